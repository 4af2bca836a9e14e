"""Measures what the small model can do, on prompts and pictures drawn afresh: `python evaluate.py --runtime product`.

An answer counts only if it is exact, to the last character. Two runtimes give the same table: `product` goes through
qwen_npu (numerics as on the device), `transformers` through transformers' greedy `generate` in float32.
Exit code 0 if every floor is met, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tasks
from PIL import Image

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS = 160
SECOND_GRID_POINTS = 2.0  # how much worse the second grid may be than the first, in percentage points
Answers = Callable[[list[tasks.Example]], list[str]]


@dataclass(frozen=True)
class Row:
    """One line of the table: how to draw its examples, and the share of exact answers it must reach, if any."""

    name: str
    task: str
    grid: str | None = None
    held_out: bool = False
    filler_words: tuple[int, int] = (0, 0)
    numbers: tuple[int, int] | None = None  # N of count, words of repeat: from, to
    floor: float | None = None
    casual: bool = False

    def draw(self, rng: np.random.Generator, count: int) -> Iterator[tasks.Example]:
        for i in range(count):
            yield tasks.sample(
                rng,
                self.task,
                self.grid,
                casual=self.casual,
                held_out=self.held_out,
                filler_words=int(rng.integers(*self.filler_words)) if self.filler_words[1] else 0,
                number=self.numbers[0] + i % (self.numbers[1] - self.numbers[0] + 1) if self.numbers else None,
            )


def rows() -> list[Row]:
    floors = {"describe": 0.97, "objects": 0.97, "colour": 0.97, "is_there": None}
    table = [Row(f"{task}, {grid}", task, grid, floor=floors[task]) for task in floors for grid in tasks.GRIDS]
    table += [Row("describe, held-out pairs", "describe", held_out=True, floor=0.85)]
    table += [Row(f"{task}, held-out pairs", task, held_out=True) for task in ("colour", "is_there")]
    numbers = {"count": (1, tasks.LARGEST_COUNT), "repeat": (2, 8)}
    table += [Row("count", "count", numbers=numbers["count"], floor=0.98)]
    table += [Row("repeat, 2-8 words", "repeat", numbers=numbers["repeat"])]
    table += [Row("repeat, 9-40 words", "repeat", numbers=(9, 40)), Row("continue", "continue")]
    table += [
        Row(f"{task}, 100-400 words of filler", task, filler_words=(100, 400), numbers=numbers.get(task))
        for task in tasks.TASKS
    ]
    table += [Row(f"{task}, asked casually", task, numbers=numbers.get(task), casual=True) for task in tasks.TASKS]
    return table


def product(directory: Path) -> Answers:
    """Answers through the product's own runtime."""
    import qwen_npu

    session = qwen_npu.Session(qwen_npu.open_bundle(directory), device="ascend:0", numerics="device")

    def answers(examples: list[tasks.Example]) -> list[str]:
        return [session.generate(e.prompt, image=e.image, max_new_tokens=MAX_NEW_TOKENS).text for e in examples]

    return answers


class Transformers:
    """Answers through transformers' greedy `generate`, float32; also what the golden answers are made with."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        torch.set_num_threads(1)
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def encode(self, prompt: str, image: Image.Image | None) -> list[int]:
        """Token ids of a prompt in the chat template, one image pad for each image token."""
        content = [{"type": "image"}] * (image is not None) + [{"type": "text", "text": prompt}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        if image:
            pads = image.width // 32 * (image.height // 32)
            text = text.replace("<|image_pad|>", "<|image_pad|>" * pads)
        return list(self.tokenizer(text)["input_ids"])

    def generate(self, encoded: list[list[int]], images: list[Image.Image | None]) -> Any:
        """One batch, all prompts of one length, all with a picture or none; what `generate` returns, with logits."""
        import torch

        ids = torch.tensor(encoded)
        feed: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images[0]:
            pictures = self.processor(images, return_tensors="np")
            feed["pixel_values"] = torch.from_numpy(np.asarray(pictures["pixel_values"]))
            feed["image_grid_thw"] = torch.from_numpy(np.asarray(pictures["image_grid_thw"]))
            feed["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        with torch.no_grad():
            return self.model.generate(
                **feed,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )

    def __call__(self, examples: list[tasks.Example]) -> list[str]:
        """Answers; quick, since a right answer is not generated but recognised.

        Fed the right answer, the model's first choice is right at every step exactly if it would generate that answer.
        Only the others are generated, one by one.
        """
        prompts = [self.encode(example.prompt, example.image) for example in examples]
        endings = [list(self.tokenizer(example.answer + "<|im_end|>")["input_ids"]) for example in examples]
        order = sorted(range(len(examples)), key=lambda i: (examples[i].image is None, len(prompts[i] + endings[i])))
        result = [""] * len(examples)
        for start in range(0, len(order), 16):
            members = order[start : start + 16]
            for i, right in zip(members, self._recognise(members, prompts, endings, examples), strict=True):
                if right:
                    result[i] = examples[i].answer
                else:
                    tokens = self.generate([prompts[i]], [examples[i].image]).sequences[0, len(prompts[i]) :]
                    result[i] = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return result

    def _recognise(
        self, members: list[int], prompts: list[list[int]], endings: list[list[int]], examples: list[tasks.Example]
    ) -> list[bool]:
        import torch

        longest = max(len(prompts[i] + endings[i]) for i in members)
        ids = torch.full((len(members), longest), self.tokenizer.pad_token_id)
        for row, i in zip(ids, members, strict=True):
            row[: len(prompts[i] + endings[i])] = torch.tensor(prompts[i] + endings[i])
        # Padding is on the right and the model causal: what stands before it does not see it.
        feed: dict[str, Any] = {"input_ids": ids}
        images = [image for image in (examples[i].image for i in members) if image]
        if images:
            pictures = [self.processor(image, return_tensors="np") for image in images]
            for name in ("pixel_values", "image_grid_thw"):
                feed[name] = torch.from_numpy(np.concatenate([np.asarray(picture[name]) for picture in pictures]))
            feed["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        with torch.no_grad():
            choices = self.model(**feed, use_cache=False).logits.argmax(-1)
        return [
            choices[row, len(prompts[i]) - 1 : len(prompts[i] + endings[i]) - 1].tolist() == endings[i]
            for row, i in enumerate(members)
        ]


def measure(answers: Answers, count: int, seed: int) -> dict[str, Any]:
    """The table as one object; wrong answers are kept, up to five a row."""
    table = []
    for number, row in enumerate(rows()):
        began = time.monotonic()
        examples = list(row.draw(np.random.default_rng([seed, number]), count))
        given = answers(examples)
        wrong = [
            {"prompt": e.prompt[-80:], "expected": e.answer, "given": g}
            for e, g in zip(examples, given, strict=True)
            if g != e.answer
        ]
        exact = 1 - len(wrong) / count
        seconds = round(time.monotonic() - began, 1)
        fine = row.floor is None or exact >= row.floor
        table.append(
            {"name": row.name, "exact": exact, "floor": row.floor, "fine": fine, "seconds": seconds, "wrong": wrong[:5]}
        )
    shares = {entry["name"]: entry["exact"] for entry in table}
    first, second = tasks.GRIDS
    behind = {t: 100 * (shares[f"{t}, {first}"] - shares[f"{t}, {second}"]) for t in tasks.PICTURE_TASKS}
    return {
        "seed": seed,
        "count": count,
        "rows": table,
        "second_grid_behind_points": behind,
        "fine": all(entry["fine"] for entry in table) and max(behind.values()) <= SECOND_GRID_POINTS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("product", "transformers"), default="product")
    parser.add_argument("--model", type=Path, default=HERE, help="checkpoint directory (default: this one)")
    parser.add_argument("--count", type=int, default=200, help="prompts of each row")
    parser.add_argument("--seed", type=int, help="default: a new one, printed with the result")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
    answers = product(args.model) if args.runtime == "product" else Transformers(args.model)
    result = {"runtime": args.runtime, **measure(answers, args.count, seed)}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"runtime {args.runtime}, seed {seed}, {args.count} prompts a row")
        for entry in result["rows"]:
            floor = f"floor {entry['floor']:.0%}" if entry["floor"] else ""
            print(f"{entry['name']:36} {entry['exact']:7.1%}  {floor:10} {'' if entry['fine'] else 'MISSED'}")
        for task, points in result["second_grid_behind_points"].items():
            print(f"second grid behind the first, {task}: {points:+.1f} points")
    return 0 if result["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())
