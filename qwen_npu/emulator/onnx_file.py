"""Reads from an ONNX file, without the onnx package, the two things onnxruntime does not tell: how many bytes its
weights have, and which operators it holds.

ONNX files are protocol buffers; only the fields needed are looked at, the rest is skipped by length.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

# Field numbers of onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_OP_TYPE = 4
_TENSOR_DIMS, _TENSOR_DATA_TYPE = 1, 2
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2}
"""Bytes of one element, by TensorProto.DataType."""


class OnnxFacts(NamedTuple):
    """`weight_bytes` counts every initializer once, wherever its data lies."""

    weight_bytes: int
    op_types: frozenset[str]


class _Malformed(ValueError):
    pass


def read_facts(path: Path) -> OnnxFacts:
    """Raises ValueError where the file is no ONNX model."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise _Malformed(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            weight_bytes, op_types = 0, set[str]()
            for number, start, end in _fields(data, 0, len(data)):
                if number == _MODEL_GRAPH:
                    for part, part_start, part_end in _fields(data, start, end):
                        if part == _GRAPH_INITIALIZER:
                            weight_bytes += _tensor_bytes(data, part_start, part_end)
                        elif part == _GRAPH_NODE:
                            op_types.add(_op_type(data, part_start, part_end))
            return OnnxFacts(weight_bytes, frozenset(op_types))


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Malformed("a number runs over its end")


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of each field; a varint's value stands in `start`."""
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at, end)
            yield number, value, -1
        elif wire == 2:
            length, at = _varint(data, at, end)
            if at + length > end:
                raise _Malformed("a field runs over its end")
            yield number, at, at + length
            at += length
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise _Malformed(f"wire type {wire}")


def _tensor_bytes(data: mmap.mmap, start: int, end: int) -> int:
    dims: list[int] = []
    element = 0
    for number, at, until in _fields(data, start, end):
        if number == _TENSOR_DIMS:
            if until < 0:
                dims.append(at)
            else:
                while at < until:
                    size, at = _varint(data, at, until)
                    dims.append(size)
        elif number == _TENSOR_DATA_TYPE and until < 0:
            element = _ELEMENT_BYTES.get(at, 0)
    return prod(dims) * element


def _op_type(data: mmap.mmap, start: int, end: int) -> str:
    for number, at, until in _fields(data, start, end):
        if number == _NODE_OP_TYPE and until >= 0:
            return bytes(data[at:until]).decode("utf-8", "replace")
    return ""
