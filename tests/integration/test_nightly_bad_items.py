"""What is wrong with one item, or lies in the way of a run, costs that item its verdict and nobody else anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_npu.errors import SuiteError, UsageError
from qwen_npu.nightly.execution import Execution
from qwen_npu.nightly.runner import run_suite
from qwen_npu.nightly.suite import load_suite
from qwen_npu.nightly.verdict import Verdict
from tests.integration.nightly_notebooks import CLAIM, DONE, write_notebook, write_suite


def damaged(path: Path) -> None:
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [None, 5]}))


def test_a_bad_item_costs_nobody_else_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "unforeseen", "other"):
        write_notebook(tmp_path / f"{name}.ipynb", [CLAIM, DONE])
    damaged(tmp_path / "cells.ipynb")
    (tmp_path / "binary.ipynb").write_bytes(b"\xff\xfe\x00")
    items = [{"notebook": f"{name}.ipynb"} for name in ("unforeseen", "cells", "binary", "other", "good")]
    suite = write_suite(tmp_path / "suite.toml", items)
    text = suite.read_text() + '\n[[item]]\nid = "nan"\nnotebook = "good.ipynb"\nparameters = { n = nan }\n'
    suite.write_text(text)
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "other.json").write_text('{"schema": 1, "records": {"bytes": 5}}')

    start = Execution.start

    def sometimes(execution: Execution) -> object:
        if execution.item.id == "unforeseen":
            raise KeyError("nobody foresaw this")
        return start(execution)

    monkeypatch.setattr(Execution, "start", sometimes)
    outcome = run_suite(suite, tmp_path / "out", jobs=2)
    found = {result.item: (result.verdict, result.reason) for result in outcome.results}
    assert found["good"][0] is Verdict.PASS
    wanted = {
        "unforeseen": (Verdict.INFRA, "KeyError"),
        "cells": (Verdict.ERROR, "cell 0 is no cell"),
        "binary": (Verdict.ERROR, "cannot be read"),
        "nan": (Verdict.ERROR, "'n' is nan"),
        "other": (Verdict.INFRA, "other.json cannot be used"),
    }
    for name, (verdict, words) in wanted.items():
        assert found[name][0] is verdict, (name, found[name])
        assert words in found[name][1]
    assert not outcome.fine
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {item["item"] for item in report["items"]} == found.keys()


@pytest.mark.parametrize("budget", ["inf", "nan"])
def test_a_budget_is_a_number_of_seconds(tmp_path: Path, budget: str) -> None:
    write_notebook(tmp_path / "good.ipynb", [DONE])
    suite = write_suite(tmp_path / "suite.toml", [{"notebook": "good.ipynb"}])
    suite.write_text(suite.read_text().replace("budget_s = 60", f"budget_s = {budget}"))
    with pytest.raises(SuiteError, match="line 3: budget_s"):
        load_suite(suite)


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    write_notebook(tmp_path / "good.ipynb", [CLAIM, DONE])
    suite = write_suite(tmp_path / "suite.toml", [{"notebook": "good.ipynb"}])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("index.html", "run.lock"):
        (theirs / name).write_text("mine")
    for text in ("mine", "{}", '{"run": "training", "suite": "mine", "items": 3}'):
        (theirs / "run.json").write_text(text)
        with pytest.raises(UsageError, match="files of others"):
            run_suite(suite, theirs)
    assert {path.read_text() for path in theirs.iterdir()} == {"mine", text}


def test_a_report_takes_away_only_what_the_earlier_one_wrote(tmp_path: Path) -> None:
    write_notebook(tmp_path / "good.ipynb", [CLAIM, DONE])
    suite = write_suite(tmp_path / "suite.toml", [{"notebook": "good.ipynb"}])
    out = tmp_path / "out"
    run_suite(suite, out)
    (out / "notes.html").write_text("mine")
    (out / "good.html").write_text("stale")
    run_suite(suite, out)
    assert (out / "notes.html").read_text() == "mine"
    assert "stale" not in (out / "good.html").read_text()[:100]
