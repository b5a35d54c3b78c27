"""What all tests share: property tests are judged by what they find, not by how fast a busy machine generates."""

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile("guidevane", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("guidevane")

# For `make mutants`: the same examples every time, and no search for a smaller one.
settings.register_profile(
    "mutants", settings.get_profile("guidevane"), derandomize=True, phases=(Phase.explicit, Phase.generate)
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Property tests last: they take longest to say that something is wrong."""
    items.sort(key=lambda item: "property" in item.path.parts)
