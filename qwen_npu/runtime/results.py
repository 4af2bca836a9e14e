"""What a generation gives back: one StepResult a stage and step, and the whole as a GenerateResult."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StepResult:
    """What one stage or decode step did.

    Attributes:
        stage: "vision", "prefill", "upload" (the one-time crossing of the states), "decode" or "verify".
        step: decode or verify step from 0; -1 for the other stages.
        token: the last token that became known, None where none did.
        tokens: all tokens that became known; a verify can prove several.
        text: the text that they completed.
        logits: [vocab] on request (a verify: one row a token), else None.
        predict_ms: from arranging the inputs to the return of predict.
        wall_ms: from the start of the step to the token being known; for a stage, build and release are not in it.
        build_ms: loading and building the stage's model.
        host_to_device_bytes, device_to_host_bytes: what crossed the bus.
        allocated_bytes: device memory allocated.
        drafted, accepted: draft tokens verified and found right.
    """

    stage: str
    step: int = -1
    token: int | None = None
    tokens: tuple[int, ...] = ()
    text: str = ""
    logits: np.ndarray | None = field(default=None, repr=False, compare=False)
    predict_ms: float = 0.0
    wall_ms: float = 0.0
    build_ms: float = 0.0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    allocated_bytes: int = 0
    drafted: int = 0
    accepted: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields without the logits."""
        facts = vars(self).copy()
        del facts["logits"]
        return facts


@dataclass(frozen=True)
class GenerateResult:
    """A whole generation.

    Attributes:
        tokens: ids of the answer, with the end-of-text token if it came.
        text: the answer without special tokens.
        prompt_tokens: tokens of the prompt, image tokens included.
        stop: why it ended: "end" (of text), "limit" (max_new_tokens) or "capacity" (the fixed KV is full).
        steps: every StepResult in order.
        peak_device_bytes: most device memory in use at once.
        peak_source: who knows the peak: "emulator" (weights and all), or "observed" (the buffers we made).
        driver, device: where it ran.
        notes: what was done to the input or decided for the user.
    """

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    stop: str
    steps: tuple[StepResult, ...]
    peak_device_bytes: int
    peak_source: str
    driver: str
    device: str
    notes: tuple[str, ...]

    @property
    def decode_steps(self) -> tuple[StepResult, ...]:
        """The decode or verify steps."""
        return tuple(step for step in self.steps if step.stage in ("decode", "verify"))

    def stage(self, name: str) -> StepResult | None:
        """The StepResult of "vision", "prefill" or "upload"."""
        return next((step for step in self.steps if step.stage == name), None)

    def to_json(self) -> dict[str, Any]:
        """The object that `qwen-npu run --json` prints; medians over decode steps, per-step traffic as lists."""
        decode = self.decode_steps
        upload = self.stage("upload")
        return {
            "tokens": list(self.tokens),
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "stop": self.stop,
            "stages": {
                step.stage: {"build_ms": step.build_ms, "predict_ms": step.predict_ms, "wall_ms": step.wall_ms}
                for step in self.steps
                if step.stage in ("vision", "prefill")
            },
            "decode": {
                "steps": len(decode),
                "predict_ms": _median([step.predict_ms for step in decode]),
                "wall_ms": _median([step.wall_ms for step in decode]),
                "upload_ms": upload.wall_ms if upload else 0.0,
                "wall_total_ms": sum(step.wall_ms for step in decode) + (upload.wall_ms if upload else 0.0),
            },
            "traffic": {
                "host_to_device_bytes": [step.host_to_device_bytes for step in decode],
                "device_to_host_bytes": [step.device_to_host_bytes for step in decode],
                "allocated_bytes": [step.allocated_bytes for step in decode],
            },
            "speculation": self._speculation(),
            "peak_device_bytes": self.peak_device_bytes,
            "peak_source": self.peak_source,
            "driver": self.driver,
            "device": self.device,
            "notes": list(self.notes),
        }

    def _speculation(self) -> dict[str, Any] | None:
        verifies = [step for step in self.steps if step.stage == "verify"]
        if not verifies:
            return None
        drafted, accepted = sum(step.drafted for step in verifies), sum(step.accepted for step in verifies)
        return {
            "verifies": len(verifies),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else 0.0,
            "tokens_per_verify": sum(len(step.tokens) for step in verifies) / len(verifies),
        }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
