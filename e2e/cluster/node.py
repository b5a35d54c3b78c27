"""CLUSTER=node: one Kubernetes node in namespaces of its own, made of this machine's processes."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

from e2e.cluster.binaries import ensure_binaries
from e2e.cluster.bringup import BringUp
from e2e.cluster.cgroups import NodeCgroup, kill, open_cgroup
from e2e.cluster.containerd import Containerd
from e2e.cluster.enter import is_inside, open_door
from e2e.cluster.errors import ClusterError
from e2e.cluster.host import ensure_packages, require_linux_root
from e2e.cluster.pki import NODE_NAME
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Settings
from e2e.cluster.state import State


class Node:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self.progress = progress
        self.state = State(settings.state)

    def up(self) -> None:
        """Bring the node up; a second time changes nothing, and what fails or is interrupted is taken away again."""
        require_linux_root()
        ensure_packages(self.progress)
        binaries = ensure_binaries(self.settings, self.progress)
        with self.state.lock(take_over=False):
            if self._answers():
                self.progress.say(f"already up: {self.state.root}")
                return
            tear_down(self.state)
            signal.signal(signal.SIGTERM, end_by_signal)
            cgroup = self._free_cgroup()
            try:
                BringUp(self.state, cgroup, binaries, self.progress).run()
            except BaseException:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                cgroup.leave()
                tear_down(self.state)
                self.progress.say(f"bring-up did not end well and was taken away; the logs are in {self.state.logs}")
                raise
        self.progress.say(f"up: node {NODE_NAME} is Ready and cluster DNS answers")

    def _free_cgroup(self) -> NodeCgroup:
        cgroup = open_cgroup(self.settings.cgroup)
        if pids := cgroup.pids():
            raise ClusterError(
                f"cgroup {cgroup.name} holds {len(pids)} processes of another cluster than {self.state.root};"
                " take that one down, or choose another name with --cgroup"
            )
        return cgroup

    def down(self) -> None:
        """End and remove all that is ours, from any half state; images and logs stay in the state folder."""
        require_linux_root()
        if not self.state.root.exists():
            self.progress.say(f"nothing to take down: there is no {self.state.root}")
            return
        with self.state.lock(take_over=True):
            was_there = self.state.read() is not None
            tear_down(self.state)
        self.progress.say("down" if was_there else f"nothing to take down in {self.state.root}")

    def exec(self, command: list[str]) -> NoReturn:
        """Become COMMAND inside of the node's namespaces and cgroups."""
        if is_inside():
            os.execvp(command[0], command)
        require_linux_root()
        open_door(self.state, self.state.read()).become(command)

    def status(self) -> int:
        """Print what is there; 0 if the cluster is up, 1 if not."""
        record = self.state.read()
        try:
            door = open_door(self.state, record)
        except ClusterError as error:
            print(error)
            return 1
        assert record is not None, "a door has a record"
        pids = door.cgroup.pids()
        rss = sum(map(resident_bytes, pids))
        print(f"{'up' if record.is_up else 'half up'}: {self.state.root}")
        print(
            f"cgroup {record.cgroup}: {len(pids)} processes, {rss / 2**20:.0f} MiB resident, PID 1 is {door.init_pid}"
        )
        print(door.kubectl("get", "nodes,pods", "-A") or "the API server does not answer")
        return 0 if record.is_up else 1

    def load_image(self, archive: Path) -> str:
        return self.image_store().import_file(archive)

    def image_store(self) -> Containerd:
        if not is_inside():
            open_door(self.state, self.state.read())
        return Containerd(self.state.socket)

    def _answers(self) -> bool:
        record = self.state.read()
        if record is None or not record.is_up or record.init is None or not record.init.is_alive():
            return False
        return open_door(self.state, record).kubectl("get", "--raw", "/readyz") is not None


def tear_down(state: State) -> None:
    """By the recorded processes and by the cgroup; never by a name."""
    record = state.read()
    if record is None:
        return
    for one in (record.init, record.outer):
        if one is not None and one.is_alive():
            kill(one.pid)
    open_cgroup(record.cgroup).remove()
    state.clear()


def end_by_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
