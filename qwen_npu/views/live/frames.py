"""A ledger reduced, as it grows, to what live views draw: a column a tick, a row a buffer.

Reads only what is new since the last `update`, so that following a run costs the same at its end as at its beginning.
Means the same as `ledger.timeline` and the residency figure, which read a whole ledger at once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_npu.contract import BufferKind, buffer_kind
from qwen_npu.ledger.events import Buffer
from qwen_npu.ledger.store import Ledger, buffer_of
from qwen_npu.ledger.timeline import FIRST_STAGES, STEP_STAGES, Tick

ALIVE, READ, WRITTEN, UPLOADED, LIVE, TWO, FREED, PEEKED = 1, 2, 4, 8, 16, 32, 64, 128
"""Bits of a cell. LIVE: this half of a pair holds the state at the end of the tick. TWO: two generations of a growing
buffer are alive within the tick. PEEKED: read by a peek graph, which is no part of the step."""

INSIDE = "inside predict"
"""The row of memory that predict brings itself for host tensors."""

PEEKS_PER_EVENT = 1024
"""The ledger's row id of a peek is its event's number times this plus its place (see `Ledger.query`)."""
_BATCH_EVENTS = 20_000
_COPIES = ("upload", "download")
_COLUMNS = "seq, t_ns, kind, stage, step, buffer, other, nbytes, source, detail"


@dataclass
class Row:
    """A buffer id on the device, or a host array. `buffer` is its newest life."""

    number: int
    id: str
    kind: BufferKind
    host: bool
    buffer: Buffer | None = None
    alive: list[Buffer] = field(default_factory=list)


class Copy(NamedTuple):
    """A copy over the bus in one tick: rows of its ends (-1 where unknown)."""

    host: int
    device: int
    up: bool
    nbytes: int
    source: str


@dataclass
class Figures:
    """What a tick's steps say: sums where several stages share a tick."""

    token: int | None = None
    text: str = ""
    predict_ms: float | None = None
    wall_ms: float | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    allocated_bytes: int = 0
    kv_bytes: int | None = None
    recurrent_bytes: int | None = None
    used_tokens: int | None = None
    drafted: Any = None
    accepted: Any = None
    graph: str = ""
    site: str = ""
    alive_bytes: int = 0
    device_bytes: int | None = None


class Frames:
    """Follows `ledger`.

    Attributes:
        ticks: as `Timeline.ticks`.
        rows: in the order in which they were first seen.
        figures, copies: one entry a tick.
        hazards: (tick, what happened).
        faults: what contradicts the books of bytes; empty when they balance.
        slot_events, peek_events: how many there were, so that readers of slots and peeks see that there are new ones.
        last_seq: the newest event taken.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.meta = ledger.meta
        self.ticks: list[Tick] = []
        self.rows: list[Row] = []
        self.figures: list[Figures] = []
        self.copies: list[list[Copy]] = []
        self.hazards: list[tuple[int, str]] = []
        self.faults: list[str] = []
        self.slot_events = 0
        self.peek_events = 0
        self.last_seq = -1
        self._at: dict[str, int] = {}
        self._run = 0
        self._stepped = False
        self._fork = 0
        self._last_step = -1
        self._before: tuple[str, int] | None = None
        self._live: dict[str, str] = {}
        self._alive_bytes = 0
        self._device_bytes: int | None = None
        self._prompt_tokens: int | None = None
        self._non_finite = False
        self._details: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, tuple[str, BufferKind]] = {}
        self._codes = np.zeros((0, 0), np.uint8)
        self._nbytes = np.zeros((0, 0), np.int64)
        self._generation = np.zeros((0, 0), np.int32)
        self._wrote = np.zeros((0, 0), np.int32)

    # what views read

    @property
    def codes(self) -> NDArray[np.uint8]:
        """Bits of every cell [rows, ticks]."""
        return self._codes[: len(self.rows), : len(self.ticks)]

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of every cell [rows, ticks]."""
        return self._nbytes[: len(self.rows), : len(self.ticks)]

    @property
    def generation(self) -> NDArray[np.int32]:
        return self._generation[: len(self.rows), : len(self.ticks)]

    @property
    def wrote(self) -> NDArray[np.int32]:
        """Tick in which each cell's content was written last, -1 if never."""
        return self._wrote[: len(self.rows), : len(self.ticks)]

    def row(self, id_: str) -> Row | None:
        number = self._at.get(id_)
        return None if number is None else self.rows[number]

    def text(self, tick: int) -> str:
        """The answer of the tick's generation up to and including the tick."""
        if not self.ticks:
            return ""
        run = self.ticks[tick].run
        return "".join(self.figures[number].text for number in range(tick + 1) if self.ticks[number].run == run)

    def live_at(self, tick: int) -> dict[str, str]:
        """Kind of state -> id of the half that is live at the end of the tick."""
        column = self.codes[:, tick]
        return {row.kind: row.id for row in self.rows if column[row.number] & LIVE}

    # following

    def update(self) -> bool:
        """Takes what is new; True if there was anything."""
        any_new = False
        while True:
            rows, born = self._new()
            if not rows:
                return any_new
            any_new = True
            peeks = self.peek_events
            for row in rows:
                # what the emulator says of a copy is a third of a recording, and within a tick nothing new
                if row[8] == "emulator" and row[2] in _COPIES and self.ticks and row[3:5] == self._before:
                    continue
                self._take(row, born)
            self.last_seq = rows[-1][0]
            if self.peek_events > peeks and not self._non_finite:
                self._look_for_non_finite(rows[0][0])
            if len(rows) < _BATCH_EVENTS:
                return True

    def _new(self) -> tuple[list[tuple[Any, ...]], dict[int, Buffer]]:
        """Rows of events, and the buffers that they allocate: from memory while the recording goes on, else read."""
        events = self.ledger.recent(self.last_seq)
        if events is not None:
            start = self.last_seq + 1
            # in the order of _COLUMNS, which is the events' own but for the duration and the first two
            rows = [(seq, event[1], event[0], *event[3:10]) for seq, event in enumerate(events, start)]
            born = {row[0]: buffer_of(events[row[0] - start]) for row in rows if _allocates(row)}
            return rows, born
        rows = self.ledger.query(
            f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (self.last_seq, _BATCH_EVENTS)
        )
        return rows, self._born(rows[0][0], rows[-1][0]) if any(map(_allocates, rows)) else {}

    def _born(self, first: int, last: int) -> dict[int, Buffer]:
        columns = ", ".join(Buffer._fields)
        found = self.ledger.query(f"SELECT rowid, {columns} FROM buffers WHERE rowid BETWEEN ? AND ?", (first, last))
        shape = Buffer._fields.index("shape") + 1
        return {
            row[0]: Buffer._make((*row[1:shape], tuple(json.loads(row[shape])), *row[shape + 1 :])) for row in found
        }

    def _take(self, event: tuple[Any, ...], born: dict[int, Buffer]) -> None:
        seq, t_ns, kind, stage, step, buffer, other, nbytes, source, detail = event
        if self._opens(stage, step, kind):
            if step >= 0 and self._resumes(stage, step):
                self._resume(stage, step)
            else:
                self._open(stage, step, seq, t_ns)
        if source == "emulator":
            if kind in ("allocate", "free"):
                self._device_bytes = (self._device_bytes or 0) + (nbytes if kind == "allocate" else -nbytes)
                self.figures[-1].device_bytes = self._device_bytes
            elif kind == "hazard":
                self._hazard(detail)
            return
        tick = len(self.ticks) - 1
        if kind == "predict":
            self._predict(self._parsed(detail), tick)
        elif kind in ("upload", "download"):
            self._copy(kind == "upload", buffer, other, nbytes, source, tick)
        elif kind == "rotate":
            self._turn(buffer, tick)
        elif kind == "step":
            self._step(json.loads(detail) if isinstance(detail, str) else self._parsed(detail), tick)
        elif kind == "allocate":
            self._allocate(seq, buffer, nbytes, born.get(seq), tick)
        elif kind == "free":
            self._free(seq, buffer, nbytes, tick)
        elif kind == "hazard":
            self._hazard(detail)
        elif kind == "peek":
            self.peek_events += 1
        elif kind.startswith("slot_") or kind in ("accept", "draft"):
            self.slot_events += 1

    def _opens(self, stage: str, step: int, kind: str) -> bool:
        if not self.ticks:
            return True
        return bool(stage) and ((stage, step) != self._before or kind == "stage_begin")

    def _open(self, stage: str, step: int, seq: int, t_ns: int) -> None:
        self._before = (stage, step)
        if self._stepped and stage in FIRST_STAGES:
            self._run, self._stepped, self._fork = self._run + 1, False, len(self.ticks)
        elif step >= 0 and stage in STEP_STAGES:
            if not self._stepped and self._fork and step > self._last_step:
                # No new generation: a sequence joined a group, whose steps go on.
                self._run -= 1
                for number in range(self._fork, len(self.ticks)):
                    self.ticks[number] = self.ticks[number]._replace(run=self._run)
            self._stepped, self._last_step = True, step
        label = stage or "start"
        if step >= 0:
            label = f"{stage} {step}"
        elif stage in STEP_STAGES:
            label = f"{stage} {'end' if self._stepped else 'start'}"
        number = len(self.ticks)
        self.ticks.append(Tick(number, self._run, stage, step, seq, t_ns, label))
        self.figures.append(Figures(alive_bytes=self._alive_bytes, device_bytes=self._device_bytes))
        self.copies.append([])
        self._room()
        self._wrote[:, number] = self._wrote[:, number - 1] if number else -1
        for row in self.rows:
            if row.alive:
                self._codes[row.number, number] = ALIVE | (TWO if len(row.alive) > 1 else 0)
                self._nbytes[row.number, number] = row.alive[-1].nbytes
                self._generation[row.number, number] = row.alive[-1].generation
        for id_ in self._live.values():
            at = self._at.get(id_)
            if at is not None and self.rows[at].alive:
                self._codes[at, number] |= LIVE

    def _resumes(self, stage: str, step: int) -> bool:
        """Whether the newest step is this one, and only the same stage has been between."""
        for tick in reversed(self.ticks):
            if tick.stage != stage:
                return False
            if tick.step >= 0:
                return tick.step == step
        return False

    def _resume(self, stage: str, step: int) -> None:
        """A model was built in the middle of a step: what happened meanwhile becomes part of the step."""
        self._before = (stage, step)
        while self.ticks[-1].step != step:
            last = len(self.ticks) - 1
            self.ticks.pop()
            late, figures = self.figures.pop(), self.figures[-1]
            for name in ("up_bytes", "down_bytes", "allocated_bytes"):
                setattr(figures, name, getattr(figures, name) + getattr(late, name))
            for name in ("kv_bytes", "recurrent_bytes", "alive_bytes", "device_bytes"):
                if getattr(late, name) is not None:
                    setattr(figures, name, getattr(late, name))
            figures.text += late.text
            if late.graph:
                figures.graph, figures.site = late.graph, late.site
            self.copies[last - 1] += self.copies.pop()
            self.hazards = [(min(tick, last - 1), text) for tick, text in self.hazards]
            now, before = self._codes[:, last], self._codes[:, last - 1]
            before[:] = (before & (0xFF ^ LIVE ^ TWO)) | now
            for cells in (self._nbytes, self._generation):
                cells[:, last - 1] = np.where(now > 0, cells[:, last], cells[:, last - 1])
                cells[:, last] = 0
            self._wrote[:, last - 1] = np.minimum(self._wrote[:, last], last - 1)
            self._wrote[:, last] = -1
            now[:] = 0

    def _room(self) -> None:
        """Doubles the arrays when a row or a tick does not fit."""
        rows, ticks = self._codes.shape
        if len(self.rows) <= rows and len(self.ticks) <= ticks:
            return
        shape = (
            max(rows, 16, 2 * rows * (len(self.rows) > rows)),
            max(ticks, 64, 2 * ticks * (len(self.ticks) > ticks)),
        )
        for name, empty in (("_codes", 0), ("_nbytes", 0), ("_generation", 0), ("_wrote", -1)):
            old = getattr(self, name)
            new = np.full(shape, empty, old.dtype)
            new[:rows, :ticks] = old
            setattr(self, name, new)

    def _parsed(self, detail: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
        """A predict's detail; steps repeat two of them, so the text is parsed once."""
        if not isinstance(detail, str):
            return detail or {}
        known = self._details.get(detail)
        if known is None:
            if len(self._details) > 64:
                self._details.clear()
            known = self._details[detail] = json.loads(detail)
        return known

    def _named(self, id_: str) -> tuple[str, BufferKind]:
        """Row and kind of a host array: a state has one row, whether it is called past or present."""
        known = self._kinds.get(id_)
        if known is None:
            at = self._at.get(id_)
            kind = self.rows[at].kind if at is not None else buffer_kind(id_.partition(".")[2] or id_)
            known = self._kinds[id_] = (f"host {kind}" if kind != "input" else id_.partition(".")[2] or id_, kind)
        return known

    def _row_of(self, id_: str, kind: BufferKind, host: bool) -> Row:
        at = self._at.get(id_)
        if at is None:
            at = self._at[id_] = len(self.rows)
            self.rows.append(Row(at, id_, kind, host))
            self._room()
        return self.rows[at]

    def _host(self, id_: str, bit: int, nbytes: int, tick: int) -> int:
        name, kind = self._named(id_)
        number = self._row_of(name, kind, True).number
        self._codes[number, tick] |= ALIVE | bit
        self._nbytes[number, tick] = max(nbytes, int(self._nbytes[number, tick]))
        if bit == WRITTEN:
            self._wrote[number, tick] = tick
        return number

    def _device(self, id_: str) -> Row | None:
        at = self._at.get(id_)
        row = None if at is None else self.rows[at]
        return row if row is not None and row.alive and not row.host else None

    def _allocate(self, seq: int, id_: str, nbytes: int, buffer: Buffer | None, tick: int) -> None:
        if buffer is None:
            self.faults.append(f"event {seq} allocates {id_!r} without saying what")
            return
        row = self._row_of(id_, buffer.kind, buffer.device == "host")
        row.buffer = buffer
        row.alive.append(buffer)
        number = row.number
        self._codes[number, tick] |= ALIVE | (TWO if len(row.alive) > 1 else 0)
        self._nbytes[number, tick] = buffer.nbytes
        self._generation[number, tick] = buffer.generation
        if len(row.alive) == 1:
            self._wrote[number, tick] = -1
        if buffer.nbytes != nbytes:
            self.faults.append(f"event {seq} allocates {nbytes} B for {id_!r}, a buffer of {buffer.nbytes} B")
        self._count(nbytes, tick)

    def _free(self, seq: int, id_: str, nbytes: int, tick: int) -> None:
        at = self._at.get(id_)
        if at is None or not self.rows[at].alive:
            self.faults.append(f"event {seq} frees {id_!r}, which is not alive")
            return
        buffer = self.rows[at].alive.pop(0)
        self._codes[at, tick] |= FREED
        if nbytes not in (0, buffer.nbytes):
            self.faults.append(f"event {seq} frees {nbytes} B of {id_!r}, allocated with {buffer.nbytes} B")
        self._count(-(nbytes or buffer.nbytes), tick)

    def _count(self, nbytes: int, tick: int) -> None:
        self._alive_bytes += nbytes
        self.figures[tick].alive_bytes = self._alive_bytes

    def _predict(self, detail: Mapping[str, Any], tick: int) -> None:
        figures = self.figures[tick]
        graph = str(detail.get("graph", ""))
        peeks = graph.startswith("peek")
        if not peeks:
            figures.graph, figures.site = graph, str(detail.get("site", ""))
        for ids, bit in ((detail.get("inputs", ()), PEEKED if peeks else READ), (detail.get("outputs", ()), WRITTEN)):
            for id_ in ids:
                row = self._device(id_)
                if row is None:
                    self._host(id_, bit, 0, tick)
                    continue
                self._codes[row.number, tick] |= bit
                if bit == WRITTEN:
                    self._wrote[row.number, tick] = tick
                    if row.kind == "kv":
                        figures.kv_bytes = row.alive[-1].nbytes
                    elif row.kind == "recurrent":
                        figures.recurrent_bytes = row.alive[-1].nbytes

    def _copy(self, up: bool, buffer: str, other: str, nbytes: int, source: str, tick: int) -> None:
        host = self._host(other, READ if up else WRITTEN, nbytes, tick) if other else -1
        device = -1
        row = self._device(buffer) if buffer else None
        if row is not None:
            device = row.number
            if up:
                self._codes[device, tick] |= UPLOADED
                self._wrote[device, tick] = tick
                if row.buffer is not None and row.buffer.half:
                    self._turn(buffer, tick)
        elif not buffer:
            device = self._row_of(INSIDE, "input", False).number
            self._codes[device, tick] |= ALIVE | (UPLOADED if up else READ)
            self._nbytes[device, tick] += nbytes
        kind = self._named(other)[1] if other else "other"
        if not up and kind == "kv":
            self.figures[tick].kv_bytes = nbytes
        elif not up and kind == "recurrent":
            self.figures[tick].recurrent_bytes = nbytes
        self.copies[tick].append(Copy(host, device, up, nbytes, source))

    def _turn(self, buffer: str, tick: int) -> None:
        at = self._at.get(buffer)
        if at is None:
            return
        kind = self.rows[at].kind
        former = self._at.get(self._live.get(kind, ""))
        if former is not None:
            self._codes[former, tick] &= ~LIVE & 0xFF
        self._live[kind] = buffer
        self._codes[at, tick] |= LIVE

    def _step(self, told: Mapping[str, Any], tick: int) -> None:
        figures = self.figures[tick]
        if told.get("token") is not None:
            figures.token = told["token"]
        figures.text += told.get("text") or ""
        for name in ("predict_ms", "wall_ms"):
            value = told.get(name)
            if value is not None:
                setattr(figures, name, (getattr(figures, name) or 0.0) + value)
        figures.up_bytes += told.get("host_to_device_bytes") or 0
        figures.down_bytes += told.get("device_to_host_bytes") or 0
        figures.allocated_bytes += told.get("allocated_bytes") or 0
        for name in ("drafted", "accepted"):
            if told.get(name) is not None:
                setattr(figures, name, told[name])
        if told.get("prompt_tokens") is not None:
            self._prompt_tokens = int(told["prompt_tokens"])
        now = self.ticks[tick]
        if now.is_step and now.stage == "decode" and self._prompt_tokens is not None:
            figures.used_tokens = self._prompt_tokens + now.step + 1

    def _look_for_non_finite(self, first: int) -> None:
        """Tells the first count of values that are not finite among the peeks from event `first` on."""
        rows = self.ledger.query(
            "SELECT step, name, dtype, shape, data FROM peeks WHERE rowid >= ? "
            "AND name LIKE '%.nonfinite' AND name NOT LIKE 'pool%' ORDER BY rowid",  # free slots of a pool are poisoned
            (first * PEEKS_PER_EVENT,),
        )
        for step, name, dtype, shape, data in rows:
            bad = np.argwhere(np.frombuffer(data, dtype).reshape(json.loads(shape)) != 0)
            if len(bad):
                where = ", ".join(f"{axis} {i}" for axis, i in zip(("layer", "head"), bad[0], strict=False))
                self._non_finite = True
                at = next((t.number for t in self.ticks if t.step == step and t.run == self._run), len(self.ticks) - 1)
                self.hazards.append((at, f"{name.partition('.')[0]}: the first value that is not finite, {where}"))
                return

    def _hazard(self, detail: str | Mapping[str, Any] | None) -> None:
        told = self._parsed(detail)
        text = str(told.get("problem") or told.get("message") or told.get("hazard") or told.get("kind") or "hazard")
        self.hazards.append((len(self.ticks) - 1, text))


def _allocates(row: tuple[Any, ...]) -> bool:
    return bool(row[2] == "allocate" and row[8] != "emulator")


def balance(frames: Frames) -> list[str]:
    """What is wrong with the books of bytes now: the running sum of events against the buffers that are alive."""
    faults = list(frames.faults)
    by_kind: dict[bool, int] = defaultdict(int)
    for row in frames.rows:
        by_kind[row.host] += sum(buffer.nbytes for buffer in row.alive)
    alive = sum(by_kind.values())
    counted = frames.figures[-1].alive_bytes if frames.figures else 0
    if alive != counted:
        faults.append(f"events leave {counted} B alive, buffers {alive} B")
    return faults
