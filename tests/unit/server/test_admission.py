"""A refusal of the core's door, as clients see it."""

import pytest

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.errors import DeadlineExceeded, InvalidRequest, WaitedTooLong
from guidevane_runtime.server.admission import refusal_error, rejection_reason

IN_THE_QUEUE = {Rejection.TIMEOUT, Rejection.DEADLINE_EXCEEDED}


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (Rejection.DRAINING, 503, "draining"),
        (Rejection.NOT_READY, 503, "not_ready"),
        (Rejection.AUTH, 401, "invalid_api_key"),
        (Rejection.BODIES, 503, "bodies_in_flight"),
        (Rejection.VALIDATION, 400, None),
        (Rejection.QUEUE_FULL, 503, "queue_full"),
        (Rejection.TENANT_CONCURRENCY, 429, "tenant_concurrency"),
        (Rejection.CONTEXT_LENGTH, 400, "context_length_exceeded"),
        # Memory that is too small for good is no overload: 429 and 503 would make clients come back for ever.
        (Rejection.NEVER_FITS, 400, "kv_capacity_exceeded"),
        (Rejection.QUEUED_TOKENS, 503, "queue_full"),
        (Rejection.TENANT_TOKENS, 429, "tenant_token_budget"),
        (Rejection.LONG_CONTEXT, 503, "long_context"),
        (Rejection.DEADLINE_UNREACHABLE, 503, "deadline_unreachable"),
    ],
)
def test_every_reason_has_its_status_and_code(reason: Rejection, status: int, code: str | None) -> None:
    error = refusal_error(Refused(reason, "no", param="n"))
    assert (error.status, error.code, error.param, error.message) == (status, code, "n", "no")


def test_no_reason_is_without_an_answer() -> None:
    for reason in set(Rejection) - IN_THE_QUEUE:
        assert refusal_error(Refused(reason, "no")).status >= 400, reason


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, 1), (0.2, 1), (7.1, 8), (120.0, 120), (5000.0, 120)])
def test_retry_after_is_the_wait_in_whole_seconds_that_sdks_obey(wait_s: float, seconds: int) -> None:
    error = refusal_error(Refused(Rejection.QUEUE_FULL, "full", wait_s))
    assert (error.retry_after_s, error.message) == (seconds, f"full; retry after {seconds} s")


def test_what_waiting_does_not_help_has_no_retry_after() -> None:
    assert refusal_error(Refused(Rejection.NEVER_FITS, "no")).retry_after_s is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused(Rejection.LONG_CONTEXT, "long"), Rejection.LONG_CONTEXT),
        (InvalidRequest("bad"), Rejection.VALIDATION),
        (WaitedTooLong("late"), Rejection.TIMEOUT),
        (DeadlineExceeded("late"), Rejection.DEADLINE_EXCEEDED),
    ],
)
def test_everything_that_is_refused_has_a_reason(error: Exception, reason: Rejection) -> None:
    assert rejection_reason(error) is reason  # type: ignore[arg-type]
