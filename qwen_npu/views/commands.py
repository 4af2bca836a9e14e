"""`qwen-npu summary|trace|diff|replay`: what a recorded ledger holds, on a terminal or as JSON. Needs no device."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_npu import views
from qwen_npu.errors import UsageError
from qwen_npu.views.theme import bytes_text

EXIT_FINE, EXIT_VERDICT = 0, 1
VIEWS = tuple(name for name in views.LEDGER_FIGURES if not name.startswith("compare"))


def add_commands(subparsers: Any) -> None:
    """Adds the commands of this room to the command line's parser."""
    summary = subparsers.add_parser("summary", help="what a recorded ledger holds; exit 1 if its books do not balance")
    summary.add_argument("ledger", type=Path)
    summary.add_argument("--view", choices=VIEWS, help="the rows of one figure instead")
    summary.add_argument("--html", type=Path, metavar="FILE", help="with --view: write the figure as an offline page")
    summary.add_argument("--at", type=int, metavar="TICK", help="the state at the end of a tick instead")
    summary.add_argument("--json", action="store_true")
    summary.set_defaults(run=_summary)

    trace = subparsers.add_parser("trace", help="write a ledger as a trace that Perfetto opens, or as CSV")
    trace.add_argument("ledger", type=Path)
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: beside the ledger, .trace.json or .TABLE.csv")
    trace.add_argument("--csv", metavar="TABLE", help="write this table (events, steps, buffers) instead")
    trace.add_argument("--json", action="store_true", help="print the path as JSON")
    trace.set_defaults(run=_trace)

    diff = subparsers.add_parser("diff", help="two recordings side by side; exit 1 if they are not equal")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    diff.add_argument("--json", action="store_true")
    diff.set_defaults(run=_diff)

    replay = subparsers.add_parser("replay", help="tell a recording again, with no device")
    replay.add_argument("ledger", type=Path)
    replay.add_argument("--speed", type=float, default=0.0, metavar="X", help="1: as it went; 0 (default): at once")
    replay.add_argument("--json", action="store_true")
    replay.set_defaults(run=_replay)


def _summary(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.export import whole_file
    from qwen_npu.ledger.store import open_ledger
    from qwen_npu.ledger.summary import at, summary

    ledger = open_ledger(options.ledger)
    if options.html and not options.view:
        raise UsageError("--html without --view", expected=f"--view with one of {', '.join(VIEWS)}")
    if options.view:
        if options.html:
            _not_itself(options.html, options.ledger)
            with whole_file(options.html) as page:
                page.write(getattr(views, options.view)(ledger).to_html(include_plotlyjs=True))
        rows = getattr(views, f"{options.view}_table")(ledger)
        print(_json(rows) if options.json else _table(rows))
        return EXIT_FINE
    if options.at is not None:
        state = at(ledger, tick=options.at)
        print(_json(state) if options.json else _instant(state))
        return EXIT_FINE
    facts = summary(ledger)
    print(_json(facts) if options.json else _page(facts))
    return EXIT_FINE if all(check["ok"] for check in facts["checks"]) else EXIT_VERDICT


def _not_itself(out: Path, ledger: Path) -> None:
    if out.exists() and out.samefile(ledger):
        raise UsageError(f"{out} is the ledger itself", expected="another file to write to")


def _trace(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.export import write_csv, write_trace
    from qwen_npu.ledger.store import open_ledger

    ledger = open_ledger(options.ledger)
    if options.out:
        _not_itself(options.out, options.ledger)
    if options.csv:
        path = write_csv(ledger, options.out or options.ledger.with_suffix(f".{options.csv}.csv"), options.csv)
    else:
        path = write_trace(ledger, options.out or options.ledger.with_suffix(".trace.json"))
    print(_json({"path": str(path)}) if options.json else path)
    return EXIT_FINE


def _diff(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.diff import diff
    from qwen_npu.ledger.store import open_ledger

    facts = diff(open_ledger(options.before), open_ledger(options.after))
    print(_json(facts) if options.json else _differences(facts))
    return EXIT_FINE if facts["equal"] else EXIT_VERDICT


def _replay(options: argparse.Namespace) -> int:
    from qwen_npu.ledger.store import open_ledger
    from qwen_npu.ledger.summary import replay

    if options.speed < 0 or not math.isfinite(options.speed):
        raise UsageError(f"--speed {options.speed}", expected="a number >= 0")
    facts = replay(open_ledger(options.ledger))
    if options.json:
        print(_json(facts))
        return EXIT_FINE
    now = 0.0
    for step in facts["steps"]:
        if options.speed:
            time.sleep(max(0.0, (step["at_ms"] - now) / 1e3 / options.speed))
            now = step["at_ms"]
        print(step["text"], end="", flush=True)
    print(f"\n\n{len(facts['tokens'])} tokens in {len(facts['steps'])} stages and steps")
    return EXIT_FINE


def _json(facts: Any) -> str:
    """One line; a number that is not finite becomes its name, since JSON has none."""
    return json.dumps(_finite(facts), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _page(facts: dict[str, Any]) -> str:
    meta = facts["meta"]
    told = ("bundle", "driver", "device", "state", "kv", "numerics")
    lines = ["  ".join(f"{key} {meta[key]}" for key in told if key in meta)]
    lines += [
        f"{facts['runs']} generations; " + ", ".join(f"{count} {stage}" for stage, count in facts["steps"].items())
    ]
    if facts["text"]:
        lines += ["", facts["text"], ""]
    lines += [f"{'stage':<10}{'count':>7}{'predict ms':>12}{'wall ms':>10}{'total ms':>11}   (medians)"]
    lines += [
        f"{stage:<10}{row['count']:>7}{row['predict_ms']:>12.3f}{row['wall_ms']:>10.3f}{row['wall_total_ms']:>11.1f}"
        for stage, row in facts["timings"].items()
    ]
    lines += ["", f"{'bytes':<8}{'kind':<12}{'a step (median)':>18}{'between steps':>16}"]
    for direction in ("H2D", "D2H"):
        a_step, between = facts["traffic"]["a_step"][direction], facts["traffic"]["between_steps"][direction]
        lines += [
            f"{direction:<8}{kind:<12}{bytes_text(a_step.get(kind, {}).get('median', 0)):>18}"
            f"{bytes_text(between.get(kind, 0)):>16}"
            for kind in sorted({*a_step, *between})
        ]
    lines += ["", f"{'buffer':<16}{'kind':<11}{'device':<10}{'bytes':>10}{'times':>7}  {'half':<8}allocated at"]
    lines += [
        f"{row['id']:<16}{row['kind']:<11}{row['device']:<10}{bytes_text(row['nbytes']):>10}{row['allocations']:>7}"
        f"  {row['half']:<8}{row['site']}"
        for row in facts["buffers"]
    ]
    lines.append("")
    lines += [f"peak {bytes_text(peak['nbytes'])} at {peak['at']} ({peak['source']})" for peak in facts["peak"]]
    lines += [
        f"hazard at {hazard['at']}: {hazard.get('problem', hazard.get('hazard', ''))}" for hazard in facts["hazards"]
    ]
    if facts["nonfinite"]:
        lines.append(f"NOT FINITE first: {facts['nonfinite']}")
    lines += [f"{'✓' if check['ok'] else '✗'} {check['name']}: {check['detail']}" for check in facts["checks"]]
    if meta.get("driver") == "emulator":
        lines.append("Emulated device: bytes and counts are exact; times are this CPU's.")
    return "\n".join(lines)


def _instant(state: dict[str, Any]) -> str:
    lines = [f"after {state['at']} (tick {state['tick']}, generation {state['run'] + 1}): {state['text']!r}"]
    lines += [f"{kind}: {id_} is live" for kind, id_ in state["live"].items()]
    lines.append(f"{bytes_text(state['bytes_alive'])} alive on the device")
    lines.append(
        _table(
            [{key: row[key] for key in ("id", "device", "nbytes", "generation", "role")} for row in state["buffers"]]
        )
    )
    lines += [f"{pool}: {facts['counts']}" for pool, facts in state["pools"].items()]
    return "\n".join(lines)


def _differences(facts: dict[str, Any]) -> str:
    if facts["equal"]:
        peeked = f"{facts['peeked']} peeks" if facts["peeked"] else "no peeks were recorded: states were not compared"
        return f"equal: tokens, buffers and bytes; {peeked}"
    lines = [f"{key}: {pair['before']} -> {pair['after']}" for key, pair in facts["meta"].items()]
    token, peek = facts["first_token"], facts["first_peek"]
    lines.append(
        f"tokens part at {token['stage']} {token['step']}: {token['before']} -> {token['after']}"
        if token
        else "tokens are equal"
    )
    if peek:
        place = ", ".join(f"{name} {peek[name]}" for name in ("layer", "head") if name in peek)
        lines.append(f"states part at step {peek['step']}: {peek['name']} {place}: {peek['before']} -> {peek['after']}")
    for what in ("buffers", "peeks"):
        for side, names in (("only before", "only_before"), ("only after", "only_after")):
            if facts[what][names]:
                lines.append(f"{what} {side}: {', '.join(facts[what][names])}")
        lines += [f"{what} changed: {name}: {change}" for name, change in facts[what]["changed"].items()]
    lines += [
        f"{direction}: {bytes_text(pair['before'])} -> {bytes_text(pair['after'])} in all"
        for direction, pair in facts["traffic"].items()
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        print("no rows: this ledger does not hold what the view shows", file=sys.stderr)
        return ""
    columns = list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *cells]
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
