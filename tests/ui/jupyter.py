"""JupyterLab as `qwen-npu lab` starts it, and what a user does with a notebook in it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.ui.chromium import Page

SLOW_S = 240
"""Pages of JupyterLab come slowly on a busy machine; nothing here is a timing."""
ERROR = "[data-mime-type='application/vnd.jupyter.error']"
ERRORS = f'[...document.querySelectorAll("{ERROR}")].map(e => e.textContent.slice(0, 500))'
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].map(e => e.textContent.trim())"
"""What stands beside the code cells: "[ ]:" not run, "[*]:" waiting, "[3]:" done."""


class Trap:
    """A proxy that answers nobody and counts who asks: what would leave the machine ends here."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            peer.settimeout(5)
            self.asked.append(peer.recv(300))
            peer.close()

    def close(self) -> None:
        self._socket.close()


class Lab:
    """`qwen-npu lab` over a directory of notebooks, with a home and configuration of its own."""

    def __init__(self, notebooks: Path, home: Path) -> None:
        self.trap = Trap()
        home.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "HOME": str(home),
            "QWEN_NPU_CACHE": os.environ.get("QWEN_NPU_CACHE", str(Path("~/.cache/qwen_npu").expanduser())),
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "IPYTHONDIR": str(home / "ipython"),
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), f"http://127.0.0.1:{self.trap.port}"),
            "no_proxy": "127.0.0.1,localhost",
        }
        environment.pop("QWEN_NPU_HEADLESS", None)
        # all cells in the document, not only those on the screen: a test asks for any of them
        settings = home / "config/lab/user-settings/@jupyterlab/notebook-extension"
        settings.mkdir(parents=True)
        (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}', encoding="utf-8")
        self.log = home / "lab.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "qwen_npu.cli", "lab", "--no-browser", "--json", "--port", str(_free_port())]
                + ["--notebooks", str(notebooks)],
                env=environment,
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        self.address = json.loads(line)["address"]

    def page(self, notebook: str) -> str:
        """The address of a notebook, alone in its window."""
        head, _, token = self.address.partition("?")
        return f"{head}/tree/{urllib.parse.quote(notebook)}?{token}&reset"  # no notebooks of an earlier visit

    def status(self, path: str, *, token: bool) -> int:
        parts = urllib.parse.urlsplit(self.address)
        address = f"{parts.scheme}://{parts.netloc}{path}" + (f"?{parts.query}" if token else "")
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def close(self) -> None:
        self.trap.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def set_parameters(notebook: dict[str, Any], **values: Any) -> None:
    """Changes lines of the parameters cell, as a user would."""
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", ()):
            lines = "".join(cell["source"]).splitlines(keepends=True)
            for i, text in enumerate(lines):
                name = text.partition(":")[0]
                if name in values:
                    lines[i] = f"{name} = {values.pop(name)!r}\n"
            cell["source"] = lines
    assert not values, f"no such parameters: {values}"


def menu(page: Page, *path: str) -> None:
    """Chooses an entry of JupyterLab's menu bar. A menu opened while the page still settles may close again."""
    bar = "[...document.querySelectorAll('.lm-MenuBar-item')]"
    items = "[...document.querySelectorAll('.lm-Menu-item')]"
    label = "e.querySelector('.lm-Menu-itemLabel')?.textContent.trim()"
    entries = [f"{items}.find(e => {label} === {entry!r})" for entry in path[1:]]
    for _ in range(4):
        page.click(f"{bar}.find(e => e.textContent.trim() === {path[0]!r})")
        if page.ask(f"new Promise(done => setTimeout(() => done(!!{entries[0]}), 1000))"):
            break
        page.key("Escape", number=27)
    for entry in entries:
        page.click(entry)


def open_and_run(page: Page, lab: Lab, notebook: str) -> None:
    """Opens a notebook and chooses "Run All Cells" until all have run or one has failed.

    JupyterLab lets go of cells that were sent while it still made friends with the kernel, and says nothing; then the
    choice is made again, as a user would.
    """
    page.open(lab.page(notebook))
    page.until("document.querySelectorAll('.jp-Cell').length > 4", SLOW_S)
    page.until("!!document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]')", SLOW_S)
    for _ in range(3):
        menu(page, "Run", "Run All Cells")
        quiet = 0
        while quiet < 6:  # half seconds in which no cell waits
            waits = page.ask(f"new Promise(done => setTimeout(() => done({PROMPTS}.includes('[*]:')), 500))")
            quiet = 0 if waits else quiet + 1
        if page.ask(ERRORS) or all(re.search(r"\d", prompt) for prompt in page.ask(PROMPTS)):
            return
        page.key("Escape")
    raise AssertionError(f"not all cells run: {page.ask(PROMPTS)}")
