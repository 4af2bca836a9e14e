"""Prefill (last logits, or all) and decode (growing or fixed KV): one sequence, states stacked over the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import ATTENTION_MASK, IMAGE_EMBEDS, PAST, PRESENT
from qwen_npu.graphs import layers
from qwen_npu.graphs.builder import Graph
from qwen_npu.graphs.nodes import Packed, chunk_function, chunk_node, recurrent_function, recurrent_node
from qwen_npu.graphs.weights import WeightTable
from qwen_npu.spec import ModelSpec, Numerics


class Cache(Protocol):
    """How a decode graph reads and writes the KV."""

    def attend(self, query: str, key: str, value: str) -> str:
        """See `layers.Attend`; called once for each full layer, in their order."""

    def write(self, numerics: Numerics) -> None:
        """Makes the output `present_kv_cache`."""


def prefill_graph(
    spec: ModelSpec,
    numerics: Numerics,
    weights: WeightTable,
    *,
    all_logits: bool = False,
    state_dtype: str = "",
    buckets: Sequence[int] = (),
) -> bytes:
    """Any number of tokens, left-padded or not; pads leave no trace in any state but their own rows of the KV.

    `buckets` are the lengths that the file declares, so that a device refuses others (none given: it takes any).
    `state_dtype` is that of the recurrent state at the node; if not given that of `numerics`.
    """
    state_dtype = state_dtype or contract.half(numerics)
    g = Graph(contract.prefill(spec, numerics, all_logits=all_logits, buckets=buckets), weights)
    g.add_function(chunk_function(spec, Packed(tokens=None), state_dtype))
    ids, x = layers.embed(g)
    keep = g.reshape(g.cast(ATTENTION_MASK, "float32"), -1, 1)
    x = g.mul(_place_image(g, spec, ids, x), keep)  # a pad is a row of zeros, here and after every layer
    bias = _causal_bias(g, spec)
    tables = layers.rope(g, spec)
    length = g.op("Shape", [ids])
    conv: list[str] = []
    recurrent: list[str] = []
    kv: list[str] = []
    start = g.const(np.zeros((1, spec.nv, spec.dv, spec.dk), state_dtype))

    def recur(query: str, key: str, value: str, beta: str, decay: str) -> str:
        out, state = chunk_node(g, spec, (query, key, value, beta, decay), start, length)
        recurrent.append(state)
        return out

    def attend(query: str, key: str, value: str) -> str:
        query, key, value = _apart(g, spec, query, key, value, tokens=None)
        kv.extend((key, value))
        out = layers.attention(g, query, key, value, bias=bias)
        return layers.by_tokens(g, out, 1, None, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)

    for layer, kind in enumerate(spec.layer_types):
        g.scope(f"layers.{layer}/")
        if kind == "linear_attention":
            x = layers.linear_layer(g, spec, layer, x, _prompt_convolution(g, spec, layer, conv), recur)
        else:
            x = layers.full_layer(g, spec, layer, x, tables, attend, keep)
        x = layers.mlp(g, spec, layer, x)
    g.scope("")
    if not all_logits:
        x = g.op("Slice", [x, g.ints(-1), g.ints(2**31 - 1), g.ints(0)])
    layers.head(g, spec, x, 1, -1)
    stack = g.reshape(g.concat(conv, axis=0), len(conv), 1, spec.conv_kernel - 1, spec.conv_lanes)
    g.finish_as(PRESENT["conv"], "Transpose", [stack], perm=[0, 1, 3, 2])
    _write_recurrent(g, spec, recurrent, state_dtype)
    g.finish_as(PRESENT["kv"], "Concat", [g.op("Unsqueeze", [piece, g.ints(0)]) for piece in kv], axis=0)
    return g.serialize()


def decode_graph(
    spec: ModelSpec,
    numerics: Numerics,
    weights: WeightTable,
    *,
    capacity: int | None,
    state_dtype: str = "",
    cache: Callable[[Graph, ModelSpec, int], Cache] | None = None,
) -> bytes:
    """One token. `capacity` None: the KV grows by one; else it is fixed and written at the mask's last one.

    `state_dtype` is that of the recurrent state at the node; if not given that of `numerics`. `cache` takes the place
    of the fixed KV's plain ops.
    """
    state_dtype = state_dtype or contract.half(numerics)
    g = Graph(contract.decode(spec, numerics, capacity), weights)
    g.add_function(recurrent_function(spec, Packed(), state_dtype))
    _, x = layers.embed(g)
    tables = layers.rope(g, spec)
    linear, taps = len(spec.linear_layers), spec.conv_kernel - 1

    past_conv = g.wide(PAST["conv"])
    # what the past adds to the convolutions, of all layers at once
    carried = g.op("ReduceSum", [g.mul(past_conv, g.weight("conv_past")), g.ints(3)], keepdims=0)
    from_past = g.split(g.reshape(carried, linear, spec.conv_lanes), (1,) * linear, axis=0)
    states = g.transpose(PAST["recurrent"], 0, 1, 2, 4, 3)
    if state_dtype != "float32":
        states = g.cast(states, state_dtype)
    pools = g.split(g.reshape(states, linear, spec.nv, spec.dv, spec.dk), (1,) * linear, axis=0)
    kv = cache(g, spec, capacity) if cache and capacity else _PlainCache(g, spec, capacity)
    one, slot = g.const(np.ones(1, np.int64)), g.const(np.zeros(1, np.int64))
    conv: list[str] = []
    recurrent: list[str] = []

    def convolution(layer: int) -> Callable[[str], str]:
        def convolve(qkv: str) -> str:
            conv.append(qkv)
            new = g.mul(qkv, g.weight(f"layers.{layer}.conv.{taps}"))
            return g.add(new, from_past[len(conv) - 1])

        return convolve

    def recur(query: str, key: str, value: str, beta: str, decay: str) -> str:
        tokens = (query, key, value, beta, decay)
        out, state = recurrent_node(g, spec, tokens, pools[len(recurrent)], one, slot)
        recurrent.append(state)
        return out

    for layer, kind in enumerate(spec.layer_types):
        g.scope(f"layers.{layer}/")
        if kind == "linear_attention":
            x = layers.linear_layer(g, spec, layer, x, convolution(layer), recur)
        else:
            x = layers.full_layer(g, spec, layer, x, tables, kv.attend)
        x = layers.mlp(g, spec, layer, x)
    g.scope("")
    layers.head(g, spec, x, 1, 1)
    new = g.reshape(g.concat(conv, axis=0), linear, 1, spec.conv_lanes, 1)
    kept = g.op("Slice", [past_conv, g.ints(1), g.ints(taps), g.ints(3)])
    g.finish_as(PRESENT["conv"], "Concat", [kept, new], axis=3)
    _write_recurrent(g, spec, recurrent, state_dtype)
    kv.write(numerics)
    return g.serialize()


def _place_image(g: Graph, spec: ModelSpec, ids: str, x: str) -> str:
    """Rows of `image_embeds` in place of the image tokens' embeddings; row 0 of the table means "no image here"."""
    is_image = g.cast(g.op("Equal", [ids, g.const(np.array(spec.image_token, np.int64))]), "int64")
    row = g.mul(g.op("CumSum", [is_image, g.const(np.array(0, np.int64))]), is_image)
    table = g.concat([g.const(np.zeros((1, spec.hidden), np.float32)), g.wide(IMAGE_EMBEDS)], axis=0)
    text = g.reshape(g.sub(g.number(1.0), g.cast(is_image, "float32")), -1, 1)
    return g.add(g.mul(x, text), g.op("Gather", [table, row], axis=0))


def _causal_bias(g: Graph, spec: ModelSpec) -> str:
    """[S * heads per KV head, S]: 0 where a row's token may look, else very negative."""
    index = g.op("CumSum", [g.op("Add", [g.mul(ATTENTION_MASK, g.ints(0)), g.ints(1)]), g.const(np.array(1, np.int64))])
    earlier = g.op("LessOrEqual", [index, g.reshape(index, -1, 1)])
    visible = g.op("And", [earlier, g.cast(ATTENTION_MASK, "bool")])
    bias = g.mul(g.sub(g.cast(visible, "float32"), g.number(1.0)), g.number(layers.HIDDEN_SCORE))
    group = spec.heads // spec.kv_heads
    if group == 1:
        return bias
    length = g.op("Shape", [bias])
    apart = g.op("Unsqueeze", [bias, g.ints(1)])
    return g.op("Reshape", [g.op("Tile", [apart, g.ints(1, group, 1)]), g.mul(length, g.ints(group, 1))])


def _apart(g: Graph, spec: ModelSpec, query: str, key: str, value: str, tokens: int | None) -> tuple[str, str, str]:
    heads, dim = spec.kv_heads, spec.head_dim
    return (
        layers.by_heads(g, query, 1, tokens, heads, spec.heads // heads, dim),
        layers.by_heads(g, key, 1, tokens, heads, 1, dim),
        layers.by_heads(g, value, 1, tokens, heads, 1, dim),
    )


def _prompt_convolution(g: Graph, spec: ModelSpec, layer: int, states: list[str]) -> Callable[[str], str]:
    """The causal convolution from a past of zeros, one shifted slice a tap; remembers the last inputs as the state."""

    def convolve(qkv: str) -> str:
        kernel = spec.conv_kernel
        padded = g.concat([g.const(np.zeros((kernel - 1, spec.conv_lanes), np.float32)), qkv], axis=0)
        axis, end = g.ints(0), g.ints(2**31 - 1)
        states.append(g.op("Slice", [padded, g.ints(1 - kernel), end, axis]))
        total = ""
        for tap in range(kernel):
            last = g.ints(tap - kernel + 1) if tap < kernel - 1 else end
            shifted = g.op("Slice", [padded, g.ints(tap), last, axis])
            part = g.mul(shifted, g.weight(f"layers.{layer}.conv.{tap}"))
            total = g.add(total, part) if total else part
        return total

    return convolve


class _PlainCache:
    """The past K and V of each full layer in f32, the bias of the scores, and how the new ones are written."""

    def __init__(self, g: Graph, spec: ModelSpec, capacity: int | None) -> None:
        self._g, self._spec = g, spec
        self._new: list[str] = []
        self._rows = 2 * len(spec.full_layers)
        past = PAST["kv"]
        self._position = ""
        if capacity is None:
            hidden = g.sub(g.cast(ATTENTION_MASK, "float32"), g.number(1.0))
            self._bias = g.mul(hidden, g.number(layers.HIDDEN_SCORE))
            valid = past
        else:
            self._bias = ""
            self._position = newest_position(g)
            # what lies behind the position is never read
            valid = g.op("Slice", [past, g.ints(0), self._position, g.ints(3)])
        self._past = g.split(g.op("Squeeze", [g.wide(valid, past), g.ints(1)]), (1,) * self._rows, axis=0)

    def attend(self, query: str, key: str, value: str) -> str:
        g = self._g
        query, key, value = _apart(g, self._spec, query, key, value, tokens=1)
        past = (self._past[len(self._new)], self._past[len(self._new) + 1])
        self._new += [key, value]
        return layers.attention(g, query, key, value, past=past, tokens=1, bias=self._bias)

    def write(self, numerics: Numerics) -> None:
        g, spec, past, present = self._g, self._spec, PAST["kv"], PRESENT["kv"]
        stack = g.reshape(g.concat(self._new, axis=0), self._rows, 1, spec.kv_heads, 1, spec.head_dim)
        if numerics == "device":
            stack = g.cast(stack, contract.half(numerics))
        if not self._position:
            g.concat([past, stack], axis=3, out=present)
            return
        place = np.moveaxis(np.indices((self._rows, 1, spec.kv_heads, 1), np.int64), 0, -1)
        along = g.const(np.array([0, 0, 0, 1], np.int64))
        g.op("ScatterND", [past, g.add(g.mul(self._position, along), g.const(place)), stack], out=present)


def newest_position(g: Graph) -> str:
    """[1] i64: where a fixed cache takes the new token, the place of the mask's last one."""
    return g.sub(g.op("ReduceSum", [ATTENTION_MASK, g.ints(1)], keepdims=0), g.ints(1))


def _write_recurrent(g: Graph, spec: ModelSpec, states: list[str], dtype: str) -> None:
    """[NV,DV,DK] states of the layers as the model-facing [layers,1,NV,DK,DV], always f32."""
    stack = g.concat(states, axis=0)
    if dtype != "float32":
        stack = g.cast(stack, "float32")
    stack = g.reshape(stack, len(states), 1, spec.nv, spec.dv, spec.dk)
    g.transpose(stack, 0, 1, 2, 4, 3, out=PRESENT["recurrent"])
