"""What the deployed 310P kernel does where ours raises an error: computed to be shown beside the strict result.

Never the default. Reproduced, from public descriptions of that kernel:

* accepted 0 or beyond L starts from the sequence's first slot; beyond L that is silently the wrong start;
* integers are cut to 32 bits: slot 2**32 + 1 becomes slot 1;
* indices are always read flat, so rows [B, W] of sequences shorter than W run into each other's slots;
* L > 8: the core returns, so this sequence and all later ones are left out, their out rows keep what was there;
* sum(L) != T: tokens of no sequence keep what was in out; sequences run on their own view of where they start;
* a scalar gk is dropped when g is given; which kind gk is, is guessed from its number of elements;
* an f32 pool given with f16 activations is read and written as 2-byte elements;
* two sequences on one slot overwrite each other (here in order; on the device in any order).

What lies outside of the arrays is not ours to touch: there a read gives NaN and a write is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_npu.rgdr.plan import MAX_TOKENS, Plan
from qwen_npu.rgdr.reference import recurrence

Array = NDArray[Any]


def read_slot_310p(indices: list[int], first: int, length: int, accepted: int | None) -> int:
    """The slot that the 310P kernel starts a sequence from ; -1: outside of `indices`."""
    position = first + accepted - 1 if accepted is not None and 1 <= accepted <= length else first
    return indices[position] if 0 <= position < len(indices) else -1


def plan_310p(lengths: Array, indices: Array, accepted: Array | None, tokens: int, slots: int) -> Plan:
    """The plan that the 310P kernel follows: no check, 32-bit integers, flat indices."""
    flat: list[int] = indices.astype(np.int32).reshape(-1).tolist()
    depth = None if accepted is None else accepted.astype(np.int32).tolist()
    plan = Plan([], [], [], [-1] * tokens)
    first = 0
    for i, length in enumerate(lengths.astype(np.int32).tolist()):
        if length > MAX_TOKENS:
            break
        read = read_slot_310p(flat, first, length, None if depth is None else depth[i])
        inside = range(max(first, 0), max(min(first + length, tokens), max(first, 0)))
        plan.start.append(inside.start)
        plan.length.append(len(inside))
        plan.read.append(read if 0 <= read < slots else -1)
        for t in inside:
            slot = flat[t] if t < len(flat) else -1
            plan.write[t] = slot if 0 <= slot < slots else -1
        first += length
    return plan


def run(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state: Array,
    out: Array,
    lengths: Array,
    indices: Array,
    g: Array | None,
    gk: Array | None,
    accepted: Array | None,
    scale: float,
) -> None:
    """Writes out and state as the 310P kernel would. Shapes and dtypes as in `recurrent_gated_delta_rule`."""
    tokens, nv = beta.shape
    if gk is not None and gk.size == tokens * nv:
        gk = None if g is not None else gk.reshape(tokens, nv)
    if state.dtype == np.float32 and query.dtype == np.float16:
        state = state.reshape(-1).view(np.float16)[: state.size].reshape(state.shape)
    plan = plan_310p(lengths, indices, accepted, tokens, state.shape[0])
    recurrence(query, key, value, beta, state, state, out, plan, g=g, gk=gk, scale=scale, precision=np.float32)
