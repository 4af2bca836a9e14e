"""Small notebooks and suites that the tests of the nightly runner write to their temporary directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARAMETERS = "n: int = 3  # figures\n"
CLAIM = "from qwen_npu import records\nrecords.record('bytes', 1024 * n, unit='bytes')"
DONE = "from qwen_npu import records\nrecords.done()"
PLOT = (
    "import plotly.graph_objects as go\n"
    "for i in range(n):\n"
    "    go.Figure(go.Scatter(y=[1, i, 3, 2]), layout={'title': '</script> 表情 😀'}).show()"
)


def write_notebook(path: Path, cells: Sequence[str], *, parameters: str | None = PARAMETERS) -> Path:
    """A notebook of format 4.5: a title, the parameters cell (none for None), the cells."""
    entries: list[dict[str, Any]] = [
        {
            "cell_type": "markdown",
            "id": "title",
            "metadata": {},
            "source": "# Trial 你好 😀\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        }
    ]
    if parameters is not None:
        entries.append(_code("parameters", parameters, ["parameters"]))
    entries += [_code(f"cell-{index}", source, []) for index, source in enumerate(cells)]
    document = {
        "cells": entries,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return path


def write_suite(path: Path, items: Sequence[dict[str, Any]], *, budget_s: float = 60) -> Path:
    """A suite file with these items; values are written as TOML (JSON's texts, numbers and lists are TOML too)."""
    lines = ["schema = 1", 'name = "trial"', f"budget_s = {budget_s}"]
    for item in items:
        lines.append("[[item]]")
        for key, value in item.items():
            if isinstance(value, dict):
                inner = ", ".join(f"{name} = {json.dumps(part, ensure_ascii=False)}" for name, part in value.items())
                lines.append(f"{key} = {{ {inner} }}")
            else:
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _code(name: str, source: str, tags: list[str]) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": name,
        "metadata": {"tags": tags} if tags else {},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }
