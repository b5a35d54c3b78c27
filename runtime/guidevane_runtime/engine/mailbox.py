"""The mailbox between server and engine: one stream socket, each message a length and a pickle.

Only a process and the child that it started hold the two ends, so what is unpickled here was pickled by us.
"""

import pickle
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

LENGTH = struct.Struct("!I")
READ_BYTES = 1 << 18


class MailboxClosedError(ConnectionError):
    """The other side is gone."""


def encode(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come in, messages as they are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def messages(self) -> Iterator[Any]:
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            end = LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            # The peer is our own parent or child, see above.
            yield pickle.loads(body)  # noqa: S301


class Mailbox:
    """The engine's end. Blocking: the engine has nothing else to do."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._buffer = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def take(self, timeout_s: float) -> list[Any]:
        """All messages that are there, after up to timeout_s for the first. Raises MailboxClosedError at the end."""
        if self._poll.poll(timeout_s * 1000):
            self._read_all()
        return list(self._buffer.messages())

    def take_first(self) -> Any:
        """Wait for one message; what came with it stays for the next take()."""
        while True:
            self._poll.poll()
            self._read_all()
            for message in self._buffer.messages():
                return message

    def put(self, message: object) -> None:
        """Raises MailboxClosedError if nobody reads any more."""
        try:
            self._sock.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError) as gone:
            raise MailboxClosedError("the server has closed the engine's mailbox") from gone

    def close(self) -> None:
        self._sock.close()

    def _read_all(self) -> None:
        while True:
            try:
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                raise MailboxClosedError("the server has closed the engine's mailbox")
            self._buffer.feed(data)
