"""A driver and a decode model small enough to read: memory is NumPy, and the model counts tokens instead of
thinking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen_npu import contract
from qwen_npu.driver.protocol import Tensor, TensorInfo
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.spec import ModelSpec, VisionSpec

SPEC = ModelSpec(
    hidden=8,
    intermediate=16,
    layer_types=("linear_attention", "full_attention"),
    heads=2,
    kv_heads=1,
    head_dim=8,
    nk=1,
    nv=2,
    dk=2,
    dv=3,
    conv_kernel=4,
    vocab=11,
    tied=True,
    rms_eps=1e-6,
    rope_theta=1e4,
    rotary_lanes=8,
    mrope_section=(2, 1, 1),
    image_token=9,
    vision_start=7,
    vision_end=8,
    end_tokens=(10,),
    pad_token=0,
    vision=VisionSpec(1, 8, 16, 1, 4, 16, 2, 2, 3, 1e4),
)


class MockDriver:
    """Device tensors are NumPy arrays that only upload, predict and download touch."""

    name = "mock"

    def __init__(self, model: MockModel | None = None, device: str = "ascend:0") -> None:
        self.device = device
        self.capabilities = frozenset({"resident", "auto_resize"} if device != "cpu" else ())
        self.model = model

    def load(self, path: Path, graph: str) -> MockModel:
        assert self.model is not None
        self.model.graph = graph
        return self.model

    def wrap(self, array, *, name, buffer):
        return Tensor(array, name=name, buffer=buffer, dtype=array.dtype, shape=array.shape, device="host")

    def upload(self, array, *, name, buffer):
        return Tensor(array.copy(), name=name, buffer=buffer, dtype=array.dtype, shape=array.shape, device=self.device)

    def empty(self, shape, info, *, buffer):
        raw = np.full(shape, 77, info.dtype)
        return Tensor(raw, name=info.name, buffer=buffer, dtype=info.dtype, shape=shape, device=self.device)

    def download(self, tensor):
        return tensor.raw.copy()

    def free(self, tensor):
        tensor.raw = None

    def address(self, tensor):
        return None

    def memory_bytes(self):
        return None

    def subscribe(self, sink, place=None):
        pass

    def close(self):
        pass


class MockModel:
    """A decode graph: conv += 1, recurrent += 1, kv gets `1000 * row + position` at the cache position; logits pick
    ids + 1."""

    def __init__(self, capacity: int | None, spec: ModelSpec = SPEC) -> None:
        self.graph = ""
        graph = contract.decode(spec, "f32", capacity)
        self.inputs = infos(graph.inputs)
        self.outputs = infos(graph.outputs)
        self.resized: list[list[tuple[int, ...]]] = []
        self.seen_shared: list[str] = []

    def resize(self, shapes):
        self.resized.append(list(shapes))

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        ids, mask, _, conv, recurrent, kv = (tensor.raw for tensor in inputs)
        position = int(mask.sum()) - 1
        if kv.shape[-2] != mask.shape[-1]:
            present_kv = np.concatenate([kv, np.zeros((*kv.shape[:-2], 1, kv.shape[-1]), kv.dtype)], axis=-2)
        else:
            present_kv = kv.copy()
        rows = np.arange(kv.shape[0]).reshape(-1, 1, 1, 1)
        present_kv[..., position, :] = 1000 * rows + position
        logits = np.zeros((1, 1, SPEC.vocab), np.float32)
        logits[..., (int(ids[0, 0]) + 1) % SPEC.vocab] = 1
        results = [logits, conv + 1, recurrent + 1, present_kv]
        if outputs is None:
            return [
                Tensor(raw, name=info.name, buffer=f"host.{info.name}", dtype=raw.dtype, shape=raw.shape, device="host")
                for raw, info in zip(results, self.outputs, strict=True)
            ]
        for tensor, raw in zip(outputs, results, strict=True):
            self.seen_shared += [t.buffer for t in inputs if t.raw is tensor.raw]
            tensor.raw[...] = raw
        return list(outputs)

    def close(self):
        pass


def infos(tensors) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(t.name, np.dtype(t.dtype), tuple(size if isinstance(size, int) else -1 for size in t.shape))
        for t in tensors
    )


def recording(model: MockModel | None = None, device: str = "ascend:0") -> RecordingDriver:
    return RecordingDriver(MockDriver(model, device))
