"""The gated delta rule in readable NumPy: what every kernel is held against.

Per sequence and value head h (key head h // (NV/NK)), with S [DV, DK] read once from its slot:

    S = S * exp(g[t,h]) * exp(gk[t,h])        gk a number or a vector over DK
    d = (v[t,h] - S k[t]) * beta[t,h]
    S = S + d k[t]^T
    out[t,h] = S (scale * q[t])               rounded to value's dtype
    state[write slot of t] = S                rounded to the state's dtype; S itself goes on unrounded
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_npu.rgdr.plan import Plan

Array = NDArray[Any]


def recurrence(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state_in: Array,
    state_out: Array,
    out: Array,
    plan: Plan,
    *,
    g: Array | None = None,
    gk: Array | None = None,
    scale: float = 1.0,
    precision: type[np.floating[Any]] = np.float64,
) -> None:
    """Runs a plan: writes `out` and the planned slots of `state_out`.

    Args:
        query, key: [T, NK, DK].
        value: [T, NV, DV]; NV a multiple of NK.
        beta: [T, NV].
        state_in, state_out: [S, NV, DV, DK], DK innermost; may be one array.
        out: [T, NV, DV].
        plan: from `plan_recurrent` or `plan_chunk`; a read slot of -1 starts from NaN.
        g: [T, NV] log decay, or None.
        gk: [T, NV] or [T, NV, DK] log key decay, or None.
        scale: multiplies the query.
        precision: dtype of the arithmetic and of the state between tokens.
    """
    repeat = value.shape[1] // key.shape[1]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first, length, slot in zip(plan.start, plan.length, plan.read, strict=True):
            if length == 0:
                continue
            shape = state_in.shape[1:]
            state = state_in[slot].astype(precision) if slot >= 0 else np.full(shape, np.nan, precision)
            for t in range(first, first + length):
                q = np.repeat(query[t].astype(precision) * precision(scale), repeat, axis=0)[:, :, None]  # [NV,DK,1]
                k = np.repeat(key[t].astype(precision), repeat, axis=0)[:, :, None]  # [NV,DK,1]
                if g is not None:
                    state *= np.exp(g[t].astype(precision))[:, None, None]
                if gk is not None:
                    decay = np.exp(gk[t].astype(precision))
                    state *= decay[:, None, :] if gk.ndim == 3 else decay[:, None, None]
                delta = value[t].astype(precision)[:, :, None] - state @ k  # [NV,DV,1]
                delta *= beta[t].astype(precision)[:, None, None]
                state += delta * k.transpose(0, 2, 1)
                out[t] = (state @ q)[:, :, 0].astype(out.dtype)
                if plan.write[t] >= 0:
                    state_out[plan.write[t]] = state.astype(state_out.dtype)
