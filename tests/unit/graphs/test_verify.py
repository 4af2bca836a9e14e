"""Verify and admit against the decode graph: tokens, and every state at every accepted depth; pools really in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_npu.bundle import Bundle, build_bundle
from qwen_npu.contract import IN_PLACE_KEY, conv_pool, state_pool
from tests.unit.graphs.checkpoints import random_checkpoint
from tests.unit.graphs.pools import PoolRunner
from tests.unit.graphs.runner import GraphRunner, native_library

Array = NDArray[Any]
WIDTH, SLOTS = 3, 11
PROMPTS = (5, 1, 9)
ROWS = np.array([[4, 2, 7], [0, 9, 1], [3, 10, 6]])  # nobody's slots stand in order; 5 and 8 belong to no one
TOKENS = np.random.default_rng(2).integers(0, 100, (3, 3 * WIDTH))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("verify")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=32, buckets=[16])


def singles(bundle: Bundle, numerics: Any) -> list[tuple[GraphRunner, dict[str, Array]]]:
    """One prefilled runner a prompt, and its states as they were then."""
    found = []
    for row, length in enumerate(PROMPTS):
        runner = GraphRunner(bundle, numerics)
        runner.prefill(np.random.default_rng(row).integers(0, 100, length), np.tile(np.arange(length), (3, 1)))
        runner.pad_to_capacity()
        found.append((runner, dict(runner.states)))
    return found


def admitted(bundle: Bundle, numerics: Any, **options: Any) -> tuple[PoolRunner, list[GraphRunner]]:
    pools = PoolRunner(bundle, numerics, sequences=3, width=WIDTH, slots=SLOTS, rows=ROWS, **options)
    runners = []
    for row, (runner, states) in enumerate(singles(bundle, numerics)):
        pools.admit(row, states, runner.tokens)
        runners.append(runner)
    return pools, runners


def near(found: Array, wanted: Array, numerics: Any) -> None:
    """f32: rounding. device: single steps round the state to f16 each token, verify carries it on in f32."""
    assert found.shape == wanted.shape
    limit = 2e-5 if numerics == "f32" else 0.02
    gap = np.abs(found.astype(np.float32) - wanted.astype(np.float32)).max()
    assert gap <= limit * np.abs(wanted.astype(np.float32)).max()


def compare_row(pools: PoolRunner, row: int, position: int, runner: GraphRunner) -> None:
    """Slot `position` of the row holds what the decode graph has after as many tokens; so does the row's KV."""
    slot = ROWS[row, position]
    for layer in range(len(pools.bundle.spec.linear_layers)):
        near(pools.pool(conv_pool(layer))[slot], runner.states["conv"][layer, 0], pools.numerics)
        state = runner.states["recurrent"][layer, 0].transpose(0, 2, 1)
        near(pools.pool(state_pool(layer))[slot], state, pools.numerics)
    end = runner.tokens
    near(pools.pool("past_kv_cache")[:, row, :, :end], runner.states["kv"][:, 0, :, :end], pools.numerics)


@pytest.mark.parametrize("native", [False, True], ids=["body", "native"])
@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_every_accepted_depth_equals_single_steps(bundle: Bundle, numerics: Any, native: bool) -> None:
    if native and not native_library():
        pytest.skip("the native kernel is not installed")
    pools, runners = admitted(bundle, numerics, native=native)
    starts = pools.lengths
    for depths in ([1, 3, 2], [3, 2, 1], [2, 1, 3]):
        # the certain tokens so far, then what each row tries next
        used = pools.lengths - starts
        tried = np.stack([TOKENS[row, used[row] : used[row] + WIDTH] for row in range(3)])
        logits = pools.verify(tried)
        for row, runner in enumerate(runners):
            branch = GraphRunner(bundle, numerics, states=dict(runner.states), tokens=runner.tokens)
            for j in range(WIDTH):
                wanted = branch.step(int(tried[row, j]), graph="decode_fixed")
                near(logits[row, j], wanted, numerics)
                assert logits[row, j].argmax() == wanted.argmax()
                compare_row(pools, row, j, branch)
                if j + 1 == depths[row]:
                    runner.states, runner.tokens = dict(branch.states), branch.tokens
        pools.accept(np.array(depths))


@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_one_token_graph_goes_on_from_any_depth(bundle: Bundle, numerics: Any) -> None:
    pools, runners = admitted(bundle, numerics)
    pools.verify(TOKENS[:, :WIDTH])
    depths = np.array([3, 1, 2])
    pools.accept(depths)
    for row, runner in enumerate(runners):
        for token in TOKENS[row, : depths[row]]:
            runner.step(int(token), graph="decode_fixed")
    for step in range(2):
        column = TOKENS[:, 5 + step]
        logits = pools.verify(column[:, None])
        pools.accept(np.ones(3))
        for row, runner in enumerate(runners):
            near(logits[row, 0], runner.step(int(column[row]), graph="decode_fixed"), numerics)
            compare_row(pools, row, 0, runner)


@pytest.mark.parametrize("native", [False, True], ids=["body", "native"])
@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_pools_in_place_equal_pools_apart(bundle: Bundle, numerics: Any, native: bool) -> None:
    """The same bits, the same buffers, and slots outside the rows untouched, whatever they hold."""
    if native and not native_library():
        pytest.skip("the native kernel is not installed")
    shared, _ = admitted(bundle, numerics, native=native)
    apart, _ = admitted(bundle, numerics, native=native, in_place=False)
    names = [name for name in shared.tensors if name != "past_kv_cache"]
    strangers = np.setdiff1d(np.arange(SLOTS), ROWS)
    for runner in (shared, apart):
        for name in names:
            pool = runner.pool(name).copy()
            pool[strangers] = np.nan
            runner.tensors[name].update_inplace(pool)
    addresses = {name: shared.tensors[name].data_ptr() for name in names}
    for depth in (3, 1):
        one, two = shared.verify(TOKENS[:, :WIDTH]), apart.verify(TOKENS[:, :WIDTH])
        assert np.array_equal(one, two)
        assert np.isfinite(one).all()
        for runner in (shared, apart):
            runner.accept(np.full(3, depth))
    for name in names:
        assert shared.tensors[name].data_ptr() == addresses[name]
        assert np.array_equal(shared.pool(name), apart.pool(name), equal_nan=True)
        assert np.isnan(shared.pool(name)[strangers]).all()
        assert np.isfinite(shared.pool(name)[ROWS]).all()


def test_admit_changes_its_slot_and_row_only(bundle: Bundle) -> None:
    pools, _ = admitted(bundle, "device")
    before = {name: pools.pool(name).copy() for name in pools.tensors}
    spec = bundle.spec
    rng = np.random.default_rng(0)
    states = {
        "conv": rng.normal(size=spec.conv_shape()).astype(np.float16),
        "recurrent": rng.normal(size=spec.recurrent_shape()).astype(np.float32),
        "kv": rng.normal(size=spec.kv_shape(bundle.capacity)).astype(np.float16),
    }
    pools.admit(1, states, 8)
    slot = ROWS[1, 0]
    others = np.arange(SLOTS) != slot
    for layer in range(len(spec.linear_layers)):
        conv, state = pools.pool(conv_pool(layer)), pools.pool(state_pool(layer))
        assert np.array_equal(conv[slot], states["conv"][layer, 0])
        assert np.array_equal(state[slot], states["recurrent"][layer, 0].transpose(0, 2, 1).astype(np.float16))
        assert np.array_equal(conv[others], before[conv_pool(layer)][others])
        assert np.array_equal(state[others], before[state_pool(layer)][others])
    kv = pools.pool("past_kv_cache")
    assert np.array_equal(kv[:, 1], states["kv"][:, 0])
    assert np.array_equal(kv[:, [0, 2]], before["past_kv_cache"][:, [0, 2]])


def test_poison_stays_in_its_row(bundle: Bundle) -> None:
    """A row admitted with NaN gives NaN; the other rows' logits keep every bit."""
    clean, _ = admitted(bundle, "device")
    wanted = clean.verify(TOKENS[:, :WIDTH])
    poisoned, _ = admitted(bundle, "device")
    _, states = singles(bundle, "device")[1]
    poisoned.admit(1, {name: np.full_like(state, np.nan) for name, state in states.items()}, PROMPTS[1])
    found = poisoned.verify(TOKENS[:, :WIDTH])
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], wanted[[0, 2]])


def test_terms_of_in_place_hold_in_the_file(bundle: Bundle) -> None:
    """The map names every pool, one node writes each, and every reader is an ancestor of that node."""
    import onnx

    sizes = {"width": WIDTH, "sequences": 2, "slots": 8}
    paths = [bundle.verify(tokens=tokens, **sizes) for tokens in (1, WIDTH)] + [bundle.admit(sequences=2, slots=8)]
    for path in paths:
        model = onnx.load(path, load_external_data=False)
        terms = json.loads({entry.key: entry.value for entry in model.metadata_props}[IN_PLACE_KEY])
        layers = range(len(bundle.spec.linear_layers))
        assert set(terms.values()) == {name(layer) for layer in layers for name in (conv_pool, state_pool)}
        maker = {output: node for node in model.graph.node for output in node.output}
        for output, pool in terms.items():
            writer = maker[output]
            assert pool in writer.input
            ancestors, front = [], [writer]
            while front:
                node = front.pop()
                if not any(node is other for other in ancestors):
                    ancestors.append(node)
                    front += [maker[name] for name in node.input if name in maker]
            for node in model.graph.node:
                assert pool not in node.input or any(node is other for other in ancestors)


def test_on_demand_graphs_are_kept_and_checked(bundle: Bundle) -> None:
    from qwen_npu.errors import BundleError, UsageError

    path = bundle.verify(tokens=2, width=2, sequences=1, slots=4)
    stamp = path.stat().st_mtime_ns
    assert bundle.verify(tokens=2, width=2, sequences=1, slots=4) == path
    assert path.stat().st_mtime_ns == stamp
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(BundleError, match="not what was built"):
        bundle.verify(tokens=2, width=2, sequences=1, slots=4)
    with pytest.raises(UsageError, match="3 tokens, width 2"):
        bundle.verify(tokens=3, width=2, sequences=1, slots=4)
