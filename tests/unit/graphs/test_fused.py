"""The graphs with `Custom` nodes: read back, counted at real size, and run with the nodes' meaning in NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qwen_npu import contract
from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.errors import ConversionError, UsageError
from qwen_npu.graphs.fused import ATTENTION, CUSTOM, SCATTER, check
from qwen_npu.graphs.nodes import CHUNK, RECURRENT
from qwen_npu.graphs.targets import Form
from qwen_npu.graphs.verify import verify_graph
from qwen_npu.graphs.weights import Piece
from qwen_npu.rgdr.plan import plan_chunk
from qwen_npu.rgdr.reference import recurrence
from qwen_npu.spec import preset
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, random_checkpoint
from tests.unit.graphs.runner import GraphRunner, open_session

FUSED = Form("ascend310p", fused=True)


class AnyWeight(Mapping[str, Piece]):
    """A table for graphs whose weights nobody reads."""

    def __getitem__(self, name: str) -> Piece:
        return Piece(0, (1, 1))

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("fused")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=12, buckets=[8])


def test_4b_decode_has_24_16_8_nodes() -> None:
    spec = preset("4b")
    fixed = FUSED.decode(spec, "device", AnyWeight(), capacity=2048)
    assert check(fixed) == Counter({RECURRENT: 24, SCATTER: 16, ATTENTION: 8})
    assert len(fixed) < 2**20
    growing = FUSED.decode(spec, "device", AnyWeight(), capacity=None)
    assert check(growing) == Counter({RECURRENT: 24})
    prefill = FUSED.prefill(spec, "device", AnyWeight(), all_logits=False, tokens=None)
    assert check(prefill) == Counter({CHUNK: 24})
    sizes = {"tokens": 4, "width": 4, "sequences": 2, "slots": 8, "capacity": 2048}
    assert check(FUSED.verify(spec, "device", AnyWeight(), sizes)) == Counter({RECURRENT: 24})


def test_attributes_of_the_nodes_as_deployed() -> None:
    spec = preset("4b")
    model = onnx.load_model_from_string(FUSED.decode(spec, "device", AnyWeight(), capacity=2048))
    makers = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[str, Any] = {}
    for node in model.graph.node:
        if node.op_type == CUSTOM:
            values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            found[values["type"].decode()] = (node, values)
    node, values = found[RECURRENT]
    assert values["input_names"] == [
        b"query",
        b"key",
        b"value",
        b"beta",
        b"state",
        b"actual_seq_lengths",
        b"ssm_state_indices",
        b"g",
        b"gk",
        b"num_accepted_tokens",
    ]
    assert values["optional_input_names"] == [b"g", b"gk", b"num_accepted_tokens"]
    assert values["output_names"] == [b"out", b"state"]
    assert (values["output_num"], values["output_types"], values["dtype"]) == (2, [42, 42], 10)
    assert values["input_index"] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert values["scale_value"] == pytest.approx(128**-0.5)
    assert values["outputs_shape"] == b"3,1,32,128,4,1,32,128,128"
    assert node.input[6] in constants  # ssm_state_indices: computed, it becomes a OneHot that nothing can map
    assert node.input[8] in constants
    for name in node.input[:4]:
        assert makers[name].op_type == "Cast"
        assert makers[name].attribute[0].i == onnx.TensorProto.FLOAT16
    node, values = found[ATTENTION]
    assert values["input_layout"] == b"BNSD"
    assert (values["block_size"], values["inner_precise"]) == (0, 1)
    assert (values["num_heads"], values["num_key_value_heads"]) == (16, 16)
    assert values["optional_input_names"] == [b"atten_mask"]
    node, values = found[SCATTER]
    assert values["output_names"] == [b"var"]
    assert (values["reduce"], values["axis"]) == (b"update", 2)
    names = [item for item in node.attribute if item.name == "optional_input_names"]
    assert [(item.type, list(item.strings)) for item in names] == [(onnx.AttributeProto.STRINGS, [])]
    assert not {"Scan", "Loop", "If"} & {node.op_type for node in model.graph.node}


def test_a_wrong_node_is_found_when_read_back() -> None:
    content = FUSED.decode(preset("4b"), "device", AnyWeight(), capacity=64)

    def broken(change: Any) -> bytes:
        model = onnx.load_model_from_string(content)
        nodes = [node for node in model.graph.node if node.op_type == CUSTOM]
        change(next(node for node in nodes if any(item.s == RECURRENT.encode() for item in node.attribute)))
        return bytes(model.SerializeToString())

    def attribute(node: Any, name: str) -> Any:
        return next(item for item in node.attribute if item.name == name)

    def types(node: Any) -> None:
        attribute(node, "output_types").ints[:] = [43, 42]

    def gap(node: Any) -> None:
        attribute(node, "input_index").ints[:] = range(8)

    def required(node: Any) -> None:
        attribute(node, "input_index").ints[:] = [0, 1, 2, 3, 5, 6, 7, 8, 9]

    def kind(node: Any) -> None:
        attribute(node, "type").s = b"RecurrentGatedDelta"

    def shape(node: Any) -> None:
        node.attribute.remove(attribute(node, "outputs_shape"))

    for change, message in (
        (types, r"output_types is \(43, 42\)"),
        (gap, r"input_index is .* for 9 inputs"),
        (required, r"inputs \['state'\] are absent"),
        (kind, "type is 'RecurrentGatedDelta'"),
        (shape, "outputs_shape is None"),
    ):
        with pytest.raises(ConversionError, match=message):
            check(broken(change))
    with pytest.raises(ConversionError, match="functions"):
        check(Form().decode(preset("4b"), "device", AnyWeight(), capacity=64))


def test_plain_targets_have_no_pools() -> None:
    for form in (Form("ascend310p", fused=False), Form("mslite-cpu")):
        with pytest.raises(UsageError, match="no graph on slot pools"):
            form.verify(preset("4b"), "device", AnyWeight(), {"tokens": 1})


class Custom(OpRun):
    """What each `Custom` node means, in NumPy; checks what it is given on the way."""

    op_domain = ""

    def _run(self, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        kind = attributes["type"]
        if kind == SCATTER:
            var, position, updates = inputs
            assert var.dtype == updates.dtype == np.float16
            written = var.copy()
            written[:, :, position] = updates
            return (written,)
        if kind == ATTENTION:
            return (self._attention(*inputs, attributes),)
        assert [array.dtype for array in inputs[:5]] == [np.float16] * 5
        wide = [array.astype(np.float32) for array in inputs[:5]]
        query, key, value, beta, state = wide
        g = inputs[6] if kind == CHUNK else inputs[7]
        tokens = len(query)
        out, after = np.empty_like(value), np.empty_like(state)
        recurrence(
            query,
            key,
            value,
            beta,
            state,
            after,
            out,
            plan_chunk([tokens], tokens, 1),
            g=g,
            scale=attributes["scale_value"],
        )
        if kind == RECURRENT:
            shapes = [*([3] + list(out.shape)), *([4] + list(after.shape))]
            assert attributes["outputs_shape"] == ",".join(map(str, shapes))
        else:
            assert inputs[5].dtype == np.int32
        return out.astype(np.float16), after.astype(np.float16)

    def _attention(self, query: Any, key: Any, value: Any, hidden: Any, attributes: Any) -> np.ndarray:
        assert hidden.dtype == bool
        assert query.shape[1] == key.shape[1] == attributes["num_heads"] == attributes["num_key_value_heads"]
        scores = query.astype(np.float32) @ key.astype(np.float32).swapaxes(2, 3) * attributes["scale_value"]
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.asarray(weights @ value.astype(np.float32)).astype(np.float16)


def evaluator(bundle: Bundle, name: str, content: bytes) -> ReferenceEvaluator:
    path = bundle.directory / f"test-{name}.onnx"
    path.write_bytes(content)
    return ReferenceEvaluator(onnx.load(str(path)), new_ops=[Custom])


def test_fused_graphs_compute_what_the_bundles_own_do(bundle: Bundle) -> None:
    spec = bundle.spec
    prefill = evaluator(bundle, "prefill", FUSED.prefill(spec, "device", bundle.weights, all_logits=False, tokens=None))
    decode = evaluator(bundle, "decode", FUSED.decode(spec, "device", bundle.weights, capacity=bundle.capacity))
    runner = GraphRunner(bundle, numerics="device")
    ids = np.array([5, 9, IMAGE_TOKEN, IMAGE_TOKEN, 17, 3])
    positions = np.tile(np.arange(6), (3, 1))
    embeds = np.random.default_rng(0).normal(size=(2, spec.hidden))
    logits = runner.prefill(ids, positions, embeds, pads=2)
    found = prefill.run(
        None,
        {
            "input_ids": np.pad(ids, (2, 0), constant_values=7)[None],
            "attention_mask": np.array([[0, 0] + [1] * 6]),
            "position_ids": np.pad(np.tile(np.arange(6), (4, 1)), ((0, 0), (2, 0)))[:, None],
            "image_embeds": embeds.astype(np.float16),
        },
    )
    close(found[0][0, 0], logits)
    close(found[2], runner.states["recurrent"])
    runner.pad_to_capacity()
    states = [runner.states[name] for name in ("conv", "recurrent", "kv")]
    for step, token in enumerate((4, 88, 61)):
        position = 6 + step
        mask = (np.arange(bundle.capacity) <= position).astype(np.int64)[None]
        feed = {
            "input_ids": np.array([[token]]),
            "attention_mask": mask,
            "position_ids": np.full((4, 1, 1), position),
            "past_conv_states": states[0],
            "past_recurrent_states": states[1],
            "past_kv_cache": states[2],
        }
        logits = runner.step(token, graph="decode_fixed")
        answer, *states = decode.run(None, feed)
        close(answer[0, 0], logits)
        for array, name in zip(states, ("conv", "recurrent", "kv"), strict=True):
            close(array, runner.states[name])


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """f16 at other borders: a few roundings of the largest value."""
    assert found.shape == wanted.shape
    wide, reference = found.astype(np.float32), wanted.astype(np.float32)
    assert np.abs(wide - reference).max() < 1e-2 * np.abs(reference).max()


def test_files_stay_small(bundle: Bundle, tmp_path: Path) -> None:
    content = FUSED.decode(bundle.spec, "device", bundle.weights, capacity=12)
    locations = [
        entry.value
        for tensor in onnx.load_model_from_string(content).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    assert set(locations) == {"weights.bin"}


def test_verify_on_the_whole_cache_gives_the_same(bundle: Bundle) -> None:
    """For the device no size may depend on data: the cache is masked there, not cut."""
    sizes = {"tokens": 2, "width": 2, "sequences": 2, "slots": 4, "capacity": bundle.capacity}
    described = contract.verify(bundle.spec, "f32", **sizes)
    rng = np.random.default_rng(3)
    feed = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in described.inputs if t.dtype == "float32"}
    first = np.array([7, 3])
    feed |= {
        "input_ids": rng.integers(0, 100, (2, 2)),
        "attention_mask": np.ones((2, bundle.capacity), np.int64),
        "position_ids": np.tile(first[:, None] + np.arange(2), (4, 1, 1)),
        "actual_seq_lengths": np.array([2, 2]),
        "ssm_state_indices": np.array([[0, 1], [2, 3]]),
        "num_accepted_tokens": np.array([1, 2], np.int32),
    }
    results = []
    for whole in (False, True):
        path = bundle.directory / f"test-verify-{whole}.onnx"
        path.write_bytes(verify_graph(bundle.spec, "f32", bundle.weights, **sizes, whole_cache=whole))
        results.append(open_session(path).run(None, feed))
    for cut, masked in zip(*results, strict=True):
        assert np.abs(cut - masked).max() < 1e-5 * max(1.0, float(np.abs(cut).max()))
