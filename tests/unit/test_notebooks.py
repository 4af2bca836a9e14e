"""The form of every notebook: what a reader of the repository, papermill and JupyterLab rely on."""

from __future__ import annotations

import ast
import json
import re

import pytest

from qwen_npu.data import notebooks_dir

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
LONGEST_CELL_LINES = 45


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def notebook(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def code(notebook) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell) -> str:
    return "".join(cell["source"])


def test_the_course_is_whole():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(10)]


def test_format_kernel_and_cell_ids_are_pinned(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


def test_nothing_of_a_run_is_stored(notebook):
    assert "widgets" not in notebook["metadata"]
    for cell in code(notebook):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_one_parameters_cell_of_typed_literals(notebook):
    (cell,) = [cell for cell in code(notebook) if "parameters" in cell["metadata"].get("tags", [])]
    for statement in ast.parse(source(cell)).body:
        assert isinstance(statement, ast.AnnAssign), "each parameter has a type"
        assert statement.value is not None
        ast.literal_eval(statement.value)


def test_every_parameter_is_used(notebook):
    (cell,) = [cell for cell in code(notebook) if "parameters" in cell["metadata"].get("tags", [])]
    rest = "\n".join(source(other) for other in code(notebook) if other is not cell)
    used = {node.id for node in ast.walk(ast.parse(rest)) if isinstance(node, ast.Name)}
    for statement in ast.parse(source(cell)).body:
        assert statement.target.id in used


def test_it_opens_with_a_story_and_closes_with_what_it_claims(notebook):
    first = source(notebook["cells"][0])
    assert first.startswith("# ")
    assert "What you will see" in first
    assert source(code(notebook)[-1]).rstrip().endswith("records.done()")


def test_cells_are_small_and_name_no_machine(notebook):
    for cell in code(notebook):
        assert len(source(cell).splitlines()) <= LONGEST_CELL_LINES
        assert not re.search(r"['\"]/(home|root|tmp|Users)/", source(cell))
