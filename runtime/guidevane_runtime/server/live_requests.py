"""Which requests are with the engine, under the client's id and under ours."""


class LiveRequests:
    """From an engine's request id to the X-Request-Id that it came under. One client's id may stand for several."""

    def __init__(self) -> None:
        self._client_ids: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._client_ids)

    def add(self, request_id: str, client_id: str) -> None:
        self._client_ids[request_id] = client_id

    def forget(self, request_id: str) -> None:
        """Idempotent."""
        self._client_ids.pop(request_id, None)

    def client_id(self, request_id: str) -> str:
        """Empty when the request is not live any more."""
        return self._client_ids.get(request_id, "")

    def oldest(self, count: int) -> list[str]:
        """Ids of the engine, those that came first first."""
        return [request_id for request_id, _ in zip(self._client_ids, range(count), strict=False)]

    def named(self, name: str, count: int) -> list[str]:
        """Ids of the engine that are `name` or came under it."""
        found = [request_id for request_id, client_id in self._client_ids.items() if name in (request_id, client_id)]
        return found[:count]
