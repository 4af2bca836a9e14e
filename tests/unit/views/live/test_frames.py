"""The frames of the live views against the readers of whole ledgers, and the cells, words and filters made of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from qwen_npu import views
from qwen_npu.ledger import store
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.slots import history
from qwen_npu.ledger.store import Ledger, open_ledger
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.rgdr.pool import SlotTable
from qwen_npu.views.live import lanes, pool
from qwen_npu.views.live.frames import FREED, LIVE, PEEKED, READ, TWO, UPLOADED, WRITTEN, Frames, balance
from qwen_npu.views.live.grid import CROSSED, EMPTY, FULL, HALF
from qwen_npu.views.live.lanes import Filter
from tests.unit.ledger.runs import CONV_BYTES, KV_TOKEN_BYTES, LOGITS_BYTES, PROMPT, Run, recorded


def followed(ledger: Ledger) -> Frames:
    frames = Frames(ledger)
    frames.update()
    return frames


def tick(frames: Frames, label: str, run: int = 0) -> int:
    return next(one.number for one in frames.ticks if one.label == label and one.run == run)


@pytest.mark.parametrize("kv", ["fixed", "growing"])
@pytest.mark.parametrize("state", ["resident", "host"])
@pytest.mark.parametrize("generations", [1, 3])
def test_frames_say_the_same_as_the_residency_table(kv: str, state: str, generations: int) -> None:
    ledger = recorded(5, kv=kv, state=state, generations=generations)
    frames = followed(ledger)
    assert frames.ticks == Timeline(ledger).ticks
    table = views.residency_table(ledger)
    words: dict[tuple[str, int], set[str]] = {}
    for row in table:
        words.setdefault((row["buffer"], row["tick"]), set()).update(row["role"].split(" and "))
    for (id_, number), roles in words.items():
        row = frames.row(id_)
        assert row is not None, id_
        code = int(frames.codes[row.number, number])
        found = {name for name, bit in (("read", READ), ("written", WRITTEN), ("uploaded", UPLOADED)) if code & bit}
        assert found == roles - {"idle"}, (id_, number)
    for row in table:
        if row["after"] and not (kv == "growing" and row["kind"] == "kv"):
            at = frames.row(row["buffer"])
            assert at is not None
            assert bool(frames.codes[at.number, row["tick"]] & LIVE) == (row["after"] == "live")
    shown = {(row.id, int(i)) for row in frames.rows for i in np.flatnonzero(frames.codes[row.number])}
    assert {spot for spot in shown if spot[0] != "inside predict"} == set(words)


def test_following_in_pieces_gives_what_reading_at_once_gives() -> None:
    whole = recorded(6, kv="growing", generations=2)
    events = whole.events()
    for seed in range(5):
        ledger = Ledger()
        for key, value in whole.meta.items():
            if key not in ("schema", "started", "started_ns"):
                ledger.set_meta(key, value)
        frames, chance = Frames(ledger), random.Random(seed)
        for event in events:
            ledger(event)
            if chance.random() < 0.1:
                frames.update()
        frames.update()
        once = followed(whole)
        assert frames.ticks == once.ticks
        assert frames.figures == once.figures
        assert frames.copies == once.copies
        for name in ("codes", "nbytes", "generation", "wrote"):
            np.testing.assert_array_equal(getattr(frames, name), getattr(once, name))
        assert not frames.update()


def test_followed_in_memory_it_is_what_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BACKLOG_EVENTS", 40)  # what is older is read from the file
    events: list[Event] = []
    Run(events.append, kv="growing").generate(30)
    with Ledger(tmp_path / "run.ledger") as ledger:
        frames, chance = Frames(ledger), random.Random(7)
        for number, event in enumerate(events):
            ledger(event)
            if chance.random() < 0.03:
                ledger.flush()
            if chance.random() < 0.05:
                in_memory = ledger.recent(frames.last_seq)
                told = events[frames.last_seq + 1 : number + 1]
                assert in_memory is None or [event[:10] for event in in_memory] == [event[:10] for event in told]
                frames.update()
                assert frames.last_seq == number
        frames.update()
    once = followed(open_ledger(tmp_path / "run.ledger"))
    assert (frames.ticks, frames.figures, frames.copies) == (once.ticks, once.figures, once.copies)
    born = [[(row.id, row.buffer and row.buffer._replace(freed=None)) for row in one.rows] for one in (frames, once)]
    assert born[0] == born[1]
    for name in ("codes", "nbytes", "generation", "wrote"):
        np.testing.assert_array_equal(getattr(frames, name), getattr(once, name))


def test_figures_of_a_step() -> None:
    frames = followed(recorded(3))
    figures = frames.figures[tick(frames, "decode 2")]
    assert (figures.token, figures.text, figures.used_tokens) == (12, " t12", PROMPT + 3)
    assert (figures.up_bytes, figures.down_bytes) == (8 + 128 + 32, LOGITS_BYTES)
    assert figures.kv_bytes == 16 * KV_TOKEN_BYTES
    assert frames.text(tick(frames, "decode 1")) == " t7 t10 t11"


def test_text_and_halves_belong_to_their_generation() -> None:
    frames = followed(recorded(2, generations=2))
    second = tick(frames, "decode 0", run=1)
    assert frames.text(second) == " t7 t10"
    assert frames.live_at(tick(frames, "decode 0"))["conv"] == "conv.b"
    assert frames.live_at(tick(frames, "decode 1"))["conv"] == "conv.a"


def test_a_growing_buffer_has_two_generations_within_a_step() -> None:
    frames = followed(recorded(4, kv="growing"))
    row = frames.row("kv")
    assert row is not None
    number = tick(frames, "decode 2")
    assert frames.codes[row.number, number] & (TWO | FREED) == TWO | FREED
    assert frames.generation[row.number, number] == 3
    assert frames.nbytes[row.number, number] == (PROMPT + 3) * KV_TOKEN_BYTES
    told = lanes.facts(frames, "kv", number)
    assert told["tensor"] == "present_kv_cache: float16[2, 1, 2, 8, 8]"
    assert told["generation"] == "3"
    assert lanes.facts(frames, "kv", tick(frames, "decode 0"))["tensor"] == "present_kv_cache: float16[2, 1, 2, 6, 8]"


def test_the_hover_tells_everything_known() -> None:
    frames = followed(recorded(4))
    told = lanes.facts(frames, "conv.a", tick(frames, "decode 2"))
    assert told["role"] == "read, scratch from here on"
    assert told["bytes"] == f"{CONV_BYTES} B ({CONV_BYTES} B)"
    assert told["device"] == "ascend:0"
    assert told["allocated at"] == "runtime/states.py:77"
    assert told["last written"] == "by predict of decode at decode 1, runtime/stages.py:40"
    assert told["source"] == "observed"
    start = lanes.facts(frames, "conv.a", tick(frames, "decode start"))
    assert start["last written"] == "by the upload at decode start, runtime/states.py:77"
    assert lanes.facts(frames, "conv.b", tick(frames, "decode start"))["last written"] == "by nobody yet"
    assert lanes.facts(frames, "nothing", 0) == {}
    assert "not there" in lanes.tip(frames, "conv.a", 0)


def test_a_peek_is_no_part_of_the_step() -> None:
    ledger = recorded(2)
    where = {"stage": "decode", "step": 2}
    ledger(Event("predict", 9, detail={"graph": "peek_fixed", "inputs": ["conv.a"], "outputs": []}, **where))
    ledger(Event("peek", 9, arrays={"recurrent.norm": np.ones((3, 4), np.float32)}, **where))
    frames = followed(ledger)
    row = frames.row("conv.a")
    assert row is not None
    assert row.alive == []  # the run had ended: the peek reads a host array of that name
    assert frames.peek_events == 1
    live = Ledger()
    run = Run(live)
    run.allocate("conv.a", "past_conv_states", "conv", (3,), "float16", stage="decode", step=0)
    run.emit("predict", detail={"graph": "peek_fixed", "inputs": ["conv.a"], "outputs": []}, stage="decode", step=0)
    code = int(followed(live).codes[0, 0])
    assert code & PEEKED
    assert not code & READ


def test_the_first_value_that_is_not_finite_is_named_once() -> None:
    ledger = recorded(5)
    for step in range(5):
        counts = np.zeros((3, 4), np.float32)
        if step >= 2:
            counts[1, 3] = 7
        arrays = {"recurrent.norm": np.ones((3, 4), np.float32), "recurrent.nonfinite": counts}
        ledger(Event("peek", step, stage="decode", step=step, arrays=arrays))
    whole = followed(ledger)
    told = [(whole.ticks[at].label, text) for at, text in whole.hazards]
    assert told == [("decode 2", "recurrent: the first value that is not finite, layer 1, head 3")]


# books


def test_books_balance_in_a_run_and_not_when_an_event_is_lost() -> None:
    whole = recorded(4, kv="growing", generations=2)
    assert balance(followed(whole)) == []
    events = whole.events()
    frees = [i for i, event in enumerate(events) if event.kind == "free"]
    for change in ("twice", "size"):
        ledger = Ledger()
        for i, event in enumerate(events):
            if i == frees[3] and change == "size":
                event = event._replace(nbytes=event.nbytes - 1)
            ledger(event)
            if i == frees[-1] and change == "twice":
                ledger(event)
        faults = balance(followed(ledger))
        assert faults, change
        assert "frees" in faults[0]


# cells


def test_cells_arrows_and_words_of_the_lanes() -> None:
    frames = followed(recorded(4))
    cursor = tick(frames, "decode 1")
    ticks = lanes.shown_ticks(frames, cursor, 40, Filter())
    picture = lanes.lanes(frames, ticks, cursor, Filter(), picked="kv.b")
    ids = [row["id"] for row in picture.rows]
    bus = ids.index("")
    assert picture.rows[bus]["bus"]
    assert set(ids[:bus]) >= {"conv.a", "conv.b", "recurrent.a", "kv.a", "logits"}
    assert all(row["band"] for row in picture.rows[bus + 1 :])
    column = cursor - picture.first
    assert picture.cells[ids.index("kv.b"), column].tolist()[1:] == [FULL, 0, lanes.GLYPHS.index("R")]
    assert picture.cells[ids.index("kv.a"), column].tolist()[1:] == [HALF, 0, lanes.GLYPHS.index("W")]
    assert picture.cells[ids.index("conv.a"), 0, 1] == EMPTY
    of_step = picture.arrows[picture.arrows[:, 0] == column]
    assert sorted(of_step[:, 3].tolist()) == [0, 1, 1, 1]
    assert all(start > bus > end for _, start, end, up in of_step.tolist() if up)
    assert all(start < bus < end for _, start, end, up in of_step.tolist() if not up)
    assert picture.side[ids.index("kv.b")].endswith("read, scratch from here on")
    assert "▲ 168 B up, ▼ 128 B down" in picture.line
    assert "kv.b: " in picture.line


def test_filters_hide_rows_and_ticks() -> None:
    frames = followed(recorded(6))
    device, _ = lanes.shown_rows(frames, Filter(search="RECURRENT"))
    assert [row.id for row in device] == ["recurrent.a", "recurrent.b"]
    assert [row.id for row in lanes.shown_rows(frames, Filter(search="past_kv"))[0]] == ["kv.a", "kv.b"]
    assert {row.kind for row in lanes.shown_rows(frames, Filter(kind="conv"))[0]} == {"conv"}
    linear = {row.id for row in lanes.shown_rows(frames, Filter(layer=0))[0]}
    full = {row.id for row in lanes.shown_rows(frames, Filter(layer=3))[0]}
    assert "kv.a" not in linear
    assert "conv.a" in linear
    assert "kv.a" in full
    assert "conv.a" not in full
    decode = lanes.shown_ticks(frames, 4, 40, Filter(stage="decode"))
    assert {frames.ticks[number].stage for number in decode} == {"decode"}


def test_the_window_holds_the_cursor_and_stays_while_it_can() -> None:
    frames = followed(recorded(100))
    for cursor in (0, 3, 50, len(frames.ticks) - 1):
        shown = lanes.shown_ticks(frames, cursor, 24, Filter())
        assert len(shown) == 24
        assert cursor in shown
        assert shown == list(range(shown[0], shown[0] + 24))
        if cursor > shown[0]:
            assert lanes.shown_ticks(frames, cursor - 1, 24, Filter(), shown[0]) == shown


@pytest.mark.full
def test_100_000_events_are_followed() -> None:
    ledger = recorded(11_200)
    assert ledger.last_seq > 100_000
    frames = followed(ledger)
    shown = lanes.shown_ticks(frames, 7_000, 24, Filter())
    picture = lanes.lanes(frames, shown, 7_000, Filter())
    assert picture.cells.shape[1] == 24
    assert balance(frames) == []


# slots


def test_slots_of_a_pool_at_every_step() -> None:
    ledger = Ledger()
    run = Run(ledger)
    where = {"stage": "admit", "step": -1}
    table = SlotTable(8, 4, sink=lambda event: ledger(event._replace(**where)))
    first = table.allocate("one")
    second = table.allocate("two")
    for step, accepted in enumerate(([3, 1], [4, 2])):
        where |= {"stage": "verify", "step": step}
        run.emit("predict", **where)
        batch = table.begin([first, second])
        table.end(batch, accepted)
    where["step"] = 2
    ledger.set_meta("slots", 8)
    ledger.set_meta("poison", True)
    table.free(second)
    frames = followed(ledger)
    books = history(ledger)
    assert books.faults == []
    picture = pool.pool(frames, books, range(len(frames.ticks)), tick(frames, "verify 0"), "slot 2")
    assert picture.side[2] == "one, position 2, gen 1, current"
    assert picture.side[3] == "one, position 3, gen 1, rejected"
    assert picture.side[4] == "two, position 0, gen 1, current"
    assert "0 free + 8 live + 0 snapshot = 8 of 8 slots" in picture.line
    assert "2 of 6 drafts accepted" in picture.line
    assert picture.line.endswith("slot 2: one, position 2, gen 1, current")
    column = tick(frames, "verify 0")
    assert picture.cells[2, column].tolist() == [0, FULL, 0, pool.GLYPHS.index("●")]
    assert picture.cells[3, column].tolist() == [0, HALF, 0, pool.GLYPHS.index("✗")]
    assert picture.cells[4, column, 0] == 1
    last = picture.cells[4, -1].tolist()
    assert last[2:] == [CROSSED, pool.GLYPHS.index("∅")]


# steps that are interrupted, groups that are joined


def split(frames: Frames) -> list[tuple[str, int]]:
    return [(one.label, one.run) for one in frames.ticks]


def test_a_model_built_within_a_step_is_part_of_the_step() -> None:
    ledger = Ledger()
    run = Run(ledger)
    step, outside = {"stage": "verify", "step": 0}, {"stage": "verify", "step": -1}
    run.allocate("kv.a", "past_kv_cache", "kv", (4,), "float16", stage="admit", step=-1)
    run.emit("draft", **step)
    run.emit("stage_begin", detail={"graph": "verify"}, **outside)
    run.allocate("logits", "logits", "logits", (4,), "float32", **outside)
    run.upload("kv.a", 8, **outside)
    run.emit("predict", detail={"graph": "verify", "inputs": ["kv.a"], "outputs": ["logits"]}, **step)
    run.emit("stage_begin", detail={"graph": "again"}, **outside)
    run.emit("predict", detail={"graph": "again", "inputs": [], "outputs": ["kv.a"]}, stage="verify", step=1)
    for frames in (followed(ledger), Frames(ledger)):
        while frames.last_seq < ledger.last_seq:
            frames.update()
        assert frames.ticks == Timeline(ledger).ticks
        assert split(frames)[:2] == [("admit", 0), ("verify 0", 0)]
        kv, logits = frames.row("kv.a"), frames.row("logits")
        assert kv is not None
        assert logits is not None
        assert frames.codes[kv.number, 1] & (READ | UPLOADED) == READ | UPLOADED
        assert frames.codes[logits.number, 1] & WRITTEN
        assert frames.wrote[logits.number, 1] == 1
        assert frames.wrote[kv.number, 1] == 1
        assert [copy.nbytes for copy in frames.copies[1]] == [8]
        assert len(frames.figures) == len(frames.copies) == len(frames.ticks)


def test_a_sequence_that_joins_a_group_begins_no_new_generation() -> None:
    ledger = Ledger()
    run = Run(ledger)
    for stage, step in (("prefill", -1), ("verify", 0), ("verify", 1), ("prefill", -1), ("admit", -1), ("verify", 2)):
        run.emit("predict", detail={}, stage=stage, step=step)
    run.emit("predict", detail={}, stage="prefill", step=-1)
    run.emit("predict", detail={}, stage="verify", step=0)
    frames = Frames(ledger)
    frames.update()
    assert frames.ticks == Timeline(ledger).ticks
    assert [one.run for one in frames.ticks] == [0, 0, 0, 0, 0, 0, 1, 1]
