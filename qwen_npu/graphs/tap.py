"""Prefill with one linear layer's recurrence laid open: what goes into its node and what comes out, for lessons.

The same nodes on the same weights as the bundle's prefill graph in f32; only the outputs are others.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from qwen_npu import contract
from qwen_npu.errors import UsageError
from qwen_npu.graphs.builder import value_info
from qwen_npu.graphs.nodes import CHUNK, CHUNK_INPUTS
from qwen_npu.spec import ModelSpec

_TAPPED = ("query", "key", "value", "beta", "g")


def tap_graph(spec: ModelSpec, prefill: Path, linear_layer: int) -> bytes:
    """The graph of `contract.tap`, made from a bundle's f32 prefill graph; it must lie beside the same weights.

    Raises:
        UsageError: no such linear layer.
    """
    model = onnx.load(prefill, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == CHUNK]
    if not 0 <= linear_layer < len(nodes):
        raise UsageError(f"linear layer {linear_layer}", expected=f"0..{len(nodes) - 1}")
    node = nodes[linear_layer]
    sources = [node.input[CHUNK_INPUTS.index(name)] for name in _TAPPED] + list(node.output[:2])
    graph = contract.tap(spec)
    del model.graph.output[:]
    for source, tensor in zip(sources, graph.outputs, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", [source], [tensor.name]))
        model.graph.output.append(value_info(tensor))
    content: bytes = model.SerializeToString(deterministic=True)
    return content
