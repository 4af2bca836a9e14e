"""Lowers a graph of a bundle to plain operators, for runtimes that take neither our nodes nor model-local functions:
the vendor's converter, and an unfused graph on the device.

What is rewritten, and why (each was seen to fail, or to be wrong, on MindSpore Lite 2.0.0):

* `RecurrentGatedDeltaRule` becomes one step; `ChunkGatedDeltaRule` becomes chunks of a bucket that is known
  (unfused.py), or one chunk over a length known when the graph runs, with the inverse of its triangular system by block
  doubling (a power series is wrong by 1e7 where keys are alike).
* Cos(x) becomes Sin(x + pi/2): the runtime's Cos is off by up to 1.8e-3.
* The valid part of a fixed KV cache is not sliced, as no size may depend on data; the scores behind it are masked.
* A Cast to bool becomes a comparison with 0: there is no kernel for it.
* Gemm with a bias that is no vector (a residual, positions) becomes MatMul and Add.
* `lower` puts the weights into the file; `lower_model` leaves them where they are.

Graphs must hold one sequence, and their nodes of the recurrence an f32 state; f16 inputs are only for the device.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qwen_npu.contract import ATTENTION_MASK, INPUT_IDS, OP_DOMAIN, PAST
from qwen_npu.errors import ConversionError
from qwen_npu.graphs.builder import Nodes, tensor_proto
from qwen_npu.graphs.layers import HIDDEN_SCORE
from qwen_npu.graphs.nodes import CHUNK, RECURRENT
from qwen_npu.graphs.unfused import chunked, triangles
from qwen_npu.spec import ModelSpec

LONGEST_CHUNK_TOKENS = 128
"""A longer bucket needs several chunks, which this lowering does not make."""


def lower(path: Path, spec: ModelSpec, *, longest_tokens: int = LONGEST_CHUNK_TOKENS) -> onnx.ModelProto:
    """The graph of an ONNX file of a bundle in plain operators, weights inside.

    Args:
        path: an f32 graph: vision, prefill or decode.
        longest_tokens: the longest bucket that prefill will be given, in tokens; a longer one gives wrong states.

    Raises:
        ConversionError: the graph has a node that has no lowering (verify, admit), or is not f32.
    """
    model = onnx.load(str(path))
    if any(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16 for value in model.graph.input):
        raise ConversionError(
            f"the {model.graph.name} graph has f16 inputs", expected="a graph of numerics 'f32'", fix="numerics='f32'"
        )
    return _Lowering(model, spec, longest_tokens, None).run()


def lower_model(content: bytes, spec: ModelSpec, *, tokens: int | None = None) -> bytes:
    """The same for the content of an ONNX file, whose weights stay in the file they lie in.

    Args:
        tokens: for prefill, the one length it takes, in any number of chunks; the graph's sizes are fixed to it.
    """
    model = onnx.load_model_from_string(content)
    return bytes(_Lowering(model, spec, LONGEST_CHUNK_TOKENS, tokens).run().SerializeToString(deterministic=True))


class _Lowering(Nodes):
    def __init__(self, model: onnx.ModelProto, spec: ModelSpec, longest_tokens: int, tokens: int | None) -> None:
        self._model = model
        self._spec = spec
        self._longest_tokens = longest_tokens
        self._tokens = tokens
        self._old = list(model.graph.node)
        self._new = onnx.GraphProto()
        super().__init__(self._new.node, "plain/")
        self._constants = {tensor.name for tensor in model.graph.initializer}
        self._vectors = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 1}
        self._shared: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._masks: tuple[str, ...] = ()
        self._past_bias = ""

    def const(self, array: Any) -> str:
        key = (str(np.asarray(array).dtype), np.shape(array), np.asarray(array).tobytes())
        if key in self._shared:
            return self._shared[key]
        name = self._shared[key] = f"plain/const_{len(self._constants)}"
        proto = tensor_proto(np.asarray(array))
        proto.name = name
        self._model.graph.initializer.append(proto)
        self._constants.add(name)
        return name

    def run(self) -> onnx.ModelProto:
        graph = self._model.graph
        if self._tokens is not None:
            self._fix_length(self._tokens)
        for node in self._old:
            if node.domain == OP_DOMAIN:
                self._lower_op(node)
            elif node.op_type == "Cos":
                turned = self.add(node.input[0], self.const(np.float32(math.pi / 2)))
                self.op("Sin", [turned], out=node.output[0])
            elif node.op_type == "Cast" and _attribute(node, "to") == onnx.TensorProto.BOOL:
                self.op("Greater", [self.cast(node.input[0], "float32"), self.number(0.0)], out=node.output[0])
            elif node.op_type == "Gemm" and len(node.input) == 3 and node.input[2] not in self._vectors:
                self.add(self.matmul(node.input[0], node.input[1]), node.input[2], out=node.output[0])
            elif node.op_type == "Slice" and node.input[0] == PAST["kv"] and node.input[2] not in self._constants:
                self._past_bias = self._bias_of_the_past()
                self._alias(node)
            elif self._past_bias and node.op_type == "Concat" and _attribute(node, "axis") == 3 and self._scores(node):
                joined = self.concat(list(node.input), axis=3)
                self.add(joined, self._past_bias, out=node.output[0])
            else:
                self._new.node.append(node)
        del graph.node[:]
        graph.node.extend(self._new.node)
        del self._model.functions[:]
        kept = [entry for entry in self._model.opset_import if entry.domain != OP_DOMAIN]
        del self._model.opset_import[:]
        self._model.opset_import.extend(kept)
        return self._model

    def _lower_op(self, node: Any) -> None:
        scale = next(item.f for item in node.attribute if item.name == "scale_value")
        if node.op_type == RECURRENT and not any(node.input[8:]):
            self._one_step(node, scale)
        elif node.op_type == CHUNK and self._tokens is not None:
            query, key, value, beta, state, _, g = node.input
            chunked(self, self._spec, (query, key, value, beta, state, g), node.output, scale, self._tokens)
        elif node.op_type == CHUNK:
            self._one_chunk(node, scale)
        else:
            raise ConversionError(
                f"node {node.name} ({node.op_type} on a pool of slots) has no plain form",
                expected="a vision, prefill or decode graph",
            )

    def _one_step(self, node: Any, scale: float) -> None:
        """out and state of one token, state [1,NV,DV,DK]; value heads stand as [NK, R]."""
        spec, (query, key, value, beta, state, _, _, g) = self._spec, node.input[:8]
        nk, ratio = spec.nk, spec.nv // spec.nk
        query = self.reshape(self.mul(query, self.number(scale)), nk, 1, spec.dk, 1)
        column = self.reshape(key, nk, 1, spec.dk, 1)
        row = self.reshape(key, nk, 1, 1, spec.dk)
        decay = self.reshape(self.op("Exp", [g]), nk, ratio, 1, 1)
        kept = self.mul(self.reshape(state, nk, ratio, spec.dv, spec.dk), decay)
        answer = self.matmul(kept, column)
        error = self.sub(self.reshape(value, nk, ratio, spec.dv, 1), answer)
        change = self.mul(error, self.reshape(beta, nk, ratio, 1, 1))
        after = self.add(kept, self.mul(change, row))
        self.reshape(self.matmul(after, query), 1, spec.nv, spec.dv, out=node.output[0])
        self.reshape(after, 1, spec.nv, spec.dv, spec.dk, out=node.output[1])

    def _one_chunk(self, node: Any, scale: float) -> None:
        """All T tokens as one chunk: c is the running sum of g, M the inverse of I + A (see the module's text)."""
        spec, (query, key, value, beta, state, _, g) = self._spec, node.input
        nk, ratio, dk, dv = spec.nk, spec.nv // spec.nk, spec.dk, spec.dv
        lower, strict, identity, *levels = self._triangles(query)
        query = self.mul(self.transpose(self.reshape(query, -1, nk, 1, dk), 1, 2, 0, 3), self.number(scale))
        key = self.transpose(self.reshape(key, -1, nk, 1, dk), 1, 2, 0, 3)
        key_turned = self.transpose(key, 0, 1, 3, 2)
        value = self.transpose(self.reshape(value, -1, nk, ratio, dv), 1, 2, 0, 3)
        beta = self.transpose(self.reshape(beta, -1, nk, ratio, 1), 1, 2, 0, 3)
        g = self.transpose(self.reshape(g, -1, nk, ratio, 1), 1, 2, 0, 3)
        c = self.matmul(lower, g)
        # masked before the exponential, which would overflow above the diagonal
        distance = self.mul(self.sub(c, self.transpose(c, 0, 1, 3, 2)), lower)
        decay = self.mul(self.op("Exp", [distance]), lower)
        a = self.mul(self.mul(self.mul(self.matmul(key, key_turned), decay), beta), strict)
        m = self.sub(identity, self.mul(a, levels[0]))
        for level in levels[1:]:
            m = self.sub(m, self.matmul(self.matmul(m, self.mul(a, level)), m))
        start = self.reshape(state, nk, ratio, dv, dk)
        start_turned = self.transpose(start, 0, 1, 3, 2)
        grown = self.op("Exp", [c])
        known = self.mul(self.matmul(key, start_turned), grown)
        u = self.matmul(m, self.mul(self.sub(value, known), beta))
        seen = self.matmul(self.mul(self.matmul(query, key_turned), decay), u)
        out = self.add(seen, self.mul(self.matmul(query, start_turned), grown))
        self.reshape(self.transpose(out, 2, 0, 1, 3), -1, spec.nv, dv, out=node.output[0])
        total = self.op("ReduceSum", [g, self.ints(2)], keepdims=1)
        left = self.op("Exp", [self.sub(total, c)])
        learnt = self.matmul(self.transpose(u, 0, 1, 3, 2), self.mul(key, left))
        after = self.add(learnt, self.mul(start, self.op("Exp", [total])))
        self.reshape(after, 1, spec.nv, dv, dk, out=node.output[1])

    def _triangles(self, query: str) -> tuple[str, ...]:
        """[T,T] masks: lower with and without the diagonal, identity, and the blocks of each doubling."""
        if not self._masks:
            masks = triangles(self._longest_tokens)
            table = self.const(np.stack(masks))
            length = self.op("Slice", [self.op("Shape", [query]), self.ints(0), self.ints(1), self.ints(0)])
            square = self.concat([length, length], axis=0)
            cut = self.op("Slice", [table, self.ints(0, 0), square, self.ints(1, 2)])
            pieces = self.split(cut, (1,) * len(masks), axis=0)
            self._masks = tuple(self.op("Squeeze", [piece, self.ints(0)]) for piece in pieces)
        return self._masks

    def _bias_of_the_past(self) -> str:
        """[1,1,1,capacity+1]: very negative where a fixed cache holds nothing yet; the token's own score comes last."""
        ones = self.cast(ATTENTION_MASK, "float32")
        width = next(value for value in self._model.graph.input if value.name == ATTENTION_MASK)
        capacity = width.type.tensor_type.shape.dim[1].dim_value
        # the mask has a one more than the cache has tokens: shifted by one, it is the mask of the past
        valid = self.op("Slice", [ones, self.ints(1), self.ints(capacity), self.ints(1)])
        padded = self.concat([valid, self.const(np.array([[0, 1]], np.float32))], axis=1)
        bias = self.mul(self.sub(padded, self.number(1.0)), self.number(HIDDEN_SCORE))
        return self.reshape(bias, 1, 1, 1, capacity + 1)

    def _fix_length(self, tokens: int) -> None:
        """Puts the number of tokens where the graph's inputs and outputs have the name of that size."""
        ids = [value for value in self._model.graph.input if value.name == INPUT_IDS]
        name = ids[0].type.tensor_type.shape.dim[1].dim_param if ids else ""
        for value in (*self._model.graph.input, *self._model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if name and dim.dim_param == name:
                    dim.dim_value = tokens

    def _scores(self, node: Any) -> bool:
        makers = {output: maker for maker in self._old for output in maker.output}
        return all(makers[name].op_type == "MatMul" for name in node.input if name in makers) and len(node.input) == 2

    def _alias(self, node: Any) -> None:
        """Lets everything that read the node's output read its first input."""
        for other in self._old:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index] = node.input[0]


def _attribute(node: Any, name: str) -> int | None:
    return next((int(item.i) for item in node.attribute if item.name == name), None)
