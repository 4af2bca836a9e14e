"""A package named as the vendor's, with the vendor's methods and nothing more, over the emulator.

What runs through it uses no capability of the emulator: any other attribute is an AttributeError here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import qwen_npu.emulator as _emulator
from qwen_npu.emulator import Context, DataType, Format, ModelType, TensorMeta

__all__ = ["Context", "DataType", "Format", "Model", "ModelType", "Tensor", "TensorMeta"]


class Tensor:
    __slots__ = ("__wrapped",)

    def __init__(self, tensor: Any = None, shape: Any = None, dtype: Any = None, device: Any = None) -> None:
        source = tensor.__wrapped if isinstance(tensor, Tensor) else tensor
        self.__wrapped = _emulator.Tensor(source, shape, dtype, device)

    @classmethod
    def _wrap(cls, wrapped: _emulator.Tensor) -> Tensor:
        tensor = cls.__new__(cls)
        tensor.__wrapped = wrapped
        return tensor

    def _bare(self) -> _emulator.Tensor:
        return self.__wrapped

    def get_data_to_numpy(self) -> np.ndarray:
        return self.__wrapped.get_data_to_numpy()

    def set_data_from_numpy(self, numpy_obj: np.ndarray) -> None:
        self.__wrapped.set_data_from_numpy(numpy_obj)

    def __getattr__(self, name: str) -> Any:
        if name not in ("name", "dtype", "shape", "format", "element_num", "data_size", "device"):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        return getattr(self.__wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("name", "dtype", "shape", "format"):
            setattr(self.__wrapped, name, value)
        else:
            super().__setattr__(name, value)


class Model:
    __slots__ = ("__wrapped",)

    def __init__(self) -> None:
        self.__wrapped = _emulator.Model()

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Any = None,
        config_path: str = "",
        config_dict: Any = None,
    ) -> None:
        self.__wrapped.build_from_file(model_path, model_type, context, config_path, config_dict)

    def get_inputs(self) -> list[Tensor]:
        return [Tensor._wrap(tensor) for tensor in self.__wrapped.get_inputs()]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        return self.__wrapped.get_outputs()

    def predict(self, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> list[Tensor]:
        given = None if outputs is None else [tensor._bare() for tensor in outputs]
        return [Tensor._wrap(tensor) for tensor in self.__wrapped.predict([tensor._bare() for tensor in inputs], given)]

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        self.__wrapped.resize([tensor._bare() for tensor in inputs], dims)
