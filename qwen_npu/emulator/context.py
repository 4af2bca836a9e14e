"""Context: where a model runs, with which options. Defaults, checks and printed forms are the vendor's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from qwen_npu.emulator import policy
from qwen_npu.emulator.checks import check_choice, check_isinstance, check_list_of, check_not_negative

_TARGETS = ["cpu", "gpu", "ascend"]
Value = TypeVar("Value")


class _Options:
    """Attributes are plain, as in the vendor package; one that means nothing is a hazard (a misspelt option)."""

    _known: frozenset[str] = frozenset()
    _prefix = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._known:
            policy.report(
                policy.Hazard(
                    "ignored_setter",
                    name,
                    f"{type(self).__name__}.{name} = {value!r} has no effect: the vendor takes any attribute",
                    expected=f"one of {', '.join(sorted(self._known))}",
                    fix="correct the name",
                )
            )
        super().__setattr__(name, value)


class _Checked(Generic[Value]):
    """An option whose assignments are checked as the vendor checks them; messages name it `PREFIX_OPTION`.

    Args:
        default: the value before any assignment.
        check: called with the name and the value; raises what the vendor raises.
        keep: makes of the value what is kept.
    """

    def __init__(self, default: Value, check: Callable[[str, Any], None], keep: Callable[[Any], Value]) -> None:
        self._default, self._check, self._keep = default, check, keep

    def __set_name__(self, owner: type[_Options], name: str) -> None:
        self._slot, self._message_name = f"_{name}", f"{owner._prefix}_{name}"

    def __get__(self, options: _Options, owner: type[_Options]) -> Value:
        value: Value = vars(options).setdefault(self._slot, self._keep(self._default))
        return value

    def __set__(self, options: _Options, value: Any) -> None:
        self._check(self._message_name, value)
        setattr(options, self._slot, self._keep(value))


def _one_of(*choices: str) -> _Checked[str]:
    return _Checked(choices[0], partial(check_choice, choices=[choice for choice in choices if choice]), str)


def _not_negative() -> _Checked[int]:
    return _Checked(0, check_not_negative, int)


def _known_affinity_mode(mode: int) -> int:
    if mode in (0, 1, 2):
        return int(mode)
    policy.report(
        policy.Hazard(
            "ignored_setter",
            "thread_affinity_mode",
            f"thread_affinity_mode = {mode} is taken and becomes 0",
            expected="0, 1 or 2",
        )
    )
    return 0


class _CPU(_Options):
    _prefix = "cpu"
    _known = frozenset(
        {"precision_mode", "thread_num", "inter_op_parallel_num", "thread_affinity_mode", "thread_affinity_core_list"}
    )

    precision_mode = _one_of("enforce_fp32", "preferred_fp16")
    thread_num = _not_negative()
    inter_op_parallel_num = _not_negative()
    thread_affinity_mode = _Checked(0, partial(check_isinstance, kind=int), _known_affinity_mode)
    thread_affinity_core_list: _Checked[list[int]] = _Checked([], partial(check_list_of, kind=int), list)

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kCPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"thread_num: {self.thread_num},\n"
            f"inter_op_parallel_num: {self.inter_op_parallel_num},\n"
            f"thread_affinity_mode: {self.thread_affinity_mode},\n"
            f"thread_affinity_core_list: {self.thread_affinity_core_list}."
        )


class _GPU(_Options):
    _prefix = "gpu"
    _known = frozenset({"precision_mode", "device_id"})

    precision_mode = _one_of("enforce_fp32", "preferred_fp16")
    device_id = _not_negative()

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kGPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id},\n"
            f"rank_id: {self.rank_id},\n"
            f"group_size: {self.group_size}."
        )

    @property
    def rank_id(self) -> int:
        return 0

    @property
    def group_size(self) -> int:
        return 1


class _Ascend(_Options):
    _prefix = "ascend"
    _known = frozenset({"precision_mode", "device_id", "provider", "rank_id"})

    precision_mode = _one_of(
        "", "enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal"
    )
    device_id = _not_negative()
    provider = _Checked("", partial(check_isinstance, kind=str), str)
    rank_id = _not_negative()

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kAscend,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id}.provider: {self.provider}.rank_id: {self.rank_id}."
        )


class _Parallel(_Options):
    _known = frozenset({"workers_num", "config_info", "config_path", "device_ids"})

    def __init__(self) -> None:
        self.workers_num = 0
        self.config_info: dict[str, dict[str, str]] = {}
        self.config_path = ""
        self.device_ids: list[int] = []

    def __str__(self) -> str:
        info = ", ".join(f"{key}: {value}" for key, value in self.config_info.items())
        return f"workers num: {self.workers_num},\nconfig info: {info},\nconfig file: {self.config_path}."


class Context(_Options):
    """Device and options of a model; one serves any number of models, and outlives them.

    `target` is ["cpu"] by default. With "ascend" in it the model runs on the emulated device of `ascend.device_id`.
    """

    _known = frozenset({"target", "group_info_file"})

    def __init__(self) -> None:
        set_plainly = object.__setattr__
        set_plainly(self, "cpu", _CPU())
        set_plainly(self, "gpu", _GPU())
        set_plainly(self, "ascend", _Ascend())
        set_plainly(self, "parallel", _Parallel())
        self._target = ["cpu"]
        self._group_info_file = ""

    cpu: _CPU
    gpu: _GPU
    ascend: _Ascend
    parallel: _Parallel

    def __str__(self) -> str:
        return f"target: {self.target}."

    @property
    def target(self) -> list[str]:
        return self._target

    @target.setter
    def target(self, value: list[str]) -> None:
        if not value:
            self._target = ["cpu"]
            return
        check_list_of("target", value, str)
        for element in value:
            if element.lower() not in _TARGETS:
                raise ValueError(f"target elements must be in {_TARGETS}, but got {element.lower()}.")
        self._target = value  # by reference, as the vendor keeps it

    @property
    def group_info_file(self) -> str:
        return self._group_info_file

    @group_info_file.setter
    def group_info_file(self, value: str) -> None:
        check_isinstance("group_info_file", value, str)
        self._group_info_file = value

    @property
    def _runs_on(self) -> str:
        """ "cpu", "gpu" or "ascend:N": the device that a model built with this context uses."""
        targets = [target.lower() for target in self._target]
        if "ascend" in targets:
            return f"ascend:{self.ascend.device_id}"
        return "gpu" if "gpu" in targets else "cpu"
