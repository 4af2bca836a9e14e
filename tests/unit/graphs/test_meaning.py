"""The graphs mean in onnx's own evaluator what they do on onnxruntime: no runtime's fusions are leant on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from qwen_npu import contract
from qwen_npu.bundle import Bundle, build_bundle
from tests.unit.graphs.checkpoints import random_checkpoint
from tests.unit.graphs.runner import open_session


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("meaning")
    checkpoint = random_checkpoint(directory / "checkpoint")
    return build_bundle(checkpoint, directory / "bundle", grids=[(2, 4)], capacity=12, buckets=[8])


def feed_of(described: contract.GraphContract, vocab: int) -> dict[str, Any]:
    """Random states and tokens; a past of 5, padding before a prompt of 6 of which 2 are image tokens."""
    rng = np.random.default_rng(4)
    sizes = {"S": 8, "N": 2, "L": 5, "L+1": 6}
    feed: dict[str, Any] = {}
    for tensor in described.inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
        feed[tensor.name] = (0.5 * rng.normal(size=shape)).astype(tensor.dtype)
    if "input_ids" in feed:
        batch, tokens = feed["input_ids"].shape
        prompt = described.stage == "prefill"
        feed["input_ids"] = rng.integers(0, 100, (batch, tokens))
        if prompt:
            feed["input_ids"][0, 3:5] = 110
        past = 0 if prompt else 5
        feed["position_ids"] = np.tile(past + np.arange(tokens), (4, batch, 1))
        mask = np.arange(feed["attention_mask"].shape[1]) < past + tokens
        feed["attention_mask"] = np.tile(mask & (np.arange(len(mask)) >= 2) if prompt else mask, (batch, 1)).astype(int)
    if described.stage == "verify":
        feed["actual_seq_lengths"][:] = feed["input_ids"].shape[1]
        feed["ssm_state_indices"] = np.array([[5, 0, 3], [1, 6, 2]])
        feed["num_accepted_tokens"][:] = [2, 0]
    return feed


@pytest.mark.parametrize("numerics", ["f32", "device"])
@pytest.mark.parametrize("graph", ["vision", "prefill", "decode_growing", "decode_fixed", "verify1", "verify3"])
def test_the_reference_evaluator_agrees(bundle: Bundle, graph: Any, numerics: Any) -> None:
    if graph.startswith("verify"):
        sizes = {"tokens": int(graph[-1]), "width": 3, "sequences": 2, "slots": 7}
        path = bundle.verify(numerics=numerics, **sizes)
        described = contract.verify(bundle.spec, numerics, capacity=bundle.capacity, **sizes)
    else:
        path, described = bundle.path(graph, numerics=numerics), bundle.contract(graph, numerics=numerics)
    feed = feed_of(described, bundle.spec.vocab)
    found = open_session(path).run(None, feed)
    wanted = ReferenceEvaluator(onnx.load(path)).run(None, feed)
    limit = 1e-4 if numerics == "f32" else 5e-3
    for tensor, mine, theirs in zip(described.outputs, found, wanted, strict=True):
        assert mine.dtype == theirs.dtype == np.dtype(tensor.dtype)
        gap = np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max()
        assert gap <= limit * max(1, np.abs(theirs.astype(np.float32)).max()), tensor.name
