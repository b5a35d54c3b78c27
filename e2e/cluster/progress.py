"""One line per step with the seconds since the start, and a sign of life during long ones."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from e2e.cluster.errors import ClusterError, CommandError

HEARTBEAT_S = 15.0
T = TypeVar("T")


class Progress:
    """Prints to standard output; the clock is monotonic and starts when the object is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:7.1f} s  {text}", flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.say(f"{text} ({time.monotonic() - begin:.1f} s)")

    def run(self, text: str, command: list[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Run a command that may take minutes; its output is shown only if it fails."""
        begin = time.monotonic()
        self.say(f"{text} ...")
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output = self._wait(process, text, begin)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise CommandError(command, process.returncode, output)
        self.say(f"{text}: done in {time.monotonic() - begin:.1f} s")

    def _wait(self, process: "subprocess.Popen[str]", text: str, begin: float) -> str:
        while True:
            try:
                return process.communicate(timeout=HEARTBEAT_S)[0]
            except subprocess.TimeoutExpired:
                self.say(f"{text} ... {time.monotonic() - begin:.0f} s so far")


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float, interval_s: float = 0.1) -> T:
    """Poll until ``probe`` returns something; a probe may raise ClusterError to end the wait at once."""
    deadline = time.monotonic() + timeout_s
    while (found := probe()) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(interval_s)
    return found
