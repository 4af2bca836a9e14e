"""Every kind of error has its section, with symptom, cause and fix; no section is about a kind that is gone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import qwen_npu
from qwen_npu import errors
from qwen_npu.cli import main
from qwen_npu.data import data_dir
from qwen_npu.errors import WorkbenchError

KINDS = {
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, WorkbenchError) and kind is not WorkbenchError
}
SECTIONS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (data_dir() / "troubleshooting.md").read_text("utf-8"), re.M | re.S)
)


def test_a_section_for_each_kind() -> None:
    assert set(SECTIONS) == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sections_are_complete(kind: str) -> None:
    parts = re.findall(r"^\* (\w+): (.+)$", SECTIONS[kind], re.M)
    assert [part for part, _ in parts] == ["Symptom", "Cause", "Fix"]
    assert all(len(text) > 10 for _, text in parts)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_symptoms_are_messages_of_the_package(kind: str) -> None:
    """What is quoted, up to the values that stand for …, is in the source; the message that a user sees leads here."""
    source = "".join(path.read_text("utf-8") for path in sorted(Path(qwen_npu.__file__).parent.rglob("*.py")))
    (symptom,) = re.findall(r"^\* Symptom: (.+)$", SECTIONS[kind], re.M)
    quoted = re.findall(r"`([^`]+)`", symptom)
    assert quoted
    for text in quoted:
        for part in text.split("…"):
            assert part.strip() in source, text


def test_the_command_line_names_the_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "4b", "--device", "nothing"]) == 2
    told = capsys.readouterr().err
    assert "unknown device 'nothing'" in told
    assert "(UsageError: see data/troubleshooting.md)" in told


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_messages_name_what_to_do(kind: str) -> None:
    error = getattr(errors, kind)("it is 7", expected="8", fix="make it 8")
    assert str(error) == "it is 7. Expected: 8. What to do: make it 8."
