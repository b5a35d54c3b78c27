"""The engine in a thread of this process, behind the same mailbox: for tests and for the simulator."""

import asyncio
import socket
import threading

from guidevane_runtime.engine.link import EngineHandle, Launcher
from guidevane_runtime.engine.mailbox import Mailbox
from guidevane_runtime.engine.process import Loader, serve


class EngineThread:
    """Can't be forced: it ends when its mailbox does, after the step that it is in."""

    def __init__(self, sock: socket.socket, load: Loader) -> None:
        self._mailbox_sock = sock
        self._thread = threading.Thread(target=serve, args=(Mailbox(sock), load), name="engine", daemon=True)
        self._thread.start()

    async def end(self, grace_s: float) -> str:
        await asyncio.to_thread(self._thread.join, grace_s)
        return "thread ended" if not self._thread.is_alive() else "thread still in its step"


def thread_launcher(load: Loader) -> Launcher:
    """A launcher for EngineClient that runs `load` and the engine's loop in a thread."""

    async def launch(sock: socket.socket) -> EngineHandle:
        return EngineThread(sock.dup(), load)

    return launch
