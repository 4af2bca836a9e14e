"""The emulator's one set of settings, and what happens when a program meets a hazard.

A hazard is a use whose result the vendor leaves undefined, or that the vendor silently ignores. The policies:

raise    an event and a `HazardError` (the default).
record   an event; then go on as the vendor does.
corrupt  an event; then go on, with the memory concerned poisoned, so that the damage can be seen.
vendor   nothing: silent, as the vendor is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, cast, get_args

from qwen_npu.errors import HazardError, UsageError

Policy = Literal["raise", "record", "corrupt", "vendor"]
POLICIES: tuple[str, ...] = get_args(Policy)
POLICY_VARIABLE = "QWEN_NPU_EMULATOR_POLICY"
NATIVE_VARIABLE = "QWEN_NPU_NATIVE"
"""Set to "off": the graphs' own function bodies run even where the native kernel library is installed."""

GIB = 2**30
CAPACITY_BYTES: Mapping[str, int] = {
    "atlas-300i-duo": 48 * GIB,  # one card is two devices of this size
    "atlas-300i-duo-48g": 24 * GIB,  # the card's smaller version: unconfirmed
    "atlas-300i-pro": 24 * GIB,
}
"""Bytes of memory of ONE device (`ascend:N`), by preset."""

DEVICES = 8
"""Devices are ascend:0 to ascend:7."""


@dataclass(frozen=True)
class Settings:
    """What `configure` sets.

    Attributes:
        policy: one of `POLICIES`.
        capacity_bytes: memory of each device.
        alignment_bytes: every device address is a multiple of it.
        threads: threads of one onnxruntime session; applies to models built afterwards.
        native: use the library of qwen_npu_kernels where it is installed; else the graphs' own function bodies run.
    """

    policy: Policy = "raise"
    capacity_bytes: int = CAPACITY_BYTES["atlas-300i-duo"]
    alignment_bytes: int = 512
    threads: int = 1
    native: bool = True


def _checked_policy(value: object, source: str) -> Policy:
    if value not in POLICIES:
        raise UsageError(
            f"{source} is {value!r}", expected=f"one of {', '.join(POLICIES)}", fix="choose one of these policies"
        )
    return cast(Policy, value)


def _from_environment() -> Settings:
    native = os.environ.get(NATIVE_VARIABLE, "").lower() != "off"
    value = os.environ.get(POLICY_VARIABLE) or "raise"
    return Settings(policy=_checked_policy(value, POLICY_VARIABLE), native=native)


settings: Settings = _from_environment()
"""Read as `policy.settings` (the name is rebound by `configure`)."""


class Configured:
    """What `configure` returns: leaving a `with` block over it restores the settings from before."""

    def __init__(self, before: Settings) -> None:
        self.before = before

    def __enter__(self) -> Settings:
        return settings

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global settings
        settings = self.before


def configure(
    *,
    policy: str | None = None,
    preset: str | None = None,
    capacity_bytes: int | None = None,
    alignment_bytes: int | None = None,
    threads: int | None = None,
    native: bool | None = None,
) -> Configured:
    """Changes the emulator's settings; what is None stays.

    Use it as a statement, or as `with configure(...):` to restore the former settings afterwards.

    Args:
        policy: "raise", "record", "corrupt" or "vendor".
        preset: a key of `CAPACITY_BYTES`: sets the memory of each device.
        capacity_bytes: memory of each device; wins over `preset`.
        alignment_bytes: a power of two.
        threads: threads of one model, from the next build on.
        native: whether to use the native kernel library where it is installed, from the next build on.

    Raises:
        UsageError: an unknown policy or preset, or a size that is not positive.
    """
    global settings
    before, changes = settings, dict[str, Any]()
    if policy is not None:
        changes["policy"] = _checked_policy(policy, "policy")
    if preset is not None:
        if preset not in CAPACITY_BYTES:
            raise UsageError(
                f"preset is {preset!r}", expected=f"one of {', '.join(CAPACITY_BYTES)}", fix="or give capacity_bytes"
            )
        changes["capacity_bytes"] = CAPACITY_BYTES[preset]
    for name, value in (("capacity_bytes", capacity_bytes), ("alignment_bytes", alignment_bytes), ("threads", threads)):
        if value is None:
            continue
        if value < 1 or (name == "alignment_bytes" and value & (value - 1)):
            wanted = "a power of two" if name == "alignment_bytes" else "a positive number"
            raise UsageError(f"{name} is {value}", expected=wanted, fix=f"give {name} such a value")
        changes[name] = value
    if native is not None:
        changes["native"] = native
    settings = replace(before, **changes)
    return Configured(before)


def device_number(device: str) -> int | None:
    """The N of "ascend:N", or None if it names no device of this machine."""
    match = re.fullmatch(r"ascend:(\d+)", device)
    number = int(match.group(1)) if match else DEVICES
    return number if number < DEVICES else None


@dataclass(frozen=True)
class Hazard:
    """One use that the vendor leaves undefined or ignores.

    Attributes:
        kind: "write_after_read", "two_writers", "stale_view", "wrong_device", "wrong_size", "wrong_dtype",
            "wrong_shape", "ignored_setter", "ignored_data", "ignored_argument", "output_ignored", "fed_back",
            "uninitialised", "use_after_free", "out_of_memory", "concurrent" or "not_resized".
        buffer: name of the buffer concerned.
        problem: one sentence, with both uses where there are two.
        expected: what would have been right.
        fix: what to do.
    """

    kind: str
    buffer: str
    problem: str
    expected: str = ""
    fix: str = ""


def report(hazard: Hazard, *, model: str = "", predict: int = -1) -> bool:
    """Applies the policy. Returns True when the caller must poison what is concerned (policy "corrupt").

    Args:
        model: file name of the model where there is one.
        predict: how many predicts that model had done before; -1 outside of predict.

    Raises:
        HazardError: policy "raise".
    """
    policy = settings.policy
    if policy == "vendor":
        return False
    from qwen_npu.emulator import instrument

    instrument.hazard(hazard, model=model, predict=predict)
    if policy == "raise":
        raise error_of(hazard, model=model, predict=predict)
    return policy == "corrupt"


def error_of(hazard: Hazard, *, model: str = "", predict: int = -1) -> HazardError:
    """The error that describes a hazard."""
    where = f" (predict {predict} of {model})" if predict >= 0 else ""
    return HazardError(
        f"{hazard.kind}: {hazard.problem}{where}",
        expected=hazard.expected,
        fix=hazard.fix or "see the emulator's policies: qwen_npu.emulator.configure(policy=...)",
    )
