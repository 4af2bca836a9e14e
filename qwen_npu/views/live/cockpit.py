"""The cockpit's own logic, without widgets: a run or a recording, its frames, the cursor, and what is wrong."""

from __future__ import annotations

import asyncio
import html
import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qwen_npu.errors import UsageError
from qwen_npu.ledger import slots as slot_books
from qwen_npu.ledger import summary
from qwen_npu.ledger.store import Ledger, open_ledger
from qwen_npu.ledger.timeline import Timeline
from qwen_npu.views.live import headless, panes
from qwen_npu.views.live.frames import Frames, balance
from qwen_npu.views.live.runner import Runner

if TYPE_CHECKING:
    from qwen_npu.runtime.results import GenerateResult
    from qwen_npu.runtime.session import Session
    from qwen_npu.views.live.panel import Panel

UPDATE_SECONDS = 0.1
"""Shortest time between two updates of the page while decoding."""
BOOKS_SECONDS = 1.0
"""Shortest time between two readings of a pool's whole books while decoding."""
FULL_CHECK_EVENTS = 60_000
"""A longer recording is checked in full only when asked (`qwen-npu summary`): it would hold up the page."""


@dataclass
class Settings:
    """What the next generation is to be. Fields as of `Session` and `Session.stream`; `image` as of `image_path`."""

    prompt: str = "Describe this image."
    image: str = ""
    device: str = "ascend:0"
    state: str = "resident"
    kv: str = "fixed"
    numerics: str = "device"
    speculate: int = 0
    peek: bool = False
    max_new_tokens: int = 64
    ignore_eos: bool = False


class Cockpit:
    """Shows a generation step by step, or a recording.

    Args:
        session: decodes; the cockpit makes another like it when the user changes a setting, and closes those it made.
        ledger: a recording to show without a device: a file, or a ledger. Not together with `session`.
        prompt, image: as of `Session.stream`; `image` may be the name of a picture that ships.
        record_to: keep the recording in this file; by default it lies in a temporary one that `close` removes.

    In a notebook the last expression `cockpit` shows it. Headless (see `live.headless`) it shows figures instead.
    """

    def __init__(
        self,
        session: Session | None = None,
        ledger: Ledger | str | Path | None = None,
        *,
        prompt: str = "Describe this image.",
        image: str | Path | None = None,
        max_new_tokens: int = 64,
        ignore_eos: bool = False,
        record_to: str | Path | None = None,
    ) -> None:
        if (session is None) == (ledger is None):
            raise UsageError(
                "a cockpit with " + ("neither session nor ledger" if session is None else "both session and ledger"),
                expected="a session to decode with, or a recording to look at",
            )
        self.frames: Frames | None = None
        self.cursor = 0
        self.books: slot_books.History | None = None
        self.problems: list[str] = []
        self.closed = False
        self.settings = Settings(prompt=prompt, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        self._session = session
        self._own_session = False
        self._made: dict[str, Any] = {}
        self._runner: Runner | None = None
        self._folder: Path | None = None
        self._record_to = None if record_to is None else Path(record_to)
        self._checks: tuple[int, bool, list[str]] | None = None
        self._books_at = (-1, 0.0)
        self._panel: Panel | None = None
        self._loop = _running_loop()
        self._woken = False
        self._updated = 0.0
        if session is not None:
            self.settings.image = "" if image is None else str(image)
            self._made = _settings_of(session)
            for name, value in self._made.items():
                setattr(self.settings, name, value)
            if self._record_to is None:
                self._folder = Path(tempfile.mkdtemp(prefix="qwen-npu-cockpit-"))
                # also when the kernel ends without close()
                self._tidy = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._runner = self._new_runner(session)
        else:
            assert ledger is not None
            self._show_ledger(ledger if isinstance(ledger, Ledger) else open_ledger(ledger))
            self.update()
            self.seek(len(self.frames.ticks) - 1 if self.frames else 0)

    # what a cell calls

    @property
    def session(self) -> Session | None:
        return self._session

    @property
    def ledger(self) -> Ledger | None:
        """What is shown."""
        return None if self.frames is None else self.frames.ledger

    @property
    def status(self) -> str:
        return "replay" if self._runner is None else self._runner.status

    @property
    def replay(self) -> bool:
        return self._runner is None

    def run(self) -> None:
        """Decodes to the end in the background; headless until it is done."""
        self._go(math.inf)

    def step(self, steps: int = 1) -> None:
        """Takes so many stages or decode steps more in the background; headless until they are done."""
        if steps < 1:
            raise UsageError(f"{steps} steps", expected="at least 1")
        self._go(steps)

    def pause(self) -> None:
        """Stops after the step under way."""
        if self._runner is not None:
            self._runner.pause()

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing is under way, then up to date; False if that took too long. Raises what ended the run."""
        done = self._runner is None or self._runner.wait(timeout)
        self._refresh()
        if self._runner is not None and self._runner.error is not None:
            raise self._runner.error
        return done

    def reset(self) -> None:
        """Ends the generation; the next Run or Step begins anew with the settings as they are then."""
        if self._runner is not None:
            self._runner.reset()
        self.problems.clear()
        if not self.replay:
            self.frames, self.books, self.cursor, self._checks = None, None, 0, None
        self._refresh()

    def read_on(self) -> None:
        """Takes in what was recorded since: of a recording that somebody else is still writing."""
        self._refresh()

    def seek(self, tick: int) -> None:
        """Moves every pane to a tick."""
        last = len(self.frames.ticks) - 1 if self.frames else 0
        self.cursor = min(max(0, tick), max(0, last))
        if self._panel is not None:
            self._panel.moved()

    def result(self) -> GenerateResult | None:
        """Everything that was generated so far."""
        return None if self._runner is None else self._runner.result()

    def close(self) -> None:
        """Ends the run, closes every widget and removes a temporary recording. The session stays the caller's."""
        if self.closed:
            return
        self.closed = True
        if self._panel is not None:
            self._panel.close()
            self._panel = None
        if self._runner is not None:
            self._runner.reset()
        self._close_own_session()
        if self._folder is not None:
            self._tidy()

    def __enter__(self) -> Cockpit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what is shown

    @property
    def widget(self) -> Any:
        """The widget, made when it is first asked for."""
        if self._panel is None:
            if self.closed:
                raise UsageError("the cockpit is closed", fix="make a new one")
            from qwen_npu.views.live.panel import Panel

            self._panel = Panel(self)
            self._refresh()
        return self._panel.widget

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not headless() and not self.closed:
            display(self.widget)
            return
        for twin in self.twins():
            display(twin)

    def twins(self) -> list[Any]:
        """The same as static outputs: the words, then figures."""
        from IPython.display import HTML

        from qwen_npu import views

        self.update()
        if self.frames is None or not self.frames.ticks or self.closed:
            return [HTML("<p>The cockpit has nothing to show yet.</p>" if not self.closed else "<p>Closed.</p>")]
        ledger = self.frames.ledger
        balanced, told = self.balance()
        words = "".join(
            f"<div style='margin:4px 0'>{part}</div>"
            for part in (
                f"<b>{html.escape(self.settings.prompt)}</b>" if not self.replay else "",
                panes.answer(self.frames, len(self.frames.ticks) - 1),
                panes.light(balanced, told),
                panes.instant(self.frames, self.cursor),
            )
        )
        figures = [views.residency(ledger), views.traffic(ledger), views.kv_growth(ledger)]
        if slot_books.pools(ledger):
            figures += [views.slot_grid(ledger), views.speculation(ledger)]
        if self.frames.peek_events:
            figures.append(views.state_norms(ledger))
        return [HTML(words), *figures]

    def balance(self) -> tuple[bool, list[str]]:
        """Whether the books balance, and the sums or what is wrong. While decoding only what is cheap is checked."""
        if self.frames is None or not self.frames.ticks:
            return True, ["nothing recorded yet"]
        faults = balance(self.frames)
        told = [f"{self.frames.figures[-1].alive_bytes:,} B alive = sum of our buffers"]
        if self.books is not None and self.books.size:
            counts = slot_books.counts(self.books.rounds[-1].slots)
            slots = f"{counts['free']} free + {counts['live']} live + {counts['snapshot']} snapshot"
            told.append(f"{slots} = {self.books.size} slots")
            if counts["total"] != self.books.size:
                faults.append(f"{slots} are not {self.books.size} slots")
            faults += self.books.faults
        if not (self._runner is not None and self._runner.running):
            told += self._full_check(faults)
        return not faults, faults[:3] if faults else told

    def _full_check(self, faults: list[str]) -> list[str]:
        """Adds what `summary.conservation` finds wrong; once for a state of the ledger, as it reads all of it."""
        assert self.frames is not None
        seq = self.frames.last_seq
        if seq > FULL_CHECK_EVENTS:
            return [f"more than {FULL_CHECK_EVENTS:,} events: `qwen-npu summary` checks them all"]
        if self._checks is None or self._checks[0] != seq:
            checks = summary.conservation(Timeline(self.frames.ledger))
            bad = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
            self._checks = (seq, not bad, bad or [f"{len(checks)} checks of the whole recording"])
        _, fine, told = self._checks
        if fine:
            return told
        faults += told
        return []

    @property
    def hazards(self) -> list[str]:
        if self.frames is None:
            return []
        return [f"{self.frames.ticks[tick].label}: {text}" for tick, text in self.frames.hazards[-3:]]

    # following

    def update(self) -> bool:
        """Reads what is new; True if there was something."""
        recorded = self._runner.ledger if self._runner is not None and self._runner.started else None
        if recorded is not None and (self.frames is None or self.frames.ledger is not recorded):
            self._show_ledger(recorded)
        if self.frames is None:
            return False
        new = self.frames.update()
        events, read = self._books_at
        if self.frames.slot_events != events:
            running = self._runner is not None and self._runner.running
            if not running or time.monotonic() - read > BOOKS_SECONDS:
                self.books = slot_books.history(self.frames.ledger)
                self._books_at = (self.frames.slot_events, time.monotonic())
        return new

    def guarded(self, action: Callable[..., Any]) -> Callable[..., None]:
        """A callback that reports what goes wrong on the error strip, and headless lets it through."""

        def call(*arguments: Any) -> None:
            try:
                action(*arguments)
            except Exception as error:
                if headless():
                    raise
                self.report(error)

        return call

    def report(self, error: BaseException) -> None:
        """Puts an error on the strip."""
        text = f"{type(error).__name__}: {error}"
        if text not in self.problems:
            self.problems = [*self.problems[-2:], text]
        if self._panel is not None:
            self._panel.alarm()

    def _show_ledger(self, ledger: Ledger) -> None:
        self.frames = Frames(ledger)
        self.books, self.cursor, self._checks, self._books_at = None, 0, None, (-1, 0.0)

    def _go(self, steps: float) -> None:
        if self.closed:
            raise UsageError("the cockpit is closed", fix="make a new one")
        if self._runner is None:
            raise UsageError(
                "a recording cannot be stepped", expected="a cockpit with a session", fix="Cockpit(session) decodes"
            )
        if not self._runner.started:
            self.problems.clear()
            self._renew_session()
            options = {"max_new_tokens": self.settings.max_new_tokens, "ignore_eos": self.settings.ignore_eos}
            self._runner.start(self.settings.prompt, self._picture(), **options)
        self._runner.go(steps)
        if headless():
            self.wait()
        else:
            self._refresh()

    def _renew_session(self) -> None:
        """Makes a session with the chosen settings if the present one has others."""
        from qwen_npu.runtime.session import Session

        assert self._session is not None
        wanted = {name: getattr(self.settings, name) for name in self._made}
        if wanted == self._made:
            return
        new = Session(self._session.bundle, driver=self._session.package, **wanted)
        self._made = wanted
        self._close_own_session()
        self._session, self._own_session = new, True
        self._runner = self._new_runner(new)

    def _close_own_session(self) -> None:
        session = self._session
        # an opened driver is the user's: sessions made with it share it, and it stays open
        if self._own_session and session is not None and isinstance(session.package, (str, ModuleType)):
            session.close()

    def _new_runner(self, session: Session) -> Runner:
        path = self._record_to or (self._folder / "run.ledger" if self._folder else None)
        return Runner(session, path, self._notify)

    def _picture(self) -> Path | None:
        from qwen_npu.data import image_path

        return image_path(self.settings.image)

    def _notify(self) -> None:
        """Called from the decoding thread."""
        if self._loop is None or self._panel is None or self._woken or headless():
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._schedule)
        except RuntimeError:  # the loop is closed: the kernel is going down
            self._woken = False

    def _schedule(self) -> None:
        assert self._loop is not None
        self._loop.call_later(max(0.0, self._updated + UPDATE_SECONDS - time.monotonic()), self._refresh)

    def _refresh(self) -> None:
        self._woken = False
        self._updated = time.monotonic()
        if self.closed:
            return
        self.guarded(self._refresh_now)()

    def _refresh_now(self) -> None:
        self.update()
        if self._runner is not None and self._runner.error is not None:
            self.report(self._runner.error)
        if self._panel is not None:
            self._panel.refresh()


def _settings_of(session: Session) -> dict[str, Any]:
    """A session's settings by the names of its arguments."""
    settings = {name: getattr(session.context, name) for name in ("state", "kv", "numerics", "speculate", "peek")}
    return {"device": session.driver.device, **settings}


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
