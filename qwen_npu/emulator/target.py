"""What the two targets share: the vendor's view of a graph's ports, shapes that follow from other shapes, and results
that a model keeps in memory of its own until its next predict."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from qwen_npu.emulator import instrument, policy
from qwen_npu.emulator.engine import Binding, Engine, EngineError, Port
from qwen_npu.emulator.enums import NUMPY_OF, OF_SCALAR, DataType, Format
from qwen_npu.emulator.memory import poison
from qwen_npu.emulator.tensor import TensorCore, TensorMeta, core_of_view, stale_hazard
from qwen_npu.errors import WorkbenchError

MAX_INT32 = 2**31 - 1


class Refused(Exception):
    """A predict or resize that the vendor refuses without saying why; this says why.

    `status` is the text that the vendor's resize reports.
    """

    def __init__(self, cause: WorkbenchError, status: str = "Common error code.") -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.status = status


def refused(problem: str, *, expected: str = "", fix: str = "", status: str = "Common error code.") -> Refused:
    return Refused(WorkbenchError(problem, expected=expected, fix=fix), status)


class Target:
    """A graph as one kind of device shows and runs it.

    Attributes:
        model: file name, for messages.
        predicts: how many predicts were begun.
        shapes: the present shape of each input; -1 where no resize has chosen a size yet.
        input_cores: what every handle of `get_inputs` wraps.
    """

    narrowed: ClassVar[Mapping[type, type]] = {}
    """Element types that this device shows as smaller ones."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.path.name
        self.predicts = 0
        self.input_types = tuple(self.shown(port) for port in engine.inputs)
        self.output_types = tuple(self.shown(port) for port in engine.outputs)
        self.shapes: list[tuple[int, ...]] = [_declared(port) for port in engine.inputs]
        self.input_cores = [
            TensorCore(kind, shape, name=port.name)
            for kind, shape, port in zip(self.input_types, self.shapes, engine.inputs, strict=True)
        ]
        self._results: list[_Results] = [_Results(self, port, kind) for port, kind in self._output_ports()]

    def _output_ports(self) -> list[tuple[Port, DataType]]:
        return list(zip(self.engine.outputs, self.output_types, strict=True))

    def shown(self, port: Port) -> DataType:
        kind = port.dtype.type
        return OF_SCALAR[self.narrowed.get(kind, kind)]

    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(port.name, kind, self.meta_shape(port)) for port, kind in self._output_ports())

    def meta_shape(self, port: Port) -> list[int]:
        return [-1 if size is None else size for size in self.output_shape(port)]

    def output_shape(self, port: Port) -> list[int | None]:
        """Sizes of an output as far as they follow from the inputs' present shapes; None where they do not."""
        known: dict[str, int] = {}
        for source, shape in zip(self.engine.inputs, self.shapes, strict=True):
            known.update(
                {
                    dim: size
                    for dim, size in zip(source.shape, shape, strict=False)
                    if isinstance(dim, str) and size >= 0
                }
            )
        return [dim if isinstance(dim, int) else known.get(dim) if dim else None for dim in port.shape]

    def resize(self, shapes: Sequence[Sequence[int]]) -> None:
        """Sets the shape of every input.

        Raises:
            Refused: with the vendor's status.
        """
        if len(shapes) != len(self.shapes) or any(not 0 < size <= MAX_INT32 for shape in shapes for size in shape):
            raise refused(
                f"resize of {self.model} to {[list(shape) for shape in shapes]}",
                expected=f"a shape for each of its {len(self.shapes)} inputs, every size from 1 to {MAX_INT32}",
                status="Invalid input param by user.",
            )
        self.take_shapes([tuple(int(size) for size in shape) for shape in shapes])
        self.set_shapes([tuple(int(size) for size in shape) for shape in shapes], automatic=False)

    def take_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        """Refuses shapes that the graph cannot have. Each target has its own limits."""
        raise NotImplementedError

    def set_shapes(self, shapes: list[tuple[int, ...]], *, automatic: bool) -> None:
        self.shapes = shapes
        for core, shape in zip(self.input_cores, shapes, strict=True):
            if not core.from_numpy and core._shape != shape:
                core._shape = shape
                core._reform()
        if instrument.sinks:
            named = {port.name: list(shape) for port, shape in zip(self.engine.inputs, shapes, strict=True)}
            instrument.resized(self.model, named, automatic=automatic)

    def report(self, hazard: policy.Hazard) -> bool:
        return policy.report(hazard, model=self.model, predict=self.predicts)

    def check_feed(self, core: TensorCore, port: Port) -> float | None:
        """Hazards of a host input that looks at results of an earlier predict. A number: that is read instead."""
        source = core if core.views is not None else core_of_view(core.data) if core.data is not None else None
        if source is None:
            return None
        if source.stale:
            hazard = stale_hazard(source, f"is fed to input {port.name} of {self.model}")
            return np.nan if self.report(hazard) else None
        return self.feeds_itself(source, port)

    def feeds_itself(self, source: TensorCore, port: Port) -> float | None:  # noqa: ARG002 (a target may not object)
        """Hazard of a result fed straight back. A number: that is read instead."""
        return None

    def check_given(self, core: TensorCore, port: Port) -> None:
        if core.block is None and core.data is None:
            self.report(
                policy.Hazard(
                    "uninitialised",
                    port.name,
                    f"input {port.name} of {self.model} was never given data; the vendor computes on arbitrary memory",
                    expected=f"data of shape {list(core._shape)}",
                    fix="tensor.set_data_from_numpy(array)",
                )
            )

    def run(self, binding: Binding, engine: Engine | None = None) -> list[np.ndarray]:
        """Runs a prepared binding, of another engine than the target's if given."""
        try:
            return (engine or self.engine).run(binding)
        except EngineError as error:
            raise refused(f"{self.model} cannot run: {error}") from error

    def keep_results(self, arrays: Sequence[np.ndarray]) -> list[TensorCore]:
        return [result.put(array) for result, array in zip(self._results, arrays, strict=True)]


class _Results:
    """The memory in which a model leaves one of its outputs, used again by every predict."""

    def __init__(self, target: Target, port: Port, kind: DataType) -> None:
        self.target = weakref.ref(target)
        self.port = port
        self.kind = kind
        self.array: np.ndarray | None = None
        self.shown: weakref.ref[TensorCore] | None = None

    def put(self, value: np.ndarray) -> TensorCore:
        """Stores a value, in the output's shown element type, and makes a core over it."""
        self._overwrite()
        dtype = NUMPY_OF[self.kind]
        if self.array is None or self.array.shape != value.shape:
            self.array = np.empty(value.shape, dtype)
        np.copyto(self.array, value, casting="unsafe")
        core = TensorCore(self.kind, value.shape, name=self.port.name, form=Format.DEFAULT, data=self.array)
        core.views = []
        self.shown = weakref.ref(core)
        return core

    def _overwrite(self) -> None:
        """What was handed out before is overwritten now: an event if a view of it is still alive."""
        core = self.shown() if self.shown is not None else None
        target = self.target()
        if core is None or target is None:
            return
        core.stale = target.model
        alive = [view for view in core.views or () if view() is not None]
        if alive and policy.settings.policy != "vendor":
            hazard = stale_hazard(core, "a view of it is still alive")
            instrument.hazard(hazard, model=target.model, predict=target.predicts)
            if policy.settings.policy == "corrupt" and self.array is not None:
                poison(self.array)
                self.array = None


def _declared(port: Port) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in port.shape)
