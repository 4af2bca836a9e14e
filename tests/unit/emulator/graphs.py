"""Small ONNX files for the emulator's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[tuple[str, int, list[int | str]]],
    outputs: list[tuple[str, int, list[int | str]]],
    weights: dict[str, np.ndarray] | None = None,
    **metadata: object,
) -> Path:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, {f"qwen_npu.{key}": json.dumps(value) for key, value in metadata.items()})
    onnx.save(model, str(path))
    return path


def counter(directory: Path) -> Path:
    """y = x + state, new_state = state + 1; f32 [1, 4]."""
    return save(
        directory / "counter.onnx",
        [helper.make_node("Add", ["x", "state"], ["y"]), helper.make_node("Add", ["state", "one"], ["new_state"])],
        [("x", T.FLOAT, [1, 4]), ("state", T.FLOAT, [1, 4])],
        [("y", T.FLOAT, [1, 4]), ("new_state", T.FLOAT, [1, 4])],
        {"one": np.ones(1, np.float32)},
    )


def growing(directory: Path) -> Path:
    """present = past with one more row: [L, 3] -> [L+1, 3], and the sum of the mask [1, L+1] (int64)."""
    return save(
        directory / "growing.onnx",
        [
            helper.make_node("Concat", ["past", "row"], ["present"], axis=0),
            helper.make_node("ReduceSum", ["mask"], ["count"], keepdims=0),
        ],
        [("mask", T.INT64, [1, "L+1"]), ("row", T.FLOAT16, [1, 3]), ("past", T.FLOAT16, ["L", 3])],
        [("count", T.INT64, []), ("present", T.FLOAT16, ["L+1", 3])],
    )


def pool(directory: Path) -> Path:
    """present_pool = pool with row `slot` replaced; declared in place. seen = the row before."""
    return save(
        directory / "pool.onnx",
        [
            helper.make_node("Unsqueeze", ["slot", "axis"], ["index"]),
            helper.make_node("Gather", ["pool", "slot"], ["old"]),
            helper.make_node("Add", ["old", "row"], ["new"]),
            helper.make_node("ScatterND", ["pool", "index", "new"], ["present_pool"]),
            helper.make_node("ReduceMax", ["new"], ["seen"], keepdims=0),
        ],
        [("slot", T.INT64, [1]), ("row", T.FLOAT, [1, 4]), ("pool", T.FLOAT, [3, 4])],
        [("seen", T.FLOAT, []), ("present_pool", T.FLOAT, [3, 4])],
        {"axis": np.array([1], np.int64)},
        in_place={"present_pool": "pool"},
    )


def bucketed(directory: Path) -> Path:
    """y = ids * 2, for declared lengths only."""
    return save(
        directory / "bucketed.onnx",
        [helper.make_node("Add", ["ids", "ids"], ["y"])],
        [("ids", T.INT64, [1, "S"])],
        [("y", T.INT64, [1, "S"])],
        buckets={"S": [4, 8]},
    )


def lookup(directory: Path) -> Path:
    """Rows of a table of 5 by id: [1, 2] -> [1, 2, 3]."""
    return save(
        directory / "lookup.onnx",
        [helper.make_node("Gather", ["table", "ids"], ["rows"])],
        [("ids", T.INT64, [1, 2])],
        [("rows", T.FLOAT, [1, 2, 3])],
        {"table": np.arange(15, dtype=np.float32).reshape(5, 3)},
    )


def wide(directory: Path) -> Path:
    """sum of a weight of 2 MiB and x."""
    return save(
        directory / "wide.onnx",
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [("x", T.FLOAT, [1, 512 * 1024])],
        [("y", T.FLOAT, [1, 512 * 1024])],
        {"w": np.ones(512 * 1024, np.float32)},
    )


def floats(*shape: int, start: float = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
