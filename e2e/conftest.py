"""Fixtures of the user stories: one namespace a story, and the whole picture printed when a story fails."""

import os
import re
from collections.abc import Iterator

import pytest

from e2e import support


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the cluster can't run, every story is skipped with the reason, never passed."""
    if reason := os.environ.get("GUIDEVANE_E2E_SKIP"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the story's own, removed afterwards; its state is printed if a test in it failed."""
    story = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    name = "e2e-" + re.sub(r"[^a-z0-9-]", "-", story)
    support.delete_namespace(name)
    support.kubectl("create", "namespace", name)
    support.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    failed_before = request.session.testsfailed
    yield name
    if request.session.testsfailed > failed_before:
        print(support.describe(name))  # pytest shows it with the failure
    support.delete_namespace(name)
