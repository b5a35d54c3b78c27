"""The steps from an empty state folder to a node that is Ready, in order. Undoing them is `node.tear_down`'s work."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from e2e.cluster import services
from e2e.cluster.cgroups import NodeCgroup
from e2e.cluster.containerd import Containerd
from e2e.cluster.enter import Door, open_door, spawn
from e2e.cluster.errors import ClusterError, tail
from e2e.cluster.host import run
from e2e.cluster.images.oci import ImageConfig, layer_of_files, write_archive
from e2e.cluster.pki import CLIENTS, NODE_IP, NODE_NAME, kubeconfig, make_pki
from e2e.cluster.progress import Progress, wait_for
from e2e.cluster.settings import PACKAGE
from e2e.cluster.state import Process, Record, State, process

ETC = PACKAGE / "etc"
PAUSE_IMAGE = "guidevane.local/pause:1"

CNI = """{"cniVersion": "0.4.0", "name": "guidevane", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "dataDir": "/run/ipam"}},
 {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}]}
"""


class BringUp:
    """One bring-up. Every wait ends at once when a program of the node has ended, with the end of its log."""

    def __init__(self, state: State, cgroup: NodeCgroup, binaries: Path, progress: Progress) -> None:
        self.state = state
        self.cgroup = cgroup
        self.binaries = binaries
        self.progress = progress
        self.containerd = Containerd(state.socket)
        self._services: dict[str, Process] = {}
        self.door: Door  # from start_init on

    def run(self) -> None:
        # Written before anything is made: from here on `down` knows what to look for.
        record = Record(self.cgroup.name, str(self.binaries))
        self.state.write(record)
        self.cgroup.create()
        # What is started from here on is born in the group, so `down` finds it whatever becomes of this process.
        self.cgroup.join()
        with self.progress.step("certificates and configuration"):
            self.write_configuration()
        with self.progress.step("namespaces"):
            record = self.start_init(record)
        with self.progress.step("etcd, containerd, API server"):
            self.start_control_plane()
        with self.progress.step("kubelet and friends; node Ready"):
            self.start_node()
        with self.progress.step("cluster DNS available"):
            self.start_dns()
        self.state.write(replace(record, is_up=True))

    # --- configuration

    def write_configuration(self) -> None:
        run_dir = self.state.run
        shutil.rmtree(self.state.logs, ignore_errors=True)
        for folder in (self.state.logs, run_dir / "cni", run_dir / "kubelet"):
            folder.mkdir(parents=True)
        for name in ("containerd.toml", "kubelet.yaml", "kube-proxy.yaml"):
            (run_dir / name).write_text(self.render(name))
        (run_dir / "cni" / "10-bridge.conflist").write_text(CNI)
        # A name server must answer or refuse at once, else getfqdn hangs: nothing listens here, so it refuses.
        (run_dir / "pod-resolv.conf").write_text(f"nameserver {NODE_IP}\n")
        run(["gcc", "-Os", "-static", "-s", "-o", str(run_dir / "pause"), str(ETC / "pause.c")])
        make_pki(run_dir / "pki")
        for user in CLIENTS:
            path = run_dir / f"{user}.conf"
            path.touch(mode=0o600)
            path.write_text(kubeconfig(run_dir / "pki", user))

    def render(self, name: str, **values: str) -> str:
        text = (ETC / name).read_text()
        everything = {"STATE": str(self.state.root), "RUN": str(self.state.run), "NODE": NODE_NAME, **values}
        for key, value in everything.items():
            text = text.replace(f"@{key}@", value)
        return text

    # --- processes

    def start_init(self, record: Record) -> Record:
        env = {
            **os.environ,
            "RUN_DIR": str(self.state.run),
            "NODE_NAME": NODE_NAME,
            "NODE_IP": NODE_IP,
            "CGROUP_LEAVES": " ".join(map(str, self.cgroup.leaves)) if self.cgroup.is_v2 else "",
            "CGROUP_MOUNTS": self.cgroup.mounts_inside(),
        }
        log = self.state.logs / "init.log"
        outer = self._services["init"] = spawn(["bash", str(ETC / "init.sh")], log, env, self.cgroup.join_top)
        record = replace(record, outer=outer)
        self.state.write(record)
        wait_for("the node's namespaces", lambda: self.alive("init") and self.is_ready(), 20, interval_s=0.02)
        record = replace(record, init=process(self.find_child(outer.pid)))
        self.state.write(record)
        self.door = open_door(self.state, record)
        return record

    def is_ready(self) -> bool | None:
        return (self.state.run / "ready").exists() or None

    def find_child(self, parent: int) -> int:
        for pid in self.cgroup.pids():
            status = Path(f"/proc/{pid}/status")
            if status.exists() and f"\nPPid:\t{parent}\n" in status.read_text():
                return pid
        raise ClusterError(
            f"process {parent} has no child in cgroup {self.cgroup.name}; see {self.state.logs}/init.log"
        )

    def serve(self, name: str, command: list[str]) -> None:
        self._services[name] = self.door.serve(command, self.state.logs / f"{name}.log")

    def alive(self, *names: str) -> bool:
        """True, or an error with the last lines of the log of the one that ended: none of them ever ends by itself."""
        for name in names or self._services:
            if not self._services[name].is_alive():
                log = self.state.logs / f"{name}.log"
                raise ClusterError(f"{name} ended; the end of {log}:\n{tail(log.read_text(errors='replace'))}")
        return True

    # --- the cluster

    def start_control_plane(self) -> None:
        run_dir = self.state.run
        self.serve("etcd", services.etcd(self.binaries, run_dir))
        self.serve("containerd", services.containerd(run_dir))
        self.serve("kube-apiserver", services.api_server(self.binaries, run_dir))
        wait_for("containerd", lambda: (self.alive() and self.containerd.is_serving()) or None, 30, interval_s=0.05)
        self.import_image(PAUSE_IMAGE, {"pause": run_dir / "pause"}, "/pause", user="65535:65535")
        self.import_image(self.dns_image, {"coredns": self.binaries / "coredns"}, "/coredns", user="65535:65535")
        wait_for("the API server", lambda: self.alive() and self.door.kubectl("get", "--raw", "/readyz"), 60)

    @property
    def dns_image(self) -> str:
        return f"guidevane.local/coredns:{self.binaries.name}"

    def import_image(self, reference: str, files: dict[str, Path], entrypoint: str, user: str) -> None:
        if reference in self.containerd.images():
            return
        layer = layer_of_files({name: (path.read_bytes(), 0o755) for name, path in files.items()})
        config = ImageConfig(entrypoint=(entrypoint,), user=user)
        self.containerd.import_stream(lambda out: write_archive(out, reference, [layer], config))

    def start_node(self) -> None:
        run_dir = self.state.run
        self.serve("kube-controller-manager", services.controller_manager(self.binaries, run_dir))
        self.serve("kube-scheduler", services.scheduler(self.binaries, run_dir))
        self.serve("kubelet", services.kubelet(self.binaries, run_dir))
        self.serve("kube-proxy", services.kube_proxy(self.binaries, run_dir))
        wait_for("node Ready", self.node_is_ready, 60)

    def node_is_ready(self) -> bool | None:
        query = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return (self.alive() and self.door.kubectl("get", "node", NODE_NAME, "-o", query) == "True") or None

    def start_dns(self) -> None:
        manifest = self.render("coredns.yaml", IMAGE=self.dns_image)
        wait_for(
            "CoreDNS' manifest", lambda: self.alive() and self.door.kubectl("apply", "-f", "-", stdin=manifest), 30
        )
        wait = ["wait", "--for=condition=Available", "--timeout=60s", "deployment/coredns"]
        wait_for("CoreDNS", lambda: self.alive() and self.door.kubectl("-n", "kube-system", *wait), 60)
