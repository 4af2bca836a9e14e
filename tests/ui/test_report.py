"""The report in Chromium with no network: every figure drawn, nothing on the console, nothing wider than the screen."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.nightly.page import PLOTLY, figure_count
from qwen_npu.nightly.report import write_page
from qwen_npu.nightly.verdict import ItemResult, Verdict
from tests.integration.nightly_notebooks import write_notebook
from tests.ui.chromium import CHROMIUM, Page

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


def look(page: Page, file: Path, *, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Opens a page of the report and says what is on it once its figures are drawn."""
    for noted in (page.exceptions, page.console, page.asked):
        noted.clear()
    page.screen(width, 900, dark=dark)
    page.open(file.as_uri())
    deadline = time.monotonic() + 60
    while True:
        time.sleep(0.1)
        answer = page.call("Runtime.evaluate", expression=COUNT, returnByValue=True)
        # between two pages there is no document to ask: the expression throws
        facts: dict[str, Any] = json.loads(answer["result"].get("value", '{"ready": ""}'))
        if facts["ready"] == "complete" and int(facts["told"] or 0) >= facts["plots"]:
            return facts
        assert time.monotonic() < deadline, facts


def trouble(page: Page) -> list[str]:
    return [*page.exceptions, *page.console, *page.foreign]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "profile", offline=True)
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
def test_page_of_a_notebook(browser: Page, tmp_path: Path, width: int, dark: bool) -> None:
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
    facts = look(browser, page, width=width, dark=dark)
    assert trouble(browser) == []
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
def test_default_suite_in_chromium(browser: Page, quick_report: Path, width: int, dark: bool) -> None:
    pages = sorted(quick_report.glob("*.html"))
    assert len(pages) > 1
    figures = 0
    for page in pages:
        assert page.stat().st_size <= 8e6
        facts = look(browser, page, width=width, dark=dark)
        assert trouble(browser) == [], page.name
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
