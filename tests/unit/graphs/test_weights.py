"""Reading checkpoints: dtypes, shards, what is missing, left over or damaged; the position table."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_npu.errors import CheckpointError
from qwen_npu.graphs.weights import Checkpoint, interpolate_positions, patch_coordinates, prepare, write
from qwen_npu.spec import ModelSpec
from tests.unit.graphs.checkpoints import random_checkpoint, tensors

NORM = "model.language_model.norm.weight"


def prepared(directory: Path) -> dict[str, Any]:
    spec = ModelSpec.from_checkpoint(directory)
    return dict(prepare(spec, Checkpoint(directory), [(2, 2)]))


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    one = prepared(random_checkpoint(tmp_path / "one"))
    many = prepared(random_checkpoint(tmp_path / "many", shards=4))
    assert one.keys() == many.keys()
    assert all(np.array_equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read_exactly(tmp_path: Path, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    directory = random_checkpoint(tmp_path / "half", dtype=dtype)
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    checkpoint = Checkpoint(directory)
    for name, array in tensors(json.loads((directory / "config.json").read_text(encoding="utf-8"))).items():
        found = checkpoint.take(name)
        assert found.dtype == np.float32
        assert np.array_equal(found, array.astype(narrow).astype(np.float32))


def test_the_table_finds_every_array_in_the_file(tmp_path: Path) -> None:
    arrays = {"a": np.arange(7, dtype=np.float32), "b": np.arange(12, dtype=np.float32).reshape(3, 4).T}
    table = write(iter(arrays.items()), tmp_path / "w")
    content = (tmp_path / "w").read_bytes()
    for name, array in arrays.items():
        piece = table[name]
        assert piece.offset % 64 == 0
        found = np.frombuffer(content[piece.offset : piece.offset + piece.nbytes], np.float32).reshape(piece.shape)
        assert np.array_equal(found, array)


def rewrite(directory: Path, change: Any) -> Path:
    from safetensors.numpy import load_file, save_file

    path = directory / "model.safetensors"
    found = load_file(path)
    change(found)
    save_file(found, path)
    return directory


def test_unfit_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    directory = rewrite(random_checkpoint(tmp_path / "a"), lambda found: found.pop(NORM))
    with pytest.raises(CheckpointError, match=f"no tensor '{NORM}'"):
        prepared(directory)
    directory = rewrite(random_checkpoint(tmp_path / "b"), lambda found: found.update({NORM: np.ones(5, np.float32)}))
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[5\].*\[48\]"):
        prepared(directory)
    bias = "model.language_model.layers.1.self_attn.q_proj.bias"
    directory = rewrite(random_checkpoint(tmp_path / "c"), lambda found: found.update({bias: np.ones(5, np.float32)}))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        prepared(directory)
    directory = rewrite(random_checkpoint(tmp_path / "d"), lambda found: found.update({NORM: np.ones(48, np.int8)}))
    with pytest.raises(CheckpointError, match="dtype I8"):
        prepared(directory)


def test_multi_token_weights_and_a_spare_tied_head_are_ignored(tmp_path: Path) -> None:
    spare = {"lm_head.weight": np.ones((120, 48), np.float32)}
    directory = rewrite(random_checkpoint(tmp_path / "a", extra=True, tied=True), lambda found: found.update(spare))
    assert "head" not in prepared(directory)


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 20, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 5) + b"{"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = random_checkpoint(tmp_path / "a")
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(directory)


def test_missing_shards_and_files_are_named(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "a", shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks .*00002"):
        Checkpoint(directory)
    (directory / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        Checkpoint(directory)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        Checkpoint(directory)


def test_patches_come_block_by_block() -> None:
    row, column = patch_coordinates((4, 4), 2)
    assert list(zip(row[:8].tolist(), column[:8].tolist(), strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), side=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_positions_of_a_plane_stay_a_plane(rows: int, columns: int, side: int) -> None:
    """Bilinear with aligned corners reproduces any linear function of row and column."""
    grid = (2 * rows, 2 * columns)
    y, x = np.divmod(np.arange(side * side), side)
    span = max(side - 1, 1)
    table = np.stack([y / span, x / span], axis=1).astype(np.float32)
    row, column = patch_coordinates(grid, 2)
    reach = 1.0 if side > 1 else 0.0
    wanted = np.stack([row / (grid[0] - 1), column / (grid[1] - 1)], axis=1) * reach
    assert np.allclose(interpolate_positions(table, grid, 2), wanted, atol=1e-6)
