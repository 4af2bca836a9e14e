"""Small untrained checkpoints with dimensions of one's choice, as a Hugging Face directory, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

AWKWARD: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 120,
}
"""DK != DV, NV = 4*NK, an odd pattern of layers, 3 heads per KV head."""

IMAGE_TOKEN, VISION_START, VISION_END = 110, 111, 112


def config(*, tied: bool = False, mrope_section: tuple[int, int, int] = (4, 2, 2), **changes: Any) -> dict[str, Any]:
    text = {**AWKWARD, **changes}
    text |= {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": len(text["layer_types"]),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 119,
        "pad_token_id": 118,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": list(mrope_section),
            "partial_rotary_factor": 2 * sum(mrope_section) / text["head_dim"],
        },
    }
    vision = {
        "model_type": "qwen3_5_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "num_position_embeddings": 25,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": text["hidden_size"],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 113,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": vision,
    }


def tensors(settings: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Every weight random, norms and biases too, so that a missing one shows."""
    rng = np.random.default_rng(seed)
    text, vision = settings["text_config"], settings["vision_config"]
    hidden, inner, dim = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    nk, nv = text["linear_num_key_heads"], text["linear_num_value_heads"]
    keys, values = nk * text["linear_key_head_dim"], nv * text["linear_value_head_dim"]
    found: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}

    def put(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        spread = scale if scale is not None else shape[-1] ** -0.5
        found[name] = (mean + spread * rng.standard_normal(shape)).astype(np.float32)

    put("model.language_model.embed_tokens.weight", text["vocab_size"], hidden, scale=1.0)
    if not settings["tie_word_embeddings"]:
        put("lm_head.weight", text["vocab_size"], hidden)
    put("model.language_model.norm.weight", hidden, scale=0.2)
    for layer, kind in enumerate(text["layer_types"]):
        at = f"model.language_model.layers.{layer}."
        put(at + "input_layernorm.weight", hidden, scale=0.2)
        put(at + "post_attention_layernorm.weight", hidden, scale=0.2)
        put(at + "mlp.gate_proj.weight", inner, hidden)
        put(at + "mlp.up_proj.weight", inner, hidden)
        put(at + "mlp.down_proj.weight", hidden, inner)
        if kind == "linear_attention":
            at += "linear_attn."
            put(at + "in_proj_qkv.weight", 2 * keys + values, hidden)
            put(at + "in_proj_z.weight", values, hidden)
            put(at + "in_proj_b.weight", nv, hidden)
            put(at + "in_proj_a.weight", nv, hidden)
            put(at + "conv1d.weight", 2 * keys + values, 1, text["linear_conv_kernel_dim"], scale=0.5)
            put(at + "dt_bias", nv, scale=1.0, mean=-3.0)
            put(at + "A_log", nv, scale=0.5)
            put(at + "norm.weight", text["linear_value_head_dim"], scale=0.2, mean=1.0)
            put(at + "out_proj.weight", hidden, values)
        else:
            at += "self_attn."
            put(at + "q_proj.weight", 2 * text["num_attention_heads"] * dim, hidden)
            put(at + "k_proj.weight", text["num_key_value_heads"] * dim, hidden)
            put(at + "v_proj.weight", text["num_key_value_heads"] * dim, hidden)
            put(at + "q_norm.weight", dim, scale=0.2)
            put(at + "k_norm.weight", dim, scale=0.2)
            put(at + "o_proj.weight", hidden, text["num_attention_heads"] * dim)

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"model.visual.{name}.weight", rows, columns)
        put(f"model.visual.{name}.bias", rows, scale=0.1)

    def norm(name: str, width: int) -> None:
        put(f"model.visual.{name}.weight", width, scale=0.2, mean=1.0)
        put(f"model.visual.{name}.bias", width, scale=0.1)

    width, side = vision["hidden_size"], vision["patch_size"]
    patch = (vision["in_channels"], vision["temporal_patch_size"], side, side)
    put("model.visual.patch_embed.proj.weight", width, *patch, scale=float(np.prod(patch)) ** -0.5)
    put("model.visual.patch_embed.proj.bias", width, scale=0.1)
    put("model.visual.pos_embed.weight", vision["num_position_embeddings"], width, scale=0.5)
    for block in range(vision["depth"]):
        norm(f"blocks.{block}.norm1", width)
        linear(f"blocks.{block}.attn.qkv", 3 * width, width)
        linear(f"blocks.{block}.attn.proj", width, width)
        norm(f"blocks.{block}.norm2", width)
        linear(f"blocks.{block}.mlp.linear_fc1", vision["intermediate_size"], width)
        linear(f"blocks.{block}.mlp.linear_fc2", width, vision["intermediate_size"])
    merged = width * vision["spatial_merge_size"] ** 2
    norm("merger.norm", width)
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", vision["out_hidden_size"], merged)
    return found


def random_checkpoint(
    directory: Path, *, dtype: str = "float32", shards: int = 1, seed: int = 0, extra: bool = False, **changes: Any
) -> Path:
    """Writes config.json and safetensors. dtype float32, float16 or bfloat16; `extra` adds an mtp tensor."""
    from safetensors.numpy import save_file

    if dtype == "bfloat16":
        import ml_dtypes

        stored = np.dtype(ml_dtypes.bfloat16)
    else:
        stored = np.dtype(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    settings = config(**changes)
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = {name: array.astype(stored) for name, array in tensors(settings, seed).items()}
    if extra:
        found["mtp.norm.weight"] = np.ones(4, stored)
    if shards == 1:
        save_file(found, directory / "model.safetensors")
        return directory
    where = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(found))}
    for file in set(where.values()):
        save_file({name: found[name] for name in where if where[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory
