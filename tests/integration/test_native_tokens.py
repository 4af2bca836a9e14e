"""The answer of a session is the same with the native kernel in its graphs and on their function bodies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import qwen_npu.emulator as emulator
from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.data import image_path, tiny_checkpoint
from qwen_npu.runtime.session import Session

pytest.importorskip("qwen_npu_kernels")

CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(CHECKPOINT)


def answer(bundle: Bundle, native: bool, numerics: str, speculate: int) -> tuple[int, ...]:
    with (
        emulator.configure(native=native),
        Session(bundle, driver="emulator", numerics=numerics, speculate=speculate) as session,  # type: ignore[arg-type]
    ):
        return session.generate(
            "Describe the image.", image_path("two_shapes"), max_new_tokens=16, ignore_eos=True
        ).tokens


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("numerics", ["f32", "device"])
def test_tokens_with_and_without_the_native_kernel(bundle: Bundle, numerics: str, speculate: int) -> None:
    native = answer(bundle, True, numerics, speculate)
    assert len(native) == 16
    assert native == answer(bundle, False, numerics, speculate)
