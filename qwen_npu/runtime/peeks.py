"""Looking at states without touching them: a small graph on the device reduces them to a few figures a head.

Only those figures cross the bus (kilobytes), and residency is not broken. They become the ledger's `peek` events.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from qwen_npu import contract
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.ledger.events import now_ns
from qwen_npu.runtime.context import RunContext
from qwen_npu.runtime.stages import DecodeStage, open_stage

FIGURES = ("norm", "max_abs", "nonfinite")
"""Names of the figures in the ledger, in the order of `contract.PEEK_FIGURES`: "recurrent.norm" [layer, head], ..."""


class StatePeek:
    """The peek graph of one sequence's states, loaded beside the decode graph while the block lasts."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._stack = ExitStack()

    def __enter__(self) -> StatePeek:
        context, bundle = self._context, self._context.bundle
        capacity = bundle.capacity if context.kv == "fixed" else None
        graph = contract.peek(bundle.spec, context.numerics, capacity=capacity)
        path = bundle.peek(kv=context.kv, numerics=context.numerics)
        stage = context.driver.stage
        self._model = self._stack.enter_context(open_stage(context.driver, path, f"peek_{context.kv}", graph))
        context.driver.stage = stage
        info = self._model.inputs[0]
        self._position = np.zeros(info.shape, info.dtype)
        self._feed = context.driver.wrap(self._position, name=info.name, buffer=f"input.{info.name}")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def look(self, decode: DecodeStage) -> None:
        """Peeks at the live states and the KV's newest position, and tells the ledger.

        Arrays of the event, f32: "recurrent.FIGURE" [linear layer, head], "conv.FIGURE" [linear layer] and
        "kv.FIGURE" [k and v of each full layer, KV head], for each of `FIGURES`.
        """
        driver = self._context.driver
        start = now_ns()
        self._position[0] = decode.tokens - 1
        feeds = [self._feed, *decode.states.inputs()]
        conv, recurrent, kv = (driver.download(result) for result in self._model.predict(feeds))
        tell_peek(driver, start, {"conv": conv, "recurrent": recurrent, "kv": kv[:, 0]})


def tell_peek(driver: RecordingDriver, start_ns: int, peeked: Mapping[str, np.ndarray]) -> None:
    """Tells the ledger of a peek: arrays [..., figure] become "KIND.FIGURE" [...], for each of `FIGURES`."""
    arrays = {
        f"{kind}.{name}": np.ascontiguousarray(array[..., figure])
        for kind, array in peeked.items()
        for figure, name in enumerate(FIGURES)
    }
    driver.emit("peek", start_ns, nbytes=sum(array.nbytes for array in peeked.values()), arrays=arrays)
