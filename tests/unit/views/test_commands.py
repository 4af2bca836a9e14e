"""`qwen-npu summary|trace|diff|replay` over recorded ledgers, through the command line's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_npu import views
from qwen_npu.cli import main
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
from qwen_npu.views.commands import VIEWS
from tests.unit.ledger.runs import RECURRENT_BYTES, Run


def record(path: Path, *, tokens: list[int] | None = None, spoil: bool = False) -> str:
    with Ledger(path) as ledger:
        for key, value in {"driver": "emulator", "device": "ascend:0", "kv": "fixed", "state": "resident"}.items():
            ledger.set_meta(key, value)
        run = Run(ledger)
        run.generate(3, tokens)
        ledger(Event("peek", 1, stage="decode", step=1, arrays={"recurrent.norm": np.full((2, 2), np.inf, np.float32)}))
        if spoil:
            run.emit("free", buffer="conv.a", nbytes=1)
    return str(path)


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return record(tmp_path / "a 图.ledger")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def test_summary_page(capsys: pytest.CaptureFixture[str], ledger: str) -> None:
    page = told(capsys, "summary", ledger)
    for fact in (" t7 t10 t11 t12", "recurrent.a", "runtime/states.py:77", "peak", "✓ bytes alive", "NOT FINITE first"):
        assert fact in page
    assert "Emulated device" in page


def test_summary_as_json_holds_no_bare_infinity(capsys: pytest.CaptureFixture[str], ledger: str) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    facts = json.loads(told(capsys, "summary", ledger, "--json"), parse_constant=refuse)
    assert facts["steps"] == {"prefill": 1, "decode": 3}
    assert facts["nonfinite"]["layer"] == 0
    rows = json.loads(told(capsys, "summary", ledger, "--view", "state_norms", "--json"), parse_constant=refuse)
    assert rows[0]["value"] == "inf"


def test_books_that_do_not_balance_are_exit_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = record(tmp_path / "bad", spoil=True)
    assert "✗ bytes alive" in told(capsys, "summary", path, code=1)
    assert told(capsys, "summary", path, "--json", code=1)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_its_rows_on_the_command_line(
    capsys: pytest.CaptureFixture[str], ledger: str, view: str
) -> None:
    assert told(capsys, "summary", ledger, "--view", view) is not None
    rows = json.loads(told(capsys, "summary", ledger, "--view", view, "--json"))
    assert isinstance(rows, list)
    assert bool(rows) == (view not in ("card_usage", "pool_states", "slot_grid", "speculation"))


def test_views_are_all_figures_of_one_ledger() -> None:
    assert set(VIEWS) == {name for name in views.LEDGER_FIGURES if not name.startswith("compare")}


def test_a_view_as_an_offline_page(capsys: pytest.CaptureFixture[str], ledger: str, tmp_path: Path) -> None:
    page = tmp_path / "traffic.html"
    told(capsys, "summary", ledger, "--view", "traffic", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "Bytes over the bus each step" in text
    assert 'src="http' not in text
    assert main(["summary", ledger, "--html", str(page)]) == 2
    assert "--view" in capsys.readouterr().err


def test_an_instant(capsys: pytest.CaptureFixture[str], ledger: str) -> None:
    page = told(capsys, "summary", ledger, "--at", "3")
    assert "after decode 1" in page
    assert "recurrent.a is live" in page
    state = json.loads(told(capsys, "summary", ledger, "--at", "3", "--json"))
    sizes = {entry["id"]: entry["nbytes"] for entry in state["buffers"]}
    assert sizes["recurrent.b"] == RECURRENT_BYTES
    assert main(["summary", ledger, "--at", "99"]) == 2


def test_trace_and_csv_lie_beside_the_ledger(capsys: pytest.CaptureFixture[str], ledger: str, tmp_path: Path) -> None:
    path = told(capsys, "trace", ledger).strip()
    assert path == str(tmp_path / "a 图.trace.json")
    assert json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    path = json.loads(told(capsys, "trace", ledger, "--csv", "steps", "--json"))["path"]
    assert path == str(tmp_path / "a 图.steps.csv")
    assert main(["trace", ledger, "--csv", "nothing"]) == 2


def test_diff(capsys: pytest.CaptureFixture[str], ledger: str, tmp_path: Path) -> None:
    assert told(capsys, "diff", ledger, ledger).startswith("equal")
    other = record(tmp_path / "other", tokens=[10, 99, 12])
    assert "tokens part at decode 1: 11 -> 99" in told(capsys, "diff", ledger, other, code=1)
    facts = json.loads(told(capsys, "diff", ledger, other, "--json", code=1))
    assert facts["first_token"]["after"] == 99


def test_replay(capsys: pytest.CaptureFixture[str], ledger: str) -> None:
    assert told(capsys, "replay", ledger).startswith(" t7 t10 t11 t12\n")
    assert told(capsys, "replay", ledger, "--speed", "1000").startswith(" t7 t10 t11 t12\n")
    assert json.loads(told(capsys, "replay", ledger, "--json"))["tokens"] == [7, 10, 11, 12]
    assert main(["replay", ledger, "--speed", "-1"]) == 2


@pytest.mark.parametrize("command", ["summary", "trace", "replay"])
def test_a_file_that_is_no_ledger_is_the_users_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    assert main([command, str(tmp_path / "absent")]) == 2
    assert "there is no ledger" in capsys.readouterr().err
