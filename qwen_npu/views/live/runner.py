"""Decoding in a thread of its own: run, step, pause, reset. Knows nothing of widgets.

All calls to the device come from that one thread. Whoever looks on reads the ledger, and is told by `notify` (called
from that thread) that there is something new.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qwen_npu.ledger.store import Ledger

if TYPE_CHECKING:
    from qwen_npu.runtime.generation import Generation
    from qwen_npu.runtime.results import GenerateResult
    from qwen_npu.runtime.session import Session

Status = Literal["empty", "paused", "running", "done", "failed"]


class Runner:
    """One generation at a time on `session`, recorded to `path`.

    Attributes:
        status: "empty" before the first step, "done" after the last.
        ledger: of the present or last generation.
        error: what ended it, if something did.
    """

    def __init__(self, session: Session, path: Path | None, notify: Callable[[], None]) -> None:
        self.session = session
        self.path = path
        self.status: Status = "empty"
        self.ledger: Ledger | None = None
        self.error: BaseException | None = None
        self.steps = 0
        self._notify = notify
        self._generation: Generation | None = None
        self._recording = ExitStack()
        self._wake = threading.Condition()
        self._wanted: float = 0
        self._closing = False
        self._busy = False
        self._thread: threading.Thread | None = None

    # what others call

    def start(self, prompt: str, image: Any, **options: Any) -> None:
        """Prepares a generation; what the user got wrong is raised here, before a model is loaded.

        Raises:
            WorkbenchError: see `Session.stream`.
        """
        self.reset()
        self._generation = self.session.stream(prompt, image, **options)
        self.ledger = self._recording.enter_context(self.session.record(self.path))
        self.status, self.error, self.steps = "paused", None, 0

    @property
    def started(self) -> bool:
        return self._generation is not None

    @property
    def running(self) -> bool:
        return self._busy or self._wanted > 0

    def go(self, steps: float) -> None:
        """Takes `steps` more stages or decode steps (infinity: to the end) in the background."""
        if self._generation is None or self.status in ("done", "failed"):
            return
        with self._wake:
            self._wanted = steps if steps == float("inf") else self._wanted + steps
            self.status = "running"
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="qwen-npu decode", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def pause(self) -> None:
        """Stops after the step under way."""
        with self._wake:
            self._wanted = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing is under way; False if that took too long."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.running, timeout)

    def result(self) -> GenerateResult | None:
        return None if self._generation is None else self._generation.result()

    def reset(self) -> None:
        """Ends the generation and its recording; the ledger stays readable."""
        self.pause()
        self.wait()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        elif self._generation is not None:
            self._generation.close()
        self._thread, self._closing, self._generation = None, False, None
        self._recording.close()
        self.status = "empty"

    # the thread

    def _work(self) -> None:
        assert self._generation is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._wanted > 0)
                if self._closing:
                    break
                self._wanted -= 1
                self._busy = True
            try:
                next(self._generation)
                self.steps += 1
                ended: Status | None = "done" if self._generation.stop else None
                if ended:  # releases the model, so that the ledger holds the end of the stage
                    next(self._generation, None)
            except StopIteration:
                ended = "done"
            except BaseException as error:  # reported to whoever looks on, in the thread that can show it
                self.error, ended = error, "failed"
            with self._wake:
                if ended:
                    self._wanted = 0
                self._busy = False
                if self._wanted <= 0:
                    self.status = ended or "paused"
                self._wake.notify_all()
            if self.ledger is not None and self._wanted <= 0:
                self.ledger.flush()
            self._notify()
        self._generation.close()
