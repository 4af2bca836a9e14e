"""The op (native kernel where installed) against the reference, over every kind of call."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_npu.rgdr import chunk_gated_delta_rule, native
from tests.unit.rgdr.rgdr_cases import Case, assert_close, check, make_case, unit

needs_native = pytest.mark.skipif(native() is None, reason="qwen-npu-kernels is not installed")


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """Any right call, small: every dtype, flat and rows, every accepted depth, odd sizes."""
    lengths = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    rows = draw(st.sampled_from([0, 0, max(lengths), max(lengths) + 1]))
    depths = None
    if draw(st.booleans()):
        depths = tuple(draw(st.integers(0, rows or n)) for n in lengths)
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        lengths,
        nk=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        dk=draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128]))),
        dv=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
        pool=draw(st.sampled_from(["f32", "f16", "bf16"])),
        rows=rows,
        spare=draw(st.integers(0, 2)),
        g=draw(st.booleans()),
        gk=draw(st.sampled_from(["", "scalar", "vector"])),
        accepted=depths,
        integers=draw(st.sampled_from([np.int32, np.int64])),
    )


fast = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@fast
@given(calls())
def test_op_equals_reference(case: Case) -> None:
    check(case)


@pytest.mark.full
@needs_native
@long
@given(calls())
def test_op_equals_reference_on_5000_calls(case: Case) -> None:
    check(case)


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    kernel = native()
    assert kernel is not None
    try:
        kernel.select_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this processor or build has no {request.param}")
    yield request.param
    kernel.select_instruction_set("")


@needs_native
@pytest.mark.parametrize("pool", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dk", [1, 15, 33, 128])
def test_every_instruction_set(instruction_set: str, pool: str, dk: int) -> None:
    for dtype in ("f32", "f16", "bf16"):
        for gk in ("", "vector"):
            lengths = (1, 3, 1)
            check(make_case(dk, lengths, dk=dk, dv=9, dtype=dtype, pool=pool, gk=gk, rows=4, accepted=(1, 4, 0)))


@needs_native
@pytest.mark.parametrize("pool", ["f16", "bf16"])
def test_every_16_bit_number_passes_through_the_kernel(instruction_set: str, pool: str) -> None:
    """Without decay or update a state is read and stored as it was, f16 subnormals too; NaN stays NaN."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(4, 4, 64, 64)
    before = bits.view(np.float16 if pool == "f16" else ml_dtypes.bfloat16)
    case = make_case(0, (1, 1, 1, 1), nk=4, group=1, dk=64, dv=64, g=False, spare=0, pool=pool)
    nothing = np.zeros_like(case.query)
    case = case.with_(
        state=before, indices=np.arange(4), key=nothing, query=nothing, value=nothing, beta=np.zeros_like(case.beta)
    )
    _, after = case.run()
    then, now = before.astype(np.float32), after.astype(np.float32)
    rows = np.isfinite(then).all(axis=-1)  # in the others infinity * 0 makes the update of the whole row NaN
    tiny = np.float32(2**-126)  # the kernel counts f32 subnormals, which bf16 has as well, as zero
    expected = np.where(np.abs(then) < tiny, 0, then)
    now_known = np.where(np.abs(now) < tiny, 0, now)
    assert np.array_equal(now_known[rows], expected[rows])
    assert np.isnan(now[~rows]).all()


@needs_native
def test_infinities_and_nan_reach_only_their_rows(instruction_set: str) -> None:
    for pool, bad in (("f16", np.inf), ("bf16", np.nan), ("f32", -np.inf)):
        case = make_case(3, (1,), dk=20, dv=10, pool=pool, nk=1, group=1)
        slot = int(case.indices[0])
        case.state[slot, 0, 4, 7] = bad
        out, state = case.run()
        assert not np.isfinite(out[0, 0, 4].astype(np.float32))
        others = [v for v in range(10) if v != 4]
        assert np.isfinite(out[0, 0, others].astype(np.float32)).all()
        assert np.isfinite(state[slot, 0, others].astype(np.float32)).all()


@pytest.mark.parametrize("pool", ["f32", "f16"])
@pytest.mark.parametrize("dk", [7, 32, 128])
def test_tokens_in_one_call_equal_single_steps(pool: str, dk: int) -> None:
    """Report 4. In an f32 pool bit for bit; an f16 pool rounds at each stored step, so only its first token agrees."""
    case = make_case(11, (8,), dk=dk, dv=dk, pool=pool, gk="scalar")
    out, state = case.run()
    stepped = case.state.copy()
    start = int(case.indices[0])
    rows = []
    for t in range(8):
        slot = int(case.indices[t])
        stepped[slot] = stepped[start]
        one = Case(
            query=case.query[t : t + 1],
            key=case.key[t : t + 1],
            value=case.value[t : t + 1],
            beta=case.beta[t : t + 1],
            state=stepped,
            lengths=np.array([1]),
            indices=np.array([slot]),
            g=case.g[t : t + 1],
            gk=case.gk[t : t + 1],
            scale=case.scale,
        )
        rows.append(one.run(state=stepped)[0][0])
        start = slot
    if pool == "f32":
        assert np.array_equal(out, np.stack(rows))
        assert state.tobytes() == stepped.tobytes()
    else:
        assert np.array_equal(out[0], rows[0])
        assert not np.array_equal(out[7], rows[7])
        np.testing.assert_allclose(out, np.stack(rows), atol=0.01)


@pytest.mark.parametrize("length", [1, 4, 8])
def test_writing_an_accepted_prefix_again_gives_the_same_bits(length: int) -> None:
    """With accepted = L the read slot is one of those written. Same start, same inputs: the same bits every time."""
    case = make_case(5, (length,), pool="f16", dtype="f16", accepted=(length,))
    first_out, first = case.run()
    check(case)
    for _ in range(3):
        again_out, again = case.run()
        assert again.tobytes() == first.tobytes()
        assert again_out.tobytes() == first_out.tobytes()
    # A shorter call over the same slots writes the same prefix: token t's state depends on tokens 0..t alone.
    kept = length // 2 + 1
    shorter = case.with_(
        query=case.query[:kept],
        key=case.key[:kept],
        value=case.value[:kept],
        beta=case.beta[:kept],
        g=case.g[:kept],
        lengths=np.array([kept]),
        indices=case.indices[None, :],
        accepted=np.array([length]),
    )
    prefix_out, prefix = shorter.run()
    slots = case.indices[:kept]
    assert prefix[slots].tobytes() == first[slots].tobytes()
    assert prefix_out.tobytes() == first_out[:kept].tobytes()


@pytest.mark.parametrize("depth", range(9))
def test_every_accepted_depth_starts_from_its_slot(depth: int) -> None:
    """Position-encoded pool: with beta = 0 and q = e0 the output is lane 0 of the slot that was read."""
    case = make_case(0, (3,), nk=1, group=1, dk=4, dv=4, rows=8, g=False, accepted=(depth,))
    case.state[:] = np.arange(len(case.state), dtype=np.float32)[:, None, None, None]
    query = np.zeros_like(case.query)
    query[..., 0] = 1
    case = case.with_(query=query, beta=np.zeros_like(case.beta), scale=1.0)
    out, _ = case.run()
    assert (out == case.indices[0, max(depth, 1) - 1]).all()


@needs_native
@pytest.mark.parametrize("pool", ["f32", "f16"])
def test_a_call_of_many_states_gives_the_bits_of_calls_of_one(pool: str) -> None:
    """16 or 8 MiB of states in one call: beyond 4 MiB the kernel asks for what it will read, and computes the same."""
    case = make_case(4, (1,) * 8, nk=16, group=2, dk=128, dv=128, pool=pool)
    out, state = case.run()
    alone = case.state.copy()
    for i in range(8):
        one = case.with_(
            query=case.query[i : i + 1],
            key=case.key[i : i + 1],
            value=case.value[i : i + 1],
            beta=case.beta[i : i + 1],
            g=case.g[i : i + 1],
            lengths=np.array([1]),
            indices=case.indices[i : i + 1],
        )
        assert out[i].tobytes() == one.run(state=alone)[0].tobytes()
    assert state.tobytes() == alone.tobytes()


@needs_native
def test_slots_past_two_to_the_31_elements() -> None:
    """4,100 slots of 32*128*128 elements: an offset in 32 bits would reach another slot."""
    shape = (4100, 32, 128, 128)
    # Address space without memory behind it: only the pages that are touched become real.
    memory = mmap.mmap(-1, int(np.prod(shape)) * 2, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0))
    pool = np.frombuffer(memory, np.float16).reshape(shape)
    small = make_case(1, (1, 1), nk=16, group=2, dk=128, dv=128, dtype="f16", pool="f16", spare=0)
    slots = np.array([4099, 2])
    pool[slots] = small.state[small.indices]
    out, _ = small.with_(indices=slots).run(state=pool)
    expected_out, expected = small.run()
    assert out.tobytes() == expected_out.tobytes()
    assert pool[slots].tobytes() == expected[small.indices].tobytes()
    for wrapped in (4099 - 4096, 0, 1, 4098):
        assert not pool[wrapped].any()


@pytest.mark.parametrize("lengths", [(1,), (5, 1), (31,), (32, 33), (0, 70), (100,)])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_chunk_of_any_length_equals_the_reference(lengths: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(sum(lengths))
    tokens, nk, nv, dk, dv = sum(lengths), 2, 4, 16, 12
    kind = np.float32 if dtype == "f32" else np.float16
    query, key = (unit(rng, (tokens, nk, dk)).astype(kind) for _ in range(2))
    value = rng.standard_normal((tokens, nv, dv)).astype(kind)
    beta = rng.random((tokens, nv)).astype(kind)
    g = -rng.exponential(0.2, (tokens, nv)).astype(np.float32)
    state = rng.standard_normal((len(lengths), nv, dv, dk)).astype(kind)
    before = state.copy()
    out, final = chunk_gated_delta_rule(query, key, value, beta, state, np.array(lengths), g, scale=0.3)
    assert np.array_equal(state, before)
    first = 0
    for i, n in enumerate(lengths):
        carried = state[i].astype(np.float64)
        for t in range(first, first + n):
            # An independent form of the same recurrence: S <- a S (I - b k k^T) + b v k^T.
            for h in range(nv):
                k, q = key[t, h // 2].astype(np.float64), query[t, h // 2].astype(np.float64)
                b, a = float(beta[t, h]), np.exp(float(g[t, h]))
                carried[h] = a * carried[h] @ (np.eye(dk) - b * np.outer(k, k)) + b * np.outer(value[t, h], k)
                assert_close(out[t, h], carried[h] @ q * 0.3, dk * n, f"out {t} {h}")
        assert_close(final[i], carried, dk * max(n, 1), f"state {i}")
        first += n


@needs_native
def test_threads_do_not_change_a_bit() -> None:
    case = make_case(9, (3, 1, 8), nk=4, dk=40, dv=40, pool="f16", accepted=(3, 1, 2))
    kernel = native()
    assert kernel is not None
    answers = set()
    for threads in (1, 2, 5):
        kernel.set_threads(threads)
        out, state = case.run()
        answers.add(out.tobytes() + state.tobytes())
    kernel.set_threads(0)
    assert len(answers) == 1


@needs_native
def test_calls_from_several_python_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    case = make_case(9, (3, 1, 8), nk=4, dk=64, dv=64)
    expected = case.run()[1].tobytes()
    with ThreadPoolExecutor(4) as workers:
        assert set(workers.map(lambda _: case.run()[1].tobytes(), range(200))) == {expected}


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_can_call_it() -> None:
    case = make_case(9, (3, 1, 8), nk=4, dk=64, dv=64)
    expected = case.run()[1].tobytes()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork in a process with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if case.run()[1].tobytes() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_strided_inputs_are_read_right() -> None:
    """Everything but the pool and out may be a view; those are used in place and must be contiguous."""
    case = make_case(2, (2, 3))
    expected = case.run()
    wide = np.zeros((*case.query.shape, 2), case.query.dtype)
    wide[..., 0] = case.query
    turned = np.asfortranarray(case.value)
    got = case.with_(query=wide[..., 0], value=turned).run()
    assert got[0].tobytes() == expected[0].tobytes()
    assert got[1].tobytes() == expected[1].tobytes()


def test_out_is_written_in_place_and_returned() -> None:
    case = make_case(2, (2, 3))
    out = np.full(case.value.shape, 7, case.value.dtype)
    got, _ = case.run(out=out)
    assert got is out
    assert np.array_equal(out, case.run()[0])


def test_no_tokens_at_all() -> None:
    case = make_case(2, (1,))
    empty = case.with_(
        query=case.query[:0], key=case.key[:0], value=case.value[:0], beta=case.beta[:0], g=case.g[:0],
        lengths=np.array([], np.int32), indices=np.array([], np.int32),
    )  # fmt: skip
    out, state = empty.run()
    assert out.shape == (0, 4, 24)
    assert state.tobytes() == case.state.tobytes()


def test_drift_of_an_f16_pool_over_500_tokens() -> None:
    """Report 19: a state rounded to f16 at every step drifts from one kept in f32; both stay near the exact one."""
    rng = np.random.default_rng(0)
    dk, nv = 32, 2
    exact = np.zeros((1, nv, dk, dk))
    pools = {name: np.zeros((1, nv, dk, dk), dtype) for name, dtype in (("f32", np.float32), ("f16", np.float16))}
    errors = dict.fromkeys(pools, 0.0)
    for seed in range(500):
        case = make_case(seed, (1,), nk=1, group=nv, dk=dk, dv=dk, spare=0)
        case = case.with_(g=-rng.uniform(0.001, 0.01, (1, nv)).astype(np.float32), indices=np.array([0]), state=exact)
        _, exact = case.exact()
        for pool in pools.values():
            case.run(state=pool)
        errors = {name: float(np.linalg.norm(pool - exact) / np.linalg.norm(exact)) for name, pool in pools.items()}
    assert errors["f32"] < 1e-5
    assert 1e-4 < errors["f16"] < 1e-2
