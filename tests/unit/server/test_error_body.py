"""Which failures a person gets to read in the log."""

import logging
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.errors import EngineUnavailable, GuidevaneError, InvalidRequest, ServerError, WaitedTooLong
from guidevane_runtime.server.admission import refusal_error
from guidevane_runtime.server.error_body import log_failure, quotes_no_client
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


def record_of(error: Exception) -> logging.LogRecord:
    return logging.LogRecord("http", logging.ERROR, "", 0, "failed", None, (type(error), error, None))


def test_what_is_no_http_is_not_quoted_in_the_log() -> None:
    assert not quotes_no_client(record_of(BadHttpMessage("a piece of a prompt")))
    assert quotes_no_client(record_of(ZeroDivisionError("a bug of ours")))
    assert quotes_no_client(logging.LogRecord("http", logging.INFO, "", 0, "started", None, None))
