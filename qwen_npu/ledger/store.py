"""The ledger file: takes events as they happen, keeps them in SQLite, gives them back.

Knows the tables and how they survive a killed process; knows nothing of what events mean beyond the rows they fill:
`allocate` and `free` make a buffer, `step` makes a step, an event's `arrays` make peeks.
A live ledger and a recorded one are read by the same methods.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from qwen_npu.errors import LedgerError
from qwen_npu.ledger.events import Buffer, Event, EventKind, Source

SCHEMA = 1

BATCH_S = 0.05
"""A recording into a file writes what waits this often, also while the recorded program hangs."""
BACKLOG_EVENTS = 8192
"""Nobody lets more events than this wait."""

_ARRAYS_PER_EVENT = 1024
"""The row id of a peek is its event's seq times this plus its place in the event, so that it names its event."""

_EVENT_COLUMNS = ("seq", "t_ns", "dur_ns", "kind", "stage", "step", "buffer", "other", "nbytes", "source", "detail")
_STEP_COLUMNS = (
    "stage",
    "step",
    "token",
    "text",
    "predict_ms",
    "wall_ms",
    "upload_ms",
    "host_to_device_bytes",
    "device_to_host_bytes",
    "allocated_bytes",
    "drafted",
    "accepted",
    "tokens",
)
_BUFFER_FIELDS = frozenset(Buffer._fields)
_FIGURES = _STEP_COLUMNS[2:]
_CELLS = frozenset({int, float, str, type(None)})
"""What a cell holds as it is; lists (of a verify's rows) become JSON."""
_TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT",
    "events": "seq INTEGER PRIMARY KEY, t_ns INTEGER, dur_ns INTEGER, kind TEXT, stage TEXT, step INTEGER, "
    "buffer TEXT, other TEXT, nbytes INTEGER, source TEXT, detail TEXT",
    "buffers": ", ".join(Buffer._fields),
    "steps": ", ".join(_STEP_COLUMNS),
    "peeks": "step, name, dtype, shape, data BLOB",
}


class StepRow(NamedTuple):
    """One row of `steps`: figures of a StepResult. `drafted`, `accepted` and `tokens` belong to verify, else None."""

    seq: int
    stage: str
    step: int
    token: int | None
    text: str
    predict_ms: float
    wall_ms: float
    upload_ms: float
    host_to_device_bytes: int
    device_to_host_bytes: int
    allocated_bytes: int
    drafted: Any = None
    accepted: Any = None
    tokens: Any = None


class Peek(NamedTuple):
    """One array of a peek; `seq` is that of its event."""

    seq: int
    step: int
    name: str
    array: np.ndarray


class Ledger:
    """Takes events (it is an `EventSink`), keeps them, and reads them back.

    Args:
        path: the file to write; a ledger that is already there is replaced, any other file is refused. None keeps
            everything in memory.

    One thread writes; any thread reads, in this process or (of a file) in another, while the run goes on. `close` ends
    the writing, not the reading. An event's `detail` must not be changed after it was given; `arrays` may.

    Raises:
        LedgerError: the file cannot be written, or is something other than a ledger.
    """

    _claimed: Path | None = None  # the file that nobody else records to meanwhile

    def __init__(self, path: str | Path | None = None) -> None:
        if not isinstance(path, (str, Path, type(None))):
            raise LedgerError(f"a ledger in {path!r}", expected="the path of a file, or None for memory")
        self.path = None if path is None else Path(path)
        self._writable = True
        self._lock = threading.RLock()
        self._pending: deque[Event] = deque()  # arrays packed
        self._recent: deque[Event] = deque(maxlen=BACKLOG_EVENTS)  # written, and still here for a live view
        self._next_seq = 0
        self._alive: dict[str, list[int]] = {}
        self._failure: LedgerError | None = None
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None
        self.cache: dict[str, Any] = {}  # what readers keep of it between two questions
        self._connection: sqlite3.Connection | None = None
        if self.path is None:
            self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            self._make_tables(self._connection)
        else:
            with _replacing(self.path):
                self._connection = _create_file(self.path)
                self._make_tables(self._connection)
            self._claimed = self.path.resolve()
            _being_recorded.add(self._claimed)
        self.set_meta("started", time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        self.set_meta("started_ns", time.perf_counter_ns())
        if self.path is not None:
            # A thread of its own writes, so that a recorded step pays for telling only. It knows the ledger weakly: a
            # recording that everybody has forgotten ends.
            arguments = (weakref.ref(self), self._stop)
            self._writer = threading.Thread(target=_write_now_and_then, args=arguments, name="ledger", daemon=True)
            self._writer.start()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        return f"<Ledger {where}: {self.last_seq + 1} events{'' if self._writable else ', read only'}>"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        with _explained(self.path):
            try:
                for table, columns in _TABLES.items():
                    connection.execute(f"CREATE TABLE {table} ({columns})")
                self.set_meta("schema", SCHEMA)
            except BaseException:
                connection.close()
                raise

    def _no_longer_recorded(self) -> None:
        if self._claimed is not None:
            _being_recorded.discard(self._claimed)
            self._claimed = None

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)
        if stop is not None:  # a recording, not a reader of one
            stop.set()
            self._no_longer_recorded()
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # writing

    def __call__(self, event: Event) -> None:
        """Records one event. Its arrays are copied at once, since they may be views of memory that changes."""
        if not self._writable:
            self._refuse_writing(f"a {event.kind} event")
        pending = self._pending
        pending.append(event if event.arrays is None else event._replace(arrays=_packed(event.arrays)))
        if len(pending) > BACKLOG_EVENTS or self._failure is not None:
            self.flush()

    def flush(self) -> None:
        """Writes what waits, so that every reader sees it and a killed process does not lose it.

        Raises:
            LedgerError: it cannot be written (now, or in the background before); nothing of it is lost.
        """
        with self._lock:
            self._write()
            self._failure = None

    def set_meta(self, key: str, value: Any) -> None:
        """Keeps a fact about the whole recording (bundle digest, driver, capacity, ...): anything JSON can hold."""
        if not self._writable:
            self._refuse_writing(f"meta {key!r}")
        with self._lock, _explained(self.path):
            self._open().execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _encode(value)))

    def close(self) -> None:
        """Ends the recording: everything is in one file, which this object opens again when it is asked to read."""
        with self._lock:
            if self._writable:
                self._end_writing()
            elif self.path is not None and self._connection is not None:
                self._connection.close()
                self._connection = None

    def _end_writing(self) -> None:
        self._write()
        self._writable = False
        self._stop.set()
        self._no_longer_recorded()
        if self.path is not None and self._connection is not None:
            with _explained(self.path):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                with suppress(sqlite3.OperationalError):  # while others read it; the file is complete all the same
                    self._connection.execute("PRAGMA journal_mode=DELETE")
                self._connection.close()
            self._connection = None

    def _refuse_writing(self, what: str) -> None:
        raise LedgerError(
            f"{what} came to a ledger that is closed ({self.path or 'in memory'})",
            expected="events only until close()",
            fix="record into a new ledger",
        )

    def _write(self) -> None:
        """Moves the waiting events into the tables, in one transaction. The caller holds the lock."""
        pending = self._pending
        if not pending:
            return
        batch = [pending.popleft() for _ in range(len(pending))]
        connection = self._open()
        rows: list[tuple[Any, ...]] = []
        steps: list[tuple[Any, ...]] = []
        peeks: list[tuple[Any, ...]] = []
        made: dict[int, list[Any]] = {}
        freed: list[tuple[int, int]] = []
        texts: dict[int, str] = {}  # by the detail's id: events of many steps share one
        seq = self._next_seq
        for event in batch:
            kind, t_ns, dur_ns, stage, step, buffer, other, nbytes, source, detail, arrays, _ = event
            text = None
            # What an allocation tells is kept once, in `buffers`, unless it tells more than a Buffer has.
            if detail and (kind != "allocate" or not detail.keys() <= _BUFFER_FIELDS):
                text = texts.get(id(detail))
                if text is None:
                    text = texts[id(detail)] = _encode(detail)
            rows.append((seq, t_ns, dur_ns, kind, stage, step, buffer, other, nbytes, source, text))
            if kind == "step":
                facts = detail or {}
                told = map(facts.get, _FIGURES)
                figures = [value if type(value) in _CELLS else _step_value(value) for value in told]
                # A step may name its stage more closely than the event: the one-time upload belongs to decode.
                steps.append((seq, facts.get("stage", stage), facts.get("step", step), *figures))
            elif kind == "allocate":
                made[seq] = _buffer_row(event)
                self._alive.setdefault(buffer, []).append(seq)
            elif kind == "free" and self._alive.get(buffer):
                # The oldest: while a growing state is handed on, two buffers of one id are alive.
                owner = self._alive[buffer].pop(0)
                if owner in made:
                    made[owner][-1] = t_ns
                else:
                    freed.append((t_ns, owner))
            if arrays:
                for place, (name, array) in enumerate(cast("Mapping[str, Packed]", arrays).items()):
                    peeks.append((seq * _ARRAYS_PER_EVENT + place, step, name, *array))
            seq += 1
        with _explained(self.path):
            connection.execute("BEGIN")
            try:
                connection.executemany(_INSERT_EVENT, rows)
                connection.executemany(_INSERT_BUFFER, [(owner, *row) for owner, row in made.items()])
                connection.executemany("UPDATE buffers SET freed = ? WHERE rowid = ?", freed)
                connection.executemany(_INSERT_STEP, steps)
                connection.executemany(_INSERT_PEEK, peeks)
                connection.execute("COMMIT")
            except BaseException:
                pending.extendleft(reversed(batch))
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        self._next_seq = seq
        self._recent.extend(batch)

    # reading

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open_file(cast(Path, self.path))
        return self._connection

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT over the tables meta, events, buffers, steps and peeks (events waiting are written first).

        In `buffers` and `steps` rowid is the seq of the event that made the row; in `peeks` it is 1024 * seq + place.
        """
        with self._lock, _explained(self.path):
            if self._writable:
                self._write()
            return self._open().execute(sql, parameters).fetchall()

    @property
    def meta(self) -> dict[str, Any]:
        return {key: _decode(value) for key, value in self.query("SELECT key, value FROM meta ORDER BY key")}

    @property
    def last_seq(self) -> int:
        """Number of the newest event, -1 if there is none."""
        return int(self.query("SELECT coalesce(max(seq), -1) FROM events")[0][0])

    def events(
        self,
        kind: EventKind | Sequence[EventKind] | None = None,
        *,
        stage: str | None = None,
        step: int | None = None,
        buffer: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> list[Event]:
        """Events in order. `buffer` finds those that name it in any role, also among a predict's inputs and outputs;
        `after` gives only those with a larger seq (what a live view asks for)."""
        where = ["seq > ?"]
        values: list[Any] = [after]
        if kind is not None:
            kinds = (kind,) if isinstance(kind, str) else tuple(kind)
            where.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values += kinds
        if stage is not None:
            where.append("stage = ?")
            values.append(stage)
        if step is not None:
            where.append("step = ?")
            values.append(step)
        if buffer is not None:
            where.append("(buffer = ? OR other = ? OR (kind IN ('predict', 'hazard') AND instr(detail, ?)))")
            values += (buffer, buffer, _encode(buffer))
        sql = f"SELECT {', '.join(_EVENT_COLUMNS)} FROM events WHERE {' AND '.join(where)} ORDER BY seq"
        if limit is not None:
            sql += " LIMIT ?"
            values.append(limit)
        rows = self.query(sql, values)
        born: dict[int, Buffer] = {}
        if any(row[3] == "allocate" for row in rows):
            born = dict(self._buffers("WHERE rowid > ?", (after,)))
        events = []
        for number, t_ns, dur_ns, of_kind, of_stage, of_step, of_buffer, other, nbytes, source, text in rows:
            detail = None if text is None else _decode(text)
            if text is None and number in born:
                detail = born[number]._replace(freed=None)._asdict()
            events.append(
                Event(of_kind, t_ns, dur_ns, of_stage, of_step, of_buffer, other, nbytes, source, detail, None, number)
            )
        return events

    def recent(self, after: int) -> list[Event] | None:
        """What a recording was told behind event `after`, as it was told, the first with the number `after` + 1; None
        where not all of it is in memory.

        For a live view, which asks often: nothing is written, read back or parsed for it.
        """
        with self._lock:
            first = self._next_seq - len(self._recent)
            if not self._writable or after + 1 < first:
                return None
            # a copy at once: the recorded program goes on adding meanwhile
            return list(islice(chain(self._recent, self._pending.copy()), after + 1 - first, None))

    def steps(self, stage: str | None = None) -> list[StepRow]:
        """One row a stage run or decode step, in order. Several generations follow one another."""
        where, values = ("WHERE stage = ?", (stage,)) if stage is not None else ("", ())
        sql = f"SELECT rowid, {', '.join(_STEP_COLUMNS)} FROM steps {where} ORDER BY rowid"
        return [
            StepRow(
                row[0],
                row[1],
                row[2],
                row[3],
                row[4] or "",
                row[5] or 0.0,
                row[6] or 0.0,
                row[7] or 0.0,
                row[8] or 0,
                row[9] or 0,
                row[10] or 0,
                *(_decode(value) if isinstance(value, str) else value for value in row[11:]),
            )
            for row in self.query(sql, values)
        ]

    def buffers(self, source: Source | None = None) -> list[Buffer]:
        """Every buffer that was ever allocated, in order of allocation; an id reused has one row a generation.

        With "observed" only those that the driver allocated for us; with "emulator" the emulator's own view of all
        device memory, which holds the same ones again under other ids, and weights besides.
        """
        if source is None:
            return [buffer for _, buffer in self._buffers()]
        return [
            buffer for _, buffer in self._buffers("WHERE rowid IN (SELECT seq FROM events WHERE source = ?)", (source,))
        ]

    def _buffers(self, where: str = "", values: Sequence[Any] = ()) -> list[tuple[int, Buffer]]:
        sql = f"SELECT rowid, {', '.join(Buffer._fields)} FROM buffers {where} ORDER BY rowid"
        return [
            (row[0], Buffer._make((*row[1:7], tuple(_decode(row[7])), *row[8:])))  # row 7 is the shape
            for row in self.query(sql, values)
        ]

    def peeks(self, name: str | None = None, *, step: int | None = None) -> list[Peek]:
        """Arrays of peeks in order; each its own copy."""
        where = ["1"]
        values: list[Any] = []
        if name is not None:
            where.append("name = ?")
            values.append(name)
        if step is not None:
            where.append("step = ?")
            values.append(step)
        sql = f"SELECT rowid, step, name, dtype, shape, data FROM peeks WHERE {' AND '.join(where)} ORDER BY rowid"
        return [
            Peek(
                row[0] // _ARRAYS_PER_EVENT,
                row[1],
                row[2],
                np.frombuffer(row[5], dtype=row[3]).reshape(_decode(row[4])).copy(),
            )
            for row in self.query(sql, values)
        ]

    def peek_names(self) -> list[str]:
        return [row[0] for row in self.query("SELECT DISTINCT name FROM peeks ORDER BY name")]


def _write_now_and_then(reference: weakref.ReferenceType[Ledger], stop: threading.Event) -> None:
    while not stop.wait(BATCH_S):
        ledger = reference()
        if ledger is None:
            return
        try:
            with ledger._lock:
                if ledger._writable:
                    ledger._write()
        except LedgerError as error:
            ledger._failure = error  # told by the next event, flush or close, which tries again
        del ledger


def open_ledger(path: str | Path) -> Ledger:
    """Opens a recording for reading; one that is still being written, too.

    Raises:
        LedgerError: there is no such file, it is damaged, not a ledger, or of another schema.
    """
    ledger = object.__new__(Ledger)
    ledger.path = Path(path)
    ledger._writable = False
    ledger._lock = threading.RLock()
    ledger._pending = deque()
    ledger._recent = deque()
    ledger._next_seq = 0
    ledger._alive = {}
    ledger._failure = None
    ledger._stop = threading.Event()
    ledger._writer = None
    ledger.cache = {}
    ledger._connection = None
    ledger._connection = _open_file(ledger.path)
    return ledger


# rows

_INSERT_EVENT = f"INSERT INTO events VALUES ({', '.join('?' * len(_EVENT_COLUMNS))})"
_INSERT_STEP = (
    f"INSERT INTO steps (rowid, {', '.join(_STEP_COLUMNS)}) VALUES ({', '.join('?' * (len(_STEP_COLUMNS) + 1))})"
)
_INSERT_PEEK = "INSERT INTO peeks (rowid, step, name, dtype, shape, data) VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_BUFFER = (
    f"INSERT INTO buffers (rowid, {', '.join(Buffer._fields)}) VALUES ({', '.join('?' * (len(Buffer._fields) + 1))})"
)


def buffer_of(event: Event) -> Buffer:
    """What an `allocate` event says of its buffer."""
    row = _buffer_row(event)
    return Buffer._make((*row[:6], tuple(json.loads(row[6])), *row[7:]))


def _buffer_row(event: Event) -> list[Any]:
    detail = event.detail or {}
    return [
        event.buffer,
        detail.get("name", event.buffer),
        detail.get("kind", "other"),
        detail.get("half", ""),
        detail.get("device", "host"),
        detail.get("dtype", ""),
        str([*map(int, detail.get("shape", ()))]),
        int(detail.get("nbytes", event.nbytes)),
        detail.get("address"),
        int(detail.get("generation", 0)),
        detail.get("site", ""),
        None,
    ]


def _step_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else _encode(value)


Packed = tuple[str, str, bytes]
"""An array as the table `peeks` holds it: dtype, shape, data."""


def _packed(arrays: Mapping[str, np.ndarray]) -> Any:
    values = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: (array.dtype.name, _encode(list(array.shape)), array.tobytes()) for name, array in values.items()}


# JSON

_decode: Callable[[str], Any] = json.loads


def _plain(value: Any) -> Any:
    """What JSON does not know. A recording must not end a run because of an odd detail: the last resort is its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _encoder() -> Callable[[Any], str]:
    """`JSONEncoder.encode`, without CPython's encoder being made anew for each of thousands of small objects."""
    plain = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain, check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    chunks = make(None, _plain, json.encoder.encode_basestring, None, ":", ",", False, False, True)
    return lambda value: "".join(chunks(value, 0))


_encode = _encoder()


# files


_being_recorded: set[Path] = set()


def _create_file(path: Path) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise LedgerError(
            f"the directory of the ledger {path} does not exist",
            expected="an existing directory",
            fix="create it first",
        )
    with _explained(path):
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        # Write-ahead log: readers and the writer do not wait for each other; a batch is whole or absent after SIGKILL.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
    return connection


@contextmanager
def _replacing(path: Path) -> Iterator[None]:
    """Puts an earlier ledger aside, and takes it away when the new one stands; without a new one it comes back."""
    try:
        aside = _put_aside(path)
        try:
            yield
        except BaseException:
            for file in _files_of(path):
                file.unlink(missing_ok=True)
            for old, file in zip(_files_of(aside), _files_of(path), strict=True):
                if old.exists():
                    old.replace(file)
            raise
        for old in _files_of(aside):
            old.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"a ledger cannot be written to {str(path)!r}: {error}", expected="a writable place"
        ) from None


def _put_aside(path: Path) -> Path:
    """Renames an earlier ledger, and nothing else: what else lies there is somebody's. Gives its new name."""
    if path.exists() and not path.is_file():
        raise LedgerError(f"{path} is no regular file", expected="a new file, or an earlier ledger to replace")
    if path.resolve() in _being_recorded:
        raise LedgerError(f"{path} is being recorded", expected="a file for each recording", fix="name another one")
    aside = path.with_name(f".{path.name}.{os.getpid()}.earlier")
    if path.exists():
        if path.stat().st_size:
            _open_file(path, check=False).close()  # refuses what is not a ledger
        for file, old in zip(_files_of(path), _files_of(aside), strict=True):
            if file.exists():
                file.replace(old)
    for log in _files_of(path)[1:]:
        if log.exists():
            raise LedgerError(f"{log} stands where the log of {path.name} goes", expected="a name that is free")
    return aside


def _files_of(path: Path) -> list[Path]:
    """A ledger and the logs that SQLite keeps beside it while it is written."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]


def _open_file(path: Path, *, check: bool = True) -> sqlite3.Connection:
    """A read-only connection to a ledger of our schema. `check` also reads the whole file for damage."""
    if not path.is_file():
        raise LedgerError(
            f"there is no ledger at {path}", expected="a file that a recording wrote", fix="check the path"
        )
    uri = path.resolve().as_uri()
    connection: sqlite3.Connection | None = None
    try:
        try:
            connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, check_same_thread=False, isolation_level=None)
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.OperationalError:
            # A directory that may not be written: the side files of the log cannot be made, and nobody writes there.
            if connection is not None:
                connection.close()
            log = path.with_name(path.name + "-wal")
            if log.is_file() and log.stat().st_size:
                raise LedgerError(
                    f"{path} has an unfinished log beside it, and its directory cannot be written",
                    expected="a directory that may be written, or a recording that was closed",
                    fix=f"copy both files, {path.name} and {log.name}, to another directory",
                ) from None
            connection = sqlite3.connect(f"{uri}?immutable=1", uri=True, check_same_thread=False, isolation_level=None)
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables >= set(_TABLES):
            raise LedgerError(
                f"{path} is a database, but not a ledger: it lacks the tables {sorted(set(_TABLES) - tables)}",
                expected="a file that a recording wrote",
            )
        schema = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if schema is None or schema[0] != str(SCHEMA):
            raise LedgerError(
                f"{path} is a ledger of schema {schema[0] if schema else 'none'}",
                expected=f"schema {SCHEMA}",
                fix="open it with the version of the workbench that recorded it, or record anew",
            )
        if check:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise LedgerError(f"{path} is damaged: {verdict}", expected="a whole ledger file", fix="record anew")
    except sqlite3.DatabaseError as error:
        if connection is not None:
            connection.close()
        raise LedgerError(
            f"{path} cannot be read as a ledger: {error}", expected="a whole file that a recording wrote"
        ) from error
    except LedgerError:
        if connection is not None:
            connection.close()
        raise
    return connection


@contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(
            f"the ledger {path or 'in memory'} failed: {error}", expected="a writable place and a whole file"
        ) from error
