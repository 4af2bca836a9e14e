"""`qwen-npu bench`: the measured ratios, one bench after the other, each in a process of its own. Needs a checkout."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_npu.data import benches_dir
from qwen_npu.errors import UsageError


@dataclass(frozen=True)
class BenchResult:
    """One bench: whether every figure kept its bound, and what it printed (only when that was kept)."""

    name: str
    within_bounds: bool
    wall_s: float
    output: str


def add_commands(subparsers: Any) -> None:
    """Adds `bench` to the command line's parser."""
    parser = subparsers.add_parser("bench", help="the measured ratios of a checkout; exit 1 if one passes its bound")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, such as ledger (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object when all have ended")
    parser.set_defaults(run=_bench)


def benches(names: Sequence[str] = ()) -> list[str]:
    """The benches of this checkout, or those named.

    Raises:
        UsageError: no checkout, or an unknown name.
    """
    known = sorted(path.stem.removeprefix("bench_") for path in benches_dir().glob("bench_*.py"))
    if not known:
        raise UsageError(
            f"there are no benches in {benches_dir()}",
            expected="a checkout: they measure against peers, and an installed package does not hold them",
        )
    for name in names:
        if name not in known:
            raise UsageError(f"there is no bench {name!r}", expected=f"one of {', '.join(known)}")
    return list(names) or known


def run_bench(name: str, *, keep_output: bool) -> BenchResult:
    """Runs one bench; its output goes where ours goes, or is kept."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.bench_{name}"],
        cwd=_checkout(),
        stdout=subprocess.PIPE if keep_output else None,
        text=True,
        check=False,
    )
    return BenchResult(name, done.returncode == 0, round(time.perf_counter() - start, 1), done.stdout or "")


def _checkout() -> Path:
    return benches_dir().parents[1]


def _bench(options: argparse.Namespace) -> int:
    results = []
    for name in benches(options.names):
        if not options.json:
            print(f"\n== {name}", flush=True)
        results.append(run_bench(name, keep_output=options.json))
    beyond = [result.name for result in results if not result.within_bounds]
    if options.json:
        print(json.dumps({"benches": [asdict(result) for result in results], "beyond_bounds": beyond}))
    else:
        print(f"\n{len(results) - len(beyond)} of {len(results)} within their bounds", *beyond)
    return 1 if beyond else 0
