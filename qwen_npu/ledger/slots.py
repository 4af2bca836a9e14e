"""The books of a slot pool, kept again from its events: who owned which slot when, what it holds, what a step accepted.

Reads slot_allocate, slot_free, slot_read, slot_write, accept and draft events. Keeping the books a second time is also
the check: whatever contradicts them (a slot given away twice, a write by a stranger) is a fault, named with its event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from qwen_npu.ledger.events import Event, EventKind
from qwen_npu.ledger.store import Ledger

SlotUse = Literal["free", "live", "snapshot", "poisoned"]
KINDS: tuple[EventKind, ...] = ("slot_allocate", "slot_free", "slot_read", "slot_write", "draft", "accept")
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Slot:
    """One slot at one moment.

    Attributes:
        use: "poisoned" is a free slot that was filled with NaN.
        owner, sequence: "" and -1 when free.
        generation: how many owners it has had.
        position: its place in its owner's row; it holds the state after that token of the last verify.
        written: round in which it was written last, -1 if not by this owner.
        read: round in which it was read last, -1 if not by this owner.
        verdict: of the last step. "current" (the accepted state, which the next step reads), "accepted" (before it),
            "rejected" (behind it), "drafted" (the step is under way), "" (not written by it).
    """

    slot: int
    use: SlotUse = "free"
    owner: str = ""
    sequence: int = -1
    generation: int = 0
    position: int = -1
    written: int = -1
    read: int = -1
    verdict: Literal["", "current", "accepted", "rejected", "drafted"] = ""


class Round(NamedTuple):
    """The pool after one step of some sequences (round 0: before the first)."""

    number: int
    seq: int
    slots: tuple[Slot, ...]


class Accept(NamedTuple):
    """What one step of one sequence came to. `accepted` counts the certain token; `rejected` are drafts."""

    seq: int
    round: int
    sequence: int
    owner: str
    drafted: int
    accepted: int
    rejected: int
    slot: int
    drafted_so_far: int
    accepted_drafts_so_far: int
    tokens: Any

    @property
    def rate(self) -> float | None:
        """Share of all drafts of this sequence that were accepted so far."""
        return self.accepted_drafts_so_far / self.drafted_so_far if self.drafted_so_far else None


@dataclass
class History:
    """All of one pool."""

    pool: str
    size: int
    rounds: list[Round] = field(default_factory=list)
    accepts: list[Accept] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def pools(ledger: Ledger) -> list[str]:
    """Names of the pools that events tell of."""
    rows = ledger.query(
        "SELECT DISTINCT buffer FROM events WHERE kind IN ('slot_allocate', 'slot_write') ORDER BY buffer"
    )
    return [row[0] for row in rows]


def history(ledger: Ledger, pool: str | None = None, *, until: int | None = None) -> History:
    """The books of a pool (None: the first), up to and including event `until`."""
    if pool is None:
        known = pools(ledger)
        pool = known[0] if known else ""
    events = [
        event for event in ledger.events(KINDS) if event.buffer in (pool, "") and (until is None or event.seq <= until)
    ]
    books = _Books(pool, _size(ledger, events), poisons=bool(ledger.meta.get("poison", False)))
    for event in events:
        books.take(event)
    books.close_round()
    return books.history


def _size(ledger: Ledger, events: Iterable[Event]) -> int:
    """Slots of the pool: as recorded, as its buffer's shape says, or the largest number seen."""
    told = ledger.meta.get("slots")
    if told is not None:
        return int(told)
    shapes = [buffer.shape for buffer in ledger.buffers() if buffer.kind == "pool" and buffer.shape]
    if shapes:
        return int(shapes[0][0])
    return 1 + max((event.detail["slot"] for event in events if event.detail and "slot" in event.detail), default=-1)


class _Books:
    def __init__(self, pool: str, size: int, *, poisons: bool) -> None:
        self.history = History(pool, size)
        self._slots = [Slot(number) for number in range(size)]
        self._poisons = poisons
        self._round = 0
        self._last_seq = -1
        self._open: set[int] = set()
        self._settled = True
        self._totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._drafts: dict[int, Any] = {}
        self._keep()

    def take(self, event: Event) -> None:
        detail = event.detail or {}
        if event.kind == "draft":
            self._drafts[int(detail.get("sequence", -1))] = detail.get("tokens", detail.get("drafted"))
            return
        number = int(detail.get("slot", -1))
        if not 0 <= number < len(self._slots):
            self._fault(event, f"slot {number} of a pool of {len(self._slots)}")
            return
        getattr(self, f"_{event.kind}")(event, self._slots[number], detail)
        self._last_seq = event.seq

    def close_round(self) -> None:
        """Keeps what the pool looks like now as the end of the round."""
        if self._last_seq > self.history.rounds[-1].seq:
            self._keep()

    def _keep(self) -> None:
        rounds = self.history.rounds
        now = Round(self._round, self._last_seq, tuple(self._slots))
        if rounds and rounds[-1].number == self._round:
            rounds[-1] = now
        else:
            rounds.append(now)

    def _fault(self, event: Event, problem: str) -> None:
        self.history.faults.append(f"event {event.seq} ({event.kind}): {problem}")

    def _put(self, number: int, **changes: Any) -> None:
        self._slots[number] = replace(self._slots[number], **changes)

    def _slot_allocate(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        if slot.use in {"live", "snapshot"}:
            self._fault(event, f"slot {slot.slot} is given away, but {slot.owner!r} owns it")
        generation = int(detail.get("generation", slot.generation + 1))
        if generation <= slot.generation:
            self._fault(event, f"slot {slot.slot} goes from generation {slot.generation} to {generation}")
        owner = str(detail.get("owner", ""))
        self._slots[slot.slot] = Slot(
            slot.slot,
            "snapshot" if owner == SNAPSHOT else "live",
            owner,
            int(detail.get("sequence", -1)),
            generation,
            int(detail.get("position", 0)),
        )

    def _slot_free(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        if slot.use not in {"live", "snapshot"}:
            self._fault(event, f"slot {slot.slot} is freed, but it is {slot.use}")
        poisoned = bool(detail.get("poisoned", self._poisons))
        self._slots[slot.slot] = Slot(slot.slot, "poisoned" if poisoned else "free", generation=slot.generation)

    def _slot_read(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        sequence = int(detail.get("sequence", -1))
        if self._settled or sequence in self._open:
            self.close_round()
            self._round += 1
            self._open = set()
            self._settled = False
        self._open.add(sequence)
        self._owned(event, slot, sequence)
        self._put(slot.slot, read=self._round)

    def _slot_write(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        sequence = int(detail.get("sequence", -1))
        self._owned(event, slot, sequence)
        self._put(slot.slot, written=self._round, verdict="drafted" if sequence in self._open else "current")

    def _accept(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        sequence = int(detail.get("sequence", -1))
        self._owned(event, slot, sequence)
        self._settled = True
        self._open.discard(sequence)
        drafted, accepted = int(detail.get("drafted", 0)), int(detail.get("accepted", 1))
        for other in self._slots:
            if other.sequence == sequence and other.use == "live" and other.verdict:
                depth = other.position - (accepted - 1)
                if depth <= 0:
                    self._put(other.slot, verdict="accepted" if depth else "current")
                else:
                    self._put(other.slot, verdict="rejected" if other.written == self._round else "")
        totals = self._totals[sequence]
        totals[0] += drafted
        totals[1] += accepted - 1
        self.history.accepts.append(
            Accept(
                event.seq,
                self._round,
                sequence,
                str(detail.get("owner", "")),
                drafted,
                accepted,
                drafted - (accepted - 1),
                slot.slot,
                totals[0],
                totals[1],
                detail.get("tokens", self._drafts.pop(sequence, None)),
            )
        )
        if not 1 <= accepted <= drafted + 1:
            self._fault(event, f"sequence {sequence} accepted {accepted} of {drafted + 1} tokens")

    def _owned(self, event: Event, slot: Slot, sequence: int) -> None:
        if slot.use != "live" or slot.sequence != sequence:
            owner = f"{slot.owner!r}" if slot.owner else "nobody"
            self._fault(event, f"sequence {sequence} uses slot {slot.slot}, which belongs to {owner} ({slot.use})")


def counts(slots: Iterable[Slot]) -> dict[str, int]:
    """How many slots are free (poisoned ones among them), live, snapshot; `total` is their sum."""
    found = {"free": 0, "live": 0, "snapshot": 0, "poisoned": 0}
    for slot in slots:
        found[slot.use] += 1
    found["free"] += found["poisoned"]
    return {**found, "total": found["free"] + found["live"] + found["snapshot"]}
