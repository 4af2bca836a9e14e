"""The cockpit: a generation under the eyes, step by step, or a recording replayed; one scrubber drives every pane."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

HEADLESS_VARIABLE = "QWEN_NPU_HEADLESS"
_NAMES = {"Cockpit": "cockpit", "Grid": "grid", "Frames": "frames"}

__all__ = ["Cockpit", "Frames", "Grid", "headless"]


def headless() -> bool:
    """Whether nobody watches: told by whoever runs the notebook, never guessed."""
    return os.environ.get(HEADLESS_VARIABLE, "") not in ("", "0")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"qwen_npu.views.live.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'qwen_npu.views.live' has no attribute {name!r}; it has {', '.join(__all__)}")
