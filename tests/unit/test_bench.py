"""The command that runs the benches: which, in a process each, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_npu.cli import EXIT_FINE, EXIT_MISTAKE, EXIT_VERDICT, main


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tests" / "bench"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    (folder / "bench_fine.py").write_text("print('ratio 1.0')")
    (folder / "bench_slow.py").write_text("import sys\nprint('ratio 9.0')\nsys.exit(1)")
    monkeypatch.setattr("qwen_npu.bench.benches_dir", lambda: folder)
    return folder


def test_a_figure_beyond_its_bound_is_a_verdict(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == EXIT_VERDICT
    told = capfd.readouterr().out
    assert told.index("== fine") < told.index("ratio 1.0") < told.index("== slow") < told.index("ratio 9.0")
    assert told.endswith("1 of 2 within their bounds slow\n")
    assert main(["bench", "fine"]) == EXIT_FINE


def test_json_is_one_object(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == EXIT_VERDICT
    facts = json.loads(capfd.readouterr().out)
    assert facts["beyond_bounds"] == ["slow"]
    assert [(row["name"], row["within_bounds"], row["output"]) for row in facts["benches"]] == [
        ("fine", True, "ratio 1.0\n"),
        ("slow", False, "ratio 9.0\n"),
    ]


def test_unknown_benches_and_installed_packages_are_told(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fast"]) == EXIT_MISTAKE
    assert "one of fine, slow" in capfd.readouterr().err
    for path in checkout.glob("*.py"):
        path.unlink()
    assert main(["bench"]) == EXIT_MISTAKE
    assert "Expected: a checkout" in capfd.readouterr().err
