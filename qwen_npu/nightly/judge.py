"""From what was seen of an item (the worker's account, the records, the runner's own measures) to its verdict."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_npu.nightly.baseline import Baseline, compare
from qwen_npu.nightly.verdict import Verdict
from qwen_npu.nightly.worker import UNWRITTEN_STATUS
from qwen_npu.records import DONE

REASON_CHARACTERS = 300
"""Longest reason: it is one line of a table; the page of the item has all of it."""


@dataclass(frozen=True)
class Seen:
    """All that the verdict rests on.

    Args:
        account: what the worker left, or None when it left nothing.
        records: the record lines, the sentinel among them.
        worker_status: exit status of the worker, negative for a signal.
        ended_by: "" or why the runner ended the item: "budget", "flood", "silence".
        last_cell: index of the cell that began last; `last_source` its first line.
    """

    account: Mapping[str, Any] | None
    records: Sequence[Mapping[str, Any]]
    worker_status: int | None
    ended_by: str
    budget_s: float
    last_cell: int | None
    last_source: str
    stopped_by: str = ""
    where: str = ""


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str
    comparison: list[dict[str, Any]]
    notes: list[str]


def judge(seen: Seen, expected: Sequence[str], baseline: Baseline | None) -> Judgement:
    """The verdict, its reason in one line, and each record beside its baseline."""
    comparison, notes = compare(seen.records, baseline)
    verdict, reason = _verdict(seen, expected, comparison)
    line = " ".join(reason.split())
    return Judgement(
        verdict, line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 1] + "…", comparison, notes
    )


def _verdict(seen: Seen, expected: Sequence[str], comparison: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    account = seen.account or {}
    kind = account.get("kind")
    evalue = str(account.get("evalue", ""))
    if seen.ended_by == "budget":
        return (
            Verdict.TIMEOUT,
            f"budget of {seen.budget_s:g} s used up {_place(seen)}{seen.where and ', at ' + seen.where}",
        )
    if seen.ended_by == "flood" or kind == "flooded":
        return Verdict.ERROR, f"flood of output {_place(seen)}: {evalue or 'the native log grew beyond its limit'}"
    if seen.ended_by == "silence":
        return Verdict.INFRA, f"the worker showed no sign of life {_place(seen)}"
    if seen.account is None and seen.worker_status == UNWRITTEN_STATUS:
        return Verdict.INFRA, f"the output cannot be written {_place(seen)}: is the disk full?"
    if seen.account is None:
        return Verdict.INFRA, f"the worker {status_text(seen.worker_status)} without an account {_place(seen)}"
    if kind == "no_kernel":
        return Verdict.INFRA, f"the kernel did not start: {evalue}"
    if kind == "disk":
        return Verdict.INFRA, f"the output cannot be written: {evalue}"
    if kind == "broken":
        return Verdict.INFRA, f"papermill failed {_place(seen)}: {account.get('ename')}: {evalue}"
    if kind == "dead":
        return Verdict.DEAD_KERNEL, f"the kernel {status_text(account.get('status'))} {_place(seen)}"
    if kind == "raised":
        return _raised(str(account.get("ename", "")), evalue, seen)
    return _ran(seen, expected, comparison)


def _raised(ename: str, evalue: str, seen: Seen) -> tuple[Verdict, str]:
    text = f"{ename}: {evalue}" if evalue else ename
    if "No space left on device" in evalue or "Disk quota exceeded" in evalue:
        return Verdict.INFRA, f"the output cannot be written {_place(seen)}: {text}"
    verdict = Verdict.FAIL if ename == "AssertionError" else Verdict.ERROR
    return verdict, f"{text} {_place(seen)}"


def _ran(seen: Seen, expected: Sequence[str], comparison: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    names = Counter(str(record.get("name")) for record in seen.records)
    twice = sorted(name for name, times in names.items() if times > 1 and name != DONE)
    wrong = [row for row in comparison if row["state"] == "changed"]
    missing = sorted(
        {*(name for name in expected if name not in names), *(r["name"] for r in comparison if r["state"] == "missing")}
    )
    if wrong:
        first = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Verdict.FAIL, f"{first['name']}: {first['text']}{more}"
    if DONE not in names:
        stopped = f"; {seen.stopped_by}" if seen.stopped_by else "; records.done() was never called"
        return Verdict.INCOMPLETE, f"the end was not reached: stopped {_place(seen)}{stopped}"
    if missing:
        return Verdict.INCOMPLETE, f"record{'s' if len(missing) > 1 else ''} missing: {', '.join(missing)}"
    if twice:
        return Verdict.FAIL, f"claimed more than once: {', '.join(twice)}"
    states = Counter(row["state"] for row in comparison)
    told = {"same": "as in the baseline", "new": "without a baseline", "info": "for information"}
    parts = [f"{states[state]} {words}" for state, words in told.items() if states[state]]
    return Verdict.PASS, f"{len(names) - 1} records: {', '.join(parts)}" if parts else "reached its end"


def _place(seen: Seen) -> str:
    if seen.last_cell is None:
        return "before the first cell"
    return f"in cell {seen.last_cell}" + (f" (`{seen.last_source}`)" if seen.last_source else "")


def status_text(status: int | None) -> str:
    """An exit status in words: "was ended by SIGKILL", "ended with status 1"."""
    if status is None:
        return "ended"
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"ended with status {status}"
