"""Nightly runs: suites of notebooks executed headless, verdicts written by the runner, an offline report, trends.

The environment that a notebook meets here: QWEN_NPU_RECORDS (where its records go), QWEN_NPU_HEADLESS=1 (no front
end will ever answer), QWEN_NPU_FILES (its working directory: what it leaves there, ledgers above all, is linked in the
report).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "run_suite": "qwen_npu.nightly.runner",
    "Outcome": "qwen_npu.nightly.verdict",
    "Verdict": "qwen_npu.nightly.verdict",
    "load_suite": "qwen_npu.nightly.suite",
    "write_report": "qwen_npu.nightly.report",
    "accept": "qwen_npu.nightly.baseline",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'qwen_npu.nightly' has no attribute {name!r}; it has {', '.join(__all__)}")
