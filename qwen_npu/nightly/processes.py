"""The processes of a run: how they die with their parent, how a group is ended, how orphans are found.

Every process of an item carries QWEN_NPU_NIGHTLY=<run>/<item> in its environment, so that what was started by it,
in whatever session, is found without knowing it before. Where there is no /proc, the recorded pids are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARKER = "QWEN_NPU_NIGHTLY"
_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel of the operating system to end this process when the one that started it ends (Linux).

    Args:
        parent: pid of the one that should be alive; if another adopted us meanwhile, we end at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def skip_slow_import() -> None:
    """Keeps jsonschema from importing a grammar that takes a second and is only used to check internationalised
    addresses, which no notebook holds; plotly brings it in through nbformat. jsonschema treats it as not installed."""
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot: with the pid it names one process for good."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def marked(prefix: str) -> list[int]:
    """Pids whose marker begins with `prefix`; zombies and ourselves left out."""
    wanted = f"{MARKER}={prefix}".encode()
    found = []
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if any(entry.startswith(wanted) for entry in environment.split(b"\0")) and start_ticks(pid) is not None:
            found.append(pid)
    return found


def end(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to each process, and to the group of each that leads one."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def sweep(prefix: str, recorded: Iterable[tuple[int, int | None]] = (), patience_s: float = 5.0) -> list[int]:
    """Ends every process marked with `prefix` and every recorded one that still is the same; gives their pids."""
    ended: list[int] = []
    deadline = time.monotonic() + patience_s
    while True:
        alive = marked(prefix)
        alive += [
            pid for pid, ticks in recorded if ticks is not None and start_ticks(pid) == ticks and pid not in alive
        ]
        if not alive:
            return ended
        ended += [pid for pid in alive if pid not in ended]
        end(alive)
        if time.monotonic() > deadline:
            return ended
        time.sleep(0.02)
