"""CPU and memory limits, read from cgroup files of both versions as a container and as a bare machine show them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guidevane_runtime.engine.device import available_cpus, cpu_limit, memory_limit

NO_LIMIT_V1 = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """/proc/self/cgroup of a container: its own group is the root."""
    file = tmp_path / "proc"
    file.write_text("4:memory:/\n3:cpu,cpuacct:/\n0::/\n")
    return file


CPU_FILES = {
    "v2 limit": ({"cpu.max": "150000 100000\n"}, 1.5),
    "v2 no limit": ({"cpu.max": "max 100000\n"}, None),
    "v1 limit": ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
    "v1 joint mount": ({"cpu,cpuacct/cpu.cfs_quota_us": "5000\n", "cpu,cpuacct/cpu.cfs_period_us": "10000\n"}, 0.5),
    "v1 no limit": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    "hybrid": ({"unified/cpu.max": "max 100\n", "cpu/cpu.cfs_quota_us": "30\n", "cpu/cpu.cfs_period_us": "10\n"}, 3.0),
    "nothing": ({}, None),
}


@pytest.mark.parametrize(("files", "expected"), CPU_FILES.values(), ids=CPU_FILES)
def test_cpu_limit_is_read_from_either_cgroup_version(
    files: dict[str, str], expected: float | None, tmp_path: Path, proc: Path
) -> None:
    assert cpu_limit(write(tmp_path / "cgroup", files), proc) == expected


def test_the_tightest_ancestor_limits_the_cpus(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.write_text("0::/kubepods/pod1/runtime\n")
    root = write(
        tmp_path / "cgroup",
        {
            "cpu.max": "max 100000\n",
            "kubepods/pod1/cpu.max": "200000 100000\n",
            "kubepods/pod1/runtime/cpu.max": "400000 100000\n",
        },
    )

    assert cpu_limit(root, proc) == 2.0


@pytest.mark.parametrize(("quota", "expected"), [("20000", 1), ("100000", 1), ("100001", 2), ("6400000", math.inf)])
def test_threads_are_the_cpu_limit_rounded_up_within_the_affinity_mask(
    quota: str, expected: float, tmp_path: Path, proc: Path
) -> None:
    root = write(tmp_path / "cgroup", {"cpu.max": f"{quota} 100000\n"})

    assert available_cpus(root, proc) == min(expected, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "536870912\n"}, 536870912),
        ({"memory/memory.limit_in_bytes": "1048576\n"}, 1048576),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": NO_LIMIT_V1}, None),
        ({}, None),
    ],
    ids=["v2", "v1", "v2 no limit", "v1 no limit", "nothing"],
)
def test_memory_limit_is_the_cgroups_or_the_machines(
    files: dict[str, str], expected: int | None, tmp_path: Path, proc: Path
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert memory_limit(write(tmp_path / "cgroup", files), proc) == (expected or machine)


def test_the_stage_is_set_before_torch_is_imported() -> None:
    code = (
        "import os, sys\n"
        "from guidevane_runtime.engine.device import prepare_environment\n"
        "prepare_environment(3)\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}

    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "MKL_NUM_THREADS": "1"}, capture_output=True, text=True
    )

    assert done.stdout.split() == ["passive", "3", "1"], done.stderr
