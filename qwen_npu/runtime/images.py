"""Pictures to `pixel_values`: reading, turning, letterboxing to a vision grid, and the processor's arithmetic in NumPy.

Equal to transformers' Qwen2-VL image processor for a picture that already has the size of a grid.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_npu.errors import CheckpointError, ImageError
from qwen_npu.spec import VisionSpec

if TYPE_CHECKING:
    from PIL import Image

Grid = tuple[int, int]
"""Rows and columns of patches."""


@dataclass(frozen=True)
class PreparedImage:
    """A picture ready for the vision stage.

    Attributes:
        pixels: RGB u8 [rows * patch, columns * patch, 3], letterboxed.
        pixel_values: f32 [rows * columns, channels * temporal * patch * patch], patches in merge-block order.
        grid: rows and columns of patches.
        note: what was done to the picture, for the result; "" if nothing.
    """

    pixels: np.ndarray
    pixel_values: np.ndarray
    grid: Grid
    note: str


@dataclass(frozen=True)
class ImageProcessor:
    """Settings of `preprocessor_config.json`: rescale, mean and std per channel, PIL resampling filter."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def from_checkpoint(cls, directory: Path) -> ImageProcessor:
        path = directory / "preprocessor_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                rescale=float(config.get("rescale_factor", 1 / 255)),
                mean=_channels(config["image_mean"]),
                std=_channels(config["image_std"]),
                resample=_filter(config.get("resample", 3)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be used: {error!r}", expected="the checkpoint's image processor configuration"
            ) from None

    def prepare(self, image: Any, grids: Sequence[Grid], vision: VisionSpec) -> PreparedImage:
        """Reads a picture and fits it to the grid with the nearest aspect ratio.

        Args:
            image: path, PIL image, or RGB/grey u8 array [H, W(, 3)].
            grids: (rows, columns) of patches that the bundle has vision graphs for.

        Raises:
            ImageError: unreadable, empty, of a kind that has no 8-bit RGB meaning, or too large to decode safely.
        """
        picture, notes = _as_rgb(_open(image))
        grid = nearest_grid(picture.width / picture.height, grids)
        height, width = grid[0] * vision.patch, grid[1] * vision.patch
        if picture.size != (width, height):
            notes.append(f"letterboxed from {picture.width}x{picture.height} to {width}x{height}")
            picture = self._letterbox(picture, width, height)
        pixels = np.asarray(picture)
        return PreparedImage(pixels, self.patches(pixels, vision), grid, "; ".join(notes))

    def _letterbox(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        from PIL import Image

        scale = min(width / picture.width, height / picture.height)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        canvas = Image.new("RGB", (width, height))
        resized = picture.resize(size, Image.Resampling(self.resample))
        canvas.paste(resized, ((width - size[0]) // 2, (height - size[1]) // 2))
        return canvas

    def patches(self, pixels: np.ndarray, vision: VisionSpec) -> np.ndarray:
        """Normalised patches, f32 [rows * columns, lanes], from RGB u8 [H, W, 3].

        Order as transformers' Qwen2-VL image processor: merge blocks row by row (rows/2, columns/2, 2, 2), inside a
        patch channel, temporal copy, row, column.
        """
        patch, merge = vision.patch, vision.merge
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        scaled: np.ndarray = (pixels * self.rescale).astype(np.float32)  # in f64 first, as transformers does
        values: np.ndarray = (scaled - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        blocks = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, vision.channels)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column, channel, y, x
        frames = np.repeat(blocks[..., None, :, :], vision.temporal_patch, axis=-3)  # a still picture fills all frames
        return np.ascontiguousarray(frames.reshape(rows * columns, vision.patch_lanes))


def _channels(values: Any) -> tuple[float, ...]:
    """One number for each of red, green and blue."""
    numbers = tuple(float(value) for value in values)
    if len(numbers) != 3 or not all(map(np.isfinite, numbers)):
        raise ValueError(f"{values} is not three numbers")
    return numbers


def _filter(number: Any) -> int:
    from PIL import Image

    return int(Image.Resampling(number))


def nearest_grid(aspect: float, grids: Sequence[Grid]) -> Grid:
    """The grid whose width / height is nearest to `aspect` on a logarithmic scale; the first of equals."""
    return min(grids, key=lambda grid: abs(np.log(grid[1] / grid[0]) - np.log(aspect)))


def _open(image: Any) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
            raise ImageError(f"an array of {image.dtype} {list(image.shape)}", expected="u8 [H, W] or [H, W, 3]")
        if not image.size:
            raise ImageError(f"an empty array {list(image.shape)}", expected="at least one pixel")
        return Image.fromarray(image)
    if not isinstance(image, bytes | str | Path | Image.Image):
        raise ImageError(f"a picture of type {type(image).__name__}", expected="a path, a PIL image or a NumPy array")
    name = f"{len(image)} bytes" if isinstance(image, bytes) else str(image)
    try:
        with warnings.catch_warnings():
            # PIL warns before it refuses; a picture of more than 89 million pixels is refused here at once.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = image if isinstance(image, Image.Image) else Image.open(io.BytesIO(_content(image)))
            picture.load()  # PIL reads when it is first asked for pixels
    except FileNotFoundError:
        raise ImageError(f"the picture {name} does not exist", expected="a path to a picture file") from None
    except UnidentifiedImageError:
        raise ImageError(
            f"{name} is not a picture that can be read", expected="PNG, JPEG, WebP, BMP, GIF or TIFF"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{name} is too large", expected="at most 89 million pixels", fix="scale it down") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ImageError(f"the picture {name} cannot be read: {error}", expected="an undamaged picture file") from None
    return picture


def _content(image: bytes | str | Path) -> bytes:
    if isinstance(image, bytes):
        return image
    path = Path(image)
    if path.exists() and not path.is_file():
        raise ImageError(f"{path} is no file", expected="a path to a picture file")  # a pipe would never end
    return path.read_bytes()


def _as_rgb(picture: Image.Image) -> tuple[Image.Image, list[str]]:
    """The picture upright in 8-bit RGB, and what was done to it."""
    from PIL import Image, ImageOps

    if not picture.width or not picture.height:
        raise ImageError(f"the picture is {picture.width}x{picture.height}", expected="at least one pixel")
    notes: list[str] = []
    turned = ImageOps.exif_transpose(picture)
    if picture.getexif().get(0x0112, 1) != 1:
        notes.append("turned upright as its EXIF says")
    picture = turned
    if picture.mode.startswith("I"):
        # PIL's own conversion clips 16 bits at 255 and so turns nearly everything white.
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(f"a picture with values {values.min()}..{values.max()}", expected="8 or 16 bits a channel")
        picture = Image.fromarray((values >> 8).astype(np.uint8))
        notes.append("16 bits reduced to 8")
    elif picture.mode == "F":
        raise ImageError("a picture of 32-bit floats has no defined brightness", expected="8 or 16 bits a channel")
    if "A" in picture.getbands() or "transparency" in picture.info:
        layered = picture.convert("RGBA")
        picture = Image.new("RGBA", layered.size, "white")
        picture.alpha_composite(layered)
        notes.append("transparency laid on white")
    return picture.convert("RGB"), notes
