"""What only the emulator knows: device memory, addresses, hidden copies, hazards.

The one door for it: nothing of this exists in the vendor package, so callers treat it as a capability. Events have
source "emulator". Without a subscriber an event costs one test of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qwen_npu.ledger.events import NOWHERE, Buffer, Event, EventSink, Place, event_of, now_ns

if TYPE_CHECKING:
    from qwen_npu.emulator.memory import Block
    from qwen_npu.emulator.policy import Hazard
    from qwen_npu.emulator.tensor import Tensor

sinks: list[tuple[EventSink, Place]] = []
"""Emitters test it before they build an event."""


class BlockInfo(NamedTuple):
    """One live allocation of a device."""

    address: int
    nbytes: int
    kind: str
    name: str
    site: str


class DeviceMemory(NamedTuple):
    """The memory of one device, in bytes. `blocks` are what is alive, in order of address."""

    live_bytes: int
    peak_bytes: int
    capacity_bytes: int
    blocks: tuple[BlockInfo, ...]


def subscribe(sink: EventSink, place: Place = NOWHERE) -> Callable[[], None]:
    """Sends every later event to `sink`, with the stage and step of `place` at that time, until the function that this
    returns is called."""
    listener = (sink, place)
    sinks.append(listener)

    def unsubscribe() -> None:
        if listener in sinks:
            sinks.remove(listener)

    return unsubscribe


def memory(device: str = "ascend:0") -> DeviceMemory:
    """What is allocated on a device now, and the most that ever was since `reset_peak`.

    Raises:
        DeviceError: there is no such device.
    """
    from qwen_npu.emulator.memory import card

    return card(device).snapshot()


def reset_peak(device: str = "ascend:0") -> None:
    """Makes the present use of a device its peak."""
    from qwen_npu.emulator.memory import card

    card(device).reset_peak()


def address(tensor: Tensor) -> int | None:
    """Device address of a tensor; None for a tensor on the host."""
    core = tensor._tensor
    return None if core is None or core.block is None else core.block.address


def free(tensor: Tensor) -> None:
    """Frees a tensor's device memory now; every later use of the tensor is a hazard (use after free)."""
    core = tensor._tensor
    if core is not None:
        core.free()


def emit(event: Event) -> None:
    for sink, place in tuple(sinks):
        sink(event._replace(stage=place.stage, step=place.step))


def buffer_id(block: Block) -> str:
    """Stable id of a block while it lives, e.g. "ascend:0@0x124000000200"."""
    return f"{block.device}@{block.address:#x}"


def allocated(block: Block, dtype: str, shape: tuple[int, ...]) -> None:
    from qwen_npu.contract import buffer_kind

    buffer = Buffer(
        id=buffer_id(block),
        name=block.name,
        kind=buffer_kind(block.name) if block.kind == "tensor" and block.name else "other",
        half="",
        device=block.device,
        dtype=dtype,
        shape=shape,
        nbytes=block.nbytes,
        address=block.address,
        generation=block.serial,
        site=block.site,
    )
    detail = {**buffer._asdict(), "what": block.kind}
    emit(Event("allocate", now_ns(), buffer=buffer.id, nbytes=block.nbytes, source="emulator", detail=detail))


def freed(block: Block) -> None:
    emit(
        Event(
            "free",
            now_ns(),
            buffer=buffer_id(block),
            nbytes=block.nbytes,
            source="emulator",
            detail={"name": block.name, "what": block.kind, "address": block.address},
        )
    )


class Copy(NamedTuple):
    """What the copies of one tensor have in common. Who copies at every step makes it once."""

    kind: Literal["upload", "download"]
    buffer: str
    nbytes: int
    detail: dict[str, Any]


def copy_of(
    kind: Literal["upload", "download"], nbytes: int, *, name: str, cause: str, hidden: bool, block: Block | None
) -> Copy:
    """`hidden` marks copies that the program did not ask for in so many words: host tensors given to predict, results
    that come to the host, a device tensor wrapped once more.
    """
    address, buffer = (None, "") if block is None else (block.address, buffer_id(block))
    return Copy(kind, buffer, nbytes, {"name": name, "cause": cause, "hidden": hidden, "address": address})


def copied(copy: Copy, start_ns: int) -> None:
    """A copy that took from `start_ns` until now."""
    dur_ns = now_ns() - start_ns
    kind, buffer, nbytes, detail = copy
    for sink, place in tuple(sinks):
        facts = (kind, start_ns, dur_ns, place.stage, place.step, buffer, "", nbytes, "emulator", detail, None, -1)
        sink(event_of(facts))


def resized(model: str, shapes: dict[str, list[int]], *, automatic: bool) -> None:
    detail = {"model": model, "shapes": shapes, "automatic": automatic}
    emit(Event("resize", now_ns(), source="emulator", detail=detail))


def hazard(hazard: Hazard, *, model: str, predict: int) -> None:
    if sinks:
        detail = {
            "hazard": hazard.kind,
            "problem": hazard.problem,
            "expected": hazard.expected,
            "model": model,
            "predict": predict,
        }
        emit(Event("hazard", now_ns(), buffer=hazard.buffer, source="emulator", detail=detail))
