"""Every error that a user of the workbench can meet.

An error says what was wrong (with the value), what was expected, and what to do. Code that reports
a user's mistake raises one of these kinds and nothing else; the CLI prints it without a traceback and exits with 2.
"""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base of all kinds.

    Args:
        problem: what was wrong, with the offending value.
        expected: what would have been right.
        fix: what the user can do now.
    """

    def __init__(self, problem: str, *, expected: str = "", fix: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.fix = fix
        super().__init__(problem, expected, fix)

    def __str__(self) -> str:
        parts = [self.problem.rstrip(".")]
        if self.expected:
            parts.append(f"Expected: {self.expected.rstrip('.')}")
        if self.fix:
            parts.append(f"What to do: {self.fix.rstrip('.')}")
        return ". ".join(parts) + "."


class UsageError(WorkbenchError):
    """A parameter, option or combination of them that makes no sense."""


class CheckpointError(WorkbenchError):
    """A Hugging Face checkpoint directory that cannot be read or is not a Qwen3.5 model."""


class BundleError(WorkbenchError):
    """A bundle that is missing, damaged, foreign or of another schema."""


class ContractError(WorkbenchError):
    """A graph whose tensors are not what the stage's contract says."""


class PromptError(WorkbenchError):
    """A prompt that cannot be used: empty, too long for the buckets, image tokens unlike embeddings."""


class ImageError(WorkbenchError):
    """A picture that cannot be read or used."""


class CapacityError(WorkbenchError):
    """The KV cache cannot hold what was asked for, or capacities disagree."""


class StateError(WorkbenchError):
    """State buffers that do not fit the graph, or are used against their terms."""


class DriverError(WorkbenchError):
    """A driver that is unknown, cannot be opened, or failed in a call."""


class DeviceError(WorkbenchError):
    """A device that is unknown, absent or not the one the data lies on."""


class DeviceMemoryError(DeviceError):
    """The device has no room for an allocation; names what is alive."""


class HazardError(WorkbenchError):
    """A use of device memory whose result the vendor leaves undefined (see the emulator's policy)."""


class OpError(WorkbenchError, ValueError):
    """An argument of RecurrentGatedDeltaRule with a wrong value or shape."""


class OpTypeError(WorkbenchError, TypeError):
    """An argument of RecurrentGatedDeltaRule with a wrong dtype or type."""


class SlotError(WorkbenchError):
    """A slot of the pool used by one who does not own it, or no slot left."""


class LedgerError(WorkbenchError):
    """A ledger file that is missing, damaged or of another schema."""


class RecordError(WorkbenchError):
    """A record a notebook claims that cannot be written as such."""


class NotebookError(WorkbenchError):
    """A notebook that cannot be run: no parameters cell, unknown parameter, wrong type."""


class SuiteError(WorkbenchError):
    """A nightly suite file with a fault; names the line."""


class ConversionError(WorkbenchError):
    """The vendor's converter is missing, failed, or wrote something else than asked."""
