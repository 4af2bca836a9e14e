"""How the nightly files are written: whole or not at all, UTF-8."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from qwen_npu.errors import NotebookError, UsageError

LOCK = "run.lock"
"""Held by the run that writes to the directory."""
_PART = ".part"
"""Ends the name of a file that is being written; one that is left belonged to a writer that was killed."""


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a temporary file beside `path`, then renames it: a reader sees the old text or the new, never a half.

    With `durable` the text is on the disk before the rename, so that a power cut keeps that promise too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None where there is no whole one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file; a last line that was cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def run_of(out: Path) -> dict[str, Any] | None:
    """What the run.json of an output directory says, or None where no run of ours wrote one."""
    facts = read_json(out / "run.json")
    if facts is None or not isinstance(facts.get("items"), list):
        return None
    return facts if all(isinstance(facts.get(key), str) for key in ("run", "suite", "started")) else None


def prepare_out(out: Path) -> None:
    """Makes the output directory and proves that it can be written.

    Raises:
        UsageError: it cannot be made or written, or it holds files that no run of ours made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
        names = {path.name for path in out.iterdir() if not path.name.endswith(_PART)}
    except OSError as error:
        raise UsageError(
            f"the output directory {out} cannot be used: {error}",
            expected="a directory that can be written",
            fix="name another one with --out",
        ) from error
    if names - {LOCK} and run_of(out) is None:
        raise UsageError(
            f"the output directory {out} holds files of others ({', '.join(sorted(names)[:3])})",
            expected="an empty directory, or one of an earlier run",
            fix="name another one with --out",
        )


def plain_parameter(name: str, value: Any) -> Any:
    """The one conversion boundary of parameters: tuple -> list, Path -> text, NumPy scalar -> number.

    Raises:
        NotebookError: any other type, which papermill would turn into text silently; a number that is not finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NotebookError(f"the parameter {name!r} is {value}", expected="a finite number")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain_parameter(f"{name}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise NotebookError(f"the parameter {name!r} has the key {key!r}", expected="text keys")
        return {key: plain_parameter(f"{name}.{key}", part) for key, part in value.items()}
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        return plain_parameter(name, value.item())
    raise NotebookError(
        f"the parameter {name!r} is of type {type(value).__name__} ({value!r})",
        expected="number, text, true/false, None, Path, or lists and dicts of them",
        fix="convert it before",
    )
