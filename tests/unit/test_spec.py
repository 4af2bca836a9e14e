from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_npu.errors import CheckpointError, UsageError
from qwen_npu.spec import ModelSpec, preset

CONFIG = {
    "model_type": "qwen3_5",
    "image_token_id": 5,
    "vision_start_token_id": 6,
    "vision_end_token_id": 7,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 3,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    },
}


def changed(path: str, value) -> dict:
    config = copy.deepcopy(CONFIG)
    *rooms, last = path.split(".")
    place = config
    for room in rooms:
        place = place[room]
    place[last] = value
    return config


def test_a_configuration_becomes_dimensions():
    spec = ModelSpec.from_config(CONFIG, end_tokens=(9, 3))
    assert (spec.nk, spec.nv, spec.dk, spec.dv) == (1, 4, 8, 12)
    assert spec.linear_layers == (0, 2)
    assert spec.full_layers == (1,)
    assert spec.conv_lanes == 2 * 8 + 4 * 12
    assert spec.rotary_lanes == 8
    assert spec.end_tokens == (3, 9)
    assert not spec.tied


def test_the_published_sizes_of_the_4b_model():
    """The figures of the deployed 4B model: conv 1.1 MiB, recurrent 48 MiB, KV 32 KiB a token and 64 MiB at 2048."""
    spec = preset("4b")
    assert spec.conv_shape() == (24, 1, 8192, 3)
    assert spec.recurrent_shape() == (24, 1, 32, 128, 128)
    assert spec.kv_shape(2048) == (16, 1, 4, 2048, 256)
    assert round(spec.conv_bytes() / 2**20, 1) == 1.1
    assert spec.recurrent_bytes() == 48 * 2**20
    assert spec.kv_bytes(1) == 32 * 2**10
    assert spec.kv_bytes(2048) == 64 * 2**20


@given(st.integers(0, 200), st.integers(0, 50))
def test_growing_copies_what_summing_each_step_gives(past, steps):
    spec = ModelSpec.from_config(CONFIG)
    summed = sum(spec.kv_bytes(past + step + 1) for step in range(steps))
    assert spec.growing_kv_copied_bytes(past, steps) == summed


def test_pool_bytes_are_those_of_its_arrays():
    spec = ModelSpec.from_config(CONFIG)
    assert spec.pool_bytes(5, 2) == 2 * math.prod((5, 4, 12, 8)) * 2
    assert spec.conv_pool_bytes(5) == 5 * spec.conv_bytes()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", "llama", "'llama'"),
        ("text_config.linear_num_key_heads", 3, "NV=4 value heads for NK=3"),
        ("text_config.layer_types", ["sliding"], "sliding"),
        ("text_config.layer_types", ["full_attention"], "one kind of layer"),
        ("text_config.num_key_value_heads", 3, "4 attention heads for 3"),
        ("text_config.rope_parameters.mrope_section", [1, 1, 1], r"\[1, 1, 1\]"),
        ("vision_config.num_position_embeddings", 15, "15"),
    ],
)
def test_a_configuration_that_the_graphs_do_not_cover_is_refused(path, value, words):
    with pytest.raises(CheckpointError, match=words):
        ModelSpec.from_config(changed(path, value))


def test_a_missing_key_is_named():
    config = copy.deepcopy(CONFIG)
    del config["text_config"]["head_dim"]
    with pytest.raises(CheckpointError, match="head_dim"):
        ModelSpec.from_config(config)


def test_a_checkpoint_without_a_readable_configuration(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelSpec.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelSpec.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}', encoding="utf-8")
    assert ModelSpec.from_checkpoint(tmp_path).end_tokens == (3, 4)


@pytest.mark.parametrize("grid", [(3, 4), (4, 5), (0, 2), (-2, 2)])
def test_an_odd_or_empty_grid_is_refused(grid):
    with pytest.raises(UsageError, match="grid"):
        ModelSpec.from_config(CONFIG).image_tokens(grid)


def test_an_unknown_preset_names_the_known():
    with pytest.raises(UsageError, match=r"tiny, 0\.8b, 4b"):
        preset("8b")
