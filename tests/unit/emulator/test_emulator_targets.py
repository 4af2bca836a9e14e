"""What the two targets do with the same graph, and the calls around predict."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qwen_npu.emulator as mslite
from qwen_npu.emulator import instrument
from qwen_npu.emulator.engine import native_library
from qwen_npu.emulator.onnx_file import read_facts
from qwen_npu.errors import DeviceError, WorkbenchError
from qwen_npu.ledger.events import Event
from tests.unit.emulator import graphs
from tests.unit.emulator.graphs import floats

Build = Callable[..., mslite.Model]
DataType = mslite.DataType


def room(shape: tuple[int, ...], dtype: mslite.DataType = DataType.FLOAT32) -> mslite.Tensor:
    return mslite.Tensor(shape=shape, dtype=dtype, device="ascend:0")


def described(tensors: list[mslite.Tensor] | tuple[mslite.TensorMeta, ...]) -> list[tuple[str, str, list[int]]]:
    return [(tensor.name, tensor.dtype.name, tensor.shape) for tensor in tensors]


def test_descriptors_on_ascend(build: Build) -> None:
    model = build(graphs.growing)
    assert described(model.get_inputs()) == [
        ("mask", "INT32", [1, -1]),
        ("row", "FLOAT16", [1, 3]),
        ("past", "FLOAT16", [-1, 3]),
    ]
    assert described(model.get_outputs()) == [("count", "INT32", []), ("present", "FLOAT16", [-1, 3])]


def test_descriptors_on_cpu(build: Build) -> None:
    model = build(graphs.growing, "cpu")
    assert described(model.get_inputs()) == [
        ("mask", "INT32", [1, -1]),
        ("row", "FLOAT32", [1, 3]),
        ("past", "FLOAT32", [-1, 3]),
    ]
    assert described(model.get_outputs()) == [("count", "INT32", []), ("present", "FLOAT32", [-1])]


def test_growing_on_ascend_resizes_by_itself(build: Build, events: list[Event]) -> None:
    model = build(graphs.growing)
    past = mslite.Tensor(np.zeros((1, 3), np.float16), device="ascend:0")
    count = room((), DataType.INT32)
    for length in range(1, 6):
        present = room((length + 1, 3), DataType.FLOAT16)
        mask = mslite.Tensor(np.ones((1, length + 1), np.int32))
        row = mslite.Tensor(np.full((1, 3), length, np.float16))
        model.predict([mask, row, past], [count, present])
        assert model.get_inputs()[0].shape == [1, length + 1]
        assert model.get_outputs()[1].shape == [length + 1, 3], "follows from the mask, which has the same size"
        past = present
    assert past.get_data_to_numpy()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert count.get_data_to_numpy() == 6
    assert sum(event.kind == "resize" for event in events) == 5


def test_growing_on_cpu_needs_a_resize(build: Build) -> None:
    model = build(graphs.growing, "cpu")
    past = np.zeros((1, 3), np.float32)
    for length in range(1, 4):
        model.resize(model.get_inputs(), [[1, length + 1], [1, 3], [length, 3]])
        results = model.predict([np.ones((1, length + 1), np.int32), np.full((1, 3), length, np.float32), past])
        past = results[1].get_data_to_numpy().copy()
    assert past[:, 0].tolist() == [0, 1, 2, 3]
    assert past.dtype == np.float32, "f16 is shown as f32"


def test_results_are_new_wrappers_around_the_given_tensors(build: Build) -> None:
    model = build(graphs.counter)
    outputs = [room((1, 4)), room((1, 4))]
    results = model.predict([floats(1, 4), floats(1, 4, start=10)], outputs)
    assert [result is output for result, output in zip(results, outputs, strict=True)] == [False, False]
    assert [instrument.address(result) for result in results] == [instrument.address(output) for output in outputs]
    assert outputs[0].get_data_to_numpy().tolist() == [[10, 12, 14, 16]]


def test_host_tensors_as_outputs_are_written(build: Build, events: list[Event]) -> None:
    model = build(graphs.counter)
    y, state = mslite.Tensor(np.zeros((1, 4), np.float32)), room((1, 4))
    events.clear()
    model.predict([mslite.Tensor(floats(1, 4)), mslite.Tensor(floats(1, 4))], [y, state])
    assert y.get_data_to_numpy().tolist() == [[0, 2, 4, 6]]
    downloads = [(event.nbytes, dict(event.detail or {})["name"]) for event in events if event.kind == "download"]
    assert downloads == [(16, "y")]


def test_host_array_written_between_predicts_is_seen(build: Build) -> None:
    model = build(graphs.counter)
    array = floats(1, 4)
    x, y, a, b = mslite.Tensor(array), room((1, 4)), room((1, 4)), room((1, 4))
    model.predict([x, floats(1, 4)], [y, a])
    array[:] = 100
    model.predict([x, a], [y, b])
    assert y.get_data_to_numpy().tolist() == [[101, 102, 103, 104]]


def test_narrowed_values_keep_their_sign(build: Build) -> None:
    model = build(graphs.bucketed)
    results = model.predict([mslite.Tensor(np.array([[1, -2, 3, -4]], np.int32))])
    assert results[0].dtype is DataType.INT32
    assert results[0].get_data_to_numpy().tolist() == [[2, -4, 6, -8]]


@pytest.mark.parametrize(
    ("feed", "says"),
    [
        ([floats(1, 4)], None),
        ([floats(1, 4), floats(1, 4).astype(np.float16)], None),
        ([floats(1, 5), floats(1, 4)], None),
    ],
)
def test_wrong_arrays(feed: list[np.ndarray], says: str | None, build: Build) -> None:
    with pytest.raises(RuntimeError, match=r"model input len:2 not equal input len:1!|data (type|size) not equal!"):
        build(graphs.counter).predict(feed)


@pytest.mark.parametrize(
    ("inputs", "outputs", "cause"),
    [
        (((1, 4), np.float16), None, "is given DataType.FLOAT16"),
        (((1, 5), np.float32), None, r"is given shape \[1, 5\]"),
        (((4,), np.float32), None, r"is given shape \[4\]"),
        (((1, 4), np.float32), [(1, 4)], "is given 1 outputs"),
        (((1, 4), np.float32), [(1, 4), (1, 4), (1, 4)], "is given 3 outputs"),
        (((1, 4), np.float32), [(1, 4), (1, 3)], "is given 12 bytes"),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "vendor"])
def test_refusals_on_ascend_have_a_cause(
    inputs: tuple[tuple[int, ...], type],
    outputs: list[tuple[int, ...]] | None,
    cause: str,
    policy: str,
    build: Build,
) -> None:
    model = build(graphs.counter)
    x = mslite.Tensor(np.zeros(*inputs))
    given = None if outputs is None else [room(shape) for shape in outputs]
    with mslite.configure(policy=policy), pytest.raises(RuntimeError, match=r"^predict failed!$") as caught:
        model.predict([x, mslite.Tensor(floats(1, 4))], given)
    assert isinstance(caught.value.__cause__, WorkbenchError)
    assert caught.match("predict failed")
    with pytest.raises(WorkbenchError, match=cause):
        raise caught.value.__cause__
    assert model.predict([floats(1, 4), floats(1, 4)])[0].get_data_to_numpy().tolist() == [[0, 2, 4, 6]]


def test_ids_out_of_range_are_refused(build: Build) -> None:
    for device in ("ascend:0", "cpu"):
        with pytest.raises(RuntimeError, match="predict failed!") as caught:
            build(graphs.lookup, device).predict([np.array([[0, 7]], np.int32)])
        assert "out of" in str(caught.value.__cause__)


def test_wrong_size_damages_a_cpu_model_until_a_resize(build: Build) -> None:
    model = build(graphs.counter, "cpu")
    with pytest.raises(RuntimeError, match="predict failed!"):
        model.predict([mslite.Tensor(floats(1, 3)), mslite.Tensor(floats(1, 4))])
    with pytest.raises(RuntimeError, match="predict failed!") as caught:
        model.predict([floats(1, 4), floats(1, 4)])
    assert "stays damaged" in str(caught.value.__cause__)
    model.resize(model.get_inputs(), [[1, 4], [1, 4]])
    assert model.predict([floats(1, 4), floats(1, 4)])[0].get_data_to_numpy().tolist() == [[0, 2, 4, 6]]


def test_buckets(build: Build) -> None:
    model = build(graphs.bucketed)
    model.resize(model.get_inputs(), [[1, 8]])
    assert model.get_inputs()[0].shape == [1, 8]
    with pytest.raises(RuntimeError, match=r"resize failed! Error is Invalid input param by user\.") as caught:
        model.resize(model.get_inputs(), [[1, 5]])
    assert "[4, 8]" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="predict failed!") as caught:
        model.predict([mslite.Tensor(np.zeros((1, 6), np.int32))])
    assert "[4, 8]" in str(caught.value.__cause__)


def test_static_graph_keeps_its_shape_on_ascend_and_not_on_cpu(build: Build) -> None:
    model = build(graphs.counter)
    with pytest.raises(RuntimeError, match=r"resize failed! Error is Invalid input param by user\."):
        model.resize(model.get_inputs(), [[2, 4], [2, 4]])
    model = build(graphs.counter, "cpu")
    model.resize(model.get_inputs(), [[2, 4], [2, 4]])
    assert model.predict([floats(2, 4), floats(2, 4)])[0].shape == [2, 4]


def test_mindir_path_beside_our_file(tmp_path: Path) -> None:
    graphs.counter(tmp_path)
    model = mslite.Model()
    model.build_from_file(str(tmp_path / "counter.mindir"), mslite.ModelType.MINDIR)
    assert str(model) == f"model_path: {tmp_path / 'counter.mindir'}."
    assert len(model.get_inputs()) == 2


def test_damaged_file_is_refused_with_its_cause(tmp_path: Path) -> None:
    path = graphs.wide(tmp_path)
    whole = path.read_bytes()
    for damage in (b"", b"no model at all", whole[: len(whole) // 2]):
        path.write_bytes(damage)
        with pytest.raises(RuntimeError, match=r"build_from_file failed! Error is Common error code\.") as caught:
            mslite.Model().build_from_file(str(path), mslite.ModelType.MINDIR)
        assert path.name in str(caught.value.__cause__)


def test_no_such_card(build: Build) -> None:
    with pytest.raises(DeviceError, match="device_id is 8"):
        build(graphs.counter, "ascend:8")


def test_facts_of_a_file(tmp_path: Path) -> None:
    facts = read_facts(graphs.pool(tmp_path))
    assert facts.weight_bytes == 8
    assert facts.op_types == {"Unsqueeze", "Gather", "Add", "ScatterND", "ReduceMax"}
    assert read_facts(graphs.wide(tmp_path)).weight_bytes == 2 * 2**20


def test_import_loads_nothing_heavy_and_the_environment_sets_the_policy() -> None:
    code = (
        "import sys, qwen_npu.emulator as m; from qwen_npu.emulator import policy; "
        "heavy = [name for name in ('onnxruntime', 'onnx') if name in sys.modules]; "
        "print(policy.settings.policy, policy.settings.native, heavy)"
    )
    environment = {**os.environ, "QWEN_NPU_EMULATOR_POLICY": "record", "QWEN_NPU_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "record False []"
    environment["QWEN_NPU_EMULATOR_POLICY"] = "silent"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "QWEN_NPU_EMULATOR_POLICY is 'silent'" in done.stderr


def test_native_library_is_a_file_or_absent() -> None:
    path = native_library()
    assert path is None or Path(path).is_file()


def test_ten_thousand_steps_leave_memory_flat(build: Build) -> None:
    """Several generations over fresh state buffers: neither device memory, prepared predicts nor objects pile up."""
    device = "ascend:4"
    before = instrument.memory(device).live_bytes
    model = build(graphs.counter, device)
    live_bytes: list[int] = []
    objects: list[int] = []
    for _generation in range(5):
        y, *halves = (mslite.Tensor(floats(1, 4), device=device) for _ in range(3))
        for step in range(2000):
            x = mslite.Tensor(np.full((1, 4), step, np.float32))
            model.predict([x, halves[step % 2]], [y, halves[1 - step % 2]])
            y.get_data_to_numpy()
        assert halves[0].get_data_to_numpy().tolist() == [[2000, 2001, 2002, 2003]]
        gc.collect()
        live_bytes.append(instrument.memory(device).live_bytes)
        objects.append(len(gc.get_objects()))
    assert len(set(live_bytes)) == 1
    assert objects[-1] - objects[2] < 50
    del model, halves, x, y
    assert instrument.memory(device).live_bytes == before
