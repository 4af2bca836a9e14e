"""Who owns which slot of a pool of states, and the pool itself in host memory.

`SlotTable` keeps the books alone, for pools that lie on a device; `SlotPool` adds one array per linear layer and the
op. A sequence has a constant row of slots for its life: position j holds the state after token j of its last verify. It
goes on from position `accepted - 1`, so a rejected draft needs no undoing: its slot is simply written again later.
At every moment free + live + snapshot slots are all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qwen_npu.errors import OpError, SlotError
from qwen_npu.ledger.events import NOWHERE, EventKind, EventSink, Place, discard, event_of, now_ns
from qwen_npu.rgdr.memory import empty_states
from qwen_npu.rgdr.op import recurrent_gated_delta_rule

Array = NDArray[Any]


@dataclass
class _Sequence:
    """One live sequence: its owner's name, its row, and how many tokens of its last step were accepted."""

    owner: str
    row: tuple[int, ...]
    accepted: int = 1
    written: int = 1  # tokens of its last step: positions behind it hold nothing of this sequence's present
    in_flight: bool = False
    closing: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A slot that keeps the state of a sequence at one moment (a prefix to go on from later)."""

    slot: int
    generation: int
    source: int


@dataclass
class Batch:
    """Sequences that take one step together: their ids, rows of slots, tokens of the step, and accepted tokens of the
    step before."""

    width: int
    sequences: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    depths: tuple[int, ...]

    # The op's inputs, i32; whoever feeds a graph has arrays of his own.

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """[B, W]"""
        return np.array(self.slots, np.int32).reshape(len(self.slots), self.width)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """[B]"""
        return np.array(self.counts, np.int32)

    @cached_property
    def accepted(self) -> NDArray[np.int32]:
        """[B]"""
        return np.array(self.depths, np.int32)


class SlotTable:
    """The books of a pool: rows of slots per sequence, generations, snapshots.

    Args:
        slots: S, number of slots in the pool.
        width: W, slots of one sequence: drafts + 1.
        name: id of the pool in events.
        sink: takes slot_allocate, slot_free, slot_read, slot_write and accept events; may be set anew at any time,
            and events cost nothing while it is `discard`.
        place: gives these events their stage and step.
    """

    def __init__(
        self,
        slots: int,
        width: int,
        *,
        name: str = "state_pool",
        sink: EventSink = discard,
        place: Place = NOWHERE,
    ) -> None:
        if width < 1 or slots < width:
            raise SlotError(
                f"a pool of {slots} slots with rows of {width}",
                expected="rows of at least 1 slot and room for one row",
                fix="give the pool (drafts + 1) * sequences slots",
            )
        self.slots = slots
        self.width = width
        self.name = name
        self.sink = sink
        self._place = place
        self._free = list(range(slots))
        self._generation = [0] * slots
        self._sequences: dict[int, _Sequence] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._next_id = 0

    # -- questions

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def live_slots(self) -> tuple[int, ...]:
        return tuple(slot for sequence in self._sequences.values() for slot in sequence.row)

    @property
    def snapshot_slots(self) -> tuple[int, ...]:
        return tuple(self._snapshots)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the live sequences, in the order they came."""
        return tuple(self._sequences)

    def row(self, sequence: int) -> tuple[int, ...]:
        """The [W] slots of a sequence, the same for its life."""
        return self._of(sequence).row

    def accepted(self, sequence: int) -> int:
        return self._of(sequence).accepted

    def read_slot(self, sequence: int) -> int:
        """The slot that holds the state of the sequence's last accepted token."""
        known = self._of(sequence)
        return known.row[known.accepted - 1]

    def generation(self, slot: int) -> int:
        """How many owners the slot has had, the present one included; 0: never used."""
        return self._generation[slot]

    def owner(self, slot: int) -> str:
        """Name of the sequence (or "snapshot") that owns the slot, "" when free."""
        if slot in self._snapshots:
            return "snapshot"
        return next((known.owner for known in self._sequences.values() if slot in known.row), "")

    # -- life of a sequence

    def allocate(self, owner: str = "") -> int:
        """Gives a new sequence a row of slots; its state is to be put in `row[0]`. Returns the sequence's id.

        Raises:
            SlotError: fewer than W slots are free.
        """
        row = self._take(self.width, "a new sequence")
        sequence = self._next_id
        self._next_id += 1
        owner = owner or f"sequence {sequence}"
        self._sequences[sequence] = _Sequence(owner, row)
        for position, slot in enumerate(row):
            self._tell("slot_allocate", slot, sequence=sequence, owner=owner, position=position)
        return sequence

    def free(self, sequence: int) -> tuple[int, ...]:
        """Ends a sequence. Returns the slots that are free now.

        While a step of it is under way the slots stay its own, so that the step's writes reach nobody else's; `end`
        frees them, and nothing is returned here.
        """
        known = self._of(sequence)
        if known.in_flight:
            known.closing = True
            return ()
        del self._sequences[sequence]
        self._give_back(known.row, sequence=sequence, owner=known.owner)
        return known.row

    def begin(self, sequences: Sequence[int], lengths: Sequence[int] | None = None) -> Batch:
        """Starts a step of some sequences over `lengths` tokens each (None: W each).

        Raises:
            SlotError: a sequence that is unknown, twice in the batch, or already in a step.
            OpError: a length outside 1..W.
        """
        counts = [self.width] * len(sequences) if lengths is None else [int(n) for n in lengths]
        if len(counts) != len(sequences):
            raise OpError(f"{len(counts)} lengths for {len(sequences)} sequences", expected="one for each")
        known = [self._of(sequence) for sequence in sequences]
        if len(set(sequences)) != len(sequences):
            raise SlotError(f"sequences {list(sequences)}", expected="each once in a step")
        for sequence, entry, length in zip(sequences, known, counts, strict=True):
            if entry.in_flight:
                raise SlotError(f"sequence {sequence} is already in a step", fix="end that step first")
            if not 1 <= length <= self.width:
                raise OpError(
                    f"sequence {sequence}: {length} tokens", expected=f"1..{self.width}, the width of its row"
                )
        for sequence, entry, length in zip(sequences, known, counts, strict=True):
            entry.in_flight = True
            entry.written = length
            if self.sink is not discard:
                self._tell_step(sequence, entry)
        return Batch(
            self.width,
            tuple(sequences),
            tuple([entry.row for entry in known]),
            tuple(counts),
            tuple([entry.accepted for entry in known]),
        )

    def end(self, batch: Batch, accepted: Sequence[int]) -> tuple[int, ...]:
        """Ends a step: sequence i goes on from the state after its accepted[i]-th token. Returns slots freed only now.

        Raises:
            SlotError: a batch that is not under way.
            OpError: accepted outside 1..length of that sequence's step (0 counts as 1, the certain token).
        """
        known = [self._of(sequence) for sequence in batch.sequences]
        depths = [max(int(depth), 1) for depth in accepted]
        if len(depths) != len(known):
            raise OpError(f"{len(depths)} accepted for {len(known)} sequences", expected="one for each")
        for sequence, entry, depth in zip(batch.sequences, known, depths, strict=True):
            if not entry.in_flight:
                raise SlotError(f"sequence {sequence} is in no step", fix="end each step once")
            if not entry.closing and depth > entry.written:
                raise OpError(
                    f"sequence {sequence}: accepted {depth} of {entry.written} tokens", expected=f"1..{entry.written}"
                )
        freed: list[int] = []
        for sequence, entry, depth in zip(batch.sequences, known, depths, strict=True):
            entry.in_flight = False
            if entry.closing:
                freed += self.free(sequence)
                continue
            entry.accepted = depth
            if self.sink is not discard:
                facts = {"sequence": sequence, "owner": entry.owner, "accepted": depth, "drafted": entry.written - 1}
                self._tell("accept", entry.row[depth - 1], **facts)
        return tuple(freed)

    def abandon(self, batch: Batch) -> tuple[int, ...]:
        """Ends a step that failed before it wrote anything: every sequence stays where it was. Returns slots freed."""
        freed: list[int] = []
        for sequence in batch.sequences:
            entry = self._of(sequence)
            entry.in_flight = False
            if entry.closing:
                freed += self.free(sequence)
        return tuple(freed)

    # -- snapshots

    def snapshot(self, sequence: int) -> Snapshot:
        """Takes a slot for a copy of the sequence's present state; the caller copies `read_slot(sequence)` to it.

        Raises:
            SlotError: no slot free, or the sequence is in a step.
        """
        source = self._settled(sequence)
        (slot,) = self._take(1, "a snapshot")
        kept = Snapshot(slot, self._generation[slot], source.row[source.accepted - 1])
        self._snapshots[slot] = kept
        self._tell("slot_allocate", slot, sequence=sequence, owner="snapshot", position=0)
        return kept

    def drop(self, snapshot: Snapshot) -> None:
        """Frees a snapshot's slot."""
        self.check_snapshot(snapshot)
        del self._snapshots[snapshot.slot]
        self._give_back((snapshot.slot,), sequence=-1, owner="snapshot")

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """Raises SlotError unless the snapshot still owns its slot."""
        if self._snapshots.get(snapshot.slot) != snapshot:
            raise SlotError(f"a snapshot of slot {snapshot.slot} that was dropped", fix="take a new snapshot")

    def restart(self, sequence: int) -> int:
        """Says that the sequence goes on from `row[0]` again, where the caller puts a state. Returns that slot."""
        known = self._settled(sequence)
        known.accepted = known.written = 1
        self._tell("slot_write", known.row[0], sequence=sequence, owner=known.owner, position=0)
        return known.row[0]

    # -- inside

    def _of(self, sequence: int) -> _Sequence:
        known = self._sequences.get(sequence)
        if known is None:
            raise SlotError(
                f"sequence {sequence} owns no slots of pool {self.name}",
                expected=f"a live sequence: {list(self._sequences) or 'there is none'}",
                fix="it was freed, or never allocated here",
            )
        return known

    def _settled(self, sequence: int) -> _Sequence:
        known = self._of(sequence)
        if known.in_flight:
            raise SlotError(f"sequence {sequence} is in a step", fix="end the step first")
        return known

    def _take(self, count: int, what: str) -> tuple[int, ...]:
        if len(self._free) < count:
            raise SlotError(
                f"{what} needs {count} slots, {len(self._free)} of {self.slots} are free",
                expected=f"live {len(self.live_slots)} + snapshot {len(self._snapshots)} + free to leave {count}",
                fix="free a sequence or drop a snapshot",
            )
        taken = tuple(self._free[:count])
        del self._free[:count]
        for slot in taken:
            self._generation[slot] += 1
        return taken

    def _give_back(self, slots: Sequence[int], **facts: Any) -> None:
        self._free = sorted([*self._free, *slots])  # the lowest first: reuse is soon, and seen
        for slot in slots:
            self._tell("slot_free", slot, **facts)

    def _tell(self, kind: EventKind, slot: int, **facts: Any) -> None:
        if self.sink is not discard:
            detail = {"slot": slot, "generation": self._generation[slot], **facts}
            place = self._place
            told = (kind, now_ns(), 0, place.stage, place.step, self.name, "", 0, "observed", detail, None, -1)
            self.sink(event_of(told))

    def _tell_step(self, sequence: int, entry: _Sequence) -> None:
        read = entry.accepted - 1
        self._tell("slot_read", entry.row[read], sequence=sequence, owner=entry.owner, position=read)
        for position, slot in enumerate(entry.row[: entry.written]):
            self._tell("slot_write", slot, sequence=sequence, owner=entry.owner, position=position)


class SlotPool:
    """States of several sequences in host memory: one array [S, NV, DV, DK] per linear layer, and their books.

    Args:
        slots: S.
        width: W = drafts + 1.
        heads, value_dim, key_dim: NV, DV, DK.
        layers: linear layers, each with a pool of its own under the same books.
        dtype: f16, bf16 or f32.
        poison: fill freed slots with NaN, so that whoever reads what he did not write is seen at once.
        name, sink: as in `SlotTable`.
    """

    def __init__(
        self,
        slots: int,
        width: int,
        heads: int,
        value_dim: int,
        key_dim: int,
        *,
        layers: int = 1,
        dtype: DTypeLike = np.float32,
        poison: bool = True,
        name: str = "state_pool",
        sink: EventSink = discard,
    ) -> None:
        self.table = SlotTable(slots, width, name=name, sink=sink)
        self.poison = poison
        self.states: list[Array] = [empty_states((slots, heads, value_dim, key_dim), dtype) for _ in range(layers)]
        for state in self.states:
            state.fill(np.nan if poison else 0)

    def allocate(self, owner: str = "", states: Sequence[Array] | None = None) -> int:
        """A new sequence, from `states` (one [NV, DV, DK] per layer, V-major) or from zero. Returns its id.

        Raises:
            SlotError: no row free.
            OpError: a state of another shape, or another number of layers.
        """
        self._check_states(states)
        sequence = self.table.allocate(owner)
        self._put(self.table.row(sequence)[0], states)
        return sequence

    def free(self, sequence: int) -> None:
        """Ends a sequence; its slots are poisoned, now or when the step under way has ended."""
        self._poison(self.table.free(sequence))

    def step(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        run: Callable[[int, Batch], None],
        accept: Callable[[Batch], Sequence[int]],
    ) -> Batch:
        """One step of some sequences: `run(layer, batch)` for each layer, then `accept(batch)` says how far each got.

        When either raises, every sequence stays at the token before the step.
        """
        batch = self.table.begin(sequences, lengths)
        try:
            for layer in range(len(self.states)):
                run(layer, batch)
            accepted = accept(batch)
        except BaseException:
            self._poison(self.table.abandon(batch))
            raise
        self._poison(self.table.end(batch, accepted))
        return batch

    def update(
        self, layer: int, batch: Batch, query: Array, key: Array, value: Array, beta: Array, **rest: Any
    ) -> Array:
        """`recurrent_gated_delta_rule` of one layer over the batch's slots. `rest`: g, gk, scale, out. Returns out."""
        return recurrent_gated_delta_rule(
            query,
            key,
            value,
            beta,
            self.states[layer],
            batch.lengths,
            batch.rows,
            num_accepted_tokens=batch.accepted,
            **rest,
        )

    def read(self, sequence: int, layer: int = 0) -> Array:
        """A copy [NV, DV, DK] of the state after the sequence's last accepted token."""
        return np.array(self.states[layer][self.table.read_slot(sequence)])

    def snapshot(self, sequence: int) -> Snapshot:
        """Keeps a copy of the sequence's present state in a slot of its own."""
        kept = self.table.snapshot(sequence)
        for state in self.states:
            state[kept.slot] = state[kept.source]
        return kept

    def restore(self, snapshot: Snapshot, sequence: int) -> None:
        """Puts a snapshot's state back as the present state of a sequence."""
        self.table.check_snapshot(snapshot)
        slot = self.table.restart(sequence)
        for state in self.states:
            state[slot] = state[snapshot.slot]

    def drop(self, snapshot: Snapshot) -> None:
        self.table.drop(snapshot)
        self._poison((snapshot.slot,))

    def _check_states(self, states: Sequence[Array] | None) -> None:
        if states is None:
            return
        shape = self.states[0].shape[1:]
        if len(states) != len(self.states):
            raise OpError(f"{len(states)} states for {len(self.states)} layers", expected="one for each linear layer")
        for layer, state in enumerate(states):
            if np.shape(state) != shape:
                swapped = np.shape(state) == (shape[0], shape[2], shape[1])
                raise OpError(
                    f"state of layer {layer} has shape {np.shape(state)}" + (": K-major" if swapped else ""),
                    expected=f"[NV, DV, DK] = {shape}",
                    fix="transpose the last two axes" if swapped else "",
                )

    def _put(self, slot: int, states: Sequence[Array] | None) -> None:
        for layer, pool in enumerate(self.states):
            pool[slot] = 0 if states is None else states[layer]

    def _poison(self, slots: Sequence[int]) -> None:
        if self.poison and slots:
            for state in self.states:
                state[list(slots)] = np.nan
