"""The device probe: on the emulator every prediction holds; a device that does otherwise is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qwen_npu import emulator
from qwen_npu.cli import main
from qwen_npu.doctor import line_of
from qwen_npu.doctor.experiments import EXPERIMENTS, write_graphs
from qwen_npu.doctor.probe import ask_all, probe
from qwen_npu.errors import DeviceError

TIMED = {"hidden upload"}
"""Compared by the bench of a quiet machine, not here."""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probe")
    write_graphs(directory, fused=False)
    return directory


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with emulator.configure(policy="vendor"):
        yield


def test_all_predictions_hold_on_the_emulator(graphs: Path) -> None:
    names = [item.name for item in EXPERIMENTS]
    assert len(names) == len(set(names)) >= 20
    answers = ask_all(emulator, "ascend:2", graphs, set(names) - TIMED)
    assert len(answers) == len(names) - len(TIMED)
    assert [line_of(answer) for answer in answers if answer.verdict != "agrees"] == []


def faked(**changes: Any) -> ModuleType:
    module = ModuleType("mindspore_lite")
    for name in emulator.__all__:
        setattr(module, name, getattr(emulator, name))
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def test_a_device_that_does_otherwise_is_told(graphs: Path) -> None:
    class Elsewhere(emulator.Model):
        """Writes results into tensors of its own, as a CPU build does, and hands those out."""

        def predict(self, inputs: Any, outputs: Any = None) -> Any:
            return super().predict(inputs)

    answers = {a.name: a for a in ask_all(faked(Model=Elsewhere), "ascend:0", graphs, set(_names()) - TIMED)}
    differs = {name for name, answer in answers.items() if answer.verdict == "differs"}
    assert {"outputs written", "results are given", "state stays", "pool in place", "op alone"} <= differs
    assert {"upload copies", "f16 kept", "int64 narrowed"}.isdisjoint(differs)
    assert "DIFFERS" in line_of(answers["outputs written"])
    assert "predicted: yes (from: vendor source)" in line_of(answers["outputs written"])


def test_a_call_that_fails_and_a_device_that_is_not_there(graphs: Path) -> None:
    class OneCard(emulator.Tensor):
        def __init__(self, *args: Any, device: Any = None, **rest: Any) -> None:
            if device == "ascend:1":
                raise RuntimeError("no such device")
            super().__init__(*args, device=device, **rest)

        def set_data_from_numpy(self, numpy_obj: np.ndarray) -> None:
            raise RuntimeError("set data failed")

    answers = {a.name: a for a in ask_all(faked(Tensor=OneCard), "ascend:0", graphs, {"other device", "set data"})}
    assert answers["other device"].verdict == "not run"
    assert "no such device" in answers["other device"].found
    assert (answers["set data"].verdict, answers["set data"].found) == ("differs", "RuntimeError: set data failed")


def _names() -> list[str]:
    return [item.name for item in EXPERIMENTS]


def test_a_process_that_dies_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dying_package.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("qwen_npu.doctor.probe.EXPERIMENTS", EXPERIMENTS[:1])
    (answer,) = probe("dying_package", "ascend:0")
    assert (answer.verdict, answer.found) == ("differs", "the process ended with status -11")
    with pytest.raises(DeviceError, match="cannot be probed"):
        probe("emulator", "cpu")


def test_command_writes_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qwen_npu.doctor.probe.EXPERIMENTS", EXPERIMENTS[:2])
    place = tmp_path / "probe.json"
    assert main(["doctor", "--probe-device", "--driver", "emulator", "--out", str(place), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["agrees"], printed["differs"], printed["not run"]) == (2, 0, 0)
    held = json.loads(place.read_text(encoding="utf-8"))
    assert held["driver"] == "emulator"
    assert [answer["source"] for answer in held["answers"]] == ["published runtime", "vendor source"]
    assert {line["name"] for line in held["doctor"]} >= {"python", "cann", "op"}
