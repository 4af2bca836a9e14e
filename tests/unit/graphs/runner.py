"""Runs the graphs of a bundle on onnxruntime with nothing between: NumPy in, NumPy out, bound by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_npu.bundle import Bundle
from qwen_npu.contract import GraphContract
from qwen_npu.spec import Numerics

Array = NDArray[Any]


def native_library() -> str | None:
    """The op library, if the package is there and not switched off."""
    if os.environ.get("QWEN_NPU_NATIVE") == "off":
        return None
    try:
        import qwen_npu_kernels
    except ImportError:
        return None
    return str(qwen_npu_kernels.onnxruntime_library_path())


@cache
def open_session(path: Path, *, native: bool = False) -> Any:
    """One session a file and library: opening costs more than a test's runs. A file that changes needs another name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    library = native_library() if native else None
    if library:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@dataclass
class GraphRunner:
    """One sequence: prefill, then decode, the states held here as the graphs give them."""

    bundle: Bundle
    numerics: Numerics = "f32"
    native: bool = False
    states: dict[str, Array] = field(default_factory=dict)
    tokens: int = 0

    @property
    def half(self) -> Any:
        return np.float16 if self.numerics == "device" else np.float32

    def run(self, graph: Any, **feed: Array) -> dict[str, Array]:
        session = open_session(self.bundle.path(graph, numerics=self.numerics), native=self.native)
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, feed), strict=True))
        check(self.bundle.contract(graph, numerics=self.numerics), feed, outputs)
        return outputs

    def vision(self, pixels: Array, grid: tuple[int, int]) -> Array:
        session = open_session(self.bundle.path("vision", numerics=self.numerics, grid=grid))
        outputs = {"image_embeds": session.run(None, {"pixel_values": pixels.astype(self.half)})[0]}
        contract = self.bundle.contract("vision", numerics=self.numerics, grid=grid)
        check(contract, {"pixel_values": pixels.astype(self.half)}, outputs)
        return outputs["image_embeds"]

    def prefill(
        self, ids: Array, positions: Array, embeds: Array | None = None, *, pads: int = 0, all_logits: bool = False
    ) -> Array:
        """ids [S], positions [3,S], `pads` tokens put to the left. Logits [S,vocab] or [vocab]; KV without the pads."""
        self.tokens = len(ids)
        ids = np.pad(ids.astype(np.int64), (pads, 0), constant_values=7)
        mask = np.pad(np.ones(self.tokens, np.int64), (pads, 0))
        four = np.concatenate([np.arange(self.tokens)[None], positions]).astype(np.int64)
        if embeds is None:
            embeds = np.zeros((0, self.bundle.spec.hidden))
        outputs = self.run(
            "prefill_all" if all_logits else "prefill",
            input_ids=ids[None],
            attention_mask=mask[None],
            position_ids=np.pad(four, ((0, 0), (pads, 0)))[:, None],
            image_embeds=embeds.astype(self.half),
        )
        self.take(outputs)
        self.states["kv"] = self.states["kv"][:, :, :, pads:]
        logits = outputs["logits"][0].astype(np.float32)
        return logits[pads:] if all_logits else logits[0]

    def take(self, outputs: dict[str, Array]) -> None:
        self.states = {
            "conv": outputs["present_conv_states"],
            "recurrent": outputs["present_recurrent_states"],
            "kv": outputs["present_kv_cache"],
        }

    def pad_to_capacity(self) -> None:
        kv = self.states["kv"]
        room = self.bundle.capacity - kv.shape[3]
        self.states["kv"] = np.pad(kv, ((0, 0), (0, 0), (0, 0), (0, room), (0, 0)))

    def step(self, token: int, delta: int = 0, *, graph: Any = "decode_growing") -> Array:
        """One token; `delta` is added to the positions t, h, w. Gives logits [vocab]."""
        mask = np.ones(self.tokens + 1, np.int64)
        if graph == "decode_fixed":
            if self.states["kv"].shape[3] != self.bundle.capacity:
                self.pad_to_capacity()
            mask = np.pad(mask, (0, self.bundle.capacity - len(mask)))
        outputs = self.run(
            graph,
            input_ids=np.array([[token]], np.int64),
            attention_mask=mask[None],
            position_ids=np.array([self.tokens] + [self.tokens + delta] * 3, np.int64).reshape(4, 1, 1),
            past_conv_states=self.states["conv"],
            past_recurrent_states=self.states["recurrent"],
            past_kv_cache=self.states["kv"],
        )
        self.tokens += 1
        self.take(outputs)
        return np.asarray(outputs["logits"][0, 0].astype(np.float32))


def check(contract: GraphContract, feed: dict[str, Array], outputs: dict[str, Array]) -> None:
    """Names, order, dtypes and shapes are the contract's; named dimensions agree with each other."""
    sizes: dict[str, int] = {}
    for tensors, arrays in ((contract.inputs, feed), (contract.outputs, outputs)):
        assert sorted(arrays) == sorted(tensor.name for tensor in tensors)
        for tensor in tensors:
            array = arrays[tensor.name]
            assert array.dtype == np.dtype(tensor.dtype), (tensor, array.dtype)
            assert array.ndim == len(tensor.shape), (tensor, array.shape)
            for dim, size in zip(tensor.shape, array.shape, strict=True):
                wanted = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
                assert size == wanted, (tensor, array.shape, sizes)
    assert list(outputs) == [tensor.name for tensor in contract.outputs]
