"""The op alone as a graph, so that a pool on a device can be driven through it by any driver.

Inputs are those of the node that a decode or verify graph carries; `state` is the pool, updated in place. The node has
the same function body as there, so it runs where no kernel is registered.
"""

from __future__ import annotations

from qwen_npu.contract import (
    ACTUAL_SEQ_LENGTHS,
    NUM_ACCEPTED_TOKENS,
    OP_DOMAIN,
    SSM_STATE_INDICES,
    Dim,
    GraphContract,
    TensorContract,
    present_of,
)
from qwen_npu.graphs.builder import Graph
from qwen_npu.graphs.nodes import RECURRENT, Packed, recurrent_function
from qwen_npu.spec import ModelSpec

STATE = "state"
OUT = "out"


def op_contract(
    spec: ModelSpec,
    *,
    sequences: int,
    tokens: int,
    width: int,
    slots: Dim,
    dtype: str = "float16",
    pool_dtype: str = "float16",
) -> GraphContract:
    """`tokens` tokens of each of `sequences` sequences, each with a row of `width` slots."""
    total, heads = sequences * tokens, (spec.nv, spec.dv)
    pool = TensorContract(STATE, pool_dtype, (slots, spec.nv, spec.dv, spec.dk))
    return GraphContract(
        "op",
        (
            TensorContract("query", dtype, (total, spec.nk, spec.dk)),
            TensorContract("key", dtype, (total, spec.nk, spec.dk)),
            TensorContract("value", dtype, (total, *heads)),
            TensorContract("beta", dtype, (total, spec.nv)),
            pool,
            TensorContract(ACTUAL_SEQ_LENGTHS, "int64", (sequences,)),
            TensorContract(SSM_STATE_INDICES, "int64", (sequences, width)),
            TensorContract("g", "float32", (total, spec.nv)),
            TensorContract(NUM_ACCEPTED_TOKENS, "int32", (sequences,)),
        ),
        (TensorContract(OUT, dtype, (total, *heads)), TensorContract(present_of(STATE), pool_dtype, pool.shape)),
        in_place={present_of(STATE): STATE},
    )


def op_graph(
    spec: ModelSpec,
    *,
    sequences: int,
    tokens: int,
    width: int,
    slots: Dim,
    dtype: str = "float16",
    pool_dtype: str = "float16",
) -> bytes:
    """The ONNX file of `op_contract`. `tokens` <= `width`; `slots` may be a name for a size chosen at run time."""
    contract = op_contract(
        spec, sequences=sequences, tokens=tokens, width=width, slots=slots, dtype=dtype, pool_dtype=pool_dtype
    )
    g = Graph(contract, {})
    g.add_function(recurrent_function(spec, Packed(sequences, tokens, width), pool_dtype))
    query, key, value, beta, state, lengths, rows, decay, accepted = contract.input_names
    g.ops(
        RECURRENT,
        [query, key, value, beta, state, lengths, rows, decay, "", accepted],
        2,
        outs=contract.output_names,
        domain=OP_DOMAIN,
        scale_value=float(spec.dk**-0.5),
    )
    return g.serialize()
