"""An API server in memory: what kmock has, with merges, and deletes that watches hear of."""

import copy
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs
import kmock
from aiohttp import web

from tests.json_merge import merged

KINDS = {
    "guidevane.dev/v1alpha1/llmservices": "LLMService",
    "v1/pods": "Pod",
    "v1/services": "Service",
    "v1/configmaps": "ConfigMap",
    "v1/secrets": "Secret",
    "v1/serviceaccounts": "ServiceAccount",
    "v1/namespaces": "Namespace",
    "v1/events": "Event",
    "events.k8s.io/v1/events": "Event",
    "apps/v1/deployments": "Deployment",
    "policy/v1/poddisruptionbudgets": "PodDisruptionBudget",
    "apiextensions.k8s.io/v1/customresourcedefinitions": "CustomResourceDefinition",
}
SELECTED = "guidevane.dev/name"
"""Label that the operator's watches of pods and Deployments select by."""
LLM = "guidevane.dev/v1alpha1/llmservices"
VERBS = ("get", "list", "watch", "create", "patch", "delete")
NAMESPACE = "demo"


@attrs.define(kw_only=True, eq=False)
class ApiServer(kmock.KubernetesEmulator):
    """kmock's API in memory, plus what our writes rely on: server-side apply, status apart from spec, conflicts."""

    status_faults: list[int] = attrs.field(factory=list)
    """Answers to the next PATCHes of a status, oldest first."""
    child_faults: dict[str, list[int]] = attrs.field(factory=dict)
    """By plural: answers to the next PATCHes, oldest first."""
    dies_after: int | None = None
    """So many writes are still done; the last of them is not answered any more, and then the server is away."""
    away: bool = False
    """Answers 503 to everything."""
    writes: Counter[str] = attrs.field(factory=Counter)
    asked: set[tuple[str, str, str]] = attrs.field(factory=set)
    """Group, resource and verb of every call, as a rule of a ClusterRole has them."""
    secret_reads: int = 0
    watches_begun: int = 0
    versions: Iterator[int] = attrs.field(factory=lambda: itertools.count(100))

    async def _handle(self, request: Any) -> web.StreamResponse:
        if self.away:
            return web.json_response({"kind": "Status", "code": 503, "reason": "ServiceUnavailable"}, status=503)
        self._note_verb(request)
        if request.method.value in ("POST", "PATCH", "DELETE") and request.resource is not None:
            self.writes[f"{request.method.value} {request.resource.plural}/{request.subresource or ''}"] += 1
            if self.dies_after is not None:
                self.dies_after -= 1
                self.away = self.dies_after <= 0
        if request.method.value == "GET" and request.resource is not None:
            self.secret_reads += request.resource.plural == "secrets"
        if request.method.value == "PATCH" and request.name is not None:
            return await self._patch(request)
        if request.method.value == "POST" and isinstance(request.data, dict):
            self._stamp(request.data, {})
        if request.method.value == "GET" and "labelSelector" in request.params and "watch" not in request.params:
            return self._list(request)
        return await super()._handle(request)

    def _note_verb(self, request: Any) -> None:
        """What a role has to allow for this call."""
        if request.resource is None or request.resource.plural is None:
            return
        many = "watch" if "watch" in request.params else "list"
        verb = {"GET": "get" if request.name else many, "POST": "create"}.get(request.method.value)
        resource = request.resource.plural + (f"/{request.subresource}" if request.subresource else "")
        self.asked.add((request.resource.group or "", resource, verb or request.method.value.lower()))
        if "apply-patch" in request.headers.get("Content-Type", ""):
            self.asked.add((request.resource.group or "", resource, "create"))  # an apply makes what is not there

    async def _serve_watch(self, request: Any) -> AsyncIterator[Any]:
        """Subscribe, then tell what is there: kmock does it the other way round, and what comes in between is lost."""
        yield b""
        mark = await self._buses[request.resource].mark()
        there = [o.raw for (found, _, _), o in self.objects.items() if found == request.resource and not o.deleted]
        self.watches_begun += 1
        for body in there:
            yield {"type": "ADDED", "object": body}
        async for event in mark:
            yield event

    async def _patch(self, request: Any) -> web.StreamResponse:
        if request.subresource == "status" and self.status_faults:
            status = self.status_faults.pop(0)
            return web.json_response({"kind": "Status", "code": status, "reason": "Injected"}, status=status)
        faults = self.child_faults.get(request.resource.plural)
        if faults:
            return web.json_response({"kind": "Status", "message": "injected"}, status=faults.pop(0))
        key = (request.resource, request.namespace, request.name)
        before = self._stored(key)
        is_apply = "apply-patch" in request.headers["Content-Type"]
        if not before and not is_apply:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        wanted = request.data.get("metadata", {}) if not is_apply else {}
        if any(wanted.get(name, held) != held for name, held in before.get("metadata", {}).items()):
            return web.json_response({"kind": "Status", "code": 409, "reason": "Conflict"}, status=409)
        patch = {"status": request.data["status"]} if request.subresource == "status" else request.data
        after = merged(before, patch)  # near enough to server-side apply for objects of one manager
        if after != before:
            self._stamp(after, before)
            self._store(key, after)
            kind = "MODIFIED" if before else "ADDED"
            await self._buses[request.resource].put({"type": kind, "object": after})
        if self.away:
            return web.json_response({"kind": "Status", "code": 504, "reason": "Timeout"}, status=504)
        return web.json_response(after)

    def _store(self, key: Any, body: dict[str, Any]) -> None:
        if key in self.objects and not self.objects[key].deleted:
            self.objects[key].delete()
        if key in self.objects:
            self.objects[key].create(body)
        else:
            self.objects[key] = body

    def _stamp(self, body: dict[str, Any], before: dict[str, Any]) -> None:
        meta = body.setdefault("metadata", {})
        number = next(self.versions)
        meta["resourceVersion"] = str(number)
        meta.setdefault("uid", f"uid-{number}")
        changed = body.get("spec") != before.get("spec")
        meta["generation"] = before.get("metadata", {}).get("generation", 0) + (1 if changed else 0)

    def _list(self, request: Any) -> web.StreamResponse:
        label, _, value = request.params["labelSelector"].partition("=")
        items = [
            o.raw
            for (resource, namespace, _), o in self.objects.items()
            if resource == request.resource and request.namespace in (None, namespace) and not o.deleted
            if label in (labels := o.raw["metadata"].get("labels", {})) and value in ("", labels[label])
        ]
        return web.json_response({"items": items, "metadata": {}})

    def find(self, resource: str, name: str) -> dict[str, Any] | None:
        return self._stored((kmock.resource(resource), NAMESPACE, name)) or None

    def _stored(self, key: Any) -> dict[str, Any]:
        if key not in self.objects or self.objects[key].deleted:
            return {}
        return copy.deepcopy(self.objects[key].raw)

    def all_of(self, resource: str) -> list[dict[str, Any]]:
        wanted = kmock.resource(resource)
        return [o.raw for (found, _, _), o in self.objects.items() if found == wanted and not o.deleted]

    async def put(self, resource: str, body: dict[str, Any]) -> None:
        """Create an object, or write a whole new version of it, as a person or a controller would."""
        name = body["metadata"]["name"]
        before = self.find(resource, name) or {}
        after = copy.deepcopy(body)
        after["metadata"] = before.get("metadata", {}) | after["metadata"] | {"namespace": NAMESPACE}
        if resource == LLM and "status" in before:
            after["status"] = before["status"]  # only the status subresource changes it
        self._stamp(after, before)
        self._store((kmock.resource(resource), NAMESPACE, name), after)
        event = {"type": "MODIFIED" if before else "ADDED", "object": after}
        had, has = (SELECTED in found.get("metadata", {}).get("labels", {}) for found in (before, after))
        if had and not has:
            event = {"type": "DELETED", "object": before}  # for a watch with a selector it is gone
        await self._buses[kmock.resource(resource)].put(event)

    async def delete_object(self, resource: str, name: str) -> None:
        before = self.find(resource, name)
        self.objects[(kmock.resource(resource), NAMESPACE, name)].delete()
        await self._buses[kmock.resource(resource)].put({"type": "DELETED", "object": before})
