"""Locks between processes: they end with their holder, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.progress import Progress


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def one_at_a_time(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder of a cache while something is made in it; waits for another process that does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if not try_lock(file.fileno()):
            progress.say(f"another process works in {folder}; waiting for it")
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
