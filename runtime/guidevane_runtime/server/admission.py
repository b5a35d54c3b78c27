"""What the core's door says, as HTTP: a status, a code and a Retry-After for each reason."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.errors import (
    DeadlineExceeded,
    GuidevaneError,
    InvalidRequest,
    Overloaded,
    TooManyRequests,
    Unauthorized,
    WaitedTooLong,
)

MAX_RETRY_AFTER_S = 120
"""The OpenAI SDKs ignore a Retry-After above it."""


class Answer(NamedTuple):
    """The error's class, which has the status, and its code; None: the status's own."""

    error: type[GuidevaneError]
    code: str | None


ANSWERS: Mapping[Rejection, Answer] = {
    Rejection.DRAINING: Answer(Overloaded, "draining"),
    Rejection.NOT_READY: Answer(Overloaded, "not_ready"),
    Rejection.AUTH: Answer(Unauthorized, "invalid_api_key"),
    Rejection.BODIES: Answer(Overloaded, "bodies_in_flight"),
    Rejection.VALIDATION: Answer(InvalidRequest, None),
    Rejection.QUEUE_FULL: Answer(Overloaded, "queue_full"),
    Rejection.TENANT_CONCURRENCY: Answer(TooManyRequests, "tenant_concurrency"),
    Rejection.CONTEXT_LENGTH: Answer(InvalidRequest, "context_length_exceeded"),
    Rejection.NEVER_FITS: Answer(InvalidRequest, "kv_capacity_exceeded"),
    Rejection.QUEUED_TOKENS: Answer(Overloaded, "queue_full"),
    Rejection.TENANT_TOKENS: Answer(TooManyRequests, "tenant_token_budget"),
    Rejection.LONG_CONTEXT: Answer(Overloaded, "long_context"),
    # 503: nothing was waited for, and another replica may be in time.
    Rejection.DEADLINE_UNREACHABLE: Answer(Overloaded, "deadline_unreachable"),
}
"""The rungs; what happens in the queue comes as an output of the engine."""


def refusal_error(refused: Refused) -> GuidevaneError:
    """The error that the client gets to read."""
    answer = ANSWERS[refused.reason]
    if refused.wait_s is None:
        return answer.error(refused.message, param=refused.param, code=answer.code)
    seconds = retry_after_s(refused.wait_s)
    error = answer.error(f"{refused.message}; retry after {seconds} s", param=refused.param, code=answer.code)
    error.retry_after_s = seconds
    return error


def retry_after_s(wait_s: float) -> int:
    """An estimate in whole seconds. Without one SDKs retry at once, and three times as many come."""
    return min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S)


def rejection_reason(error: GuidevaneError | Refused) -> Rejection:
    """The reason label of what was raised at the door or in the queue."""
    if isinstance(error, Refused):
        return error.reason
    if isinstance(error, DeadlineExceeded):
        return Rejection.DEADLINE_EXCEEDED
    return Rejection.TIMEOUT if isinstance(error, WaitedTooLong) else Rejection.VALIDATION
