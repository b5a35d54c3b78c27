"""Reads answers of servers that nobody vouches for: a body has an end, or it is no answer."""

import aiohttp

MAX_BODY_MIB = 4
"""Longest body that is read. The exposition of a busy pod has a tenth of a MiB."""


class TooLongError(aiohttp.ClientError):
    """The body did not end in time."""

    def __str__(self) -> str:
        """What a person is told."""
        return f"the answer is longer than {MAX_BODY_MIB} MiB"


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises TooLongError, after which the connection is of no more use."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_MIB * 2**20:
            response.close()
            raise TooLongError
    return bytes(body)
