"""How a request stands in line, from its headers and its body. A header goes before the body's field.

Headers are what a gateway sets for its clients; the body is the client's own. The tenant is in neither: it comes from
the key.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.jobs import Job
from guidevane_runtime.server.sampling import MAX_PRIORITY, MIN_PRIORITY

CLASS_HEADER = "X-Request-Class"
PRIORITY_HEADER = "X-Priority"
DEADLINE_HEADER = "X-Deadline-Ms"
MAX_DEADLINE_MS = 86_400_000
"""A day, as for waitingTimeoutMilliseconds."""


class Wishes(NamedTuple):
    """What the headers ask for; None: they don't say."""

    request_class: RequestClass | None
    priority: int | None
    deadline_ms: int | None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Wishes":
        return cls(
            _class(headers),
            _integer(headers, PRIORITY_HEADER, MIN_PRIORITY, MAX_PRIORITY),
            _integer(headers, DEADLINE_HEADER, 1, MAX_DEADLINE_MS),
        )

    def standing(self, tenant: str, job: Job, arrival_s: float) -> Standing:
        return Standing(
            arrival_s=arrival_s,
            tenant=tenant,
            request_class=self.request_class or job.request_class or RequestClass.INTERACTIVE,
            priority=job.sampling.priority if self.priority is None else self.priority,
            deadline_s=None if self.deadline_ms is None else arrival_s + self.deadline_ms / 1000,
        )


def _class(headers: Mapping[str, str]) -> RequestClass | None:
    given = headers.get(CLASS_HEADER)
    if given is None:
        return None
    try:
        return RequestClass(given.strip().lower())
    except ValueError:
        names = " or ".join(RequestClass)
        raise InvalidRequest(f"{CLASS_HEADER} is {given[:40]!r}, must be {names}", param=CLASS_HEADER) from None


def _integer(headers: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    given = headers.get(name)
    if given is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,10}", given.strip()) or not low <= int(given) <= high:
        raise InvalidRequest(f"{name} is {given[:40]!r}, must be a whole number from {low} to {high}", param=name)
    return int(given)
