"""The server's end of one engine process: its mailbox as an asyncio protocol, and the process itself."""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from guidevane_runtime.core.messages import EngineFailed, Event
from guidevane_runtime.engine.mailbox import FrameBuffer, encode


class EngineHandle(Protocol):
    """Whatever runs the engine: a process, or a thread in tests and in the simulator."""

    async def end(self, grace_s: float) -> str:
        """Wait for its end, by force after grace_s if it can be forced; say how it ended. Idempotent."""


class Launcher(Protocol):
    async def __call__(self, sock: socket.socket) -> EngineHandle:
        """Start an engine that has `sock` as its mailbox; the caller closes its own copy afterwards."""


class EngineLink(asyncio.Protocol):
    """One engine from its start to its end. Outputs of a step arrive as one event."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._buffer = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self._handle: EngineHandle | None = None
        self.failure: EngineFailed | None = None
        """The engine's own word on why it ends."""
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, launch: Launcher, on_event: Callable[[Event], None]) -> "EngineLink":
        ours, theirs = socket.socketpair()
        link = cls(on_event)
        try:
            ours.setblocking(False)
            link._handle = await launch(theirs)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException:
            ours.close()
            await link.end(0.0)
            raise
        finally:
            theirs.close()
        return link

    def send(self, message: object) -> None:
        """Never blocks; a message to an engine that is gone is lost, as the engine's requests are."""
        if self._transport is not None and not self.closed.is_set():
            self._transport.write(encode(message))

    async def end(self, grace_s: float) -> str:
        """Close the mailbox after the engine had grace_s to end by itself. Says how it ended."""
        try:
            return "never started" if self._handle is None else await self._handle.end(grace_s)
        finally:
            if self._transport is not None:
                self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        for event in self._buffer.messages():
            if isinstance(event, EngineFailed):
                self.failure = event
            self._on_event(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self, grace_s: float) -> str:
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        return f"exit status {self._process.returncode}"

    def _kill(self) -> None:
        try:
            self._process.kill()
        except ProcessLookupError:
            return


def process_launcher(arguments: Sequence[str] = ()) -> Launcher:
    """Start `python -m guidevane_runtime.engine` with these further arguments."""

    async def launch(sock: socket.socket) -> EngineHandle:
        command: list[Any] = [sys.executable, "-m", "guidevane_runtime.engine", "--mailbox-fd", str(sock.fileno())]
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, pass_fds=(sock.fileno(),), stdin=asyncio.subprocess.DEVNULL
        )
        return EngineProcess(process)

    return launch
