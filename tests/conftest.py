"""Prints at the end of a run, also of a distributed one, what tests recorded as the property "summary"."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, text in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(text)
