"""Two runs, or two instants of one run, side by side: only before, only after, changed, and where they first part."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from qwen_npu.errors import UsageError
from qwen_npu.ledger import summary
from qwen_npu.ledger.store import Ledger, Peek
from qwen_npu.ledger.timeline import Timeline

_COMPARED = ("name", "kind", "device", "dtype", "shape", "nbytes")
_AXES = ("layer", "head")


def diff(before: Ledger, after: Ledger) -> dict[str, Any]:
    """Compares two recordings.

    Returns:
        `equal` (tokens, peeks, buffers and bytes; times never count), `meta` that differs, `buffers` and `peeks` as
        only_before, only_after and changed, `peeked` (how many peeks both hold), `first_token` and `first_peek` where
        the runs part, `traffic` totals that differ, `timings` side by side.
    """
    lines = [Timeline.of(before), Timeline.of(after)]
    held = [{entry["id"]: entry for entry in summary.buffers(timeline)} for timeline in lines]
    buffers = _sets(held[0], held[1], _COMPARED)
    tokens = _first_token(before, after)
    peeks, first_peek, compared = _peeks(before, after)
    sums = [summary.traffic(timeline) for timeline in lines]
    traffic = {
        direction: {"before": sums[0]["total"][direction], "after": sums[1]["total"][direction]}
        for direction in ("H2D", "D2H")
        if sums[0]["total"][direction] != sums[1]["total"][direction]
    }
    parted = (tokens, first_peek, traffic, *peeks.values(), *buffers.values())
    return {
        "equal": not any(parted),
        "meta": _meta(before, after),
        "first_token": tokens,
        "first_peek": first_peek,
        "peeked": compared,
        "peeks": peeks,
        "buffers": buffers,
        "traffic": traffic,
        "a_step": {"before": sums[0]["a_step"], "after": sums[1]["a_step"]},
        "timings": {"before": summary.timings(before), "after": summary.timings(after)},
    }


def diff_instants(ledger: Ledger, before: int, after: int) -> dict[str, Any]:
    """Compares the ends of two ticks of one recording: buffers that came, went or changed hands, halves that turned."""
    if before > after:
        raise UsageError(f"tick {before} lies behind tick {after}", expected="the earlier tick first")
    one, other = summary.at(ledger, tick=before), summary.at(ledger, tick=after)
    held = [{f"{entry['id']}#{entry['generation']}": entry for entry in state["buffers"]} for state in (one, other)]
    return {
        "before": one["at"],
        "after": other["at"],
        "buffers": _sets(held[0], held[1], ("role",)),
        "live": {
            kind: {"before": one["live"].get(kind), "after": other["live"].get(kind)}
            for kind in sorted({*one["live"], *other["live"]})
            if one["live"].get(kind) != other["live"].get(kind)
        },
        "bytes_alive": {"before": one["bytes_alive"], "after": other["bytes_alive"]},
        "text": other["text"][len(one["text"]) :] if one["run"] == other["run"] else other["text"],
    }


def _sets(before: dict[str, Any], after: dict[str, Any], compared: tuple[str, ...]) -> dict[str, Any]:
    changed = {}
    for key in before.keys() & after.keys():
        fields = {
            name: {"before": before[key][name], "after": after[key][name]}
            for name in compared
            if before[key][name] != after[key][name]
        }
        if fields:
            changed[key] = fields
    return {
        "only_before": sorted(before.keys() - after.keys()),
        "only_after": sorted(after.keys() - before.keys()),
        "changed": dict(sorted(changed.items())),
    }


def _meta(before: Ledger, after: Ledger) -> dict[str, Any]:
    one, other = before.meta, after.meta
    return {
        key: {"before": one.get(key), "after": other.get(key)}
        for key in sorted({*one, *other} - {"started", "started_ns"})
        if one.get(key) != other.get(key)
    }


def _first_token(before: Ledger, after: Ledger) -> dict[str, Any] | None:
    """The first token that differs, or is in one run only; None where all are equal."""
    runs = [[step for step in ledger.steps() if step.token is not None or step.tokens] for ledger in (before, after)]
    for number in range(max(len(run) for run in runs)):
        pair = [run[number] if number < len(run) else None for run in runs]
        told = [None if step is None else step.tokens or step.token for step in pair]
        if told[0] != told[1]:
            step = pair[0] or pair[1]
            assert step is not None
            return {"number": number, "stage": step.stage, "step": step.step, "before": told[0], "after": told[1]}
    return None


def _peeks(before: Ledger, after: Ledger) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    one, other = _by_place(before), _by_place(after)
    changed: dict[str, dict[str, Any]] = {}
    first: dict[str, Any] | None = None
    both = one.keys() & other.keys()
    for place in sorted(both):
        run, step, name = place
        a, b = one[place].array, other[place].array
        found = _difference(a, b)
        if found is None:
            continue
        entry = changed.setdefault(name, {"max_abs": 0.0, "steps": 0, "first_step": step, "run": run})
        entry["steps"] += 1
        gaps = entry["max_abs"], found["max_abs"]
        # None: a shape that changed, or NaN against a number, is further than any distance.
        entry["max_abs"] = None if None in gaps else max(gaps)
        if first is None:
            first = {"name": name, "run": run, "step": step, **found}
    lonely = {
        "only_before": _lonely(one.keys(), other.keys()),
        "only_after": _lonely(other.keys(), one.keys()),
    }
    return {**lonely, "changed": changed}, first, len(both)


def _lonely(mine: Collection[tuple[int, int, str]], theirs: Collection[tuple[int, int, str]]) -> list[str]:
    """Peeks that the other run lacks: by name where it has none of that name, else by place."""
    known, others = {key[2] for key in theirs}, set(theirs)
    return sorted(
        {
            f"{name} of run {run}, step {step}" if name in known else name
            for run, step, name in mine
            if (run, step, name) not in others
        }
    )


def _by_place(ledger: Ledger) -> dict[tuple[int, int, str], Peek]:
    timeline = Timeline.of(ledger)
    return {(timeline.ticks[timeline.tick_at(peek.seq)].run, peek.step, peek.name): peek for peek in ledger.peeks()}


def _difference(a: np.ndarray, b: np.ndarray) -> dict[str, Any] | None:
    """None if equal (NaN equals NaN), else max_abs (None where there is no distance) and the first place."""
    if a.shape != b.shape:
        return {"max_abs": None, "before": list(a.shape), "after": list(b.shape), "index": None}
    wide = np.float64 if a.dtype.kind in "fiub" else a.dtype
    one, other = a.astype(wide), b.astype(wide)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return None
    index = [int(i) for i in np.argwhere(~same)[0]]
    gaps = np.abs(one[~same] - other[~same])
    finite = bool(np.isfinite(gaps).all())
    at = tuple(index)
    return {
        "max_abs": float(gaps.max()) if finite else None,
        "index": index,
        **dict(zip(_AXES, index, strict=False)),
        "before": float(one[at]) if np.isfinite(one[at]) else str(one[at]),
        "after": float(other[at]) if np.isfinite(other[at]) else str(other[at]),
    }
