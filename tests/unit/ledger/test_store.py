from __future__ import annotations

import gc
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_npu.errors import LedgerError
from qwen_npu.ledger.events import Buffer, Event
from qwen_npu.ledger.store import BACKLOG_EVENTS, BATCH_S, Ledger, open_ledger
from tests.unit.ledger.runs import KV_TOKEN_BYTES, PROMPT, Run, recorded


@pytest.mark.parametrize("in_file", [False, True])
def test_events_come_back_as_they_went_in(tmp_path: Path, in_file: bool) -> None:
    ledger = Ledger(tmp_path / "记录 🌱.ledger" if in_file else None)
    buffer = Buffer(
        "conv.a", "past_conv_states", "conv", "a", "ascend:0", "float16", (2, 1, 8, 3), 96, 4096, 0, "s.py:1"
    )
    sent = [
        Event("allocate", 10, stage="decode", buffer="conv.a", nbytes=96, detail=buffer._asdict()),
        Event("upload", 20, 5, "decode", -1, "conv.a", "host.conv", 96),
        Event("predict", 30, 7, "decode", 0, detail={"inputs": ["conv.a"], "outputs": ["conv.b"], "text": "图片 🐟"}),
        Event("rotate", 40, 0, "decode", 0, "conv.b", "conv.a", 0, "inferred", {"kind": "conv"}),
    ]
    for event in sent:
        ledger(event)
    assert ledger.events() == [event._replace(seq=seq) for seq, event in enumerate(sent)]
    ledger.close()
    assert ledger.events() == [event._replace(seq=seq) for seq, event in enumerate(sent)]
    if in_file:
        assert open_ledger(tmp_path / "记录 🌱.ledger").events() == ledger.events()


details = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)
# SQLite keeps text as UTF-8, which cannot hold lone surrogates; no tensor or file name of ours has any.


@settings(max_examples=60, deadline=None)
@given(detail=details, nbytes=st.integers(0, 2**62), step=st.integers(-1, 10**6), name=st.text(max_size=10))
def test_any_detail_survives(detail: dict[str, object], nbytes: int, step: int, name: str) -> None:
    ledger = Ledger()
    sent = Event("hazard", 1, 2, "decode", step, name, nbytes=nbytes, source="emulator", detail=detail)
    ledger(sent)
    assert ledger.events() == [sent._replace(seq=0)]


def test_what_json_cannot_hold_does_not_end_a_run() -> None:
    ledger = Ledger()
    detail = {"n": np.int64(3), "a": np.arange(2), "p": Path("x"), "t": (1, 2), "s": {2, 1}, "f": np.float32(0.5)}
    ledger(Event("hazard", 1, detail=detail))
    assert ledger.events()[0].detail == {"n": 3, "a": [0, 1], "p": "x", "t": [1, 2], "s": [1, 2], "f": 0.5}


def test_filters() -> None:
    ledger = recorded(3)
    assert {event.kind for event in ledger.events("upload")} == {"upload"}
    assert [event.step for event in ledger.events("predict", stage="decode")] == [0, 1, 2]
    assert {event.step for event in ledger.events(step=1)} == {1}
    uses = ledger.events(("predict", "upload"), buffer="conv.a")
    assert [event.kind for event in uses] == ["upload", "predict", "predict", "predict"]
    assert ledger.events(buffer="conv") == []  # a part of an id is not the id
    everything = ledger.events()
    assert ledger.events(after=everything[-3].seq) == everything[-2:]
    assert ledger.events(limit=2) == everything[:2]


def test_buffers_have_generations_and_ends() -> None:
    ledger = recorded(3, kv="growing")
    caches = [buffer for buffer in ledger.buffers() if buffer.id == "kv"]
    assert [buffer.generation for buffer in caches] == [0, 1, 2, 3]
    assert [buffer.nbytes for buffer in caches] == [KV_TOKEN_BYTES * tokens for tokens in range(PROMPT, PROMPT + 4)]
    frees = [event.t_ns for event in ledger.events("free", buffer="kv")]
    assert [buffer.freed for buffer in caches] == frees  # the older of two living generations goes first
    assert caches[0].shape == (2, 1, 2, PROMPT, 8)


def test_a_free_in_a_later_batch_finds_its_buffer() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.allocate("logits", "logits", "logits", (1, 1, 4), "float16")
    assert ledger.buffers()[0].freed is None
    run.free("logits")
    assert ledger.buffers()[0].freed == run.clock_ns
    ledger(Event("free", 5, buffer="never.allocated"))
    assert len(ledger.buffers()) == 1


def test_steps() -> None:
    ledger = recorded(2, generations=2)
    rows = ledger.steps("decode")
    assert [(row.step, row.token, row.text) for row in rows] == [(0, 10, " t10"), (1, 11, " t11")] * 2
    assert [row.host_to_device_bytes for row in rows] == [8 + 128 + 32] * 4
    assert [row.seq for row in rows] == [event.seq for event in ledger.events("step", stage="decode")]
    assert rows[0].predict_ms == 0.003
    assert rows[0].drafted is None


def test_verify_steps_hold_lists() -> None:
    ledger = Ledger()
    Run(ledger).step("verify", 0, 4, 10, 0, 0, drafted=[3, 0], accepted=[2, np.int32(0)], tokens=[[4, 5], [6]])
    row = ledger.steps()[0]
    assert (row.drafted, row.accepted, row.tokens) == ([3, 0], [2, 0], [[4, 5], [6]])


def test_peeks_are_copied_at_once() -> None:
    ledger = Ledger()
    view = np.arange(6, dtype=np.float32).reshape(2, 3)
    ledger(Event("peek", 1, stage="decode", step=4, arrays={"norm": view, "count": np.array([[1]], np.int32)}))
    view[:] = -1
    peek = ledger.peeks("norm")[0]
    np.testing.assert_array_equal(peek.array, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (peek.seq, peek.step, peek.array.dtype) == (0, 4, np.float32)
    assert ledger.peek_names() == ["count", "norm"]
    assert ledger.peeks(step=3) == []


def test_meta() -> None:
    ledger = Ledger()
    ledger.set_meta("spec", {"nv": 4, "layers": [1, 2]})
    ledger.set_meta("device", "ascend:0")
    assert ledger.meta["spec"] == {"nv": 4, "layers": [1, 2]}
    assert ledger.meta["schema"] == 1
    assert ledger.meta["device"] == "ascend:0"


def test_the_file_has_exactly_the_tables_of_schema_1(tmp_path: Path) -> None:
    Ledger(tmp_path / "run").close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    connection = sqlite3.connect(tmp_path / "run")
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")]
    assert tables == ["buffers", "events", "meta", "peeks", "steps"]
    columns = [row[1] for row in connection.execute("PRAGMA table_info(buffers)")]
    assert columns == list(Buffer._fields)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(events)")]
    assert sorted(columns) == sorted(set(Event._fields) - {"arrays"})
    connection.close()


def test_a_closed_ledger_refuses_events() -> None:
    ledger = recorded(1)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger(Event("step", 1))
    with pytest.raises(LedgerError, match="closed"):
        ledger.set_meta("x", 1)
    assert len(ledger.steps("decode")) == 1


def test_recording_again_replaces_a_ledger_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    with Ledger(path) as first:
        Run(first).generate(3)
    with Ledger(path) as second:
        Run(second).generate(1)
    assert len(open_ledger(path).steps("decode")) == 1
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(LedgerError, match=r"notes\.txt"):
        Ledger(other)
    assert other.read_text() == "mine"
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(tmp_path / "absent" / "run")


def test_what_is_not_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger at"):
        open_ledger(tmp_path / "absent")
    with pytest.raises(LedgerError, match="no ledger at"):
        open_ledger(tmp_path)
    (tmp_path / "text").write_text("not a database, but long enough to be looked at" * 40)
    with pytest.raises(LedgerError, match="cannot be read"):
        open_ledger(tmp_path / "text")
    (tmp_path / "empty").touch()
    with pytest.raises(LedgerError, match="lacks the tables"):
        open_ledger(tmp_path / "empty")
    foreign = sqlite3.connect(tmp_path / "foreign")
    foreign.execute("CREATE TABLE meta (key, value)")
    foreign.commit()
    foreign.close()
    with pytest.raises(LedgerError, match="lacks the tables"):
        open_ledger(tmp_path / "foreign")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "run").close()
    connection = sqlite3.connect(tmp_path / "run")
    connection.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError, match="schema 2"):
        open_ledger(tmp_path / "run")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Ledger(path) as ledger:
        Run(ledger).generate(200)
    data = bytearray(path.read_bytes())
    cut = tmp_path / "cut"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(LedgerError, match=r"damaged|cannot be read"):
        open_ledger(cut)
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = b"\xff" * 4096
    scribbled = tmp_path / "scribbled"
    scribbled.write_bytes(data)
    with pytest.raises(LedgerError, match=r"damaged|cannot be read"):
        open_ledger(scribbled)


def test_a_recording_is_readable_while_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    ledger = Ledger(path)
    run = Run(ledger)
    run.generate(2)
    ledger.flush()
    reader = open_ledger(path)
    before = len(reader.events())
    run.generate(2)
    ledger.flush()
    assert len(reader.events()) == 2 * before
    ledger.close()  # although somebody reads
    assert len(reader.events()) == 2 * before
    assert len(open_ledger(path).steps("decode")) == 4


def test_a_recording_is_written_without_being_asked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    for _ in range(10):
        ledger(Event("rotate", 1))
    reader = open_ledger(tmp_path / "run")
    deadline = time.monotonic() + 20
    while len(reader.events()) < 10:
        assert time.monotonic() < deadline
        time.sleep(BATCH_S / 5)
    ledger.close()


def test_not_more_than_a_backlog_waits() -> None:
    ledger = Ledger()
    for _ in range(BACKLOG_EVENTS + 1):
        ledger(Event("rotate", 1))
    assert ledger._pending == type(ledger._pending)()
    assert len(ledger.events()) == BACKLOG_EVENTS + 1


def test_events_that_cannot_be_written_are_told_and_not_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run", isolation_level=None)) as other:
        other.execute("DROP TABLE peeks")
    for step in range(3):
        ledger(Event("peek", step, arrays={"x": np.zeros(2)}))
    with pytest.raises(LedgerError, match="peeks"):
        ledger.flush()
    with closing(sqlite3.connect(tmp_path / "run", isolation_level=None)) as other:
        other.execute("CREATE TABLE peeks (step, name, dtype, shape, data BLOB)")
    assert [event.t_ns for event in ledger.events()] == [0, 1, 2]
    ledger.close()


def test_a_failure_in_the_background_is_told_by_the_next_event(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run", isolation_level=None)) as other:
        other.execute("DROP TABLE peeks")
    ledger(Event("peek", 0, arrays={"x": np.zeros(2)}))
    deadline = time.monotonic() + 20
    while ledger._failure is None:
        assert time.monotonic() < deadline
        time.sleep(BATCH_S / 5)
    with pytest.raises(LedgerError, match="peeks"):
        ledger(Event("rotate", 1))


def test_a_forgotten_recording_ends_its_thread(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    thread = ledger._writer
    assert thread is not None
    ledger(Event("rotate", 1))
    del ledger
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_threads_read_while_one_writes() -> None:
    ledger = Ledger()
    problems: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        seen = -1
        try:
            while not stop.is_set():
                for event in ledger.events(after=seen):
                    assert event.seq == seen + 1
                    seen = event.seq
                ledger.steps()
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for index in range(5000):
        ledger(Event("rotate", index))
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert [event.t_ns for event in ledger.events()] == list(range(5000))


_VICTIM = """
import sys, time
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
ledger = Ledger(sys.argv[1])
for index in range(1000):
    ledger(Event("step", index, stage="decode", step=index, detail={"token": index, "text": "x"}))
ledger.flush()
print("written", flush=True)
while True:
    ledger(Event("rotate", 1, stage="decode"))
"""


def test_a_killed_recording_shows_everything_up_to_the_last_batch(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "written\n"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    ledger = open_ledger(path)
    assert [row.token for row in ledger.steps()] == list(range(1000))
    events = ledger.events()
    assert [event.seq for event in events] == list(range(len(events)))


def test_an_unfinished_recording_whose_side_files_cannot_be_made_says_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    Run(ledger).generate(2)
    ledger.flush()
    copy = tmp_path / "copy"
    copy.write_bytes((tmp_path / "run").read_bytes())
    (tmp_path / "copy-wal").write_bytes((tmp_path / "run-wal").read_bytes())
    (tmp_path / "copy-shm").symlink_to(tmp_path / "absent" / "x")  # cannot be made, not even by root
    with pytest.raises(LedgerError, match="copy both files"):
        open_ledger(copy)
    (tmp_path / "copy-shm").unlink()
    assert open_ledger(copy).events() == ledger.events()
    ledger.close()
