"""The cockpit's panes of text as HTML: the answer, the instant, a buffer, the light, the error strip."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from qwen_npu.views.live.frames import LIVE, Frames
from qwen_npu.views.theme import bytes_text

_SOFT = "color:var(--jp-ui-font-color2,inherit)"
_CELL = "padding:1px 14px 1px 0;text-align:left;vertical-align:top"
_GREEN, _RED, _AMBER = ("#00664B", "#FFFFFF"), ("#A32A00", "#FFFFFF"), ("#6B4700", "#FFFFFF")
"""Background and text of badges: contrast of at least 4.5 on either theme."""


TEXT_BEFORE, TEXT_AFTER = 480, 160
"""Characters of the answer shown before and after the cursor: what fits its pane. The ledger holds all of it."""


def answer(frames: Frames, cursor: int) -> str:
    """The text so far: what is known at the cursor, then what came later, faint."""
    if not frames.ticks:
        return f"<div style='{_SOFT}'>The answer grows here.</div>"
    run = frames.ticks[cursor].run
    known = frames.text(cursor)
    later = ""
    for number in range(cursor + 1, len(frames.ticks)):
        if frames.ticks[number].run != run or len(later) > TEXT_AFTER:
            break
        later += frames.figures[number].text
    before = html.escape(known if len(known) <= TEXT_BEFORE else "… " + known[-TEXT_BEFORE:])
    after = html.escape(later)
    return (
        "<div style='white-space:pre-wrap;max-height:110px;overflow:auto;font-size:15px;line-height:1.45;"
        "color:var(--jp-ui-font-color1,inherit)'>"
        f"<span class='qn-text'>{before}</span><span style='border-left:2px solid #0072B2;margin:0 1px'></span>"
        f"<span style='{_SOFT}'>{after}</span></div>"
    )


def instant(frames: Frames, cursor: int) -> str:
    """The state at the cursor: which half is live, tokens in use, bytes."""
    if not frames.ticks:
        return ""
    figures = frames.figures[cursor]
    rows: list[tuple[str, str]] = [("tick", f"{cursor} of {len(frames.ticks) - 1}: {frames.ticks[cursor].label}")]
    if figures.token is not None:
        rows.append(("token", f"{figures.token} {figures.text!r}"))
    for kind, id_ in frames.live_at(cursor).items():
        column = frames.codes[:, cursor]
        scratch = [
            row.id
            for row in frames.rows
            if row.kind == kind and column[row.number] and not column[row.number] & LIVE and not row.host
        ]
        row = frames.row(id_)
        size = bytes_text(int(frames.nbytes[row.number, cursor])) if row is not None else ""
        rows.append((kind, f"live {id_} ({size})" + (f", scratch {scratch[0]}" if scratch else "")))
    if figures.used_tokens is not None:
        capacity = frames.meta.get("capacity") if frames.meta.get("kv") == "fixed" else None
        rows.append(("tokens", f"{figures.used_tokens}" + (f" of {capacity}" if capacity else ", no fixed capacity")))
    rows.append(("our buffers", bytes_text(figures.alive_bytes)))
    if figures.device_bytes is not None:
        rows.append(("device memory", f"{bytes_text(figures.device_bytes)}, weights and all (emulator)"))
    else:
        rows.append(("device memory", "not observable: this driver does not tell it"))
    if figures.predict_ms is not None:
        rows.append(("time", f"predict {figures.predict_ms:.2f} ms, wall {figures.wall_ms or 0:.2f} ms"))
    if frames.ticks[cursor].stage == "verify" and figures.drafted is not None:
        rows.append(("drafts", f"{figures.drafted} drafted, {figures.accepted} accepted"))
    return _table("At this instant", rows)


def buffer(facts: Mapping[str, str]) -> str:
    """Everything about the picked buffer."""
    if not facts:
        return f"<div style='{_SOFT}'><b>Buffer</b><br>Click a row, or search, to see all about a buffer.</div>"
    return _table("Buffer", list(facts.items()))


def light(balanced: bool, told: Sequence[str]) -> str:
    """Green or red, and says which in words."""
    colours = _GREEN if balanced else _RED
    head = "✓ books balance" if balanced else "✗ books do not balance"
    return badge(head, colours) + f" <span style='{_SOFT}'>{html.escape('; '.join(told))}</span>"


def status(text: str, *, good: bool = True) -> str:
    return badge(text, _GREEN if good else _AMBER)


def strip(problems: Sequence[str], hazards: Sequence[str]) -> str:
    """The error strip; empty when there is nothing to say."""
    lines = [f"{badge('error', _RED)} {html.escape(text)}" for text in problems]
    lines += [f"{badge('hazard', _AMBER)} {html.escape(text)}" for text in hazards]
    if not lines:
        return ""
    body = "<br>".join(lines)
    return (
        "<div role='alert' class='qn-error' style='border-left:4px solid #A32A00;padding:4px 8px;white-space:pre-wrap;"
        f"color:var(--jp-ui-font-color1,inherit)'>{body}</div>"
    )


def badge(text: str, colours: tuple[str, str]) -> str:
    return (
        f"<span style='background:{colours[0]};color:{colours[1]};border-radius:3px;padding:1px 7px;font-weight:600'>"
        f"{html.escape(text)}</span>"
    )


def _table(head: str, rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><td style='{_CELL};{_SOFT};white-space:nowrap'>{html.escape(name)}</td>"
        f"<td style='{_CELL}'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return (
        "<div style='font-size:12.5px;line-height:1.45;color:var(--jp-ui-font-color1,inherit)'>"
        f"<b>{html.escape(head)}</b><table style='border-collapse:collapse;margin:0'>{body}</table></div>"
    )
