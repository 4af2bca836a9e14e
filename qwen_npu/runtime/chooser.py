"""Which token comes next: greedy choice or teacher forcing, the text so far, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen_npu.runtime.inputs import TextStream


def greedy(logits: np.ndarray) -> Any:
    """The tokens [...] with the largest of the logits [..., vocab]; of equal ones the first."""
    # NumPy compares f16 one by one: to widen them first takes a third of the time
    return (logits.astype(np.float32) if logits.dtype == np.float16 else logits).argmax(axis=-1)


class TokenChooser:
    """The answer of one sequence as it comes about.

    Args:
        limit_tokens: most tokens of the answer.
        end_tokens: ids that end it; empty to ignore end of text.
        force_tokens: fed instead of the chosen ones.
        want_logits: put the logits into each choice.

    Attributes:
        token: what the next step is fed.
        tokens: the answer so far.
        want_logits: whether steps give logits.
        stop: why it ended: "end", "limit", "capacity"; "" while it goes on.
    """

    def __init__(
        self,
        text: TextStream,
        limit_tokens: int,
        end_tokens: Sequence[int],
        force_tokens: Sequence[int] | None = None,
        want_logits: bool = False,
    ) -> None:
        self._text = text
        self._limit_tokens = limit_tokens
        self._end_tokens = frozenset(end_tokens)
        self._force_tokens = force_tokens
        self.want_logits = want_logits
        self.tokens: list[int] = []
        self.token = -1
        self.stop = ""

    @property
    def remaining_tokens(self) -> int:
        return self._limit_tokens - len(self.tokens)

    def choose(self, logits: np.ndarray, *, full: bool = False) -> dict[str, Any]:
        """Takes the greedy choice from the logits [vocab] of one position.

        Args:
            full: no further token can be fed.

        Returns:
            the StepResult fields token and tokens (the choice, also under teacher forcing), text and logits.
        """
        taken = self.take([int(greedy(logits))], full=full)
        return {**taken, "logits": logits if self.want_logits else None}

    def take(self, choices: Sequence[int], *, full: bool = False) -> dict[str, Any]:
        """Takes chosen tokens one after the other until one of them ends the answer; see `choose`."""
        text = ""
        taken: list[int] = []
        for number, choice in enumerate(choices, 1):
            self.token = choice if self._force_tokens is None else int(self._force_tokens[len(self.tokens)])
            self.tokens.append(choice)
            taken.append(choice)
            if choice in self._end_tokens:
                self.stop = "end"
            elif self.remaining_tokens <= 0:
                self.stop = "limit"
            elif full and number == len(choices):
                self.stop = "capacity"
            text += self._text.push(choice, last=bool(self.stop))
            if self.stop:
                break
        return {"token": taken[-1], "tokens": tuple(taken), "text": text}
