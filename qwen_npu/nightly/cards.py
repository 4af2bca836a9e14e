"""The NPU cards of this machine, and the lease that keeps two items off one card."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "QWEN_NPU_CARDS"
"""Names the cards ("0,1"; "" for none) where /dev does not show them, such as in a container."""


def list_cards() -> list[int]:
    """The numbers of the NPU cards: what QWEN_NPU_CARDS says, else /dev/davinci0, /dev/davinci1, ..."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [int(part) for part in named.split(",") if part.strip().isdigit()]
    found = (re.fullmatch(r"davinci(\d+)", path.name) for path in Path("/dev").glob("davinci*"))
    return sorted(int(match.group(1)) for match in found if match)


@dataclass
class Lease:
    """A card held by this process: an exclusive lock on a file that all users of the machine share."""

    card: int
    descriptor: int

    def release(self) -> None:
        os.close(self.descriptor)


def lease_card(cards: list[int]) -> Lease | None:
    """The first card that nobody holds, or None. The lock goes with the last process that inherited it."""
    folder = Path(tempfile.gettempdir()) / "qwen-npu-cards"
    folder.mkdir(mode=0o1777, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it
        folder.chmod(0o1777)
    for card in cards:
        path = folder / f"card-{card}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        return Lease(card, descriptor)
    return None


def used_memory_percent(card: int) -> float | None:
    """How full the card's memory is, as the vendor's npu-smi reports it; None where there is no such tool or figure."""
    try:
        text = subprocess.run(
            ["npu-smi", "info", "-t", "usages", "-i", str(card)], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"(?:HBM|DDR|Memory) Usage Rate\s*\(%\)\s*:\s*([\d.]+)", text)
    return float(match.group(1)) if match else None
