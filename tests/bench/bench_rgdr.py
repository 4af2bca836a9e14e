"""What the native kernel costs beside reading and writing the state once, beside its peers, and beside itself.

    python -m tests.bench.bench_rgdr [--json FILE]

NK = 16, NV = 32, DK = DV = 128. Every figure is the median, over rounds in one process, of a ratio of two contenders
that run in turn: each untimed until the caches have settled on what it touches, then a few times, of which the median
counts. (A large last cache takes some calls to settle on the states of a call of 64; before that a figure is neither
that cache's nor memory's.) With one thread the CPU time of that thread is measured, so that other programs on the
machine change it little; with two threads wall time. Each peer's answer is compared with ours before it is timed. A
bound is met or not met; beside one that is not met stands what multiplying the state in place, and nothing else, would
reach on this machine. Exit code 1 if a bound is not met.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen_npu.rgdr import empty_states, native, recurrent_gated_delta_rule

NK, NV, DK, DV = 16, 32, 128, 128
SCALE = DK**-0.5
ROUNDS = {1: 60, 8: 15, 64: 5}
SETTLING_CALLS = {1: 5, 8: 5, 64: 6}
CALLS = {1: 9, 8: 5, 64: 3}
LAYERS = 8
Call = Callable[[], Any]


class Step:
    """One call of B sequences with L tokens, flat slots, and everything it needs allocated once."""

    def __init__(self, batch: int, tokens: int = 1, dtype: Any = np.float32, pools: int = 1) -> None:
        rng = np.random.default_rng(0)
        total = batch * tokens
        self.batch, self.total, self.turn = batch, total, 0
        self.query = unit(rng, total, NK, DK)
        self.key = unit(rng, total, NK, DK)
        self.value = rng.standard_normal((total, NV, DV)).astype(np.float32)
        self.beta = rng.random((total, NV)).astype(np.float32)
        self.g = -rng.uniform(0.001, 0.1, (total, NV)).astype(np.float32)
        self.pools = [empty_states((total, NV, DV, DK), dtype) for _ in range(pools)]
        for pool in self.pools:
            pool[...] = rng.standard_normal(pool.shape, np.float32)
        self.out = np.empty_like(self.value)
        self.lengths = np.full(batch, tokens, np.int32)
        self.slots = np.arange(total, dtype=np.int32)
        first = list(range(0, total, tokens))
        self.plan = array("q", first + [tokens] * batch + first + list(range(total)))

    def op(self) -> None:
        """The op as users call it."""
        pool = self.pools[self.turn % len(self.pools)]
        self.turn += 1
        recurrent_gated_delta_rule(
            self.query,
            self.key,
            self.value,
            self.beta,
            pool,
            self.lengths,
            self.slots,
            self.g,
            scale=SCALE,
            out=self.out,
        )

    def bare(self) -> None:
        """The kernel alone, with a plan made before."""
        pool = self.pools[0]
        kind = 0 if pool.dtype == np.float32 else 1
        kernel().run(
            self.query, self.key, self.value, self.beta, pool, pool, self.out, self.g, None, self.plan, 0, kind,
            self.total, self.total, NK, NV, DK, DV, self.batch, SCALE, 0, False,
        )  # fmt: skip


def kernel() -> Any:
    module = native()
    if module is None:
        sys.exit("the native kernel is not installed: pip install ./kernels/native")
    return module


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def copied(state: np.ndarray) -> np.ndarray:
    """A state for a peer, as well placed in memory as ours."""
    copy = empty_states(state.shape, state.dtype)
    copy[...] = state
    return copy


def in_turn(
    contenders: dict[str, Call], batch: int, clock: Callable[[], float], pools: int = 1, rounds: int = 0
) -> dict[str, list[float]]:
    """Seconds of each contender, one figure a round. pools: how many a contender takes in turn, call after call."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds or ROUNDS[batch]):
        for name, call in contenders.items():
            for _ in range(SETTLING_CALLS[batch] * pools):
                call()
            taken = []
            for _ in range(CALLS[batch]):
                start = clock()
                call()
                taken.append(clock() - start)
            times[name].append(statistics.median(taken))
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


# -- the yardstick and the peers; each is checked against the op before it counts


def read_modify_write(step: Step, threads: int) -> dict[str, Call]:
    """x *= 1 over the same pool: ours, and NumPy's with one thread; the faster one counts."""
    pool = step.pools[0]
    ways: dict[str, Call] = {"rmw": lambda: kernel().read_modify_write(pool, 1.0, threads)}
    if threads == 1:
        ways["numpy rmw"] = lambda: np.multiply(pool, np.float32(1), out=pool)
    return ways


def numpy_best(step: Step) -> tuple[Call, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """Matrix products by sequence, so that a state stays in the cache; every temporary allocated once."""
    state = copied(step.pools[0])
    out = np.empty_like(step.value)
    key = np.repeat(step.key, NV // NK, axis=1)[..., None]
    query = np.repeat(step.query, NV // NK, axis=1)[..., None] * np.float32(SCALE)
    decay = np.exp(step.g)[:, :, None, None]
    seen, change = np.empty((NV, DV, 1), np.float32), empty_states((NV, DV, DK), np.float32)

    def call() -> None:
        for i in range(step.batch):
            s = state[i]
            s *= decay[i]
            np.matmul(s, key[i], out=seen)
            np.subtract(step.value[i][..., None], seen, out=seen)
            np.multiply(seen, step.beta[i][:, None, None], out=seen)
            np.multiply(seen, key[i].transpose(0, 2, 1), out=change)
            s += change
            np.matmul(s, query[i], out=out[i][..., None])

    return call, lambda: (out, state)


def session(node: Any, inputs: list[tuple[str, np.ndarray]], outputs: list[tuple[str, tuple[int, ...]]]) -> Any:
    from onnx import TensorProto, helper
    from onnxruntime import InferenceSession, SessionOptions

    kind = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "peer",
        [helper.make_tensor_value_info(name, kind[x.dtype], x.shape) for name, x in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(node.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if node.domain == "qwen_npu":
        options.register_custom_ops_library(kernel().onnxruntime_library_path())
    return InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(made: Any, inputs: list[tuple[str, np.ndarray]], outputs: list[tuple[str, np.ndarray]]) -> Call:
    """A run with inputs and outputs bound to memory once, as a decode loop does."""
    from onnxruntime import OrtValue

    binding = made.io_binding()
    for name, x in inputs:
        binding.bind_ortvalue_input(
            name, OrtValue.ortvalue_from_numpy_with_onnx_type(x, 1 if x.dtype == np.float32 else 6)
        )
    for name, x in outputs:
        binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy_with_onnx_type(x, 1))
    return lambda: made.run_with_iobinding(binding)


def linear_attention(step: Step) -> tuple[Call, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    from onnx import helper

    b = step.batch
    state = copied(step.pools[0].transpose(0, 1, 3, 2))
    present, out = empty_states(state.shape, state.dtype), np.empty((b, 1, NV * DV), np.float32)
    repeat = NV // NK
    inputs = [
        ("query", np.repeat(step.query, repeat, axis=1).reshape(b, 1, -1)),
        ("key", np.repeat(step.key, repeat, axis=1).reshape(b, 1, -1)),
        ("value", step.value.reshape(b, 1, -1)),
        ("past", state),
        ("decay", step.g.reshape(b, 1, -1)),
        ("beta", step.beta.reshape(b, 1, -1)),
    ]
    node = helper.make_node(
        "LinearAttention", [name for name, _ in inputs], ["out", "present"], domain="com.microsoft",
        q_num_heads=NV, kv_num_heads=NV, scale=SCALE, update_rule="gated_delta",
    )  # fmt: skip
    made = session(node, inputs, [("out", out.shape), ("present", present.shape)])
    call = bound(made, inputs, [("out", out), ("present", present)])
    return call, lambda: (out.reshape(b, NV, DV), present.transpose(0, 1, 3, 2))


def gated_delta_net(step: Step) -> tuple[Call, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    from onnx import helper

    state, out = copied(step.pools[0]), np.empty_like(step.value)
    present = empty_states(state.shape, state.dtype)
    inputs = [
        ("query", step.query), ("key", step.key), ("value", step.value),
        ("decay", step.g), ("beta", step.beta), ("state", state),
    ]  # fmt: skip
    node = helper.make_node(
        "GatedDeltaNet", ["query", "key", "value", "", "decay", "beta", "state"], ["out", "present"],
        domain="com.microsoft", scale=SCALE, update_rule="gated_delta",
    )  # fmt: skip
    made = session(node, inputs, [("out", out.shape), ("present", present.shape)])
    return bound(made, inputs, [("out", out), ("present", present)]), lambda: (out, present)


def our_node(step: Step) -> tuple[Call, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """The same kernel as a node of a graph, its pool bound as input and output."""
    from onnx import helper

    state, out = copied(step.pools[0]), np.empty_like(step.value)
    inputs = [
        ("query", step.query), ("key", step.key), ("value", step.value), ("beta", step.beta), ("state", state),
        ("lengths", step.lengths), ("slots", step.slots), ("g", step.g),
    ]  # fmt: skip
    node = helper.make_node(
        "RecurrentGatedDeltaRule",
        [name for name, _ in inputs],
        ["out", "present"],
        domain="qwen_npu",
        scale_value=SCALE,
    )
    made = session(node, inputs, [("out", out.shape), ("present", state.shape)])
    return bound(made, inputs, [("out", out), ("present", state)]), lambda: (out, state)


def transformers_torch(step: Step) -> tuple[Call, Callable[[], tuple[np.ndarray, np.ndarray]]] | None:
    try:
        import torch
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
    except ImportError:
        return None
    torch.set_num_threads(1)
    query, key, value, g, beta = (
        torch.from_numpy(x[:, None].copy()) for x in (step.query, step.key, step.value, step.g, step.beta)
    )
    state = torch.from_numpy(copied(step.pools[0].transpose(0, 1, 3, 2)))
    last: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            last[:] = torch_recurrent_gated_delta_rule(
                query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True
            )

    return call, lambda: (last[0][:, 0].numpy(), last[1].numpy().transpose(0, 1, 3, 2))


PEERS: dict[str, tuple[Callable[[Step], Any], dict[int, float]]] = {
    "onnxruntime LinearAttention": (linear_attention, {1: 3.5, 8: 6, 64: 2.8}),
    "onnxruntime GatedDeltaNet": (gated_delta_net, {1: 15, 8: 15, 64: 6}),
    "NumPy, best form": (numpy_best, {1: 6, 8: 6, 64: 2.7}),
    "transformers torch": (transformers_torch, {1: 9}),
    "our node in onnxruntime": (our_node, {1: 0, 8: 0, 64: 0}),
}


class Report:
    """Prints a line a figure and remembers which bounds were met."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        bound_: float | None,
        at_least: bool,
        microseconds: float,
        memory: float | None = None,
    ) -> None:
        """memory: the figure of a kernel that only reads and writes the state, where there is such a figure."""
        met = not bound_ or (value >= bound_ if at_least else value <= bound_)
        line = {"what": what, "value": value, "unit": unit, "bound": bound_ or None, "met": met, "memory": memory}
        self.lines.append(line)
        limit = f"{'>=' if at_least else '<='} {bound_:g}" if bound_ else ""
        verdict = "" if not bound_ else "met" if met else "NOT MET"
        if not met and memory is not None:
            verdict += f" (reading and writing the state alone: {memory:.2f})"
        print(f"{what:58} {value:8.2f} {unit:3} {limit:8} ours {microseconds:9.0f} us  {verdict}", flush=True)


def against_memory(report: Report, threads: int, bounds: dict[int, float]) -> None:
    clock = time.thread_time if threads == 1 else time.perf_counter
    kernel().set_threads(threads)
    for batch, bound_ in bounds.items():
        step = Step(batch)
        times = in_turn({"op": step.op, **read_modify_write(step, threads)}, batch, clock)
        ours = times.pop("op")
        share = min(ratio(times[name], ours) for name in times)
        what = f"of in-place read-modify-write, B = {batch}, {threads} thread{'s' * (threads > 1)}"
        report.add(what, share, "", bound_, True, statistics.median(ours) * 1e6)


def against_peers(report: Report) -> None:
    kernel().set_threads(1)
    for name, (make, bounds) in PEERS.items():
        for batch, bound_ in bounds.items():
            step = Step(batch)
            fresh = Step(batch)
            peer = make(step)
            if peer is None:
                print(f"{name}: not installed (pip install -e '.[oracle]')")
                break
            call, answer = peer
            call()
            fresh.op()
            for mine, its in zip((fresh.out, fresh.pools[0]), answer(), strict=True):
                np.testing.assert_allclose(mine, its, atol=2e-5)
            memory = read_modify_write(step, 1)
            times = in_turn({"op": step.op, name: call, **memory}, batch, time.thread_time)
            report.add(
                f"{name}, B = {batch}: times our cost", ratio(times[name], times["op"]), "x", bound_, True,
                statistics.median(times["op"]) * 1e6, max(ratio(times[name], times[way]) for way in memory),
            )  # fmt: skip


def against_itself(report: Report) -> None:
    kernel().set_threads(1)
    clock = time.thread_time
    single, half = Step(64), Step(64, dtype=np.float16)
    memory = read_modify_write(Step(32), 1)  # as many bytes as the f16 pool
    times = in_turn({"f32": single.op, "f16": half.op, **memory}, 64, clock)
    report.add(
        "f32 pool against f16 pool, B = 64", ratio(times["f32"], times["f16"]), "x", 1.9, True,
        statistics.median(times["f16"]) * 1e6, max(ratio(times["f32"], times[way]) for way in memory),
    )  # fmt: skip
    del single, half, memory

    # One pool called again and again, and as in a model: other layers' pools come between two calls.
    for pools in (1, LAYERS):
        one, four = Step(1, pools=pools), Step(1, tokens=4, pools=pools)
        memory = read_modify_write(four, 1) if pools == 1 else {}  # the four slots
        times = in_turn({"1": one.op, "4": four.op, **memory}, 1, clock, pools)
        report.add(
            f"L = 4 against L = 1, {pools} layer{'s in turn' * (pools > 1)}", ratio(times["4"], times["1"]), "x", 4.2,
            False, statistics.median(times["4"]) * 1e6,
            min((ratio(times[way], times["1"]) for way in memory), default=None),
        )  # fmt: skip
        del one, four, memory

    for batch, bound_, unit_ in ((1, 12.0, "us"), (64, 5.0, "%")):
        step = Step(batch)
        rounds = 5 * ROUNDS[batch]  # a small difference of two large figures
        times = in_turn({"op": step.op, "bare": step.bare}, batch, clock, rounds=rounds)
        extra = [a - b for a, b in zip(times["op"], times["bare"], strict=True)]
        value = statistics.median(extra) * 1e6
        if unit_ == "%":
            value = 100 * statistics.median(e / b for e, b in zip(extra, times["bare"], strict=True))
        what = f"what a call from Python adds, B = {batch}"
        report.add(what, value, unit_, bound_, False, statistics.median(times["op"]) * 1e6)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--json", type=Path, help="also write the figures here")
    options.add_argument("--only", choices=("memory", "two", "peers", "itself"), action="append")
    arguments = options.parse_args()
    parts = arguments.only or ["memory", "two", "peers", "itself"]
    report = Report()
    print(f"{kernel().instruction_set()}, {kernel().threads()} threads by default; NK={NK} NV={NV} DK={DK} DV={DV}")
    if "memory" in parts:
        against_memory(report, 1, {1: 0.50, 8: 0.65, 64: 0.65})
    if "two" in parts:
        against_memory(report, 2, {1: 0.45, 8: 0.50, 64: 0.65})
    if "peers" in parts:
        against_peers(report)
    if "itself" in parts:
        against_itself(report)
    bounds = [line for line in report.lines if line["bound"]]
    missed = [line["what"] for line in bounds if not line["met"]]
    print(f"{len(bounds) - len(missed)} of {len(bounds)} bounds met" + ", not met:" * bool(missed), *missed, sep="\n  ")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.lines, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
