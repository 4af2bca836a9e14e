"""From what was seen to a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from qwen_npu.nightly.baseline import Baseline
from qwen_npu.nightly.judge import Seen, judge, status_text
from qwen_npu.nightly.verdict import Verdict
from qwen_npu.records import DONE


def line(name: str, value: Any = True, kind: str = "exact") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "", "kind": kind}


def seen(account: dict[str, Any] | None, *records: dict[str, Any], **changes: Any) -> Seen:
    facts: dict[str, Any] = {
        "account": account,
        "records": records,
        "worker_status": 0,
        "ended_by": "",
        "budget_s": 9.0,
        "last_cell": 4,
        "last_source": "work()",
    }
    return Seen(**{**facts, **changes})


RAN = {"kind": "ran"}
END = line(DONE)


@pytest.mark.parametrize(
    ("what", "verdict", "words"),
    [
        (seen(RAN, line("a"), END), Verdict.PASS, "1 records"),
        (seen(RAN, END, line("a")), Verdict.PASS, "1 records"),
        (seen(RAN, line("a")), Verdict.INCOMPLETE, "records.done() was never called"),
        (seen(RAN, line("a"), stopped_by="SystemExit(0)"), Verdict.INCOMPLETE, "SystemExit(0)"),
        (seen(RAN, END), Verdict.INCOMPLETE, "record missing: a"),
        (seen(RAN, line("a"), line("a"), END), Verdict.FAIL, "more than once: a"),
        (seen({"kind": "raised", "ename": "AssertionError", "evalue": "no"}), Verdict.FAIL, "no in cell 4 (`work()`)"),
        (seen({"kind": "raised", "ename": "ValueError", "evalue": "x\ny"}), Verdict.ERROR, "ValueError: x y in"),
        (
            seen({"kind": "raised", "ename": "OSError", "evalue": "[Errno 28] No space left on device"}),
            Verdict.INFRA,
            "cannot be written",
        ),
        (seen({"kind": "dead", "status": -11}), Verdict.DEAD_KERNEL, "ended by SIGSEGV in cell 4"),
        (seen({"kind": "dead", "status": 0}), Verdict.DEAD_KERNEL, "ended with status 0"),
        (seen({"kind": "no_kernel", "evalue": "none"}), Verdict.INFRA, "did not start: none"),
        (seen({"kind": "disk", "evalue": "full"}), Verdict.INFRA, "full"),
        (seen({"kind": "broken", "ename": "E", "evalue": "v"}), Verdict.INFRA, "E: v"),
        (seen({"kind": "flooded", "evalue": "too much"}), Verdict.ERROR, "too much"),
        (seen(None, worker_status=-9), Verdict.INFRA, "ended by SIGKILL without an account"),
        (seen(None, worker_status=3), Verdict.INFRA, "is the disk full?"),
        (seen(None, last_cell=None), Verdict.INFRA, "before the first cell"),
        # what the runner did counts more than what the worker wrote on its way out
        (seen(RAN, line("a"), END, ended_by="budget"), Verdict.TIMEOUT, "budget of 9 s"),
        (seen(None, ended_by="budget", where="line 3 in f"), Verdict.TIMEOUT, "at line 3 in f"),
        (seen(None, ended_by="flood"), Verdict.ERROR, "native log"),
        (seen(None, ended_by="silence"), Verdict.INFRA, "no sign of life"),
    ],
)
def test_verdicts(what: Seen, verdict: Verdict, words: str) -> None:
    judgement = judge(what, ["a"], None)
    assert judgement.verdict is verdict
    assert words in judgement.reason
    assert "\n" not in judgement.reason


def test_baseline_turns_pass_into_fail() -> None:
    accepted = Baseline("t", "", "", "", {"a": {"value": 1, "kind": "exact"}, "b": {"value": 2, "kind": "exact"}})
    good = judge(seen(RAN, line("a", 1), line("b", 2), END), [], accepted)
    assert good.verdict is Verdict.PASS
    bad = judge(seen(RAN, line("a", 3), line("b", 4), END), [], accepted)
    assert bad.verdict is Verdict.FAIL
    assert bad.reason == "a: 3, baseline 1 (and 1 more)"
    gone = judge(seen(RAN, line("a", 1), END), [], accepted)
    assert gone.verdict is Verdict.INCOMPLETE
    assert gone.reason == "record missing: b"


def test_only_pass_and_skipped_are_fine() -> None:
    assert [verdict for verdict in Verdict if verdict.fine] == [Verdict.PASS, Verdict.SKIPPED]


def test_status_text() -> None:
    assert status_text(-9) == "was ended by SIGKILL"
    assert status_text(-99) == "was ended by signal 99"
    assert status_text(3) == "ended with status 3"
    assert status_text(None) == "ended"
