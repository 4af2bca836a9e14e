"""The three states between decode steps: where they live, how they take turns, when they are refused.

`ResidentStates` keeps them on the device; `RoundTripStates` brings them to the host after every step. Both have the
same few methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from qwen_npu.contract import PAST, STATE_KINDS
from qwen_npu.driver.protocol import Tensor, TensorInfo
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import CapacityError, StateError


class StateArrays(NamedTuple):
    """States on the host, layouts of `contract.py`: conv [linear, 1, lanes, kernel-1], recurrent [linear, 1, NV, DK,
    DV], kv [2 * full, 1, KV heads, tokens or capacity, head dim]."""

    conv: np.ndarray
    recurrent: np.ndarray
    kv: np.ndarray


class DecodeInfos(NamedTuple):
    """Descriptors of the decode graph's inputs and outputs in contract order."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def past(self) -> tuple[TensorInfo, ...]:
        return self.inputs[-len(STATE_KINDS) :]

    @property
    def present(self) -> tuple[TensorInfo, ...]:
        return self.outputs[-len(STATE_KINDS) :]

    @property
    def mask(self) -> TensorInfo:
        return self.inputs[1]


def fixed_capacity(infos: DecodeInfos) -> int | None:
    """The KV capacity in tokens of a fixed decode graph, None for a growing one.

    Fixed means: mask's last axis == past KV axis -2 == present KV axis -2 > 0. Anything else is growing.
    """
    # a model may describe an output whose shape it does not know yet as [-1], without its rank
    lengths = [info.shape[-2] if len(info.shape) > 1 else -1 for info in (infos.past[2], infos.present[2])]
    sizes = {infos.mask.shape[-1], *lengths}
    size = sizes.pop()
    return size if not sizes and size > 0 else None


def hand_over(states: StateArrays, pads: int, prefill_tokens: int, capacity: int | None) -> StateArrays:
    """Prefill's states as decode takes them: the pads' KV dropped, the cache padded to a fixed capacity.

    Args:
        states: as they came from prefill.
        pads: tokens of left padding.
        prefill_tokens: length of the bucket.
        capacity: of a fixed decode graph, None for growing.

    Raises:
        CapacityError: the prompt does not fit, or a foreign prefill graph padded its cache to another capacity.
    """
    kv = states.kv
    length = kv.shape[-2]
    prompt = prefill_tokens - pads
    if length != prefill_tokens:
        # A foreign graph that pads its own cache must have padded to our capacity, and cannot have seen pads of ours.
        if capacity is None or length != capacity or pads:
            raise CapacityError(
                f"prefill gives a KV cache of {length} tokens for a bucket of {prefill_tokens}",
                expected=f"{prefill_tokens} tokens, or the decode graph's capacity {capacity} from an unpadded prompt",
                fix="use prefill and decode graphs of one bundle",
            )
        return states
    kv = kv[..., pads:, :]
    if capacity is None:
        return states._replace(kv=np.ascontiguousarray(kv))
    if prompt > capacity:
        raise CapacityError(
            f"the prompt has {prompt} tokens, the KV cache holds {capacity}", expected=f"at most {capacity} tokens"
        )
    padded = np.zeros((*kv.shape[:-2], capacity, kv.shape[-1]), kv.dtype)
    padded[..., :prompt, :] = kv
    return states._replace(kv=padded)


def check_fixed(mask: np.ndarray, states: StateArrays, capacity: int) -> None:
    """The five checks of the fixed policy before the first step.

    Raises:
        StateError: batch is not 1; the mask holds anything but 0 and 1; its ones are no contiguous prefix.
        CapacityError: the prompt is longer than the cache; prefill's cache and the decode graph differ in capacity.
    """
    if mask.shape[0] != 1 or states.kv.shape[1] != 1:
        raise StateError(
            f"a batch of {max(mask.shape[0], states.kv.shape[1])}", expected="a batch of 1 with a fixed KV"
        )
    if states.kv.shape[-2] != capacity:
        raise CapacityError(
            f"prefill hands over a KV cache of {states.kv.shape[-2]} tokens, the decode graph's capacity is {capacity}",
            expected="one capacity for both",
            fix="use prefill and decode graphs of one bundle",
        )
    if mask.shape[-1] > capacity:
        raise CapacityError(
            f"the mask covers {mask.shape[-1]} tokens, the KV cache holds {capacity}", expected=f"at most {capacity}"
        )
    if not np.isin(mask, (0, 1)).all():
        raise StateError(
            f"the attention mask holds {sorted(set(mask.ravel().tolist()) - {0, 1})}", expected="0 and 1 only"
        )
    ones = int(mask.sum())
    if not mask[0, :ones].all():
        raise StateError(
            f"the ones of the attention mask are not a prefix: position {int(mask[0].argmin())} is 0 before a 1",
            expected="ones first, then zeros",
        )


class States(Protocol):
    """What a decode stage needs of the states, wherever they live. Order: conv, recurrent, kv."""

    def inputs(self) -> Sequence[Tensor]:
        """The live states."""

    def outputs(self) -> Sequence[Tensor] | None:
        """Where the next step writes, None if the model brings its own."""

    def advance(self, results: Sequence[Tensor]) -> None:
        """Makes the step's results the live states."""

    def read(self) -> StateArrays:
        """All live states on the host."""

    def free(self) -> None:
        """Gives all memory back."""


class HeldStates(Protocol):
    """States of a generation that a session keeps until the next one."""

    @property
    def tokens(self) -> int:
        """Tokens that they hold."""

    def read(self) -> StateArrays:
        """All of them on the host: an explicit crossing."""

    def free(self) -> None:
        """Gives all memory back."""


class ResidentStates:
    """States on the device. Conv, recurrent and a fixed KV take turns in two halves; a growing KV is allocated anew
    each step.

    A graph may write before it has read, so what a step reads is never what it writes.
    """

    def __init__(self, driver: RecordingDriver, infos: DecodeInfos, states: StateArrays, capacity: int | None) -> None:
        self._driver = driver
        self._present = infos.present
        self._growing = capacity is None
        self._live: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._grown: Tensor | None = None  # a growing KV that a step under way writes
        try:
            for kind, array, past, present in zip(STATE_KINDS, states, infos.past, infos.present, strict=True):
                grows = self._growing and kind == "kv"
                check_fits(array, past)
                self._live.append(driver.upload(array, name=PAST[kind], buffer=kind if grows else f"{kind}.a"))
                if not grows:
                    self._scratch.append(driver.empty(array.shape, present, buffer=f"{kind}.b"))
        except BaseException:
            self.free()  # half of the states is of no use, and the next try needs the room
            raise

    def inputs(self) -> Sequence[Tensor]:
        return self._live

    def outputs(self) -> Sequence[Tensor]:
        if not self._growing:
            return self._scratch
        *front, tokens, lanes = self._live[2].shape
        self._grown = self._driver.empty((*front, tokens + 1, lanes), self._present[2], buffer="kv")
        return [*self._scratch, self._grown]

    def advance(self, results: Sequence[Tensor]) -> None:
        former = self._live
        self._live = list(results)
        if self._growing:
            self._driver.free(former[2])
            self._scratch = former[:2]
            self._grown = None
        else:
            self._scratch = former
        self._driver.rotated(STATE_KINDS, self._live, former)

    def read(self) -> StateArrays:
        return StateArrays(*(self._driver.download(tensor) for tensor in self._live))

    def free(self) -> None:
        for tensor in (*self._live, *self._scratch):
            self._driver.free(tensor)
        if self._grown is not None:  # its step failed
            self._driver.free(self._grown)
        self._live, self._scratch, self._grown = [], [], None


class RoundTripStates:
    """States on the host: fed to every step as host tensors and copied from its results, with the dtypes of the
    graph."""

    def __init__(self, driver: RecordingDriver, infos: DecodeInfos, states: StateArrays) -> None:
        self._driver = driver
        self._live: list[np.ndarray] = []
        for array, past in zip(states, infos.past, strict=True):
            check_fits(array, past)
            self._live.append(array)

    def inputs(self) -> Sequence[Tensor]:
        return [
            self._driver.wrap(array, name=PAST[kind], buffer=f"host.{kind}")
            for kind, array in zip(STATE_KINDS, self._live, strict=True)
        ]

    def outputs(self) -> None:
        return None

    def advance(self, results: Sequence[Tensor]) -> None:
        # download copies: the package's own arrays are views that its next predict overwrites
        self._live = [self._driver.download(tensor) for tensor in results]

    def read(self) -> StateArrays:
        return StateArrays(*(array.copy() for array in self._live))

    def free(self) -> None:
        self._live = []


def check_fits(array: np.ndarray, past: TensorInfo) -> None:
    """Refuses a state whose dtype or shape is not the graph's: the vendor compares byte sizes only.

    Raises:
        StateError: names the state, both dtypes and both shapes.
    """
    same_shape = len(array.shape) == len(past.shape) and all(
        want in (-1, have) for have, want in zip(array.shape, past.shape, strict=True)
    )
    if array.dtype != past.dtype or not same_shape:
        raise StateError(
            f"{past.name} is {array.dtype.name}{list(array.shape)}",
            expected=f"{past.dtype.name}{list(past.shape)}, as the decode graph declares it",
            fix="use graphs of one bundle, built with one numerics",
        )
