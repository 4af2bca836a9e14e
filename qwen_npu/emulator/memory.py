"""Device memory: what is allocated on ascend:0 to ascend:7, where, and what was the most at once.

Addresses are simulated; the bytes live in this process, apart from every array of the program.
"""

from __future__ import annotations

import itertools
import sys
import threading
from bisect import bisect
from collections import deque

import numpy as np

from qwen_npu.emulator import instrument, policy
from qwen_npu.errors import DeviceError, DeviceMemoryError

BASE_ADDRESS = 0x1240_0000_0000
"""First address of every device. Only differences and alignment mean something."""

_PASSED_OVER = ("qwen_npu.emulator", "qwen_npu.driver")
_serial = itertools.count(1)


def _site() -> str:
    """The nearest caller outside the emulator and the drivers, as "file:line"."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_PASSED_OVER):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Block:
    """One allocation of device memory; freed when it is collected, or by `free`.

    Attributes:
        device: "ascend:N".
        address: simulated, a multiple of the alignment.
        nbytes: what was asked for.
        kind: "tensor", "weights" or "input" (a model's own buffer for an input that comes from the host).
        name: of the tensor or the model's file.
        site: "file:line" that allocated it.
        serial: unique in this process.
    """

    __slots__ = ("_card", "_reserved_bytes", "address", "alive", "device", "kind", "name", "nbytes", "serial", "site")

    def __init__(self, card: Card, address: int, nbytes: int, reserved_bytes: int, kind: str, name: str) -> None:
        self._card = card
        self._reserved_bytes = reserved_bytes
        self.device = card.device
        self.address = address
        self.nbytes = nbytes
        self.kind = kind
        self.name = name
        self.site = _site()
        self.serial = next(_serial)
        self.alive = True

    def free(self) -> None:
        if self.alive:
            self.alive = False
            self._card.release(self, self._reserved_bytes)

    def __del__(self) -> None:
        self.free()


class Card:
    """The memory of one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._top = BASE_ADDRESS
        self._holes: list[tuple[int, int]] = []  # (address, bytes), by address, never touching each other
        self._blocks: dict[int, tuple[int, str, str, str]] = {}  # address -> (nbytes, kind, name, site): holds no Block
        self._lock = threading.Lock()
        self._released: deque[tuple[int, int, int]] = deque()  # (address, nbytes, reserved), not yet accounted

    def allocate(self, nbytes: int, kind: str, name: str, dtype: str = "", shape: tuple[int, ...] = ()) -> Block:
        """Raises DeviceMemoryError, naming what is alive, when the device is full."""
        alignment = policy.settings.alignment_bytes
        reserved = max(alignment, -(-nbytes // alignment) * alignment)
        with self._lock:
            self._account_released()
            if self.live_bytes + nbytes > policy.settings.capacity_bytes:
                raise self._full(nbytes, kind, name)
            block = Block(self, self._place(reserved), nbytes, reserved, kind, name)
            self._blocks[block.address] = (nbytes, kind, name, block.site)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if instrument.sinks:
            instrument.allocated(block, dtype, shape)
        return block

    def _place(self, reserved: int) -> int:
        for index, (address, size) in enumerate(self._holes):
            if size >= reserved:
                if size == reserved:
                    del self._holes[index]
                else:
                    self._holes[index] = (address + reserved, size - reserved)
                return address
        address = self._top
        self._top += reserved
        return address

    def release(self, block: Block, reserved: int) -> None:
        """Gives a block back. Safe in a finaliser that interrupts any method here: the holder of the lock accounts."""
        self._released.append((block.address, block.nbytes, reserved))
        if self._lock.acquire(blocking=False):
            try:
                self._account_released()
            finally:
                self._lock.release()
        if instrument.sinks:
            instrument.freed(block)

    def _account_released(self) -> None:
        while self._released:
            address, nbytes, reserved = self._released.popleft()
            self._blocks.pop(address, None)
            self.live_bytes -= nbytes
            index = bisect(self._holes, (address, 0))
            if index < len(self._holes) and address + reserved == self._holes[index][0]:
                reserved += self._holes.pop(index)[1]
            if index and sum(self._holes[index - 1]) == address:
                index -= 1
                address, size = self._holes.pop(index)
                reserved += size
            if address + reserved == self._top:
                self._top = address
            else:
                self._holes.insert(index, (address, reserved))

    def rename(self, block: Block, name: str) -> None:
        block.name = name
        if block.address in self._blocks:
            nbytes, kind, _, site = self._blocks[block.address]
            self._blocks[block.address] = (nbytes, kind, name, site)

    def snapshot(self) -> instrument.DeviceMemory:
        with self._lock:
            self._account_released()
            blocks = tuple(instrument.BlockInfo(address, *rest) for address, rest in sorted(self._blocks.items()))
            return instrument.DeviceMemory(self.live_bytes, self.peak_bytes, policy.settings.capacity_bytes, blocks)

    def reset_peak(self) -> None:
        with self._lock:
            self._account_released()
            self.peak_bytes = self.live_bytes

    def _full(self, nbytes: int, kind: str, name: str) -> DeviceMemoryError:
        largest = sorted(self._blocks.values(), reverse=True)[:8]
        alive = "; ".join(
            f"{size:,} bytes {what} {label or '(no name)'} from {site}" for size, what, label, site in largest
        )
        if len(self._blocks) > len(largest):
            alive += f"; and {len(self._blocks) - len(largest)} smaller"
        free = policy.settings.capacity_bytes - self.live_bytes
        hazard = policy.Hazard("out_of_memory", name, f"{nbytes:,} bytes for {kind} {name or '(no name)'} do not fit")
        if policy.settings.policy != "vendor":
            instrument.hazard(hazard, model="", predict=-1)
        return DeviceMemoryError(
            f"{self.device} has no room for {nbytes:,} bytes ({kind} {name or '(no name)'}); "
            f"alive: {alive or 'nothing'}",
            expected=f"at most {free:,} bytes, of a capacity of {policy.settings.capacity_bytes:,}",
            fix="release what is alive (del the tensor or model), or use a smaller capacity or context",
        )


_cards = [Card(f"ascend:{number}") for number in range(policy.DEVICES)]


def card(device: str) -> Card:
    """The device of that name.

    Raises:
        DeviceError: there is no such device.
    """
    number = policy.device_number(device)
    if number is None:
        raise DeviceError(
            f"no device {device!r}",
            expected=f"ascend:0 to ascend:{policy.DEVICES - 1}",
            fix="use a device that exists",
        )
    return _cards[number]


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Uninitialised bytes that start at a multiple of 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def poison(array: np.ndarray, value: float = np.nan) -> None:
    """Makes the content of an array wrong; 0 for integers, as a wild index would end the run instead."""
    if array.flags.writeable:
        array.fill(value if np.issubdtype(array.dtype, np.floating) else 0)
