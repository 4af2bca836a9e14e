"""What the slots of a pool hold: the figures of a sweep, slot by layer and head, beside who owns each slot."""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go

from qwen_npu.errors import UsageError
from qwen_npu.ledger.slots import Slot, history
from qwen_npu.ledger.store import Ledger, Peek
from qwen_npu.views import theme
from qwen_npu.views.figures.marks import mark_nonfinite
from qwen_npu.views.theme import Table

NORM = "pool.norm"


def pool_states(ledger: Ledger, name: str = NORM) -> go.Figure:
    """The newest sweep: a row a slot, with its owner, a column a layer and head. Not finite is a cross.

    Args:
        name: of the sweep's figure: "pool.norm", "pool.max_abs" or "pool.nonfinite".
    """
    title = f"Slot pool by layer and head: {name}"
    peek = _newest(ledger, name)
    if peek is None:
        return theme.nothing(
            ledger, title=title, reason="No sweep of a pool was recorded: group.sweep() makes one on request."
        )
    values = _by_slot(peek)
    layers, heads = peek.array.shape[0], peek.array.shape[2]
    columns = [f"layer {layer} head {head}" for layer in range(layers) for head in range(heads)]
    slots = _slots(ledger, peek)
    rows = [_label(number, slots.get(number)) for number in range(len(values))]
    figure = go.Figure(
        go.Heatmap(
            z=np.where(np.isfinite(values), values, np.nan),
            colorscale=theme.SEQUENTIAL,
            colorbar={
                "title": {"text": name.partition(".")[2], "side": "right"},
                "thickness": 14,
                "outlinewidth": 0,
            },
            customdata=np.broadcast_to(np.array(columns), values.shape),
            text=np.broadcast_to(np.array([html.escape(row) for row in rows])[:, None], values.shape),
            hovertemplate="%{text}<br>%{customdata}: %{z:.6g}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    bad = mark_nonfinite(
        figure, values, lambda row, at: f"{html.escape(rows[row])}<br>{columns[at]}: {values[row, at]}"
    )
    figure.update_xaxes(
        title="layer (its heads side by side)",
        tickvals=[layer * heads + (heads - 1) / 2 for layer in range(layers)],
        ticktext=[str(layer) for layer in range(layers)],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=rows, autorange="reversed", showgrid=False, zeroline=False
    )
    spoilt = sorted({int(row) for row, _ in bad})
    owned = [number for number in spoilt if number in slots and slots[number].use in ("live", "snapshot")]
    subtitle = f"{len(rows)} slots at step {peek.step}. " + (
        f"Not finite: slots {', '.join(map(str, spoilt))}." if spoilt else "All values are finite."
    )
    return theme.finish(
        figure,
        ledger,
        title=title,
        subtitle=subtitle,
        sources={"observed"},
        notes=[f"slots {owned} are owned: those not written yet hold what their last owner left"] if owned else [],
        height=int(min(900, 240 + 24 * len(rows))),
    )


def pool_states_table(ledger: Ledger, name: str = NORM) -> Table:
    """A row a slot, layer and head of the newest sweep; `use`, `owner` and `position` as the books had them then."""
    peek = _newest(ledger, name)
    if peek is None:
        return Table()
    slots = _slots(ledger, peek)
    rows = Table()
    for (layer, number, head), value in np.ndenumerate(peek.array):
        slot = slots.get(number, Slot(number))
        rows.append(
            {
                "slot": number,
                "layer": layer,
                "head": head,
                "value": value.item(),
                "use": slot.use,
                "owner": slot.owner,
                "position": slot.position,
                "verdict": slot.verdict,
            }
        )
    return rows


def _newest(ledger: Ledger, name: str) -> Peek | None:
    peeks = ledger.peeks(name)
    if not peeks:
        return None
    shape = peeks[-1].array.shape
    if len(shape) != 3:
        raise UsageError(f"peek {name!r} has arrays of shape {list(shape)}", expected="[linear layer, slot, head]")
    return peeks[-1]


def _by_slot(peek: Peek) -> np.ndarray:
    """[slot, layer * head]"""
    slots = peek.array.shape[1]
    values: np.ndarray = peek.array.astype(np.float64).transpose(1, 0, 2).reshape(slots, -1)
    return values


def _slots(ledger: Ledger, peek: Peek) -> dict[int, Slot]:
    """The pool's books when the sweep was made; empty where nobody told of slots."""
    rounds = history(ledger, until=peek.seq).rounds
    return {slot.slot: slot for slot in rounds[-1].slots} if rounds else {}


def _label(number: int, slot: Slot | None) -> str:
    if slot is None:
        return f"slot {number}"
    if slot.use in ("free", "poisoned"):
        return f"slot {number} · {slot.use}"
    what = f" {slot.verdict}" if slot.verdict else ""
    return f"slot {number} · {slot.owner} [{slot.position}]{what}"
