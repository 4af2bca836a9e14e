"""What is somebody else's stays as it is: files beside, in the way of, or in place of what the workbench writes."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from qwen_npu.cli import EXIT_MISTAKE, main
from qwen_npu.errors import LedgerError, StateError, UsageError
from qwen_npu.ledger.store import Ledger, open_ledger
from qwen_npu.ledger.summary import replay
from tests.unit.ledger.runs import Run


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "run.ledger"
    with Ledger(path) as recording:
        Run(recording, kv="fixed", capacity=32).generate(4)
    return path


def test_a_ledger_replaces_an_earlier_one_and_nothing_else(tmp_path: Path, ledger: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "a/b", "x" * 300, "nul\0"):
        with pytest.raises(LedgerError):
            Ledger(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "diary-journal").write_text("mine")
    with pytest.raises(LedgerError, match="diary-journal"):
        Ledger(tmp_path / "diary")
    assert (tmp_path / "diary-journal").read_text() == "mine"
    Ledger(ledger).close()
    assert open_ledger(ledger).last_seq == -1


def test_an_earlier_ledger_outlives_a_disk_that_is_full(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ledger.read_bytes()

    def full(recording: Ledger, key: str, value: object) -> None:
        raise LedgerError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "set_meta", full)
        with pytest.raises(LedgerError, match="full"):
            Ledger(ledger)
    assert ledger.read_bytes() == before
    assert list(ledger.parent.iterdir()) == [ledger]
    Ledger(ledger).close()
    assert list(ledger.parent.iterdir()) == [ledger]


def test_one_file_is_recorded_once_at_a_time(ledger: Path) -> None:
    with Ledger(ledger) as first:
        with pytest.raises(LedgerError, match="is being recorded"):
            Ledger(ledger)
        Run(first, kv="fixed", capacity=32).generate(2)
    assert open_ledger(ledger).last_seq > 0
    Ledger(ledger).close()


@pytest.mark.parametrize("options", [["trace"], ["summary", "--view", "traffic"]])
def test_a_ledger_is_not_written_over_by_its_own_reader(ledger: Path, options: list[str]) -> None:
    before = ledger.read_bytes()
    out = "--out" if options == ["trace"] else "--html"
    assert main([*options, str(ledger), out, str(ledger)]) == EXIT_MISTAKE
    assert ledger.read_bytes() == before


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, ledger: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "trace.json.part").write_text("mine")
    names = set(tmp_path.iterdir())
    assert main(["trace", str(ledger), "--out", str(tmp_path / "folder")]) == EXIT_MISTAKE
    assert set(tmp_path.iterdir()) == names
    assert main(["trace", str(ledger), "--out", str(tmp_path / "trace.json")]) == 0
    assert (tmp_path / "trace.json.part").read_text() == "mine"


def test_a_history_is_not_made_of_another_database(tmp_path: Path, ledger: Path) -> None:
    other = tmp_path / "app.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE meta (key, value)")
    connection.close()
    for path in (other, ledger):
        before = path.read_bytes()
        assert main(["nightly", "history", str(path)]) == EXIT_MISTAKE
        assert path.read_bytes() == before


def test_a_setting_of_the_environment_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess
    import sys

    environment = {**os.environ, "QWEN_NPU_EMULATOR_POLICY": "foo"}
    command = [sys.executable, "-m", "qwen_npu.cli", "plan"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_MISTAKE
    assert "QWEN_NPU_EMULATOR_POLICY is 'foo'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_session_says_so() -> None:
    from qwen_npu.bundle import open_bundle
    from qwen_npu.runtime.session import Session

    with pytest.raises(UsageError, match="open_bundle"):
        Session("tiny")  # type: ignore[arg-type]
    session = Session(open_bundle("tiny"), driver="emulator")
    session.close()
    with pytest.raises(StateError, match="closed"):
        session.generate("hi")
    with pytest.raises(StateError, match="closed"):
        session.group(drafts=2)
    with pytest.raises(StateError, match="closed"), session.record():
        pass


def test_a_replay_tells_accepted_drafts(tmp_path: Path) -> None:
    from qwen_npu.bundle import open_bundle
    from qwen_npu.runtime.session import Session

    path = tmp_path / "drafts.ledger"
    with Session(open_bundle("tiny"), driver="emulator", speculate=4) as session, session.record(path):
        answer = session.generate("Repeat: red blue green red blue green red blue green", max_new_tokens=12)
    assert answer.to_json()["speculation"]["accepted"] > 0
    assert replay(open_ledger(path))["tokens"] == list(answer.tokens)
