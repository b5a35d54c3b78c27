"""Speaks the admin contract with one pod: PATCH and GET /admin/limits on the pod's own address.

The answer of a pod is data, never an exception: one pod out of three that does not answer is a state of the service.
"""

import json
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError
from yarl import URL

from guidevane_api.admin import LimitsPatch, LimitsView
from guidevane_operator.answers import TooLongError, read_body

ROUTE = "/admin/limits"


@dataclass(frozen=True)
class Accepted:
    """The pod obeys, or will between its next two steps."""

    view: LimitsView


@dataclass(frozen=True)
class Fenced:
    """The pod has seen a higher epoch: this operator is not the newest writer, or the status was lost."""

    epoch: int | None
    """The epoch that the pod holds, if it could be asked."""


@dataclass(frozen=True)
class Refused:
    """The pod cannot obey these limits."""

    status: int
    message: str
    fields: dict[str, str] = field(default_factory=dict)
    """Wire name of the field -> why."""


@dataclass(frozen=True)
class Unreachable:
    """No usable answer."""

    message: str


PushResult = Accepted | Fenced | Refused | Unreachable


class AdminClient:
    """Calls admin ports. Safe to share between tasks."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def patch(self, host: str, port: int, token: str, patch: LimitsPatch) -> PushResult:
        """Ask one pod for these limits; where it has seen a later epoch, ask which."""
        body = patch.model_dump(mode="json", by_alias=True, exclude_none=True)
        answer = await self._call("PATCH", host, port, token, body)
        if isinstance(answer, Fenced) and answer.epoch is None:
            view = await self._call("GET", host, port, token)
            return Fenced(view.view.epoch) if isinstance(view, Accepted) else answer
        return answer

    async def _call(
        self, method: str, host: str, port: int, token: str, body: dict[str, object] | None = None
    ) -> PushResult:
        """One request, typed by its answer."""
        try:
            async with self._session.request(
                method,
                URL.build(scheme="http", host=host, port=port, path=ROUTE),
                json=body,
                headers={"Authorization": f"Bearer {token}"},
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                return _read(response.status, await read_body(response))
        except TooLongError as error:
            return Unreachable(f"{error} at {host}:{port}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Unreachable(f"{type(error).__name__} at {host}:{port}")


def _read(status: int, body: bytes) -> PushResult:
    """Type an answer by its status."""
    if status == 200:
        try:
            return Accepted(LimitsView.model_validate_json(body))
        except ValidationError as error:
            return Unreachable(f"the answer is not a limits view ({error.error_count()} faults)")
    problem = _problem(body)
    if status == 409:
        return Fenced(None)
    if status in (400, 401, 403, 422):
        fields = problem.get("errors") or {}
        fields = {str(name): str(why) for name, why in fields.items()} if isinstance(fields, dict) else {}
        return Refused(status, str(problem.get("message", "")) or "; ".join(fields.values()), fields)
    return Unreachable(f"status {status} {problem.get('message', '')}".strip())


def _problem(body: bytes) -> dict[str, object]:
    """The error object of an answer, whether bare or under "error"."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    inner = answer.get("error", answer) if isinstance(answer, dict) else {}
    return inner if isinstance(inner, dict) else {"message": str(inner)}
