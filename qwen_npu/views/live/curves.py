"""The curves of the cockpit: bytes over the bus, bytes held, and time, over the same ticks as the grids."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.live.frames import Frames

_SHADES = {
    False: {"paper": "#FFFFFF", "text": "#1A1A1A", "grid": "#E2E2E2"},
    True: {"paper": "#111111", "text": "#EDEDED", "grid": "#3A3A3A"},
}
MAX_POINTS = 2_000
"""Points of a curve; of a longer run the newest are drawn."""

_LINES: tuple[tuple[str, str, int, str, str], ...] = (
    ("up_bytes", "▲ up", 1, theme.ORANGE, "solid"),
    ("down_bytes", "▼ down", 1, theme.BLUE, "dot"),
    ("alive_bytes", "our buffers", 2, theme.GREY, "solid"),
    ("kv_bytes", "KV", 2, theme.GREEN, "solid"),
    ("recurrent_bytes", "recurrent", 2, theme.VERMILION, "dashdot"),
    ("wall_ms", "wall", 3, theme.VERMILION, "dot"),
    ("predict_ms", "predict", 3, theme.BLUE, "solid"),
)


class Curves:
    """One long-lived FigureWidget. Its cursor is a line that the scrubber moves."""

    def __init__(self) -> None:
        figure = make_subplots(
            rows=1, cols=3, horizontal_spacing=0.06, subplot_titles=("bytes over the bus", "bytes held", "ms a step")
        )
        for _, text, column, colour, dash in _LINES:
            figure.add_trace(
                go.Scatter(
                    x=[],
                    y=[],
                    name=text,
                    mode="lines",
                    line={"color": colour, "dash": dash, "width": 2},
                    legend="legend" if column == 1 else f"legend{column}",
                ),
                row=1,
                col=column,
            )
        for column in (1, 2, 3):
            figure.add_vline(x=0, line={"width": 1.5, "dash": "dash", "color": "#8A8A8A"}, row=1, col=column)
            place = {"x": (0.0, 0.355, 0.71)[column - 1], "y": -0.18, "yanchor": "top", "orientation": "h"}
            figure.update_layout({"legend" if column == 1 else f"legend{column}": place})
        figure.update_layout(
            height=270,
            autosize=True,
            margin={"l": 56, "r": 40, "t": 34, "b": 60},
            modebar={
                "orientation": "v",
                "remove": ["zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale"],
            },
            font={"size": 12, "family": "system-ui, sans-serif"},
            uirevision="keep",  # zoom and hidden curves stay as the user left them
        )
        figure.update_annotations(font={"size": 13})
        figure.update_yaxes(rangemode="tozero")
        self.widget = go.FigureWidget(figure)
        self.paint(False)

    def paint(self, dark: bool) -> None:
        """Light or dark, as the page is."""
        shade = _SHADES[dark]
        with self.widget.batch_update():
            self.widget.update_layout(
                paper_bgcolor=shade["paper"], plot_bgcolor=shade["paper"], font={"color": shade["text"]}
            )
            self.widget.update_xaxes(gridcolor=shade["grid"], zerolinecolor=shade["grid"])
            self.widget.update_yaxes(gridcolor=shade["grid"], zerolinecolor=shade["grid"])

    def update(self, frames: Frames) -> None:
        """Draws the steps; what lies between them has its figures in the grid."""
        ticks = axis.step_ticks(frames.ticks)[-MAX_POINTS:]
        if not ticks and frames.ticks:
            ticks = frames.ticks[-MAX_POINTS:]
        numbers = [tick.number for tick in ticks]
        at, texts = axis.thinned(ticks, most=8) if ticks else ([], [])
        top = max((frames.figures[number].alive_bytes for number in numbers), default=0)
        crossed = max((max(frames.figures[n].up_bytes, frames.figures[n].down_bytes) for n in numbers), default=0)
        with self.widget.batch_update():
            for trace, (name, *_) in zip(self.widget.data, _LINES, strict=True):
                trace.x = numbers
                trace.y = [getattr(frames.figures[number], name) for number in numbers]
            self.widget.update_xaxes(tickvals=[numbers[i] for i in at], ticktext=texts)
            for column, high in ((1, crossed), (2, top)):
                marks, names = axis.byte_marks(0, max(high, 1) * 1.08, most=4)
                self.widget.update_yaxes(
                    tickvals=marks, ticktext=names, range=[0, max(high, 1) * 1.08], row=1, col=column
                )

    def cursor(self, tick: int) -> None:
        """Moves the line."""
        with self.widget.batch_update():
            for shape in self.widget.layout.shapes:
                shape.x0 = shape.x1 = tick

    def close(self) -> None:
        self.widget.close()


def norms_figure() -> Any:
    """A heat map [layer x head] whose values the cockpit sets."""
    figure = go.FigureWidget(
        go.Heatmap(z=[[0.0]], colorscale=theme.SEQUENTIAL, colorbar={"title": "L2 norm", "thickness": 12})
    )
    figure.update_layout(
        height=250,
        margin={"l": 50, "r": 10, "t": 34, "b": 40},
        title={"text": "recurrent state by peek", "font": {"size": 13}},
    )
    figure.update_xaxes(title="head", dtick=1)
    figure.update_yaxes(title="linear layer", dtick=1, autorange="reversed")
    return figure
