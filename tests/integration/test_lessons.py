"""What the course provokes is what it says: the model's own recurrence, a wrong order, a wrong padding."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_npu import lessons
from qwen_npu.bundle import open_bundle
from qwen_npu.data import image_path
from qwen_npu.errors import UsageError, WorkbenchError
from qwen_npu.rgdr import chunk_gated_delta_rule
from qwen_npu.runtime.session import Session


@pytest.fixture(scope="module")
def session():
    with Session(open_bundle("tiny"), driver="emulator", numerics="f32") as opened:
        yield opened


@pytest.fixture(scope="module")
def feed(session):
    return session.inputs.feed("Describe this image.", image_path("wide_two_shapes"))


def test_a_layers_recurrence_is_what_prefill_computed(session, feed):
    _, states = lessons.prefill_in_bucket(session, feed, 64)
    for layer in (0, len(session.bundle.spec.linear_layers) - 1):
        laid_open = lessons.recurrence_of(session, feed, layer)
        assert np.allclose(laid_open.final_state[0].swapaxes(-1, -2), states.recurrent[layer, 0], atol=1e-5)
        assert np.allclose(np.linalg.norm(laid_open.key, axis=-1), 1, atol=1e-3)
        assert (laid_open.g <= 0).all()
        out, state = chunk_gated_delta_rule(
            *laid_open[:4],
            np.zeros_like(laid_open.final_state),
            np.array([len(feed.tokens)]),
            g=laid_open.g,
            scale=session.bundle.spec.dk**-0.5,
        )
        assert np.allclose(state, laid_open.final_state, atol=1e-5)
        assert np.allclose(out, laid_open.out, atol=1e-5)


def test_the_rule_written_out_ends_in_the_graphs_state(session, feed):
    laid_open = lessons.recurrence_of(session, feed, 1)
    for head in range(session.bundle.spec.nv):
        states = lessons.states_over_tokens(laid_open, head)
        assert states.shape == (len(feed.tokens), session.bundle.spec.dv, session.bundle.spec.dk)
        assert np.allclose(states[-1], laid_open.final_state[0, head], atol=1e-5)


def test_there_is_no_layer_beyond_the_last(session, feed):
    with pytest.raises(UsageError, match="linear layer 99"):
        lessons.recurrence_of(session, feed, 99)


def test_raster_order_is_row_by_row(session, feed):
    """The first patches of the raster are the top row of the picture, left to right."""
    rows, columns = feed.image.grid
    raster = lessons.in_raster_order(feed.image, session.bundle.spec.vision.merge)
    patch = session.bundle.spec.vision.patch
    for index in (0, 1, columns - 1, columns, rows * columns - 1):
        row, column = divmod(index, columns)
        red = feed.image.pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch, 0]
        lanes = raster.pixel_values[index, : patch * patch].reshape(patch, patch)
        assert np.array_equal(np.rint((lanes * 0.5 + 0.5) * 255).astype(np.uint8), red)


def test_left_padding_is_exact_and_right_padding_is_not(session, feed):
    _, exact = lessons.prefill_in_bucket(session, feed, 64)
    _, left = lessons.prefill_in_bucket(session, feed, 128)
    assert max(lessons.largest_difference(left, exact).values()) <= 1e-5
    right = lessons.largest_difference(lessons.prefill_right_padded(session, feed, 64), exact)
    assert right["conv"] > 0.05
    assert right["recurrent"] > 0.05
    assert right["kv"] <= 1e-5
    with pytest.raises(UsageError, match="padded to 3"):
        lessons.prefill_right_padded(session, feed, 3)


def test_a_length_that_is_no_bucket_is_refused_as_on_the_box(session, feed):
    with pytest.raises(WorkbenchError, match="one of the declared sizes"):
        lessons.prefill_in_bucket(session, feed, 65)
