"""The micro-experiments of `doctor --probe-device`: each asks the device one thing that the emulator only has from
reading, through the vendor's methods alone.

An experiment gives a short answer; what the emulator answers, and where it has that from, stands beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np

from qwen_npu.contract import BUCKETS_KEY, IN_PLACE_KEY

SOURCE_CODE: Final = "vendor source"
PUBLISHED: Final = "published runtime"
MEASURED: Final = "measured on cpu, same code"
ASSUMED: Final = "assumed"
ARITHMETIC: Final = "arithmetic"
Source = Literal["vendor source", "published runtime", "measured on cpu, same code", "assumed", "arithmetic"]

TIMED_BYTES = 32 * 2**20
TIMED_PREDICTS = 9
REFUSED, ACCEPTED = "refused", "accepted"


class NotRunError(Exception):
    """The experiment makes no sense here; the text says why."""


@dataclass(frozen=True)
class Experiment:
    """`prediction` is the emulator's answer."""

    name: str
    question: str
    prediction: str
    source: Source
    run: Callable[[Bench], str]


class Bench:
    """A device with the small graphs of the experiments.

    Args:
        module: the vendor's package, or one with its interface.
        graphs: directory with the graphs of `write_graphs`, converted where the package needs that.
    """

    def __init__(self, module: ModuleType, device_id: int, graphs: Path) -> None:
        self.module = module
        self.device_id = device_id
        self.graphs = graphs
        self.device = f"ascend:{device_id}"
        self.context = self.context_of(device_id)

    def context_of(self, device_id: int) -> Any:
        context = self.module.Context()
        context.target = ["ascend"]
        context.ascend.device_id = device_id
        return context

    def model(self, name: str) -> Any:
        """A graph, loaded anew: what one experiment did to a model is nothing to the next."""
        model = self.module.Model()
        file = str(self.graphs / f"{name}.mindir")
        model.build_from_file(file, self.module.ModelType.MINDIR, self.context)
        return model

    def host(self, array: np.ndarray) -> Any:
        return self.module.Tensor(np.ascontiguousarray(array))

    def on_device(self, array: np.ndarray, device: str = "") -> Any:
        return self.module.Tensor(np.ascontiguousarray(array), device=device or self.device)

    def room(self, shape: Sequence[int], dtype: str = "FLOAT32") -> Any:
        return self.module.Tensor(shape=list(shape), dtype=getattr(self.module.DataType, dtype), device=self.device)


def values(tensor: Any) -> np.ndarray:
    """A copy of a tensor's contents."""
    return np.array(tensor.get_data_to_numpy())


def outcome(call: Callable[[], Any]) -> str:
    """Whether a call goes through; what is refused raises."""
    try:
        call()
    except Exception:
        return REFUSED
    return ACCEPTED


def yes(condition: Any) -> str:
    return "yes" if bool(condition) else "no"


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def _outputs_written(b: Bench) -> str:
    out = b.room((2, 4))
    b.model("add").predict([b.host(X)], [out])
    return yes(np.array_equal(values(out), X + 1))


def _results_are_given(b: Bench) -> str:
    (result,) = b.model("add").predict([b.host(X)], [b.room((2, 4))])
    return str(result.device)


def _results_on_host(b: Bench) -> str:
    (result,) = b.model("add").predict([b.host(X)])
    return str(result.device)


def _results_reused(b: Bench) -> str:
    model = b.model("add")
    view = model.predict([b.host(X)])[0].get_data_to_numpy()
    model.predict([b.host(X + 100)])
    return yes(np.array_equal(np.array(view), X + 101))


def _device_input(b: Bench) -> str:
    held, model, out = b.on_device(X), b.model("add"), b.room((2, 4))
    model.predict([held], [out])
    return yes(np.array_equal(values(out), X + 1) and np.array_equal(values(held), X))


def _download_is_a_copy(b: Bench) -> str:
    held = b.on_device(X)
    held.get_data_to_numpy()[...] = -1
    return yes(np.array_equal(values(held), X))


def _upload_is_a_copy(b: Bench) -> str:
    source = X.copy()
    held = b.on_device(source)
    source[...] = -1
    return yes(np.array_equal(values(held), X))


def _set_data_on_device(b: Bench) -> str:
    held = b.on_device(X)
    held.set_data_from_numpy(np.ascontiguousarray(X + 5))
    out = b.room((2, 4))
    b.model("add").predict([held], [out])
    return yes(np.array_equal(values(out), X + 6))


def _state_stays(b: Bench) -> str:
    """Two halves in turn: the state after five steps is the sum of what was fed."""
    model = b.model("step")
    halves = [b.on_device(np.zeros((2, 4), np.float32)), b.room((2, 4))]
    out = b.room((2, 4))
    for step in range(5):
        model.predict([b.host(X * step), halves[step % 2]], [out, halves[1 - step % 2]])
    return yes(np.array_equal(values(halves[1]), X * 10))


def _pool_in_place(b: Bench) -> str:
    """One buffer as input and output of a graph with one ScatterND, which may write in place."""
    start = np.arange(20, dtype=np.float32).reshape(5, 4)
    pool, row = b.on_device(start), np.full((1, 4), 9, np.float32)
    b.model("pool").predict([b.host(np.array([[3]], np.int32)), b.host(row), pool], [pool])
    wanted = start.copy()
    wanted[3] = 9
    return yes(np.array_equal(values(pool), wanted))


def _aliased(b: Bench) -> str:
    """One buffer as input and output where the graph may write before it has read."""
    held = b.on_device(X)
    model = b.model("step")
    x, out = b.host(X), b.room((2, 4))
    return outcome(lambda: model.predict([x, held], [out, held]))


def _wrong_output_bytes(b: Bench) -> str:
    model = b.model("add")
    x, out = b.host(X), b.room((2, 3))
    return outcome(lambda: model.predict([x], [out]))


def _wrong_output_dtype(b: Bench) -> str:
    model = b.model("add")
    x, out = b.host(X), b.room((2, 4), "INT32")
    return outcome(lambda: model.predict([x], [out]))


def _wrong_output_count(b: Bench) -> str:
    model = b.model("step")
    given, out = [b.host(X), b.on_device(X)], b.room((2, 4))
    return outcome(lambda: model.predict(given, [out]))


def _wrong_input_dtype(b: Bench) -> str:
    model = b.model("add")
    x = b.host(X.astype(np.int32))
    return outcome(lambda: model.predict([x]))


def _wrong_input_shape(b: Bench) -> str:
    model = b.model("add")
    x = b.host(np.ones((3, 4), np.float32))
    return outcome(lambda: model.predict([x]))


def _usable_after_refusal(b: Bench) -> str:
    model = b.model("add")
    x = b.host(np.ones((3, 5), np.float32))
    outcome(lambda: model.predict([x]))
    return yes(np.array_equal(values(model.predict([b.host(X)])[0]), X + 1))


def _dynamic_without_resize(b: Bench) -> str:
    model = b.model("dynamic")
    found = [values(model.predict([b.host(np.ones((1, size), np.float32))])[0]) for size in (3, 7)]
    return yes([array.shape for array in found] == [(1, 3), (1, 7)] and all(np.all(a == 2) for a in found))


def _declared_sizes(b: Bench) -> str:
    model = b.model("declared")

    def run(size: int) -> None:
        model.resize(model.get_inputs(), [[1, size]])
        model.predict([x[size]])

    x = {size: b.host(np.ones((1, size), np.float32)) for size in (8, 5)}
    run(8)
    return outcome(lambda: run(5))


def _half_kept(b: Bench) -> str:
    model = b.model("half")
    (info,) = model.get_inputs()
    (result,) = model.predict([b.host(np.full((2, 4), 1.5, np.float16))])
    return f"{info.dtype.name} in, {result.dtype.name} out"


def _integers_narrowed(b: Bench) -> str:
    (info,) = b.model("ids").get_inputs()
    return str(info.dtype.name)


def _descriptors(b: Bench) -> str:
    model = b.model("step")
    names = [tensor.name for tensor in (*model.get_inputs(), *model.get_outputs())]
    return ", ".join(names)


def _other_device(b: Bench) -> str:
    """State on one device, the model on another."""
    try:
        held = b.on_device(X, f"ascend:{b.device_id + 1}")
        held.get_data_to_numpy()
    except Exception as error:
        raise NotRunError(f"there is no second device: {error}") from error
    model = b.model("add")
    out = b.room((2, 4))
    return outcome(lambda: model.predict([held], [out]))


def _median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(TIMED_PREDICTS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def _hidden_upload(b: Bench) -> str:
    """A graph that reads one row of a large input: from the host the whole of it must cross first."""
    large = np.ones((TIMED_BYTES // 4096, 1024), np.float32)
    model, out, held, source = b.model("row"), b.room((1, 1024)), b.on_device(large), b.host(large)
    model.predict([held], [out])
    resident = _median_ms(lambda: model.predict([held], [out]))
    crossing = _median_ms(lambda: model.predict([source], [out]))
    return yes(crossing > 2 * resident)


def _peek(b: Bench) -> str:
    """The state's norms, reduced on the device, are those NumPy finds."""
    spec = probe_spec()
    rng = np.random.default_rng(0)
    state = rng.normal(size=spec.recurrent_shape()).astype(np.float32)
    conv = rng.normal(size=spec.conv_shape()).astype(np.float16)
    kv = rng.normal(size=spec.kv_shape(PEEK_CAPACITY)).astype(np.float16)
    model = b.model("peek")
    given = [b.host(np.array([3], np.int32)), b.on_device(conv), b.on_device(state), b.on_device(kv)]
    _, recurrent, _ = (values(result) for result in model.predict(given))
    norms = np.sqrt((state.astype(np.float64) ** 2).sum(axis=(3, 4)))[:, 0]
    return yes(np.allclose(recurrent[..., 0].reshape(norms.shape), norms, rtol=5e-3))


def _op_alone(b: Bench) -> str:
    """The op on a pool of four slots, two tokens, read at slot 1, written to slots 1 and 2, against the reference."""
    from qwen_npu.rgdr.plan import plan_chunk
    from qwen_npu.rgdr.reference import recurrence

    spec = probe_spec()
    rng = np.random.default_rng(1)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float16)

    query, key, value = random(2, spec.nk, spec.dk), random(2, spec.nk, spec.dk), random(2, spec.nv, spec.dv)
    query /= np.linalg.norm(query.astype(np.float32), axis=-1, keepdims=True).astype(np.float16)
    key /= np.linalg.norm(key.astype(np.float32), axis=-1, keepdims=True).astype(np.float16)
    beta = rng.uniform(0.1, 0.9, (2, spec.nv)).astype(np.float16)
    g = -rng.uniform(0.01, 0.3, (2, spec.nv)).astype(np.float32)
    start = random(4, spec.nv, spec.dv, spec.dk)
    pool, out = b.on_device(start), b.room((2, spec.nv, spec.dv), "FLOAT16")
    integers = [np.array([2], np.int32), np.array([[1, 2]], np.int32)]
    given = [b.host(array) for array in (query, key, value, beta)]
    given += [pool, *map(b.host, integers), b.host(g), b.host(np.array([1], np.int32))]
    b.model("op").predict(given, [out, pool])
    q, k, v, b_wide, before = (array.astype(np.float32) for array in (query, key, value, beta, start[1:2]))
    wanted, after = np.empty_like(v), np.empty_like(before)
    recurrence(q, k, v, b_wide, before, after, wanted, plan_chunk([2], 2, 1), g=g, scale=spec.dk**-0.5)
    found, slots = values(out).astype(np.float32), values(pool)
    near = np.abs(found - wanted).max() < 2e-2 and np.abs(slots[2].astype(np.float32) - after[0]).max() < 2e-2
    kept = np.array_equal(slots[0], start[0]) and np.array_equal(slots[3], start[3])
    return yes(near and kept)


PEEK_CAPACITY = 8

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("descriptors", "what are a model's tensors called?", "x, past, out, present", PUBLISHED, _descriptors),
    Experiment("outputs written", "are given device outputs written in place?", "yes", SOURCE_CODE, _outputs_written),
    Experiment(
        "results are given", "on what device are results with given outputs?", "{device}", MEASURED, _results_are_given
    ),
    Experiment(
        "results on host", "on what device are results without outputs?", "None:-1", PUBLISHED, _results_on_host
    ),
    Experiment("results reused", "does the next predict overwrite a host result?", "yes", MEASURED, _results_reused),
    Experiment(
        "device input", "is a device input read where it lies, and left as it was?", "yes", SOURCE_CODE, _device_input
    ),
    Experiment(
        "upload copies", "does a device tensor hold a copy of its array?", "yes", SOURCE_CODE, _upload_is_a_copy
    ),
    Experiment("download copies", "is a downloaded array a copy?", "yes", SOURCE_CODE, _download_is_a_copy),
    Experiment("set data", "does set_data_from_numpy write into a device tensor?", "yes", ASSUMED, _set_data_on_device),
    Experiment(
        "state stays", "does state that takes turns in two halves survive five steps?", "yes", PUBLISHED, _state_stays
    ),
    Experiment("pool in place", "can one ScatterND update a pool in place?", "yes", ASSUMED, _pool_in_place),
    Experiment("aliased", "is one buffer as input and output refused?", ACCEPTED, SOURCE_CODE, _aliased),
    Experiment("output bytes", "is an output of other bytes refused?", REFUSED, SOURCE_CODE, _wrong_output_bytes),
    Experiment(
        "output dtype",
        "is an output of the same bytes, another dtype refused?",
        ACCEPTED,
        SOURCE_CODE,
        _wrong_output_dtype,
    ),
    Experiment("output count", "are too few outputs refused?", REFUSED, SOURCE_CODE, _wrong_output_count),
    Experiment("input dtype", "is an input of another dtype refused?", REFUSED, MEASURED, _wrong_input_dtype),
    Experiment("input shape", "does a static graph refuse another shape?", REFUSED, ASSUMED, _wrong_input_shape),
    Experiment(
        "after a refusal", "is the model usable after a refused predict?", "yes", MEASURED, _usable_after_refusal
    ),
    Experiment(
        "resizes itself",
        "does a dynamic graph take new shapes without resize?",
        "yes",
        SOURCE_CODE,
        _dynamic_without_resize,
    ),
    Experiment("declared sizes", "is a size that was not declared refused?", REFUSED, PUBLISHED, _declared_sizes),
    Experiment("f16 kept", "does f16 stay f16 at the border?", "FLOAT16 in, FLOAT16 out", PUBLISHED, _half_kept),
    Experiment("int64 narrowed", "as what are int64 inputs shown?", "INT32", PUBLISHED, _integers_narrowed),
    Experiment("other device", "is state of another device refused?", ACCEPTED, SOURCE_CODE, _other_device),
    Experiment("hidden upload", "does a host input cross the bus at each predict?", "yes", SOURCE_CODE, _hidden_upload),
    Experiment("peek", "does the peek graph give the norms of the states?", "yes", ARITHMETIC, _peek),
    Experiment(
        "op alone", "does the op agree with the reference, other slots untouched?", "yes", ARITHMETIC, _op_alone
    ),
)


def probe_spec() -> Any:
    """Dimensions of the peek and of the op: the tiny model's."""
    from qwen_npu.spec import preset

    return preset("tiny")


def write_graphs(directory: Path, *, fused: bool) -> None:
    """The ONNX files of all experiments. `fused`: the op as a `Custom` node, for the vendor's converter."""
    import onnx

    from qwen_npu.graphs.peek import peek_graph
    from qwen_npu.graphs.targets import Form

    directory.mkdir(parents=True, exist_ok=True)
    helper, kinds = onnx.helper, onnx.TensorProto

    def save(name: str, nodes: list[Any], inputs: Any, outputs: Any, constants: Any = (), **facts: str) -> None:
        tensors = [onnx.numpy_helper.from_array(array, key) for key, array in constants]
        graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        for key, value in facts.items():
            helper.set_model_props(model, {{"in_place": IN_PLACE_KEY, "buckets": BUCKETS_KEY}[key]: value})
        (directory / f"{name}.onnx").write_bytes(model.SerializeToString())

    def value(name: str, shape: Sequence[int | str], kind: int = kinds.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, list(shape))

    one = [("one", np.float32(1))]
    add = [helper.make_node("Add", ["x", "one"], ["y"])]
    save("add", add, [value("x", (2, 4))], [value("y", (2, 4))], one)
    save("dynamic", add, [value("x", (1, "S"))], [value("y", (1, "S"))], one)
    save("declared", add, [value("x", (1, "S"))], [value("y", (1, "S"))], one, buckets=json.dumps({"S": [4, 8]}))
    step = [helper.make_node("Add", ["past", "x"], ["present"]), helper.make_node("Mul", ["present", "one"], ["out"])]
    states = [value("x", (2, 4)), value("past", (2, 4))]
    save("step", step, states, [value("out", (2, 4)), value("present", (2, 4))], one)
    scatter = [
        helper.make_node("Cast", ["slot"], ["at"], to=kinds.INT64),
        helper.make_node("ScatterND", ["pool", "at", "row"], ["present_pool"]),
    ]
    given = [value("slot", (1, 1), kinds.INT32), value("row", (1, 4)), value("pool", (5, 4))]
    save("pool", scatter, given, [value("present_pool", (5, 4))], in_place=json.dumps({"present_pool": "pool"}))
    half = [helper.make_node("Add", ["x", "x"], ["y"])]
    save("half", half, [value("x", (2, 4), kinds.FLOAT16)], [value("y", (2, 4), kinds.FLOAT16)])
    ids = [helper.make_node("Cast", ["ids"], ["wide"], to=kinds.FLOAT), helper.make_node("Add", ["wide", "one"], ["y"])]
    save("ids", ids, [value("ids", (1, 4), kinds.INT64)], [value("y", (1, 4))], one)
    rows = TIMED_BYTES // 4096
    pick = [helper.make_node("Gather", ["x", "first"], ["y"], axis=0)]
    save("row", pick, [value("x", (rows, 1024))], [value("y", (1, 1024))], [("first", np.zeros(1, np.int64))])
    spec = probe_spec()
    (directory / "peek.onnx").write_bytes(peek_graph(spec, "device", capacity=PEEK_CAPACITY))
    form = Form("ascend310p", fused=True) if fused else Form()
    sizes = {"sequences": 1, "tokens": 2, "width": 2, "slots": 4}
    (directory / "op.onnx").write_bytes(form.op(spec, sizes, "float16"))
