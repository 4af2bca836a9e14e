"""A session that emits the events of a made-up model, so that the cockpit can be tested without graph or device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qwen_npu.ledger.store import Ledger
from tests.unit.ledger.runs import SPEC, Run


class FakeGeneration:
    """Upload, then decode steps; `stop` after the last, `fails_at` raises instead of that step."""

    def __init__(self, session: FakeSession, limit: int) -> None:
        self.stop = ""
        self.closed = False
        self.session = session
        self.threads: set[int] = set()
        self._stages = self._run(limit)

    def __iter__(self) -> FakeGeneration:
        return self

    def __next__(self) -> str:
        self.threads.add(threading.get_ident())
        return next(self._stages)

    def _run(self, limit: int) -> Iterator[str]:
        session = self.session
        run = session.run
        run.emit("stage_begin", stage="prefill", detail={"graph": "prefill"})
        run.step("prefill", -1, 7, 20_000, 0, 0)
        yield "prefill"
        start = {"stage": "decode", "step": -1}
        run.emit("stage_begin", stage="decode", detail={"graph": "decode"})
        for half in ("a", "b"):
            run.allocate(f"recurrent.{half}", "past_recurrent_states", "recurrent", (3, 1, 4, 8, 8), "float32", **start)
            run.allocate(f"conv.{half}", "past_conv_states", "conv", (3, 1, 24, 3), "float16", **start)
            run.allocate(f"kv.{half}", "past_kv_cache", "kv", run.kv_shape(run.capacity), "float16", **start)
        run.allocate("logits", "logits", "logits", (1, 1, 64), "float16", **start)
        yield "upload"
        for step in range(limit):
            if step == session.fails_at:
                raise RuntimeError("the card fell off the bus")
            if session.gate is not None:
                session.gate.acquire()
            run.decode(step, 10 + step)
            if step == limit - 1:
                self.stop = "limit"
            yield "decode"
        run.emit("stage_end", stage="decode", detail={"graph": "decode"})

    def close(self) -> None:
        self.closed = True
        self._stages.close()

    def result(self) -> str:
        return "result"


class FakeSession:
    """What the cockpit needs of a session."""

    def __init__(self, *, fails_at: int = -1, gate: threading.Semaphore | None = None) -> None:
        self.fails_at = fails_at
        self.gate = gate
        self.notes = ("a note",)
        self.context = SimpleNamespace(state="resident", kv="fixed", numerics="device", speculate=0, peek=False)
        self.driver = SimpleNamespace(name="fake", device="ascend:0")
        self.asked: list[tuple[Any, ...]] = []
        self.generation: FakeGeneration | None = None
        self.run: Run

    def stream(self, prompt: str, image: Any = None, *, max_new_tokens: int, ignore_eos: bool) -> FakeGeneration:
        self.asked.append((prompt, image, max_new_tokens, ignore_eos))
        self.generation = FakeGeneration(self, max_new_tokens)
        return self.generation

    @contextmanager
    def record(self, path: Path | None = None) -> Iterator[Ledger]:
        ledger = Ledger(path)
        for key, value in {"kv": "fixed", "state": "resident", "capacity": 16, "spec": SPEC, "driver": "fake"}.items():
            ledger.set_meta(key, value)
        self.run = Run(ledger)
        try:
            yield ledger
        finally:
            ledger.close()
