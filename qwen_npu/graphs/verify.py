"""Speculative decoding: several tokens of several sequences in one call, on pools of slots.

The state after each token has a slot of its own, so that rejecting a draft undoes nothing: the next call reads at the
last accepted token's slot (`ssm_state_indices[b, num_accepted_tokens[b] - 1]`) and writes the row's slots again. Pools
are updated in place: one node writes each, and whatever reads it is an ancestor of that node.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import (
    ACTUAL_SEQ_LENGTHS,
    ATTENTION_MASK,
    NUM_ACCEPTED_TOKENS,
    PAST,
    POSITION_IDS,
    PRESENT,
    SSM_STATE_INDICES,
    conv_pool,
    present_of,
    state_pool,
)
from qwen_npu.graphs import layers
from qwen_npu.graphs.builder import Graph
from qwen_npu.graphs.nodes import Packed, recurrent_function, recurrent_node
from qwen_npu.graphs.weights import WeightTable
from qwen_npu.spec import ModelSpec, Numerics


def verify_graph(
    spec: ModelSpec,
    numerics: Numerics,
    weights: WeightTable,
    *,
    tokens: int,
    width: int,
    sequences: int,
    slots: int,
    capacity: int,
    whole_cache: bool = False,
) -> bytes:
    """`tokens` (1 to `width`) tokens of each sequence.

    `whole_cache` reads the KV up to its capacity, masked, instead of cutting it where the longest sequence ends: for
    devices on which no size may depend on data.

    A past position of the KV is seen where `attention_mask` is 1 and it lies before `position_ids[0, b, 0]`; the new
    tokens see each other causally and are written at `position_ids[0, b, j]`.
    """
    sizes = {"tokens": tokens, "width": width, "sequences": sequences, "slots": slots, "capacity": capacity}
    g = Graph(contract.verify(spec, numerics, **sizes), weights)
    half = contract.half(numerics)
    g.add_function(recurrent_function(spec, Packed(sequences, tokens, width), half))
    _, x = layers.embed(g)
    tables = layers.rope(g, spec)
    conv = _ConvPools(g, spec, numerics, sequences, tokens, width)
    kv = _Cache(g, spec, sequences, tokens, capacity, whole_cache)
    linear = 0

    def recur(query: str, key: str, value: str, beta: str, decay: str) -> str:
        pool = state_pool(linear)
        rest = (pool, ACTUAL_SEQ_LENGTHS, SSM_STATE_INDICES, NUM_ACCEPTED_TOKENS)
        out, _ = recurrent_node(g, spec, (query, key, value, beta, decay), *rest, state_out=present_of(pool))
        return out

    for layer, kind in enumerate(spec.layer_types):
        g.scope(f"layers.{layer}/")
        if kind == "linear_attention":
            x = layers.linear_layer(g, spec, layer, x, conv.of_layer(layer), recur)
            linear += 1
        else:
            x = layers.full_layer(g, spec, layer, x, tables, kv.attend)
        x = layers.mlp(g, spec, layer, x)
    g.scope("")
    layers.head(g, spec, x, sequences, tokens)
    conv.write()
    kv.write(numerics)
    return g.serialize()


class _ConvPools:
    """The conv pools of all linear layers: the past is fetched for all at once, and so are the new states laid out."""

    def __init__(self, g: Graph, spec: ModelSpec, numerics: Numerics, sequences: int, tokens: int, width: int) -> None:
        self._g, self._spec, self._numerics = g, spec, numerics
        self._sequences, self._tokens, self._layers = sequences, tokens, len(spec.linear_layers)
        self._new: list[str] = []
        self._pools = [conv_pool(i) for i in range(self._layers)]
        self._width = width
        accepted = g.op("Max", [NUM_ACCEPTED_TOKENS, g.const(np.ones(1, np.int32))])
        place = g.add(accepted, g.const(np.arange(sequences, dtype=np.int32) * width - 1))
        read = g.op("Gather", [g.reshape(SSM_STATE_INDICES, sequences * width), place], axis=0)
        past = g.concat([g.op("Gather", [pool, read], axis=0) for pool in self._pools], axis=0)
        self._stack = past = g.wide(past, self._pools[0])  # [layers * B, lanes, kernel - 1]
        rows = sequences
        if tokens == 1:
            past = g.reshape(past, self._layers, sequences, *spec.conv_shape()[2:])
            past = g.op("ReduceSum", [g.mul(past, g.weight("conv_past")), g.ints(3)], keepdims=0)
        else:
            past = g.transpose(past, 0, 2, 1)  # tokens before lanes, as they come from the projection
            rows *= spec.conv_kernel - 1
        self._past = g.split(g.reshape(past, self._layers * rows, spec.conv_lanes), (rows,) * self._layers, axis=0)

    def of_layer(self, layer: int) -> Callable[[str], str]:
        g, kernel = self._g, self._spec.conv_kernel

        def one_token(qkv: str) -> str:
            """As in decode: what the past adds is known already."""
            past = self._past[len(self._new)]
            self._new.append(qkv)
            return g.add(g.mul(qkv, g.weight(f"layers.{layer}.conv.{kernel - 1}")), past)

        def several(qkv: str) -> str:
            rows = g.concat([self._past[len(self._new)], qkv], axis=0)
            self._new.append(rows)
            seen = g.op("Gather", [rows, g.const(self._windows())], axis=0)  # [B * L, kernel, lanes]
            weighted = g.mul(seen, g.weight(f"layers.{layer}.conv"))
            return g.op("ReduceSum", [weighted, g.ints(1)], keepdims=0)

        return one_token if self._tokens == 1 else several

    def write(self) -> None:
        g, rows = self._g, self._sequences * self._tokens
        lanes, taps = self._spec.conv_shape()[2:]
        new = g.concat(self._new, axis=0)
        if self._tokens == 1:
            kept = g.op("Slice", [self._stack, g.ints(1), g.ints(taps), g.ints(2)])
            states = g.concat([kept, g.reshape(new, self._layers * rows, lanes, 1)], axis=2)
        else:
            windows = self._windows()[:, 1:]  # without its oldest, a token's window is the state after it
            first = np.arange(self._layers)[:, None, None] * (rows + self._sequences * taps)
            places = (first + windows).reshape(-1, taps)
            states = g.transpose(g.op("Gather", [new, g.const(places)], axis=0), 0, 2, 1)
        if self._numerics == "device":
            states = g.cast(states, contract.half(self._numerics))
        slots = SSM_STATE_INDICES
        if self._tokens < self._width:
            slots = g.op("Slice", [slots, g.ints(0), g.ints(self._tokens), g.ints(1)])
        slots = g.reshape(slots, rows, 1)
        for pool, piece in zip(self._pools, g.split(states, (rows,) * self._layers, axis=0), strict=True):
            g.op("ScatterND", [pool, slots, piece], out=present_of(pool))

    def _windows(self) -> np.ndarray:
        """Where each token's own window lies in a layer's rows, all past ones before all new ones: [B * L, kernel]."""
        taps = self._spec.conv_kernel - 1
        past = np.arange(self._sequences * taps).reshape(self._sequences, taps)
        new = past.size + np.arange(self._sequences * self._tokens).reshape(self._sequences, self._tokens)
        line = np.concatenate([past, new], axis=1)
        return np.lib.stride_tricks.sliding_window_view(line, taps + 1, axis=1).reshape(-1, taps + 1)


class _Cache:
    """The KV of all sequences: the valid part of the past, read in f32; the new keys and values, written at the end."""

    def __init__(self, g: Graph, spec: ModelSpec, sequences: int, tokens: int, capacity: int, whole: bool) -> None:
        self._g, self._spec, self._sequences, self._tokens = g, spec, sequences, tokens
        self._new: list[str] = []
        self._rows = 2 * len(spec.full_layers)
        self._positions = g.op("Gather", [POSITION_IDS, g.const(np.array(0, np.int64))], axis=0)  # [B, L]
        first = self._positions
        if tokens > 1:
            first = g.op("Slice", [first, g.ints(0), g.ints(1), g.ints(1)])  # [B, 1]
        past, longest = PAST["kv"], ""
        if not whole:
            longest = g.reshape(first, 1) if sequences == 1 else g.op("ReduceMax", [first], axes=[0], keepdims=0)
            past = g.op("Slice", [past, g.ints(0), longest, g.ints(3)])
        past = g.reshape(g.wide(past, PAST["kv"]), self._rows * sequences, spec.kv_heads, -1, spec.head_dim)
        self._past = g.split(past, (sequences,) * self._rows, axis=0)

        seen = ATTENTION_MASK
        if longest:
            seen = g.op("Slice", [seen, g.ints(0), longest, g.ints(1)])
        seen = g.cast(seen, "bool")
        if whole or sequences > 1:  # one sequence alone is cut where it ends
            before = g.op("Less", [g.const(np.arange(capacity, dtype=np.int64)[None]), first])
            if longest:
                before = g.op("Slice", [before, g.ints(0), longest, g.ints(1)])
            seen = g.op("And", [before, seen])
        bias = g.op("Where", [seen, g.number(0.0), g.number(-layers.HIDDEN_SCORE)])
        self._past_bias = bias if sequences == 1 else g.op("Unsqueeze", [bias, g.ints(1, 2)])
        self._new_bias = ""
        if tokens > 1:
            later = np.triu(np.full((tokens, tokens), -layers.HIDDEN_SCORE, np.float32), 1)
            self._new_bias = g.const(np.repeat(later, spec.heads // spec.kv_heads, 0))

    def attend(self, query: str, key: str, value: str) -> str:
        g, heads, group = self._g, self._spec.kv_heads, self._spec.heads // self._spec.kv_heads
        shape = (self._sequences, self._tokens, heads)
        query = layers.by_heads(g, query, *shape, group, self._spec.head_dim)
        key = layers.by_heads(g, key, *shape, 1, self._spec.head_dim)
        value = layers.by_heads(g, value, *shape, 1, self._spec.head_dim)
        past = (self._past[len(self._new)], self._past[len(self._new) + 1])
        self._new += [key, value]
        biases = {"past_bias": self._past_bias, "new_bias": self._new_bias}
        out = layers.attention(g, query, key, value, past=past, tokens=self._tokens, **biases)
        return layers.by_tokens(g, out, *shape, group, self._spec.head_dim)

    def write(self, numerics: Numerics) -> None:
        g, spec = self._g, self._spec
        shape = (self._rows, self._sequences, spec.kv_heads, self._tokens)
        new = g.reshape(g.concat(self._new, axis=0), *shape, spec.head_dim)
        if numerics == "device":
            new = g.cast(new, contract.half(numerics))
        place = np.moveaxis(np.indices(shape, np.int64), 0, -1)
        place[..., 3] = 0
        along = g.const(np.array([0, 0, 0, 1], np.int64))
        positions = g.reshape(self._positions, 1, self._sequences, 1, self._tokens, 1)
        g.op("ScatterND", [PAST["kv"], g.add(g.mul(positions, along), g.const(place)), new], out=PRESENT["kv"])
