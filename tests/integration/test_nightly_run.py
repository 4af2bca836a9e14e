"""The runner with real kernels: right verdicts, nothing lost, nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from qwen_npu.errors import UsageError
from qwen_npu.nightly.cards import lease_card
from qwen_npu.nightly.commands import add_commands
from qwen_npu.nightly.files import read_json
from qwen_npu.nightly.processes import marked
from qwen_npu.nightly.runner import run_one, run_suite
from qwen_npu.nightly.verdict import ItemResult, Outcome, Verdict, read_verdict
from tests.integration.nightly_notebooks import CLAIM, DONE, PLOT, write_notebook, write_suite

HOLD_AND_FLOOD = """
import ctypes
libc = ctypes.PyDLL(None)  # holds the interpreter while in C
text = b"native line\\n" * 20_000
libc.write(1, text, len(text))
libc.sleep(1000)
"""

# name: cells, keys of the suite's item, verdict, words of the reason
FAULTS: dict[str, tuple[list[str], dict[str, Any], Verdict, str]] = {
    "sigkill": (
        ["import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"],
        {},
        Verdict.DEAD_KERNEL,
        "SIGKILL in cell 3",
    ),
    "segfault": (["import ctypes; ctypes.string_at(0)"], {}, Verdict.DEAD_KERNEL, "SIGSEGV"),
    "os_exit": (["import os; os._exit(0)"], {}, Verdict.DEAD_KERNEL, "ended with status 0"),
    "sys_exit": (["import sys; sys.exit(0)", DONE], {}, Verdict.INCOMPLETE, "SystemExit(0)"),
    "hang_python": (["print('before')", "while True: pass"], {"budget_s": 40}, Verdict.TIMEOUT, "line 1 in <module>"),
    "hang_c": (["print('before')", HOLD_AND_FLOOD], {"budget_s": 40}, Verdict.TIMEOUT, "line 5 in <module>"),
    "flood": (["while True: print('x' * 100_000)"], {}, Verdict.ERROR, "flood"),
    "child": (
        ["import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)", CLAIM, DONE],
        {},
        Verdict.PASS,
        "1 records",
    ),
    "error": (["1 / 0"], {}, Verdict.ERROR, "ZeroDivisionError: division by zero in cell 2 (`1 / 0`)"),
    "failed": ([CLAIM, "assert n == 4, 'n is %d' % n"], {}, Verdict.FAIL, "n is 3 in cell 3"),
    "swallowed": (
        ["try:\n    1 / 0\nexcept Exception:\n    pass\nprint('SUCCESS')", DONE],
        {"records": ["bytes"]},
        Verdict.INCOMPLETE,
        "record missing: bytes",
    ),
    "no_record": ([CLAIM, DONE], {"records": ["bytes", "tokens"]}, Verdict.INCOMPLETE, "record missing: tokens"),
    "no_end": ([CLAIM], {}, Verdict.INCOMPLETE, "records.done() was never called"),
    "unknown_parameter": ([DONE], {"parameters": {"m": 1}}, Verdict.ERROR, "no parameter 'm'"),
    "wrong_type": ([DONE], {"parameters": {"n": "three"}}, Verdict.ERROR, "Expected: int"),
    "no_kernelspec": ([DONE], {"kernel": "no-such-kernel"}, Verdict.INFRA, "no kernel 'no-such-kernel'"),
    "no_card": ([DONE], {"device": "npu"}, Verdict.SKIPPED, "needs an NPU card"),
    "good": ([PLOT, CLAIM, DONE], {"records": ["bytes"], "parameters": {"n": 2}}, Verdict.PASS, "1 records"),
}
QUICK = ("error", "swallowed", "unknown_parameter", "wrong_type", "no_card", "good")


def suite_of(folder: Path, names: tuple[str, ...], *, untagged: bool = False, budget_s: float = 120) -> Path:
    items = []
    for name in names:
        cells, keys, _, _ = FAULTS[name]
        write_notebook(folder / f"{name}.ipynb", cells)
        items.append({"notebook": f"{name}.ipynb", **keys})
    if untagged:
        write_notebook(folder / "untagged.ipynb", [DONE], parameters=None)
        items.append({"notebook": "untagged.ipynb"})
    return write_suite(folder / "suite.toml", items, budget_s=budget_s)


def by_name(outcome: Outcome) -> dict[str, ItemResult]:
    return {result.item: result for result in outcome.results}


def assert_nothing_left(out: Path) -> None:
    run = read_json(out / "run.json")
    assert run is not None
    assert marked(f"{run['run']}/") == []
    jobs = [read_json(path) or {} for path in out.glob("items/*/job.json")]
    assert not [job["ipc"] for job in jobs if Path(job["ipc"]).exists()]


@pytest.fixture(autouse=True)
def no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A commit made while the tests run would change what a verdict is about."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_NPU_CARDS", "")


def check_faults(tmp_path: Path, names: tuple[str, ...], jobs: int) -> Outcome:
    said: list[str] = []
    suite = suite_of(tmp_path, names, untagged=True)
    outcome = run_suite(suite, tmp_path / "out 报告", jobs=jobs, say=said.append)
    results = by_name(outcome)
    found = {name: (results[name].verdict, FAULTS[name][3] in results[name].reason) for name in names}
    wanted = {name: (FAULTS[name][2], True) for name in names}
    assert found == wanted, {name: results[name].reason for name in names if found[name] != wanted[name]}
    assert results["untagged"].verdict is Verdict.ERROR
    assert "no code cell tagged 'parameters'" in results["untagged"].reason
    assert outcome.exit_code == 1
    for result in outcome.results:
        assert (outcome.out / f"{result.item}.html").stat().st_size < 8e6
        assert read_verdict(outcome.out / "items" / result.item) == result
    assert len(said) == len(outcome.results)
    assert_nothing_left(outcome.out)
    return outcome


@pytest.mark.usefixtures("no_cards")
def test_quick_faults_and_the_report(tmp_path: Path) -> None:
    outcome = check_faults(tmp_path, QUICK, jobs=2)
    report = json.loads((outcome.out / "report.json").read_text(encoding="utf-8"))
    assert report["counts"] == outcome.counts
    assert [item["item"] for item in report["items"]] == [*QUICK, "untagged"]
    cases = ET.parse(outcome.out / "junit.xml").getroot()
    assert (cases.get("tests"), cases.get("errors"), cases.get("skipped")) == ("7", "5", "1")
    index = outcome.index.read_text(encoding="utf-8")
    first_screen = index[: index.index("<table")]
    assert "ZeroDivisionError: division by zero" in first_screen
    assert "good.html" not in first_screen
    assert index.index("error.html") < index.index("good.html")
    page = (outcome.out / "good.html").read_text(encoding="utf-8")
    assert page.count('<div class="plot"') == 2
    assert "</script> 表情" not in page
    assert "你好" in page
    good = by_name(outcome)["good"]
    assert good.records[0]["value"] == 2048
    assert good.cells[0]["cell"] == 1
    assert good.environment["driver"]


@pytest.mark.full
@pytest.mark.usefixtures("no_cards")
def test_every_fault(tmp_path: Path) -> None:
    outcome = check_faults(tmp_path, tuple(FAULTS), jobs=4)
    results = by_name(outcome)
    assert "native line" in (outcome.out / "items/hang_c/native.log").read_text(encoding="utf-8")
    assert "Segmentation fault" in results["segfault"].log_tail
    assert "KeyboardInterrupt" in (outcome.out / "items/hang_python/notebook.ipynb").read_text(encoding="utf-8")
    assert "before" in (outcome.out / "items/hang_c/notebook.ipynb").read_text(encoding="utf-8")
    assert results["child"].notes[-1].startswith("1 process(es) outlived")


@pytest.mark.full
def test_24_at_once(tmp_path: Path) -> None:
    write_notebook(tmp_path / "t.ipynb", [CLAIM, DONE])
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "t.ipynb", "grid": {"n": list(range(24))}}], budget_s=300)
    outcome = run_suite(suite, tmp_path / "out", jobs=24)
    assert outcome.counts == {"PASS": 24}
    assert [result.records[0]["value"] for result in outcome.results] == [1024 * n for n in range(24)]
    assert_nothing_left(outcome.out)


RUN = "import sys; from qwen_npu.nightly.runner import run_suite; sys.exit(run_suite(*sys.argv[1:3], jobs=2).exit_code)"


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[tuple[Path, Path, subprocess.Popen[bytes]]]:
    """A run in a process of its own, caught when its first item is done and the second, which takes long, is in a cell
    of C code that holds the interpreter."""
    write_notebook(tmp_path / "first.ipynb", [CLAIM, DONE])
    gate = tmp_path / "gate"
    slow = f"import ctypes, pathlib\nif not pathlib.Path({str(gate)!r}).exists():\n    ctypes.PyDLL(None).sleep(1000)"
    write_notebook(tmp_path / "slow.ipynb", [slow, CLAIM, DONE])
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "first.ipynb"}, {"notebook": "slow.ipynb"}], budget_s=300)
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", RUN, str(suite), str(out)])
    try:
        deadline = time.monotonic() + 120
        while not (
            read_verdict(out / "items/first") and (read_json(out / "items/slow/progress.json") or {}).get("cell") == 2
        ):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        gate.touch()
        yield suite, out, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runner_ended_then_resumed(
    slow_run: tuple[Path, Path, subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    suite, out, process = slow_run
    with pytest.raises(UsageError, match="another run is writing"):
        run_suite(suite, out)
    process.send_signal(number)
    status = process.wait(timeout=60)
    first = read_verdict(out / "items/first")
    assert first is not None
    assert read_verdict(out / "items/slow") is None
    run = read_json(out / "run.json")
    assert run is not None
    if number is signal.SIGTERM:
        assert status == 1
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert report["counts"] == {"PASS": 1, "INCOMPLETE": 1}
        assert "SIGTERM" in report["items"][1]["reason"]
    else:
        assert status == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while marked(f"{run['run']}/"):
        assert time.monotonic() < deadline, "processes outlived the runner"
        time.sleep(0.1)
    outcome = run_suite(suite, out, resume=True)
    assert outcome.counts == {"PASS": 2}
    assert outcome.results[0] == first
    assert_nothing_left(out)


@pytest.mark.full
def test_failed_items_run_again_and_baselines_decide(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", [CLAIM, DONE])
    write_notebook(
        tmp_path / "b.ipynb", [f"assert __import__('pathlib').Path({str(tmp_path / 'ok')!r}).exists()", DONE]
    )
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "a.ipynb"}, {"notebook": "b.ipynb"}])
    out, history = tmp_path / "out", tmp_path / "h.sqlite"
    first = run_suite(suite, out, history=history)
    assert [result.verdict for result in first.results] == [Verdict.PASS, Verdict.FAIL]
    (tmp_path / "ok").touch()
    second = run_suite(suite, out, failed=True, history=history)
    assert [result.verdict for result in second.results] == [Verdict.PASS, Verdict.PASS]
    assert second.results[0] == first.results[0]

    assert command("nightly", "accept", str(out), "--item", "a", "--reason", "as computed") == 0
    write_notebook(notebook, [CLAIM.replace("1024", "1025"), DONE])
    third = run_suite(suite, tmp_path / "out3", history=history, items=["a"])
    assert third.results[0].verdict is Verdict.FAIL
    assert third.results[0].reason == "bytes: 3,075 bytes, baseline 3,072 bytes"
    row = json.loads((tmp_path / "out3/report.json").read_text(encoding="utf-8"))["items"][0]
    assert row["changes"] == ["bytes: 3,072 → 3,075"]
    assert row["since"].startswith("last good 20")
    assert "<svg" in third.index.read_text(encoding="utf-8")


@pytest.mark.full
def test_card_busy_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_NPU_CARDS", "97")
    write_notebook(tmp_path / "t.ipynb", ["import os; print(os.environ['ASCEND_RT_VISIBLE_DEVICES'])", DONE])
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "t.ipynb", "device": "npu"}])
    lease = lease_card([97])
    assert lease is not None
    busy = run_suite(suite, tmp_path / "busy").results[0]
    assert (busy.verdict, busy.reason) == (Verdict.INFRA, "every card is busy (97)")
    lease.release()
    free = run_suite(suite, tmp_path / "free").results[0]
    assert free.verdict is Verdict.PASS
    assert free.environment["card"] == 97
    assert "97\\n" in (tmp_path / "free/items/t/notebook.ipynb").read_text(encoding="utf-8")
    again = lease_card([97])
    assert again is not None
    again.release()


@pytest.mark.full
def test_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    try:
        fill = "open('fill', 'wb').write(bytes(64 * 2**20))"
        write_notebook(
            tmp_path / "a.ipynb", [f"try:\n    {fill}\nexcept OSError:\n    pass\nprint('x' * 9_000_000)", DONE]
        )
        write_notebook(tmp_path / "b.ipynb", [DONE])
        suite = write_suite(tmp_path / "s.toml", [{"notebook": "a.ipynb"}, {"notebook": "b.ipynb"}])
        outcome = run_suite(suite, small / "out", jobs=1)
        assert [result.verdict for result in outcome.results] == [Verdict.INFRA, Verdict.INFRA]
        assert "cannot be written" in outcome.results[0].reason
        assert outcome.exit_code == 1
        assert_nothing_left(small / "out")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_output_that_cannot_be_used(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, ("good",))
    with pytest.raises(UsageError, match="holds files of others"):
        run_suite(suite, tmp_path)
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(UsageError, match="cannot be used"):
        run_suite(suite, occupied / "out")
    with pytest.raises(UsageError, match="jobs is 0"):
        run_suite(suite, tmp_path / "out", jobs=0)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that even root cannot write")
def test_read_only_output(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        run_suite(suite_of(tmp_path, ("good",)), "/proc/self/report")


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, ("unknown_parameter",))
    run_suite(suite, tmp_path / "out")
    with (tmp_path / "out/run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run"):
            run_suite(suite, tmp_path / "out")


def test_one_notebook(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "数.ipynb", ["assert text == '猫 😀'", DONE], parameters="text = ''\n")
    result = run_one(notebook, tmp_path / "out", text="猫 😀")
    assert result.verdict is Verdict.PASS, result.reason
    assert (tmp_path / "out/数.html").exists()


def command(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an item that never starts: the commands' own work, without a kernel."""
    suite = suite_of(tmp_path, ("unknown_parameter",))
    out, history = tmp_path / "out", tmp_path / "h.sqlite"
    arguments = ("nightly", "run", str(suite), "--out", str(out), "--history", str(history))
    assert command(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(out / "index.html")
    assert printed.err.startswith("ERROR")
    assert command(*arguments, "--json") == 1
    assert json.loads(capsys.readouterr().out)["index"] == str(out / "index.html")
    shutil.rmtree(out / "items")
    assert command("nightly", "report", str(out), "--json") == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"INCOMPLETE": 1}
    with pytest.raises(UsageError, match="did not reach its end"):
        command("nightly", "accept", str(out), "--reason", "x")
    assert command("nightly", "history", str(history), "--json") == 0
    nights = json.loads(capsys.readouterr().out)["unknown_parameter"]
    assert [night["verdict"] for night in nights["nights"]] == ["ERROR", "ERROR"]
    assert nights["last_good"] is None
    assert command("nightly", "history", str(history)) == 0
    assert "last good never" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no run in"):
        command("nightly", "report", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="--out DIR"):
        command("nightly", "run", str(suite), "--resume")


def test_importing_the_commands_is_light() -> None:
    heavy = ("pydantic", "papermill", "nbformat", "sqlite3")
    code = f"import qwen_npu.nightly.commands, sys; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert result.stdout.strip() == "[]"
