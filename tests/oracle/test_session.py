"""The whole runtime against transformers: 48 prompts drawn afresh, resident and host, growing and fixed, both numerics.

f32: every token equal in free running. device: compared teacher-forced, the same choice at every step whose margin in
the oracle exceeds 0.25, logits within cosine 0.999 and NRMSE 0.02; free running may part only at a smaller margin.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen_npu.bundle import open_bundle
from qwen_npu.data import tiny_checkpoint
from qwen_npu.runtime.session import Session

pytest.importorskip("torch")
pytest.importorskip("transformers")

CHECKPOINT = tiny_checkpoint()
MARGIN = 0.25
MAX_NEW_TOKENS = 40
SEED = 20
BUCKETS = (32, 64, 128, 256, 512)
WAYS = list(itertools.product(("resident", "host"), ("growing", "fixed")))


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    image: Any
    answer: list[int]
    logits: np.ndarray  # [steps, vocab]

    @property
    def margins(self) -> np.ndarray:
        best = np.sort(self.logits, axis=-1)
        return best[:, -1] - best[:, -2]


def load(name: str) -> Any:
    """A module of the model's own directory, which is no package."""
    spec = importlib.util.spec_from_file_location(name, CHECKPOINT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tasks = load("tasks")
    oracle = load("evaluate").Transformers(CHECKPOINT)
    rng = np.random.default_rng(SEED)
    drawn = [
        tasks.sample(
            rng, tasks.PICTURE_TASKS[i % 4], ("square", "wide")[i // 4 % 2], filler_words=(0, 0, 20, 60)[i % 4]
        )
        for i in range(32)
    ]
    encoded = [(oracle.encode(example.prompt, example.image), example.image) for example in drawn]
    edges = [edge + off for edge in BUCKETS[:4] for off in (-1, 0, 1)] + [BUCKETS[-1] - 1, BUCKETS[-1], 20, 400]
    for i, length in enumerate(edges):
        example = tasks.sample(rng, "count", number=15 + i)  # long answers: many steps to compare
        encoded.append((lengthened(oracle, tasks, rng, example.prompt, length), None))
    made = []
    for ids, image in encoded:
        out = oracle.generate([ids], [image])
        answer = out.sequences[0, len(ids) :].tolist()[:MAX_NEW_TOKENS]
        made.append(Prompt(ids, image, answer, np.stack([step[0].numpy() for step in out.logits])[:MAX_NEW_TOKENS]))
    assert len(made) == 48
    return made


def lengthened(oracle: Any, tasks: Any, rng: np.random.Generator, prompt: str, length: int) -> list[int]:
    """The prompt's ids with filler before the text, cut so that there are exactly `length` of them."""
    ids = oracle.encode(prompt, None)
    if len(ids) >= length:
        return ids[:3] + ids[3 + len(ids) - length :]
    filler = oracle.tokenizer(tasks.filler(rng, 2 * length))["input_ids"]
    at = len(oracle.encode("", None)) - 4
    return ids[:at] + filler[: length - len(ids)] + ids[at:]


@pytest.fixture(scope="module")
def bundle() -> Any:
    return open_bundle(CHECKPOINT)


def run(bundle: Any, prompt: Prompt, state: str, kv: str, numerics: str, **options: Any) -> Any:
    with Session(bundle, driver="emulator", state=state, kv=kv, numerics=numerics) as session:
        return session.generate(prompt.tokens, prompt.image, max_new_tokens=MAX_NEW_TOKENS, logits=True, **options)


def all_ways(bundle: Any, prompt: Prompt, numerics: str) -> Any:
    """One result, after it was seen that resident and host are equal bit for bit, and the tokens of all ways equal."""
    results = {way: run(bundle, prompt, *way, numerics) for way in WAYS}
    for kv in ("growing", "fixed"):
        resident, host = results["resident", kv], results["host", kv]
        for ours, theirs in zip(resident.steps, host.steps, strict=True):
            assert (ours.logits is None) == (theirs.logits is None)
            if ours.logits is not None:
                assert np.array_equal(ours.logits, theirs.logits)
    assert len({result.tokens for result in results.values()}) == 1
    return results["resident", "fixed"]


def test_f32_gives_every_token_of_transformers_in_all_ways(bundle, prompts):
    for prompt in prompts:
        assert list(all_ways(bundle, prompt, "f32").tokens) == prompt.answer


def test_device_parts_from_the_oracle_at_small_margins_only_in_all_ways(bundle, prompts):
    for prompt in prompts:
        tokens = all_ways(bundle, prompt, "device").tokens
        for step, (ours, oracle) in enumerate(itertools.zip_longest(tokens, prompt.answer)):
            if ours != oracle:
                assert prompt.margins[step] <= MARGIN
                break


def test_device_follows_the_oracle_wherever_its_margin_is_clear(bundle, prompts):
    checked = 0
    for prompt in prompts:
        result = run(bundle, prompt, "resident", "fixed", "device", force_tokens=prompt.answer)
        steps = [step for step in result.steps if step.token is not None]
        assert len(steps) == len(prompt.answer)
        for step, oracle, margin, token in zip(steps, prompt.logits, prompt.margins, prompt.answer, strict=True):
            ours = step.logits.astype(np.float32)
            cosine = ours @ oracle / np.linalg.norm(ours) / np.linalg.norm(oracle)
            nrmse = np.sqrt(np.mean((ours - oracle) ** 2) / np.mean(oracle**2))
            assert cosine >= 0.999
            assert nrmse <= 0.02
            if margin > MARGIN:
                assert step.token == token
                checked += 1
    assert checked > 500


def test_pictures_and_positions_are_those_of_transformers(bundle, prompts):
    import torch

    oracle = sys.modules["evaluate"].Transformers(CHECKPOINT)
    from qwen_npu.runtime.inputs import InputProcessor

    inputs = InputProcessor(bundle.checkpoint, bundle.spec, bundle.grids)
    for prompt in prompts[:8]:
        feed = inputs.feed(prompt.tokens, prompt.image)
        theirs = oracle.processor([prompt.image], return_tensors="np")
        assert np.array_equal(feed.image.pixel_values, theirs["pixel_values"])
        ids = torch.tensor([prompt.tokens])
        positions, delta = oracle.model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == bundle.spec.image_token).int(),
            image_grid_thw=torch.from_numpy(np.asarray(theirs["image_grid_thw"])),
        )
        assert np.array_equal(feed.positions[1:], positions.numpy()[-3:])
        assert feed.delta == int(delta)


def test_the_chat_template_gives_transformers_ids(bundle):
    tasks, oracle = sys.modules["tasks"], sys.modules["evaluate"].Transformers(CHECKPOINT)
    from qwen_npu.runtime.inputs import InputProcessor

    inputs = InputProcessor(bundle.checkpoint, bundle.spec, bundle.grids)
    rng = np.random.default_rng(SEED + 1)
    for task in tasks.TASKS:
        example = tasks.sample(rng, task, filler_words=20)
        assert inputs.feed(example.prompt, example.image).tokens.tolist() == oracle.encode(
            example.prompt, example.image
        )
    for text in ("数到五。", "Count 🙂 1–3", "a\nb\t c"):
        assert inputs.feed(text).tokens.tolist() == oracle.encode(text, None)
