"""The golden answers are what transformers says, and the checkpoint loads with transformers' own classes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL = DATA / "tiny_qwen3_5"
GOLDEN = json.loads((DATA / "golden" / "golden.json").read_text(encoding="utf-8"))
# Every task, both grids, the shortest and the longest prompts.
CHOSEN = GOLDEN["prompts"][::7]


@pytest.fixture(scope="module")
def oracle() -> Any:
    sys.path.insert(0, str(MODEL))
    try:
        import evaluate
    finally:
        sys.path.remove(str(MODEL))
    return evaluate.Transformers(MODEL)


def test_golden_answers_belong_to_these_weights() -> None:
    assert hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest() == GOLDEN["model_sha256"]


@pytest.mark.parametrize("entry", CHOSEN, ids=[entry["name"] for entry in CHOSEN])
def test_transformers_says_the_golden_answer(oracle: Any, entry: dict[str, Any]) -> None:
    from PIL import Image

    image = Image.open(DATA / "golden" / entry["image"]) if entry["image"] else None
    ids = oracle.encode(entry["prompt"], image)
    assert ids == entry["prompt_tokens"]
    out = oracle.generate([ids], [image])
    assert out.sequences[0, len(ids) :].tolist() == entry["tokens"]
    for logits, margin in zip(out.logits, entry["margins"], strict=True):
        best, second = logits[0].topk(2).values.tolist()
        assert best - second == pytest.approx(margin, abs=2e-3)


def test_nothing_is_missing_or_left_over(oracle: Any) -> None:
    from transformers import AutoModelForImageTextToText

    _, report = AutoModelForImageTextToText.from_pretrained(MODEL, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(oracle.tokenizer).__name__ == "Qwen3_5Tokenizer"
