"""The op against answers computed in float64 elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.unit.rgdr.rgdr_cases import EPS, TINY, Case, assert_close, dtype_name, golden_files


@cache
def load(path: Path) -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key in file.files:
            name, array = key.split("/")
            cases.setdefault(name, {})[array] = file[key]
    return cases


ALL = [pytest.param(path, name, id=f"{path.stem}-{name}") for path in golden_files() for name in load(path)]


def case_of(arrays: dict[str, np.ndarray]) -> Case:
    return Case(
        query=arrays["q"],
        key=arrays["k"],
        value=arrays["v"],
        beta=arrays["beta"],
        state=arrays["state"],
        lengths=arrays["lens"],
        indices=arrays["idx"],
        g=arrays.get("g"),
        gk=arrays.get("gk"),
        accepted=arrays.get("acc"),
        scale=float(arrays["scale"]),
    )


def relative_rms(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((actual.astype(np.float64) - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize(("path", "name"), ALL)
def test_op_gives_the_golden_answer(path: Path, name: str) -> None:
    arrays = load(path)[name]
    case = case_of(arrays)
    out, state = case.run()
    for what, actual, exact in (("out", out, arrays["out64"]), ("state", state, arrays["state64"])):
        if dtype_name(actual.dtype) == "f32":
            assert relative_rms(actual, exact) <= 2e-6, what
        else:
            assert_close(actual, exact, case.query.shape[2], what)


@pytest.mark.parametrize(("path", "name"), ALL)
def test_reference_in_float64_gives_the_golden_answer_before_rounding(path: Path, name: str) -> None:
    arrays = load(path)[name]
    out, state = case_of(arrays).exact()
    # The answers were stored unrounded, except that slots nobody writes hold the pool's own numbers.
    np.testing.assert_allclose(out, arrays["out64"], rtol=1e-10, atol=1e-12)
    loose = EPS[dtype_name(arrays["state"].dtype)]
    np.testing.assert_allclose(state, arrays["state64"], rtol=loose, atol=max(TINY["f16"], 1e-12))
