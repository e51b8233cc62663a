"""Figures that a test has measured are shown at the end of the run, though its output is captured and whichever process ran it."""

from collections.abc import Callable

import pytest

_KEY = "proof"


@pytest.fixture
def proof(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line to be shown in the summary; it is in the JUnit report too. Say it before the assertions that it is about."""
    return lambda line: record_property(_KEY, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == _KEY and report.when == "call"
    ]
    if found:
        terminalreporter.section("figures")
        for line in sorted(found):
            terminalreporter.line(line)
