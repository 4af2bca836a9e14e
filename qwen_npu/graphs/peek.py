"""Looks at state where it lies: a few figures of each head cross the bus, the state does not.

Figures, in the order of `contract.PEEK_FIGURES`: L2 norm and largest magnitude of the finite elements, and how many
are not finite.
"""

from __future__ import annotations

import math

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import PAST, PEEK, POSITION, SLOTS, GraphContract, conv_pool, state_pool
from qwen_npu.graphs.builder import Graph
from qwen_npu.spec import ModelSpec, Numerics

_FIGURES = len(contract.PEEK_FIGURES)


def peek_graph(spec: ModelSpec, numerics: Numerics, *, capacity: int | None) -> bytes:
    """The three states of one sequence, as a decode step takes them; of the KV only the row at `position`."""
    g = Graph(contract.peek(spec, numerics, capacity=capacity), {})
    layers, conv_size = len(spec.linear_layers), math.prod(spec.conv_shape()[2:])
    _figures(g, g.wide(PAST["conv"]), conv_size, (2, 3), PEEK["conv"], layers, _FIGURES)
    _figures(g, PAST["recurrent"], spec.dv * spec.dk, (3, 4), PEEK["recurrent"], layers, spec.nv, _FIGURES)
    _newest(g, spec, 1)
    return g.serialize()


def peek_pools_graph(spec: ModelSpec, numerics: Numerics, *, sequences: int, slots: int, capacity: int) -> bytes:
    """The slots named by `slots` of every pool, and each sequence's KV row at its `position`."""
    g = Graph(contract.peek_pools(spec, numerics, sequences=sequences, slots=slots, capacity=capacity), {})
    layers, conv_size = len(spec.linear_layers), math.prod(spec.conv_shape()[2:])

    def chosen(pools: list[str]) -> str:
        return g.wide(g.concat([g.op("Gather", [pool, SLOTS], axis=0) for pool in pools], axis=0), pools[0])

    conv = chosen([conv_pool(layer) for layer in range(layers)])
    _figures(g, conv, conv_size, (1, 2), PEEK["conv"], layers, -1, _FIGURES)
    states = chosen([state_pool(layer) for layer in range(layers)])
    _figures(g, states, spec.dv * spec.dk, (2, 3), PEEK["recurrent"], layers, -1, spec.nv, _FIGURES)
    _newest(g, spec, sequences)
    return g.serialize()


def _newest(g: Graph, spec: ModelSpec, sequences: int) -> None:
    shape = (2 * len(spec.full_layers), sequences, spec.kv_heads)
    place = np.zeros((*shape, 4), np.int64)
    place[..., :3] = np.moveaxis(np.indices(shape), 0, -1)
    along = g.mul(g.reshape(POSITION, 1, sequences, 1, 1), g.const(np.array([0, 0, 0, 1], np.int64)))
    rows = g.op("GatherND", [PAST["kv"], g.add(along, g.const(place))])
    _figures(g, g.wide(rows, PAST["kv"]), spec.head_dim, (3,), PEEK["kv"], *shape, _FIGURES)


def _figures(g: Graph, x: str, elements: int, axes: tuple[int, ...], out: str, *shape: int) -> None:
    """Reduces `axes`, which hold `elements` numbers, and shapes the result. Plain sums and maxima are the fast ones."""
    size = g.op("Abs", [x])
    finite = g.op("LessOrEqual", [size, g.number(float(np.finfo(np.float32).max))])  # false for what is no number
    size = g.op("Where", [finite, size, g.number(0.0)])
    norm = g.op("Sqrt", [g.op("ReduceSum", [g.mul(size, size), g.ints(*axes)], keepdims=1)])
    largest = g.op("ReduceMax", [size], axes=axes, keepdims=1)
    count = g.op("ReduceSum", [g.cast(finite, "float32"), g.ints(*axes)], keepdims=1)
    others = g.sub(g.number(float(elements)), count)
    g.reshape(g.concat([norm, largest, others], axis=axes[-1]), *shape, out=out)


def peeked_bytes(described: GraphContract, slots: int = 1) -> int:
    """What crosses the bus for one peek, `slots` being the number of slots looked at."""
    return sum(4 * int(np.prod([slots if isinstance(dim, str) else dim for dim in t.shape])) for t in described.outputs)
