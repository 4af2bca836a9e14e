"""The recurrence over a whole bucket in plain ops: chunks of equal length, for runtimes without a node for it.

What does not depend on the state (inside a chunk) is computed for all chunks at once; only the state goes from chunk to
chunk, five nodes each. Source of the formula: the gated delta rule in its chunked form,

    U  = M v beta - (M k beta exp(c)) S,   M = (I + A)^-1 by block doubling
    o  = ((q k^T) D) U + (q exp(c)) S,     S' = (k exp(c_last - c))^T U + exp(c_last) S

with c the running sum of g inside a chunk. A power series for M would be off by 1e7 where keys are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwen_npu.graphs.builder import Nodes
from qwen_npu.spec import ModelSpec

CHUNK_TOKENS = 64


def chunked(
    g: Nodes, spec: ModelSpec, inputs: Sequence[str], outputs: Sequence[str], scale: float, tokens: int
) -> None:
    """Writes out [tokens,NV,DV] and the state after the last token [1,NV,DV,DK], all f32.

    Args:
        inputs: query, key [tokens,NK,DK], value [tokens,NV,DV], beta [tokens,NV], state [1,NV,DV,DK] and
            g [tokens,NV].
        tokens: the bucket; where it is no multiple of a chunk, zeros are put before it: they leave no trace.
    """
    nk, ratio, dk, dv = spec.nk, spec.nv // spec.nk, spec.dk, spec.dv
    size = min(CHUNK_TOKENS, tokens)
    count = -(-tokens // size)
    pads = count * size - tokens
    query, key, value, beta, state, decay_log = inputs

    def by_chunk(array: str, heads: int, group: int, lanes: int) -> str:
        """[tokens, heads * group, lanes] as [chunks, heads, group, size, lanes]."""
        array = g.reshape(array, tokens, heads * group, lanes)
        if pads:
            array = g.concat([g.const(np.zeros((pads, heads * group, lanes), np.float32)), array], axis=0)
        return g.transpose(g.reshape(array, count, size, heads, group, lanes), 0, 2, 3, 1, 4)

    query = g.mul(by_chunk(query, nk, 1, dk), g.number(scale))
    key = by_chunk(key, nk, 1, dk)
    value = by_chunk(value, nk, ratio, dv)
    beta = by_chunk(beta, nk, ratio, 1)
    log = by_chunk(decay_log, nk, ratio, 1)

    lower, strict, identity, *levels = (g.const(mask) for mask in triangles(size))
    key_turned = g.transpose(key, 0, 1, 2, 4, 3)
    running = g.matmul(lower, log)
    # masked before the exponential, which would overflow above the diagonal
    distance = g.mul(g.sub(running, g.transpose(running, 0, 1, 2, 4, 3)), lower)
    decay = g.mul(g.op("Exp", [distance]), lower)
    a = g.mul(g.mul(g.mul(g.matmul(key, key_turned), decay), beta), strict)
    m = g.sub(identity, g.mul(a, levels[0])) if levels else identity
    for level in levels[1:]:
        m = g.sub(m, g.matmul(g.matmul(m, g.mul(a, level)), m))
    grown = g.op("Exp", [running])
    total = g.op("ReduceSum", [log, g.ints(3)], keepdims=1)
    answers = g.matmul(m, g.mul(value, beta))  # [chunks, NK, R, size, DV]
    asked = g.matmul(m, g.mul(g.mul(key, grown), beta))  # [chunks, NK, R, size, DK]
    learnt_by = g.transpose(g.mul(key, g.op("Exp", [g.sub(total, running)])), 0, 1, 2, 4, 3)
    kept = g.op("Exp", [total])

    each = (1,) * count
    per_chunk = [g.split(array, each, axis=0) if count > 1 else [array] for array in (answers, asked, learnt_by, kept)]
    now = g.transpose(g.reshape(state, 1, nk, ratio, dv, dk), 0, 1, 2, 4, 3)  # K-major from here on
    before: list[str] = []
    changes: list[str] = []
    for answer, question, learn, keep in zip(*per_chunk, strict=True):
        change = g.sub(answer, g.matmul(question, now))
        before.append(now)
        changes.append(change)
        now = g.add(g.matmul(learn, change), g.mul(now, keep))

    inside = g.matmul(g.mul(g.matmul(query, key_turned), decay), g.concat(changes, axis=0))
    out = g.add(inside, g.matmul(g.mul(query, grown), g.concat(before, axis=0)))
    out = g.reshape(g.transpose(out, 0, 3, 1, 2, 4), count * size, spec.nv, dv)
    g.op("Slice", [out, g.ints(pads), g.ints(count * size), g.ints(0)], out=outputs[0])
    g.reshape(g.transpose(now, 0, 1, 2, 4, 3), 1, spec.nv, dv, dk, out=outputs[1])


def triangles(size: int) -> list[np.ndarray]:
    """[size, size] f32 masks: lower with and without the diagonal, identity, and the blocks of each doubling."""
    row, column = np.indices((size, size))
    masks = [row >= column, row > column, row == column]
    block = 1
    while block < size:
        masks.append((row // block == column // block + 1) & (row // block % 2 == 1))
        block *= 2
    return [mask.astype(np.float32) for mask in masks]
