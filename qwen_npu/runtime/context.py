"""What every part of a run shares: the bundle, the opened device and the settings. Made by the session, changed by
nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import PromptError, UsageError
from qwen_npu.runtime.chooser import TokenChooser
from qwen_npu.runtime.inputs import InputProcessor, TextStream
from qwen_npu.spec import Numerics

if TYPE_CHECKING:
    from qwen_npu.bundle import Bundle

StatePlace = Literal["resident", "host"]
KvPolicy = Literal["fixed", "growing"]
STATE_PLACES: tuple[StatePlace, ...] = get_args(StatePlace)
KV_POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)


@dataclass(frozen=True)
class RunContext:
    """See `Session` for the settings."""

    bundle: Bundle
    driver: RecordingDriver
    inputs: InputProcessor
    state: StatePlace
    kv: KvPolicy
    numerics: Numerics
    speculate: int
    peek: bool

    def chooser(
        self,
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        force_tokens: Sequence[int] | None = None,
        want_logits: bool = False,
    ) -> TokenChooser:
        """The answer of one sequence, still empty; arguments as `Session.stream`."""
        if not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens!r}", expected="a whole number, at least 1")
        if force_tokens is not None:
            vocab = self.bundle.spec.vocab
            for token in force_tokens:
                if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
                    raise PromptError(f"force_tokens holds {token!r}", expected=f"token ids, 0..{vocab - 1}")
        ends = () if ignore_eos else self.bundle.spec.end_tokens
        return TokenChooser(TextStream(self.inputs), max_new_tokens, ends, force_tokens, want_logits)
