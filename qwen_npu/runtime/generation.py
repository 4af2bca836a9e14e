"""One greedy generation: vision, prefill, the one-time upload of the states, then decode step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.ledger.events import now_ns
from qwen_npu.runtime.inputs import Feed, TextStream
from qwen_npu.runtime.results import GenerateResult, StepResult
from qwen_npu.runtime.stages import DecodeStage, StageModel, open_stage, run_prefill, run_vision
from qwen_npu.runtime.states import DecodeInfos, fixed_capacity, hand_over

if TYPE_CHECKING:
    from qwen_npu.bundle import GraphName
    from qwen_npu.runtime.session import Session


class Generation(Iterator[StepResult]):
    """A generation under way: iterate it for one StepResult a stage and step; `result()` gives all of it so far.

    Attributes:
        stop: why it ended ("end", "limit", "capacity"), "" while it goes on.
    """

    def __init__(self, session: Session, feed: Feed, bucket: int, chooser: TokenChooser, notes: Sequence[str]) -> None:
        self._session = session
        self._driver = session.driver
        self._feed = feed
        self._bucket = bucket
        self._chooser = chooser
        self._notes = tuple(notes)
        self._steps: list[StepResult] = []
        self._run = self._stages()

    @property
    def stop(self) -> str:
        return self._chooser.stop

    def __next__(self) -> StepResult:
        step = next(self._run)
        self._steps.append(step)
        return step

    def close(self) -> None:
        """Ends it early: the models are released, the states stay readable."""
        self._run.close()

    def result(self) -> GenerateResult:
        """Everything so far as one result."""
        session = self._session
        tokens = tuple(step.token for step in self._steps if step.token is not None)
        peak_device_bytes, source = session.peak_device_bytes()
        return GenerateResult(
            tokens=tokens,
            text=session.inputs.decode(tokens),
            prompt_tokens=len(self._feed.tokens),
            stop=self.stop,
            steps=tuple(self._steps),
            peak_device_bytes=peak_device_bytes,
            peak_source=source,
            driver=session.driver.name,
            device=session.device,
            notes=self._notes,
        )

    def _stages(self) -> Generator[StepResult, None, None]:
        feed, driver, chooser = self._feed, self._driver, self._chooser
        embeds = None
        if feed.image is not None:
            with self._stage("vision", feed.image.grid) as model:
                meter = _Meter(driver)
                embeds = run_vision(driver, model, feed.image.pixel_values)
                step = meter.step("vision", build_ms=model.build_ms)
            yield self._told(step)
        with self._stage("prefill") as model:
            meter = _Meter(driver)
            prefill = run_prefill(driver, model, feed.tokens, feed.positions, embeds, self._bucket)
            predict_ms = meter.elapsed_ms()
            choice = chooser.choose(prefill.logits[0, -1])
            step = meter.step("prefill", build_ms=model.build_ms, predict_ms=predict_ms, **choice)
        yield self._told(step)
        if self.stop:
            return
        with self._stage("decode_fixed" if self._session.kv == "fixed" else "decode_growing") as model:
            meter = _Meter(driver)
            capacity = fixed_capacity(DecodeInfos(model.inputs, model.outputs))
            states = hand_over(prefill.states, prefill.pads, self._bucket, capacity)
            decode = DecodeStage(
                driver, model, states, len(feed.tokens), feed.delta, resident=self._session.state == "resident"
            )
            self._session.adopt(decode)
            yield self._told(meter.step("upload", build_ms=model.build_ms))
            while not self.stop:
                driver.step += 1
                meter = _Meter(driver)
                logits, predict_ms = decode.step(chooser.token)
                choice = chooser.choose(logits, full=decode.full)
                yield self._told(meter.step("decode", driver.step, predict_ms=predict_ms, **choice))

    def _stage(self, graph: GraphName, grid: tuple[int, int] | None = None) -> AbstractContextManager[StageModel]:
        bundle, numerics = self._session.bundle, self._session.numerics
        path = bundle.path(graph, numerics=numerics, grid=grid)
        return open_stage(self._driver, path, graph, bundle.contract(graph, numerics=numerics, grid=grid))

    def _told(self, step: StepResult) -> StepResult:
        if self._driver.recording:
            detail = {**step.to_json(), "prompt_tokens": len(self._feed.tokens)}
            self._driver.emit("step", now_ns() - int(step.wall_ms * 1e6), detail=detail)
        return step


class TokenChooser:
    """Greedy choice, or teacher forcing: what the next step is fed, the text so far, and when to stop.

    Args:
        limit_tokens: most tokens of the answer.
        end_tokens: ids that end it; empty to ignore end of text.
        force_tokens: fed instead of the chosen ones.
        want_logits: put the logits into each choice.
    """

    def __init__(
        self,
        text: TextStream,
        limit_tokens: int,
        end_tokens: Sequence[int],
        force_tokens: Sequence[int] | None,
        want_logits: bool,
    ) -> None:
        self._text = text
        self._limit_tokens = limit_tokens
        self._end_tokens = frozenset(end_tokens)
        self._force_tokens = force_tokens
        self._want_logits = want_logits
        self._count = 0
        self.token = -1
        self.stop = ""

    def choose(self, logits: np.ndarray, *, full: bool = False) -> dict[str, Any]:
        """Takes the logits [vocab] of one position; `full` says that no further token can be fed.

        Returns:
            the StepResult fields token (the choice, also under teacher forcing), text and logits.
        """
        token = int(logits.argmax())
        self.token = token if self._force_tokens is None else int(self._force_tokens[self._count])
        self._count += 1
        if token in self._end_tokens:
            self.stop = "end"
        elif self._count >= self._limit_tokens:
            self.stop = "limit"
        elif full:
            self.stop = "capacity"
        text = self._text.push(token, last=bool(self.stop))
        return {"token": token, "text": text, "logits": logits if self._want_logits else None}


class _Meter:
    """Time and bytes from its making on."""

    def __init__(self, driver: RecordingDriver) -> None:
        self._driver = driver
        self._start_ns = now_ns()
        self._before = self._counters()

    def _counters(self) -> tuple[int, int, int]:
        driver = self._driver
        return driver.host_to_device_bytes, driver.device_to_host_bytes, driver.allocated_bytes

    def elapsed_ms(self) -> float:
        return (now_ns() - self._start_ns) / 1e6

    def step(self, stage: str, step: int = -1, *, predict_ms: float | None = None, **fields: Any) -> StepResult:
        """A StepResult of what happened since; `predict_ms` is the whole time where not given."""
        wall_ms = self.elapsed_ms()
        up, down, allocated = (now - before for now, before in zip(self._counters(), self._before, strict=True))
        return StepResult(
            stage,
            step,
            predict_ms=wall_ms if predict_ms is None else predict_ms,
            wall_ms=wall_ms,
            host_to_device_bytes=up,
            device_to_host_bytes=down,
            allocated_bytes=allocated,
            **fields,
        )
