"""An emulated Ascend device: `import qwen_npu.emulator as mslite` stands in for the vendor's `mindspore_lite` package.

The vendor's names behave as the vendor's 2025-07 API does, down to the messages of its errors; what the vendor gets
wrong in silence is loud here (`configure(policy=...)`). `instrument` shows what only an emulator can know.
onnxruntime is imported when the first model is built.
"""

from qwen_npu.emulator import instrument
from qwen_npu.emulator.context import Context
from qwen_npu.emulator.enums import DataType, Format, ModelType
from qwen_npu.emulator.model import Model, ModelParallelRunner
from qwen_npu.emulator.policy import configure
from qwen_npu.emulator.tensor import Tensor, TensorMeta

__all__ = [
    "Context",
    "DataType",
    "Format",
    "Model",
    "ModelParallelRunner",
    "ModelType",
    "Tensor",
    "TensorMeta",
    "configure",
    "instrument",
]
