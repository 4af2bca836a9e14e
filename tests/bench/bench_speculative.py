"""What speculation costs and gains on the tiny model, as ratios in one process (CPU time, medians of pairs).

    python -m tests.bench.bench_speculative

Verify of 4 tokens against a plain decode step; a repeating text with lookup against plain decoding; a text in which
lookup finds nothing against plain decoding. Emulated device: ratios of this CPU, not of an NPU.
"""

from __future__ import annotations

import statistics
import sys
import time

from qwen_npu.bundle import open_bundle
from qwen_npu.runtime.drafts import ScriptedDrafter
from qwen_npu.runtime.session import Session

PAIRS = 9
TOKENS = 90
BOUNDS = {
    "verify of 4 tokens / decode step": 1.6,
    "time a token, repeating text, lookup / plain": 0.7,
    "time a token, lookup finds nothing / plain": 1.05,
}
LEAST_TOKENS_A_VERIFY = 2.5
REPEATING = (
    "Repeat: ship moon ship moon ship moon ship moon ship moon ship moon",
    "Continue the pattern: sun rain sun rain sun rain sun rain",
)
DRAFTS = 4


def cpu_ms(session: Session, prompt: str, tokens: int, **options: object) -> tuple[float, int, int]:
    """(CPU milliseconds of the steps, tokens, steps) of one generation."""
    generation = session.stream(prompt, max_new_tokens=tokens, ignore_eos=True, **options)
    for step in generation:
        if step.stage == "upload":
            break
    start = time.process_time()
    steps = [(time.process_time() - start, len(step.tokens)) for step in generation]
    # the first step opens the graphs of a speculative run
    first_s, first_tokens = steps[0]
    return (steps[-1][0] - first_s) * 1e3, sum(count for _, count in steps) - first_tokens, len(steps) - 1


def per(session: Session, prompt: str, tokens: int, *, step: bool = False, **options: object) -> float:
    spent_ms, made, steps = cpu_ms(session, prompt, tokens, **options)
    return spent_ms / (steps if step else made)


class Silent:
    """A drafter that is asked and never finds anything, at the cost of looking."""

    def __init__(self) -> None:
        from qwen_npu.runtime.drafts import PromptLookup

        self._lookup = PromptLookup()

    def extend(self, tokens) -> None:
        self._lookup.extend(tokens)

    def draft(self, limit_tokens: int) -> list[int]:
        self._lookup.draft(limit_tokens)
        return []


def main() -> int:
    bundle = open_bundle("tiny")
    plain = Session(bundle, driver="emulator")
    drafting = Session(bundle, driver="emulator", speculate=3)
    looking = Session(bundle, driver="emulator", speculate=DRAFTS)
    answer = plain.generate(REPEATING[0], max_new_tokens=TOKENS, ignore_eos=True).tokens
    ratios: dict[str, list[float]] = {name: [] for name in BOUNDS}
    verify, repeating, silent = BOUNDS
    yields = []
    for _ in range(PAIRS):
        step_ms = per(plain, REPEATING[0], TOKENS, step=True)
        wrong = ScriptedDrafter(answer, right=lambda call: 0, wrong=lambda token: (token + 1) % 256)
        ratios[verify].append(per(drafting, REPEATING[0], 40, step=True, drafter=wrong) / step_ms)
        ratios[silent].append(per(looking, REPEATING[0], TOKENS, drafter=Silent()) / step_ms)
        for prompt in REPEATING:
            natural = plain.generate(prompt, max_new_tokens=TOKENS)
            if len(natural.tokens) < 8:
                continue
            length = len(natural.tokens)
            plain_ms = per(plain, prompt, length)
            spent_ms, made, steps = cpu_ms(looking, prompt, length)
            ratios[repeating].append(spent_ms / made / plain_ms)
            yields.append(made / steps)
    fine = True
    for name, bound in BOUNDS.items():
        median = statistics.median(ratios[name])
        fine &= median <= bound
        print(f"{name:<48}{median:6.2f}  at most {bound}  (measured on this CPU, emulated device)")
    made = statistics.median(yields)
    print(f"{'tokens a verify, repeating text':<48}{made:6.2f}  at least {LEAST_TOKENS_A_VERIFY}")
    return 0 if fine and made >= LEAST_TOKENS_A_VERIFY else 1


if __name__ == "__main__":
    sys.exit(main())
