"""Slots: who owns them, what they hold, and that nobody else's are ever read or written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen_npu.errors import OpError, SlotError
from qwen_npu.ledger.events import Event
from qwen_npu.rgdr import Batch, SlotPool, SlotTable, Snapshot
from tests.unit.rgdr.rgdr_cases import make_case

NV, DV, DK = 2, 6, 4


def pool_of(slots: int = 8, width: int = 2, **options: object) -> SlotPool:
    return SlotPool(slots, width, NV, DV, DK, **options)  # type: ignore[arg-type]


def tokens(seed: int, lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    case = make_case(seed, lengths, nk=1, group=NV, dk=DK, dv=DV)
    return {"query": case.query, "key": case.key, "value": case.value, "beta": case.beta, "g": case.g}


def step(pool: SlotPool, sequences: list[int], accepted: list[int], seed: int, lengths: tuple[int, ...]) -> np.ndarray:
    outs = []
    pool.step(
        sequences,
        lengths,
        lambda layer, batch: outs.append(pool.update(layer, batch, **tokens(seed + 1000 * layer, lengths))),
        lambda batch: accepted,
    )
    return outs[0]


def conserved(table: SlotTable) -> None:
    free, live, kept = table.free_slots, table.live_slots, table.snapshot_slots
    assert len(free) + len(live) + len(kept) == table.slots
    assert sorted((*free, *live, *kept)) == list(range(table.slots))


class Life(RuleBasedStateMachine):
    """Any order of operations, against a model in which every sequence has a pool of its own."""

    @initialize(width=st.integers(1, 3), slots=st.integers(3, 9))
    def start(self, width: int, slots: int) -> None:
        self.events: list[Event] = []
        self.pool = pool_of(slots, width, sink=self.events.append)
        self.alone: dict[int, np.ndarray] = {}  # the state of each sequence, computed on its own
        self.kept: dict[int, tuple[Snapshot, np.ndarray]] = {}
        self.generations = [0] * slots
        self.seed = 0

    def check_generations(self) -> None:
        now = [self.pool.table.generation(slot) for slot in range(self.pool.table.slots)]
        assert all(later >= earlier for later, earlier in zip(now, self.generations, strict=True))
        self.generations = now

    @rule()
    def allocate(self) -> None:
        table = self.pool.table
        free = len(table.free_slots)
        self.seed += 1
        state = np.random.default_rng(self.seed).standard_normal((NV, DV, DK)).astype(np.float32)
        if free < table.width:
            with pytest.raises(SlotError, match="slots"):
                self.pool.allocate("one too many", [state])
            assert len(table.free_slots) == free
            return
        sequence = self.pool.allocate(f"request {self.seed}", [state])
        row = table.row(sequence)
        assert len(set(row)) == table.width
        assert all(table.owner(slot) == f"request {self.seed}" for slot in row)
        self.alone[sequence] = state

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.alone)))
        row = self.pool.table.row(sequence)
        before = [self.pool.table.generation(slot) for slot in row]
        self.pool.free(sequence)
        del self.alone[sequence]
        assert np.isnan(self.pool.states[0][list(row)]).all()
        assert [self.pool.table.generation(slot) for slot in row] == before
        with pytest.raises(SlotError, match=f"sequence {sequence} owns no slots"):
            self.pool.table.row(sequence)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        width = self.pool.table.width
        some = data.draw(st.lists(st.sampled_from(sorted(self.alone)), min_size=1, unique=True))
        lengths = tuple(data.draw(st.integers(1, width)) for _ in some)
        depths = [data.draw(st.integers(0, n)) for n in lengths]
        self.seed += 1
        outside = set(range(self.pool.table.slots)) - {s for i in some for s in self.pool.table.row(i)}
        before = self.pool.states[0][sorted(outside)].tobytes()
        out = step(self.pool, some, depths, self.seed, lengths)
        assert self.pool.states[0][sorted(outside)].tobytes() == before
        assert np.isfinite(out).all()
        # The model: each sequence alone, only its accepted tokens.
        arrays = tokens(self.seed, lengths)
        first = 0
        for sequence, n, depth in zip(some, lengths, depths, strict=True):
            taken = max(depth, 1)
            case = make_case(0, (taken,), nk=1, group=NV, dk=DK, dv=DV).with_(
                state=self.alone[sequence][None].copy(),
                indices=np.zeros(taken, np.int32),
                **{name: array[first : first + taken] for name, array in arrays.items()},
            )
            case = case.with_(scale=1.0)
            alone_out, alone = case.run()
            assert np.array_equal(out[first : first + taken], alone_out)
            self.alone[sequence] = alone[0]
            first += n

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.alone)))
        if not self.pool.table.free_slots:
            with pytest.raises(SlotError, match="a snapshot needs 1 slots"):
                self.pool.snapshot(sequence)
            return
        kept = self.pool.snapshot(sequence)
        self.kept[kept.slot] = (kept, self.alone[sequence])

    @precondition(lambda self: self.kept and self.alone)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        kept, state = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        sequence = data.draw(st.sampled_from(sorted(self.alone)))
        self.pool.restore(kept, sequence)
        self.alone[sequence] = state

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        kept, _ = self.kept.pop(data.draw(st.sampled_from(sorted(self.kept))))
        self.pool.drop(kept)
        with pytest.raises(SlotError, match="was dropped"):
            self.pool.drop(kept)

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        conserved(self.pool.table)
        self.check_generations()
        assert set(self.pool.table.sequences) == set(self.alone)
        for sequence, state in self.alone.items():
            assert np.array_equal(self.pool.read(sequence), state)
        for kept, state in self.kept.values():
            assert np.array_equal(self.pool.states[0][kept.slot], state)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


def test_a_poisoned_slot_gives_what_a_zeroed_one_gives() -> None:
    """Report 3: poison, then a new sequence with a prompt of one token."""
    poisoned, zeroed = pool_of(2, 2), pool_of(2, 2, poison=False)
    old = poisoned.allocate("old")
    step(poisoned, [old], [2], 1, (2,))
    poisoned.free(old)
    assert np.isnan(poisoned.states[0]).all()
    for pool in (poisoned, zeroed):
        pool.allocate("new")
    answers = [step(pool, [pool.table.sequences[0]], [1], 2, (1,)) for pool in (poisoned, zeroed)]
    assert np.array_equal(*answers)
    assert np.array_equal(poisoned.read(1), zeroed.read(0))


def test_twenty_nine_requests_on_one_slot() -> None:
    """Report 6: nothing of an earlier request reaches a later one, and the slot's generation counts its owners."""
    pool = pool_of(1, 1)
    for request in range(29):
        sequence = pool.allocate(f"request {request}")
        out = step(pool, [sequence], [1], request, (1,))
        fresh = pool_of(1, 1)
        assert np.array_equal(out, step(fresh, [fresh.allocate()], [1], request, (1,)))
        assert pool.table.generation(0) == request + 1
        pool.free(sequence)


def test_zero_drafts_after_an_accepted_draft() -> None:
    """Report 1: the state comes from the accepted slot, not from the first."""
    pool = pool_of(4, 3)
    sequence = pool.allocate()
    step(pool, [sequence], [3], 5, (3,))
    expected = pool.states[0][pool.table.row(sequence)[2]].copy()
    assert np.array_equal(pool.read(sequence), expected)
    step(pool, [sequence], [1], 6, (1,))
    assert pool.table.read_slot(sequence) == pool.table.row(sequence)[0]
    alone = make_case(0, (1,), nk=1, group=NV, dk=DK, dv=DV).with_(
        state=expected[None], indices=np.array([0]), scale=1.0, **tokens(6, (1,))
    )
    assert np.array_equal(pool.read(sequence), alone.run()[1][0])


def test_a_sequence_freed_while_it_is_verified_keeps_its_slots_until_the_step_ends() -> None:
    """Report 7: no write may reach a slot that someone else owns by then."""
    pool = pool_of(4, 2)
    leaving, staying = pool.allocate("leaving"), pool.allocate("staying")
    row = pool.table.row(leaving)

    def run(layer: int, batch: Batch) -> None:
        pool.free(leaving)
        with pytest.raises(SlotError, match="needs 2 slots, 0 of 4 are free"):
            pool.allocate("too early")
        pool.update(layer, batch, **tokens(1, (2, 2)))
        assert pool.table.owner(row[0]) == "leaving"

    pool.step([leaving, staying], [2, 2], run, lambda batch: [2, 2])
    assert pool.table.sequences == (staying,)
    assert pool.table.accepted(staying) == 2
    assert np.isnan(pool.states[0][list(row)]).all()
    conserved(pool.table)
    new = pool.allocate("new")
    assert pool.table.row(new) == row
    assert pool.table.generation(row[0]) == 2


def test_a_step_that_fails_leaves_every_sequence_where_it_was() -> None:
    pool = pool_of(4, 2)
    sequence = pool.allocate()
    step(pool, [sequence], [2], 1, (2,))
    before = pool.states[0].tobytes()
    with pytest.raises(OpError, match="beta has shape"):
        pool.step(
            [sequence],
            [1],
            lambda layer, batch: pool.update(layer, batch, **{**tokens(2, (1,)), "beta": np.zeros((2, 2), np.float32)}),
            lambda batch: [1],
        )
    assert pool.table.accepted(sequence) == 2
    assert pool.states[0].tobytes() == before
    step(pool, [sequence], [1], 3, (1,))


def test_wrong_uses_of_the_books() -> None:
    table = SlotTable(4, 2)
    one = table.allocate("one")
    for wrong, error, message in (
        (lambda: table.begin([one, one]), SlotError, "each once in a step"),
        (lambda: table.begin([one], [3]), OpError, r"sequence 0: 3 tokens.*1\.\.2"),
        (lambda: table.begin([one], [0]), OpError, r"sequence 0: 0 tokens.*1\.\.2"),
        (lambda: table.begin([one], [1, 1]), OpError, "2 lengths for 1 sequences"),
        (lambda: table.begin([7]), SlotError, "sequence 7 owns no slots"),
        (lambda: table.free(7), SlotError, r"sequence 7 owns no slots of pool state_pool.*\[0\]"),
        (lambda: SlotTable(2, 3), SlotError, "a pool of 2 slots with rows of 3"),
        (lambda: SlotTable(2, 0), SlotError, "rows of 0"),
    ):
        with pytest.raises(error, match=message):
            wrong()
        conserved(table)
    batch = table.begin([one], [2])
    for wrong, error, message in (
        (lambda: table.begin([one]), SlotError, "already in a step"),
        (lambda: table.snapshot(one), SlotError, "is in a step"),
        (lambda: table.restart(one), SlotError, "is in a step"),
        (lambda: table.end(batch, [3]), OpError, r"sequence 0: accepted 3 of 2 tokens"),
        (lambda: table.end(batch, []), OpError, "0 accepted for 1 sequences"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    table.end(batch, [1])
    with pytest.raises(SlotError, match="is in no step"):
        table.end(batch, [1])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([np.zeros((NV, DK, DV), np.float32)], "K-major"),
        ([np.zeros((NV, DV, DK), np.float32)] * 2, "2 states for 1 layers"),
        ([np.zeros((NV, DV), np.float32)], "has shape"),
    ],
)
def test_a_state_that_does_not_fit_takes_no_slot(states: list[np.ndarray], message: str) -> None:
    pool = pool_of(2, 2)
    with pytest.raises(OpError, match=message):
        pool.allocate("x", states)
    assert pool.table.sequences == ()
    assert np.isnan(pool.states[0]).all()


def test_layers_keep_their_own_states() -> None:
    pool = pool_of(4, 2, layers=3, dtype=np.float16)
    start = [np.full((NV, DV, DK), layer, np.float16) for layer in range(3)]
    sequence = pool.allocate("x", start)
    assert [pool.read(sequence, layer)[0, 0, 0] for layer in range(3)] == [0, 1, 2]
    kept = pool.snapshot(sequence)
    step(pool, [sequence], [2], 4, (2,))
    assert not np.array_equal(pool.read(sequence, 2), start[2])
    pool.restore(kept, sequence)
    assert all(np.array_equal(pool.read(sequence, layer), start[layer]) for layer in range(3))


def test_events_tell_what_happened_to_which_slot() -> None:
    events: list[Event] = []
    pool = pool_of(3, 2, sink=events.append, name="pool.0")
    sequence = pool.allocate("request 1")
    step(pool, [sequence], [2], 1, (2,))
    pool.snapshot(sequence)
    pool.free(sequence)
    told = [(event.kind, event.detail["slot"]) for event in events if event.detail is not None]
    assert told == [
        ("slot_allocate", 0),
        ("slot_allocate", 1),
        ("slot_read", 0),
        ("slot_write", 0),
        ("slot_write", 1),
        ("accept", 1),
        ("slot_allocate", 2),
        ("slot_free", 0),
        ("slot_free", 1),
    ]
    assert {event.buffer for event in events} == {"pool.0"}
    assert all(event.detail is not None and event.detail["generation"] == 1 for event in events)
    accept = next(event for event in events if event.kind == "accept")
    assert accept.detail is not None
    assert (accept.detail["owner"], accept.detail["accepted"], accept.detail["drafted"]) == ("request 1", 2, 1)
    assert [event.t_ns for event in events] == sorted(event.t_ns for event in events)
