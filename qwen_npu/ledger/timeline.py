"""A ledger seen along its steps: ticks of time, lives of buffers, moves between host and device, uses by predict.

What figures, summaries and exports share. The emulator's own events tell the same allocations and copies a second
time under its own ids, so they are kept apart: `moves` and `lives` are the driver's view, `device_lives` the
emulator's.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from functools import cached_property
from typing import Any, Literal, NamedTuple

from qwen_npu.contract import BufferKind, buffer_kind
from qwen_npu.ledger.events import Buffer, Source
from qwen_npu.ledger.store import Ledger

Direction = Literal["H2D", "D2H"]
FIRST_STAGES = frozenset({"vision", "prefill"})
STEP_STAGES = frozenset({"decode", "verify"})


class Tick(NamedTuple):
    """A stretch of the run: one decode or verify step, or what lies between (`step` -1). `run` counts generations."""

    number: int
    run: int
    stage: str
    step: int
    first_seq: int
    start_ns: int
    label: str

    @property
    def is_step(self) -> bool:
        return self.step >= 0 and self.stage in STEP_STAGES


class Life(NamedTuple):
    """A buffer from its allocation to its end. `dead_*` are None while it is alive."""

    buffer: Buffer
    source: Source
    born_seq: int
    born_ns: int
    dead_seq: int | None
    dead_ns: int | None


class Move(NamedTuple):
    """A copy over the bus. `buffer` is the device buffer ("" where predict moved a host tensor by itself)."""

    seq: int
    tick: int
    t_ns: int
    dur_ns: int
    direction: Direction
    kind: BufferKind
    buffer: str
    host: str
    nbytes: int
    source: Source


class Use(NamedTuple):
    """One predict: what it read and what it wrote, by buffer id."""

    seq: int
    tick: int
    t_ns: int
    dur_ns: int
    graph: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    site: str


class Turn(NamedTuple):
    """From here on `live` holds the state of `kind`, and `former` is scratch."""

    seq: int
    tick: int
    kind: str
    live: str
    former: str


class Timeline:
    """Reads a ledger once; each part when it is first asked for."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @classmethod
    def of(cls, ledger: Ledger) -> Timeline:
        """The timeline of a ledger as it is now; read anew only if events came since it was last asked for."""
        seq = ledger.last_seq
        known = ledger.cache.get("timeline")
        if known is None or known[0] != seq:
            known = ledger.cache["timeline"] = (seq, cls(ledger))
        timeline: Timeline = known[1]
        return timeline

    @cached_property
    def ticks(self) -> list[Tick]:
        ticks: list[Tick] = []
        run, stepped, fork, last_step = 0, False, 0, -1
        before: tuple[str, int] | None = None
        rows = self.ledger.query("SELECT seq, stage, step, t_ns, kind FROM events ORDER BY seq")
        for seq, stage, step, t_ns, kind in rows:
            if (not stage and ticks) or ((stage, step) == before and kind != "stage_begin"):
                continue
            if step >= 0 and self._resumes(ticks, stage, step):
                # A model was built in the middle of the step: that was part of it.
                while ticks[-1].step != step:
                    ticks.pop()
                before = (stage, step)
                continue
            before = (stage, step)
            if stepped and stage in FIRST_STAGES:
                run, stepped, fork = run + 1, False, len(ticks)
            elif step >= 0 and stage in STEP_STAGES:
                if not stepped and fork and step > last_step:
                    # No new generation: a sequence joined a group, whose steps go on.
                    run -= 1
                    ticks[fork:] = [tick._replace(run=run) for tick in ticks[fork:]]
                stepped, last_step = True, step
            label = stage or "start"
            if step >= 0:
                label = f"{stage} {step}"
            elif stage in STEP_STAGES:
                label = f"{stage} {'end' if stepped else 'start'}"
            ticks.append(Tick(len(ticks), run, stage, step, seq, t_ns, label))
        return ticks

    @staticmethod
    def _resumes(ticks: list[Tick], stage: str, step: int) -> bool:
        """Whether the newest step is this one, and only the same stage has been between."""
        for tick in reversed(ticks):
            if tick.stage != stage:
                return False
            if tick.step >= 0:
                return tick.step == step
        return False

    @cached_property
    def last_seq(self) -> int:
        return self.ledger.last_seq

    @cached_property
    def _first_seqs(self) -> list[int]:
        return [tick.first_seq for tick in self.ticks]

    def tick_at(self, seq: int) -> int:
        """Number of the tick that an event belongs to; events of no stage belong to the tick that is under way."""
        return max(0, bisect_right(self._first_seqs, seq) - 1)

    @cached_property
    def _all_lives(self) -> list[Life]:
        ends: dict[tuple[str, int], int] = {
            (buffer, t_ns): seq
            for seq, buffer, t_ns in self.ledger.query("SELECT seq, buffer, t_ns FROM events WHERE kind = 'free'")
        }
        columns = ", ".join(f"b.{name}" for name in Buffer._fields)
        rows = self.ledger.query(
            f"SELECT e.seq, e.t_ns, e.source, {columns} FROM buffers b JOIN events e ON e.seq = b.rowid ORDER BY e.seq"
        )
        lives = []
        for seq, t_ns, source, *fields in rows:
            fields[6] = tuple(json.loads(fields[6]))
            buffer = Buffer._make(fields)
            dead = None if buffer.freed is None else ends.get((buffer.id, buffer.freed), seq)
            lives.append(Life(buffer, source, seq, t_ns, dead, buffer.freed))
        return lives

    @cached_property
    def lives(self) -> list[Life]:
        """What the driver allocated for us, on the device and (if told) on the host."""
        return [life for life in self._all_lives if life.source != "emulator"]

    @cached_property
    def device_lives(self) -> list[Life]:
        """All device memory as the emulator knows it, weights included; empty elsewhere."""
        return [life for life in self._all_lives if life.source == "emulator"]

    @cached_property
    def kinds(self) -> dict[str, BufferKind]:
        """The kind of every buffer id that was allocated."""
        return {life.buffer.id: life.buffer.kind for life in self._all_lives}

    def kind_of(self, id_: str) -> BufferKind:
        """Also of host ids such as "host.past_kv_cache" or "input.input_ids", which nobody allocates."""
        known = self.kinds.get(id_)
        return known if known is not None else buffer_kind(id_.partition(".")[2] or id_)

    @cached_property
    def _all_moves(self) -> list[Move]:
        rows = self.ledger.query(
            "SELECT seq, t_ns, dur_ns, kind, buffer, other, nbytes, source FROM events "
            "WHERE kind IN ('upload', 'download') ORDER BY seq"
        )
        known: dict[str, BufferKind] = {}
        moves = []
        tick, starts = 0, [*self._first_seqs[1:], 2**63]
        for seq, t_ns, dur_ns, kind, buffer, other, nbytes, source in rows:
            while seq >= starts[tick]:
                tick += 1
            name = buffer or other
            of_kind = known.get(name)
            if of_kind is None:
                of_kind = known[name] = self.kind_of(name)
            direction: Direction = "H2D" if kind == "upload" else "D2H"
            moves.append(Move(seq, tick, t_ns, dur_ns, direction, of_kind, buffer, other, nbytes, source))
        return moves

    @cached_property
    def moves(self) -> list[Move]:
        return [move for move in self._all_moves if move.source != "emulator"]

    @cached_property
    def device_moves(self) -> list[Move]:
        """Copies as the emulator counted them."""
        return [move for move in self._all_moves if move.source == "emulator"]

    @cached_property
    def uses(self) -> list[Use]:
        rows = self.ledger.query("SELECT seq, t_ns, dur_ns, detail FROM events WHERE kind = 'predict' ORDER BY seq")
        uses = []
        for seq, t_ns, dur_ns, text in rows:
            detail: dict[str, Any] = json.loads(text) if text else {}
            uses.append(
                Use(
                    seq,
                    self.tick_at(seq),
                    t_ns,
                    dur_ns,
                    detail.get("graph", ""),
                    tuple(detail.get("inputs", ())),
                    tuple(detail.get("outputs", ())),
                    detail.get("site", ""),
                )
            )
        return uses

    @cached_property
    def turns(self) -> list[Turn]:
        """Which half is live, each time that changed: first by the one-time upload, then by every rotation."""
        rows = self.ledger.query(
            "SELECT seq, kind, buffer, other FROM events WHERE kind = 'rotate' "
            "OR (kind = 'upload' AND buffer != '' AND source != 'emulator') ORDER BY seq"
        )
        halves = {life.buffer.id for life in self.lives if life.buffer.half}
        return [
            Turn(seq, self.tick_at(seq), self.kind_of(buffer), buffer, other if kind == "rotate" else "")
            for seq, kind, buffer, other in rows
            if kind == "rotate" or buffer in halves
        ]

    @cached_property
    def lives_by_id(self) -> dict[str, list[Life]]:
        """The driver's lives by buffer id, oldest first."""
        by_id: dict[str, list[Life]] = defaultdict(list)
        for life in self.lives:
            by_id[life.buffer.id].append(life)
        return dict(by_id)

    @cached_property
    def _born_by_id(self) -> dict[str, list[int]]:
        return {id_: [life.born_seq for life in lives] for id_, lives in self.lives_by_id.items()}

    def life_at(self, id_: str, seq: int, role: Literal["input", "output"] = "input") -> Life | None:
        """The life that an id meant at an event. While a growing state is handed on, two buffers have one id: the older
        one is read, the newer one written."""
        lives = self.lives_by_id.get(id_, [])
        last = bisect_right(self._born_by_id.get(id_, ()), seq)
        recent = reversed(lives[max(0, last - 4) : last])
        alive = [life for life in recent if life.dead_seq is None or life.dead_seq > seq]
        if not alive:
            return None
        return alive[0] if role == "output" else alive[-1]
