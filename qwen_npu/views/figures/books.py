"""Whether the books balance: every conservation check of a ledger, ✓ or ✗."""

from __future__ import annotations

import html

import plotly.graph_objects as go

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.summary import conservation
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.views import theme
from qwen_npu.views.theme import Table


def checks(ledger: Ledger) -> go.Figure:
    """A line a check: what must balance, whether it does, and the sums or the first fault."""
    table = checks_table(ledger)
    marks = ["✓ balanced" if row["ok"] else "✗ WRONG" for row in table]
    colours = [theme.GREEN if row["ok"] else theme.VERMILION for row in table]
    paper, text = theme.shade("paper"), theme.shade("text")
    figure = go.Figure(
        go.Table(
            columnwidth=[14, 36, 50],
            header={
                "values": ["", "what must balance", "sums, or the first fault"],
                "align": "left",
                "fill": {"color": theme.shade("band")},
                "font": {"color": text, "size": 12.5},
                "line": {"color": theme.shade("grid")},
            },
            cells={
                "values": [marks, *([html.escape(row[name]) for row in table] for name in ("name", "detail"))],
                "align": "left",
                "height": 28,
                "fill": {"color": [colours, [paper] * len(table), [paper] * len(table)]},
                "font": {"color": [[theme.ink(colour) for colour in colours], text, text], "size": 12.5},
                "line": {"color": theme.shade("grid")},
            },
        )
    )
    wrong = sum(not row["ok"] for row in table)
    subtitle = "All balance." if not wrong else f"<b>{wrong} of {len(table)} do not balance.</b>"
    figure = theme.finish(
        figure, ledger, title="Do the books balance?", subtitle=subtitle, sources=(), height=200 + 30 * len(table)
    )
    figure.update_layout(margin={"l": 20})
    return figure


def checks_table(ledger: Ledger) -> Table:
    """A row a check: name, ok, detail."""
    return Table(
        {"name": check.name, "ok": check.ok, "detail": check.detail} for check in conservation(Timeline.of(ledger))
    )
