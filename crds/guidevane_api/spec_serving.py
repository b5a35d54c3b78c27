"""What is served: the blocks `model`, `engine` and `envelope` of an LLMService. A change is a rollout."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from guidevane_api.limits import ApiModel, Envelope, Percent
from guidevane_api.schema import (
    Later,
    ObjectName,
    OptionalName,
    OptionalQuantity,
    Port,
    Rule,
    ShortText,
    list_map,
    model_rules,
    rules,
)

URI_SCHEMES = ("hf", "oci", "pvc", "file", "s3")
"""Where a model can come from."""

OWNED_FLAGS = (
    "model",
    "served-model-name",
    "host",
    "port",
    "admin-port",
    "admin-token-file",
    "limits-file",
    "envelope-[a-z-]+",
    "block-size",
    "kv-cache-memory",
    "dtype",
    "gpu-memory-utilization-percent",
    "drain-seconds",
    "guard",
    "slo-[a-z0-9-]+",
    "tenants-file",
)
"""Runtime flags that the operator writes from other fields, as patterns: `engine.extraArgs` must not repeat them."""


class LocalSecretRef(ApiModel):
    """A Secret in the same namespace."""

    name: OptionalName = ""
    """Name of the Secret."""


class Adapter(ApiModel):
    """One LoRA adapter."""

    name: ObjectName
    """Name that a request puts into `model` to use this adapter."""
    uri: Annotated[str, Field(max_length=512)]
    """Where the adapter comes from, in the forms of model.uri."""
    revision: Annotated[str, Field(max_length=128)] = ""
    """Commit or digest of the adapter. Default: resolved once."""
    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the adapter, at most envelope.maxAdapterRank."""


class ModelSpec(ApiModel):
    """The model that is served."""

    uri: Annotated[
        str,
        Field(max_length=512),
        Later("downloads", ready=("file://", "pvc://")),
        rules(
            Rule(
                f"self.matches('^({'|'.join(URI_SCHEMES)})://.+')",
                "spec.model.uri must not be empty: hf://, oci://, pvc://, file:// or s3:// and a path",
            ),
            Rule(
                "!self.startsWith('file://') || self.startsWith('file:///')",
                "spec.model.uri with file:// takes an absolute path in the image, with three slashes: file:///models/name",
            ),
            Rule(
                "!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$')",
                "spec.model.uri with pvc:// takes the claim's name and a path in it: pvc://claim/path",
            ),
            Rule(
                "self.split('://')[0] == oldSelf.split('://')[0]",
                "the scheme of spec.model.uri can't be changed; create a new LLMService for another kind of storage",
            ),
        ),
    ]
    """Where the model comes from: file:///path in the runtime image, pvc://claim/path in a PersistentVolumeClaim
    of this namespace; later hf://org/name, oci://image and s3://bucket/path. A HuggingFace folder (safetensors) or a
    GGUF file. The scheme can't be changed."""
    revision: Annotated[str, Field(max_length=128), Later("downloads")] = ""
    """Commit or digest of the model. Default: resolved once and kept in status."""
    served_name: Annotated[str, Field(max_length=128)] = ""
    """Name that requests put into `model`. Default: metadata.name."""
    secret_ref: Annotated[LocalSecretRef, Later("downloads")] = LocalSecretRef()
    """Secret with the token for the download; mounted as a file, never an environment variable."""
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=32), list_map("name"), Later("LoRA adapters")] = ()
    """LoRA adapters, loaded live into running pods."""


class PullPolicy(StrEnum):
    """When the node pulls the image."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class SecretKeyRef(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in the Secret."""


class EnvVarSource(ApiModel):
    """Where a value comes from, if it is not written here."""

    secret_key_ref: SecretKeyRef
    """Take the value from a Secret. The pod reads it; the operator does not."""


class EnvVar(ApiModel):
    """One environment variable of the runtime container."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "!self.name.startsWith('GUIDEVANE_')",
                "spec.engine.env must not set GUIDEVANE_ variables; use the spec's fields or extraArgs",
                ".name",
            ),
            Rule(
                "!(has(self.value) && has(self.valueFrom))",
                "spec.engine.env takes value or valueFrom, not both",
                ".value",
            ),
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value, in plain text."""
    value_from: EnvVarSource | None = None
    """A Secret that holds the value."""


class EngineSpec(ApiModel):
    """The runtime container."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule("self.port != self.adminPort", "spec.engine.adminPort must differ from spec.engine.port", ".adminPort")
        )
    )

    image: Annotated[
        str,
        Field(max_length=512),
        rules(
            Rule(
                "self == '' || self.contains('@sha256:')"
                " || (self.matches(':[A-Za-z0-9_][A-Za-z0-9_.-]*$') && !self.endsWith(':latest'))",
                "spec.engine.image needs a digest, or a tag other than latest",
            )
        ),
    ] = ""
    """Runtime image, with a digest or a tag other than latest. Default: the image that the operator was released
    with."""
    image_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When the node pulls the image."""
    port: Port = 8000
    """Port of the OpenAI API, /metrics and the probes."""
    admin_port: Port = 8001
    """Port of /admin/limits, for the operator only; never in the Service."""
    admin_auth_secret_ref: Annotated[LocalSecretRef, Later("admin tokens of your own")] = LocalSecretRef()
    """Secret with the admin token. Default: the operator makes the Secret <name>-admin."""
    extra_args: Annotated[
        tuple[ShortText, ...],
        Field(max_length=32),
        rules(
            Rule(
                f"self.all(a, !a.matches('^--({'|'.join(OWNED_FLAGS)})(=.*)?$'))",
                "spec.engine.extraArgs must not hold a flag that another field owns, as --model or --port;"
                " set spec.model, spec.engine, spec.envelope, spec.limits, spec.slo, spec.tenancy or spec.drain",
            )
        ),
    ] = ()
    """More flags of the runtime, as in --num-threads=4. Flags that other fields own are refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64), list_map("name")] = ()
    """Environment variables of the runtime container."""


class DType(StrEnum):
    """Number format of weights and activations."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "Bfloat16"
    FLOAT16 = "Float16"


class EnvelopeSpec(Envelope):
    """Start-up capacity: what memory and kernels are sized for; spec.limits moves inside it."""

    gpu_memory_utilization_percent: Percent = 90
    """Share of GPU memory, in percent, for weights, workspace and KV cache together. No effect on CPU."""
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in one KV-cache block."""
    kv_cache_memory: OptionalQuantity = ""
    """Memory of the KV cache, as in 512Mi. Default, if empty: on GPU what gpuMemoryUtilizationPercent leaves, on CPU
    a quarter of resources.limits.memory and at most 4Gi."""
    dtype: DType = DType.AUTO
    """Number format of weights and activations. Auto is bfloat16 where the hardware has it, else float32."""
    max_adapters: Annotated[int, Field(ge=0, le=256), Later("LoRA adapters")] = 0
    """LoRA adapters in memory at once, at most."""
    max_adapter_rank: Annotated[int, Field(ge=0, le=512), Later("LoRA adapters")] = 0
    """Largest rank of a LoRA adapter."""
