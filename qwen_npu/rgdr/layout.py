"""Which way round a state lies: the check for what no shape can show when DK == DV.

One step changes a state by S' - decay * S = d k^T: in a V-major state [DV, DK] every row of the change is a multiple of
the key, in a K-major one every column is. So states before and after one token, and its key, tell the layout.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


def layout_of_update(
    before: NDArray[Any], after: NDArray[Any], key: NDArray[Any], log_decay: float = 0.0, tolerance: float = 0.05
) -> Literal["VK", "KV", "unknown"]:
    """Whether one head's state was updated V-major ("VK", as the op does) or K-major ("KV", transposed).

    Args:
        before, after: [D, D] the head's state before and after ONE token.
        key: [D] the token's key for this head.
        log_decay: the token's g (plus a scalar gk) for this head.
        tolerance: part of the change's norm that may point elsewhere (rounding of an f16 pool).

    Returns:
        "unknown" where the change fits both or neither: no change at all, or more than one token between the two.
    """
    change = after.astype(np.float64) - np.exp(log_decay) * before.astype(np.float64)
    unit = key.astype(np.float64)
    size, length = np.linalg.norm(change), np.linalg.norm(unit)
    if size == 0 or length == 0:
        return "unknown"
    unit = unit / length
    off_rows = np.linalg.norm(change - np.outer(change @ unit, unit)) / size
    off_columns = np.linalg.norm(change - np.outer(unit, unit @ change)) / size
    v_major, k_major = off_rows <= tolerance, off_columns <= tolerance
    if v_major == k_major:
        return "unknown"
    return "VK" if v_major else "KV"
