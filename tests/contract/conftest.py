"""A real API server for contract tests: etcd and kube-apiserver on loopback, without root and without a node."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "contract-tests"
START_SECONDS = 90
NEEDED = ("etcd", "kube-apiserver", "kubectl")


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    code: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


@dataclass(frozen=True)
class ApiServer:
    """A running API server with the LLMService CRD in it."""

    url: str
    kubectl_path: Path
    kubeconfig: Path

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Answer:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl._create_unverified_context()  # the server signs its own certificate
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return Answer(answer.status, json.load(answer))
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, json.load(refused))

    def kubectl(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.kubectl_path), f"--kubeconfig={self.kubeconfig}", *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def find_binaries() -> Path:
    """GUIDEVANE_KUBE_BIN, or what the cluster built. Building takes ten minutes, so it is not done in a test."""
    named = os.environ.get("GUIDEVANE_KUBE_BIN")
    if named:
        folder = Path(named)
    else:
        binaries = pytest.importorskip("e2e.cluster.binaries", reason="run pytest as `python -m pytest` in the root")
        settings = pytest.importorskip("e2e.cluster.settings", reason="run pytest as `python -m pytest` in the root")
        folder = binaries.folder(settings.read_settings(os.environ, None, None, None))
    missing = [name for name in NEEDED if not (folder / name).exists()]
    if missing:
        pytest.skip(f"NO REAL API SERVER: {', '.join(missing)} not in {folder}; `make test` builds them")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def api_server_command(binary: Path, folder: Path, port: int, etcd_port: int) -> list[str]:
    return [
        str(binary),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--advertise-address=10.250.0.1",  # loopback is refused; with no endpoint reconciler it is never used
        "--endpoint-reconciler-type=none",
        f"--cert-dir={folder}/certificates",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder}/sa.key",
        f"--service-account-signing-key-file={folder}/sa.key",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--disable-admission-plugins=ServiceAccount",
    ]


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {START_SECONDS} s"
        time.sleep(0.1)


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "test",
    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    "users": [{"name": "test", "user": {"token": TOKEN}}],
}


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that knows no CRD yet."""
    binaries = find_binaries()
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("NO REAL API SERVER: openssl is not installed")
    folder = tmp_path_factory.mktemp("api-server")
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    subprocess.run([openssl, "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    port, etcd_port, peer_port = free_port(), free_port(), free_port()
    etcd = [
        str(binaries / "etcd"),
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
        f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
        "--unsafe-no-fsync",
    ]
    kubeconfig = folder / "kubeconfig"
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    kubeconfig.write_text(json.dumps({**KUBECONFIG, "clusters": [{"name": "test", "cluster": cluster}]}))
    server = ApiServer(f"https://127.0.0.1:{port}", binaries / "kubectl", kubeconfig)
    command = api_server_command(binaries / "kube-apiserver", folder, port, etcd_port)
    log = folder / "kube-apiserver.log"
    with running(etcd, folder / "etcd.log"), running(command, log) as process:

        def has_default_namespace() -> bool:
            assert process.poll() is None, f"kube-apiserver ended:\n{log.read_text()[-2000:]}"
            try:
                return server.request("GET", "/api/v1/namespaces/default").code == 200
            except OSError:
                return False

        wait_for("the API server has its first namespace", has_default_namespace)
        yield server


@pytest.fixture(scope="session")
def api_server(bare_api_server: ApiServer) -> ApiServer:
    """An API server that took crds/llmservices.yaml."""
    applied = bare_api_server.kubectl("apply", "-f", str(ROOT / "crds" / "llmservices.yaml"))
    assert applied.returncode == 0, applied.stderr
    # kubectl wait fails at once on a CRD that has no conditions yet.
    established = ("wait", "--for=condition=Established", "--timeout=5s", "crd/llmservices.guidevane.dev")
    wait_for("the CRD is established", lambda: bare_api_server.kubectl(*established).returncode == 0)
    wait_for("kubectl explain knows LLMService", lambda: bare_api_server.kubectl("explain", "llm").returncode == 0)
    return bare_api_server
