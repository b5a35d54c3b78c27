"""Events about the guard: one when it gives way, one when that is over, and none for what it tries in between."""

import pytest

from guidevane_api.conditions import EventReason
from guidevane_operator.guard_news import GuardNews

GAVE_WAY, RECOVERED = EventReason.GUARD_GAVE_WAY, EventReason.GUARD_RECOVERED


def told(levels: list[float | None], period_s: float = 15.0) -> list[EventReason]:
    news = GuardNews()
    found = [news.look(level, 1000.0 + number * period_s) for number, level in enumerate(levels)]
    return [reason for reason in found if reason is not None]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([0, 0, 0, 0, 0, 0], []),
        ([0, 1, 2, 3, 2, 1], [GAVE_WAY]),
        ([1, 0, 0, 0, 0], [GAVE_WAY]),
        ([1, 0, 0, 0, 0, 0], [GAVE_WAY, RECOVERED]),
        ([1, 0, 0, 1, 0, 0, 1, 0, 0], [GAVE_WAY]),
        ([1, 0, 0, 0, 0, 0, 0, 2], [GAVE_WAY, RECOVERED, GAVE_WAY]),
        ([1, None, None, None, None, None, None], [GAVE_WAY]),
        ([1, 0, 0, None, 0, 0, 0, 0], [GAVE_WAY]),
    ],
    ids=str,
)
def test_what_is_told_of_a_course_of_levels(levels: list[float | None], expected: list[EventReason]) -> None:
    assert told(levels) == expected
