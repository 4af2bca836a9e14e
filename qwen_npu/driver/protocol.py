"""What the runtime asks of a driver. Everything above this seam works through these few calls, whichever package
answers them.

A driver that knows more than the vendor's package shows says so in `capabilities`; nobody asks which driver it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from qwen_npu.ledger.events import NOWHERE, EventSink, Place

Capability = Literal[
    "resident",  # device tensors exist, and predict writes into the caller's
    "auto_resize",  # a dynamic graph takes inputs of a new shape without `resize`
    "addresses",  # a device tensor's address is known
    "device_memory",  # live and peak bytes of the whole device are known, weights and workspace too
    "hidden_copies",  # copies that the vendor makes unseen are reported
]


@dataclass(frozen=True)
class TensorInfo:
    """A descriptor of a model's input or output. `shape` holds -1 where the size is the caller's."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Tensor:
    """A handle to host or device memory.

    Attributes:
        raw: the package's own tensor; None once freed.
        name: tensor name in the graph.
        buffer: id of the buffer in the ledger.
        device: "host" or "ascend:N".
    """

    __slots__ = ("buffer", "device", "dtype", "name", "nbytes", "raw", "shape")

    def __init__(
        self, raw: Any, *, name: str, buffer: str, dtype: np.dtype[Any], shape: tuple[int, ...], device: str
    ) -> None:
        self.raw = raw
        self.name = name
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))

    def __repr__(self) -> str:
        return f"Tensor({self.buffer}: {self.dtype.name}{list(self.shape)} on {self.device})"


class Model(Protocol):
    """A loaded graph."""

    graph: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def resize(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Sets the shapes of all inputs, in order."""

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Runs the graph. With `outputs` on the device the results are written there; else they come as host tensors
        whose memory the next predict of this model may overwrite."""

    def close(self) -> None:
        """Releases the model and its memory."""


class Driver(Protocol):
    """One device, opened."""

    name: str
    device: str
    capabilities: frozenset[Capability]

    def load(self, path: Path, graph: str) -> Model:
        """Loads a stage graph; `graph` is its name in the ledger."""

    def wrap(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        """A host tensor over the array's own memory: later writes to the array are seen by the next predict."""

    def upload(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        """A device tensor that holds a copy of the array."""

    def empty(self, shape: tuple[int, ...], info: TensorInfo, *, buffer: str) -> Tensor:
        """A device tensor with dtype, name and format of a model's descriptor; contents undefined."""

    def download(self, tensor: Tensor) -> np.ndarray:
        """The contents as an array of the caller's own."""

    def free(self, tensor: Tensor) -> None:
        """Gives the memory back; the handle must not be used again."""

    def address(self, tensor: Tensor) -> int | None:
        """Device address, None where unknown."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """(live, peak) bytes of the device, None where unknown."""

    def subscribe(self, sink: EventSink | None, place: Place = NOWHERE) -> None:
        """Sends what only the package knows (hidden copies, hazards) to `sink`, as events of `place`; None ends it."""

    def close(self) -> None:
        """Releases the device."""
