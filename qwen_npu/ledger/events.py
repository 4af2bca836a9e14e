"""The typed events that the runtime emits, and the sink they go to. Knows nothing of who emits or stores them.

Everything that views, reports, traces and the CLI show is derived from these. An emitter (driver, runtime,
slot pool) holds an `EventSink` and nothing else of the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from qwen_npu.contract import BufferKind

if TYPE_CHECKING:
    import numpy as np

Source = Literal["observed", "inferred", "emulator"]
"""Who knows it: seen at the vendor's API, concluded by us, or known to the emulator alone."""

EventKind = Literal[
    "allocate",
    "free",
    "upload",
    "download",
    "predict",
    "rotate",
    "alias",
    "resize",
    "stage_begin",
    "stage_end",
    "step",
    "peek",
    "hazard",
    "slot_allocate",
    "slot_free",
    "slot_write",
    "slot_read",
    "draft",
    "verify",
    "accept",
    "sample",
]


class Event(NamedTuple):
    """One thing that happened. The ledger numbers events (`seq`) in the order it receives them.

    Attributes:
        kind: one of `EventKind`.
        t_ns: start, `time.perf_counter_ns` of the recording process.
        dur_ns: duration; 0 for an instant.
        stage: "vision", "prefill", "decode", "verify", "admit" or "".
        step: decode step, 0 for the first token of a generation; -1 outside of steps.
        buffer: id of the buffer it happened to, or "".
        other: id of the second buffer (copy source, alias partner, former half), or "".
        nbytes: bytes moved, allocated or freed; 0 where none.
        source: who knows it.
        detail: JSON-serialisable facts of this kind of event.
        arrays: small arrays of a peek, stored in the table `peeks`; never part of `detail`.
        seq: position in the ledger; -1 until recorded.
    """

    kind: EventKind
    t_ns: int
    dur_ns: int = 0
    stage: str = ""
    step: int = -1
    buffer: str = ""
    other: str = ""
    nbytes: int = 0
    source: Source = "observed"
    detail: Mapping[str, Any] | None = None
    arrays: Mapping[str, np.ndarray] | None = None
    seq: int = -1


event_of: Callable[[tuple[Any, ...]], Event] = partial(tuple.__new__, Event)
"""An event of all its fields in order: a third of the price of `Event(...)`, for those who tell several a step."""


class Buffer(NamedTuple):
    """A piece of host or device memory with a stable id. Travels as the `detail` of its `allocate` event.

    Attributes:
        id: stable and unique in a recording, e.g. "recurrent.a".
        name: tensor name in the graph, e.g. "past_recurrent_states".
        kind: one of `contract.BufferKind`.
        half: "a" or "b" of a ping-pong pair, "" where there is no pair.
        device: "host" or "ascend:N".
        dtype: NumPy dtype name.
        shape: in elements.
        nbytes: payload bytes.
        address: device address where the source knows it (emulator), else None.
        generation: how many buffers have had this id before this one.
        site: "file:line" of our code that allocated it.
        freed: `t_ns` when it was freed, None while alive.
    """

    id: str
    name: str
    kind: BufferKind
    half: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    address: int | None = None
    generation: int = 0
    site: str = ""
    freed: int | None = None


EventSink = Callable[[Event], None]


class Place(Protocol):
    """Where a run stands: what an emitter that knows nothing of stages and steps stamps its events with."""

    stage: str
    step: int


class Nowhere:
    """Outside of any run."""

    stage = ""
    step = -1


NOWHERE: Place = Nowhere()


def discard(event: Event) -> None:
    """The sink of those who do not record."""


now_ns = time.perf_counter_ns
