"""One greedy generation: vision, prefill, the one-time upload of the states, then decode or verify step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from qwen_npu.runtime.chooser import TokenChooser
from qwen_npu.runtime.drafts import Drafter
from qwen_npu.runtime.inputs import Feed
from qwen_npu.runtime.meter import Meter, told
from qwen_npu.runtime.peeks import StatePeek
from qwen_npu.runtime.results import GenerateResult, StepResult
from qwen_npu.runtime.speculative import SpeculativeGroup
from qwen_npu.runtime.stages import DecodeStage, PrefillResult, StageModel, open_stage, run_prefill, run_vision
from qwen_npu.runtime.states import DecodeInfos, fixed_capacity, hand_over

if TYPE_CHECKING:
    from qwen_npu.bundle import GraphName
    from qwen_npu.runtime.session import Session


class Generation(Iterator[StepResult]):
    """A generation under way: iterate it for one StepResult a stage and step; `result()` gives all of it so far.

    Attributes:
        stop: why it ended ("end", "limit", "capacity"), "" while it goes on.
    """

    def __init__(
        self,
        session: Session,
        feed: Feed,
        bucket: int,
        chooser: TokenChooser,
        notes: Sequence[str],
        drafter: Drafter | None = None,
    ) -> None:
        self._session = session
        self._driver = session.driver
        self._feed = feed
        self._bucket = bucket
        self._chooser = chooser
        self._notes = tuple(notes)
        self._drafter = drafter
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
        tokens = tuple(token for step in self._steps for token in step.tokens)
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
        session, feed, chooser = self._session, self._feed, self._chooser
        prefill = yield from prompt_stages(session, feed, self._bucket, chooser)
        if chooser.stop:
            return
        if session.speculate:
            yield from self._speculate(prefill)
            return
        driver = self._driver
        graph: GraphName = "decode_fixed" if session.kv == "fixed" else "decode_growing"
        with stage_of(session, graph) as model, StatePeek(session) if session.peek else nullcontext() as peek:
            meter = Meter(driver)
            capacity = fixed_capacity(DecodeInfos(model.inputs, model.outputs))
            states = hand_over(prefill.states, prefill.pads, self._bucket, capacity)
            resident = session.state == "resident"
            decode = DecodeStage(driver, model, states, len(feed.tokens), feed.delta, resident=resident)
            session.adopt(decode)
            yield self._told(meter.step("upload", build_ms=model.build_ms))
            while not chooser.stop:
                driver.step += 1
                meter = Meter(driver)
                logits, predict_ms = decode.step(chooser.token)
                choice = chooser.choose(logits, full=decode.full)
                step = meter.step("decode", driver.step, predict_ms=predict_ms, **choice)
                if peek is not None:
                    peek.look(decode)
                yield self._told(step)

    def _speculate(self, prefill: PrefillResult) -> Generator[StepResult, None, None]:
        session, driver = self._session, self._driver
        meter = Meter(driver)
        group = SpeculativeGroup(session, drafts=session.speculate)
        session.adopt(group)
        try:
            group.admit(self._feed, prefill, self._bucket, self._chooser, self._drafter)
            yield self._told(meter.step("upload", build_ms=group.build_ms))
            while not self._chooser.stop:
                yield group.step()
        finally:
            group.close_models()

    def _told(self, step: StepResult) -> StepResult:
        return told(self._driver, step, len(self._feed.tokens))


def prompt_stages(
    session: Session, feed: Feed, bucket: int, chooser: TokenChooser
) -> Generator[StepResult, None, PrefillResult]:
    """Vision (with a picture) and prefill; each model is released before its StepResult is given. Returns prefill's."""
    driver = session.driver
    embeds = None
    if feed.image is not None:
        with stage_of(session, "vision", feed.image.grid) as model:
            meter = Meter(driver)
            embeds = run_vision(driver, model, feed.image.pixel_values)
            step = meter.step("vision", build_ms=model.build_ms)
        yield told(driver, step, len(feed.tokens))
    with stage_of(session, "prefill") as model:
        meter = Meter(driver)
        prefill = run_prefill(driver, model, feed.tokens, feed.positions, embeds, bucket)
        predict_ms = meter.elapsed_ms()
        choice = chooser.choose(prefill.logits[0, -1])
        step = meter.step("prefill", build_ms=model.build_ms, predict_ms=predict_ms, **choice)
    yield told(driver, step, len(feed.tokens))
    return prefill


def stage_of(
    session: Session, graph: GraphName, grid: tuple[int, int] | None = None
) -> AbstractContextManager[StageModel]:
    """A stage of the session's bundle, built now and released at the end of the block."""
    bundle, numerics = session.bundle, session.numerics
    path = bundle.path(graph, numerics=numerics, grid=grid)
    return open_stage(session.driver, path, graph, bundle.contract(graph, numerics=numerics, grid=grid))
