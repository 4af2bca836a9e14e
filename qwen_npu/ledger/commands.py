"""`qwen-npu summary|trace|diff|replay`: what a recorded ledger says, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def add_commands(subparsers: Any) -> None:
    """Adds the commands of this room to the command line's parser."""
    summary = subparsers.add_parser("summary", help="what a ledger holds: traffic, residency, peak, checks")
    summary.add_argument("ledger", type=Path)
    summary.add_argument("--json", action="store_true")
    summary.set_defaults(run=_summary)

    trace = subparsers.add_parser("trace", help="write a ledger as a trace that Perfetto opens, or as CSV")
    trace.add_argument("ledger", type=Path)
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: beside the ledger, .trace.json or .TABLE.csv")
    trace.add_argument("--csv", metavar="TABLE", help="write this table (events, steps, buffers) instead")
    trace.add_argument("--json", action="store_true", help="print the path as JSON")
    trace.set_defaults(run=_trace)

    diff = subparsers.add_parser("diff", help="compare two ledgers; exit code 1 where tokens, states or bytes differ")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    diff.add_argument("--json", action="store_true")
    diff.set_defaults(run=_diff)

    replay = subparsers.add_parser("replay", help="tell a recorded generation again, with no device")
    replay.add_argument("ledger", type=Path)
    replay.add_argument("--speed", type=float, default=0.0, metavar="X", help="X times as fast as recorded; 0: at once")
    replay.add_argument("--json", action="store_true")
    replay.set_defaults(run=_replay)


def _summary(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.store import open_ledger
    from qwen_npu.ledger.summary import summary

    with open_ledger(options.ledger) as ledger:
        facts = summary(ledger)
    if options.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    print(facts["text"])
    print()
    for name in ("driver", "device", "state", "kv", "numerics", "bundle"):
        print(f"{name:<10}{facts['meta'].get(name, '-')}")
    print("steps     ", ", ".join(f"{count} {stage}" for stage, count in facts["steps"].items()) or "-")
    for direction, moved in facts["traffic"]["total"].items():
        print(f"{direction:<10}{_bytes(moved)}")
    for peak in facts["peak"]:
        print("peak      ", ", ".join(f"{key} {_plain(value)}" for key, value in peak.items()))
    print("live      ", ", ".join(facts["live"].values()) or "-")
    for hazard in facts["hazards"]:
        print(f"hazard     {hazard}")
    if facts["nonfinite"]:
        print(f"not finite {facts['nonfinite']}")
    for check in facts["checks"]:
        print(f"{'ok' if check['ok'] else 'WRONG':<10}{check['name']}: {check['detail']}")
    return 0 if all(check["ok"] for check in facts["checks"]) else 1


def _trace(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.export import write_csv, write_trace
    from qwen_npu.ledger.store import open_ledger

    with open_ledger(options.ledger) as ledger:
        if options.csv:
            path = write_csv(ledger, options.out or options.ledger.with_suffix(f".{options.csv}.csv"), options.csv)
        else:
            path = write_trace(ledger, options.out or options.ledger.with_suffix(".trace.json"))
    print(json.dumps({"path": str(path)}) if options.json else path)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.diff import diff
    from qwen_npu.ledger.store import open_ledger

    with open_ledger(options.before) as before, open_ledger(options.after) as after:
        found = diff(before, after)
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("equal: tokens, peeks, buffers and bytes" if found["equal"] else "not equal")
        for key, value in found.items():
            if key not in ("equal", "timings") and value:
                print(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    return 0 if found["equal"] else 1


def _replay(options: argparse.Namespace) -> int:
    from qwen_npu.errors import UsageError
    from qwen_npu.ledger.store import open_ledger
    from qwen_npu.ledger.summary import replay

    if options.speed < 0:
        raise UsageError(f"--speed is {options.speed}", expected="0 or more")
    with open_ledger(options.ledger) as ledger:
        told = replay(ledger)
    if options.json:
        print(json.dumps(told, ensure_ascii=False))
        return 0
    last_ms = 0.0
    for step in told["steps"]:
        if options.speed:
            time.sleep(max(0.0, step["at_ms"] - last_ms) / 1000 / options.speed)
            last_ms = step["at_ms"]
        print(step["text"], end="", flush=True)
    print()
    return 0


def _bytes(value: Any) -> str:
    return f"{value:,} bytes" if isinstance(value, int) else str(value)


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
