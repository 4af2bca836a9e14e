"""The suite file: what it may hold, and that a fault is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_npu.errors import SuiteError
from qwen_npu.nightly.suite import line_of, load_suite, suites_dir

HEAD = 'schema = 1\nname = "trial"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.ipynb", "b.ipynb"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    return tmp_path


def suite_file(folder: Path, text: str) -> Path:
    path = folder / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_grid_is_spread(folder: Path) -> None:
    text = (
        HEAD
        + '[[item]]\nnotebook = "a.ipynb"\nparameters = { x = 1 }\n[item.grid]\nkv = ["fixed", "growing"]\nn = [1, 2]\n'
    )
    suite = load_suite(suite_file(folder, text))
    assert [item.id for item in suite.items] == [
        "a--kv-fixed--n-1",
        "a--kv-fixed--n-2",
        "a--kv-growing--n-1",
        "a--kv-growing--n-2",
    ]
    assert suite.items[3].parameters == {"x": 1, "kv": "growing", "n": 2}
    assert suite.baselines == folder / "baselines"


def test_budget_of_the_suite_is_the_default_of_its_items(folder: Path) -> None:
    text = HEAD + 'budget_s = 7\n[[item]]\nnotebook = "a.ipynb"\n[[item]]\nnotebook = "b.ipynb"\nbudget_s = 2.5\n'
    assert [item.budget_s for item in load_suite(suite_file(folder, text)).items] == [7.0, 2.5]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (HEAD + "[[item]]\nnotebook = 3\n", 4, "notebook"),
        (
            HEAD + '[[item]]\nnotebook = "a.ipynb"\n\n[[item]]\n# a note\nnotebook = "b.ipynb"\nbudget = 3\n',
            9,
            "unknown key",
        ),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\nbudget_s = -1\n', 5, "greater than 0"),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\ndevice = "gpu"\n', 5, "'npu'"),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\n[item.grid]\nn = []\n', 5, "empty"),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\nparameters = { n = 1 }\ngrid = { n = [1] }\n', 6, "both"),
        (HEAD + '[[item]]\nnotebook = "c.ipynb"\n', 4, "no notebook"),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\nid = "../up"\n', 5, "an id holds"),
        (HEAD + '[[item]]\nnotebook = "a.ipynb"\n[[item]]\nnotebook = "b.ipynb"\nid = "A"\n', 5, "two items"),
        ('schema = 2\nname = "x"\n[[item]]\nnotebook = "a.ipynb"\n', 1, "schema"),
        (HEAD + "[[item]\n", 3, "not TOML"),
        ("name = 'x'\nitem = []\nschema = 1\n", 2, "at least 1"),
    ],
)
def test_fault_is_named_with_its_line(folder: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(SuiteError) as error:
        load_suite(suite_file(folder, text))
    assert f"line {line}" in str(error.value)
    assert words in str(error.value)


def test_missing_and_unreadable_files(folder: Path) -> None:
    with pytest.raises(SuiteError, match="no suite file"):
        load_suite(folder / "none.toml")
    with pytest.raises(SuiteError, match="default"):
        load_suite("nonesuch")
    path = folder / "suite.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SuiteError, match="UTF-8"):
        load_suite(path)


def test_select(folder: Path) -> None:
    text = HEAD + '[[item]]\nnotebook = "a.ipynb"\ntags = ["quick"]\n[[item]]\nnotebook = "b.ipynb"\n'
    suite = load_suite(suite_file(folder, text))
    assert [item.id for item in suite.select(["quick"]).items] == ["a"]
    assert [item.id for item in suite.select(ids=["b"]).items] == ["b"]
    with pytest.raises(SuiteError, match="quick"):
        suite.select(["slow"])
    with pytest.raises(SuiteError, match="no item 'c'"):
        suite.select(ids=["c"])


@given(st.integers(0, 5), st.integers(0, 3))
def test_line_of_finds_the_nth_table(before: int, comments: int) -> None:
    lines = [f"# {n}" for n in range(comments)] + ['name = "x"']
    for n in range(before + 1):
        lines += ["[[item]]", f"id = {n}", "[item.grid]", "n = [1]"]
    text = "\n".join(lines)
    assert lines[line_of(text, ("item", before, "id")) - 1] == f"id = {before}"
    assert line_of(text, ("item", before, "grid", "n")) == len(lines)
    assert line_of(text, ("item", before, "absent")) == len(lines) - 3


def test_shipped_suites_load() -> None:
    shipped = sorted(suites_dir().glob("*.toml"))
    assert shipped
    for path in shipped:
        suite = load_suite(path.stem)
        assert suite.baselines == path.parents[1] / "baselines"
        assert any("quick" in item.tags for item in suite.items)
