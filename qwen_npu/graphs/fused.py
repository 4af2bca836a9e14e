"""Graphs for the Ascend converter: `Custom` nodes in place of our own nodes and of the fixed cache's attention.

What the converter reads of such a node, and the attributes that the deployed graphs carry, are in `KINDS`; `check`
reads a finished graph back and counts its nodes. A node that is wrong here fails only on the box, minutes later and
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from qwen_npu.contract import ATTENTION_MASK, OP_DOMAIN, PAST, PRESENT, half
from qwen_npu.errors import ConversionError
from qwen_npu.graphs.builder import Graph, Nodes, tensor_proto
from qwen_npu.graphs.nodes import CHUNK, CHUNK_INPUTS, RECURRENT, RECURRENT_INPUTS
from qwen_npu.graphs.text import newest_position
from qwen_npu.spec import ModelSpec, Numerics

CUSTOM = "Custom"
SCATTER = "Scatter"
ATTENTION = "IncreFlashAttention"
MINDSPORE_FLOAT16 = 42
"""MindSpore's TypeId of float16."""


@dataclass(frozen=True)
class Kind:
    """What a `Custom` node of one `type` looks like.

    Attributes:
        inputs: all inputs that the op has, in order; `optional` those that may be absent.
        attributes: further attributes, with the ONNX kind of each; `fixed` are those with one right value.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    RECURRENT: Kind(
        RECURRENT_INPUTS,
        ("out", "state"),  # `state` in and out: one buffer, slots that are not written stay as they are
        ("g", "gk", "num_accepted_tokens"),
        {"scale_value": "FLOAT", "outputs_shape": "STRING", "output_types": "INTS", "dtype": "INT"},
        {"output_types": (MINDSPORE_FLOAT16,) * 2, "dtype": int(onnx.TensorProto.FLOAT16)},
    ),
    CHUNK: Kind(
        CHUNK_INPUTS,
        ("out", "final_state"),
        ("g",),
        {"scale_value": "FLOAT", "dtype": "INT"},
        {"dtype": int(onnx.TensorProto.FLOAT16)},
    ),
    SCATTER: Kind(
        ("var", "indices", "updates"),
        ("var",),  # the same name: in place
        (),
        {"reduce": "STRING", "axis": "INT"},
        {"reduce": "update", "axis": 2},
    ),
    ATTENTION: Kind(
        ("query", "key", "value", "atten_mask"),
        ("attention_out",),
        ("atten_mask",),
        {
            "num_heads": "INT",
            "num_key_value_heads": "INT",
            "scale_value": "FLOAT",
            "input_layout": "STRING",
            "block_size": "INT",
            "inner_precise": "INT",
        },
        {"input_layout": "BNSD", "block_size": 0, "inner_precise": 1},
    ),
}


def custom(
    g: Nodes, kind: str, inputs: Sequence[str], *, outs: Sequence[str] | None = None, **attributes: Any
) -> list[str]:
    """One `Custom` node. An absent optional input is ""; the node then has a gap in `input_index`."""
    form = KINDS[kind]
    index = [place for place, name in enumerate(inputs) if name]
    return g.ops(
        CUSTOM,
        [inputs[place] for place in index],
        len(form.outputs),
        outs=outs,
        type=kind,
        input_names=list(form.inputs),
        optional_input_names=list(form.optional),
        output_names=list(form.outputs),
        output_num=len(form.outputs),
        input_index=index,
        **attributes,
        **form.fixed,
    )


def fuse(content: bytes, spec: ModelSpec, *, tokens: int = 1, slots: int = 1) -> bytes:
    """Our own nodes of a graph of numerics "device" as `Custom` nodes, f16 at their borders.

    Args:
        tokens: T of a RecurrentGatedDeltaRule node; slots: of its state. They go into `outputs_shape`, which the
            converter needs as it cannot infer them.
    """
    model = onnx.load_model_from_string(content)
    return bytes(_Fusing(model, spec, tokens, slots).run().SerializeToString(deterministic=True))


class _Fusing(Nodes):
    def __init__(self, model: onnx.ModelProto, spec: ModelSpec, tokens: int, slots: int) -> None:
        self._model, self._spec = model, spec
        self._tokens, self._slots = tokens, slots
        self._new = onnx.GraphProto()
        super().__init__(self._new.node, "fused/")
        self._shapes = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
        self._constants = 0

    def const(self, array: Any) -> str:
        self._constants += 1
        proto = tensor_proto(array)
        proto.name = f"fused/const_{self._constants}"
        self._model.graph.initializer.append(proto)
        return str(proto.name)

    def run(self) -> onnx.ModelProto:
        graph = self._model.graph
        for node in list(graph.node):
            if node.domain != OP_DOMAIN:
                self._new.node.append(node)
            elif node.op_type == RECURRENT:
                self._recurrent(node)
            else:
                self._chunk(node)
        del graph.node[:]
        graph.node.extend(self._new.node)
        del self._model.functions[:]
        kept = [entry for entry in self._model.opset_import if entry.domain != OP_DOMAIN]
        del self._model.opset_import[:]
        self._model.opset_import.extend(kept)
        return self._model

    def _recurrent(self, node: Any) -> None:
        query, key, value, beta, state, lengths, slots, g, gk, accepted = node.input
        if not accepted:  # plain decode: one sequence, its one slot
            accepted = self.const(np.ones(1, np.int32))
        nv, dv, dk = self._spec.nv, self._spec.dv, self._spec.dk
        shapes = [3, self._tokens, nv, dv, 4, self._slots, nv, dv, dk]  # rank and sizes of each output
        inputs = [*map(self._half, (query, key, value, beta)), state, lengths, slots, g, gk, accepted]
        out = self._out(node)
        custom(
            self,
            RECURRENT,
            inputs,
            outs=[out, node.output[1]],
            scale_value=_scale(node),
            outputs_shape=",".join(map(str, shapes)),
        )
        self._widen(out, node)

    def _chunk(self, node: Any) -> None:
        query, key, value, beta, state, lengths, g = node.input
        inputs = [*map(self._half, (query, key, value, beta)), state, self.cast(lengths, "int32"), g]
        out = self._out(node)
        custom(self, CHUNK, inputs, outs=[out, node.output[1]], scale_value=_scale(node))
        self._widen(out, node)

    def _half(self, value: str) -> str:
        return value if self._is_half(value) else self.cast(value, "float16")

    def _is_half(self, value: str) -> bool:
        return value in self._shapes and self._shapes[value].elem_type == onnx.TensorProto.FLOAT16

    def _out(self, node: Any) -> str:
        name: str = node.output[0]
        return name if self._is_half(name) else f"{name}.half"

    def _widen(self, out: str, node: Any) -> None:
        if out != node.output[0]:
            self.cast(out, "float32", out=node.output[0])


def _scale(node: Any) -> float:
    return float(next(item.f for item in node.attribute if item.name == "scale_value"))


class FusedCache:
    """The fixed KV of a decode graph through `Scatter` and `IncreFlashAttention` nodes, f16 as it lies."""

    def __init__(self, g: Graph, spec: ModelSpec, capacity: int) -> None:
        self._g, self._spec, self._capacity = g, spec, capacity
        rows = 2 * len(spec.full_layers)
        self._position = newest_position(g)
        hidden = g.op("Equal", [ATTENTION_MASK, g.const(np.array(0, np.int64))])  # True: not to be seen
        self._hidden = g.reshape(hidden, 1, 1, 1, capacity)
        self._past = g.split(g.op("Squeeze", [PAST["kv"], g.ints(1)]), (1,) * rows, axis=0)
        self._present: list[str] = []

    def attend(self, query: str, key: str, value: str) -> str:
        g, heads, dim = self._g, self._spec.heads, self._spec.head_dim
        held = [self._written(key), self._written(value)]
        query = g.cast(g.reshape(query, 1, heads, 1, dim), "float16")
        inputs = [query, *map(self._by_head, held), self._hidden]
        # the scale of the scores is in the norm of the queries
        (out,) = custom(g, ATTENTION, inputs, scale_value=1.0, num_heads=heads, num_key_value_heads=heads)
        return g.cast(out, "float32")

    def write(self, numerics: Numerics) -> None:
        assert half(numerics) == "float16"
        g = self._g
        g.op("Unsqueeze", [g.concat(self._present, axis=0), g.ints(1)], out=PRESENT["kv"])

    def _written(self, new: str) -> str:
        """[1, KV, capacity, D] with the new token's row in its place."""
        g, spec = self._g, self._spec
        new = g.cast(g.reshape(new, 1, spec.kv_heads, 1, spec.head_dim), "float16")
        (held,) = custom(g, SCATTER, [self._past[len(self._present)], self._position, new])
        self._present.append(held)
        return held

    def _by_head(self, held: str) -> str:
        """Every attention head its own copy of its KV head: the 310P's kernel wants as many of one as of the other."""
        g, spec = self._g, self._spec
        group = spec.heads // spec.kv_heads
        if group == 1:
            return held
        apart = g.reshape(held, spec.kv_heads, 1, self._capacity, spec.head_dim)
        size = g.ints(spec.kv_heads, group, self._capacity, spec.head_dim)
        return g.reshape(g.op("Expand", [apart, size]), 1, spec.heads, self._capacity, spec.head_dim)


def check(content: bytes) -> Counter[str]:
    """Reads a graph back and counts its `Custom` nodes by type.

    Raises:
        ConversionError: a node of ours is left, a function is, or a `Custom` node is not as its kind demands.
    """
    model = onnx.load_model_from_string(content)
    counts: Counter[str] = Counter()
    if model.functions:
        raise ConversionError(
            f"the graph holds functions: {[function.name for function in model.functions]}",
            expected="none: the converter refuses them",
        )
    for node in model.graph.node:
        if node.domain:
            raise ConversionError(f"node {node.name} is {node.domain}::{node.op_type}", expected="Custom or plain ops")
        if node.op_type == CUSTOM:
            counts[_check_node(node)] += 1
    return counts


def _check_node(node: Any) -> str:
    def refuse(problem: str, expected: Any) -> ConversionError:
        return ConversionError(f"node {node.name}: {problem}", expected=str(expected), fix="build the graph again")

    held = {item.name: item for item in node.attribute}
    values = {item.name: _value(item) for item in node.attribute}
    name = str(values.get("type"))
    if name not in KINDS:
        raise refuse(f"type is {name!r}", f"one of {', '.join(KINDS)}")
    kind = KINDS[name]
    wanted: dict[str, Any] = {
        "input_names": kind.inputs,
        "optional_input_names": kind.optional,
        "output_names": kind.outputs,
        "output_num": len(kind.outputs),
        **kind.fixed,
    }
    for key, value in wanted.items():
        if values.get(key) != value:
            raise refuse(f"{key} is {values.get(key)!r}", value)
    for key, form in kind.attributes.items():
        if key not in held or onnx.AttributeProto.AttributeType.Name(held[key].type) != form:
            raise refuse(f"{key} is {values.get(key)!r}", f"an attribute of kind {form}")
    index = values.get("input_index", ())
    if len(index) != len(node.input) or list(index) != sorted(set(index)) or not all(node.input):
        raise refuse(f"input_index is {index} for {len(node.input)} inputs", "ascending, one for each input")
    absent = set(kind.inputs) - {kind.inputs[place] for place in index if place < len(kind.inputs)}
    if not absent <= set(kind.optional):
        raise refuse(f"inputs {sorted(absent - set(kind.optional))} are absent", "all but optional ones")
    if len(node.output) != len(kind.outputs):
        raise refuse(f"it has {len(node.output)} outputs", len(kind.outputs))
    return name


def _value(attribute: Any) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, int | float):
        return value
    return tuple(item.decode() if isinstance(item, bytes) else item for item in value)
