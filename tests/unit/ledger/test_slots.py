from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_npu.ledger.events import Event
from qwen_npu.ledger.slots import counts, history, pools
from qwen_npu.ledger.store import Ledger
from qwen_npu.rgdr.pool import SlotTable


def pool(slots: int = 8, width: int = 3) -> tuple[Ledger, SlotTable]:
    ledger = Ledger()
    ledger.set_meta("slots", slots)
    return ledger, SlotTable(slots, width, sink=ledger)


def test_a_step_of_a_sequence() -> None:
    ledger, table = pool()
    sequence = table.allocate("a")
    table.end(table.begin([sequence]), [2])
    books = history(ledger)
    assert pools(ledger) == ["state_pool"]
    before, after = books.rounds
    assert [slot.use for slot in before.slots] == ["live"] * 3 + ["free"] * 5
    assert [slot.verdict for slot in after.slots[:3]] == ["accepted", "current", "rejected"]
    assert [slot.position for slot in after.slots[:3]] == [0, 1, 2]
    assert after.slots[0].read == after.slots[0].written == 1
    assert after.slots[1].read == -1
    assert {slot.owner for slot in after.slots[:3]} == {"a"}
    (accept,) = books.accepts
    assert (accept.drafted, accept.accepted, accept.rejected, accept.slot, accept.rate) == (2, 2, 1, 1, 0.5)
    assert books.faults == []


def test_acceptance_so_far_counts_drafts_of_one_sequence() -> None:
    ledger, table = pool()
    one, other = table.allocate(), table.allocate()
    table.end(table.begin([one, other]), [3, 1])
    table.end(table.begin([one, other]), [1, 1])
    rates = [(accept.sequence, accept.round, accept.rate) for accept in history(ledger).accepts]
    assert rates == [(0, 1, 1.0), (1, 1, 0.0), (0, 2, 0.5), (1, 2, 0.0)]


def test_a_shorter_step_leaves_no_verdict_behind_it() -> None:
    ledger, table = pool()
    sequence = table.allocate()
    table.end(table.begin([sequence]), [3])
    table.end(table.begin([sequence], [1]), [1])
    assert [slot.verdict for slot in history(ledger).rounds[-1].slots[:3]] == ["current", "", ""]


def test_snapshots_and_poison() -> None:
    ledger, table = pool()
    ledger.set_meta("poison", True)
    sequence = table.allocate()
    kept = table.snapshot(sequence)
    table.free(sequence)
    slots = history(ledger).rounds[-1].slots
    assert [slot.use for slot in slots] == ["poisoned"] * 3 + ["snapshot"] + ["free"] * 4
    assert counts(slots) == {"free": 7, "live": 0, "snapshot": 1, "poisoned": 3, "total": 8}
    table.drop(kept)
    assert history(ledger).faults == []
    assert history(ledger).rounds[-1].slots[3].generation == 1


def test_an_earlier_moment() -> None:
    ledger, table = pool()
    sequence = table.allocate()
    moment = ledger.last_seq
    table.end(table.begin([sequence]), [1])
    table.free(sequence)
    assert counts(history(ledger, until=moment).rounds[-1].slots)["live"] == 3
    assert counts(history(ledger).rounds[-1].slots)["live"] == 0


@pytest.mark.parametrize(
    ("kind", "detail", "fault"),
    [
        ("slot_allocate", {"slot": 0, "generation": 2, "sequence": 9, "owner": "thief"}, "but 'a' owns it"),
        ("slot_allocate", {"slot": 5, "generation": 0, "sequence": 9, "owner": "b"}, "generation 0 to 0"),
        ("slot_free", {"slot": 6, "generation": 0, "sequence": 0}, "slot 6 is freed, but it is free"),
        ("slot_write", {"slot": 0, "sequence": 9}, "sequence 9 uses slot 0, which belongs to 'a'"),
        ("slot_read", {"slot": 7, "sequence": 0}, "belongs to nobody"),
        ("slot_write", {"slot": 8, "sequence": 0}, "slot 8 of a pool of 8"),
        ("accept", {"slot": 0, "sequence": 0, "drafted": 2, "accepted": 4}, "accepted 4 of 3 tokens"),
    ],
)
def test_what_contradicts_the_books_is_a_fault(kind: Any, detail: dict[str, Any], fault: str) -> None:
    ledger, table = pool()
    table.allocate("a")
    ledger(Event(kind, 1, buffer="state_pool", detail=detail))
    assert any(fault in text for text in history(ledger).faults)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_books_kept_from_events_are_the_pools_own(data: st.DataObject) -> None:
    ledger, table = pool(slots=11, width=2)
    snapshots = []
    for _ in range(data.draw(st.integers(1, 25))):
        live = list(table.sequences)
        act = data.draw(st.sampled_from(["allocate", "step", "free", "snapshot", "drop", "restart"]))
        if act == "allocate" and len(table.free_slots) >= 2:
            table.allocate()
        elif act == "step" and live:
            chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
            lengths = [data.draw(st.integers(1, 2)) for _ in chosen]
            table.end(table.begin(chosen, lengths), [data.draw(st.integers(1, length)) for length in lengths])
        elif act == "free" and live:
            table.free(data.draw(st.sampled_from(live)))
        elif act == "snapshot" and live and table.free_slots:
            snapshots.append(table.snapshot(live[0]))
        elif act == "drop" and snapshots:
            table.drop(snapshots.pop())
        elif act == "restart" and live:
            table.restart(live[-1])
    books = history(ledger)
    slots = books.rounds[-1].slots
    assert books.faults == []
    assert tuple(slot.slot for slot in slots if slot.use == "free") == table.free_slots
    assert {slot.slot for slot in slots if slot.use == "live"} == set(table.live_slots)
    assert {slot.slot for slot in slots if slot.use == "snapshot"} == set(table.snapshot_slots)
    assert [slot.generation for slot in slots] == [table.generation(slot) for slot in range(11)]
    assert counts(slots)["total"] == 11


def test_the_size_comes_from_the_pools_buffer_where_meta_lacks_it() -> None:
    ledger = Ledger()
    detail = {"name": "state_pool_0", "kind": "pool", "shape": (6, 2, 4, 4), "nbytes": 768, "device": "ascend:0"}
    ledger(Event("allocate", 1, buffer="state_pool_0", nbytes=768, detail=detail))
    SlotTable(6, 2, sink=ledger).allocate()
    assert history(ledger).size == 6


def test_numpy_numbers_in_events() -> None:
    ledger = Ledger()
    detail = {"slot": np.int32(0), "generation": np.int64(1), "sequence": np.int32(0), "owner": "a", "position": 0}
    ledger(Event("slot_allocate", 1, buffer="p", detail=detail))
    assert history(ledger).rounds[-1].slots[0].owner == "a"


def test_a_recording_that_begins_in_the_middle_learns_the_owners() -> None:
    table = SlotTable(6, 2)
    sequence = table.allocate("early")
    table.end(table.begin([sequence]), [2])
    ledger = Ledger()
    ledger.set_meta("slots", 6)
    table.sink = ledger
    table.end(table.begin([sequence]), [1])
    books = history(ledger)
    assert books.faults == []
    assert [slot.owner for slot in books.rounds[-1].slots[:2]] == ["early", "early"]
    assert [slot.verdict for slot in books.rounds[-1].slots[:2]] == ["current", "rejected"]


def test_the_runtimes_count_of_drafts_goes_before_the_pools_which_holds_padding() -> None:
    ledger, table = pool()
    sequence = table.allocate()
    batch = table.begin([sequence])
    ledger(Event("draft", 1, stage="verify", detail={"sequence": sequence, "tokens": [41]}))
    ledger(Event("verify", 2, stage="verify", detail={"sequence": sequence, "drafted": 1, "accepted": 1}))
    table.end(batch, [2])
    (accept,) = history(ledger).accepts
    assert (accept.drafted, accept.accepted, accept.rejected, accept.tokens) == (1, 2, 0, [41])


def test_poison_that_is_told() -> None:
    ledger, table = pool()
    table.free(table.allocate())
    ledger(Event("slot_write", 1, buffer="state_pool", detail={"slot": 1, "generation": 1, "poison": True}))
    slots = history(ledger).rounds[-1].slots
    assert [slot.use for slot in slots[:3]] == ["free", "poisoned", "free"]
    table.allocate()
    ledger(Event("slot_write", 1, buffer="state_pool", detail={"slot": 1, "generation": 2, "poison": True}))
    assert "slot 1 is filled with NaN, but" in history(ledger).faults[0]
