"""What the runner says of an item: the kinds of verdict, and the file that holds one.

Papermill's metadata plays no part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from qwen_npu.nightly.files import read_json, write_json

SCHEMA = 1


class Verdict(str, Enum):
    """PASS; FAIL (assertion or tolerance); ERROR (exception, or a notebook that cannot be run); TIMEOUT (budget used
    up); DEAD_KERNEL; INFRA (kernel does not start, card busy, disk full); SKIPPED (no device); INCOMPLETE (sentinel or
    a record missing, or the run was interrupted)."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"
    DEAD_KERNEL = "DEAD_KERNEL"
    INFRA = "INFRA"
    SKIPPED = "SKIPPED"
    INCOMPLETE = "INCOMPLETE"

    @property
    def fine(self) -> bool:
        return self in {Verdict.PASS, Verdict.SKIPPED}


@dataclass
class ItemResult:
    """The verdict on one item. Times in seconds; `environment` says what ran it; `files` are relative to the report."""

    item: str
    notebook: str
    verdict: Verdict
    reason: str
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    started: str = ""
    wall_s: float = 0.0
    kernel_start_s: float | None = None
    cells: list[dict[str, Any]] = field(default_factory=list)
    budget_s: float = 0.0
    last_cell: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    comparison: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log_tail: str = ""
    attempts: int = 1
    worker: str = ""
    peak_device_bytes: int | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["verdict"] = self.verdict.value
        return {"schema": SCHEMA, **facts}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> ItemResult:
        known = {name: value for name, value in facts.items() if name in cls.__dataclass_fields__}
        known["verdict"] = Verdict(facts["verdict"])
        return cls(**known)

    def write(self, folder: Path) -> None:
        """Writes verdict.json, whole or not at all. The file exists only once the verdict is final."""
        write_json(folder / "verdict.json", self.to_json())


def read_verdict(folder: Path) -> ItemResult | None:
    """The final verdict in an item's folder, or None where there is none of this schema."""
    facts = read_json(folder / "verdict.json")
    if facts is None or facts.get("schema") != SCHEMA:
        return None
    try:
        return ItemResult.from_json(facts)
    except (KeyError, TypeError, ValueError):
        return None


@dataclass
class Outcome:
    """A run: its results in the suite's order, and where the report lies."""

    suite: str
    out: Path
    index: Path
    results: list[ItemResult]
    interrupted: str = ""

    @property
    def fine(self) -> bool:
        return not self.interrupted and all(result.verdict.fine for result in self.results)

    @property
    def exit_code(self) -> int:
        """0 only if all is PASS, or SKIPPED as declared."""
        return 0 if self.fine else 1

    @property
    def counts(self) -> dict[str, int]:
        return count(self.results)


def count(results: Sequence[ItemResult]) -> dict[str, int]:
    """How often each verdict occurs, in the order of `Verdict`."""
    have = Counter(result.verdict for result in results)
    return {verdict.value: have[verdict] for verdict in Verdict if have[verdict]}
