"""Where files lie: what ships (a checkout's `data/`, an installed wheel's `qwen_npu/_data`) and the cache."""

from __future__ import annotations

import os
from pathlib import Path

from qwen_npu.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def _room(packed: str, checkout: str) -> Path:
    inside = _PACKAGE / packed
    return inside if inside.is_dir() else _PACKAGE.parent / checkout


def data_dir() -> Path:
    """The data directory: tiny model, pictures, golden answers, baselines, suites."""
    return _room("_data", "data")


def notebooks_dir() -> Path:
    """The directory of the course's notebooks."""
    return _room("_notebooks", "notebooks")


def benches_dir() -> Path:
    """The directory of the benches; only a checkout has one."""
    return _PACKAGE.parent / "tests" / "bench"


def tiny_checkpoint() -> Path:
    """The Hugging Face directory of the small model that is the embedded default."""
    return data_dir() / "tiny_qwen3_5"


def image_path(image: str) -> Path | None:
    """A picture by the name of one that ships ("two_shapes"), or by path; "" is no picture.

    Raises:
        UsageError: neither a shipped picture nor a file.
    """
    if not image:
        return None
    shipped = {path.stem: path for path in sorted((data_dir() / "images").glob("*.png"))}
    if image in shipped:
        return shipped[image]
    path = Path(image)
    if not path.is_file():
        raise UsageError(
            f"there is no picture {image!r}", expected=f"a picture file, or one that ships: {', '.join(shipped)}"
        )
    return path


def cache_directory() -> Path:
    """Where bundles and compiled helpers are kept: $QWEN_NPU_CACHE, or the user's cache directory."""
    named = os.environ.get("QWEN_NPU_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qwen-npu"
