"""What the notebooks provoke on purpose or lay open: wrong orders, wrong padding, the recurrence of one layer.

Nothing else in the package uses it. Everything runs the bundle's own graphs through the session's driver.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from qwen_npu import contract
from qwen_npu.driver.protocol import Tensor
from qwen_npu.errors import UsageError
from qwen_npu.runtime import stages
from qwen_npu.runtime.images import PreparedImage
from qwen_npu.runtime.inputs import Feed, choose_bucket
from qwen_npu.runtime.prompt import stage_of
from qwen_npu.runtime.session import Session
from qwen_npu.runtime.stages import PrefillResult, open_stage, predict_prompt, run_prefill
from qwen_npu.runtime.states import ResidentStates, StateArrays
from qwen_npu.spec import ModelSpec

if TYPE_CHECKING:
    from PIL import Image

_EXIF_ORIENTATION = 0x0112


def in_raster_order(image: PreparedImage, merge: int) -> PreparedImage:
    """The picture with its patches row by row, as one might expect them, instead of in merge blocks: the wrong
    order."""
    rows, columns = image.grid
    blocks = np.arange(rows * columns).reshape(rows // merge, columns // merge, merge, merge)
    place = blocks.transpose(0, 2, 1, 3).reshape(-1)  # raster index -> index in merge-block order
    return dataclasses.replace(image, pixel_values=np.ascontiguousarray(image.pixel_values[place]))


def embeddings_of(session: Session, feed: Feed) -> np.ndarray | None:
    """The picture's embeddings, None without one."""
    return None if feed.image is None else session.embed(feed.image)


def prefill_in_bucket(session: Session, feed: Feed, bucket: int) -> tuple[PrefillResult, StateArrays]:
    """Prefill left-padded to a bucket of one's choosing; also its states with the pads' KV dropped."""
    embeds = embeddings_of(session, feed)
    with stage_of(session.context, "prefill") as model:
        result = run_prefill(session.driver, model, feed.tokens, feed.positions, embeds, bucket)
    return result, result.states._replace(kv=result.states.kv[..., result.pads :, :])


def prefill_right_padded(session: Session, feed: Feed, bucket: int) -> StateArrays:
    """Prefill of the prompt with zeros BEHIND it up to `bucket` tokens: what naive padding does. KV of pads dropped."""
    length = len(feed.tokens)
    if bucket < length:
        raise UsageError(f"{length} prompt tokens padded to {bucket}", expected=f"{length} or more")
    pad_tokens = bucket - length
    tokens = np.concatenate([feed.tokens, np.zeros(pad_tokens, np.int64)])
    after = feed.positions[..., -1:] + 1 + np.arange(pad_tokens)
    positions = np.concatenate([feed.positions, after], axis=-1)
    embeds = embeddings_of(session, feed)
    with stage_of(session.context, "prefill") as model:
        result = run_prefill(session.driver, model, tokens, positions, embeds, len(tokens))
    return result.states._replace(kv=result.states.kv[..., :length, :])


class _OneBuffer(ResidentStates):
    """The fault of reading and writing one buffer; a growing KV is allocated anew as ever."""

    def outputs(self) -> Sequence[Tensor]:
        return [*self.inputs()[:2], super().outputs()[2]] if self._growing else self.inputs()


@contextmanager
def one_buffer(policy: str) -> Iterator[None]:
    """Sessions inside keep each state in one buffer instead of a pair; an emulator answers hazards by `policy`.

    What the vendor's device does with it is the vendor's: no policy changes that.
    """
    from qwen_npu import emulator

    pair = stages.ResidentStates  # type: ignore[attr-defined]
    stages.ResidentStates = _OneBuffer  # type: ignore[attr-defined]
    try:
        with emulator.configure(policy=policy):
            yield
    finally:
        stages.ResidentStates = pair  # type: ignore[attr-defined]


def lying_on_its_side(picture: Image.Image) -> Image.Image:
    """The picture as a camera held upright stores it: turned by a quarter, with the EXIF orientation that undoes it."""
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(picture).transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[_EXIF_ORIENTATION] = 6  # "turn by 90 degrees clockwise to show"
    return turned


def largest_difference(ours: StateArrays, reference: StateArrays) -> dict[str, float]:
    """For each state the largest difference, relative to the reference's largest value."""
    return {
        kind: float(np.abs(a.astype(np.float64) - b).max() / max(float(np.abs(b).max()), 1e-30))
        for kind, a, b in zip(contract.STATE_KINDS, ours, reference, strict=True)
    }


class Recurrence(NamedTuple):
    """What one linear layer's recurrence took and made over a prompt, in f32.

    query, key [S, NK, DK] (L2-normalised), value [S, NV, DV], beta, g [S, NV], out [S, NV, DV],
    final_state [1, NV, DV, DK].
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    beta: np.ndarray
    g: np.ndarray
    out: np.ndarray
    final_state: np.ndarray


def recurrence_of(session: Session, feed: Feed, linear_layer: int) -> Recurrence:
    """The model's own q, k, v, beta and g at one linear layer (counted from 0), for the prompt without its pads."""
    bundle = session.bundle
    bucket = choose_bucket(len(feed.tokens), bundle.buckets, bundle.capacity)
    embeds = embeddings_of(session, feed)
    with open_stage(session.driver, bundle.tap(linear_layer), "tap", contract.tap(bundle.spec)) as model:
        found = predict_prompt(session.driver, model, feed.tokens, feed.positions, embeds, bucket)
    query, key, value, beta, g, out = (over_tokens[bucket - len(feed.tokens) :] for over_tokens in found[:-1])
    return Recurrence(query, key, value, beta, g, out, final_state=found[-1])


def states_over_tokens(recurrence: Recurrence, head: int) -> np.ndarray:
    """The state of one value head after each token, [S, DV, DK]: the recurrence written out, one line a rule.

    Source: the gated delta rule as in `rgdr.reference`.
    """
    _, _, value, beta, g, _, _ = recurrence
    repeat = value.shape[1] // recurrence.key.shape[1]
    state = np.zeros(recurrence.final_state.shape[2:])
    states = np.empty((len(value), *state.shape))
    for t in range(len(value)):
        key = recurrence.key[t, head // repeat].astype(np.float64)
        state = state * np.exp(np.float64(g[t, head]))
        delta = (value[t, head] - state @ key) * beta[t, head]
        state = state + np.outer(delta, key)
        states[t] = state
    return states


def until_end(tokens: Sequence[int], spec: ModelSpec) -> list[int]:
    """The tokens before the first end of text. What a model says behind it (`ignore_eos`) nobody taught it: it hangs on
    the last bit, and is no record."""
    return list(itertools.takewhile(lambda token: token not in spec.end_tokens, tokens))
