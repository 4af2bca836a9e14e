"""Items on Dask workers, on loopback: a worker is killed in the middle, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_npu.errors import UsageError
from qwen_npu.nightly.runner import run_suite
from qwen_npu.nightly.verdict import Verdict
from tests.integration.nightly_notebooks import CLAIM, DONE, write_notebook, write_suite

pytest.importorskip("distributed")

pytestmark = pytest.mark.full


def dask(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:1] + [str(Path.cwd())])}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler and the processes of its two workers, the first of which has a card."""
    scheduler_log = tmp_path / "scheduler.log"
    processes = [
        dask("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show", log=scheduler_log)
    ]
    try:
        address = waited(lambda: re.search(r"Scheduler at:\s+(tcp://\S+)", scheduler_log.read_text()), 60).group(1)
        common = ["--no-nanny", "--no-dashboard", "--nthreads", "1", "--host", "127.0.0.1"]
        for number, resources in enumerate(([], ["--resources", "NPU=1"])):
            log = tmp_path / f"worker{number}.log"
            processes.append(dask("dask_worker", address, *common, *resources, log=log))
            waited(lambda log=log: re.search(r"Starting established connection|Registered to", log.read_text()), 60)
        yield address, processes[1:]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def waited(look, seconds: float):
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_twelve_items_and_a_worker_that_dies(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, workers = cluster
    mark = tmp_path / "slow-runs-here"
    slow = (
        "import os, pathlib, time\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "if n == 0 and not mark.exists():\n"
        "    mark.write_text(str(os.getppid()))\n"
        "    time.sleep(1000)"
    )
    write_notebook(tmp_path / "t.ipynb", [slow, CLAIM, DONE])
    write_notebook(tmp_path / "fail.ipynb", ["print('words')", "assert False, 'as wished'"])
    suite = write_suite(
        tmp_path / "s.toml",
        [{"notebook": "t.ipynb", "grid": {"n": list(range(11))}}, {"notebook": "fail.ipynb"}],
        budget_s=300,
    )
    killed: list[int] = []

    def kill_the_one_that_runs_it() -> None:
        waited(lambda: mark.exists() and mark.read_text(), 200)
        parent = int(Path(f"/proc/{mark.read_text()}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent in [worker.pid for worker in workers]
        os.kill(parent, signal.SIGKILL)
        killed.append(parent)

    killer = threading.Thread(target=kill_the_one_that_runs_it)
    killer.start()
    outcome = run_suite(suite, tmp_path / "out", scheduler=address)
    killer.join()
    assert len(killed) == 1
    assert outcome.counts == {"PASS": 11, "FAIL": 1}
    assert [result.records[0]["value"] for result in outcome.results[:11]] == [1024 * n for n in range(11)]
    retried = [result for result in outcome.results if result.attempts > 1]
    assert [result.item for result in retried] == ["t--n-0"]
    assert retried[0].attempts == 2
    assert "died while it ran this; run again on tcp://" in retried[0].notes[-1]
    fail = outcome.results[11]
    assert "as wished" in fail.reason
    assert "words" in (tmp_path / "out/items/fail/notebook.ipynb").read_text(encoding="utf-8")
    assert all((tmp_path / f"out/{result.item}.html").exists() for result in outcome.results)


def test_cards_are_asked_for(cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path) -> None:
    """The worker with NPU=1 gets the item; this machine has no card, so it says SKIPPED there, from its own look."""
    address, _ = cluster
    write_notebook(tmp_path / "t.ipynb", [DONE])
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "t.ipynb", "device": "npu"}])
    result = run_suite(suite, tmp_path / "out", scheduler=address).results[0]
    assert result.verdict is Verdict.SKIPPED
    assert result.worker.startswith("tcp://127.0.0.1")


def test_no_scheduler(tmp_path: Path) -> None:
    write_notebook(tmp_path / "t.ipynb", [DONE])
    suite = write_suite(tmp_path / "s.toml", [{"notebook": "t.ipynb"}])
    with pytest.raises(UsageError, match="no Dask scheduler answers"):
        run_suite(suite, tmp_path / "out", scheduler="tcp://127.0.0.1:9")
