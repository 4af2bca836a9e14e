"""Context: where a model runs, with which options. Defaults, checks and printed forms are the vendor's."""

from __future__ import annotations

from typing import Any

from qwen_npu.emulator import policy
from qwen_npu.emulator.checks import check_choice, check_isinstance, check_list_of, check_not_negative

_TARGETS = ["cpu", "gpu", "ascend"]


class _Options:
    """Attributes are plain, as in the vendor package; one that means nothing is a hazard (a misspelt option)."""

    _known: frozenset[str] = frozenset()

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


class _CPU(_Options):
    _known = frozenset(
        {"precision_mode", "thread_num", "inter_op_parallel_num", "thread_affinity_mode", "thread_affinity_core_list"}
    )

    def __init__(self) -> None:
        self._precision_mode = "enforce_fp32"
        self._thread_num = 0
        self._inter_op_parallel_num = 0
        self._thread_affinity_mode = 0
        self._thread_affinity_core_list: list[int] = []

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kCPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"thread_num: {self.thread_num},\n"
            f"inter_op_parallel_num: {self.inter_op_parallel_num},\n"
            f"thread_affinity_mode: {self.thread_affinity_mode},\n"
            f"thread_affinity_core_list: {self.thread_affinity_core_list}."
        )

    @property
    def precision_mode(self) -> str:
        return self._precision_mode

    @precision_mode.setter
    def precision_mode(self, value: str) -> None:
        check_choice("cpu_precision_mode", value, ("enforce_fp32", "preferred_fp16"))
        self._precision_mode = value

    @property
    def thread_num(self) -> int:
        return self._thread_num

    @thread_num.setter
    def thread_num(self, value: int) -> None:
        check_not_negative("cpu_thread_num", value)
        self._thread_num = int(value)

    @property
    def inter_op_parallel_num(self) -> int:
        return self._inter_op_parallel_num

    @inter_op_parallel_num.setter
    def inter_op_parallel_num(self, value: int) -> None:
        check_not_negative("cpu_inter_op_parallel_num", value)
        self._inter_op_parallel_num = int(value)

    @property
    def thread_affinity_mode(self) -> int:
        return self._thread_affinity_mode

    @thread_affinity_mode.setter
    def thread_affinity_mode(self, value: int) -> None:
        check_isinstance("cpu_thread_affinity_mode", value, int)
        if value not in (0, 1, 2):
            policy.report(
                policy.Hazard(
                    "ignored_setter",
                    "thread_affinity_mode",
                    f"thread_affinity_mode = {value} is taken and becomes 0",
                    expected="0, 1 or 2",
                )
            )
            value = 0
        self._thread_affinity_mode = int(value)

    @property
    def thread_affinity_core_list(self) -> list[int]:
        return self._thread_affinity_core_list

    @thread_affinity_core_list.setter
    def thread_affinity_core_list(self, value: list[int]) -> None:
        check_list_of("cpu_thread_affinity_core_list", value, int)
        self._thread_affinity_core_list = list(value)


class _GPU(_Options):
    _known = frozenset({"precision_mode", "device_id"})

    def __init__(self) -> None:
        self._precision_mode = "enforce_fp32"
        self._device_id = 0

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kGPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id},\n"
            f"rank_id: {self.rank_id},\n"
            f"group_size: {self.group_size}."
        )

    @property
    def precision_mode(self) -> str:
        return self._precision_mode

    @precision_mode.setter
    def precision_mode(self, value: str) -> None:
        check_choice("gpu_precision_mode", value, ("enforce_fp32", "preferred_fp16"))
        self._precision_mode = value

    @property
    def device_id(self) -> int:
        return self._device_id

    @device_id.setter
    def device_id(self, value: int) -> None:
        check_not_negative("gpu_device_id", value)
        self._device_id = int(value)

    @property
    def rank_id(self) -> int:
        return 0

    @property
    def group_size(self) -> int:
        return 1


class _Ascend(_Options):
    _known = frozenset({"precision_mode", "device_id", "provider", "rank_id"})
    _modes = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")

    def __init__(self) -> None:
        self._precision_mode = ""
        self._device_id = 0
        self._provider = ""
        self._rank_id = 0

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kAscend,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id}.provider: {self.provider}.rank_id: {self.rank_id}."
        )

    @property
    def precision_mode(self) -> str:
        return self._precision_mode

    @precision_mode.setter
    def precision_mode(self, value: str) -> None:
        check_choice("ascend_precision_mode", value, self._modes)
        self._precision_mode = value

    @property
    def device_id(self) -> int:
        return self._device_id

    @device_id.setter
    def device_id(self, value: int) -> None:
        check_not_negative("ascend_device_id", value)
        self._device_id = int(value)

    @property
    def provider(self) -> str:
        return self._provider

    @provider.setter
    def provider(self, value: str) -> None:
        check_isinstance("ascend_provider", value, str)
        self._provider = value

    @property
    def rank_id(self) -> int:
        return self._rank_id

    @rank_id.setter
    def rank_id(self, value: int) -> None:
        check_not_negative("ascend_rank_id", value)
        self._rank_id = int(value)


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
