"""What every child is rendered from, and what all children have in common."""

from dataclasses import dataclass

from guidevane_api.llmservice import API_VERSION, KIND, NAME_LABEL, LLMServiceSpec
from guidevane_api.pod_files import TenantsFile
from guidevane_operator.kube import Manifest, ServiceKey

LIMITS_DIR = "/etc/guidevane/limits"
LIMITS_FILE = "limits.json"
SLO_FILE = "slo.json"
"""Beside the limits: a pod that is made while the operator is down has both."""
TENANTS_DIR = "/etc/guidevane/tenants"
TENANTS_FILE = "tenants.json"
TOKEN_DIR = "/etc/guidevane/admin"  # noqa: S105
TOKEN_KEY = "token"  # noqa: S105
MODEL_DIR = "/mnt/model"
"""Where a pvc:// claim is mounted."""


@dataclass(frozen=True)
class RenderContext:
    """Everything that rendering looks at."""

    key: ServiceKey
    uid: str
    spec: LLMServiceSpec
    runtime_image: str
    """Image for a spec that names none."""
    token: str
    """Admin token of the service: made once, kept for its life."""
    tenants: TenantsFile
    """Who shares the service; keys as digests."""
    restart_requested_at: str = ""

    @property
    def wanted_replicas(self) -> int:
        """Pods that should exist."""
        return 0 if self.spec.suspend else self.spec.replicas

    @property
    def limits_name(self) -> str:
        """Name of the ConfigMap with the start-up limits and the guard's lines."""
        return f"{self.key.name}-limits"

    @property
    def secret_name(self) -> str:
        """Name of the Secret with the admin token."""
        return f"{self.key.name}-admin"

    @property
    def tenants_name(self) -> str:
        """Name of the Secret with the tenants."""
        return f"{self.key.name}-tenants"

    @property
    def service_account_name(self) -> str:
        """The user's ServiceAccount, or the one we make."""
        return self.spec.security.service_account_name or self.key.name

    @property
    def uses_gpu(self) -> bool:
        """Whether a pod holds a device that a second pod may not get."""
        gpu = self.spec.resources.gpu
        return gpu is not None and gpu.per_replica > 0

    def common_labels(self) -> dict[str, str]:
        """Labels of every child."""
        return {
            "app.kubernetes.io/name": "guidevane-runtime",
            "app.kubernetes.io/instance": self.key.name,
            "app.kubernetes.io/managed-by": "guidevane",
            NAME_LABEL: self.key.name,
        }

    def selector(self) -> dict[str, str]:
        """The one label that selects the pods; it is immutable in a Deployment, so it never gets a second."""
        return {NAME_LABEL: self.key.name}

    def child(self, api_version: str, kind: str, name: str) -> Manifest:
        """A child without its body: name, labels, owner."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.key.namespace,
                "labels": self.common_labels(),
                "ownerReferences": [
                    {
                        "apiVersion": API_VERSION,
                        "kind": KIND,
                        "name": self.key.name,
                        "uid": self.uid,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
        }
