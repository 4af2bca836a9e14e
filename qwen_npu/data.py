"""Where the files that ship with the package lie: in a checkout `data/`, in an installed wheel `qwen_npu/_data`."""

from __future__ import annotations

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
