"""The target "ascend": device tensors are read and written where they lie, host tensors are copied both ways.

What of this is measured and what is only read from the vendor's source stands in the README beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from qwen_npu.emulator import instrument, policy
from qwen_npu.emulator.engine import Binding, Engine, Port
from qwen_npu.emulator.enums import NUMPY_OF, DataType
from qwen_npu.emulator.memory import Block, aligned_bytes, card, poison
from qwen_npu.emulator.target import Target, refused
from qwen_npu.emulator.tensor import Signature, TensorCore, handed_out
from qwen_npu.ledger.events import now_ns

_PLANS_KEPT = 8
"""Two halves of a pair alternate; more sets of buffers than this in turn would prepare anew each time."""
_SMALLEST_STAGE_BYTES = 4096


class _Staged(NamedTuple):
    """An input or output that passes through memory of the model's own: from or to the host, or widened on the way."""

    port: int
    array: np.ndarray
    copy: instrument.Copy | None
    """What crosses the bus; None where the tensor lies on the device already."""


class _Plan(NamedTuple):
    """A checked and prepared predict over one set of buffers."""

    binding: Binding
    staged_inputs: tuple[_Staged, ...]
    staged_outputs: tuple[_Staged, ...]
    given_outputs: bool
    hazards: tuple[tuple[policy.Hazard, np.ndarray | None], ...]
    """Under policies that go on: reported at every predict, with the memory to poison under "corrupt"."""


class _Stage:
    """A model's own device memory for one input or output; grows by doubling."""

    def __init__(self, device: str, name: str) -> None:
        self.device = device
        self.name = name
        self.capacity_bytes = -1
        self.block: Block | None = None
        self.memory = np.empty(0, np.uint8)

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], shown: DataType) -> np.ndarray | None:
        """An array over it, or None if it had to move, which makes every prepared plan invalid."""
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * dtype.itemsize
        moved = nbytes > self.capacity_bytes
        if moved:
            capacity_bytes = max(_SMALLEST_STAGE_BYTES, 1 << max(nbytes - 1, 0).bit_length())
            on_device = capacity_bytes // dtype.itemsize * NUMPY_OF[shown].itemsize
            self.block, self.capacity_bytes = None, -1  # freed before its successor is allocated
            self.block = card(self.device).allocate(on_device, "input", self.name)
            self.memory = aligned_bytes(capacity_bytes)
            self.capacity_bytes = capacity_bytes
        return None if moved else self.memory[:nbytes].view(dtype).reshape(shape)


class AscendTarget(Target):
    """One graph on one device.

    Raises:
        DeviceError, DeviceMemoryError: no such device, or no room for the weights.
    """

    narrowed: ClassVar = {np.int64: np.int32, np.float64: np.float32}

    def __init__(self, engine: Engine, device: str) -> None:
        super().__init__(engine)
        self.device = device
        self._weights = card(device).allocate(engine.weight_bytes, "weights", self.model)
        self._plans: dict[tuple[Signature, ...], _Plan] = {}
        self._stages = [_Stage(device, port.name) for port in engine.inputs]

    def predict(self, inputs: Sequence[TensorCore], outputs: Sequence[TensorCore]) -> list[TensorCore]:
        """Runs once. Without `outputs` the results come to the host.

        Raises:
            Refused: what the vendor answers with "predict failed!".
            HazardError: by policy.
        """
        key = (*[core.signature for core in inputs], None, *[core.signature for core in outputs])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._prepare(inputs, outputs, key)
        for staged in plan.staged_inputs:
            core = inputs[staged.port]
            data = core.data
            if handed_out or data is None or core.views is not None:
                self._check_and_bring(core, staged)
            else:
                self._bring(data, staged)
        for hazard, memory in plan.hazards:
            if self.report(hazard) and memory is not None:
                poison(memory)
        values = self.run(plan.binding)
        self.predicts += 1
        if not plan.given_outputs:
            return self._to_host(values)
        for core in outputs:
            core.written = True
        for staged in plan.staged_outputs:
            self._deliver(outputs[staged.port], staged)
        return list(outputs)

    def _bring(self, source: np.ndarray, staged: _Staged) -> None:
        if staged.copy is None or not instrument.sinks:
            staged.array[...] = source
            return
        start = now_ns()
        staged.array[...] = source
        instrument.copied(staged.copy, start)

    def _check_and_bring(self, core: TensorCore, staged: _Staged) -> None:
        port = self.engine.inputs[staged.port]
        source, spoilt = core.data, None
        if core.block is None:
            self.check_given(core, port)
            if source is None:
                source = np.zeros(staged.array.shape, staged.array.dtype)
            spoilt = self.check_feed(core, port)
        if source is not None:
            self._bring(source, staged)
        if spoilt is not None:
            poison(staged.array, spoilt)

    def _deliver(self, core: TensorCore, staged: _Staged) -> None:
        start = now_ns()
        if core.data is None:
            core.data = np.empty(core._shape, NUMPY_OF[core._dtype])
        np.copyto(core.data, staged.array.reshape(core.data.shape), casting="unsafe")
        if staged.copy is not None and instrument.sinks:
            instrument.copied(staged.copy, start)

    def _to_host(self, values: Sequence[np.ndarray]) -> list[TensorCore]:
        start = now_ns()
        cores = self.keep_results(values)
        if instrument.sinks:
            for core in cores:
                instrument.copied(self._copy("download", core, core.get_tensor_name(), None), start)
        return cores

    def _copy(
        self, kind: Literal["upload", "download"], core: TensorCore, name: str, block: Block | None
    ) -> instrument.Copy:
        cause = f"{'input' if kind == 'upload' else 'output'} of {self.model}"
        return instrument.copy_of(kind, core.get_data_size(), name=name, cause=cause, hidden=True, block=block)

    def take_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        for port, shape in zip(self.engine.inputs, shapes, strict=True):
            self._check_shape(port, shape)

    def _check_shape(self, port: Port, shape: tuple[int, ...]) -> None:
        if len(shape) != len(port.shape) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(port.shape, shape, strict=True)
        ):
            raise refused(
                f"input {port.name} of {self.model} is given shape {list(shape)}",
                expected=f"shape {[dim if isinstance(dim, int) else dim or -1 for dim in port.shape]}",
                fix="give an array of that shape",
                status="Invalid input param by user.",
            )
        for dim, size in zip(port.shape, shape, strict=True):
            declared = self.engine.buckets.get(dim) if isinstance(dim, str) else None
            if declared is not None and size not in declared:
                raise refused(
                    f"input {port.name} of {self.model} is given {size} as {dim}",
                    expected=f"one of the declared sizes {list(declared)}",
                    fix="pad to the next declared size",
                    status="Invalid input param by user.",
                )

    # Checks and preparation: once for each set of buffers.

    def _prepare(
        self, inputs: Sequence[TensorCore], outputs: Sequence[TensorCore], key: tuple[Signature, ...]
    ) -> _Plan:
        found: list[tuple[policy.Hazard, np.ndarray | None]] = []
        self._check_inputs(inputs, found)
        if outputs:
            self._check_outputs(inputs, outputs, found)
        passing = len(found)  # what follows may be over by the next predict: not kept in a plan
        for core, port in zip(inputs, self.engine.inputs, strict=True):
            if core.block is not None and not core.written:
                hazard = policy.Hazard(
                    "uninitialised",
                    _label(core, port),
                    f"input {port.name} of {self.model} ({_where(core)}) was never written",
                    expected="a tensor with data, or an output of an earlier predict",
                )
                found.append((hazard, core.data))
        if policy.settings.policy == "raise" and found:
            self.report(found[0][0])
        while True:
            plan = self._bind(inputs, outputs, tuple(found))
            if plan is not None:
                break
            self._plans.clear()  # a stage moved
        if passing == len(found):
            if len(self._plans) >= _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _check_inputs(self, inputs: Sequence[TensorCore], found: list[tuple[policy.Hazard, np.ndarray | None]]) -> None:
        shapes: list[tuple[int, ...]] = []
        for core, port, kind in zip(inputs, self.engine.inputs, self.input_types, strict=True):
            if core._dtype is not kind:
                raise refused(
                    f"input {port.name} of {self.model} is given {core._dtype}",
                    expected=str(kind),
                    fix="use the dtype of model.get_inputs()",
                )
            self._check_shape(port, core._shape)
            shapes.append(core._shape)
            self._check_place(core, port, found)
        if shapes != self.shapes:
            self.set_shapes(shapes, automatic=True)

    def _check_place(self, core: TensorCore, port: Port, found: list[tuple[policy.Hazard, np.ndarray | None]]) -> None:
        block = core.block
        if block is None:
            return
        if not block.alive:
            hazard = policy.Hazard(
                "use_after_free",
                _label(core, port),
                f"{port.name} of {self.model} is {_where(core)}, allocated by {block.site} and freed since",
                expected="a tensor that is alive",
                fix="keep the tensor until its last use",
            )
            found.append((hazard, core.data))
        if block.device != self.device:
            hazard = policy.Hazard(
                "wrong_device",
                _label(core, port),
                f"{port.name} of {self.model}, which runs on {self.device}, is {_where(core)} of {block.device}",
                expected=f"a tensor on {self.device}, or on the host",
                fix="take the device id of the tensors and of the context from one place",
            )
            found.append((hazard, core.data))

    def _check_outputs(
        self,
        inputs: Sequence[TensorCore],
        outputs: Sequence[TensorCore],
        found: list[tuple[policy.Hazard, np.ndarray | None]],
    ) -> None:
        engine = self.engine
        if len(outputs) != len(engine.outputs):
            raise refused(
                f"{self.model} is given {len(outputs)} outputs",
                expected=f"{len(engine.outputs)}: {', '.join(port.name for port in engine.outputs)}",
                fix="give a tensor for each of model.get_outputs()",
            )
        writers: dict[int, Port] = {}
        for index, (core, port, kind) in enumerate(zip(outputs, engine.outputs, self.output_types, strict=True)):
            self._check_place(core, port, found)
            self._check_form(core, port, kind, found)
            block = core.block
            if block is None:
                continue
            if block.serial in writers:
                hazard = policy.Hazard(
                    "two_writers",
                    _label(core, port),
                    f"outputs {writers[block.serial].name} and {port.name} of {self.model} are both {_where(core)}",
                    expected="memory of its own for each output",
                )
                found.append((hazard, core.data))
            writers[block.serial] = port
            for position, (source, read) in enumerate(zip(inputs, engine.inputs, strict=True)):
                if source.block is block and engine.in_place.get(index) != position:
                    hazard = policy.Hazard(
                        "write_after_read",
                        _label(core, port),
                        f"{_where(core)} is read as {read.name} and written as {port.name} by one predict: "
                        "the graph may write before it has read",
                        expected="another buffer for the output, or a graph that declares the pair in place",
                        fix="use two buffers in turn",
                    )
                    found.append((hazard, core.data))

    def _check_form(
        self, core: TensorCore, port: Port, kind: DataType, found: list[tuple[policy.Hazard, np.ndarray | None]]
    ) -> None:
        shape = self._written_shape(core, port)
        wanted = int(np.prod(shape, dtype=np.int64)) * NUMPY_OF[kind].itemsize
        if core.get_data_size() != wanted:
            raise refused(
                f"output {port.name} of {self.model} is given {core.get_data_size()} bytes "
                f"({core._dtype.name} {core.get_shape()})",
                expected=f"{wanted} bytes ({kind.name} {list(shape)})",
                fix="make the output tensor from model.get_outputs()",
            )
        if core._dtype is not kind or core._shape != shape:
            hazard = policy.Hazard(
                "wrong_dtype" if core._dtype is not kind else "wrong_shape",
                _label(core, port),
                f"output {port.name} of {self.model} is given as {core._dtype.name} {core.get_shape()}; "
                "the vendor compares only the bytes",
                expected=f"{kind.name} {list(shape)}",
                fix="make the output tensor from model.get_outputs()",
            )
            found.append((hazard, None))

    def _written_shape(self, core: TensorCore, port: Port) -> tuple[int, ...]:
        """The output's shape; where a size follows from nothing, the one that the given tensor has."""
        sizes = self.output_shape(port)
        given: Sequence[int] = core._shape if len(core._shape) == len(sizes) else [1] * len(sizes)
        return tuple(given[axis] if size is None else size for axis, size in enumerate(sizes))

    def _bind(
        self,
        inputs: Sequence[TensorCore],
        outputs: Sequence[TensorCore],
        hazards: tuple[tuple[policy.Hazard, np.ndarray | None], ...],
    ) -> _Plan | None:
        engine = self.engine
        sources: list[np.ndarray] = []
        targets: list[np.ndarray | None] = []
        staged_inputs: list[_Staged] = []
        staged_outputs: list[_Staged] = []
        moved = False
        for index, (core, port) in enumerate(zip(inputs, engine.inputs, strict=True)):
            if core.block is not None and core.data is not None and core.data.dtype == port.dtype:
                sources.append(core.data)
                continue
            stage = self._stages[index]
            array = stage.array(port.dtype, core._shape, core._dtype)
            if array is None:
                moved = True
                continue
            sources.append(array)
            copy = self._copy("upload", core, port.name, stage.block) if core.block is None else None
            staged_inputs.append(_Staged(index, array, copy))
        if moved:
            return None
        for index, (core, port) in enumerate(zip(outputs, engine.outputs, strict=False)):
            shape = self._written_shape(core, port)
            if core.block is not None and core.data is not None and core.data.dtype == port.dtype:
                targets.append(core.data.reshape(shape))
                continue
            array = aligned_bytes(int(np.prod(shape, dtype=np.int64)) * port.dtype.itemsize).view(port.dtype)
            array = array.reshape(shape)
            targets.append(array)
            copy = self._copy("download", core, port.name, None) if core.block is None else None
            staged_outputs.append(_Staged(index, array, copy))
        if not outputs:
            targets = [None] * len(engine.outputs)
        return _Plan(engine.bind(sources, targets), tuple(staged_inputs), tuple(staged_outputs), bool(outputs), hazards)


def _label(core: TensorCore, port: Port) -> str:
    return core.get_tensor_name() or port.name


def _where(core: TensorCore) -> str:
    assert core.block is not None
    name = core.get_tensor_name()
    return f"the tensor {name + ' ' if name else ''}at {core.block.address:#x}"
