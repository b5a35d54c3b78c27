"""How requests and numbers flow: the blocks `monitoring`, `gateway` and `tenancy`. A change is live."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from guidevane_api.limits import ApiModel, Tokens
from guidevane_api.schema import (
    Later,
    ObjectName,
    OptionalName,
    Port,
    Rule,
    ShortText,
    list_map,
    rules,
)
from guidevane_api.spec_serving import SecretKeyRef


class MonitoringSpec(ApiModel):
    """Where the operator reads its signals."""

    scrape_interval_seconds: Annotated[int, Field(ge=1, le=300)] = 15
    """Seconds between two scrapes of a pod, as Prometheus is set up; signals older than three are stale."""
    prometheus_url: Annotated[
        str,
        Field(alias="prometheusURL", max_length=512),
        rules(
            Rule(
                "self == '' || self.matches('^https?://[^ ]+$')",
                "spec.monitoring.prometheusURL must be empty or start with http:// or https://",
            )
        ),
    ] = ""
    """Prometheus that scrapes the pods, as in http://prometheus.monitoring.svc:9090. Default, if empty: the
    operator's own setting; without one, the operator reads the pods directly."""
    pod_monitor: Annotated[bool, Later("PodMonitor objects")] = False
    """Make a PodMonitor for the Prometheus operator."""
    prometheus_rule: Annotated[bool, Later("PrometheusRule objects")] = False
    """Make a PrometheusRule with SLO alerts."""
    dashboard: Annotated[bool, Later("dashboards")] = False
    """Make a ConfigMap with a Grafana dashboard."""


class ServiceType(StrEnum):
    """Type of the Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class GatewayService(ApiModel):
    """The Service in front of the pods."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """Type of the Service."""


class EndpointPickerRef(ApiModel):
    """The endpoint picker of an InferencePool."""

    name: OptionalName = ""
    """Service of the endpoint picker."""
    port: Port = 9002
    """Its port."""


class FailureMode(StrEnum):
    """What a gateway does while the endpoint picker is away."""

    FAIL_OPEN = "FailOpen"
    FAIL_CLOSE = "FailClose"


class InferencePoolSpec(ApiModel):
    """An InferencePool of the Gateway API inference extension."""

    enabled: bool = False
    """Make an InferencePool."""
    epp_ref: EndpointPickerRef = EndpointPickerRef()
    """Its endpoint picker."""
    failure_mode: FailureMode = FailureMode.FAIL_OPEN
    """What a gateway does while the endpoint picker is away."""


class ParentRef(ApiModel):
    """A Gateway that an HTTPRoute attaches to."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: OptionalName = ""
    """Its namespace. Default: that of the service."""


class HTTPRouteSpec(ApiModel):
    """An HTTPRoute to the service."""

    enabled: bool = False
    """Make an HTTPRoute."""
    parent_refs: Annotated[tuple[ParentRef, ...], Field(max_length=8)] = ()
    """Gateways that it attaches to."""
    hostnames: Annotated[tuple[ShortText, ...], Field(max_length=16)] = ()
    """Host names that it answers to."""


class GatewaySpec(ApiModel):
    """How requests reach the pods."""

    service: GatewayService = GatewayService()
    """The Service in front of the pods."""
    inference_pool: Annotated[InferencePoolSpec, Later("inference pools")] = InferencePoolSpec()
    """An InferencePool of the Gateway API inference extension."""
    http_route: Annotated[HTTPRouteSpec, Later("HTTP routes")] = HTTPRouteSpec()
    """An HTTPRoute to the service."""


class Tenant(ApiModel):
    """One tenant and its share."""

    name: ObjectName
    """Name of the tenant, as it shows up in metrics."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Share of the service against other tenants."""
    max_in_flight: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Requests at once, at most; above it 429. Default: no cap of its own."""
    max_queued_tokens: Tokens | None = None
    """Prompt tokens waiting, at most; above it 429. Default: no cap of its own."""
    key_secret_ref: SecretKeyRef | None = None
    """Secret with the API keys of this tenant, one a line. Default: requests without a key are its own."""


class ClassShares(ApiModel):
    """Shares of the two classes of work."""

    interactive: Annotated[int, Field(ge=1, le=1000)] = 9
    """Share of interactive requests."""
    offline: Annotated[int, Field(ge=1, le=1000)] = 1
    """Share of offline requests."""


class TenancySpec(ApiModel):
    """Tenants and classes that share the service."""

    tenants: Annotated[
        tuple[Tenant, ...],
        Field(max_length=64),
        list_map("name"),
        rules(
            Rule(
                "self.filter(t, !has(t.keySecretRef)).size() <= 1",
                "spec.tenancy.tenants: only one may have no keySecretRef; requests without a key are its own",
            )
        ),
    ] = ()
    """Tenants, known by name. Default: everybody is let in, and all are one."""
    classes: ClassShares = ClassShares()
    """Shares of the two classes of work: interactive and offline."""
