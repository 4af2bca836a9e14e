"""The plain form of the graphs, which the real MindSpore Lite runs, answers as transformers does, in f32."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_npu.bundle import open_bundle
from qwen_npu.data import tiny_checkpoint
from qwen_npu.runtime.session import Session
from tests.integration.real_mslite.lowered import lowered
from tests.integration.real_mslite.prompts import BUCKETS, CAPACITY, PROMPTS, STEPS, answers

CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())


@pytest.mark.full
def test_plain_graphs_give_every_token_of_transformers(reference: Callable[[Path], Any], tmp_path: Path) -> None:
    bundle = open_bundle(CHECKPOINT, capacity=CAPACITY, buckets=BUCKETS)
    plain = lowered(bundle, tmp_path / "plain")
    oracle = reference(CHECKPOINT)
    wanted = []
    with Session(bundle, driver="emulator") as session:
        feeds = [session.inputs.feed(prompt, image) for prompt, image in PROMPTS]
    for feed in feeds:
        seen = feed.image
        pixels = None if seen is None else np.asarray(seen.pixel_values, np.float32)
        logits = oracle.prefill(feed.tokens, pixels, None if seen is None else seen.grid)[-1]
        tokens = [int(logits.argmax())]
        while len(tokens) < STEPS:
            tokens.append(int(oracle.step(tokens[-1]).argmax()))
        wanted.append(tuple(tokens))
    assert answers(plain, "emulator", "fixed") == wanted
    assert answers(plain, "emulator", "growing") == wanted
