"""Puts one sequence's prefill states into its row of the KV and into a slot of every pool: no weights, only writes."""

from __future__ import annotations

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import ADMITTED, PAST, PRESENT, ROW, SLOT, conv_pool, present_of, state_pool
from qwen_npu.graphs.builder import Graph
from qwen_npu.spec import ModelSpec, Numerics


def admit_graph(spec: ModelSpec, numerics: Numerics, *, sequences: int, slots: int, capacity: int) -> bytes:
    """Pools in place, one ScatterND each; the KV is written anew, its other rows copied."""
    g = Graph(contract.admit(spec, numerics, sequences=sequences, slots=slots, capacity=capacity), {})
    layers, rows = len(spec.linear_layers), 2 * len(spec.full_layers)
    slot = g.reshape(g.cast(SLOT, "int64"), 1, 1)
    conv = g.split(g.reshape(ADMITTED["conv"], layers, *spec.conv_shape()[2:]), (1,) * layers, axis=0)
    states = g.transpose(ADMITTED["recurrent"], 0, 1, 2, 4, 3)  # the op keeps its state V-major
    if numerics == "device":
        states = g.cast(states, contract.half(numerics))
    recurrent = g.split(g.reshape(states, layers, spec.nv, spec.dv, spec.dk), (1,) * layers, axis=0)
    for layer in range(layers):
        for pool, piece in ((conv_pool(layer), conv[layer]), (state_pool(layer), recurrent[layer])):
            g.op("ScatterND", [pool, slot, piece], out=present_of(pool))
    place = np.stack([np.arange(rows), np.zeros(rows)], axis=1).astype(np.int64)
    row = g.mul(g.cast(ROW, "int64"), g.const(np.array([[0, 1]], np.int64)))
    kv = g.op("Squeeze", [ADMITTED["kv"], g.ints(1)])
    g.op("ScatterND", [PAST["kv"], g.add(row, g.const(place)), kv], out=PRESENT["kv"])
    return g.serialize()
