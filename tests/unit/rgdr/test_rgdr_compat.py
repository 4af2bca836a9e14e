"""The silent behaviours of the deployed kernel, computed beside the strict op."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_npu.errors import OpError
from qwen_npu.rgdr.compat import read_slot_310p
from tests.unit.rgdr.rgdr_cases import Case, make_case


@pytest.mark.parametrize(("accepted", "position"), [(None, 0), (0, 0), (1, 0), (2, 1), (4, 3), (5, 0), (-1, 0)])
def test_read_slot_with_four_tokens(accepted: int | None, position: int) -> None:
    slots = [9, 10, 11, 12, 13, 14, 15, 16]
    assert read_slot_310p(slots, 4, 4, accepted) == slots[4 + position]


def lane_reader(lengths: tuple[int, ...], **kind: object) -> Case:
    """A call whose output is the number of the slot it started from: pool = slot, beta = 0, q = e0."""
    case = make_case(0, lengths, nk=1, group=1, dk=4, dv=4, g=False, **kind)  # type: ignore[arg-type]
    case.state[:] = np.arange(len(case.state), dtype=np.float32)[:, None, None, None].astype(case.state.dtype)
    query = np.zeros_like(case.query)
    query[..., 0] = 1
    return case.with_(query=query, beta=np.zeros_like(case.beta), scale=1.0)


def test_accepted_beyond_the_length_starts_from_the_first_slot() -> None:
    case = lane_reader((4,), accepted=(5,))
    out, _ = case.run(compat="310p")
    assert (out == case.indices[0]).all()
    with pytest.raises(OpError):
        case.run()


def test_right_calls_are_the_same() -> None:
    case = make_case(3, (2, 4), dtype="f16", pool="f16", accepted=(2, 1))
    out, state = case.run(compat="310p")
    strict_out, strict = case.run()
    np.testing.assert_allclose(out.astype(float), strict_out.astype(float), atol=2e-3)
    np.testing.assert_allclose(state.astype(float), strict.astype(float), atol=2e-3)


def test_more_than_eight_tokens_leave_out_this_sequence_and_all_later_ones() -> None:
    case = make_case(3, (2, 8, 3)).with_(lengths=np.array([2, 9, 2]))
    out = np.full(case.value.shape, 7, np.float32)
    _, state = case.run(compat="310p", out=out)
    assert (out[2:] == 7).all()
    assert not (out[:2] == 7).any()
    later = case.indices[2:]
    assert state[later].tobytes() == case.state[later].tobytes()


def test_slots_are_cut_to_32_bits() -> None:
    case = lane_reader((1,), spare=3, integers=np.int64)
    out, _ = case.with_(indices=np.array([2**32 + 1])).run(compat="310p")
    assert (out == 1).all()
    with pytest.raises(OpError, match="slot 4294967297"):
        case.with_(indices=np.array([2**32 + 1])).run()


def test_rows_are_read_flat_so_short_sequences_write_into_their_neighbour() -> None:
    """Two sequences of two tokens with rows of four: sequence 1 starts from and writes sequence 0's slots 2 and 3."""
    case = lane_reader((2, 2), rows=4, spare=0, accepted=(1, 1))
    rows = np.arange(8).reshape(2, 4)
    out, _ = case.with_(indices=rows).run(compat="310p")
    assert out[:, 0, 0].tolist() == [0, 0, 2, 2]
    strict, _ = case.with_(indices=rows).run()
    assert strict[:, 0, 0].tolist() == [0, 0, 4, 4]


def test_a_scalar_gk_is_dropped_when_g_is_given() -> None:
    case = make_case(3, (2,), gk="scalar", dtype="f16", pool="f16")
    dropped = case.run(compat="310p")
    assert dropped[1].tobytes() == case.with_(gk=None).run(compat="310p")[1].tobytes()
    assert not np.allclose(dropped[1].astype(float), case.run()[1].astype(float), atol=1e-2)
    alone = case.with_(g=None)
    np.testing.assert_allclose(alone.run(compat="310p")[1].astype(float), alone.run()[1].astype(float), atol=2e-3)


def test_an_f32_pool_is_read_as_two_byte_elements() -> None:
    """Plausible numbers without an error: half of the pool is never touched, and nothing is what it was."""
    case = make_case(3, (1,), dtype="f16", pool="f32", spare=3)
    out, state = case.run(compat="310p")
    assert np.isfinite(out.astype(float)).mean() > 0.5
    half = case.state.size // 2
    assert state.reshape(-1)[half:].tobytes() == case.state.reshape(-1)[half:].tobytes()
    assert state.tobytes() != case.state.tobytes()
    strict, _ = case.run()
    assert not np.allclose(out.astype(float), strict.astype(float), atol=1e-2)


def test_lengths_that_do_not_add_up_pass_silently() -> None:
    case = lane_reader((2, 3))
    out = np.full(case.value.shape, -1, np.float32)
    case.with_(lengths=np.array([2, 2])).run(compat="310p", out=out)
    assert (out[4] == -1).all()
    case.with_(lengths=np.array([2, 5])).run(compat="310p", out=out)
    assert (out[2:] == case.indices[2]).all()
    case.with_(lengths=np.array([4, -1, 2])).run(compat="310p", out=out)
    assert (out[3:] == case.indices[0]).all()  # slot 3 holds what sequence 0 carried there from its first slot


def test_slots_outside_of_the_pool_read_nan_and_write_nothing() -> None:
    case = lane_reader((1, 1))
    out, state = case.with_(indices=np.array([50, int(case.indices[1])])).run(compat="310p")
    assert np.isnan(out[0]).all()
    assert (out[1] == case.indices[1]).all()
    assert state[int(case.indices[0])].tobytes() == case.state[int(case.indices[0])].tobytes()
