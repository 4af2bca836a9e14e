"""A session: one bundle on one device, with its settings. Generates, records, and reads states back on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from qwen_npu.driver import open_driver
from qwen_npu.driver.protocol import Driver
from qwen_npu.driver.recording import RecordingDriver
from qwen_npu.errors import StateError, UsageError
from qwen_npu.runtime.chooser import TokenChooser
from qwen_npu.runtime.drafts import Drafter
from qwen_npu.runtime.generation import Generation
from qwen_npu.runtime.inputs import InputProcessor, TextStream, choose_bucket
from qwen_npu.runtime.results import GenerateResult
from qwen_npu.runtime.speculative import MOST_DRAFTS
from qwen_npu.runtime.states import HeldStates, StateArrays
from qwen_npu.spec import NUMERICS, Numerics

if TYPE_CHECKING:
    from qwen_npu.bundle import Bundle
    from qwen_npu.ledger.store import Ledger

StatePlace = Literal["resident", "host"]
KvPolicy = Literal["fixed", "growing"]


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
        _one_of("state", state, ("resident", "host"))
        _one_of("kv", kv, ("fixed", "growing"))
        _one_of("numerics", numerics, NUMERICS)
        if speculate and (state, kv) != ("resident", "fixed"):
            raise UsageError(
                f"speculate={speculate} with state={state!r} and kv={kv!r}",
                expected="state='resident' and kv='fixed': drafts live in slot pools on the device",
            )
        if speculate and peek:
            raise UsageError("peek with speculate", expected="one of them")
        if not 0 <= speculate <= MOST_DRAFTS:
            raise UsageError(f"speculate is {speculate}", expected=f"0..{MOST_DRAFTS}")
        self.bundle = bundle
        self.device = device
        self.kv = kv
        self.numerics = numerics
        self.speculate = speculate
        self.peek = peek
        self.notes: tuple[str, ...] = ()
        self.driver: RecordingDriver = open_driver(driver, device)
        if state == "resident" and "resident" not in self.driver.capabilities:
            if speculate:
                raise UsageError(
                    f"speculate={speculate} on {device}, which has no resident tensors", expected="a device 'ascend:N'"
                )
            self.notes = (f"states are kept on the host: {device} has no resident tensors",)
            state = "host"
        self.state = state
        self.inputs = InputProcessor(bundle.checkpoint, bundle.spec, bundle.grids)
        self._held: HeldStates | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the states and the device."""
        self._release_states()
        self.driver.close()

    def generate(self, prompt: str | Sequence[int], image: Any = None, **options: Any) -> GenerateResult:
        """Runs a generation to its end; arguments as `stream`."""
        generation = self.stream(prompt, image, **options)
        for _ in generation:
            pass
        return generation.result()

    def stream(
        self,
        prompt: str | Sequence[int],
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
            prompt: text for the chat template, or token ids taken as they are.
            image: path, PIL image or u8 array, None for text only.
            max_new_tokens: most tokens of the answer, at least 1.
            ignore_eos: go on after end of text.
            force_tokens: feed these instead of the chosen tokens (teacher forcing); ends after the last of them.
            logits: give each step's logits.
            drafter: where drafts come from (with `speculate`); prompt lookup if not given.
        """
        if force_tokens is not None:
            if self.speculate:
                raise UsageError("force_tokens with speculate", expected="one of them")
            max_new_tokens = len(force_tokens)
            ignore_eos = True
        chooser = self.chooser(max_new_tokens, ignore_eos=ignore_eos, force_tokens=force_tokens, want_logits=logits)
        feed = self.inputs.feed(prompt, image)
        bucket = choose_bucket(len(feed.tokens), self.bundle.buckets, self.bundle.capacity)
        notes = list(self.notes)
        if feed.image is not None and feed.image.note:
            notes.append(f"picture {feed.image.note}")
        self._release_states()
        return Generation(self, feed, bucket, chooser, notes, drafter)

    def chooser(
        self,
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        force_tokens: Sequence[int] | None = None,
        want_logits: bool = False,
    ) -> TokenChooser:
        """The answer of one sequence, still empty; arguments as `stream`."""
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}", expected="at least 1")
        ends = () if ignore_eos else self.bundle.spec.end_tokens
        return TokenChooser(TextStream(self.inputs), max_new_tokens, ends, force_tokens, want_logits)

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

    def peak_device_bytes(self) -> tuple[int, str]:
        """Most device bytes in use at once since the device was opened, and who knows it."""
        known = self.driver.memory_bytes()
        return (known[1], "emulator") if known is not None else (self.driver.peak_bytes, "observed")

    @contextmanager
    def record(self, path: str | Path | None = None) -> Iterator[Ledger]:
        """Records what happens inside the block into a ledger: a file, or memory without a path."""
        from qwen_npu.ledger.store import Ledger

        ledger = Ledger(path)
        for key, value in self._describe().items():
            ledger.set_meta(key, value)
        try:
            with self.driver.record(ledger):
                yield ledger
        finally:
            ledger.close() if path is not None else ledger.flush()

    def adopt(self, held: HeldStates) -> None:
        """Takes over a generation's states, so that they can be read until the next one begins."""
        self._held = held

    def _release_states(self) -> None:
        if self._held is not None:
            self._held.free()
            self._held = None

    def _describe(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle.name,
            "bundle_digest": self.bundle.digest,
            "spec": dataclasses.asdict(self.bundle.spec),
            "capacity": self.bundle.capacity,
            "buckets": list(self.bundle.buckets),
            "driver": self.driver.name,
            "device": self.device,
            "capabilities": sorted(self.driver.capabilities),
            "state": self.state,
            "kv": self.kv,
            "numerics": self.numerics,
            "speculate": self.speculate,
        }


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", expected=f"one of {', '.join(choices)}")
