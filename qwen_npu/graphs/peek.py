"""Looks at state where it lies: a few figures of each head cross the bus, the state does not.

Figures, in the order of `contract.PEEK_FIGURES`: L2 norm, largest magnitude, and how many elements are not finite
(or so large that their square is not, above 1.8e19); where there are any, the first two are NaN.
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
    """Reduces `axes`, which hold `elements` numbers, and shapes the result; everything from one array of squares."""
    squares = g.mul(x, x)
    total = g.op("ReduceSum", [squares, g.ints(*axes)], keepdims=1)
    largest = g.op("ReduceMax", [squares], axes=axes, keepdims=1)
    roots = g.op("Sqrt", [g.concat([total, largest], axis=axes[-1])])
    # a maximum may pass over what is no number: 0 is added where the total is one, else NaN
    roots = g.add(roots, g.sub(total, total))
    finite = g.op("LessOrEqual", [squares, g.number(float(np.finfo(np.float32).max))])
    count = g.op("ReduceSum", [g.cast(finite, "float32"), g.ints(*axes)], keepdims=1)
    others = g.sub(g.number(float(elements)), count)
    g.reshape(g.concat([roots, others], axis=axes[-1]), *shape, out=out)


def peeked_bytes(described: GraphContract, slots: int = 1) -> int:
    """What crosses the bus for one peek, `slots` being the number of slots looked at."""
    return sum(4 * int(np.prod([slots if isinstance(dim, str) else dim for dim in t.shape])) for t in described.outputs)
