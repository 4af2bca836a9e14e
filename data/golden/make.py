"""Makes the golden answers of this directory: 64 prompts and transformers' greedy answers in float32.

    python make.py      writes golden.json and picture_*.png beside itself; needs torch and transformers

golden.json holds, for every prompt: `name`, `task`, `prompt`, `image` (a file name or null), `grid`, `held_out` (the
picture holds a colour-shape pair that training never drew), `expected` (the right answer), `prompt_tokens` (ids, image
pads expanded), `tokens` (ids, the closing <|im_end|> included), `text` (without it) and `margins` (for each step the
logit of the chosen token less that of the next best).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "tiny_qwen3_5"
sys.path.insert(0, str(MODEL))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import evaluate  # noqa: E402
import numpy as np  # noqa: E402
import tasks  # noqa: E402

SEED = 64
# Pictures: grid, number of things, whether a pair is held out; and the questions to each, with the exact number of
# prompt tokens wanted (None: whatever the bare question takes). Lengths stand around the edges of the prefill buckets.
PICTURES: list[tuple[str, int, bool, list[tuple[str, int | None]]]] = [
    ("square", 2, False, [("describe", None), ("objects", None), ("colour", 64)]),
    ("wide", 3, False, [("describe", None), ("is_there", None), ("objects", 128)]),
    ("square", 1, False, [("describe", None), ("colour", 63)]),
    ("square", 3, False, [("describe", None), ("is_there", 65)]),
    ("wide", 1, False, [("describe", None), ("colour", 127)]),
    ("wide", 2, False, [("describe", None), ("is_there", 129)]),
    ("square", 2, True, [("describe", None), ("is_there", None), ("colour", 256)]),
    ("wide", 2, True, [("describe", None), ("colour", None)]),
    ("square", 1, True, [("describe", 90), ("is_there", 257)]),
    ("wide", 3, True, [("describe", 255), ("objects", None)]),
    ("square", 3, False, [("describe", 64), ("objects", 300)]),
    ("wide", 3, False, [("describe", 128), ("colour", 400)]),
    ("square", 2, False, [("describe", 256), ("is_there", 180)]),
    ("wide", 2, False, [("describe", 257), ("is_there", None)]),
    ("square", 3, False, [("describe", 400), ("colour", None)]),
    ("wide", 1, False, [("describe", 350), ("objects", 511)]),
    ("square", 2, False, [("describe", 512)]),
]
# Text only: task, number (N; at least so many words; period), prompt tokens.
TEXTS: list[tuple[str, int | None, int | None]] = [
    ("count", 3, None),
    ("count", 9, 32),
    ("count", 12, 31),
    ("count", 16, None),
    ("count", 20, 64),
    ("count", 24, 33),
    ("count", 27, 128),
    ("count", 30, None),
    ("count", 30, 256),
    ("count", 21, 400),
    ("count", 18, None),
    ("count", 22, 65),
    ("count", 25, 129),
    ("count", 28, 300),
    ("count", 29, 255),
    ("count", 26, 512),
    ("repeat", 3, None),
    ("repeat", 5, 32),
    ("repeat", 5, 65),
    ("repeat", 5, 129),
    ("repeat", 8, None),
    ("repeat", 5, 511),
    ("continue", 2, None),
    ("continue", 3, 33),
    ("continue", 4, 63),
    ("continue", None, 127),
    ("continue", None, 257),
    ("continue", None, None),
]


def main() -> None:
    oracle = evaluate.Transformers(MODEL)
    rng = np.random.default_rng(SEED)
    prompts: list[dict[str, Any]] = []
    for number, (grid, things, held_out, questions) in enumerate(PICTURES):
        scene = tasks.sample_scene(rng, grid, held_out=held_out, things=things, one_of_a_shape=True)
        image = tasks.draw(rng, scene)
        name = f"picture_{number:02}.png"
        image.save(HERE / name, optimize=True)
        for task, length in questions:
            prompt, expected = fitting(oracle, rng, image, length, lambda t=task, s=scene: tasks.question(rng, t, s))
            entry = {"task": task, "prompt": prompt, "image": name, "grid": grid, "held_out": held_out}
            prompts.append({**entry, "expected": expected, **answer(oracle, prompt, image)})
    for task, count, length in TEXTS:

        def draw(task: str = task, count: int | None = count) -> tuple[str, str]:
            more = int(rng.integers(0, 4)) if task == "repeat" else 0  # so that every length can be met
            example = tasks.sample(rng, task, number=count + more if count else None)
            return example.prompt, example.answer

        prompt, expected = fitting(oracle, rng, None, length, draw)
        entry = {"task": task, "prompt": prompt, "image": None, "grid": None, "held_out": False}
        prompts.append({**entry, "expected": expected, **answer(oracle, prompt, None)})
    for number, entry in enumerate(prompts):
        entry["name"] = f"{number:02}-{entry['task']}"
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in prompts)
    temporary = HERE / "golden.tmp"
    temporary.write_text(f'{{"model_sha256": "{digest}", "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
    temporary.replace(HERE / "golden.json")
    lengths = [len(entry["prompt_tokens"]) for entry in prompts]
    right = sum(entry["text"] == entry["expected"] for entry in prompts)
    least = min(min(entry["margins"]) for entry in prompts)
    steps = sum(len(entry["tokens"]) for entry in prompts)
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {steps} steps, {right} right")
    print(f"least margin {least:.3f}, steps below 0.25: {sum(m < 0.25 for e in prompts for m in e['margins'])}")


def fitting(
    oracle: evaluate.Transformers,
    rng: np.random.Generator,
    image: Any,
    length: int | None,
    draw: Callable[[], tuple[str, str]],
) -> tuple[str, str]:
    """Draw a question, and unrelated sentences before it, until the prompt has exactly `length` tokens."""
    if length is None:
        return draw()
    for _ in range(2000):
        question, expected = draw()
        missing = length - len(oracle.encode(question, image))
        # A filler ends with one short sentence at most; several of them reach every length.
        shorts = int(rng.integers(0, 6))
        words = missing - 5 * shorts - int(rng.integers(0, 9))
        lead = tasks.filler(rng, words) + "".join(tasks.filler(rng, 5) for _ in range(shorts))
        prompt = lead + question
        if len(oracle.encode(prompt, image)) == length:
            return prompt, expected
    raise SystemExit(f"no prompt of {length} tokens found")


def answer(oracle: evaluate.Transformers, prompt: str, image: Any) -> dict[str, Any]:
    ids = oracle.encode(prompt, image)
    out = oracle.generate([ids], [image])
    tokens = out.sequences[0, len(ids) :].tolist()
    margins = []
    for logits in out.logits:
        best, second = logits[0].topk(2).values.tolist()
        margins.append(round(best - second, 4))
    text = oracle.tokenizer.decode(tokens, skip_special_tokens=True)
    return {"prompt_tokens": ids, "tokens": tokens, "text": text, "margins": margins}


if __name__ == "__main__":
    main()
