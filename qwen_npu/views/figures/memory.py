"""Device memory by address over time. Addresses are the emulator's: the vendor's package shows none."""

from __future__ import annotations

import html
from collections import defaultdict
from typing import Any

import plotly.graph_objects as go

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Life, Timeline
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.figures.axis import Window
from qwen_npu.views.theme import Table, bytes_text

_LEAST_SHARE = 0.004
"""A block is drawn at least this share of the axis high, so that a small one can be seen."""


def memory_map(ledger: Ledger, *, window: Window | None = None) -> go.Figure:
    """Every block of device memory: height is its address range, length its life."""
    title = "Device memory by address"
    rows = memory_map_table(ledger)
    if not rows:
        return theme.nothing(
            ledger,
            title=title,
            reason="Addresses are not observable here: only the emulator tells them, the vendor's package does not.",
        )
    timeline = Timeline.of(ledger)
    ticks, note = axis.windowed(timeline.ticks, window)
    first, last = ticks[0].number, ticks[-1].number + 1
    rows = Table(row for row in rows if row["end"] > first and row["begin"] < last)
    if not rows:
        return theme.nothing(ledger, title=title, reason=f"No device memory was held in this window. {note}")
    base = min(row["address"] for row in rows)
    # Weights would press the states into a line: the axis begins with the addresses of what changes.
    states = [row for row in rows if row["kind"] not in ("weights", "input")] or rows
    low = min(row["address"] for row in states) - base
    high = max(row["address"] + row["nbytes"] for row in states) - base
    least = (high - low) * _LEAST_SHARE
    figure = go.Figure()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["kind"]].append(row)
    for kind in sorted(groups, key=lambda kind: (kind not in theme.KINDS, kind)):
        group = groups[kind]
        fill = theme.GREY if kind == "weights" else theme.colour(kind)
        figure.add_trace(
            go.Bar(
                x=[(max(row["begin"], first) + min(row["end"], last)) / 2 for row in group],
                width=[min(row["end"], last) - max(row["begin"], first) for row in group],
                base=[row["address"] - base for row in group],
                y=[max(row["nbytes"], least) for row in group],
                name=kind,
                marker={
                    "color": theme.tint(fill, 0.55),
                    "line": {"color": fill, "width": 1.2},
                    "pattern": {
                        "shape": theme.KIND_PATTERNS.get(kind, "/"),
                        "fgcolor": fill,
                        "size": 6,
                        "solidity": 0.2,
                    },
                },
                hovertext=[_hover(row) for row in group],
                hoverinfo="text",
            )
        )
    marks, texts = axis.thinned(ticks)
    figure.update_xaxes(
        title="step", tickvals=[first + mark + 0.5 for mark in marks], ticktext=texts, range=[first, last], tickangle=0
    )
    pad = 0.03 * (high - low)
    at, _ = axis.byte_marks(low - pad, high + pad)
    figure.update_yaxes(
        title=f"address - {base:#x}",
        tickvals=at,
        ticktext=[f"+{int(mark):#x}" for mark in at],
        range=[low - pad, high + pad],
    )
    figure.update_layout(barmode="overlay", bargap=0)
    alive = sum(row["nbytes"] for row in rows if row["alive"])
    notes = [note] if note else []
    if any(row["address"] - base < low or row["address"] - base > high for row in rows):
        notes.append("the axis shows where the states lie; a double click shows all, weights too")
    if any(row["nbytes"] < least for row in rows):
        notes.append("blocks lower than a line are drawn as a line")
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=f"{len(rows)} blocks; {bytes_text(alive)} alive at the end of the recording.",
        sources={row["source"] for row in rows},
        notes=notes,
        height=520,
    )


def memory_map_table(ledger: Ledger) -> Table:
    """A row a block: address, size, what lies there under which name, from when to when (in ticks, with fractions)."""
    timeline = Timeline.of(ledger)
    ours = [life for life in timeline.lives if life.buffer.address is not None]
    by_address: dict[int, list[Life]] = defaultdict(list)
    for life in ours:
        assert life.buffer.address is not None
        by_address[life.buffer.address].append(life)
    blocks = timeline.device_lives or ours
    whats = {
        event.seq: str((event.detail or {}).get("what", ""))
        for event in (ledger.events("allocate") if timeline.device_lives else ())
        if event.source == "emulator"
    }
    last = ledger.last_seq + 1
    rows = Table()
    for block in blocks:
        address = block.buffer.address
        if address is None:
            continue
        named = next((life for life in by_address[address] if _overlap(life, block, last)), None)
        what = whats.get(block.born_seq, "")
        kind = what if what == "weights" else "input" if what == "input" else block.buffer.kind
        rows.append(
            {
                "address": address,
                "nbytes": block.buffer.nbytes,
                "id": named.buffer.id if named is not None else block.buffer.name or block.buffer.id,
                "kind": named.buffer.kind if named is not None else kind,
                "begin": _position(timeline, block.born_seq),
                "end": _position(timeline, block.dead_seq)
                if block.dead_seq is not None
                else float(len(timeline.ticks)),
                "alive": block.dead_seq is None,
                "generation": named.buffer.generation if named is not None else None,
                "site": named.buffer.site if named is not None else block.buffer.site,
                "source": block.source,
            }
        )
    return rows


def _overlap(life: Life, block: Life, last: int) -> bool:
    """Whether both name the same memory: ours is announced after the emulator's, and ends a little after it."""
    return block.born_seq <= life.born_seq < (block.dead_seq if block.dead_seq is not None else last)


def _position(timeline: Timeline, seq: int) -> float:
    """Tick of an event, with the share of the tick's events before it."""
    number = timeline.tick_at(seq)
    first = timeline.ticks[number].first_seq
    after = timeline.ticks[number + 1].first_seq if number + 1 < len(timeline.ticks) else timeline.last_seq + 1
    return number + (seq - first) / max(1, after - first)


def _hover(row: dict[str, Any]) -> str:
    generation = "" if row["generation"] is None else f", generation {row['generation']}"
    return (
        f"<b>{html.escape(str(row['id']))}</b> ({row['kind']}){generation}<br>{row['address']:#x}, "
        f"{bytes_text(row['nbytes'])} ({row['nbytes']} B)<br>allocated at {html.escape(row['site'] or 'unknown')}"
        f"<br>source: {row['source']}"
    )
