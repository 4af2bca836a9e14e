from __future__ import annotations

import numpy as np

from qwen_npu.driver.protocol import TensorInfo
from tests.unit.runtime.mocks import MockModel, recording

INFO = TensorInfo("present_kv_cache", np.dtype(np.float16), (-1, 4))


def recorded(use):
    driver = recording(MockModel(None))
    events = []
    with driver.record(events.append):
        use(driver)
    return events


def test_an_upload_is_an_allocation_and_a_copy():
    events = recorded(lambda driver: driver.upload(np.zeros((2, 4), np.float16), name="past_kv_cache", buffer="kv.a"))
    assert [event.kind for event in events] == ["allocate", "upload"]
    allocate, upload = events
    assert allocate.detail["kind"] == "kv"
    assert allocate.detail["half"] == "a"
    assert allocate.detail["device"] == "ascend:0"
    assert allocate.detail["shape"] == (2, 4)
    assert upload.nbytes == 16
    assert upload.other == "host.past_kv_cache"


def test_the_site_of_an_allocation_is_outside_the_driver_room():
    events = recorded(lambda driver: driver.empty((1, 4), INFO, buffer="kv"))
    assert "test_recording.py:" in events[0].detail["site"]


def test_a_buffer_id_used_again_is_a_new_generation():
    def use(driver):
        for _ in range(3):
            driver.free(driver.empty((1, 4), INFO, buffer="kv"))

    events = recorded(use)
    assert [event.detail["generation"] for event in events if event.kind == "allocate"] == [0, 1, 2]
    assert [event.nbytes for event in events if event.kind == "free"] == [8, 8, 8]


def test_recording_begins_with_the_buffers_already_alive():
    driver = recording(MockModel(None))
    kept = driver.empty((1, 4), INFO, buffer="kv")
    events = []
    with driver.record(events.append):
        pass
    assert [(event.kind, event.buffer) for event in events] == [("allocate", "kv")]
    assert driver.live_bytes == kept.nbytes


def test_host_inputs_and_results_of_a_device_graph_cross_by_inference():
    driver = recording(MockModel(4))
    model = driver.load("", "decode")
    feeds = [
        driver.wrap(
            np.ones([abs(size) for size in info.shape], info.dtype), name=info.name, buffer=f"input.{info.name}"
        )
        for info in model.inputs
    ]
    events = []
    with driver.record(events.append):
        model.predict(feeds)
    crossing = [event for event in events if event.kind in ("upload", "download")]
    assert {event.source for event in crossing} == {"inferred"}
    assert sum(event.nbytes for event in crossing if event.kind == "upload") == driver.host_to_device_bytes
    assert sum(event.nbytes for event in crossing if event.kind == "download") == driver.device_to_host_bytes
    assert driver.host_to_device_bytes == sum(feed.nbytes for feed in feeds)


def test_nothing_is_told_outside_of_a_recording_but_bytes_are_counted():
    driver = recording(MockModel(None))
    tensor = driver.upload(np.zeros(4, np.float32), name="x", buffer="x")
    driver.download(tensor)
    assert (driver.host_to_device_bytes, driver.device_to_host_bytes) == (16, 16)
    assert not driver.recording
