"""Regressions put into the runtime on purpose: the default suite finds each, and the report's first screen names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen_npu.data import tiny_checkpoint
from qwen_npu.nightly.baseline import accept
from qwen_npu.nightly.runner import run_suite
from qwen_npu.nightly.suite import Suite, load_suite
from qwen_npu.nightly.verdict import Verdict

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not any(tiny_checkpoint().glob("*.safetensors")), reason="the small model is not here"),
]

# what every Python process of the run does before anything else (the fault), and the items of the default suite that
# must find it
SEEDS = {
    "pad_mask_off": (
        """
import numpy as np
from qwen_npu.runtime import stages
padded = stages.left_padded
stages.left_padded = lambda array, bucket, value=0: padded(array, bucket, int(array.ndim == 2 and np.all(array == 1)))
""",
        ("02_prefill",),
    ),
    "kv_off_by_one": (
        """
from qwen_npu.runtime import stages
def one_too_many(self, mask=stages.DecodeStage._next_mask):
    if self.capacity is not None and self.tokens + 1 < self.capacity:
        self._mask[0, self.tokens + 1] = 1
    return mask(self)
stages.DecodeStage._next_mask = one_too_many
""",
        ("04_kv_growth",),
    ),
    "rollback_removed": (
        """
from qwen_npu.runtime import speculative
def keep_all(self, batch, taken, settle=speculative.SpeculativeGroup._settle):
    settle(self, batch, batch.lengths.tolist())
speculative.SpeculativeGroup._settle = keep_all
""",
        ("06_slot_pool",),
    ),
}
FINDERS = sorted({name for _, names in SEEDS.values() for name in names})


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The items that must find a fault, with baselines accepted from a run without any."""
    folder = tmp_path_factory.mktemp("clean")
    suite = load_suite("default").select(ids=FINDERS).model_copy(update={"baselines": folder / "baselines"})
    outcome = run_suite(suite, folder / "out")
    assert outcome.fine, [(result.item, result.reason) for result in outcome.results]
    for result in outcome.results:
        accept(suite.baselines, [result], "a run without fault")
    return suite


def test_the_same_again_is_fine(clean: Suite, tmp_path: Path) -> None:
    outcome = run_suite(clean, tmp_path / "out")
    assert outcome.fine, [(result.item, result.reason) for result in outcome.results]
    assert {row["state"] for result in outcome.results for row in result.comparison} <= {"same", "info"}


@pytest.mark.parametrize("seed", SEEDS)
def test_seeded_regression_is_found(clean: Suite, tmp_path: Path, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, finders = SEEDS[seed]
    (tmp_path / "sitecustomize.py").write_text(fault, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    outcome = run_suite(clean.select(ids=finders), tmp_path / "out")
    verdicts = {result.item: result.verdict for result in outcome.results}
    assert Verdict.FAIL in verdicts.values(), [(result.item, result.reason) for result in outcome.results]
    index = outcome.index.read_text(encoding="utf-8")
    first_screen = index[: index.index("<table")]
    for item, verdict in verdicts.items():
        assert (f">{item}</a>: FAIL" in first_screen) is (verdict is Verdict.FAIL)
