"""The operator's own settings: flags over GUIDEVANE_* environment over defaults, read once in __main__."""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from guidevane_operator.errors import SettingsError

ENV_PREFIX = "GUIDEVANE_"

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseSettings):
    """The guidevane operator: turns LLMService objects into pods and keeps their live limits inside the SLO."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="python -m guidevane_operator",
        use_attribute_docstrings=True,
    )

    namespaces: str = ""
    """Namespaces to watch, separated by commas. Empty: all of them, which needs a ClusterRole."""
    runtime_image: str = "guidevane.dev/runtime:0.1.0"
    """Image of pods whose spec.engine.image is empty."""
    prometheus_url: str = ""
    """Prometheus for services whose spec.monitoring.prometheusURL is empty. Empty: their pods are
    scraped directly."""
    health_port: Port = 8080
    """Port of /healthz: 200 while every loop is alive."""
    resync_seconds: Seconds = 300.0
    """Time between two full reconciles of a service, which read everything whether or not anything changed."""
    key_seconds: Seconds = 30.0
    """Time between two looks at the Secrets of services and those with the keys of tenants: no watch tells of them."""
    drift_seconds: Seconds = 60.0
    """Time between two renewals of the lease on live limits; well below spec.retune.leaseSeconds."""
    status_seconds: Seconds = 60.0
    """Least time between two status writes that carry numbers only. Transitions and decisions are written at once."""
    admin_timeout_seconds: Seconds = 4.0
    """Longest wait for one pod's admin port, which answers after the step that is under way."""
    prometheus_timeout_seconds: Seconds = 5.0
    """Longest wait for one Prometheus query, or one scrape of a pod."""
    api_timeout_seconds: Seconds = 30.0
    """Longest wait for one call to the Kubernetes API."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json for the cluster."""
    verbose: bool = False
    """Log debug lines too."""

    def watched_namespaces(self) -> tuple[str, ...]:
        """The namespaces to watch; empty means all."""
        return tuple(name.strip() for name in self.namespaces.split(",") if name.strip())


def read_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the command line and the environment; an unknown one stops the start and is named."""
    known = {(ENV_PREFIX + name).upper() for name in Settings.model_fields}
    for name in os.environ if environ is None else environ:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise SettingsError(f"{name} is no setting of the operator; known: {', '.join(sorted(known))}")
    return Settings(_cli_parse_args=list(argv))
