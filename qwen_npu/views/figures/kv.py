"""How the KV cache grows: used against capacity, measured against predicted, beside the flat recurrent state."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import numpy as np
import plotly.graph_objects as go

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.theme import Table, bytes_text

_BESIDE = ("peek", "admit")
"""Graphs that run within a step without being it."""


def kv_growth(ledger: Ledger) -> go.Figure:
    """Bytes of the KV cache after each step: held by the buffer, filled with tokens, predicted by the formula."""
    title = "KV cache: what it holds and what it costs"
    rows = kv_growth_table(ledger)
    if not rows:
        return theme.nothing(ledger, title=title, reason="This ledger holds no decode step with a KV cache.")
    timeline = Timeline.of(ledger)
    steps = axis.step_ticks(timeline.ticks)
    place = {tick.number: i for i, tick in enumerate(steps)}
    figure = go.Figure()
    green, vermilion, text = theme.colour("kv"), theme.colour("recurrent"), theme.shade("text")
    lines = (
        ("used_bytes", "filled with tokens", {"color": green, "width": 0}, "", True),
        ("kv_bytes", "KV buffer, measured", {"color": green, "width": 3}, "circle", False),
        ("predicted_bytes", "KV buffer, predicted", {"color": text, "width": 1.5, "dash": "dot"}, "x-thin-open", False),
        (
            "recurrent_bytes",
            "recurrent state (one half)",
            {"color": vermilion, "width": 2, "dash": "dashdot"},
            "",
            False,
        ),
    )
    few = len(rows) <= 64
    for column, name, line, symbol, filled in lines:
        if all(row[column] is None for row in rows):
            continue
        xs, ys, hover = _line(rows, column, place)
        fill: dict[str, Any] = {}
        if filled:
            fill = {
                "fill": "tozeroy",
                "fillcolor": theme.tint(green, 0.35),
                "fillpattern": {"shape": ".", "fgcolor": green},
            }
        figure.add_trace(
            go.Scatter(
                x=np.array(xs, dtype=np.float64),
                y=np.array(ys, dtype=np.float64),
                name=name,
                mode="lines+markers" if symbol and few else "lines",
                line=line,
                marker={"symbol": symbol or "circle", "size": 7, "line": {"width": 1.5}},
                **theme.hover(hover),
                **fill,
            )
        )
    high = max(row[column] or 0 for row in rows for column in ("kv_bytes", "predicted_bytes", "recurrent_bytes"))
    marks, texts = axis.byte_marks(0, high * 1.08)
    figure.update_yaxes(title="bytes on one side", tickvals=marks, ticktext=texts, range=[0, high * 1.08])
    figure.update_yaxes(title="")
    at, names = axis.thinned(steps)
    figure.update_xaxes(title="step", tickvals=at, ticktext=names)
    notes = []
    if any(row["used_tokens"] is None for row in rows):
        notes.append("tokens in use are not recorded in this ledger")
    return theme.finish(
        figure, ledger, title=title, subtitle=_told(rows), sources={"observed", "inferred"}, notes=notes
    )


def kv_growth_table(ledger: Ledger) -> Table:
    """A row a step: tokens in use and capacity, bytes held, filled and predicted, allocated in the step, bytes of the
    recurrent state."""
    timeline = Timeline.of(ledger)
    meta = ledger.meta
    growing = meta.get("kv") == "growing"
    formula = token_bytes(ledger)
    prompts = _prompt_tokens(ledger, timeline)
    taken = _tokens_taken(ledger, timeline)
    allocated: dict[int, int] = defaultdict(int)
    for life in timeline.lives:
        if life.buffer.kind == "kv":
            allocated[timeline.tick_at(life.born_seq)] += life.buffer.nbytes
    on_host: dict[tuple[int, str], int] = {}
    for move in timeline.moves:
        if move.direction == "D2H" and move.kind in ("kv", "recurrent"):
            on_host[move.tick, move.kind] = move.nbytes
    rows = Table()
    for use in timeline.uses:
        tick = timeline.ticks[use.tick]
        if not tick.is_step or use.graph.startswith(_BESIDE):
            continue
        written = [timeline.life_at(id_, use.seq, "output") for id_ in use.outputs]
        held = {life.buffer.kind: life.buffer for life in written if life is not None}
        kv_bytes = held["kv"].nbytes if "kv" in held else on_host.get((tick.number, "kv"))
        if kv_bytes is None:
            continue
        recurrent = held["recurrent"].nbytes if "recurrent" in held else on_host.get((tick.number, "recurrent"))
        capacity = held["kv"].shape[-2] if "kv" in held else kv_bytes // formula if formula else None
        prompt = prompts.get(tick.run)
        batch = held["kv"].shape[1] if "kv" in held else 1
        new = taken.get(tick.number, (0, 0))[1] if tick.stage == "verify" else tick.step + 1
        used = prompt + new if prompt is not None and batch == 1 else None
        # Predicted is what the dimensions and the token count say, never what was measured.
        tokens = used if growing else meta.get("capacity")
        rows.append(
            {
                "tick": tick.number,
                "at": tick.label,
                "run": tick.run,
                "step": tick.step,
                "prompt_tokens": prompt,
                "written_tokens": taken.get(tick.number, (0, 0))[0] if tick.stage == "verify" else 1,
                "used_tokens": used,
                "capacity_tokens": capacity,
                "kv_bytes": kv_bytes,
                "used_bytes": used * kv_bytes // capacity if used is not None and capacity else None,
                "predicted_bytes": tokens * formula * batch if tokens is not None and formula is not None else None,
                "allocated_bytes": allocated.get(tick.number, 0),
                "recurrent_bytes": recurrent,
            }
        )
    return rows


def token_bytes(ledger: Ledger) -> int | None:
    """Bytes of KV a token costs by the formula of the recorded dimensions; None where they were not recorded."""
    meta = ledger.meta
    spec = meta.get("spec")
    if not spec:
        return None
    full = sum(kind == "full_attention" for kind in spec["layer_types"])
    return int(2 * full * spec["kv_heads"] * spec["head_dim"] * (4 if meta.get("numerics") == "f32" else 2))


def _prompt_tokens(ledger: Ledger, timeline: Timeline) -> dict[int, int]:
    """Tokens of the prompt of each run, where its steps tell them."""
    rows = ledger.query(
        "SELECT seq, json_extract(detail, '$.prompt_tokens') FROM events WHERE kind = 'step' ORDER BY seq"
    )
    found: dict[int, int] = {}
    for seq, tokens in rows:
        if tokens is not None:
            found.setdefault(timeline.ticks[timeline.tick_at(seq)].run, int(tokens))
    return found


def _tokens_taken(ledger: Ledger, timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Of each verify's tick: tokens that its first sequence took, and how many that makes in its run."""
    found: dict[int, tuple[int, int]] = {}
    run = total = 0
    for step in ledger.steps("verify"):
        tick = timeline.ticks[timeline.tick_at(step.seq)]
        if tick.run != run:
            run, total = tick.run, 0
        count = len(step.tokens or ())
        total += count
        found[tick.number] = (count, total)
    return found


def _line(rows: Table, column: str, place: dict[int, int]) -> tuple[list[Any], list[Any], list[str | None]]:
    xs: list[Any] = []
    ys: list[Any] = []
    hover: list[str | None] = []
    run = rows[0]["run"]
    for row in rows:
        if row["run"] != run:  # a gap between generations
            run = row["run"]
            xs.append(None)
            ys.append(None)
            hover.append(None)
        xs.append(place[row["tick"]])
        ys.append(row[column])
        used = "" if row["used_tokens"] is None else f"<br>{row['used_tokens']} tokens in use"
        hover.append(
            f"{row['at']}<br>{column.removesuffix('_bytes')}: {bytes_text(row[column])} ({row[column]} B){used}"
            f"<br>room for {row['capacity_tokens']} tokens"
            f"<br>allocated in this step: {bytes_text(row['allocated_bytes'])}"
            if row[column] is not None
            else None
        )
    return xs, ys, hover


def _told(rows: Table) -> str:
    first = [row for row in rows if row["run"] == rows[0]["run"]]
    measured = [row["kv_bytes"] for row in first]
    if len(set(measured)) == 1:
        text = f"Constant: {bytes_text(measured[0])} for {first[0]['capacity_tokens']} tokens"
        last = first[-1]["used_tokens"]
        text += f", {last} in use at the end" if last is not None else ""
    else:
        slope = statistics.linear_regression(range(len(measured)), measured).slope
        text = f"Grows by {bytes_text(slope)} a token; allocated anew each step"
    wrong = sum(row["predicted_bytes"] is not None and row["predicted_bytes"] != row["kv_bytes"] for row in rows)
    if any(row["predicted_bytes"] is not None for row in rows):
        text += "; as predicted at every step" if not wrong else f"; NOT as predicted at {wrong} of {len(rows)} steps"
    if rows[0]["recurrent_bytes"]:
        text += f". The recurrent state stays at {bytes_text(rows[0]['recurrent_bytes'])}"
    return text + "."
