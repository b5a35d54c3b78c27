"""Ids that join a request with its answer, its errors and its log lines. W3C trace context, https://www.w3.org/TR/trace-context/."""

import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from aiohttp import web

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The client's own where it sent good ones, else new ones. Two requests may carry the same."""

    request_id: str
    trace_id: str
    span_id: str
    flags: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        sent = headers.get("X-Request-Id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        parent = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        if parent and parent[1].strip("0") and parent[2].strip("0"):
            return cls(request_id, parent[1], secrets.token_hex(8), parent[3])
        return cls(request_id, secrets.token_hex(16), secrets.token_hex(8), "00")

    def headers(self) -> dict[str, str]:
        """For the answer."""
        return {"X-Request-Id": self.request_id, "traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags}"}


IDS = web.RequestKey("ids", RequestIds)
