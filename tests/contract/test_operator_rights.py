"""The operator as a process of its own against a real API server, under the rights of manifests/base and no others."""

import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "rights"
SERVICE = {
    "apiVersion": "guidevane.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": NAMESPACE},
    "spec": {"model": {"uri": "file:///models/tiny"}, "replicas": 2, "limits": {"maxNumSeqs": 8}},
}
PATH = f"/apis/guidevane.dev/v1alpha1/namespaces/{NAMESPACE}/llmservices/chat"
ROLE = "system:serviceaccount:guidevane-system:guidevane-operator"


@dataclass
class Running:
    """The operator, and a person with all rights beside it."""

    server: Any
    log: Path
    health_port: int
    wait_for: Callable[[str, Callable[[], bool]], None]

    def kubectl(self, *args: str, stdin: Any = None) -> str:
        done = self.server.kubectl(*args, stdin=None if stdin is None else json.dumps(stdin))
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def status(self) -> dict[str, Any]:
        return dict(self.server.request("GET", PATH).body.get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        return dict({c["type"]: c for c in self.status().get("conditions", [])}.get(kind, {}))

    def until(self, what: str, holds: Callable[[], Any]) -> None:
        self.wait_for(f"{what}; operator says:\n{self.log.read_text()[-3000:]}", lambda: bool(holds()))


@pytest.fixture(scope="module")
def operator(api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("operator")
    for arguments in (
        ("apply", "--server-side", "--force-conflicts", "-k", str(ROOT / "manifests" / "base")),
        ("create", "namespace", NAMESPACE),
        ("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"),
    ):
        done = api_server.kubectl(*arguments)
        assert done.returncode == 0, done.stderr
    token = api_server.kubectl("create", "token", "guidevane-operator", "-n", "guidevane-system")
    assert token.returncode == 0, token.stderr
    kubeconfig = json.loads(api_server.kubeconfig.read_text())
    kubeconfig["users"][0]["user"] = {"token": token.stdout.strip()}
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        health_port = int(probe.getsockname()[1])
    log = folder / "operator.log"
    command = [sys.executable, "-m", "guidevane_operator", f"--health-port={health_port}", "--status-seconds=1"]
    command += ["--key-seconds=3"]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        running = Running(api_server, log, health_port, sys.modules[type(api_server).__module__].wait_for)
        try:
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, log.read_text()[-2000:]


def test_a_service_is_served_under_the_operators_own_rights(operator: Running) -> None:
    operator.kubectl("apply", "-f", "-", stdin=SERVICE)
    operator.until("status is written", lambda: operator.status().get("observedGeneration") == 1)
    operator.until("the Deployment is there", lambda: operator.condition("Ready").get("reason") == "Pending")

    kinds = ["deployment", "service", "configmap/chat-limits", "secret/chat-admin", "secret/chat-tenants"]
    kinds += ["serviceaccount/chat", "pdb/chat"]
    for kind in kinds:
        name = (kind,) if "/" in kind else (kind, "chat")
        owner = operator.kubectl("get", *name, "-n", NAMESPACE, "-o", "jsonpath={.metadata.ownerReferences[0].kind}")
        assert owner == "LLMService", kind
    assert operator.condition("SpecAccepted")["status"] == "True"
    wide = operator.kubectl("get", "llm", "-n", NAMESPACE, "-o", "wide")
    assert "0/2" in wide
    assert "Pending" in wide


def test_nothing_changes_when_it_looks_again(operator: Running) -> None:
    before = operator.server.request("GET", PATH).body["metadata"]["resourceVersion"]
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/chat"
    generation = operator.server.request("GET", deployment).body["metadata"]["generation"]
    operator.kubectl("label", "llm", "chat", "-n", NAMESPACE, "seen=again")
    operator.kubectl("annotate", "llm", "chat", "-n", NAMESPACE, "example.org/note=1")
    operator.kubectl("scale", "deployment", "chat", "-n", NAMESPACE, "--replicas=5")
    operator.until(
        "the Deployment is back", lambda: operator.server.request("GET", deployment).body["spec"]["replicas"] == 2
    )
    after = operator.server.request("GET", deployment).body["metadata"]["generation"]
    assert after == generation + 2, "one for the scaling by hand, one for taking it back"
    assert int(operator.server.request("GET", PATH).body["metadata"]["resourceVersion"]) > int(before)
    events = ("get", "events", "-n", NAMESPACE)
    operator.until("an event says who scaled", lambda: "scaled to 5 by kubectl" in operator.kubectl(*events))


def test_a_label_taken_from_the_deployment_is_back_at_once(operator: Running) -> None:
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/chat"
    operator.kubectl("label", "deployment", "chat", "-n", NAMESPACE, "guidevane.dev/name-")

    def labels() -> dict[str, str]:
        return dict(operator.server.request("GET", deployment).body["metadata"]["labels"])

    operator.until("the label is back", lambda: labels().get("guidevane.dev/name") == "chat")


CHILDREN = [
    ("/api/v1", "configmaps/chat-limits"),
    ("/api/v1", "services/chat"),
    ("/api/v1", "serviceaccounts/chat"),
    ("/apis/apps/v1", "deployments/chat"),
    ("/apis/policy/v1", "poddisruptionbudgets/chat"),
    ("/api/v1", "secrets/chat-admin"),
    ("/api/v1", "secrets/chat-tenants"),
]
"""Group and version, plural and name."""


@pytest.mark.parametrize(("root", "child"), CHILDREN, ids=lambda value: value.split("/")[-2])
def test_a_deleted_child_is_back_without_a_resync(operator: Running, root: str, child: str) -> None:
    path = f"{root}/namespaces/{NAMESPACE}/{child}"
    before = operator.server.request("GET", path).body
    assert operator.server.request("DELETE", path).code == 200

    def is_back() -> bool:
        now = operator.server.request("GET", path)
        return bool(now.code == 200 and now.body["metadata"]["uid"] != before["metadata"]["uid"])

    operator.until(f"{child} is back", is_back)
    after = operator.server.request("GET", path).body
    assert after.get("data") == before.get("data"), "the token is the one that pods know"
    assert after["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    ("root", "child", "edit"),
    [
        ("/api/v1", "configmaps/chat-limits", {"data": {"limits.json": "{}"}}),
        ("/api/v1", "services/chat", {"spec": {"selector": {"guidevane.dev/name": "other"}}}),
        ("/apis/apps/v1", "deployments/chat", {"spec": {"progressDeadlineSeconds": 5}}),
        ("/apis/policy/v1", "poddisruptionbudgets/chat", {"spec": {"maxUnavailable": 2}}),
        ("/api/v1", "secrets/chat-tenants", {"data": {"tenants.json": None}}),
    ],
    ids=lambda value: value.split("/")[-2] if isinstance(value, str) else "",
)
def test_an_edited_child_goes_back_to_what_is_declared(
    operator: Running, root: str, child: str, edit: dict[str, Any]
) -> None:
    path = f"{root}/namespaces/{NAMESPACE}/{child}"
    before = operator.server.request("GET", path).body
    edited = operator.server.request("PATCH", path, edit, "application/merge-patch+json")
    assert edited.code == 200, edited.message
    part = next(iter(edit))
    operator.until(f"{child} is as it was", lambda: operator.server.request("GET", path).body.get(part) == before[part])


def num_writes(operator: Running) -> dict[str, int]:
    """Writes that the API server took so far, of the kinds that the operator writes."""
    kinds = {child.split("/")[0] for _, child in CHILDREN} | {"llmservices", "events", "pods"}
    found = {}
    for line in operator.kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{") and re.search('verb="(POST|PUT|PATCH|APPLY|DELETE)"', line):
            resource = re.search('resource="([a-z]+)"', line)
            if resource and resource[1] in kinds:
                found[line.rsplit(" ", 1)[0]] = int(float(line.rsplit(" ", 1)[1]))
    return found


def test_a_service_that_nobody_touches_costs_no_write(operator: Running) -> None:
    def is_quiet() -> bool:
        before = num_writes(operator)
        time.sleep(2)
        return bool(operator.status().get("retune")) and num_writes(operator) == before

    operator.until("the last write is done", is_quiet)
    before, key_period_s = num_writes(operator), 3
    assert before
    time.sleep(3 * key_period_s)  # several looks at the Secrets, which no watch tells of
    assert num_writes(operator) == before


def test_services_of_one_name_in_two_namespaces_do_not_touch_each_other(operator: Running) -> None:
    operator.kubectl("create", "namespace", "rights-too")
    operator.kubectl("apply", "-f", "-", stdin=SERVICE | {"metadata": {"name": "chat", "namespace": "rights-too"}})

    def child(namespace: str, path: str) -> dict[str, Any]:
        return dict(operator.server.request("GET", f"/api/v1/namespaces/{namespace}/{path}").body)

    here = {path: child(NAMESPACE, path) for path in ("secrets/chat-admin", "configmaps/chat-limits")}
    operator.until("its children are there", lambda: child("rights-too", "services/chat").get("spec"))
    assert child("rights-too", "secrets/chat-admin")["data"] != here["secrets/chat-admin"]["data"]
    path = "/apis/guidevane.dev/v1alpha1/namespaces/rights-too/llmservices/chat"
    owner = operator.server.request("GET", path).body["metadata"]["uid"]
    operator.kubectl("delete", "configmap", "chat-limits", "-n", "rights-too")
    operator.until("it is back", lambda: child("rights-too", "configmaps/chat-limits").get("data"))

    assert child("rights-too", "configmaps/chat-limits")["metadata"]["ownerReferences"][0]["uid"] == owner
    operator.kubectl("delete", "llm", "chat", "-n", "rights-too", "--timeout=10s")
    assert {path: child(NAMESPACE, path) for path in here} == here
    assert operator.status()["limits"]["epoch"] == 1


def test_a_changed_spec_is_taken_over_and_the_budget_goes(operator: Running) -> None:
    changed = {"spec": {"replicas": 1, "limits": {"maxNumSeqs": 2}}}
    operator.kubectl("patch", "llm", "chat", "-n", NAMESPACE, "--type=merge", "-p", json.dumps(changed))
    operator.until("the new epoch", lambda: operator.status()["limits"]["epoch"] == 2)
    budget = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/chat"
    operator.until("no budget", lambda: operator.server.request("GET", budget).code == 404)
    limits = operator.kubectl("get", "configmap", "chat-limits", "-n", NAMESPACE, "-o", "jsonpath={.data}")
    assert "maxNumSeqs" in limits


def test_keys_of_tenants_are_read_by_name_and_reach_the_pods_as_digests(operator: Running) -> None:
    operator.kubectl("create", "secret", "generic", "keys", "-n", NAMESPACE, "--from-literal=gold=sk-gold")
    operator.kubectl("apply", "-f", "-", stdin=sample_with_tenants())

    def told() -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/secrets/chat-tenants"
        return base64.b64decode(operator.server.request("GET", path).body["data"]["tenants.json"]).decode()

    operator.until("the digest is there", lambda: hashlib.sha256(b"sk-gold").hexdigest() in told())
    assert "sk-gold" not in told()
    operator.until("silver is locked out", lambda: operator.condition("TenantKeysFound").get("status") == "False")
    missing = "tenant silver: Secret keys has no silver; put a key there, or correct keySecretRef"
    assert missing in operator.condition("TenantKeysFound")["message"]
    operator.until("an event says so", lambda: "TenantLockedOut" in operator.kubectl("get", "events", "-n", NAMESPACE))


def sample_with_tenants() -> dict[str, Any]:
    """The service as it stands at that point, with two tenants."""
    refs = [{"name": name, "keySecretRef": {"name": "keys", "key": name}} for name in ("gold", "silver")]
    spec = SERVICE["spec"] | {"replicas": 1, "limits": {"maxNumSeqs": 2}, "tenancy": {"tenants": refs}}
    return SERVICE | {"spec": spec}


def test_a_refused_field_is_an_event_and_a_condition(operator: Running) -> None:
    later = {"spec": {"model": {"revision": "abc"}}}
    operator.kubectl("patch", "llm", "chat", "-n", NAMESPACE, "--type=merge", "-p", json.dumps(later))
    operator.until("it is refused", lambda: operator.condition("SpecAccepted").get("status") == "False")
    operator.until("an event says so", lambda: "SpecRefused" in operator.kubectl("get", "events", "-n", NAMESPACE))


def test_a_pod_that_cannot_load_its_model_is_seen(operator: Running) -> None:
    operator.kubectl(
        "patch", "llm", "chat", "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"model":{"revision":""}}}'
    )
    operator.until("it is accepted", lambda: operator.condition("SpecAccepted").get("status") == "True")
    deployment = operator.server.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/chat").body
    template = deployment["spec"]["template"]
    metadata = {"name": "chat-x", "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    made = operator.server.request("POST", pods, {"metadata": metadata, "spec": template["spec"]})
    assert made.code == 201, made.message
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "/models/tiny does not exist"}}
    container = {
        "name": "runtime",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 2,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": ended,
    }
    status = {"status": {"phase": "Running", "containerStatuses": [container]}}
    patched = operator.server.request("PATCH", f"{pods}/chat-x/status", status, "application/merge-patch+json")
    assert patched.code == 200, patched.message
    operator.until("status says so", lambda: operator.status().get("reason") == "ModelNotFound")
    assert "/models/tiny does not exist" in operator.condition("Ready")["message"]
    operator.kubectl("label", "pod", "chat-x", "-n", NAMESPACE, "guidevane.dev/name-")
    operator.until("the pod is no pod of the service", lambda: operator.status().get("replicas") == 0)


def test_the_operator_is_healthy_and_was_never_forbidden_anything(operator: Running) -> None:
    def is_healthy() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.health_port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)

    operator.until("it is healthy", is_healthy)
    text = operator.log.read_text()
    assert "orbidden" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "verb_and_resource",
    [
        ("patch", "llmservices"),
        ("update", "llmservices"),
        ("delete", "llmservices"),
        ("list", "secrets"),
        ("watch", "secrets"),
        ("update", "configmaps"),
        ("delete", "configmaps"),
        ("delete", "services"),
        ("delete", "serviceaccounts"),
        ("delete", "secrets"),
        ("delete", "pods"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("delete", "deployments"),
        ("create", "clusterroles"),
        ("get", "nodes"),
        ("list", "namespaces"),
    ],
    ids=" ".join,
)
def test_the_operator_may_not(operator: Running, verb_and_resource: tuple[str, str]) -> None:
    done = operator.server.kubectl("auth", "can-i", *verb_and_resource, f"--as={ROLE}", "-n", NAMESPACE)
    assert done.stdout.strip() == "no"


def test_deleting_a_service_ends_without_the_operator_doing_anything(operator: Running) -> None:
    operator.kubectl("delete", "llm", "chat", "-n", NAMESPACE, "--timeout=10s")
    assert operator.server.request("GET", PATH).code == 404


def test_a_service_made_again_starts_afresh_and_waits_for_what_is_left(operator: Running) -> None:
    operator.kubectl("apply", "-f", "-", stdin=SERVICE)
    left = "of the deleted LLMService"  # no garbage collector runs here
    operator.until("it waits", lambda: left in operator.condition("Progressing").get("message", ""))
    assert operator.status()["limits"]["epoch"] == 1
    operator.kubectl("delete", "-n", NAMESPACE, "deployment,svc,cm,secret,sa,pdb", "-l", "guidevane.dev/name=chat")
    operator.until("its children are made", lambda: operator.condition("Progressing").get("reason") == "Progressing")
