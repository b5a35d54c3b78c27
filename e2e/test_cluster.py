"""The test cluster leaves nothing behind: not after a plain run, not when `up` is killed at any moment.

Runs beside a cluster that is up: it has a state folder and a cgroup of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster.binaries import TOOLS, folder
from e2e.cluster.cgroups import open_cgroup, parse_hierarchies
from e2e.cluster.host import missing_packages
from e2e.cluster.settings import REPOSITORY, read_settings
from e2e.cluster.state import State

CGROUP = "guidevane-test"
BESIDE = read_settings({}, "node", None, None).cgroup
"""Of the cluster that is up."""
START_S = 120.0
"""Longest wait for `up`, or for a moment of it: beside another cluster, on a busy machine."""


def why_not_here() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"needs Linux and root; this is {sys.platform}, uid {getattr(os, 'geteuid', lambda: '?')()}"
    binaries = folder(read_settings(os.environ, "node", None, None))
    missing = missing_packages() + [name for name in TOOLS if not (binaries / name).exists()]
    return f"not installed yet: {', '.join(missing)}; run: python -m e2e.cluster up" if missing else ""


needs_node = pytest.mark.skipif(bool(why_not_here()), reason=f"NO CLUSTER TEST WAS RUN: {why_not_here()}")


@pytest.fixture
def state_folder() -> Iterator[Path]:
    # pytest's own folders have too long a path for kubelet's sockets.
    path = Path(tempfile.mkdtemp(prefix="guidevane-"))
    yield path
    cluster(path, "down")
    shutil.rmtree(path)


def command(state: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "e2e.cluster", "--state", str(state), "--cgroup", CGROUP, *arguments]


def cluster(state: Path, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(state, *arguments), cwd=REPOSITORY, input=stdin, capture_output=True, text=True, timeout=START_S
    )


def assert_nothing_remains(state: Path, namespaces: set[str]) -> None:
    cgroup = open_cgroup(CGROUP)
    assert cgroup.pids() == set()
    assert not cgroup.exists()
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    assert [mount for mount in mounts if mount.startswith(str(state))] == []
    assert processes_that_mention(str(state)) == []
    assert network_namespaces() <= namespaces
    assert not State(state).run.exists()


def processes_that_mention(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def network_namespaces() -> set[str]:
    """Of all processes but those of the cluster beside us, whose pods come and go as they please."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{BESIDE}" not in (process / "cgroup").read_text():
                found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "the moment to kill at did not come"
        time.sleep(0.01)


@needs_node
def test_a_cluster_comes_up_works_and_leaves_nothing_behind(state_folder: Path) -> None:
    namespaces = network_namespaces()

    up = cluster(state_folder, "up")
    assert up.returncode == 0, up.stdout + up.stderr
    assert "already up" in cluster(state_folder, "up").stdout
    assert "Ready" in cluster(state_folder, "kubectl", "get", "nodes", "--no-headers").stdout
    inside = cluster(state_folder, "exec", "--", "sh", "-c", "pwd; hostname; cat; exit 7", stdin="from outside")
    assert inside.returncode == 7
    assert inside.stdout == f"{REPOSITORY}\nguidevane-node\nfrom outside"
    assert cluster(state_folder, "status").returncode == 0

    assert cluster(state_folder, "down").returncode == 0
    assert_nothing_remains(state_folder, namespaces)
    assert cluster(state_folder, "status").returncode == 1


# Seen from outside by what is on the disk: each is a moment with something else half done.
MOMENTS = {
    "before anything is made": "state.json",
    "while certificates are made": "run/pki/ca.crt",
    "while namespaces are made": "logs/init.log",
    "when the namespaces are there": "run/ready",
    "while the control plane starts": "logs/kube-apiserver.log",
    "when containerd serves": "run/containerd.sock",
    "while the node registers": "logs/kubelet.log",
    "while pods start": "run/kubelet/pods",
}


@needs_node
@pytest.mark.parametrize("moment", MOMENTS)
def test_down_removes_everything_when_up_was_killed(state_folder: Path, moment: str) -> None:
    namespaces = network_namespaces()
    up = subprocess.Popen(command(state_folder, "up"), cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    wait_until((state_folder / MOMENTS[moment]).exists)
    up.kill()
    up.wait()

    down = cluster(state_folder, "down")

    assert down.returncode == 0, down.stdout + down.stderr
    assert_nothing_remains(state_folder, namespaces)


def heed_interrupts() -> None:
    """As in a terminal: the tests themselves may be a background job, which shells start with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@needs_node
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_up_cleans_up_after_itself(state_folder: Path, number: signal.Signals) -> None:
    namespaces = network_namespaces()
    up = subprocess.Popen(
        command(state_folder, "up"), cwd=REPOSITORY, stdout=subprocess.DEVNULL, preexec_fn=heed_interrupts
    )
    wait_until((state_folder / "logs/kube-apiserver.log").exists)
    up.send_signal(number)

    assert up.wait(timeout=30) != 0
    assert_nothing_remains(state_folder, namespaces)


@needs_node
def test_down_ends_an_up_that_still_runs(state_folder: Path) -> None:
    namespaces = network_namespaces()
    up = subprocess.Popen(command(state_folder, "up"), cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    wait_until((state_folder / "run/ready").exists)

    down = cluster(state_folder, "down")

    assert down.returncode == 0, down.stdout + down.stderr
    assert up.wait(timeout=30) != 0
    assert_nothing_remains(state_folder, namespaces)


@needs_node
def test_up_comes_up_from_the_remains_of_a_killed_up(state_folder: Path) -> None:
    first = subprocess.Popen(command(state_folder, "up"), cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    wait_until((state_folder / "logs/kubelet.log").exists)
    first.kill()
    first.wait()

    second = cluster(state_folder, "up")

    assert second.returncode == 0, second.stdout + second.stderr


@needs_node
def test_two_clusters_do_not_share_a_cgroup(state_folder: Path) -> None:
    assert cluster(state_folder, "up").returncode == 0
    with tempfile.TemporaryDirectory(prefix="guidevane-") as other:
        refused = cluster(Path(other), "up")

        assert refused.returncode == 1
        assert f"cgroup {CGROUP} holds" in refused.stderr
        assert "Ready" in cluster(state_folder, "kubectl", "get", "nodes", "--no-headers").stdout


def test_cgroup_hierarchies_are_read_from_a_hybrid_machine() -> None:
    text = (
        "29 22 0:25 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
        "30 22 0:26 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd\n"
        "31 22 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
        "32 22 0:28 / /tmp rw,relatime - tmpfs tmpfs rw\n"
    )

    options = [(h.mount.name, h.fstype, h.options) for h in parse_hierarchies(text)]

    assert options == [
        ("cpu,cpuacct", "cgroup", "cpu,cpuacct"),
        ("systemd", "cgroup", "none,name=systemd"),
        ("unified", "cgroup2", ""),
    ]
