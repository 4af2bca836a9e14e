"""What goes in and comes out: the picture's patches, mRoPE positions over the picture, the best logits.

These draw a session's inputs and results; of a ledger only `logits_topk` can, where a peek holds logits.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.errors import UsageError
from qwen_npu.ledger.store import Ledger
from qwen_npu.views import theme
from qwen_npu.views.theme import Table

if TYPE_CHECKING:
    from qwen_npu.runtime.images import PreparedImage
    from qwen_npu.runtime.inputs import Feed
    from qwen_npu.spec import ModelSpec


def vision_patches(image: PreparedImage, *, merge: int = 2) -> go.Figure:
    """The letterboxed picture under its grid: thin lines are patches, thick ones the blocks that become one token.

    Args:
        image: of `session.inputs.feed(prompt, image).image`.
        merge: patches of a block's side.
    """
    rows, columns = image.grid
    height, width = image.pixels.shape[:2]
    figure = go.Figure()
    _picture(figure, image.pixels)
    _grid_lines(figure, rows, columns, height, width, merge)
    table = vision_patches_table(image, merge=merge)
    figure.add_trace(
        go.Scatter(
            x=[row["x"] for row in table],
            y=[row["y"] for row in table],
            mode="markers",
            marker={"size": 12, "color": "rgba(0,0,0,0)"},
            hovertext=[
                f"patch row {row['row']} column {row['column']}<br>row {row['patch']} of pixel_values, "
                f"token {row['token']} of image_embeds<br>mean {row['mean']:.3f}"
                for row in table
            ],
            hoverinfo="text",
            showlegend=False,
        )
    )
    patch_h, patch_w = height / rows, width / columns
    if rows * columns <= 1024:
        for token in range(rows * columns // merge**2):
            block_row, block_column = divmod(token, columns // merge)
            _badge(figure, (block_column + 0.5) * merge * patch_w, (block_row + 0.5) * merge * patch_h, str(token))
    _picture_axes(figure, height, width)
    subtitle = (
        f"{rows} x {columns} patches of {int(patch_h)} pixels become {rows * columns // merge**2} tokens. "
        f"{html.escape(image.note)}"
    )
    return theme.finish(figure, None, title="The picture as patches", subtitle=subtitle, sources=(), height=560)


def vision_patches_table(image: PreparedImage, *, merge: int = 2) -> Table:
    """A row a patch in the order of `pixel_values`: its place in the picture, its token, mean of its values."""
    rows, columns = image.grid
    patch_h, patch_w = image.pixels.shape[0] / rows, image.pixels.shape[1] / columns
    table = Table()
    for patch in range(rows * columns):
        token, inside = divmod(patch, merge**2)
        block_row, block_column = divmod(token, columns // merge)
        row, column = block_row * merge + inside // merge, block_column * merge + inside % merge
        table.append(
            {
                "patch": patch,
                "token": token,
                "row": row,
                "column": column,
                "x": (column + 0.5) * patch_w,
                "y": (row + 0.5) * patch_h,
                "mean": float(image.pixel_values[patch].mean()),
            }
        )
    return table


def mrope_positions(feed: Feed, spec: ModelSpec) -> go.Figure:
    """Left the picture with the (h, w) position of each of its tokens, right t, h and w of the whole prompt."""
    title = "mRoPE positions"
    t, h, w = (feed.positions[axis, 0] for axis in (1, 2, 3))
    is_image = feed.tokens == spec.image_token
    picture = feed.image if is_image.any() else None
    figure = make_subplots(
        rows=1,
        cols=2 if picture is not None else 1,
        column_widths=[0.42, 0.58] if picture is not None else None,
        horizontal_spacing=0.1,
    )
    right = 2 if picture is not None else 1
    if picture is not None:
        rows, columns = picture.grid
        merge = spec.vision.merge
        height, width = picture.pixels.shape[:2]
        _picture(figure, picture.pixels, row=1, col=1)
        _grid_lines(figure, rows, columns, height, width, merge, row=1, col=1, thin=False)
        for token, index in enumerate(np.flatnonzero(is_image)):
            block_row, block_column = divmod(token, columns // merge)
            _badge(
                figure,
                (block_column + 0.5) * width * merge / columns,
                (block_row + 0.5) * height * merge / rows,
                f"{h[index]},{w[index]}",
                row=1,
                col=1,
            )
        _picture_axes(figure, height, width, row=1, col=1)
    places = list(range(len(feed.tokens)))
    styles = (
        ("t", t, theme.BLUE, "solid", "circle"),
        ("h", h, theme.VERMILION, "dash", "diamond"),
        ("w", w, theme.GREEN, "dot", "square"),
    )
    for name, values, colour, dash, symbol in styles:
        figure.add_trace(
            go.Scatter(
                x=places,
                y=values,
                name=name,
                mode="lines+markers" if len(places) <= 160 else "lines",
                line={"color": colour, "dash": dash, "width": 1.8},
                marker={"symbol": symbol, "size": 5},
                hovertemplate=f"token %{{x}}: {name} = %{{y}}<extra></extra>",
            ),
            row=1,
            col=right,
        )
    if picture is not None:  # after the curves: plotly draws no shape into a subplot that is still empty
        first, last = np.flatnonzero(is_image)[[0, -1]]
        figure.add_vrect(
            x0=first - 0.5, x1=last + 0.5, fillcolor=theme.shade("grid"), line_width=0, layer="below", row=1, col=right
        )
    figure.update_xaxes(title="token of the prompt", row=1, col=right)
    figure.update_yaxes(title="position", row=1, col=right)
    length = len(feed.tokens)
    subtitle = (
        f"{length} tokens, {int(is_image.sum())} of the picture (shaded). Decode goes on at {length} + delta "
        f"({feed.delta}) = {length + feed.delta}."
    )
    return theme.finish(figure, None, title=title, subtitle=subtitle, sources=(), height=480)


def mrope_positions_table(feed: Feed, spec: ModelSpec) -> Table:
    """A row a token: its id, whether it is of the picture, positions t, h, w, and the text position of the mask."""
    return Table(
        {
            "index": index,
            "token": int(token),
            "picture": bool(token == spec.image_token),
            "text": int(feed.positions[0, 0, index]),
            **{name: int(feed.positions[axis, 0, index]) for axis, name in ((1, "t"), (2, "h"), (3, "w"))},
        }
        for index, token in enumerate(feed.tokens)
    )


def logits_topk(
    source: Ledger | np.ndarray, *, step: int = 0, k: int = 10, decode: Callable[[int], str] | None = None
) -> go.Figure:
    """The k best tokens and how far apart they are.

    Args:
        source: logits [vocab] of one step, or a ledger whose peek "logits" holds them.
        step: of a ledger.
        decode: token id -> text, for the names of the bars.
    """
    title = "Best tokens" + (f" of step {step}" if isinstance(source, Ledger) else "")
    table = logits_topk_table(source, step=step, k=k, decode=decode)
    ledger = source if isinstance(source, Ledger) else None
    if not table:
        return theme.nothing(ledger, title=title, reason=f"No logits of step {step} were recorded.")
    names = [f"{row['token']} {row['text']!r}" if decode is not None else str(row["token"]) for row in table]
    figure = go.Figure()
    for place, fill, pattern in ((slice(1), theme.BLUE, ""), (slice(1, None), theme.SKY, "/")):
        figure.add_trace(
            go.Bar(
                x=[row["logit"] for row in table[place]],
                y=[html.escape(name) for name in names[place]],
                orientation="h",
                offsetgroup="tokens",
                marker={"color": fill, "pattern": {"shape": pattern, "size": 6, "solidity": 0.15}},
                text=[f"{row['logit']:.3f}  ({row['probability']:.1%})" for row in table[place]],
                textposition="outside",
                cliponaxis=False,
                hoverinfo="skip",
                showlegend=False,
            )
        )
    figure.update_yaxes(autorange="reversed", type="category", title="token", showgrid=False)
    low, high = min(0.0, table[-1]["logit"]), max(0.0, table[0]["logit"])
    figure.update_xaxes(title="logit", range=[low - 0.2 * (high - low) * (low < 0), high + 0.2 * (high - low)])
    margin = table[0]["logit"] - table[1]["logit"] if len(table) > 1 else float("inf")
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=f"The choice leads by {margin:.3f}; below 0.25 rounding to f16 may turn it.",
        sources={"observed"},
        height=200 + 26 * len(table),
    )


def logits_topk_table(
    source: Ledger | np.ndarray, *, step: int = 0, k: int = 10, decode: Callable[[int], str] | None = None
) -> Table:
    """A row a token, best first: id, logit, probability."""
    if isinstance(source, Ledger):
        peeks = source.peeks("logits", step=step)
        if not peeks:
            return Table()
        source = peeks[-1].array
    logits = np.asarray(source, dtype=np.float64).reshape(-1)
    if k < 1:
        raise UsageError(f"k is {k}", expected="at least 1")
    best = np.argsort(-logits, kind="stable")[:k]
    weights = np.exp(logits - logits.max())
    return Table(
        {
            "token": int(token),
            "text": decode(int(token)) if decode is not None else "",
            "logit": float(logits[token]),
            "probability": float(weights[token] / weights.sum()),
        }
        for token in best
    )


def _picture(figure: go.Figure, pixels: np.ndarray, **place: Any) -> None:
    """The picture itself, inside the figure: no file and no network."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    height, width = pixels.shape[:2]
    axes = {"xref": "x", "yref": "y"}
    figure.add_layout_image(
        source="data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii"),
        x=0,
        y=0,
        sizex=width,
        sizey=height,
        sizing="stretch",
        layer="below",
        **(place or axes),
    )


def _picture_axes(figure: go.Figure, height: int, width: int, **place: Any) -> None:
    figure.update_xaxes(range=[0, width], visible=False, constrain="domain", **place)
    figure.update_yaxes(range=[height, 0], visible=False, scaleanchor="x", constrain="domain", **place)


def _grid_lines(
    figure: go.Figure, rows: int, columns: int, height: int, width: int, merge: int, *, thin: bool = True, **place: Any
) -> None:
    for every, line in (
        (1, {"color": "rgba(0,0,0,0.45)", "width": 0.8, "dash": "dot"}),
        (merge, {"color": theme.ORANGE, "width": 2}),
    ):
        if every == 1 and not thin:
            continue
        xs: list[float | None] = []
        ys: list[float | None] = []
        for row in range(0, rows + 1, every):
            xs += [0, width, None]
            ys += [row * height / rows] * 2 + [None]
        for column in range(0, columns + 1, every):
            xs += [column * width / columns] * 2 + [None]
            ys += [0, height, None]
        figure.add_trace(
            go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False),
            **place,
        )


def _badge(figure: go.Figure, x: float, y: float, text: str, **place: Any) -> None:
    figure.add_annotation(
        x=x,
        y=y,
        text=text,
        showarrow=False,
        font={"size": 11, "color": "#FFFFFF"},
        bgcolor="rgba(0,0,0,0.72)",
        borderpad=2,
        **place,
    )
