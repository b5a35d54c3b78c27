"""What is written down about a cluster, so that a later command finds all of it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.locks import try_lock


@dataclass(frozen=True)
class Process:
    """A process by its number and its start time, so that a number that was given out again is not taken for ours."""

    pid: int
    start: str

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.start


def start_time(pid: int) -> str | None:
    """Clock ticks since boot at which the process began; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def process(pid: int) -> Process:
    start = start_time(pid)
    if start is None:
        raise ClusterError(f"process {pid} ended at once; its log is in the logs folder of the state folder")
    return Process(pid, start)


@dataclass(frozen=True)
class Record:
    cgroup: str
    binaries: str
    is_up: bool = False
    outer: Process | None = None
    """`unshare` in the machine's namespaces; when it dies, PID 1 of the node dies."""
    init: Process | None = None
    """PID 1 of the node, by the machine's number; when it dies, all processes of the node die."""


class State:
    """The folder of one cluster. `run/` is made anew at each bring-up; `containerd/` and `logs/` stay."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "run"
        self.logs = root / "logs"
        self.socket = self.run / "containerd.sock"
        self._file = root / "state.json"

    def read(self) -> Record | None:
        try:
            data = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        for name in ("outer", "init"):
            data[name] = data[name] and Process(**data[name])
        return Record(**data)

    def write(self, record: Record) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(asdict(record)))
        part.replace(self._file)

    def clear(self) -> None:
        """Forget the cluster and remove what it had on disk, images and logs excepted."""
        refuse_if_mounted(self.root)
        shutil.rmtree(self.run, ignore_errors=True)
        self._file.unlink(missing_ok=True)

    @contextmanager
    def lock(self, take_over: bool) -> Iterator[None]:
        """One command at a time may change the cluster; `down` takes over from an `up` that still runs by ending it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("a+") as file:
            if not try_lock(file.fileno()):
                file.seek(0)
                self._take_over(file.fileno(), int(file.read() or 0), take_over)
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _take_over(self, fd: int, holder: int, allowed: bool) -> None:
        if not allowed:
            raise ClusterError(f"process {holder} is changing the cluster in {self.root}; wait for it, or run down")
        for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            # The lock is held, so the number in the file is that of a living process.
            os.kill(holder, number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if try_lock(fd):
                    return
                time.sleep(0.05)
        raise ClusterError(f"process {holder} holds {self.root}/lock and does not end; look at it with ps -p {holder}")


def refuse_if_mounted(folder: Path) -> None:
    """Removing a folder with something mounted below would remove what is mounted there."""
    mounts = [Path(line.split(" ")[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if inside := [str(mount) for mount in mounts if mount.is_relative_to(folder)]:
        raise ClusterError(f"still mounted below {folder}: {', '.join(inside)}; umount them and run down again")
