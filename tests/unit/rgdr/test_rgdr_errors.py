"""Every bad input of the op has its own error, and leaves the pool byte for byte as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_npu.errors import OpError, OpTypeError, WorkbenchError
from qwen_npu.rgdr import chunk_gated_delta_rule, layout_of_update, recurrent_gated_delta_rule
from tests.unit.rgdr.rgdr_cases import Case, check, make_case


def changed(**changes: Any) -> Callable[[], Case]:
    return lambda: make_case(4, (2, 3), gk="vector", rows=4, accepted=(1, 2)).with_(**changes)


def flat(**changes: Any) -> Callable[[], Case]:
    return lambda: make_case(4, (2, 3), spare=2).with_(**changes)


BASE = make_case(4, (2, 3), gk="vector", rows=4, accepted=(1, 2))
ROW = BASE.indices

BAD_VALUES = {
    # the reports of the op's neighbours
    "sum of lengths": (flat(lengths=np.array([2, 2])), "add up to 4, but there are 5 tokens"),
    "prefix sums": (flat(lengths=np.array([0, 2, 5])), "sequence 0: actual_seq_lengths is 0"),
    "negative length": (flat(lengths=np.array([6, -1])), "sequence 1: actual_seq_lengths is -1"),
    "slot 10 of 7": (flat(indices=np.array([0, 1, 10, 3, 4])), "sequence 1: slot 10 at position 0"),
    "negative slot": (flat(indices=np.array([0, 1, 2, 3, -1])), "sequence 1: slot -1 at position 2"),
    "slot 2^32 + 1": (flat(indices=np.array([0, 1, 2, 3, 2**32 + 1])), "sequence 1: slot 4294967297"),
    "accepted beyond a flat sequence": (
        flat(accepted=np.array([3, 1])),
        r"sequence 0: num_accepted_tokens is 3.*0\.\.2",
    ),
    "accepted beyond the row": (changed(accepted=np.array([1, 5])), r"sequence 1: num_accepted_tokens is 5.*0\.\.4"),
    "negative accepted": (changed(accepted=np.array([-1, 1])), "sequence 0: num_accepted_tokens is -1"),
    "one slot, two writers": (flat(indices=np.array([0, 1, 1, 3, 4])), "slot 1 is written by sequences 0 and 1"),
    "read slot of another": (
        changed(indices=np.array([[0, 1, 2, 3], [4, 5, 6, 0]]), accepted=np.array([1, 4])),
        "sequence 1 starts from slot 0, which sequence 0 writes",
    ),
    "row too narrow": (changed(indices=ROW[:, :2], accepted=None), "sequence 1: 3 tokens, but its row has 2 slots"),
    # shapes
    "indices of another length": (flat(indices=np.arange(4)), r"ssm_state_indices has shape \(4,\)"),
    "rows of another batch": (changed(indices=np.arange(8).reshape(1, 8)), "ssm_state_indices has shape"),
    "rows without a slot": (changed(indices=np.zeros((2, 0), np.int32)), "ssm_state_indices has shape"),
    "accepted of another batch": (changed(accepted=np.array([1])), "num_accepted_tokens has shape"),
    "lengths of rank 2": (changed(lengths=np.array([[2, 3]])), "actual_seq_lengths has shape"),
    "key shape": (changed(key=BASE.key[..., :-1]), "key has shape"),
    "query rank": (changed(query=BASE.query[0]), "query has shape"),
    "no lanes": (changed(query=BASE.query[..., :0], key=BASE.key[..., :0]), "query has shape"),
    "value of fewer tokens": (changed(value=BASE.value[:-1]), "value has shape"),
    "NV not a multiple of NK": (
        changed(value=BASE.value[:, :3], beta=BASE.beta[:, :3]),
        "NV = 3 value heads for NK = 2",
    ),
    "NV < NK": (changed(value=BASE.value[:, :1], beta=BASE.beta[:, :1]), "NV = 1 value heads for NK = 2"),
    "beta shape": (changed(beta=BASE.beta[:, :2]), "beta has shape"),
    "g shape": (changed(g=np.zeros((5, 3), np.float32)), "g has shape"),
    "gk shape": (changed(gk=np.zeros((5, 4, 15), np.float32)), "gk has shape"),
    "pool of other heads": (changed(state=BASE.state[:, :2]), "state has shape"),
    "transposed pool": (
        changed(state=np.ascontiguousarray(BASE.state.transpose(0, 1, 3, 2))),
        r"K-major \(transposed\)",
    ),
    "pool of rank 3": (changed(state=BASE.state[0]), "state has shape"),
    # layout
    "pool view with gaps": (changed(state=np.zeros((18, 4, 24, 16), np.float32)[::2]), "not C-contiguous"),
    "read-only pool": (changed(state=np.broadcast_to(BASE.state[:1], (1, 4, 24, 16))), "read-only"),
    "scale": (changed(scale=float("nan")), "scale is nan"),
}

BAD_TYPES = {
    "f64 query": (changed(query=BASE.query.astype(np.float64)), "query has dtype float64"),
    "mixed activations": (changed(value=BASE.value.astype(np.float16)), "value float16"),
    "f64 pool": (changed(state=BASE.state.astype(np.float64)), "state has dtype float64"),
    "integer pool": (changed(state=BASE.state.astype(np.int16)), "state has dtype int16"),
    "big-endian pool": (changed(state=BASE.state.astype(">f4")), "state has dtype >f4"),
    "f16 g": (changed(g=BASE.g.astype(np.float16)), "g has dtype float16"),
    "f64 gk": (changed(gk=BASE.gk.astype(np.float64)), "gk has dtype float64"),
    "f32 lengths": (changed(lengths=np.array([2.0, 3.0], np.float32)), "actual_seq_lengths has dtype float32"),
    "i16 slots": (changed(indices=ROW.astype(np.int16)), "ssm_state_indices has dtype int16"),
    "bool accepted": (changed(accepted=np.array([True, True])), "num_accepted_tokens has dtype bool"),
    "list for query": (changed(query=[[1.0]]), "query is list"),
    "text for scale": (changed(scale="1"), "scale is str"),
    "pad slot": (changed(options={"pad_slot": 1.5}), "pad_slot is float"),
    "out of another dtype": (changed(options={"out": np.zeros((5, 4, 24), np.float16)}), "out is float16"),
}


@pytest.mark.parametrize("name", [*BAD_VALUES, *BAD_TYPES])
def test_bad_input_has_its_own_error_and_touches_nothing(name: str) -> None:
    make, message = BAD_VALUES.get(name) or BAD_TYPES[name]
    case = make()
    pool = case.state
    before = pool.tobytes()
    with pytest.raises(OpError if name in BAD_VALUES else OpTypeError) as caught:
        case.run(state=pool)
    text = str(caught.value)
    assert re.search(message, text), text
    assert isinstance(caught.value, WorkbenchError)
    assert isinstance(caught.value, ValueError if name in BAD_VALUES else TypeError)
    assert pool.tobytes() == before


def test_the_same_inputs_without_the_fault_are_right() -> None:
    check(BASE)
    check(flat()())


def test_more_than_eight_tokens() -> None:
    case = make_case(0, (8, 8))
    wrong = case.with_(lengths=np.array([10, 6]))
    with pytest.raises(OpError, match=r"sequence 0: actual_seq_lengths is 10.*1\.\.8"):
        wrong.run()


def test_transposed_view_is_named_as_such_when_dk_equals_dv() -> None:
    """Report 21: no shape shows it, the strides do."""
    case = make_case(0, (1,), dk=16, dv=16)
    with pytest.raises(OpError, match="a transposed view"):
        case.run(state=case.state.transpose(0, 1, 3, 2))


def test_a_transposed_copy_is_told_by_what_one_token_changes() -> None:
    """Report 21: where neither shape nor strides show it, one update does."""
    case = make_case(0, (1,), dk=16, dv=16, pool="f16", nk=1, group=1)
    slot = int(case.indices[0])
    _, after = case.run()
    decay = float(case.g[0, 0])
    key = case.key[0, 0]
    assert layout_of_update(case.state[slot, 0], after[slot, 0], key, decay) == "VK"
    assert layout_of_update(case.state[slot, 0].T, after[slot, 0].T, key, decay) == "KV"
    assert layout_of_update(case.state[slot, 0], case.state[slot, 0], key, 0.0) == "unknown"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("compat", "910b", 'compat=.*"310p"'), ("on_error", "ignore", 'on_error=.*"raise" or "skip"')],
)
def test_unknown_options(option: str, value: str, message: str) -> None:
    with pytest.raises(OpError, match=message):
        make_case().run(**{option: value})


@pytest.mark.parametrize("what", ["value", "state", "shape", "strides"])
def test_out_that_cannot_be_used(what: str) -> None:
    case = make_case(1, (2,), dk=24, dv=24)
    out = {
        "value": case.value,
        "state": case.state.reshape(-1)[: case.value.size].reshape(case.value.shape),
        "shape": np.zeros((1, 2, 3), np.float32),
        "strides": np.zeros((*case.value.shape, 2), np.float32)[..., 0],
    }[what]
    before = case.state.tobytes()
    with pytest.raises(OpError, match="out "):
        case.run(state=case.state, out=out)
    assert case.state.tobytes() == before


def test_lists_of_integers_are_taken() -> None:
    case = make_case(0, (2, 1))
    expected = case.run()
    pool = case.state.copy()
    out = recurrent_gated_delta_rule(
        case.query, case.key, case.value, case.beta, pool, [2, 1], case.indices.tolist(), g=case.g, scale=case.scale
    )
    assert np.array_equal(out, expected[0])
    assert np.array_equal(pool, expected[1])


@pytest.mark.parametrize("accepted", [(0, 0), (1, 1), (7, 7), (2, 6)])
def test_two_sequences_of_six_drafts(accepted: tuple[int, int]) -> None:
    """Report 2: low acceptance with two sequences; 0 reads like 1."""
    case = make_case(6, (7, 7), rows=7, accepted=accepted, pool="f16", dtype="f16")
    check(case)
    if accepted == (0, 0):
        assert case.run()[1].tobytes() == case.with_(accepted=np.array([1, 1])).run()[1].tobytes()


def test_a_short_last_draft_may_follow_many_accepted() -> None:
    """Report 10: accepted 4 with a length of 2 is right with rows, and refused with flat indices."""
    case = make_case(6, (2, 1), rows=4, accepted=(4, 3))
    check(case)
    with pytest.raises(OpError, match="sequence 0: num_accepted_tokens is 4"):
        make_case(6, (2, 1), accepted=(4, 3)).run()


# -- on_error="skip": what the device does


def test_skip_gives_nan_rows_to_the_wrong_sequence_and_goes_on_with_the_others() -> None:
    good = make_case(7, (2, 1, 3), rows=3, accepted=(1, 1, 3))
    bad = good.with_(accepted=np.array([1, 4, 3]))
    out, state = bad.run(on_error="skip")
    expected_out, expected = good.run()
    assert np.isnan(out[2]).all()
    assert np.array_equal(out[[0, 1, 3, 4, 5]], expected_out[[0, 1, 3, 4, 5]])
    left_alone = int(good.indices[1, 0])
    assert state[left_alone].tobytes() == good.state[left_alone].tobytes()
    rest = [slot for slot in range(len(state)) if slot != left_alone]
    assert state[rest].tobytes() == expected[rest].tobytes()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_skip_stops_both_sequences_of_a_clash(kind: str) -> None:
    case = make_case(7, (2, 2, 1), rows=2, accepted=(1, 1, 1))
    rows = np.array([[0, 1], [1, 2], [3, 4]]) if kind == "write" else np.array([[0, 1], [2, 3], [4, 0]])
    wrong = case.with_(indices=rows, accepted=np.array([1, 1, 1 if kind == "write" else 2]))
    out, state = wrong.run(on_error="skip")
    hit = [0, 1, 2, 3] if kind == "write" else [0, 1, 4]
    assert np.isnan(out[hit]).all()
    assert not np.isnan(np.delete(out, hit, axis=0)).any()
    untouched = [0, 1, 2] if kind == "write" else [0, 1, 4]
    assert state[untouched].tobytes() == case.state[untouched].tobytes()


def test_skip_with_lengths_that_do_not_add_up() -> None:
    case = make_case(7, (2, 3), spare=3)
    out, state = case.with_(lengths=np.array([2, 1])).run(on_error="skip")
    assert not np.isnan(out[:3]).any()
    assert np.isnan(out[3:]).all()
    out, state = case.with_(lengths=np.array([2, 4])).run(on_error="skip")
    assert not np.isnan(out[:2]).any()
    assert np.isnan(out[2:]).all()
    assert state[case.indices[2:]].tobytes() == case.state[case.indices[2:]].tobytes()
    out, state = case.with_(lengths=np.array([-1, 5])).run(on_error="skip")
    assert not np.isnan(out).any()


def test_skip_and_raise_agree_on_what_is_right() -> None:
    @settings(max_examples=300, deadline=None)
    @given(
        lengths=st.lists(st.integers(-1, 9), min_size=1, max_size=3),
        slots=st.lists(st.integers(-1, 6), min_size=12, max_size=12),
        accepted=st.lists(st.integers(-1, 5), min_size=3, max_size=3),
        rows=st.booleans(),
        tokens=st.integers(1, 6),
    )
    def agree(lengths: list[int], slots: list[int], accepted: list[int], rows: bool, tokens: int) -> None:
        base = make_case(1, (tokens,), nk=1, group=1, dk=2, dv=2, spare=6 - tokens)
        b = len(lengths)
        case = base.with_(
            lengths=np.array(lengths),
            indices=np.array(slots).reshape(3, 4)[:b] if rows else np.array(slots[:tokens]),
            accepted=np.array(accepted[:b]),
        )
        before = case.state.tobytes()
        skipped_out, skipped = case.run(on_error="skip")
        pool = case.state.copy()
        try:
            out, _ = case.run(state=pool)
        except OpError:
            assert pool.tobytes() == before
            # Where no row is NaN the wrong sequences have no row: empty, or behind the last token.
            rowless = any(n < 1 for n in lengths) or sum(lengths) > tokens
            assert np.isnan(skipped_out).all(axis=(1, 2)).any() or rowless
            return
        assert not np.isnan(out).any()
        assert out.tobytes() == skipped_out.tobytes()
        assert pool.tobytes() == skipped.tobytes()

    agree()


# -- pad_slot


@pytest.mark.parametrize("pad", [-1, 999])
def test_padded_sequences_are_left_out(pad: int) -> None:
    case = make_case(8, (2, 1, 2), rows=2, spare=0)
    rows = case.indices.astype(np.int64)
    rows[1] = pad
    out, state = case.with_(indices=rows).run(pad_slot=pad)
    expected_out, expected = case.run()
    assert not out[2].any()
    assert np.array_equal(out[[0, 1, 3, 4]], expected_out[[0, 1, 3, 4]])
    left_alone = case.indices[1]
    assert state[left_alone].tobytes() == case.state[left_alone].tobytes()
    rest = [slot for slot in range(len(state)) if slot not in left_alone]
    assert state[rest].tobytes() == expected[rest].tobytes()


def test_flat_padding_and_accepted_that_means_nothing() -> None:
    case = make_case(8, (2, 1), accepted=(1, 99))
    slots = case.indices.astype(np.int64)
    slots[2] = -1
    out, _ = case.with_(indices=slots).run(pad_slot=-1)
    assert not out[2].any()
    assert out[:2].any()


def test_a_pad_slot_among_others_is_an_error() -> None:
    case = make_case(8, (2, 1), rows=2, spare=1)
    slots = np.array([[0, 1], [2, 3]])
    with pytest.raises(OpError, match="sequence 0: the pad slot 1 at position 1"):
        case.with_(indices=slots).run(pad_slot=1)
    check(case.with_(indices=slots))  # an unused column may be anything
    case.with_(indices=slots).run(pad_slot=3)


# -- chunk


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, 2], "add up to 4, but there are 5"),
        ([6, -1], "sequence 1: actual_seq_lengths is -1"),
        ([5], "1 lengths for 2"),
    ],
)
def test_chunk_refuses_wrong_lengths(lengths: list[int], message: str) -> None:
    case = make_case(4, (2, 3))
    with pytest.raises(OpError, match=message):
        chunk_gated_delta_rule(case.query, case.key, case.value, case.beta, case.state[:2], lengths, case.g)


def test_chunk_reads_a_read_only_state() -> None:
    case = make_case(4, (2, 3))
    state = case.state[:2]
    state.flags.writeable = False
    _, final = chunk_gated_delta_rule(case.query, case.key, case.value, case.beta, state, [2, 3], case.g)
    assert final.flags.writeable
    assert not np.array_equal(final, state)
