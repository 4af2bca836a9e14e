"""One page of a headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """What a user sees and does, and what the browser knows besides.

    Attributes:
        asked: every address that the page asked for.
        exceptions: what its scripts threw.
        console: errors and warnings on its console.
    """

    def __init__(self, profile: Path, *, width: int = 1400, height: int = 1900, offline: bool = False) -> None:
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
        self.exceptions: list[str] = []
        self.console: list[str] = []
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        if offline:
            nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            self.call("Network.emulateNetworkConditions", offline=True, **nothing)
        self.screen(width, height)

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
            self.exceptions.append(str(facts["exceptionDetails"].get("exception", facts))[:600])
        elif method == "Runtime.consoleAPICalled" and (
            facts["type"] in {"error", "warning"} or str(facts["args"][:1]).find("WARN: ") >= 0  # plotly.js's own way
        ):
            self.console.append(str(facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in {"error", "warning"}:
            self.console.append(str(facts["entry"]))

    @property
    def foreign(self) -> list[str]:
        """Addresses asked for that are not this machine's."""
        parts = [(url, urllib.parse.urlsplit(url)) for url in sorted(self.asked)]
        local = {"127.0.0.1", "localhost"}
        inline = {"data", "blob", "about", "chrome", "devtools", "file"}
        return [url for url, part in parts if part.scheme not in inline and part.hostname not in local]

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """A window of this size, on a machine whose user likes it light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

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
        """Presses and releases the mouse on the middle of the element that an expression finds.

        Waits until nothing lies over it: JupyterLab covers the page for a moment when its theme changes.
        """
        at = self.until(
            f"(() => {{const e = {finder}; if (!e) return null; e.scrollIntoView({{block: 'nearest'}});"
            " const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;"
            " const top = document.elementFromPoint(x, y);"
            " return top && (e.contains(top) || top.contains(e)) ? [x, y] : null})()",
            seconds,
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
