"""Where the cluster keeps its things, and which kind of cluster it is. Read once, in ``__main__``."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

KINDS = ("node", "kind", "current")
REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parent

# A unix socket's path ends at 107 bytes, and kubelet puts sockets up to 40 bytes below the state folder.
MAX_STATE_PATH = 64


@dataclass(frozen=True)
class Settings:
    kind: str
    """node: our own single node; kind: kind and Docker; current: the cluster of the current kubeconfig."""
    state: Path
    """All that belongs to one cluster. ``containerd/`` below it survives ``down``, so images are imported once."""
    cache: Path
    """What any number of clusters share: built binaries, Go, image layers. Safe to delete; made again in minutes."""
    cgroup: str
    """Name of the node's control group; two clusters on one machine need two names and two state folders."""

    @property
    def bin_root(self) -> Path:
        return self.cache / "bin"

    @property
    def layers(self) -> Path:
        return self.cache / "layers"


def read_settings(env: Mapping[str, str], kind: str | None, state: str | None, cgroup: str | None) -> Settings:
    """Flags win over the environment, the environment over the defaults."""
    cache = Path(env.get("GUIDEVANE_CACHE_DIR") or Path.home() / ".cache" / "guidevane").resolve()
    folder = Path(state or env.get("GUIDEVANE_CLUSTER_DIR") or cache / "cluster").resolve()
    settings = Settings(
        kind=kind or env.get("CLUSTER") or "node",
        state=folder,
        cache=cache,
        cgroup=cgroup or env.get("GUIDEVANE_NODE_CGROUP") or "guidevane-node",
    )
    check(settings)
    return settings


def check(settings: Settings) -> None:
    if settings.kind not in KINDS:
        raise ClusterError(f"CLUSTER is {settings.kind!r}; it may be one of: {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", settings.cgroup):
        raise ClusterError(
            f"the cgroup name {settings.cgroup!r} is not a plain name; use small letters, digits and dashes, 63 at most"
        )
    if len(os.fsencode(settings.state)) > MAX_STATE_PATH:
        raise ClusterError(
            f"the state folder {settings.state} has {len(os.fsencode(settings.state))} bytes, limit {MAX_STATE_PATH}"
            " (kubelet's sockets lie below it); choose a shorter one with --state"
        )
    if any(c.isspace() for c in str(settings.state)):
        raise ClusterError(
            f"the state folder {str(settings.state)!r} contains white space; choose another with --state"
        )
