"""Writes an answer: as one JSON body, or as server-sent events. A slow client holds no more than its text."""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from guidevane_runtime.errors import GuidevaneError, ServerError
from guidevane_runtime.server.choices import Delta
from guidevane_runtime.server.error_body import error_body, log_failure
from guidevane_runtime.server.generation import Generation
from guidevane_runtime.server.shapes import AnswerShape, Envelope
from guidevane_runtime.server.tracing import IDS

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 15.0
"""A comment line this often before the first token: proxies cut silent connections, often after 30 to 60 s."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_encode = msgspec.json.encode


async def answer_whole(generation: Generation, shape: AnswerShape) -> web.Response:
    """Wait for every choice, then answer with one body."""
    answers = {choice.index: Delta() for choice in generation.choices}
    while not generation.is_done:
        for index, delta in (await generation.next()).items():
            answers[index].merge(delta)
    body = shape.whole(generation.choices, [answers[choice.index] for choice in generation.choices])
    return web.Response(body=_encode(body), content_type="application/json")


async def answer_stream(
    request: web.Request,
    generation: Generation,
    shape: AnswerShape,
    envelope: Envelope,
    *,
    ping_interval_s: float = PING_INTERVAL_S,
) -> web.StreamResponse:
    """Send deltas as they come.

    Headers wait for the first news or the first ping: an error before them still gets its own status. After them an
    error is an event of the stream, and [DONE] ends it all the same.
    """
    writer = EventWriter(request)
    try:
        await _write_events(writer, generation, shape, envelope, ping_interval_s)
    except GuidevaneError as error:
        if not writer.has_begun:
            raise
        log_failure(request, error)
        await writer.send(error_body(request, error))
    except Exception as error:
        if isinstance(error, ConnectionError) or not writer.has_begun:
            raise
        logger.exception("stream failed", extra={"request_id": request[IDS].request_id})
        await writer.send(
            error_body(request, ServerError("an unexpected error; quote the request id when you report it"))
        )
    return await writer.end()


async def _write_events(
    writer: "EventWriter", generation: Generation, shape: AnswerShape, envelope: Envelope, ping_interval_s: float
) -> None:
    news = await _first_news(writer, generation, ping_interval_s)
    for event in shape.opening(generation.choices):
        await writer.send(event)
    while True:
        for index, delta in news.items():
            await writer.send(shape.chunk(generation.choices[index], delta))
        if generation.is_done:
            break
        news = await generation.next()
    if envelope.include_usage:
        await writer.send(shape.usage_chunk(generation.choices))


async def _first_news(writer: "EventWriter", generation: Generation, ping_interval_s: float) -> dict[int, Delta]:
    waiting = asyncio.create_task(generation.next())
    try:
        while not waiting.done():
            done, _ = await asyncio.wait((waiting,), timeout=ping_interval_s)
            if not done:
                await writer.ping()
        return waiting.result()
    finally:
        waiting.cancel()


class EventWriter:
    """Server-sent events on one response, begun with the first of them."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self.has_begun = False

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(b"data: " + _encode(event) + b"\n\n")

    async def ping(self) -> None:
        """A comment, which clients ignore."""
        await self._write(b": ping\n\n")

    async def end(self) -> web.StreamResponse:
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._response.prepare(self.request)
        await self._response.write(data)
