"""Calls of the op for the tests of this directory: seeded, with L2-normalised q and k, and their answer in float64."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qwen_npu.rgdr import recurrent_gated_delta_rule
from qwen_npu.rgdr.plan import plan_recurrent
from qwen_npu.rgdr.reference import recurrence

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
EPS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # half a unit in the last place, relative
TINY = {"f32": 0.0, "f16": 2.0**-25, "bf16": 0.0}  # the same among subnormals
REPOSITORY = Path(__file__).parents[3]
SMALL_CASES = REPOSITORY / "tests" / "data" / "rgdr_golden_small.npz"


def dtype_name(dtype: Any) -> str:
    return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[np.dtype(dtype).name]


@dataclass
class Case:
    """Arguments of one call. `state` is the pool before it."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    lengths: np.ndarray
    indices: np.ndarray
    g: np.ndarray | None = None
    gk: np.ndarray | None = None
    accepted: np.ndarray | None = None
    scale: float = 0.25
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, state: np.ndarray | None = None, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """(out, pool after) of the op; `self.state` stays as it is unless it is passed."""
        pool = self.state.copy() if state is None else state
        out = recurrent_gated_delta_rule(
            self.query,
            self.key,
            self.value,
            self.beta,
            pool,
            self.lengths,
            self.indices,
            g=self.g,
            gk=self.gk,
            num_accepted_tokens=self.accepted,
            scale=self.scale,
            **{**self.options, **more},
        )
        return out, pool

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, pool after) in float64, unrounded."""
        rows = self.indices.ndim == 2
        plan = plan_recurrent(
            self.lengths.tolist(),
            None if rows else self.indices.tolist(),
            self.indices.tolist() if rows else None,
            None if self.accepted is None else self.accepted.tolist(),
            len(self.query),
            len(self.state),
        )
        out = np.zeros(self.value.shape)
        state = self.state.astype(np.float64)
        recurrence(
            self.query, self.key, self.value, self.beta, state.copy(), state, out, plan,
            g=self.g, gk=self.gk, scale=self.scale,
        )  # fmt: skip
        return out, state

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make_case(
    seed: int = 0,
    lengths: tuple[int, ...] = (1,),
    *,
    nk: int = 2,
    group: int = 2,
    dk: int = 16,
    dv: int = 24,
    dtype: str = "f32",
    pool: str = "f32",
    rows: int = 0,
    spare: int = 1,
    g: bool = True,
    gk: str = "",
    accepted: tuple[int, ...] | None = None,
    integers: Any = np.int32,
) -> Case:
    """A right call. rows: width of the rows, 0 for flat indices. spare: slots nobody owns. gk: "", scalar or vector."""
    rng = np.random.default_rng(seed)
    tokens, sequences, nv = sum(lengths), len(lengths), nk * group
    used = sequences * rows if rows else tokens
    slots = rng.permutation(used + spare)[:used]
    return Case(
        query=unit(rng, (tokens, nk, dk)).astype(DTYPES[dtype]),
        key=unit(rng, (tokens, nk, dk)).astype(DTYPES[dtype]),
        value=rng.standard_normal((tokens, nv, dv)).astype(DTYPES[dtype]),
        beta=rng.random((tokens, nv)).astype(DTYPES[dtype]),
        state=rng.standard_normal((used + spare, nv, dv, dk)).astype(DTYPES[pool]),
        lengths=np.array(lengths, integers),
        indices=slots.reshape(sequences, rows).astype(integers) if rows else slots.astype(integers),
        g=-rng.exponential(1.0, (tokens, nv)).astype(np.float32) if g else None,
        gk=-rng.exponential(0.5, (tokens, nv) if gk == "scalar" else (tokens, nv, dk)).astype(np.float32)
        if gk
        else None,
        accepted=None if accepted is None else np.array(accepted, integers),
    )


def assert_close(actual: np.ndarray, exact: np.ndarray, lanes: int, what: str) -> None:
    """`actual` is `exact` within one rounding to its dtype and the error of f32 sums over `lanes` numbers."""
    name = dtype_name(actual.dtype)
    got = actual.astype(np.float64)
    size = max(1.0, float(np.abs(exact).max(initial=0)))
    tolerance = np.maximum(1.01 * EPS[name] * np.abs(exact), TINY[name]) + 2.0**-24 * 4 * np.sqrt(lanes) * size
    wrong = ~(np.abs(got - exact) <= tolerance)
    assert not wrong.any(), (
        f"{what}: {wrong.sum()} of {wrong.size} wrong, worst {np.nanmax(np.abs(got - exact) / tolerance)}"
    )


def check(case: Case) -> None:
    """The op's answer is the exact one, and slots that nobody writes keep their bytes."""
    out, state = case.run()
    exact_out, exact_state = case.exact()
    lanes = case.query.shape[2] * max(1, int(case.lengths.max(initial=1)))
    assert_close(out, exact_out, lanes, "out")
    assert_close(state, exact_state, lanes, "state")
    untouched = sorted(set(range(len(state))) - set(written_slots(case)))
    assert state[untouched].tobytes() == case.state[untouched].tobytes()


def written_slots(case: Case) -> list[int]:
    if case.indices.ndim == 1:
        return [int(slot) for slot in case.indices]
    return [int(slot) for row, n in zip(case.indices, case.lengths, strict=True) for slot in row[:n]]


def golden_files() -> list[Path]:
    """The golden cases of this repository, and the full set where it is at hand."""
    full = [Path(os.environ.get("QWEN_NPU_CASES", REPOSITORY.parent / "shared" / "cases")) / "rgdr_golden.npz"]
    return [SMALL_CASES, *(path for path in full if path.is_file())]
