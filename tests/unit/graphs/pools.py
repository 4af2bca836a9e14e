"""Drives the verify and admit graphs: pools as onnxruntime tensors, bound as input and output at once where allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_npu import contract
from qwen_npu.bundle import Bundle
from qwen_npu.contract import GraphContract
from qwen_npu.spec import Numerics
from tests.unit.graphs.runner import open_session

Array = NDArray[Any]


class PoolRunner:
    """`sequences` rows of `width` slots, on pools of `slots`; row b owns slots b*width.. unless `rows` says else."""

    def __init__(
        self,
        bundle: Bundle,
        numerics: Numerics,
        *,
        sequences: int,
        width: int,
        slots: int,
        rows: Array | None = None,
        native: bool = False,
        in_place: bool = True,
    ) -> None:
        self.bundle, self.numerics, self.native, self.in_place = bundle, numerics, native, in_place
        self.sequences, self.width, self.slots = sequences, width, slots
        self.rows = np.arange(sequences * width).reshape(sequences, width) if rows is None else rows
        self.accepted = np.ones(sequences, np.int32)
        self.lengths = np.zeros(sequences, np.int64)
        self._arrays: list[Array] = []
        self.tensors: dict[str, Any] = {}
        for tensor in self.contract_of(1).inputs[6:]:
            self.tensors[tensor.name] = self._value(np.zeros(tensor.shape, tensor.dtype))

    def contract_of(self, tokens: int) -> GraphContract:
        sizes = {"width": self.width, "sequences": self.sequences, "slots": self.slots}
        return contract.verify(self.bundle.spec, self.numerics, tokens=tokens, capacity=self.bundle.capacity, **sizes)

    def admit(self, row: int, states: dict[str, Array], tokens: int) -> None:
        """States as prefill gives them, the KV padded to capacity."""
        sizes = {"sequences": self.sequences, "slots": self.slots}
        described = contract.admit(self.bundle.spec, self.numerics, capacity=self.bundle.capacity, **sizes)
        feed = {
            "row": np.array([row], np.int32),
            "slot": self.rows[row, :1].astype(np.int32),
            "conv_states": states["conv"],
            "recurrent_states": states["recurrent"],
            "kv_cache": states["kv"],
        }
        self._run(self.bundle.admit(numerics=self.numerics, **sizes), described, feed)
        self.accepted[row], self.lengths[row] = 1, tokens

    def verify(self, tokens: Array, deltas: Array | None = None) -> Array:
        """tokens [B, L]; lengths are left as they are (see `accept`). Gives logits [B, L, vocab] f32."""
        count = tokens.shape[1]
        sizes = {"width": self.width, "sequences": self.sequences, "slots": self.slots}
        places = self.lengths[:, None] + np.arange(count)
        shift = np.zeros(self.sequences, np.int64) if deltas is None else deltas
        feed = {
            "input_ids": tokens.astype(np.int64),
            "attention_mask": (np.arange(self.bundle.capacity) < self.lengths[:, None] + count).astype(np.int64),
            "position_ids": np.stack([places, *[places + shift[:, None]] * 3]).astype(np.int64),
            "actual_seq_lengths": np.full(self.sequences, count, np.int64),
            "ssm_state_indices": self.rows.astype(np.int64),
            "num_accepted_tokens": self.accepted,
        }
        path = self.bundle.verify(tokens=count, numerics=self.numerics, **sizes)
        return np.asarray(self._run(path, self.contract_of(count), feed)["logits"].astype(np.float32))

    def accept(self, accepted: Array) -> None:
        """How many of the last call's tokens count, for each row."""
        self.accepted = accepted.astype(np.int32)
        self.lengths = self.lengths + accepted

    def pool(self, name: str) -> Array:
        return np.array(self.tensors[name].numpy())

    def _value(self, array: Array) -> Any:
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._arrays.append(array)  # it may be the memory behind the value
        return value

    def _run(self, path: Path, described: GraphContract, feed: dict[str, Array]) -> dict[str, Array]:
        session = open_session(path, native=self.native)
        assert [value.name for value in session.get_inputs()] == list(described.input_names)
        assert [value.name for value in session.get_outputs()] == list(described.output_names)
        binding = session.io_binding()
        held: dict[str, Any] = {}
        for tensor in described.inputs:
            value = self.tensors.get(tensor.name) or self._value(feed[tensor.name])
            held[tensor.name] = value
            binding.bind_ortvalue_input(tensor.name, value)
        outputs: dict[str, Any] = {}
        for tensor in described.outputs:
            shared = described.in_place.get(tensor.name) if self.in_place else None
            value = held[shared] if shared else self._value(np.full(tensor.shape, 7, tensor.dtype))
            outputs[tensor.name] = value
            binding.bind_ortvalue_output(tensor.name, value)
        session.run_with_iobinding(binding)
        for name, value in outputs.items():
            if name != "logits":
                past = name.replace("present_kv", "past_kv").removeprefix("present_")
                self.tensors[past] = value
        return {name: np.array(value.numpy()) for name, value in outputs.items() if name == "logits"}
