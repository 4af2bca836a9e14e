from __future__ import annotations

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Timeline
from tests.unit.ledger.runs import Run, recorded


def test_ticks_are_stages_and_steps_in_order() -> None:
    timeline = Timeline(recorded(2, generations=2))
    once = ["prefill", "decode start", "decode 0", "decode 1", "decode end"]
    assert [tick.label for tick in timeline.ticks] == once * 2
    assert [tick.run for tick in timeline.ticks] == [0] * 5 + [1] * 5
    assert [tick.number for tick in timeline.ticks] == list(range(10))
    assert [tick.is_step for tick in timeline.ticks[:5]] == [False, False, True, True, False]


def test_an_event_belongs_to_the_tick_under_way() -> None:
    ledger = recorded(2)
    timeline = Timeline(ledger)
    for event in ledger.events():
        tick = timeline.ticks[timeline.tick_at(event.seq)]
        assert (tick.stage, tick.step) == (event.stage, event.step)


def test_events_of_no_stage_start_no_tick_of_their_own() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.emit("allocate", buffer="x", nbytes=4)
    run.generate(1)
    run.emit("download", buffer="conv.a", nbytes=4)
    timeline = Timeline(ledger)
    assert [tick.label for tick in timeline.ticks] == ["start", "prefill", "decode start", "decode 0", "decode end"]
    assert timeline.tick_at(ledger.last_seq) == 4
    assert timeline.moves[-1].tick == 4


def test_an_id_means_the_older_buffer_when_read_and_the_newer_when_written() -> None:
    timeline = Timeline(recorded(3, kv="growing"))
    use = next(use for use in timeline.uses if timeline.ticks[use.tick].label == "decode 1")
    read, written = timeline.life_at("kv", use.seq, "input"), timeline.life_at("kv", use.seq, "output")
    assert read is not None
    assert written is not None
    assert (read.buffer.generation, written.buffer.generation) == (1, 2)
    assert timeline.life_at("kv", timeline.ledger.last_seq) is None
    assert timeline.life_at("nothing", use.seq) is None


def test_kinds_of_buffers_that_nobody_allocates() -> None:
    timeline = Timeline(recorded(1))
    kinds = {
        "host.past_kv_cache": "kv",
        "host.present_recurrent_states": "recurrent",
        "host.conv": "conv",
        "input.input_ids": "input",
        "host.logits": "logits",
        "kv.a": "kv",
    }
    assert {id_: timeline.kind_of(id_) for id_ in kinds} == kinds


def test_the_live_half_turns_with_every_step() -> None:
    timeline = Timeline(recorded(3))
    assert [turn.live for turn in timeline.turns if turn.kind == "kv"] == ["kv.a", "kv.b", "kv.a", "kv.b"]


def test_nothing() -> None:
    timeline = Timeline(Ledger())
    assert timeline.ticks == timeline.moves == timeline.uses == timeline.turns == timeline.lives == []


def test_a_model_built_in_the_middle_of_a_step_is_part_of_it() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.emit("draft", stage="verify", step=7)
    run.emit("stage_begin", stage="verify", step=-1)
    run.emit("upload", other="input.x", nbytes=3, stage="verify", step=7)
    run.emit("upload", other="input.x", nbytes=4, stage="verify", step=8)
    timeline = Timeline(ledger)
    assert [tick.label for tick in timeline.ticks] == ["verify 7", "verify 8"]
    assert [move.tick for move in timeline.moves] == [0, 1]


def test_a_sequence_that_joins_a_group_begins_no_new_generation() -> None:
    ledger = Ledger()
    run = Run(ledger)
    for stage, step in (("prefill", -1), ("admit", -1), ("verify", 0), ("prefill", -1), ("admit", -1), ("verify", 1)):
        run.emit("predict", stage=stage, step=step)
    assert {tick.run for tick in Timeline(ledger).ticks} == {0}
    for stage, step in (("prefill", -1), ("verify", 0)):
        run.emit("predict", stage=stage, step=step)
    assert [tick.run for tick in Timeline(ledger).ticks] == [0] * 6 + [1] * 2
