"""A session: one bundle on one device, with its settings. Generates, records, and reads states back on request."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_npu.driver import open_driver
from qwen_npu.driver.protocol import Driver
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import StateError, UsageError
from qwen_npu.runtime.context import KV_POLICIES, STATE_PLACES, KvPolicy, RunContext, StatePlace
from qwen_npu.runtime.drafts import Drafter
from qwen_npu.runtime.generation import Generation
from qwen_npu.runtime.images import PreparedImage
from qwen_npu.runtime.inputs import Feed, InputProcessor, choose_bucket
from qwen_npu.runtime.prompt import stage_of
from qwen_npu.runtime.results import GenerateResult
from qwen_npu.runtime.speculative import MOST_DRAFTS, SpeculativeGroup
from qwen_npu.runtime.stages import run_vision
from qwen_npu.runtime.states import HeldStates, StateArrays
from qwen_npu.spec import NUMERICS, Numerics

if TYPE_CHECKING:
    from qwen_npu.bundle import Bundle
    from qwen_npu.ledger.store import Ledger


class Session:
    """One bundle on one device.

    Args:
        bundle: see `qwen_npu.open_bundle`.
        device: "ascend:N" or "cpu".
        driver: "auto", "emulator", "mindspore_lite", a module with the vendor's interface, or a `Driver`.
        state: "resident" keeps the states on the device, "host" brings them to the host after each step. On a CPU
            target
            they are always on the host.
        kv: "fixed" capacity or "growing".
        numerics: "device" (the dtypes of the deployed graphs) or "f32".
        peek: look at every decode step's states through a peek graph, and tell the ledger.
        speculate: K, most drafts a verify (with resident states and a fixed KV); 0: token by token.

    Attributes:
        package: what was given as `driver`: a session with other settings is opened through the same.

    Raises:
        UsageError: an unknown setting, or settings that exclude each other.
        DriverError, DeviceError: see `open_driver`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: str = "ascend:0",
        driver: str | ModuleType | Driver = "auto",
        state: StatePlace = "resident",
        kv: KvPolicy = "fixed",
        numerics: Numerics = "device",
        speculate: int = 0,
        peek: bool = False,
    ) -> None:
        if not hasattr(bundle, "digest"):
            raise UsageError(f"a session of {bundle!r}", expected=f"a bundle: qn.open_bundle({str(bundle)!r})")
        _one_of("state", state, STATE_PLACES)
        _one_of("kv", kv, KV_POLICIES)
        _one_of("numerics", numerics, NUMERICS)
        if not isinstance(speculate, int) or not 0 <= speculate <= MOST_DRAFTS:
            raise UsageError(f"speculate is {speculate!r}", expected=f"a whole number, 0..{MOST_DRAFTS}")
        if speculate and (state, kv) != ("resident", "fixed"):
            raise UsageError(
                f"speculate={speculate} with state={state!r} and kv={kv!r}",
                expected="state='resident' and kv='fixed': drafts live in slot pools on the device",
            )
        self._closed = False
        self.notes: tuple[str, ...] = ()
        self.package = driver
        opened = open_driver(driver, device)
        if state == "resident" and "resident" not in opened.capabilities:
            if speculate:
                raise UsageError(
                    f"speculate={speculate} on {device}, which has no resident tensors", expected="a device 'ascend:N'"
                )
            self.notes = (f"states are kept on the host: {device} has no resident tensors",)
            state = "host"
        inputs = InputProcessor(bundle.checkpoint, bundle.spec, bundle.grids)
        self.context = RunContext(bundle, opened, inputs, state, kv, numerics, speculate, peek)
        self._held: HeldStates | None = None
        self._last_generation: Callable[[], Generation | None] = lambda: None

    @property
    def bundle(self) -> Bundle:
        return self.context.bundle

    @property
    def driver(self) -> RecordingDriver:
        return self.context.driver

    @property
    def inputs(self) -> InputProcessor:
        return self.context.inputs

    @property
    def speculate(self) -> int:
        return self.context.speculate

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the states and the device; the session is of no use afterwards."""
        self._end_generation("the session is closed")
        self._closed = True
        self.driver.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StateError("the session is closed", expected="an open one", fix="make a new Session of the bundle")

    def generate(self, prompt: str | Sequence[int] | Feed, image: Any = None, **options: Any) -> GenerateResult:
        """Runs a generation to its end; arguments as `stream`."""
        generation = self.stream(prompt, image, **options)
        for _ in generation:
            pass
        return generation.result()

    def stream(
        self,
        prompt: str | Sequence[int] | Feed,
        image: Any = None,
        *,
        max_new_tokens: int = 64,
        ignore_eos: bool = False,
        force_tokens: Sequence[int] | None = None,
        logits: bool = False,
        drafter: Drafter | None = None,
    ) -> Generation:
        """Starts a greedy generation. Everything the user can get wrong is checked before a model is loaded.

        Args:
            prompt: text for the chat template, token ids taken as they are, or a feed of `session.inputs` (no image
                then).
            image: path, PIL image or u8 array, None for text only.
            max_new_tokens: most tokens of the answer, at least 1.
            ignore_eos: go on after end of text.
            force_tokens: feed these instead of the chosen tokens (teacher forcing); ends after the last of them.
            logits: give each step's logits.
            drafter: where drafts come from (with `speculate`); prompt lookup if not given.
        """
        self._refuse_if_closed()
        if force_tokens is not None:
            if self.speculate:
                raise UsageError("force_tokens with speculate", expected="one of them")
            max_new_tokens = len(force_tokens)
            ignore_eos = True
        chooser = self.context.chooser(
            max_new_tokens, ignore_eos=ignore_eos, force_tokens=force_tokens, want_logits=logits
        )
        feed = prompt if isinstance(prompt, Feed) else self.inputs.feed(prompt, image)
        bucket = choose_bucket(len(feed.tokens), self.bundle.buckets, self.bundle.capacity)
        notes = list(self.notes)
        if feed.image is not None and feed.image.note:
            notes.append(f"picture {feed.image.note}")
        self._end_generation("the session has begun another one")
        generation = Generation(self.context, feed, bucket, chooser, notes, self._hold, drafter)
        self._last_generation = weakref.ref(generation)
        return generation

    def embed(self, image: PreparedImage) -> np.ndarray:
        """`image_embeds` [tokens of the picture, hidden]: the vision stage alone."""
        self._refuse_if_closed()
        with stage_of(self.context, "vision", image.grid) as model:
            return run_vision(self.driver, model, image.pixel_values)

    def group(self, *, drafts: int, sequences: int = 1, poison: bool = True) -> SpeculativeGroup:
        """Several sequences that decode together with up to `drafts` drafts each; free it when done."""
        self._refuse_if_closed()
        return SpeculativeGroup(self.context, drafts=drafts, sequences=sequences, poison=poison)

    def read_states(self) -> StateArrays:
        """All states on the host: conv, recurrent, kv. An explicit crossing, which the ledger shows.

        Raises:
            StateError: nothing has been decoded yet.
        """
        if self._held is None:
            raise StateError("there are no states to read", expected="a generation that has reached decode")
        return self._held.read()

    @property
    def state_tokens(self) -> int:
        """Tokens that the states hold; 0 before decode."""
        return 0 if self._held is None else self._held.tokens

    @contextmanager
    def record(self, path: str | Path | None = None) -> Iterator[Ledger]:
        """Records what happens inside the block into a ledger: a file, or memory without a path."""
        from qwen_npu.ledger.store import Ledger

        self._refuse_if_closed()
        ledger = Ledger(path)
        for key, value in self._describe().items():
            ledger.set_meta(key, value)
        try:
            with self.driver.record(ledger):
                yield ledger
        finally:
            ledger.close() if path is not None else ledger.flush()

    def _hold(self, held: HeldStates) -> None:
        self._held = held

    def _end_generation(self, why: str) -> None:
        if (generation := self._last_generation()) is not None:
            generation.give_way(why)
        if self._held is not None:
            self._held.free()
            self._held = None

    def _describe(self) -> dict[str, Any]:
        context, bundle, driver = self.context, self.bundle, self.driver
        return {
            "bundle": bundle.name,
            "bundle_digest": bundle.digest,
            "spec": dataclasses.asdict(bundle.spec),
            "capacity": bundle.capacity,
            "buckets": list(bundle.buckets),
            "driver": driver.name,
            "device": driver.device,
            "capabilities": sorted(driver.capabilities),
            "state": context.state,
            "kv": context.kv,
            "numerics": context.numerics,
            "speculate": context.speculate,
        }


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", expected=f"one of {', '.join(choices)}")
