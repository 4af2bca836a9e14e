"""Figures of memory, peeks, slots, inputs and balances; by their tables and traces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qwen_npu import views
from qwen_npu.errors import UsageError
from qwen_npu.ledger.events import Event
from qwen_npu.ledger.store import Ledger
from qwen_npu.rgdr.pool import SlotTable
from tests.unit.ledger.runs import KV_TOKEN_BYTES, PROMPT, Run, norms, peeks, recorded


def text_of(figure: Any) -> str:
    return " ".join(annotation.text or "" for annotation in figure.layout.annotations)


# memory


def test_memory_map_places_blocks_by_address_and_life() -> None:
    ledger = recorded(3, kv="growing")
    table = views.memory_map_table(ledger)
    assert len(table) == len(ledger.buffers())
    caches = [row for row in table if row["id"] == "kv"]
    assert [row["nbytes"] for row in caches] == [KV_TOKEN_BYTES * (PROMPT + step) for step in range(4)]
    for row in table:
        assert 0 <= row["begin"] < row["end"]
    # a cache is freed in the step after the one that wrote it
    assert [int(row["end"]) - int(row["begin"]) for row in caches[1:3]] == [1, 1]
    figure = views.memory_map(ledger)
    figure.to_json()
    assert {trace.name for trace in figure.data} == {"conv", "recurrent", "kv", "logits"}


def test_memory_map_joins_our_names_to_the_emulators_blocks() -> None:
    ledger = Ledger()
    run = Run(ledger)
    weights = {"id": "ascend:0@0x500", "name": "decode.onnx", "kind": "other", "nbytes": 64, "address": 0x500}
    block = {
        "id": "ascend:0@0x1000",
        "name": "",
        "kind": "other",
        "nbytes": 16,
        "address": 0x1000,
        "device": "ascend:0",
    }
    for detail, what in ((weights, "weights"), (block, "tensor")):
        detail |= {"device": "ascend:0", "what": what, "site": "elsewhere.py:1"}
        run.emit("allocate", buffer=detail["id"], nbytes=detail["nbytes"], source="emulator", detail=detail)
    run.allocate("conv.a", "past_conv_states", "conv", (4,), "float32")
    rows = {row["id"]: row for row in views.memory_map_table(ledger)}
    assert rows.keys() == {"decode.onnx", "conv.a"}
    assert rows["decode.onnx"]["kind"] == "weights"
    assert rows["conv.a"]["site"] == "runtime/states.py:77"
    assert rows["conv.a"]["source"] == "emulator"


def test_addresses_that_nobody_tells_are_said_to_be_unobservable() -> None:
    ledger = recorded(3, addresses=False)
    figure = views.memory_map(ledger)
    assert not figure.data
    assert "not observable" in text_of(figure)
    assert views.memory_map_table(ledger) == []


@pytest.mark.parametrize("name", [name for name in views.LEDGER_FIGURES if not name.startswith("compare")])
def test_every_figure_stands_on_what_the_vendors_package_shows(name: str) -> None:
    ledger = recorded(3, kv="growing", addresses=False)
    for event in ledger.events():
        assert event.source != "emulator"
    getattr(views, name)(ledger).to_json()
    getattr(views, f"{name}_table")(ledger)


# peeks


def peeked(bad: float | None = None) -> Ledger:
    ledger = Ledger()
    arrays = (
        {"recurrent.norm": norms(step, 2 if bad is not None and step == 3 else None, 1, bad or 0)} for step in range(5)
    )
    peeks(ledger, arrays)
    return ledger


def test_norms_by_layer_head_and_step() -> None:
    ledger = peeked()
    table = views.state_norms_table(ledger)
    for row in table:
        assert row["value"] == row["step"] + 10 * row["layer"] + 100 * row["head"]
    figure = views.state_norms(ledger)
    heat = figure.data[0].z
    assert heat.shape == (12, 5)
    assert heat[1 * 4 + 3][2] == 2 + 10 + 300
    assert figure.data[0].colorscale[0][1] == "#440154"  # viridis
    assert "All values are finite" in figure.layout.title.subtitle.text


def test_a_value_that_is_not_finite_carries_a_cross_and_is_named() -> None:
    figure = views.state_norms(peeked(float("nan")))
    cross = figure.data[1]
    assert (cross.x[0], cross.y[0]) == (3, 2 * 4 + 1)
    assert "step 3, layer 2 head 1" in figure.layout.title.subtitle.text


def test_two_runs_apart() -> None:
    table = views.compare_states_table(peeked(), peeked(200.0))
    assert [row["max_abs"] for row in table] == [0, 0, 0, 77.0, 0]
    assert (table[3]["layer"], table[3]["head"]) == (2, 1)
    figure = views.compare_states(peeked(), peeked(200.0))
    mark = figure.data[-1]
    assert (mark.name, mark.x[0], mark.y[0]) == ("first difference", 3, 9)
    assert views.compare_states_table(peeked(), peeked(float("inf")))[3]["max_abs"] == float("inf")
    other = Ledger()
    peeks(other, iter([{"recurrent.norm": np.ones((2, 2))}]))
    with pytest.raises(UsageError, match="two runs of one model"):
        views.compare_states(peeked(), other)


def test_peeks_that_were_not_recorded() -> None:
    assert "switched off" in text_of(views.state_norms(Ledger()))
    assert "there are recurrent.norm" in text_of(views.state_norms(peeked(), "conv.norm"))
    ledger = Ledger()
    peeks(ledger, iter([{"x": np.ones((1, 2, 3))}]))
    with pytest.raises(UsageError, match=re.escape("[layer] or [layer, head]")):
        views.state_norms(ledger, "x")


def test_kv_positions() -> None:
    table = views.kv_positions_table(recorded(4))
    assert [row["written_at"] for row in table] == [PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3]
    assert [row["empty"] for row in table] == [10, 9, 8, 7]
    cells = views.kv_positions(recorded(4)).data[0].z
    assert cells[1].tolist() == [1] * PROMPT + [2, 3] + [0] * 9


def test_kv_positions_of_verifies_follow_the_accepted_tokens() -> None:
    ledger = Ledger()
    for key, value in {"kv": "fixed", "capacity": 16}.items():
        ledger.set_meta(key, value)
    run = Run(ledger)
    for step, tokens in enumerate(([4, 5, 6], [7])):
        where = {"stage": "verify", "step": step}
        if not step:
            for half in "ab":
                run.allocate(f"kv.{half}", "past_kv_cache", "kv", run.kv_shape(16), "float16", **where)
        run.emit("predict", detail={"inputs": ["kv.a"], "outputs": ["kv.b"]}, **where)
        run.step("verify", step, tokens[-1], 10, 0, 0, 2 * 16 * KV_TOKEN_BYTES * (not step), tokens=tokens)
    table = views.kv_positions_table(ledger)
    assert [(row["written_at"], row["written"]) for row in table] == [(PROMPT, 3), (PROMPT + 3, 1)]


# slots


def pool() -> tuple[Ledger, SlotTable]:
    ledger = Ledger()
    ledger.set_meta("slots", 8)
    table = SlotTable(8, 3, sink=ledger)
    one, other = table.allocate("sequence in row 0"), table.allocate("b")
    table.end(table.begin([one, other]), [2, 1])
    table.free(other)
    kept = table.snapshot(one)
    table.end(table.begin([one]), [3])
    table.drop(kept)
    return ledger, table


def test_slot_grid_tells_owner_generation_position_and_verdict() -> None:
    ledger, _ = pool()
    table = views.slot_grid_table(ledger)
    after = {row["slot"]: row for row in table if row["round"] == 1}
    assert [after[slot]["state"] for slot in range(8)] == [
        "accepted", "current", "rejected", "current", "rejected", "rejected", "free", "free",
    ]  # fmt: skip
    assert after[1]["owner"] == "sequence in row 0"
    assert after[1]["generation"] == 1
    last = {row["slot"]: row for row in table if row["round"] == 2}
    assert last[3]["state"] == "snapshot"
    figure = views.slot_grid(ledger)
    figure.to_json()
    (texts,) = [trace.text for trace in figure.select_traces({"mode": "text"})]
    assert "● r0 1" in texts
    assert "▣" in texts
    assert "5 free + 3 live + 0 snapshot = 8 slots" in figure.layout.title.subtitle.text


def test_faults_of_the_books_stand_below_the_grid() -> None:
    ledger, _ = pool()
    ledger(Event("slot_write", 1, buffer="state_pool", detail={"slot": 0, "sequence": 9}))
    assert "FAULT: event" in text_of(views.slot_grid(ledger))


def test_many_slots_and_rounds_are_drawn_without_texts() -> None:
    ledger = Ledger()
    table = SlotTable(64, 4, sink=ledger)
    sequences = [table.allocate() for _ in range(16)]
    for _ in range(450):
        table.end(table.begin(sequences), [1] * 16)
    figure = views.slot_grid(ledger)
    assert not list(figure.select_traces({"mode": "text"}))
    assert figure.data[0].z.shape == (64, 400)
    assert "earlier rounds are not drawn" in text_of(figure)


def test_speculation() -> None:
    ledger, _ = pool()
    table = views.speculation_table(ledger)
    assert [(row["owner"], row["drafted"], row["accepted"], row["rejected"], row["slot"]) for row in table] == [
        ("sequence in row 0", 2, 2, 1, 1),
        ("b", 2, 1, 2, 3),
        ("sequence in row 0", 2, 3, 0, 2),
    ]
    assert [row["acceptance_so_far"] for row in table] == [0.5, 0.0, 0.75]
    figure = views.speculation(ledger)
    figure.to_json()
    assert "3 of 6 drafts accepted (50%)" in figure.layout.title.subtitle.text
    symbols = {trace.marker.symbol for trace in figure.data if trace.mode == "markers"}
    assert len(symbols) == 3
    assert "↩1" in text_of(figure)


# inputs


@dataclass
class Picture:
    pixels: np.ndarray
    pixel_values: np.ndarray
    grid: tuple[int, int]
    note: str = "letterboxed"


def picture(rows: int = 4, columns: int = 6, patch: int = 2) -> Picture:
    pixels = np.zeros((rows * patch, columns * patch, 3), np.uint8)
    return Picture(pixels, np.arange(rows * columns, dtype=np.float32)[:, None].repeat(3, 1), (rows, columns))


def test_patches_in_merge_block_order() -> None:
    table = views.vision_patches_table(picture())  # type: ignore[arg-type]
    places = [(row["row"], row["column"]) for row in table]
    assert places[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert sorted(places) == [(row, column) for row in range(4) for column in range(6)]
    assert [row["token"] for row in table] == [patch // 4 for patch in range(24)]
    assert table[5]["mean"] == 5.0
    figure = views.vision_patches(picture())  # type: ignore[arg-type]
    figure.to_json()
    assert figure.layout.images[0].source.startswith("data:image/png;base64,")
    assert "4 x 6 patches" in figure.layout.title.subtitle.text


@pytest.mark.parametrize("with_picture", [True, False])
def test_mrope_positions(with_picture: bool) -> None:
    spec = SimpleNamespace(image_token=9, vision=SimpleNamespace(merge=2))
    tokens = np.array([1, 9, 9, 9, 9, 9, 9, 2] if with_picture else [1, 2, 3])
    positions = np.arange(len(tokens))[None, None].repeat(4, 0)
    feed = SimpleNamespace(tokens=tokens, positions=positions, delta=-3, image=picture() if with_picture else None)
    table = views.mrope_positions_table(feed, spec)  # type: ignore[arg-type]
    assert [row["picture"] for row in table] == (tokens == 9).tolist()
    figure = views.mrope_positions(feed, spec)  # type: ignore[arg-type]
    figure.to_json()
    assert len(figure.layout.images) == int(with_picture)
    assert f"= {len(tokens) - 3}." in figure.layout.title.subtitle.text


def test_best_logits() -> None:
    logits = np.array([0.0, 3.0, -1.0, 2.5], np.float16)
    table = views.logits_topk_table(logits, k=3, decode=lambda token: f"<{token}>")
    assert [row["token"] for row in table] == [1, 3, 0]
    assert table[0]["text"] == "<1>"
    assert sum(row["probability"] for row in views.logits_topk_table(logits, k=4)) == pytest.approx(1)
    figure = views.logits_topk(logits, decode=lambda token: f"<{token}>")
    figure.to_json()
    assert [bar.x for bar in figure.data] == [(3.0,), (2.5, 0.0, -1.0)]
    assert "leads by 0.500" in figure.layout.title.subtitle.text
    ledger = Ledger()
    peeks(ledger, iter([{"logits": logits}]))
    assert views.logits_topk_table(ledger, step=0)[0]["token"] == 1
    assert views.logits_topk_table(ledger, step=5) == []
    assert not views.logits_topk(ledger, step=5).data
    with pytest.raises(UsageError, match="k is 0"):
        views.logits_topk_table(logits, k=0)


# balances


def test_balances_are_green_or_red() -> None:
    ledger = recorded(2)
    assert "All balance" in views.checks(ledger).layout.title.subtitle.text
    Run(ledger).emit("free", buffer="conv.a", nbytes=1)
    figure = views.checks(ledger)
    assert "1 of 2 do not balance" in figure.layout.title.subtitle.text
    assert "✗ WRONG" in figure.data[0].cells.values[0]
    assert [row["ok"] for row in views.checks_table(ledger)] == [False, True]


def test_figures_need_nothing_from_the_network() -> None:
    for name in views.LEDGER_FIGURES:
        if name.startswith("compare"):
            continue
        text = getattr(views, name)(recorded(2)).to_json()
        assert "http" not in text


def test_a_peek_within_a_step_is_no_step_of_its_own() -> None:
    ledger = Ledger()
    run = Run(ledger, state="host")
    for step in range(3):
        run.decode(step, 5)
        look = {
            "graph": "peek_fixed",
            "inputs": ["host.conv", "host.recurrent", "host.kv"],
            "outputs": ["host.peek_kv"],
        }
        run.emit("predict", stage="decode", step=step, detail=look)
    assert [row["step"] for row in views.kv_growth_table(ledger)] == [0, 1, 2]


def test_residency_keeps_peeks_apart_from_steps() -> None:
    ledger = recorded(1)
    run = Run(ledger)
    run.allocate("conv.b", "past_conv_states", "conv", (4,), "float16", stage="decode", step=5)
    look = {"graph": "peek_fixed", "inputs": ["conv.b"], "outputs": ["host.peek_conv"]}
    run.emit("predict", stage="decode", step=5, detail=look)
    assert [row["role"] for row in views.residency_table(ledger) if row["buffer"] == "conv.b"][-1] == "peeked"
    assert "P peeked at" in views.residency(ledger).layout.title.subtitle.text
    assert "peeked" not in views.residency(recorded(1)).layout.title.subtitle.text


# a pool's sweep, and the card


def swept() -> Ledger:
    """Two sequences in a pool of four slots; one has left and its slots were filled with NaN. Then a sweep."""
    ledger = Ledger()
    ledger.set_meta("poison", True)
    table = SlotTable(4, 2, sink=ledger)
    table.allocate("cat")
    leaving = table.allocate("dog")
    table.end(table.begin([0]), [2])
    table.free(leaving)
    values = np.add.outer(np.add.outer(100.0 * np.arange(2), 10.0 * np.arange(4)), np.arange(3.0)).astype(np.float32)
    values[:, 2:] = np.nan
    ledger(Event("peek", 1, stage="verify", step=0, arrays={"pool.norm": values}))
    return ledger


def test_what_the_slots_hold_by_layer_and_head() -> None:
    ledger = swept()
    table = views.pool_states_table(ledger)
    assert len(table) == 2 * 4 * 3
    for row in table:
        if row["slot"] < 2:
            assert row["value"] == 100 * row["layer"] + 10 * row["slot"] + row["head"]
            assert (row["owner"], row["use"], row["position"]) == ("cat", "live", row["slot"])
        else:
            assert np.isnan(row["value"])
            assert row["use"] == "poisoned"
    figure = views.pool_states(ledger)
    assert figure.data[0].z.shape == (4, 6)
    assert figure.data[0].z[1][4] == 100 + 10 + 1
    assert set(figure.data[1].y) == {2, 3}
    assert "Not finite: slots 2, 3" in figure.layout.title.subtitle.text
    assert list(figure.layout.yaxis.ticktext) == [
        "slot 0 · cat [0] accepted",
        "slot 1 · cat [1] current",
        "slot 2 · poisoned",
        "slot 3 · poisoned",
    ]


def test_a_pool_nobody_swept_and_a_peek_of_another_shape() -> None:
    assert "group.sweep()" in text_of(views.pool_states(recorded(1)))
    assert views.pool_states_table(recorded(1)) == []
    with pytest.raises(UsageError, match=r"linear layer, slot, head"):
        views.pool_states(peeked(), "recurrent.norm")


def sampled_card(cores: float | None = 71.0) -> Ledger:
    ledger = Ledger()
    ledger.set_meta("started_ns", 0)
    run = Run(ledger)
    run.clock_ns = 1_000_000_000
    run.generate(2)
    for second, percent in ((0, 4.0), (2, 50.0)):
        devices = [
            {"memory_bytes": 1000, "memory_percent": percent + 10 * device, "aicore_percent": cores}
            for device in range(2)
        ]
        ledger(Event("sample", second * 1_000_000_000, 5, detail={"card": 3, "devices": devices}))
    return ledger


def test_what_npu_smi_told_of_the_card() -> None:
    ledger = sampled_card()
    table = views.card_usage_table(ledger)
    assert [(row["at_s"], row["card"], row["device"], row["used_bytes"]) for row in table] == [
        (0.0, 3, 0, 40),
        (0.0, 3, 1, 140),
        (2.0, 3, 0, 500),
        (2.0, 3, 1, 600),
    ]
    assert table[0]["during"] == ""
    assert table[-1]["during"]
    figure = views.card_usage(ledger)
    assert [list(trace.y) for trace in figure.data] == [[4, 50], [71, 71], [14, 60], [71, 71]]
    assert len({trace.line.dash for trace in figure.data}) == 2
    assert "card 3 device 1" in figure.layout.title.subtitle.text
    assert "not told" in text_of(views.card_usage(sampled_card(None)))
    assert "npu-smi was not asked" in text_of(views.card_usage(recorded(1)))
