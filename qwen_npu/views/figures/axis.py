"""The step axis that figures share, and axes in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qwen_npu.errors import UsageError
from qwen_npu.ledger.timeline import Tick
from qwen_npu.views.theme import bytes_text

MAX_BARS = 400
"""Above so many steps, bars are drawn as areas: a browser draws thousands of bars slowly."""
MAX_LANES_TICKS = 160
"""Steps that a figure with one bar a buffer and step shows unless asked for others."""

Window = tuple[int, int]
"""First and last tick to show, both included."""


def step_ticks(ticks: Sequence[Tick]) -> list[Tick]:
    return [tick for tick in ticks if tick.is_step]


def windowed(ticks: Sequence[Tick], window: Window | None) -> tuple[list[Tick], str]:
    """The ticks to draw and, where some are left out, a sentence that says so.

    Raises:
        UsageError: a window that holds no tick.
    """
    if window is None:
        shown = list(ticks[-MAX_LANES_TICKS:])
    else:
        first, last = window
        shown = [tick for tick in ticks if first <= tick.number <= last]
        if not shown:
            raise UsageError(
                f"window {window!r} holds no tick",
                expected=f"(first, last) within 0..{len(ticks) - 1}" if ticks else "a ledger that holds events",
            )
    if len(shown) == len(ticks):
        return shown, ""
    return shown, f"ticks {shown[0].number} to {shown[-1].number} of {len(ticks)}; window=(first, last) shows others"


def labels(ticks: Sequence[Tick]) -> list[str]:
    """Axis text of each tick: the step's number, the name of what lies between steps, the generation if several."""
    several = len({tick.run for tick in ticks}) > 1
    texts = []
    for tick in ticks:
        text = str(tick.step) if tick.is_step else tick.label.removeprefix("decode ").removeprefix("verify ")
        texts.append(f"{tick.run + 1}:{text}" if several else text)
    return texts


def thinned(ticks: Sequence[Tick], most: int = 24) -> tuple[list[int], list[str]]:
    """Positions and texts of at most about `most` axis marks; what lies between steps is always marked if there is
    room."""
    texts = labels(ticks)
    stride = _nice(max(1, math.ceil(len(ticks) / most)))
    chosen = [i for i, tick in enumerate(ticks) if not tick.is_step or tick.step % stride == 0]
    if len(chosen) > 2 * most:
        chosen = chosen[:: math.ceil(len(chosen) / most)]
    return chosen, [texts[i] for i in chosen]


def byte_marks(low: float, high: float, most: int = 6) -> tuple[list[float], list[str]]:
    """Round marks from `low` to `high` bytes; their texts are without sign (direction is told by the side)."""
    span = max(high - low, 1.0)
    step = 2.0 ** math.ceil(math.log2(max(span / most, 1.0)))
    first, last = math.ceil(low / step), math.floor(high / step)
    marks = [step * i for i in range(first, last + 1)]
    return marks, [bytes_text(abs(mark)) for mark in marks]


def _nice(stride: int) -> int:
    magnitude: int = 10 ** int(math.log10(stride))
    return next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= stride)
