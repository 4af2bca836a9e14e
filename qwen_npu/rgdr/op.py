"""RecurrentGatedDeltaRule and ChunkGatedDeltaRule on the CPU: check everything, then compute, then return.

Nothing is written before all checks have passed. A right call of the usual kind is checked and run by the native kernel
(distribution qwen-npu-kernels) in one go; every other call comes through the checks here, which name what is wrong.
Without the native kernel `reference.recurrence` computes, in f32 as well. Set QWEN_NPU_NATIVE=off to leave it out.
"""

from __future__ import annotations

import math
import os
from functools import cache
from types import ModuleType
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qwen_npu.errors import OpError, OpTypeError
from qwen_npu.rgdr import compat as compat_310p
from qwen_npu.rgdr.plan import Plan, plan_chunk, plan_recurrent
from qwen_npu.rgdr.reference import recurrence

Array = NDArray[Any]
OnError = Literal["raise", "skip"]
Compat = Literal["310p"]

_CODES: dict[np.dtype[Any], int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}
_BF16 = 2
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_F32 = np.dtype(np.float32)


@cache
def native() -> ModuleType | None:
    """The native kernel's module, or None where it is not installed or switched off."""
    if os.environ.get("QWEN_NPU_NATIVE", "").lower() == "off":
        return None
    try:
        import qwen_npu_kernels
    except ImportError:
        return None
    return qwen_npu_kernels  # type: ignore[no-any-return]


def recurrent_gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state: Array,
    actual_seq_lengths: ArrayLike,
    ssm_state_indices: ArrayLike,
    g: Array | None = None,
    gk: Array | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    scale: float = 1.0,
    pad_slot: int | None = None,
    compat: Compat | None = None,
    on_error: OnError = "raise",
    out: Array | None = None,
) -> Array:
    """One step of the gated delta rule for B sequences over a pool of states, in place on `state`.

    Sequence i (L_i packed tokens) starts from the slot at position accepted_i - 1 of its row and stores the state after
    each token in that token's slot. The contract stands in kernels/README.md, the formula in `qwen_npu.rgdr.reference`.

    Args:
        query, key: [T, NK, DK], L2-normalised by the caller; f16, bf16 or f32, one dtype for these four.
        value: [T, NV, DV], NV a multiple of NK.
        beta: [T, NV], already a sigmoid.
        state: [S, NV, DV, DK] (V-major, DK innermost), C-contiguous and writable; f16, bf16 or f32.
        actual_seq_lengths: [B] i32 or i64, lengths in 1..8 whose sum is T.
        ssm_state_indices: [T] slots (flat), or [B, W] rows with W >= every length; i32 or i64.
        g: [T, NV] f32 log decay.
        gk: [T, NV] or [T, NV, DK] f32 log key decay; applies beside g.
        num_accepted_tokens: [B] i32 or i64 in 0..W (rows) or 0..L (flat); 0 reads like 1; None: all 1.
        scale: multiplies the query, usually DK ** -0.5.
        pad_slot: sequences whose slots are all this one are left out; their out rows are zero.
        compat: "310p" computes what the deployed kernel silently does (see `qwen_npu.rgdr.compat`).
        on_error: "raise", or "skip" as on the device: a sequence that fails a check writes nothing and gets NaN rows.
        out: [T, NV, DV] of value's dtype to write into; allocated when None.

    Returns:
        out. Computed in f32 and rounded to value's dtype.

    Raises:
        OpTypeError: a wrong type or dtype.
        OpError: a wrong shape, layout or value.
    """
    kernel = native()
    if kernel is not None and pad_slot is None and compat is None and on_error == "raise" and type(value) is np.ndarray:
        # The usual case at once: the kernel checks the whole call, and leaves it alone unless everything is right.
        place = np.empty(value.shape, value.dtype) if out is None else out
        if type(scale) is float and kernel.step(
            query,
            key,
            value,
            beta,
            state,
            actual_seq_lengths,
            ssm_state_indices,
            g,
            gk,
            num_accepted_tokens,
            scale,
            place,
        ):
            return place
    if compat is not None and compat != "310p":
        raise OpError(f"compat={compat!r}", expected='None or "310p"', fix="leave it out for the strict op")
    if on_error != "raise" and on_error != "skip":
        raise OpError(f"on_error={on_error!r}", expected='"raise" or "skip"')
    tokens, slots = _check_arrays(query, key, value, beta, state, "state", g, gk, scale)
    lengths = _integers(actual_seq_lengths, "actual_seq_lengths")
    indices = _integers(ssm_state_indices, "ssm_state_indices")
    accepted = None if num_accepted_tokens is None else _integers(num_accepted_tokens, "num_accepted_tokens")
    sequences = lengths.shape[0] if lengths.ndim == 1 else _bad_shape("actual_seq_lengths", lengths, "[B]")
    if accepted is not None and accepted.shape != (sequences,):
        _bad_shape("num_accepted_tokens", accepted, f"[B] = ({sequences},)")
    if indices.ndim == 2:
        if indices.shape[0] != sequences or indices.shape[1] < 1:
            _bad_shape("ssm_state_indices", indices, f"rows [B, W] with B = {sequences} and W >= 1")
    elif indices.shape != (tokens,) and compat is None:
        _bad_shape("ssm_state_indices", indices, f"[T] = ({tokens},), or rows [B, W]")
    if pad_slot is not None and not isinstance(pad_slot, (int, np.integer)):
        raise OpTypeError(f"pad_slot is {type(pad_slot).__name__}", expected="an int or None")
    out = _check_out(out, value, (query, key, beta, state, g, gk))

    if compat is not None:
        compat_310p.run(query, key, value, beta, state, out, lengths, indices, g, gk, accepted, scale)
        return out
    rows = indices.ndim == 2
    plan = plan_recurrent(
        lengths.tolist(),
        None if rows else indices.tolist(),
        indices.tolist() if rows else None,
        None if accepted is None else accepted.tolist(),
        tokens,
        slots,
        pad_slot,
        on_error == "skip",
    )
    for first, last in plan.blank:
        out[first:last] = 0
    for first, last in plan.refused:
        out[first:last] = np.nan
    _compute(query, key, value, beta, state, state, out, plan, g, gk, scale)
    return out


def chunk_gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    initial_state: Array,
    actual_seq_lengths: ArrayLike,
    g: Array | None = None,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """The same recurrence over sequences of any length, from state i to state i: what prefill runs.

    Args:
        query, key: [T, NK, DK]; value: [T, NV, DV]; beta: [T, NV]; g: [T, NV] f32: as in `recurrent_gated_delta_rule`.
        initial_state: [B, NV, DV, DK], left as it is.
        actual_seq_lengths: [B] i32 or i64, 0 or more, their sum is T.

    Returns:
        (out [T, NV, DV] of value's dtype, final_state [B, NV, DV, DK] of initial_state's dtype).

    Raises:
        OpTypeError, OpError: as `recurrent_gated_delta_rule`.
    """
    tokens, states = _check_arrays(query, key, value, beta, initial_state, "initial_state", g, None, scale)
    lengths = _integers(actual_seq_lengths, "actual_seq_lengths")
    if lengths.ndim != 1:
        _bad_shape("actual_seq_lengths", lengths, "[B]")
    plan = plan_chunk(lengths.tolist(), tokens, states)
    out = np.empty(value.shape, value.dtype)
    final = initial_state.copy()
    _compute(query, key, value, beta, final, final, out, plan, g, None, scale)
    return out, final


def _compute(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state_in: Array,
    state_out: Array,
    out: Array,
    plan: Plan,
    g: Array | None,
    gk: Array | None,
    scale: float,
) -> None:
    kernel = native()
    if kernel is None:
        recurrence(
            query, key, value, beta, state_in, state_out, out, plan, g=g, gk=gk, scale=scale, precision=np.float32
        )
        return
    activation, pool = _code(query), _code(state_in)
    tokens, nk, dk = query.shape
    nv, dv = value.shape[1:]
    kernel.run(
        _bytes(query, activation),
        _bytes(key, activation),
        _bytes(value, activation),
        _bytes(beta, activation),
        _bytes(state_in, pool),
        _bytes(state_out, pool),
        _bytes(out, activation),
        None if g is None else _bytes(g, 0),
        None if gk is None else _bytes(gk, 0),
        plan.packed(),
        activation,
        pool,
        tokens,
        state_in.shape[0],
        nk,
        nv,
        dk,
        dv,
        len(plan.length),
        float(scale),
        0,
        gk is not None and gk.ndim == 3,
    )


def _bytes(array: Array, code: int) -> Array:
    """The array as the buffer protocol can show it: contiguous, and bf16, which it has no name for, as u16."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.view(np.uint16) if code == _BF16 else array


def _code(array: Array) -> int:
    code = _CODES.get(array.dtype)
    if code is None and array.dtype.name == "bfloat16":
        code = _CODES[array.dtype] = _BF16
    return -1 if code is None else code


def _check_arrays(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state: Array,
    state_name: str,
    g: Array | None,
    gk: Array | None,
    scale: float,
) -> tuple[int, int]:
    """Types, dtypes, shapes and layout of everything that is not an integer. Returns (T, S)."""
    named: tuple[tuple[str, Any], ...] = (
        ("query", query),
        ("key", key),
        ("value", value),
        ("beta", beta),
        (state_name, state),
    )
    for name, array in named:
        if not isinstance(array, np.ndarray):
            raise OpTypeError(f"{name} is {type(array).__name__}", expected="a NumPy array")
        if _code(array) < 0:
            raise OpTypeError(
                f"{name} has dtype {array.dtype.str if array.dtype.isnative is False else array.dtype}",
                expected="float16, bfloat16 or float32 in native byte order",
                fix="convert it with astype",
            )
    dtype = query.dtype
    if key.dtype != dtype or value.dtype != dtype or beta.dtype != dtype:
        raise OpTypeError(
            f"query is {dtype}, key {key.dtype}, value {value.dtype}, beta {beta.dtype}",
            expected="one dtype for these four (state may have another)",
            fix="convert them with astype",
        )
    optional: tuple[tuple[str, Any], ...] = (("g", g), ("gk", gk))
    for name, array in optional:
        if array is None:
            continue
        if not isinstance(array, np.ndarray):
            raise OpTypeError(f"{name} is {type(array).__name__}", expected="a float32 NumPy array or None")
        if array.dtype != _F32:
            raise OpTypeError(f"{name} has dtype {array.dtype}", expected="float32", fix="convert it with astype")
    if query.ndim != 3 or 0 in query.shape[1:]:
        _bad_shape("query", query, "[T, NK, DK]")
    if value.ndim != 3 or 0 in value.shape[1:]:
        _bad_shape("value", value, "[T, NV, DV]")
    tokens, nk, dk = query.shape
    nv, dv = value.shape[1:]
    if key.shape != query.shape:
        _bad_shape("key", key, f"query's shape {query.shape}")
    if value.shape[0] != tokens:
        _bad_shape("value", value, f"[T, NV, DV] with T = {tokens} as in query")
    if nv % nk:
        raise OpError(
            f"NV = {nv} value heads for NK = {nk} key heads",
            expected="NV to be a multiple of NK",
            fix="check the order of heads and lanes in query and value",
        )
    if beta.shape != (tokens, nv):
        _bad_shape("beta", beta, f"[T, NV] = {(tokens, nv)}")
    if g is not None and g.shape != (tokens, nv):
        _bad_shape("g", g, f"[T, NV] = {(tokens, nv)}")
    if gk is not None and gk.shape != (tokens, nv, dk) and gk.shape != (tokens, nv):
        _bad_shape("gk", gk, f"[T, NV] = {(tokens, nv)} or [T, NV, DK] = {(tokens, nv, dk)}")
    if state.ndim != 4 or state.shape[1:] != (nv, dv, dk):
        swapped = state.ndim == 4 and state.shape[1:] == (nv, dk, dv)
        raise OpError(
            f"{state_name} has shape {state.shape}" + (": K-major (transposed)" if swapped else ""),
            expected=f"[S, NV, DV, DK] = [S, {nv}, {dv}, {dk}]",
            fix="store it V-major: np.ascontiguousarray(state.transpose(0, 1, 3, 2))" if swapped else "",
        )
    if not state.flags.carray:
        _bad_layout(state, state_name)
    if not isinstance(scale, (int, float, np.floating, np.integer)):
        raise OpTypeError(f"scale is {type(scale).__name__}", expected="a number")
    if not math.isfinite(scale):
        raise OpError(f"scale is {scale}", expected="a finite number, usually DK ** -0.5")
    return tokens, state.shape[0]


def _bad_layout(state: Array, name: str) -> None:
    """Refuses a pool that cannot be used in place; a read-only one is fine where it is only read."""
    if not state.flags.c_contiguous:
        transposed = state.transpose(0, 1, 3, 2).flags.c_contiguous
        raise OpError(
            f"{name} is not C-contiguous (strides {state.strides})" + (": a transposed view" if transposed else ""),
            expected="DK innermost in memory, slots one after another",
            fix="keep the pool as one contiguous array; a copy would not be written back",
        )
    if name == "state" and not state.flags.writeable:
        raise OpError(f"{name} is read-only", expected="a writable array: it is updated in place", fix="pass a copy")
    if not state.flags.aligned:
        raise OpError(f"{name} is not aligned to its items", expected="an aligned array")


def _check_out(out: Array | None, value: Array, others: tuple[Array | None, ...]) -> Array:
    if out is None:
        return np.empty(value.shape, value.dtype)
    if not isinstance(out, np.ndarray) or out.dtype != value.dtype:
        raise OpTypeError(
            f"out is {out.dtype if isinstance(out, np.ndarray) else type(out).__name__}",
            expected=f"an array of value's dtype {value.dtype}",
        )
    if out.shape != value.shape:
        _bad_shape("out", out, f"value's shape {value.shape}")
    if not out.flags.carray:
        raise OpError("out is not a writable C-contiguous array", expected="one that can be written in place")
    if any(other is not None and np.may_share_memory(out, other) for other in (value, *others)):
        raise OpError(
            "out shares memory with an input", expected="memory of its own", fix="allocate out once and reuse it"
        )
    return out


def _integers(numbers: ArrayLike, name: str) -> NDArray[Any]:
    array = numbers if isinstance(numbers, np.ndarray) else np.asarray(numbers)
    if array.dtype != _INT32 and array.dtype != _INT64:
        if array.size == 0 and not isinstance(numbers, np.ndarray):
            return array.astype(np.int64)
        raise OpTypeError(f"{name} has dtype {array.dtype}", expected="int32 or int64", fix="convert it with astype")
    return array


def _bad_shape(name: str, array: Array, expected: str) -> NoReturn:
    raise OpError(f"{name} has shape {array.shape}", expected=expected)
