"""The driver over a package with the interface of `mindspore_lite`: the vendor's own, or the emulator. One code for
both.

Only calls that the vendor's package has are made; what the emulator knows beyond them is reached through its
`instrument`, if the module has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from qwen_npu.driver.protocol import Capability, Tensor, TensorInfo
from qwen_npu.errors import DeviceError, DriverError, WorkbenchError
from qwen_npu.ledger.events import NOWHERE, EventSink, Place

_NUMPY_NAMES = {
    "BOOL": "bool",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "FLOAT16": "float16",
    "FLOAT32": "float32",
    "FLOAT64": "float64",
}


def parse_device(device: str) -> tuple[str, int]:
    """("ascend", N) or ("cpu", 0) from "ascend:N" or "cpu".

    Raises:
        DeviceError: any other text.
    """
    if device == "cpu":
        return "cpu", 0
    card = re.fullmatch(r"ascend:([0-9]{1,3})", device) if isinstance(device, str) else None
    if card is not None:
        return "ascend", int(card[1])
    raise DeviceError(
        f"unknown device {device!r}", expected="'ascend:N' with a card number, such as 'ascend:0', or 'cpu'"
    )


class MsliteDriver:
    """Opens a device through `module`. The device id has one source: `device`, for the context and for every tensor."""

    def __init__(self, module: ModuleType, device: str) -> None:
        self.name = module.__name__.rpartition(".")[2]
        self.device = device
        self._module = module
        self._instrument = getattr(module, "instrument", None)
        target, number = parse_device(device)
        self._context = module.Context()
        self._context.target = [target]
        capabilities: set[Capability] = set()
        if target == "ascend":
            self._context.ascend.device_id = number
            capabilities |= {"resident", "auto_resize"}
        else:
            self._context.cpu.thread_num = 1
        if self._instrument is not None and target == "ascend":
            capabilities |= {"addresses", "device_memory", "hidden_copies"}
        self.capabilities: frozenset[Capability] = frozenset(capabilities)
        self._unsubscribe: Any = None
        self._dtypes = {
            getattr(module.DataType, vendor): np.dtype(ours)
            for vendor, ours in _NUMPY_NAMES.items()
            if hasattr(module.DataType, vendor)
        }

    def load(self, path: Path, graph: str) -> MsliteModel:
        """Loads the MindIR that belongs to a bundle's ONNX file `path` (same name, other suffix)."""
        model = self._module.Model()
        file = path.with_suffix(".mindir")
        parts = file.with_name(f"{path.stem}_graph.mindir")  # above 2 GB the converter keeps the variables apart
        if not file.exists() and parts.exists():
            file = parts
        try:
            model.build_from_file(str(file), self._module.ModelType.MINDIR, self._context)
        except WorkbenchError:
            raise
        except Exception as error:
            raise DriverError(
                f"{self.name} could not build the {graph} graph from {file}: {_told(error)}",
                expected=f"a MindIR file that {self.device} takes",
                fix="convert the bundle with qwen-npu convert; qwen-npu doctor checks the device",
            ) from error
        return MsliteModel(self, model, graph)

    def wrap(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        raw = self._call(self._module.Tensor, np.ascontiguousarray(array))
        return Tensor(raw, name=name, buffer=buffer, dtype=array.dtype, shape=array.shape, device="host")

    def upload(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        raw = self._call(self._module.Tensor, np.ascontiguousarray(array), device=self.device)
        raw.name = name
        return Tensor(raw, name=name, buffer=buffer, dtype=array.dtype, shape=array.shape, device=self.device)

    def empty(self, shape: tuple[int, ...], info: TensorInfo, *, buffer: str) -> Tensor:
        raw = self._call(
            self._module.Tensor, shape=list(shape), dtype=self._vendor_dtype(info.dtype), device=self.device
        )
        raw.name = info.name
        return Tensor(raw, name=info.name, buffer=buffer, dtype=info.dtype, shape=shape, device=self.device)

    def download(self, tensor: Tensor) -> np.ndarray:
        data: np.ndarray = self._call(tensor.raw.get_data_to_numpy)
        # A host tensor gives a view that the model's next predict overwrites; a device tensor's array is already ours.
        return data if tensor.device != "host" else data.copy()

    def free(self, tensor: Tensor) -> None:
        tensor.raw = None

    def address(self, tensor: Tensor) -> int | None:
        if self._instrument is None or tensor.device == "host":
            return None
        address: int | None = self._instrument.address(tensor.raw)
        return address

    def memory_bytes(self) -> tuple[int, int] | None:
        if "device_memory" not in self.capabilities or self._instrument is None:
            return None
        memory = self._instrument.memory(self.device)
        return memory.live_bytes, memory.peak_bytes

    def subscribe(self, sink: EventSink | None, place: Place = NOWHERE) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if sink is not None and self._instrument is not None:
            self._unsubscribe = self._instrument.subscribe(sink, place)

    def close(self) -> None:
        self.subscribe(None)
        self._context = None

    def _numpy_dtype(self, dtype: Any) -> np.dtype[Any]:
        if dtype not in self._dtypes:
            raise DriverError(f"a model's tensor has dtype {dtype}", expected=f"one of {', '.join(_NUMPY_NAMES)}")
        return self._dtypes[dtype]

    def _vendor_dtype(self, dtype: np.dtype[Any]) -> Any:
        return next(vendor for vendor, ours in self._dtypes.items() if ours == dtype)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        refusal: WorkbenchError
        cause: BaseException | None = None
        try:
            return function(*args, **kwargs)
        except WorkbenchError as error:
            refusal = error
        except Exception as error:
            cause = error.with_traceback(None)
            refusal = DriverError(
                f"{self.name} failed on {self.device}: {_told(error)}",
                fix="qwen-npu doctor checks the device and the package",
            )
        # A notebook keeps the last error. Frames of this call in its traceback would keep model and tensors on the
        # device, and the next try would find no room.
        del function, args, kwargs
        raise refusal.with_traceback(None) from cause


class MsliteModel:
    """A built model. Its descriptors are read once: names, dtypes and declared shapes.

    Nothing here refers to itself in a circle: what is closed is freed at once, without a garbage collection, which
    would take long in a process that holds much.
    """

    def __init__(self, driver: MsliteDriver, model: Any, graph: str) -> None:
        self.graph = graph
        self._driver = driver
        self._model = model
        self._raw_inputs = model.get_inputs()
        self.inputs = tuple(self._info(tensor) for tensor in self._raw_inputs)
        self.outputs = tuple(self._info(tensor) for tensor in model.get_outputs())

    def _info(self, tensor: Any) -> TensorInfo:
        return TensorInfo(tensor.name, self._driver._numpy_dtype(tensor.dtype), tuple(tensor.shape))

    def resize(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._driver._call(self._model.resize, self._raw_inputs, [list(shape) for shape in shapes])

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        call = self._driver._call
        if outputs is not None:
            call(self._model.predict, [tensor.raw for tensor in inputs], [tensor.raw for tensor in outputs])
            return list(outputs)
        results = call(self._model.predict, [tensor.raw for tensor in inputs])
        return [
            Tensor(
                raw,
                name=info.name,
                buffer=f"host.{info.name}",
                dtype=self._driver._numpy_dtype(raw.dtype),
                shape=tuple(raw.shape),
                device="host",
            )
            for raw, info in zip(results, self.outputs, strict=True)
        ]

    def close(self) -> None:
        self._model = None
        self._raw_inputs = []


def _told(error: Exception) -> str:
    """The package's message, and the reason behind it where it gives one."""
    return f"{error} ({error.__cause__})" if error.__cause__ is not None else str(error)
