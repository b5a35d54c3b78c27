"""The programs of the node and their command lines."""

from pathlib import Path

from e2e.cluster.pki import NODE_IP, NODE_NAME


def etcd(binaries: Path, run: Path) -> list[str]:
    url = "http://127.0.0.1:2379"
    return [
        str(binaries / "etcd"),
        f"--data-dir={run}/etcd",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        "--unsafe-no-fsync",  # the data ends with the cluster
    ]


def containerd(run: Path) -> list[str]:
    return ["containerd", "-c", f"{run}/containerd.toml"]


def api_server(binaries: Path, run: Path) -> list[str]:
    pki = run / "pki"
    return [
        str(binaries / "kube-apiserver"),
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={NODE_IP}",
        "--bind-address=0.0.0.0",
        "--secure-port=6443",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--endpoint-reconciler-type=lease",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        # The aggregation layer: an APIService can register a metrics adapter.
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--enable-aggregator-routing=true",
    ]


def _with_kubeconfig(binaries: Path, run: Path, name: str) -> list[str]:
    config = run / f"{name}.conf"
    return [
        str(binaries / name),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
    ]


def controller_manager(binaries: Path, run: Path) -> list[str]:
    return [
        *_with_kubeconfig(binaries, run, "kube-controller-manager"),
        f"--service-account-private-key-file={run}/pki/sa.key",
        f"--root-ca-file={run}/pki/ca.crt",  # becomes kube-root-ca.crt, which every pod with a token waits for
        "--use-service-account-credentials=true",
        "--cluster-cidr=10.244.0.0/16",
        "--allocate-node-cidrs=false",
        # One service account for each of forty controllers: at the default 20 requests a second that takes 5 s.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def scheduler(binaries: Path, run: Path) -> list[str]:
    return _with_kubeconfig(binaries, run, "kube-scheduler")


def kubelet(binaries: Path, run: Path) -> list[str]:
    return [
        str(binaries / "kubelet"),
        f"--config={run}/kubelet.yaml",
        f"--kubeconfig={run}/kubelet.conf",
        f"--root-dir={run}/kubelet",
        f"--cert-dir={run}/kubelet/pki",
        f"--node-ip={NODE_IP}",
        f"--hostname-override={NODE_NAME}",
        f"--tls-cert-file={run}/pki/kubelet-serving.crt",
        f"--tls-private-key-file={run}/pki/kubelet-serving.key",
    ]


def kube_proxy(binaries: Path, run: Path) -> list[str]:
    return [str(binaries / "kube-proxy"), f"--config={run}/kube-proxy.yaml"]
