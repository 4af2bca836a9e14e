"""Processes are found by their marker and ended; cards are leased; files are whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_npu.nightly.cards import lease_card, list_cards, used_memory_percent
from qwen_npu.nightly.files import read_json, read_lines, write_json, write_text
from qwen_npu.nightly.processes import MARKER, marked, start_ticks, sweep

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def sleeper(marker: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: marker}, start_new_session=True)


def test_sweep_ends_the_marked_and_no_other() -> None:
    run = f"test{os.getpid()}"
    ours, other, recorded = sleeper(f"{run}/a/"), sleeper(f"{run}x/a/"), sleeper("elsewhere/")
    try:
        assert sorted(marked(f"{run}/")) == [ours.pid]
        ticks = start_ticks(recorded.pid)
        assert ticks is not None
        assert start_ticks(other.pid) is not None
        # a pid that was given to another process since is left alone
        ended = sweep(f"{run}/", [(recorded.pid, ticks), (other.pid, 1)])
        assert sorted(ended) == sorted([ours.pid, recorded.pid])
        assert ours.wait(10) == recorded.wait(10) == -9
        assert other.poll() is None
        assert sweep(f"{run}/") == []
        assert start_ticks(ours.pid) is None
    finally:
        for process in (ours, other, recorded):
            process.kill()
            process.wait()


def test_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_NPU_CARDS", "3, 95")
    assert list_cards() == [3, 95]
    monkeypatch.setenv("QWEN_NPU_CARDS", "")
    assert list_cards() == []
    first, second = lease_card([95, 96]), lease_card([95, 96])
    assert first is not None
    assert second is not None
    assert (first.card, second.card) == (95, 96)
    assert lease_card([95, 96]) is None
    first.release()
    again = lease_card([95, 96])
    assert again is not None
    assert again.card == 95
    again.release()
    second.release()


def test_memory_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\n[ \"$5\" = 0 ] && echo '\tHBM Usage Rate(%)              : 12'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert used_memory_percent(0) == 12.0
    assert used_memory_percent(1) is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert used_memory_percent(0) is None


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_json(path, {"a": "猫"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert read_json(path) == {"a": "猫"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.json"]
    for text in ("", "{", "[1]"):
        path.write_text(text, encoding="utf-8")
        assert read_json(path) is None
    path.write_text('{"a": 1}\n\n[2]\n{"a": 2}\n{"a": 3', encoding="utf-8")
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "absent") == []
