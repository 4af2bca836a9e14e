"""The graphs against transformers: logits and every state, of untrained models with awkward sizes and of the tiny one.

Every test compares with the same weights read by transformers itself, so a layout error cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_npu.bundle import Bundle, build_bundle, open_bundle
from qwen_npu.data import tiny_checkpoint
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, VISION_END, VISION_START, random_checkpoint
from tests.unit.graphs.runner import GraphRunner

pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn about themselves

Array = NDArray[Any]
LINEAR, FULL = "linear_attention", "full_attention"

VARIANTS: dict[str, dict[str, Any]] = {
    "dk_not_dv_nv_4nk_untied": {},
    "nv_equals_nk_tied_mha": {
        "tied": True,
        "linear_num_value_heads": 2,
        "num_key_value_heads": 6,
        "layer_types": [FULL, LINEAR],
    },
    "linear_last_bf16_shards": {
        "dtype": "bfloat16",
        "shards": 3,
        "extra": True,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 8,
    },
    "whole_head_rotates_f16": {
        "dtype": "float16",
        "mrope_section": (6, 5, 5),
        "num_key_value_heads": 1,
        "layer_types": [FULL, FULL, LINEAR],
    },
    "odd_widths": {"hidden_size": 36, "vocab_size": 127, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
}
GRID = (4, 6)


def random_prompt(vocab: int, image_tokens: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 100, 23)
    image = [VISION_START, *[IMAGE_TOKEN] * image_tokens, VISION_END] if image_tokens else []
    return np.array([*text[:5], *image, *text[5:]], np.int64)


def far(found: Array, wanted: Array) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found.astype(np.float32) - wanted.astype(np.float32)).max())


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Any:
    directory = random_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, **VARIANTS[request.param])
    bundle = build_bundle(directory, directory.parent / "bundle", grids=[GRID, (2, 2)], capacity=64, buckets=[16, 64])
    return bundle, reference(directory)


@pytest.mark.parametrize("grid", [GRID, (2, 2)])
def test_vision_equals_transformers(case: tuple[Bundle, Any], grid: tuple[int, int]) -> None:
    bundle, oracle = case
    pixels = np.random.default_rng(3).uniform(-1, 1, (grid[0] * grid[1], 96)).astype(np.float32)
    assert far(GraphRunner(bundle).vision(pixels, grid), oracle.vision(pixels, grid)) < 3e-5


@pytest.mark.parametrize("pads", [0, 9])
def test_prefill_then_steps_equal_transformers_in_logits_and_states(case: tuple[Bundle, Any], pads: int) -> None:
    bundle, oracle = case
    pixels = np.random.default_rng(3).uniform(-1, 1, (GRID[0] * GRID[1], 96)).astype(np.float32)
    ids = random_prompt(bundle.spec.vocab, bundle.spec.image_tokens(GRID))
    wanted = oracle.prefill(ids, pixels, GRID)
    graphs = GraphRunner(bundle)
    embeds = graphs.vision(pixels, GRID)
    assert far(graphs.prefill(ids, oracle.positions, embeds, pads=pads), wanted[-1]) < 1e-3
    assert far(graphs.prefill(ids, oracle.positions, embeds, pads=pads, all_logits=True), wanted) < 1e-3
    compare_states(graphs, oracle)
    fixed = GraphRunner(bundle, states=dict(graphs.states), tokens=graphs.tokens)
    for token in [3, 17, 100, 3, 3, 42]:
        wanted = oracle.step(token)
        logits = graphs.step(token, oracle.delta)
        assert far(logits, wanted) < 1e-3
        # the fixed graph reads only what is valid, so it does the very same arithmetic
        assert far(fixed.step(token, oracle.delta, graph="decode_fixed"), logits) == 0
    compare_states(graphs, oracle)
    assert np.array_equal(fixed.states["kv"][:, :, :, : graphs.tokens], graphs.states["kv"])
    assert not fixed.states["kv"][:, :, :, graphs.tokens :].any()


def compare_states(graphs: GraphRunner, oracle: Any) -> None:
    wanted = oracle.states()
    for name, limit in (("conv", 1e-4), ("recurrent", 1e-4), ("kv", 1e-4)):
        assert np.abs(wanted[name]).max() > 0.1  # else the limit would say nothing
        assert far(graphs.states[name], wanted[name]) < limit, name


def test_text_alone_needs_no_image_rows(case: tuple[Bundle, Any]) -> None:
    bundle, oracle = case
    ids = random_prompt(bundle.spec.vocab, 0)[:1]
    wanted = oracle.prefill(ids)
    graphs = GraphRunner(bundle)
    assert far(graphs.prefill(ids, oracle.positions), wanted[-1]) < 1e-3
    compare_states(graphs, oracle)
    assert far(graphs.step(5, graph="decode_fixed"), oracle.step(5)) < 1e-3


@pytest.fixture(scope="module")
def tiny(reference: Callable[[Path], Any]) -> tuple[Bundle, Any]:
    return open_bundle("tiny"), reference(tiny_checkpoint())


def tiny_prompt(bundle: Bundle, length: int = 60) -> tuple[Array, Array, tuple[int, int]]:
    rng = np.random.default_rng(length)
    grid, spec = bundle.grids[-1], bundle.spec
    image = [spec.vision_start, *[spec.image_token] * spec.image_tokens(grid), spec.vision_end]
    pixels = rng.uniform(-1, 1, (grid[0] * grid[1], spec.vision.patch_lanes)).astype(np.float32)
    return np.array([*rng.integers(0, 255, 4), *image, *rng.integers(0, 255, length)], np.int64), pixels, grid


def test_device_numerics_of_the_tiny_model_stay_close(tiny: tuple[Bundle, Any]) -> None:
    """design.md: cosine 0.999 and NRMSE 0.02 of the logits, teacher-forced; states within f16's reach."""
    bundle, oracle = tiny
    ids, pixels, grid = tiny_prompt(bundle)
    graphs = GraphRunner(bundle, "device")
    wanted = [oracle.prefill(ids, pixels, grid)[-1]]
    found = [graphs.prefill(ids, oracle.positions, graphs.vision(pixels, grid))]
    for token in np.random.default_rng(5).integers(0, 255, 24).tolist():
        wanted.append(oracle.step(token))
        found.append(graphs.step(token, oracle.delta, graph="decode_fixed"))
    for a, b in zip(found, wanted, strict=True):
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 0.02
        top = np.sort(b)[-2:]
        assert top[1] - top[0] < 0.25 or a.argmax() == b.argmax()
    for name, state in oracle.states().items():
        mine = graphs.states[name][:, :, :, : graphs.tokens] if name == "kv" else graphs.states[name]
        assert far(mine, state) < 0.01 * np.abs(state).max(), name


@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_tiny_prefill_equals_transformers_whatever_the_padding(tiny: tuple[Bundle, Any], numerics: Any) -> None:
    bundle, oracle = tiny
    ids, pixels, grid = tiny_prompt(bundle, 40)
    wanted = oracle.prefill(ids, pixels, grid)[-1]
    plain, padded = GraphRunner(bundle, numerics), GraphRunner(bundle, numerics)
    embeds = plain.vision(pixels, grid)
    first = plain.prefill(ids, oracle.positions, embeds)
    second = padded.prefill(ids, oracle.positions, embeds, pads=128 - len(ids))
    if numerics == "f32":
        assert far(first, wanted) < 1e-3
    assert first.argmax() == second.argmax() == wanted.argmax()
    for name, state in plain.states.items():
        limit = 1e-5 if numerics == "f32" else 1e-3 * float(np.abs(state).max())
        assert far(padded.states[name], state) < limit, name


def test_tiny_vision_equals_transformers(tiny: tuple[Bundle, Any]) -> None:
    """Its embeddings reach 20; there transformers' own f32 is up to 5e-5 from f64, so the limit grows with them."""
    bundle, oracle = tiny
    for grid in bundle.grids:
        lanes = bundle.spec.vision.patch_lanes
        pixels = np.random.default_rng(1).uniform(-1, 1, (grid[0] * grid[1], lanes)).astype(np.float32)
        wanted = oracle.vision(pixels, grid)
        assert far(GraphRunner(bundle).vision(pixels, grid), wanted) < 5e-6 * np.abs(wanted).max()
