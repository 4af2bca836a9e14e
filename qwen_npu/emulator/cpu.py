"""The target "cpu", as measured on the vendor's: element types narrowed, sizes compared in bytes, a resize needed
before a dynamic graph runs, results in memory that the next predict overwrites, given outputs left unwritten."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from qwen_npu.emulator import policy
from qwen_npu.emulator.engine import Engine, EngineError, Port
from qwen_npu.emulator.memory import poison
from qwen_npu.emulator.target import Refused, Target, refused
from qwen_npu.emulator.tensor import TensorCore
from qwen_npu.errors import WorkbenchError


class CpuTarget(Target):
    """One graph on the vendor's CPU target.

    Raises:
        EngineError: a graph without any computation, which the vendor does not load.
    """

    narrowed: ClassVar = {np.float16: np.float32, np.float64: np.float32, np.int64: np.int32}

    def __init__(self, engine: Engine) -> None:
        if engine.op_types <= {"Identity", "Cast"}:
            raise EngineError(f"{engine.path.name} computes nothing (only {', '.join(sorted(engine.op_types))})")
        super().__init__(engine)
        self._damaged = False
        self._relaxed: Engine | None = None

    def meta_shape(self, port: Port) -> list[int]:
        shape = super().meta_shape(port)
        return [-1] if -1 in shape else shape  # the vendor forgets the rank of an output that is not known

    def predict(self, inputs: Sequence[TensorCore], outputs: Sequence[TensorCore]) -> list[TensorCore]:
        """Runs once; results are in the model's own memory, whatever `outputs` says.

        Raises:
            Refused: what the vendor answers with "predict failed!".
            HazardError: by policy.
        """
        arrays = self._arrays(inputs)
        self._check_outputs(inputs, outputs)
        engine = self._relaxed or self.engine
        values = self.run(engine.bind(arrays, [None] * len(engine.outputs)), engine)
        self.predicts += 1
        results = self.keep_results(values)
        if not outputs:
            return results
        for given, result in zip(outputs, results, strict=False):
            if not given.from_numpy and given.block is None:
                given._dtype, given._shape = result._dtype, result._shape
                given._reform()
        return list(outputs)

    def _arrays(self, inputs: Sequence[TensorCore]) -> list[np.ndarray]:
        if self._damaged:
            raise refused(
                f"{self.model} was given an input of the wrong size before, and the vendor's model stays damaged",
                expected="a resize after such an error",
                fix="model.resize(model.get_inputs(), [...])",
            )
        for index, core in enumerate(inputs):
            if core._dtype is not self.input_types[index]:
                raise refused(
                    f"input {self.engine.inputs[index].name} of {self.model} is given {core._dtype}",
                    expected=str(self.input_types[index]),
                    fix="use the dtype of model.get_inputs()",
                )
        if any(size < 0 for shape in self.shapes for size in shape):
            hazard = policy.Hazard(
                "not_resized",
                "",
                f"{self.model} has inputs of free shape {[list(shape) for shape in self.shapes]} and no resize was "
                "done: the vendor fails, or computes zeros",
                expected="a resize before predict",
                fix="model.resize(model.get_inputs(), [...])",
            )
            self.report(hazard)
            raise refused(hazard.problem, expected=hazard.expected, fix=hazard.fix)
        return [self._array(index, core) for index, core in enumerate(inputs)]

    def _array(self, index: int, core: TensorCore) -> np.ndarray:
        port, shape = self.engine.inputs[index], self.shapes[index]
        count = int(np.prod(shape, dtype=np.int64))
        if core.get_element_num() != count:
            self._damaged = True
            raise refused(
                f"input {port.name} of {self.model} is given shape {core.get_shape()}",
                expected=f"shape {list(shape)}",
                fix="model.resize(...) to the shape that you feed, or feed the model's",
            )
        if core.block is not None:
            self.report(
                policy.Hazard(
                    "wrong_device",
                    port.name,
                    f"input {port.name} of {self.model}, which runs on the cpu, lies on {core.block.device}",
                    expected="a tensor on the host",
                )
            )
        if core._shape != shape:
            self.report(
                policy.Hazard(
                    "wrong_shape",
                    port.name,
                    f"input {port.name} of {self.model} is given shape {core.get_shape()}; the vendor compares only "
                    "the bytes and computes with its own shape",
                    expected=f"shape {list(shape)}",
                    fix="reshape the array, or resize the model",
                )
            )
        self.check_given(core, port)
        if core.data is None:
            return np.zeros(shape, port.dtype)
        spoilt = self.check_feed(core, port)
        array = np.array(core.data, dtype=port.dtype, copy=True, order="C").reshape(shape)
        if spoilt is not None:
            poison(array, spoilt)
        return array

    def feeds_itself(self, source: TensorCore, port: Port) -> float | None:
        if not any(result.array is source.data for result in self._results):
            return None
        poisoned = self.report(
            policy.Hazard(
                "fed_back",
                source.get_tensor_name(),
                f"output {source.get_tensor_name()} of {self.model} is fed to its input {port.name} uncopied: the "
                "vendor writes the next result into the memory that it reads",
                expected="a copy, or two models of one file in turn",
                fix="tensor.get_data_to_numpy().copy()",
            )
        )
        return np.nan if poisoned else 0.0  # the vendor's memory pool has given it to an intermediate result: any value

    def _check_outputs(self, inputs: Sequence[TensorCore], outputs: Sequence[TensorCore]) -> None:  # noqa: ARG002
        if not outputs:
            return
        count = len(self.engine.outputs)
        if len(outputs) < count:
            hazard = policy.Hazard(
                "wrong_size",
                "",
                f"{self.model} has {count} outputs and is given {len(outputs)}: the vendor reads beyond the list",
                expected=f"{count} outputs, or none",
            )
            self.report(hazard)
            raise refused(hazard.problem, expected=hazard.expected)
        self.report(
            policy.Hazard(
                "output_ignored",
                self.engine.outputs[0].name,
                f"outputs are given to {self.model} on the cpu; the vendor does not write into them",
                expected="predict(inputs) on a cpu target",
                fix="leave `outputs` out and copy the results",
            )
        )

    def take_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        fits = all(
            len(shape) == len(port.shape)
            and all(not isinstance(dim, int) or dim == size for dim, size in zip(port.shape, shape, strict=True))
            for port, shape in zip(self.engine.inputs, shapes, strict=True)
        )
        relaxed = None if fits else _relax(self.engine, shapes)
        self._relaxed = relaxed
        self._damaged = False


def _relax(engine: Engine, shapes: list[tuple[int, ...]]) -> Engine:
    """The same graph with its inputs declared in other shapes: the vendor lets even static graphs be resized.

    Raises:
        Refused: the graph does not work in these shapes.
    """
    import onnx

    model = onnx.load(str(engine.path))
    for value, shape in zip(model.graph.input, shapes, strict=True):
        del value.type.tensor_type.shape.dim[:]
        for size in shape:
            value.type.tensor_type.shape.dim.add().dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / engine.path.name
        onnx.save(model, str(path))
        try:
            relaxed = Engine(path)
            trial = [np.zeros(shape, port.dtype) for shape, port in zip(shapes, engine.inputs, strict=True)]
            relaxed.run(relaxed.bind(trial, [None] * len(relaxed.outputs)))
        except EngineError as error:
            cause = WorkbenchError(
                f"{engine.path.name} cannot be resized to {[list(shape) for shape in shapes]}: {error}",
                expected="shapes that its operators can take",
            )
            raise Refused(cause) from error
    return relaxed
