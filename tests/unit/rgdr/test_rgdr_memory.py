"""Memory for states: of the wanted type, beginning with a cache line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qwen_npu.rgdr import SlotPool, empty_states
from qwen_npu.rgdr.memory import LINE_BYTES


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (1, 32, 128, 128)])
def test_states_begin_with_a_cache_line(dtype: type, shape: tuple[int, ...]) -> None:
    states = empty_states(shape, dtype)
    assert states.shape == shape
    assert states.dtype == dtype
    assert states.flags.c_contiguous
    assert states.flags.writeable
    assert states.ctypes.data % LINE_BYTES == 0


def test_every_layer_of_a_pool_begins_with_a_cache_line() -> None:
    pool = SlotPool(4, 2, 2, 3, 5, layers=3, poison=False)
    assert [state.ctypes.data % LINE_BYTES for state in pool.states] == [0, 0, 0]
    assert not any(state.any() for state in pool.states)
