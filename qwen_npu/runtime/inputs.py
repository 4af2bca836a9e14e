"""Prompt and picture to what the stages are fed: chat template, tokenizer, image processor. No torch, no
transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_npu.errors import CapacityError, CheckpointError, PromptError, WorkbenchError
from qwen_npu.runtime.images import Grid, ImageProcessor, PreparedImage
from qwen_npu.runtime.positions import prefill_positions
from qwen_npu.spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Feed:
    """A prompt ready for the stages.

    Attributes:
        tokens: i64 [S], unpadded.
        positions: i64 [4, 1, S].
        delta: what decode adds to its positions.
        image: the prepared picture, or None.
    """

    tokens: np.ndarray
    positions: np.ndarray
    delta: int
    image: PreparedImage | None


class InputProcessor:
    """Reads a checkpoint's tokenizer, chat template and image processor when they are first needed."""

    def __init__(self, checkpoint: Path, spec: ModelSpec, grids: Sequence[Grid]) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._grids = tuple(grids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self._checkpoint / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {error}", expected="a tokenizer.json file") from None

    @cached_property
    def _template(self) -> Any:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self._checkpoint / "chat_template.jinja"
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}", expected="a chat template") from None

    @cached_property
    def image_processor(self) -> ImageProcessor:
        return ImageProcessor.from_checkpoint(self._checkpoint)

    def feed(self, prompt: str | Sequence[int], image: Any = None) -> Feed:
        """Makes the feed of one prompt.

        Args:
            prompt: the user's text, put into the chat template; or token ids, taken as they are.
            image: see `ImageProcessor.prepare`; its tokens go before the text.

        Raises:
            PromptError: empty, unknown token ids, or image tokens unlike the picture.
            ImageError: the picture cannot be used.
        """
        prepared = None if image is None else self.image_processor.prepare(image, self._grids, self._spec.vision)
        tokens = self._tokens(prompt, prepared)
        positions, delta = prefill_positions(tokens, None if prepared is None else prepared.grid, self._spec)
        return Feed(tokens, positions, delta, prepared)

    def _tokens(self, prompt: str | Sequence[int], image: PreparedImage | None) -> np.ndarray:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty", expected="some text")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise PromptError(f"the prompt is no text: {error}", expected="valid UTF-8") from None
            ids = self.tokenizer.encode(self._chat(prompt, image), add_special_tokens=False).ids
            tokens = np.asarray(ids, np.int64)
        else:
            try:
                tokens = np.asarray(prompt)
            except ValueError:  # lists of several lengths
                raise PromptError(f"a prompt {prompt!r}", expected="text, or a list of token ids") from None
            if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
                raise PromptError(
                    f"a prompt of {tokens.dtype} {list(tokens.shape)}", expected="text, or a list of token ids"
                )
            tokens = tokens.astype(np.int64)
        outside = tokens[(tokens < 0) | (tokens >= self._spec.vocab)]
        if outside.size:
            raise PromptError(f"token id {outside[0]} is not in the vocabulary", expected=f"0..{self._spec.vocab - 1}")
        return tokens

    def _chat(self, prompt: str, image: PreparedImage | None) -> str:
        content: list[dict[str, str]] = [{"type": "text", "text": prompt}]
        if image is not None:
            content.insert(0, {"type": "image"})
        try:
            text: str = self._template.render(
                messages=[{"role": "user", "content": content}], add_generation_prompt=True
            )
        except WorkbenchError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise CheckpointError(
                f"the chat template of {self._checkpoint} fails: {error}", expected="a template that takes a message"
            ) from None
        if image is None:
            return text
        # The template places one image token; the picture needs one for each of its embeddings.
        mark: str | None = self.tokenizer.id_to_token(self._spec.image_token)
        if mark is None:
            raise CheckpointError(
                f"the tokenizer of {self._checkpoint} has no token {self._spec.image_token}",
                expected="the image token that config.json names",
            )
        return text.replace(mark, mark * self._spec.image_tokens(image.grid), 1)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text


def choose_bucket(prompt_tokens: int, buckets: Sequence[int], capacity: int) -> int:
    """The shortest prefill length that holds the prompt.

    Raises:
        PromptError: longer than the last bucket.
        CapacityError: no room to generate behind it.
    """
    if prompt_tokens > max(buckets):
        raise PromptError(
            f"the prompt has {prompt_tokens} tokens",
            expected=f"at most {max(buckets)}, the longest prefill bucket of {list(buckets)}",
            fix="shorten the prompt, or build the bundle with a longer bucket",
        )
    if prompt_tokens >= capacity:
        raise CapacityError(
            f"the prompt has {prompt_tokens} tokens and the KV cache holds {capacity}: there is no room to generate",
            expected=f"a prompt of at most {capacity - 1} tokens",
            fix="shorten the prompt, or build the bundle with a larger capacity",
        )
    return min(bucket for bucket in buckets if bucket >= prompt_tokens)


class TextStream:
    """Turns tokens into text piece by piece, holding back bytes of a character that is not complete."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._pending: list[int] = []  # since the last whole character, so that a step's cost does not grow

    def push(self, token: int, *, last: bool = False) -> str:
        """The text that this token completes; with `last`, whatever is left."""
        self._pending.append(token)
        text = self._inputs.decode(self._pending)
        if text.endswith("\ufffd") and not last:
            return ""
        self._pending.clear()
        return text


def _raise_template_error(message: str) -> None:
    raise CheckpointError(
        f"the chat template refuses the prompt: {message}", expected="a prompt that the template takes"
    )
