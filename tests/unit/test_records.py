from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_npu import records
from qwen_npu.errors import RecordError
from qwen_npu.records import done, record


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "records 记录.jsonl"
    monkeypatch.setenv(records.RECORDS_VARIABLE, str(path))
    monkeypatch.delenv(records.CELL_VARIABLE, raising=False)
    return lambda: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_is_one_line_that_is_there_at_once(lines: Any) -> None:
    record("h2d_bytes", np.int64(168), unit="bytes")
    assert lines() == [
        {"schema": 1, "name": "h2d_bytes", "value": 168, "unit": "bytes", "kind": "exact", "tol": None, "cell": None}
    ]
    record("cosine", np.float32(0.5), kind="absolute", tol=1e-3)
    record("predict_ms", 1.25, unit="ms", kind="info")
    done()
    assert [line["name"] for line in lines()] == ["h2d_bytes", "cosine", "predict_ms", "__done__"]
    assert lines()[1]["tol"] == 1e-3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        ((1, np.int8(2)), [1, 2]),
        ({"conv": np.float64(0.5)}, {"conv": 0.5}),
        ("图片 🐟", "图片 🐟"),
        (None, None),
        (Path("a") / "b", "a/b"),
    ],
)
def test_values_become_plain(lines: Any, value: Any, plain: Any) -> None:
    record("value", value)
    assert lines()[0]["value"] == plain


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), [1.0, float("-inf")], {"a": np.nan}])
def test_nan_and_infinity_are_refused(lines: Any, value: Any) -> None:
    with pytest.raises(RecordError, match="'loss'"):
        record("loss", value)


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("", 1, {}),
        ("  ", 1, {}),
        (7, 1, {}),
        ("__done__", True, {}),
        ("x", 1, {"kind": "fuzzy"}),
        ("x", 1, {"kind": "relative"}),
        ("x", 1, {"kind": "relative", "tol": -0.1}),
        ("x", 1, {"kind": "absolute", "tol": float("nan")}),
        ("x", 1, {"kind": "absolute", "tol": "0.1"}),
        ("x", 1, {"tol": 0.1}),
        ("x", 1, {"kind": "info", "tol": 0.1}),
        ("x", "text", {"kind": "relative", "tol": 0.1}),
        ("x", True, {"kind": "relative", "tol": 0.1}),
        ("x", object(), {}),
        ("x", {1: 2}, {}),
        ("x", b"bytes", {}),
        ("x", 1 + 2j, {}),
    ],
)
def test_claims_that_make_no_sense_are_refused_with_or_without_a_file(
    monkeypatch: pytest.MonkeyPatch, name: Any, value: Any, options: dict[str, Any]
) -> None:
    monkeypatch.delenv(records.RECORDS_VARIABLE, raising=False)
    with pytest.raises(RecordError):
        record(name, value, **options)


def test_without_the_variable_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(records.RECORDS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record("x", 1)
    done()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(records.RECORDS_VARIABLE, str(tmp_path / "absent" / "x.jsonl"))
    with pytest.raises(RecordError, match=records.RECORDS_VARIABLE):
        record("x", 1)


def test_the_runner_may_name_the_cell(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.CELL_VARIABLE, "cell-7")
    record("x", 1)
    assert lines()[0]["cell"] == "cell-7"
