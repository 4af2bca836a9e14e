from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.errors import LedgerError, UsageError
from qwen_npu.ledger.export import trace, write_csv, write_trace
from qwen_npu.ledger.store import Ledger
from qwen_npu.rgdr.pool import SlotTable
from tests.unit.ledger.runs import Run, recorded


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return spans


@pytest.mark.parametrize("kv", ["fixed", "growing"])
@pytest.mark.parametrize("state", ["resident", "host"])
def test_spans_of_a_track_nest(kv: str, state: str) -> None:
    found = tracks(trace(recorded(5, kv=kv, state=state, generations=2))["traceEvents"])
    assert set(found) == {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)}
    for spans in found.values():
        around: list[tuple[float, float, str]] = []
        for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][1] <= begin + 1e-6:
                around.pop()
            assert not around or end <= around[-1][1] + 1e-6, (around[-1], name)
            around.append((begin, end, name))


def test_steps_lie_within_their_stage() -> None:
    spans = tracks(trace(recorded(3))["traceEvents"])[1, 1]
    stage = next(span for span in spans if span[2] == "decode_fixed")
    steps = [span for span in spans if span[2].startswith("decode ")]
    assert [name for *_, name in steps] == ["decode 0", "decode 1", "decode 2"]
    for begin, end, _ in steps:
        assert stage[0] <= begin <= end <= stage[1] + 1e-6


def test_lives_are_async_pairs_and_flows_join_two_tracks() -> None:
    ledger = recorded(3, kv="growing")
    events = trace(ledger)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "b"}
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert len(begins) == len(ledger.buffers())
    assert all(begins[key]["ts"] <= ends[key]["ts"] for key in begins)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    flows = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == flows.keys()
    assert len(starts) == len(ledger.events(("upload", "download")))
    spans = tracks(events)
    for key, start in starts.items():
        assert {start["pid"], flows[key]["pid"]} == {1, 2}
        for end in (start, flows[key]):
            assert any(begin <= end["ts"] <= last for begin, last, _ in spans[end["pid"], end["tid"]])


def test_the_counter_is_the_bytes_alive() -> None:
    ledger = recorded(2)
    events = trace(ledger)["traceEvents"]
    values = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert max(values) == sum(buffer.nbytes for buffer in ledger.buffers())
    assert values[-1] == 0


def test_slots_and_hazards_are_instants() -> None:
    ledger = recorded(1)
    SlotTable(4, 2, sink=ledger).allocate()
    Run(ledger).emit("hazard", buffer="conv.a", detail={"hazard": "overlap"})
    names = [event["name"] for event in trace(ledger)["traceEvents"] if event["ph"] == "i"]
    assert "slot_allocate 0" in names
    assert "hazard conv.a" in names


def test_tracks_have_names() -> None:
    events = trace(recorded(1))["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named


def test_files(tmp_path: Path) -> None:
    ledger = recorded(2)
    text = write_trace(ledger, tmp_path / "图 trace.json").read_text(encoding="utf-8")
    assert json.loads(text)["traceEvents"]
    with write_csv(ledger, tmp_path / "events.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ledger.events())
    assert rows[0]["kind"] == "stage_begin"
    with write_csv(ledger, tmp_path / "buffers.csv", "buffers").open(encoding="utf-8", newline="") as file:
        assert next(row["id"] for row in csv.DictReader(file)) == "conv.a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffers.csv", "events.csv", "图 trace.json"]
    with pytest.raises(UsageError, match="no table"):
        write_csv(ledger, tmp_path / "x.csv", "peeks")
    with pytest.raises(LedgerError, match="cannot be written"):
        write_trace(ledger, tmp_path / "absent" / "x.json")


def test_nothing() -> None:
    assert {event["ph"] for event in trace(Ledger())["traceEvents"]} == {"M"}
