"""Drivers: the seam between the runtime and whatever package holds the device."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from qwen_npu.driver.mslite import MsliteDriver, parse_device
from qwen_npu.driver.protocol import Driver
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import DriverError

DRIVERS = ("auto", "emulator", "mindspore_lite")


def open_driver(driver: str | ModuleType | Driver, device: str) -> RecordingDriver:
    """Opens `device` ("ascend:N" or "cpu").

    Args:
        driver: "mindspore_lite" (the vendor's package), "emulator", or "auto": the vendor's package where it is
            installed
            together with a card, else the emulator. A module with the vendor's interface and a `Driver` are taken as
            they are.

    Raises:
        DriverError: an unknown name, or a package that cannot be imported.
        DeviceError: an unknown device.
    """
    parse_device(device)
    if isinstance(driver, ModuleType):
        return RecordingDriver(MsliteDriver(driver, device))
    if not isinstance(driver, str) and hasattr(driver, "load"):
        return RecordingDriver(driver)
    if driver not in DRIVERS:
        raise DriverError(
            f"unknown driver {driver!r}", expected=f"one of {', '.join(DRIVERS)}, a module of the vendor's or a Driver"
        )
    name, _ = choose_driver(driver)
    return RecordingDriver(MsliteDriver(_import(name), device))


def choose_driver(driver: str) -> tuple[str, str]:
    """The driver that a name stands for, and why it was chosen, as half a sentence."""
    if driver != "auto":
        return driver, "as asked"
    if importlib.util.find_spec("mindspore_lite") is None:
        return "emulator", "the package mindspore_lite is not installed"
    if not any(Path("/dev").glob("davinci[0-9]*")):
        return "emulator", "there is no NPU device file (/dev/davinciN)"
    return "mindspore_lite", "the package is installed and an NPU device file is there"


def vendor_device_present() -> bool:
    """Whether the vendor's package is installed and a card's device file exists."""
    return choose_driver("auto")[0] == "mindspore_lite"


def _import(name: str) -> ModuleType:
    if name == "emulator":
        return importlib.import_module("qwen_npu.emulator")
    try:
        return importlib.import_module("mindspore_lite")
    except ImportError as error:
        raise DriverError(
            f"the package mindspore_lite cannot be imported: {error}",
            expected="the vendor's wheel in this Python environment",
            fix="install the wheel that came with the box (qwen-npu doctor tells where to get it), or the emulator",
        ) from None
