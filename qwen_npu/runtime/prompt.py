"""What comes before decoding, the same for every way of decoding: vision (with a picture) and prefill."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from qwen_npu.runtime.chooser import TokenChooser
from qwen_npu.runtime.context import RunContext
from qwen_npu.runtime.inputs import Feed
from qwen_npu.runtime.meter import Meter, told
from qwen_npu.runtime.results import StepResult
from qwen_npu.runtime.stages import PrefillResult, StageModel, open_stage, run_prefill, run_vision

if TYPE_CHECKING:
    from qwen_npu.bundle import GraphName


def prompt_stages(
    context: RunContext, feed: Feed, bucket: int, chooser: TokenChooser
) -> Generator[StepResult, None, PrefillResult]:
    """Vision and prefill; each model is released before its StepResult is given. Returns prefill's result."""
    driver = context.driver
    embeds = None
    if feed.image is not None:
        with stage_of(context, "vision", feed.image.grid) as model:
            meter = Meter(driver)
            embeds = run_vision(driver, model, feed.image.pixel_values)
            step = meter.step("vision", build_ms=model.build_ms)
        yield told(meter, step, len(feed.tokens))
    with stage_of(context, "prefill", tokens=bucket) as model:
        meter = Meter(driver)
        prefill = run_prefill(driver, model, feed.tokens, feed.positions, embeds, bucket)
        predict_ms = meter.elapsed_ms()
        choice = chooser.choose(prefill.logits[0, -1])
        step = meter.step("prefill", build_ms=model.build_ms, predict_ms=predict_ms, **choice)
    yield told(meter, step, len(feed.tokens))
    return prefill


def stage_of(
    context: RunContext, graph: GraphName, grid: tuple[int, int] | None = None, tokens: int | None = None
) -> AbstractContextManager[StageModel]:
    """A stage of the bundle, built now and released at the end of the block."""
    bundle, numerics = context.bundle, context.numerics
    path = bundle.path(graph, numerics=numerics, grid=grid, tokens=tokens)
    return open_stage(context.driver, path, graph, bundle.contract(graph, numerics=numerics, grid=grid))


def finished(stages: Generator[StepResult, None, PrefillResult]) -> PrefillResult:
    """Runs the stages to their end without looking, and gives what they return."""

    def returned() -> Generator[StepResult, None, None]:
        result.append((yield from stages))

    result: list[PrefillResult] = []
    for _ in returned():
        pass
    return result[0]
