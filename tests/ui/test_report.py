"""The report in Chromium with no network: every figure drawn, nothing on the console, nothing wider than the screen."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.nightly.page import PLOTLY, figure_count
from qwen_npu.nightly.report import write_page
from qwen_npu.nightly.verdict import ItemResult, Verdict
from tests.integration.nightly_notebooks import write_notebook

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.ui, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

COUNT = """JSON.stringify({
  ready: document.readyState,
  plots: document.querySelectorAll('.plot').length,
  drawn: [...document.querySelectorAll('.plot')].filter(
    plot => plot.querySelector('svg.main-svg .trace, svg.main-svg .slice, svg.main-svg image, canvas')).length,
  told: document.documentElement.dataset.plotsDrawn || null,
  width: document.documentElement.scrollWidth,
  ground: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
})"""


class Browser:
    """One page of a headless Chromium over the DevTools protocol, its network switched off."""

    def __init__(self, profile: Path) -> None:
        import websocket

        assert CHROMIUM is not None
        self.process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        self.socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=60)
        self.number = 0
        self.trouble: list[str] = []
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

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
        if method == "Runtime.exceptionThrown":
            self.trouble.append(str(facts["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in {"error", "warning"}:
            self.trouble.append(str(facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in {"error", "warning"}:
            self.trouble.append(str(facts["entry"]))
        elif method == "Network.requestWillBeSent" and not facts["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.trouble.append("asked the network for " + facts["request"]["url"])

    def look(self, path: Path, *, width: int = 1200, dark: bool = False) -> dict[str, Any]:
        """Opens a page and says what is on it once its figures are drawn."""
        self.trouble.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while True:
            time.sleep(0.1)
            answer = self.call("Runtime.evaluate", expression=COUNT, returnByValue=True)
            # between two pages there is no document to ask: the expression throws
            facts: dict[str, Any] = json.loads(answer["result"].get("value", '{"ready": ""}'))
            if facts["ready"] == "complete" and int(facts["told"] or 0) >= facts["plots"]:
                return facts
            assert time.monotonic() < deadline, facts

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    page = Browser(tmp_path / "profile")
    yield page
    page.close()


def executed(folder: Path, outputs: list[dict[str, Any]]) -> Path:
    """An executed notebook, as papermill leaves it, without running one."""
    path = write_notebook(folder / "notebook.ipynb", ["draw()", "print('end')"])
    document = json.loads(path.read_text(encoding="utf-8"))
    document["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {"x": "</script>" * 9}}}
    document["cells"][2]["outputs"] = outputs
    document["cells"][2]["execution_count"] = 1
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def display(**data: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def figure(**layout: Any) -> dict[str, Any]:
    import plotly.graph_objects as go

    drawn = go.Figure([go.Scatter(y=[1, 3, 2], name="</script><b>"), go.Bar(y=[2, 1, 2])], layout=layout)
    return display(**{PLOTLY: json.loads(drawn.to_json()), "text/plain": "Figure()"})


@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), pytest.param(390, True, marks=pytest.mark.full)], ids=["wide", "phone"]
)
def test_page_of_a_notebook(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    folder = tmp_path / "report/items/t"
    folder.mkdir(parents=True)
    outputs = [
        figure(title="</script> 表情 😀", height=900),
        figure(width=1100),
        display(**{"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "FigureWidget(...)"}),
        display(**{"application/javascript": "require(['x'])", "text/plain": "loads a library"}),
        display(**{"text/html": ["<table><tr>", "<td>a cell</td></tr></table>"]}),
        {"output_type": "stream", "name": "stdout", "text": ["<b>not bold</b>\n", "x" * 300_000]},
        {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31mred\x1b[0m " + "y" * 200]},
        figure(),
    ]
    path = executed(folder, outputs)
    page = write_page(tmp_path / "report", ItemResult("t", "t.ipynb", Verdict.PASS, "fine", log_tail="<i>log</i>"))
    assert figure_count(path) == 3
    assert page.stat().st_size <= 8e6
    text = page.read_text(encoding="utf-8")
    assert text.count("Plotly.newPlot(target") == 1
    assert "characters left out" in text
    assert "A live widget stood here" in text
    assert "require([" not in text
    facts = browser.look(page, width=width, dark=dark)
    assert browser.trouble == []
    assert facts["plots"] == facts["drawn"] == int(facts["told"]) == 3
    assert facts["width"] <= width
    assert (facts["ground"] == "rgb(255, 255, 255)") is not dark


def test_page_that_would_be_too_large(tmp_path: Path) -> None:
    folder = tmp_path / "items/t"
    folder.mkdir(parents=True)
    executed(folder, [display(**{"text/html": "<p>" + "z" * 9_000_000 + "</p>"})])
    page = write_page(tmp_path, ItemResult("t", "t.ipynb", Verdict.PASS, "fine"))
    assert page.stat().st_size < 1e6
    assert "would be 9." in page.read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, False), (390, True)])
def test_default_suite_in_chromium(browser: Browser, quick_report: Path, width: int, dark: bool) -> None:
    pages = sorted(quick_report.glob("*.html"))
    assert len(pages) > 1
    figures = 0
    for page in pages:
        assert page.stat().st_size <= 8e6
        facts = browser.look(page, width=width, dark=dark)
        assert browser.trouble == [], page.name
        assert facts["drawn"] == facts["plots"], page.name
        assert facts["width"] <= width, page.name
        figures += facts["plots"]
        notebook = quick_report / "items" / page.stem / "notebook.ipynb"
        if notebook.exists():
            assert facts["plots"] == figure_count(notebook), page.name
    assert figures > 0


@pytest.fixture(scope="module")
def quick_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qwen_npu.nightly.runner import run_suite

    outcome = run_suite("default", tmp_path_factory.mktemp("report"), tags=["quick"])
    assert outcome.fine, [(result.item, result.reason) for result in outcome.results]
    return outcome.out
