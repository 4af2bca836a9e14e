"""What the nightly runner adds to an item: a suite of one small notebook beside papermill alone on the same notebook.

    python -m tests.bench.bench_nightly

Wall time of pairs in one run, the report and its pages included. Exit code 1 if the median difference passes the limit.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import papermill

from qwen_npu.nightly.runner import run_suite
from tests.integration.nightly_notebooks import CLAIM, DONE, PLOT, write_notebook, write_suite

ITEMS = 4
PAIRS = 3
LARGEST_COST_S = 1.5


def main() -> int:
    costs = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        notebook = write_notebook(place / "small.ipynb", [CLAIM, PLOT, DONE])
        suite = write_suite(
            place / "suite.toml", [{"notebook": "small.ipynb", "grid": {"n": list(range(1, ITEMS + 1))}}]
        )
        for pair in range(PAIRS):
            start = time.perf_counter()
            for n in range(1, ITEMS + 1):
                papermill.execute_notebook(
                    notebook, place / "bare.ipynb", {"n": n}, progress_bar=False, log_output=False
                )
            bare_s = time.perf_counter() - start
            start = time.perf_counter()
            outcome = run_suite(suite, place / f"out{pair}", jobs=1)
            ours_s = time.perf_counter() - start
            assert outcome.counts == {"PASS": ITEMS}, outcome.counts
            costs.append((ours_s - bare_s) / ITEMS)
            print(f"an item: papermill {bare_s / ITEMS:.2f} s, runner {ours_s / ITEMS:.2f} s")
    cost_s = statistics.median(costs)
    fine = cost_s <= LARGEST_COST_S
    print(f"the runner's own cost: {cost_s:.2f} s an item (limit {LARGEST_COST_S} s){'' if fine else '  MISSED'}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
