"""Makes ONNX graphs node by node, without tracing: names, constants, references into the weight file.

Knows the file format; nothing of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qwen_npu.contract import BUCKETS_KEY, IN_PLACE_KEY, OP_DOMAIN, GraphContract, TensorContract
from qwen_npu.graphs.weights import WEIGHT_FILE, WeightTable

OPSET = 17
"""The last one before LayerNormalization and friends change; every target of the project reads it."""
_IR_VERSION = 8

_ELEMENT = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
}


class Nodes:
    """Appends nodes to a graph or function. Every method gives the names of the values it made."""

    def __init__(self, nodes: Any, prefix: str = "") -> None:
        self._nodes = nodes
        self._prefix = prefix
        self._count = 0

    def op(self, kind: str, inputs: Sequence[str], *, out: str = "", domain: str = "", **attributes: Any) -> str:
        """One node with one output, called `out` if given."""
        return self.ops(kind, inputs, 1, outs=[out] if out else None, domain=domain, **attributes)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: int,
        *,
        outs: Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """One node with several outputs."""
        self._count += 1
        label = f"{self._prefix}{kind}_{self._count}"
        names = list(outs) if outs else [label if outputs == 1 else f"{label}.{i}" for i in range(outputs)]
        node = self._nodes.add()
        node.op_type = kind
        node.domain = domain
        node.name = label
        node.input.extend(inputs)
        node.output.extend(names)
        for key, value in attributes.items():
            _set_attribute(node.attribute.add(), key, value)
        return names

    def const(self, array: NDArray[Any]) -> str:
        """A small constant. Here a Constant node; a graph makes it an initializer."""
        return self.op("Constant", [], value=tensor_proto(array))

    def ints(self, *values: int) -> str:
        """A vector of int64: shapes, axes, sizes."""
        return self.const(np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A scalar of f32."""
        return self.const(np.array(value, np.float32))

    def cast(self, value: str, dtype: str, *, out: str = "") -> str:
        return self.op("Cast", [value], out=out, to=int(_ELEMENT[dtype]))

    def reshape(self, value: str, *shape: int, out: str = "") -> str:
        return self.op("Reshape", [value, self.ints(*shape)], out=out)

    def transpose(self, value: str, *order: int, out: str = "") -> str:
        return self.op("Transpose", [value], out=out, perm=order)

    def split(self, value: str, sizes: Sequence[int], axis: int) -> list[str]:
        return self.ops("Split", [value, self.ints(*sizes)], len(sizes), axis=axis)

    def concat(self, values: Sequence[str], axis: int, *, out: str = "") -> str:
        if len(values) == 1 and not out:
            return values[0]
        return self.op("Concat", values, out=out, axis=axis)

    def add(self, a: str, b: str, *, out: str = "") -> str:
        return self.op("Add", [a, b], out=out)

    def mul(self, a: str, b: str, *, out: str = "") -> str:
        return self.op("Mul", [a, b], out=out)

    def sub(self, a: str, b: str) -> str:
        return self.op("Sub", [a, b])

    def matmul(self, a: str, b: str) -> str:
        return self.op("MatMul", [a, b])


class Graph(Nodes):
    """One graph with the inputs and outputs of its contract. Nodes that make an output are given its name (`out=`)."""

    def __init__(self, contract: GraphContract, weights: WeightTable) -> None:
        self.contract = contract
        self._model = onnx.ModelProto(ir_version=_IR_VERSION, producer_name="qwen-npu")
        self._model.graph.name = contract.stage
        super().__init__(self._model.graph.node)
        self._weights = weights
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._placed: set[str] = set()
        self._dtypes = {tensor.name: tensor.dtype for tensor in (*contract.inputs, *contract.outputs)}
        for tensor in contract.inputs:
            self._model.graph.input.append(value_info(tensor))
        for tensor in contract.outputs:
            self._model.graph.output.append(value_info(tensor))

    def scope(self, prefix: str) -> None:
        """Nodes made from now on have names that begin with `prefix`."""
        self._prefix = prefix

    def const(self, array: NDArray[Any]) -> str:
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = f"const_{len(self._constants)}"
            proto = tensor_proto(array)
            proto.name = name
            self._model.graph.initializer.append(proto)
        return self._constants[key]

    def weight(self, name: str) -> str:
        """A piece of the weight file, as an initializer that refers to it."""
        if name not in self._placed:
            self._placed.add(name)
            piece = self._weights[name]
            proto = self._model.graph.initializer.add()
            proto.name = name
            proto.data_type = onnx.TensorProto.FLOAT
            proto.dims.extend(piece.shape)
            proto.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", WEIGHT_FILE), ("offset", piece.offset), ("length", piece.nbytes)):
                entry = proto.external_data.add()
                entry.key, entry.value = key, str(value)
        return name

    def wide(self, value: str, source: str = "") -> str:
        """`value` as f32; it is the graph input of that name, or has the dtype of graph input `source`."""
        return value if self._dtypes[source or value] == "float32" else self.cast(value, "float32")

    def finish_as(self, out: str, kind: str, inputs: Sequence[str], **attributes: Any) -> None:
        """The last node in f32 before output `out`; a Cast follows where the contract wants another dtype."""
        if self._dtypes[out] == "float32":
            self.op(kind, inputs, out=out, **attributes)
        else:
            self.cast(self.op(kind, inputs, **attributes), self._dtypes[out], out=out)

    def add_function(self, function: Any) -> None:
        self._model.functions.append(function)

    def serialize(self) -> bytes:
        """The file's content; deterministic."""
        model = self._model
        model.opset_import.append(onnx.OperatorSetIdProto(domain="", version=OPSET))
        if any(node.domain == OP_DOMAIN for node in model.graph.node):
            model.opset_import.append(onnx.OperatorSetIdProto(domain=OP_DOMAIN, version=1))
        for key, declared in ((IN_PLACE_KEY, self.contract.in_place), (BUCKETS_KEY, self.contract.buckets)):
            if declared:
                entry = model.metadata_props.add()
                entry.key, entry.value = key, json.dumps(dict(declared), sort_keys=True)
        return bytes(model.SerializeToString(deterministic=True))


def tensor_proto(array: NDArray[Any]) -> Any:
    """A TensorProto that carries its data."""
    proto = onnx.TensorProto()
    proto.data_type = _ELEMENT[str(array.dtype)]
    proto.dims.extend(array.shape)
    proto.raw_data = array.tobytes()
    return proto


def value_type(dtype: str, shape: Sequence[int | str] | None = None) -> Any:
    """A tensor's TypeProto; without a shape its rank is left open."""
    proto = onnx.TypeProto()
    proto.tensor_type.elem_type = _ELEMENT[dtype]
    if shape is not None:
        proto.tensor_type.shape.SetInParent()
        for dim in shape:
            if isinstance(dim, int):
                proto.tensor_type.shape.dim.add().dim_value = dim
            else:
                proto.tensor_type.shape.dim.add().dim_param = dim
    return proto


def value_info(tensor: TensorContract) -> Any:
    return onnx.ValueInfoProto(name=tensor.name, type=value_type(tensor.dtype, tensor.shape))


def _set_attribute(attribute: Any, key: str, value: Any) -> None:
    kinds = onnx.AttributeProto
    attribute.name = key
    if isinstance(value, int):
        attribute.type, attribute.i = kinds.INT, value
    elif isinstance(value, float):
        attribute.type, attribute.f = kinds.FLOAT, value
    elif isinstance(value, str):
        attribute.type, attribute.s = kinds.STRING, value.encode()
    elif isinstance(value, onnx.TensorProto):
        attribute.type = kinds.TENSOR
        attribute.t.CopyFrom(value)
    elif isinstance(value, onnx.GraphProto):
        attribute.type = kinds.GRAPH
        attribute.g.CopyFrom(value)
    elif isinstance(value, Mapping):  # {"ref": name}: the attribute of the function
        attribute.type, attribute.ref_attr_name = kinds.FLOAT, value["ref"]
    elif all(isinstance(item, str) for item in value):  # an empty list is one of names
        attribute.type = kinds.STRINGS
        attribute.strings.extend(item.encode() for item in value)
    else:
        attribute.type = kinds.INTS
        attribute.ints.extend(value)
