"""Clusters that are not ours: CLUSTER=kind (kind and Docker) and CLUSTER=current (the current kubeconfig)."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

from e2e.cluster.errors import ClusterError
from e2e.cluster.host import run
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Settings

KIND_NAME = "guidevane"


def require_tool(name: str, way_out: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is not on PATH; {way_out}")
    return found


class Current:
    """Whatever kubectl reaches now. Nothing of it is made, changed or removed by us."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self.progress = progress

    def up(self) -> None:
        run(["kubectl", "get", "--raw", "/readyz"])
        context = run(["kubectl", "config", "current-context"]).strip()
        self.progress.say(f"the current cluster answers: context {context}")

    def down(self) -> None:
        self.progress.say("the current cluster is yours: left as it is")

    def exec(self, command: list[str]) -> NoReturn:
        require_tool(command[0], "install it, or put it on PATH")
        os.execvp(command[0], command)

    def status(self) -> int:
        kubectl = require_tool("kubectl", "install it, or put it on PATH")
        return subprocess.run([kubectl, "get", "nodes,pods", "-A"], check=False).returncode

    def load_image(self, archive: Path) -> str:
        raise ClusterError(
            f"{archive} cannot be loaded into CLUSTER=current, which gives no access to its nodes;"
            " push the image to a registry that the cluster reaches, or use CLUSTER=node or CLUSTER=kind"
        )


class Kind(Current):
    """A cluster that kind makes in Docker; its kubeconfig is in the state folder, the user's own stays as it is."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        super().__init__(settings, progress)
        self.kubeconfig = settings.state / "kind.conf"
        os.environ["KUBECONFIG"] = str(self.kubeconfig)

    def _kind(self, *arguments: str) -> str:
        kind = require_tool("kind", "install kind, or use CLUSTER=node (Linux, root)")
        require_tool("docker", "install Docker, or use CLUSTER=node (Linux, root)")
        return run([kind, *arguments, "--name", KIND_NAME])

    def up(self) -> None:
        require_tool("kubectl", "install kubectl")
        self.settings.state.mkdir(parents=True, exist_ok=True)
        clusters = run(
            [require_tool("kind", "install kind, or use CLUSTER=node (Linux, root)"), "get", "clusters"]
        ).split()
        if KIND_NAME in clusters:
            self._kind("export", "kubeconfig", "--kubeconfig", str(self.kubeconfig))
            self.progress.say(f"already up: kind cluster {KIND_NAME}")
            return
        with self.progress.step(f"kind cluster {KIND_NAME}"):
            self._kind("create", "cluster", "--wait", "120s", "--kubeconfig", str(self.kubeconfig))

    def down(self) -> None:
        self._kind("delete", "cluster", "--kubeconfig", str(self.kubeconfig))
        self.progress.say(f"kind cluster {KIND_NAME} deleted")

    def load_image(self, archive: Path) -> str:
        return self._kind("load", "image-archive", str(archive))
