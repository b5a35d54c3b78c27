"""Clients that are gone without a word, or take nothing: TCP itself notices them, and cuts the connection.

The kernel knows what a client's machine has taken; here a write is done once the kernel holds it, which may be
megabytes earlier. A handler whose connection is cut is cancelled, and frees what it holds.
"""

import asyncio
import contextlib
import socket
import sys

PATIENCE_S = 30
"""A client that takes nothing for this long is let go, as is one whose machine does not answer: what it holds belongs
to others."""
PROBE_AFTER_S = 15
"""Of silence: a client that waits for its answer has nothing to acknowledge, so its machine is asked."""
PROBE_INTERVAL_S = 5


def watch_peer(transport: asyncio.BaseTransport | None, patience_s: float = PATIENCE_S) -> None:
    """Cut a connection whose other end takes nothing. On Linux; elsewhere the system's own timeouts hold."""
    connection = transport and transport.get_extra_info("socket")
    if sys.platform != "linux" or not connection:
        return
    options = {
        socket.TCP_USER_TIMEOUT: int(patience_s * 1000),
        socket.TCP_KEEPIDLE: PROBE_AFTER_S,
        socket.TCP_KEEPINTVL: PROBE_INTERVAL_S,
    }
    # A connection that was closed meanwhile has no options.
    with contextlib.suppress(OSError):
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
