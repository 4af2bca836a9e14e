"""Twelve prompts, eight with pictures, and the answers of a session to them."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw

from qwen_npu.bundle import Bundle
from qwen_npu.driver.protocol import Driver
from qwen_npu.runtime.session import Session

STEPS = 33
"""The first token comes from prefill, 32 from decode."""
CAPACITY = 128
BUCKETS = (32, 64)
TEXTS = ("Count from 1 to 5.", "Count from 1 to 9.", "Say hello.", "Describe the image.")


def picture(index: int) -> Image.Image:
    """One or two shapes, another for each index."""
    colours = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "white")
    image = Image.new("RGB", (128, 128), ("black", "gray")[index % 2])
    draw = ImageDraw.Draw(image)
    boxes = [(8, 40, 56, 88), (72, 40, 120, 88)][: 1 + index % 2]
    for place, box in enumerate(boxes):
        shape = draw.ellipse if (index + place) % 3 else draw.rectangle
        shape(box, fill=colours[(index + 3 * place) % 8])
    return image


PROMPTS: list[tuple[str, Any]] = [("Describe the image.", picture(index)) for index in range(8)]
PROMPTS += [(text, None) for text in TEXTS]


def answers(bundle: Bundle, driver: str | Driver, kv: str) -> list[tuple[int, ...]]:
    """The tokens of each prompt, in f32 on a CPU target, going on after end of text."""
    with Session(bundle, device="cpu", driver=driver, state="host", kv=kv, numerics="f32") as session:  # type: ignore[arg-type]
        return [
            session.generate(prompt, image, max_new_tokens=STEPS, ignore_eos=True).tokens for prompt, image in PROMPTS
        ]
