"""Session on the emulated device: what the emulator sees of it, and what a single state buffer would do."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_npu.emulator as mslite
from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.contract import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS
from qwen_npu.data import image_path, tiny_checkpoint
from qwen_npu.emulator import instrument
from qwen_npu.errors import DeviceMemoryError, HazardError
from qwen_npu.ledger.events import Event
from qwen_npu.runtime import stages
from qwen_npu.runtime.session import Session
from qwen_npu.runtime.states import ResidentStates

CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
DEVICE = "ascend:3"
STEPS = 6


@pytest.fixture(autouse=True)
def device_is_empty() -> None:
    """The traceback of an error that a test expected holds what its frames held."""
    gc.collect()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(CHECKPOINT)


class OneBuffer(ResidentStates):
    """The fault: each state is input and output of every step."""

    def outputs(self) -> list[stages.Tensor]:
        return list(self._live)


def answer(bundle: Bundle, kv: str = "fixed") -> tuple[int, ...]:
    with Session(bundle, device=DEVICE, driver="emulator", kv=kv) as session:  # type: ignore[arg-type]
        image = image_path("two_shapes")
        return session.generate("Describe the image.", image, max_new_tokens=STEPS, ignore_eos=True).tokens


def test_corrupt_changes_the_answer_of_a_single_buffer_and_not_of_the_pair(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = answer(bundle)
    with mslite.configure(policy="corrupt"):
        assert answer(bundle) == right
        monkeypatch.setattr(stages, "ResidentStates", OneBuffer)
        wrong = answer(bundle)
    assert wrong[0] == right[0], "prefill's token"
    assert wrong != right
    with pytest.raises(HazardError) as caught:
        answer(bundle)
    assert "read as past_conv_states and written as present_conv_states" in str(caught.value)
    with mslite.configure(policy="record"):
        seen: list[Event] = []
        unsubscribe = instrument.subscribe(seen.append)
        answer(bundle)
        unsubscribe()
    hazards = [event for event in seen if event.kind == "hazard"]
    assert len(hazards) == 3 * (STEPS - 1), "three states, each step"
    assert {(event.detail or {})["hazard"] for event in hazards} == {"write_after_read"}


@pytest.mark.parametrize("kv", ["fixed", "growing"])
def test_resident_steps_move_the_integers_up_and_the_logits_down(bundle: Bundle, kv: str) -> None:
    seen: list[Event] = []
    with Session(bundle, device=DEVICE, driver="emulator", kv=kv) as session:  # type: ignore[arg-type]
        run = session.stream("Describe the image.", max_new_tokens=STEPS, ignore_eos=True)
        decoded = 0
        unsubscribe = instrument.subscribe(seen.append)
        for step in run:
            if step.stage == "decode":
                decoded += 1
                moved = {
                    kind: {(event.detail or {})["name"]: event.nbytes for event in seen if event.kind == kind}
                    for kind in ("upload", "download")
                }
                assert set(moved["upload"]) == {INPUT_IDS, ATTENTION_MASK, POSITION_IDS}
                assert set(moved["download"]) == {LOGITS}
                assert sum(moved["upload"].values()) == step.host_to_device_bytes
                assert sum(moved["download"].values()) == step.device_to_host_bytes
                allocated = [event for event in seen if event.kind == "allocate"]
                named = [event for event in allocated if (event.detail or {})["what"] == "tensor"]
                assert sum(event.nbytes for event in named) == step.allocated_bytes
                if decoded > 1:
                    assert len(allocated) == (kv == "growing")
            assert not [event for event in seen if event.kind == "hazard"]
            seen.clear()
        unsubscribe()
    assert decoded == STEPS - 1
    assert instrument.memory(DEVICE).live_bytes == 0


def test_states_stay_where_they_are(bundle: Bundle) -> None:
    """Two addresses a state, in turn, and what lies there is what the host path has."""
    with Session(bundle, device=DEVICE, driver="emulator", numerics="f32") as session:
        run = session.stream("Describe the image.", max_new_tokens=STEPS, ignore_eos=True)
        addresses = [
            [block.address for block in instrument.memory(DEVICE).blocks] for step in run if step.stage == "decode"
        ]
        assert addresses == [addresses[0]] * (STEPS - 1)
        resident = session.read_states()
    with Session(bundle, device=DEVICE, driver="emulator", numerics="f32", state="host") as session:
        session.generate("Describe the image.", max_new_tokens=STEPS, ignore_eos=True)
        host = session.read_states()
    for ours, theirs in zip(resident, host, strict=True):
        assert np.array_equal(ours, theirs)


def test_weights_and_states_are_device_memory_and_too_small_a_device_says_so(bundle: Bundle) -> None:
    instrument.reset_peak(DEVICE)
    answer(bundle)
    peak_bytes = instrument.memory(DEVICE).peak_bytes
    assert peak_bytes > bundle.spec.recurrent_bytes()
    with mslite.configure(capacity_bytes=peak_bytes):
        answer(bundle)
    with mslite.configure(capacity_bytes=peak_bytes - 1), pytest.raises(DeviceMemoryError) as caught:
        answer(bundle)
    assert "weights decode_fixed-device.onnx" in str(caught.value)
    assert "runtime/states.py" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "growing"}, {"speculate": 3}, {"state": "host"}, {"peek": True}],
    ids=lambda options: "-".join(options) or "default",
)
def test_an_answer_that_finds_no_room_leaves_nothing_behind(bundle: Bundle, options: dict[str, Any]) -> None:
    """A notebook keeps the last error with its traceback; the next try needs the room all the same."""

    def ask() -> None:
        with Session(bundle, device=DEVICE, driver="emulator", **options) as session:
            session.generate("Describe this image.", image_path("two_shapes"), max_new_tokens=24, ignore_eos=True)

    instrument.reset_peak(DEVICE)
    ask()
    peak_bytes = instrument.memory(DEVICE).peak_bytes
    errors = []
    gc.disable()
    try:
        for capacity_bytes in np.linspace(200_000, peak_bytes - 1, 12):
            with mslite.configure(capacity_bytes=int(capacity_bytes)), pytest.raises(DeviceMemoryError) as caught:
                ask()
            errors.append(caught.value)
            assert instrument.memory(DEVICE).live_bytes == 0, int(capacity_bytes)
        ask()
    finally:
        gc.enable()
