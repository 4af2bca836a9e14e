"""The curves of the cockpit: bytes over the bus, bytes held, and time, over the same ticks as the grids.

Drawn by a few kB of our own JavaScript: a plotly FigureWidget sends 5 MB for each figure, and inside another widget it
came up empty in two of four sessions. Plotly draws the static twins.
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import numpy as np
import traitlets

from qwen_npu.ledger.timeline import Tick
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.live.frames import Frames

_HERE = Path(__file__).resolve().parent

MAX_POINTS = 2_000
"""Points of a curve; of a longer run the newest are drawn."""

PANELS = (
    {"title": "bytes over the bus, a step", "unit": "bytes"},
    {"title": "bytes held on the device", "unit": "bytes"},
    {"title": "time of a step", "unit": "ms"},
)
LINES = (
    ("up_bytes", "▲ up", 0, theme.ORANGE, "solid"),
    ("down_bytes", "▼ down", 0, theme.BLUE, "dot"),
    ("alive_bytes", "our buffers", 1, theme.GREY, "dot"),
    ("kv_bytes", "KV", 1, theme.GREEN, "solid"),
    ("recurrent_bytes", "recurrent", 1, theme.VERMILION, "dash"),
    ("wall_ms", "wall", 2, theme.VERMILION, "dot"),
    ("predict_ms", "predict", 2, theme.BLUE, "solid"),
)
"""Field of `Figures`, name, panel, colour, dash."""


class Curves(anywidget.AnyWidget):  # type: ignore[misc]
    """One long-lived widget. `cursor` is the scrubber's tick; a click moves it."""

    _esm = _HERE / "curves.js"
    panels = traitlets.List().tag(sync=True)
    lines = traitlets.List().tag(sync=True)
    x = traitlets.Bytes(b"").tag(sync=True)
    y = traitlets.Bytes(b"").tag(sync=True)
    marks = traitlets.List().tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True)

    def __init__(self) -> None:
        lines = [
            {"name": name, "panel": panel, "colour": colour, "dash": dash} for _, name, panel, colour, dash in LINES
        ]
        super().__init__(panels=list(PANELS), lines=lines)

    def update(self, frames: Frames) -> None:
        """Draws the steps, or the stages while there is no step yet."""
        ticks = chosen(frames)
        numbers, values = points(frames, ticks)
        at, texts = axis.thinned(ticks, most=8) if ticks else ([], [])
        with self.hold_sync():
            self.x = numbers.tobytes()
            self.y = values.tobytes()
            self.marks = [[int(numbers[i]), text] for i, text in zip(at, texts, strict=True)]


def chosen(frames: Frames) -> list[Tick]:
    return (axis.step_ticks(frames.ticks) or frames.ticks)[-MAX_POINTS:]


def points(frames: Frames, ticks: list[Tick]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the ticks i32 [n], and values f64 [lines, n], NaN where there is none."""
    numbers = np.array([tick.number for tick in ticks], np.int32)
    figures = [frames.figures[tick.number] for tick in ticks]
    values = np.full((len(LINES), len(ticks)), np.nan)
    for i, (name, *_) in enumerate(LINES):
        for k, figure in enumerate(figures):
            value = getattr(figure, name)
            if value is not None:
                values[i, k] = value
    return numbers, values
