"""Interleaved mRoPE positions: what `position_ids` [4, 1, S] hold in prefill and decode."""

from __future__ import annotations

import numpy as np

from qwen_npu.errors import PromptError
from qwen_npu.spec import ModelSpec


def prefill_positions(tokens: np.ndarray, grid: tuple[int, int] | None, spec: ModelSpec) -> tuple[np.ndarray, int]:
    """Positions of a prompt and the delta that decoding adds.

    Row 0 is the text position (masks only), rows 1-3 are t, h, w. An image that starts at position p takes
    (p, p + row, p + column) over its merged grid; the next text position is p + max(rows, columns).
    Source: Qwen3.5's `get_rope_index`.

    Args:
        tokens: i64 [S].
        grid: rows and columns of patches of the picture, None without one.

    Returns:
        positions i64 [4, 1, S] and delta = last position + 1 - S.

    Raises:
        PromptError: image tokens that do not form one run of the picture's size.
    """
    length = len(tokens)
    positions = np.empty((4, 1, length), np.int64)
    positions[0, 0] = np.arange(length)
    is_image = tokens == spec.image_token
    count = int(is_image.sum())
    wanted = spec.image_tokens(grid) if grid is not None else 0
    if count != wanted:
        raise PromptError(
            f"the prompt holds {count} image tokens, the picture gives {wanted} embeddings",
            expected="as many image tokens as embeddings",
            fix="leave the image token out of the text: the chat template places it",
        )
    if not count or grid is None:
        positions[1:, 0] = np.arange(length)
        return positions, 0
    start = int(is_image.argmax())
    if not is_image[start : start + count].all():
        raise PromptError("the image tokens do not stand together", expected=f"one run of {count} image tokens")
    rows, columns = grid[0] // spec.vision.merge, grid[1] // spec.vision.merge
    positions[1:, 0, :start] = np.arange(start)
    positions[1, 0, start : start + count] = start
    positions[2, 0, start : start + count] = start + np.repeat(np.arange(rows), columns)
    positions[3, 0, start : start + count] = start + np.tile(np.arange(columns), rows)
    after = start + max(rows, columns)
    positions[1:, 0, start + count :] = after + np.arange(length - start - count)
    delta = after - start - count
    return positions, delta


def decode_positions(past_tokens: int, delta: int, out: np.ndarray) -> None:
    """Writes the positions of the token at cache position `past_tokens` into `out` [4, 1, 1]."""
    out[0] = past_tokens
    out[1:] = past_tokens + delta


def left_padded(array: np.ndarray, bucket: int, value: int = 0) -> np.ndarray:
    """The array with `value` before its last axis so that it has `bucket` entries there."""
    pads = bucket - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(pads, 0)], constant_values=value)
