"""The slot pool over time: who owns which slot, what it holds, what was accepted; and the strip of speculation."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.ledger.slots import Slot, counts, history
from qwen_npu.ledger.store import Ledger
from qwen_npu.views import theme
from qwen_npu.views.figures.axis import Window
from qwen_npu.views.theme import Table

MAX_TEXT_CELLS = 600
MAX_ROUNDS = 400
_STATES = ("free", "poisoned", "snapshot", "live", "accepted", "current", "rejected", "drafted")
_BADGES = {
    "free": "",
    "poisoned": "NaN",
    "snapshot": "▣",
    "live": "·",
    "accepted": "✓",
    "current": "●",
    "rejected": "✗",
    "drafted": "…",
}
_MEANINGS = {
    "free": "free",
    "poisoned": "free, filled with NaN",
    "snapshot": "▣ snapshot",
    "live": "· owned, not written by the last step",
    "accepted": "✓ accepted, before the current",
    "current": "● current: the next step reads it",
    "rejected": "✗ rejected draft",
    "drafted": "… step under way",
}


def slot_grid(ledger: Ledger, pool: str | None = None, *, window: Window | None = None) -> go.Figure:
    """A row a slot, a column a step of the pool; each cell says what it is, whose, and at which position of its row.

    Args:
        pool: its name in the events; the first by default.
        window: first and last round to show.
    """
    title = "Slot pool"
    books = history(ledger, pool)
    if not books.size:
        return theme.nothing(ledger, title=title, reason="This ledger holds no slots: no pool was used.")
    rounds = books.rounds if window is None else [r for r in books.rounds if window[0] <= r.number <= window[1]]
    left_out = max(0, len(rounds) - MAX_ROUNDS)
    rounds = rounds[left_out:]
    states = [[_state(slot) for slot in moment.slots] for moment in rounds]
    z = np.array([[_STATES.index(state) for state in column] for column in states]).T
    palette = (
        theme.shade("band"),
        theme.GREY,
        theme.PURPLE,
        theme.tint(theme.SKY, 0.35),
        theme.SKY,
        theme.BLUE,
        theme.tint(theme.VERMILION, 0.6),
        theme.YELLOW,
    )
    scale: list[list[Any]] = []
    for i, colour in enumerate(palette):
        scale += [[i / len(palette), colour], [(i + 1) / len(palette), colour]]
    used = sorted({state for column in states for state in column}, key=_STATES.index)
    few = z.size <= MAX_TEXT_CELLS
    figure = go.Figure(
        go.Heatmap(
            z=z,
            zmin=-0.5,
            zmax=len(palette) - 0.5,
            colorscale=scale,
            showscale=False,
            hovertext=[[_hover(moment.number, moment.slots[row]) for moment in rounds] for row in range(books.size)],
            hoverinfo="text",
            xgap=1 if len(rounds) < 120 else 0,
            ygap=1,
        )
    )
    for state in used:  # a legend: the heatmap has none
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                name=_MEANINGS[state],
                marker={
                    "symbol": "square",
                    "size": 12,
                    "color": palette[_STATES.index(state)],
                    "line": {"width": 1, "color": theme.shade("soft")},
                },
            )
        )
    if few:
        room = int(780 / len(rounds) / 6.5) - 4  # letters that fit into a cell beside badge and position
        longest = max(len(_short(slot.owner)) for moment in rounds for slot in moment.slots)
        shown = longest if longest <= room else room if room >= 1 else 0
        written = [
            (column, slot.slot, html.escape(text), theme.ink(palette[_STATES.index(state)]))
            for column, moment in enumerate(rounds)
            for slot, state in zip(moment.slots, states[column], strict=True)
            if (text := _cell_text(slot, _BADGES[state], room, shown))
        ]
        # one trace: an annotation a cell would be validated anew with every further one
        figure.add_trace(
            go.Scatter(
                x=[place[0] for place in written],
                y=[place[1] for place in written],
                text=[place[2] for place in written],
                mode="text",
                textfont={"size": 10, "color": [place[3] for place in written]},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    else:
        read = [
            (column, slot.slot)
            for column, moment in enumerate(rounds)
            for slot in moment.slots
            if slot.verdict == "current"
        ]
        figure.add_trace(
            go.Scatter(
                x=[place[0] for place in read],
                y=[place[1] for place in read],
                mode="markers",
                marker={"symbol": "circle", "size": 3, "color": "#FFFFFF"},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    stride = max(1, -(-len(rounds) // 24))
    figure.update_xaxes(
        title="step of the pool (0: before the first)",
        tickvals=list(range(0, len(rounds), stride)),
        ticktext=[str(moment.number) for moment in rounds[::stride]],
        showgrid=False,
        zeroline=False,
        range=[-0.5, len(rounds) - 0.5],
    )
    stride = max(1, -(-books.size // 32))
    figure.update_yaxes(
        title="slot", tickvals=list(range(0, books.size, stride)), autorange="reversed", showgrid=False, zeroline=False
    )
    now = counts(rounds[-1].slots)
    subtitle = (
        f"{books.pool}: {now['free']} free + {now['live']} live + {now['snapshot']} snapshot = {books.size} slots "
        "at the end. In a cell: what it is, whose, position in its row."
    )
    notes = [f"{left_out} earlier rounds are not drawn; window=(first, last) shows them"] if left_out else []
    notes += [f"FAULT: {fault}" for fault in books.faults[:3]]
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=subtitle,
        sources={"observed"},
        notes=notes,
        height=int(min(900, 220 + 24 * min(books.size, 28))),
    )


def _cell_text(slot: Slot, badge: str, room: int, shown: int) -> str:
    """The words of a cell with `room` letters beside badge and position, of them `shown` for the owner."""
    if slot.use != "live" or room < -1:
        return badge if len(badge) <= max(1, room + 2) else ""
    return f"{badge} {_short(slot.owner)[:shown]} {slot.position}" if shown else f"{badge}{slot.position}"


def slot_grid_table(ledger: Ledger, pool: str | None = None) -> Table:
    """A row a slot and step of the pool."""
    return Table(
        {
            "round": moment.number,
            "slot": slot.slot,
            "state": _state(slot),
            "use": slot.use,
            "owner": slot.owner,
            "sequence": slot.sequence,
            "generation": slot.generation,
            "position": slot.position,
            "verdict": slot.verdict,
            "read_in": slot.read,
            "written_in": slot.written,
        }
        for moment in history(ledger, pool).rounds
        for slot in moment.slots
    )


def speculation(ledger: Ledger, pool: str | None = None) -> go.Figure:
    """For every step of every sequence its tokens: certain, accepted, rejected; below, acceptance so far."""
    title = "Speculation"
    accepts = history(ledger, pool).accepts
    if not accepts:
        return theme.nothing(ledger, title=title, reason="This ledger holds no accepted or rejected drafts.")
    sequences = list(dict.fromkeys(accept.sequence for accept in accepts))
    width = max(accept.drafted for accept in accepts) + 1
    owners = {accept.sequence: accept.owner for accept in accepts}
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.06)
    lane = {sequence: number * (width + 1) for number, sequence in enumerate(sequences)}
    groups: dict[str, list[tuple[float, float, str]]] = {"certain": [], "accepted": [], "rejected": []}
    for accept in accepts:
        for position in range(accept.drafted + 1):
            verdict = "certain" if position == 0 else "accepted" if position < accept.accepted else "rejected"
            token = ""
            if position and isinstance(accept.tokens, (list, tuple)) and position <= len(accept.tokens):
                token = f", token {html.escape(str(accept.tokens[position - 1]))}"
            groups[verdict].append(
                (
                    accept.round,
                    lane[accept.sequence] + position,
                    f"{html.escape(accept.owner)}, step {accept.round}: position {position} {verdict}{token}<br>"
                    f"goes on from slot {accept.slot}; {accept.rejected} of {accept.drafted} drafts rejected",
                )
            )
    styles = {
        "certain": (theme.BLUE, "circle", "● certain token"),
        "accepted": (theme.GREEN, "square", "■ accepted draft"),
        "rejected": (theme.VERMILION, "x-thin-open", "✗ rejected draft"),
    }
    for verdict, (colour, symbol, name) in styles.items():
        if groups[verdict]:
            figure.add_trace(
                go.Scatter(
                    x=[place[0] for place in groups[verdict]],
                    y=[place[1] for place in groups[verdict]],
                    mode="markers",
                    name=name,
                    marker={"color": colour, "symbol": symbol, "size": 10, "line": {"width": 2, "color": colour}},
                    hovertext=[place[2] for place in groups[verdict]],
                    hoverinfo="text",
                ),
                row=1,
                col=1,
            )
    rolled = [accept for accept in accepts if accept.rejected]
    if rolled and len(rolled) <= 48:
        for accept in rolled:
            figure.add_annotation(
                x=accept.round,
                y=lane[accept.sequence] + accept.drafted + 0.7,
                text=f"↩{accept.slot}",
                showarrow=False,
                font={"size": 9.5},
                row=1,
                col=1,
            )
    dashes = ("solid", "dot", "dash", "dashdot")
    colours = (theme.BLUE, theme.ORANGE, theme.GREEN, theme.PURPLE, theme.SKY, theme.VERMILION)
    for number, sequence in enumerate(sequences):
        mine = [accept for accept in accepts if accept.sequence == sequence and accept.rate is not None]
        figure.add_trace(
            go.Scatter(
                x=[accept.round for accept in mine],
                y=[accept.rate for accept in mine],
                mode="lines+markers" if len(mine) <= 64 else "lines",
                name=f"acceptance of {html.escape(owners[sequence])}",
                line={"color": colours[number % len(colours)], "dash": dashes[number % len(dashes)], "shape": "hv"},
                marker={"size": 5},
                hovertemplate="step %{x}: %{y:.0%} of drafts accepted so far<extra></extra>",
            ),
            row=2,
            col=1,
        )
    figure.update_yaxes(
        tickvals=[lane[sequence] + (width - 1) / 2 for sequence in sequences],
        ticktext=[html.escape(owners[sequence]) for sequence in sequences],
        showgrid=False,
        zeroline=False,
        range=[-1, len(sequences) * (width + 1)],
        row=1,
        col=1,
    )
    figure.update_yaxes(title="accepted so far", range=[0, 1.05], tickformat=".0%", row=2, col=1)
    figure.update_xaxes(title="step of the pool", row=2, col=1)
    drafted = sum(accept.drafted for accept in accepts)
    taken = drafted - sum(accept.rejected for accept in accepts)
    tokens = sum(accept.accepted for accept in accepts)
    rate = f" ({taken / drafted:.0%})" if drafted else ""
    subtitle = (
        f"{taken} of {drafted} drafts accepted{rate}; {tokens} tokens in {len(accepts)} steps, "
        f"{tokens / len(accepts):.2f} a step. ↩n: rolled back to slot n, by reading it instead."
    )
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=subtitle,
        sources={"observed"},
        height=300 + 26 * (width + 1) * min(len(sequences), 6),
    )


def speculation_table(ledger: Ledger, pool: str | None = None) -> Table:
    """A row a step and sequence."""
    return Table(
        {
            "round": accept.round,
            "sequence": accept.sequence,
            "owner": accept.owner,
            "drafted": accept.drafted,
            "accepted": accept.accepted,
            "rejected": accept.rejected,
            "slot": accept.slot,
            "acceptance_so_far": accept.rate,
            "tokens": accept.tokens,
        }
        for accept in history(ledger, pool).accepts
    )


def _state(slot: Slot) -> str:
    return slot.verdict or slot.use if slot.use == "live" else slot.use


def _short(owner: str) -> str:
    """ "sequence in row 2" is r2 in a cell."""
    words = owner.split()
    if len(words) > 1 and words[-1].isdecimal():
        return f"{words[-2][0]}{words[-1]}"
    return owner[:8]


def _hover(number: int, slot: Slot) -> str:
    lines = [f"<b>slot {slot.slot}</b>, step {number}: {_MEANINGS[_state(slot)]}"]
    if slot.owner:
        lines.append(f"owner {html.escape(slot.owner)}, generation {slot.generation}")
    elif slot.generation:
        lines.append(f"had {slot.generation} owners")
    if slot.use == "live":
        written = f"written in step {slot.written}" if slot.written >= 0 else "never written by this owner"
        lines.append(f"holds the state after token {slot.position} of its row, {written}")
        if slot.read >= 0:
            lines.append(f"read in step {slot.read}")
    return "<br>".join(lines)
