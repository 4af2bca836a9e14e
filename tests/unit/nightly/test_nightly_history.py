"""Past nights: last good, first bad, the usual band."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.errors import UsageError
from qwen_npu.nightly.history import History, opened
from qwen_npu.nightly.verdict import ItemResult, Verdict


def night(verdict: Verdict, *records: dict[str, Any], item: str = "t", wall_s: float = 1.0) -> ItemResult:
    return ItemResult(item, "t.ipynb", verdict, "why", wall_s=wall_s, records=list(records))


def fill(history: History, verdicts: list[Verdict]) -> None:
    for number, verdict in enumerate(verdicts):
        history.add(
            f"run{number}", "s", f"2026-01-{number + 1:02}T00:00:00", {"commit": f"c{number}"}, [night(verdict)]
        )


PASS, FAIL, INFRA, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.INFRA, Verdict.SKIPPED


@pytest.mark.parametrize(
    ("verdicts", "good", "bad"),
    [
        ([PASS, PASS, FAIL, FAIL], "c1", "c2"),
        ([PASS, FAIL, PASS, FAIL], "c2", "c3"),
        ([FAIL, FAIL], None, "c0"),
        ([PASS, INFRA, FAIL, INFRA], "c0", "c2"),
        ([PASS, SKIPPED, FAIL, SKIPPED], "c0", "c2"),
    ],
)
def test_turn(tmp_path: Path, verdicts: list[Verdict], good: str | None, bad: str) -> None:
    with History(tmp_path / "h.sqlite") as history:
        fill(history, verdicts)
        turn = history.turn("t")
        assert turn is not None
        assert (turn.last_good.commit if turn.last_good else None) == good
        assert turn.first_bad.commit == bad


def test_no_turn_while_it_passes(tmp_path: Path) -> None:
    with History(tmp_path / "h.sqlite") as history:
        assert history.turn("t") is None
        fill(history, [FAIL, PASS, INFRA])
        assert history.turn("t") is None
        assert [entry.verdict for entry in history.nights("t", limit=2)] == ["PASS", "INFRA"]
        assert history.items() == ["t"]


def test_a_night_taken_up_again_replaces_itself(tmp_path: Path) -> None:
    record = {"name": "a", "value": [1, "猫"], "kind": "exact"}
    info = {"name": "ms", "value": 2.0, "kind": "info"}
    with History(tmp_path / "h.sqlite") as history:
        history.add("r", "s", "2026-01-01", {"commit": "c"}, [night(FAIL)])
        history.add("r", "s", "2026-01-01", {"commit": "c"}, [night(PASS, record, info)])
        assert [entry.verdict for entry in history.nights("t")] == ["PASS"]
        assert history.records("r", "t") == {"a": [1, "猫"]}


def test_band(tmp_path: Path) -> None:
    with History(tmp_path / "h.sqlite") as history:
        for number, value in enumerate([10.0, 10.2, 9.9, 10.1, 500.0, 10.0]):
            verdict = FAIL if value == 500.0 else PASS  # a night that failed is no measure
            result = night(verdict, {"name": "ms", "value": value, "kind": "info"})
            history.add(f"r{number}", "s", f"2026-01-{number:02}", {}, [result])
            if number < 5:
                assert history.band("t", "ms") is None
        band = history.band("t", "ms")
        assert band is not None
        assert band[0] < 9.9
        assert 10.2 < band[1] < 11
        assert history.band("t", "absent") is None


def test_not_a_history(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_text("no database at all, but long enough to be looked at as one by the library", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be used"):
        History(path)
    path.unlink()
    History(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '9'")
    connection.close()
    with pytest.raises(UsageError, match="schema 9"):
        History(path)
    with opened(None) as none:
        assert none is None
