"""What the emulated device costs: Session.step beside a bare onnxruntime loop over the same graph; time to open.

    python -m tests.bench.bench_emulator [BUNDLE]

Ratios are medians of pairs: blocks of steps of the session and of the bare loop alternate in one process. Both run in
one thread, and its CPU time is what is compared: another program on the machine does not change it much.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.emulator import Context, Model, ModelType, instrument
from qwen_npu.emulator.engine import native_library
from qwen_npu.runtime.session import Session
from qwen_npu.runtime.states import StateArrays

PROMPT = list(range(5, 17))
PAIRS = 80
STEPS_A_BLOCK = 10
LARGEST_RATIO = 1.2
LARGEST_OPENING_S = 0.6
LONG_RUN_STEPS = 10_000
LARGEST_GROWTH_MIB = 8.0


class BareLoop:
    """Decode with nothing but onnxruntime: two prepared bindings over preallocated buffers, used in turn."""

    def __init__(self, bundle: Bundle, states: StateArrays, tokens: int, token: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        library = native_library()
        if library is not None:
            options.register_custom_ops_library(library)
        self._session = ort.InferenceSession(
            str(bundle.path("decode_fixed")), options, providers=["CPUExecutionProvider"]
        )
        capacity = bundle.capacity
        self._ids = np.zeros((1, 1), np.int64)
        self._mask = np.zeros((1, capacity), np.int64)
        self._mask[:, :tokens] = 1
        self._positions = np.zeros((4, 1, 1), np.int64)
        self._logits = np.zeros((1, 1, bundle.spec.vocab), np.float16)
        halves = [[np.array(state) for state in states], [np.zeros_like(state) for state in states]]
        feeds = (self._ids, self._mask, self._positions)
        self._bindings = [
            self._bind(ort, (*feeds, *halves[half]), (self._logits, *halves[1 - half])) for half in (0, 1)
        ]
        self._tokens = tokens
        self._token = token
        self._half = 0

    def _bind(self, ort: Any, inputs: tuple[np.ndarray, ...], outputs: tuple[np.ndarray, ...]) -> Any:
        binding = self._session.io_binding()
        for node, array in zip(self._session.get_inputs(), inputs, strict=True):
            binding.bind_ortvalue_input(node.name, ort.OrtValue.ortvalue_from_numpy(array))
        for node, array in zip(self._session.get_outputs(), outputs, strict=True):
            binding.bind_ortvalue_output(node.name, ort.OrtValue.ortvalue_from_numpy(array))
        return binding

    def step(self) -> int:
        self._ids[0, 0] = self._token
        self._positions[:] = self._tokens
        self._mask[0, self._tokens] = 1
        self._session.run_with_iobinding(self._bindings[self._half])
        self._half = 1 - self._half
        self._tokens += 1
        self._token = int(self._logits.argmax())
        return self._token


def step_ratio(bundle: Bundle) -> dict[str, float]:
    """Median over pairs of (session block / bare block), and the median step times in ms. The tokens must agree."""
    session = Session(bundle, driver="emulator")
    generation = session.stream(PROMPT, max_new_tokens=PAIRS * STEPS_A_BLOCK + 10, ignore_eos=True)
    first = next(step for step in generation if step.stage == "prefill")
    next(generation)  # upload
    states = session.read_states()
    assert first.token is not None
    bare = BareLoop(bundle, states, len(PROMPT), first.token)
    ratios, session_ms, bare_ms = [], [], []
    for pair in range(PAIRS):
        order = (generation_block(generation), bare_block(bare))
        results = [next(block) for block in (order if pair % 2 else order[::-1])]
        (ours, our_tokens), (plain, plain_tokens) = results if pair % 2 else results[::-1]
        assert our_tokens == plain_tokens, "the two loops compute the same"
        ratios.append(ours / plain)
        session_ms.append(ours / STEPS_A_BLOCK)
        bare_ms.append(plain / STEPS_A_BLOCK)
    session.close()
    return {
        "ratio": statistics.median(ratios),
        "session_step_ms": statistics.median(session_ms),
        "bare_step_ms": statistics.median(bare_ms),
    }


Block = Iterator[tuple[float, list[int | None]]]


def generation_block(generation: Any) -> Block:
    start = time.thread_time()
    tokens = [next(generation).token for _ in range(STEPS_A_BLOCK)]
    yield (time.thread_time() - start) * 1e3, tokens


def bare_block(bare: BareLoop) -> Block:
    start = time.thread_time()
    tokens: list[int | None] = [bare.step() for _ in range(STEPS_A_BLOCK)]
    yield (time.thread_time() - start) * 1e3, tokens


def opening_s(bundle: Bundle) -> float:
    """Median time to open the built bundle and to build vision, prefill and decode from it."""
    context = Context()
    context.target = ["ascend"]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        opened = open_bundle(bundle.directory)
        for graph in ("vision", "prefill", "decode_fixed"):
            Model().build_from_file(str(opened.path(graph)), ModelType.MINDIR, context)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def long_run(bundle: Bundle) -> tuple[int, list[float], list[int]]:
    """At least 10,000 steps over several generations: steps done, the process's MiB and the device's live bytes after
    each generation."""
    steps, resident_mib, live_bytes = 0, list[float](), list[int]()
    with Session(bundle, driver="emulator") as session:
        while steps < LONG_RUN_STEPS:
            length = min(bundle.capacity - len(PROMPT), LONG_RUN_STEPS - steps + 1)
            for step in session.stream(PROMPT, max_new_tokens=length, ignore_eos=True):
                steps += step.stage == "decode"
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            live_bytes.append(instrument.memory(session.driver.device).live_bytes)
    return steps, resident_mib, live_bytes


def main(source: str = "tiny") -> int:
    bundle = open_bundle(source)
    seconds = opening_s(bundle)
    print(f"opening a bundle and building its three stages: {seconds:.2f} s (limit {LARGEST_OPENING_S})")
    result = step_ratio(bundle)
    print(
        f"Session.step {result['session_step_ms']:.3f} ms, bare onnxruntime {result['bare_step_ms']:.3f} ms: "
        f"ratio {result['ratio']:.3f} (limit {LARGEST_RATIO})"
    )
    steps, resident_mib, live_bytes = long_run(bundle)
    growth_mib = resident_mib[-1] - resident_mib[1]
    flat = len(set(live_bytes)) == 1 and growth_mib < LARGEST_GROWTH_MIB
    print(
        f"{steps:,} steps over {len(live_bytes)} generations: device {live_bytes[0]:,} to {live_bytes[-1]:,} bytes, "
        f"process {growth_mib:+.1f} MiB after the second (limit {LARGEST_GROWTH_MIB})"
    )
    return 0 if result["ratio"] <= LARGEST_RATIO and seconds <= LARGEST_OPENING_S and flat else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
