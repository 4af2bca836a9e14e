"""The accepted values of an item's records, as text that a review can read, and the comparison with a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_npu.errors import UsageError
from qwen_npu.nightly.files import read_json, write_json
from qwen_npu.nightly.verdict import ItemResult
from qwen_npu.records import DONE, KINDS

SCHEMA = 1


@dataclass(frozen=True)
class Baseline:
    """What was accepted, when, at which commit and why. `records` by name: value, unit, kind, tol."""

    item: str
    accepted: str
    commit: str
    reason: str
    records: dict[str, dict[str, Any]]


def baseline_path(folder: Path, item: str) -> Path:
    return folder / f"{item}.json"


def read_baseline(folder: Path, item: str) -> Baseline | None:
    """The baseline of an item, or None where none was accepted.

    Raises:
        UsageError: the file is damaged or of another schema; comparing with nothing would hide a regression.
    """
    path = baseline_path(folder, item)
    if not path.exists():
        return None
    facts = read_json(path)
    records = facts.get("records") if facts is not None and facts.get("schema") == SCHEMA else None
    if facts is None or not isinstance(records, dict) or not all(map(_is_record, records.values())):
        raise UsageError(
            f"the baseline {path} cannot be used",
            expected=f"JSON of schema {SCHEMA}: records with value, kind and tol",
            fix="restore it from git",
        )
    return Baseline(
        item=item,
        accepted=str(facts.get("accepted", "")),
        commit=str(facts.get("commit", "")),
        reason=str(facts.get("reason", "")),
        records=records,
    )


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or "value" not in record:
        return False
    kind = record.get("kind", "exact")
    if kind not in KINDS:
        return False
    numbers = [record.get("tol", 0.0), *([record["value"]] if kind != "exact" else [])]
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)


def accept(folder: Path, results: Sequence[ItemResult], reason: str) -> list[Path]:
    """Writes the records of `results` as the new baselines of their items: of all of them, or of none. Records of kind
    info are left out: timings are trend, never equality.

    Raises:
        UsageError: no reason, or a run whose records are not whole.
    """
    accepted = {baseline_path(folder, result.item): _accepted(result, reason) for result in results}
    folder.mkdir(parents=True, exist_ok=True)
    for path, facts in accepted.items():
        write_json(path, facts)
    return list(accepted)


def _accepted(result: ItemResult, reason: str) -> dict[str, Any]:
    if not reason.strip():
        raise UsageError("a baseline needs a reason", expected="--reason 'why the new values are right'")
    names = [record["name"] for record in result.records]
    if DONE not in names:
        raise UsageError(
            f"the run of {result.item} did not reach its end ({result.verdict.value}: {result.reason})",
            expected="a run whose records are whole",
            fix="repair it and run it again",
        )
    records = {
        record["name"]: {
            key: record[key] for key in ("value", "unit", "kind", "tol") if record.get(key) not in ("", None)
        }
        for record in sorted(result.records, key=lambda record: str(record["name"]))
        if record["name"] != DONE and record["kind"] != "info"
    }
    return {
        "schema": SCHEMA,
        "item": result.item,
        "accepted": result.started[:10],
        "commit": result.environment.get("commit", ""),
        "reason": reason.strip(),
        "records": records,
    }


def compare(records: Sequence[Mapping[str, Any]], baseline: Baseline | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Each record beside its baseline: rows of name, value, unit, kind, baseline, state, text; and notes.

    The state is "same" (equal, or within the tolerance of the baseline), "changed", "new" (not in the baseline),
    "missing" (only in the baseline) or "info".
    """
    rows: list[dict[str, Any]] = []
    known = dict(baseline.records) if baseline is not None else {}
    for record in records:
        name = record["name"]
        if name == DONE:
            continue
        accepted = known.pop(name, None)
        row = {
            "name": name,
            "value": record.get("value"),
            "unit": record.get("unit", ""),
            "kind": record.get("kind", "exact"),
            "baseline": accepted["value"] if accepted else None,
        }
        if row["kind"] == "info":
            row |= {"state": "info", "text": ""}
        elif accepted is None:
            row |= {"state": "new", "text": "not in the baseline"}
        else:
            difference = _difference(row, accepted)
            row |= {"state": "changed" if difference else "same", "text": difference}
        rows.append(row)
    for name, accepted in known.items():
        rows.append(
            {
                "name": name,
                "value": None,
                "unit": accepted.get("unit", ""),
                "kind": accepted.get("kind", "exact"),
                "baseline": accepted.get("value"),
                "state": "missing",
                "text": "in the baseline only",
            }
        )
    notes = []
    fresh = [row["name"] for row in rows if row["state"] == "new"]
    if baseline is None and rows:
        notes.append("no baseline yet: `qwen-npu nightly accept` makes one")
    elif fresh:
        notes.append(f"not in the baseline yet: {', '.join(fresh)}")
    return rows, notes


def _difference(row: Mapping[str, Any], accepted: Mapping[str, Any]) -> str:
    """What is wrong with a value, or "". The kind and tolerance are the baseline's: those were reviewed."""
    value, wanted, kind = row["value"], accepted["value"], accepted.get("kind", "exact")
    unit = f" {row['unit']}" if row["unit"] else ""
    if row["kind"] != kind:
        return f"its kind is {row['kind']}, the baseline's is {kind}"
    if kind == "exact":
        return "" if _equal(value, wanted) else f"{short(value)}{unit}, baseline {short(wanted)}{unit}"
    tolerance = float(accepted.get("tol", 0.0))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{short(value)} is not a number, baseline {short(wanted)}"
    error = abs(value - wanted)
    limit = tolerance * abs(wanted) if kind == "relative" else tolerance
    if error <= limit:
        return ""
    return f"{short(value)}{unit}, baseline {short(wanted)}{unit}, off by {error:.3g}, allowed {limit:.3g}"


def _equal(a: Any, b: Any) -> bool:
    """Equal as JSON: True is not 1, but 1.0 is 1 (a writer may drop the point)."""
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def short(value: Any, limit: int = 60) -> str:
    """A value for a line of text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
