"""The product's own session on the real MindSpore Lite 2.0.0: 12 prompts, growing and fixed, MINDIR and .ms, against
the emulator on the same graphs and against transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.data import tiny_checkpoint
from qwen_npu.driver.protocol import Driver
from qwen_npu.driver.worker import Kind, WorkerDriver
from qwen_npu.errors import DriverError
from qwen_npu.runtime.session import Session
from tests.integration.real_mslite.environment import Unavailable, interpreter
from tests.integration.real_mslite.lowered import lowered

pytestmark = pytest.mark.full

CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
STEPS = 33
"""The first token comes from prefill, 32 from decode."""
CAPACITY = 128
BUCKETS = (32, 64)
WAYS: list[tuple[str, Kind]] = [(kv, kind) for kv in ("growing", "fixed") for kind in ("MINDIR", "MINDIR_LITE")]
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
def plain(bundle: Bundle, python: Path) -> Bundle:
    return lowered(bundle, python)


def answers(bundle: Bundle, driver: str | Driver, kv: str) -> list[tuple[int, ...]]:
    with Session(bundle, device="cpu", driver=driver, state="host", kv=kv, numerics="f32") as session:  # type: ignore[arg-type]
        return [
            session.generate(prompt, image, max_new_tokens=STEPS, ignore_eos=True).tokens for prompt, image in PROMPTS
        ]


@pytest.fixture(scope="module")
def transformers_answers(bundle: Bundle) -> list[tuple[int, ...]]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracle.conftest import Reference

    reference = Reference(CHECKPOINT)
    found = []
    with Session(bundle, driver="emulator") as session:
        feeds = [session.inputs.feed(prompt, image) for prompt, image in PROMPTS]
    for feed in feeds:
        seen = feed.image
        pixels = None if seen is None else np.asarray(seen.pixel_values, np.float32)
        logits = reference.prefill(feed.tokens, pixels, None if seen is None else seen.grid)[-1]
        tokens = [int(logits.argmax())]
        while len(tokens) < STEPS:
            tokens.append(int(reference.step(tokens[-1]).argmax()))
        found.append(tuple(tokens))
    return found


@pytest.fixture(scope="module")
def worker(python: Path, request: pytest.FixtureRequest) -> Iterator[WorkerDriver]:
    driver = WorkerDriver(python, kind=request.param)
    yield driver
    driver.close()


@pytest.mark.parametrize(("kv", "worker"), WAYS, indirect=["worker"], ids=[f"{kv}-{kind}" for kv, kind in WAYS])
def test_real_package_answers_as_the_emulator_and_transformers(
    kv: str, worker: WorkerDriver, plain: Bundle, transformers_answers: list[tuple[int, ...]]
) -> None:
    real = answers(plain, worker, kv)
    assert worker.version == "2.0.0"
    assert [len(tokens) for tokens in real] == [STEPS] * len(PROMPTS)
    assert real == answers(plain, "emulator", kv)
    assert real == transformers_answers


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
