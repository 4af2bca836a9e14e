"""From the tensors of a Hugging Face checkpoint to the one weight file that all graphs of a bundle share.

Knows the names of the checkpoint's tensors, how they are fused and turned for the graphs, and the layout of the file.
Everything is f32 in the file; a graph refers to a piece of it by name.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_npu.errors import CheckpointError
from qwen_npu.spec import ModelSpec

Floats = NDArray[np.float32]
Grid = tuple[int, int]

WEIGHT_FILE = "weights.bin"
_ALIGNMENT_BYTES = 64
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Piece:
    """One array of the weight file: f32, C order."""

    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


WeightTable = Mapping[str, Piece]


class Checkpoint:
    """The tensors of a directory of safetensors files (one `model.safetensors`, or shards), read one at a time as f32.

    Reads F32, F16 and BF16 without any package for them. Remembers what was taken, so that leftovers can be refused.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._where: dict[str, tuple[Path, int, Mapping[str, Any]]] = {}
        self._taken: set[str] = set()
        for path in weight_files(self.directory):
            start, header = _read_header(path)
            for name, entry in header.items():
                self._where[name] = (path, start, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> Floats:
        """The tensor `name` as f32; with `shape` given, that shape is demanded."""
        if name not in self._where:
            raise CheckpointError(
                f"{self.directory} has no tensor {name!r}",
                expected="all weights of the model that config.json describes",
            )
        path, start, entry = self._where[name]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{name} in {path.name} has dtype {entry['dtype']}",
                expected="F32, F16 or BF16",
                fix="use an unquantised checkpoint",
            )
        dtype = _DTYPES[entry["dtype"]]
        stored = tuple(entry["shape"])
        if shape and stored != shape:
            raise CheckpointError(f"{name} has shape {list(stored)}", expected=f"{list(shape)}, from config.json")
        first, last = entry["data_offsets"]
        if last - first != math.prod(stored) * dtype.itemsize or start + last > path.stat().st_size:
            raise CheckpointError(f"{path} is damaged: {name} does not lie inside the file", fix="download it again")
        self._taken.add(name)
        raw = np.fromfile(path, dtype=dtype, count=math.prod(stored), offset=start + first).reshape(stored)
        if entry["dtype"] == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(raw, dtype=np.float32)

    def leftovers(self) -> list[str]:
        return sorted(set(self._where) - self._taken)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index if there is one, else `model.safetensors`, else all."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index} is not a safetensors index", expected="JSON with a weight_map") from None
        files = [directory / name for name in names]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks {missing}", expected="every shard that the index names")
        return files
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} has no safetensors file", expected="model.safetensors, or shards with their index"
        )
    return files


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        raw = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        header = json.loads(raw)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file", fix="download it again") from None
    header.pop("__metadata__", None)
    return 8 + length, header


def write(pieces: Iterator[tuple[str, Floats]], path: Path) -> dict[str, Piece]:
    """Writes the arrays one after another and gives the table to find them by."""
    table: dict[str, Piece] = {}
    with path.open("wb") as file:
        for name, array in pieces:
            file.write(b"\0" * (-file.tell() % _ALIGNMENT_BYTES))
            table[name] = Piece(file.tell(), array.shape)
            file.write(np.ascontiguousarray(array, dtype="<f4").data)
    return table


def prepare(spec: ModelSpec, checkpoint: Checkpoint, grids: Sequence[Grid]) -> Iterator[tuple[str, Floats]]:
    """All arrays of the graphs, in the form the graphs use them: projections that read the same input side by side in
    one matrix, transposed to [in, out]; norm weights with their 1 added; constants of the recurrence computed.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is one that the graphs have no place for.
    """
    language = "model.language_model."
    hidden = spec.hidden
    yield "embed", checkpoint.take(f"{language}embed_tokens.weight", spec.vocab, hidden)
    if not spec.tied:
        yield "head", checkpoint.take("lm_head.weight", spec.vocab, hidden)
    yield "norm", 1 + checkpoint.take(f"{language}norm.weight", hidden)
    for layer, kind in enumerate(spec.layer_types):
        source, name = f"{language}layers.{layer}.", f"layers.{layer}."
        yield f"{name}norm1", 1 + checkpoint.take(f"{source}input_layernorm.weight", hidden)
        yield f"{name}norm2", 1 + checkpoint.take(f"{source}post_attention_layernorm.weight", hidden)
        part = _linear_layer if kind == "linear_attention" else _full_layer
        for key, array in part(spec, checkpoint, source):
            yield name + key, array
        gate = checkpoint.take(f"{source}mlp.gate_proj.weight", spec.intermediate, hidden)
        up = checkpoint.take(f"{source}mlp.up_proj.weight", spec.intermediate, hidden)
        yield f"{name}gate_up", np.concatenate([gate, up]).T
        yield f"{name}down", checkpoint.take(f"{source}mlp.down_proj.weight", hidden, spec.intermediate).T
    # the taps that meet the past, of all linear layers: decode applies them at once
    sources = [f"{language}layers.{layer}.linear_attn." for layer in spec.linear_layers]
    yield "conv_past", np.stack([_conv(spec, checkpoint, source)[None, :, :-1] for source in sources])
    yield from _vision(spec, checkpoint, grids)
    ignored = ("mtp.", "lm_head." if spec.tied else "mtp.")
    unknown = [name for name in checkpoint.leftovers() if not name.startswith(ignored)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.directory} has tensors the graphs have no place for: {unknown[:5]}",
            expected="the weights of an unquantised Qwen3.5 without attention biases",
        )


def _linear_layer(spec: ModelSpec, checkpoint: Checkpoint, source: str) -> Iterator[tuple[str, Floats]]:
    source += "linear_attn."
    hidden, lanes, values = spec.hidden, spec.conv_lanes, spec.nv * spec.dv
    qkv = checkpoint.take(f"{source}in_proj_qkv.weight", lanes, hidden)
    z = checkpoint.take(f"{source}in_proj_z.weight", values, hidden)
    b = checkpoint.take(f"{source}in_proj_b.weight", spec.nv, hidden)
    a = checkpoint.take(f"{source}in_proj_a.weight", spec.nv, hidden)
    yield "in_proj", np.concatenate([qkv, z, b, a]).T
    # the bias of `a` rides on the projection: one node less a layer
    dt_bias = checkpoint.take(f"{source}dt_bias", spec.nv)
    yield "in_bias", np.concatenate([np.zeros(lanes + values + spec.nv, np.float32), dt_bias])
    yield "decay", -np.exp(checkpoint.take(f"{source}A_log", spec.nv))
    conv = _conv(spec, checkpoint, source)
    yield "conv", conv.T  # [kernel, lanes]
    yield from ((f"conv.{tap}", conv[:, tap]) for tap in range(spec.conv_kernel))
    yield "out_norm", checkpoint.take(f"{source}norm.weight", spec.dv)
    yield "out_proj", checkpoint.take(f"{source}out_proj.weight", hidden, values).T


def _conv(spec: ModelSpec, checkpoint: Checkpoint, source: str) -> Floats:
    return checkpoint.take(f"{source}conv1d.weight", spec.conv_lanes, 1, spec.conv_kernel)[:, 0]


def _full_layer(spec: ModelSpec, checkpoint: Checkpoint, source: str) -> Iterator[tuple[str, Floats]]:
    source += "self_attn."
    hidden, dim = spec.hidden, spec.head_dim
    q_gate = checkpoint.take(f"{source}q_proj.weight", 2 * spec.heads * dim, hidden).reshape(spec.heads, 2, dim, hidden)
    k = checkpoint.take(f"{source}k_proj.weight", spec.kv_heads * dim, hidden)
    v = checkpoint.take(f"{source}v_proj.weight", spec.kv_heads * dim, hidden)
    q, gate = q_gate[:, 0].reshape(-1, hidden), q_gate[:, 1].reshape(-1, hidden)
    yield "in_proj", np.concatenate([q, k, v, gate]).T
    q_norm = (1 + checkpoint.take(f"{source}q_norm.weight", dim)) * np.float32(dim**-0.5)  # the scale of the scores
    k_norm = 1 + checkpoint.take(f"{source}k_norm.weight", dim)
    yield "qk_norm", np.stack([q_norm] * spec.heads + [k_norm] * spec.kv_heads)
    yield "out_proj", checkpoint.take(f"{source}o_proj.weight", hidden, spec.heads * dim).T


def _vision(spec: ModelSpec, checkpoint: Checkpoint, grids: Sequence[Grid]) -> Iterator[tuple[str, Floats]]:
    vision, source = spec.vision, "model.visual."
    width, inner = vision.hidden, vision.intermediate

    def linear(name: str, key: str, rows: int, columns: int) -> Iterator[tuple[str, Floats]]:
        yield f"vision.{key}", checkpoint.take(f"{source}{name}.weight", rows, columns).T
        yield f"vision.{key}_bias", checkpoint.take(f"{source}{name}.bias", rows)

    def norm(name: str, key: str) -> Iterator[tuple[str, Floats]]:
        yield f"vision.{key}", checkpoint.take(f"{source}{name}.weight", width)
        yield f"vision.{key}_bias", checkpoint.take(f"{source}{name}.bias", width)

    patch = (width, vision.channels, vision.temporal_patch, vision.patch, vision.patch)
    yield "vision.patch", checkpoint.take(f"{source}patch_embed.proj.weight", *patch).reshape(width, -1).T
    bias = checkpoint.take(f"{source}patch_embed.proj.bias", width)
    table = checkpoint.take(f"{source}pos_embed.weight", vision.positions, width)
    for grid in grids:
        yield positions_name(grid), bias + interpolate_positions(table, grid, vision.merge)
    for block in range(vision.depth):
        yield from norm(f"blocks.{block}.norm1", f"{block}.norm1")
        yield from linear(f"blocks.{block}.attn.qkv", f"{block}.qkv", 3 * width, width)
        yield from linear(f"blocks.{block}.attn.proj", f"{block}.proj", width, width)
        yield from norm(f"blocks.{block}.norm2", f"{block}.norm2")
        yield from linear(f"blocks.{block}.mlp.linear_fc1", f"{block}.fc1", inner, width)
        yield from linear(f"blocks.{block}.mlp.linear_fc2", f"{block}.fc2", width, inner)
    merged = width * vision.merge**2
    yield from norm("merger.norm", "merger.norm")
    yield from linear("merger.linear_fc1", "merger.fc1", merged, merged)
    yield from linear("merger.linear_fc2", "merger.fc2", spec.hidden, merged)


def positions_name(grid: Grid) -> str:
    """Name of the array that holds position embeddings plus patch bias for a grid."""
    return f"vision.positions.{grid[0]}x{grid[1]}"


def patch_coordinates(grid: Grid, merge: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch, in the order of `pixel_values`: merge blocks one after another."""
    rows, columns = grid
    index = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    flat = index.transpose(0, 2, 1, 3).reshape(-1)
    return flat // columns, flat % columns


def interpolate_positions(table: Floats, grid: Grid, merge: int) -> Floats:
    """The learned square table resampled bilinearly to a grid, corners aligned: [patches, width], in patch order."""
    side = math.isqrt(len(table))

    def axis(index: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.minimum(place.astype(np.int64), side - 1)
        return low, np.minimum(low + 1, side - 1), place - low.astype(np.float32)

    row, column = patch_coordinates(grid, merge)
    top, bottom, down = axis(row, grid[0])
    left, right, across = axis(column, grid[1])
    down, across = down[:, None], across[:, None]
    return np.asarray(
        table[top * side + left] * ((1 - down) * (1 - across))
        + table[top * side + right] * ((1 - down) * across)
        + table[bottom * side + left] * (down * (1 - across))
        + table[bottom * side + right] * (down * across),
        dtype=np.float32,
    )
