from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import qwen_npu.emulator as mslite
from qwen_npu.emulator import instrument
from qwen_npu.ledger.events import Event

Build = Callable[..., mslite.Model]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with mslite.configure(policy="raise"):
        yield


@pytest.fixture
def events() -> Iterator[list[Event]]:
    gc.collect()  # what earlier tests left in cycles is not to be freed under this one's eyes
    seen: list[Event] = []
    unsubscribe = instrument.subscribe(seen.append)
    yield seen
    unsubscribe()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build(graph: Callable[[Path], Path], device: str = "ascend:0") -> mslite.Model:
        context = mslite.Context()
        target, _, number = device.partition(":")
        context.target = [target]
        if number:
            context.ascend.device_id = int(number)
        model = mslite.Model()
        model.build_from_file(str(graph(tmp_path)), mslite.ModelType.MINDIR, context)
        return model

    return build


def floats(*shape: int, start: float = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
