"""How figures look: colours, patterns, text of bytes, the table under a figure. Knows nothing of what they show.

Categories are Okabe-Ito, sequences viridis, and nothing is told by colour alone: host is hatched and device solid,
kinds have their own patterns where they are stacked, live and scratch carry badges. Figures bring their own background,
so that they read the same on a light and on a dark page; `use("dark")` makes the background dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from qwen_npu.errors import UsageError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from qwen_npu.ledger.store import Ledger

Theme = Literal["light", "dark"]

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY = "#8A8A8A"

KIND_COLOURS: Mapping[str, str] = {
    "conv": BLUE,
    "recurrent": VERMILION,
    "kv": GREEN,
    "logits": PURPLE,
    "input": ORANGE,
    "pool": SKY,
    "peek": YELLOW,
    "other": GREY,
}
KIND_PATTERNS: Mapping[str, str] = {
    "conv": "x",
    "recurrent": "-",
    "kv": ".",
    "logits": "",
    "input": "|",
    "pool": "+",
    "peek": "/",
    "other": "\\",
}
HOST_PATTERN = "/"
KINDS = tuple(KIND_COLOURS)
SEQUENTIAL = "Viridis"

_SHADES: Mapping[str, Mapping[str, str]] = {
    "light": {"paper": "#FFFFFF", "text": "#1A1A1A", "soft": "#595959", "grid": "#E2E2E2", "band": "#F4F4F4"},
    "dark": {"paper": "#16181D", "text": "#EDEDED", "soft": "#A9ADB5", "grid": "#363A42", "band": "#20232A"},
}
_theme: Theme = "light"


def use(theme: Theme) -> None:
    """Figures made from now on are light or dark."""
    global _theme
    if theme not in _SHADES:
        raise UsageError(f"unknown theme {theme!r}", expected="'light' or 'dark'")
    _theme = theme


def shade(role: Literal["paper", "text", "soft", "grid", "band"]) -> str:
    return _SHADES[_theme][role]


def colour(kind: str) -> str:
    return KIND_COLOURS.get(kind, GREY)


def ink(background: str) -> str:
    """Black or white, whichever is read better on `background` (#RRGGBB); WCAG contrast."""
    luminance = _luminance(background)
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#FFFFFF"


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two colours (#RRGGBB), 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def tint(colour_: str, share: float) -> str:
    """`colour_` mixed into the background; `share` 1 is the colour itself."""
    mixed = (
        round(int(colour_[i : i + 2], 16) * share + int(shade("paper")[i : i + 2], 16) * (1 - share)) for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02X}" for part in mixed)


def bytes_text(nbytes: float) -> str:
    """1 B, 2.0 KiB, 138 KiB, 48.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if abs(nbytes) >= 100 else f"{nbytes:.1f} {unit}"
    raise AssertionError  # the loop returns at its last unit


def finish(
    figure: go.Figure,
    ledger: Ledger | None,
    *,
    title: str,
    subtitle: str = "",
    sources: Iterable[str] = ("observed",),
    notes: Sequence[str] = (),
    height: int = 420,
    axis_height: int = 54,
) -> go.Figure:
    """Title, look and the line that says where the data come from, `axis_height` pixels below the plot."""
    text, soft, grid = shade("text"), shade("soft"), shade("grid")
    device = ""
    if ledger is not None:
        meta = ledger.meta
        device = str(meta.get("device", ""))
        if meta.get("driver") == "emulator":
            device += " emulated: bytes and counts are exact, times are this CPU's"
    known = [source for source in ("observed", "inferred", "emulator") if source in set(sources)]
    parts = [html.escape(part) for part in ("source: " + " + ".join(known) if known else "", device) if part]
    footer = "<br>".join(["  ·  ".join(parts), *(html.escape(note) for note in notes)])
    figure.update_layout(
        title={
            "text": title,
            "subtitle": {"text": subtitle, "font": {"size": 12.5, "color": soft}},
            "x": 0,
            "xref": "paper",
            "font": {"size": 17, "color": text},
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14, "l": 0},
        },
        font={
            "family": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans CJK SC', sans-serif",
            "size": 12.5,
            "color": text,
        },
        paper_bgcolor=shade("paper"),
        plot_bgcolor=shade("paper"),
        height=height,
        margin={"l": 70, "r": 30, "t": 84, "b": 30 + axis_height + 14 * len(notes)},
        hoverlabel={"font": {"size": 12.5}, "align": "left"},
        legend={"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left", "yanchor": "top", "tracegroupgap": 4},
        bargap=0.12,
        colorway=[BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY],
    )
    title_font = {"size": 12.5}
    figure.update_xaxes(gridcolor=grid, zerolinecolor=grid, linecolor=soft, automargin=True, title_font=title_font)
    figure.update_yaxes(gridcolor=grid, zerolinecolor=soft, linecolor=soft, automargin=True, title_font=title_font)
    figure.add_annotation(
        text=footer,
        x=0,
        xref="paper",
        xanchor="left",
        y=0,
        yref="paper",
        yanchor="top",
        yshift=-axis_height,
        showarrow=False,
        align="left",
        font={"size": 11, "color": soft},
    )
    return figure


def nothing(ledger: Ledger | None, *, title: str, reason: str) -> go.Figure:
    """The figure of what this ledger does not hold, saying why."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(
        text=html.escape(reason), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14}
    )
    return finish(figure, ledger, title=title, sources=(), height=260)


def hover(texts: Iterable[str | None]) -> dict[str, Any]:
    """Arguments of a trace whose points tell `texts`. As customdata, which plotly takes as it is: it checks every
    element of hovertext, a second for a hundred thousand."""
    import numpy as np

    return {"customdata": np.array(list(texts), dtype=object), "hovertemplate": "%{customdata}<extra></extra>"}


class Table(list[dict[str, Any]]):
    """The data of a figure as rows; shows itself, and any slice of it, as an HTML table in a notebook."""

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice, /) -> Table: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> dict[str, Any] | Table:
        found = super().__getitem__(place)
        return Table(found) if isinstance(found, list) else found

    def _repr_html_(self) -> str:
        if not self:
            return "<p><em>no rows</em></p>"
        columns = list(self[0])
        head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(name)))}</td>" for name in columns) + "</tr>"
            for row in self[:MAX_ROWS]
        )
        more = f"<p><em>{len(self) - MAX_ROWS} more rows</em></p>" if len(self) > MAX_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


MAX_ROWS = 60
"""Rows that a notebook shows of a table; the list itself holds all."""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _luminance(colour_: str) -> float:
    parts = []
    for i in (1, 3, 5):
        part = int(colour_[i : i + 2], 16) / 255
        parts.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
