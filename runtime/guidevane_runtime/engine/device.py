"""What the container gives this process: CPUs and memory. Imports no torch, so that it can set the stage for it.

Both cgroup versions count: v2 (`cpu.max`, `memory.max`) and v1 (`cpu.cfs_quota_us`, `memory.limit_in_bytes`).
Inside a container the cgroup file system is rooted at the container's own group; on a bare machine a group's path is
read from /proc/self/cgroup, and every ancestor's limit holds too.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 says "no limit" with a number close to 2**63, rounded to pages."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest value that glibc takes."""
TRIM_THRESHOLD_BYTES = 512 << 20


def prepare_environment(num_threads: int | None = None) -> None:
    """Set what OpenMP and malloc read once. Call it before torch is imported; values that the user set stay.

    Passive waiting: a spinning OpenMP barrier turns 0.1 ms into tens of ms as soon as another process wants the core.
    """
    threads = str(num_threads or available_cpus())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    _keep_freed_memory()


def available_cpus(root: Path = CGROUP_ROOT, proc: Path = PROC) -> int:
    """CPUs that this process can keep busy: the CPU limit rounded up, and never more than its affinity mask holds."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_limit(root, proc)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cpu_limit(root: Path = CGROUP_ROOT, proc: Path = PROC) -> float | None:
    """The tightest CPU quota over this process's cgroups, in CPUs; None where there is none."""
    quotas = [_quota_v2(folder / "cpu.max") for folder in _folders_v2(root, proc)]
    quotas += [_quota_v1(folder) for folder in _folders_v1(root, proc, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(root: Path = CGROUP_ROOT, proc: Path = PROC) -> int:
    """Bytes that this process may use: the tightest cgroup limit, or the machine's memory where there is none."""
    limits = [_number(folder / "memory.max") for folder in _folders_v2(root, proc)]
    limits += [_number(folder / "memory.limit_in_bytes") for folder in _folders_v1(root, proc, "memory")]
    return min([limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES] + [_machine_memory()])


def _folders_v2(root: Path, proc: Path) -> Iterator[Path]:
    for mount in (root, root / "unified"):
        if (mount / "cgroup.controllers").exists() or (mount / "cpu.max").exists() or (mount / "memory.max").exists():
            yield from _with_ancestors(mount, _group_path(proc, ""))


def _folders_v1(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    for name in (controller, "cpu,cpuacct", "cpuacct,cpu"):
        mount = root / name
        if controller in name.split(",") and mount.is_dir():
            yield from _with_ancestors(mount, _group_path(proc, controller))


def _with_ancestors(mount: Path, group: str) -> Iterator[Path]:
    folder = mount / group.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _group_path(proc: Path, controller: str) -> str:
    """Path of our group in the hierarchy of `controller` ("" is v2), read from lines like `4:cpu,cpuacct:/a/b`."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and ".." not in path:
            return path
    return "/"


def _quota_v2(file: Path) -> float | None:
    words = _words(file)
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _number(file: Path) -> int | None:
    words = _words(file)
    return None if len(words) != 1 or words[0] == "max" else int(words[0])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _keep_freed_memory() -> None:
    """Have glibc reuse freed activations instead of unmapping them: else every step pays page faults for its logits."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
