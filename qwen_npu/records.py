"""What a notebook claims: named values that the nightly run compares, never rendered text.

`record(...)` appends one JSON line to the file named by QWEN_NPU_RECORDS (the runner sets it); without the variable it
only checks the claim. `done()` says that the last cell was reached.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from qwen_npu.errors import RecordError

SCHEMA = 1
RECORDS_VARIABLE = "QWEN_NPU_RECORDS"
CELL_VARIABLE = "QWEN_NPU_CELL"
DONE = "__done__"
"""Name of the sentinel record."""

RecordKind = Literal["exact", "relative", "absolute", "info"]
KINDS: tuple[str, ...] = get_args(RecordKind)


def record(name: str, value: Any, *, unit: str = "", kind: RecordKind = "exact", tol: float | None = None) -> None:
    """Claims that `name` is `value`.

    Args:
        name: unique within the notebook.
        value: number, text, true/false, None, or lists and string-keyed mappings of them; NumPy scalars and arrays
            become plain ones.
        unit: "bytes", "ms", "tokens/s", ...
        kind: how it is compared with the baseline: "exact", "relative" or "absolute" (within `tol`), or "info" (trend
            only; what timings are).
        tol: a number >= 0; needed by "relative" and "absolute", refused by the others.

    Raises:
        RecordError: NaN or infinity, a value JSON cannot hold, an unknown kind, or a tolerance that does not fit it.
    """
    if not isinstance(name, str) or not name.strip():
        raise RecordError(f"the name of a record is {name!r}", expected="a text that is not empty")
    if name == DONE:
        raise RecordError(
            f"the name {DONE!r} is taken", expected="another name", fix="call records.done() in the last cell"
        )
    if kind not in KINDS:
        raise RecordError(f"record {name!r} is of kind {kind!r}", expected=f"one of {', '.join(KINDS)}")
    plain = _plain(value, name)
    if kind in {"relative", "absolute"}:
        if isinstance(plain, bool) or not isinstance(plain, (int, float)):
            raise RecordError(
                f"record {name!r} of kind {kind} has the value {plain!r}", expected="a number", fix="use kind='exact'"
            )
        if tol is None:
            raise RecordError(f"record {name!r} of kind {kind} has no tolerance", expected="tol, a number >= 0")
        tolerance = _plain(tol, name)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or tolerance < 0:
            raise RecordError(f"record {name!r} has the tolerance {tol!r}", expected="a number >= 0")
        tol = float(tolerance)
    elif tol is not None:
        raise RecordError(
            f"record {name!r} of kind {kind} has the tolerance {tol!r}",
            expected="no tolerance",
            fix="use kind='relative' or kind='absolute'",
        )
    _append({"name": name, "value": plain, "unit": str(unit), "kind": kind, "tol": tol})


def done() -> None:
    """The sentinel: the last cell of the notebook was reached."""
    _append({"name": DONE, "value": True, "unit": "", "kind": "exact", "tol": None})


def _append(line: Mapping[str, Any]) -> None:
    path = os.environ.get(RECORDS_VARIABLE)
    if not path:
        return
    text = json.dumps({"schema": SCHEMA, **line, "cell": _cell()}, ensure_ascii=False, allow_nan=False)
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
    except OSError as error:
        raise RecordError(
            f"the record {line['name']!r} cannot be written to {path}: {error}",
            expected=f"a writable file named by {RECORDS_VARIABLE}",
        ) from error


def _cell() -> str | int | None:
    """The cell that claims it: what the runner says, else the kernel's execution count, else None."""
    named = os.environ.get(CELL_VARIABLE)
    if named:
        return named
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return None
    count = getattr(shell, "execution_count", None)
    return count if isinstance(count, int) else None


def _plain(value: Any, name: str) -> Any:
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # NumPy scalars and arrays
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"record {name!r} has the value {value}", expected="a finite number")
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecordError(f"record {name!r} has the key {key!r}", expected="text keys")
        return {key: _plain(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    raise RecordError(
        f"record {name!r} has a value of type {type(value).__name__}",
        expected="number, text, true/false, None, or lists and mappings of them",
    )
