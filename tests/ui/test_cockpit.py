"""The cockpit in JupyterLab in Chromium: run all, press Step and Run, scrub, read what changed from the page.

The lab runs with a proxy set that answers nobody: whatever server or kernel would ask of the network shows up there,
and whatever the page asks for is noted by the browser. QWEN_NPU_TEST_CHECKPOINT names another checkpoint than the
shipped one, QWEN_NPU_UI_PICTURES a directory for screenshots.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.data import notebooks_dir
from tests.ui.chromium import CHROMIUM, Page
from tests.ui.jupyter import SLOW_S, Lab, menu, open_and_run, set_parameters

pytestmark = [pytest.mark.ui, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

BUNDLE = os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or "tiny"
GRID = "document.querySelector('.qn-grid [data-tick]')"
COCKPIT = "document.querySelector('.qn-cockpit')"


class Cockpit:
    """What a user sees and does."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def facts(self) -> dict[str, Any]:
        """The grid's numbers, and texts of the page."""
        told: dict[str, Any] = json.loads(
            self.page.ask(
                f"JSON.stringify({{...{GRID}.dataset, line: document.querySelector('.qn-line').textContent,"
                f" text: document.querySelector('.qn-text')?.textContent ?? '', all: {COCKPIT}.textContent}})"
            )
        )
        return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in told.items()}

    def press(self, name: str) -> None:
        find = f"[...document.querySelectorAll('.qn-cockpit button')].find(e => e.textContent.trim() === {name!r})"
        self.page.click(find)

    def put(self, label: str, value: str) -> None:
        field = (
            "[...document.querySelectorAll('.qn-cockpit .widget-label')]"
            f".find(e => e.textContent.trim() === {label!r}).parentElement.querySelector('input, select')"
        )
        self.page.ask(
            f"(() => {{const e = {field}; e.value = {value!r};"
            " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}))})()"
        )

    def tick_box(self, label: str) -> None:
        self.page.ask(
            "[...document.querySelectorAll('.qn-cockpit .widget-checkbox')]"
            f".find(e => e.textContent.includes({label!r})).querySelector('input').click()"
        )

    def until(self, condition: str, seconds: float = SLOW_S) -> None:
        self.page.until(condition, seconds)

    def until_line(self, start: str) -> None:
        self.until(f"document.querySelector('.qn-line').textContent.startsWith({start!r})")

    def until_done(self) -> None:
        self.until(f"{COCKPIT}.textContent.includes('done') && {COCKPIT}.textContent.includes('whole recording')")

    def focus(self) -> None:
        self.page.ask(f"{GRID}.focus()")

    def picture(self, name: str) -> None:
        folder = os.environ.get("QWEN_NPU_UI_PICTURES")
        if folder:
            self.page.ask(f"{COCKPIT}.scrollIntoView()")
            time.sleep(1)
            self.page.picture(Path(folder) / f"{name}.png")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    notebook = json.loads((notebooks_dir() / "00_cockpit.ipynb").read_text(encoding="utf-8"))
    set_parameters(notebook, bundle_name=BUNDLE, ignore_eos=True)
    (notebooks / "00_cockpit.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    server = Lab(notebooks, folder / "home")
    yield server
    server.close()


@pytest.fixture(scope="module")
def cockpit(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cockpit]:
    """The notebook, opened and run from the menu."""
    page = Page(tmp_path_factory.mktemp("profile"))
    try:
        open_and_run(page, lab, "00_cockpit.ipynb")
        page.until(f"Number({GRID}?.dataset.ticks) >= 8", SLOW_S)
        page.until("[...document.querySelectorAll('.jp-OutputArea-output')].some(e => /B alive/.test(e.textContent))")
        yield Cockpit(page)
    finally:
        page.close()


def test_only_loopback_and_only_with_the_token(lab: Lab) -> None:
    assert urllib.parse.urlsplit(lab.address).hostname == "127.0.0.1"
    assert lab.status("/api/contents", token=False) == 403
    assert lab.status("/api/contents", token=True) == 200
    command = Path(f"/proc/{lab.process.pid}/cmdline")
    if command.exists():
        token = lab.address.rpartition("token=")[2]
        assert len(token) >= 32
        assert token not in command.read_text(encoding="utf-8", errors="replace")


def test_run_all_then_step_then_run(cockpit: Cockpit) -> None:
    before = cockpit.facts()
    assert before["ticks"] == 8  # vision, prefill, upload, five decode steps
    assert before["line"].startswith("decode 4: ▲ ")
    assert "live conv.b" in before["all"]
    cockpit.press("Step")
    cockpit.until(f"Number({GRID}.dataset.ticks) === 9")
    cockpit.until_line("decode 5: ")
    stepped = cockpit.facts()
    assert stepped["text"].startswith(before["text"])
    assert len(stepped["text"]) >= len(before["text"])
    assert "live conv.a" in stepped["all"]
    cockpit.press("Run")
    cockpit.until_done()
    ran = cockpit.facts()
    assert ran["ticks"] > 40
    assert ran["tick"] == ran["ticks"] - 1
    assert "✓ books balance" in ran["all"]
    assert len(ran["text"]) > len(stepped["text"])


def test_keys_scrub_every_pane(cockpit: Cockpit) -> None:
    cockpit.focus()
    cockpit.page.key("Home")
    cockpit.until_line("vision: ")
    for _ in range(3):
        cockpit.page.key("ArrowRight")
    cockpit.until_line("decode 0: ")
    facts = cockpit.facts()
    assert facts["tick"] == 3
    assert "tick3 of" in facts["all"]
    assert "live conv.b" in facts["all"]
    assert int(cockpit.page.ask("document.querySelector('.qn-curves').dataset.cursor")) == 3
    slider = cockpit.page.ask(f"{COCKPIT}.querySelector('.widget-slider .widget-readout').textContent")
    assert int(slider) == 3
    cockpit.page.key("ArrowDown")
    cockpit.until(f"{GRID}.dataset.picked !== ''")
    picked = cockpit.facts()["picked"]
    cockpit.until(f"document.querySelector('.qn-line').textContent.includes({picked!r} + ':')")
    assert "allocated at" in cockpit.facts()["all"]
    cockpit.page.key("ArrowRight")
    cockpit.until_line("decode 1: ")
    assert "live conv.a" in cockpit.facts()["all"]
    cells = cockpit.page.ask("document.querySelectorAll('.jp-Cell').length")
    assert cells > 4  # the keys were the grid's alone: none moved, cut or made a cell
    assert cockpit.page.ask("document.activeElement === " + GRID)


def test_space_plays_and_pauses(cockpit: Cockpit) -> None:
    cockpit.focus()
    cockpit.page.key("Home")
    cockpit.until(f"{GRID}.dataset.tick === '0'")
    cockpit.page.key(" ", "Space", 32)
    cockpit.until(f"Number({GRID}.dataset.tick) >= 2")
    cockpit.page.key(" ", "Space", 32)
    time.sleep(1)
    stopped = cockpit.facts()["tick"]
    time.sleep(2)
    assert cockpit.facts()["tick"] == stopped


def test_hover_tells_all_about_a_buffer(cockpit: Cockpit) -> None:
    cockpit.page.ask(f"{GRID}.scrollIntoView({{block: 'center'}})")
    at = cockpit.page.ask(
        f"(() => {{const r = {GRID}.querySelector('canvas').getBoundingClientRect();"
        " return [r.x + 150 + 0.6 * (r.width - 150 - 236), r.y + 22 + 10]})()"
    )
    cockpit.page.mouse("mouseMoved", *at)
    cockpit.until("!document.querySelector('.qn-tip').hidden")
    tip = cockpit.page.ask("document.querySelector('.qn-tip').textContent")
    for name in ("buffer: conv.a", "tensor: past_conv_states: float16", "bytes: ", "device: ascend:0", "generation: 0"):
        assert name in tip
    for name in ("allocated at: runtime/states.py:", "last written: by ", "source: observed"):
        assert name in tip


def test_search_leaves_one_row(cockpit: Cockpit) -> None:
    many = cockpit.facts()["rows"]
    cockpit.put("search", "kv.b")
    cockpit.until(f"Number({GRID}.dataset.rows) === 2 && {GRID}.dataset.picked === 'kv.b'")
    cockpit.put("search", "")
    cockpit.until(f"Number({GRID}.dataset.rows) > 6")
    assert cockpit.facts()["rows"] <= many + 4


def test_light_and_dark(cockpit: Cockpit) -> None:
    assert cockpit.facts()["dark"] == "false"
    cockpit.picture("light")
    pixel = (
        f"(() => {{const c = {GRID}.querySelector('canvas');"
        " return [...c.getContext('2d').getImageData(3, 3, 1, 1).data].slice(0, 3)})()"
    )
    assert min(cockpit.page.ask(pixel)) > 240
    menu(cockpit.page, "Settings", "Theme", "JupyterLab Dark")
    cockpit.until(f"{GRID}.dataset.dark === 'true'")
    assert max(cockpit.page.ask(pixel)) < 60
    cockpit.picture("dark")
    menu(cockpit.page, "Settings", "Theme", "JupyterLab Light")
    cockpit.until(f"{GRID}.dataset.dark === 'false'")


def test_drafts_show_the_pool_of_slots(cockpit: Cockpit) -> None:
    cockpit.put("drafts", "3")
    cockpit.press("Reset")
    cockpit.until(f"Number({GRID}.dataset.ticks) === 0")
    cockpit.press("Run")
    cockpit.until_done()
    cockpit.until("document.querySelectorAll('.qn-line')[1]?.textContent.includes('of 4 slots')")
    line = cockpit.page.ask("document.querySelectorAll('.qn-line')[1].textContent")
    assert "4 live" in line
    assert "drafts accepted so far" in line
    assert "✓ books balance" in cockpit.facts()["all"]
    cockpit.picture("drafts")
    cockpit.put("drafts", "0")


def test_peeks_show_the_norm_of_every_head(cockpit: Cockpit) -> None:
    cockpit.tick_box("peek")
    cockpit.press("Reset")
    cockpit.until(f"Number({GRID}.dataset.ticks) === 0")
    cockpit.press("Run")
    cockpit.until_done()
    cockpit.focus()
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        cockpit.page.key(key)
    cockpit.until("[...document.querySelectorAll('.qn-line')].some(e => e.textContent.includes('norms from'))")
    cockpit.until("[...document.querySelectorAll('.qn-line')].some(e => e.textContent.includes('0 not finite'))")
    assert "✓ books balance" in cockpit.facts()["all"]
    cockpit.picture("peeks")
    cockpit.tick_box("peek")


def test_a_mistake_is_told_on_the_strip(cockpit: Cockpit) -> None:
    cockpit.put("drafts", "3")
    cockpit.put("state", "host")
    cockpit.press("Reset")
    cockpit.until(f"Number({GRID}.dataset.ticks) === 0")
    cockpit.press("Run")
    cockpit.until("document.querySelector('.qn-error')?.textContent.includes('speculate=3 with state')")
    cockpit.put("drafts", "0")
    cockpit.put("state", "resident")


@pytest.mark.full
def test_memory_stays_flat_over_1000_steps(cockpit: Cockpit, lab: Lab) -> None:
    cockpit.put("tokens", "960")
    cockpit.press("Reset")
    cockpit.until(f"Number({GRID}.dataset.ticks) === 0")
    cockpit.press("Run")
    page, kernel = [], []
    for ticks in (200, 950):
        cockpit.until(f"Number({GRID}.dataset.ticks) >= {ticks}")
        page.append(cockpit.page.heap_bytes())
        kernel.append(kernel_bytes(lab))
    cockpit.until_done()
    page.append(cockpit.page.heap_bytes())
    print(f"page {[round(n / 1e6, 1) for n in page]} MB, kernel {[round(n / 1e6, 1) for n in kernel]} MB")
    assert page[-1] - page[0] < 10e6
    assert kernel[-1] - kernel[0] < 40e6


def kernel_bytes(lab: Lab) -> int:
    """Resident memory of the lab's kernel."""
    told = subprocess.run(["ps", "-eo", "ppid=,rss=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in told.splitlines()]
    (found,) = [int(rss) for parent, rss, args in rows if parent == str(lab.process.pid) and "ipykernel" in args]
    return found * 1024


def test_nothing_left_the_machine(cockpit: Cockpit, lab: Lab) -> None:
    assert any("127.0.0.1" in address for address in cockpit.page.asked)
    assert cockpit.page.foreign == []
    assert lab.trap.asked == []
    assert cockpit.page.exceptions == []
