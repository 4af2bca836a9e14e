"""What crosses the bus each step, by direction and kind of buffer; two runs side by side."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Tick, Timeline
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.theme import Table, bytes_text

_ARROWS = {"H2D": "▲ H2D", "D2H": "▼ D2H"}
_STATES = ("conv", "recurrent", "kv", "pool")

Sums = dict[tuple[str, str], dict[int, tuple[int, int]]]
"""(direction, kind) -> tick -> (bytes, copies)."""


def traffic(ledger: Ledger) -> go.Figure:
    """Bars a step: host to device above the line, device to host below, stacked by kind of buffer.

    The one-time crossing of the states before the first step is told in the subtitle, not drawn.
    """
    timeline = Timeline.of(ledger)
    steps = axis.step_ticks(timeline.ticks)
    title = "Bytes over the bus each step"
    if not steps:
        return theme.nothing(ledger, title=title, reason="This ledger holds no decode or verify step.")
    figure = go.Figure()
    sums = _sums(timeline)
    low, high = _draw(figure, steps, sums, legend=set())
    _byte_axis(figure, low, high)
    marks, texts = axis.thinned(steps)
    figure.update_xaxes(title="step", tickvals=marks, ticktext=texts)
    figure.update_layout(barmode="relative")
    sources = {move.source for move in timeline.moves}
    subtitle = f"{_a_step(steps, sums)}. {_once(timeline, sums)}"
    return theme.finish(figure, ledger, title=title, subtitle=subtitle, sources=sources)


def traffic_table(ledger: Ledger) -> Table:
    """Bytes and number of copies of every tick, direction and kind; also of what lies between steps."""
    timeline = Timeline.of(ledger)
    sums = _sums(timeline)
    cells = sorted((tick, direction, kind) for (direction, kind), ticks in sums.items() for tick in ticks)
    return Table(
        {
            "run": timeline.ticks[tick].run,
            "stage": timeline.ticks[tick].stage,
            "step": timeline.ticks[tick].step,
            "at": timeline.ticks[tick].label,
            "direction": direction,
            "kind": kind,
            "nbytes": sums[direction, kind][tick][0],
            "copies": sums[direction, kind][tick][1],
        }
        for tick, direction, kind in cells
    )


def compare_traffic(
    first: Ledger, second: Ledger, *, names: tuple[str, str] = ("resident", "host round trip")
) -> go.Figure:
    """Bytes a step of two runs side by side on one scale."""
    title = "Bytes over the bus each step: " + " beside ".join(names)
    timelines = [Timeline.of(ledger) for ledger in (first, second)]
    if not all(axis.step_ticks(timeline.ticks) for timeline in timelines):
        return theme.nothing(first, title=title, reason="One of the two ledgers holds no decode or verify step.")
    all_sums = [_sums(timeline) for timeline in timelines]
    headings = [
        f"<b>{name}</b><br>{_a_step(axis.step_ticks(timeline.ticks), sums, short=True)}"
        for name, timeline, sums in zip(names, timelines, all_sums, strict=True)
    ]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=headings, horizontal_spacing=0.04)
    legend: set[str] = set()
    low = high = 0.0
    spans = []
    for column, (timeline, sums) in enumerate(zip(timelines, all_sums, strict=True), start=1):
        steps = axis.step_ticks(timeline.ticks)
        bottom, top = _draw(figure, steps, sums, legend=legend, column=column)
        low, high = min(low, bottom), max(high, top)
        spans.append((len(steps), top - bottom))
        marks, texts = axis.thinned(steps, most=12)
        figure.update_xaxes(title="step", tickvals=marks, ticktext=texts, row=1, col=column)
    _byte_axis(figure, low, high)
    figure.update_yaxes(title="", row=1, col=2)
    for column, (count, span) in enumerate(spans, start=1):
        if span < 0.01 * (high - low):
            figure.add_annotation(
                x=(count - 1) / 2,
                y=0,
                text="less than a line's width at this scale",
                showarrow=False,
                yshift=12,
                font={"size": 11, "color": theme.shade("soft")},
                row=1,
                col=column,
            )
    figure.update_layout(barmode="relative")
    sources = {move.source for timeline in timelines for move in timeline.moves}
    theme.finish(figure, first, title=title, subtitle=" ", sources=sources, height=460)
    figure.update_layout(margin={"t": 126})
    figure.update_annotations({"font": {"size": 12.5, "color": theme.shade("text")}}, selector={"yanchor": "bottom"})
    return figure


def compare_traffic_table(
    first: Ledger, second: Ledger, *, names: tuple[str, str] = ("resident", "host round trip")
) -> Table:
    """Bytes of every step and direction in both runs."""
    rows: dict[tuple[int, int, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))
    for name, ledger in zip(names, (first, second), strict=True):
        timeline = Timeline.of(ledger)
        for (direction, _), ticks in _sums(timeline).items():
            for number, (nbytes, _) in ticks.items():
                tick = timeline.ticks[number]
                if tick.is_step:
                    rows[tick.run, tick.step, direction][name] += nbytes
    return Table({"run": key[0], "step": key[1], "direction": key[2], **rows[key]} for key in sorted(rows))


def _sums(timeline: Timeline) -> Sums:
    sums: Sums = defaultdict(dict)
    for move in timeline.moves:
        cell = sums[move.direction, move.kind]
        nbytes, copies = cell.get(move.tick, (0, 0))
        cell[move.tick] = (nbytes + move.nbytes, copies + 1)
    return sums


def _draw(
    figure: go.Figure, steps: Sequence[Tick], sums: Sums, *, legend: set[str], column: int | None = None
) -> tuple[float, float]:
    """Adds the bars; gives the lowest and the highest stack. `legend` holds the kinds already in the legend."""
    place = {"row": 1, "col": column} if column is not None else {}
    positions = list(range(len(steps)))
    texts = [tick.label for tick in steps]
    stacks = {"H2D": [0] * len(steps), "D2H": [0] * len(steps)}
    for direction in ("H2D", "D2H"):
        for kind in theme.KINDS:
            cells = sums.get((direction, kind), {})
            values = [cells.get(tick.number, (0, 0)) for tick in steps]
            if not any(nbytes for nbytes, _ in values):
                continue
            stacks[direction] = [a + b for a, (b, _) in zip(stacks[direction], values, strict=True)]
            sign = 1 if direction == "H2D" else -1
            heights = [sign * nbytes for nbytes, _ in values]
            hover = [
                f"{text}<br>{_ARROWS[direction]} {kind}: {bytes_text(nbytes)} ({nbytes} B) in {copies} copies"
                for text, (nbytes, copies) in zip(texts, values, strict=True)
            ]
            common = {
                "x": np.array(positions),
                "y": np.array(heights),
                "name": kind,
                "legendgroup": kind,
                "legendrank": theme.KINDS.index(kind),
                "showlegend": kind not in legend,
                **theme.hover(hover),
            }
            legend.add(kind)
            fill = theme.colour(kind)
            pattern = {"shape": theme.KIND_PATTERNS[kind], "fgcolor": theme.ink(fill), "fgopacity": 0.35, "size": 6}
            if len(steps) <= axis.MAX_BARS:
                trace = go.Bar(**common, marker={"color": fill, "pattern": pattern, "line": {"width": 0}})
            else:
                trace = go.Scatter(
                    **common,
                    mode="lines",
                    line={"width": 0.5, "color": fill, "shape": "hv"},
                    stackgroup=direction,
                    fillcolor=fill,
                    fillpattern=pattern,
                )
            figure.add_trace(trace, **place)
    figure.add_hline(y=0, line={"color": theme.shade("soft"), "width": 1}, **place)
    return -float(max(stacks["D2H"])), float(max(stacks["H2D"]))


def _byte_axis(figure: go.Figure, low: float, high: float) -> None:
    span = max(high - low, 1.0)
    low, high = low - 0.06 * span, high + 0.06 * span
    marks, texts = axis.byte_marks(low, high)
    figure.update_yaxes(
        title="▼ device to host     ▲ host to device", tickvals=marks, ticktext=texts, range=[low, high]
    )


def _a_step(steps: Sequence[Tick], sums: Sums, *, short: bool = False) -> str:
    """ "A step moves ▲ 168 B (input) and ▼ 2.0 KiB (logits)": medians over the steps, exact where all are equal."""
    sides, exact, states = [], True, 0
    for direction in ("H2D", "D2H"):
        totals = [0] * len(steps)
        kinds = []
        for kind in theme.KINDS:
            cells = sums.get((direction, kind), {})
            values = [cells.get(tick.number, (0, 0))[0] for tick in steps]
            if any(values):
                kinds.append(kind)
                totals = [a + b for a, b in zip(totals, values, strict=True)]
                states += sum(values) if kind in _STATES else 0
        exact = exact and len(set(totals)) == 1
        sides.append(f"{_ARROWS[direction]} {bytes_text(statistics.median(totals))} ({', '.join(kinds) or 'nothing'})")
    many = "Every step" if exact else "A step (median)"
    text = f"{many}: {sides[0]}, {sides[1]}"
    if short:
        return f"{many}:<br>{sides[0]}<br>{sides[1]}"
    return text + (f"; states cross every time, {bytes_text(states)} in all" if states else "; no state crosses")


def _once(timeline: Timeline, sums: Sums) -> str:
    """What states crossed upwards outside of the steps: at the hand-over, or when a sequence joined."""
    first = next((tick.number for tick in timeline.ticks if tick.is_step), 0)
    outside: dict[int, int] = defaultdict(int)
    for (direction, kind), ticks in sums.items():
        for tick, (nbytes, _) in ticks.items():
            if direction == "H2D" and kind in _STATES and not timeline.ticks[tick].is_step:
                outside[tick] += nbytes
    total = sum(outside.values())
    if not total:
        return ""
    if max(outside) < first:
        return f"Before the first step the states went up once: {bytes_text(total)}."
    return f"Outside of steps {bytes_text(total)} of state went up."
