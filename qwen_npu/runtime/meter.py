"""Time and bytes of a stretch of a run, as a StepResult, and the telling of it to the ledger."""

from __future__ import annotations

from typing import Any

from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.ledger.events import now_ns
from qwen_npu.runtime.results import StepResult


class Meter:
    """Time and bytes from its making on."""

    def __init__(self, driver: RecordingDriver) -> None:
        self.driver = driver
        self.start_ns = now_ns()
        self._up_bytes = driver.host_to_device_bytes
        self._down_bytes = driver.device_to_host_bytes
        self._allocated_bytes = driver.allocated_bytes

    def elapsed_ms(self) -> float:
        return (now_ns() - self.start_ns) / 1e6

    def step(self, stage: str, step: int = -1, *, predict_ms: float | None = None, **fields: Any) -> StepResult:
        """A StepResult of what happened since; `predict_ms` is the whole time where not given."""
        wall_ms, driver = self.elapsed_ms(), self.driver
        return StepResult(
            stage,
            step,
            predict_ms=wall_ms if predict_ms is None else predict_ms,
            wall_ms=wall_ms,
            host_to_device_bytes=driver.host_to_device_bytes - self._up_bytes,
            device_to_host_bytes=driver.device_to_host_bytes - self._down_bytes,
            allocated_bytes=driver.allocated_bytes - self._allocated_bytes,
            **fields,
        )


def told(meter: Meter, step: StepResult, prompt_tokens: int) -> StepResult:
    """The step that `meter` measured, after the ledger has heard of it.

    It is told with the prompt's length, so that readers know the tokens in use, and with its own time: it may be told
    later, when the stage's model is released.
    """
    driver = meter.driver
    if driver.recording:
        detail = step.to_json()
        detail["prompt_tokens"] = prompt_tokens
        driver.emit("step", meter.start_ns, dur_ns=int(step.wall_ms * 1e6), detail=detail)
    return step
