"""Which requests are with the engine, under the client's id and under ours."""

from typing import NamedTuple

from guidevane_runtime.core.leases import Standing


class Origin(NamedTuple):
    """Where a request comes from."""

    client_id: str
    standing: Standing


class LiveRequests:
    """From an engine's request id to the X-Request-Id that it came under. One client's id may stand for several."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, request_id: str, client_id: str, standing: Standing) -> None:
        self._origins[request_id] = Origin(client_id, standing)

    def forget(self, request_id: str) -> None:
        """Idempotent."""
        self._origins.pop(request_id, None)

    def origin(self, request_id: str) -> Origin | None:
        """None when the request is not live any more."""
        return self._origins.get(request_id)

    def oldest(self, count: int) -> list[str]:
        """Ids of the engine, those that came first first."""
        return [request_id for request_id, _ in zip(self._origins, range(count), strict=False)]

    def named(self, name: str, count: int) -> list[str]:
        """Ids of the engine that are `name` or came under it."""
        found = [request_id for request_id, origin in self._origins.items() if name in (request_id, origin.client_id)]
        return found[:count]
