"""Which failures a person gets to read in the log."""

import logging
from typing import Any

import pytest

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.errors import EngineUnavailable, GuidevaneError, InvalidRequest, ServerError, WaitedTooLong
from guidevane_runtime.server.admission import refusal_error
from guidevane_runtime.server.error_body import log_failure
from guidevane_runtime.server.tracing import IDS, RequestIds


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (ServerError("the engine died"), logging.WARNING),
        (EngineUnavailable("the engine is gone"), logging.WARNING),
        # Thousands in a second, each counted in /metrics: a line each would hide all others.
        (refusal_error(Refused(Rejection.QUEUE_FULL, "full", 1)), logging.DEBUG),
        (WaitedTooLong("too long"), logging.DEBUG),
        (InvalidRequest("no prompt"), logging.DEBUG),
    ],
)
def test_overload_does_not_flood_the_log(caplog: pytest.LogCaptureFixture, error: GuidevaneError, level: int) -> None:
    caplog.set_level(logging.DEBUG)
    request: Any = {IDS: RequestIds.of({"X-Request-Id": "r1"})}
    log_failure(request, error)
    (record,) = caplog.records
    assert record.levelno == level
    assert vars(record)["request_id"] == "r1"
