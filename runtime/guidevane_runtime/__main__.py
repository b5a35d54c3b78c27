"""`python -m guidevane_runtime`: read the settings, run the server, say why if it can't.

Exit status: 0 after an orderly end; 2 for a flag or variable that is misspelt or not valid; 3 for whatever else stops
the start: a model that can't be loaded, a limits or token file that can't be read, a port that is taken.
"""

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from guidevane_runtime.errors import StartError
from guidevane_runtime.logs import configure_logging
from guidevane_runtime.server.process import Server
from guidevane_runtime.settings import RuntimeSettings, read_settings

logger = logging.getLogger(__name__)

EXIT_BAD_SETTINGS = 2
EXIT_CANNOT_START = 3
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
MAX_OPEN_FILES = 65_536
"""Each connection is an open file. The usual soft limit is 1024, and above it uvloop drops connections unanswered."""


def main(arguments: Sequence[str]) -> int:
    """Run until SIGTERM. Returns the exit status."""
    configure_logging("text")
    try:
        settings = read_settings(arguments)
    except StartError as error:
        return _give_up(error, EXIT_BAD_SETTINGS)
    configure_logging(settings.log_format)
    allow_many_connections()
    try:
        uvloop.run(_serve(settings))
    except StartError as error:
        return _give_up(error, EXIT_CANNOT_START)
    return 0


async def _serve(settings: RuntimeSettings) -> None:
    await Server(settings).run()


def allow_many_connections() -> None:
    """Raise the soft limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses what its kernel has no room for.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_up(error: StartError, status: int) -> int:
    logger.error("can't start", extra={"reason": error.message})
    _write_termination_log(error.message)
    return status


def _write_termination_log(message: str) -> None:
    """Where Kubernetes reads why a container ended. Only into a file that is there already, unless it was named."""
    named = os.environ.get("GUIDEVANE_TERMINATION_LOG")
    file = Path(named or DEFAULT_TERMINATION_LOG)
    if named is None and not file.exists():
        return
    try:
        file.write_text(message[:4096])
    except OSError as error:
        logger.warning("can't write the termination log", extra={"file": str(file), "reason": str(error)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
