"""What all tests share: property tests are judged by what they find, and say how to find it again.

They are not judged by how fast a busy machine generates.
"""

import os
import shlex
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings

# A test that lists health checks of its own gets all the others back, so these are listed here, for all.
NO_FAULTS = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,  # ours are factories: they keep nothing between examples
]
settings.register_profile("guidevane", deadline=None, print_blob=True, suppress_health_check=NO_FAULTS)
settings.register_profile("unshrunk", settings.get_profile("guidevane"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("guidevane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Property tests last: they take longest to say that something is wrong."""
    items.sort(key=lambda item: "property" in item.path.parts)


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis seed: {config.getoption('--hypothesis-seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Below a property test that failed stands the command that fails in the same way."""
    report = yield
    if report.when == "call" and report.failed and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        report.sections.append(("Replay", replay_command(item)))
    return report


def replay_command(item: pytest.Item) -> str:
    examples = os.environ.get("HYPOTHESIS_EXAMPLES")
    prefix = f"HYPOTHESIS_EXAMPLES={examples} " if examples else ""
    seed = item.config.getoption("--hypothesis-seed")
    return f"{prefix}python -m pytest {shlex.quote(item.nodeid)} --hypothesis-seed={seed}"
