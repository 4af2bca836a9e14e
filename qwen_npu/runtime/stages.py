"""Vision, prefill and decode: each is built, run and released, one model alive at a time. Only NumPy arrays cross
between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from qwen_npu.contract import LOGITS, GraphContract
from qwen_npu.driver.protocol import Tensor, TensorInfo
from qwen_npu.driver.recording import RecordingDriver, RecordingModel
from qwen_npu.errors import CapacityError
from qwen_npu.ledger.events import now_ns
from qwen_npu.runtime.positions import decode_positions, left_padded
from qwen_npu.runtime.states import (
    DecodeInfos,
    ResidentStates,
    RoundTripStates,
    StateArrays,
    States,
    check_fixed,
    fixed_capacity,
)


class StageModel:
    """A loaded model seen through its contract: tensors in contract order, whatever the file's own order.

    Attributes:
        inputs, outputs: the model's descriptors in contract order; names are the contract's.
        build_ms: time to load and build.
    """

    def __init__(self, model: RecordingModel, contract: GraphContract, build_ms: float) -> None:
        self._model = model
        self._input_at = contract.bind([info.name for info in model.inputs], "inputs")
        self._output_at = contract.bind([info.name for info in model.outputs], "outputs")
        self._in_order = self._input_at == tuple(range(len(self._input_at)))
        self._out_order = self._output_at == tuple(range(len(self._output_at)))
        self.inputs = _named(model.inputs, self._input_at, contract.input_names)
        self.outputs = _named(model.outputs, self._output_at, contract.output_names)
        self.build_ms = build_ms

    def resize(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._model.resize(_placed(shapes, self._input_at))

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        if not self._in_order:
            inputs = _placed(inputs, self._input_at)
        if outputs is not None and not self._out_order:
            outputs = _placed(outputs, self._output_at)
        results = self._model.predict(inputs, outputs)
        return results if self._out_order else [results[index] for index in self._output_at]


@contextmanager
def open_stage(driver: RecordingDriver, path: Path, graph: str, contract: GraphContract) -> Iterator[StageModel]:
    """Builds a stage's model and releases it at the end, whatever happened."""
    driver.stage, driver.step = contract.stage, -1
    start = now_ns()
    driver.emit("stage_begin", detail={"graph": graph})
    model = driver.load(path, graph)
    try:
        yield StageModel(model, contract, (now_ns() - start) / 1e6)
    finally:
        model.close()
        driver.stage, driver.step = contract.stage, -1
        driver.emit("stage_end", start, detail={"graph": graph})
        driver.stage = ""


def run_vision(driver: RecordingDriver, model: StageModel, pixel_values: np.ndarray) -> np.ndarray:
    """`image_embeds` [rows, hidden] of `pixel_values` [patches, lanes]."""
    (result,) = model.predict([_host(driver, pixel_values, model.inputs[0])])
    return driver.download(result)


class PrefillResult(NamedTuple):
    """logits [1, 1 or bucket, vocab], the states as the graph gives them, tokens of padding."""

    logits: np.ndarray
    states: StateArrays
    pads: int


def run_prefill(
    driver: RecordingDriver,
    model: StageModel,
    tokens: np.ndarray,
    positions: np.ndarray,
    image_embeds: np.ndarray | None,
    bucket: int,
) -> PrefillResult:
    """Runs a prompt left-padded to `bucket` tokens; the pads are masked out inside the graph, so every state stays
    exact. Arguments as `predict_prompt`.
    """
    logits, *states = predict_prompt(driver, model, tokens, positions, image_embeds, bucket)
    return PrefillResult(logits, StateArrays(*states), bucket - len(tokens))


def predict_prompt(
    driver: RecordingDriver,
    model: StageModel,
    tokens: np.ndarray,
    positions: np.ndarray,
    image_embeds: np.ndarray | None,
    bucket: int,
) -> list[np.ndarray]:
    """What a graph with the inputs of prefill gives for a prompt left-padded to `bucket` tokens.

    Args:
        tokens: i64 [S].
        positions: i64 [4, 1, S].
        image_embeds: [rows, hidden] or None.
    """
    ids, mask, position_ids, embeds = model.inputs
    if image_embeds is None:
        # one zero row that no token reads: the vendor's runtime has no empty tensors
        image_embeds = np.zeros((1, embeds.shape[-1]), embeds.dtype)
    arrays = (
        left_padded(tokens[None], bucket),
        left_padded(np.ones((1, len(tokens)), np.int64), bucket),
        left_padded(positions, bucket),
        image_embeds,
    )
    feeds = [_host(driver, array, info) for array, info in zip(arrays, (ids, mask, position_ids, embeds), strict=True)]
    shapes = [feed.shape for feed in feeds]
    if shapes != [info.shape for info in model.inputs]:
        model.resize(shapes)
    return [driver.download(result) for result in model.predict(feeds)]


class DecodeStage:
    """Decode over one loaded model: state buffers, mask and position, one token a step.

    Attributes:
        capacity: tokens of a fixed KV, None when it grows.
        tokens: how many tokens the states hold.
        states: where the states live.
    """

    def __init__(
        self,
        driver: RecordingDriver,
        model: StageModel,
        states: StateArrays,
        prompt_tokens: int,
        delta: int,
        *,
        resident: bool,
    ) -> None:
        self._driver = driver
        self._model = model
        self._delta = delta
        infos = DecodeInfos(model.inputs, model.outputs)
        self.capacity = fixed_capacity(infos)
        self.tokens = prompt_tokens
        mask_tokens = self.capacity or prompt_tokens
        mask = np.zeros((1, mask_tokens), infos.mask.dtype)
        mask[:, :prompt_tokens] = 1
        if self.capacity is not None:
            if prompt_tokens > self.capacity:
                raise CapacityError(
                    f"the prompt has {prompt_tokens} tokens, the KV cache holds {self.capacity}",
                    expected=f"at most {self.capacity} tokens",
                )
            check_fixed(mask, states, self.capacity)
        self._ids = np.zeros((1, 1), infos.inputs[0].dtype)
        self._positions = np.zeros((4, 1, 1), infos.inputs[2].dtype)
        self._mask = mask
        # host tensors over arrays that are written in place: wrapped once, seen by every predict
        self._ids_feed = _host(driver, self._ids, infos.inputs[0])
        self._positions_feed = _host(driver, self._positions, infos.inputs[2])
        self._mask_feed = _host(driver, mask, infos.mask)
        self._must_resize = "auto_resize" not in driver.capabilities
        self._logits: Tensor | None = None
        self.states: States
        if resident:
            shape = tuple(1 if size < 0 else size for size in infos.outputs[0].shape)
            self.states = ResidentStates(driver, infos, states, self.capacity)
            try:
                self._logits = driver.empty(shape, infos.outputs[0], buffer=LOGITS)
            except BaseException:
                self.states.free()
                raise
        else:
            self.states = RoundTripStates(driver, infos, states)

    @property
    def full(self) -> bool:
        """Whether a fixed cache has no room for another token."""
        return self.capacity is not None and self.tokens >= self.capacity

    def step(self, token: int) -> tuple[np.ndarray, float]:
        """Feeds one token.

        Returns:
            logits [vocab] of the next token (the caller's own array) and predict_ms: from arranging the inputs to the
            return of predict.

        Raises:
            CapacityError: the fixed cache is full; nothing was written.
        """
        if self.full:
            raise CapacityError(
                f"the KV cache is full: {self.tokens} of {self.capacity} tokens",
                expected="fewer tokens",
                fix="ask for fewer tokens, use kv='growing', or build the bundle with a larger capacity",
            )
        start = now_ns()
        self._ids[0, 0] = token
        decode_positions(self.tokens, self._delta, self._positions)
        feeds = [self._ids_feed, self._next_mask(), self._positions_feed, *self.states.inputs()]
        destinations = self.states.outputs()
        outputs = None if destinations is None or self._logits is None else [self._logits, *destinations]
        if self._must_resize and any(-1 in info.shape for info in self._model.inputs):
            self._model.resize([feed.shape for feed in feeds])
        logits, *states = self._model.predict(feeds, outputs)
        predict_ms = (now_ns() - start) / 1e6
        array = self._driver.download(logits)
        self.states.advance(states)
        self.tokens += 1
        return array.reshape(-1), predict_ms

    def read(self) -> StateArrays:
        """All live states on the host: an explicit crossing."""
        return self.states.read()

    def free(self) -> None:
        """Gives the state and logits buffers back."""
        self.states.free()
        if self._logits is not None:
            self._driver.free(self._logits)
            self._logits = None

    def _next_mask(self) -> Tensor:
        if self.capacity is not None:
            self._mask[0, self.tokens] = 1
            return self._mask_feed
        return _host(self._driver, np.ones((1, self.tokens + 1), self._mask.dtype), self._model.inputs[1])


def _host(driver: RecordingDriver, array: np.ndarray, info: TensorInfo) -> Tensor:
    """A host tensor of the dtype that the model's own descriptor asks for."""
    return driver.wrap(array.astype(info.dtype, copy=False), name=info.name, buffer=f"input.{info.name}")


def _named(infos: Sequence[TensorInfo], at: Sequence[int], names: Sequence[str]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, infos[i].dtype, infos[i].shape) for i, name in zip(at, names, strict=True))


T = TypeVar("T")


def _placed(values: Sequence[T], at: Sequence[int]) -> list[T]:
    """The contract's values in the model's own order."""
    placed = list(values)
    for value, index in zip(values, at, strict=True):
        placed[index] = value
    return placed
