"""The pod of a service. spec.limits, slo and tenancy are not in here: changing them must never touch a pod template."""

from typing import Any

from guidevane_api.spec_pod import ComputeQuantities, PodSecurity
from guidevane_operator.children.context import (
    LIMITS_DIR,
    LIMITS_FILE,
    MODEL_DIR,
    SLO_FILE,
    TENANTS_DIR,
    TENANTS_FILE,
    TOKEN_DIR,
    TOKEN_KEY,
    RenderContext,
)
from guidevane_operator.children.quantity import to_bytes, to_flag
from guidevane_operator.facts import CONTAINER

USER_ID = 10001
"""User and group of the runtime image."""
MAX_DEFAULT_KV_BYTES = 4 << 30
"""KV cache of a CPU pod without spec.envelope.kvCacheMemory: a quarter of its memory limit, at most this."""
PROBE_TIMEOUT_S = 5
"""A busy node answers late; later than this is no answer."""


def pod_spec(context: RenderContext) -> dict[str, Any]:
    """The PodSpec."""
    spec = context.spec
    scheduling = spec.scheduling
    pod: dict[str, Any] = {
        "serviceAccountName": context.service_account_name,
        "automountServiceAccountToken": spec.security.automount_token,
        # A Service called "guidevane" would else put GUIDEVANE_PORT=tcp://... into the runtime's settings.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _grace_s(context),
        "securityContext": _pod_security(spec.security.pod_security),
        "containers": [_container(context)],
        "volumes": _volumes(context),
        "topologySpreadConstraints": [
            {
                **scheduling.topology_spread.model_dump(mode="json", by_alias=True),
                "labelSelector": {"matchLabels": context.selector()},
            }
        ],
    }
    optional = {
        "nodeSelector": dict(scheduling.node_selector),
        "tolerations": _tolerations(context),
        "affinity": scheduling.affinity,
        "priorityClassName": scheduling.priority_class_name,
        "runtimeClassName": scheduling.runtime_class_name,
    }
    return pod | {name: value for name, value in optional.items() if value}


def _container(context: RenderContext) -> dict[str, Any]:
    """The runtime container."""
    spec = context.spec
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.engine.image or context.runtime_image,
        "imagePullPolicy": spec.engine.image_pull_policy.value,
        "args": runtime_args(context),
        "env": _environment(context),
        "ports": [
            {"name": "http", "containerPort": spec.engine.port, "protocol": "TCP"},
            {"name": "admin", "containerPort": spec.engine.admin_port, "protocol": "TCP"},
        ],
        "resources": _resources(context),
        "securityContext": _container_security(spec.security.pod_security),
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(context),
        **_probes(context),
    }
    if spec.drain.pre_stop_seconds:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": spec.drain.pre_stop_seconds}}}
    return container


def runtime_args(context: RenderContext) -> list[str]:
    """The command line of the runtime: start-up capacity only."""
    spec, envelope = context.spec, context.spec.envelope
    flags: dict[str, Any] = {
        "model": _model_path(context),
        "served-model-name": spec.model.served_name or context.key.name,
        "host": "0.0.0.0",  # noqa: S104  the pod's own network
        "port": spec.engine.port,
        "admin-port": spec.engine.admin_port,
        "admin-token-file": f"{TOKEN_DIR}/{TOKEN_KEY}",
        "limits-file": f"{LIMITS_DIR}/{LIMITS_FILE}",
        "slo-file": f"{LIMITS_DIR}/{SLO_FILE}",
        "tenants-file": f"{TENANTS_DIR}/{TENANTS_FILE}",
        "envelope-max-num-seqs": envelope.max_num_seqs,
        "envelope-max-num-batched-tokens": envelope.max_num_batched_tokens,
        "envelope-max-model-len": envelope.max_model_len or None,
        "block-size": envelope.block_size,
        "kv-cache-memory": _kv_memory(context),
        "dtype": envelope.dtype.value.lower(),
        "gpu-memory-utilization-percent": envelope.gpu_memory_utilization_percent if context.uses_gpu else None,
        "drain-seconds": _drain_s(context),
    }
    args = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return args + list(spec.engine.extra_args)


def _model_path(context: RenderContext) -> str:
    """What the runtime is told to load: file:// as it is, pvc://claim/path as a path below the mount."""
    uri = context.spec.model.uri
    if uri.startswith("pvc://"):
        _, _, path = uri.removeprefix("pvc://").partition("/")
        return f"{MODEL_DIR}/{path}".rstrip("/")
    return uri


def _kv_memory(context: RenderContext) -> str | None:
    """KV-cache memory: as given; else on CPU from the memory limit, on GPU what the runtime finds free."""
    given = context.spec.envelope.kv_cache_memory
    if given:
        return to_flag(to_bytes(given))
    memory = context.spec.resources.limits.memory
    if context.uses_gpu or memory is None:
        return None
    return f"{min(MAX_DEFAULT_KV_BYTES, to_bytes(memory) // 4) >> 20}Mi"


def _environment(context: RenderContext) -> list[dict[str, Any]]:
    """Who the pod is, and where it may write; then what the user sets."""
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    ours: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    ours += [{"name": "HOME", "value": "/tmp"}, {"name": "GUIDEVANE_LOG_FORMAT", "value": "json"}]  # noqa: S108
    users = [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in context.spec.engine.env]
    taken = {variable["name"] for variable in users}
    return [variable for variable in ours if variable["name"] not in taken] + users


def _resources(context: RenderContext) -> dict[str, Any]:
    """Requests and limits; a request that is left out is what the limit says."""
    resources = context.spec.resources
    requests, limits = _quantities(resources.requests), _quantities(resources.limits)
    if context.uses_gpu and resources.gpu is not None:
        limits[resources.gpu.resource_name] = str(resources.gpu.per_replica)
    return {name: value for name, value in {"requests": requests, "limits": limits}.items() if value}


def _quantities(given: ComputeQuantities) -> dict[str, str]:
    return given.model_dump(mode="json", by_alias=True, exclude_none=True)


def _tolerations(context: RenderContext) -> list[dict[str, Any]]:
    """The user's, and for a GPU service that of its own taint."""
    gpu = context.spec.resources.gpu
    found = [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in context.spec.scheduling.tolerations]
    # MIG slices carry the taint of the whole card.
    taint = "nvidia.com/gpu" if gpu is None or gpu.resource_name.startswith("nvidia.com/") else gpu.resource_name
    if context.uses_gpu and taint not in {toleration.get("key") for toleration in found}:
        found.append({"key": taint, "operator": "Exists", "effect": "NoSchedule"})
    return found


def _pod_security(level: PodSecurity) -> dict[str, Any]:
    """Security context of the pod."""
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if level is PodSecurity.RESTRICTED:
        context |= {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    return context


def _container_security(level: PodSecurity) -> dict[str, Any]:
    """Security context of the container."""
    if level is PodSecurity.RESTRICTED:
        return {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    return {"allowPrivilegeEscalation": False}


def _probes(context: RenderContext) -> dict[str, Any]:
    """Start-up waits for the model; after it /readyz decides on traffic and /livez on a restart."""
    probes = context.spec.probes

    def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": "http"},
            "periodSeconds": period_s,
            "failureThreshold": failures,
            "timeoutSeconds": PROBE_TIMEOUT_S,
        }

    return {
        "startupProbe": probe("/readyz", probes.startup.period_seconds, probes.startup.failure_threshold),
        "readinessProbe": probe("/readyz", probes.readiness.period_seconds, probes.readiness.failure_threshold),
        "livenessProbe": probe("/livez", probes.liveness.period_seconds, probes.liveness.failure_threshold),
    }


def _grace_s(context: RenderContext) -> int:
    """Seconds from the request to end until the node kills the pod."""
    drain = context.spec.drain
    return min(drain.pre_stop_seconds + drain.shutdown_seconds + drain.margin_seconds, drain.max_seconds)


def _drain_s(context: RenderContext) -> int:
    """Seconds that running requests have: less than asked for where drain.maxSeconds cuts the sum short."""
    drain = context.spec.drain
    left = _grace_s(context) - drain.pre_stop_seconds - drain.margin_seconds
    return max(1, min(drain.shutdown_seconds, left))


def _mounts(context: RenderContext) -> list[dict[str, Any]]:
    """Where the volumes are in the container."""
    mounts: list[dict[str, Any]] = [
        {"name": "limits", "mountPath": LIMITS_DIR, "readOnly": True},
        {"name": "admin", "mountPath": TOKEN_DIR, "readOnly": True},
        {"name": "tenants", "mountPath": TENANTS_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  an emptyDir of this pod
    ]
    if context.spec.resources.shared_memory:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    if context.spec.model.uri.startswith("pvc://"):
        mounts.append({"name": "model", "mountPath": MODEL_DIR, "readOnly": True})
    return mounts


def _volumes(context: RenderContext) -> list[dict[str, Any]]:
    """Folders follow their objects: a container restart comes up with the last spec.limits, slo and tenancy.

    Tenants are mounted without spec.tenancy too: the first one is no rollout.
    """
    spec = context.spec
    volumes: list[dict[str, Any]] = [
        {"name": "limits", "configMap": {"name": context.limits_name}},
        {"name": "admin", "secret": {"secretName": context.secret_name, "defaultMode": 0o440}},
        {"name": "tenants", "secret": {"secretName": context.tenants_name, "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.resources.shared_memory:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}})
    if spec.model.uri.startswith("pvc://"):
        claim = spec.model.uri.removeprefix("pvc://").partition("/")[0]
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return volumes
