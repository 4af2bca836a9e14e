"""Pictures that broke others: used rightly, or refused with the reason."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from qwen_npu.errors import ImageError
from qwen_npu.runtime.images import ImageProcessor, nearest_grid
from qwen_npu.spec import VisionSpec

VISION = VisionSpec(
    depth=1,
    hidden=8,
    intermediate=16,
    heads=1,
    positions=64,
    patch=16,
    merge=2,
    temporal_patch=2,
    channels=3,
    rope_theta=1e4,
)
PROCESSOR = ImageProcessor(rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3, resample=3)
GRIDS = ((8, 8), (8, 12))


def prepare(image, grids=GRIDS):
    return PROCESSOR.prepare(image, grids, VISION)


def gradient(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))


def test_a_picture_of_a_grids_size_is_taken_as_it_is():
    prepared = prepare(gradient(128, 128))
    assert prepared.grid == (8, 8)
    assert prepared.note == ""
    assert np.array_equal(prepared.pixels, np.asarray(gradient(128, 128)))


def test_patches_stand_in_merge_blocks_with_two_frames():
    """Each patch filled with its own number: the order can be read off."""
    numbers = np.arange(16).reshape(4, 4).repeat(16, 0).repeat(16, 1).astype(np.uint8)
    values = prepare(np.stack([numbers] * 3, -1), ((4, 4),)).pixel_values
    assert values.shape == (16, 1536)
    order = np.rint((values[:, 0] * 0.5 + 0.5) * 255).astype(int).tolist()
    assert order == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert (values == values[:, :1]).all()


def test_lanes_are_channel_frame_row_column():
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[3, 5, 1] = 255
    (lane,) = np.flatnonzero(prepare(pixels, ((2, 2),)).pixel_values[0] > 0)[:1]
    assert lane == 1 * 512 + 0 * 256 + 3 * 16 + 5


def test_wide_and_narrow_pictures_are_letterboxed_in_black():
    prepared = prepare(Image.new("RGB", (400, 100), "white"))
    assert prepared.grid == (8, 12)
    assert "letterboxed from 400x100 to 192x128" in prepared.note
    assert (prepared.pixels[0] == 0).all()
    assert (prepared.pixels[64] == 255).all()


@pytest.mark.parametrize("size", [(1, 1), (5000, 10), (3, 4000), (127, 129)])
def test_any_size_of_picture_fills_a_grid(size):
    prepared = prepare(Image.new("RGB", size, "white"))
    rows, columns = prepared.grid
    assert prepared.pixels.shape == (rows * 16, columns * 16, 3)
    assert prepared.pixels.max() > 0


def test_sixteen_bits_keep_their_brightness():
    """PIL's own conversion clips at 255, so a mid-grey picture would turn white."""
    prepared = prepare(Image.fromarray(np.full((128, 128), 0x8000, np.uint16)))
    assert (prepared.pixels == 0x80).all()
    assert "16 bits" in prepared.note


def test_a_palette_with_transparency_and_alpha_are_laid_on_white():
    clear = Image.new("RGBA", (128, 128), (255, 0, 0, 0))
    assert (prepare(clear).pixels == 255).all()
    palette = Image.new("P", (128, 128), 0)
    palette.putpalette([10, 20, 30] + [0] * 765)
    assert (prepare(palette).pixels == (10, 20, 30)).all()
    palette.info["transparency"] = 0
    assert (prepare(palette).pixels == 255).all()


def test_cmyk_and_grey_become_rgb():
    assert (prepare(Image.new("CMYK", (128, 128), (0, 255, 255, 0))).pixels == (255, 0, 0)).all()
    assert (prepare(Image.new("L", (128, 128), 7)).pixels == 7).all()
    assert (prepare(Image.new("1", (128, 128), 1)).pixels == 255).all()


def test_an_exif_turned_picture_is_turned_upright(tmp_path):
    picture = Image.new("RGB", (192, 128), "white")
    picture.paste("red", (0, 0, 192, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    picture.save(tmp_path / "turned.png", exif=exif)
    prepared = prepare(tmp_path / "turned.png", ((8, 12), (12, 8)))
    assert prepared.grid == (12, 8)
    assert prepared.pixels[60, 120].tolist() == [255, 0, 0]
    assert "EXIF" in prepared.note


def test_what_is_no_picture_is_refused_with_the_reason(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("not a picture", encoding="utf-8")
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole, "PNG")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[:2000])
    for name, words in [
        ("empty.png", "not a picture"),
        ("text.png", "not a picture"),
        ("cut.png", "cannot be read"),
        ("missing.png", "does not exist"),
    ]:
        with pytest.raises(ImageError, match=words):
            prepare(tmp_path / name)
    with pytest.raises(ImageError, match="is no file"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((0, 4, 3), np.uint8), "empty"),
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (np.zeros((4, 4, 4), np.uint8), r"\[4, 4, 4\]"),
        (42, "type int"),
        (Image.new("F", (4, 4)), "floats"),
    ],
)
def test_other_values_are_refused(image, words):
    with pytest.raises(ImageError, match=words):
        prepare(image)


def test_a_picture_too_large_to_decode_is_refused(monkeypatch, tmp_path):
    Image.new("1", (200, 200)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.raises(ImageError, match="too large"):
        prepare(tmp_path / "large.png")


def test_the_nearest_grid_is_by_aspect_ratio():
    assert nearest_grid(1.0, GRIDS) == (8, 8)
    assert nearest_grid(1.4, GRIDS) == (8, 12)
    assert nearest_grid(0.1, GRIDS) == (8, 8)
