"""Marks that several figures put on a grid of values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from qwen_npu.views import theme


def mark_nonfinite(figure: go.Figure, values: np.ndarray, tell: Callable[[int, int], str]) -> np.ndarray:
    """A cross on every cell of `values` [rows, columns] that is NaN or infinite, `tell(row, column)` its hover text.

    Returns:
        The (row, column) pairs marked, [n, 2].
    """
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        figure.add_trace(
            go.Scatter(
                x=bad[:, 1],
                y=bad[:, 0],
                mode="markers",
                marker={"symbol": "x", "size": 8, "color": theme.VERMILION},
                hovertext=[tell(int(row), int(column)) for row, column in bad],
                hoverinfo="text",
                name="not finite",
                showlegend=False,
            )
        )
    return bad
