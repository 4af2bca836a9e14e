"""The course in JupyterLab in Chromium: each notebook runs top to bottom, and its control changes what it shows.

QWEN_NPU_UI_PICTURES names a directory for screenshots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_npu.data import notebooks_dir
from tests.ui.chromium import CHROMIUM, Page
from tests.ui.jupyter import ERRORS, Lab, open_and_run

pytestmark = [pytest.mark.ui, pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

LESSONS = sorted(path.name for path in notebooks_dir().glob("0[1-9]_*.ipynb"))
CONTROL = "document.querySelector('.widget-interact')"
SHOWN = f"{CONTROL}.querySelector('.jp-OutputArea').textContent"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(notebooks_dir(), folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    server = Lab(folder / "notebooks", folder / "home")
    yield server
    server.close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page(tmp_path / "profile", height=2400)
    yield opened
    opened.close()


@pytest.mark.parametrize("lesson", LESSONS)
def test_runs_top_to_bottom_and_its_control_works(lab: Lab, page: Page, lesson: str) -> None:
    open_and_run(page, lab, lesson)
    assert page.ask(ERRORS) == []
    page.until(f"!!{CONTROL} && {SHOWN}.trim() !== ''")
    before = page.ask(SHOWN)
    turn(page)
    page.until(f"{SHOWN} !== {before!r} && {SHOWN}.trim() !== ''")
    pictures = os.environ.get("QWEN_NPU_UI_PICTURES")
    if pictures:
        page.picture(Path(pictures) / f"{lesson}.png")
    assert page.foreign == []
    assert page.exceptions == []
    assert [text for text in page.console if "WARN: " in text] == []  # plotly.js


def turn(page: Page) -> None:
    """Sets the control to something else, by key or by choice, as a user would."""
    page.ask(f"{CONTROL}.scrollIntoView({{block: 'center'}})")
    if page.ask(f"!!{CONTROL}.querySelector('.noUi-handle')"):
        page.ask(f"{CONTROL}.querySelector('.noUi-handle').focus()")
        page.key("ArrowRight")
    elif page.ask(f"!!{CONTROL}.querySelector('select')"):
        page.ask(
            f"(e => {{e.selectedIndex = (e.selectedIndex + 1) % e.length;"
            f" e.dispatchEvent(new Event('change', {{bubbles: true}}))}})({CONTROL}.querySelector('select'))"
        )
    else:
        page.ask(
            "(e => {e.value = 'How many objects are there in this picture?';"
            " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}))})"
            f"({CONTROL}.querySelector('input'))"
        )
