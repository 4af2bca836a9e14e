"""The two nodes of the linear layers' recurrence, and what they mean in plain ops.

`qwen_npu::RecurrentGatedDeltaRule` (decode, verify) and `qwen_npu::ChunkGatedDeltaRule` (prefill). A runtime with a
kernel for them uses it; any other inlines the function body that the graph carries. The bodies know the head counts
of their model and compute in f32 whatever the dtypes outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from qwen_npu.contract import OP_DOMAIN
from qwen_npu.graphs.builder import OPSET, Graph, Nodes, value_type
from qwen_npu.spec import ModelSpec

RECURRENT = "RecurrentGatedDeltaRule"
CHUNK = "ChunkGatedDeltaRule"

RECURRENT_INPUTS = (
    "query",
    "key",
    "value",
    "beta",
    "state",
    "actual_seq_lengths",
    "ssm_state_indices",
    "g",
    "gk",
    "num_accepted_tokens",
)
CHUNK_INPUTS = ("query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g")


@dataclass(frozen=True)
class Packed:
    """How the T tokens of a node are packed: `sequences` times `tokens` each, one sequence after another.

    tokens: None if the length is known only when the graph runs.
    width: slots in a row of `ssm_state_indices`; 0 when sequence i owns just slot i (plain decode, prefill).
    """

    sequences: int = 1
    tokens: int | None = 1
    width: int = 0


def recurrent_node(
    graph: Graph,
    spec: ModelSpec,
    tokens: tuple[str, str, str, str, str],
    state: str,
    lengths: str,
    slots: str,
    accepted: str = "",
    *,
    state_out: str = "",
) -> tuple[str, str]:
    """`tokens` is query, key [T,NK,DK], value [T,NV,DV], beta, g [T,NV]; gives out [T,NV,DV] and the pool."""
    query, key, value, beta, g = tokens
    inputs = [query, key, value, beta, state, lengths, slots, g, "", accepted]  # no gk
    outs = [f"{state_out}.out", state_out] if state_out else None
    out, state_after = graph.ops(RECURRENT, inputs, 2, outs=outs, domain=OP_DOMAIN, scale_value=float(spec.dk**-0.5))
    return out, state_after


def chunk_node(
    graph: Graph, spec: ModelSpec, tokens: tuple[str, str, str, str, str], state: str, lengths: str
) -> tuple[str, str]:
    """As `recurrent_node`, for a prompt: gives out [T,NV,DV] and the state after the last token [B,NV,DV,DK]."""
    query, key, value, beta, g = tokens
    inputs = [query, key, value, beta, state, lengths, g]
    out, final_state = graph.ops(CHUNK, inputs, 2, domain=OP_DOMAIN, scale_value=float(spec.dk**-0.5))
    return out, final_state


def recurrent_function(spec: ModelSpec, packed: Packed, state_dtype: str) -> Any:
    """The meaning of RecurrentGatedDeltaRule for one way of packing: `g` given, `gk` absent, equal lengths.

    With rows (packed.width > 0) the state is read at the row's slot of the last accepted token and written to the
    row's slot of each token; `num_accepted_tokens` must be given then.
    """
    function = _function(RECURRENT, RECURRENT_INPUTS, ("out", "state_out"))
    body = Nodes(function.node)
    b, nv, dv, dk = packed.sequences, spec.nv, spec.dv, spec.dk
    if not packed.width:
        start = "state"
    else:
        accepted = body.op("Max", [body.cast("num_accepted_tokens", "int64"), body.ints(1)])
        place = body.add(accepted, body.const(np.arange(b, dtype=np.int64) * packed.width - 1))
        flat = body.reshape("ssm_state_indices", b * packed.width)
        start = body.op("Gather", ["state", body.op("Gather", [flat, place], axis=0)], axis=0)
    states = _run(body, spec, packed, start, keep_all=packed.width > 0)
    if not packed.width:
        body.cast(body.reshape(states, b, nv, dv, dk), state_dtype, out="state_out")
    else:
        assert packed.tokens is not None
        updates = body.cast(body.reshape(states, -1, nv, dv, dk), state_dtype)
        rows = "ssm_state_indices"
        if packed.tokens < packed.width:
            rows = body.op("Slice", [rows, body.ints(0), body.ints(packed.tokens), body.ints(1)])
        indices = body.reshape(body.transpose(rows, 1, 0), b * packed.tokens, 1)  # token by token, as the states come
        body.op("ScatterND", ["state", indices, updates], out="state_out")
    return function


def chunk_function(spec: ModelSpec, packed: Packed, state_dtype: str) -> Any:
    """The meaning of ChunkGatedDeltaRule: the same recurrence, any number of tokens, only the last state kept."""
    function = _function(CHUNK, CHUNK_INPUTS, ("out", "final_state"))
    body = Nodes(function.node)
    state = _run(body, spec, packed, "initial_state", keep_all=False)
    body.cast(body.reshape(state, packed.sequences, spec.nv, spec.dv, spec.dk), state_dtype, out="final_state")
    return function


def _function(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    function = onnx.FunctionProto(name=name, domain=OP_DOMAIN, attribute=["scale_value"])
    function.input.extend(inputs)
    function.output.extend(outputs)
    function.opset_import.append(onnx.OperatorSetIdProto(domain="", version=OPSET))
    return function


def _run(body: Nodes, spec: ModelSpec, packed: Packed, start: str, *, keep_all: bool) -> str:
    """Writes `out`; gives the states after each token [L,B,...] (keep_all) or after the last [B,NK,R,DV,DK], in f32.

    Value heads stand as [NK, R]: the R of them that share a key head broadcast against it, nothing is repeated.
    """
    b, nk, ratio, dv, dk = packed.sequences, spec.nk, spec.nv // spec.nk, spec.dv, spec.dk
    single = packed.tokens == 1
    lead = (b,) if single else (-1, b)

    def lay_out(value: str, *shape: int) -> str:
        if single:
            return body.reshape(value, b, *shape)
        if b == 1:
            return body.reshape(value, -1, 1, *shape)
        order = [1, 0, *range(2, 2 + len(shape))]
        return body.transpose(body.reshape(value, b, -1, *shape), *order)

    scale = body.op("Constant", [], value_float={"ref": "scale_value"})
    query = lay_out(body.mul(body.cast("query", "float32"), scale), nk, 1, dk, 1)
    key = lay_out(body.cast("key", "float32"), nk, 1, dk, 1)
    key_row = body.reshape(key, *lead, nk, 1, 1, dk)
    value = lay_out(body.cast("value", "float32"), nk, ratio, dv, 1)
    beta = lay_out(body.cast("beta", "float32"), nk, ratio, 1, 1)
    decay = lay_out(body.op("Exp", ["g"]), nk, ratio, 1, 1)
    state = body.reshape(body.cast(start, "float32"), b, nk, ratio, dv, dk)
    tokens = (query, key, key_row, value, beta, decay)
    if single:
        after, out = _step(body, state, *tokens)
        states = after
    else:
        last, *stacked = body.ops(
            "Scan", [state, *tokens], 3 if keep_all else 2, body=_scan_body(keep_all), num_scan_inputs=len(tokens)
        )
        out, states = stacked[0], stacked[1] if keep_all else last
        if b > 1:
            out = body.transpose(out, 1, 0, 2, 3, 4, 5)
    body.op("CastLike", [body.reshape(out, -1, spec.nv, dv), "value"], out="out")
    return states


def _step(
    body: Nodes, state: str, query: str, key: str, key_row: str, value: str, beta: str, decay: str, out: str = ""
) -> tuple[str, str]:
    """One token: state [..,DV,DK] decays, forgets what it would answer to the key, learns the value."""
    kept = body.mul(state, decay)
    change = body.mul(body.sub(value, body.matmul(kept, key)), beta)
    after = body.add(kept, body.mul(change, key_row), out=out)
    return after, body.matmul(after, query)


def _scan_body(keep_all: bool) -> Any:
    graph = onnx.GraphProto(name="token")
    body = Nodes(graph.node, "token.")
    names = ["query", "key", "key_row", "value", "beta", "decay"]
    for name in ["state", *names]:
        graph.input.append(onnx.ValueInfoProto(name=f"token.{name}", type=value_type("float32")))
    after, out = _step(body, "token.state", *(f"token.{name}" for name in names))
    outputs = [after, out]
    if keep_all:
        outputs.append(body.op("Identity", [after]))
    for name in outputs:
        graph.output.append(onnx.ValueInfoProto(name=name, type=value_type("float32")))
    return graph
