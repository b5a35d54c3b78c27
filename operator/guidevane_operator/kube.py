"""A thin client of the Kubernetes API: the five calls that the operator makes, on plain dictionaries.

Authentication and TLS are those of the official client; its thousand models stay unloaded. Every call has a timeout.
"""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from guidevane_operator.errors import ConflictError, KubeError, NotFoundError

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

FIELD_MANAGER = "guidevane-operator"
"""Field manager of everything the operator writes."""

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"

_ERRORS = {404: NotFoundError, 409: ConflictError}


class ServiceKey(NamedTuple):
    """Which LLMService."""

    namespace: str
    name: str


class Resource(NamedTuple):
    """Where objects of one kind live in the API."""

    api_version: str
    plural: str

    @property
    def gvr(self) -> tuple[str, str, str]:
        """Group, version and plural; the core group is empty."""
        group, _, version = self.api_version.rpartition("/")
        return group, version, self.plural

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The URL path of a collection, an object or its subresource."""
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version, "namespaces", quote(namespace, safe=""), self.plural]
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


PODS = Resource("v1", "pods")
DEPLOYMENTS = Resource("apps/v1", "deployments")
LLM_SERVICES = Resource("guidevane.dev/v1alpha1", "llmservices")
EVENTS = Resource("events.k8s.io/v1", "events")
RESOURCES = {
    "ConfigMap": Resource("v1", "configmaps"),
    "Deployment": DEPLOYMENTS,
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "Secret": Resource("v1", "secrets"),
    "Service": Resource("v1", "services"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
}
"""Kinds of children."""


class KubeClient:
    """Calls the API server. Safe to share between tasks."""

    def __init__(self, configuration: kubernetes_client.Configuration, timeout_s: float = 30.0) -> None:
        self._api = kubernetes_client.ApiClient(configuration)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, resource: Resource, key: ServiceKey) -> Manifest:
        """Read one object."""
        return await self._call("GET", resource.path(key.namespace, key.name))

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server knows the kind, as it does once the CRD is installed."""
        try:
            answer = await self._call("GET", f"/apis/{resource.api_version}")
        except NotFoundError:
            return False
        return any(found.get("name") == resource.plural for found in answer.get("resources") or ())

    async def try_get(self, resource: Resource, key: ServiceKey) -> Manifest | None:
        """Read one object, None if it is not there."""
        try:
            return await self.get(resource, key)
        except NotFoundError:
            return None

    async def list_labelled(self, resource: Resource, namespace: str, label: str, value: str) -> list[Manifest]:
        """Objects of one namespace with one label."""
        query = urlencode({"labelSelector": f"{label}={value}"})
        answer = await self._call("GET", f"{resource.path(namespace)}?{query}")
        return list(answer.get("items") or ())

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply under our field manager: creates what is missing, leaves fields of others alone."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta["namespace"], meta["name"])
        return await self._call("PATCH", path + f"?fieldManager={FIELD_MANAGER}&force=true", manifest, APPLY_PATCH)

    async def delete(self, kind: str, key: ServiceKey) -> None:
        """Delete a child; one that is gone already is fine."""
        try:
            await self._call("DELETE", RESOURCES[kind].path(key.namespace, key.name))
        except NotFoundError:
            logger.debug("nothing to delete", extra={"kind": kind, "service": key.name})

    async def patch_status(
        self, key: ServiceKey, status: Mapping[str, Any], uid: str, resource_version: str = ""
    ) -> Manifest:
        """Merge `status` into the object's own, if it is still the object with this UID.

        With a resource version, 409 if somebody wrote since.
        """
        body: Manifest = {"metadata": {"uid": uid}, "status": status}
        if resource_version:
            body["metadata"]["resourceVersion"] = resource_version
        path = LLM_SERVICES.path(key.namespace, key.name, "status") + f"?fieldManager={FIELD_MANAGER}"
        return await self._call("PATCH", path, body, MERGE_PATCH)

    async def create_event(self, event: Manifest) -> Manifest:
        """Post one event."""
        path = EVENTS.path(event["metadata"]["namespace"])
        return await self._call("POST", path, {"apiVersion": EVENTS.api_version, "kind": "Event", **event})

    async def _call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Manifest:
        """One request; answers that are no success become KubeError."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            verb, url, headers, payload, _ = await self._api.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = await self._api.call_api(verb, url, headers, payload, _request_timeout=self._timeout)
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeError(0, type(error).__name__, f"{method} {path}: no answer from the API server") from error
        return _decode(method, path, response.status, text)


def _decode(method: str, path: str, status: int, text: bytes) -> Manifest:
    """The object in an answer, or the error that the answer is."""
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = {"message": text[:200].decode(errors="replace")}
    if status < 300:
        return dict(answer)
    error = _ERRORS.get(status, KubeError)
    raise error(status, str(answer.get("reason", "")), f"{method} {path}: {answer.get('message', '')}")


async def load_configuration() -> kubernetes_client.Configuration:
    """In-cluster configuration where there is one, else the kubeconfig of the user."""
    configuration = kubernetes_client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        path = os.environ.get("KUBECONFIG")
        await kubernetes_config.load_kube_config(config_file=path, client_configuration=configuration)
    return configuration
