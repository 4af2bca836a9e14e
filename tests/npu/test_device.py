"""What only the box can show. One command for all of it:

    QWEN_NPU_DEVICE_BUNDLE=DIR pytest -m npu

DIR is a bundle that was built with --target ascend310p and converted. Skipped where the vendor's package or a card is
missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.convert import command_line, compare, find_converter
from qwen_npu.data import image_path
from qwen_npu.doctor import line_of
from qwen_npu.doctor.checks import examine
from qwen_npu.doctor.machine import Machine
from qwen_npu.doctor.probe import probe
from qwen_npu.driver import open_driver, vendor_device_present
from qwen_npu.driver.protocol import Driver
from qwen_npu.runtime.session import Session

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not vendor_device_present(), reason="needs mindspore_lite and /dev/davinciN"),
]

DEVICE = os.environ.get("QWEN_NPU_DEVICE", "ascend:0")
PROMPT, STEPS = "Describe the image.", 16
NEEDED = {"python", "packages", "devices", "driver", "cann", "mindspore lite"}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    named = os.environ.get("QWEN_NPU_DEVICE_BUNDLE")
    if not named:
        pytest.skip("QWEN_NPU_DEVICE_BUNDLE names no converted bundle")
    return open_bundle(named)


@pytest.fixture
def driver() -> Iterator[Driver]:
    opened = open_driver("mindspore_lite", DEVICE)
    yield opened
    opened.close()


def test_doctor_finds_nothing_broken() -> None:
    assert [line for line in examine(Machine()) if line.name in NEEDED and line.status == "fail"] == []


def test_device_does_what_the_emulator_predicts() -> None:
    answers = probe("mindspore_lite", DEVICE, converter=command_line(find_converter(), ascend=True))
    assert [line_of(answer) for answer in answers if answer.verdict == "differs"] == []


def test_converted_graphs_have_their_tensors(bundle: Bundle, driver: Driver) -> None:
    paths = sorted(Path(bundle.directory).glob("*.onnx"))
    converted = [path for path in paths if list(path.parent.glob(f"{path.stem}*.mindir"))]
    assert converted
    for path in converted:
        assert "as in the ONNX file" in compare(path, driver)


@pytest.mark.parametrize("kv", ["fixed", "growing"])
def test_resident_equals_round_trip(bundle: Bundle, kv: str) -> None:
    def tokens(state: str) -> tuple[int, ...]:
        with Session(bundle, device=DEVICE, driver="mindspore_lite", state=state, kv=kv) as session:  # type: ignore[arg-type]
            return session.generate(PROMPT, image_path("two_shapes"), max_new_tokens=STEPS, ignore_eos=True).tokens

    assert tokens("resident") == tokens("host")


def test_resident_steps_move_inputs_and_logits_alone(bundle: Bundle) -> None:
    with Session(bundle, device=DEVICE, driver="mindspore_lite") as session:
        result = session.generate(PROMPT, image_path("two_shapes"), max_new_tokens=STEPS, ignore_eos=True)
    logits = bundle.spec.logits_bytes()
    steps = [step for step in result.steps if step.stage == "decode"]
    assert {step.device_to_host_bytes for step in steps} == {logits}
    assert {step.allocated_bytes for step in steps[1:]} == {0}


def test_device_answers_near_the_emulator(bundle: Bundle) -> None:
    """Teacher-forced with the device's own tokens, on the checkpoint named by QWEN_NPU_DEVICE_CHECKPOINT."""
    checkpoint = os.environ.get("QWEN_NPU_DEVICE_CHECKPOINT")
    if not checkpoint:
        pytest.skip("QWEN_NPU_DEVICE_CHECKPOINT names no checkpoint")
    picture = image_path("two_shapes")

    def logits(
        source: Bundle, driver: str, device: str, forced: tuple[int, ...] | None
    ) -> tuple[list[np.ndarray], tuple[int, ...]]:
        with Session(source, device=device, driver=driver) as session:
            generation = session.stream(
                PROMPT, picture, max_new_tokens=STEPS, ignore_eos=True, force_tokens=forced, want_logits=True
            )
            found = [step.logits for step in generation if step.logits is not None]
            return found, generation.result().tokens

    device, tokens = logits(bundle, "mindspore_lite", DEVICE, None)
    options = {"grids": bundle.grids, "capacity": bundle.capacity, "buckets": bundle.buckets}
    emulated, _ = logits(open_bundle(checkpoint, **options), "emulator", "ascend:0", tokens)
    for found, wanted in zip(device, emulated, strict=True):
        a, b = found.astype(np.float64), wanted.astype(np.float64)
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.999
        assert np.sqrt(((a - b) ** 2).mean() / (b**2).mean()) <= 0.02
