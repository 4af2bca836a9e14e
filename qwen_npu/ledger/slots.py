"""The books of a slot pool, kept again from its events: who owned which slot when, what it holds, what a step accepted.

Reads slot_allocate, slot_free, slot_read, slot_write, draft, verify and accept events. Keeping the books a second time
is also the check: whatever contradicts them (a slot given away twice, a write by a stranger) is a fault, named with its
event. The pool's own accept event counts padding among the drafts; where the runtime tells a verify, its count is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from qwen_npu.ledger.events import Event, EventKind
from qwen_npu.ledger.store import Ledger

SlotUse = Literal["free", "live", "snapshot", "poisoned"]
KINDS: tuple[EventKind, ...] = (
    "slot_allocate",
    "slot_free",
    "slot_read",
    "slot_write",
    "draft",
    "verify",
    "accept",
)
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
    """What one step of one sequence came to. `accepted` counts the certain token; `rejected` are drafts, `tokens` the
    drafts' ids where told."""

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
    """Slots of the pool: as recorded, as the newest pool buffer's shape says, or by the largest number seen."""
    told = ledger.meta.get("slots")
    if told is not None:
        return int(told)
    shapes = [buffer.shape for buffer in ledger.buffers() if buffer.kind == "pool" and buffer.shape]
    if shapes:
        return int(shapes[-1][0])
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
        self._between = False
        self._totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._drafts: dict[int, Mapping[str, Any]] = {}
        self._verified: dict[int, Mapping[str, Any]] = {}
        self._keep()

    def take(self, event: Event) -> None:
        detail = event.detail or {}
        if event.kind in {"draft", "verify"}:
            told = self._drafts if event.kind == "draft" else self._verified
            told[int(detail.get("sequence", -1))] = detail
            return
        number = int(detail.get("slot", -1))
        if not 0 <= number < len(self._slots):
            self._fault(event, f"slot {number} of a pool of {len(self._slots)}")
            return
        slot = self._slots[number]
        if event.kind != "slot_allocate" and slot.generation == 0 and int(detail.get("generation", 0)) > 0:
            slot = self._older_than_the_recording(slot, detail)
        getattr(self, f"_{event.kind}")(event, slot, detail)
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

    def _older_than_the_recording(self, slot: Slot, detail: Mapping[str, Any]) -> Slot:
        """The owner that a slot must have had before the first event."""
        owner = str(detail.get("owner", ""))
        adopted = Slot(
            slot.slot,
            "snapshot" if owner == SNAPSHOT else "live",
            owner,
            int(detail.get("sequence", -1)),
            int(detail["generation"]),
            int(detail.get("position", -1)),
        )
        self._slots[slot.slot] = adopted
        return adopted

    def _slot_allocate(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        self._begin_between()
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

    def _begin_between(self) -> None:
        """What happens after a step belongs to the next one, so that a step's end is kept as it was."""
        if self._settled and self._round and not self._between:
            self.close_round()
            self._round += 1
            self._between = True

    def _slot_free(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        self._begin_between()
        if slot.use not in {"live", "snapshot"}:
            self._fault(event, f"slot {slot.slot} is freed, but it is {slot.use}")
        poisoned = bool(detail.get("poisoned", self._poisons))
        self._slots[slot.slot] = Slot(slot.slot, "poisoned" if poisoned else "free", generation=slot.generation)

    def _slot_read(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        sequence = int(detail.get("sequence", -1))
        if self._settled or sequence in self._open:
            if not self._between:
                self.close_round()
                self._round += 1
            self._open = set()
            self._settled = self._between = False
        self._open.add(sequence)
        self._owned(event, slot, sequence)
        self._put(slot.slot, read=self._round)

    def _slot_write(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        self._begin_between()
        if detail.get("poison"):
            if slot.use in {"live", "snapshot"}:
                self._fault(event, f"slot {slot.slot} is filled with NaN, but {slot.owner!r} owns it")
            self._put(slot.slot, use="poisoned")
            return
        sequence = int(detail.get("sequence", -1))
        self._owned(event, slot, sequence)
        self._put(slot.slot, written=self._round, verdict="drafted" if sequence in self._open else "current")

    def _accept(self, event: Event, slot: Slot, detail: dict[str, Any]) -> None:
        sequence = int(detail.get("sequence", -1))
        self._owned(event, slot, sequence)
        self._settled = True
        self._open.discard(sequence)
        verified = self._verified.pop(sequence, detail)
        drafted, accepted = int(verified.get("drafted", 0)), int(detail.get("accepted", 1))
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
                self._drafts.pop(sequence, {}).get("tokens"),
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
