"""What a ledger shows: figures (plotly) with a table twin each, and live widgets over the same data.

`qwen_npu.views.residency(ledger)` and its like bring plotly in when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FIGURES = {
    "card_usage": "card",
    "checks": "books",
    "compare_states": "states",
    "compare_traffic": "traffic",
    "kv_growth": "kv",
    "kv_positions": "states",
    "logits_topk": "inputs",
    "memory_map": "memory",
    "mrope_positions": "inputs",
    "ping_pong": "residency",
    "pool_states": "pool",
    "residency": "residency",
    "slot_grid": "slots",
    "speculation": "slots",
    "state_norms": "states",
    "timings": "timings",
    "traffic": "traffic",
    "vision_patches": "inputs",
}
_OF_A_SESSION = ("logits_topk", "mrope_positions", "vision_patches")
LEDGER_FIGURES = tuple(name for name in _FIGURES if name not in _OF_A_SESSION)
"""Figures that need nothing but a ledger (or two: those that compare)."""
_MODULES = ("figures", "live", "theme")

__all__ = ["LEDGER_FIGURES", *sorted(_FIGURES), *(f"{name}_table" for name in sorted(_FIGURES)), *_MODULES]


def __getattr__(name: str) -> Any:
    module = _FIGURES.get(name.removesuffix("_table"))
    if module is not None:
        return getattr(import_module(f"qwen_npu.views.figures.{module}"), name)
    if name in _MODULES:
        return import_module(f"qwen_npu.views.{name}")
    raise AttributeError(f"module 'qwen_npu.views' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
