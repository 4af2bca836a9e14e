"""What speculation costs and gains on the tiny model, as ratios in one process (CPU time, medians of pairs).

Steps are compared in blocks that alternate between the two sessions, so that both meet the same machine.

    python -m tests.bench.bench_speculative

Verify of 4 tokens against a plain decode step; repeating and pattern prompts (going on after the end of text, to have
enough steps) with lookup against plain decoding; a text in which lookup finds nothing against plain decoding.
Emulated device: ratios of this CPU, not of an NPU.
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
STEPS_A_BLOCK = 8
BOUNDS = {
    "verify of 4 tokens / decode step": 1.6,
    "time a token, repeating text, lookup / plain": 0.7,
    "time a token, lookup finds nothing / plain": 1.05,
}
LEAST_TOKENS_A_VERIFY = 2.5
REPEATING = (
    "Repeat: cat dog bird fish fox lion goat wolf",
    "Copy these words: ship moon lake stone tree house door lamp",
    "Continue the pattern: red blue red blue red blue red",
    "Continue the pattern: sun moon sun moon sun moon sun",
)
DRAFTS = 7


def step_ratios(session: Session, plain: Session, prompt: str, **options: object) -> list[float]:
    """CPU time of a block of steps of `session` by that of a block of `plain`, both decoding the prompt in turns."""
    ours = session.stream(prompt, max_new_tokens=TOKENS, ignore_eos=True, **options)
    theirs = plain.stream(prompt, max_new_tokens=TOKENS, ignore_eos=True)
    for generation in (ours, theirs):
        while next(generation).step < 1:  # the first steps open graphs
            pass
    ratios = []
    for pair in range((TOKENS - 10) // STEPS_A_BLOCK):
        spent = {}
        for generation in (ours, theirs) if pair % 2 else (theirs, ours):
            start = time.process_time()
            for _ in range(STEPS_A_BLOCK):
                next(generation)
            spent[generation] = time.process_time() - start
        ratios.append(spent[ours] / spent[theirs])
    ours.close()
    theirs.close()
    return ratios


def cpu_ms(session: Session, prompt: str, tokens: int, **options: object) -> tuple[float, int, int]:
    """(median CPU milliseconds of a step, tokens, steps) of one generation; a median, as some steps open a graph."""
    generation = session.stream(prompt, max_new_tokens=tokens, ignore_eos=True, **options)
    spent_ms, made, before = [], 0, time.process_time()
    for step in generation:
        now = time.process_time()
        if step.step >= 0:
            spent_ms.append((now - before) * 1e3)
            made += len(step.tokens)
        before = now
    return statistics.median(spent_ms), made, len(spent_ms)


def per_token_ms(session: Session, prompt: str, tokens: int, **options: object) -> float:
    step_ms, made, steps = cpu_ms(session, prompt, tokens, **options)
    return step_ms * steps / made


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
        wrong = ScriptedDrafter(answer, right=lambda call: 0, wrong=lambda token: (token + 1) % 256)
        ratios[verify] += step_ratios(drafting, plain, REPEATING[0], drafter=wrong)
        ratios[silent] += step_ratios(looking, plain, REPEATING[0], drafter=Silent())
        for prompt in REPEATING:
            plain_ms = per_token_ms(plain, prompt, TOKENS)
            step_ms, made, steps = cpu_ms(looking, prompt, TOKENS)
            ratios[repeating].append(step_ms * steps / made / plain_ms)
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
