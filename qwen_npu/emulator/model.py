"""Model of the vendor package: arguments, their checks and messages. ascend.py and cpu.py do the work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen_npu.emulator import policy
from qwen_npu.emulator.checks import check_elements, check_isinstance
from qwen_npu.emulator.context import Context
from qwen_npu.emulator.enums import ModelType
from qwen_npu.emulator.target import Refused
from qwen_npu.emulator.tensor import Tensor, TensorCore, TensorMeta
from qwen_npu.errors import DeviceError, DeviceMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qwen_npu.emulator.ascend import AscendTarget
    from qwen_npu.emulator.cpu import CpuTarget

_CONVERTED_SUFFIXES = (".mindir", ".ms")


class Model:
    """A graph, loaded on the device that its context names."""

    def __init__(self) -> None:
        self.model_path_ = ""
        self._target: AscendTarget | CpuTarget | None = None
        self._tried = False
        self._running = threading.Lock()

    def __str__(self) -> str:
        return f"model_path: {self.model_path_}."

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: dict[str, dict[str, str]] | None = None,
    ) -> None:
        """Loads a graph: an ONNX file, or a .mindir or .ms path beside which our ONNX file of the same name lies.

        Raises:
            TypeError: an argument of the wrong type.
            RuntimeError: no such file, or one that cannot be loaded; the reason is its `__cause__`.
            DeviceError, DeviceMemoryError: no such device, or no room on it (not under policy "vendor").
        """
        check_isinstance("model_path", model_path, str)
        check_isinstance("model_type", model_type, ModelType)
        if context is None:
            context = Context()
        check_isinstance("context", context, Context)
        check_isinstance("config_path", config_path, str)
        path = Path(model_path)
        source = path.with_suffix(".onnx") if path.suffix in _CONVERTED_SUFFIXES else path
        if not model_path or not (path.exists() or source.exists()):
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        self.model_path_ = model_path
        if config_path:
            if not Path(config_path).exists():
                raise RuntimeError("build_from_file failed, config_path does not exist!")
            with open(config_path) as file:  # noqa: PTH123 (the vendor's error for a directory names the path so)
                file.read()
        _check_config(config_dict)
        if self._tried:
            raise RuntimeError("build_from_file failed! Error is Common error code.")
        self._tried = True
        self._target = _load(source if source.exists() else path, context)

    def get_inputs(self) -> list[Tensor]:
        """New handles over the model's input tensors."""
        return [] if self._target is None else [Tensor._around(core) for core in self._target.input_cores]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        return () if self._target is None else self._target.metas()

    def get_model_info(self, key: str) -> str:
        check_isinstance("key", key, str)
        return ""

    def predict(
        self, inputs: list[Tensor | np.ndarray] | tuple[Tensor | np.ndarray, ...], outputs: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Runs the graph. On an ascend target the results are written into `outputs` where they are given.

        Raises:
            TypeError, RuntimeError: the vendor's; the reason for "predict failed!" is its `__cause__`.
            HazardError: by policy.
        """
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(f"inputs must be list or tuple, but got {type(inputs)}.")
        target = self._target
        count = 0 if target is None else len(target.input_cores)
        if count != len(inputs):
            _check_input_kinds(inputs)
            raise RuntimeError(f"model input len:{count} not equal input len:{len(inputs)}!")
        cores = [
            value._tensor or _built(value) if type(value) is Tensor else self._core(index, value)
            for index, value in enumerate(inputs)
        ]
        given: list[TensorCore] = []
        if outputs is not None:
            if not isinstance(outputs, list):
                raise TypeError(f"outputs must be list, but got {type(outputs)}.")
            check_elements("outputs", outputs, Tensor)
            given = [tensor._tensor or _built(tensor) for tensor in outputs]
        if target is None:
            raise RuntimeError("predict failed!")
        if not self._running.acquire(blocking=False):
            self._report_concurrent()
            self._running.acquire()
        try:
            results = target.predict(cores, given)
        except Refused as refusal:
            raise RuntimeError("predict failed!") from refusal.cause
        except DeviceMemoryError as error:
            if policy.settings.policy == "vendor":
                raise RuntimeError("predict failed!") from error
            raise
        finally:
            self._running.release()
        return Tensor._around_each(results)

    def resize(self, inputs: list[Tensor] | tuple[Tensor, ...], dims: Sequence[Sequence[int]]) -> None:
        """Gives every input a new shape. The tensors themselves are not looked at, as with the vendor.

        Raises:
            TypeError, ValueError, RuntimeError: the vendor's.
        """
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(f"inputs must be list or tuple of Lite Tensor, but got {type(inputs)}.")
        check_elements("inputs", inputs, Tensor)
        if not isinstance(dims, (list, tuple)):
            raise TypeError(f"dims must be list or tuple of shape, but got {type(dims)}.")
        for index, shape in enumerate(dims):
            if not isinstance(shape, (list, tuple)):
                raise TypeError(f"dims element must be list or tuple of int, but got {type(shape)} at index {index}.")
            for axis, size in enumerate(shape):
                if not isinstance(size, int):
                    raise TypeError(
                        f"dims element's element must be int, but got {type(size)} "
                        f"at {index}th dims element's {axis}th element."
                    )
        if len(inputs) != len(dims):
            raise ValueError(
                f"inputs' size does not match dims' size, but got inputs: {len(inputs)} and dims: {len(dims)}."
            )
        if self._target is None:
            raise RuntimeError("resize failed! Error is Common error code.")
        try:
            self._target.resize(dims)
        except Refused as refusal:
            raise RuntimeError(f"resize failed! Error is {refusal.status}") from refusal.cause

    def _core(self, index: int, value: Tensor | np.ndarray) -> TensorCore:
        if isinstance(value, Tensor):
            return _built(value)
        if isinstance(value, np.ndarray):
            assert self._target is not None
            handle = Tensor._around(self._target.input_cores[index])
            handle.set_data_from_numpy(value)
            return _built(handle)
        raise TypeError("inputs element must be Tensor, of numpy.")

    def _report_concurrent(self) -> None:
        policy.report(
            policy.Hazard(
                "concurrent",
                "",
                f"two threads are in predict of {self.model_path_} at once; the vendor's threads share its buffers",
                expected="one thread for each Model",
                fix="build a second Model from the file",
            )
        )


class ModelParallelRunner:
    """The vendor's pool of workers over one file; here one worker."""

    def __init__(self) -> None:
        self._model = Model()

    def __str__(self) -> str:
        return str(self._model)

    def build_from_file(self, model_path: str, context: Context | None = None) -> None:
        """Loads a graph, as `Model.build_from_file` does with ModelType.MINDIR."""
        check_isinstance("model_path", model_path, str)
        if not Path(model_path).exists():
            raise RuntimeError("ModelParallelRunner's build from file failed, model_path does not exist!")
        self._model.build_from_file(model_path, ModelType.MINDIR, context)

    def get_inputs(self) -> list[Tensor]:
        return self._model.get_inputs()

    def predict(self, inputs: list[Tensor | np.ndarray], outputs: list[Tensor] | None = None) -> list[Tensor]:
        return self._model.predict(inputs, outputs)


def _built(tensor: Tensor) -> TensorCore:
    core = tensor._tensor
    if core is None:
        raise AttributeError("'NoneType' object has no attribute 'get_data_type'")
    return core


def _check_input_kinds(inputs: Sequence[object]) -> None:
    if not all(isinstance(value, (Tensor, np.ndarray)) for value in inputs):
        raise TypeError("inputs element must be Tensor, of numpy.")


def _check_config(config: dict[str, dict[str, str]] | None) -> None:
    if config is None:
        return
    check_isinstance("config_dict", config, dict)
    for section, options in config.items():
        check_isinstance("config_dict_key", section, str)
        check_isinstance("config_dict_value", options, dict)
        for option, value in options.items():
            check_isinstance("config_dict_value_key", option, str)
            check_isinstance("config_dict_value_value", value, str)


def _load(path: Path, context: Context) -> AscendTarget | CpuTarget:
    from qwen_npu.emulator.ascend import AscendTarget
    from qwen_npu.emulator.cpu import CpuTarget
    from qwen_npu.emulator.engine import Engine, EngineError

    place = context._runs_on
    failure = RuntimeError("build_from_file failed! Error is Common error code.")
    if place == "gpu":
        raise failure
    try:
        if place == "cpu":
            return CpuTarget(Engine(path))
        if policy.device_number(place) is None:
            raise DeviceError(
                f"the context's ascend.device_id is {context.ascend.device_id}",
                expected=f"0 to {policy.DEVICES - 1}",
                fix="use a device that exists",
            )
        return AscendTarget(Engine(path), place)
    except EngineError as error:
        raise failure from error
    except (DeviceError, DeviceMemoryError) as error:
        if policy.settings.policy == "vendor":
            raise failure from error
        raise
