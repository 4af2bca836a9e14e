"""A driver around any driver: counts what moves and, while a sink is set, tells it as events.

Bytes are counted always, since every step reports them; events are made only for a sink. Knows nothing of stages'
logic: the session sets `stage` and `step`, which events carry.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from qwen_npu.contract import STATE_KINDS, buffer_kind
from qwen_npu.driver.protocol import Capability, Driver, Model, Tensor, TensorInfo
from qwen_npu.ledger.events import (
    NOWHERE,
    Buffer,
    Event,
    EventKind,
    EventSink,
    Place,
    Source,
    discard,
    event_of,
    now_ns,
)

_PACKAGE = str(Path(__file__).resolve().parents[1])
_HERE = str(Path(__file__).resolve().parent)
_DETAILS_KEPT = 64
_ROTATED = {kind: {"kind": kind} for kind in STATE_KINDS}
"""One object a kind, so that a ledger encodes it once."""


class RecordingDriver:
    """Wraps `driver`.

    Attributes:
        host_to_device_bytes, device_to_host_bytes, allocated_bytes: sums since the driver was opened.
        live_bytes, peak_bytes: device buffers that were made through this driver; weights and workspace are not among
            them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sink: EventSink | None = None
        self._generations: Counter[str] = Counter()
        self._live: dict[int, Buffer] = {}
        self.name = driver.name
        self.device = driver.device
        self.capabilities: frozenset[Capability] = driver.capabilities
        self.stage = ""
        self.step = -1
        self.host_to_device_bytes = 0
        self.device_to_host_bytes = 0
        self.allocated_bytes = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    @property
    def recording(self) -> bool:
        return self._sink is not None

    @property
    def sink(self) -> EventSink:
        """Where events go now. An emitter beside this driver stamps its own with the driver's stage and step."""
        return self._sink or discard

    @contextmanager
    def record(self, sink: EventSink) -> Iterator[None]:
        """Sends events to `sink`; begins with the buffers that are already alive."""
        self._sink = sink
        start = now_ns()
        for buffer in self._live.values():
            sink(Event("allocate", start, buffer=buffer.id, nbytes=buffer.nbytes, detail=buffer._asdict()))
        self._driver.subscribe(sink if "hidden_copies" in self.capabilities else None, self)
        try:
            yield
        finally:
            self._driver.subscribe(None)
            self._sink = None

    def emit(
        self,
        kind: EventKind,
        start_ns: int = 0,
        *,
        dur_ns: int | None = None,
        buffer: str = "",
        other: str = "",
        nbytes: int = 0,
        source: Source = "observed",
        detail: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Tells the sink, if there is one, of something that began at `start_ns` and has just ended.

        `start_ns` 0 is now, without duration; `dur_ns` says how long it took if it ended earlier.
        """
        sink = self._sink
        if sink is None:
            return
        now = now_ns()
        start = start_ns or now
        duration = now - start if dur_ns is None else dur_ns
        place = (self.stage, self.step)
        sink(event_of((kind, start, duration, *place, buffer, other, nbytes, source, detail, arrays, -1)))

    def rotated(self, kinds: Iterable[str], live: Iterable[Tensor], former: Iterable[Tensor]) -> None:
        """Tells that the live half of each kind is another one now. Nothing moved."""
        sink = self._sink
        if sink is None:
            return
        now, stage, step = now_ns(), self.stage, self.step
        for kind, new, old in zip(kinds, live, former, strict=True):
            detail = _ROTATED[kind]
            sink(event_of(("rotate", now, 0, stage, step, new.buffer, old.buffer, 0, "observed", detail, None, -1)))

    def load(self, path: Path, graph: str) -> RecordingModel:
        return RecordingModel(self, self._driver.load(path, graph))

    def wrap(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        return self._driver.wrap(array, name=name, buffer=buffer)

    def upload(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        start = now_ns()
        tensor = self._driver.upload(array, name=name, buffer=buffer)
        self._allocated(tensor)
        self.host_to_device_bytes += tensor.nbytes
        self.emit("upload", start, buffer=buffer, other=f"host.{name}", nbytes=tensor.nbytes)
        return tensor

    def empty(self, shape: tuple[int, ...], info: TensorInfo, *, buffer: str) -> Tensor:
        tensor = self._driver.empty(shape, info, buffer=buffer)
        self._allocated(tensor)
        return tensor

    def download(self, tensor: Tensor) -> np.ndarray:
        start = now_ns()
        array = self._driver.download(tensor)
        if tensor.device != "host":
            self.device_to_host_bytes += tensor.nbytes
            self.emit("download", start, buffer=tensor.buffer, other=f"host.{tensor.name}", nbytes=tensor.nbytes)
        return array

    def free(self, tensor: Tensor) -> None:
        self._driver.free(tensor)
        if self._live.pop(id(tensor), None) is not None:
            self.live_bytes -= tensor.nbytes
            self.emit("free", buffer=tensor.buffer, nbytes=tensor.nbytes)

    def address(self, tensor: Tensor) -> int | None:
        return self._driver.address(tensor)

    def memory_bytes(self) -> tuple[int, int] | None:
        return self._driver.memory_bytes()

    def subscribe(self, sink: EventSink | None, place: Place = NOWHERE) -> None:
        self._driver.subscribe(sink, place)

    def close(self) -> None:
        self._driver.close()

    def _allocated(self, tensor: Tensor) -> None:
        self.allocated_bytes += tensor.nbytes
        self.live_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        generation = self._generations[tensor.buffer]
        self._generations[tensor.buffer] = generation + 1
        half = tensor.buffer.rpartition(".")[2]
        buffer = Buffer(
            id=tensor.buffer,
            name=tensor.name,
            kind=buffer_kind(tensor.name),
            half=half if half in ("a", "b") else "",
            device=tensor.device,
            dtype=tensor.dtype.name,
            shape=tensor.shape,
            nbytes=tensor.nbytes,
            address=self._driver.address(tensor),
            generation=generation,
            site=_site(),
        )
        self._live[id(tensor)] = buffer
        if self._sink is not None:
            self.emit("allocate", buffer=buffer.id, nbytes=buffer.nbytes, detail=buffer._asdict())


class RecordingModel:
    """A model around any model: a host input of a device graph crosses in predict, and so does a result without a
    destination."""

    def __init__(self, driver: RecordingDriver, model: Model) -> None:
        self.graph = model.graph
        self.inputs = model.inputs
        self.outputs = model.outputs
        self._driver = driver
        self._model = model
        self._on_device = "resident" in driver.capabilities
        self._details: dict[Hashable, dict[str, Any]] = {}

    def resize(self, shapes: Sequence[tuple[int, ...]]) -> None:
        start = now_ns()
        self._model.resize(shapes)
        self._driver.emit("resize", start, detail={"graph": self.graph, "shapes": [list(shape) for shape in shapes]})

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        driver = self._driver
        start = now_ns()
        results = self._model.predict(inputs, outputs)
        if self._on_device:
            for tensor in inputs:
                if tensor.device == "host":
                    driver.host_to_device_bytes += tensor.nbytes
            for tensor in results:
                if tensor.device == "host":
                    driver.device_to_host_bytes += tensor.nbytes
        if driver.recording:
            self._tell(start, inputs, results)
        return results

    def close(self) -> None:
        self._model.close()

    def _tell(self, start_ns: int, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        driver = self._driver
        sink = driver._sink
        assert sink is not None
        now, stage, step = now_ns(), driver.stage, driver.step
        detail = self._detail(inputs, results)
        sink(event_of(("predict", start_ns, now - start_ns, stage, step, "", "", 0, "observed", detail, None, -1)))
        if not self._on_device:
            return
        for tensor in inputs:
            if tensor.device == "host":
                crossed = ("upload", now, 0, stage, step, "", tensor.buffer, tensor.nbytes, "inferred", None, None, -1)
                sink(event_of(crossed))
        for tensor in results:
            if tensor.device == "host":
                sink(Event("download", now, 0, stage, step, "", tensor.buffer, tensor.nbytes, "inferred"))

    def _detail(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> dict[str, Any]:
        """What a predict tells. Steps take turns between two of them, so each is made once: `site` is the line that
        first asked for it."""
        read, written = tuple(map(_buffer_of, inputs)), tuple(map(_buffer_of, results))
        detail = self._details.get((read, written))
        if detail is None:
            if len(self._details) >= _DETAILS_KEPT:
                self._details.clear()
            detail = {"graph": self.graph, "inputs": list(read), "outputs": list(written), "site": _site()}
            self._details[read, written] = detail
        return detail


_buffer_of = attrgetter("buffer")


def _site() -> str:
    """file:line of the innermost frame of this package outside the driver room."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.removeprefix(_PACKAGE).lstrip('/')}:{frame.f_lineno}"
