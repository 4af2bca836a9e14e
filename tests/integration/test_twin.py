"""The Ascend C op on its C++ twin against the op on the CPU: the same rows and pool, the same sequences refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_npu.errors import OpError, WorkbenchError
from qwen_npu.graphs.nodes import RECURRENT_INPUTS
from qwen_npu.rgdr import recurrent_gated_delta_rule, twin

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "data" / "rgdr_golden_small.npz"
PACKAGE = REPOSITORY / "kernels" / "rgdr"

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler on this machine"
)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The runner is built into one directory for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN_NPU_CACHE", str(tmp_path_factory.getbasetemp().parent / "twin-cache"))
        yield


def call(
    lengths: list[int],
    *,
    width: int = 0,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (32, 48),
    gk: int = 0,
    index: type = np.int32,
    seed: int = 0,
) -> dict[str, Any]:
    """A sound call in f16; width 0 = flat slots; slots are 0, 1, 2 .. by position; every number depends on the seed."""
    rng = np.random.default_rng(seed)
    tokens, (nk, nv), (dk, dv) = sum(lengths), heads, dims
    slots = (len(lengths) * width if width else tokens) + 2
    unit = rng.standard_normal((2, tokens, nk, dk))
    unit /= np.sqrt((unit**2).sum(-1, keepdims=True) + 1e-6)
    positions = np.arange(len(lengths) * width if width else tokens, dtype=index)
    arguments: dict[str, Any] = {
        "query": unit[0].astype(np.float16),
        "key": unit[1].astype(np.float16),
        "value": rng.standard_normal((tokens, nv, dv)).astype(np.float16),
        "beta": rng.uniform(0.1, 1, (tokens, nv)).astype(np.float16),
        "state": (rng.standard_normal((slots, nv, dv, dk)) * 0.5).astype(np.float16),
        "actual_seq_lengths": np.asarray(lengths, index),
        "ssm_state_indices": positions.reshape(len(lengths), width) if width else positions,
        "g": rng.uniform(-1.5, 0, (tokens, nv)).astype(np.float32),
        "num_accepted_tokens": np.ones(len(lengths), np.int32),
        "scale": dk**-0.5,
    }
    if gk:
        shape = (tokens, nv) if gk == 1 else (tokens, nv, dk)
        arguments["gk"] = rng.uniform(-0.8, 0, shape).astype(np.float32)
    return arguments


def both(arguments: dict[str, Any], **options: Any) -> tuple[twin.TwinResult, np.ndarray, np.ndarray]:
    """(on the twin, out on the CPU, pool on the CPU)."""
    pool = arguments["state"].copy()
    out = recurrent_gated_delta_rule(**{**arguments, "state": pool}, on_error="skip")
    return twin.run(**arguments, **options), out, pool


def assert_same(arguments: dict[str, Any], **options: Any) -> twin.TwinResult:
    result, out, pool = both(arguments, **options)
    assert result.findings == ()
    for ours, theirs in ((result.out, out), (result.state, pool)):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        a, b = np.nan_to_num(ours.astype(np.float64)), np.nan_to_num(theirs.astype(np.float64))
        # Both compute in f32 and round once: they differ where a rounding falls on the other side, by one unit.
        assert np.count_nonzero(a != b) <= a.size / 50 + 2
        np.testing.assert_allclose(a, b, rtol=2**-10, atol=2**-20)
    return result


@needs_compiler
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("gk", [0, 1, 2])
def test_sound_calls_agree(width: int, gk: int) -> None:
    arguments = call([2, 4, 1], width=width, gk=gk, heads=(2, 4), index=np.int64 if gk else np.int32, seed=gk)
    arguments["num_accepted_tokens"] = np.asarray([0, 3, 4 if width else 1], np.int32)
    assert_same(arguments, core_order="backward", barriers="automatic" if gk else "strict")


def faults(width: int) -> dict[str, dict[str, Any]]:
    """Changes of call([2, 3, 2]) that one or more sequences must not survive."""
    sound = call([2, 3, 2], width=width, index=np.int64)
    second = 4 if width else 2
    flat = sound["ssm_state_indices"].ravel()

    def slots(**changes: int) -> dict[str, Any]:
        changed = flat.copy()
        for position, slot in changes.items():
            changed[int(position[1:])] = slot
        return {"ssm_state_indices": changed.reshape(sound["ssm_state_indices"].shape)}

    def accepted(*values: int) -> dict[str, Any]:
        return {"num_accepted_tokens": np.asarray(values, np.int32)}

    def lengths(*values: int) -> dict[str, Any]:
        return {"actual_seq_lengths": np.asarray(values, np.int64)}

    pads = slots(**{f"p{position}": -1 for position in range(second, second + (4 if width else 3))})
    return {
        "slot behind the pool": slots(**{f"p{second}": len(sound["state"])}),
        "negative slot": slots(**{f"p{second + 1}": -1}),
        "slot 2^32 + 1": slots(**{f"p{second}": 2**32 + 1}),
        "accepted too large": accepted(1, 5, 1),
        "accepted negative": accepted(1, -1, 1),
        "accepted 0": accepted(0, 0, 0),
        "two write one slot": slots(p0=second + 1),
        "one reads what another writes": slots(**{f"p{second}": 1}),
        "clash with one that fails": slots(p0=second) | accepted(1, 9, 1),
        "length 0": lengths(0, 3, 2),
        "length 9": lengths(9, 3, 2),
        "negative length": lengths(-3, 3, 2),
        "too few tokens": lengths(2, 3, 1),
        "too many tokens": lengths(2, 3, 3),
        "a huge length": lengths(2, 2**40, 2),
        "pads without pad_slot": pads,
        "pads": {**pads, "pad_slot": -1},
        "the pad slot among others": {**slots(**{f"p{second}": -1}), "pad_slot": -1},
        "the pad slot is a slot": {"pad_slot": second + 1},
    }


@needs_compiler
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("fault", sorted(faults(0)))
def test_the_same_sequences_are_refused(width: int, fault: str) -> None:
    arguments = call([2, 3, 2], width=width, index=np.int64) | faults(width)[fault]
    result = assert_same(arguments)
    if fault not in ("accepted 0", "pads"):
        assert np.isnan(result.out).any()


@st.composite
def sound(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    width = draw(st.sampled_from([0, 0, max(lengths), max(lengths) + 1]))
    heads = draw(st.integers(1, 3))
    arguments = call(
        lengths,
        width=width,
        heads=(heads, heads * draw(st.integers(1, 4))),
        dims=(16 * draw(st.integers(1, 8)), 16 * draw(st.integers(1, 8))),
        gk=draw(st.integers(0, 2)),
        index=draw(st.sampled_from([np.int32, np.int64])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    depths = draw(st.none() | st.tuples(*(st.integers(0, width or n) for n in lengths)))
    arguments["num_accepted_tokens"] = None if depths is None else np.asarray(depths, np.int32)
    if draw(st.booleans()):
        arguments["g"] = None
    return arguments


@st.composite
def unsound(draw: st.DrawFn) -> dict[str, Any]:
    """Integers that may be wrong in any way, and often clash."""
    width = draw(st.sampled_from([0, 1, 3]))
    sequences = draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 9))
    arguments = call([tokens] if not width else [1] * tokens, dims=(16, 16), heads=(1, 1))
    shape = (sequences, width) if width else (tokens,)
    size = sequences * width if width else tokens
    slot = st.integers(-1, draw(st.integers(1, len(arguments["state"]))))
    drawn = draw(st.lists(slot, min_size=size, max_size=size))
    arguments["ssm_state_indices"] = np.asarray(drawn, np.int64).reshape(shape)
    lengths = draw(st.lists(st.integers(-1, 9) | st.integers(1, 3), min_size=sequences, max_size=sequences))
    if draw(st.booleans()):  # the last makes the sum right, if it can
        lengths[-1] = tokens - sum(lengths[:-1])
    arguments["actual_seq_lengths"] = np.asarray(lengths, np.int64)
    accepted = draw(st.none() | st.lists(st.integers(-1, 4), min_size=sequences, max_size=sequences))
    arguments["num_accepted_tokens"] = None if accepted is None else np.asarray(accepted, np.int32)
    arguments["pad_slot"] = draw(st.none() | st.integers(-1, 1))
    return arguments


few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
many = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@needs_compiler
@few
@given(sound())
def test_any_sound_call_agrees(arguments: dict[str, Any]) -> None:
    assert_same(arguments)


@needs_compiler
@few
@given(unsound())
def test_any_integers_agree(arguments: dict[str, Any]) -> None:
    assert_same(arguments)


@needs_compiler
@pytest.mark.full
@many
@given(sound())
def test_many_sound_calls_agree(arguments: dict[str, Any]) -> None:
    assert_same(arguments, core_order="backward")


@needs_compiler
@pytest.mark.full
@many
@given(unsound())
def test_many_integers_agree(arguments: dict[str, Any]) -> None:
    assert_same(arguments)


@needs_compiler
def test_golden_cases_of_16_bits() -> None:
    seen = 0
    with np.load(GOLDEN) as archive:
        for name in sorted({entry.split("/")[0] for entry in archive.files}):
            case = {entry.split("/")[1]: archive[entry] for entry in archive.files if entry.startswith(f"{name}/")}
            arguments = {
                "query": case["q"],
                "key": case["k"],
                "value": case["v"],
                "beta": case["beta"],
                "state": case["state"],
                "actual_seq_lengths": case["lens"],
                "ssm_state_indices": case["idx"],
                "g": case.get("g"),
                "gk": case.get("gk"),
                "num_accepted_tokens": case.get("acc"),
                "scale": float(case["scale"]),
            }
            if case["q"].shape[-1] % 16 or case["v"].shape[-1] % 16:
                with pytest.raises(OpError, match="multiples of 16"):
                    twin.run(**arguments)
                continue
            result = twin.run(**arguments)
            assert result.findings == ()
            for ours, exact in ((result.out, case["out64"]), (result.state, case["state64"])):
                assert np.mean(ours != exact.astype(np.float16)) <= 0.01, name
            seen += 1
    assert seen >= 3


@needs_compiler
def test_what_the_host_refuses_names_the_reason() -> None:
    arguments = call([1])
    with pytest.raises(OpError, match="state has data type 0"):
        twin.run(**{**arguments, "state": arguments["state"].astype(np.float32)})
    with pytest.raises(OpError, match="expected 27"):
        twin.run(**arguments, soc="ascend910b")


@needs_compiler
def test_bfloat16_on_the_other_chip() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arguments = call([2, 1], seed=3)
    for name in ("query", "key", "value", "beta", "state"):
        arguments[name] = arguments[name].astype(bfloat16)
    result, out, pool = both(arguments, soc="ascend910b")
    assert result.findings == ()
    assert np.mean(result.out != out) <= 0.01
    assert np.mean(result.state != pool) <= 0.01


@needs_compiler
def test_counts_at_model_size() -> None:
    counted = twin.counts(128, 128, NK=16, NV=32)
    assert counted.vector_to_scalar_waits <= 4 * counted.token_heads
    state, row = 128 * 128 * 2, 128 * 2
    assert counted.read_bytes == dict.fromkeys(("query", "key", "value"), 32 * row) | {"state": 32 * state}
    assert counted.written_bytes == {"out": 32 * row, "state": 32 * state}
    assert counted.ub_bytes <= counted.user_ub_bytes
    verify = twin.counts(128, 128, NK=4, NV=8, tokens=4)
    assert verify.read_bytes["state"] == 8 * state  # once for four tokens
    assert verify.written_bytes["state"] == 4 * 8 * state  # the state after each of them


@needs_compiler
def test_the_definition_is_the_contract() -> None:
    defined = twin.definition()
    inputs = defined["units"]["ascend310p"]["inputs"]
    assert [item["name"] for item in inputs] == list(RECURRENT_INPUTS)
    assert [item["name"] for item in inputs if not item["required"]] == ["g", "gk", "num_accepted_tokens"]
    assert [item["name"] for item in defined["units"]["ascend310p"]["outputs"]] == ["out", "state"]
    assert defined["attributes"][0] == {"name": "scale_value", "type": "float", "default": 1.0}
    assert inputs[0]["types"] == [1] * 4  # float16
    assert defined["units"]["ascend910b"]["inputs"][0]["types"] == [27] * 4  # bfloat16

    # The prototype that msopgen reads says the same.
    numbers = {"float": 0, "float16": 1, "int32": 3, "int64": 9}
    (prototype,) = json.loads((PACKAGE / "recurrent_gated_delta_rule.json").read_text())
    assert prototype["op"] == defined["op"]
    for kind, key in (("inputs", "input_desc"), ("outputs", "output_desc")):
        assert [(item["name"], item["required"], item["types"]) for item in defined["units"]["ascend310p"][kind]] == [
            (item["name"], item["param_type"] == "required", [numbers[name] for name in item["type"]])
            for item in prototype[key]
        ]
    assert [(item["name"], item["type"], item["default"]) for item in defined["attributes"]] == [
        (item["name"], item["type"], item["default_value"]) for item in prototype["attr"]
    ]


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("QWEN_NPU_CACHE", str(tmp_path))
    with pytest.raises(WorkbenchError, match="no C\\+\\+ compiler"):
        twin.counts()
