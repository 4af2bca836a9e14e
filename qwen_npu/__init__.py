"""qwen_npu: see where the state of a staged Qwen3.5 runtime lives on an Ascend NPU, live, nightly and in a course.

Importing this package loads nothing heavy; each name below brings its room in when it is first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from qwen_npu.errors import WorkbenchError

__version__ = "0.1.0"

# From 1.29 on onnxruntime's wheels report every process to their vendor over the network, from the import on; only the
# environment, set before it, keeps all of that away. Nothing of the workbench leaves the machine.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_LAZY = {
    "Session": "qwen_npu.runtime.session",
    "open_bundle": "qwen_npu.bundle",
    "build_bundle": "qwen_npu.bundle",
    "open_ledger": "qwen_npu.ledger.store",
    "record": "qwen_npu.records",
}
_ROOMS = ("bundle", "contract", "driver", "emulator", "graphs", "ledger", "records", "rgdr", "runtime", "spec", "views")

__all__ = ["WorkbenchError", "__version__", *_LAZY, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _ROOMS:
        return import_module(f"qwen_npu.{name}")
    raise AttributeError(f"module 'qwen_npu' has no attribute {name!r}; it has {', '.join(__all__)}")
