"""Runs ONNX graphs on this CPU with onnxruntime, over memory that the caller owns.

Knows nothing of the vendor package: ports with NumPy dtypes, and runs bound to addresses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen_npu.contract import BUCKETS_KEY, IN_PLACE_KEY
from qwen_npu.emulator import policy
from qwen_npu.emulator.enums import NUMPY_OF_ONNX
from qwen_npu.emulator.onnx_file import read_facts


class EngineError(Exception):
    """A graph that cannot be loaded or run; the text is the reason."""


class Port(NamedTuple):
    """One input or output: `shape` holds ints and, where the size is free, a name ("" if it has none)."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    @property
    def static(self) -> bool:
        return all(isinstance(size, int) for size in self.shape)


class Binding(NamedTuple):
    """A prepared run. `outputs` are the indices of outputs that onnxruntime allocates."""

    binding: Any
    free_outputs: tuple[int, ...]


class Engine:
    """One loaded graph.

    Raises:
        EngineError: the file is no ONNX model that onnxruntime can load.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        try:
            facts = read_facts(path)
        except (ValueError, OSError) as error:
            raise EngineError(f"{path.name} is no ONNX model: {error}") from error
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = policy.settings.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        library = native_library() if policy.settings.native else None
        if library is not None:
            options.register_custom_ops_library(library)
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's kinds have no base of their own
            raise EngineError(f"onnxruntime cannot load {path.name}: {error}") from error
        self._raw = self._session._sess
        self.path = path
        self.weight_bytes = facts.weight_bytes
        self.op_types = facts.op_types
        self.inputs = tuple(_port(node) for node in self._session.get_inputs())
        self.outputs = tuple(_port(node) for node in self._session.get_outputs())
        metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        in_place: dict[str, str] = json.loads(metadata.get(IN_PLACE_KEY) or "{}")
        input_index = {port.name: index for index, port in enumerate(self.inputs)}
        self.in_place: dict[int, int] = {
            index: input_index[in_place[port.name]]
            for index, port in enumerate(self.outputs)
            if in_place.get(port.name) in input_index
        }
        """Output index -> the input whose buffer it may share."""
        buckets: dict[str, list[int]] = json.loads(metadata.get(BUCKETS_KEY) or "{}")
        self.buckets = {name: tuple(sorted(sizes)) for name, sizes in buckets.items()}

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray | None]) -> Binding:
        """Prepares a run over these arrays' memory. Holds no reference to them: who keeps the binding keeps them.

        Arrays have the port's dtype, are contiguous and stay where they are. None lets onnxruntime allocate an output.
        """
        binding = self._session.io_binding()
        for port, array in zip(self.inputs, inputs, strict=True):
            binding.bind_input(port.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        free: list[int] = []
        for index, (port, target) in enumerate(zip(self.outputs, outputs, strict=True)):
            if target is None:
                binding.bind_output(port.name, "cpu")
                free.append(index)
            else:
                binding.bind_output(port.name, "cpu", 0, target.dtype.type, target.shape, target.ctypes.data)
        return Binding(binding._iobinding, tuple(free))

    def run(self, binding: Binding) -> list[np.ndarray]:
        """Runs, and returns the outputs that onnxruntime allocated, in order.

        Raises:
            EngineError: the graph refuses the inputs or the outputs' shapes.
        """
        try:
            self._raw.run_with_iobinding(binding.binding, None)
        except Exception as error:
            raise EngineError(str(error)) from error
        if not binding.free_outputs:
            return []
        values = binding.binding.get_outputs()
        return [values[index].numpy() for index in binding.free_outputs]


def native_library() -> str | None:
    """Path of the onnxruntime op library of the distribution qwen-npu-kernels, where it is installed."""
    try:
        import qwen_npu_kernels
    except ImportError:
        return None
    path = qwen_npu_kernels.onnxruntime_library_path()
    return None if path is None else str(path)


def _port(node: Any) -> Port:
    dtype = NUMPY_OF_ONNX.get(node.type)
    if dtype is None:
        raise EngineError(f"{node.name} has type {node.type}, which no device takes")
    return Port(node.name, dtype, tuple(size if isinstance(size, int) else size or "" for size in node.shape))
