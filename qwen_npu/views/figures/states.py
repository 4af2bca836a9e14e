"""What peeks saw of the states: norms of every layer and head over steps, two runs apart, and the KV's positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from qwen_npu.errors import UsageError
from qwen_npu.ledger.store import Ledger, Peek
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.figures.kv import kv_growth_table
from qwen_npu.views.figures.marks import mark_nonfinite
from qwen_npu.views.theme import Table

NORM = "recurrent.norm"
MAX_CELLS_WITH_POSITIONS = 200_000


def state_norms(ledger: Ledger, name: str = NORM) -> go.Figure:
    """A row a layer and head, a column a step; colour is the peek's value. Values that are not finite carry a cross.

    Args:
        name: of the peek; its arrays are [layer, head], or [layer] (`ledger.peek_names()` lists them).
    """
    title = f"State by layer and head: {name}"
    peeks = ledger.peeks(name)
    if not peeks:
        return _no_peeks(ledger, title, name)
    values, rows = _stack(peeks)
    return _heatmap(ledger, title, Timeline.of(ledger), peeks, values, rows, "value")


def state_norms_table(ledger: Ledger, name: str = NORM) -> Table:
    """A row a step, layer and head."""
    timeline = Timeline.of(ledger)
    return Table(
        {
            "run": timeline.ticks[timeline.tick_at(peek.seq)].run,
            "step": peek.step,
            **dict(zip(("layer", "head"), index, strict=False)),
            "value": value.item(),
        }
        for peek in ledger.peeks(name)
        for index, value in np.ndenumerate(peek.array)
    )


def compare_states(first: Ledger, second: Ledger, name: str = NORM) -> go.Figure:
    """The distance of two runs, |first - second|, by layer, head and step; the first that differs is marked."""
    title = f"Two runs apart: {name}"
    rows = compare_states_table(first, second, name)
    if not rows:
        return _no_peeks(first, title, name)
    pairs = _pairs(first, second, name)
    values, labels = _stack([a for a, _ in pairs])
    others, _ = _stack([b for _, b in pairs])
    # equal infinities and equal NaN are no distance
    same = (values == others) | (np.isnan(values) & np.isnan(others))
    with np.errstate(invalid="ignore"):
        distances = np.where(same, 0.0, np.abs(values - others))
    figure = _heatmap(first, title, Timeline.of(first), [a for a, _ in pairs], distances, labels, "|difference|")
    parted = np.argwhere(distances.T != 0)
    if len(parted):
        step, row = (int(i) for i in parted[0])
        figure.add_trace(
            go.Scatter(
                x=[step],
                y=[row],
                mode="markers",
                marker={"symbol": "circle-open", "size": 16, "color": theme.VERMILION, "line": {"width": 3}},
                name="first difference",
                hovertext=[f"first difference: {labels[row]}, step {pairs[step][0].step}"],
                hoverinfo="text",
                showlegend=True,
            )
        )
        figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"})
    return figure


def compare_states_table(first: Ledger, second: Ledger, name: str = NORM) -> Table:
    """A row a step: the largest distance and where it is."""
    rows = Table()
    for a, b in _pairs(first, second, name):
        with np.errstate(invalid="ignore"):
            gap = np.abs(a.array.astype(np.float64) - b.array.astype(np.float64))
        gap = np.where((a.array == b.array) | (np.isnan(a.array) & np.isnan(b.array)), 0.0, gap)
        gap = np.where(np.isnan(gap), np.inf, gap)
        index = [int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape)]
        rows.append({"step": a.step, "max_abs": float(gap.max()), **dict(zip(("layer", "head"), index, strict=False))})
    return rows


def kv_positions(ledger: Ledger) -> go.Figure:
    """Which positions of the KV cache are filled at each step: by the prompt, by earlier steps, by this one."""
    title = "KV cache by position"
    rows = [row for row in kv_growth_table(ledger) if row["used_tokens"] is not None]
    if not rows:
        return theme.nothing(
            ledger, title=title, reason="This ledger does not tell how many tokens the cache holds at each step."
        )
    widest = max(row["capacity_tokens"] or row["used_tokens"] for row in rows)
    used = max(row["used_tokens"] for row in rows)
    shown = min(widest, max(used + max(4, used // 8), 16))  # an almost empty cache is not drawn to its end
    stride = max(1, -(-len(rows) * shown // MAX_CELLS_WITH_POSITIONS))
    rows = rows[::stride]
    cells = np.full((len(rows), shown), np.nan, np.float32)
    for line, row in enumerate(rows):
        capacity = row["capacity_tokens"] or row["used_tokens"]
        cells[line, : min(capacity, shown)] = 0
        cells[line, : row["used_tokens"]] = 2
        cells[line, : row["prompt_tokens"]] = 1
        cells[line, row["used_tokens"] - row["written_tokens"] : row["used_tokens"]] = 3
    palette = (theme.shade("grid"), theme.SKY, theme.GREEN, theme.VERMILION)
    names = ("empty", "prompt", "earlier steps", "written by this step")
    scale: list[list[Any]] = []
    for i, colour in enumerate(palette):
        scale += [[i / 4, colour], [(i + 1) / 4, colour]]
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            zmin=-0.5,
            zmax=3.5,
            colorscale=scale,
            colorbar={"tickvals": [0, 1, 2, 3], "ticktext": list(names), "thickness": 14, "outlinewidth": 0},
            hovertemplate="position %{x}, line %{y}<extra></extra>",
            xgap=0.5 if shown < 200 else 0,
            ygap=0.5 if len(rows) < 100 else 0,
        )
    )
    figure.add_trace(
        go.Scatter(
            x=[row["used_tokens"] - 1 for row in rows],
            y=list(range(len(rows))),
            mode="markers",
            marker={"symbol": "circle", "size": 4, "color": "#FFFFFF"},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    several = rows[-1]["run"] > 0
    stride = max(1, len(rows) // 16)
    figure.update_yaxes(
        title="step",
        autorange="reversed",
        tickvals=list(range(0, len(rows), stride)),
        ticktext=[f"{row['run'] + 1}:{row['step']}" if several else str(row["step"]) for row in rows[::stride]],
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(
        title="position in the cache (tokens)", showgrid=False, zeroline=False, range=[-0.5, shown - 0.5]
    )
    last = rows[-1]
    capacity = last["capacity_tokens"] or last["used_tokens"]
    subtitle = f"{last['used_tokens']} of {capacity} positions in use after {last['at']}."
    subtitle += f" Positions behind {shown} are empty and not drawn." if shown < capacity else ""
    return theme.finish(figure, ledger, title=title, subtitle=subtitle, sources={"observed", "inferred"}, height=440)


def kv_positions_table(ledger: Ledger) -> Table:
    """A row a step: positions filled by the prompt and by steps, the one written now, the empty ones."""
    return Table(
        {
            "run": row["run"],
            "step": row["step"],
            "prompt": row["prompt_tokens"],
            "steps": row["used_tokens"] - row["prompt_tokens"],
            "written_at": row["used_tokens"] - row["written_tokens"],
            "written": row["written_tokens"],
            "empty": (row["capacity_tokens"] or row["used_tokens"]) - row["used_tokens"],
        }
        for row in kv_growth_table(ledger)
        if row["used_tokens"] is not None
    )


def _pairs(first: Ledger, second: Ledger, name: str) -> list[tuple[Peek, Peek]]:
    pairs = list(zip(first.peeks(name), second.peeks(name), strict=False))
    for a, b in pairs:
        if a.array.shape != b.array.shape:
            raise UsageError(
                f"peek {name!r} is {list(a.array.shape)} in one run and {list(b.array.shape)} in the other",
                expected="two runs of one model",
            )
    return pairs


def _stack(peeks: Sequence[Peek]) -> tuple[np.ndarray, list[str]]:
    """Values [layer * head, step] and the text of each row."""
    shape = peeks[0].array.shape
    if not 1 <= len(shape) <= 2 or any(peek.array.shape != shape for peek in peeks):
        raise UsageError(
            f"peek {peeks[0].name!r} has arrays of shape {list(shape)}", expected="[layer] or [layer, head], all alike"
        )
    values = np.stack([peek.array.reshape(-1).astype(np.float64) for peek in peeks], axis=1)
    if len(shape) == 1:
        return values, [f"layer {layer}" for layer in range(shape[0])]
    return values, [f"layer {layer} head {head}" for layer in range(shape[0]) for head in range(shape[1])]


def _heatmap(
    ledger: Ledger,
    title: str,
    timeline: Timeline,
    peeks: Sequence[Peek],
    values: np.ndarray,
    rows: Sequence[str],
    what: str,
) -> go.Figure:
    ticks = [timeline.ticks[timeline.tick_at(peek.seq)] for peek in peeks]
    finite = np.where(np.isfinite(values), values, np.nan)
    texts = axis.labels(ticks)
    figure = go.Figure(
        go.Heatmap(
            z=finite,
            colorscale=theme.SEQUENTIAL,
            colorbar={"title": {"text": what, "side": "right"}, "thickness": 14, "outlinewidth": 0},
            customdata=np.broadcast_to(np.array(texts), finite.shape),
            text=np.broadcast_to(np.array(rows)[:, None], finite.shape),
            hovertemplate=f"%{{text}}, step %{{customdata}}<br>{what} %{{z:.6g}}<extra></extra>",
        )
    )
    bad = mark_nonfinite(figure, values, lambda row, step: f"{rows[row]}, step {texts[step]}: {values[row, step]}")
    at, names = axis.thinned(ticks)
    figure.update_xaxes(
        title="step", tickvals=at, ticktext=names, showgrid=False, zeroline=False, range=[-0.5, len(ticks) - 0.5]
    )
    stride = max(1, -(-len(rows) // 40))
    figure.update_yaxes(
        tickvals=list(range(0, len(rows), stride)), ticktext=list(rows)[::stride], autorange="reversed", showgrid=False
    )
    figure.update_yaxes(zeroline=False)
    subtitle = "All values are finite."
    if len(bad):
        row, step = min(bad.tolist(), key=lambda place: (place[1], place[0]))
        subtitle = f"<b>Not finite first at step {texts[step]}, {rows[row]}</b> (crosses: {len(bad)} values)."
    height = int(min(760, 200 + 12 * len(rows)))
    return theme.finish(figure, ledger, title=title, subtitle=subtitle, sources={"observed"}, height=max(height, 340))


def _no_peeks(ledger: Ledger, title: str, name: str) -> go.Figure:
    known = ", ".join(ledger.peek_names())
    reason = f"No peeks named {name!r} were recorded" + (
        f"; there are {known}." if known else " (they are switched off)."
    )
    return theme.nothing(ledger, title=title, reason=reason)
