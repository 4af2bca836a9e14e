"""What the graphs cost: building and opening a bundle, a decode step, verify and peek beside it, pools in place.

    python -m tests.bench.bench_graphs [BUNDLE]

Ratios are medians of pairs run in turn in one process, in CPU time of the one thread that works, so that other programs
on the machine change them little. Exit code 1 if a limit is passed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen_npu import contract
from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.contract import GraphContract
from tests.unit.graphs.runner import native_library, open_session

PAIRS = 300
PAST_TOKENS = 100
WIDTH = 4
LARGEST_BUILD_S = 0.6
LARGEST_OPENING_S = 0.1
LIMITS = {
    "verify of 1 token": 1.05,
    "verify of 4 tokens": 1.6,
    "verify of 4 tokens, 400 slots": 1.6,
    "peek": 0.15,
}


def main(source: str) -> int:
    failures = []
    for what, limit, seconds in opening(source):
        print(f"{what:34} {seconds:8.3f} s   limit {limit}")
        if seconds > limit:
            failures.append(what)
    bundle = open_bundle(source)
    for native in (True, False) if native_library() else (False,):
        steps = {name: bound(*parts, native=native) for name, parts in graphs(bundle).items()}
        times = in_turn(steps)
        base = times.pop("decode")
        print(f"\n{'native kernel' if native else 'function bodies'}, {PAST_TOKENS} tokens of past")
        print(f"{'decode, fixed KV':34} {statistics.median(base) * 1e3:8.3f} ms")
        for name, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
            limit = LIMITS[name]
            print(f"{name:34} {statistics.median(taken) * 1e3:8.3f} ms  {ratio:5.2f} of a step, limit {limit}")
            if native and ratio > limit:
                failures.append(name)
    print(f"\npast their limit: {', '.join(failures) or 'none'}")
    return 1 if failures else 0


def opening(source: str) -> list[tuple[str, float, float]]:
    """CPU seconds of the first and of the next `open_bundle`, each in a fresh process with an empty or filled cache."""
    program = "import time, sys; from qwen_npu.bundle import open_bundle; start = time.process_time(); "
    program += "open_bundle(sys.argv[1]); print(time.process_time() - start)"
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "QWEN_NPU_CACHE": cache}
        command = [sys.executable, "-c", program, source]
        said = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (float(run.stdout) for run in said)
    return [("first build of a bundle", LARGEST_BUILD_S, first), ("opening it again", LARGEST_OPENING_S, second)]


def graphs(bundle: Bundle) -> dict[str, tuple[Path, GraphContract]]:
    found = {"decode": (bundle.path("decode_fixed"), bundle.contract("decode_fixed"))}
    for name, tokens, slots in (
        ("verify of 1 token", 1, WIDTH),
        ("verify of 4 tokens", WIDTH, WIDTH),
        ("verify of 4 tokens, 400 slots", WIDTH, 400),
    ):
        sizes = {"tokens": tokens, "width": WIDTH, "sequences": 1, "slots": slots}
        described = contract.verify(bundle.spec, "device", capacity=bundle.capacity, **sizes)
        found[name] = (bundle.verify(**sizes), described)
    found["peek"] = (bundle.peek(), contract.peek(bundle.spec, "device", capacity=bundle.capacity))
    return found


def bound(path: Path, described: GraphContract, *, native: bool) -> Callable[[], None]:
    """The graph with every tensor bound beforehand, pools as input and output at once."""
    import onnxruntime

    session = open_session(path, native=native)
    binding = session.io_binding()
    held: dict[str, Any] = {}
    for name, array in feed_of(described).items():
        held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, held[name])
    for tensor in described.outputs:
        shared = described.in_place.get(tensor.name)
        value = (
            held[shared] if shared else onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(tensor.shape, tensor.dtype))
        )
        held[tensor.name] = value
        binding.bind_ortvalue_output(tensor.name, value)
    held["binding"] = binding

    def run() -> None:
        session.run_with_iobinding(held["binding"])

    return run


def feed_of(described: GraphContract) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feed: dict[str, Any] = {}
    for tensor in described.inputs:
        states = tensor.dtype.startswith("float")
        feed[tensor.name] = (0.1 * rng.normal(size=tensor.shape) if states else np.ones(tensor.shape)).astype(
            tensor.dtype
        )
    if "position_ids" in feed:
        tokens = feed["position_ids"].shape[2]
        feed["position_ids"][:] = PAST_TOKENS + np.arange(tokens)
        feed["attention_mask"][:] = np.arange(feed["attention_mask"].shape[1]) < PAST_TOKENS + tokens
    if "ssm_state_indices" in feed:
        feed["actual_seq_lengths"][:] = tokens
        feed["ssm_state_indices"][:] = np.arange(feed["ssm_state_indices"].shape[1])
    return feed


def in_turn(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(PAIRS + 20):
        for name, run in steps.items():
            start = time.thread_time()
            run()
            if repeat >= 20:
                taken[name].append(time.thread_time() - start)
    return taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "tiny"))
