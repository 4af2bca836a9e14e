"""Where every buffer lives at each step, what is read and written there, and what crosses between host and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.summary import last_writes
from qwen_npu.ledger.timeline import Life, Move, Tick, Timeline
from qwen_npu.views import theme
from qwen_npu.views.figures import axis
from qwen_npu.views.figures.axis import Window
from qwen_npu.views.theme import Table, bytes_text

INSIDE = "inside predict"
"""The lane of memory that predict brings itself for host tensors; the vendor's package does not show it."""

_STATES = ("conv", "recurrent", "kv", "pool")
_ORDER = ("input", "logits", "peek", "other", "pool", "kv", "recurrent", "conv")
"""From the bus outwards: what crosses every step lies next to it, so that its arrows are short."""
MAX_BADGES = 48
"""Bars carry R and W up to so many ticks; beyond, only the hover tells."""
MAX_COLUMNS = 10
"""More copies in one tick than this share a line by host lane."""
MAX_TEXTS = 16
"""The sums of bytes stand on the bus up to so many ticks."""


@dataclass(frozen=True)
class Cell:
    """A buffer at a tick. `role`: "read", "written", "uploaded", "peeked", some of them joined by " and ", or "idle".

    `life` is None for host arrays, which nobody allocates through the driver.
    """

    tick: Tick
    lane: str
    kind: str
    host: bool
    role: str
    life: Life | None
    nbytes: int


def cells(timeline: Timeline, ticks: Sequence[Tick]) -> list[Cell]:
    """Every buffer that is alive on the device, or touched on the host, at each of `ticks`."""
    wanted = {tick.number: tick for tick in ticks}
    read: dict[int, set[int]] = defaultdict(set)
    written: dict[int, set[int]] = defaultdict(set)
    uploaded: dict[int, set[int]] = defaultdict(set)
    peeked: dict[int, set[int]] = defaultdict(set)
    hosts: dict[int, dict[str, tuple[str, int, set[str]]]] = defaultdict(dict)

    def touch_host(tick: int, id_: str, role: str, nbytes: int) -> None:
        if id_:
            lane, kind = host_lane(timeline, id_)
            _, known, roles = hosts[tick].get(lane, (kind, 0, set()))
            hosts[tick][lane] = (kind, max(known, nbytes), roles | {role})

    for use in timeline.uses:
        if use.tick in wanted:
            looking = use.graph.startswith("peek")
            sides = ((use.inputs, peeked if looking else read, "input"), (use.outputs, written, "output"))
            for ids, marks, side in sides:
                for id_ in ids:
                    life = timeline.life_at(id_, use.seq, "output" if side == "output" else "input")
                    if life is not None and life.buffer.device != "host":
                        marks[use.tick].add(life.born_seq)
                    else:
                        touch_host(use.tick, id_, "read" if side == "input" else "written", 0)
    for move in timeline.moves:
        if move.tick in wanted:
            life = timeline.life_at(move.buffer, move.seq) if move.buffer else None
            if life is not None and move.direction == "H2D":
                uploaded[move.tick].add(life.born_seq)
            touch_host(move.tick, move.host, "read" if move.direction == "H2D" else "written", move.nbytes)

    marked = (("read", read), ("written", written), ("uploaded", uploaded), ("peeked", peeked))
    found = []
    for life in timeline.lives:
        first = timeline.tick_at(life.born_seq)
        last = timeline.tick_at(life.dead_seq) if life.dead_seq is not None else timeline.ticks[-1].number
        for number in range(max(first, ticks[0].number), min(last, ticks[-1].number) + 1):
            roles = [role for role, marks in marked if life.born_seq in marks[number]]
            host = life.buffer.device == "host"
            found.append(
                Cell(
                    wanted[number],
                    life.buffer.id,
                    life.buffer.kind,
                    host,
                    " and ".join(roles) or "idle",
                    life,
                    life.buffer.nbytes,
                )
            )
    for number, lanes in sorted(hosts.items()):
        for lane, (kind, nbytes, roles_) in lanes.items():
            found.append(Cell(wanted[number], lane, kind, True, " and ".join(sorted(roles_)), None, nbytes))
    return found


def host_lane(timeline: Timeline, id_: str) -> tuple[str, str]:
    """Lane and kind of a host array. A state has one lane, whether it is called past or present."""
    kind = timeline.kind_of(id_)
    return (f"host {kind}" if kind != "input" else id_.partition(".")[2] or id_), kind


def residency(ledger: Ledger, *, window: Window | None = None) -> go.Figure:
    """A lane a buffer, device above, host below; copies as arrows between them.

    Args:
        window: first and last tick (see the table's column "tick"); by default the newest that can be drawn legibly.
    """
    title = "Where the buffers live"
    timeline = Timeline.of(ledger)
    if not timeline.ticks:
        return theme.nothing(ledger, title=title, reason="This ledger holds no events.")
    ticks, note = axis.windowed(timeline.ticks, window)
    found = cells(timeline, ticks)
    shown = {tick.number for tick in ticks}
    moves = [move for move in timeline.moves if move.tick in shown]
    grown = _grown(found)
    lanes = _lanes(timeline, found, moves, grown)
    if not lanes:
        return theme.nothing(ledger, title=title, reason="Neither buffers nor copies were recorded.")
    figure = go.Figure()
    low, high = _bands(figure, lanes)
    _bars(figure, timeline, ticks, found, lanes, grown)
    _arrows(figure, timeline, ticks, moves, lanes, grown)
    if len(ticks) <= MAX_TEXTS:
        _sums_on_the_bus(figure, ticks, moves)
    marks, texts = axis.thinned(ticks)
    figure.update_xaxes(
        title="step", tickvals=[mark + 0.5 for mark in marks], ticktext=texts, range=[0, len(ticks)], showgrid=False
    )
    slanted = len(marks) > 14 and any(len(text) > 3 for text in texts)
    figure.update_xaxes(tickangle=-45 if slanted else 0)
    figure.update_yaxes(
        tickvals=list(lanes.values()),
        ticktext=list(lanes),
        range=[low, high],
        showgrid=False,
        zeroline=False,
    )
    figure.update_layout(barmode="overlay", bargap=0)
    notes = [note] if note else []
    if INSIDE in lanes:
        notes.append(f"{INSIDE!r}: memory that predict brings for host tensors, not shown by the vendor's package")
    sources = {move.source for move in moves} | {cell.life.source for cell in found if cell.life is not None}
    states = sum(move.nbytes for move in moves if move.kind in _STATES and timeline.ticks[move.tick].is_step)
    steps = axis.step_ticks(ticks)
    subtitle = "R read, W written, U uploaded"
    subtitle += ", P peeked at" if any("peeked" in cell.role for cell in found) else ""
    subtitle += "; host hatched, device solid; ▲ up to the device, ▼ down to the host. "
    if steps:
        subtitle += (
            f"<b>{bytes_text(states)} of state crossed in {len(steps)} steps.</b>"
            if states
            else f"<b>No state crossed in {len(steps)} steps.</b>"
        )
    figure = theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=subtitle,
        sources=sources,
        notes=notes,
        height=int(180 + 32 * (high - low)) + 34 * slanted,
        axis_height=54 + 34 * slanted,
    )
    figure.update_layout(legend={"x": 1.035})
    return figure


def residency_table(ledger: Ledger, *, window: Window | None = None) -> Table:
    """A row for every buffer and tick."""
    timeline = Timeline.of(ledger)
    if not timeline.ticks:
        return Table()
    ticks = timeline.ticks if window is None else axis.windowed(timeline.ticks, window)[0]
    live = live_ids(timeline)
    rows = Table()
    for cell in sorted(cells(timeline, ticks), key=lambda cell: (cell.tick.number, cell.host, cell.lane)):
        buffer = cell.life.buffer if cell.life is not None else None
        turn = live[cell.tick.number]
        state = ""
        if buffer is not None and buffer.half:
            state = "live" if turn.get(buffer.kind) == buffer.id else "scratch"
        rows.append(
            {
                "tick": cell.tick.number,
                "at": cell.tick.label,
                "run": cell.tick.run,
                "buffer": cell.lane,
                "kind": cell.kind,
                "device": buffer.device if buffer is not None else "host",
                "role": cell.role,
                "after": state,
                "nbytes": cell.nbytes,
                "dtype": buffer.dtype if buffer is not None else "",
                "shape": list(buffer.shape) if buffer is not None else None,
                "generation": buffer.generation if buffer is not None else None,
                "address": buffer.address if buffer is not None else None,
                "site": buffer.site if buffer is not None else "",
            }
        )
    return rows


def ping_pong(ledger: Ledger, *, window: Window | None = None) -> go.Figure:
    """The two halves of each state pair: which one a step reads (live) and which it writes (scratch)."""
    title = "Ping-pong pairs: live and scratch"
    rows = ping_pong_table(ledger, window=window)
    if not rows:
        return theme.nothing(
            ledger,
            title=title,
            reason="No pair takes turns in this ledger: the states were not kept on the device"
            if ledger.meta.get("state") == "host"
            else "No pair takes turns in this ledger.",
        )
    timeline = Timeline.of(ledger)
    steps, note = axis.windowed(axis.step_ticks(timeline.ticks), window)
    place = {tick.number: i for i, tick in enumerate(steps)}
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lanes: dict[str, float] = {}
    for kind in kinds:
        for half in sorted(
            {row["live"] for row in rows if row["kind"] == kind}
            | {row["scratch"] for row in rows if row["kind"] == kind}
        ):
            lanes[half] = -len(lanes) - 0.5 * kinds.index(kind)
    figure = go.Figure()
    badges = len(steps) <= 24
    for kind in kinds:
        fill = theme.colour(kind)
        of_kind = [row for row in rows if row["kind"] == kind]
        for role, background, pattern in (("live", fill, ""), ("scratch", theme.tint(fill, 0.25), "")):
            figure.add_trace(
                go.Bar(
                    x=[0.96] * len(of_kind),
                    base=[place[row["tick"]] + 0.02 for row in of_kind],
                    y=[lanes[row[role]] for row in of_kind],
                    width=0.8,
                    orientation="h",
                    name=f"{kind}: {'live, read' if role == 'live' else 'scratch, written'}",
                    marker={"color": background, "pattern": {"shape": pattern}, "line": {"color": fill, "width": 1.5}},
                    text=[("live" if role == "live" else "scratch") if badges else "" for _ in of_kind],
                    textposition="inside",
                    insidetextanchor="middle",
                    textangle=0,
                    textfont={"color": theme.ink(background), "size": 11},
                    hovertext=[
                        f"{row['at']}<br>{row[role]} is {role}: "
                        f"{'read' if role == 'live' else 'written, live from the next step on'}<br>"
                        f"{bytes_text(row['nbytes'])} on {row['device']}"
                        for row in of_kind
                    ],
                    hoverinfo="text",
                )
            )
    clashes = [row for row in rows if row["clash"]]
    if clashes:
        figure.add_trace(
            go.Scatter(
                x=[place[row["tick"]] + 0.5 for row in clashes],
                y=[lanes[row["live"]] for row in clashes],
                mode="markers+text",
                marker={"symbol": "x", "size": 14, "color": theme.shade("text")},
                text=["read and written"] * len(clashes),
                textposition="top center",
                name="read and written in one step",
            )
        )
    marks, texts = axis.thinned(steps)
    figure.update_xaxes(
        title="step", tickvals=[mark + 0.5 for mark in marks], ticktext=texts, range=[0, len(steps)], showgrid=False
    )
    figure.update_yaxes(tickvals=list(lanes.values()), ticktext=list(lanes), showgrid=False, zeroline=False)
    figure.update_layout(barmode="overlay", bargap=0)
    growing = any(life.buffer.id == "kv" for life in timeline.lives)
    subtitle = "A step reads the live half and writes the scratch half; then they change places. "
    subtitle += "The growing KV has no pair: each step allocates a new, longer one." if growing else ""
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=subtitle,
        sources={"observed", "inferred"},
        notes=[note] if note else [],
        height=200 + 40 * len(lanes),
    )


def ping_pong_table(ledger: Ledger, *, window: Window | None = None) -> Table:
    """A row for every step and pair: the half read, the half written. `clash` is True where they are the same."""
    timeline = Timeline.of(ledger)
    steps = axis.step_ticks(timeline.ticks)
    if not steps:
        return Table()
    chosen = {tick.number for tick in axis.windowed(steps, window)[0]}
    halves = {life.buffer.id: life.buffer for life in timeline.lives if life.buffer.half}
    rows = Table()
    for use in timeline.uses:
        if use.tick not in chosen:
            continue
        tick = timeline.ticks[use.tick]
        for id_ in use.inputs:
            buffer = halves.get(id_)
            if buffer is None:
                continue
            written = next((out for out in use.outputs if out in halves and halves[out].kind == buffer.kind), None)
            if written is not None:
                rows.append(
                    {
                        "tick": tick.number,
                        "at": tick.label,
                        "run": tick.run,
                        "step": tick.step,
                        "kind": buffer.kind,
                        "live": id_,
                        "scratch": written,
                        "clash": id_ == written,
                        "nbytes": buffer.nbytes,
                        "device": buffer.device,
                    }
                )
    return rows


def live_ids(timeline: Timeline) -> list[Mapping[str, str]]:
    """For each tick, kind of state -> id of the buffer that is live at its end."""
    now: dict[str, str] = {}
    at: list[Mapping[str, str]] = []
    turns = iter(timeline.turns)
    turn = next(turns, None)
    for tick in timeline.ticks:
        while turn is not None and turn.tick <= tick.number:
            now[turn.kind] = turn.live
            turn = next(turns, None)
        at.append(dict(now))
    return at


def _grown(found: Iterable[Cell]) -> set[str]:
    """Lanes in which two generations are alive within one step: a growing buffer."""
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for cell in found:
        if cell.life is not None and cell.role != "idle":
            seen[cell.lane, cell.tick.number] += 1
    return {lane for (lane, _), count in seen.items() if count > 1}


def _lanes(timeline: Timeline, found: Iterable[Cell], moves: Iterable[Move], grown: Iterable[str]) -> dict[str, float]:
    """Heights of the lanes."""
    host: dict[str, str] = {}
    device: dict[str, str] = {}
    for cell in found:
        (host if cell.host else device)[cell.lane] = cell.kind
    for move in moves:
        if move.host:
            lane, kind = host_lane(timeline, move.host)
            host.setdefault(lane, kind)
        if not move.buffer:
            device[INSIDE] = "input"
    # The bus is at height 0: device lanes above it, so that an upload goes up, and host lanes below.
    heights: dict[str, float] = {}
    height = 1.25
    for lane in sorted(device, key=lambda lane: (lane == INSIDE, -_ORDER.index(device[lane]), lane), reverse=True):
        extra = 0.35 * (lane in grown)
        heights[lane] = height + extra
        height += 1 + 2 * extra
    height = -1.25
    for lane in sorted(host, key=lambda lane: (_ORDER.index(host[lane]), lane)):
        heights[lane] = height
        height -= 1
    return heights


def _bands(figure: go.Figure, lanes: Mapping[str, float]) -> tuple[float, float]:
    """Shades the host's half and names both; gives the lowest and the highest point."""
    low, high = min(0.0, *lanes.values()) - 0.7, max(0.0, *lanes.values()) + 1.0
    figure.add_hrect(y0=low, y1=0, fillcolor=theme.shade("band"), line_width=0, layer="below")
    figure.add_hline(y=0, line={"color": theme.shade("soft"), "width": 1, "dash": "dash"}, layer="below")
    for text, height in (("<b>DEVICE</b>", high / 2), ("<b>HOST</b>", low / 2)):
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", y=height, text=text, textangle=90, showarrow=False, font={"size": 11}
        )
    return low, high


def _sums_on_the_bus(figure: go.Figure, ticks: Sequence[Tick], moves: Sequence[Move]) -> None:
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for move in moves:
        sums[move.tick, move.direction] += move.nbytes
    for place, tick in enumerate(ticks):
        sides = ((arrow, sums.get((tick.number, direction))) for arrow, direction in (("▲", "H2D"), ("▼", "D2H")))
        parts = [f"{arrow}{bytes_text(nbytes)}" for arrow, nbytes in sides if nbytes is not None]
        if parts:
            figure.add_annotation(
                x=place + 0.5,
                y=0,
                text="<br>".join(parts),
                showarrow=False,
                font={"size": 10.5},
                bgcolor=theme.shade("paper"),
                borderpad=1,
            )


def _bars(
    figure: go.Figure,
    timeline: Timeline,
    ticks: Sequence[Tick],
    found: Sequence[Cell],
    lanes: Mapping[str, float],
    grown: Iterable[str],
) -> None:
    place = {tick.number: i for i, tick in enumerate(ticks)}
    badges = len(ticks) <= MAX_BADGES
    writes = last_writes(timeline, {cell.life.born_seq for cell in found if cell.life is not None})
    groups: dict[tuple[str, bool, str], list[Cell]] = defaultdict(list)
    for cell in found:
        strength = "idle" if cell.role == "idle" else "read" if "read" in cell.role and not cell.host else "touched"
        groups[cell.kind, cell.host, strength].append(cell)
    order = ("read", "touched", "idle")
    named: set[tuple[str, bool]] = set()
    for (kind, host, strength), group in sorted(
        groups.items(), key=lambda item: (theme.KINDS.index(item[0][0]), item[0][1], order.index(item[0][2]))
    ):
        fill = theme.colour(kind)
        background = theme.tint(fill, {"read": 1.0, "touched": 0.5, "idle": 0.2}[strength])
        heights, thick, badge_texts = [], [], []
        for cell in group:
            offset = _offset(cell.life) if cell.lane in grown else 0.0
            heights.append(lanes[cell.lane] + offset)
            thick.append(0.66 if offset else 0.76)
            badge_texts.append("" if strength == "idle" or host or not badges else _badge(cell.role))
        figure.add_trace(
            go.Bar(
                x=[1.0] * len(group),
                base=[place[cell.tick.number] for cell in group],
                y=heights,
                width=thick,
                orientation="h",
                name=f"{kind}, {'host' if host else 'device'}",
                legendgroup=f"{kind}{host}",
                showlegend=(kind, host) not in named,
                marker={
                    "color": background,
                    "line": {"color": theme.shade("paper"), "width": 1 if badges else 0},
                    "pattern": {
                        "shape": theme.HOST_PATTERN if host else "",
                        "fgcolor": fill,
                        "size": 6,
                        "solidity": 0.4,
                    },
                },
                text=badge_texts,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"size": 10, "color": theme.ink(background)},
                hovertext=[_hover(cell, writes) for cell in group],
                hoverinfo="text",
            )
        )
        named.add((kind, host))


def _offset(life: Life | None) -> float:
    """Two generations of a growing buffer are alive within one step: they share a lane, one above the other."""
    if life is None:
        return 0.0
    return 0.36 if life.buffer.generation % 2 else -0.36


def _badge(role: str) -> str:
    return "".join({"read": "R", "written": "W", "uploaded": "U", "peeked": "P"}[word] for word in role.split(" and "))


def _hover(cell: Cell, writes: Mapping[int, str]) -> str:
    if cell.life is None:
        size = f"<br>{bytes_text(cell.nbytes)}" if cell.nbytes else ""
        return f"<b>{cell.lane}</b> on the host, {cell.role}<br>{cell.tick.label}{size}"
    buffer = cell.life.buffer
    address = f"<br>address {buffer.address:#x} (emulator)" if buffer.address is not None else ""
    return (
        f"<b>{buffer.id}</b> {cell.role}, {cell.tick.label}<br>{buffer.name}: {buffer.dtype}{list(buffer.shape)}<br>"
        f"{bytes_text(buffer.nbytes)} ({buffer.nbytes} B) on {buffer.device}, generation {buffer.generation}"
        f"{address}<br>"
        f"allocated at {buffer.site or 'unknown'}<br>last written by {writes.get(cell.life.born_seq, 'nobody')}"
        f"<br>source: {cell.life.source}"
    )


def _lane(timeline: Timeline, move: Move) -> str:
    return host_lane(timeline, move.host)[0] if move.host else ""


def _columns(timeline: Timeline, moves: Sequence[Move]) -> list[tuple[str, str]]:
    """What shares a line with what: copies of one host array, or of one host lane where there are many."""
    by_array: list[tuple[str, str]] = [(move.direction, move.host) for move in moves]
    if len(set(by_array)) <= MAX_COLUMNS:
        return by_array
    return [(move.direction, _lane(timeline, move)) for move in moves]


def _arrows(
    figure: go.Figure,
    timeline: Timeline,
    ticks: Sequence[Tick],
    moves: Sequence[Move],
    lanes: Mapping[str, float],
    grown: Iterable[str],
) -> None:
    place = {tick.number: i for i, tick in enumerate(ticks)}
    by_tick: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_tick[move.tick].append(move)
    for direction, symbol in (("H2D", "triangle-up"), ("D2H", "triangle-down")):
        lines: dict[str, list[Any]] = {"x": [], "y": []}
        heads: dict[str, list[Any]] = {"x": [], "y": [], "hover": []}
        verb, way = ("▲ upload", "→") if direction == "H2D" else ("▼ download", "←")
        for number, group in by_tick.items():
            columns = _columns(timeline, group)
            order = list(dict.fromkeys(columns))
            ends: dict[float, list[float]] = defaultdict(list)
            for move, column in zip(group, columns, strict=True):
                if move.direction != direction:
                    continue
                x = place[number] + (order.index(column) + 0.5) / len(order)
                below = lanes.get(_lane(timeline, move)) if move.host else 0.0
                above = lanes.get(move.buffer or INSIDE)
                if above is None or below is None:
                    continue
                if move.buffer in grown:
                    above += _offset(timeline.life_at(move.buffer, move.seq))
                ends[x] += (above, below)
                heads["x"].append(x)
                heads["y"].append(above if direction == "H2D" else below)
                took = f" in {move.dur_ns / 1e3:,.1f} µs" if move.dur_ns else ""
                heads["hover"].append(
                    f"{verb} of {move.kind}, {timeline.ticks[number].label}<br>"
                    f"{move.host or 'host'} {way} {move.buffer or INSIDE}<br>"
                    f"{bytes_text(move.nbytes)} ({move.nbytes} B){took}<br>source: {move.source}"
                )
            for x, heights in ends.items():
                lines["x"] += [x, x, None]
                lines["y"] += [min(heights), max(heights), None]
        if not heads["x"]:
            continue
        dash = "solid" if direction == "H2D" else "dot"
        group_ = f"copies {direction}"
        figure.add_trace(
            go.Scatter(
                x=lines["x"],
                y=lines["y"],
                mode="lines",
                line={"color": theme.shade("text"), "width": 1, "dash": dash},
                hoverinfo="skip",
                showlegend=False,
                legendgroup=group_,
            )
        )
        figure.add_trace(
            go.Scatter(
                x=heads["x"],
                y=heads["y"],
                mode="markers",
                marker={"symbol": symbol, "size": 8, "color": theme.shade("text")},
                hovertext=heads["hover"],
                hoverinfo="text",
                name=f"copy {direction}",
                legendgroup=group_,
            )
        )
