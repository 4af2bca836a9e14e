"""Device memory: addresses, live and peak bytes, release, and that host and device never share an array."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen_npu.emulator as mslite
from qwen_npu.emulator import instrument
from qwen_npu.emulator.memory import Block, Card
from qwen_npu.errors import DeviceError, UsageError
from qwen_npu.ledger.events import Event
from tests.unit.emulator import graphs
from tests.unit.emulator.graphs import floats

DEVICE = "ascend:2"
Build = Callable[..., mslite.Model]


def room(*shape: int) -> mslite.Tensor:
    return mslite.Tensor(shape=shape, dtype=mslite.DataType.FLOAT32, device=DEVICE)


def test_bytes_addresses_and_release() -> None:
    before = instrument.memory(DEVICE)
    a, b = room(100), room(3)
    a.name = "conv.a"
    during = instrument.memory(DEVICE)
    assert during.live_bytes - before.live_bytes == 412
    assert [(block.nbytes, block.kind, block.name) for block in during.blocks] == [
        (400, "tensor", "conv.a"),
        (12, "tensor", ""),
    ]
    assert during.blocks[0].site.rpartition(":")[0] == __file__
    assert instrument.address(a) == during.blocks[0].address
    assert instrument.address(b) == during.blocks[1].address
    assert all(block.address % 512 == 0 for block in during.blocks)
    del a, b
    after = instrument.memory(DEVICE)
    assert after.live_bytes == before.live_bytes
    assert after.peak_bytes >= before.live_bytes + 412
    instrument.reset_peak(DEVICE)
    assert instrument.memory(DEVICE).peak_bytes == after.live_bytes


def test_events_of_allocation_and_release(events: list[Event]) -> None:
    tensor = room(2, 3)
    address = instrument.address(tensor)
    del tensor
    allocate, free = events
    assert (allocate.kind, free.kind) == ("allocate", "free")
    assert allocate.buffer == free.buffer == f"{DEVICE}@{address:#x}"
    assert allocate.nbytes == free.nbytes == 24
    detail = dict(allocate.detail or {})
    assert (detail["address"], detail["shape"], detail["dtype"], detail["device"]) == (
        address,
        (2, 3),
        "float32",
        DEVICE,
    )


def test_nothing_is_kept_by_a_subscriber_that_left() -> None:
    seen: list[Event] = []
    unsubscribe = instrument.subscribe(seen.append)
    unsubscribe()
    unsubscribe()
    room(1)
    assert seen == []


def test_host_tensor_has_no_address() -> None:
    assert instrument.address(mslite.Tensor(floats(2))) is None


def test_weights_are_device_memory_and_go_with_the_model(build: Build) -> None:
    before = instrument.memory(DEVICE).live_bytes
    model = build(graphs.wide, DEVICE)
    blocks = [block for block in instrument.memory(DEVICE).blocks if block.kind == "weights"]
    assert [(block.nbytes, block.name) for block in blocks] == [(2 * 2**20, "wide.onnx")]
    del model
    assert instrument.memory(DEVICE).live_bytes == before


def test_model_that_ran_frees_everything_without_a_collection(build: Build) -> None:
    gc.disable()
    try:
        before = instrument.memory(DEVICE).live_bytes
        model = build(graphs.counter, DEVICE)
        outputs = [room(1, 4), room(1, 4)]
        model.predict([mslite.Tensor(floats(1, 4)), mslite.Tensor(floats(1, 4), device=DEVICE)], outputs)
        model.predict([mslite.Tensor(floats(1, 4)), mslite.Tensor(floats(1, 4))])
        del outputs
        del model
        assert instrument.memory(DEVICE).live_bytes == before
    finally:
        gc.enable()


def test_prepared_predicts_do_not_keep_tensors_alive(build: Build) -> None:
    model = build(graphs.counter, DEVICE)
    state = mslite.Tensor(floats(1, 4), device=DEVICE)
    outputs = [room(1, 4), room(1, 4)]
    model.predict([mslite.Tensor(floats(1, 4)), state], outputs)
    before = instrument.memory(DEVICE).live_bytes
    del state, outputs
    assert before - instrument.memory(DEVICE).live_bytes == 48


def test_devices_are_apart() -> None:
    other = instrument.memory("ascend:7").live_bytes
    tensor = room(64)
    assert instrument.memory("ascend:7").live_bytes == other
    assert tensor.device == DEVICE


def test_upload_and_download_copy() -> None:
    source = floats(4)
    tensor = mslite.Tensor(source, device=DEVICE)
    source[:] = -1
    first = tensor.get_data_to_numpy()
    first[:] = -2
    assert tensor.get_data_to_numpy().tolist() == [0, 1, 2, 3]


def test_set_data_on_a_device_copies(events: list[Event]) -> None:
    tensor, source = room(4), floats(4)
    tensor.set_data_from_numpy(source)
    source[:] = -1
    assert tensor.get_data_to_numpy().tolist() == [0, 1, 2, 3]
    assert [event.kind for event in events] == ["allocate", "upload", "download"]


def test_wrapping_a_device_tensor_copies_down_and_up(events: list[Event]) -> None:
    tensor = mslite.Tensor(floats(4), device=DEVICE)
    events.clear()
    again = mslite.Tensor(tensor, device=DEVICE)
    copies = [
        (event.kind, event.nbytes, dict(event.detail or {})["hidden"]) for event in events if "load" in event.kind
    ]
    assert copies == [("download", 16, True), ("upload", 16, True)]
    assert instrument.address(again) != instrument.address(tensor)
    assert again.get_data_to_numpy().tolist() == [0, 1, 2, 3]


def test_wrapping_a_device_tensor_without_a_device_brings_it_to_the_host(events: list[Event]) -> None:
    again = mslite.Tensor(mslite.Tensor(floats(4), device=DEVICE))
    assert again.device == "None:-1"
    assert [event.kind for event in events if "load" in event.kind] == ["upload", "download"]


def test_bytes_of_every_copy_of_a_predict(build: Build, events: list[Event]) -> None:
    model = build(graphs.growing, DEVICE)
    past = mslite.Tensor(np.zeros((5, 3), np.float16), device=DEVICE)
    count = mslite.Tensor(shape=[], dtype=mslite.DataType.INT32, device=DEVICE)
    present = mslite.Tensor(shape=[6, 3], dtype=mslite.DataType.FLOAT16, device=DEVICE)
    row, mask = mslite.Tensor(np.ones((1, 3), np.float16)), mslite.Tensor(np.ones((1, 6), np.int32))
    events.clear()
    model.predict([mask, row, past], [count, present])
    uploads = {dict(event.detail or {})["name"]: event.nbytes for event in events if event.kind == "upload"}
    assert uploads == {"mask": 24, "row": 6}, "int64 in the file is int32 on the device"
    assert not [event for event in events if event.kind == "download"]
    assert count.get_data_to_numpy() == 6
    assert present.get_data_to_numpy().tolist() == [[0.0] * 3] * 5 + [[1.0] * 3]
    events.clear()
    results = model.predict([mask, row, past])
    downloads = {dict(event.detail or {})["name"]: event.nbytes for event in events if event.kind == "download"}
    assert downloads == {"count": 4, "present": 36}
    assert [result.device for result in results] == ["None:-1", "None:-1"]


def test_unknown_devices() -> None:
    with pytest.raises(DeviceError, match="ascend:0 to ascend:7"):
        mslite.Tensor(floats(2), device="ascend:8")
    with pytest.raises(DeviceError, match="no device 'cpu'"):
        instrument.memory("cpu")


def test_presets_and_settings() -> None:
    with mslite.configure(preset="atlas-300i-pro"):
        assert instrument.memory(DEVICE).capacity_bytes == 24 * 2**30
        with mslite.configure(capacity_bytes=123):
            assert instrument.memory(DEVICE).capacity_bytes == 123
        assert instrument.memory(DEVICE).capacity_bytes == 24 * 2**30
    assert instrument.memory(DEVICE).capacity_bytes == 48 * 2**30
    for wrong in ({"policy": "loud"}, {"preset": "atlas"}, {"capacity_bytes": 0}, {"alignment_bytes": 48}):
        with pytest.raises(UsageError):
            mslite.configure(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 7)), max_size=40))
def test_blocks_never_overlap_and_all_comes_back(orders: list[tuple[int, int]]) -> None:
    """Allocate, and free one of the living now and then: spans stay apart, sums stay right, space is used again."""
    card, living, block = Card("ascend:0"), dict[int, Block](), None
    for nbytes, victim in orders:
        block = card.allocate(nbytes, "tensor", "")
        living[block.address] = block
        if victim < len(living):
            living.pop(sorted(living)[victim]).free()
        snapshot = card.snapshot()
        assert [info.address for info in snapshot.blocks] == sorted(living)
        assert snapshot.live_bytes == sum(block.nbytes for block in living.values())
        spans = [(info.address, info.address + info.nbytes) for info in snapshot.blocks]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    block = None
    living.clear()
    assert card.snapshot().live_bytes == 0
    assert card._holes == []
