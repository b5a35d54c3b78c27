"""Bodies that are being read hold a bounded number of bytes, whatever clients do."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.errors import BodyTooLarge, InvalidRequest, UnsupportedBody
from guidevane_runtime.server.bodies import BodyReader


class Upload:
    """A request whose body comes piece by piece; an empty piece is its end."""

    client_max_size = 100
    content_length: int | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, *pieces: bytes) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        for piece in pieces:
            self.pieces.put_nowait(piece)
        self.content = self

    async def readany(self) -> bytes:
        return await self.pieces.get()

    async def read_with(self, reader: BodyReader) -> bytes:
        async with reader.read(cast(Any, self)) as raw:
            return raw


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def settle(reader: BodyReader, num_bytes: int) -> None:
    """Until so many bytes are held."""
    for _ in range(1000):
        await asyncio.sleep(0)
        if reader.num_bytes == num_bytes:
            return
    raise AssertionError(f"{reader.num_bytes} bytes are held, not {num_bytes}")


async def test_a_body_counts_until_it_is_parsed(clock: Clock) -> None:
    reader = BodyReader(clock)
    async with reader.read(cast(Any, Upload(b"ab", b"c", b""))) as raw:
        assert (raw, reader.num_bytes) == (b"abc", 3)
    assert reader.num_bytes == 0


async def test_what_would_be_too_much_is_refused_and_gives_back_what_it_held(clock: Clock) -> None:
    reader = BodyReader(clock, max_bytes=10)
    slow = asyncio.create_task(Upload(b"1234567").read_with(reader))
    await settle(reader, 7)
    with pytest.raises(Refused) as raised:
        await Upload(b"12", b"34", b"").read_with(reader)
    assert raised.value.reason is Rejection.BODIES
    assert str(raised.value) == "request bodies that are being read hold 9 bytes, 10 are allowed"
    assert reader.num_bytes == 7
    assert await Upload(b"123", b"").read_with(reader) == b"123"
    slow.cancel()
    await asyncio.wait((slow,))
    assert reader.num_bytes == 0


async def test_a_flood_of_slow_uploads_never_holds_more_than_is_allowed(clock: Clock) -> None:
    reader, uploads = BodyReader(clock, max_bytes=50), [Upload(b"12345") for _ in range(200)]
    tasks = [asyncio.create_task(upload.read_with(reader)) for upload in uploads]
    await settle(reader, 50)
    for upload in uploads:
        upload.pieces.put_nowait(b"")
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end for end in ends if isinstance(end, bytes)] == [b"12345"] * 10
    assert {type(end) for end in ends} == {bytes, Refused}
    assert reader.num_bytes == 0


async def test_clients_that_send_nothing_hold_nothing(clock: Clock) -> None:
    reader = BodyReader(clock, max_bytes=10)
    silent = [asyncio.create_task(Upload().read_with(reader)) for _ in range(100)]
    assert await Upload(b"1234567890", b"").read_with(reader) == b"1234567890"
    for task in silent:
        task.cancel()
    await asyncio.wait(silent)


async def test_a_body_that_does_not_end_is_400_with_what_came(clock: Clock) -> None:
    reader = BodyReader(clock, read_timeout_s=0.01)
    with pytest.raises(InvalidRequest, match="3 bytes of the body arrived within 0 s, and not its end") as raised:
        await Upload(b"abc").read_with(reader)
    assert raised.value.code == "body_too_slow"
    assert reader.num_bytes == 0


async def test_a_body_above_the_size_limit_is_413(clock: Clock) -> None:
    reader = BodyReader(clock)
    with pytest.raises(BodyTooLarge):
        await Upload(b"x" * 100, b"y", b"").read_with(reader)
    assert reader.num_bytes == 0


async def test_a_body_that_announces_too_much_is_not_waited_for(clock: Clock) -> None:
    upload = Upload()
    upload.content_length = 101
    with pytest.raises(BodyTooLarge, match="101 bytes or more, 100 are allowed"):
        await asyncio.wait_for(upload.read_with(BodyReader(clock)), 5)


async def test_a_compressed_body_is_not_unfolded(clock: Clock) -> None:
    upload = Upload(b"", b"")
    upload.headers = {"Content-Encoding": " GZip"}
    with pytest.raises(UnsupportedBody, match="Content-Encoding is 'gzip'"):
        await upload.read_with(BodyReader(clock))


async def test_the_wait_is_the_time_that_bodies_take(clock: Clock) -> None:
    reader = BodyReader(clock, max_bytes=3)
    for _ in range(100):
        async with reader.read(cast(Any, Upload(b"x", b""))):
            clock.now_s += 4.0
    with pytest.raises(Refused) as raised:
        await Upload(b"1234").read_with(reader)
    assert raised.value.wait_s == pytest.approx(4.0, rel=0.01)
