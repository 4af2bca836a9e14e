"""Tensor and TensorMeta of the vendor package: host tensors share the caller's arrays, device tensors never do.

A `Tensor` is a thin wrapper around a `TensorCore`, as the vendor's is around its C++ object: predict returns new
wrappers around the same cores, and setting other data gives a wrapper a new core.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from qwen_npu.emulator import instrument, policy
from qwen_npu.emulator.checks import check_elements, check_isinstance
from qwen_npu.emulator.enums import NUMPY_OF, OF_SCALAR, DataType, Format, item_bytes
from qwen_npu.emulator.memory import Block, aligned_bytes, card, poison
from qwen_npu.errors import DeviceError, DeviceMemoryError
from qwen_npu.ledger.events import now_ns

Signature = Any
"""What a predict's plan depends on: an int that is unique to a device tensor's memory and form, or (dtype, shape)."""

_serial = itertools.count(1)
_MAX_INT64 = 2**63 - 1


class _Window:
    """Gives an array over foreign memory a base of its own, so that a view lives as long as any slice of it."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: np.ndarray, *, writeable: bool) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], not writeable)
        self.__array_interface__ = interface
        self._owner = array


class TensorCore:
    """What the vendor's C++ tensor object knows. Method names are those that its error messages show.

    Attributes:
        data: array in the tensor's own shape and dtype: the caller's on the host, the block's memory on a device;
            None while a host tensor was never given data.
        block: the device memory; None on the host.
        from_numpy: data was set from an array, so that the vendor ignores the setters.
        written: a device tensor's memory has had a value put in.
        stale: name of the model whose next predict has overwritten this output.
        views: arrays handed out over the memory of a model's own output.
        copies: what copies of it tell, by their cause.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_format",
        "_name",
        "_shape",
        "block",
        "copies",
        "data",
        "from_numpy",
        "signature",
        "stale",
        "views",
        "written",
    )

    def __init__(
        self,
        dtype: DataType = DataType.FLOAT32,
        shape: Sequence[int] = (),
        *,
        name: str = "",
        form: Format = Format.NCHW,
        data: np.ndarray | None = None,
        block: Block | None = None,
        from_numpy: bool = False,
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._shape = tuple(shape)
        self._format = form
        self.data = data
        self.block = block
        self.from_numpy = from_numpy
        self.written = False
        self.stale = ""
        self.views: list[weakref.ref[np.ndarray]] | None = None
        self.copies: dict[str, instrument.Copy] | None = None
        self.signature: Signature = None
        self.sign()

    def sign(self) -> None:
        # the number of the dtype: an Enum's hash is a Python function
        self.signature = (self._dtype.value, self._shape) if self.block is None else next(_serial)

    def get_tensor_name(self) -> str:
        return self._name

    def get_data_type(self) -> DataType:
        return self._dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_format(self) -> Format:
        return self._format

    def get_element_num(self) -> int:
        return _element_count(self._shape)

    def get_data_size(self) -> int:
        return _element_count(self._shape) * item_bytes(self._dtype)

    def get_device(self) -> str:
        return "None:-1" if self.block is None else self.block.device

    def set_tensor_name(self, name: str) -> None:
        self._name = name
        self.copies = None
        if self.block is not None:
            card(self.block.device).rename(self.block, name)

    def set_data_type(self, dtype: DataType) -> None:
        if dtype is not self._dtype and self._may_set("dtype", self._dtype, dtype, item_bytes(dtype), self._shape):
            self._dtype = dtype
            self._reform()

    def set_format(self, form: Format) -> None:
        if form is not self._format and self._may_set("format", self._format, form, None, None):
            self._format = form

    def set_shape(self, shape: list[int]) -> None:
        if any(not -_MAX_INT64 - 1 <= size <= _MAX_INT64 for size in shape):
            raise TypeError(
                "set_shape(): incompatible function arguments. The following argument types are supported:\n"
                "    1. (self: TensorBind, arg0: List[int]) -> None\n\n"
                f"Invoked with: {object.__repr__(self)}, {shape}"
            )
        new = tuple(int(size) for size in shape)
        if new != self._shape and self._may_set("shape", self._shape, new, item_bytes(self._dtype), new):
            self._shape = new
            self._reform()

    def _may_set(self, what: str, old: Any, new: Any, item: int | None, shape: tuple[int, ...] | None) -> bool:
        """Whether a setter takes effect: not after data, nor to another size of memory that is already there."""
        fits = item is None or shape is None or _element_count(shape) * item == self.get_data_size()
        if not self.from_numpy and (self.block is None or fits):
            return True
        label = self._name or "(no name)"
        policy.report(
            policy.Hazard(
                "ignored_setter",
                self._name,
                f"tensor {label}: {what} = {new} after it was given data as {old}; the vendor ignores it silently",
                expected=f"{what} set before the data",
                fix="make a new Tensor",
            )
        )
        return False

    def _reform(self) -> None:
        if self.block is not None and self.data is not None:
            self.data = _bytes_of(self.data).view(NUMPY_OF[self._dtype]).reshape(self._shape)
        else:
            self.data = None
        self.sign()

    def check_alive(self, use: str) -> None:
        if self.block is not None and not self.block.alive:
            policy.report(
                policy.Hazard(
                    "use_after_free",
                    self._name,
                    f"tensor {self._name or '(no name)'} at {self.block.address:#x} of {self.block.device} "
                    f"was freed and is now used: {use}",
                    expected="a tensor that is alive",
                    fix="keep the tensor until its last use",
                )
            )

    def get_data_to_numpy(self) -> np.ndarray:
        """The host's view of the data; of a device tensor a fresh copy (a download)."""
        self.check_alive("read to the host")
        if self.block is not None:
            return self._download()
        dtype = NUMPY_OF.get(self._dtype)
        if dtype is None:
            return np.zeros(self._shape, np.dtype([]))
        if any(size <= 0 for size in self._shape):
            return np.array([])  # the vendor's answer: shape (0,), float64
        if self.data is None:
            self.data = np.zeros(self._shape, dtype)
        if self.stale:
            policy.report(stale_hazard(self, "is read now"))
        writeable = self.data.flags.writeable or policy.settings.policy == "vendor"
        view: np.ndarray = np.asarray(_Window(self.data, writeable=writeable))
        if self.views is not None:
            self.views.append(weakref.ref(view))
            handed_out[id(view)] = self
            weakref.finalize(view, handed_out.pop, id(view), None).atexit = False
        return view

    def _download(self) -> np.ndarray:
        assert self.data is not None
        assert self.block is not None
        if not self.written:
            policy.report(
                policy.Hazard(
                    "uninitialised",
                    self._name,
                    f"tensor {self._name or '(no name)'} is read to the host, and nothing was ever written into it",
                    expected="data, or an output of a predict",
                )
            )
        if not instrument.sinks:
            return np.array(self.data)
        start = now_ns()
        copy: np.ndarray = np.array(self.data)
        self._tell_copy("download", start, copy.nbytes, "get_data_to_numpy", hidden=False)
        return copy

    def upload(self, array: np.ndarray, cause: str, *, hidden: bool) -> None:
        """Copies an array of the same number of bytes into the device's memory."""
        assert self.data is not None
        start = now_ns()
        np.copyto(_bytes_of(self.data), _bytes_of(np.ascontiguousarray(array)))
        self.written = True
        if instrument.sinks:
            self._tell_copy("upload", start, array.nbytes, cause, hidden=hidden)

    def _tell_copy(
        self, kind: Literal["upload", "download"], start_ns: int, nbytes: int, cause: str, *, hidden: bool
    ) -> None:
        if self.copies is None:
            self.copies = {}
        told = self.copies.get(cause)
        if told is None:
            told = instrument.copy_of(kind, nbytes, name=self._name, cause=cause, hidden=hidden, block=self.block)
            self.copies[cause] = told
        instrument.copied(told, start_ns)

    def free(self) -> None:
        if self.block is not None:
            self.block.free()
            self.sign()


handed_out: dict[int, TensorCore] = {}
"""id of a living view -> the core it shows; entries go with the view."""


def core_of_view(array: np.ndarray) -> TensorCore | None:
    """The model's own output that an array looks at, through any number of slices."""
    if not handed_out:
        return None
    current: Any = array
    while isinstance(current, np.ndarray):
        core = handed_out.get(id(current))
        if core is not None:
            return core
        current = current.base
    return None


def stale_hazard(core: TensorCore, use: str) -> policy.Hazard:
    """The hazard of using a model's own output after that model's next predict."""
    return policy.Hazard(
        "stale_view",
        core.get_tensor_name(),
        f"output {core.get_tensor_name()} was overwritten by the next predict of {core.stale} and {use}",
        expected="a copy taken before the next predict",
        fix="tensor.get_data_to_numpy().copy()",
    )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _element_count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        if size < 0:
            return 0
        count *= size
    return count if count * 8 <= _MAX_INT64 else 0


def supported_dtype(array: np.ndarray) -> DataType:
    """Raises the vendor's TypeError for an element type it does not know."""
    data_type = OF_SCALAR.get(array.dtype.type)
    if data_type is None:
        raise TypeError(f"Unsupported numpy dtype value {array.dtype}")
    return data_type


def _unreadable(array: np.ndarray, name: str) -> bool:
    """Whether the vendor would silently not read this array; the policy has been applied."""
    if not array.dtype.isnative:
        problem = f"a big-endian array ({array.dtype.str}) is given to tensor {name or '(no name)'}"
        fix = "array.astype(array.dtype.newbyteorder('='))"
    elif array.flags.f_contiguous and not array.flags.c_contiguous:
        problem = f"a Fortran-ordered array of shape {array.shape} is given to tensor {name or '(no name)'}"
        fix = "numpy.ascontiguousarray(array)"
    else:
        return False
    hazard = policy.Hazard(
        "ignored_data", name, f"{problem}; the vendor ignores it silently", "C order, native bytes", fix
    )
    policy.report(hazard)
    return True


def device_core(
    dtype: DataType, shape: Sequence[int], device: str, *, name: str = "", form: Format = Format.NCHW
) -> TensorCore | None:
    """A core with its own device memory; None where the vendor would fail silently (policy vendor)."""
    nbytes = _element_count(shape) * item_bytes(dtype)
    try:
        block = card(device).allocate(nbytes, "tensor", name, str(NUMPY_OF.get(dtype, "")), tuple(shape))
    except (DeviceError, DeviceMemoryError):
        if policy.settings.policy == "vendor":
            return None
        raise
    memory = aligned_bytes(nbytes)
    data = memory.view(NUMPY_OF[dtype]).reshape(tuple(shape)) if dtype in NUMPY_OF else None
    if data is not None and policy.settings.policy == "corrupt":
        poison(data)
    return TensorCore(dtype, shape, name=name, form=form, data=data, block=block)


def _parse_device(device: object) -> str:
    check_isinstance("device", device, str)
    assert isinstance(device, str)
    parts = device.split(":")
    if parts[0] != "ascend":
        raise TypeError("now only support ascend device.")
    if len(parts) > 2:
        raise TypeError("device must be 'ascend:index', eg: 'ascend:0'")
    if len(parts) == 1:
        return "ascend:0"
    if not parts[1].isdigit():
        raise TypeError("device id should >= 0.")
    return f"ascend:{int(parts[1])}"


class Tensor:
    """A named array on the host or on a device.

    Args:
        tensor: an ndarray (on the host its memory is shared, on a device it is copied), a Tensor, or None.
        shape: list or tuple of ints; only together with dtype where there is no `tensor`.
        dtype: a DataType.
        device: "ascend" or "ascend:N"; None is the host.
    """

    __slots__ = ("__weakref__", "_tensor")
    _tensor: TensorCore | None

    def __init__(
        self,
        tensor: Tensor | TensorCore | np.ndarray | None = None,
        shape: list[int] | tuple[int, ...] | None = None,
        dtype: DataType | None = None,
        device: str | None = None,
    ) -> None:
        if tensor is not None and not isinstance(tensor, (Tensor, np.ndarray, TensorCore)):
            raise TypeError(f"tensor must be MindSpore Lite's Tensor._tensor or numpy ndarray, but got {type(tensor)}.")
        if shape is not None:
            if not isinstance(shape, (list, tuple)):
                raise TypeError(f"shape must be list or tuple, but got {type(shape)}.")
            check_elements("shape", shape, int)
        if dtype is not None:
            check_isinstance("dtype", dtype, DataType)
        place = None if device is None else _parse_device(device)
        if isinstance(tensor, np.ndarray):
            self._tensor = _from_array(tensor, shape, dtype, place)
        elif isinstance(tensor, Tensor):
            self._tensor = _from_tensor(tensor, shape, dtype, place)
        elif isinstance(tensor, TensorCore):
            self._tensor = tensor
        else:
            self._tensor = _from_shape(shape, dtype, place)

    @classmethod
    def _around(cls, core: TensorCore | None) -> Tensor:
        wrapper = cls.__new__(cls)
        wrapper._tensor = core
        return wrapper

    @classmethod
    def _around_each(cls, cores: Sequence[TensorCore]) -> list[Tensor]:
        """`_around` each of them, at every step of a program: a graph with pools has dozens."""
        new, wrappers = cls.__new__, []
        for core in cores:
            wrapper = new(cls)
            wrapper._tensor = core
            wrappers.append(wrapper)
        return wrappers

    def __str__(self) -> str:
        return (
            f"name: {self.name},\n"
            f"dtype: {self.dtype},\n"
            f"shape: {self.shape},\n"
            f"format: {self.format},\n"
            f"element_num: {self.element_num},\n"
            f"data_size: {self.data_size}.\n"
            f"device: {self.device}."
        )

    # Where the vendor failed silently `_tensor` is None, and the first use is an AttributeError, as with the vendor.

    @property
    def name(self) -> str:
        return self._tensor.get_tensor_name()  # type: ignore[union-attr]

    @name.setter
    def name(self, name: str) -> None:
        check_isinstance("name", name, str)
        self._tensor.set_tensor_name(name)  # type: ignore[union-attr]

    @property
    def dtype(self) -> DataType:
        return self._tensor.get_data_type()  # type: ignore[union-attr]

    @dtype.setter
    def dtype(self, dtype: DataType) -> None:
        check_isinstance("dtype", dtype, DataType)
        self._tensor.set_data_type(dtype)  # type: ignore[union-attr]

    @property
    def shape(self) -> list[int]:
        return self._tensor.get_shape()  # type: ignore[union-attr]

    @shape.setter
    def shape(self, shape: list[int] | tuple[int, ...]) -> None:
        if not isinstance(shape, (list, tuple)):
            raise TypeError(f"shape must be list or tuple, but got {type(shape)}.")
        check_elements("shape", shape, int)
        self._tensor.set_shape(list(shape))  # type: ignore[union-attr]

    @property
    def format(self) -> Format:
        return self._tensor.get_format()  # type: ignore[union-attr]

    @format.setter
    def format(self, tensor_format: Format) -> None:
        check_isinstance("format", tensor_format, Format)
        self._tensor.set_format(tensor_format)  # type: ignore[union-attr]

    @property
    def element_num(self) -> int:
        return self._tensor.get_element_num()  # type: ignore[union-attr]

    @property
    def data_size(self) -> int:
        """Bytes."""
        return self._tensor.get_data_size()  # type: ignore[union-attr]

    @property
    def device(self) -> str:
        return self._tensor.get_device()  # type: ignore[union-attr]

    def get_data_to_numpy(self) -> np.ndarray:
        """On the host a writeable view of the tensor's memory; from a device a fresh copy."""
        return self._tensor.get_data_to_numpy()  # type: ignore[union-attr]

    def set_data_from_numpy(self, numpy_obj: np.ndarray) -> None:
        """Lets a host tensor refer to the array (no copy), or copies the array into a device tensor.

        Raises:
            TypeError: not an ndarray, or of an element type the vendor does not know.
            RuntimeError: another element type or number of bytes than the tensor's.
            HazardError: what the vendor takes in silence: Fortran order, big-endian, another shape of the same size.
        """
        if not isinstance(numpy_obj, np.ndarray):
            raise TypeError(f"numpy_obj must be numpy.ndarray, but got {type(numpy_obj)}.")
        data_type = supported_dtype(numpy_obj)
        core = self._tensor
        if core is None:
            raise AttributeError("'NoneType' object has no attribute 'get_data_type'")
        if data_type is not core.get_data_type():
            raise RuntimeError(
                f"data type not equal! Numpy type: {numpy_obj.dtype.type}, Tensor type: {core.get_data_type()}"
            )
        if numpy_obj.nbytes != core.get_data_size():
            raise RuntimeError(
                f"data size not equal! Numpy size: {numpy_obj.nbytes}, Tensor size: {core.get_data_size()}"
            )
        if _unreadable(numpy_obj, core._name):
            return
        shape = core._shape
        if numpy_obj.shape != shape:
            policy.report(
                policy.Hazard(
                    "wrong_shape",
                    core._name,
                    f"an array of shape {list(numpy_obj.shape)} is given to tensor {core._name or '(no name)'} of "
                    f"shape {list(shape)}; the vendor compares only the bytes",
                    expected=f"an array of shape {list(shape)}",
                    fix="reshape the array",
                )
            )
        if core.block is not None:
            core.check_alive("given data")
            core.upload(numpy_obj, "set_data_from_numpy", hidden=False)
            return
        array = numpy_obj if numpy_obj.flags.c_contiguous else np.ascontiguousarray(numpy_obj)
        if array.shape != shape:
            array = np.asarray(array).reshape(shape)
        self._tensor = TensorCore(core._dtype, shape, name=core._name, data=array, from_numpy=True)


def _from_array(
    array: np.ndarray, shape: Sequence[int] | None, dtype: DataType | None, device: str | None
) -> TensorCore | None:
    data_type = supported_dtype(array)
    if shape is not None and tuple(shape) != array.shape:
        raise TypeError(
            f"user set shape is not equal numpy shape, user shape: {list(shape)}, numpy shape is: {array.shape}."
        )
    if dtype is not None and dtype is not data_type:
        raise TypeError(f"user set dtype is not equal numpy dtype, user dtype: {dtype}, numpy dtype is: {array.dtype}.")
    if _unreadable(array, ""):
        return None
    if device is None:
        data = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        return TensorCore(data_type, array.shape, data=data, from_numpy=True)
    core = device_core(data_type, array.shape, device)
    if core is not None:
        core.upload(array, "Tensor(array, device=)", hidden=False)
    return core


def _from_tensor(
    tensor: Tensor, shape: Sequence[int] | None, dtype: DataType | None, device: str | None
) -> TensorCore | None:
    source = tensor._tensor
    if source is None:
        return None
    if shape is not None and tuple(shape) != source._shape:
        raise TypeError(
            f"user set shape is not equal numpy shape, user's shape: {list(shape)}, "
            f"tensor shape is: {source.get_shape()}."
        )
    if dtype is not None and dtype is not source._dtype:
        raise TypeError(
            f"user set dtype is not equal tensor dtype, user's dtype: {dtype}, tensor dtype is: {source._dtype}."
        )
    if source.block is None and device is None:
        same = TensorCore(
            source._dtype, source._shape, name=source._name, data=source.data, from_numpy=source.data is not None
        )
        same.views = source.views
        return same
    source.check_alive("wrapped in a new Tensor")
    array = source.data
    start = now_ns()
    if source.block is not None and array is not None:
        array = array.copy()  # the vendor takes a device tensor's data through the host, whatever the destination
        if instrument.sinks:
            source._tell_copy("download", start, array.nbytes, "Tensor(tensor)", hidden=True)
    if device is None:
        return TensorCore(source._dtype, source._shape, name=source._name, data=array, from_numpy=True)
    core = device_core(source._dtype, source._shape, device, name=source._name)
    if core is not None and array is not None and (source.block is None or source.written):
        core.upload(array, "Tensor(tensor, device=)", hidden=source.block is not None)
    return core


def _from_shape(shape: Sequence[int] | None, dtype: DataType | None, device: str | None) -> TensorCore | None:
    if shape is None or dtype is None:
        given = [name for name, value in (("shape", shape), ("dtype", dtype), ("device", device)) if value is not None]
        if given:
            policy.report(
                policy.Hazard(
                    "ignored_argument",
                    "",
                    f"Tensor({'=, '.join(given)}=): the vendor ignores these without both shape and dtype",
                    expected="shape and dtype together",
                    fix="give both",
                )
            )
        return TensorCore()
    if any(size < 0 for size in shape):
        policy.report(
            policy.Hazard(
                "ignored_argument",
                "",
                f"Tensor(shape={list(shape)}): with a negative size the vendor makes a tensor that fails when used",
                expected="sizes of at least 0",
                fix="set .shape afterwards, or wait for the size",
            )
        )
        return None
    shape = tuple(int(size) for size in shape)
    return TensorCore(dtype, shape) if device is None else device_core(dtype, shape, device)


class TensorMeta:
    """What a model says of one of its outputs."""

    def __init__(self, name: str, dtype: DataType, shape: Sequence[int], form: Format = Format.NCHW) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = list(shape)
        self.format = form

    @property
    def element_num(self) -> int:
        return _element_count(self.shape)

    @property
    def data_size(self) -> int:
        """Bytes."""
        return self.element_num * item_bytes(self.dtype)

    def __str__(self) -> str:
        return (
            f"name: {self.name},\n"
            f"dtype: {self.dtype},\n"
            f"shape: {self.shape},\n"
            f"format: {self.format},\n"
            f"element_num: {self.element_num},\n"
            f"data_size: {self.data_size}."
        )
