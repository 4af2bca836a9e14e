"""Prefill in plain ops, bucket by bucket: logits and states of the token recurrence of the bundle's own graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.graphs.lowering_plain import lower_model
from qwen_npu.graphs.targets import Form
from qwen_npu.graphs.weights import WEIGHT_FILE
from qwen_npu.rgdr.plan import plan_chunk
from qwen_npu.rgdr.reference import recurrence
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, random_checkpoint
from tests.unit.graphs.runner import GraphRunner
from tests.unit.graphs.test_lowering_plain import NO_KERNEL, chunk_model

BUCKETS = (1, 16, 48, 64, 100, 192)
"""One token, less than a chunk, one chunk, no multiple of a chunk, several."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("unfused")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=200, buckets=BUCKETS)


def plain_prefill(bundle: Bundle, bucket: int, target: str = "mslite-cpu", numerics: str = "f32") -> Path:
    """Written beside the bundle's weights, which it refers to."""
    form = Form(target, fused=False)  # type: ignore[arg-type]
    path = bundle.directory / f"test-{target}-{bucket}.onnx"
    if not path.is_file():
        path.write_bytes(form.prefill(bundle.spec, numerics, bundle.weights, all_logits=False, tokens=bucket))  # type: ignore[arg-type]
    return path


def feed(bundle: Bundle, bucket: int, pads: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(bucket + pads)
    length = bucket - pads
    ids = rng.integers(0, 100, length)
    if length >= 7:
        ids[3:5] = IMAGE_TOKEN
    mask = np.pad(np.ones(length, np.int64), (pads, 0))
    positions = np.pad(np.tile(np.arange(length), (4, 1)), ((0, 0), (pads, 0)))
    embeds = rng.normal(size=(2, bundle.spec.hidden)).astype(np.float32)
    ids = np.pad(ids, (pads, 0), constant_values=7)
    return {
        "input_ids": ids[None].astype(np.int64),
        "attention_mask": mask[None],
        "position_ids": positions[:, None].astype(np.int64),
        "image_embeds": embeds,
    }


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
def test_plain_prefill_equals_the_token_recurrence(bundle: Bundle, bucket: int, padded: bool) -> None:
    pads = bucket // 3 if padded else 0
    inputs = feed(bundle, bucket, pads)
    path = plain_prefill(bundle, bucket)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, bucket]
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    wanted = GraphRunner(bundle).run("prefill", **inputs)
    for name, array in wanted.items():
        valid = np.s_[:, :, :, pads:] if name == "present_kv_cache" else np.s_[...]
        scale = max(1.0, float(np.abs(array[valid]).max()))
        assert np.abs(found[name][valid] - array[valid]).max() < 1e-4 * scale, name


def test_only_plain_operators_and_weights_stay_outside(bundle: Bundle) -> None:
    path = plain_prefill(bundle, 192)
    assert path.stat().st_size < 2**20
    model = onnx.load(str(path), load_external_data=False)
    onnx.checker.check_model(str(path), full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not NO_KERNEL & {node.op_type for node in model.graph.node}
    places = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    assert places == {WEIGHT_FILE}


def test_device_graph_keeps_f16_borders_and_an_f32_state(bundle: Bundle) -> None:
    """Unfused on the device: the dtypes of the deployed graphs, and no rounding of the recurrent state on the way."""
    inputs = feed(bundle, 100, 10)
    half = {**inputs, "image_embeds": inputs["image_embeds"].astype(np.float16)}
    path = plain_prefill(bundle, 100, "ascend310p", "device")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, half), strict=True))
    assert found["logits"].dtype == np.float16
    state = found["present_recurrent_states"]
    assert state.dtype == np.float32
    assert not np.array_equal(state, state.astype(np.float16).astype(np.float32))
    wanted = GraphRunner(bundle, numerics="device").run("prefill", **half)["present_recurrent_states"]
    assert np.array_equal(wanted, wanted.astype(np.float16).astype(np.float32))
    assert np.abs(state - wanted).max() < 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("alike", [False, True], ids=["random", "equal keys"])
def test_several_chunks_from_a_state_are_stable(bundle: Bundle, tmp_path: Path, alike: bool) -> None:
    spec, tokens = bundle.spec, 200
    shapes = {
        "query": (tokens, spec.nk, spec.dk),
        "key": (tokens, spec.nk, spec.dk),
        "value": (tokens, spec.nv, spec.dv),
        "beta": (tokens, spec.nv),
        "initial_state": (1, spec.nv, spec.dv, spec.dk),
        "g": (tokens, spec.nv),
    }
    rng = np.random.default_rng(1)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    arrays["beta"][:] = rng.uniform(0, 1, shapes["beta"])
    arrays["g"][:] = -rng.uniform(0, 0.5, shapes["g"])
    if alike:
        arrays["key"][:] = arrays["key"][0, 0]
        arrays["beta"][:], arrays["g"][:] = 0.99, -1e-3
    path = tmp_path / "chunks.onnx"
    path.write_bytes(lower_model(chunk_model(shapes).SerializeToString(), spec, tokens=tokens))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    out, state = session.run(None, arrays)
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted, after = np.empty_like(exact["value"]), np.empty_like(exact["initial_state"])
    arguments = [exact[name] for name in ("query", "key", "value", "beta", "initial_state")]
    recurrence(*arguments, after, wanted, plan_chunk([tokens], tokens, 1), g=exact["g"], scale=spec.dk**-0.5)
    assert np.abs(out - wanted).max() < 1e-4
    assert np.abs(state - after).max() < 1e-4
