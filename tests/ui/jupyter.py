"""JupyterLab as `qwen-npu lab` starts it, in a headless Chromium: what tests of live widgets need."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
        return f"{head}/tree/{urllib.parse.quote(notebook)}?{token}"

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


class Page:
    """One page of a headless Chromium over the DevTools protocol. Notes every address that it asks for."""

    def __init__(self, profile: Path, *, width: int = 1400, height: int = 1900) -> None:
        import websocket

        assert CHROMIUM is not None
        profile.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"]
            + ["--disable-background-networking", "--disable-component-update", "--remote-allow-origins=*"]
            + ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        self.socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=120)
        self.number = 0
        self.asked: set[str] = set()
        self.trouble: list[str] = []
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.add(facts["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.asked.add(facts["url"])
        elif method == "Runtime.exceptionThrown":
            self.trouble.append(str(facts["exceptionDetails"].get("exception", facts))[:600])

    @property
    def foreign(self) -> list[str]:
        """Addresses asked for that are not this machine's."""
        parts = [(url, urllib.parse.urlsplit(url)) for url in sorted(self.asked)]
        local = {"127.0.0.1", "localhost"}
        inline = {"data", "blob", "about", "chrome", "devtools"}
        return [url for url, part in parts if part.scheme not in inline and part.hostname not in local]

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 90, every: float = 0.2) -> Any:
        """Waits for an expression to be true, and gives its value."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.ask(expression)
            if value:
                return value
            assert time.monotonic() < deadline, f"not true within {seconds} s: {expression}"
            time.sleep(every)

    def click(self, finder: str, *, seconds: float = 60) -> None:
        """Presses and releases the mouse on the middle of the element that an expression finds."""
        self.until(f"!!({finder})", seconds)
        at = self.ask(
            f"(() => {{const e = {finder}; e.scrollIntoView({{block: 'nearest'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]})()"
        )
        self.mouse("mouseMoved", *at)
        self.mouse("mousePressed", *at)
        self.mouse("mouseReleased", *at)

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def key(self, key: str, code: str = "", number: int = 0, text: str = "") -> None:
        facts = {"key": key, "code": code or key, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def menu(self, *path: str) -> None:
        """Chooses an entry of JupyterLab's menu bar."""
        bar = "[...document.querySelectorAll('.lm-MenuBar-item')]"
        self.click(f"{bar}.find(e => e.textContent.trim() === {path[0]!r})")
        for entry in path[1:]:
            items = "[...document.querySelectorAll('.lm-Menu-item')]"
            label = "e.querySelector('.lm-Menu-itemLabel')?.textContent.trim()"
            self.click(f"{items}.find(e => {label} === {entry!r})")

    def picture(self, path: Path) -> None:
        """A screenshot."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def heap_bytes(self) -> int:
        """What the page's JavaScript holds after a collection."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
