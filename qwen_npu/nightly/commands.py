"""`qwen-npu report` and `qwen-npu nightly run|report|accept|history`: arguments in, exit code out."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen_npu.nightly.verdict import Outcome

QUICK = "quick"


def add_commands(subparsers: Any) -> None:
    """Adds the commands of this room to the command line's parser."""
    report = subparsers.add_parser("report", help="run the quick notebooks headless and write an offline HTML report")
    report.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="where to (default: ./report)")
    _add_run_options(report)
    report.set_defaults(run=_report)

    nightly = subparsers.add_parser("nightly", help="run suites of notebooks, compare with baselines, keep a history")
    parts = nightly.add_subparsers(dest="nightly_command", required=True, metavar="PART")

    run = parts.add_parser("run", help="run a suite")
    run.add_argument("suite", nargs="?", default="default", help="a TOML file or a shipped suite (default: default)")
    run.add_argument("--out", type=Path, metavar="DIR", help="where to (default: ./nightly/<start time>)")
    run.add_argument("--tag", action="append", default=[], metavar="TAG", help="only items with this tag (repeatable)")
    run.add_argument("--item", action="append", default=[], metavar="ID", help="only this item (repeatable)")
    run.add_argument("--resume", action="store_true", help="keep the verdicts an interrupted run left in --out")
    run.add_argument("--failed", action="store_true", help="like --resume, and run again what was not fine")
    run.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="the SQLite file of past nights (default: history.sqlite beside DIR)",
    )
    run.add_argument("--scheduler", metavar="ADDRESS", help="run on the workers of this Dask scheduler")
    _add_run_options(run)
    run.set_defaults(run=_nightly_run)

    again = parts.add_parser("report", help="write the report of a run again, from what lies in DIR")
    again.add_argument("out", type=Path, metavar="DIR")
    again.add_argument("--history", type=Path, metavar="FILE")
    again.add_argument("--json", action="store_true", help="print the report as JSON")
    again.set_defaults(run=_nightly_report)

    accept = parts.add_parser("accept", help="take the records of a run as the new baseline")
    accept.add_argument("out", type=Path, metavar="DIR", help="the run's directory")
    accept.add_argument("--item", action="append", default=[], metavar="ID", help="only this item (repeatable)")
    accept.add_argument("--reason", required=True, help="why the new values are right; kept with them")
    accept.add_argument("--json", action="store_true")
    accept.set_defaults(run=_nightly_accept)

    history = parts.add_parser("history", help="past nights of each item")
    history.add_argument("history", type=Path, metavar="FILE", help="the SQLite file")
    history.add_argument("--item", action="append", default=[], metavar="ID")
    history.add_argument("--json", action="store_true")
    history.set_defaults(run=_nightly_history)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, metavar="N", help="items at a time (default: the number of CPUs)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(outcome: Outcome, as_json: bool) -> int:
    if as_json:
        text = (outcome.out / "report.json").read_text(encoding="utf-8")
        print(json.dumps({**json.loads(text), "index": str(outcome.index)}, ensure_ascii=False))
    else:
        print(", ".join(f"{number} {verdict}" for verdict, number in outcome.counts.items()))
        if outcome.interrupted:
            print(f"not whole: {outcome.interrupted}")
        print(outcome.index)
    return outcome.exit_code


def _report(options: argparse.Namespace) -> int:
    from qwen_npu.nightly.runner import run_suite

    outcome = run_suite("default", options.out, jobs=options.jobs, tags=(QUICK,), say=_say)
    return _tell(outcome, options.json)


def _nightly_run(options: argparse.Namespace) -> int:
    import datetime as dt

    from qwen_npu.errors import UsageError
    from qwen_npu.nightly.runner import run_suite

    if options.out is None:
        if options.resume or options.failed:
            raise UsageError("--resume and --failed need the run to go on with", expected="--out DIR")
        options.out = _fresh(Path("nightly") / dt.datetime.now().strftime("%Y-%m-%d_%H%M%S"))
    outcome = run_suite(
        options.suite,
        options.out,
        jobs=options.jobs,
        tags=options.tag,
        items=options.item,
        resume=options.resume,
        failed=options.failed,
        history=options.history or options.out.absolute().parent / "history.sqlite",
        scheduler=options.scheduler,
        say=_say,
    )
    return _tell(outcome, options.json)


def _fresh(folder: Path) -> Path:
    """A directory that this call has made: two runs that start in one second get two."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError


def _nightly_report(options: argparse.Namespace) -> int:
    from qwen_npu.nightly.report import read_results, write_report
    from qwen_npu.nightly.verdict import Outcome

    index = write_report(options.out, history=options.history, again=True)
    run, results = read_results(options.out)
    outcome = Outcome(run["suite"], options.out, index.absolute(), results, run.get("interrupted", ""))
    return _tell(outcome, options.json)


def _nightly_accept(options: argparse.Namespace) -> int:
    from qwen_npu.errors import UsageError
    from qwen_npu.nightly.baseline import accept
    from qwen_npu.nightly.report import read_results

    run, results = read_results(options.out)
    known = {result.item: result for result in results}
    for name in options.item:
        if name not in known:
            raise UsageError(f"the run in {options.out} has no item {name!r}", expected=", ".join(sorted(known)))
    chosen = [known[name] for name in options.item] or results
    paths = accept(Path(run["baselines"]), chosen, options.reason)
    if options.json:
        print(json.dumps({"accepted": [str(path) for path in paths]}, ensure_ascii=False))
    else:
        print("\n".join(map(str, paths)))
    return 0


def _nightly_history(options: argparse.Namespace) -> int:
    from qwen_npu.errors import UsageError
    from qwen_npu.nightly.history import History

    if not options.history.is_file():
        raise UsageError(f"there is no history {options.history}", expected="the SQLite file of a nightly run")
    facts: dict[str, Any] = {}
    with History(options.history) as history:
        for item in options.item or history.items():
            turn = history.turn(item)
            facts[item] = {
                "nights": [vars(night) for night in history.nights(item)],
                "last_good": vars(turn.last_good) if turn and turn.last_good else None,
                "first_bad": vars(turn.first_bad) if turn else None,
            }
    if options.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    for item, fact in facts.items():
        print(item)
        for night in fact["nights"]:
            when = f"{night['started']}  {night['commit'][:10]:<10}"
            print(f"  {when}  {night['verdict']:<12}{night['wall_s']:>8.1f} s  {night['reason']}")
        if fact["first_bad"]:
            good = fact["last_good"]
            print(
                f"  last good {good['commit'][:10] or good['started'] if good else 'never'}, "
                f"first bad {fact['first_bad']['commit'][:10] or fact['first_bad']['started']}"
            )
    return 0
