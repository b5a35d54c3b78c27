"""All children of a service, in the order in which they are applied."""

import base64
import hashlib
import json
from typing import Any

from guidevane_api.limits import ApiModel, SchedulerLimits
from guidevane_api.llmservice import RESTART_ANNOTATION, REVISION_LABEL, LLMServiceSpec
from guidevane_api.pod_files import GuardMode, ProtectionLines
from guidevane_api.spec_control import GuardAction
from guidevane_api.spec_pod import PDBMode
from guidevane_operator.children.context import LIMITS_FILE, SLO_FILE, TENANTS_FILE, TOKEN_KEY, RenderContext
from guidevane_operator.children.pod import pod_spec
from guidevane_operator.kube import Manifest
from guidevane_operator.limits_plan import outgoing

PDB_KIND = "PodDisruptionBudget"
GUARD_MODES = {
    GuardAction.OFF: GuardMode.OFF,
    GuardAction.DRY_RUN: GuardMode.DRY_RUN,
    GuardAction.ON: GuardMode.ON,
}
"""By spec.slo.guard."""


def render(context: RenderContext) -> list[Manifest]:
    """The manifests that should exist, what pods need first."""
    children = [
        _limits(context),
        _admin_secret(context),
        _tenants_secret(context),
        _service(context),
        _deployment(context),
    ]
    if not context.spec.security.service_account_name:
        children.insert(0, _service_account(context))
    if wants_pdb(context):
        children.append(_pdb(context))
    return children


def wants_pdb(context: RenderContext) -> bool:
    """From two replicas on: with one, a budget would block every node drain for ever."""
    return context.spec.disruption.pdb is PDBMode.AUTO and context.wanted_replicas >= 2


def revision_of(context: RenderContext) -> str:
    """Hash of the pod template: equal for two specs exactly if their pods are interchangeable."""
    text = json.dumps([pod_spec(context), context.restart_requested_at], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _service_account(context: RenderContext) -> Manifest:
    """An account without rights: pods never speak to the API server."""
    account = context.child("v1", "ServiceAccount", context.key.name)
    return account | {"automountServiceAccountToken": False}


def _limits(context: RenderContext) -> Manifest:
    """The last spec.limits, resolved as far as the operator can, and the lines of the guard."""
    spec = context.spec
    limits = outgoing(SchedulerLimits.resolve(spec.limits, spec.envelope), spec.limits, spec.envelope)
    files = {LIMITS_FILE: _file(limits), SLO_FILE: _file(protection_of(spec))}
    return context.child("v1", "ConfigMap", context.limits_name) | {"data": files}


def protection_of(spec: LLMServiceSpec) -> ProtectionLines:
    """What the pods' guards protect."""
    slo = spec.slo
    return ProtectionLines(
        mode=GUARD_MODES[slo.guard],
        ttft_p95_milliseconds=slo.ttft_p95_milliseconds,
        itl_p95_milliseconds=slo.itl_p95_milliseconds,
        queue_wait_p95_milliseconds=slo.queue_wait_p95_milliseconds,
        kv_cache_utilization_max_percent=slo.kv_cache_utilization_max_percent,
        admission_reject_rate_max_percent=slo.admission_reject_rate_max_percent,
    )


def _file(content: ApiModel) -> str:
    """The text of a file that pods read."""
    fields = content.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _admin_secret(context: RenderContext) -> Manifest:
    """The token that opens the admin port."""
    secret = context.child("v1", "Secret", context.secret_name)
    return secret | {"type": "Opaque", "data": {TOKEN_KEY: _encoded(context.token)}}


def _tenants_secret(context: RenderContext) -> Manifest:
    """Who shares the service. A digest lets a short key be guessed, so it is no ConfigMap."""
    secret = context.child("v1", "Secret", context.tenants_name)
    return secret | {"type": "Opaque", "data": {TENANTS_FILE: _encoded(_file(context.tenants))}}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _service(context: RenderContext) -> Manifest:
    """The Service: the OpenAI API only, never the admin port."""
    port = {
        "name": "http",
        "port": context.spec.engine.port,
        "targetPort": "http",
        "protocol": "TCP",
        "appProtocol": "http",
    }
    service = context.child("v1", "Service", context.key.name)
    return service | {
        "spec": {
            "type": context.spec.gateway.service.type.value,
            "selector": context.selector(),
            "ports": [port],
        }
    }


def _deployment(context: RenderContext) -> Manifest:
    """The Deployment. Its rolling update is set so that it cannot deadlock."""
    revision = revision_of(context)
    template: dict[str, Any] = {
        "metadata": {"labels": context.common_labels() | {REVISION_LABEL: revision}},
        "spec": pod_spec(context),
    }
    if context.restart_requested_at:
        template["metadata"]["annotations"] = {RESTART_ANNOTATION: context.restart_requested_at}
    rollout = context.spec.rollout
    deployment = context.child("apps/v1", "Deployment", context.key.name)
    return deployment | {
        "spec": {
            "replicas": context.wanted_replicas,
            "selector": {"matchLabels": context.selector()},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(context)},
            "progressDeadlineSeconds": rollout.progress_deadline_seconds,
            "revisionHistoryLimit": rollout.revision_history_limit,
            "template": template,
        }
    }


def _rolling_update(context: RenderContext) -> dict[str, int]:
    """On GPU the old pod goes first: a surge pod would wait for ever for the device that the old one holds."""
    if context.uses_gpu:
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": 1, "maxUnavailable": 0}


def _pdb(context: RenderContext) -> Manifest:
    """One pod at a time may be taken away on purpose."""
    budget = context.child("policy/v1", PDB_KIND, context.key.name)
    return budget | {
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": context.selector()},
        }
    }
