"""The data behind the figures, by their tables and traces; nothing here looks at pixels."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from qwen_npu import views
from qwen_npu.errors import UsageError
from qwen_npu.ledger.store import Ledger
from qwen_npu.views import theme
from tests.unit.ledger.runs import (
    CONV_BYTES,
    KV_TOKEN_BYTES,
    LOGITS_BYTES,
    PROMPT,
    RECURRENT_BYTES,
    Run,
    recorded,
)

ONE_LEDGER = ("residency", "ping_pong", "traffic", "kv_growth", "timings")
INPUT_BYTES = 8 + 128 + 32


def rows(table: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in table if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("name", ONE_LEDGER)
@pytest.mark.parametrize("kv", ["fixed", "growing"])
@pytest.mark.parametrize("state", ["resident", "host"])
@pytest.mark.parametrize("generations", [1, 2])
def test_every_figure_draws_every_run(name: str, kv: str, state: str, generations: int) -> None:
    ledger = recorded(4, kv=kv, state=state, generations=generations)
    figure = getattr(views, name)(ledger)
    figure.to_json()  # plotly checks every property
    assert figure.layout.title.text
    for bar in figure.select_traces({"type": "bar"}):  # plotly.js asks a pattern for ONE colour under it
        assert bar.marker.pattern.shape is None or isinstance(bar.marker.color, str)
    if not (name == "ping_pong" and state == "host"):
        assert figure.data
        assert getattr(views, f"{name}_table")(ledger)


@pytest.mark.parametrize("name", ONE_LEDGER)
def test_an_empty_ledger_says_why_there_is_nothing(name: str) -> None:
    figure = getattr(views, name)(Ledger())
    assert not figure.data
    assert "ledger holds no" in figure.layout.annotations[0].text or "No pair" in figure.layout.annotations[0].text
    assert getattr(views, f"{name}_table")(Ledger()) == []


def test_resident_steps_move_inputs_up_and_logits_down() -> None:
    table = views.traffic_table(recorded(3))
    for step in range(3):
        moved = {(row["direction"], row["kind"]): row["nbytes"] for row in rows(table, step=step)}
        assert moved == {("H2D", "input"): INPUT_BYTES, ("D2H", "logits"): LOGITS_BYTES}
    once = {row["kind"]: row["nbytes"] for row in rows(table, at="decode start")}
    assert once == {"conv": CONV_BYTES, "recurrent": RECURRENT_BYTES, "kv": 16 * KV_TOKEN_BYTES}
    assert "no state crosses" in views.traffic(recorded(3)).layout.title.subtitle.text


def test_round_trip_steps_move_all_states_both_ways() -> None:
    ledger = recorded(3, state="host", kv="growing")
    table = views.traffic_table(ledger)
    kv = (PROMPT + 1) * KV_TOKEN_BYTES
    moved = {(row["direction"], row["kind"]): row["nbytes"] for row in rows(table, step=1)}
    assert moved == {
        ("H2D", "input"): INPUT_BYTES,
        ("H2D", "conv"): CONV_BYTES,
        ("H2D", "recurrent"): RECURRENT_BYTES,
        ("H2D", "kv"): kv,
        ("D2H", "logits"): LOGITS_BYTES,
        ("D2H", "conv"): CONV_BYTES,
        ("D2H", "recurrent"): RECURRENT_BYTES,
        ("D2H", "kv"): kv + KV_TOKEN_BYTES,
    }
    figure = views.traffic(ledger)
    heights = {(bar.name, bar.y[1]) for bar in figure.data}
    assert ("kv", kv) in heights
    assert ("kv", -kv - KV_TOKEN_BYTES) in heights


def test_traffic_keeps_generations_apart() -> None:
    table = views.traffic_table(recorded(2, generations=3))
    assert [row["run"] for row in rows(table, step=1, kind="logits")] == [0, 1, 2]


def test_the_emulators_own_count_is_not_added() -> None:
    ledger = Ledger()
    run = Run(ledger)
    run.emit("upload", buffer="ascend:0@0x10", nbytes=8, source="emulator", stage="decode", step=0)
    run.emit("upload", other="input.input_ids", nbytes=8, source="inferred", stage="decode", step=0)
    assert [row["nbytes"] for row in views.traffic_table(ledger)] == [8]


def test_many_steps_are_drawn_as_areas_with_the_same_data() -> None:
    ledger = recorded(500, kv="growing", state="host")
    figure = views.traffic(ledger)
    assert {trace.type for trace in figure.data} == {"scatter"}
    total = sum(sum(abs(y) for y in trace.y) for trace in figure.data)
    assert total == sum(row["nbytes"] for row in views.traffic_table(ledger) if row["step"] >= 0)


def test_two_runs_on_one_scale() -> None:
    resident, host = recorded(3), recorded(3, state="host")
    table = views.compare_traffic_table(resident, host)
    states = CONV_BYTES + RECURRENT_BYTES + 16 * KV_TOKEN_BYTES
    for row in table:
        assert row["host round trip"] - row["resident"] == states
    figure = views.compare_traffic(resident, host)
    figure.to_json()
    assert figure.layout.yaxis2.matches == "y"
    assert {trace.xaxis for trace in figure.data} == {"x", "x2"}


def test_residency_tells_what_each_step_reads_and_writes() -> None:
    table = views.residency_table(recorded(3))
    assert [row["role"] for row in rows(table, buffer="conv.a")] == ["uploaded", "read", "written", "read", "idle"]
    assert [row["after"] for row in rows(table, buffer="conv.a")] == ["live", "scratch", "live", "scratch", "scratch"]
    assert {row["device"] for row in rows(table, kind="recurrent") if "." in row["buffer"]} == {"ascend:0"}
    assert rows(table, buffer="conv.a")[0]["site"] == "runtime/states.py:77"
    assert [row["at"] for row in rows(table, buffer="host conv")] == ["decode start"]


def test_a_growing_cache_has_two_generations_alive_within_a_step() -> None:
    table = views.residency_table(recorded(3, kv="growing"))
    step = [(row["generation"], row["role"]) for row in rows(table, buffer="kv", at="decode 1")]
    assert step == [(1, "read"), (2, "written")]


def test_residency_hover_names_what_people_look_for() -> None:
    figure = views.residency(recorded(3))
    texts = [text for trace in figure.data if trace.hovertext for text in trace.hovertext if "recurrent.b" in text]
    assert texts
    for fact in (
        "float32[3, 1, 4, 8, 8]",
        "3072 B",
        "ascend:0",
        "generation 0",
        "runtime/states.py:77",
        "last written",
    ):
        assert any(fact in text for text in texts), fact


def test_arrows_tell_bytes_and_time_of_every_copy() -> None:
    """The upload of a state takes 500 ns in the recording; what predict moves by itself has no time of its own."""
    ledger = recorded(1)
    arrows = {trace.name: trace for trace in views.residency(ledger).data if (trace.name or "").startswith("copy ")}
    up, down = arrows["copy H2D"], arrows["copy D2H"]
    assert (up.marker.symbol, down.marker.symbol) == ("triangle-up", "triangle-down")
    assert any(f"({RECURRENT_BYTES} B) in 0.5 µs" in text for text in up.hovertext)
    assert any("host.input_ids" in text for text in up.hovertext)
    (logits,) = [text for text in down.hovertext if "logits" in text]
    assert f"({LOGITS_BYTES} B)" in logits


def test_host_is_hatched_and_device_is_not() -> None:
    figure = views.residency(recorded(2))
    for trace in figure.data:
        if trace.type == "bar":
            assert trace.marker.pattern.shape == ("/" if trace.name.endswith("host") else "")


def test_a_window_shows_its_ticks_and_no_others() -> None:
    ledger = recorded(30)
    assert {row["tick"] for row in views.residency_table(ledger, window=(5, 8))} == {5, 6, 7, 8}
    assert "ticks 5 to 8 of 33" in views.residency(ledger, window=(5, 8)).layout.annotations[-1].text
    with pytest.raises(UsageError, match="holds no tick"):
        views.residency(ledger, window=(90, 95))


def test_ping_pong_alternates_and_names_a_clash() -> None:
    table = views.ping_pong_table(recorded(4))
    assert [(row["live"], row["scratch"]) for row in rows(table, kind="kv")] == [("kv.a", "kv.b"), ("kv.b", "kv.a")] * 2
    assert not any(row["clash"] for row in table)
    ledger = recorded(2)
    Run(ledger).emit("predict", stage="decode", step=2, detail={"inputs": ["conv.a"], "outputs": ["conv.a"]})
    assert [row["clash"] for row in views.ping_pong_table(ledger)][-1] is True
    assert any(trace.name == "read and written in one step" for trace in views.ping_pong(ledger).data)


@pytest.mark.parametrize("state", ["resident", "host"])
def test_a_growing_cache_costs_what_was_predicted(state: str) -> None:
    table = views.kv_growth_table(recorded(5, kv="growing", state=state))
    for step, row in enumerate(table):
        tokens = PROMPT + step + 1
        assert row["used_tokens"] == row["capacity_tokens"] == tokens
        assert row["kv_bytes"] == row["predicted_bytes"] == row["used_bytes"] == tokens * KV_TOKEN_BYTES
        assert row["allocated_bytes"] == (tokens * KV_TOKEN_BYTES if state == "resident" else 0)
        assert row["recurrent_bytes"] == RECURRENT_BYTES
    figure = views.kv_growth(recorded(5, kv="growing"))
    assert "Grows by 64 B a token" in figure.layout.title.subtitle.text
    (flat,) = [trace for trace in figure.data if (trace.name or "").startswith("recurrent")]
    assert set(flat.y) == {RECURRENT_BYTES}


def test_a_fixed_cache_is_constant_and_fills_up() -> None:
    table = views.kv_growth_table(recorded(5))
    assert {row["kv_bytes"] for row in table} == {16 * KV_TOKEN_BYTES}
    assert [row["used_tokens"] for row in table] == [6, 7, 8, 9, 10]
    assert {row["allocated_bytes"] for row in table} == {0}


def test_a_cache_of_another_size_than_predicted_is_named() -> None:
    ledger = recorded(3)
    ledger.set_meta("capacity", 32)
    assert "NOT as predicted at 3 of 3 steps" in views.kv_growth(ledger).layout.title.subtitle.text


def test_timings_keep_both_conventions_and_the_upload_apart() -> None:
    ledger = recorded(4)
    table = views.timings_table(ledger)
    assert [row["stage"] for row in table] == ["prefill", "decode", "decode", "decode", "decode"]
    assert table[1]["predict_ms"] == 0.003
    assert table[1]["wall_ms"] == pytest.approx(0.005)
    figure = views.timings(ledger)
    assert {trace.name for trace in figure.data if trace.type == "scatter"} == {"predict", "wall"}
    assert [bar.x for bar in figure.data if bar.type == "bar"] == [("prefill",), ("upload",)]


def test_emulated_figures_say_so() -> None:
    ledger = recorded(2)
    assert "emulated" not in views.timings(ledger).layout.annotations[-1].text
    ledger.set_meta("driver", "emulator")
    ledger.set_meta("device", "ascend:0")
    text = views.timings(ledger).layout.annotations[-1].text
    assert "ascend:0 emulated: bytes and counts are exact, times are this CPU&#x27;s" in text


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_can_be_read_in_both_themes(name: Any) -> None:
    theme.use(name)
    try:
        for text in ("text", "soft"):
            for paper in ("paper", "band"):
                assert theme.contrast(theme.shade(text), theme.shade(paper)) >= 4.5
        for kind in theme.KINDS:
            for share in (1.0, 0.5, 0.25, 0.2):
                background = theme.tint(theme.colour(kind), share)
                assert theme.contrast(theme.ink(background), background) >= 4.5
        figure = views.traffic(recorded(2))
        assert figure.layout.paper_bgcolor == theme.shade("paper")
    finally:
        theme.use("light")


def test_kinds_differ_without_colour() -> None:
    assert len(set(theme.KIND_PATTERNS.values())) == len(theme.KINDS) == len(set(theme.KIND_COLOURS.values()))


def test_an_unknown_theme_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown theme"):
        theme.use("sepia")  # type: ignore[arg-type]


def test_a_table_shows_itself_and_escapes() -> None:
    table = theme.Table([{"text": "<b>&", "n": i, "x": 1.23456} for i in range(theme.MAX_ROWS + 5)])
    html = table._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "1.235" in html
    assert "5 more rows" in html
    assert "no rows" in theme.Table()._repr_html_()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (-2048, "-2.0 KiB"), (50331648, "48.0 MiB"), (2**40, "1024 GiB")],
)
def test_bytes_as_text(nbytes: int, text: str) -> None:
    assert theme.bytes_text(nbytes) == text


def test_views_bring_plotly_in_only_when_used() -> None:
    code = "import sys; from qwen_npu import views; views.theme; assert 'plotly' not in sys.modules; views.traffic"
    subprocess.run([sys.executable, "-c", code + "; assert 'plotly' in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="it has"):
        _ = views.residence
