"""A slice of the 4B model, one linear and one full layer at its dimensions with random weights: bytes and step times.

    python -m tests.bench.bench_slice_4b

Fixed KV: a step must cost the same at 32 and at 2048 tokens. Growing KV: a step copies the whole cache and costs more.
Decode runs through the runtime's own stage and the emulator's driver; only the states are made up (of zeros' size and
random content), as a prefill of 2048 tokens at this size would take minutes here.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.driver import open_driver
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.runtime.stages import DecodeStage, StageModel, open_stage
from qwen_npu.runtime.states import StateArrays
from qwen_npu.spec import ModelSpec
from tests.unit.graphs.checkpoints import random_checkpoint

SLICE = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 512,
    "mrope_section": (11, 11, 10),
}
SHORT_TOKENS, LONG_TOKENS, CAPACITY_TOKENS = 32, 2048, 2112
PAIRS = 9
LARGEST_FIXED_RATIO = 1.15


def states(spec: ModelSpec, tokens: int, capacity: int | None) -> StateArrays:
    rng = np.random.default_rng(tokens)
    kv = np.zeros(spec.kv_shape(capacity or tokens), np.float16)
    kv[:, :, :, :tokens] = rng.normal(size=spec.kv_shape(tokens)).astype(np.float16)
    conv = rng.normal(size=spec.conv_shape()).astype(np.float16)
    return StateArrays(conv, rng.normal(size=spec.recurrent_shape()).astype(np.float32), kv)


def check_bytes(spec: ModelSpec, arrays: StateArrays, tokens: int) -> None:
    """The states' bytes are those of spec.py's formulas, layer for layer those of the whole 4B model."""
    assert arrays.conv.nbytes == spec.conv_bytes() == 8192 * 3 * 2
    assert arrays.recurrent.nbytes == spec.recurrent_bytes() == 32 * 128 * 128 * 4
    assert arrays.kv.nbytes == spec.kv_bytes(tokens) == 2 * 4 * 256 * 2 * tokens


def stage(
    driver: RecordingDriver, model: StageModel, spec: ModelSpec, tokens: int, capacity: int | None
) -> DecodeStage:
    arrays = states(spec, tokens, capacity)
    check_bytes(spec, arrays, capacity or tokens)
    return DecodeStage(driver, model, arrays, tokens, 0, resident=True)


def step_ms(decode: DecodeStage) -> float:
    start = time.perf_counter()
    logits, _ = decode.step(7)
    assert np.isfinite(logits).all()
    return (time.perf_counter() - start) * 1e3


def measure(bundle: Bundle, kv: str) -> tuple[float, float, float]:
    """Median step in ms at the short and the long length, and the median of the pairs' ratios."""
    driver = open_driver("emulator", "ascend:0")
    graph = f"decode_{kv}"
    capacity = bundle.capacity if kv == "fixed" else None
    with open_stage(driver, bundle.path(graph), graph, bundle.contract(graph)) as model:  # type: ignore[arg-type]
        short = stage(driver, model, bundle.spec, SHORT_TOKENS, capacity)
        long = stage(driver, model, bundle.spec, LONG_TOKENS, capacity)
        for decode in (short, long, short, long):
            step_ms(decode)
        pairs = []
        for index in range(PAIRS):
            first, second = (short, long) if index % 2 else (long, short)
            times = {id(first): step_ms(first), id(second): step_ms(second)}
            pairs.append((times[id(short)], times[id(long)]))
        short.free()
        long.free()
    driver.close()
    ratio = statistics.median(b / a for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="qwen-npu-slice-") as directory:
        checkpoint = random_checkpoint(Path(directory) / "checkpoint", dtype="float16", **SLICE)
        bundle = build_bundle(
            checkpoint, Path(directory) / "bundle", grids=[(2, 4)], capacity=CAPACITY_TOKENS, buckets=[SHORT_TOKENS]
        )
        fixed_short, fixed_long, fixed_ratio = measure(bundle, "fixed")
        growing_short, growing_long, growing_ratio = measure(bundle, "growing")
    spec = bundle.spec
    copied = spec.kv_bytes(LONG_TOKENS + 1) - spec.kv_bytes(SHORT_TOKENS + 1)
    print(
        f"4B slice, {SHORT_TOKENS} to {LONG_TOKENS} tokens: fixed {fixed_short:.1f} to {fixed_long:.1f} ms, "
        f"ratio {fixed_ratio:.3f} (limit {LARGEST_FIXED_RATIO}); "
        f"growing {growing_short:.1f} to {growing_long:.1f} ms, ratio {growing_ratio:.3f} "
        f"({copied / 2**20:.1f} MiB more copied each step)"
    )
    return 0 if fixed_ratio <= LARGEST_FIXED_RATIO and growing_ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
