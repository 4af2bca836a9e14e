"""The contract of every graph: names, order, dtypes and shapes of its tensors.

Graph builders, bundles, drivers and the runtime take names and shapes from here; nobody else spells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qwen_npu.errors import ContractError
from qwen_npu.spec import ModelSpec, Numerics

Stage = Literal["vision", "prefill", "decode", "verify", "admit", "peek", "op"]
BufferKind = Literal["conv", "recurrent", "kv", "logits", "input", "pool", "peek", "other"]
Dim = int | str
"""A fixed size, or the name of a dimension that the caller chooses."""

OP_DOMAIN = "qwen_npu"
IN_PLACE_KEY = "qwen_npu.in_place"
"""Graph metadata: JSON object output name -> input name of the pairs that may share one buffer."""
BUCKETS_KEY = "qwen_npu.buckets"
"""Graph metadata: JSON object name of a dimension -> list of the sizes that are declared for it; others are refused."""

PIXEL_VALUES = "pixel_values"
IMAGE_EMBEDS = "image_embeds"
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
LOGITS = "logits"
ACTUAL_SEQ_LENGTHS = "actual_seq_lengths"
SSM_STATE_INDICES = "ssm_state_indices"
NUM_ACCEPTED_TOKENS = "num_accepted_tokens"
ROW = "row"
SLOT = "slot"
POSITION = "position"
SLOTS = "slots"

STATE_KINDS = ("conv", "recurrent", "kv")
"""Order of the states in every graph's inputs and outputs."""
PAST = {"conv": "past_conv_states", "recurrent": "past_recurrent_states", "kv": "past_kv_cache"}
PRESENT = {"conv": "present_conv_states", "recurrent": "present_recurrent_states", "kv": "present_kv_cache"}

ADMITTED = {"conv": "conv_states", "recurrent": "recurrent_states", "kv": "kv_cache"}
"""The one sequence's states that an admit graph is given: prefill's `present_*`, the KV padded to capacity."""

PEEK = {"conv": "peek_conv", "recurrent": "peek_recurrent", "kv": "peek_kv"}
PEEK_FIGURES = ("l2_norm", "max_abs", "non_finite")
"""Last axis of every peek output; the first two are NaN where an element is not finite, the third counts those."""


def conv_pool(layer: int) -> str:
    """Name of the conv pool of the layer-th LINEAR layer, counted from 0."""
    return f"conv_pool_{layer}"


def state_pool(layer: int) -> str:
    """Name of the recurrent pool of the layer-th LINEAR layer, counted from 0."""
    return f"state_pool_{layer}"


def present_of(past: str) -> str:
    """Name of the output that carries on the state of input `past`."""
    return past.replace("past_", "present_") if past.startswith("past_") else f"present_{past}"


_BARE_KINDS: tuple[BufferKind, ...] = ("conv", "recurrent", "kv", "logits", "peek")


def buffer_kind(name: str) -> BufferKind:
    """The kind of buffer that a tensor of this name is."""
    bare = name.removeprefix("past_").removeprefix("present_")
    if bare.startswith(("conv_pool", "state_pool")):
        return "pool"
    for kind in _BARE_KINDS:
        if bare.startswith(kind):
            return kind
    return "input"


@dataclass(frozen=True)
class TensorContract:
    """One tensor: its name, NumPy dtype name as the ONNX file declares it, and shape."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class GraphContract:
    """What one graph takes and gives, in order.

    `in_place` maps outputs to the inputs whose buffer they may share; `buckets` a free size to the only values of it
    that the device knows.
    """

    stage: Stage
    inputs: tuple[TensorContract, ...]
    outputs: tuple[TensorContract, ...]
    in_place: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.outputs)

    def bind(self, names: Sequence[str], side: Literal["inputs", "outputs"] = "inputs") -> tuple[int, ...]:
        """For each tensor of the contract, its index in a model's own list of `names`.

        By name; by position where the model has lost its names (none of them is one of ours).

        Raises:
            ContractError: another number of tensors, or only some of the names known.
        """
        expected = tuple(tensor.name for tensor in getattr(self, side))
        if len(names) != len(expected):
            raise ContractError(
                f"the {self.stage} graph has {len(names)} {side}: {list(names)}",
                expected=f"exactly {len(expected)}: {list(expected)}",
                fix="use a model built for this stage (qwen-npu build)",
            )
        if not set(names) & set(expected):
            return tuple(range(len(expected)))
        missing = [name for name in expected if name not in names]
        if missing:
            raise ContractError(
                f"the {self.stage} graph lacks {side} {missing}; it has {list(names)}",
                expected=str(list(expected)),
                fix="use a model built for this stage (qwen-npu build)",
            )
        return tuple(list(names).index(name) for name in expected)


def half(numerics: Numerics) -> str:
    """The dtype of what the deployed graphs carry as f16."""
    return "float16" if numerics == "device" else "float32"


def vision(spec: ModelSpec, numerics: Numerics, grid: tuple[int, int]) -> GraphContract:
    """One graph per grid of (rows, columns) of patches."""
    rows, columns = grid
    return GraphContract(
        "vision",
        (TensorContract(PIXEL_VALUES, half(numerics), (rows * columns, spec.vision.patch_lanes)),),
        (TensorContract(IMAGE_EMBEDS, half(numerics), (spec.image_tokens(grid), spec.hidden)),),
    )


def _states(
    spec: ModelSpec, numerics: Numerics, names: Mapping[str, str], kv_tokens: Dim
) -> tuple[TensorContract, ...]:
    kv = spec.kv_shape(1)
    return (
        TensorContract(names["conv"], half(numerics), spec.conv_shape()),
        TensorContract(names["recurrent"], "float32", spec.recurrent_shape()),
        TensorContract(names["kv"], half(numerics), (*kv[:3], kv_tokens, kv[4])),
    )


def prefill(
    spec: ModelSpec, numerics: Numerics, *, all_logits: bool = False, buckets: Sequence[int] = ()
) -> GraphContract:
    """S tokens, left-padded; `image_embeds` may have no rows. Logits of the last token, or of all (`prefill_all`).

    `buckets`: the values of S that the device knows; none given: any.
    """
    return GraphContract(
        "prefill",
        (
            TensorContract(INPUT_IDS, "int64", (1, "S")),
            TensorContract(ATTENTION_MASK, "int64", (1, "S")),
            TensorContract(POSITION_IDS, "int64", (4, 1, "S")),
            TensorContract(IMAGE_EMBEDS, half(numerics), ("N", spec.hidden)),
        ),
        (
            TensorContract(LOGITS, half(numerics), (1, "S" if all_logits else 1, spec.vocab)),
            *_states(spec, numerics, PRESENT, "S"),
        ),
        buckets={"S": tuple(buckets)} if buckets else {},
    )


def tap(spec: ModelSpec) -> GraphContract:
    """Prefill in f32 that gives what one linear layer's recurrence takes and makes, head by head; see `graphs.tap`."""
    return GraphContract(
        "prefill",
        prefill(spec, "f32").inputs,
        (
            TensorContract("query", "float32", ("S", spec.nk, spec.dk)),
            TensorContract("key", "float32", ("S", spec.nk, spec.dk)),
            TensorContract("value", "float32", ("S", spec.nv, spec.dv)),
            TensorContract("beta", "float32", ("S", spec.nv)),
            TensorContract("g", "float32", ("S", spec.nv)),
            TensorContract("out", "float32", ("S", spec.nv, spec.dv)),
            TensorContract("final_state", "float32", (1, spec.nv, spec.dv, spec.dk)),
        ),
    )


def decode(spec: ModelSpec, numerics: Numerics, capacity: int | None) -> GraphContract:
    """One token. `capacity` is the fixed KV length in tokens; None is the growing graph."""
    past: Dim = capacity if capacity is not None else "L"
    mask: Dim = capacity if capacity is not None else "L+1"
    return GraphContract(
        "decode",
        (
            TensorContract(INPUT_IDS, "int64", (1, 1)),
            TensorContract(ATTENTION_MASK, "int64", (1, mask)),
            TensorContract(POSITION_IDS, "int64", (4, 1, 1)),
            *_states(spec, numerics, PAST, past),
        ),
        (
            TensorContract(LOGITS, half(numerics), (1, 1, spec.vocab)),
            *_states(spec, numerics, PRESENT, mask),
        ),
    )


def _pools(spec: ModelSpec, numerics: Numerics, slots: Dim) -> tuple[TensorContract, ...]:
    conv = spec.conv_shape()[2:]
    state = (spec.nv, spec.dv, spec.dk)
    pools: list[TensorContract] = []
    for layer in range(len(spec.linear_layers)):
        pools.append(TensorContract(conv_pool(layer), half(numerics), (slots, *conv)))
        pools.append(
            TensorContract(state_pool(layer), "float16" if numerics == "device" else "float32", (slots, *state))
        )
    return tuple(pools)


def _presents(tensors: Sequence[TensorContract]) -> tuple[TensorContract, ...]:
    return tuple(TensorContract(present_of(tensor.name), tensor.dtype, tensor.shape) for tensor in tensors)


def verify(
    spec: ModelSpec, numerics: Numerics, *, tokens: int, width: int, sequences: int, slots: int, capacity: int
) -> GraphContract:
    """`tokens` (1 or `width`) tokens of each of `sequences` rows on slot pools; all pools in place, the KV a pair."""
    kv = TensorContract(PAST["kv"], half(numerics), spec.kv_shape(capacity, sequences))
    pools = _pools(spec, numerics, slots)
    return GraphContract(
        "verify",
        (
            TensorContract(INPUT_IDS, "int64", (sequences, tokens)),
            TensorContract(ATTENTION_MASK, "int64", (sequences, capacity)),
            TensorContract(POSITION_IDS, "int64", (4, sequences, tokens)),
            TensorContract(ACTUAL_SEQ_LENGTHS, "int64", (sequences,)),
            TensorContract(SSM_STATE_INDICES, "int64", (sequences, width)),
            TensorContract(NUM_ACCEPTED_TOKENS, "int32", (sequences,)),
            kv,
            *pools,
        ),
        (TensorContract(LOGITS, half(numerics), (sequences, tokens, spec.vocab)), *_presents((kv, *pools))),
        in_place={present_of(pool.name): pool.name for pool in pools},
    )


def admit(spec: ModelSpec, numerics: Numerics, *, sequences: int, slots: int, capacity: int) -> GraphContract:
    """Puts one sequence's prefill states into its row of the KV and its slot of every pool."""
    kv = TensorContract(PAST["kv"], half(numerics), spec.kv_shape(capacity, sequences))
    pools = _pools(spec, numerics, slots)
    return GraphContract(
        "admit",
        (
            TensorContract(ROW, "int32", (1,)),
            TensorContract(SLOT, "int32", (1,)),
            *_states(spec, numerics, ADMITTED, capacity),
            kv,
            *pools,
        ),
        _presents((kv, *pools)),
        in_place={present_of(pool.name): pool.name for pool in pools},
    )


def _peeks(spec: ModelSpec, sequences: int, slots: tuple[Dim, ...]) -> tuple[TensorContract, ...]:
    layers, full, figures = len(spec.linear_layers), 2 * len(spec.full_layers), len(PEEK_FIGURES)
    return (
        TensorContract(PEEK["conv"], "float32", (layers, *slots, figures)),
        TensorContract(PEEK["recurrent"], "float32", (layers, *slots, spec.nv, figures)),
        TensorContract(PEEK["kv"], "float32", (full, sequences, spec.kv_heads, figures)),
    )


def peek(spec: ModelSpec, numerics: Numerics, *, capacity: int | None) -> GraphContract:
    """Figures of one sequence's states; of the KV only the row at `position`. `capacity` None: a growing KV."""
    states = _states(spec, numerics, PAST, capacity if capacity is not None else "L")
    return GraphContract("peek", (TensorContract(POSITION, "int64", (1,)), *states), _peeks(spec, 1, ()))


def peek_pools(spec: ModelSpec, numerics: Numerics, *, sequences: int, slots: int, capacity: int) -> GraphContract:
    """Figures of the K pool slots named by `slots`, and of each sequence's KV row at its `position`."""
    kv = TensorContract(PAST["kv"], half(numerics), spec.kv_shape(capacity, sequences))
    where = (TensorContract(POSITION, "int64", (sequences,)), TensorContract(SLOTS, "int64", ("K",)))
    return GraphContract("peek", (*where, kv, *_pools(spec, numerics, slots)), _peeks(spec, sequences, ("K",)))
