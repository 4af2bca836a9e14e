"""The plain form of the graphs computes what the bundle's own compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.contract import OP_DOMAIN
from qwen_npu.errors import ConversionError
from qwen_npu.graphs.builder import OPSET
from qwen_npu.graphs.lowering_plain import lower
from qwen_npu.rgdr.plan import plan_chunk
from qwen_npu.rgdr.reference import recurrence
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, random_checkpoint
from tests.unit.graphs.runner import GraphRunner

GRAPHS: tuple[Any, ...] = ("prefill", "decode_growing", "decode_fixed")
NO_KERNEL = {"Scan", "Loop", "If", "Cos", "CastLike", "Einsum", "GreaterOrEqual", "ScatterElements"}
HEADS = [
    {},  # DK != DV, NV = 4*NK
    {"linear_num_value_heads": 2, "linear_key_head_dim": 24, "linear_value_head_dim": 16},  # NV = NK, DK > DV
]


@pytest.fixture(scope="module", params=HEADS, ids=["NV=4NK", "NV=NK"])
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    directory = tmp_path_factory.mktemp("lowering")
    checkpoint = random_checkpoint(directory / "checkpoint", **request.param)
    bundle = build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=48, buckets=[16, 32])
    plain = dataclasses.replace(bundle, directory=directory / "plain")
    plain.directory.mkdir()
    for graph in (*GRAPHS, "vision"):
        model = lower(bundle.path(graph, numerics="f32"), bundle.spec, longest_tokens=32)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(plain.path(graph, numerics="f32")))
    return bundle, plain


def test_only_plain_operators(bundles: tuple[Bundle, Bundle]) -> None:
    for graph in (*GRAPHS, "vision"):
        model = onnx.load(str(bundles[1].path(graph, numerics="f32")))
        assert {node.domain for node in model.graph.node} == {""}
        assert not NO_KERNEL & {node.op_type for node in model.graph.node}
        assert not model.functions
        assert all(not tensor.external_data for tensor in model.graph.initializer)
        ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
        biases = [node.input[2] for node in model.graph.node if node.op_type == "Gemm" and len(node.input) > 2]
        assert {ranks.get(bias) for bias in biases} <= {1}


@pytest.mark.parametrize(("length", "pads"), [(1, 0), (1, 15), (7, 9), (16, 0), (31, 1)])
def test_prefill_and_decode_equal_the_bundles_own(bundles: tuple[Bundle, Bundle], length: int, pads: int) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, 100, length)
    embeds = rng.normal(size=(2, bundles[0].spec.hidden)).astype(np.float32)
    if length >= 7:
        ids[3:5] = IMAGE_TOKEN
    positions = np.tile(np.arange(length), (3, 1))
    wanted, found = (GraphRunner(bundle) for bundle in bundles)
    logits = [runner.prefill(ids, positions, embeds, pads=pads) for runner in (wanted, found)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
    for graph in ("decode_growing", "decode_fixed"):
        for token in (3, 90, 5):
            steps = [runner.step(token, 2, graph=graph) for runner in (wanted, found)]
            assert np.abs(steps[0] - steps[1]).max() < 1e-4
    for name, state in wanted.states.items():
        assert np.abs(state - found.states[name]).max() < 1e-4 * max(1, np.abs(state).max()), name


def test_vision_equals_the_bundles_own(bundles: tuple[Bundle, Bundle]) -> None:
    pixels = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    wanted, found = (GraphRunner(bundle).vision(pixels, (2, 4)) for bundle in bundles)
    assert np.abs(wanted - found).max() < 1e-5


@pytest.mark.parametrize("tokens", [32, 128])
def test_chunk_is_stable_where_keys_are_alike(bundles: tuple[Bundle, Bundle], tokens: int, tmp_path: Path) -> None:
    """A flat picture gives nearly equal keys: the power series for the inverse is off by 1e7 there, doubling is not."""
    spec = bundles[0].spec
    shapes = {
        "query": (tokens, spec.nk, spec.dk),
        "key": (tokens, spec.nk, spec.dk),
        "value": (tokens, spec.nv, spec.dv),
        "beta": (tokens, spec.nv),
        "initial_state": (1, spec.nv, spec.dv, spec.dk),
        "g": (tokens, spec.nv),
    }
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feed["key"][:] = feed["key"][0, 0] / np.linalg.norm(feed["key"][0, 0])
    feed["beta"][:], feed["g"][:] = 0.99, -1e-3
    path = tmp_path / "chunk.onnx"
    onnx.save(chunk_model(shapes), str(path))
    onnx.save(lower(path, spec, longest_tokens=128), str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    out, state = session.run(None, feed)
    exact = {name: array.astype(np.float64) for name, array in feed.items()}
    wanted, after = np.empty_like(exact["value"]), np.empty_like(exact["initial_state"])
    arguments = [exact[name] for name in ("query", "key", "value", "beta", "initial_state")]
    plan = plan_chunk([tokens], tokens, 1)
    recurrence(*arguments, after, wanted, plan, g=exact["g"], scale=spec.dk**-0.5)
    assert np.abs(out - wanted).max() < 1e-4
    assert np.abs(state - after).max() < 1e-4


def chunk_model(shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    lengths = onnx.numpy_helper.from_array(np.array([0], np.int64), "lengths")
    names = ["query", "key", "value", "beta", "initial_state", "lengths", "g"]
    scale = shapes["query"][2] ** -0.5
    node = helper.make_node("ChunkGatedDeltaRule", names, ["out", "state"], domain=OP_DOMAIN, scale_value=scale)
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in ("out", "state")]
    graph = helper.make_graph([node], "chunk", inputs, outputs, [lengths])
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(OP_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def test_what_has_no_plain_form(bundles: tuple[Bundle, Bundle]) -> None:
    bundle = bundles[0]
    with pytest.raises(ConversionError, match="f16 inputs"):
        lower(bundle.path("decode_fixed", numerics="device"), bundle.spec)
    verify = bundle.verify(width=2, sequences=1, slots=4, tokens=1, numerics="f32")
    with pytest.raises(ConversionError, match="no plain form"):
        lower(verify, bundle.spec)
