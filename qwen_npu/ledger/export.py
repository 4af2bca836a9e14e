"""A ledger for other tools: Chrome trace JSON that Perfetto loads, and CSV.

Perfetto nests "X" spans of one track only if each lies within the one around it; so stages and steps are nested spans
of one track, and what may overlap (copies, lives of buffers) goes to tracks of its own or is an async pair.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from qwen_npu.errors import LedgerError, UsageError
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
from qwen_npu.ledger.timeline import Timeline

HOST, DEVICE = 1, 2
_TRACKS = {
    (HOST, 1): "stages and steps",
    (HOST, 2): "copies up (host to device)",
    (HOST, 3): "copies down (device to host)",
    (DEVICE, 1): "predict",
    (DEVICE, 2): "copies arriving and leaving",
    (DEVICE, 3): "halves, slots, hazards",
}
_INSTANTS = (
    "rotate",
    "hazard",
    "alias",
    "resize",
    "slot_allocate",
    "slot_free",
    "slot_write",
    "slot_read",
    "draft",
    "accept",
)
CSV_TABLES = ("events", "steps", "buffers")


def trace(ledger: Ledger) -> dict[str, Any]:
    """The recording in Chrome's trace format: `traceEvents`, times in microseconds from the first event."""
    timeline = Timeline.of(ledger)
    events = ledger.events()
    start = min((event.t_ns for event in events), default=0)
    device = str(ledger.meta.get("device", "device"))
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": HOST, "args": {"name": "host"}},
        {"ph": "M", "name": "process_name", "pid": DEVICE, "args": {"name": device}},
        *(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for (pid, tid), name in _TRACKS.items()
        ),
    ]

    def us(t_ns: int) -> float:
        return (t_ns - start) / 1e3

    out += _spans(events, us)
    for event in events:
        if event.kind == "predict":
            out.append(_span(event, us, DEVICE, 1, str((event.detail or {}).get("graph", "predict"))))
        elif event.kind in _INSTANTS:
            name = f"{event.kind} {event.buffer}".strip()
            if event.kind.startswith("slot") and event.detail:
                name = f"{event.kind} {event.detail.get('slot')}"
            out.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": name,
                    "pid": DEVICE,
                    "tid": 3,
                    "ts": us(event.t_ns),
                    "args": _facts(event),
                }
            )
    alive: Counter[str] = Counter()
    changes = []
    for life in timeline.lives:
        buffer = life.buffer
        key = {
            "cat": "buffer",
            "id": f"{buffer.id}#{buffer.generation}.{life.born_seq}",
            "pid": DEVICE if buffer.device != "host" else HOST,
            "tid": 0,
        }
        facts = {**buffer._asdict(), "shape": list(buffer.shape), "source": life.source}
        out.append({"ph": "b", "name": buffer.id, **key, "ts": us(life.born_ns), "args": facts})
        changes.append((life.born_ns, buffer.kind, buffer.nbytes))
        end = life.dead_ns if life.dead_ns is not None else max(event.t_ns + event.dur_ns for event in events)
        out.append({"ph": "e", "name": buffer.id, **key, "ts": us(end)})
        if life.dead_ns is not None:
            changes.append((life.dead_ns, buffer.kind, -buffer.nbytes))
    for t_ns, kind, nbytes in sorted(changes):
        alive[kind] += nbytes
        out.append({"ph": "C", "name": "bytes alive", "pid": DEVICE, "ts": us(t_ns), "args": dict(alive)})
    clock = {HOST: {2: 0.0, 3: 0.0}, DEVICE: {2: 0.0}}
    for move in timeline.moves:
        up = move.direction == "H2D"
        facts = {
            "kind": move.kind,
            "nbytes": move.nbytes,
            "source": move.source,
            "host": move.host,
            "device": move.buffer,
        }
        name = f"{'up' if up else 'down'} {move.buffer or move.host}"
        ends = []
        for pid, tid in ((HOST, 2 if up else 3), (DEVICE, 2)):
            # Copies that were only concluded have no duration and may share an instant: one after the other, 1 ns each.
            begin = max(us(move.t_ns), clock[pid][tid])
            length = max(move.dur_ns / 1e3, 0.001)
            clock[pid][tid] = begin + length
            ends.append((pid, tid, begin, length))
            out.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length, "args": facts})
        (host, device_end) = ends
        source, target = (host, device_end) if up else (device_end, host)
        flow = {"cat": "copy", "name": "copy", "id": move.seq}
        out.append({"ph": "s", **flow, "pid": source[0], "tid": source[1], "ts": source[2]})
        out.append({"ph": "f", "bp": "e", **flow, "pid": target[0], "tid": target[1], "ts": target[2] + target[3] / 2})
    return {
        "traceEvents": out,
        "displayTimeUnit": "ms",
        "otherData": {key: value for key, value in ledger.meta.items() if key != "spec"},
    }


def write_trace(ledger: Ledger, path: str | Path) -> Path:
    """Writes `trace` as a file for ui.perfetto.dev or chrome://tracing."""
    target = Path(path)
    with whole_file(target) as file:
        json.dump(trace(ledger), file, ensure_ascii=False, separators=(",", ":"))
    return target


def write_csv(ledger: Ledger, path: str | Path, table: str = "events") -> Path:
    """Writes one table of the ledger (events, steps or buffers) as CSV with a header line."""
    if table not in CSV_TABLES:
        raise UsageError(f"there is no table {table!r} to export", expected=f"one of {', '.join(CSV_TABLES)}")
    names = [row[1] for row in ledger.query(f"PRAGMA table_info({table})")]
    target = Path(path)
    with whole_file(target) as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(ledger.query(f"SELECT {', '.join(names)} FROM {table} ORDER BY rowid"))
    return target


@contextmanager
def whole_file(target: Path) -> Iterator[TextIO]:
    """A file that is there whole or not at all: written beside its place, then renamed."""
    if target.exists() and not target.is_file():
        raise LedgerError(f"{target} is no regular file", expected="a new file, or one to replace")
    scratch: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        scratch = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
        scratch.chmod(0o644)
        scratch.replace(target)
    except (OSError, ValueError) as error:
        raise LedgerError(f"{str(target)!r} cannot be written: {error}", expected="a writable place") from error
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def _spans(events: list[Event], us: Any) -> list[dict[str, Any]]:
    """Stages and steps as nested spans of one track: a step is cut to its stage, a stage to the next one."""
    stages: list[list[Any]] = []
    open_stage: list[Any] | None = None
    steps = []
    for event in events:
        if event.kind == "stage_begin":
            open_stage = [event.t_ns, event.t_ns, event]
            stages.append(open_stage)
        elif open_stage is not None and event.stage == open_stage[2].stage:
            open_stage[1] = max(open_stage[1], event.t_ns + event.dur_ns)
        if event.kind == "step":
            steps.append(event)
    out = []
    for number, (begin, end, event) in enumerate(stages):
        if number + 1 < len(stages):
            end = min(end, stages[number + 1][0])
        stages[number][1] = end
        name = str((event.detail or {}).get("graph", event.stage))
        out.append(_x(name, HOST, 1, us(begin), us(end) - us(begin), _facts(event)))
    last_end = 0.0
    for event in steps:
        begin, end = event.t_ns, event.t_ns + event.dur_ns
        for low, high, _ in stages:
            if low <= begin < high:
                end = min(end, high)
                break
        start = max(us(begin), last_end)  # steps follow one another
        length = max(us(end) - start, 0.0)
        last_end = start + length
        detail = event.detail or {}
        name = f"{detail.get('stage', event.stage)} {detail.get('step', event.step)}".removesuffix(" -1")
        out.append(_x(name, HOST, 1, start, length, _facts(event)))
    return out


def _span(event: Event, us: Any, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _x(name, pid, tid, us(event.t_ns), event.dur_ns / 1e3, _facts(event))


def _x(name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _facts(event: Event) -> dict[str, Any]:
    return {"seq": event.seq, "stage": event.stage, "step": event.step, "source": event.source, **(event.detail or {})}
