"""The slot pool over ticks: from the pool's books to the cells and words of a grid. A row a slot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from qwen_npu.ledger.slots import History, Slot, counts
from qwen_npu.views import theme
from qwen_npu.views.live.frames import Frames
from qwen_npu.views.live.grid import CROSSED, DOTTED, FULL, HALF, HATCHED, IDLE, SOLID, Picture

OWNER_COLOURS = [theme.BLUE, theme.ORANGE, theme.GREEN, theme.PURPLE, theme.SKY, theme.VERMILION, theme.YELLOW]
PALETTE = [*OWNER_COLOURS, theme.GREY]
GLYPHS = ["", "●", "✓", "✗", "…", "S", "∅"]
_MARKS = {"current": 1, "accepted": 2, "rejected": 3, "drafted": 4}
LEGEND = [
    [theme.BLUE, FULL, SOLID, "●", "live: the accepted state, read next"],
    [theme.BLUE, HALF, SOLID, "✓", "live: accepted, before it"],
    [theme.BLUE, HALF, SOLID, "✗", "live: rejected draft"],
    [theme.BLUE, IDLE, SOLID, "", "live, not written"],
    [theme.BLUE, HALF, HATCHED, "S", "snapshot"],
    [theme.GREY, IDLE, DOTTED, "", "free"],
    [theme.GREY, HALF, CROSSED, "∅", "free and poisoned"],
]


def pool(frames: Frames, books: History, ticks: Sequence[int], cursor: int, picked: str = "") -> Picture:
    """The picture of `ticks` (which must follow one another); the words beside the rows tell of `cursor`."""
    if not ticks or not books.size:
        return Picture(line="This ledger holds no slot pool.")
    first, last = ticks[0], ticks[-1]
    cells = np.zeros((books.size, last - first + 1, 4), np.uint8)
    for tick in range(first, last + 1):
        for slot in slots_at(frames, books, tick):
            cells[slot.slot, tick - first] = _cell(slot)
    now = slots_at(frames, books, cursor)
    told = counts(now)
    line = (
        f"{frames.ticks[cursor].label}: {told['free']} free + {told['live']} live + {told['snapshot']} snapshot = "
        f"{told['total']} of {books.size} slots"
    )
    done = [accept for accept in books.accepts if accept.seq < _end(frames, cursor)]
    drafted = sum(accept.drafted for accept in done)
    if drafted:
        kept = drafted - sum(accept.rejected for accept in done)
        line += f"  ·  {kept} of {drafted} drafts accepted so far ({kept / drafted:.0%})"
    number = int(picked.removeprefix("slot ")) if picked.startswith("slot ") else -1
    if 0 <= number < len(now):
        line += f"  ·  slot {number}: {words(now[number])}"
    return Picture(
        rows=[{"id": f"slot {i}", "label": f"slot {i}", "band": False, "bus": False} for i in range(books.size)],
        columns=[
            str(tick.step) if tick.is_step else tick.label.removeprefix("verify ")
            for tick in frames.ticks[first : last + 1]
        ],
        first=first,
        cells=cells,
        side=[words(slot) for slot in now],
        line=line,
    )


def slots_at(frames: Frames, books: History, tick: int) -> tuple[Slot, ...]:
    """The slots at the end of a tick."""
    at = bisect_right(books.rounds, _end(frames, tick) - 1, key=lambda one: one.seq) - 1
    return books.rounds[max(at, 0)].slots


def _end(frames: Frames, tick: int) -> int:
    """The first event behind a tick."""
    return frames.ticks[tick + 1].first_seq if tick + 1 < len(frames.ticks) else frames.last_seq + 1


def words(slot: Slot) -> str:
    """Owner, position held, generation, and what the last step made of it."""
    if slot.use in {"free", "poisoned"}:
        return f"{slot.use}, had {slot.generation} owners" if slot.generation else slot.use
    told = f"{slot.owner}, position {slot.position}, gen {slot.generation}"
    return f"{told}, {slot.verdict}" if slot.verdict else told


def _cell(slot: Slot) -> tuple[int, int, int, int]:
    grey = len(OWNER_COLOURS)
    if slot.use == "free":
        return grey, IDLE, DOTTED, 0
    if slot.use == "poisoned":
        return grey, HALF, CROSSED, 6
    colour = max(slot.sequence, 0) % len(OWNER_COLOURS)
    if slot.use == "snapshot":
        return colour, HALF, HATCHED, 5
    strength = FULL if slot.verdict == "current" else HALF if slot.verdict else IDLE
    return colour, strength, SOLID, _MARKS.get(slot.verdict, 0)
