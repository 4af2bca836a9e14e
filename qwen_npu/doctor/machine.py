"""What the doctor may look at: files, environment, commands, packages. One object, so that a test can lay out another
machine under a directory of its own."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

COMMAND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ran:
    """A command that was run: its exit code (None: there is no such command, or it did not end) and what it said."""

    code: int | None
    text: str


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> Ran:
    """Runs a command without input, both outputs together."""
    try:
        done = subprocess.run(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Ran(None, str(error))
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))


def installed_version(package: str) -> str:
    """The version of a distribution in this Python, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Machine:
    """The computer that is examined.

    Attributes:
        root: where its file tree begins.
        run: runs a command with an environment.
        version: of an installed distribution, "" where there is none.
        python: version of the running interpreter.
        open_files: soft limit of open files of this process.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str], Mapping[str, str]], Ran] = run_command
    version: Callable[[str], str] = installed_version
    python: tuple[int, int, int] = (sys.version_info[0], sys.version_info[1], sys.version_info[2])
    prefix: Path = Path(sys.prefix)
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def path(self, absolute: str | Path) -> Path:
        """A path of that machine, from one that begins with /."""
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str:
        """The text of a file, "" where it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def free_bytes(self, directory: Path) -> int:
        """Free space of the file system that `directory` (or the first parent that exists) lies on."""
        while not directory.exists() and directory != directory.parent:
            directory = directory.parent
        return shutil.disk_usage(directory).free

    @property
    def cards(self) -> list[int]:
        """Numbers of the NPU device files."""
        names = (path.name.removeprefix("davinci") for path in self.path("/dev").glob("davinci[0-9]*"))
        return sorted(int(name) for name in names if name.isdigit())
