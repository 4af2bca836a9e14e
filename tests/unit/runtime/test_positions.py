from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_npu.errors import PromptError
from qwen_npu.runtime.positions import decode_positions, left_padded, prefill_positions
from tests.unit.runtime.mocks import SPEC

IMAGE = SPEC.image_token


def prompt(before: int, image_tokens: int, after: int) -> np.ndarray:
    return np.array([1] * before + [IMAGE] * image_tokens + [2] * after, np.int64)


def test_text_only_positions_are_the_same_in_all_rows():
    positions, delta = prefill_positions(prompt(5, 0, 0), None, SPEC)
    assert positions.shape == (4, 1, 5)
    assert (positions == np.arange(5)).all()
    assert delta == 0


def test_a_wide_picture_counts_rows_and_columns_apart():
    """Worked by hand: 4x6 patches are 2x3 tokens from position 3; the text goes on at 3 + max(2, 3)."""
    positions, delta = prefill_positions(prompt(3, 6, 2), (4, 6), SPEC)
    assert positions[1, 0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]
    assert positions[2, 0].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]
    assert positions[3, 0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert positions[0, 0].tolist() == list(range(11))
    assert delta == 8 - 11


@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_the_first_decoded_token_continues_the_last_position(before, half_rows, half_columns, after):
    grid = (2 * half_rows, 2 * half_columns)
    tokens = prompt(before, half_rows * half_columns, after)
    positions, delta = prefill_positions(tokens, grid, SPEC)
    next_position = np.zeros((4, 1, 1), np.int64)
    decode_positions(len(tokens), delta, next_position)
    assert next_position[0] == len(tokens)
    assert (next_position[1:] == positions[1:].max() + 1).all()


@pytest.mark.parametrize(
    ("tokens", "grid", "numbers"),
    [
        (prompt(2, 3, 1), (4, 4), ("3 image tokens", "gives 4")),
        (prompt(2, 1, 1), None, ("1 image tokens", "gives 0")),
        (prompt(2, 0, 1), (2, 2), ("0 image tokens", "gives 1")),
    ],
)
def test_image_tokens_unlike_embeddings_are_refused_with_both_numbers(tokens, grid, numbers):
    with pytest.raises(PromptError) as error:
        prefill_positions(tokens, grid, SPEC)
    assert all(number in str(error.value) for number in numbers)


def test_image_tokens_must_stand_together():
    with pytest.raises(PromptError, match="stand together"):
        prefill_positions(np.array([IMAGE, 1, IMAGE, IMAGE, IMAGE]), (4, 4), SPEC)


def test_left_padding_pads_the_last_axis_only():
    assert left_padded(np.array([[5, 6]]), 4).tolist() == [[0, 0, 5, 6]]
    assert left_padded(np.ones((4, 1, 2), np.int64), 5).shape == (4, 1, 5)
