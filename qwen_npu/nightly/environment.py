"""What ran it: commit, versions, machine, cards. Held in every verdict and shown in the report."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import qwen_npu
from qwen_npu.nightly.cards import list_cards

_PACKAGES = (
    "numpy",
    "onnxruntime",
    "onnx",
    "papermill",
    "nbclient",
    "ipykernel",
    "plotly",
    "qwen-npu-kernels",
    "mindspore-lite",
)


def environment() -> dict[str, Any]:
    """The facts as plain JSON; a package that is absent is left out, a commit that is unknown is ""."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    commit, dirty = commit_of(Path(qwen_npu.__file__).resolve().parent)
    return {
        "commit": commit,
        "dirty": dirty,
        "qwen_npu": qwen_npu.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "host": platform.node(),
        "cpus": os.cpu_count() or 1,
        "driver": "mindspore_lite" if "mindspore-lite" in versions else "emulator",
        "cann": _cann(),
        "cards": list_cards(),
        "versions": versions,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def commit_of(folder: Path) -> tuple[str, bool]:
    """The commit a directory is at, and whether files that git knows have changed since; ("", False) outside git."""
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "", False
    return head, bool(changed)


def _cann() -> str:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return ""
    for name in ("version.cfg", "version.info"):
        try:
            text = (Path(home) / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        return " ".join(text.split())[:200]
    return ""
