"""The node's control group in every hierarchy of the machine: version 1, hybrid, or version 2 alone.

The group is the leash of the node: whatever `up` or `exec` starts joins it before it becomes anything else, so
everything that is ours can be found, and ended, without ever looking at the name of a process.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")

# Mount options that describe the mount rather than name a controller.
PLAIN_OPTIONS = {"rw", "ro", "xattr", "clone_children", "cpuset_v2_mode", "nsdelegate", "memory_recursiveprot"}


@dataclass(frozen=True)
class Hierarchy:
    mount: Path
    fstype: str
    options: str
    """What `mount -o` wants to show the same hierarchy again inside of the node's cgroup namespace."""


def parse_hierarchies(mountinfo: str) -> list[Hierarchy]:
    """The cgroup mounts of a /proc/PID/mountinfo text, in its order."""
    found: dict[Path, Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fstype, _, superblock = right.split(" ", 2)
        mount = Path(left.split(" ")[4])
        if fstype not in ("cgroup", "cgroup2") or not mount.is_relative_to(ROOT):
            continue
        options = [o for o in superblock.split(",") if o not in PLAIN_OPTIONS and not o.startswith("release_agent=")]
        if any(o.startswith("name=") for o in options):
            options.insert(0, "none")
        found[mount] = Hierarchy(mount, fstype, ",".join(options) if fstype == "cgroup" else "")
    return list(found.values())


def home_folders(hierarchies: list[Hierarchy], proc_cgroup: str) -> list[Path]:
    """The folder in each hierarchy that a /proc/PID/cgroup text names, or its top where it cannot be seen from here."""
    paths: dict[frozenset[str], str] = {}
    for line in proc_cgroup.splitlines():
        _, names, path = line.split(":", 2)
        paths[frozenset(filter(None, names.split(",")))] = path.lstrip("/")
    folders = []
    for hierarchy in hierarchies:
        controllers = frozenset(filter(None, hierarchy.options.split(","))) - {"none"}
        folder = hierarchy.mount / paths.get(controllers, "")
        folders.append(folder if folder.is_dir() else hierarchy.mount)
    return folders


class NodeCgroup:
    """One name in every hierarchy. Only `create` makes folders, so a process that joins too late fails and ends."""

    def __init__(self, name: str, hierarchies: list[Hierarchy]) -> None:
        if not hierarchies:
            raise ClusterError(
                f"no cgroup hierarchy is mounted below {ROOT}; mount one (see docs/cluster.md) and try again"
            )
        self.name = name
        self.hierarchies = hierarchies
        self.is_v2 = [h.mount for h in hierarchies] == [ROOT]
        self.folders = [h.mount / name for h in hierarchies]
        self._home = home_folders(hierarchies, Path("/proc/self/cgroup").read_text())
        # Version 2 allows processes only in leaves once the children have controllers.
        self.leaves = [f / "init" for f in self.folders] if self.is_v2 else self.folders

    def create(self) -> None:
        if self.is_v2:
            self._enable_controllers()
        for hierarchy, folder, leaf in zip(self.hierarchies, self.folders, self.leaves, strict=True):
            folder.mkdir(exist_ok=True)
            leaf.mkdir(exist_ok=True)
            if "cpuset" in hierarchy.options.split(","):
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((hierarchy.mount / name).read_text())
                (folder / "cgroup.clone_children").write_text("1")

    def _enable_controllers(self) -> None:
        for controller in (ROOT / "cgroup.controllers").read_text().split():
            try:
                (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                if controller in ("cpu", "cpuset", "memory", "pids"):
                    raise ClusterError(
                        f"cgroup controller {controller} cannot be handed down from {ROOT} ({error.strerror});"
                        " run on the host or in a container with its own, writable cgroup namespace"
                    ) from error

    def join(self) -> None:
        """Move this process to where the node's processes live; all that it starts is born there."""
        move_self(self.leaves)

    def leave(self) -> None:
        """Move this process back to where it was when this object was made, so that the group can be removed."""
        move_self(self._home)

    def join_top(self) -> None:
        """Move this process to the group itself, which becomes the root of the node's cgroup namespace.

        Safe between fork and exec: it only writes files.
        """
        move_self(self.folders)

    def pids(self) -> set[int]:
        """Every process in the group or below it, by the machine's numbers."""
        found: set[int] = set()
        for folder in self.folders:
            for path, _, _ in os.walk(folder):
                found |= read_pids(Path(path))
        return found - {os.getpid()}

    def exists(self) -> bool:
        return any(folder.exists() for folder in self.folders)

    def kill(self, timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while pids := self.pids():
            for pid in pids:
                kill(pid)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"processes {sorted(pids)} in cgroup {self.name} do not end; look at them with ps -p"
                )
            time.sleep(0.02)

    def remove(self, timeout_s: float = 15) -> None:
        """End what is in the group and take the group away; repeated, as the kernel lets go of a group with a delay."""
        deadline = time.monotonic() + timeout_s
        while self.exists():
            self.kill()
            for folder in self.folders:
                remove_empty_folders(folder)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"cgroup {self.name} cannot be removed; is this shell in it? (cat /proc/self/cgroup)"
                )
            time.sleep(0.02)

    def mounts_inside(self) -> str:
        """For init.sh: FOLDER=TYPE:OPTIONS, one for each hierarchy, FOLDER relative to /sys/fs/cgroup."""
        return " ".join(f"{h.mount.relative_to(ROOT)}={h.fstype}:{h.options}" for h in self.hierarchies)


def move_self(folders: list[Path]) -> None:
    pid = str(os.getpid()).encode()
    for folder in folders:
        fd = os.open(folder / "cgroup.procs", os.O_WRONLY)
        os.write(fd, pid)
        os.close(fd)


def read_pids(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()} - {0}
    except (FileNotFoundError, OSError):  # gone, or a threaded group of version 2
        return set()


def remove_empty_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            Path(path).rmdir()
        except OSError:
            continue  # still in use: the caller tries again


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def open_cgroup(name: str) -> NodeCgroup:
    return NodeCgroup(name, parse_hierarchies(Path("/proc/self/mountinfo").read_text()))
