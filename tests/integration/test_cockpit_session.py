"""The cockpit over real sessions on the emulated device: every setting, the vendor-only package, a killed process."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qwen_npu import emulator, views
from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.data import tiny_checkpoint
from qwen_npu.driver.mslite import MsliteDriver
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.runtime.session import Session
from qwen_npu.views.live import Cockpit
from qwen_npu.views.live.frames import LIVE, Frames

FACADE = Path(__file__).parent / "facade" / "mindspore_lite" / "__init__.py"
CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
SETTINGS: list[dict[str, Any]] = [
    {},
    {"kv": "growing"},
    {"state": "host"},
    {"state": "host", "kv": "growing"},
    {"peek": True},
    {"peek": True, "kv": "growing"},
    {"speculate": 3},
    {"device": "cpu"},
]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(CHECKPOINT)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_NPU_HEADLESS", raising=False)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())) or "default")
def test_every_setting_balances_and_says_what_the_figures_say(bundle: Bundle, settings: dict[str, Any]) -> None:
    with Session(bundle, **settings) as session, Cockpit(session, image="two_shapes", max_new_tokens=10) as cockpit:
        assert cockpit.widget is not None
        cockpit.settings.ignore_eos = True
        cockpit.step(2)
        assert cockpit.wait(120)
        cockpit.run()
        assert cockpit.wait(120)
        assert cockpit.status == "done"
        balanced, told = cockpit.balance()
        assert balanced, told
        frames = cockpit.frames
        assert frames.ticks == Timeline(frames.ledger).ticks
        assert frames.text(len(frames.ticks) - 1) == cockpit.result().text
        for row in views.residency_table(frames.ledger):
            known = frames.row(row["buffer"])
            assert known is not None
            assert frames.codes[known.number, row["tick"]]
            if row["after"] and row["buffer"] != "kv":
                assert bool(frames.codes[known.number, row["tick"]] & LIVE) == (row["after"] == "live")
        steps = [step for step in frames.ledger.steps() if step.stage in ("decode", "verify")]
        shown = [frames.figures[tick.number] for tick in frames.ticks if tick.is_step]
        assert [figures.up_bytes for figures in shown] == [step.host_to_device_bytes for step in steps]
        assert [figures.down_bytes for figures in shown] == [step.device_to_host_bytes for step in steps]


def test_settings_of_the_page_make_a_session_and_close_it(bundle: Bundle) -> None:
    with Session(bundle) as session, Cockpit(session, max_new_tokens=4) as cockpit:
        cockpit.settings.kv = "growing"
        cockpit.run()
        assert cockpit.wait(120)
        made = cockpit.session
        assert made is not session
        assert made.context.kv == "growing"
        assert cockpit.frames.row("kv") is not None
        cockpit.reset()
        cockpit.run()
        assert cockpit.wait(120)
        assert cockpit.session is made


def test_over_the_vendors_methods_alone(bundle: Bundle) -> None:
    spec = importlib.util.spec_from_file_location("mindspore_lite", FACADE)
    assert spec is not None
    assert spec.loader is not None
    facade: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(facade)
    with Session(bundle, driver=facade) as session, Cockpit(session, max_new_tokens=5) as cockpit:
        assert cockpit.widget is not None
        cockpit.run()
        assert cockpit.wait(120)
        panel = cockpit._panel
        panel.search.value = "recurrent.a"
        cockpit.seek(4)
        assert "not observable" in panel.instant.value
        assert "not observable" in panel.buffer.value
        assert "books balance" in panel.light.value
        assert np.frombuffer(panel.lanes.cells, np.uint8).any()


@pytest.mark.parametrize("what", ["module", "driver"])
def test_other_settings_are_opened_through_what_the_session_was_given(bundle: Bundle, what: str) -> None:
    package = ModuleType("of_my_own")
    vars(package).update({name: getattr(emulator, name) for name in emulator.__all__})
    opened = MsliteDriver(package, "ascend:0")
    with (
        Session(bundle, driver=package if what == "module" else opened) as session,
        Cockpit(session, max_new_tokens=3) as cockpit,
    ):
        for state in ("host", "resident", "host"):
            cockpit.settings.state = state
            cockpit.reset()
            cockpit.run()
            assert cockpit.wait(120)
            assert not cockpit.problems
            assert cockpit.session is not None
            assert cockpit.session.driver.name == "of_my_own"
        assert cockpit.session is not session
        assert session.generate("Describe the image.", max_new_tokens=2).tokens  # it is the user's own, and still open


PROGRAM = """
import sys
import qwen_npu as qn
with qn.Session(qn.open_bundle(sys.argv[1])) as session, session.record(sys.argv[2]):
    for step in session.stream("Describe the image.", max_new_tokens=900, ignore_eos=True):
        print(step.step, flush=True)
"""


def test_a_recording_of_a_killed_process_is_shown_up_to_its_last_batch(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "killed.ledger"
    command = [sys.executable, "-c", PROGRAM, str(CHECKPOINT), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline() or -9) < 40:
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    with Cockpit(ledger=path) as cockpit:
        assert cockpit.widget is not None
        assert any(tick.label == "decode 20" for tick in cockpit.frames.ticks)
        frames = Frames(cockpit.ledger)
        frames.update()
        assert cockpit._panel.slider.max == len(frames.ticks) - 1
        balanced, told = cockpit.balance()
        assert balanced, told
