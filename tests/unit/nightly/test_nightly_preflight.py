"""Parameters are checked before a kernel starts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_npu.errors import NotebookError
from qwen_npu.nightly.files import plain_parameter
from qwen_npu.nightly.preflight import check, parameters
from tests.integration.nightly_notebooks import write_notebook

CELL = '''
"""What can be set."""
steps: int = 8            # decode steps
state = "resident"
kv: Literal["fixed", "growing"] = "fixed"
scale = 0.5
label: str | None = None
prompts = ["a", "b"]
fast = True
limit: Optional[int] = None
shape = (1, 2)
offset = -1
'''


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "t.ipynb", ["x = 1"], parameters=CELL)


def test_known_parameters(notebook: Path) -> None:
    known = parameters(notebook)
    assert list(known) == ["steps", "state", "kv", "scale", "label", "prompts", "fast", "limit", "shape", "offset"]
    assert known["steps"].default == 8
    assert known["offset"].default == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 3),
        ("scale", 2),
        ("scale", 0.25),
        ("kv", "growing"),
        ("label", None),
        ("label", "猫 😀.png"),
        ("fast", False),
        ("limit", 4),
        ("limit", None),
        ("shape", (3, 4)),
    ],
)
def test_right_types(notebook: Path, name: str, value: Any) -> None:
    wanted = list(value) if isinstance(value, tuple) else value
    assert check(notebook, {name: value}) == {name: wanted}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("step", 3, "did you mean 'steps'"),
        ("nothing_like_it", 3, "has no parameter"),
        ("steps", "3", "Expected: int, such as 8"),
        ("steps", 3.0, "(float)"),
        ("steps", True, "(bool)"),
        ("fast", 1, "Expected: bool"),
        ("state", 1, "Expected: str"),
        ("kv", "grown", "one of 'fixed', 'growing'"),
        ("label", 3, "None or str"),
        ("prompts", "a", "Expected: list"),
        ("steps", dt.date(2026, 1, 2), "of type date"),
    ],
)
def test_wrong_ones_are_refused(notebook: Path, name: str, value: Any, words: str) -> None:
    with pytest.raises(NotebookError) as error:
        check(notebook, {name: value})
    assert words in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "line",
    ["y = x * 10", "import os", "a = b = 1", "n += 1", "f(1)", "p = Path('x')", "t = f'{1}'", "d['k'] = 1", "n: int"],
)
def test_only_literals(tmp_path: Path, line: str) -> None:
    path = write_notebook(tmp_path / "t.ipynb", [], parameters=f"x = 1\n{line}\n")
    with pytest.raises(NotebookError, match=r"line 2.*not a name with a literal"):
        parameters(path)


def test_parameters_cell_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="has no code cell tagged"):
        parameters(write_notebook(tmp_path / "t.ipynb", ["x = 1"], parameters=None))
    path = tmp_path / "t.ipynb"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(NotebookError, match="format 4"):
        parameters(path)
    with pytest.raises(NotebookError, match="cannot be read"):
        parameters(tmp_path / "absent.ipynb")
    with pytest.raises(NotebookError, match="not Python"):
        parameters(write_notebook(path, [], parameters="x = = 1"))


def test_conversion_boundary() -> None:
    given = {"a": (1, (2, 3)), "p": Path("x") / "y", "i": np.int64(3), "f": np.float32(0.5), "d": {"k": (1,)}}
    assert plain_parameter("all", given) == {"a": [1, [2, 3]], "p": "x/y", "i": 3, "f": 0.5, "d": {"k": [1]}}
    for value, kind in ((np.zeros(2), "ndarray"), ({1}, "set"), (b"x", "bytes"), (1j, "complex")):
        with pytest.raises(NotebookError, match=kind):
            plain_parameter("x", [value])
    with pytest.raises(NotebookError, match="text keys"):
        plain_parameter("x", {1: 2})
