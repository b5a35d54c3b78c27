"""What the user stories and the demo share: kubectl, waiting for conditions, streaming clients, readings from the pods.

Everything here talks to a real cluster through kubectl and to real pods through their Service; nothing is mocked.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")
Manifest = dict[str, Any]

REPO = Path(__file__).resolve().parent.parent
SYSTEM_NAMESPACE = "guidevane-system"
MONITORING_NAMESPACE = "guidevane-monitoring"


class KubectlError(RuntimeError):
    """kubectl said no; the message is its standard error."""


def kubectl(*args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
    """Standard output of one kubectl call."""
    done = subprocess.run(
        ["kubectl", *args], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        raise KubectlError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def get(kind: str, name: str, namespace: str) -> Manifest:
    return dict(json.loads(kubectl("get", kind, name, "-n", namespace, "-o", "json")))


def pods_of(service: str, namespace: str) -> list[Manifest]:
    """Pods of an LLMService that are not on their way out."""
    out = kubectl("get", "pods", "-n", namespace, "-l", f"guidevane.dev/name={service}", "-o", "json")
    return [pod for pod in json.loads(out)["items"] if "deletionTimestamp" not in pod["metadata"]]


def apply(manifest: Manifest | str, namespace: str | None = None) -> str:
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    scope = ["-n", namespace] if namespace else []
    return kubectl("apply", *scope, "-f", "-", stdin=text)


def patch_spec(service: str, namespace: str, spec: Manifest) -> None:
    kubectl("patch", "llm", service, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 60, poll_s: float = 0.25) -> T:
    """First truthy answer of `look`. A KubectlError counts as not yet; the last one is told when time runs out."""
    deadline, last = time.monotonic() + timeout_s, ""
    while True:
        try:
            if found := look():
                return found
        except KubectlError as error:
            last = f"; last error: {error}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s{last}")
        time.sleep(poll_s)


async def wait_for_async(what: str, look: Callable[[], T | None], timeout_s: float = 60) -> T:
    """`wait_for` in a thread, so that streams go on meanwhile."""
    return await asyncio.to_thread(wait_for, what, look, timeout_s)


def condition(obj: Manifest, kind: str) -> Manifest:
    """The condition of that type, or {} while there is none."""
    found = [c for c in obj.get("status", {}).get("conditions", []) if c["type"] == kind]
    return dict(found[0]) if found else {}


def has_condition(service: str, namespace: str, kind: str, status: str = "True") -> Callable[[], Manifest | None]:
    """A look for `wait_for`: the LLMService once its condition stands so."""

    def look() -> Manifest | None:
        obj = get("llm", service, namespace)
        return obj if condition(obj, kind).get("status") == status else None

    return look


def wait_ready(service: str, namespace: str, timeout_s: float = 180) -> Manifest:
    return wait_for(f"LLMService {service} Ready", has_condition(service, namespace, "Ready"), timeout_s)


def sample(name: str, **spec: Manifest | int | str) -> Manifest:
    """manifests/samples/<name>.yaml with blocks of its spec merged with `spec`."""
    import yaml

    manifest: Manifest = yaml.safe_load((REPO / "manifests/samples" / f"{name}.yaml").read_text())
    for block, value in spec.items():
        if isinstance(value, dict):
            manifest["spec"][block] = {**manifest["spec"].get(block, {}), **value}
        else:
            manifest["spec"][block] = value
    return manifest


def events(namespace: str, reason: str) -> list[Manifest]:
    """Events of a namespace with that reason."""
    items = json.loads(kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    return [event for event in items if event.get("reason") == reason]


# ------------------------------------------------------------------------------------------------ the pods' own word


def pod_metrics(pod: str, namespace: str) -> dict[str, float]:
    """A runtime pod's own /metrics, through the API server: `name{label="value",...}` -> value, labels sorted."""
    text = kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:8000/proxy/metrics")
    readings = {}
    for family in text_string_to_metric_families(text):
        for reading in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(reading.labels.items()))
            readings[f"{reading.name}{{{labels}}}"] = reading.value
    return readings


def metric_sum(readings: dict[str, float], name: str, *having: str) -> float:
    """Sum of a metric's series whose label text holds every one of `having`."""
    return sum(
        value
        for series, value in readings.items()
        if series.startswith(name + "{") and all(part in series for part in having)
    )


def effective_limit(pod: str, namespace: str, name: str) -> int:
    return int(metric_sum(pod_metrics(pod, namespace), "guidevane_limit", f'name="{name}"', 'kind="effective"'))


def restarts(pod: Manifest) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


# ------------------------------------------------------------------------------------------------ traffic


def service_url(service: str, namespace: str) -> str:
    """Base URL of a service: its cluster IP, reachable from inside the node's namespaces."""
    if override := os.environ.get("GUIDEVANE_E2E_URL"):
        return override
    spec = get("service", service, namespace)["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


@dataclass
class Stream:
    """What a client saw of one streamed answer."""

    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    done: bool = False
    error: str = ""

    @property
    def whole(self) -> bool:
        """Ended as the protocol wants it: a finish reason, [DONE], no error."""
        return self.done and self.finish_reason in ("stop", "length") and not self.error


async def chat(
    url: str,
    content: str,
    *,
    max_tokens: int = 32,
    on_text: Callable[[str], None] = lambda _text: None,
    **fields: object,
) -> Stream:
    """One streamed chat completion, read to its end. Failures are in the answer, not raised."""
    body = {
        "model": fields.pop("model", None) or await _first_model(url),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "stream": True,
        **fields,
    }
    seen = Stream()
    timeout = aiohttp.ClientTimeout(total=300)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as answer,
        ):
            if answer.status != 200:
                seen.error = f"HTTP {answer.status}: {await answer.text()}"
                return seen
            async for line in answer.content:
                _read_line(line.decode().strip(), seen, on_text)
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


def _read_line(line: str, seen: Stream, on_text: Callable[[str], None]) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        seen.done = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        if delta := choice["delta"].get("content"):
            seen.text += delta
            seen.token_times_s.append(time.monotonic())
            on_text(delta)
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason


async def _first_model(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


# ------------------------------------------------------------------------------------------------ installing


def install_guidevane(say: Callable[[str], None]) -> None:
    """CRD, operator and Prometheus from manifests/, applied and waited for."""
    say("CRD and operator (manifests/base)")
    kubectl("apply", "--server-side", "--force-conflicts", "-k", str(REPO / "manifests/base"))
    # kubectl wait fails at once on a CRD that has no conditions yet.
    established = ("wait", "--for=condition=Established", "crd/llmservices.guidevane.dev", "--timeout=5s")
    wait_for("the CRD is established", lambda: kubectl(*established))
    say("Prometheus (manifests/monitoring)")
    kubectl("apply", "--server-side", "--force-conflicts", "-k", str(REPO / "manifests/monitoring"))
    for namespace in (SYSTEM_NAMESPACE, MONITORING_NAMESPACE):
        kubectl("rollout", "status", "deployment", "-n", namespace, "--timeout=180s", timeout_s=190)


def delete_namespace(namespace: str) -> None:
    with suppress(KubectlError):
        kubectl("delete", "namespace", namespace, "--wait=true", "--timeout=120s", timeout_s=130)


def describe(namespace: str) -> str:
    """What a person would look at after a failure: objects, events, log tails."""
    parts = []
    for args in (
        ("get", "llm,deploy,pods,svc", "-n", namespace, "-o", "wide"),
        ("get", "llm", "-n", namespace, "-o", "yaml"),
        ("get", "events", "-n", namespace, "--sort-by=.lastTimestamp"),
        ("logs", "-n", namespace, "-l", "app.kubernetes.io/managed-by=guidevane", "--tail=60", "--prefix"),
        ("logs", "-n", SYSTEM_NAMESPACE, "deployment/guidevane-operator", "--tail=80"),
    ):
        with suppress(KubectlError, subprocess.TimeoutExpired):
            parts.append(f"$ kubectl {' '.join(args)}\n{kubectl(*args)}")
    return "\n".join(parts)
