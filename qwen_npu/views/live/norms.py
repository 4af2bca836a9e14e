"""What a peek saw of the recurrent state at the cursor's step: a row a layer, a cell a head."""

from __future__ import annotations

import numpy as np

from qwen_npu.views.figures.states import NORM
from qwen_npu.views.live.frames import Frames
from qwen_npu.views.live.grid import CROSSED, FULL, SOLID, Picture

PALETTE = [
    "#440154",
    "#472D7B",
    "#3B528B",
    "#2C728E",
    "#21918C",
    "#28AE80",
    "#5EC962",
    "#ADDC30",
    "#FDE725",
    "#8A8A8A",
]
"""Viridis in nine steps, and grey for what is not finite."""
GLYPHS = ["", "NaN"]
_STEPS = len(PALETTE) - 1
LEGEND = [
    [PALETTE[0], FULL, SOLID, "", "smallest norm shown"],
    [PALETTE[_STEPS // 2], FULL, SOLID, "", "middle"],
    [PALETTE[_STEPS - 1], FULL, SOLID, "", "largest"],
    [PALETTE[_STEPS], FULL, CROSSED, "", "not finite"],
]


def norms(frames: Frames, cursor: int) -> Picture | None:
    """The picture of the peek within the cursor's tick; None where there is none."""
    tick = frames.ticks[cursor]
    end = frames.ticks[cursor + 1].first_seq if cursor + 1 < len(frames.ticks) else frames.last_seq + 1
    found = [peek for peek in frames.ledger.peeks(NORM, step=tick.step) if tick.first_seq <= peek.seq < end]
    if not found or found[-1].array.ndim != 2:
        return None
    values = found[-1].array.astype(float)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    span = high - low or 1.0
    cells = np.zeros((*values.shape, 4), np.uint8)
    levels = np.clip((np.where(finite, values, low) - low) / span * _STEPS, 0, _STEPS - 1).astype(np.uint8)
    cells[..., 0] = np.where(finite, levels, _STEPS)
    cells[..., 1] = FULL
    cells[..., 2] = np.where(finite, SOLID, CROSSED)
    cells[..., 3] = ~finite
    names = [f"linear layer {layer}" for layer in range(len(values))]
    return Picture(
        rows=[{"id": name, "label": name, "band": False, "bus": False} for name in names],
        columns=[f"head {head}" for head in range(values.shape[1])],
        cells=cells,
        side=[f"{row.min():.4g} to {row.max():.4g}" for row in values],
        line=f"{tick.label}: norms from {low:.4g} to {high:.4g}; {int((~finite).sum())} not finite",
    )
