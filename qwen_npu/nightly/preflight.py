"""What is checked before a kernel starts: the notebook can be read, has one parameters cell of literals, and the
parameters given are known to it, of the right type, and make sense."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_npu.errors import NotebookError, WorkbenchError
from qwen_npu.nightly import vocabulary
from qwen_npu.nightly.files import plain_parameter

TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """One assignment of the parameters cell. `allowed` are the type names it takes; `choices` those of a Literal."""

    name: str
    default: Any
    allowed: frozenset[str]
    choices: tuple[Any, ...] = ()


def check(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks `given` against the notebook and returns the plain values to inject.

    Raises:
        NotebookError: unreadable notebook, no (or more than one) parameters cell, a parameter that is not a literal,
            an unknown parameter (with the nearest known name), a value of the wrong type or one that makes no sense.
    """
    known = parameters(notebook)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise NotebookError(
                f"{notebook.name} has no parameter {name!r}",
                expected=f"one of {', '.join(known) or '(it has none)'}",
                fix=f"did you mean {near[0]!r}?" if near else "",
            )
        plain = plain_parameter(name, value)
        _check_type(notebook, known[name], plain)
        try:
            values[name] = vocabulary.meant(name, plain)
        except WorkbenchError as error:
            raise NotebookError(
                f"{notebook.name}: the parameter {name!r} is {value!r}", expected=error.expected, fix=error.fix
            ) from None
    try:
        vocabulary.check_together({name: parameter.default for name, parameter in known.items()} | values)
    except WorkbenchError as error:
        raise NotebookError(f"{notebook.name}: {error.problem}", expected=error.expected, fix=error.fix) from None
    return values


def read_notebook(notebook: Path) -> dict[str, Any]:
    """The notebook's JSON.

    Raises:
        NotebookError: no such file, or not a notebook of format 4.
    """
    try:
        document = json.loads(notebook.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotebookError(f"the notebook {notebook} cannot be read: {error}", expected="an .ipynb file") from error
    if not isinstance(document, dict) or document.get("nbformat") != 4 or not isinstance(document.get("cells"), list):
        raise NotebookError(f"{notebook} is not a notebook of format 4", expected="nbformat 4.5")
    for index, cell in enumerate(document["cells"]):
        if not isinstance(cell, dict) or not isinstance(cell.get("metadata", {}), dict):
            raise NotebookError(f"{notebook}: cell {index} is no cell of a notebook", expected="nbformat 4.5")
    return document


def parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, in the order of its parameters cell.

    Raises:
        NotebookError: see `check`.
    """
    cells = read_notebook(notebook)["cells"]
    tagged = [
        (index, cell)
        for index, cell in enumerate(cells)
        if cell.get("cell_type") == "code" and TAG in (cell.get("metadata", {}).get("tags") or [])
    ]
    if len(tagged) != 1:
        raise NotebookError(
            f"{notebook.name} has {len(tagged) or 'no'} code cell{'s' if len(tagged) > 1 else ''} tagged {TAG!r}",
            expected="exactly one, with its parameters as literals",
            fix=f"tag the cell that holds the defaults with {TAG!r}; without it an override is silently lost",
        )
    index, cell = tagged[0]
    return _assignments(f"{notebook.name}, cell {index}", "".join(cell.get("source", "")))


def _assignments(place: str, source: str) -> dict[str, Parameter]:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NotebookError(
            f"{place}: the parameters cell is not Python: {error.msg} (line {error.lineno})",
            expected="assignments of literals",
        ) from error
    found: dict[str, Parameter] = {}
    for statement in tree.body:
        annotation: ast.expr | None = None
        value: ast.expr | None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value, annotation = statement.target, statement.value, statement.annotation
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a text that explains
        else:
            target, value = None, None
        if not isinstance(target, ast.Name) or value is None:
            raise _not_literal(place, statement)
        try:
            default = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError) as error:
            raise _not_literal(place, statement) from error
        allowed, choices = _allowed(annotation, default)
        found[target.id] = Parameter(target.id, default, allowed, choices)
    return found


def _not_literal(place: str, statement: ast.stmt) -> NotebookError:
    return NotebookError(
        f"{place}, line {statement.lineno}: `{ast.unparse(statement)}` is not a name with a literal",
        expected="NAME = literal (or NAME: type = literal), one a line",
        fix="move what is computed to the next cell: it would not be computed anew for an overridden parameter",
    )


_ANNOTATED = {
    "int": {"int"},
    "float": {"int", "float"},
    "str": {"str"},
    "bool": {"bool"},
    "list": {"list"},
    "tuple": {"list"},
    "Sequence": {"list"},
    "dict": {"dict"},
    "Mapping": {"dict"},
    "Path": {"str"},
    "None": {"NoneType"},
    "Any": {"int", "float", "str", "bool", "list", "dict", "NoneType"},
}


def _allowed(annotation: ast.expr | None, default: Any) -> tuple[frozenset[str], tuple[Any, ...]]:
    if annotation is not None:
        names, choices = _annotated(annotation)
        if names:
            return frozenset(names), tuple(choices)
    if default is None:
        return frozenset(_ANNOTATED["Any"]), ()
    kind = type(default).__name__
    return frozenset(_ANNOTATED.get(kind, {kind})), ()


def _annotated(node: ast.expr) -> tuple[set[str], list[Any]]:
    """Type names and Literal choices an annotation allows; nothing for one that is not understood."""
    if isinstance(node, ast.Constant) and node.value is None:
        return {"NoneType"}, []
    if isinstance(node, ast.Name):
        return set(_ANNOTATED.get(node.id, ())), []
    if isinstance(node, ast.Attribute):
        return set(_ANNOTATED.get(node.attr, ())), []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _annotated(node.left), _annotated(node.right)
        if not left[0] or not right[0]:
            return set(), []
        return left[0] | right[0], left[1] + right[1]
    if isinstance(node, ast.Subscript):
        outer = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if outer == "Literal":
            try:
                choices = ast.literal_eval(node.slice)
            except ValueError:
                return set(), []
            choices = list(choices) if isinstance(choices, tuple) else [choices]
            return {type(choice).__name__ for choice in choices}, choices
        if outer == "Optional":
            names, choices = _annotated(node.slice)
            return (names | {"NoneType"} if names else set()), choices
        return set(_ANNOTATED.get(outer, ())), []
    return set(), []


def _check_type(notebook: Path, parameter: Parameter, value: Any) -> None:
    kind = type(value).__name__
    if kind not in parameter.allowed:
        names = sorted("None" if name == "NoneType" else name for name in parameter.allowed)
        raise NotebookError(
            f"{notebook.name}: the parameter {parameter.name!r} is {value!r} ({kind})",
            expected=f"{' or '.join(names)}, such as {parameter.default!r}",
        )
    if parameter.choices and kind != "NoneType" and value not in parameter.choices:
        raise NotebookError(
            f"{notebook.name}: the parameter {parameter.name!r} is {value!r}",
            expected=f"one of {', '.join(repr(choice) for choice in parameter.choices)}",
        )
