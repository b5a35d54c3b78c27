"""A run of the state machines says how many steps they took, and has the time to shrink what it finds."""

from pathlib import Path

import pytest

from tests.property.machine import num_steps

HERE = Path(__file__).parent
MAX_S = 1800
"""Shrinking may take five minutes by itself, and a long random run as long as it was asked for."""

pytest.register_assert_rewrite("tests.property.checks", "tests.property.traffic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(MAX_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if num_steps:
        by_machine = ", ".join(f"{name} {number}" for name, number in num_steps.items())
        terminalreporter.write_line(f"state machines: {num_steps.total()} steps ({by_machine})")
