"""What the vendor's `npu-smi` tells of a card while something runs on it: one event a sample, for the ledger.

Samples are taken by a thread and given to the sink at the end of the block, by the caller's own thread: a ledger has
one writer.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from qwen_npu.ledger.events import Event, EventSink, now_ns

MIB = 2**20
PERIOD_S = 1.0
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Usage:
    """One device of a card: memory in bytes, shares in percent; `aicore_percent` is None where it is not told."""

    memory_bytes: int
    memory_percent: float
    aicore_percent: float | None


def usages_text(card: int) -> str:
    """What `npu-smi info -t usages` says of a card, "" where it cannot be asked."""
    command = ["npu-smi", "info", "-t", "usages", "-i", str(card)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_usages(text: str) -> list[Usage]:
    """The devices of a card, in their order; nothing where the figures do not make pairs."""
    sizes = re.findall(r"(?:HBM|DDR) Capacity\s*\(MB\)\s*:\s*(\d+)", text)
    shares = re.findall(r"(?:HBM|DDR) Usage Rate\s*\(%\)\s*:\s*([\d.]+)", text)
    cores = re.findall(r"Aicore Usage Rate\s*\(%\)\s*:\s*([\d.]+)", text)
    if len(sizes) != len(shares):
        return []
    busy = [float(value) for value in cores] if len(cores) == len(sizes) else [None] * len(sizes)
    return [Usage(int(size) * MIB, float(share), core) for size, share, core in zip(sizes, shares, busy, strict=True)]


@contextmanager
def sampled(
    sink: EventSink, card: int, *, period_s: float = PERIOD_S, ask: Callable[[int], str] = usages_text
) -> Iterator[None]:
    """Samples a card while the block runs; a card that cannot be asked gives no events."""
    events: list[Event] = []
    over = threading.Event()

    def sample() -> None:
        while True:
            start = now_ns()
            devices = parse_usages(ask(card))
            if devices:
                detail = {"card": card, "devices": [asdict(usage) for usage in devices]}
                events.append(Event("sample", start, now_ns() - start, detail=detail))
            if over.wait(period_s):
                return

    thread = threading.Thread(target=sample, name="npu-smi", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for event in events:
            sink(event)
