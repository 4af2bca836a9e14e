"""Finds or makes a Python 3.7 with the real mindspore_lite 2.0.0.

    python -m tests.integration.real_mslite.environment

makes a virtual environment under build/real_mslite and prints its interpreter, or why there can be none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[3] / "build" / "real_mslite"
PYTHON_VARIABLE = "QWEN_NPU_MSLITE_PYTHON"
WHEEL = "mindspore-lite==2.0.0"
_INTERPRETER = HOME / "venv" / "bin" / "python"


class Unavailable(Exception):
    """Why the real package cannot be used here."""


def interpreter() -> Path:
    """An interpreter that was made before, or is named in the environment.

    Raises:
        Unavailable: there is none yet.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else _INTERPRETER
    if not python.is_file():
        raise Unavailable(f"no {python}: `make real-mslite` makes it where python3.7 and the wheel can be had")
    _check(python)
    return python


def make() -> Path:
    """Makes the environment unless it is there.

    Raises:
        Unavailable: no Python 3.7, or no wheel.
    """
    if _INTERPRETER.is_file() or os.environ.get(PYTHON_VARIABLE):
        return interpreter()
    source = _python37()
    _run([str(source), "-m", "venv", "--clear", str(HOME / "venv")], "python3.7 cannot make a virtual environment")
    try:
        _run([str(_INTERPRETER), "-m", "pip", "install", "--quiet", WHEEL], f"{WHEEL} cannot be had")
        _check(_INTERPRETER)
    except Unavailable:
        shutil.rmtree(HOME / "venv")
        raise
    return _INTERPRETER


def _python37() -> Path:
    candidates = [shutil.which("python3.7")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += sorted(str(path) for path in pyenv.glob("versions/3.7.*/bin/python"))
    for candidate in candidates:
        if candidate is None:
            continue
        code = "import sys; print(sys.version_info[:2] == (3, 7))"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == "True":  # a shim of a version manager may stand there without a version behind it
            return Path(candidate)
    raise Unavailable("there is no Python 3.7")


def _check(python: Path) -> None:
    _run([str(python), "-c", "import mindspore_lite"], f"{python} cannot import mindspore_lite")


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{problem}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


if __name__ == "__main__":
    try:
        print(make())
    except Unavailable as reason:
        print(f"skipped: {reason}")
        sys.exit(0)
