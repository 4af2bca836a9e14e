"""How long stages and steps take, in both conventions: predict and wall; the one-time upload stands apart."""

from __future__ import annotations

import statistics
from collections import defaultdict

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import STEP_STAGES
from qwen_npu.views import theme
from qwen_npu.views.theme import Table

_ONCE = ("vision", "prefill", "upload")
_PATTERNS = {"vision": "/", "prefill": "x", "upload": "."}


def timings(ledger: Ledger) -> go.Figure:
    """Left the stages that run once, right every decode or verify step."""
    title = "Time: predict and wall"
    rows = timings_table(ledger)
    if not rows:
        return theme.nothing(ledger, title=title, reason="This ledger holds no step.")
    steps = [row for row in rows if row["stage"] in STEP_STAGES]
    once: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["stage"] in _ONCE:
            once[row["stage"]].append(row["wall_ms"])
        elif row["upload_ms"]:
            once["upload"].append(row["upload_ms"])
    figure = make_subplots(rows=1, cols=2, column_widths=[0.24, 0.76], horizontal_spacing=0.08)
    colours = {"vision": theme.SKY, "prefill": theme.BLUE, "upload": theme.ORANGE}
    for name in [name for name in _ONCE if name in once]:
        value = statistics.median(once[name])
        figure.add_trace(
            go.Bar(
                x=[name],
                y=[value],
                offsetgroup="once",
                marker={"color": colours[name], "pattern": {"shape": _PATTERNS[name], "size": 6}},
                text=f"{value:.3g} ms",
                textposition="outside",
                cliponaxis=False,
                hovertext=f"{name}: {value:.4g} ms wall, median of {len(once[name])}",
                hoverinfo="text",
                showlegend=False,
            ),
            row=1,
            col=1,
        )
    texts = [f"{row['run'] + 1}:{row['step']}" if steps[-1]["run"] else str(row["step"]) for row in steps]
    for column, colour, dash, symbol in (
        ("wall_ms", theme.VERMILION, "dot", "diamond-open"),
        ("predict_ms", theme.BLUE, "solid", "circle"),
    ):
        figure.add_trace(
            go.Scatter(
                x=list(range(len(steps))),
                y=[row[column] for row in steps],
                name=column.removesuffix("_ms"),
                mode="lines+markers" if len(steps) <= 128 else "lines",
                line={"color": colour, "width": 1.8, "dash": dash},
                marker={"symbol": symbol, "size": 6},
                hovertext=[
                    f"{row['stage']} {row['step']}: {row[column]:.4g} ms {column.removesuffix('_ms')}" for row in steps
                ],
                hoverinfo="text",
            ),
            row=1,
            col=2,
        )
    stride = max(1, len(steps) // 16)
    figure.update_xaxes(
        title="step", tickvals=list(range(0, len(steps), stride)), ticktext=texts[::stride], row=1, col=2
    )
    figure.update_xaxes(title="once a generation", row=1, col=1)
    figure.update_yaxes(title="ms wall", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="ms a step", rangemode="tozero", row=1, col=2)
    return theme.finish(figure, ledger, title=title, subtitle=_told(rows, once), height=420)


def timings_table(ledger: Ledger) -> Table:
    """A row a stage and step: predict_ms from arranging the inputs to the return of predict, wall_ms to the token."""
    rows = Table()
    run, stepped = 0, False
    for step in ledger.steps():
        if step.stage in STEP_STAGES:
            stepped = True
        elif stepped:
            run, stepped = run + 1, False
        rows.append(
            {
                "run": run,
                "stage": step.stage,
                "step": step.step,
                "predict_ms": step.predict_ms,
                "wall_ms": step.wall_ms,
                "upload_ms": step.upload_ms,
                "token": step.token,
                "text": step.text,
            }
        )
    return rows


def _told(rows: Table, once: dict[str, list[float]]) -> str:
    steps = [row for row in rows if row["stage"] in STEP_STAGES]
    if not steps:
        return ""
    predict = statistics.median(row["predict_ms"] for row in steps)
    wall = statistics.median(row["wall_ms"] for row in steps)
    upload = sum(once.get("upload", ()))
    total = sum(row["wall_ms"] for row in steps) + upload
    return (
        f"Median step: predict {predict:.3g} ms, wall {wall:.3g} ms. Wall total of {len(steps)} steps {total:.4g} ms, "
        f"of it {upload:.3g} ms for the one-time upload of the states."
    )
