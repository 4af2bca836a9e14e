"""The gated delta rule on the CPU: a native kernel for NumPy arrays, and the same kernel as an onnxruntime op library.

Use it through `qwen_npu.rgdr`, which names what is wrong with a call: `step` here only says that it did not run it, and
`run` takes a call that was already checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qwen_npu_kernels._native import (
    instruction_set,
    read_modify_write,
    run,
    select_instruction_set,
    set_threads,
    step,
    threads,
)

__all__ = [
    "instruction_set",
    "onnxruntime_library_path",
    "read_modify_write",
    "run",
    "select_instruction_set",
    "set_threads",
    "step",
    "threads",
]
__version__ = "0.1.0"


def onnxruntime_library_path() -> str:
    """Path for `SessionOptions.register_custom_ops_library`: registers the ops of domain `qwen_npu`."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return str(Path(__file__).parent / f"libqwen_npu_kernels{suffix}")
