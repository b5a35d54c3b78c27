"""One certificate authority and a certificate for each component, made anew at every bring-up."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.host import run

NODE_IP = "10.250.0.1"
NODE_NAME = "guidevane-node"
API_SERVER = f"https://{NODE_IP}:6443"
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
CLIENT = "extendedKeyUsage=clientAuth"


@dataclass(frozen=True)
class Identity:
    name: str
    subject: str
    extension: str = CLIENT


IDENTITIES = (
    Identity(
        "apiserver",
        "/CN=kube-apiserver",
        "subjectAltName=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,"
        f"IP:127.0.0.1,IP:{NODE_IP},IP:10.96.0.1",
    ),
    Identity("kubelet-serving", f"/CN={NODE_NAME}", f"subjectAltName=DNS:{NODE_NAME},IP:{NODE_IP}"),
    Identity("apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
    Identity("front-proxy", "/CN=front-proxy-client"),
    Identity("admin", "/O=system:masters/CN=admin"),
    Identity("kube-controller-manager", "/CN=system:kube-controller-manager"),
    Identity("kube-scheduler", "/CN=system:kube-scheduler"),
    Identity("kubelet", f"/O=system:nodes/CN=system:node:{NODE_NAME}"),
    Identity("kube-proxy", "/CN=system:kube-proxy"),
)
CLIENTS = ("admin", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")


def make_pki(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    ca = ["openssl", "req", "-x509", *CURVE, "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt")]
    run([*ca, "-days", "365", "-subj", "/CN=guidevane-node-ca"])
    with ThreadPoolExecutor(4) as pool:
        service_accounts = pool.submit(make_service_account_key, folder)
        for _ in pool.map(lambda numbered: make_certificate(folder, *numbered), enumerate(IDENTITIES, start=2)):
            pass
        service_accounts.result()


def make_service_account_key(folder: Path) -> None:
    run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"])
    run(["openssl", "rsa", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub")])


def make_certificate(folder: Path, serial: int, identity: Identity) -> None:
    base = folder / identity.name
    run(["openssl", "req", *CURVE, "-keyout", f"{base}.key", "-out", f"{base}.csr", "-subj", identity.subject])
    Path(f"{base}.ext").write_text(identity.extension)
    sign = [
        "openssl",
        "x509",
        "-req",
        "-in",
        f"{base}.csr",
        "-CA",
        str(folder / "ca.crt"),
        "-CAkey",
        str(folder / "ca.key"),
    ]
    run([*sign, "-set_serial", str(serial), "-days", "365", "-out", f"{base}.crt", "-extfile", f"{base}.ext"])


def kubeconfig(pki: Path, user: str) -> str:
    def data(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    cluster = {"server": API_SERVER, "certificate-authority-data": data("ca.crt")}
    credentials = {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "guidevane", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "guidevane", "context": {"cluster": "guidevane", "user": user}}],
            "current-context": "guidevane",
        }
    )
