"""Peek graphs against NumPy: figures of every state, of numbers that are none, and how little crosses the bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_npu import contract
from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.errors import UsageError
from qwen_npu.graphs.peek import peeked_bytes
from qwen_npu.spec import preset
from tests.unit.graphs.checkpoints import random_checkpoint
from tests.unit.graphs.runner import check, open_session

Array = NDArray[Any]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("peek")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=24, buckets=[8])


def figures(array: Array, axes: tuple[int, ...]) -> Array:
    exact = np.where(np.isfinite(array), array.astype(np.float64), np.nan)
    parts = (np.sqrt((exact**2).sum(axes)), np.abs(exact).max(axes), np.isnan(exact).sum(axes))
    return np.stack(parts, axis=-1)


def run(path: Path, described: contract.GraphContract, feed: dict[str, Array]) -> dict[str, Array]:
    outputs = dict(zip(described.output_names, open_session(path).run(None, feed), strict=True))
    check(described, feed, outputs)
    return outputs


def random_feed(described: contract.GraphContract, seed: int, **sizes: int) -> dict[str, Array]:
    """Random states with a few elements that are no numbers, infinite or zero."""
    rng = np.random.default_rng(seed)
    feed = {}
    for tensor in described.inputs:
        if tensor.dtype.startswith("float"):
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
            array = rng.normal(size=shape).astype(tensor.dtype)
            flat = array.reshape(-1)
            flat[rng.integers(0, flat.size, 5)] = [np.nan, np.inf, -np.inf, np.nan, 0]
            feed[tensor.name] = array
    return feed


@pytest.mark.parametrize("numerics", ["f32", "device"])
@pytest.mark.parametrize("kv", ["fixed", "growing"])
def test_figures_of_one_sequence(bundle: Bundle, kv: Any, numerics: Any) -> None:
    described = contract.peek(bundle.spec, numerics, capacity=bundle.capacity if kv == "fixed" else None)
    for position in (0, 6, 10):
        feed = random_feed(described, position, L=11)
        feed["past_kv_cache"][0, 0, 1, position, :2] = [np.nan, np.inf]
        found = run(bundle.peek(kv=kv, numerics=numerics), described, {"position": np.array([position]), **feed})
        assert np.allclose(found["peek_conv"], figures(feed["past_conv_states"], (1, 2, 3)), rtol=1e-5, equal_nan=True)
        assert np.allclose(
            found["peek_recurrent"], figures(feed["past_recurrent_states"][:, 0], (2, 3)), rtol=1e-5, equal_nan=True
        )
        assert np.allclose(
            found["peek_kv"], figures(feed["past_kv_cache"][:, :, :, position], (3,)), rtol=1e-5, equal_nan=True
        )
        assert found["peek_kv"][0, 0, 1, 2] >= 2
        assert found["peek_recurrent"][..., 2].sum() >= 3
        assert np.isfinite(found["peek_recurrent"]).any(axis=(1, 2)).any()


@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_figures_of_chosen_slots(bundle: Bundle, numerics: Any) -> None:
    sizes = {"sequences": 3, "slots": 7}
    described = contract.peek_pools(bundle.spec, numerics, capacity=bundle.capacity, **sizes)
    path = bundle.peek_pools(numerics=numerics, **sizes)
    places = np.array([4, 23, 0])
    for slots in (np.array([5, 0, 6]), np.arange(7), np.array([2])):
        feed = random_feed(described, len(slots))
        found = run(path, described, {"position": places, "slots": slots, **feed})
        layers = range(len(bundle.spec.linear_layers))
        conv = np.stack([feed[contract.conv_pool(layer)][slots] for layer in layers])
        state = np.stack([feed[contract.state_pool(layer)][slots] for layer in layers])
        newest = np.stack([feed["past_kv_cache"][:, b, :, place] for b, place in enumerate(places)], axis=1)
        assert np.allclose(found["peek_conv"], figures(conv, (2, 3)), rtol=1e-5, equal_nan=True)
        assert np.allclose(found["peek_recurrent"], figures(state, (3, 4)), rtol=1e-5, equal_nan=True)
        assert np.allclose(found["peek_kv"], figures(newest, (3,)), rtol=1e-5, equal_nan=True)


def test_a_peek_at_real_size_stays_under_64_kib() -> None:
    spec = preset("4b")
    assert peeked_bytes(contract.peek(spec, "device", capacity=2048)) == 24 * 3 * 4 * (1 + 32) + 16 * 4 * 3 * 4
    pools = contract.peek_pools(spec, "device", sequences=4, slots=17, capacity=2048)
    assert peeked_bytes(pools, slots=4) < 64 * 2**10  # the live slot of four sequences
    assert contract.peek(spec, "device", capacity=None).inputs[3].shape[3] == "L"


def test_every_name_of_a_peek_has_its_kind(bundle: Bundle) -> None:
    described = contract.peek(bundle.spec, "device", capacity=8)
    assert [contract.buffer_kind(tensor.name) for tensor in described.outputs] == ["peek"] * 3
    assert [contract.buffer_kind(tensor.name) for tensor in described.inputs] == ["input", "conv", "recurrent", "kv"]


def test_senseless_peeks_are_refused(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="shrinking"):
        bundle.peek(kv="shrinking")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 slots"):
        bundle.peek_pools(sequences=1, slots=0)
