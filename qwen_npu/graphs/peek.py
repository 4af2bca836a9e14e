"""Looks at state where it lies: a few figures of each head cross the bus, the state does not.

Figures, in the order of `contract.PEEK_FIGURES`: L2 norm and largest magnitude of the finite elements, and how many
are not finite.
"""

from __future__ import annotations

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import PAST, PEEK, POSITION, SLOTS, GraphContract, conv_pool, state_pool
from qwen_npu.graphs.builder import Graph
from qwen_npu.spec import ModelSpec, Numerics

_FIGURES = len(contract.PEEK_FIGURES)


def peek_graph(spec: ModelSpec, numerics: Numerics, *, capacity: int | None) -> bytes:
    """The three states of one sequence, as a decode step takes them; of the KV only the row at `position`."""
    g = Graph(contract.peek(spec, numerics, capacity=capacity), {})
    layers = len(spec.linear_layers)
    _figures(g, g.wide(PAST["conv"]), (2, 3), PEEK["conv"], layers, _FIGURES)
    _figures(g, PAST["recurrent"], (3, 4), PEEK["recurrent"], layers, spec.nv, _FIGURES)
    _newest(g, spec, 1)
    return g.serialize()


def peek_pools_graph(spec: ModelSpec, numerics: Numerics, *, sequences: int, slots: int, capacity: int) -> bytes:
    """The slots named by `slots` of every pool, and each sequence's KV row at its `position`."""
    g = Graph(contract.peek_pools(spec, numerics, sequences=sequences, slots=slots, capacity=capacity), {})
    layers = len(spec.linear_layers)

    def chosen(pools: list[str]) -> str:
        return g.wide(g.concat([g.op("Gather", [pool, SLOTS], axis=0) for pool in pools], axis=0), pools[0])

    conv = chosen([conv_pool(layer) for layer in range(layers)])
    _figures(g, conv, (1, 2), PEEK["conv"], layers, -1, _FIGURES)
    states = chosen([state_pool(layer) for layer in range(layers)])
    _figures(g, states, (2, 3), PEEK["recurrent"], layers, -1, spec.nv, _FIGURES)
    _newest(g, spec, sequences)
    return g.serialize()


def _newest(g: Graph, spec: ModelSpec, sequences: int) -> None:
    shape = (2 * len(spec.full_layers), sequences, spec.kv_heads)
    place = np.zeros((*shape, 4), np.int64)
    place[..., :3] = np.moveaxis(np.indices(shape), 0, -1)
    along = g.mul(g.reshape(POSITION, 1, sequences, 1, 1), g.const(np.array([0, 0, 0, 1], np.int64)))
    rows = g.op("GatherND", [PAST["kv"], g.add(along, g.const(place))])
    _figures(g, g.wide(rows, PAST["kv"]), (3,), PEEK["kv"], *shape, _FIGURES)


def _figures(g: Graph, x: str, axes: tuple[int, ...], out: str, *shape: int) -> None:
    not_finite = g.op("IsNaN", [g.mul(x, g.number(0.0))])  # zero times infinity is not a number either
    finite = g.op("Where", [not_finite, g.number(0.0), x])
    norm = g.op("ReduceL2", [finite], axes=axes, keepdims=1)
    largest = g.op("ReduceMax", [g.op("Abs", [finite])], axes=axes, keepdims=1)
    count = g.op("ReduceSum", [g.cast(not_finite, "float32"), g.ints(*axes)], keepdims=1)
    g.reshape(g.concat([norm, largest, count], axis=axes[-1]), *shape, out=out)


def peeked_bytes(described: GraphContract, slots: int = 1) -> int:
    """What crosses the bus for one peek, `slots` being the number of slots looked at."""
    return sum(4 * int(np.prod([slots if isinstance(dim, str) else dim for dim in t.shape])) for t in described.outputs)
