"""What the vendor's npu-smi told of the card while a run was recorded: memory in use and busy cores, over time."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.views import theme
from qwen_npu.views.theme import Table, bytes_text

_LOOKS = (
    (theme.BLUE, "circle", "solid"),
    (theme.VERMILION, "square", "dash"),
    (theme.GREEN, "diamond", "dot"),
    (theme.PURPLE, "x", "dashdot"),
)


def card_usage(ledger: Ledger) -> go.Figure:
    """Above the memory of each device of the card, below its AI cores, in percent, over the seconds of the run."""
    title = "The card, by npu-smi"
    rows = card_usage_table(ledger)
    if not rows:
        return theme.nothing(
            ledger,
            title=title,
            reason="npu-smi was not asked here: it is where a run on a real card is recorded (qwen-npu run --record).",
        )
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    devices = sorted({(row["card"], row["device"]) for row in rows})
    for number, (card, device) in enumerate(devices):
        colour, symbol, dash = _LOOKS[number % len(_LOOKS)]
        mine = [row for row in rows if (row["card"], row["device"]) == (card, device)]
        for line, column in ((1, "memory_percent"), (2, "aicore_percent")):
            figure.add_trace(
                go.Scatter(
                    x=[row["at_s"] for row in mine],
                    y=[row[column] for row in mine],
                    name=f"card {card} device {device}",
                    legendgroup=f"{card}.{device}",
                    showlegend=line == 1,
                    mode="lines+markers",
                    line={"color": colour, "width": 1.8, "dash": dash},
                    marker={"symbol": symbol, "size": 6},
                    hovertext=[_hover(row) for row in mine],
                    hoverinfo="text",
                ),
                row=line,
                col=1,
            )
    figure.update_yaxes(title="memory, %", range=[0, 105], row=1, col=1)
    figure.update_yaxes(title="AI cores, %", range=[0, 105], row=2, col=1)
    figure.update_xaxes(title="seconds of the recording", row=2, col=1)
    most = max(rows, key=lambda row: float(row["used_bytes"]))
    subtitle = (
        f"{len({row['at_s'] for row in rows})} samples; most in use {bytes_text(most['used_bytes'])} of "
        f"{bytes_text(most['memory_bytes'])} on card {most['card']} device {most['device']}, all programs together."
    )
    notes = ["AI cores are not told by this card"] if all(row["aicore_percent"] is None for row in rows) else []
    return theme.finish(figure, ledger, title=title, subtitle=subtitle, sources={"observed"}, notes=notes, height=460)


def card_usage_table(ledger: Ledger) -> Table:
    """A row a sample and device: when (seconds of the recording, and the step under way), memory, AI cores.

    `used_bytes` is the told percentage of the told size: exact to 1 % of it.
    """
    samples = ledger.events("sample")
    if not samples:
        return Table()
    timeline = Timeline.of(ledger)
    start_ns = int(ledger.meta.get("started_ns", samples[0].t_ns))
    rows = Table()
    for event in samples:
        facts = event.detail or {}
        # told after the block that was sampled: when, not in which order, says beside which step
        before = [tick for tick in timeline.ticks if tick.start_ns <= event.t_ns]
        for device, usage in enumerate(facts.get("devices", ())):
            rows.append(
                {
                    "at_s": (event.t_ns - start_ns) / 1e9,
                    "during": before[-1].label if before else "",
                    "card": facts.get("card"),
                    "device": device,
                    "memory_bytes": usage["memory_bytes"],
                    "memory_percent": usage["memory_percent"],
                    "used_bytes": round(usage["memory_bytes"] * usage["memory_percent"] / 100),
                    "aicore_percent": usage["aicore_percent"],
                }
            )
    return rows


def _hover(row: dict[str, object]) -> str:
    cores = "not told" if row["aicore_percent"] is None else f"{row['aicore_percent']} %"
    return (
        f"card {row['card']} device {row['device']}, {row['at_s']:.2f} s ({row['during'] or 'before the first step'})"
        f"<br>memory {row['memory_percent']} % of {row['memory_bytes']:,} B, AI cores {cores}"
    )
