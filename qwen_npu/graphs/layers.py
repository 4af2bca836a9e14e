"""The layers of the language model in plain ops, the same for prefill, decode and verify.

Hidden states are [T, hidden] with T = sequences * tokens, one sequence after another. What differs between the graphs
(where past state comes from and where new state goes) is handed in as a function.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qwen_npu.contract import INPUT_IDS, LOGITS, POSITION_IDS
from qwen_npu.graphs.builder import Graph
from qwen_npu.spec import ModelSpec

HIDDEN_SCORE = 1e9
"""Taken from the score of a position that must not be seen; finite, so that a row of nothing but those stays finite."""


Recur = Callable[[str, str, str, str, str], str]
"""The recurrence of one linear layer: query, key [T,NK,DK], value [T,NV,DV], beta, g [T,NV] give out [T,NV,DV]."""

Attend = Callable[[str, str, str], str]
"""Attention of one full layer: query [T,heads,D] (scaled), key [T,KV,D], value [T,KV*D] to [T,heads*D]."""


def rms_norm(g: Graph, x: str, scale: str, eps: float) -> str:
    """scale * x / sqrt(mean(x^2) + eps) over the last axis; in the form that onnxruntime fuses into one node."""
    mean = g.op("ReduceMean", [g.op("Pow", [x, g.number(2.0)])], axes=[-1], keepdims=1)
    root = g.op("Sqrt", [g.add(mean, g.number(eps))])
    return g.mul(g.op("Div", [x, root]), scale)


def silu(g: Graph, x: str) -> str:
    return g.mul(x, g.op("Sigmoid", [x]))


def project(g: Graph, x: str, weight: str, *, bias: str = "") -> str:
    """[T, in] times a weight [in, out]; `bias` [out], or [T, out] for a residual."""
    return g.op("Gemm", [x, g.weight(weight), *([bias] if bias else [])])


def embed(g: Graph) -> tuple[str, str]:
    """The token ids as [T] and their embeddings [T, hidden]."""
    ids = g.reshape(INPUT_IDS, -1)
    return ids, g.op("Gather", [g.weight("embed"), ids], axis=0)


def head(g: Graph, spec: ModelSpec, x: str, *leading: int) -> None:
    """Final norm and vocabulary projection, shaped [*leading, vocab], as the graph's logits."""
    x = rms_norm(g, x, g.weight("norm"), spec.rms_eps)
    matrix = g.weight("embed" if spec.tied else "head")
    logits = g.op("Gemm", [x, matrix], transB=1)
    g.finish_as(LOGITS, "Reshape", [logits, g.ints(*leading, spec.vocab)])


def rope(g: Graph, spec: ModelSpec) -> tuple[str, str]:
    """cos and signed sin [T, 1, head_dim] of the interleaved mRoPE, from rows t, h, w of `position_ids` [4, B, L].

    Frequency j of the rotary half takes h at j = 1, 4, 7.. < 3*section[1], w at j = 2, 5.. < 3*section[2], else t.
    Lanes that do not rotate get angle 0. The sign of the rotation's first half sits in the angle: sin(-a) = -sin(a).
    """
    half = spec.rotary_lanes // 2
    exponents = np.arange(0, spec.rotary_lanes, 2, dtype=np.float32) / spec.rotary_lanes
    frequencies = 1 / np.float32(spec.rope_theta) ** exponents
    axis = np.ones(half, np.int64)
    for which in (1, 2):
        axis[which : 3 * spec.mrope_section[which] : 3] = which + 1
    angles = np.zeros((4, 2, spec.head_dim), np.float32)
    lanes = np.arange(half)
    for start in (0, half):
        angles[axis, 0, start + lanes] = frequencies
        angles[axis, 1, start + lanes] = -frequencies if start == 0 else frequencies
    positions = g.transpose(g.cast(g.reshape(POSITION_IDS, 4, -1), "float32"), 1, 0)
    table = g.reshape(g.matmul(positions, g.const(angles.reshape(4, -1))), -1, 2, spec.head_dim)
    cosine, sine = g.split(table, (1, 1), axis=1)
    return g.op("Cos", [cosine]), g.op("Sin", [sine])


def rotate(g: Graph, spec: ModelSpec, x: str, tables: tuple[str, str]) -> str:
    """Applies the rotation to x [T, heads, head_dim]: x * cos + (halves swapped) * sin."""
    half = spec.rotary_lanes // 2
    rest = spec.head_dim - 2 * half
    first, second, *passed = g.split(x, (half, half, rest) if rest else (half, half), axis=2)
    swapped = g.concat([second, first, *passed], axis=2)
    cosine, sine = tables
    return g.add(g.mul(x, cosine), g.mul(swapped, sine))


def linear_layer(g: Graph, spec: ModelSpec, layer: int, x: str, convolve: Callable[[str], str], recur: Recur) -> str:
    """A gated delta layer with its residual. `convolve` takes and gives [T, conv lanes], before the SiLU."""
    name = f"layers.{layer}."
    keys, values = spec.nk * spec.dk, spec.nv * spec.dv
    normed = rms_norm(g, x, g.weight(f"{name}norm1"), spec.rms_eps)
    mixed = project(g, normed, f"{name}in_proj", bias=g.weight(f"{name}in_bias"))
    qkv, z, b, a = g.split(mixed, (spec.conv_lanes, values, spec.nv, spec.nv), axis=1)
    qk, v = g.split(silu(g, convolve(qkv)), (2 * keys, values), axis=1)
    # x / sqrt(sum x^2 + 1e-6) as an RMS norm: sum = DK * mean; one node for q and k together
    unit = g.const(np.full(spec.dk, spec.dk**-0.5, np.float32))
    qk = rms_norm(g, g.reshape(qk, -1, 2 * spec.nk, spec.dk), unit, 1e-6 / spec.dk)
    query, key = g.split(qk, (spec.nk, spec.nk), axis=1)
    decay = g.mul(g.op("Softplus", [a]), g.weight(f"{name}decay"))
    out = recur(query, key, g.reshape(v, -1, spec.nv, spec.dv), g.op("Sigmoid", [b]), decay)
    out = g.reshape(rms_norm(g, out, g.weight(f"{name}out_norm"), spec.rms_eps), -1, values)
    return project(g, g.mul(out, silu(g, z)), f"{name}out_proj", bias=x)


def full_layer(
    g: Graph, spec: ModelSpec, layer: int, x: str, tables: tuple[str, str], attend: Attend, keep: str = ""
) -> str:
    """A gated attention layer with its residual. `keep` [T, 1] of 0 and 1: rows with 0 get nothing added."""
    name = f"layers.{layer}."
    q_lanes, kv_lanes, both = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.heads + spec.kv_heads
    normed = rms_norm(g, x, g.weight(f"{name}norm1"), spec.rms_eps)
    mixed = project(g, normed, f"{name}in_proj")
    qk, value, gate = g.split(mixed, (q_lanes + kv_lanes, kv_lanes, q_lanes), axis=1)
    ones = g.const(np.ones(spec.head_dim, np.float32))
    qk = rms_norm(g, g.reshape(qk, -1, both, spec.head_dim), ones, spec.rms_eps)
    qk = rotate(g, spec, g.mul(qk, g.weight(f"{name}qk_norm")), tables)
    query, key = g.split(qk, (spec.heads, spec.kv_heads), axis=1)
    out = g.mul(g.reshape(attend(query, key, value), -1, q_lanes), g.op("Sigmoid", [gate]))
    if keep:
        out = g.mul(out, keep)
    return project(g, out, f"{name}out_proj", bias=x)


def mlp(g: Graph, spec: ModelSpec, layer: int, x: str) -> str:
    """The SwiGLU block with its residual."""
    name = f"layers.{layer}."
    normed = rms_norm(g, x, g.weight(f"{name}norm2"), spec.rms_eps)
    gate, up = g.split(project(g, normed, f"{name}gate_up"), (spec.intermediate,) * 2, axis=1)
    return project(g, g.mul(silu(g, gate), up), f"{name}down", bias=x)


def by_heads(g: Graph, value: str, batch: int, tokens: int | None, heads: int, group: int, dim: int) -> str:
    """[T, heads*group, dim] as [batch, heads, tokens*group, dim]; `tokens` None if known only when the graph runs."""
    if tokens == 1:
        return g.reshape(value, batch, heads, group, dim)
    length = -1 if tokens is None else tokens
    if group == 1:
        return g.transpose(g.reshape(value, batch, length, heads, dim), 0, 2, 1, 3)
    apart = g.transpose(g.reshape(value, batch, length, heads, group, dim), 0, 2, 1, 3, 4)
    return g.reshape(apart, batch, heads, -1, dim)


def by_tokens(g: Graph, value: str, batch: int, tokens: int | None, heads: int, group: int, dim: int) -> str:
    """The way back of `by_heads`, up to the shape of the last axes: they are left for the caller to join."""
    if tokens == 1:
        return value
    length = -1 if tokens is None else tokens
    return g.transpose(g.reshape(value, batch, heads, length, group, dim), 0, 2, 1, 3, 4)


def attention(
    g: Graph,
    query: str,
    key: str,
    value: str,
    *,
    past: tuple[str, str] | None = None,
    tokens: int = 0,
    bias: str = "",
    past_bias: str = "",
    new_bias: str = "",
) -> str:
    """Grouped attention: query [B,KV,rows,D] on key, value [B,KV,L,D]; KV heads are not repeated.

    `past` key and value [B,KV,N,D] (with `tokens` = L) come first. They are never joined with the new ones, only the
    scores are: nothing of the cache is copied. `bias` is added to the scores [B,KV,rows,N+L], `past_bias` to those of
    the past [B,KV,rows,N], `new_bias` to the others.
    """
    scores = g.matmul(query, g.transpose(key, 0, 1, 3, 2))
    if new_bias:
        scores = g.add(scores, new_bias)
    if past:
        before = g.matmul(query, g.transpose(past[0], 0, 1, 3, 2))
        scores = g.concat([g.add(before, past_bias) if past_bias else before, scores], axis=3)
    weights = g.op("Softmax", [g.add(scores, bias) if bias else scores], axis=-1)
    if not past:
        return g.matmul(weights, value)
    border, axis = g.ints(-tokens), g.ints(3)
    old = g.op("Slice", [weights, g.ints(0), border, axis])
    new = g.op("Slice", [weights, border, g.ints(2**31 - 1), axis])
    return g.add(g.matmul(old, past[1]), g.matmul(new, value))
