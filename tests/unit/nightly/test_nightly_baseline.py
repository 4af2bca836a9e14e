"""Records beside their baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_npu.errors import UsageError
from qwen_npu.nightly.baseline import Baseline, accept, baseline_path, compare, read_baseline
from qwen_npu.nightly.verdict import ItemResult, Verdict
from qwen_npu.records import DONE


def line(name: str, value: Any, kind: str = "exact", tol: float | None = None) -> dict[str, Any]:
    return {"schema": 1, "name": name, "value": value, "unit": "", "kind": kind, "tol": tol, "cell": None}


SENTINEL = line(DONE, True)


def baseline(**records: Any) -> Baseline:
    return Baseline("t", "2026-01-01", "", "first", {name: dict(record) for name, record in records.items()})


def state(record: dict[str, Any], accepted: dict[str, Any]) -> str:
    (row,), _ = compare([record], baseline(**{record["name"]: accepted}))
    return str(row["state"])


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (1.0, 1, True),
        (True, 1, False),
        (0, False, False),
        ("猫", "猫", True),
        ([1, [2, 3]], [1, [2, 3]], True),
        ([1, 2], [1, 2, 3], False),
        ([True], [1], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, None, True),
    ],
)
def test_exact(value: Any, wanted: Any, same: bool) -> None:
    assert (state(line("x", value), {"value": wanted, "kind": "exact"}) == "same") is same


@given(st.floats(-1e6, 1e6), st.floats(0.0, 1.0), st.floats(-2.0, 2.0))
def test_tolerances(wanted: float, tol: float, times: float) -> None:
    value = wanted + times * tol
    inside = abs(value - wanted) <= tol
    assert (
        state(line("x", value, "absolute", tol), {"value": wanted, "kind": "absolute", "tol": tol}) == "same"
    ) is inside
    relative = wanted * (1 + times * tol)
    inside = abs(relative - wanted) <= tol * abs(wanted)
    accepted = {"value": wanted, "kind": "relative", "tol": tol}
    assert (state(line("x", relative, "relative", tol), accepted) == "same") is inside


def test_the_reviewed_tolerance_counts() -> None:
    assert state(line("x", 1.4, "absolute", 1.0), {"value": 1.0, "kind": "absolute", "tol": 0.1}) == "changed"
    assert state(line("x", 1.0, "exact"), {"value": 1.0, "kind": "absolute", "tol": 0.1}) == "changed"
    assert state(line("x", 1e9, "info"), {"value": 1.0, "kind": "exact"}) == "info"


def test_new_and_missing() -> None:
    rows, notes = compare([line("a", 1), line("new", 2), SENTINEL], baseline(a={"value": 1}, gone={"value": 3}))
    assert {row["name"]: row["state"] for row in rows} == {"a": "same", "new": "new", "gone": "missing"}
    assert notes == ["not in the baseline yet: new"]
    rows, notes = compare([line("a", 1)], None)
    assert rows[0]["state"] == "new"
    assert "no baseline" in notes[0]


def result(*records: dict[str, Any]) -> ItemResult:
    return ItemResult("t", "t.ipynb", Verdict.FAIL, "x", records=list(records), started="2026-11-29T01:02:03+00:00")


def test_accept_then_compare(tmp_path: Path) -> None:
    run = result(line("b", [1, 2]), line("a", 0.5, "relative", 0.1), line("t", 9.0, "info"), SENTINEL)
    [path] = accept(tmp_path, [run], "first values 初")
    assert path == baseline_path(tmp_path, "t")
    text = path.read_text(encoding="utf-8")
    assert text.index('"a"') < text.index('"b"')
    assert "first values 初" in text
    accepted = read_baseline(tmp_path, "t")
    assert accepted is not None
    assert accepted.accepted == "2026-11-29"
    assert list(accepted.records) == ["a", "b"]
    assert {row["state"] for row in compare(run.records, accepted)[0]} == {"same", "info"}


def test_accept_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a reason"):
        accept(tmp_path, [result(SENTINEL)], "  ")
    with pytest.raises(UsageError, match="did not reach its end"):
        accept(tmp_path, [result(SENTINEL), result(line("a", 1))], "why not")
    assert not list(tmp_path.iterdir())


def test_damaged_baseline_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert read_baseline(tmp_path, "t") is None
    for text in ("{", "[]", '{"schema": 9, "records": {}}'):
        baseline_path(tmp_path, "t").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="cannot be used"):
            read_baseline(tmp_path, "t")
