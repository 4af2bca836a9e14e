"""The language graphs against themselves: at once or token by token, padding, growing and fixed, what is never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.graphs.text import decode_graph, prefill_graph
from qwen_npu.spec import NUMERICS
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, random_checkpoint
from tests.unit.graphs.runner import GraphRunner, native_library

Array = NDArray[Any]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("text")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=48, buckets=[16])


def prompt(length: int, seed: int = 0) -> tuple[Array, Array]:
    return np.random.default_rng(seed).integers(0, 100, length), np.tile(np.arange(length), (3, 1))


def gap(found: Array, wanted: Array) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found.astype(np.float32) - wanted.astype(np.float32)).max())


@given(length=st.integers(1, 20), pads=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_left_padding_changes_nothing(bundle: Bundle, numerics: Any, length: int, pads: int, seed: int) -> None:
    plain, padded = GraphRunner(bundle, numerics), GraphRunner(bundle, numerics)
    logits = plain.prefill(*prompt(length, seed))
    scale = float(np.abs(logits).max())
    assert gap(padded.prefill(*prompt(length, seed), pads=pads), logits) < (1e-4 if numerics == "f32" else 2e-3 * scale)
    for name, state in plain.states.items():
        limit = 1e-5 * max(1, np.abs(state).max()) if numerics == "f32" else 1e-3 * np.abs(state).max()
        assert gap(padded.states[name], state) < limit, name


@pytest.mark.parametrize("graph", ["decode_growing", "decode_fixed"])
def test_token_by_token_equals_prefill(bundle: Bundle, graph: Any) -> None:
    """From states of zeros and no past at all: the decode graphs stand on their own."""
    ids, positions = prompt(7)
    whole = GraphRunner(bundle)
    logits = whole.prefill(ids, positions, all_logits=True)
    spec = bundle.spec
    states = {
        "conv": np.zeros(spec.conv_shape(), np.float32),
        "recurrent": np.zeros(spec.recurrent_shape(), np.float32),
        "kv": np.zeros(spec.kv_shape(0), np.float32),
    }
    single = GraphRunner(bundle, states=states)
    for token, wanted in zip(ids.tolist(), logits, strict=True):
        assert gap(single.step(token, graph=graph), wanted) < 1e-4
    for name, state in whole.states.items():
        found = single.states[name][:, :, :, : len(ids)] if name == "kv" else single.states[name]
        assert gap(found, state) < 1e-4, name


@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_fixed_never_reads_behind_its_position(bundle: Bundle, numerics: Any) -> None:
    clean, dirty = GraphRunner(bundle, numerics), GraphRunner(bundle, numerics)
    for runner in (clean, dirty):
        runner.prefill(*prompt(6))
        runner.pad_to_capacity()
    dirty.states["kv"][:, :, :, 6:] = np.nan
    for token in (1, 2, 3):
        assert gap(dirty.step(token, graph="decode_fixed"), clean.step(token, graph="decode_fixed")) == 0
    assert np.array_equal(dirty.states["kv"][:, :, :, :9], clean.states["kv"][:, :, :, :9])
    assert np.isnan(dirty.states["kv"][:, :, :, 9:]).all()


def test_fixed_writes_one_position_and_keeps_the_rest_bit_for_bit(bundle: Bundle) -> None:
    runner = GraphRunner(bundle, "device")
    runner.prefill(*prompt(5))
    runner.pad_to_capacity()
    marked = np.arange(runner.states["kv"].size).reshape(runner.states["kv"].shape) % 1999
    past = np.where(np.arange(bundle.capacity)[:, None] >= 6, marked, runner.states["kv"]).astype(np.float16)
    runner.states["kv"] = past.copy()
    runner.step(3, graph="decode_fixed")
    changed = (runner.states["kv"] != past).any(axis=(0, 1, 2, 4))
    assert np.flatnonzero(changed).tolist() == [5]


def test_last_position_of_the_capacity_is_usable(bundle: Bundle) -> None:
    fixed, growing = GraphRunner(bundle), GraphRunner(bundle)
    for runner in (fixed, growing):
        runner.prefill(*prompt(bundle.capacity - 1))
    assert gap(fixed.step(9, graph="decode_fixed"), growing.step(9)) == 0
    assert np.array_equal(fixed.states["kv"], growing.states["kv"])


def test_device_numerics_round_where_the_box_does(bundle: Bundle) -> None:
    """The recurrent state is f32 outside and f16 at the op's boundary: after prefill and after each step."""
    runner = GraphRunner(bundle, "device")
    runner.prefill(*prompt(9))
    for token in (None, 4, 5):
        if token is not None:
            runner.step(token)
        state = runner.states["recurrent"]
        assert state.dtype == np.float32
        assert np.array_equal(state, state.astype(np.float16).astype(np.float32))
        assert np.abs(state).max() > 0.1
    exact = GraphRunner(bundle, "f32")
    exact.prefill(*prompt(9))
    state = exact.states["recurrent"]
    assert not np.array_equal(state, state.astype(np.float16).astype(np.float32))


def test_device_numerics_round_the_state_that_comes_in(bundle: Bundle) -> None:
    """As the fused node does: two states that are one in f16 give one answer."""
    runner = GraphRunner(bundle, "device")
    runner.prefill(*prompt(9))
    other = GraphRunner(bundle, "device", states=dict(runner.states), tokens=runner.tokens)
    other.states["recurrent"] = runner.states["recurrent"] * np.float32(1 + 1e-5)
    assert np.array_equal(other.step(4), runner.step(4))


def test_image_rows_go_to_image_tokens_in_order(bundle: Bundle) -> None:
    """A row that equals a token's own embedding gives what that token gives."""
    ids, positions = prompt(8)
    table = bundle.weights["embed"]
    embed = np.fromfile(bundle.directory / "weights.bin", np.float32, table.nbytes // 4, offset=table.offset)
    embed = embed.reshape(table.shape)
    runner = GraphRunner(bundle)
    wanted = runner.prefill(ids, positions, all_logits=True)
    places = [1, 2, 6]
    masked = ids.copy()
    masked[places] = IMAGE_TOKEN
    assert gap(runner.prefill(masked, positions, embed[ids[places]], all_logits=True), wanted) < 1e-5
    assert gap(runner.prefill(masked, positions, embed[ids[places[::-1]]], all_logits=True), wanted) > 0.01


def test_more_image_tokens_than_rows_cannot_run(bundle: Bundle) -> None:
    with pytest.raises(Exception, match=r"(?i)indices|bounds|range"):
        GraphRunner(bundle).prefill(np.array([IMAGE_TOKEN] * 3), np.tile(np.arange(3), (3, 1)), np.zeros((2, 48)))


@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_native_kernel_and_function_body_agree(bundle: Bundle, numerics: Any) -> None:
    if not native_library():
        pytest.skip("the native kernel is not installed")
    body, native = GraphRunner(bundle, numerics), GraphRunner(bundle, numerics, native=True)
    limit = 1e-4 if numerics == "f32" else 0.02
    assert gap(native.prefill(*prompt(13), pads=3), body.prefill(*prompt(13), pads=3)) < limit
    for token in range(4):
        assert gap(native.step(token), body.step(token)) < limit
    for name, state in body.states.items():
        assert gap(native.states[name], state) < limit, name


def test_building_twice_gives_the_same_file(bundle: Bundle) -> None:
    for numerics in NUMERICS:
        prefill = prefill_graph(bundle.spec, numerics, bundle.weights, buckets=bundle.buckets)
        fixed = decode_graph(bundle.spec, numerics, bundle.weights, capacity=bundle.capacity)
        assert prefill == bundle.path("prefill", numerics=numerics).read_bytes()
        assert fixed == bundle.path("decode_fixed", numerics=numerics).read_bytes()


@pytest.mark.parametrize("numerics", ["f32", "device"])
@pytest.mark.parametrize("graph", ["vision", "prefill", "prefill_all", "decode_growing", "decode_fixed"])
def test_files_declare_their_contract_and_pass_the_checker(bundle: Bundle, graph: Any, numerics: Any) -> None:
    import onnx

    path: Path = bundle.path(graph, numerics=numerics)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    described = bundle.contract(graph, numerics=numerics)
    for values, tensors in ((model.graph.input, described.inputs), (model.graph.output, described.outputs)):
        assert [value.name for value in values] == [tensor.name for tensor in tensors]
        for value, tensor in zip(values, tensors, strict=True):
            kind = value.type.tensor_type
            assert onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) == np.dtype(tensor.dtype)
            assert tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim) == tensor.shape
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {
        "ScatterElements",
        "Einsum",
        "GreaterOrEqual",
        "Where",
        "Scan",
        "Loop",
    }  # converters refuse them


def test_graphs_of_the_real_sizes_are_small_files() -> None:
    """Weights stay outside, and nothing in a graph grows with the model: a 4B decode is a quarter of a megabyte."""
    import onnx

    from qwen_npu.graphs.nodes import RECURRENT
    from qwen_npu.graphs.weights import Piece
    from qwen_npu.spec import preset

    spec = preset("4b")

    class Anything(dict[str, Piece]):
        def __missing__(self, name: str) -> Piece:
            return Piece(0, (1,))

    content = decode_graph(spec, "device", Anything(), capacity=2048)
    assert len(content) < 2**18
    model = onnx.load_from_string(content)
    assert sum(node.op_type == RECURRENT for node in model.graph.node) == 24
