"""Samples of a card in a ledger, from what npu-smi prints."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from qwen_npu.driver.npu_smi import MIB, parse_usages, sampled, usages_text
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger, open_ledger

TEXT = """
    NPU ID                         : 3
    Chip Count                     : 2
    DDR Capacity(MB)               : 44280
    DDR Usage Rate(%)              : 4
    Aicore Usage Rate(%)           : 71
    Chip ID                        : 0
    DDR Capacity(MB)               : 43693
    DDR Usage Rate(%)              : 50
    Aicore Usage Rate(%)           : 0
    Chip ID                        : 1
"""


def test_two_devices_of_a_card() -> None:
    first, second = parse_usages(TEXT)
    assert (first.memory_bytes, first.memory_percent, first.aicore_percent) == (44280 * MIB, 4.0, 71.0)
    assert (second.memory_bytes, second.memory_percent, second.aicore_percent) == (43693 * MIB, 50.0, 0.0)
    assert parse_usages(TEXT.replace("Aicore", "Vector"))[0].aicore_percent is None
    assert parse_usages("DDR Capacity(MB) : 44280") == parse_usages("") == []


def test_samples_come_into_the_ledger_from_the_callers_thread(tmp_path: Path) -> None:
    twice = threading.Event()
    asked: list[int] = []

    def ask(card: int) -> str:
        asked.append(card)
        if len(asked) == 2:
            twice.set()
        return TEXT

    path = tmp_path / "run.ledger"
    ledger = Ledger(path)
    with sampled(ledger, 3, period_s=0.01, ask=ask):
        assert twice.wait(30)
        ledger(Event("step", 1, stage="decode", step=0))
    ledger.close()
    with open_ledger(path) as held:
        found = list(held.events(kind="sample"))
    assert len(found) == len(asked) >= 2
    detail = found[0].detail
    assert detail is not None
    assert (detail["card"], detail["devices"][1]["memory_percent"]) == (3, 50.0)


def test_a_card_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usages_text(0) == ""
    events: list[Event] = []
    with sampled(events.append, 0, period_s=0.01):
        pass
    assert events == []
