from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from qwen_npu.errors import UsageError
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.summary import (
    at,
    buffers,
    conservation,
    first_nonfinite,
    live_halves,
    peaks,
    replay,
    summary,
    traffic,
)
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.rgdr.pool import SlotTable
from tests.unit.ledger.runs import (
    CONV_BYTES,
    KV_TOKEN_BYTES,
    LOGITS_BYTES,
    PROMPT,
    RECURRENT_BYTES,
    Run,
    norms,
    peeks,
    recorded,
)

FIXED_BYTES = 2 * (CONV_BYTES + RECURRENT_BYTES + 16 * KV_TOKEN_BYTES) + LOGITS_BYTES


def red(ledger: Ledger) -> list[str]:
    return [check.name for check in conservation(Timeline(ledger)) if not check.ok]


@pytest.mark.parametrize("kv", ["fixed", "growing"])
@pytest.mark.parametrize("state", ["resident", "host"])
def test_a_summary_is_json_and_its_books_balance(kv: str, state: str) -> None:
    ledger = recorded(4, kv=kv, state=state, generations=2)
    facts = json.loads(json.dumps(summary(ledger)))
    assert facts["runs"] == 2
    assert facts["steps"] == {"prefill": 2, "decode": 8}
    assert facts["text"].startswith(" t7 t10 t11")
    assert [check["name"] for check in facts["checks"] if not check["ok"]] == []


def test_traffic_of_a_step_and_between() -> None:
    facts = traffic(Timeline(recorded(4)))
    assert facts["a_step"]["H2D"] == {"input": {"min": 168, "median": 168, "max": 168}}
    assert facts["a_step"]["D2H"] == {"logits": {"min": LOGITS_BYTES, "median": LOGITS_BYTES, "max": LOGITS_BYTES}}
    once = {"conv": CONV_BYTES, "recurrent": RECURRENT_BYTES, "kv": 16 * KV_TOKEN_BYTES}
    assert facts["between_steps"]["H2D"] == once
    assert facts["total"]["H2D"] == 4 * 168 + sum(once.values())


def test_peak_of_a_growing_cache_is_at_the_last_step() -> None:
    (peak,) = peaks(Timeline(recorded(3, kv="growing")))
    kv = (2 * (PROMPT + 3) - 1) * KV_TOKEN_BYTES  # the old one and the new one
    assert peak.nbytes == 2 * (CONV_BYTES + RECURRENT_BYTES) + LOGITS_BYTES + kv
    assert peak.at == "decode 2"
    assert peaks(Timeline(recorded(3)))[0].nbytes == FIXED_BYTES


def test_an_instant() -> None:
    ledger = recorded(3)
    state = at(ledger, tick=3)  # after decode 1
    assert state["at"] == "decode 1"
    assert state["live"] == {"conv": "conv.a", "recurrent": "recurrent.a", "kv": "kv.a"}
    assert state["bytes_alive"] == FIXED_BYTES
    assert {entry["id"]: entry["role"] for entry in state["buffers"]}["conv.b"] == "scratch"
    assert state["text"] == " t7 t10 t11"
    assert at(ledger, seq=0)["buffers"] == []
    last = ledger.events()[-1]
    assert at(ledger, t_ns=last.t_ns)["seq"] == last.seq
    json.dumps(state)


@pytest.mark.parametrize("instant", [{}, {"tick": 1, "seq": 1}, {"tick": 99}, {"seq": -1}, {"seq": 10**6}, {"t_ns": 0}])
def test_an_instant_outside_of_the_recording_is_refused(instant: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        at(recorded(1), **instant)


def test_live_halves_at_any_event() -> None:
    timeline = Timeline(recorded(3))
    turns = [turn.seq for turn in timeline.turns if turn.kind == "conv"]
    assert [live_halves(timeline, seq)["conv"] for seq in turns] == ["conv.a", "conv.b", "conv.a", "conv.b"]
    assert live_halves(timeline, turns[1] - 1)["conv"] == "conv.a"


def test_buffers_tell_their_line_and_last_writer() -> None:
    entries = {entry["id"]: entry for entry in buffers(Timeline(recorded(3)))}
    assert entries["conv.b"]["last_written"] == "predict of decode, decode 2, at runtime/stages.py:40"
    assert entries["conv.b"]["site"] == "runtime/states.py:77"
    assert entries["conv.b"]["half"] == "live"
    assert entries["conv.a"]["half"] == "scratch"
    assert not entries["conv.a"]["alive"]


def test_a_buffer_freed_twice_is_red() -> None:
    ledger = recorded(2)
    assert red(ledger) == []
    Run(ledger).emit("free", buffer="conv.a", nbytes=CONV_BYTES)
    assert red(ledger) == ["bytes alive = sum of buffers"]


def test_a_buffer_freed_with_another_size_is_red() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.allocate("x", "x", "other", (4,), "float32")
    run.emit("free", buffer="x", nbytes=12)
    assert red(ledger) == ["bytes alive = sum of buffers"]


@pytest.mark.parametrize(("up", "down", "allocated"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_step_that_tells_another_sum_than_its_copies_is_red(up: int, down: int, allocated: int) -> None:
    ledger = recorded(2)
    Run(ledger).step("decode", 2, 5, 10, up, down, allocated)
    assert red(ledger) == ["bytes of steps = copies and allocations"]


def test_a_copy_that_only_the_emulator_saw_is_red() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.emit("upload", buffer="ascend:0@0x10", nbytes=8, source="emulator", stage="decode", step=0)
    run.emit("upload", other="input.input_ids", nbytes=8, source="inferred", stage="decode", step=0)
    assert red(ledger) == []
    run.emit("download", buffer="ascend:0@0x10", nbytes=8, source="emulator", stage="decode", step=0)
    assert red(ledger) == ["copies seen = copies the emulator made"]


def test_a_buffer_where_the_emulator_holds_nothing_is_red() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.emit("stage_begin", stage="decode")
    block = {"id": "ascend:0@0x1000", "nbytes": 16, "address": 0x1000, "device": "ascend:0", "what": "tensor"}
    run.emit("allocate", buffer="ascend:0@0x1000", nbytes=16, source="emulator", detail=block)
    run.allocate("x", "x", "other", (4,), "float32")
    assert red(ledger) == []
    run.emit("free", buffer="ascend:0@0x1000", nbytes=16, source="emulator")
    assert red(ledger) == ["our buffers = blocks of the emulator"]


def test_slots_of_a_pool_balance_until_a_stranger_writes() -> None:
    ledger = recorded(1)
    ledger.set_meta("slots", 6)
    table = SlotTable(6, 2, sink=ledger)
    sequence = table.allocate()
    table.end(table.begin([sequence]), [2])
    checks = {check.name: check for check in conservation(Timeline(ledger))}
    assert checks["slots of state_pool"].ok
    assert checks["slots of state_pool"].detail == "4 free + 2 live + 0 snapshot = 6 slots"
    ledger(Event("slot_write", 1, buffer="state_pool", detail={"slot": 0, "sequence": 5}))
    assert red(ledger) == ["slots of state_pool"]
    assert at(ledger, seq=ledger.last_seq)["pools"]["state_pool"]["counts"]["live"] == 2


def test_replay_tells_text_tokens_and_times() -> None:
    facts = replay(recorded(2))
    assert facts["text"] == " t7 t10 t11"
    assert facts["tokens"] == [7, 10, 11]
    times = [step["at_ms"] for step in facts["steps"]]
    assert times == sorted(times)
    assert times[0] == pytest.approx(0.022)


def test_the_first_value_that_is_not_finite_is_named_by_layer_head_and_step() -> None:
    ledger = Ledger()
    counts = np.zeros((3, 4), np.int32)
    bad = counts.copy()
    bad[2, 1] = 5
    bad[2, 3] = 1
    peeks(ledger, iter([{"recurrent.nonfinite": counts}, {"recurrent.nonfinite": bad}, {"recurrent.nonfinite": bad}]))
    found = first_nonfinite(ledger)
    assert found is not None
    assert (found["name"], found["step"], found["layer"], found["head"]) == ("recurrent.nonfinite", 1, 2, 1)
    assert first_nonfinite(Ledger()) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_norms_that_are_not_finite_are_found_too(value: Any) -> None:
    ledger = Ledger()
    peeks(ledger, iter([{"recurrent.norm": norms(0)}, {"recurrent.norm": norms(1, 0, 3, value)}]))
    found = first_nonfinite(ledger)
    assert found is not None
    assert (found["step"], found["layer"], found["head"]) == (1, 0, 3)


def test_an_empty_ledger() -> None:
    facts = summary(Ledger())
    assert facts["runs"] == 0
    assert all(check["ok"] for check in facts["checks"])
    json.dumps(facts)
