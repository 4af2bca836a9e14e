"""A run of a suite: which items run when, what is kept when the run itself is ended, and how it is taken up again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from qwen_npu.errors import UsageError
from qwen_npu.nightly.baseline import Baseline, read_baseline
from qwen_npu.nightly.environment import environment
from qwen_npu.nightly.execution import Execution, digest_of, now, recorded_processes
from qwen_npu.nightly.files import LOCK, prepare_out, read_json, run_of, write_json
from qwen_npu.nightly.history import History
from qwen_npu.nightly.processes import sweep
from qwen_npu.nightly.report import page_name, write_page, write_report
from qwen_npu.nightly.suite import Item, Suite, load_suite
from qwen_npu.nightly.verdict import ItemResult, Outcome, Verdict, read_verdict

SCHEMA = 1
_TICK_S = 0.05

Say = Callable[[str], None]


def run_suite(
    suite: str | Path | Suite,
    out_dir: str | Path,
    *,
    jobs: int | None = None,
    tags: Sequence[str] = (),
    items: Sequence[str] = (),
    resume: bool = False,
    failed: bool = False,
    history: str | Path | None = None,
    scheduler: str | None = None,
    say: Say | None = None,
) -> Outcome:
    """Runs the notebooks of a suite headless and writes OUT/index.html, one page a notebook, report.json, junit.xml.

    Args:
        suite: a loaded suite, a TOML file, or the name of one that ships with the package.
        out_dir: the report's directory; empty, or one of an earlier run (which is replaced unless `resume`).
        jobs: items at a time; the number of CPUs by default.
        tags, items: run only those (tags: any of them).
        resume: keep the verdicts of an earlier run in `out_dir` that are about the same notebook, parameters,
            expectations and commit.
        failed: like `resume`, but run again what is neither PASS nor SKIPPED.
        history: the SQLite file of past nights, read and extended.
        scheduler: address of a Dask scheduler; items run on its workers.
        say: called with one line for each thing that happens.

    Raises:
        SuiteError: the suite file has a fault. UsageError: `out_dir` cannot be used, or another run is writing to it.
    """
    plan = suite if isinstance(suite, Suite) else load_suite(suite)
    if tags or items:
        plan = plan.select(tags, items)
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}", expected="a number from 1")
    if history is not None:
        History(Path(history)).close()  # a file that is none must not cost a night
    out = Path(out_dir).absolute()
    prepare_out(out)
    with _locked(out), _stop_on_signals() as stopped:
        run = Run(plan, out, resume or failed, failed, say or (lambda _: None))
        if scheduler is not None:
            from qwen_npu.nightly.cluster import run_on_cluster

            run_on_cluster(run, scheduler, stopped)
        else:
            _run_locally(run, jobs or os.cpu_count() or 1, stopped)
        return run.close(stopped[0] if stopped else "", Path(history) if history is not None else None)


class Run:
    """The state of a run: what is to do, what is known, what is on the disk."""

    def __init__(self, suite: Suite, out: Path, keep: bool, failed: bool, say: Say) -> None:
        self.suite, self.out, self.say = suite, out, say
        self.id = uuid.uuid4().hex
        self.environment = environment()
        self.started = now()
        self.results: dict[str, ItemResult] = {}
        self.unwritten: list[str] = []
        earlier = run_of(out)
        self._sweep(earlier)
        if keep and earlier is not None and earlier.get("suite") == suite.name:
            # the same night goes on, also in the history
            self.id, self.started = earlier["run"], earlier["started"]
        self.baselines: dict[str, Baseline | None] = {}
        self.digests = {item.id: digest_of(item, self.environment["commit"]) for item in suite.items}
        if keep:
            self._keep(failed)
        else:
            self._clear(earlier)
        self._write_run("")
        self.todo = [item for item in suite.items if item.id not in self.results and self._can_be_judged(item)]

    def _can_be_judged(self, item: Item) -> bool:
        """Reads the item's baseline. A damaged one costs the item its verdict, and no other item anything."""
        try:
            self.baselines[item.id] = read_baseline(self.suite.baselines, item.id)
        except UsageError as error:
            self.done(self._not_run(item, Verdict.INFRA, str(error)))
            return False
        return True

    def folder(self, item: Item) -> Path:
        return self.out / "items" / item.id

    def execution(self, item: Item) -> Execution:
        return Execution(
            item,
            self.folder(item),
            run=self.id,
            environment=self.environment,
            baseline=self.baselines[item.id],
            digest=self.digests[item.id],
        )

    def done(self, result: ItemResult) -> None:
        """Keeps a verdict: in memory first, then on the disk; a disk that refuses it makes the item INFRA."""
        self.results[result.item] = result
        self.say(f"{result.verdict.value:<12} {result.item}  {result.wall_s:.1f} s  {result.reason}")
        folder = self.out / "items" / result.item
        try:
            folder.mkdir(parents=True, exist_ok=True)
            result.write(folder)
            write_page(self.out, result)
        except OSError as error:
            if result.verdict.fine:
                result.verdict = Verdict.INFRA
                result.reason = f"the output cannot be written: {error} (it was {result.reason})"
            self.unwritten.append(f"{result.item}: {error}")
            self.say(f"{result.verdict.value:<12} {result.item}  {result.reason}; not on the disk: {error}")

    def close(self, interrupted: str, history: Path | None) -> Outcome:
        """Writes the report of all items, those that never ran as INCOMPLETE."""
        why = f"not run to its end: {interrupted or 'the run was ended'}; `--resume` takes it up again"
        results = [
            self.results.get(item.id) or self._not_run(item, Verdict.INCOMPLETE, why) for item in self.suite.items
        ]
        index = self.out / "index.html"
        try:
            self._write_run(interrupted)
            write_report(self.out, results=results, history=history)
        except OSError as error:
            self.unwritten.append(f"report: {error}")
            self.say(f"the report cannot be written: {error}")
        outcome = Outcome(self.suite.name, self.out, index, results, interrupted)
        if self.unwritten and outcome.fine:
            outcome.interrupted = "the report cannot be written"
        return outcome

    def _not_run(self, item: Item, verdict: Verdict, reason: str) -> ItemResult:
        return ItemResult(
            item=item.id,
            notebook=item.notebook.name,
            verdict=verdict,
            reason=reason,
            parameters={
                name: value if isinstance(value, (int, float, str, bool)) else repr(value)
                for name, value in item.parameters.items()
            },
            tags=list(item.tags),
            budget_s=item.budget_s,
            environment=self.environment,
        )

    def _keep(self, failed: bool) -> None:
        for item in self.suite.items:
            result = read_verdict(self.folder(item))
            if result is None or result.digest != self.digests[item.id]:
                continue
            if not failed or result.verdict.fine:
                self.results[item.id] = result
        if self.results:
            self.say(f"{len(self.results)} verdicts kept from the earlier run")

    def _clear(self, earlier: dict[str, Any] | None) -> None:
        """Takes away what the earlier run wrote, and nothing else."""
        shutil.rmtree(self.out / "items", ignore_errors=True)
        pages = [page_name(str(item)) for item in (earlier or {}).get("items", [])]
        for name in [*pages, "index.html", "report.json", "junit.xml"]:
            (self.out / Path(name).name).unlink(missing_ok=True)

    def _sweep(self, earlier: dict[str, Any] | None) -> None:
        """Ends what a run that was killed left behind here. We hold the directory's lock, so none is alive."""
        if earlier is None:
            return
        folders = [path for path in (self.out / "items").glob("*") if path.is_dir()]
        recorded = [pair for folder in folders for pair in recorded_processes(folder)]
        ended = sweep(f"{earlier['run']}/", recorded)
        if ended:
            self.say(f"{len(ended)} processes of an earlier run ended")
        for folder in folders:
            ipc = (read_json(folder / "processes.json") or {}).get("ipc")
            if isinstance(ipc, str) and Path(ipc).name.startswith("qn-"):
                shutil.rmtree(ipc, ignore_errors=True)

    def _write_run(self, interrupted: str) -> None:
        write_json(
            self.out / "run.json",
            {
                "schema": SCHEMA,
                "run": self.id,
                "suite": self.suite.name,
                "suite_file": str(self.suite.path),
                "baselines": str(self.suite.baselines),
                "started": self.started,
                "written": now(),
                "interrupted": interrupted,
                "items": [item.id for item in self.suite.items],
                "environment": self.environment,
            },
        )


def _run_locally(run: Run, jobs: int, stopped: list[str]) -> None:
    waiting = list(run.todo)
    running: list[Execution] = []
    try:
        while (waiting or running) and not stopped:
            while waiting and len(running) < jobs and not stopped:
                execution = run.execution(waiting.pop(0))
                result = _guarded(execution, execution.start)
                if result is None:
                    running.append(execution)
                else:
                    run.done(result)
            for execution in list(running):
                result = _guarded(execution, execution.poll)
                if result is not None:
                    running.remove(execution)
                    run.done(result)
            if running:
                time.sleep(_TICK_S)
    finally:
        for execution in running:
            execution.stop()


def _guarded(execution: Execution, step: Callable[[], ItemResult | None]) -> ItemResult | None:
    try:
        return step()
    except Exception as error:
        return execution.broken(error)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Holds the output directory for this run alone."""
    with (out / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                f"another run is writing to {out}", expected="one run a directory", fix="name another one with --out"
            ) from error
        yield


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[str]]:
    """A list that gets the signal's name when the run is asked to end (SIGTERM, SIGINT, SIGHUP)."""
    stopped: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def note(number: int, _: FrameType | None) -> None:
        stopped.append(f"ended by {signal.Signals(number).name}")

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_one(notebook: str | Path, out_dir: str | Path, **parameters: Any) -> ItemResult:
    """Runs one notebook with parameters, outside any suite, and writes its report.

    Raises:
        NotebookError: no such notebook, unknown or badly typed parameter.
    """
    from qwen_npu.nightly.preflight import check
    from qwen_npu.nightly.suite import DEFAULT_BUDGET_S

    path = Path(notebook).resolve()
    values = check(path, parameters)
    item = Item(
        id=path.stem,
        notebook=path,
        parameters=values,
        tags=(),
        budget_s=DEFAULT_BUDGET_S,
        records=(),
        device="any",
        kernel=None,
    )
    suite = Suite(name=path.stem, path=path, baselines=path.parent / "baselines", items=(item,))
    return run_suite(suite, out_dir).results[0]


__all__ = ["Say", "run_one", "run_suite"]
