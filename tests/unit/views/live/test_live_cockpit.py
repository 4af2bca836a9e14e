"""The cockpit on a made-up session: stepping, scrubbing, errors, replay, headless twins, widgets that all close."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances

from qwen_npu.errors import SlotError, UsageError
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
from qwen_npu.views.live import Cockpit, panes
from tests.unit.ledger.runs import Run, recorded
from tests.unit.views.live.fakes import FakeSession


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_NPU_HEADLESS", raising=False)


@pytest.fixture
def headless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_NPU_HEADLESS", "1")


@pytest.fixture
def cockpit() -> Iterator[Cockpit]:
    made = Cockpit(FakeSession(), prompt="Say <b>.", max_new_tokens=6)  # type: ignore[arg-type]
    yield made
    made.close()


def panel(cockpit: Cockpit) -> Any:
    assert cockpit.widget is not None
    return cockpit._panel


def test_run_all_from_the_buttons(cockpit: Cockpit) -> None:
    shown = panel(cockpit)
    assert "Run or Step" in shown.lanes.line
    shown.step.click()
    assert cockpit.wait(20)
    assert [tick.label for tick in cockpit.frames.ticks] == ["prefill"]
    assert "t7" in shown.text.value
    assert "ready" not in shown.status.value
    shown.run.click()
    assert cockpit.wait(20)
    assert cockpit.status == "done"
    assert cockpit.frames.ticks[-1].label == "decode end"
    assert shown.slider.value == shown.slider.max == cockpit.cursor == len(cockpit.frames.ticks) - 1
    assert "t10 t11 t12 t13 t14 t15" in shown.text.value
    assert shown.run.disabled
    assert shown.pause.disabled
    assert "books balance" in shown.light.value
    assert cockpit.result() == "result"
    assert cockpit.session.generation.threads != {threading.get_ident()}
    assert cockpit.session.asked == [("Say <b>.", None, 6, False)]


def test_one_scrubber_drives_every_pane(cockpit: Cockpit) -> None:
    shown = panel(cockpit)
    cockpit.run()
    cockpit.wait(20)
    at = next(tick.number for tick in cockpit.frames.ticks if tick.label == "decode 2")
    shown.slider.value = at
    assert cockpit.cursor == at
    assert not shown.follow.value
    assert shown.lanes.line.startswith("decode 2:")
    assert "live conv.b" in shown.instant.value
    assert "t12</span>" in shown.text.value
    assert np.frombuffer(shown.curves.x, np.int32).tolist() == list(range(2, 8))
    shown.slider.value = at + 1
    assert "live conv.a" in shown.instant.value
    cockpit.seek(0)
    assert shown.slider.value == 0
    shown.follow.value = True
    assert cockpit.cursor == len(cockpit.frames.ticks) - 1
    targets = {(link.source[0], link.target[0], link.target[1]) for link in shown._links}
    assert (shown.play, shown.slider, "value") in targets
    assert (shown.slider, shown.lanes, "cursor") in targets
    assert (shown.slider, shown.slots, "cursor") in targets


def test_one_speed_for_the_list_the_player_and_the_keys(cockpit: Cockpit) -> None:
    shown = panel(cockpit)
    shown.speed.value = 50
    assert shown.play.interval == 50
    shown.lanes.interval = 190  # as the keys set it
    assert shown.speed.value == shown.play.interval == 200


def test_search_filters_and_picks(cockpit: Cockpit) -> None:
    shown = panel(cockpit)
    cockpit.run()
    cockpit.wait(20)
    shown.search.value = "kv.b"
    assert [row["id"] for row in shown.lanes.rows] == ["kv.b", ""]
    assert "present_kv" in shown.buffer.value or "past_kv_cache" in shown.buffer.value
    shown.search.value = ""
    shown.kind.value = "conv"
    assert {row["id"] for row in shown.lanes.rows} >= {"conv.a", "conv.b"}
    assert "kv.a" not in {row["id"] for row in shown.lanes.rows}
    assert [option[1] for option in shown.layer.options] == [-1, 0, 1, 2, 3]
    assert "decode" in [option[1] for option in shown.stage.options]


def test_pause_and_go_on_and_reset() -> None:
    gate = threading.Semaphore(2)
    session = FakeSession(gate=gate)
    with Cockpit(session, max_new_tokens=5) as cockpit:  # type: ignore[arg-type]
        cockpit.run()
        deadline = time.monotonic() + 20
        while session.run.clock_ns < 20_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        cockpit.pause()
        gate.release()
        assert cockpit.wait(20)
        taken = cockpit._runner.steps
        assert cockpit.status == "paused"
        assert 2 <= taken <= 5
        gate.release(9)
        cockpit.step(1)
        assert cockpit.wait(20)
        assert cockpit._runner.steps == taken + 1
        first = session.generation
        cockpit.reset()
        assert first is not None
        assert first.closed
        assert cockpit.status == "empty"
        assert cockpit.frames is None
        cockpit.step()
        assert cockpit.wait(20)
        assert len(session.asked) == 2


def test_an_error_is_on_the_strip_and_raised_by_wait() -> None:
    with Cockpit(FakeSession(fails_at=1), max_new_tokens=5) as cockpit:  # type: ignore[arg-type]
        shown = panel(cockpit)
        cockpit.run()
        with pytest.raises(RuntimeError, match="fell off the bus"):
            cockpit.wait(20)
        assert cockpit.status == "failed"
        assert "RuntimeError: the card fell off the bus" in shown.strip.value
        assert "role='alert'" in shown.strip.value
        assert cockpit.frames.ticks[-1].label in {"decode 0", "decode end"}


def test_a_callback_that_fails_is_reported(cockpit: Cockpit, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = panel(cockpit)

    def broken() -> None:
        raise SlotError("slot 3 is <gone>", expected="a slot")

    monkeypatch.setattr(cockpit, "step", broken)
    shown.step.click()
    assert "slot 3 is &lt;gone&gt;" in shown.strip.value
    assert "error" in shown.strip.value


def test_headless_raises_what_a_callback_raises(cockpit: Cockpit, headless: None) -> None:
    def broken() -> None:
        raise SlotError("gone", expected="a slot")

    with pytest.raises(SlotError, match="gone"):
        cockpit.guarded(broken)()
    assert cockpit.problems == []


def test_headless_is_synchronous_and_shows_figures(headless: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(_instances)
    with Cockpit(FakeSession(), prompt="<i>", max_new_tokens=4) as cockpit:  # type: ignore[arg-type]
        cockpit.step(2)
        assert cockpit.status == "paused"
        cockpit.run()
        assert cockpit.status == "done"
        words, *figures = cockpit.twins()
        assert "&lt;i&gt;" in words.data
        assert "t10 t11 t12 t13" in words.data
        assert "books balance" in words.data
        assert len(figures) == 3
        assert all(type(figure).__name__ == "Figure" and figure.data for figure in figures)
        cockpit._ipython_display_()
    assert set(_instances) == before, "a widget was made, though nobody looks"


def test_headless_error_comes_to_the_cell(headless: None) -> None:
    cockpit = Cockpit(FakeSession(fails_at=0), max_new_tokens=4)  # type: ignore[arg-type]
    with cockpit, pytest.raises(RuntimeError, match="fell off the bus"):
        cockpit.run()


def test_a_recording_is_shown_without_a_session(tmp_path: Path) -> None:
    path = tmp_path / "测试 😀.ledger"
    ledger = Ledger(path)
    ledger.set_meta("kv", "growing")
    Run(ledger, kv="growing").generate(5)
    ledger.close()
    with Cockpit(ledger=path) as cockpit:
        shown = panel(cockpit)
        assert cockpit.status == "replay"
        assert shown.slider.max == len(cockpit.frames.ticks) - 1
        shown.slider.value = 4
        assert shown.lanes.line.startswith(cockpit.frames.ticks[4].label)
        with pytest.raises(UsageError, match="cannot be stepped"):
            cockpit.step()
        assert "books balance" in shown.light.value


def test_a_recording_that_is_still_written_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = Ledger(path)
    run = Run(ledger)
    run.generate(2)
    ledger.flush()
    with Cockpit(ledger=path) as cockpit:
        shown = panel(cockpit)
        before = len(cockpit.frames.ticks)
        run.generate(3)
        ledger.flush()
        shown.read_on.click()
        assert len(cockpit.frames.ticks) > before
        assert shown.slider.max == len(cockpit.frames.ticks) - 1
    ledger.close()


def test_what_the_vendors_package_does_not_tell_is_said() -> None:
    ledger = Ledger()
    Run(ledger, addresses=False).generate(3)
    with Cockpit(ledger=ledger) as cockpit:
        shown = panel(cockpit)
        shown.search.value = "conv.a"
        cockpit.seek(4)
        assert "device memory" in shown.instant.value
        assert "not observable" in shown.instant.value
        assert "address</td>" in shown.buffer.value
        assert "not observable" in shown.buffer.value
        assert "books balance" in shown.light.value


def test_the_light_is_red_when_the_books_do_not_balance() -> None:
    ledger = Ledger()
    for event in recorded(3).events():
        if event.kind == "free" and event.buffer == "kv.a":
            ledger(event)  # freed twice
        ledger(event)
    with Cockpit(ledger=ledger) as cockpit:
        balanced, told = cockpit.balance()
        assert not balanced
        assert "'kv.a', which is not alive" in " ".join(told)
        assert "books do not balance" in panel(cockpit).light.value
        assert "✗" in panes.light(balanced, told)


def test_the_light_is_red_when_a_stranger_writes_to_a_slot() -> None:
    ledger = Ledger()
    where = {"stage": "verify", "step": 0}
    ledger.set_meta("slots", 2)
    detail = {"slot": 0, "sequence": 0, "owner": "one", "position": 0}
    ledger(Event("slot_allocate", 1, buffer="state_pool", detail=detail, **where))
    ledger(Event("slot_write", 2, buffer="state_pool", detail={**detail, "sequence": 5}, **where))
    with Cockpit(ledger=ledger) as cockpit:
        balanced, told = cockpit.balance()
        assert not balanced
        assert "sequence 5 uses slot 0" in told[0]


def test_hazards_are_on_the_strip() -> None:
    ledger = recorded(2)
    ledger(Event("hazard", 9, stage="decode", step=1, source="emulator", detail={"problem": "kv.a overlaps"}))
    with Cockpit(ledger=ledger) as cockpit:
        assert "kv.a overlaps" in panel(cockpit).strip.value
        assert "hazard" in panel(cockpit).strip.value


def test_every_widget_is_closed() -> None:
    gc.collect()
    before = set(_instances)
    for _ in range(2):
        with Cockpit(FakeSession(), max_new_tokens=3) as cockpit:  # type: ignore[arg-type]
            assert panel(cockpit)
            cockpit.run()
            cockpit.wait(20)
            assert len(_instances) > len(before) + 20
    with Cockpit(ledger=recorded(3)) as replay:
        assert panel(replay)
    assert set(_instances) == before
    with pytest.raises(UsageError, match="closed"):
        cockpit.run()


def test_a_temporary_recording_is_removed_and_a_wished_one_kept(tmp_path: Path) -> None:
    with Cockpit(FakeSession(), max_new_tokens=2) as cockpit:  # type: ignore[arg-type]
        cockpit.run()
        cockpit.wait(20)
        temporary = cockpit.ledger.path
        assert temporary.exists()
    assert not temporary.exists()
    kept = tmp_path / "run.ledger"
    with Cockpit(FakeSession(), max_new_tokens=2, record_to=kept) as cockpit:  # type: ignore[arg-type]
        cockpit.run()
        cockpit.wait(20)
    with Cockpit(ledger=kept) as replayed:
        assert replayed.frames.text(len(replayed.frames.ticks) - 1) == " t7 t10 t11"


def test_updates_come_on_the_loop_and_are_coalesced() -> None:
    async def live() -> tuple[int, int]:
        with Cockpit(FakeSession(), max_new_tokens=400) as cockpit:  # type: ignore[arg-type]
            shown = panel(cockpit)
            refresh, threads = shown.refresh, set()

            def counted() -> None:
                threads.add(threading.get_ident())
                counts.append(len(cockpit.frames.ticks))
                refresh()

            counts: list[int] = []
            shown.refresh = counted
            cockpit.run()
            start = time.monotonic()
            while cockpit.status != "done" and time.monotonic() < start + 60:
                await asyncio.sleep(0.02)
            took = time.monotonic() - start
            await asyncio.sleep(0.3)
            assert threads == {threading.get_ident()}
            assert counts[-1] == len(cockpit.frames.ticks) >= 400
            return len(counts), round(took * 10) + 4

    updates, most = asyncio.run(live())
    assert 1 <= updates <= most


def test_nothing_given_or_both() -> None:
    with pytest.raises(UsageError, match="neither session nor ledger"):
        Cockpit()
    with pytest.raises(UsageError, match="both session and ledger"):
        Cockpit(FakeSession(), Ledger())  # type: ignore[arg-type]


def test_text_on_badges_is_readable() -> None:
    from qwen_npu.views.theme import contrast

    for colours in (panes._GREEN, panes._RED, panes._AMBER):
        assert contrast(*colours) >= 4.5
