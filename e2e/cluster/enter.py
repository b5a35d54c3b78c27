"""How a process gets into the node: its cgroups first, then its namespaces."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from e2e.cluster.cgroups import NodeCgroup, open_cgroup
from e2e.cluster.errors import ClusterError
from e2e.cluster.state import Process, Record, State, process

INSIDE = "GUIDEVANE_INSIDE_NODE"
"""Set for what runs inside of the node, so that a command of ours there does not try to enter once more."""


def is_inside() -> bool:
    return bool(os.environ.get(INSIDE))


@dataclass(frozen=True)
class Door:
    """The way into one running node."""

    init_pid: int
    cgroup: NodeCgroup
    kubeconfig: Path
    binaries: Path

    def command(self, command: list[str]) -> list[str]:
        """`nsenter -p` stays as the parent of what it starts; when it ends, so does its child."""
        namespaces = ["-m", "-n", "-p", "-u", "-i", "-C"]
        return ["nsenter", "-t", str(self.init_pid), *namespaces, "--", "setpriv", "--pdeathsig", "TERM", *command]

    def environment(self) -> dict[str, str]:
        """The admin's kubeconfig, kubectl of the right version (the machine's may be older), root's tools."""
        path = [str(self.binaries), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": ":".join(filter(None, path)), INSIDE: "1"}

    def serve(self, command: list[str], log: Path) -> Process:
        """Start a program of the node; the caller is in the node's cgroup already."""
        return spawn(self.command(command), log, self.environment())

    def become(self, command: list[str]) -> NoReturn:
        """Replace this process; folder, input, output and exit status are the caller's."""
        self.cgroup.join()
        # The mount namespace begins at /, so the folder is entered by env(1) inside of it.
        entering = self.command(["env", f"--chdir={Path.cwd()}", *command])
        os.execvpe(entering[0], entering, self.environment())

    def kubectl(self, *arguments: str, stdin: str = "") -> str | None:
        """Its output, or None if it failed, as it does while the cluster comes up."""
        done = subprocess.run(
            self.command(["kubectl", *arguments]),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment(),
        )
        return done.stdout if done.returncode == 0 else None


def spawn(
    command: list[str], log: Path, env: Mapping[str, str], before_exec: Callable[[], None] | None = None
) -> Process:
    """Start a process that outlives this one."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
            env=env,
            cwd="/",
        )
    return process(started.pid)


def open_door(state: State, record: Record | None) -> Door:
    """The door into the node that the record describes, if it is there."""
    if record is None or record.init is None or not record.init.is_alive():
        raise ClusterError(f"no cluster is up in {state.root}; bring one up with: python -m e2e.cluster up")
    return Door(record.init.pid, open_cgroup(record.cgroup), state.run / "admin.conf", Path(record.binaries))
