from __future__ import annotations

import pytest

from qwen_npu import contract
from qwen_npu.errors import ContractError
from tests.unit.runtime.mocks import SPEC

DECODE = contract.decode(SPEC, "device", 16)


def test_the_order_of_the_three_stages():
    assert contract.prefill(SPEC, "device").input_names == (
        "input_ids",
        "attention_mask",
        "position_ids",
        "image_embeds",
    )
    assert DECODE.input_names[3:] == ("past_conv_states", "past_recurrent_states", "past_kv_cache")
    assert DECODE.output_names == ("logits", "present_conv_states", "present_recurrent_states", "present_kv_cache")


def test_device_numerics_keeps_the_recurrent_state_in_f32():
    assert [tensor.dtype for tensor in DECODE.outputs] == ["float16", "float16", "float32", "float16"]
    assert {tensor.dtype for tensor in contract.decode(SPEC, "f32", 16).outputs} == {"float32"}


def test_names_bind_in_any_order():
    names = list(reversed(DECODE.input_names))
    assert [names[i] for i in DECODE.bind(names)] == list(DECODE.input_names)


def test_a_model_without_our_names_binds_by_position():
    assert DECODE.bind([f"x{i}" for i in range(6)]) == (0, 1, 2, 3, 4, 5)


def test_a_fifth_output_or_a_half_known_set_of_names_is_refused():
    with pytest.raises(ContractError, match="5 outputs"):
        DECODE.bind([*DECODE.output_names, "extra"], "outputs")
    with pytest.raises(ContractError, match="past_kv_cache"):
        DECODE.bind([*DECODE.input_names[:5], "kv"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("past_conv_states", "conv"),
        ("present_recurrent_states", "recurrent"),
        ("past_kv_cache", "kv"),
        ("logits", "logits"),
        ("present_state_pool_3", "pool"),
        ("conv_pool_0", "pool"),
        ("input_ids", "input"),
    ],
)
def test_the_kind_of_buffer_follows_from_the_name(name, kind):
    assert contract.buffer_kind(name) == kind


def test_pools_are_in_place_and_the_kv_is_a_pair():
    graph = contract.verify(SPEC, "device", tokens=4, width=4, sequences=2, slots=8, capacity=16)
    assert graph.in_place == {"present_conv_pool_0": "conv_pool_0", "present_state_pool_0": "state_pool_0"}
    assert "present_kv_cache" in graph.output_names
