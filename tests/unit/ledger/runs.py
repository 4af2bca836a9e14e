"""Hand-made event sequences as emitters make them: what a session of a tiny model would emit, with exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from qwen_npu.ledger.events import Buffer, Event
from qwen_npu.ledger.store import Ledger

LAYERS, HEADS = 3, 4
CONV_SHAPE = (LAYERS, 1, 24, 3)
RECURRENT_SHAPE = (LAYERS, 1, HEADS, 8, 8)
VOCAB = 64
CONV_BYTES = 3 * 24 * 3 * 2
RECURRENT_BYTES = 3 * 4 * 8 * 8 * 4
KV_TOKEN_BYTES = 2 * 2 * 8 * 2  # k and v, 2 heads, 8 lanes, f16
LOGITS_BYTES = VOCAB * 2
PROMPT = 5
SPEC = {"layer_types": ["linear_attention"] * LAYERS + ["full_attention"], "kv_heads": 2, "head_dim": 8}
INPUTS = {"input_ids": 8, "attention_mask": 8 * 16, "position_ids": 32}


@dataclass
class Run:
    """Emits the events of generations into `sink`; a clock of its own makes every time exact."""

    sink: Callable[[Event], None]
    kv: str = "fixed"
    state: str = "resident"
    capacity: int = 16
    addresses: bool = True
    clock_ns: int = 1_000
    generations: dict[str, int] = field(default_factory=dict)
    alive: dict[str, list[Buffer]] = field(default_factory=dict)
    next_address: int = 0x1000

    def emit(self, kind: str, dur_ns: int = 0, **fields: object) -> None:
        self.clock_ns += max(dur_ns, 100)
        self.sink(Event(kind, self.clock_ns - dur_ns, dur_ns, **fields))  # type: ignore[arg-type]

    def allocate(self, id_: str, name: str, kind: str, shape: tuple[int, ...], dtype: str, **where: object) -> None:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        generation = self.generations.get(id_, 0)
        self.generations[id_] = generation + 1
        address = self.next_address if self.addresses else None
        self.next_address += -(-nbytes // 256) * 256
        half = id_[-1] if id_.endswith((".a", ".b")) else ""
        buffer = Buffer(
            id_, name, kind, half, "ascend:0", dtype, shape, nbytes, address, generation, "runtime/states.py:77"
        )
        self.alive.setdefault(id_, []).append(buffer)
        self.emit("allocate", buffer=id_, nbytes=nbytes, detail=buffer._asdict(), **where)

    def free(self, id_: str, **where: object) -> None:
        buffer = self.alive[id_].pop(0)
        self.emit("free", buffer=id_, nbytes=buffer.nbytes, **where)

    def upload(self, id_: str, nbytes: int, **where: object) -> None:
        self.emit("upload", 500, buffer=id_, other=f"host.{id_}", nbytes=nbytes, **where)

    def download(self, id_: str, nbytes: int, **where: object) -> None:
        self.emit("download", 500, buffer=id_, other=f"host.{id_}", nbytes=nbytes, **where)

    def kv_shape(self, tokens: int) -> tuple[int, ...]:
        return (2, 1, 2, tokens, 8)

    def generate(self, steps: int, tokens: list[int] | None = None) -> None:
        """One generation: prefill of PROMPT tokens, upload of the states, then `steps` decode steps."""
        self.emit("stage_begin", stage="prefill", detail={"graph": "prefill", "weights_bytes": 1000})
        self.emit("predict", 20_000, stage="prefill", detail={"inputs": ["host.input_ids"], "outputs": []})
        self.step("prefill", -1, 7, 20_000, 0, 0)
        self.emit("stage_end", stage="prefill", detail={"graph": "prefill"})
        self.emit("stage_begin", stage="decode", detail={"graph": f"decode_{self.kv}", "weights_bytes": 1000})
        start = {"stage": "decode", "step": -1}
        halves = ("a", "b")
        growing = self.kv == "growing"
        kv_ids = ("kv",) if growing else ("kv.a", "kv.b")
        if self.state == "resident":
            for half in halves:
                self.allocate(f"conv.{half}", "past_conv_states", "conv", CONV_SHAPE, "float16", **start)
                self.allocate(
                    f"recurrent.{half}", "past_recurrent_states", "recurrent", RECURRENT_SHAPE, "float32", **start
                )
            for id_ in kv_ids:
                length = PROMPT if growing else self.capacity
                self.allocate(id_, "past_kv_cache", "kv", self.kv_shape(length), "float16", **start)
            self.allocate("logits", "logits", "logits", (1, 1, VOCAB), "float16", **start)
            self.upload("conv.a", CONV_BYTES, **start)
            self.upload("recurrent.a", RECURRENT_BYTES, **start)
            self.upload(kv_ids[0], (PROMPT if growing else self.capacity) * KV_TOKEN_BYTES, **start)
        for step in range(steps):
            self.decode(step, 10 + step if tokens is None else tokens[step])
        if self.state == "resident":
            for id_ in list(self.alive):
                while self.alive[id_]:
                    self.free(id_, stage="decode", step=-1)
        self.emit("stage_end", stage="decode", detail={"graph": f"decode_{self.kv}"})

    def decode(self, step: int, token: int) -> None:
        where = {"stage": "decode", "step": step}
        growing = self.kv == "growing"
        live, scratch = ("a", "b") if step % 2 == 0 else ("b", "a")
        kv_live, kv_scratch = ("kv", "kv") if growing else (f"kv.{live}", f"kv.{scratch}")
        inputs = [f"host.{name}" for name in INPUTS]
        up = down = allocated = 0
        if self.state == "resident":
            if growing:
                self.allocate("kv", "present_kv_cache", "kv", self.kv_shape(PROMPT + step + 1), "float16", **where)
                allocated = (PROMPT + step + 1) * KV_TOKEN_BYTES
            ins = [f"conv.{live}", f"recurrent.{live}", kv_live]
            outs = ["logits", f"conv.{scratch}", f"recurrent.{scratch}", kv_scratch]
        else:
            ins = ["host.conv", "host.recurrent", "host.kv"]
            outs = ["host.logits", "host.conv", "host.recurrent", "host.kv"]
        self.emit(
            "predict",
            3_000 + 10 * step,
            detail={"inputs": inputs + ins, "outputs": outs, "graph": "decode", "site": "runtime/stages.py:40"},
            **where,
        )
        for name, nbytes in INPUTS.items():
            up += nbytes
            self.emit("upload", other=f"host.{name}", nbytes=nbytes, source="inferred", **where)
        if self.state == "resident":
            self.download("logits", LOGITS_BYTES, **where)
            down += LOGITS_BYTES
            for kind in ("conv", "recurrent") if growing else ("conv", "recurrent", "kv"):
                self.emit(
                    "rotate",
                    buffer=f"{kind}.{scratch}",
                    other=f"{kind}.{live}",
                    source="inferred",
                    detail={"kind": kind},
                    **where,
                )
            if growing:
                self.free("kv", **where)
        else:
            tokens = PROMPT + step if growing else self.capacity
            sizes = {"conv": CONV_BYTES, "recurrent": RECURRENT_BYTES, "kv": tokens * KV_TOKEN_BYTES}
            for kind, nbytes in sizes.items():
                self.emit("upload", other=f"host.{kind}", nbytes=nbytes, source="inferred", **where)
                up += nbytes
            if growing:
                sizes["kv"] += KV_TOKEN_BYTES
            for kind, nbytes in {"logits": LOGITS_BYTES, **sizes}.items():
                self.emit("download", other=f"host.{kind}", nbytes=nbytes, source="inferred", **where)
                down += nbytes
        self.step("decode", step, token, 3_000 + 10 * step, up, down, allocated)

    def step(
        self, stage: str, step: int, token: int, predict_ns: int, up: int, down: int, allocated: int = 0, **more: object
    ) -> None:
        detail = {
            "stage": stage,
            "step": step,
            "token": token,
            "text": f" t{token}",
            "predict_ms": predict_ns / 1e6,
            "wall_ms": predict_ns / 1e6 + 0.002,
            "upload_ms": 0.0015 if step == 0 else 0.0,
            "host_to_device_bytes": up,
            "device_to_host_bytes": down,
            "allocated_bytes": allocated,
            "prompt_tokens": PROMPT,
            **more,
        }
        self.emit("step", predict_ns + 2_000, stage=stage, step=step, detail=detail)


def recorded(
    steps: int = 4, *, generations: int = 1, kv: str = "fixed", state: str = "resident", **options: object
) -> Ledger:
    """A ledger in memory of such a run."""
    ledger = Ledger()
    for key, value in {"kv": kv, "state": state, "capacity": 16, "numerics": "device", "spec": SPEC}.items():
        ledger.set_meta(key, value)
    run = Run(ledger, kv=kv, state=state, **options)  # type: ignore[arg-type]
    for _ in range(generations):
        run.generate(steps)
    return ledger


def norms(step: int, layer: int | None = None, head: int | None = None, value: float = 0.0) -> np.ndarray:
    """Position-encoded peek [LAYERS, HEADS]: step + 10 * layer + 100 * head; one place may hold another value."""
    array = np.add.outer(10.0 * np.arange(LAYERS), 100.0 * np.arange(HEADS)).astype(np.float32) + step
    if layer is not None and head is not None:
        array[layer, head] = value
    return array


def peeks(ledger: Ledger, arrays: Iterator[dict[str, np.ndarray]]) -> None:
    for step, named in enumerate(arrays):
        ledger(Event("peek", step, stage="decode", step=step, arrays=named))
