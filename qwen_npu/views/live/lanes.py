"""Residency lanes: from frames to the cells, arrows and words of a grid. Device rows above the bus, host rows below."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen_npu.ledger.events import Buffer
from qwen_npu.views import theme
from qwen_npu.views.live.frames import ALIVE, FREED, LIVE, PEEKED, READ, TWO, UPLOADED, WRITTEN, Frames, Row
from qwen_npu.views.live.grid import EMPTY, FULL, HALF, HATCHED, IDLE, SOLID, Picture
from qwen_npu.views.theme import bytes_text

_OUTWARD = ("input", "logits", "peek", "other", "pool", "kv", "recurrent", "conv")
"""From the bus outwards: what crosses every step lies next to it."""
_STATES = ("conv", "recurrent", "kv", "pool")
GLYPHS = ["", "R", "W", "RW", "U", "UR", "UW", "URW", "P", "RP", "WP", "RWP", "UP", "URP", "UWP", "URWP"]
PALETTE = [theme.colour(kind) for kind in theme.KINDS]
_WORDS = [
    [theme.GREY, FULL, SOLID, "R", "read by predict"],
    [theme.GREY, HALF, SOLID, "W", "written"],
    [theme.GREY, HALF, SOLID, "U", "uploaded"],
    [theme.GREY, IDLE, SOLID, "", "idle"],
    [theme.GREY, IDLE, HATCHED, "", "on the host"],
]


@dataclass(frozen=True)
class Filter:
    """Which rows and ticks are shown; "" shows all.

    Attributes:
        search: part of a buffer id or tensor name.
        layer: number of a layer, None for all: rows that hold nothing of that layer are hidden.
    """

    search: str = ""
    stage: str = ""
    layer: int | None = None
    kind: str = ""


def legend(frames: Frames) -> list[list[object]]:
    """What the cells mean: the kinds that there are, then the signs."""
    kinds = {row.kind for row in frames.rows}
    told: list[list[object]] = [[theme.colour(kind), FULL, SOLID, "", kind] for kind in theme.KINDS if kind in kinds]
    told += _WORDS
    if frames.peek_events:
        told.append([theme.GREY, IDLE, SOLID, "P", "looked at by a peek"])
    told.append(["#FFFFFF", EMPTY, SOLID, "", "▲ up to the device (solid lines), ▼ down to the host (dotted)"])
    return told


def shown_rows(frames: Frames, chosen: Filter) -> tuple[list[Row], list[Row]]:
    """Device rows from the top to the bus, host rows from the bus down."""
    found = [row for row in frames.rows if _matches(frames, row, chosen)]
    device = sorted((row for row in found if not row.host), key=lambda row: (-_OUTWARD.index(row.kind), row.id))
    host = sorted((row for row in found if row.host), key=lambda row: (_OUTWARD.index(row.kind), row.number))
    return device, host


def shown_ticks(frames: Frames, cursor: int, span: int, chosen: Filter, first: int | None = None) -> list[int]:
    """At most `span` ticks of the chosen stage, among them the cursor; from tick `first` on as long as that holds."""
    ticks = [tick.number for tick in frames.ticks if not chosen.stage or tick.stage == chosen.stage]
    if len(ticks) <= span:
        return ticks
    at = int(np.searchsorted(ticks, cursor))
    start = int(np.searchsorted(ticks, first)) if first is not None else at - span // 2
    if not start <= at < start + span - 1:
        start = at - span + 1 + span // 4 if at >= start + span - 1 else at - span // 4
    start = min(max(0, start), len(ticks) - span)
    return ticks[start : start + span]


def lanes(frames: Frames, ticks: Sequence[int], cursor: int, chosen: Filter, picked: str = "") -> Picture:
    """The picture of `ticks`, which must follow one another; the words beside the rows tell of `cursor`."""
    if not ticks:
        return Picture(line="Nothing to show yet: press Run or Step.")
    device, host = shown_rows(frames, chosen)
    first, last = ticks[0], ticks[-1]
    # A host array is a row only while it plays a part; buffers of the device keep their places.
    host = [row for row in host if row.id == picked or frames.codes[row.number, first : last + 1].any()]
    width = last - first + 1
    rows = [{"id": row.id, "label": row.id, "band": False, "bus": False} for row in device]
    rows.append({"id": "", "label": "device ▲ bus ▼ host", "band": False, "bus": True})
    rows += [{"id": row.id, "label": row.id, "band": True, "bus": False} for row in host]
    order: list[Row | None] = [*device, None, *host]
    place = {row.number: i for i, row in enumerate(order) if row is not None}
    bus = len(device)
    cells = np.zeros((len(order), width, 4), np.uint8)
    for i, row in enumerate(order):
        if row is not None:
            cells[i] = _cells(frames.codes[row.number, first : last + 1], row)
    arrows = []
    for tick in range(first, last + 1):
        for copy in frames.copies[tick]:
            ends = place.get(copy.host, bus), place.get(copy.device, bus)
            if (copy.host in place or copy.device in place) and ends[0] != ends[1]:
                start, end = ends if copy.up else ends[::-1]
                arrows.append((tick - first, start, end, int(copy.up)))
    if chosen.stage:  # ticks of other stages lie between: shown empty
        off = [tick - first for tick in range(first, last + 1) if tick not in set(ticks)]
        cells[:, off] = 0
        arrows = [arrow for arrow in arrows if arrow[0] not in set(off)]
    side = [_bus_words(frames, cursor) if row is None else _words(frames, row, cursor) for row in order]
    return Picture(
        rows=rows,
        columns=[_label(frames, tick) for tick in range(first, last + 1)],
        first=first,
        cells=cells,
        arrows=np.array(arrows, np.int32).reshape(-1, 4),
        side=side,
        line=line(frames, cursor, picked),
    )


def line(frames: Frames, cursor: int, picked: str) -> str:
    """What is said in one line about the cursor's tick and the picked row."""
    if not 0 <= cursor < len(frames.ticks):
        return ""
    figures = frames.figures[cursor]
    told = f"{frames.ticks[cursor].label}: ▲ {bytes_text(figures.up_bytes)} up, ▼ {bytes_text(figures.down_bytes)} down"
    if figures.allocated_bytes:
        told += f", {bytes_text(figures.allocated_bytes)} allocated"
    told += f"; {bytes_text(figures.alive_bytes)} in our device buffers"
    row = frames.row(picked) if picked else None
    if row is not None:
        told += f"  ·  {row.id}: {_words(frames, row, cursor) or 'not there'}"
    return told


def facts(frames: Frames, id_: str, tick: int) -> dict[str, str]:
    """Everything known about a buffer at a tick, in the order in which it is shown."""
    row = frames.row(id_)
    if row is None or not 0 <= tick < len(frames.ticks):
        return {}
    code = int(frames.codes[row.number, tick])
    nbytes = int(frames.nbytes[row.number, tick])
    generation = int(frames.generation[row.number, tick])
    told = {"buffer": id_, "at": frames.ticks[tick].label, "role": _role(code, row) or "not there"}
    if code & PEEKED:
        told["role"] += "; looked at by a peek"
    if code & TWO:
        told["role"] += "; two generations alive within the step, this is the newer"
    buffer = _life(frames, row, generation)
    if buffer is not None:
        told |= {
            "tensor": f"{buffer.name}: {buffer.dtype}{list(buffer.shape)}",
            "bytes": f"{bytes_text(buffer.nbytes)} ({buffer.nbytes:,} B)",
            "device": buffer.device,
            "generation": str(buffer.generation),
            "allocated at": buffer.site or "unknown",
        }
        known = buffer.address is not None
        told["address"] = f"{buffer.address:#x} (emulator)" if known else "not observable: this driver does not tell it"
    else:
        told |= {
            "bytes": f"{bytes_text(nbytes)} ({nbytes:,} B)" if nbytes else "not told",
            "device": _where(row, frames),
        }
    wrote = int(frames.wrote[row.number, tick])
    told["last written"] = _writer(frames, row, wrote) if wrote >= 0 else "by nobody yet"
    told["source"] = "observed" if buffer is not None else "inferred"
    return told


def tip(frames: Frames, id_: str, tick: int) -> str:
    return "\n".join(f"{name}: {value}" for name, value in facts(frames, id_, tick).items())


def _cells(codes: np.ndarray, row: Row) -> np.ndarray:
    read, written, uploaded = (codes & READ) > 0, (codes & WRITTEN) > 0, (codes & UPLOADED) > 0
    cells = np.zeros((len(codes), 4), np.uint8)
    cells[:, 0] = theme.KINDS.index(row.kind)
    touched = read | written | uploaded
    cells[:, 1] = np.where(codes & ALIVE, np.where(touched, np.where(read & (not row.host), FULL, HALF), IDLE), EMPTY)
    cells[:, 2] = HATCHED if row.host else SOLID
    if not row.host:
        cells[:, 3] = read * 1 + written * 2 + uploaded * 4 + ((codes & PEEKED) > 0) * 8
    return cells


def _role(code: int, row: Row) -> str:
    if not code & ALIVE:
        return ""
    words = [word for bit, word in ((READ, "read"), (WRITTEN, "written"), (UPLOADED, "uploaded")) if code & bit]
    told = " and ".join(words) or "idle"
    if row.kind in _STATES and not row.host:
        if code & LIVE:
            told += ", live from here on" if code & WRITTEN and not code & READ else ", live"
        elif row.buffer is not None and row.buffer.half:
            told += ", scratch from here on" if code & READ else ", scratch"
    if code & FREED:
        told += ", freed" if not code & TWO else ", old one freed"
    return told


def _words(frames: Frames, row: Row, tick: int) -> str:
    if not 0 <= tick < len(frames.ticks):
        return ""
    role = _role(int(frames.codes[row.number, tick]), row)
    nbytes = int(frames.nbytes[row.number, tick])
    return f"{bytes_text(nbytes)} {role}" if role and nbytes else role


def _bus_words(frames: Frames, tick: int) -> str:
    if not 0 <= tick < len(frames.ticks):
        return ""
    figures = frames.figures[tick]
    return f"▲ {bytes_text(figures.up_bytes)}   ▼ {bytes_text(figures.down_bytes)}"


def _label(frames: Frames, tick: int) -> str:
    now = frames.ticks[tick]
    return str(now.step) if now.is_step else now.label.removeprefix("decode ").removeprefix("verify ")


def _where(row: Row, frames: Frames) -> str:
    return "host" if row.host else str(frames.meta.get("device", "device"))


def _writer(frames: Frames, row: Row, tick: int) -> str:
    label, figures = frames.ticks[tick].label, frames.figures[tick]
    code = int(frames.codes[row.number, tick])
    if code & UPLOADED and not code & WRITTEN:
        site = row.buffer.site if row.buffer is not None else ""  # an upload allocates what it writes
        return f"by the upload at {label}" + (f", {site}" if site else "")
    graph = f" of {figures.graph}" if figures.graph else ""
    return f"by predict{graph} at {label}" + (f", {figures.site}" if figures.site else "")


def _life(frames: Frames, row: Row, generation: int) -> Buffer | None:
    """The buffer that had this id and generation; the newest is at hand, older ones are looked up in the ledger."""
    if row.buffer is None:
        return None
    if row.buffer.generation == generation:
        return row.buffer
    found = frames.ledger.query(
        f"SELECT {', '.join(Buffer._fields)} FROM buffers WHERE id = ? AND generation = ?", (row.id, generation)
    )
    if not found:
        return None
    buffer = Buffer(*found[-1])
    return buffer._replace(shape=tuple(json.loads(str(buffer.shape))))


def _matches(frames: Frames, row: Row, chosen: Filter) -> bool:
    if chosen.kind and row.kind != chosen.kind:
        return False
    if chosen.search:
        names = row.id.lower(), (row.buffer.name if row.buffer is not None else "").lower()
        if not any(chosen.search.lower() in name for name in names):
            return False
    return chosen.layer is None or row.kind not in _STATES or _holds(frames, row, chosen.layer)


def _holds(frames: Frames, row: Row, layer: int) -> bool:
    """Whether a state's buffer holds something of a layer of the model (conv, recurrent: linear; KV: full)."""
    kinds = (frames.meta.get("spec") or {}).get("layer_types")
    if not kinds or layer >= len(kinds):
        return True
    linear: bool = kinds[layer] == "linear_attention"
    if row.kind == "pool":
        name = row.buffer.name if row.buffer is not None else row.id
        number = name.rpartition("_")[2].partition(".")[0]
        nth = sum(kind == "linear_attention" for kind in kinds[:layer])
        return linear and (not number.isdigit() or int(number) == nth)
    return linear == (row.kind in ("conv", "recurrent"))
