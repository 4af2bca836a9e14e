"""What speculation costs and gains on the tiny model, as ratios in one process (CPU time, medians of pairs).

Steps are compared in blocks of the two sessions in the order A B B A, since whoever takes over finds the other's
weights in the cache; and once with either opened first, since the place that its weights get in memory is worth a
tenth.

    python -m tests.bench.bench_speculative

Verify of 4 tokens against a plain decode step; repeating and pattern prompts (going on after the end of text, to have
enough steps) with lookup against plain decoding; a text in which lookup finds nothing against plain decoding.
Emulated device: ratios of this CPU, not of an NPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from qwen_npu.bundle import open_bundle
from qwen_npu.runtime.drafts import Drafter, PromptLookup, ScriptedDrafter
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


def step_ratio(session: Session, plain: Session, prompt: str, drafter: Callable[[], Drafter]) -> float:
    """CPU time of a step of `session` by that of one of `plain`, both decoding the prompt in turns."""
    spent = {session: 0.0, plain: 0.0}
    for order in ((session, plain), (plain, session)):
        running = {}
        for one in order:
            options = {"drafter": drafter()} if one is session else {}
            running[one] = one.stream(prompt, max_new_tokens=TOKENS, ignore_eos=True, **options)
            while next(running[one]).step < 1:  # the first steps open graphs
                pass
        for _ in range((TOKENS - 10) // (2 * STEPS_A_BLOCK)):
            for one in (*order, *reversed(order)):
                start = time.process_time()
                for _ in range(STEPS_A_BLOCK):
                    next(running[one])
                spent[one] += time.process_time() - start
        for one in order:
            running[one].close()
    return spent[session] / spent[plain]


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


class Silent(PromptLookup):
    """A drafter that is asked and never finds anything, at the cost of looking."""

    def draft(self, limit_tokens: int) -> list[int]:
        super().draft(limit_tokens)
        return []


def main() -> int:
    bundle = open_bundle("tiny")
    plain = Session(bundle, driver="emulator")
    drafting = Session(bundle, driver="emulator", speculate=3)
    looking = Session(bundle, driver="emulator", speculate=DRAFTS)
    answer = plain.generate(REPEATING[0], max_new_tokens=TOKENS, ignore_eos=True).tokens

    def wrong() -> Drafter:
        return ScriptedDrafter(answer, right=lambda call: 0, wrong=lambda token: (token + 1) % 256)

    ratios: dict[str, list[float]] = {name: [] for name in BOUNDS}
    verify, repeating, silent = BOUNDS
    yields = []
    for _ in range(PAIRS):
        ratios[verify].append(step_ratio(drafting, plain, REPEATING[0], wrong))
        ratios[silent].append(step_ratio(looking, plain, REPEATING[0], Silent))
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
