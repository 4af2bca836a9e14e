"""The process that runs one notebook with papermill and leaves an account of what it saw: `python -m
qwen_npu.nightly.worker JOB.json`. It judges nothing; the runner does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from qwen_npu.nightly import kernel
from qwen_npu.nightly.files import read_json, write_json
from qwen_npu.nightly.processes import die_with_parent, skip_slow_import, start_ticks

BEAT_S = 1.0
UNWRITTEN_STATUS = 3
"""Exit status of a worker that could not even write its account."""
OUTPUT_LIMIT_BYTES = 32 * 2**20
"""Largest amount of output one notebook may send (text and figures); more is a flood, and the kernel is ended."""


class _Progress:
    """What the runner may read at any time: the cell that runs, the kernel's pid, what each cell took."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {"cell": None, "source": "", "kernel": None, "kernel_ticks": None, "cells": []}
        self.begun = self.made = time.monotonic()

    def write(self) -> None:
        write_json(self.path, self.facts, durable=False)

    def cell_start(self, index: int, source: str, process: Any) -> None:
        if self.facts["kernel"] is None:
            self.facts["kernel"] = process.pid
            self.facts["kernel_ticks"] = start_ticks(process.pid)
            self.facts["kernel_start_s"] = round(time.monotonic() - self.made, 4)
        self.begun = time.monotonic()
        self.facts["cell"] = index
        lines = (line.strip() for line in source.splitlines())
        self.facts["source"] = next((line for line in lines if line and not line.startswith("#")), "")[:80]
        self.write()

    def cell_end(self, index: int) -> None:
        self.facts["cells"].append({"cell": index, "seconds": round(time.monotonic() - self.begun, 4)})


def _beat(path: Path) -> None:
    def run() -> None:
        while True:
            with contextlib.suppress(OSError):
                path.touch()
            time.sleep(BEAT_S)

    threading.Thread(target=run, name="beat", daemon=True).start()


def _kernel_manager(job: dict[str, Any]) -> Any:
    """A manager whose sockets lie in this item's own short directory: no port to race for, no name shared."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    ipc = Path(job["ipc"])
    specs = KernelSpecManager(ensure_native_kernel=False)
    if job["kernel"] == kernel.NAME:
        folder = ipc / "kernels" / kernel.NAME
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "kernel.json", kernel.spec(), durable=False)
        specs.kernel_dirs = [str(ipc / "kernels")]
    return AsyncKernelManager(
        kernel_name=job["kernel"],
        kernel_spec_manager=specs,
        transport="ipc",
        ip=str(ipc / "k"),
        connection_file=str(ipc / "connection.json"),
    )


def _client_class() -> Any:
    from papermill.clientwrap import PapermillNotebookClient
    from traitlets import Any as AnyTrait

    class Client(PapermillNotebookClient):  # type: ignore[misc]
        progress = AnyTrait()
        received_bytes = 0
        flooded = False

        def process_message(self, message: Any, *arguments: Any, **options: Any) -> Any:
            content = message.get("content", {})
            if "text" in content:
                self.received_bytes += len(content["text"])
            for value in content.get("data", {}).values() if isinstance(content.get("data"), dict) else ():
                self.received_bytes += len(value) if isinstance(value, str) else len(json.dumps(value))
            if self.received_bytes > OUTPUT_LIMIT_BYTES:
                if not self.flooded:
                    self.flooded = True
                    self.km.provisioner.process.kill()
                return None
            return super().process_message(message, *arguments, **options)

    return Client


def _run(job: dict[str, Any], progress: _Progress) -> dict[str, Any]:
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.exceptions import PapermillExecutionError

    manager = _kernel_manager(job)
    client_class = _client_class()
    clients: list[Any] = []

    class Engine(NBClientEngine):  # type: ignore[misc]
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            client = client_class(
                nb_man,
                km=manager,
                kernel_name=kernel_name,
                timeout=None,
                startup_timeout=options["start_timeout"],
                iopub_timeout=30,
                on_cell_start=lambda cell, cell_index: progress.cell_start(
                    cell_index, cell.source, manager.provisioner.process
                ),
                on_cell_executed=lambda cell_index, **_: progress.cell_end(cell_index),
            )
            clients.append(client)
            return client.execute()

    papermill_engines.register("qwen-npu", Engine)
    status: int | None = None
    account: dict[str, Any]
    try:
        papermill.execute_notebook(
            job["notebook"],
            job["output"],
            parameters=job["parameters"],
            engine_name="qwen-npu",
            kernel_name=job["kernel"],
            language="python",
            progress_bar=False,
            cwd=job["cwd"],
            start_timeout=job["start_timeout_s"],
        )
        account = {"kind": "ran"}
    except PapermillExecutionError as error:
        account = {
            "kind": "raised",
            "cell": error.cell_index,
            "ename": error.ename,
            "evalue": _plain(error.evalue),
            "traceback": [_plain(line) for line in error.traceback],
        }
    except DeadKernelError as error:
        process = manager.provisioner.process if manager.provisioner else None
        status = process.poll() if process is not None else None
        account = {"kind": "dead", "evalue": str(error), "status": status}
    except NoSuchKernel as error:
        account = {"kind": "no_kernel", "evalue": f"there is no kernel {error.name!r}"}
    except OSError as error:
        kind = "disk" if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG} else "broken"
        account = {"kind": kind, "ename": type(error).__name__, "evalue": str(error)}
    except Exception as error:  # whatever papermill or its libraries raise belongs in the account
        account = {"kind": "broken", "ename": type(error).__name__, "evalue": str(error)}
        with contextlib.suppress(OSError):
            traceback.print_exc()
    if progress.facts["kernel"] is None and account["kind"] in {"broken", "dead"}:
        account["kind"] = "no_kernel"
    if clients and clients[0].flooded:
        account = {"kind": "flooded", "evalue": f"more than {OUTPUT_LIMIT_BYTES // 2**20} MiB of output"}
    return account


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def main() -> None:
    """Runs the job of sys.argv[1] and writes account.json beside it."""
    job = read_json(Path(sys.argv[1]))
    if job is None:
        sys.exit(f"no job in {sys.argv[1]}")
    die_with_parent(job["runner"])
    folder = Path(sys.argv[1]).parent
    _beat(folder / "heartbeat")
    skip_slow_import()
    progress = _Progress(folder / "progress.json")
    account = _run(job, progress)
    try:
        progress.write()
        write_json(folder / "account.json", account)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"the account cannot be written: {error}: {json.dumps(account)}", file=sys.stderr, flush=True)
        os._exit(UNWRITTEN_STATUS)
    # nothing of ours is left to tidy, and a client library's threads must not keep the process
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
