"""Reads request bodies within a budget of bytes: a flood of large or slow uploads fills no memory.

A body is in no lease yet, as nobody knows what it asks for before it is read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import hdrs, web

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.core.pace import Rate
from guidevane_runtime.errors import BodyTooLarge, InvalidRequest, UnsupportedBody

MAX_BYTES_IN_FLIGHT = 256 << 20
"""Of all bodies that are being read or parsed: eight of the largest."""
READ_TIMEOUT_S = 60.0
"""For one body. 32 MiB in it are 4.5 Mbit/s."""


class BodyReader:
    """Counts the bytes that are there, not those that are announced: a client that sends nothing takes nothing."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_bytes: int = MAX_BYTES_IN_FLIGHT,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._read_timeout_s = read_timeout_s
        self._stays = Rate(1.0)
        """Of bodies, from their first byte until they are parsed."""
        self.num_bytes = 0
        """Of all bodies that are here."""

    @asynccontextmanager
    async def read(self, request: web.Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """The whole body; it counts until the context ends. Raises Refused when all of them together get too large.

        max_bytes: of this one; None: the app's own bound.
        """
        bound = max_bytes or request.client_max_size
        ensure_plain(request)
        _ensure_size(request.content_length or 0, bound)
        began_s, body = self._clock(), bytearray()
        try:
            await self._fill(body, request, bound)
            yield bytes(body)
        finally:
            self.num_bytes -= len(body)
            self._stays.add(1, self._clock() - began_s, is_busy=True)

    async def _fill(self, body: bytearray, request: web.Request, max_bytes: int) -> None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                while chunk := await request.content.readany():
                    self._ensure_room(len(chunk))
                    body += chunk
                    self.num_bytes += len(chunk)
                    _ensure_size(len(body), max_bytes)
        except TimeoutError as error:
            raise InvalidRequest(
                f"{len(body)} bytes of the body arrived within {self._read_timeout_s:.0f} s, and not its end; send it "
                "faster or in parts",
                code="body_too_slow",
            ) from error

    def _ensure_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Refused(
                Rejection.BODIES,
                f"request bodies that are being read hold {self.num_bytes} bytes, {self._max_bytes} are allowed",
                self._stays.s_per_unit,
            )


def ensure_plain(request: web.Request) -> None:
    """Refuse a compressed body: a small one unfolds to gigabytes, and costs the event loop seconds."""
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedBody(f"Content-Encoding is {coding[:40]!r}; send the body as plain JSON")


def _ensure_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"the body has {num_bytes} bytes or more, {max_bytes} are allowed; shorten it")
