"""Where the files that ship with the package lie: in a checkout `data/`, in an installed wheel `qwen_npu/_data`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _room(packed: str, checkout: str) -> Path:
    inside = _PACKAGE / packed
    return inside if inside.is_dir() else _PACKAGE.parent / checkout


def data_dir() -> Path:
    """The data directory: tiny model, pictures, prompts, golden answers, baselines."""
    return _room("_data", "data")


def notebooks_dir() -> Path:
    """The directory of the course's notebooks."""
    return _room("_notebooks", "notebooks")


def tiny_checkpoint() -> Path:
    """The Hugging Face directory of the small model that is the embedded default."""
    return data_dir() / "tiny_qwen3_5"
