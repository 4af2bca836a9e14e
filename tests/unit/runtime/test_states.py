"""State buffers with position-encoded values, so that every assertion is exact."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_npu import contract
from qwen_npu.driver.protocol import TensorInfo
from qwen_npu.errors import CapacityError, StateError
from qwen_npu.runtime.stages import DecodeStage, StageModel
from qwen_npu.runtime.states import DecodeInfos, StateArrays, check_fits, check_fixed, fixed_capacity, hand_over
from tests.unit.runtime.mocks import SPEC, MockModel, recording

CAPACITY = 6


def states(tokens: int) -> StateArrays:
    """conv 100s, recurrent 500s, kv = 1000 * row + position: every value names its place."""
    kv = np.zeros(SPEC.kv_shape(tokens), np.float32)
    kv[...] = 1000 * np.arange(kv.shape[0]).reshape(-1, 1, 1, 1, 1) + np.arange(tokens).reshape(1, 1, 1, -1, 1)
    return StateArrays(
        np.full(SPEC.conv_shape(), 100, np.float32), np.full(SPEC.recurrent_shape(), 500, np.float32), kv
    )


def stage(capacity: int | None, prompt_tokens: int, *, resident: bool = True, device: str = "ascend:0"):
    model = MockModel(capacity)
    driver = recording(model, device)
    bound = StageModel(driver.load("", "decode"), contract.decode(SPEC, "f32", capacity), 0.0)
    handed = hand_over(states(prompt_tokens), 0, prompt_tokens, capacity)
    return DecodeStage(driver, bound, handed, prompt_tokens, 0, resident=resident), driver, model


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("capacity", [CAPACITY, None])
def test_states_after_three_steps_hold_every_position(capacity, resident):
    decode, _, model = stage(capacity, 2, resident=resident)
    for token in range(3):
        logits, _ = decode.step(token)
        assert logits.argmax() == token + 1
    read = decode.states.read()
    assert (read.conv == 103).all()
    assert (read.recurrent == 503).all()
    assert np.array_equal(read.kv[..., :5, :], states(5).kv)
    assert read.kv.shape[-2] == (capacity or 5)
    assert model.seen_shared == [], "an output shared memory with an input"


def test_fixed_allocates_nothing_after_the_upload():
    decode, driver, _ = stage(CAPACITY, 2)
    before = driver.allocated_bytes
    for token in range(3):
        decode.step(token)
    assert driver.allocated_bytes == before


def test_growing_allocates_one_cache_of_the_predicted_size_each_step():
    decode, driver, _ = stage(None, 2)
    for step in range(3):
        before, alive = driver.allocated_bytes, driver.live_bytes
        decode.step(step)
        assert driver.allocated_bytes - before == SPEC.kv_bytes(2 + step + 1, numerics="f32")
        assert driver.live_bytes - alive == SPEC.kv_bytes(1, numerics="f32")


@pytest.mark.parametrize("capacity", [CAPACITY, None])
def test_resident_moves_only_small_inputs_up_and_logits_down(capacity):
    decode, driver, _ = stage(capacity, 2)
    up, down = driver.host_to_device_bytes, driver.device_to_host_bytes
    decode.step(0)
    mask_tokens = capacity or 3
    assert driver.host_to_device_bytes - up == 8 * (1 + 4 + mask_tokens)
    assert driver.device_to_host_bytes - down == SPEC.logits_bytes(numerics="f32")


def test_round_trip_moves_every_state_both_ways():
    decode, driver, _ = stage(CAPACITY, 2, resident=False)
    up, down = driver.host_to_device_bytes, driver.device_to_host_bytes
    decode.step(0)
    all_states = SPEC.conv_bytes(numerics="f32") + SPEC.recurrent_bytes() + SPEC.kv_bytes(CAPACITY, numerics="f32")
    assert driver.host_to_device_bytes - up == all_states + 8 * (1 + 4 + CAPACITY)
    assert driver.device_to_host_bytes - down == all_states + SPEC.logits_bytes(numerics="f32")


def test_a_full_cache_refuses_the_step_and_writes_nothing():
    decode, _, _ = stage(CAPACITY, 5)
    decode.step(0)
    assert decode.full
    before = decode.states.read()
    with pytest.raises(CapacityError, match="6 of 6"):
        decode.step(1)
    after = decode.states.read()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert decode.tokens == 6


def test_free_gives_all_memory_back():
    decode, driver, _ = stage(None, 2)
    decode.step(0)
    decode.free()
    assert driver.live_bytes == 0


def test_on_a_cpu_target_a_growing_graph_is_resized_before_each_step():
    decode, _, model = stage(None, 2, resident=False, device="cpu")
    decode.step(0)
    decode.step(1)
    assert [shapes[1] for shapes in model.resized] == [(1, 3), (1, 4)]
    assert [shapes[5][-2] for shapes in model.resized] == [2, 3]


# which policy a graph has


@pytest.mark.parametrize(
    ("mask", "past", "present", "capacity"),
    [(8, 8, 8, 8), (-1, -1, -1, None), (8, 8, 9, None), (9, 8, 9, None), (0, 0, 0, None), (8, -1, 8, None)],
)
def test_fixed_is_recognised_by_three_equal_sizes(mask, past, present, capacity):
    f32 = np.dtype(np.float32)
    inputs = [
        TensorInfo(name, f32, (1, mask) if name == "attention_mask" else (1, 1))
        for name in ("ids", "attention_mask", "pos", "c", "r")
    ]
    infos = DecodeInfos(
        (*inputs, TensorInfo("kv", f32, (2, 1, 1, past, 4))),
        (*inputs[:3], TensorInfo("kv", f32, (2, 1, 1, present, 4))),
    )
    assert fixed_capacity(infos) == capacity


# handing over from prefill


def test_the_pads_kv_is_dropped_and_the_cache_padded_to_capacity():
    handed = hand_over(states(5), pads=2, prefill_tokens=5, capacity=CAPACITY)
    assert handed.kv.shape[-2] == CAPACITY
    assert handed.kv[0, 0, 0, :, 0].tolist() == [2, 3, 4, 0, 0, 0]
    assert handed.kv[1, 0, 0, :, 0].tolist() == [1002, 1003, 1004, 0, 0, 0]


def test_a_growing_cache_has_exactly_the_prompt():
    assert hand_over(states(5), pads=2, prefill_tokens=5, capacity=None).kv.shape[-2] == 3


def test_a_prompt_longer_than_capacity_is_refused_never_cut():
    with pytest.raises(CapacityError, match="7 tokens"):
        hand_over(states(7), 0, 7, CAPACITY)


def test_a_foreign_prefill_may_pad_to_our_capacity_only():
    assert hand_over(states(CAPACITY), 0, 4, CAPACITY).kv.shape[-2] == CAPACITY
    with pytest.raises(CapacityError, match="cache of 8 tokens"):
        hand_over(states(8), 0, 4, CAPACITY)
    with pytest.raises(CapacityError):
        hand_over(states(CAPACITY), 1, 4, CAPACITY)


# the five checks


def mask(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


GOOD = mask(1, 1, 0, 0, 0, 0)


def test_the_five_checks_pass_what_is_right():
    check_fixed(GOOD, states(CAPACITY), CAPACITY)


@pytest.mark.parametrize(
    ("bad_mask", "kv_tokens", "batch", "kind", "words"),
    [
        (GOOD, CAPACITY, 2, StateError, "batch of 2"),
        (mask(1, 1, 1, 1, 1, 1, 1), CAPACITY, 1, CapacityError, "covers 7 tokens"),
        (GOOD, 5, 1, CapacityError, "cache of 5 tokens"),
        (mask(1, 2, 0, 0, 0, 0), CAPACITY, 1, StateError, r"holds \[2\]"),
        (mask(0, 1, 1, 0, 0, 0), CAPACITY, 1, StateError, "position 0 is 0 before a 1"),
        (mask(1, 0, 1, 0, 0, 0), CAPACITY, 1, StateError, "position 1 is 0 before a 1"),
    ],
)
def test_each_of_the_five_checks_refuses(bad_mask, kv_tokens, batch, kind, words):
    given = states(kv_tokens)
    if batch > 1:
        given = given._replace(kv=np.repeat(given.kv, batch, axis=1))
    with pytest.raises(kind, match=words):
        check_fixed(bad_mask, given, CAPACITY)


def test_a_state_of_another_dtype_or_shape_is_refused_with_both():
    info = TensorInfo("past_recurrent_states", np.dtype(np.float32), (1, 1, 2, 2, 3))
    with pytest.raises(StateError, match="float16"):
        check_fits(np.zeros((1, 1, 2, 2, 3), np.float16), info)
    with pytest.raises(StateError, match=r"\[1, 1, 2, 3, 2\]"):
        check_fits(np.zeros((1, 1, 2, 3, 2), np.float32), info)
