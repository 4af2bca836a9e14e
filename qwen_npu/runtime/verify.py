"""The verify and admit graphs with the device memory they share: pools in place, KV in two halves. Knows rows and
slots, no text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import GraphContract
from qwen_npu.driver.protocol import Tensor, TensorInfo
from qwen_npu.runtime.context import RunContext
from qwen_npu.runtime.stages import StageModel, open_stage
from qwen_npu.runtime.states import StateArrays


class VerifyFeed:
    """The integer inputs of one verify graph, written in place before each call: wrapped once, seen by every
    predict."""

    def __init__(self, context: RunContext, model: StageModel, mask: Tensor) -> None:
        ids, _, positions, lengths, slots, accepted = (np.zeros(info.shape, info.dtype) for info in model.inputs[:6])
        self._sequences, self._length = ids.shape
        lengths[:] = self._length
        accepted[:] = 1
        # numbers are put in one by one: views of memory take them faster than arrays
        self._ids, self._positions, self._accepted = (x.reshape(-1).data for x in (ids, positions, accepted))
        self._slots = slots
        arrays = (ids, None, positions, lengths, slots, accepted)
        self.tensors = [
            mask if array is None else _wrapped(context, array, info)
            for array, info in zip(arrays, model.inputs, strict=False)
        ]

    def row(
        self, row: int, fed: Sequence[int], past_tokens: int, delta: int, slots: Sequence[int], accepted: int
    ) -> None:
        """`fed` is the certain token and its drafts; whatever is fed behind them is written behind the accepted token,
        unread."""
        self._slots[row] = slots
        first, plane = row * self._length, self._sequences * self._length
        for place, token in enumerate(fed, first):
            self._ids[place] = token
        for place, position in enumerate(range(past_tokens, past_tokens + self._length), first):
            self._positions[place] = position
            position += delta
            self._positions[plane + place] = position
            self._positions[2 * plane + place] = position
            self._positions[3 * plane + place] = position
        self._accepted[row] = accepted

    def empty_row(self, row: int, slots: Sequence[int]) -> None:
        """A row without a sequence: it writes to slots that nobody owns, and nobody reads its result."""
        self.row(row, [0] * self._length, 0, 0, slots, 1)


class VerifyGraphs:
    """Opens the graphs when they are first needed. All of them work on the same pools and KV."""

    def __init__(self, context: RunContext, width: int, sequences: int, slots: int) -> None:
        self._context = context
        self._driver = context.driver
        self._width = width
        self._sizes = {"sequences": sequences, "slots": slots}
        self._open = ExitStack()
        self._verify: dict[int, StageModel] = {}
        self._feeds: dict[int, VerifyFeed] = {}
        self._logits: dict[int, Tensor] = {}
        self._admit: StageModel | None = None
        self._peek: StageModel | None = None
        self._kv: list[Tensor] = []  # live half first
        self._pools: list[Tensor] = []
        self._mask = np.zeros((0, 0))
        self._mask_feed: Tensor | None = None
        self.build_ms = 0.0

    def see(self, row: int, start: int, end: int, seen: bool) -> None:
        """Which of a row's cache positions the next verify sees."""
        self._mask[row, start:end] = seen

    def feed(self, length: int) -> VerifyFeed:
        """The inputs of the graph of `length` tokens; opens it."""
        if length not in self._feeds:
            spec, numerics = self._context.bundle.spec, self._context.numerics
            capacity = self._context.bundle.capacity
            sizes = {"tokens": length, "width": self._width, **self._sizes}
            graph = contract.verify(spec, numerics, capacity=capacity, **sizes)
            model = self._opened(self._context.bundle.verify(numerics=numerics, **sizes), f"verify_{length}", graph)
            info = model.outputs[0]
            assert self._mask_feed is not None
            self._verify[length] = model
            self._logits[length] = self._driver.empty(info.shape, info, buffer=f"logits.{length}")
            self._feeds[length] = VerifyFeed(self._context, model, self._mask_feed)
        return self._feeds[length]

    def predict(self, length: int) -> None:
        """One verify with what was put into `feed(length)`."""
        live, scratch = self._kv
        inputs = [*self._feeds[length].tensors, live, *self._pools]
        self._verify[length].predict(inputs, [self._logits[length], scratch, *self._pools])
        self._rotate()

    def logits(self, length: int) -> np.ndarray:
        """[B, length, vocab] of the last verify, downloaded."""
        return self._driver.download(self._logits[length])

    def write(self, row: int, slot: int, states: StateArrays) -> None:
        """Puts one sequence's states into a slot of every pool and a row of the KV: the vendor has no partial write."""
        model = self._admit_model()
        driver = self._driver
        driver.stage = "admit"
        small = (np.array([row]), np.array([slot]))
        feeds = [
            _wrapped(self._context, array.astype(info.dtype, copy=False), info)
            for array, info in zip((*small, *states), model.inputs, strict=False)
        ]
        live, scratch = self._kv
        model.predict([*feeds, live, *self._pools], [scratch, *self._pools])
        self._rotate()

    def nan_states(self) -> StateArrays:
        """States of one sequence, all NaN: what a freed slot is poisoned with."""
        conv, recurrent, kv = self._admit_model().inputs[2:5]
        return StateArrays(*(np.full(info.shape, np.nan, info.dtype) for info in (conv, recurrent, kv)))

    def peek(self, slots: Sequence[int], positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Figures (see `contract.PEEK_FIGURES`, last axis) of some slots and of each row's KV at its position.

        Returns:
            conv [linear layer, slot, 3], recurrent [linear layer, slot, head, 3], kv [k and v, row, KV head, 3].
        """
        model = self._peek_model()
        arrays = (np.array(positions), np.array(slots))
        feeds = [
            _wrapped(self._context, array.astype(info.dtype), info)
            for array, info in zip(arrays, model.inputs, strict=False)
        ]
        results = model.predict([*feeds, self._kv[0], *self._pools])
        conv, recurrent, kv = (self._driver.download(result) for result in results)
        return conv, recurrent, kv

    def read(self, row: int, slot: int) -> StateArrays:
        """The states in a slot and a row, in the layout of `StateArrays`. Downloads whole pools."""
        pools = [self._driver.download(pool)[slot] for pool in self._pools]
        conv, recurrent = np.stack(pools[0::2]), np.stack(pools[1::2])
        kv = self._driver.download(self._kv[0])[:, row : row + 1]
        # the op keeps its state V-major
        return StateArrays(conv[:, None], recurrent.swapaxes(-1, -2)[:, None].astype(np.float32), kv)

    def close_models(self) -> None:
        """Releases the graphs; pools and KV stay."""
        self._open.close()
        self._verify.clear()
        self._feeds.clear()
        self._admit = self._peek = None

    def free(self) -> None:
        """Releases graphs, pools, KV and logits."""
        self.close_models()
        for tensor in (*self._kv, *self._pools, *self._logits.values()):
            self._driver.free(tensor)
        self._kv, self._pools = [], []
        self._logits.clear()

    def _admit_model(self) -> StageModel:
        if self._admit is None:
            spec, numerics = self._context.bundle.spec, self._context.numerics
            capacity = self._context.bundle.capacity
            graph = contract.admit(spec, numerics, capacity=capacity, **self._sizes)
            self._admit = self._opened(self._context.bundle.admit(numerics=numerics, **self._sizes), "admit", graph)
            if not self._kv:
                self._allocate(self._admit)
        return self._admit

    def _peek_model(self) -> StageModel:
        if self._peek is None:
            bundle, numerics = self._context.bundle, self._context.numerics
            graph = contract.peek_pools(bundle.spec, numerics, capacity=bundle.capacity, **self._sizes)
            self._peek = self._opened(bundle.peek_pools(numerics=numerics, **self._sizes), "peek_pools", graph)
        return self._peek

    def _allocate(self, admit: StageModel) -> None:
        """KV and pools, all NaN: whatever is read before it was written shows."""
        kv, *pools = admit.inputs[5:]
        try:
            self._kv.append(self._poisoned(kv, "kv.a"))
            self._kv.append(self._driver.empty(kv.shape, kv, buffer="kv.b"))
            for pool in pools:
                self._pools.append(self._poisoned(pool, pool.name))
        except BaseException:
            self.free()  # half of the pools is of no use, and the next try needs the room
            raise
        self._mask = np.zeros((self._sizes["sequences"], self._context.bundle.capacity), np.int32)
        self._mask_feed = _wrapped(self._context, self._mask, TensorInfo(contract.ATTENTION_MASK, self._mask.dtype, ()))

    def _poisoned(self, info: TensorInfo, buffer: str) -> Tensor:
        return self._driver.upload(np.full(info.shape, np.nan, info.dtype), name=info.name, buffer=buffer)

    def _opened(self, path: Path, name: str, graph: GraphContract) -> StageModel:
        stage, step = self._driver.stage, self._driver.step
        model = self._open.enter_context(open_stage(self._driver, path, name, graph))
        if step >= 0:  # a graph that a step finds missing is opened in that step, and the step goes on
            self._driver.stage, self._driver.step = stage, step
        self.build_ms += model.build_ms
        return model

    def _rotate(self) -> None:
        live, scratch = self._kv
        self._kv = [scratch, live]
        self._driver.rotated(("kv",), (scratch,), (live,))


def _wrapped(context: RunContext, array: np.ndarray, info: TensorInfo) -> Tensor:
    return context.driver.wrap(array, name=info.name, buffer=f"input.{info.name}")
