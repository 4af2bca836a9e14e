"""Host memory for states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE_BYTES = 64


def empty_states(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialised array that begins with a cache line, which NumPy's own do not.

    Where every vector of a row lies across two lines, a step in the cache takes a third longer.
    """
    kind = np.dtype(dtype)
    size_bytes = math.prod(shape) * kind.itemsize
    memory = np.empty(size_bytes + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    return memory[first : first + size_bytes].view(kind).reshape(shape)
