"""Dimensions of a Qwen3.5 model, the shapes of its states and what they cost in bytes.

The one place for dimensions: read from a Hugging Face `config.json` or from a preset.
Knows nothing of graphs, files of weights or devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from qwen_npu.errors import CheckpointError, UsageError

LayerType = Literal["linear_attention", "full_attention"]
Numerics = Literal["device", "f32"]

NUMERICS: tuple[Numerics, ...] = ("device", "f32")
MOST_PATCHES = 65_536
"""Of one picture: 16,777,216 pixels, the most that the published models' processor takes, in patches of 16 x 16."""


@dataclass(frozen=True)
class VisionSpec:
    """The vision tower. `positions` is the size of the learned position table (a square grid)."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    positions: int
    patch: int
    merge: int
    temporal_patch: int
    channels: int
    rope_theta: float

    @property
    def patch_lanes(self) -> int:
        """Width of one row of `pixel_values`: channels * temporal patch * patch * patch."""
        return self.channels * self.temporal_patch * self.patch * self.patch


@dataclass(frozen=True)
class ModelSpec:
    """A Qwen3.5 model. Names as users know them: NK, NV heads and DK, DV lanes of the linear layers.

    Shapes are in elements, sizes in bytes. `numerics` "device" gives the dtypes of the deployed graphs (conv, KV f16;
    recurrent f32), "f32" makes every state f32.
    """

    hidden: int
    intermediate: int
    layer_types: tuple[LayerType, ...]
    heads: int
    kv_heads: int
    head_dim: int
    nk: int
    nv: int
    dk: int
    dv: int
    conv_kernel: int
    vocab: int
    tied: bool
    rms_eps: float
    rope_theta: float
    rotary_lanes: int
    mrope_section: tuple[int, int, int]
    image_token: int
    vision_start: int
    vision_end: int
    end_tokens: tuple[int, ...]
    pad_token: int
    vision: VisionSpec

    # layers

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the linear layers; row i of the conv and recurrent stacks is layer `linear_layers[i]`."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full layers; rows 2i and 2i+1 of the KV stack are k and v of layer `full_layers[i]`."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def conv_lanes(self) -> int:
        """Channels of the depthwise convolution: q, k and v side by side."""
        return 2 * self.nk * self.dk + self.nv * self.dv

    # state shapes

    def conv_shape(self, batch: int = 1) -> tuple[int, ...]:
        """[linear layers, batch, conv lanes, kernel - 1]: the last inputs of the convolution, oldest first."""
        return (len(self.linear_layers), batch, self.conv_lanes, self.conv_kernel - 1)

    def recurrent_shape(self, batch: int = 1) -> tuple[int, ...]:
        """[linear layers, batch, NV, DK, DV]; the op's own layout is [slot, NV, DV, DK]."""
        return (len(self.linear_layers), batch, self.nv, self.dk, self.dv)

    def kv_shape(self, tokens: int, batch: int = 1) -> tuple[int, ...]:
        """[2 * full layers, batch, KV heads, tokens, head dim], ordered k0, v0, k1, v1, ..."""
        return (2 * len(self.full_layers), batch, self.kv_heads, tokens, self.head_dim)

    # bytes

    def conv_bytes(self, batch: int = 1, numerics: Numerics = "device") -> int:
        return math.prod(self.conv_shape(batch)) * _half_bytes(numerics)

    def recurrent_bytes(self, batch: int = 1) -> int:
        """f32 in both numerics: the model-facing tensor is never f16."""
        return math.prod(self.recurrent_shape(batch)) * 4

    def kv_bytes(self, tokens: int, batch: int = 1, numerics: Numerics = "device") -> int:
        return math.prod(self.kv_shape(tokens, batch)) * _half_bytes(numerics)

    def logits_bytes(self, batch: int = 1, numerics: Numerics = "device") -> int:
        return batch * self.vocab * _half_bytes(numerics)

    def step_input_bytes(self, mask_tokens: int, index_bytes: int = 4) -> int:
        """What a resident decode step sends to the device: one id, four positions, the mask; as deployed in int32."""
        return (1 + 4 + mask_tokens) * index_bytes

    def state_bytes(self, kv_tokens: int, numerics: Numerics = "device") -> int:
        """Conv, recurrent and KV of one sequence together."""
        kv = self.kv_bytes(kv_tokens, numerics=numerics)
        return self.conv_bytes(numerics=numerics) + self.recurrent_bytes() + kv

    def growing_kv_copied_bytes(self, past_tokens: int, steps: int, numerics: Numerics = "device") -> int:
        """Bytes of KV that `steps` growing steps write from `past_tokens` on: step i writes past + i + 1 positions."""
        positions = steps * past_tokens + steps * (steps + 1) // 2
        return positions * self.kv_bytes(1, numerics=numerics)

    def pool_bytes(self, slots: int, state_bytes: int = 4) -> int:
        """All recurrent pools ([slots, NV, DV, DK] a linear layer); `state_bytes` is the size of one element."""
        return len(self.linear_layers) * slots * self.nv * self.dv * self.dk * state_bytes

    def conv_pool_bytes(self, slots: int, numerics: Numerics = "device") -> int:
        return math.prod(self.conv_shape(slots)) * _half_bytes(numerics)

    # vision

    def image_tokens(self, grid: tuple[int, int]) -> int:
        """Rows of `image_embeds` for a grid of (rows, columns) of patches; both must be even."""
        rows, columns = grid
        merge = self.vision.merge
        if rows <= 0 or columns <= 0 or rows % merge or columns % merge or rows * columns > MOST_PATCHES:
            raise UsageError(
                f"a vision grid of {rows}x{columns} patches cannot be merged {merge}x{merge}",
                expected=f"both sides positive multiples of {merge}, at most {MOST_PATCHES:,} patches",
            )
        return rows * columns // merge**2

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> ModelSpec:
        """Reads `config.json` of a Hugging Face Qwen3.5 checkpoint directory.

        Raises:
            CheckpointError: the file is missing, not JSON, or not a Qwen3.5 configuration that the graphs cover.
        """
        path = Path(directory) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist",
                expected="a Hugging Face checkpoint directory with config.json and safetensors",
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", expected="a JSON file") from None
        return cls.from_config(config, end_tokens=_generation_end_tokens(Path(directory)))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], end_tokens: tuple[int, ...] = ()) -> ModelSpec:
        """Builds the spec from a parsed `config.json`; `end_tokens` are added to its own."""
        kind = config.get("model_type") if isinstance(config, Mapping) else type(config).__name__
        if kind != "qwen3_5":
            raise CheckpointError(f"model_type is {kind!r}", expected="'qwen3_5'", fix="point to a Qwen3.5 checkpoint")
        try:
            spec = _parse(config, end_tokens)
        except KeyError as error:
            raise CheckpointError(
                f"the configuration has no {error.args[0]!r}", expected="a complete Qwen3.5 config.json"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the configuration does not make sense: {error}", expected="a Qwen3.5 config.json"
            ) from None
        for part in (spec, spec.vision):
            _check_numbers(part)
        spec._check()
        return spec

    def _check(self) -> None:
        def refuse(problem: str, expected: str) -> None:
            raise CheckpointError(problem, expected=expected)

        unknown = [kind for kind in self.layer_types if kind not in get_args(LayerType)]
        if unknown or not self.layer_types:
            refuse(f"layer_types holds {unknown}", "linear_attention and full_attention only, at least one layer")
        if not self.linear_layers or not self.full_layers:
            refuse(
                "layer_types has one kind of layer only", "at least one linear and one full layer, as every Qwen3.5 has"
            )
        if self.nv % self.nk:
            refuse(f"NV={self.nv} value heads for NK={self.nk} key heads", "NV a multiple of NK")
        if self.heads % self.kv_heads:
            refuse(f"{self.heads} attention heads for {self.kv_heads} KV heads", "heads a multiple of KV heads")
        if self.rotary_lanes % 2 or sum(self.mrope_section) * 2 != self.rotary_lanes:
            refuse(
                f"mrope_section {list(self.mrope_section)} for {self.rotary_lanes} rotary lanes",
                "sections that add up to half of head_dim * partial_rotary_factor",
            )
        if math.isqrt(self.vision.positions) ** 2 != self.vision.positions:
            refuse(f"num_position_embeddings is {self.vision.positions}", "a square number")


PRESETS = ("tiny", "0.8b", "4b")


def preset(name: str) -> ModelSpec:
    """The dimensions of a published model ("0.8b", "4b"); "tiny" is the checkpoint that ships in data/.

    Source of the figures: the public Qwen3.5 configurations.
    """
    if name == "tiny":
        from qwen_npu.data import tiny_checkpoint

        return ModelSpec.from_checkpoint(tiny_checkpoint())
    if name not in PRESETS:
        raise UsageError(f"unknown model {name!r}", expected=f"one of {', '.join(PRESETS)}, or a checkpoint directory")
    small = name == "0.8b"
    layers = 24 if small else 32
    return ModelSpec(
        hidden=1024 if small else 2560,
        intermediate=3584 if small else 9216,
        layer_types=tuple("full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)),
        heads=8 if small else 16,
        kv_heads=2 if small else 4,
        head_dim=256,
        nk=16,
        nv=16 if small else 32,
        dk=128,
        dv=128,
        conv_kernel=4,
        vocab=248320,
        tied=True,
        rms_eps=1e-6,
        rope_theta=1e7,
        rotary_lanes=64,
        mrope_section=(11, 11, 10),
        image_token=248056,
        vision_start=248053,
        vision_end=248054,
        end_tokens=(248044, 248046),
        pad_token=248044,
        vision=VisionSpec(
            depth=12 if small else 24,
            hidden=768 if small else 1024,
            intermediate=3072 if small else 4096,
            heads=12 if small else 16,
            positions=2304,
            patch=16,
            merge=2,
            temporal_patch=2,
            channels=3,
            rope_theta=1e4,
        ),
    )


_TOKEN_IDS = frozenset({"image_token", "vision_start", "vision_end", "pad_token"})


def _check_numbers(part: ModelSpec | VisionSpec) -> None:
    """Every size is a whole number from 1, every token id one from 0, every other number finite and above 0."""
    for entry in dataclasses.fields(part):
        value = getattr(part, entry.name)
        if entry.type == "int":
            least = 0 if entry.name in _TOKEN_IDS else 1
            fine = type(value) is int and least <= value < 2**31
        elif entry.type == "float":
            fine = type(value) in (int, float) and math.isfinite(value) and value > 0
        elif entry.name == "end_tokens":
            fine = all(type(token) is int for token in value)
        else:
            continue
        if not fine:
            raise CheckpointError(
                f"the configuration gives {value!r} for {entry.name} of the {type(part).__name__}",
                expected="a positive number",
            )


def _half_bytes(numerics: Numerics) -> int:
    return 2 if numerics == "device" else 4


def _generation_end_tokens(directory: Path) -> tuple[int, ...]:
    try:
        generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
        return _as_tokens(generation.get("eos_token_id"))
    except (OSError, ValueError, TypeError, AttributeError):
        return ()


def _as_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _parse(config: Mapping[str, Any], end_tokens: tuple[int, ...]) -> ModelSpec:
    text, vision = config["text_config"], config["vision_config"]
    rope = text["rope_parameters"]
    first, second, third = rope["mrope_section"]
    layers = text["layer_types"]
    ends = dict.fromkeys(_as_tokens(text.get("eos_token_id")) + _as_tokens(config.get("eos_token_id")) + end_tokens)
    pad = text.get("pad_token_id")
    return ModelSpec(
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        layer_types=tuple(layers),
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        nk=text["linear_num_key_heads"],
        nv=text["linear_num_value_heads"],
        dk=text["linear_key_head_dim"],
        dv=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        vocab=text["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        rms_eps=text["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        rotary_lanes=int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
        mrope_section=(first, second, third),
        image_token=config["image_token_id"],
        vision_start=config["vision_start_token_id"],
        vision_end=config["vision_end_token_id"],
        end_tokens=tuple(ends),
        pad_token=0 if pad is None else pad,
        vision=VisionSpec(
            depth=vision["depth"],
            hidden=vision["hidden_size"],
            intermediate=vision["intermediate_size"],
            heads=vision["num_heads"],
            positions=vision["num_position_embeddings"],
            patch=vision["patch_size"],
            merge=vision["spatial_merge_size"],
            temporal_patch=vision["temporal_patch_size"],
            channels=vision["in_channels"],
            rope_theta=float(vision.get("rope_parameters", {}).get("rope_theta", 1e4)),
        ),
    )
