"""The widget that draws cells over ticks: residency lanes and slot pools. What a cell means is decided by its users.

Its JavaScript lies beside this file and is sent with the widget: nothing is fetched. Cells travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from numpy.typing import NDArray

_HERE = Path(__file__).resolve().parent

EMPTY, IDLE, HALF, FULL = 0, 1, 2, 3
"""Strengths of a cell's colour; EMPTY is not drawn."""
SOLID, HATCHED, DOTTED, CROSSED = 0, 1, 2, 3
"""Patterns."""


@dataclass
class Picture:
    """What a grid shows.

    Attributes:
        rows: dicts with id, label, band (shaded), bus (a separator that carries the arrows).
        columns: a label for every tick shown, "" for none.
        first: tick of the first column.
        cells: u8 [rows, columns, 4]: palette entry, strength, pattern, glyph.
        arrows: i32 [n, 4]: column, from row, to row, 1 up or 0 down.
        side: a text beside each row: its state at the cursor.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    first: int = 0
    cells: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0, 4), np.uint8))
    arrows: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    side: list[str] = field(default_factory=list)
    line: str = ""


class Grid(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows a `Picture`; `cursor`, `picked`, `playing`, `interval` and `span` also change from the keyboard and mouse.

    Args:
        tip: text for a hovered row id and tick.
    """

    _esm = _HERE / "grid.js"
    _css = _HERE / "grid.css"
    title = traitlets.Unicode("").tag(sync=True)
    rows = traitlets.List().tag(sync=True)
    columns = traitlets.List().tag(sync=True)
    first = traitlets.Int(0).tag(sync=True)
    total = traitlets.Int(0).tag(sync=True)
    cells = traitlets.Bytes(b"").tag(sync=True)
    arrows = traitlets.Bytes(b"").tag(sync=True)
    side = traitlets.List().tag(sync=True)
    line = traitlets.Unicode("").tag(sync=True)
    legend = traitlets.List().tag(sync=True)
    palette = traitlets.List().tag(sync=True)
    glyphs = traitlets.List().tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True)
    picked = traitlets.Unicode("").tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    interval = traitlets.Int(400).tag(sync=True)
    span = traitlets.Int(24).tag(sync=True)

    def __init__(self, *, tip: Callable[[str, int], str], **traits: Any) -> None:
        super().__init__(**traits)
        self._tip = tip
        self.on_msg(self._asked)

    def show(self, picture: Picture, total: int) -> None:
        """Sends a picture as one message."""
        with self.hold_sync():
            self.rows = picture.rows
            self.columns = picture.columns
            self.first = picture.first
            self.total = total
            self.cells = np.ascontiguousarray(picture.cells).tobytes()
            self.arrows = np.ascontiguousarray(picture.arrows).tobytes()
            self.side = picture.side
            self.line = picture.line

    def _asked(self, _: Any, message: Any, _buffers: Any) -> None:
        spot = message.get("hover") if isinstance(message, dict) else None
        if spot:
            self.send({"id": spot[0], "tick": spot[1], "tip": self._tip(str(spot[0]), int(spot[1]))})
