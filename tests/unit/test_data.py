"""The tasks of the small model: pictures show what their answers say, and the files beside the weights fit together."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL = DATA / "tiny_qwen3_5"


def load(path: Path) -> ModuleType:
    name = f"small_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tasks = load(MODEL / "tasks.py")


def nearest_colour(pixel: np.ndarray) -> str:
    return min(tasks.COLOURS, key=lambda name: np.abs(np.array(tasks.COLOURS[name]) - pixel).sum())


@pytest.mark.parametrize("grid", ["square", "wide"])
@pytest.mark.parametrize("seed", range(12))
def test_picture_shows_what_its_caption_says(grid: str, seed: int) -> None:
    example = tasks.sample(np.random.default_rng(seed), "describe", grid)
    assert example.image.size == tasks.GRIDS[grid]
    pixels = np.asarray(example.image, dtype=float)
    scene = example.scene
    for thing in scene.things:
        middle = pixels[int(thing.y) - 1 : int(thing.y) + 2, int(thing.x) - 1 : int(thing.x) + 2].mean((0, 1))
        assert nearest_colour(middle) == thing.colour
    joint = " left of " if scene.layout == "row" else " above "
    assert [part.split()[1:] for part in example.answer.split(joint)] == [list(t.pair) for t in scene.things]
    along = [t.x if scene.layout == "row" else t.y for t in scene.things]
    assert along == sorted(along)


def test_things_stay_inside_and_apart() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        scene = tasks.sample_scene(rng, "square" if rng.random() < 0.5 else "wide")
        width, height = tasks.GRIDS[scene.grid]
        for i, a in enumerate(scene.things):
            assert a.radius <= a.x <= width - a.radius
            assert a.radius <= a.y <= height - a.radius
            for b in scene.things[i + 1 :]:
                assert np.hypot(a.x - b.x, a.y - b.y) >= a.radius + b.radius


def test_held_out_pairs_are_drawn_only_on_request() -> None:
    rng = np.random.default_rng(6)
    for _ in range(400):
        assert not {t.pair for t in tasks.sample_scene(rng).things} & tasks.HELD_OUT
        assert len({t.pair for t in tasks.sample_scene(rng, held_out=True).things} & tasks.HELD_OUT) == 1
    # Every colour and every shape is still seen often.
    assert all(sum(pair[0] == colour for pair in tasks.SEEN) >= 4 for colour in tasks.COLOURS)
    assert all(sum(pair[1] == shape for pair in tasks.SEEN) >= 7 for shape in tasks.SHAPES)


def test_questions_have_one_right_answer() -> None:
    rng = np.random.default_rng(7)
    said = set()
    for _ in range(300):
        colour = tasks.sample(rng, "colour")
        shape = next(s for s in tasks.SHAPES if s in colour.prompt)
        assert [t.colour for t in colour.scene.things if t.shape == shape] == [colour.answer]
        there = tasks.sample(rng, "is_there")
        asked = next(pair for pair in tasks.PAIRS if " ".join(pair) in there.prompt)
        assert there.answer == ("yes" if asked in {t.pair for t in there.scene.things} else "no")
        said.add(there.answer)
        many = tasks.sample(rng, "objects")
        assert many.answer == ("one", "two", "three")[len(many.scene.things) - 1]
    assert said == {"yes", "no"}


def test_text_answers() -> None:
    rng = np.random.default_rng(8)
    count = tasks.sample(rng, "count", number=12)
    assert "12" in count.prompt
    assert count.answer == "1 2 3 4 5 6 7 8 9 10 11 12"
    repeat = tasks.sample(rng, "repeat", number=40, filler_words=30)
    assert len(repeat.answer.split()) == 40
    assert repeat.prompt.endswith(": " + repeat.answer)
    assert repeat.prompt.startswith("The ")
    turns = tasks.sample(rng, "continue", number=3)
    given = turns.prompt.split()
    whole = given[-6:] + turns.answer.split()
    assert all(whole[i] == whole[i - 3] for i in range(3, len(whole)))


def test_asked_casually_it_is_the_same_question() -> None:
    for task in tasks.TEXT_TASKS:
        prompts = set()
        for seed in range(200):
            example = tasks.sample(np.random.default_rng(seed), task, number=4, casual=True)
            asked = example.answer if task in ("count", "repeat") else ""
            assert all(word in example.prompt for word in asked.split()[-1:])
            prompts.add(example.prompt)
        assert any(prompt[0].islower() for prompt in prompts)
        if task == "count":
            assert example.answer == "1 2 3 4"
            assert {"Count to 4", "count to 4", "Count from 1 to 4", "Count from 1 to 4."} <= prompts


def test_sampling_is_a_function_of_the_seed() -> None:
    for task in tasks.TASKS:
        one, two = (tasks.sample(np.random.default_rng(9), task) for _ in range(2))
        assert (one.prompt, one.answer) == (two.prompt, two.answer)
        if one.image:
            assert np.array_equal(np.asarray(one.image), np.asarray(two.image))
    with pytest.raises(ValueError, match="unknown task"):
        tasks.sample(np.random.default_rng(9), "sing")


def test_checkpoint_dimensions_differ_where_a_mistake_could_hide() -> None:
    text = json.loads((MODEL / "config.json").read_text())["text_config"]
    assert text["linear_key_head_dim"] != text["linear_value_head_dim"]
    assert text["linear_num_value_heads"] == 2 * text["linear_num_key_heads"]
    assert (MODEL / "model.safetensors").stat().st_size <= 8_000_000


def test_tokenizer_takes_any_text() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = json.loads((MODEL / "config.json").read_text())
    assert tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.token_to_id("<|im_end|>") == config["text_config"]["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
    text = "图片里有什么？ 😀 naïve\n\ttabs"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for word in [*tasks.WORDS, *tasks.COLOURS, *tasks.SHAPES]:
        assert len(tokenizer.encode(" " + word).ids) == 1


def test_golden_answers_are_complete() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    golden = json.loads((DATA / "golden" / "golden.json").read_text(encoding="utf-8"))
    prompts = golden["prompts"]
    assert len(prompts) == 64
    assert len({p["name"] for p in prompts}) == 64
    assert sum(p["image"] is not None for p in prompts) >= 32
    assert {p["grid"] for p in prompts} == {None, "square", "wide"}
    assert sum(40 <= len(p["tokens"]) <= 130 for p in prompts) >= 10
    lengths = {len(p["prompt_tokens"]) for p in prompts}
    for edge in (32, 64, 128, 256, 512):
        assert edge in lengths
        assert edge - 1 in lengths
    for p in prompts:
        assert len(p["margins"]) == len(p["tokens"])
        assert min(p["margins"]) > 0
        assert tokenizer.decode(p["tokens"]) == p["text"]
        assert p["tokens"][-1] == tokenizer.token_to_id("<|im_end|>")
        pads = p["prompt_tokens"].count(tokenizer.token_to_id("<|image_pad|>"))
        assert pads == {None: 0, "square": 16, "wide": 24}[p["grid"]]
        if p["image"]:
            assert (DATA / "golden" / p["image"]).exists()
