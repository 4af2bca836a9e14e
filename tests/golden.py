"""The golden prompts that ship in data/golden, for tests that hold the runtime against them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qwen_npu.data import data_dir

CLEAR_MARGIN = 0.25
"""Device numerics may choose otherwise than the oracle only where its top-2 margin is no larger than this."""


@dataclass(frozen=True)
class Golden:
    """One prompt with transformers' greedy answer (f32) and the top-2 margin of every step."""

    name: str
    prompt_tokens: list[int]
    image: Path | None
    tokens: list[int]
    margins: list[float]

    @property
    def clear_tokens(self) -> list[int]:
        """The answer up to the first step whose margin is not clear."""
        for step, margin in enumerate(self.margins):
            if margin <= CLEAR_MARGIN:
                return self.tokens[:step]
        return self.tokens


@cache
def golden_prompts() -> tuple[Golden, ...]:
    directory = data_dir() / "golden"
    entries = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["prompts"]
    return tuple(
        Golden(
            entry["name"],
            entry["prompt_tokens"],
            directory / entry["image"] if entry["image"] else None,
            entry["tokens"],
            entry["margins"],
        )
        for entry in entries
    )
