"""Items sent to other machines through Dask `distributed`: what goes there, what comes home, what happens when a worker
dies. Dask schedules; an item that needs a card asks for one unit of the resource NPU (`dask worker --resources NPU=1`).
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_npu.errors import UsageError
from qwen_npu.nightly.baseline import Baseline
from qwen_npu.nightly.environment import environment
from qwen_npu.nightly.execution import Execution
from qwen_npu.nightly.suite import Item
from qwen_npu.nightly.verdict import ItemResult, Verdict

if TYPE_CHECKING:
    from qwen_npu.nightly.runner import Run

ATTEMPTS = 2
"""An item whose worker died runs once more, on another."""
RESOURCE = "NPU"
HOME_LIMIT_BYTES = 256 * 2**20
"""What one item may send home; larger files stay out, and a note says so."""
_LOOK_S = 0.5


def run_on_cluster(run: Run, address: str, stopped: list[str]) -> None:
    """Runs the items of `run` on the workers of the scheduler at `address`.

    Raises:
        UsageError: `distributed` is not installed, nobody answers, or no worker has joined.
    """
    client = _connect(address)
    try:
        with client.as_current():
            _Night(run, client).go(stopped)
    finally:
        client.close()


def _connect(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "a scheduler was named, but Dask is not installed", fix="pip install 'qwen-npu[cluster]'"
        ) from error
    try:
        client = Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address!r}: {error}",
            expected="an address such as tcp://127.0.0.1:8786",
            fix="start one with `dask scheduler`",
        ) from error
    if not client.scheduler_info(n_workers=-1)["workers"]:
        client.close()
        raise UsageError(
            f"the scheduler at {address} has no worker", fix=f"start some: dask worker {address} --resources NPU=1"
        )
    return client


class _Night:
    """The items under way. Each start of an item is an event of the run's topic; more starts than one mean that a
    worker died."""

    def __init__(self, run: Run, client: Any) -> None:
        self.run, self.client = run, client
        self.topic = f"qwen-npu-{run.id}"
        self.starts: dict[str, list[str]] = {}
        self.futures: dict[Any, Item] = {}

    def go(self, stopped: list[str]) -> None:
        from distributed import Event, wait

        stop = Event(f"{self.topic}-stop")
        self.client.subscribe_topic(self.topic, self._started)
        for item in self.run.todo:
            self._submit(item)
        while self.futures and not stopped:
            with contextlib.suppress(TimeoutError):
                wait(list(self.futures), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            for future in [future for future in self.futures if future.done()]:
                self.run.done(self._home(future, self.futures.pop(future)))
            for future, item in list(self.futures.items()):
                if len(self.starts.get(item.id, ())) > ATTEMPTS:
                    del self.futures[future]
                    future.cancel(force=True)
                    self.run.done(self._infra(item, "its worker died each time"))
        if self.futures:
            stop.set()
            self.client.cancel(list(self.futures), force=True)

    def _submit(self, item: Item) -> None:
        needs_card = item.device == "npu"
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        if needs_card and not any(worker.get("resources", {}).get(RESOURCE) for worker in workers):
            result = self._infra(item, "")
            result.verdict, result.reason = Verdict.SKIPPED, f"needs an NPU card; no worker has the resource {RESOURCE}"
            self.run.done(result)
            return
        try:
            notebook = item.notebook.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            self.run.done(self._infra(item, f"its notebook cannot be read: {error}"))
            return
        baseline = self.run.baselines[item.id]
        errand = {
            "item": item.model_dump(mode="json"),
            "notebook": notebook,
            "baseline": vars(baseline) if baseline is not None else None,
            "run": self.run.id,
            "digest": self.run.digests[item.id],
            "topic": self.topic,
        }
        future = self.client.submit(
            run_errand,
            json.dumps(errand, ensure_ascii=False),
            key=f"{self.topic}-{item.id}",
            resources={RESOURCE: 1} if needs_card else None,
            pure=False,
        )
        self.futures[future] = item

    def _started(self, event: tuple[float, Any]) -> None:
        facts = event[1]
        self.starts.setdefault(facts["item"], []).append(facts["worker"])

    def _home(self, future: Any, item: Item) -> ItemResult:
        if future.status != "finished":
            error = future.exception() if future.status == "error" else future.status
            return self._infra(item, f"{type(error).__name__}: {error}")
        facts, archive = future.result()
        result = ItemResult.from_json(json.loads(facts))
        starts = self._starts_of(item)
        result.attempts = max(1, len(starts))
        if len(starts) > 1:
            result.notes.append(f"the worker {starts[0]} died while it ran this; run again on {result.worker}")
        folder = self.run.folder(item)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _unpack(archive, folder)
        return result

    def _starts_of(self, item: Item) -> list[str]:
        """The workers that began the item; the scheduler's own list, since an event may be on its way to us."""
        events = self.client.get_events(self.topic)
        return [facts["worker"] for _, facts in events if facts["item"] == item.id]

    def _infra(self, item: Item, why: str) -> ItemResult:
        starts = self._starts_of(item)
        on = f" on {', '.join(starts)}" if starts else ""
        return ItemResult(
            item=item.id,
            notebook=item.notebook.name,
            verdict=Verdict.INFRA,
            reason=f"the cluster lost it{on}: {why}",
            tags=list(item.tags),
            started=self.run.started,
            budget_s=item.budget_s,
            attempts=max(1, len(starts)),
            environment=self.run.environment,
            digest=self.run.digests[item.id],
        )


def run_errand(errand: str) -> tuple[str, bytes]:
    """On the worker: runs one item in a temporary directory; gives its verdict as JSON and its files as a zip."""
    from distributed import Event, get_worker

    facts = json.loads(errand)
    worker = get_worker()
    worker.log_event(facts["topic"], {"item": facts["item"]["id"], "worker": worker.address})
    stop = Event(f"{facts['topic']}-stop")
    with tempfile.TemporaryDirectory(prefix="qwen-npu-errand-") as name:
        home = Path(name)
        notebook = home / Path(facts["item"]["notebook"]).name
        notebook.write_text(facts["notebook"], encoding="utf-8")
        item = Item.model_validate({**facts["item"], "notebook": notebook})
        execution = Execution(
            item,
            home / "item",
            run=f"{facts['run']}-{home.name}",
            environment=environment(),
            baseline=Baseline(**facts["baseline"]) if facts["baseline"] else None,
            digest=facts["digest"],
        )
        result = execution.start()
        try:
            looked = time.monotonic()
            while result is None:
                time.sleep(0.05)
                result = execution.poll()
                if time.monotonic() - looked > 2.0:
                    looked = time.monotonic()
                    if result is None and stop.is_set():
                        raise RuntimeError("the run was ended")
        finally:
            if result is None:
                execution.stop()
        result.worker = worker.address
        archive, left_out = _pack(home / "item")
        result.notes += [f"too large to send home: {name}" for name in left_out]
        return json.dumps(result.to_json(), ensure_ascii=False), archive


def _pack(folder: Path) -> tuple[bytes, list[str]]:
    buffer = io.BytesIO()
    total = 0
    left_out = []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            total += path.stat().st_size
            if total > HOME_LIMIT_BYTES:
                total -= path.stat().st_size
                left_out.append(name)
            else:
                archive.write(path, name)
    return buffer.getvalue(), left_out


def _unpack(content: bytes, folder: Path) -> None:
    """Only names inside `folder`; zipfile drops drive letters, leading slashes and '..' itself."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder)
