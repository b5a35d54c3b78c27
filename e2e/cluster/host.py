"""What the machine must bring along: Linux, root, a handful of Debian packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError, CommandError
from e2e.cluster.progress import Progress

CNI_BIN = Path("/usr/lib/cni")

# Something that only the package brings -> the package.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_BIN / "bridge"): "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "/bin/busybox": "busybox-static",
    "ip": "iproute2",
    "gcc": "gcc",
    "openssl": "openssl",
    "nsenter": "util-linux",
}
# gcc alone has no headers to compile the pause program with.
ALSO = {"gcc": ["libc6-dev"]}


def require_linux() -> None:
    if sys.platform != "linux":
        raise ClusterError(
            f"this works on Linux only, and this is {sys.platform};"
            " use CLUSTER=kind or CLUSTER=current, with images that docker built from the Dockerfiles"
        )


def require_linux_root() -> None:
    require_linux()
    if os.geteuid() != 0:
        raise ClusterError(
            f"the node needs root for namespaces and cgroups, this is uid {os.geteuid()};"
            " run with sudo, or use CLUSTER=kind or CLUSTER=current"
        )


def run(command: list[str], stdin: str | None = None) -> str:
    """Run a short command; returns its standard output, raises CommandError with all of its output."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not on PATH; install it and try again") from error
    if done.returncode:
        raise CommandError(command, done.returncode, done.stdout + done.stderr)
    return done.stdout


def is_present(what: str) -> bool:
    return Path(what).exists() if what.startswith("/") else shutil.which(what) is not None


def missing_packages() -> list[str]:
    missing = {name: None for what, name in PACKAGES.items() if not is_present(what)}
    return [package for name in missing for package in (name, *ALSO.get(name, []))]


def ensure_packages(progress: Progress) -> None:
    if missing := missing_packages():
        apt_install(progress, missing)
    if left := missing_packages():
        raise ClusterError(
            f"still missing after the installation: {', '.join(left)}; install them by hand and try again"
        )


def apt_install(progress: Progress, packages: list[str]) -> None:
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"missing: {', '.join(packages)} (Debian's names), and there is no apt-get to install them with;"
            " install them by hand and try again"
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    progress.run("package lists", ["apt-get", "update", "-q"], env=env)
    with no_service_starts():
        progress.run(
            f"packages {' '.join(packages)}",
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages],
            env=env,
        )


class no_service_starts:  # noqa: N801 - reads as a statement: with no_service_starts()
    """Debian starts the services of a package unless policy-rc.d says 101; the node starts its own."""

    path = Path("/usr/sbin/policy-rc.d")

    def __enter__(self) -> None:
        self._ours = not self.path.exists()
        if self._ours:
            self.path.write_text("#!/bin/sh\nexit 101\n")
            self.path.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        if self._ours:
            self.path.unlink(missing_ok=True)
