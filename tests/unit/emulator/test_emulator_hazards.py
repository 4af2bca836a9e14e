"""Everything that the vendor gets wrong in silence, under each policy: one row for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import qwen_npu.emulator as mslite
from qwen_npu.emulator import instrument
from qwen_npu.errors import DeviceMemoryError, HazardError
from qwen_npu.ledger.events import Event
from tests.unit.emulator import graphs
from tests.unit.emulator.graphs import floats

FLOAT32 = mslite.DataType.FLOAT32
Build = Callable[..., mslite.Model]


def on_device(shape: tuple[int, ...] = (1, 4), start: float = 0, device: str = "ascend:0") -> mslite.Tensor:
    return mslite.Tensor(floats(*shape, start=start), device=device)


def room(shape: tuple[int, ...] = (1, 4), device: str = "ascend:0") -> mslite.Tensor:
    return mslite.Tensor(shape=shape, dtype=FLOAT32, device=device)


def host(shape: tuple[int, ...] = (1, 4)) -> mslite.Tensor:
    return mslite.Tensor(floats(*shape))


def shaped(shape: tuple[int, ...] = (2, 3)) -> mslite.Tensor:
    return mslite.Tensor(shape=shape, dtype=FLOAT32)


def fortran_array_in_constructor(_: Build) -> None:
    mslite.Tensor(np.asfortranarray(floats(2, 3)))


def fortran_array_set(_: Build) -> None:
    shaped().set_data_from_numpy(np.asfortranarray(floats(2, 3)))


def big_endian_array_in_constructor(_: Build) -> None:
    mslite.Tensor(floats(2).astype(">f4"))


def big_endian_array_set(_: Build) -> None:
    shaped((2,)).set_data_from_numpy(floats(2).astype(">f4"))


def other_shape_of_the_same_size_set(_: Build) -> None:
    shaped((2, 3)).set_data_from_numpy(floats(3, 2))


def transposed_array_set(_: Build) -> None:
    shaped((2, 3, 4)).set_data_from_numpy(floats(2, 3, 4).transpose(0, 2, 1))


def other_shape_of_the_same_size_on_cpu(build: Build) -> None:
    build(graphs.counter, "cpu").predict([host((4, 1)), host()])


def shape_set_after_data(_: Build) -> None:
    host((2, 3)).shape = [3, 2]


def dtype_set_after_data(_: Build) -> None:
    host().dtype = mslite.DataType.INT32


def format_set_after_data(_: Build) -> None:
    host().format = mslite.Format.NHWC


def other_size_set_on_device(_: Build) -> None:
    on_device().shape = [1, 5]


def unknown_option(_: Build) -> None:
    mslite.Context().ascend.device = 1  # type: ignore[attr-defined]


def affinity_mode_out_of_range(_: Build) -> None:
    mslite.Context().cpu.thread_affinity_mode = 3


def shape_without_dtype(_: Build) -> None:
    mslite.Tensor(shape=[2, 3])


def dtype_without_shape(_: Build) -> None:
    mslite.Tensor(dtype=FLOAT32, device="ascend:0")


def negative_size_in_constructor(_: Build) -> None:
    mslite.Tensor(shape=[-1, 3], dtype=FLOAT32)


def output_fed_back_on_cpu(build: Build) -> None:
    model = build(graphs.counter, "cpu")
    result = model.predict([host(), host()])
    model.predict([host(), result[1]])


def view_of_output_fed_back_on_cpu(build: Build) -> None:
    model = build(graphs.counter, "cpu")
    view = model.predict([host(), host()])[1].get_data_to_numpy()[:, :]
    model.predict([host(), mslite.Tensor(view)])


def outputs_given_on_cpu(build: Build) -> None:
    build(graphs.counter, "cpu").predict([host(), host()], [host(), host()])


def too_few_outputs_on_cpu(build: Build) -> None:
    build(graphs.counter, "cpu").predict([host(), host()], [host()])


def device_tensor_on_cpu(build: Build) -> None:
    build(graphs.counter, "cpu").predict([host(), on_device()])


def dynamic_without_resize_on_cpu(build: Build) -> None:
    build(graphs.bucketed, "cpu").predict([mslite.Tensor(np.zeros((1, 4), np.int32))])


def input_on_another_device(build: Build) -> None:
    build(graphs.counter).predict([host(), on_device(device="ascend:3")], [room(), room()])


def output_on_another_device(build: Build) -> None:
    build(graphs.counter).predict([host(), on_device()], [room(), room(device="ascend:3")])


def one_buffer_read_and_written(build: Build) -> None:
    state = on_device()
    state.name = "past_state"
    build(graphs.counter).predict([host(), state], [room(), state])


def two_outputs_in_one_buffer(build: Build) -> None:
    both = room()
    build(graphs.counter).predict([host(), on_device()], [both, both])


def output_of_another_shape(build: Build) -> None:
    build(graphs.counter).predict([host(), on_device()], [room(), room((4, 1))])


def output_of_another_dtype(build: Build) -> None:
    other = mslite.Tensor(shape=[1, 4], dtype=mslite.DataType.INT32, device="ascend:0")
    build(graphs.counter).predict([host(), on_device()], [room(), other])


def device_input_never_written(build: Build) -> None:
    build(graphs.counter).predict([host(), room()], [room(), room()])


def host_input_never_given_data(build: Build) -> None:
    build(graphs.counter).predict([shaped((1, 4)), host()])


def device_tensor_read_before_written(_: Build) -> None:
    room().get_data_to_numpy()


def stale_tensor_read(build: Build) -> None:
    model = build(graphs.counter)
    result = model.predict([host(), host()])
    model.predict([host(), host()])
    result[1].get_data_to_numpy()


def stale_view_fed_back(build: Build) -> None:
    model = build(graphs.counter)
    view = model.predict([host(), host()])[1].get_data_to_numpy()
    model.predict([host(), host()])
    model.predict([host(), mslite.Tensor(view.reshape(1, 4)[:])])


def freed_tensor_as_input(build: Build) -> None:
    state = on_device()
    instrument.free(state)
    build(graphs.counter).predict([host(), state], [room(), room()])


def freed_tensor_in_a_prepared_predict(build: Build) -> None:
    model, state, outputs = build(graphs.counter), on_device(), [room(), room()]
    model.predict([host(), state], outputs)
    instrument.free(state)
    model.predict([host(), state], outputs)


def freed_tensor_read(_: Build) -> None:
    state = on_device()
    instrument.free(state)
    state.get_data_to_numpy()


def freed_tensor_wrapped(_: Build) -> None:
    state = on_device()
    instrument.free(state)
    mslite.Tensor(state, device="ascend:0")


class Silence(NamedTuple):
    use: Callable[[Build], None]
    kind: str
    says: str
    """Part of the error's text."""


SILENCES = [
    Silence(fortran_array_in_constructor, "ignored_data", "Fortran-ordered"),
    Silence(fortran_array_set, "ignored_data", "Fortran-ordered"),
    Silence(big_endian_array_in_constructor, "ignored_data", "big-endian"),
    Silence(big_endian_array_set, "ignored_data", "big-endian"),
    Silence(other_shape_of_the_same_size_set, "wrong_shape", "[3, 2]"),
    Silence(transposed_array_set, "wrong_shape", "[2, 4, 3]"),
    Silence(other_shape_of_the_same_size_on_cpu, "wrong_shape", "[4, 1]"),
    Silence(shape_set_after_data, "ignored_setter", "shape"),
    Silence(dtype_set_after_data, "ignored_setter", "dtype"),
    Silence(format_set_after_data, "ignored_setter", "format"),
    Silence(other_size_set_on_device, "ignored_setter", "shape"),
    Silence(unknown_option, "ignored_setter", "_Ascend.device"),
    Silence(affinity_mode_out_of_range, "ignored_setter", "thread_affinity_mode"),
    Silence(shape_without_dtype, "ignored_argument", "shape and dtype"),
    Silence(dtype_without_shape, "ignored_argument", "shape and dtype"),
    Silence(negative_size_in_constructor, "ignored_argument", "[-1, 3]"),
    Silence(output_fed_back_on_cpu, "fed_back", "new_state"),
    Silence(view_of_output_fed_back_on_cpu, "fed_back", "new_state"),
    Silence(outputs_given_on_cpu, "output_ignored", "counter.onnx"),
    Silence(too_few_outputs_on_cpu, "wrong_size", "2 outputs and is given 1"),
    Silence(device_tensor_on_cpu, "wrong_device", "ascend:0"),
    Silence(dynamic_without_resize_on_cpu, "not_resized", "resize"),
    Silence(input_on_another_device, "wrong_device", "ascend:3"),
    Silence(output_on_another_device, "wrong_device", "ascend:3"),
    Silence(one_buffer_read_and_written, "write_after_read", "read as state and written as new_state"),
    Silence(two_outputs_in_one_buffer, "two_writers", "outputs y and new_state"),
    Silence(output_of_another_shape, "wrong_shape", "[4, 1]"),
    Silence(output_of_another_dtype, "wrong_dtype", "INT32"),
    Silence(device_input_never_written, "uninitialised", "never written"),
    Silence(host_input_never_given_data, "uninitialised", "never given data"),
    Silence(device_tensor_read_before_written, "uninitialised", "nothing was ever written"),
    Silence(stale_tensor_read, "stale_view", "new_state was overwritten"),
    Silence(stale_view_fed_back, "stale_view", "fed to input state"),
    Silence(freed_tensor_as_input, "use_after_free", "freed since"),
    Silence(freed_tensor_in_a_prepared_predict, "use_after_free", "freed since"),
    Silence(freed_tensor_read, "use_after_free", "read to the host"),
    Silence(freed_tensor_wrapped, "use_after_free", "wrapped"),
]


def hazards(events: list[Event]) -> list[str]:
    return [dict(event.detail or {})["hazard"] for event in events if event.kind == "hazard"]


rows = pytest.mark.parametrize("silence", SILENCES, ids=lambda silence: silence.use.__name__)


@rows
def test_raise(silence: Silence, build: Build, events: list[Event]) -> None:
    with pytest.raises(HazardError) as caught:
        silence.use(build)
    text = str(caught.value)
    assert silence.kind in text
    assert silence.says in text
    assert silence.kind in hazards(events)


@rows
@pytest.mark.parametrize("policy", ["record", "corrupt"])
def test_go_on_with_an_event(silence: Silence, policy: str, build: Build, events: list[Event]) -> None:
    with mslite.configure(policy=policy):
        as_vendor(silence, build)
    assert silence.kind in hazards(events)
    assert {event.source for event in events} == {"emulator"}


@rows
def test_vendor_is_silent(silence: Silence, build: Build, events: list[Event]) -> None:
    with mslite.configure(policy="vendor"):
        as_vendor(silence, build)
    assert hazards(events) == []


def as_vendor(silence: Silence, build: Build) -> None:
    """The vendor's own answer: silence, or for two of these a failure without a reason."""
    if silence.use in (too_few_outputs_on_cpu, dynamic_without_resize_on_cpu):
        with pytest.raises(RuntimeError, match=r"^predict failed!$"):
            silence.use(build)
    else:
        silence.use(build)


def test_hazard_names_buffer_step_and_both_uses(build: Build) -> None:
    model = build(graphs.counter)
    state, other, y = on_device(), room(), room()
    state.name = "recurrent.a"
    model.predict([host(), state], [y, other])
    with pytest.raises(HazardError) as caught:
        model.predict([host(), state], [y, state])
    text = str(caught.value)
    assert "recurrent.a" in text
    assert f"{instrument.address(state):#x}" in text
    assert "read as state and written as new_state" in text
    assert "predict 1 of counter.onnx" in text


def test_declared_pair_may_share_a_buffer(build: Build, events: list[Event]) -> None:
    model = build(graphs.pool)
    pool, seen = on_device((3, 4)), room(())
    for _ in range(3):
        model.predict(
            [mslite.Tensor(np.array([1], np.int32)), mslite.Tensor(np.ones((1, 4), np.float32)), pool], [seen, pool]
        )
    assert pool.get_data_to_numpy().tolist() == [[0, 1, 2, 3], [7, 8, 9, 10], [8, 9, 10, 11]]
    assert seen.get_data_to_numpy() == 10
    assert hazards(events) == []


def test_declared_pair_is_for_its_own_input_only(build: Build) -> None:
    """The pool's output may lie in the pool, not in another input of the same size."""
    model = build(two_pools)
    a, b = on_device((3, 4)), on_device((3, 4))
    model.predict([a, b], [a])
    with pytest.raises(HazardError, match="read as other and written as present_pool"):
        model.predict([a, b], [b])


def two_pools(directory: graphs.Path) -> graphs.Path:
    add = graphs.helper.make_node("Add", ["pool", "other"], ["present_pool"])
    ports = [(name, graphs.T.FLOAT, [3, 4]) for name in ("pool", "other")]
    out = [("present_pool", graphs.T.FLOAT, [3, 4])]
    return graphs.save(directory / "two_pools.onnx", [add], ports, out, in_place={"present_pool": "pool"})


def test_corrupt_write_after_read_changes_the_answer_and_a_pair_restores_it(build: Build) -> None:
    model = build(graphs.counter)

    def answers(halves: list[mslite.Tensor]) -> list[float]:
        y, seen = room(), []
        for step in range(3):
            model.predict([host(), halves[step % len(halves)]], [y, halves[(step + 1) % len(halves)]])
            seen.append(float(y.get_data_to_numpy().sum()))
        return seen

    with mslite.configure(policy="corrupt"):
        pair = answers([on_device(), room()])
        single = answers([on_device()])
    assert pair == [12, 16, 20]
    assert np.isnan(single).all()


def test_corrupt_poisons_a_kept_view_and_leaves_the_new_result(build: Build) -> None:
    model = build(graphs.counter)
    with mslite.configure(policy="corrupt"):
        kept = model.predict([host(), host()])[1].get_data_to_numpy()
        new = model.predict([host(), host()])[1].get_data_to_numpy()
    assert np.isnan(kept).all()
    assert new.tolist() == [[1, 2, 3, 4]]


def test_kept_view_is_an_event_and_not_yet_an_error(build: Build, events: list[Event]) -> None:
    model = build(graphs.counter)
    kept = model.predict([host(), host()])[1].get_data_to_numpy()[0, :2]  # a slice keeps it alive too
    assert kept.tolist() == [1, 2]
    model.predict([host(), mslite.Tensor(floats(1, 4, start=10))])
    assert hazards(events) == ["stale_view"]
    assert kept.tolist() == [11, 12], "overwritten, as the vendor does"


def test_dropped_view_and_copy_are_no_hazard(build: Build, events: list[Event]) -> None:
    model = build(graphs.counter)
    copy = model.predict([host(), host()])[1].get_data_to_numpy().copy()
    for _ in range(3):
        copy = model.predict([host(), mslite.Tensor(copy)])[1].get_data_to_numpy().copy()
    assert copy.tolist() == [[4, 5, 6, 7]]
    assert hazards(events) == []


def test_corrupt_fed_back_on_cpu(build: Build) -> None:
    model = build(graphs.counter, "cpu")
    with mslite.configure(policy="corrupt"):
        result = model.predict([host(), host()])
        assert np.isnan(model.predict([host(), result[1]])[0].get_data_to_numpy()).all()


def test_two_models_in_turn_may_feed_each_other_on_cpu(build: Build, events: list[Event]) -> None:
    models = [build(graphs.counter, "cpu"), build(graphs.counter, "cpu")]
    state = host()
    for step in range(4):
        state = models[step % 2].predict([host(), state])[1]
    assert state.get_data_to_numpy().tolist() == [[4, 5, 6, 7]]
    assert hazards(events) == []


def test_concurrent_predicts_on_one_model(build: Build) -> None:
    model = build(graphs.counter)
    assert model._running.acquire(blocking=False)  # another thread is inside
    try:
        with pytest.raises(HazardError, match="two threads"):
            model.predict([host(), host()])
    finally:
        model._running.release()
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(bool(model.predict([host(), host()]))))
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.parametrize(("policy", "device"), [("raise", "ascend:5"), ("record", "ascend:6"), ("corrupt", "ascend:7")])
def test_out_of_memory_names_what_is_alive(policy: str, device: str, events: list[Event]) -> None:
    with mslite.configure(policy=policy, capacity_bytes=1000):
        kept = room((10, 10), device)
        kept.name = "kv.a"
        with pytest.raises(DeviceMemoryError) as caught:
            room((200, 1), device)
    text = str(caught.value)
    assert "800 bytes" in text
    assert "400 bytes tensor kv.a" in text
    assert "test_emulator_hazards.py" in text
    assert "at most 600 bytes, of a capacity of 1,000" in text
    assert hazards(events) == ["out_of_memory"]


@pytest.mark.parametrize(("policy", "error"), [("raise", DeviceMemoryError), ("vendor", RuntimeError)])
def test_no_room_for_an_input_and_then_there_is(policy: str, error: type[Exception], build: Build) -> None:
    model = build(graphs.counter, "ascend:5")
    taken = instrument.memory("ascend:5").live_bytes
    with mslite.configure(policy=policy):
        with mslite.configure(capacity_bytes=taken + 5000), pytest.raises(error):
            model.predict([host(), host()])
        assert model.predict([host(), host()])[0].get_data_to_numpy().tolist() == [[0, 2, 4, 6]]


def test_out_of_memory_as_the_vendor(build: Build) -> None:
    with mslite.configure(policy="vendor", capacity_bytes=1000):
        tensor = room((400, 1))
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'get_data_to_numpy'"):
            tensor.get_data_to_numpy()
        with pytest.raises(RuntimeError, match="build_from_file failed! Error is Common error code"):
            build(graphs.wide)
