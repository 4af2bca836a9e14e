"""Where draft tokens come from: looked up in the text so far, or scripted for tests and lessons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses the next tokens of one sequence. It is told every token of the prompt and of the answer, in order."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens that are certain now."""

    def draft(self, limit_tokens: int) -> list[int]:
        """At most `limit_tokens` guesses of what follows; none is a fine answer."""


class PromptLookup:
    """Finds the last n tokens earlier in the text and guesses that what followed then follows now.

    Longer n-grams are tried first. An index of every n-gram's latest end keeps a step's cost independent of the length.

    Args:
        longest, shortest: lengths of the n-grams in tokens.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest = longest
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._last: list[tuple[int, ...]] = []  # the n-grams that end at the last token, longest first

    def extend(self, tokens: Sequence[int]) -> None:
        known = self._tokens
        for token in tokens:
            # what ends at the present last token is indexed only now, so that it never finds itself
            end = len(known)
            for words in self._last:
                self._after[words] = end
            known.append(int(token))
            tail = tuple(known[-self._longest :])
            self._last = [tail[-length:] for length in self._lengths if length <= len(tail)]

    def draft(self, limit_tokens: int) -> list[int]:
        if limit_tokens <= 0:
            return []
        for words in self._last:
            start = self._after.get(words)
            if start is not None:
                return self._continued(start, limit_tokens)
        return []

    def _continued(self, start: int, limit_tokens: int) -> list[int]:
        """What followed at `start`; where that runs into the end, it repeats with the same period."""
        period = len(self._tokens) - start
        return [self._tokens[start + i % period] for i in range(limit_tokens)]


class ScriptedDrafter:
    """Drafts from a known answer, right up to a depth of its choosing: for tests and lessons.

    Args:
        answer: the tokens that the model will give, the first one included (it comes from prefill).
        right: how many of the drafts at the n-th call are right; the next one is wrong. None: all of them.
        wrong: makes a wrong token of a right one.
        drafts: how many drafts at the n-th call (limited by what is asked); None: as many as asked.
    """

    def __init__(
        self,
        answer: Sequence[int],
        *,
        right: Callable[[int], int] | None = None,
        wrong: Callable[[int], int] = lambda token: token + 1,
        drafts: Callable[[int], int] | None = None,
    ) -> None:
        self._answer = list(answer)
        self._right = right
        self._wrong = wrong
        self._drafts = drafts
        self._prompt_seen = False
        self._known = 0
        self._calls = 0

    def extend(self, tokens: Sequence[int]) -> None:
        # the first call brings the prompt
        if self._prompt_seen:
            self._known += len(tokens)
        self._prompt_seen = True

    def draft(self, limit_tokens: int) -> list[int]:
        call, self._calls = self._calls, self._calls + 1
        if self._drafts is not None:
            limit_tokens = min(limit_tokens, self._drafts(call))
        guesses = self._answer[self._known : self._known + limit_tokens]
        if self._right is not None and self._right(call) < len(guesses):
            depth = self._right(call)
            guesses[depth:] = [self._wrong(token) for token in guesses[depth:]]
        return guesses
