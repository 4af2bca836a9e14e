"""Trains the small Qwen3.5 of this directory from nothing (torch and transformers; two hours and more on one thread).

    python train.py --prepare       writes config, tokenizer, chat template and processor configuration only
    python train.py                 trains (or resumes from --work) and writes model.safetensors in float16

The number of steps and every seed are fixed, and the batch of a step depends on the step alone, so a stopped run goes
on from its last checkpoint as if nothing had happened. The first `VISION_STEPS` train the vision tower alone on labels
of patches; then everything is trained on the tasks of tasks.py, with a loss on the answers only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tasks
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

Stage = TypeVar("Stage")
HERE = Path(__file__).resolve().parent
SEED = 20261129
# The course of the training. Pairs (step, value) are joined by straight lines; mappings hold from a step on. The run
# was watched and steered: where a curve bends, something had stopped being learnt. These tables are what was done.
VISION_STEPS = 1200
SHORT_FROM = 2126  # long lists to repeat had drowned everything else: from here on short ones
STRAY_FROM = 3145  # pictures in colours without a name teach the vision tower shapes whatever the colour
HARD_FROM = 3566  # pictures to describe hold three things more often, and fewer prompts are text only
NEAR_FROM = 4352  # more pictures in colours without a name, and nearer to those of held-out pairs
MORE_FROM = 4750  # and more of those once again
AROUND_FROM = 5070  # those in every shade but the one that is held out itself; and long lists to repeat come back
ASKED_FROM = 6700  # prompts as people type them; the vision tower stays as it is
STEPS = 7900
# Share of the full learning rate; it rises twice, since the text model starts later.
RATE = (
    (0, 0.0),
    (50, 1.0),
    (1199, 1.0),
    (1200, 0.0),
    (1250, 1.0),
    (1803, 1.0),
    (1804, 0.7),
    (1922, 0.647),
    (1923, 0.5),
    (2126, 0.414),
    (2614, 0.286),
    (3000, 0.286),
    (3566, 0.178),
    (3800, 0.178),
    (4352, 0.080),
    (4353, 0.13),
    (4750, 0.0),
    (4751, 0.16),
    (5070, 0.0),
    (5130, 0.2),
    (5900, 0.2),
    (ASKED_FROM, 0.0),
    (6750, 0.12),
    (7300, 0.12),
    (STEPS, 0.0),
)
# How often a picture is made to hold a single thing.
SINGLES = ((VISION_STEPS, 0.6), (1921, 0.407), (1922, 0.12), (2126, 0.099), (2614, 0.068), (3566, 0.034), (4750, 0.0))
THINGS = (0.15, 0.3, 0.55)  # from HARD_FROM on: shares of pictures to describe with one, two and three things
# Weight of the loss on patches.
PATCH_WEIGHT = (
    (0, 0.5),
    (3565, 0.182),
    (3566, 0.6),
    (4351, 0.473),
    (4352, 1.0),
    (4749, 1.0),
    (4750, 1.5),
    (5070, 1.5),
    (5071, 1.0),
    (6699, 1.0),
    (ASKED_FROM, 0.0),
)
# Pictures in colours without a name in a step.
STRAYS = {0: 0, STRAY_FROM: 8, NEAR_FROM: 14, MORE_FROM: 24, ASKED_FROM: 0}
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
BLOCK_ROWS = 128  # of the optimizer, see Muon
CASUAL_SHARE = 0.65  # of the prompts, from ASKED_FROM on
VOCABULARY = 1024
SPECIAL = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|im_start|>",
    "<|vision_pad|>",
)
SPECIAL_IDS = {name: VOCABULARY - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}
PATCH, MERGE = 16, 2
# What a batch holds, how often, and how many examples: long ones are few, since they cost most.
KINDS = ("plain", "answers", "filler", "long")
KIND_SHARES = {  # from a step on
    0: (0.72, 0.14, 0.09, 0.05),
    1803: (0.7, 0.2, 0.06, 0.04),
    SHORT_FROM: (0.84, 0.06, 0.06, 0.04),
    AROUND_FROM: (0.74, 0.16, 0.06, 0.04),
}
BATCH = {"plain": 32, "answers": 12, "filler": 14, "long": 4}
PICTURE_SHARES = {  # from a step on; in the order of tasks.PICTURE_TASKS
    0: (0.5, 0.12, 0.18, 0.2),
    2614: (0.34, 0.12, 0.34, 0.2),
    STRAY_FROM: (0.45, 0.12, 0.23, 0.2),
    HARD_FROM: (0.6, 0.1, 0.13, 0.17),
}

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "float16",
    "tie_word_embeddings": True,
    "image_token_id": SPECIAL_IDS["<|image_pad|>"],
    "video_token_id": SPECIAL_IDS["<|video_pad|>"],
    "vision_start_token_id": SPECIAL_IDS["<|vision_start|>"],
    "vision_end_token_id": SPECIAL_IDS["<|vision_end|>"],
    "initializer_range": 0.05,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        "bos_token_id": None,
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.05,
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": 128,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        "initializer_range": 0.03,
    },
}
CHAT_TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    "size": {"shortest_edge": 4096, "longest_edge": 16777216},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
}


# ---------------------------------------------------------------------------------------------------- files beside it


def prepare(directory: Path) -> None:
    """Write everything but the weights."""
    generation = {
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
        "do_sample": False,
        "use_cache": True,
    }
    for name, content in (
        ("config.json", CONFIG),
        ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer = Qwen3_5Tokenizer(
        tokenizer_object=train_tokenizer(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the texts of the tasks: their words become one token each, anything else falls to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(SEED)
    texts = ["user\nassistant\nsystem\n"] * 300
    for _ in range(1500):
        for task in tasks.TEXT_TASKS:
            example = tasks.sample(rng, task, filler_words=int(rng.integers(0, 40)))
            texts += [example.prompt, example.answer]
        for task in tasks.PICTURE_TASKS:
            question, answer = tasks.question(rng, task, tasks.sample_scene(rng, one_of_a_shape=task == "colour"))
            texts += [question, answer]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    spare = VOCABULARY - len(SPECIAL) - len(state["model"]["vocab"])
    # Too few texts for so many merges: fill with tokens that no text yields, so that ids stay where the config says.
    for i in range(spare):
        state["model"]["vocab"][f"<|unused_{i}|>"] = len(state["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    assert {name: tokenizer.token_to_id(name) for name in SPECIAL} == SPECIAL_IDS
    return tokenizer


# --------------------------------------------------------------------------------------------------------- batches


def grid_patches(grid: str) -> tuple[int, int]:
    """Patches of a grid: rows, columns."""
    width, height = tasks.GRIDS[grid]
    return height // PATCH, width // PATCH


def patch_rows(image: Image.Image) -> np.ndarray:
    """Pixels [patches, 3*16*16] in -1..1, patches in merge-block order; one of the two equal temporal copies."""
    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * PATCH * PATCH)


def patch_labels(scene: tasks.Scene) -> np.ndarray:
    """Shape and colour label of every patch [patches, 2] in merge-block order: 0 nothing, -100 undecided (an edge)."""
    rows, columns = grid_patches(scene.grid)
    labels = np.zeros((2, rows, columns), dtype=np.int64)
    y, x = (np.mgrid[0:rows, 0:columns] + 0.5) * PATCH
    for thing in scene.things:
        distance = np.hypot(x - thing.x, y - thing.y)
        inside = (distance < thing.radius * 0.8) | (distance == distance.min())
        names = (tasks.SHAPES.index(thing.shape) + 1, list(tasks.COLOURS).index(thing.colour) + 1)
        for plane, name in zip(labels, names, strict=True):
            plane[(distance < thing.radius + PATCH * 0.7) & (plane == 0)] = -100
            plane[inside] = name
    blocks = labels.reshape(2, rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(1, 3, 2, 4, 0)
    return blocks.reshape(rows * columns, 2)


def render(example: tasks.Example) -> str:
    """The prompt as the chat template writes it, image pads expanded."""
    picture = ""
    if example.grid:
        rows, columns = grid_patches(example.grid)
        picture = "<|vision_start|>" + "<|image_pad|>" * (rows * columns // MERGE**2) + "<|vision_end|>"
    return f"<|im_start|>user\n{picture}{example.prompt}<|im_end|>\n<|im_start|>assistant\n"


def positions(ids: np.ndarray, grid: str | None) -> np.ndarray:
    """mRoPE positions [3, tokens] (t, h, w) of a sequence with at most one picture."""
    length = len(ids)
    if grid is None:
        return np.broadcast_to(np.arange(length), (3, length))
    rows, columns = (n // MERGE for n in grid_patches(grid))
    first = int(np.argmax(ids == SPECIAL_IDS["<|image_pad|>"]))
    cells = np.arange(rows * columns)
    picture = first + np.stack([np.zeros_like(cells), cells // columns, cells % columns])
    rest = np.arange(length - first - len(cells)) + first + max(rows, columns)
    parts = [np.broadcast_to(np.arange(first), (3, first)), picture, np.broadcast_to(rest, (3, len(rest)))]
    return np.concatenate(parts, axis=1).astype(np.int64)


def draw_batch(step: int) -> list[tasks.Example]:
    """The examples of a step: a function of the step alone."""
    rng = np.random.default_rng([SEED, step])
    if step < VISION_STEPS:
        return [tasks.sample(rng, "describe") for _ in range(BATCH["plain"])]
    kind = KINDS[int(rng.choice(len(KINDS), p=latest(KIND_SHARES, step)))]
    examples = []
    for i in range(BATCH[kind]):
        casual = step >= ASKED_FROM and rng.random() < CASUAL_SHARE
        words = 0
        if kind == "filler":
            words = int(rng.integers(5, 120))
        elif kind == "long":
            words = int(rng.integers(120, 470))
        if kind == "answers":
            if step < SHORT_FROM:
                task, longest_list = ("count", "repeat")[i % 2], 60
            elif step < AROUND_FROM:
                task, longest_list = "count", 0
            else:  # lists grow from 16 words to 40 within 500 steps
                task = ("count", "repeat")[i % 4 > 0]
                longest_list = int(np.interp(step - AROUND_FROM, (0, 500), (16, 40)))
            number = int(rng.integers(9, 31) if task == "count" else rng.integers(9, longest_list + 1))
            examples.append(tasks.sample(rng, task, number=number, casual=casual))
        elif i % (8 if HARD_FROM <= step < ASKED_FROM else 4) == 3:
            task = tasks.TEXT_TASKS[int(rng.integers(3))]
            number = None
            if kind in ("plain", "filler") and task != "continue":
                number = int(rng.integers(2, 13) if step < ASKED_FROM else rng.integers(1, 31))
            if task == "repeat" and step >= SHORT_FROM:
                number = int(rng.integers(2, 9))
            examples.append(tasks.sample(rng, task, number=number, filler_words=words, casual=casual))
        else:
            task = str(rng.choice(tasks.PICTURE_TASKS, p=latest(PICTURE_SHARES, step)))
            things = 1 if rng.random() < along(SINGLES, step) else None
            if task == "describe" and step >= HARD_FROM:
                things = 1 + int(rng.choice(3, p=THINGS))
            examples.append(tasks.sample(rng, task, filler_words=words, things=things, casual=casual))
    return examples


def draw_strays(step: int) -> list[tasks.Example]:
    """Pictures in colours without a name: shapes whatever their colour.

    Held-out pairs stay unseen. No shape is drawn in a colour to which its held-out one is the nearest of all named ones
    (at first: among the three nearest). From AROUND_FROM on every shade is drawn that lies 45 of 255 or more from
    the held-out one, which itself varies by at most 18: else the tower learns "purplish, so not a square".
    """
    rng = np.random.default_rng([SEED, step, 1])
    named = np.array(list(tasks.COLOURS.values()))
    examples = []
    for _ in range(latest(STRAYS, step)):
        scene = tasks.sample_scene(rng)
        shades: list[tuple[int, int, int]] = []
        while len(shades) < len(scene.things):
            shade = rng.integers(0, 256, 3)
            distance = np.linalg.norm(named - shade, axis=1)
            nearest = {list(tasks.COLOURS)[i] for i in np.argsort(distance)[: 1 if step >= NEAR_FROM else 3]}
            unseen = {colour for colour, shape in tasks.HELD_OUT if shape == scene.things[len(shades)].shape}
            if step >= AROUND_FROM:
                fine = all(np.linalg.norm(np.array(tasks.COLOURS[colour]) - shade) >= 45 for colour in unseen)
            else:
                fine = bool(np.ptp(shade) > 70 and distance.min() > 60 and not nearest & unseen)
            if fine:
                shades.append((int(shade[0]), int(shade[1]), int(shade[2])))
        examples.append(tasks.Example("stray", "", "", tasks.draw(rng, scene, shades), scene.grid, scene))
    return examples


# ------------------------------------------------------------------------------------------------------------ model


class Trainee(torch.nn.Module):
    """The model of transformers with a faster way through it: pictures of one grid at once, logits of answers only."""

    def __init__(self, model: Qwen3_5ForConditionalGeneration, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.patch_classes = [len(tasks.SHAPES) + 1, len(tasks.COLOURS) + 1]
        self.patch_head = torch.nn.Linear(CONFIG["vision_config"]["hidden_size"], sum(self.patch_classes))

    def look(self, images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures of one grid to patches before the merger [n, patches, hidden] and embeddings [n, tokens, hidden]."""
        visual = self.model.model.visual
        rows, columns = images[0].size[1] // PATCH, images[0].size[0] // PATCH
        grid = torch.tensor([[1, rows, columns]])
        pixels = torch.from_numpy(np.stack([patch_rows(image) for image in images]))
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
        index, share = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=MERGE,
        )
        place = (visual.pos_embed(index) * share[:, :, None]).sum(1)
        cos, sin = visual.rotary_pos_emb(place, get_vision_position_ids(grid, MERGE))
        x = F.linear(pixels, weight, visual.patch_embed.proj.bias) + place
        count, length, hidden = x.shape
        for block in visual.blocks:
            heads = block.attn.qkv(block.norm1(x)).view(count, length, 3, block.attn.num_heads, -1)
            q, k = modeling.apply_rotary_pos_emb_vision(heads[:, :, 0], heads[:, :, 1], cos, sin)
            q, k, v = (t.transpose(1, 2) for t in (q, k, heads[:, :, 2]))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, length, hidden)
            x = x + block.attn.proj(mixed)
            x = x + block.mlp(block.norm2(x))
        return x, visual.merger(x.reshape(-1, hidden)).view(count, length // MERGE**2, -1)

    def patch_loss(self, patches: torch.Tensor, examples: list[tasks.Example]) -> torch.Tensor:
        known = [patch_labels(example.scene) for example in examples if example.scene]
        for example, labels_of_one in zip(examples, known, strict=True):
            if example.task == "stray":
                labels_of_one[labels_of_one[:, 1] > 0, 1] = -100
        labels = torch.from_numpy(np.stack(known)).flatten(0, 1)
        shape, colour = self.patch_head(patches.flatten(0, 1)).split(self.patch_classes, -1)
        return F.cross_entropy(shape, labels[:, 0]) + F.cross_entropy(colour, labels[:, 1])

    def forward(
        self, examples: list[tasks.Example], strays: Sequence[tasks.Example] = (), vision_only: bool = False
    ) -> dict[str, Any]:
        """Losses of a batch, and for every example whether greedy decoding would give its answer exactly."""
        embeds: dict[int, torch.Tensor] = {}
        patch_losses = []
        for grid in tasks.GRIDS:
            chosen = [i for i, example in enumerate(examples) if example.grid == grid]
            seen = [examples[i] for i in chosen]
            if chosen:
                seen += [example for example in strays if example.grid == grid]
                patches, merged = self.look([example.image for example in seen if example.image])
                embeds.update(zip(chosen, merged[: len(chosen)], strict=True))
                patch_losses.append((len(seen), self.patch_loss(patches, seen)))
        total = sum(n for n, _ in patch_losses)
        result: dict[str, Any] = {"patch_loss": sum(n * loss for n, loss in patch_losses) / max(total, 1)}
        if vision_only:
            return result

        prompts = [self.tokenizer(render(example))["input_ids"] for example in examples]
        answers = [self.tokenizer(example.answer + "<|im_end|>")["input_ids"] for example in examples]
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = np.full((len(examples), longest), SPECIAL_IDS["<|endoftext|>"])
        place = np.zeros((3, len(examples), longest), dtype=np.int64)
        at, owner, weights = [], [], []
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            length = len(prompt) + len(answer)
            ids[i, :length] = prompt + answer
            place[:, i, :length] = positions(ids[i, :length], examples[i].grid)
            at += [i * longest + len(prompt) - 1 + j for j in range(len(answer))]
            owner += [i] * len(answer)
            # Between a mean over tokens (one-word answers would hardly count) and over examples (long ones would not).
            weights += [len(answer) ** -0.5] * len(answer)
        tokens = torch.from_numpy(ids)
        x = self.model.model.language_model.embed_tokens(tokens)
        if embeds:
            pictures = torch.cat([embeds[i] for i in sorted(embeds)])
            x = x.masked_scatter((tokens == SPECIAL_IDS["<|image_pad|>"])[..., None], pictures)
        # Padding is on the right and everything is causal: no mask.
        x = self.model.model.language_model(
            inputs_embeds=x, position_ids=torch.from_numpy(place), use_cache=False
        ).last_hidden_state
        where = torch.tensor(at)
        logits = self.model.lm_head(x.flatten(0, 1)[where])
        target = tokens.flatten()[where + 1]
        weight = torch.tensor(weights)
        result["loss"] = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
        wrong = (logits.argmax(-1) != target).numpy()
        exact = np.ones(len(examples), dtype=bool)
        exact[np.array(owner)[wrong]] = False
        result["exact"] = exact
        return result


def new_model() -> Qwen3_5ForConditionalGeneration:
    config = Qwen3_5Config(**{key: value for key, value in CONFIG.items() if key != "dtype"})
    torch.manual_seed(SEED)
    model = Qwen3_5ForConditionalGeneration(config).float()
    for layer in model.model.language_model.layers:
        if layer.block_type == "linear_attention":
            # Time steps log-uniform in [1e-3, 1e-1]; with the usual 1 the linear layers forget at once.
            dt = torch.exp(torch.empty_like(layer.linear_attn.dt_bias).uniform_(np.log(1e-3), np.log(1e-1)))
            layer.linear_attn.dt_bias.data = dt + torch.log(-torch.expm1(-dt))
    return model


def check_same_as_transformers(trainee: Trainee) -> None:
    """The fast way through the vision tower must equal the slow one, on both grids."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for grid in tasks.GRIDS:
            image = tasks.sample(rng, "describe", grid).image
            rows = torch.from_numpy(patch_rows(image)).view(-1, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1)
            thw = torch.tensor([[1, *grid_patches(grid)]])
            slow = trainee.model.model.visual(rows.reshape(len(rows), -1), grid_thw=thw).pooler_output
            torch.testing.assert_close(trainee.look([image])[1][0], slow, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------- optimizer


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz steps, in float32, matrices of one shape together.

    Updates have a root mean square of 0.2 * lr, as AdamW's have, whatever the shape.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - the signature of the base class
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    update = p.grad.lerp(state["momentum"], group["momentum"]).flatten(1)
                    if min(update.shape) > BLOCK_ROWS:  # the one big matrix would cost as much as all others together
                        update = update.reshape(-1, BLOCK_ROWS, update.shape[1])
                    alike[update.shape].append((p, update))
            for shape, pairs in alike.items():
                update = orthogonal(torch.stack([u for _, u in pairs]).flatten(0, -3)) * 0.2 * max(shape[-2:]) ** 0.5
                for (p, _), u in zip(pairs, update.chunk(len(pairs)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(u.view_as(p), alpha=group["lr"])


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Nearest (half-)orthogonal matrices of a stack [n, rows, columns], by the quintic Newton-Schulz iteration."""
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if x.shape[1] <= x.shape[2] else wide.mT


def optimizers(trainee: Trainee) -> list[torch.optim.Optimizer]:
    elsewhere = ("embed_tokens", "pos_embed", "conv1d", "in_proj_a", "in_proj_b", "patch_head")
    matrices, others = [], []
    for name, p in trainee.named_parameters():
        (others if p.ndim < 2 or any(part in name for part in elsewhere) else matrices).append(p)
    return [
        Muon(matrices),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def latest(stages: dict[int, Stage], step: int) -> Stage:
    """The value of the last stage begun."""
    return next(value for first, value in reversed(stages.items()) if step >= first)


def along(line: tuple[tuple[int, float], ...], step: int) -> float:
    return float(np.interp(step, *zip(*line, strict=True)))


# ------------------------------------------------------------------------------------------------------------- run


def save(trainee: Trainee, path: Path) -> None:
    """Write the weights in float16, without the auxiliary head; the tied head is not written twice."""
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in trainee.model.state_dict().items()
        if name != "lm_head.weight"
    }
    temporary = path.with_suffix(".tmp")
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(path)


def held_out_exact(trainee: Trainee, count: int = 48) -> float:
    rng = np.random.default_rng(7)
    with torch.no_grad():
        return float(trainee([tasks.sample(rng, "describe", held_out=True) for _ in range(count)])["exact"].mean())


def train(directory: Path, work: Path, fast: bool, from_step: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trainee = Trainee(new_model(), tokenizer)
    check_same_as_transformers(trainee)
    if fast:
        for part in (modeling.Qwen3_5RMSNorm, modeling.Qwen3_5RMSNormGated, modeling.Qwen3_5MLP):
            part.forward = torch.compile(part.forward, dynamic=True)
    opts = optimizers(trainee)
    checkpoint = work / "checkpoint.pt"
    start, seconds = from_step, 0.0
    if from_step and not checkpoint.exists():
        trainee.model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)  # the head is tied
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        trainee.load_state_dict(saved["trainee"])
        for opt, state in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        start, seconds = saved["step"], saved["seconds"]
    size = sum(p.numel() for p in trainee.model.parameters())
    print(f"{size:,} parameters, from step {start} of {STEPS}", flush=True)
    began = last_saved = time.monotonic()
    losses: list[float] = []
    exact: dict[str, list[bool]] = defaultdict(list)
    for step in range(start, STEPS):
        trainee.model.model.visual.requires_grad_(step < ASKED_FROM)
        for opt in opts:
            opt.zero_grad(set_to_none=True)
            for group in opt.param_groups:
                group["lr"] = LEARNING_RATE * along(RATE, step + 1)
        examples = draw_batch(step)
        result = trainee(examples, draw_strays(step), vision_only=step < VISION_STEPS)
        if step < VISION_STEPS:
            loss = result["patch_loss"]
            losses.append(loss.item())
        else:
            loss = result["loss"] + along(PATCH_WEIGHT, step) * result["patch_loss"]
            losses.append(result["loss"].item())
            for example, right in zip(examples, result["exact"], strict=True):
                exact[example.task].append(bool(right))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        for opt in opts:
            opt.step()

        now = time.monotonic()
        if (step + 1) % 50 == 0:
            shares = " ".join(f"{task} {np.mean(exact[task]):.3f}" for task in tasks.TASKS if exact[task])
            spent = seconds + now - began
            print(f"step {step + 1} {spent:.0f} s loss {np.mean(losses):.4f} exact: {shares}", flush=True)
            losses.clear()
            exact.clear()
        if (step + 1) % 500 == 0 and step >= VISION_STEPS:
            print(f"step {step + 1} held-out pairs, describe: {held_out_exact(trainee):.3f}", flush=True)
        if now - last_saved > 120 or step + 1 == STEPS:
            state = {
                "trainee": trainee.state_dict(),
                "optimizers": [opt.state_dict() for opt in opts],
                "step": step + 1,
                "seconds": seconds + now - began,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            last_saved = now
    save(trainee, directory / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="write everything but the weights, then stop")
    parser.add_argument("--out", type=Path, default=HERE, help="model directory (default: this one)")
    parser.add_argument("--work", type=Path, default=Path("train-work"), help="where the resumable checkpoint is kept")
    parser.add_argument(
        "--from-step", type=int, default=0, help="begin there with the weights of --out and a fresh optimizer"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="a fifth faster; needs a C++ compiler")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.prepare or not (args.out / "tokenizer.json").exists():
        prepare(args.out)
    if not args.prepare:
        args.work.mkdir(parents=True, exist_ok=True)
        train(args.out, args.work, args.compile, args.from_step)


if __name__ == "__main__":
    main()
