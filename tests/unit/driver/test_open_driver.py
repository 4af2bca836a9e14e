from __future__ import annotations

import sys

import pytest

from qwen_npu.driver import open_driver, parse_device, vendor_device_present
from qwen_npu.errors import DeviceError, DriverError


@pytest.mark.parametrize(
    ("device", "parsed"), [("cpu", ("cpu", 0)), ("ascend:0", ("ascend", 0)), ("ascend:7", ("ascend", 7))]
)
def test_devices_that_exist(device, parsed):
    assert parse_device(device) == parsed


@pytest.mark.parametrize(
    "device", ["", "npu", "ascend", "ascend:", "ascend:-1", "ascend:x", "cpu:0", "cuda:0", "ascend:0:1"]
)
def test_an_unknown_device_is_refused_by_its_text(device):
    with pytest.raises(DeviceError, match="unknown device"):
        parse_device(device)


def test_an_unknown_driver_names_the_known():
    with pytest.raises(DriverError, match="auto, emulator, mindspore_lite"):
        open_driver("onnxruntime", "cpu")


@pytest.mark.skipif(vendor_device_present(), reason="the vendor's package is here")
def test_the_vendors_package_absent_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspore_lite", None)
    with pytest.raises(DriverError, match="wheel that came with the box"):
        open_driver("mindspore_lite", "ascend:0")


def test_auto_takes_the_emulator_where_no_card_is(monkeypatch):
    monkeypatch.setattr("qwen_npu.driver.vendor_device_present", lambda: False)
    assert open_driver("auto", "ascend:0").name == "emulator"
