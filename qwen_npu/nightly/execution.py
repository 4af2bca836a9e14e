"""One item on this machine: its process, its budget, its end, its verdict. Polled by the runner, which has several."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

import qwen_npu
from qwen_npu.errors import NotebookError, WorkbenchError
from qwen_npu.nightly import kernel
from qwen_npu.nightly.baseline import Baseline
from qwen_npu.nightly.cards import Lease, lease_card, list_cards, used_memory_percent
from qwen_npu.nightly.files import read_json, read_lines, write_json
from qwen_npu.nightly.judge import Seen, judge
from qwen_npu.nightly.preflight import check
from qwen_npu.nightly.processes import MARKER, end, marked, start_ticks, sweep
from qwen_npu.nightly.suite import Item
from qwen_npu.nightly.verdict import ItemResult, Verdict
from qwen_npu.records import RECORDS_VARIABLE

LOG_LIMIT_BYTES = 64 * 2**20
"""Size of the native log that counts as a flood."""
SILENCE_S = 60.0
"""A worker whose heartbeat is older has hung itself, whatever its notebook does."""
TRACE_GRACE_S, INTERRUPT_GRACE_S = 0.3, 3.0
LEAST_FREE_BYTES = 32 * 2**20
"""Free space without which an item is not started: its output could not be kept."""
CARD_MEMORY_SLACK_PERCENT = 2.0
_UNIX_SOCKET_LIMIT_BYTES = 90
"""The path of a socket may hold 107 bytes; the kernel's sockets add a few to their directory's."""


class Execution:
    """An item under way in `folder`. `start`, then `poll` until it gives a result; `stop` ends it without one."""

    def __init__(
        self,
        item: Item,
        folder: Path,
        *,
        run: str,
        environment: dict[str, Any],
        baseline: Baseline | None,
        digest: str,
    ) -> None:
        self.item = item
        self.folder = folder
        self.marker = f"{run}/{item.id}/"
        self.environment = environment
        self.baseline = baseline
        self.digest = digest
        self.process: subprocess.Popen[bytes] | None = None
        self.log: IO[bytes] | None = None
        self.ipc: Path | None = None
        self.lease: Lease | None = None
        self.memory_before: float | None = None
        self.ended_by = ""
        self.started = now()
        self.begun = time.monotonic()
        self.over_since: float | None = None
        self.interrupted = False

    def start(self) -> ItemResult | None:
        """Starts the worker. Gives a result at once where the item cannot or need not run."""
        try:
            clear(self.folder)
            if shutil.disk_usage(self.folder).free < LEAST_FREE_BYTES:
                return self._result(Verdict.INFRA, f"less than {LEAST_FREE_BYTES // 2**20} MiB free for the output")
            if self.item.device == "npu":
                refused = self._take_card()
                if refused is not None:
                    return refused
            values = check(self.item.notebook, self.item.parameters)
            self._spawn(values)
        except NotebookError as error:
            self._tidy()
            return self._result(Verdict.ERROR, str(error))
        except (OSError, WorkbenchError) as error:
            self._tidy()
            return self._result(Verdict.INFRA, f"the item cannot be started: {error}")
        return None

    def poll(self) -> ItemResult | None:
        """Enforces the budget and the limits; gives the result once all processes of the item have ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            return self._finish()
        elapsed = time.monotonic() - self.begun
        if elapsed > self.item.budget_s:
            self._out_of_budget(elapsed - self.item.budget_s)
        elif self._log_size() > LOG_LIMIT_BYTES:
            self._end_all("flood")
        elif self._silent_s() > SILENCE_S:
            self._end_all("silence")
        return None

    def broken(self, error: Exception) -> ItemResult:
        """Ends the item whose start or end raised what nobody foresaw: that costs its verdict, not the night."""
        self.stop()
        result = self._result(Verdict.INFRA, f"the runner failed on this item: {type(error).__name__}: {error}")
        result.log_tail = "".join(traceback.format_exception(error))
        return result

    def stop(self) -> None:
        """Ends all processes of the item at once; leaves no verdict."""
        if self.process is not None:
            end([self.process.pid])
            sweep(self.marker, self._recorded())
            self.process.wait()
        self._tidy()

    def _take_card(self) -> ItemResult | None:
        cards = list_cards()
        if not cards:
            return self._result(Verdict.SKIPPED, "needs an NPU card; this machine has none")
        self.lease = lease_card(cards)
        if self.lease is None:
            return self._result(Verdict.INFRA, f"every card is busy ({', '.join(map(str, cards))})")
        self.memory_before = used_memory_percent(self.lease.card)
        return None

    def _spawn(self, values: dict[str, Any]) -> None:
        folder = self.folder.resolve()
        (folder / "files").mkdir()
        self.ipc = _short_directory()
        job = {
            "notebook": str(self.item.notebook),
            "output": str(folder / "notebook.ipynb"),
            "parameters": values,
            "kernel": self.item.kernel or kernel.NAME,
            "ipc": str(self.ipc),
            "cwd": str(folder / "files"),
            "start_timeout_s": max(60, int(self.item.budget_s)),
            "runner": os.getpid(),
        }
        write_json(folder / "job.json", job, durable=False)
        environment = dict(os.environ)
        environment.update(
            {
                MARKER: self.marker,
                RECORDS_VARIABLE: str(folder / "records.jsonl"),
                "QWEN_NPU_HEADLESS": "1",
                "QWEN_NPU_FILES": str(folder / "files"),
                "PYTHONPATH": os.pathsep.join(
                    part
                    for part in (str(Path(qwen_npu.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))
                    if part
                ),
                "PYTHONUNBUFFERED": "1",
                "JUPYTER_RUNTIME_DIR": str(self.ipc),
                "IPYTHONDIR": str(self.ipc / "ipython"),
                "NO_COLOR": "1",
                "PLOTLY_RENDERER": "plotly_mimetype",
                "TQDM_DISABLE": "1",
            }
        )
        if self.lease is not None:
            environment["ASCEND_RT_VISIBLE_DEVICES"] = str(self.lease.card)
        self.log = (folder / "native.log").open("wb")
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qwen_npu.nightly.worker", str(folder / "job.json")],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(self.lease.descriptor,) if self.lease is not None else (),
        )
        write_json(
            folder / "processes.json",
            {"worker": self.process.pid, "worker_ticks": start_ticks(self.process.pid), "ipc": str(self.ipc)},
            durable=False,
        )

    def _out_of_budget(self, over_s: float) -> None:
        """First the kernel says where it is, then it is interrupted (so that the notebook keeps a traceback), then all
        is ended: code in C answers to neither."""
        self.ended_by = "budget"
        pid = self._kernel_pid()
        if self.over_since is None:
            self.over_since = over_s
            if pid is not None and self.item.kernel is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            return
        waited = over_s - self.over_since
        if waited > TRACE_GRACE_S and not self.interrupted:
            self.interrupted = True
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
        if waited > TRACE_GRACE_S + INTERRUPT_GRACE_S or pid is None:
            self._end_all("budget")

    def _end_all(self, why: str) -> None:
        self.ended_by = why
        if self.process is not None:
            end([self.process.pid])
            end(marked(self.marker))

    def _kernel_pid(self) -> int | None:
        """The kernel's pid, if that process still is the same."""
        progress = read_json(self.folder / "progress.json") or {}
        pid, ticks = progress.get("kernel"), progress.get("kernel_ticks")
        if pid is None or (ticks is not None and start_ticks(pid) != ticks):
            return None
        return int(pid)

    def _recorded(self) -> list[tuple[int, int | None]]:
        return recorded_processes(self.folder)

    def _log_size(self) -> int:
        try:
            return (self.folder / "native.log").stat().st_size
        except OSError:
            return 0

    def _silent_s(self) -> float:
        try:
            age = time.time() - (self.folder / "heartbeat").stat().st_mtime
        except OSError:
            return time.monotonic() - self.begun
        # a clock that was set back or forward is no silence
        return min(age, time.monotonic() - self.begun)

    def _finish(self) -> ItemResult:
        assert self.process is not None
        wall_s = time.monotonic() - self.begun
        recorded = self._recorded()
        ours = {pid for pid, _ in recorded}  # the kernel may be slow to leave: no orphan of the notebook's making
        orphans = [pid for pid in sweep(self.marker, recorded) if pid not in ours]
        progress = read_json(self.folder / "progress.json") or {}
        records = [line for line in read_lines(self.folder / "records.jsonl") if isinstance(line.get("name"), str)]
        text = self._trim_log()
        tail = "\n".join(line[:500] for line in text.splitlines()[-40:])
        last_cell = progress.get("cell")
        judgement = judge(
            Seen(
                account=read_json(self.folder / "account.json"),
                records=records,
                worker_status=self.process.returncode,
                ended_by=self.ended_by,
                budget_s=self.item.budget_s,
                last_cell=last_cell,
                last_source=progress.get("source", ""),
                stopped_by=_left_early(self.folder / "notebook.ipynb"),
                where=_where(text) if self.ended_by == "budget" else "",
            ),
            self.item.records,
            self.baseline,
        )
        result = self._result(judgement.verdict, judgement.reason)
        result.wall_s = round(wall_s, 3)
        result.kernel_start_s = progress.get("kernel_start_s")
        result.cells = progress.get("cells", [])
        result.last_cell = last_cell
        result.records = records
        result.comparison = judgement.comparison
        result.notes = judgement.notes + self._notes(orphans)
        result.log_tail = tail
        peak = next((line.get("value") for line in records if line["name"] == "peak_device_bytes"), None)
        result.peak_device_bytes = peak if isinstance(peak, int) else None
        self._tidy()
        return result

    def _notes(self, orphans: list[int]) -> list[str]:
        notes = []
        if orphans and not self.ended_by:
            notes.append(f"{len(orphans)} process(es) outlived the worker and were ended")
        if self.lease is not None and self.memory_before is not None:
            after = used_memory_percent(self.lease.card)
            if after is not None and after > self.memory_before + CARD_MEMORY_SLACK_PERCENT:
                notes.append(
                    f"card {self.lease.card}: memory at {after:g} % afterwards, {self.memory_before:g} % before"
                )
        return notes

    def _trim_log(self, keep_bytes: int = 2**20) -> str:
        """Closes the native log, cuts out the middle of a flood, and gives its end."""
        if self.log is not None:
            self.log.close()
            self.log = None
        path = self.folder / "native.log"
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                if size > 2 * keep_bytes:
                    head = file.read(keep_bytes)
                    file.seek(size - keep_bytes)
                    tail = file.read()
                    note = f"\n... {size - 2 * keep_bytes} bytes left out ...\n".encode()
                    path.write_bytes(head + note + tail)
                else:
                    tail = file.read()
        except OSError:
            return ""
        return tail[-65536:].decode("utf-8", errors="replace")

    def _result(self, verdict: Verdict, reason: str) -> ItemResult:
        return ItemResult(
            item=self.item.id,
            notebook=self.item.notebook.name,
            verdict=verdict,
            reason=reason,
            parameters=_jsonable(self.item.parameters),
            tags=list(self.item.tags),
            started=self.started,
            wall_s=round(time.monotonic() - self.begun, 3),
            budget_s=self.item.budget_s,
            environment={**self.environment, "card": self.lease.card if self.lease else None},
            digest=self.digest,
        )

    def _tidy(self) -> None:
        if self.log is not None:
            self.log.close()
            self.log = None
        if self.ipc is not None:
            shutil.rmtree(self.ipc, ignore_errors=True)
            self.ipc = None
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        for name in ("heartbeat", "processes.json"):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


def recorded_processes(folder: Path) -> list[tuple[int, int | None]]:
    """The (pid, start) pairs that an item's folder names: its worker and its kernel."""
    worker = read_json(folder / "processes.json") or {}
    progress = read_json(folder / "progress.json") or {}
    pairs = [(worker.get("worker"), worker.get("worker_ticks")), (progress.get("kernel"), progress.get("kernel_ticks"))]
    return [(int(pid), ticks) for pid, ticks in pairs if pid is not None]


def clear(folder: Path) -> None:
    """An empty folder for an item: what an earlier attempt left is gone."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def digest_of(item: Item, commit: str) -> str:
    """What a verdict is about: notebook, parameters, expectations and the commit. Another digest, another run."""
    facts = json.dumps([item.model_dump(mode="json"), commit], sort_keys=True, default=repr)
    try:
        content = item.notebook.read_bytes()
    except OSError:
        content = b""
    return hashlib.sha256(facts.encode() + content).hexdigest()[:24]


def now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def _short_directory() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="qn-"))
    if len(os.fsencode(folder)) > _UNIX_SOCKET_LIMIT_BYTES and Path("/tmp").is_dir():
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="qn-", dir="/tmp"))
    return folder


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    """Parameters for the verdict file, also those that were refused."""
    try:
        facts: dict[str, Any] = json.loads(json.dumps(values, default=repr, allow_nan=False))
    except ValueError:  # no finite number, or a list within itself
        facts = {name: repr(value) for name, value in values.items()}
    return facts


def _left_early(output: Path) -> str:
    """ "SystemExit(...)" if an output of the notebook says that it left before its end, which papermill accepts."""
    for cell in (read_json(output) or {}).get("cells", []):
        for entry in cell.get("outputs", []):
            if entry.get("ename") == "SystemExit":
                return f"SystemExit({entry.get('evalue', '')})"
    return ""


def _where(log: str) -> str:
    """The innermost frame of the dump that SIGUSR1 made: "line 4 in <module>"."""
    dumps = log.split("(most recent call first)")
    if len(dumps) < 2:
        return ""
    match = re.search(r'File "(.*?)", line (\d+) in (\S+)', dumps[-1])
    if match is None:
        return ""
    name = Path(match.group(1)).name
    inside = "" if "ipykernel_" in match.group(1) else f" of {name}"
    return f"line {match.group(2)} in {match.group(3)}{inside}"
