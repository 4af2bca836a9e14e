"""What recording and looking cost: the sink alone, a recorded decode step beside a plain one, size, figures.

    python -m tests.bench.bench_ledger [BUNDLE]

The ratio is the median of pairs of blocks that alternate in one generation, in CPU time of the thread that decodes, so
that other programs on the machine change it little. The file is written by another thread, whose time counts only in
the figures of the sink alone. Exit code 1 if a limit is passed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from qwen_npu import views
from qwen_npu.bundle import open_bundle
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger, open_ledger
from qwen_npu.runtime.session import Session
from tests.unit.ledger.runs import Run, norms

PROMPT = list(range(5, 17))
PAIRS = 12
STEPS_A_BLOCK = 40
SINK_STEPS = 2_000
LARGEST_SINK_US = 50.0
LARGEST_RECORDING = 1.05
LARGEST_MB = 20.0
RECORDED_STEPS = 2_000
FIGURE_EVENTS = 100_000
LARGEST_FIGURE_S = 1.0


def sink_us(kv: str) -> tuple[float, float]:
    """Microseconds of CPU, of all threads, that a step's events cost a file beyond making them, and events a step."""

    def run(sink: Callable[[Event], None], finish: Callable[[], None]) -> float:
        start = time.process_time()
        Run(sink, kv=kv, capacity=SINK_STEPS + 16).generate(SINK_STEPS)
        finish()
        return (time.process_time() - start) / SINK_STEPS * 1e6

    costs = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(5):
            plain = run(lambda _: None, lambda: None)
            with Ledger(Path(directory) / str(number)) as ledger:
                costs.append(run(ledger, ledger.flush) - plain)
        events = ledger.last_seq / SINK_STEPS
    return statistics.median(costs), events


def recording_ratio(source: str) -> tuple[float, float, float]:
    """CPU ms of a plain step, of a recorded one, and the median of the pairs' ratios."""
    plain, recorded = [], []
    with tempfile.TemporaryDirectory() as directory, Session(open_bundle(source), driver="emulator") as session:
        ledger = Ledger(Path(directory) / "run")
        steps = session.stream(PROMPT, max_new_tokens=(2 * PAIRS + 2) * STEPS_A_BLOCK, ignore_eos=True)
        for number in range(2 * PAIRS + 1):
            with session.driver.record(ledger) if number % 2 else nullcontext():
                start = time.thread_time()
                for _ in range(STEPS_A_BLOCK):
                    next(steps)
                took_ms = (time.thread_time() - start) / STEPS_A_BLOCK * 1e3
            if number:  # the first block holds vision, prefill and the upload
                (recorded if number % 2 else plain).append(took_ms)
        steps.close()
        ledger.close()
    ratios = [b / a for a, b in zip(plain, recorded, strict=True)]
    return statistics.median(plain), statistics.median(recorded), statistics.median(ratios)


def recording_mb(source: str) -> tuple[int, float]:
    """Events and megabytes of a recording of several generations, 2,000 steps in all."""
    with tempfile.TemporaryDirectory() as directory, Session(open_bundle(source), driver="emulator") as session:
        path = Path(directory) / "run"
        with session.record(path):
            for _ in range(4):
                session.generate(PROMPT, max_new_tokens=RECORDED_STEPS // 4 + 1, ignore_eos=True)
        return open_ledger(path).last_seq + 1, path.stat().st_size / 1e6


def figure_seconds() -> tuple[int, dict[str, float]]:
    """CPU seconds to build each figure of a large ledger that nobody has read before."""
    ledger = Ledger()
    for key, value in {"kv": "growing", "state": "resident", "numerics": "device"}.items():
        ledger.set_meta(key, value)
    run = Run(ledger, kv="growing")
    while ledger.last_seq < FIGURE_EVENTS:
        run.generate(2_000)
        for step in range(200):
            ledger(Event("peek", run.clock_ns, stage="decode", step=step, arrays={"recurrent.norm": norms(step)}))
    names = [name for name in views.LEDGER_FIGURES if not name.startswith("compare")]
    views.timings(Ledger())  # brings plotly in
    seconds = {}
    for name in names:
        times = []
        for _ in range(3):
            ledger.cache.clear()
            start = time.thread_time()
            getattr(views, name)(ledger)
            times.append(time.thread_time() - start)
        seconds[name] = statistics.median(times)
    return ledger.last_seq + 1, seconds


def main(source: str = "tiny") -> int:
    fine = True
    for kv in ("fixed", "growing"):
        cost_us, events = sink_us(kv)
        fine &= cost_us <= LARGEST_SINK_US
        print(f"sink, {kv} KV: {cost_us:.1f} us a step of {events:.1f} events (limit {LARGEST_SINK_US:.0f})")
    plain_ms, recorded_ms, ratio = recording_ratio(source)
    fine &= ratio <= LARGEST_RECORDING
    print(
        f"decode step {plain_ms:.3f} ms, recorded {recorded_ms:.3f} ms: ratio {ratio:.3f} (limit {LARGEST_RECORDING})"
    )
    events, megabytes = recording_mb(source)
    fine &= megabytes <= LARGEST_MB
    print(f"{RECORDED_STEPS:,} steps recorded: {events:,} events, {megabytes:.1f} MB (limit {LARGEST_MB:.0f})")
    events, seconds = figure_seconds()
    slowest = max(seconds, key=lambda name: seconds[name])
    fine &= seconds[slowest] <= LARGEST_FIGURE_S
    print(
        f"figures of {events:,} events: slowest {slowest} {seconds[slowest]:.2f} s (limit {LARGEST_FIGURE_S:.0f}); "
        + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
