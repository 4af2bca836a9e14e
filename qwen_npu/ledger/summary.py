"""Answers from a ledger in plain numbers: what moved, what lives where, the peak, one instant, do the books balance.

Everything returned is a dataclass or a mapping that JSON can hold: the command line prints it, figures draw the same.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qwen_npu.errors import UsageError
from qwen_npu.ledger import slots as slot_books
from qwen_npu.ledger.events import Buffer, Source
from qwen_npu.ledger.store import Ledger, StepRow
from qwen_npu.ledger.timeline import Life, Move, Timeline, Use


@dataclass(frozen=True)
class Check:
    """One balance of the books. `detail` says the sums, or the first thing that is wrong."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once, as `source` knows them."""

    source: Source
    nbytes: int
    seq: int
    at: str


def summary(ledger: Ledger) -> dict[str, Any]:
    """Everything a terminal page should say of a recording."""
    timeline = Timeline.of(ledger)
    meta = {key: value for key, value in ledger.meta.items() if key != "spec"}
    return {
        "meta": meta,
        "events": dict(Counter(row[0] for row in ledger.query("SELECT kind FROM events")).most_common()),
        "runs": max((tick.run for tick in timeline.ticks), default=-1) + 1,
        "steps": dict(Counter(step.stage for step in ledger.steps())),
        "text": replay(ledger)["text"],
        "traffic": traffic(timeline),
        "timings": timings(ledger),
        "peak": [asdict(peak) for peak in peaks(timeline)],
        "live": live_halves(timeline),
        "buffers": buffers(timeline),
        "hazards": [
            {"seq": event.seq, "at": timeline.ticks[timeline.tick_at(event.seq)].label, **(event.detail or {})}
            for event in ledger.events("hazard")
        ],
        "nonfinite": first_nonfinite(ledger),
        "checks": [asdict(check) for check in conservation(timeline)],
    }


def traffic(timeline: Timeline) -> dict[str, Any]:
    """Bytes by direction and kind: a step (smallest, median, largest), between the steps, and in all."""
    steps = [tick.number for tick in timeline.ticks if tick.is_step]
    place = {number: i for i, number in enumerate(steps)}
    a_step: dict[str, dict[str, list[int]]] = {"H2D": {}, "D2H": {}}
    between: dict[str, Counter[str]] = {"H2D": Counter(), "D2H": Counter()}
    for move in timeline.moves:
        if move.tick in place:
            a_step[move.direction].setdefault(move.kind, [0] * len(steps))[place[move.tick]] += move.nbytes
        else:
            between[move.direction][move.kind] += move.nbytes
    total = {
        direction: sum(sum(values) for values in a_step[direction].values()) + sum(between[direction].values())
        for direction in a_step
    }
    return {
        "a_step": {
            direction: {
                kind: {"min": min(values), "median": statistics.median(values), "max": max(values)}
                for kind, values in kinds.items()
            }
            for direction, kinds in a_step.items()
        },
        "between_steps": {direction: dict(kinds) for direction, kinds in between.items()},
        "total": total,
    }


def timings(ledger: Ledger) -> dict[str, Any]:
    """Per stage: number, median predict_ms and wall_ms, and the sum of wall_ms."""
    stages: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in ledger.steps():
        stages[step.stage].append((step.predict_ms, step.wall_ms))
    return {
        stage: {
            "count": len(values),
            "predict_ms": statistics.median(predict for predict, _ in values),
            "wall_ms": statistics.median(wall for _, wall in values),
            "wall_total_ms": sum(wall for _, wall in values),
        }
        for stage, values in stages.items()
    }


def buffers(timeline: Timeline) -> list[dict[str, Any]]:
    """One entry a buffer id: where it lives, how often it was allocated, who wrote it last, whether it is live."""
    live = set(live_halves(timeline).values())
    writes = last_writes(timeline, [lives[-1].born_seq for lives in timeline.lives_by_id.values()])
    entries = []
    for id_, lives in timeline.lives_by_id.items():
        last = lives[-1]
        buffer = last.buffer
        entries.append(
            {
                "id": id_,
                "name": buffer.name,
                "kind": buffer.kind,
                "device": buffer.device,
                "dtype": buffer.dtype,
                "shape": list(buffer.shape),
                "nbytes": buffer.nbytes,
                "address": buffer.address,
                "allocations": len(lives),
                "half": ("live" if id_ in live else "scratch") if buffer.half else "",
                "alive": last.dead_seq is None,
                "site": buffer.site,
                "last_written": writes.get(last.born_seq, ""),
                "source": last.source,
            }
        )
    return entries


def last_writes(timeline: Timeline, wanted: Collection[int]) -> dict[int, str]:
    """Who wrote the lives born at the `wanted` events last: born_seq -> "predict of decode_fixed, decode 3, at
    file:line"."""
    sites = {life.born_seq: life.buffer.site for life in timeline.lives if life.born_seq in wanted}
    ids = {life.buffer.id for life in timeline.lives if life.born_seq in sites}
    writers: dict[int, Move | Use] = {}
    for move in timeline.moves:
        if move.direction == "H2D" and move.buffer in ids:
            life = timeline.life_at(move.buffer, move.seq)
            if life is not None:
                writers[life.born_seq] = move
    for use in timeline.uses:
        for id_ in ids.intersection(use.outputs):
            life = timeline.life_at(id_, use.seq, "output")
            if life is not None and (life.born_seq not in writers or writers[life.born_seq].seq < use.seq):
                writers[life.born_seq] = use
    texts = {}
    for born in writers.keys() & set(wanted):
        writer = writers[born]
        at_tick = timeline.ticks[writer.tick].label
        if isinstance(writer, Move):
            # The one call that allocates a buffer for an array also uploads it.
            text, site = "upload", sites[born]
        else:
            text, site = f"predict of {writer.graph}" if writer.graph else "predict", writer.site
        texts[born] = f"{text}, {at_tick}" + (f", at {site}" if site else "")
    return texts


def live_halves(timeline: Timeline, seq: int | None = None) -> dict[str, str]:
    """Kind of state -> id of the buffer that holds it after event `seq` (None: at the end)."""
    live: dict[str, str] = {}
    for turn in timeline.turns:
        if seq is not None and turn.seq > seq:
            break
        live[turn.kind] = turn.live
    return live


def peaks(timeline: Timeline) -> list[Peak]:
    """The peak of the buffers we made, and of all device memory where the emulator tells it."""
    found = []
    views: tuple[tuple[Source, list[Life]], ...] = (
        ("observed", [life for life in timeline.lives if life.buffer.device != "host"]),
        ("emulator", timeline.device_lives),
    )
    for source, lives in views:
        changes = [(life.born_seq, life.buffer.nbytes) for life in lives]
        changes += [(life.dead_seq, -life.buffer.nbytes) for life in lives if life.dead_seq is not None]
        alive = most = at = 0
        for seq, nbytes in sorted(changes):
            alive += nbytes
            if alive > most:
                most, at = alive, seq
        if lives:
            found.append(Peak(source, most, at, timeline.ticks[timeline.tick_at(at)].label))
    return found


def at(ledger: Ledger, *, tick: int | None = None, seq: int | None = None, t_ns: int | None = None) -> dict[str, Any]:
    """The state at one instant: at the end of a tick, after an event, or at a time. Exactly one of the three.

    Returns:
        what is alive with its role, which halves are live, bytes alive, the text so far, and the slots of a pool.

    Raises:
        UsageError: none or several of the three, or an instant outside of the recording.
    """
    timeline = Timeline.of(ledger)
    if [tick, seq, t_ns].count(None) != 2:
        raise UsageError("an instant needs exactly one of tick, seq and t_ns", expected="for example tick=3")
    last = ledger.last_seq
    if tick is not None:
        if not 0 <= tick < len(timeline.ticks):
            raise UsageError(f"tick {tick}", expected=f"0 to {len(timeline.ticks) - 1}")
        seq = timeline.ticks[tick + 1].first_seq - 1 if tick + 1 < len(timeline.ticks) else last
    elif t_ns is not None:
        found = ledger.query("SELECT max(seq) FROM events WHERE t_ns <= ?", (t_ns,))[0][0]
        seq = -1 if found is None else found
    assert seq is not None
    if not 0 <= seq <= last:
        raise UsageError(f"event {seq}", expected=f"0 to {last}")
    live = live_halves(timeline, seq)
    alive = [life for life in timeline.lives if life.born_seq <= seq and (life.dead_seq is None or life.dead_seq > seq)]
    now = timeline.ticks[timeline.tick_at(seq)]
    pools = {}
    for pool in slot_books.pools(ledger):
        slots = slot_books.history(ledger, pool, until=seq).rounds[-1].slots
        pools[pool] = {"counts": slot_books.counts(slots), "slots": [asdict(slot) for slot in slots]}
    return {
        "seq": seq,
        "tick": now.number,
        "at": now.label,
        "run": now.run,
        "live": live,
        "buffers": [_alive(life.buffer, live) for life in alive],
        "bytes_alive": sum(life.buffer.nbytes for life in alive if life.buffer.device != "host"),
        "text": "".join(
            step.text
            for step in ledger.steps()
            if step.seq <= seq and timeline.ticks[timeline.tick_at(step.seq)].run == now.run
        ),
        "pools": pools,
    }


def conservation(timeline: Timeline) -> list[Check]:
    """Whether the books balance: bytes alive, bytes of every step, the emulator's own count, slots of every pool."""
    checks = [_bytes_alive(timeline), _bytes_a_step(timeline)]
    if timeline.device_moves or timeline.device_lives:
        checks += [_device_agrees(timeline), _device_holds(timeline)]
    for pool in slot_books.pools(timeline.ledger):
        books = slot_books.history(timeline.ledger, pool)
        counts = slot_books.counts(books.rounds[-1].slots)
        balanced = counts["total"] == books.size and not books.faults
        text = f"{counts['free']} free + {counts['live']} live + {counts['snapshot']} snapshot = {books.size} slots"
        checks.append(Check(f"slots of {pool}", balanced, books.faults[0] if books.faults else text))
    return checks


def replay(ledger: Ledger) -> dict[str, Any]:
    """The recording told again: the text and, step by step, what became known when (ms from the first step)."""
    rows = ledger.query("SELECT seq, t_ns, dur_ns FROM events WHERE kind = 'step' ORDER BY seq")
    ends = {seq: t_ns + dur_ns for seq, t_ns, dur_ns in rows}
    steps = ledger.steps()
    start = rows[0][1] if rows else 0
    return {
        "text": "".join(step.text for step in steps),
        "tokens": [token for step in steps for token in _tokens(step)],
        "steps": [
            {"stage": step.stage, "step": step.step, "token": step.token, "tokens": _tokens(step), "text": step.text}
            | {"predict_ms": step.predict_ms, "wall_ms": step.wall_ms, "at_ms": (ends[step.seq] - start) / 1e6}
            for step in steps
        ],
    }


def _tokens(step: StepRow) -> list[int]:
    """What a step added to the answer: a verify its accepted drafts and one token more."""
    return list(step.tokens or ([] if step.token is None else [step.token]))


def first_nonfinite(ledger: Ledger) -> dict[str, Any] | None:
    """The first peek that counts or holds a value that is not finite: name, step and index ([layer, head] of a state).

    A peek whose name ends in "nonfinite" counts such values on the device; in any other they are looked for here.
    """
    for peek in ledger.peeks():
        if peek.array.dtype.kind not in "fiu":
            continue
        bad = peek.array != 0 if peek.name.endswith("nonfinite") else ~np.isfinite(peek.array)
        if bad.any():
            index = [int(i) for i in np.argwhere(bad)[0]]
            names = ("layer", "head")
            return {
                "name": peek.name,
                "step": peek.step,
                "seq": peek.seq,
                "index": index,
                **dict(zip(names, index, strict=False)),
            }
    return None


def _alive(buffer: Buffer, live: Mapping[str, str]) -> dict[str, Any]:
    role = ""
    if buffer.half:
        role = "live" if live.get(buffer.kind) == buffer.id else "scratch"
    return {**buffer._asdict(), "shape": list(buffer.shape), "role": role}


def _bytes_alive(timeline: Timeline) -> Check:
    """Bytes by the events' own figures against the sum of the buffers that are not freed."""
    name = "bytes alive = sum of buffers"
    alive: dict[tuple[str, str], list[int]] = defaultdict(list)
    faults = []
    for event in timeline.ledger.events(("allocate", "free")):
        held = alive[event.source, event.buffer]
        if event.kind == "allocate":
            held.append(event.nbytes)
        elif held:
            nbytes = held.pop(0)
            if event.nbytes not in (0, nbytes):
                faults.append(
                    f"event {event.seq} frees {event.nbytes} B of {event.buffer!r}, allocated with {nbytes} B"
                )
        elif event.source != "emulator":  # which does not tell what it held before the recording began
            faults.append(f"event {event.seq} frees {event.buffer!r}, which is not alive")
    sums = []
    for source, lives in (("ours", timeline.lives), ("emulator", timeline.device_lives)):
        by_events = sum(
            sum(held) for (of_source, _), held in alive.items() if (of_source == "emulator") == (source == "emulator")
        )
        by_buffers = sum(life.buffer.nbytes for life in lives if life.buffer.freed is None)
        if by_events != by_buffers:
            faults.append(f"{source}: events leave {by_events} B alive, buffers {by_buffers} B")
        if lives:
            sums.append(f"{source}: {by_events} B = {by_buffers} B")
    return Check(name, not faults, faults[0] if faults else "; ".join(sums) or "nothing was allocated")


def _bytes_a_step(timeline: Timeline) -> Check:
    """What each step says it moved and allocated against the copies and allocations recorded since the step before."""
    ledger = timeline.ledger
    name = "bytes of steps = copies and allocations"
    steps = ledger.steps()
    moved: Counter[tuple[int, str]] = Counter()
    by_seq = iter(
        sorted(
            [(move.seq, move.tick, move.direction, move.nbytes) for move in timeline.moves]
            + [
                (life.born_seq, timeline.tick_at(life.born_seq), "allocated", life.buffer.nbytes)
                for life in timeline.lives
                if life.buffer.device != "host"
            ]
        )
    )
    pending = next(by_seq, None)
    for number, step in enumerate(steps):
        tick = timeline.tick_at(step.seq)
        while pending is not None and pending[0] < step.seq:
            if pending[1] == tick:  # states read between two steps belong to neither
                moved[number, pending[2]] += pending[3]
            pending = next(by_seq, None)
        for direction, told in (
            ("H2D", step.host_to_device_bytes),
            ("D2H", step.device_to_host_bytes),
            ("allocated", step.allocated_bytes),
        ):
            if moved[number, direction] != told:
                text = f"{step.stage} {step.step} tells {told} B {direction}, events {moved[number, direction]} B"
                return Check(name, False, text)
    return Check(name, True, f"{len(steps)} stages and steps agree")


def _device_agrees(timeline: Timeline) -> Check:
    """Copies that the emulator counted against those we saw or concluded: more of them are hidden copies."""
    name = "copies seen = copies the emulator made"
    sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for side, moves in enumerate((timeline.moves, timeline.device_moves)):
        for move in moves:
            sums[move.tick, move.direction][side] += move.nbytes
    steps = timeline.ledger.steps()
    told = timeline.tick_at(steps[-1].seq) if steps else len(timeline.ticks)
    for (tick, direction), (seen, made) in sorted(sums.items()):
        if tick > told and timeline.ticks[tick].is_step:
            continue  # the recording ends within this step (a killed process), which may be half told
        if seen != made:
            text = f"{timeline.ticks[tick].label}: {seen} B {direction} seen, {made} B made by the emulator"
            return Check(name, False, text)
    return Check(name, True, f"{sum(made for _, made in sums.values())} B both")


def _device_holds(timeline: Timeline) -> Check:
    """Every device buffer of ours is a live block of the emulator at its address."""
    name = "our buffers = blocks of the emulator"
    blocks = {life.buffer.address: life for life in timeline.device_lives}  # the newest at each address
    ours = [
        life
        for life in timeline.lives
        if life.buffer.device != "host" and life.buffer.freed is None and life.buffer.address is not None
    ]
    begin = timeline.ledger.query("SELECT min(seq) FROM events WHERE kind != 'allocate'")[0][0] or 0
    for life in ours:
        block = blocks.get(life.buffer.address)
        if block is None and life.born_seq < begin:
            continue  # older than the recording, which then holds nothing of its block
        if block is None or block.dead_seq is not None or block.buffer.nbytes < life.buffer.nbytes:
            text = (
                f"{life.buffer.id} is alive at {life.buffer.address:#x}, where the emulator holds nothing of its size"
            )
            return Check(name, False, text)
    return Check(name, True, f"{len(ours)} buffers found at their addresses")
