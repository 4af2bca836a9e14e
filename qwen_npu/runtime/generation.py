"""One greedy generation: vision, prefill, the one-time upload of the states, then decode or verify step by step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate

from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import StateError
from qwen_npu.runtime.chooser import TokenChooser
from qwen_npu.runtime.context import RunContext
from qwen_npu.runtime.drafts import Drafter
from qwen_npu.runtime.inputs import Feed
from qwen_npu.runtime.meter import Meter, told
from qwen_npu.runtime.peeks import StatePeek
from qwen_npu.runtime.prompt import prompt_stages, stage_of
from qwen_npu.runtime.results import GenerateResult, StepResult
from qwen_npu.runtime.speculative import SpeculativeGroup
from qwen_npu.runtime.stages import DecodeStage, PrefillResult
from qwen_npu.runtime.states import DecodeInfos, HeldStates, fixed_capacity, hand_over


class Generation(Iterator[StepResult]):
    """A generation under way: iterate it for one StepResult a stage and step; `result()` gives all of it so far.

    Args:
        hold: takes the states over, so that they can be read when the generation has ended.

    Attributes:
        stop: why it ended ("end", "limit", "capacity"), "" while it goes on.
    """

    def __init__(
        self,
        context: RunContext,
        feed: Feed,
        bucket: int,
        chooser: TokenChooser,
        notes: Sequence[str],
        hold: Callable[[HeldStates], None],
        drafter: Drafter | None = None,
    ) -> None:
        self._context = context
        self._driver = context.driver
        self._hold = hold
        self._feed = feed
        self._bucket = bucket
        self._chooser = chooser
        self._notes = tuple(notes)
        self._drafter = drafter
        self._steps: list[StepResult] = []
        self._run = self._stages()
        self._ended_by = ""

    @property
    def stop(self) -> str:
        return self._chooser.stop

    def __next__(self) -> StepResult:
        if self._ended_by:
            raise StateError(
                f"this generation was ended: {self._ended_by}",
                expected="one generation of a session at a time: the states are the session's",
                fix="take the steps before, or open a session for each",
            )
        step = next(self._run)
        self._steps.append(step)
        return step

    def close(self) -> None:
        """Ends it early: the models are released, the states stay readable."""
        self._run.close()

    def give_way(self, why: str) -> None:
        """Ends it, unless it has ended, because the session goes on to something else; a later `next` says why.

        Raises:
            StateError: it is in the midst of a step, in another thread.
        """
        state = getgeneratorstate(self._run)
        if state == GEN_RUNNING:
            raise StateError(
                "a generation of this session is in the midst of a step", fix="wait for it, or open another session"
            )
        if state != GEN_CLOSED:
            self._run.close()
            self._ended_by = why

    def result(self) -> GenerateResult:
        """Everything so far as one result."""
        driver = self._driver
        tokens = tuple(token for step in self._steps for token in step.tokens)
        peak_device_bytes, source = peak_of(driver)
        return GenerateResult(
            tokens=tokens,
            text=self._context.inputs.decode(tokens),
            prompt_tokens=len(self._feed.tokens),
            stop=self.stop,
            steps=tuple(self._steps),
            peak_device_bytes=peak_device_bytes,
            peak_source=source,
            driver=driver.name,
            device=driver.device,
            notes=self._notes,
        )

    def _stages(self) -> Generator[StepResult, None, None]:
        context, feed, chooser = self._context, self._feed, self._chooser
        prefill = yield from prompt_stages(context, feed, self._bucket, chooser)
        if chooser.stop:
            return
        if context.speculate:
            yield from self._speculate(prefill)
            return
        driver = self._driver
        with (
            stage_of(context, "decode_fixed" if context.kv == "fixed" else "decode_growing") as model,
            StatePeek(context) if context.peek else nullcontext() as peek,
        ):
            meter = Meter(driver)
            capacity = fixed_capacity(DecodeInfos(model.inputs, model.outputs))
            states = hand_over(prefill.states, prefill.pads, self._bucket, capacity)
            resident = context.state == "resident"
            decode = DecodeStage(driver, model, states, len(feed.tokens), feed.delta, resident=resident)
            self._hold(decode)
            yield self._told(meter, meter.step("upload", build_ms=model.build_ms))
            while not chooser.stop:
                driver.step += 1
                meter = Meter(driver)
                logits, predict_ms = decode.step(chooser.token)
                choice = chooser.choose(logits, full=decode.full)
                step = self._told(meter, meter.step("decode", driver.step, predict_ms=predict_ms, **choice))
                if peek is not None:  # after the step was told: what a peek moves is no part of it
                    peek.look(decode)
                yield step

    def _speculate(self, prefill: PrefillResult) -> Generator[StepResult, None, None]:
        meter = Meter(self._driver)
        group = SpeculativeGroup(self._context, drafts=self._context.speculate)
        self._hold(group)
        try:
            group.admit(self._feed, prefill, self._bucket, self._chooser, self._drafter)
            yield self._told(meter, meter.step("upload", build_ms=group.build_ms))
            while not self._chooser.stop:
                yield group.step()
        finally:
            group.close_models()

    def _told(self, meter: Meter, step: StepResult) -> StepResult:
        return told(meter, step, len(self._feed.tokens))


def peak_of(driver: RecordingDriver) -> tuple[int, str]:
    """Most device bytes in use at once since the device was opened, and who knows it: the emulator, or our own
    books."""
    known = driver.memory_bytes()
    return (known[1], "emulator") if known is not None else (driver.peak_bytes, "observed")
