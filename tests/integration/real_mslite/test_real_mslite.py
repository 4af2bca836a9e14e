"""The product's own session on the real MindSpore Lite 2.0.0: 12 prompts, growing and fixed, MINDIR and .ms, against
the emulator on the same graphs. That the emulator answers on them as transformers does, tests/oracle shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.data import tiny_checkpoint
from qwen_npu.driver.worker import Kind, WorkerDriver
from qwen_npu.errors import DriverError
from tests.integration.real_mslite.environment import Unavailable, interpreter
from tests.integration.real_mslite.lowered import converted
from tests.integration.real_mslite.prompts import BUCKETS, CAPACITY, PROMPTS, STEPS, answers

pytestmark = pytest.mark.full

CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
WAYS: list[tuple[str, Kind]] = [(kv, kind) for kv in ("growing", "fixed") for kind in ("MINDIR", "MINDIR_LITE")]


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return interpreter()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(CHECKPOINT, capacity=CAPACITY, buckets=BUCKETS)


@pytest.fixture(scope="module")
def plain(bundle: Bundle, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return converted(bundle, python, tmp_path_factory.mktemp("real") / "plain")


@pytest.fixture(scope="module")
def worker(python: Path, request: pytest.FixtureRequest) -> Iterator[WorkerDriver]:
    driver = WorkerDriver(python, kind=request.param)
    yield driver
    driver.close()


@pytest.mark.parametrize(("kv", "worker"), WAYS, indirect=["worker"], ids=[f"{kv}-{kind}" for kv, kind in WAYS])
def test_real_package_answers_as_the_emulator(kv: str, worker: WorkerDriver, plain: Bundle) -> None:
    real = answers(plain, worker, kv)
    assert worker.version == "2.0.0"
    assert [len(tokens) for tokens in real] == [STEPS] * len(PROMPTS)
    assert real == answers(plain, "emulator", kv)


def test_plain_graphs_answer_as_the_bundles_own(bundle: Bundle, plain: Bundle) -> None:
    assert answers(plain, "emulator", "fixed") == answers(bundle, "emulator", "fixed")


@pytest.mark.parametrize("worker", ["MINDIR"], indirect=True)
def test_worker_reports_the_vendors_error(worker: WorkerDriver, plain: Bundle, tmp_path: Path) -> None:
    damaged = tmp_path / "graph.mindir"
    damaged.write_bytes(b"no model")
    with pytest.raises(DriverError, match="build_from_file failed! Error is Common error code"):
        worker.load(damaged.with_suffix(".onnx"), "vision")
    assert worker.load(plain.path("vision", numerics="f32"), "vision").inputs[0].name == "pixel_values"


def test_worker_that_dies_is_an_error(python: Path) -> None:
    driver = WorkerDriver(python)
    driver._process.kill()
    driver._process.wait()
    with pytest.raises(DriverError, match="worker failed in hello"):
        driver.call("hello")
    driver.close()
