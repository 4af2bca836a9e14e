"""`build --target mslite-cpu` and `convert` with the real 2.0.0 converter: every graph, its tensors, and prefill in
several chunks against the token recurrence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_npu.build import build
from qwen_npu.convert import Kind, convert, in_worker
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.driver.worker import WorkerDriver
from qwen_npu.runtime.stages import open_stage, run_prefill
from tests.integration.real_mslite.environment import Unavailable, interpreter
from tests.unit.graphs.checkpoints import IMAGE_TOKEN, random_checkpoint
from tests.unit.graphs.runner import GraphRunner

pytestmark = pytest.mark.full

SIZES: dict[str, Any] = {"capacity": 112, "buckets": (16, 100), "grids": [(2, 4)]}


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return interpreter()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("kind", ["MINDIR", "MINDIR_LITE"])
def test_every_graph_converts_and_prefill_in_chunks_is_right(python: Path, tmp_path: Path, kind: Kind) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint")
    bundle = build(checkpoint, tmp_path / "plain", "mslite-cpu", **SIZES).bundle
    own = build(checkpoint, tmp_path / "own", "emulator", **{**SIZES, "drafts": 0}).bundle
    worker = WorkerDriver(python, kind=kind)
    driver = RecordingDriver(worker)
    try:
        wanted = ("vision", "prefill-", "decode", "peek") if kind == "MINDIR" else ("prefill-", "decode_fixed")
        done = convert(
            bundle.directory, in_worker(python, kind), version=worker.version, kind=kind, graphs=wanted, check=worker
        )
        assert len(done) == (7 if kind == "MINDIR" else 3)
        assert all("as in the ONNX file" in item.checked for item in done)
        rng = np.random.default_rng(0)
        for bucket, length in ((16, 16), (16, 9), (100, 100), (100, 71)):
            ids = rng.integers(0, 100, length)
            ids[3:5] = IMAGE_TOKEN
            embeds = rng.normal(size=(2, bundle.spec.hidden)).astype(np.float32)
            positions = np.tile(np.arange(length), (4, 1))[:, None]
            contract = bundle.contract("prefill", numerics="f32")
            path = bundle.path("prefill", numerics="f32", tokens=bucket)
            with open_stage(driver, path, "prefill", contract) as model:
                found = run_prefill(driver, model, ids, positions, embeds, bucket)
            runner = GraphRunner(own)
            logits = runner.prefill(ids, positions[1:, 0], embeds)
            near(found.logits[0, -1], logits)
            near(found.states.conv, runner.states["conv"])
            near(found.states.recurrent, runner.states["recurrent"])
            near(found.states.kv[:, :, :, bucket - length :], runner.states["kv"])
    finally:
        worker.close()


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-4 * max(1.0, float(np.abs(wanted).max()))
