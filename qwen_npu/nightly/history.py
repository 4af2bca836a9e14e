"""Past nights in one SQLite file: verdicts, records, commits; the last good and first bad one; the usual band."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_npu.errors import UsageError
from qwen_npu.nightly.verdict import ItemResult
from qwen_npu.records import DONE

SCHEMA = 1
NIGHTS = 30
BAND = 3.0
"""Half width of the usual band, in robust standard deviations."""
LEAST_FOR_BAND = 5

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, suite TEXT NOT NULL, started TEXT NOT NULL, git_commit TEXT NOT NULL,
    environment TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    run TEXT NOT NULL REFERENCES runs, item TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL,
    wall_s REAL NOT NULL, PRIMARY KEY (run, item));
CREATE TABLE IF NOT EXISTS records (
    run TEXT NOT NULL REFERENCES runs, item TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, unit TEXT NOT NULL,
    kind TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS records_of ON records (item, run);
"""


@dataclass(frozen=True)
class Night:
    """One past verdict on an item."""

    run: str
    started: str
    commit: str
    verdict: str
    reason: str
    wall_s: float


@dataclass(frozen=True)
class Turn:
    """Where an item went bad: the last night it passed (if any) and the first after it that did not."""

    last_good: Night | None
    first_bad: Night


def _refuse_other_files(path: Path) -> None:
    """Other files stay as they are: a ledger and another program's database are SQLite, too."""
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"meta", "runs", "verdicts", "records"} <= tables:
        raise UsageError(
            f"{path} is no history: it has the tables {sorted(tables)}", expected="a new file, or a history"
        )


class History:
    """The nights in `path`; made where it is missing.

    Raises:
        UsageError: not a history file, or of another schema, or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _refuse_other_files(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=30.0)
            with self._connection:
                self._connection.executescript(_TABLES)
                self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"the history {path} cannot be used: {error}", expected="a SQLite file we can write"
            ) from error
        if found != str(SCHEMA):
            self._connection.close()
            raise UsageError(f"the history {path} has schema {found}", expected=f"schema {SCHEMA}")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self, run: str, suite: str, started: str, environment: dict[str, Any], results: Sequence[ItemResult]
    ) -> None:
        """Adds a night, or the rest of one that was taken up again. All or nothing."""
        with self._connection as connection:
            connection.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)",
                (run, suite, started, environment.get("commit", ""), json.dumps(environment, ensure_ascii=False)),
            )
            for result in results:
                connection.execute(
                    "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?)",
                    (run, result.item, result.verdict.value, result.reason, result.wall_s),
                )
                connection.execute("DELETE FROM records WHERE run = ? AND item = ?", (run, result.item))
                connection.executemany(
                    "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (
                            run,
                            result.item,
                            record["name"],
                            json.dumps(record.get("value"), ensure_ascii=False),
                            str(record.get("unit", "")),
                            str(record.get("kind", "exact")),
                        )
                        for record in result.records
                        if record["name"] != DONE
                    ],
                )

    def nights(self, item: str, limit: int = NIGHTS) -> list[Night]:
        """The last `limit` verdicts on an item, oldest first."""
        rows = self._connection.execute(
            "SELECT run, started, git_commit, verdict, reason, wall_s FROM verdicts JOIN runs USING (run) "
            "WHERE item = ? ORDER BY started DESC, runs.rowid DESC LIMIT ?",
            (item, limit),
        ).fetchall()
        return [Night(*row) for row in reversed(rows)]

    def items(self) -> list[str]:
        return [row[0] for row in self._connection.execute("SELECT DISTINCT item FROM verdicts ORDER BY item")]

    def turn(self, item: str) -> Turn | None:
        """Last good and first bad night of an item whose newest verdict is not fine; None for one that is fine.
        Nights that say nothing about the code (INFRA, SKIPPED, INCOMPLETE by interruption) are passed over."""
        first_bad: Night | None = None
        for night in reversed(self.nights(item, limit=100_000)):
            if night.verdict in {"INFRA", "SKIPPED"}:
                continue
            if night.verdict == "PASS":
                return Turn(night, first_bad) if first_bad is not None else None
            first_bad = night
        return Turn(None, first_bad) if first_bad is not None else None

    def records(self, run: str, item: str) -> dict[str, Any]:
        """The records of an item in one night that count (all but info), by name."""
        rows = self._connection.execute(
            "SELECT name, value FROM records WHERE run = ? AND item = ? AND kind <> 'info'", (run, item)
        )
        return {name: json.loads(value) for name, value in rows}

    def band(self, item: str, name: str) -> tuple[float, float] | None:
        """The usual band of an info record over the last passing nights: median +- 3 robust deviations (the median
        absolute deviation times 1.4826), at least 5 % wide either way. None with fewer than five nights."""
        rows = self._connection.execute(
            "SELECT records.value FROM records JOIN runs USING (run) JOIN verdicts ON verdicts.run = records.run "
            "AND verdicts.item = records.item WHERE records.item = ? AND name = ? AND verdict = 'PASS' "
            "ORDER BY started DESC LIMIT ?",
            (item, name, NIGHTS),
        ).fetchall()
        values = [json.loads(row[0]) for row in rows]
        numbers = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if len(numbers) < LEAST_FOR_BAND:
            return None
        middle = statistics.median(numbers)
        spread = 1.4826 * statistics.median(abs(number - middle) for number in numbers)
        half = max(BAND * spread, 0.05 * abs(middle))
        return middle - half, middle + half


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[History | None]:
    """The history in `path`, or None for no path."""
    if path is None:
        yield None
        return
    with History(path) as history:
        yield history
