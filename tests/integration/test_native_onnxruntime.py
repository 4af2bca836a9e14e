"""The native kernel as an onnxruntime op library, and the op as a graph: with the kernel, and on its function body."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_npu.errors import OpError
from qwen_npu.graphs.op import op_graph
from qwen_npu.rgdr import chunk_gated_delta_rule, native, recurrent_gated_delta_rule
from qwen_npu.spec import ModelSpec, preset

kernels = pytest.importorskip("qwen_npu_kernels")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(native() is None, reason="the native kernel is switched off")

OP_INPUTS = (
    *("query", "key", "value", "beta", "state", "actual_seq_lengths", "ssm_state_indices"),
    *("g", "gk", "num_accepted_tokens"),
)
CHUNK_INPUTS = ("query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g")
INTEGERS = {"actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens"}
ELEMENT = {"float32": 1, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}


@cache
def session_of(model: bytes, native: bool = True, threads: int = 1) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are expected here, and are asserted on
    if native:
        options.register_custom_ops_library(kernels.onnxruntime_library_path())
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@cache
def node_model(op: str, given_inputs: tuple[tuple[str, str, int], ...], activation: str, state: str) -> bytes:
    """One bare node without a function body. given_inputs: (name, dtype, rank)."""
    helper = onnx.helper
    names = [name for name, _, _ in given_inputs]
    order = OP_INPUTS if op == "RecurrentGatedDeltaRule" else CHUNK_INPUTS
    inputs = [name if name in names else "" for name in order]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(op, inputs, ["out", "present"], domain="qwen_npu", scale_value=0.25)
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(n, ELEMENT[d], [f"{n}_{i}" for i in range(r)]) for n, d, r in given_inputs],
        [
            helper.make_tensor_value_info("out", ELEMENT[activation], ["a", "b", "c"]),
            helper.make_tensor_value_info("present", ELEMENT[state], ["d", "e", "f", "g"]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("qwen_npu", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def run_node(op: str, feeds: dict[str, np.ndarray], threads: int = 1) -> list[np.ndarray]:
    given_inputs = tuple((name, array.dtype.name, array.ndim) for name, array in feeds.items())
    state = feeds["state" if op == "RecurrentGatedDeltaRule" else "initial_state"].dtype.name
    session = session_of(node_model(op, given_inputs, feeds["query"].dtype.name, state), threads=threads)
    return list(session.run(None, feeds))


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def feeds_of(
    lengths: tuple[int, ...],
    *,
    width: int = 0,
    dims: tuple[int, int, int, int] = (2, 4, 16, 24),
    activation: str = "float32",
    pool: str = "float32",
    integers: str = "int64",
    gk: str = "",
    accepted: tuple[int, ...] | None = None,
) -> dict[str, np.ndarray]:
    """A right call. dims: NK, NV, DK, DV."""
    rng = np.random.default_rng(0)
    (nk, nv, dk, dv), tokens = dims, sum(lengths)
    used = len(lengths) * width if width else tokens
    slots = rng.permutation(used + 1)[:used].astype(integers)
    feeds = {
        "query": unit(rng, tokens, nk, dk).astype(activation),
        "key": unit(rng, tokens, nk, dk).astype(activation),
        "value": rng.standard_normal((tokens, nv, dv)).astype(activation),
        "beta": rng.random((tokens, nv)).astype(activation),
        "state": rng.standard_normal((used + 1, nv, dv, dk)).astype(pool),
        "actual_seq_lengths": np.array(lengths, integers),
        "ssm_state_indices": slots.reshape(-1, width) if width else slots,
        "g": -rng.exponential(1.0, (tokens, nv)).astype(np.float32),
    }
    if gk:
        feeds["gk"] = -rng.exponential(1.0, (tokens, nv) if gk == "scalar" else (tokens, nv, dk)).astype(np.float32)
    if accepted is not None:
        feeds["num_accepted_tokens"] = np.array(accepted, integers)
    return feeds


def run_op(feeds: dict[str, np.ndarray], scale: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    pool = feeds["state"].copy()
    return recurrent_gated_delta_rule(**{**feeds, "state": pool}, scale=scale), pool


@pytest.mark.parametrize("integers", ["int32", "int64"])
@pytest.mark.parametrize("pool", ["float32", "float16"])
@pytest.mark.parametrize("activation", ["float32", "float16"])
@pytest.mark.parametrize("gk", ["", "scalar", "vector"])
def test_node_equals_op(activation: str, pool: str, integers: str, gk: str) -> None:
    feeds = feeds_of((1, 3, 2), width=4, activation=activation, pool=pool, integers=integers, gk=gk, accepted=(4, 0, 2))
    out, state = run_node("RecurrentGatedDeltaRule", feeds)
    expected_out, expected = run_op(feeds)
    assert out.tobytes() == expected_out.tobytes()
    assert state.tobytes() == expected.tobytes()


def test_node_with_flat_indices_and_nothing_optional() -> None:
    feeds = feeds_of((2, 1))
    del feeds["g"]
    out, state = run_node("RecurrentGatedDeltaRule", feeds, threads=2)
    expected_out, expected = run_op(feeds)
    assert out.tobytes() == expected_out.tobytes()
    assert state.tobytes() == expected.tobytes()


def test_bf16_node() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    feeds = feeds_of((2, 1), activation="float32")
    floats = [name for name in feeds if name not in INTEGERS | {"g"}]
    feeds.update({name: feeds[name].astype(ml_dtypes.bfloat16) for name in floats})
    given_inputs = tuple((name, array.dtype.name, array.ndim) for name, array in feeds.items())
    session = session_of(node_model("RecurrentGatedDeltaRule", given_inputs, "bfloat16", "bfloat16"))
    binding = session.io_binding()
    values = {}
    for name, array in feeds.items():
        bits = array.view(np.uint16) if name in floats else array
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENT[array.dtype.name])
        binding.bind_ortvalue_input(name, values[name])
    out = np.zeros(feeds["value"].shape, np.uint16)
    present = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(out, ELEMENT["bfloat16"])
    binding.bind_ortvalue_output("out", present)
    binding.bind_ortvalue_output("present", values["state"])  # in place
    expected_out, expected = run_op(feeds)
    session.run_with_iobinding(binding)
    assert out.tobytes() == expected_out.tobytes()
    assert feeds["state"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("lengths", [(5,), (1, 40), (0, 3)])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_chunk_node_equals_op(lengths: tuple[int, ...], kind: str) -> None:
    feeds = feeds_of(lengths, activation=kind, pool=kind, integers="int32")
    feeds = {name: feeds[name] for name in CHUNK_INPUTS if name in feeds}
    rng = np.random.default_rng(1)
    feeds["initial_state"] = rng.standard_normal((len(lengths), 4, 24, 16)).astype(kind)
    out, final = run_node("ChunkGatedDeltaRule", feeds, threads=2)
    expected_out, expected = chunk_gated_delta_rule(**feeds, scale=0.25)
    assert out.tobytes() == expected_out.tobytes()
    assert final.tobytes() == expected.tobytes()


def in_place(session: Any, feeds: dict[str, np.ndarray], state_output: str) -> np.ndarray:
    """Runs with the pool's own memory bound as input and output; gives out. The pool in `feeds` is updated."""
    binding = session.io_binding()
    pool = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feeds["state"], ELEMENT[feeds["state"].dtype.name])
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array) if name != "state" else binding.bind_ortvalue_input(name, pool)
    binding.bind_output("out", "cpu")
    binding.bind_ortvalue_output(state_output, pool)
    session.run_with_iobinding(binding)
    return np.array(binding.get_outputs()[0].numpy())


def test_in_place_touches_only_the_slots_it_writes() -> None:
    feeds = feeds_of((2, 1), width=2, accepted=(2, 1))
    expected_out, expected = run_op(feeds)
    given_inputs = tuple((name, array.dtype.name, array.ndim) for name, array in feeds.items())
    session = session_of(node_model("RecurrentGatedDeltaRule", given_inputs, "float32", "float32"))
    out = in_place(session, feeds, "present")
    assert out.tobytes() == expected_out.tobytes()
    assert feeds["state"].tobytes() == expected.tobytes()


def test_a_refused_call_leaves_the_pool_as_it_was() -> None:
    feeds = feeds_of((2, 1), width=2, accepted=(2, 3))
    before = feeds["state"].tobytes()
    given_inputs = tuple((name, array.dtype.name, array.ndim) for name, array in feeds.items())
    session = session_of(node_model("RecurrentGatedDeltaRule", given_inputs, "float32", "float32"))
    with pytest.raises(Exception, match=r"sequence 1: num_accepted_tokens is 3, allowed 0\.\.2"):
        in_place(session, feeds, "present")
    assert feeds["state"].tobytes() == before


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("key", (3, 2, 15)),
        ("value", (2, 4, 24)),
        ("value", (3, 3, 24)),
        ("beta", (3, 2)),
        ("state", (3, 4, 16, 24)),
        ("g", (2, 4)),
        ("ssm_state_indices", (4,)),
        ("ssm_state_indices", (3, 2)),
        ("ssm_state_indices", (2, 0)),
        ("actual_seq_lengths", (2, 1)),
        ("num_accepted_tokens", (3,)),
        ("gk", (3, 4, 15)),
        ("gk", (3, 1)),
    ],
)
def test_wrong_shapes_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    feeds = feeds_of((2, 1), width=2, accepted=(1, 1))
    feeds[name] = np.ones(shape, feeds[name].dtype if name in feeds else np.float32)
    with pytest.raises(Exception, match=name if name != "value" else "value|beta|NV"):
        run_node("RecurrentGatedDeltaRule", feeds)
    with pytest.raises(OpError):
        run_op(feeds)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(-1, 9), min_size=1, max_size=3),
    slots=st.lists(st.integers(-1, 6), min_size=12, max_size=12),
    accepted=st.lists(st.integers(-1, 5), min_size=3, max_size=3),
    rows=st.booleans(),
    tokens=st.integers(1, 8),
)
def test_node_and_op_refuse_the_same_calls(
    lengths: list[int], slots: list[int], accepted: list[int], rows: bool, tokens: int
) -> None:
    """The checks exist twice, for Python and for graphs; here they are held together."""
    feeds = feeds_of((tokens,), dims=(1, 1, 2, 2))
    feeds["state"] = np.resize(feeds["state"], (6, 1, 2, 2))
    feeds["actual_seq_lengths"] = np.array(lengths)
    feeds["ssm_state_indices"] = np.array(slots).reshape(3, 4)[: len(lengths)] if rows else np.array(slots[:tokens])
    feeds["num_accepted_tokens"] = np.array(accepted[: len(lengths)])
    try:
        expected = run_op(feeds)
    except OpError as error:
        with pytest.raises(Exception, match="RecurrentGatedDeltaRule") as refused:
            run_node("RecurrentGatedDeltaRule", feeds)
        subject, message = error.problem.split(":")[0], str(refused.value)
        # Of several faults each names the first it meets; slots that clash are met earlier in the graph.
        assert "sequence" not in subject or subject in message or "slot" in subject or "is written by" in message
        return
    out, state = run_node("RecurrentGatedDeltaRule", feeds)
    assert out.tobytes() == expected[0].tobytes()
    assert state.tobytes() == expected[1].tobytes()


def small_spec() -> ModelSpec:
    return replace(preset("tiny"), nk=2, nv=4, dk=16, dv=24)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize(
    ("tokens", "width", "accepted"), [(1, 1, (1, 1)), (1, 4, (4, 1)), (4, 4, (3, 0)), (2, 4, (4, 2))]
)
def test_op_graph_with_kernel_on_its_body_and_in_numpy(
    kind: str, tokens: int, width: int, accepted: tuple[int, int]
) -> None:
    spec = small_spec()
    model = op_graph(spec, sequences=2, tokens=tokens, width=width, slots=2 * width + 1, dtype=kind, pool_dtype=kind)
    feeds = feeds_of((tokens, tokens), width=width, activation=kind, pool=kind, accepted=accepted)
    feeds["num_accepted_tokens"] = feeds["num_accepted_tokens"].astype(np.int32)
    expected_out, expected = run_op(feeds, spec.dk**-0.5)
    tolerance = 2e-6 if kind == "float32" else 2e-3
    for with_kernel in (True, False):
        feeds_now = {**feeds, "state": feeds["state"].copy()}
        out = in_place(session_of(model, with_kernel), feeds_now, "present_state")
        if with_kernel:
            assert out.tobytes() == expected_out.tobytes()
            assert feeds_now["state"].tobytes() == expected.tobytes()
        else:
            np.testing.assert_allclose(out.astype(float), expected_out.astype(float), atol=tolerance)
            np.testing.assert_allclose(feeds_now["state"].astype(float), expected.astype(float), atol=tolerance)


def test_the_library_is_loaded_and_unloaded_without_the_python_module(tmp_path: Path) -> None:
    feeds = feeds_of((2, 1))
    given_inputs = tuple((name, array.dtype.name, array.ndim) for name, array in feeds.items())
    (tmp_path / "node.onnx").write_bytes(node_model("RecurrentGatedDeltaRule", given_inputs, "float32", "float32"))
    np.savez(tmp_path / "feeds.npz", **feeds)
    code = f"""
import sys, numpy as np, onnxruntime as ort
feeds = dict(np.load("feeds.npz"))
for _ in range(3):
    options = ort.SessionOptions()
    options.register_custom_ops_library({kernels.onnxruntime_library_path()!r})
    session = ort.InferenceSession("node.onnx", options)
    out, state = session.run(None, feeds)
    del session, options
assert "qwen_npu_kernels" not in sys.modules
np.save("out.npy", out)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert np.array_equal(np.load(tmp_path / "out.npy"), run_op(feeds)[0])
