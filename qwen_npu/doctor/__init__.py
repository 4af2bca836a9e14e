"""`qwen-npu doctor`: what this machine lacks, and with `--probe-device` what its device does other than expected."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_npu.errors import UsageError

if TYPE_CHECKING:
    from qwen_npu.doctor.checks import Line
    from qwen_npu.doctor.probe import Answer

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_VERDICTS = {"agrees": "agrees ", "differs": "DIFFERS", "not run": "not run"}


def add_commands(subparsers: Any) -> None:
    """Adds `doctor` to the command line's parser."""
    parser = subparsers.add_parser("doctor", help="what this machine lacks, with the fix of each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--probe-device", action="store_true", help="ask the device what the emulator only has from reading"
    )
    parser.add_argument("--driver", choices=("auto", "emulator", "mindspore_lite"), help="to probe (default: auto)")
    parser.add_argument("--device", metavar="ascend:N", help="to probe (default: ascend:0)")
    parser.add_argument("--converter", type=Path, metavar="FILE", help="for the probe's graphs: converter_lite")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the probe's report (default: ./probe-<driver>.json)")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from qwen_npu.doctor.checks import examine
    from qwen_npu.doctor.machine import Machine

    if not options.probe_device:
        for name in ("driver", "device", "converter", "out"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} without --probe-device", expected="both: it says what is probed, and how")
    lines = examine(Machine())
    failed = any(line.status == "fail" for line in lines)
    if not options.probe_device:
        print(json.dumps([asdict(line) for line in lines]) if options.json else render(lines))
        return 1 if failed else 0
    return _probe(options, lines)


def _probe(options: argparse.Namespace, lines: Sequence[Line]) -> int:
    from qwen_npu.convert import command_line, find_converter
    from qwen_npu.doctor.probe import probe, report
    from qwen_npu.driver import choose_driver

    driver, why = choose_driver(options.driver or "auto")
    device = options.device or "ascend:0"
    converter = None
    if driver != "emulator":
        converter = command_line(find_converter(options.converter), ascend=True)
    if not options.json:
        print(f"{driver} on {device}: {why}\n")
    answers = probe(
        driver,
        device,
        converter=converter,
        progress=(lambda _: None) if options.json else (lambda answer: print(line_of(answer), flush=True)),
    )
    place = report(answers, driver, device, lines, options.out or Path(f"probe-{driver}.json"))
    counts = {verdict: sum(answer.verdict == verdict for answer in answers) for verdict in _VERDICTS}
    if options.json:
        print(json.dumps({"report": str(place), **counts, "answers": [asdict(answer) for answer in answers]}))
    else:
        print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        print(f"Attach {place} to a report.", file=sys.stderr)
    return 1 if counts["differs"] else 0


def line_of(answer: Answer) -> str:
    """One experiment as a line of text."""
    text = f"{_VERDICTS[answer.verdict]}  {answer.name:<18}{answer.question} {answer.found}"
    if answer.verdict == "differs":
        text += f"\n         {'':<18}predicted: {answer.predicted} (from: {answer.source})"
    return text


def render(lines: Sequence[Line]) -> str:
    """The findings as text, each fix under its line."""
    text = []
    for line in lines:
        text.append(f"{_MARKS[line.status]}  {line.name:<16}{line.found}")
        if line.fix:
            text.append(f"      {'':<16}-> {line.fix}")
    return "\n".join(text)
