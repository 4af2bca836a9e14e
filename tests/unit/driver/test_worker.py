"""The worker driver's own side, with no vendor package: what travels, and what a worker that fails says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qwen_npu.driver.mslite_worker import ALIGNMENT_BYTES, Mapped
from qwen_npu.driver.worker import WorkerDriver
from qwen_npu.errors import DriverError

DTYPES = st.sampled_from([np.float32, np.float16, np.int32, np.int64, np.bool_])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(data=st.data())
def test_arrays_cross_unchanged_whatever_their_number_and_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("mapped") / "arrays.bin"
    writer, reader = Mapped(path), Mapped(path)
    for _ in range(3):
        sent = data.draw(st.lists(arrays.arrays(data.draw(DTYPES), data.draw(SHAPES)), max_size=4))
        places = writer.lay(sent)
        assert all(place["offset"] % ALIGNMENT_BYTES == 0 for place in places)
        for array, place in zip(sent, places, strict=True):
            seen = reader.look(place)
            assert seen.dtype == array.dtype
            assert seen.tobytes() == array.tobytes()
            assert seen.shape == array.shape


def test_python_without_the_package_is_an_error_with_the_reason() -> None:
    with pytest.raises(DriverError, match="No module named 'mindspore_lite'"):
        WorkerDriver(Path(sys.executable))
