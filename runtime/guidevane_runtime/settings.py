"""The one settings object of the runtime: flag over environment (GUIDEVANE_*) over default. Read once, in __main__."""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from guidevane_api.limits import MAX_TOKENS, Count, Envelope, PartialLimits, Percent, SchedulerLimits, Tokens
from guidevane_api.pod_files import GuardMode, ProtectionLines
from guidevane_api.schema import Milliseconds
from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.errors import StartError

ENV_PREFIX = "GUIDEVANE_"
SIMILAR = 0.75
"""Likeness (difflib) from which a name is a misspelling: PROT and PORT have it, CACHE_DIR has it with no setting."""

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9}


def parse_quantity(value: object) -> object:
    """Bytes of a Kubernetes quantity: 512Mi, 2G, 1048576."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+)([KMGT]i|[kMG]?)", value.strip())
    if not found:
        raise ValueError(f"{value!r} is no quantity; write for example 512Mi or 4Gi")
    return int(found[1]) * _UNITS[found[2]]


Quantity = Annotated[int, BeforeValidator(parse_quantity), Field(ge=1)]
MAX_SECONDS = 86_400
"""A day, the longest that anything here is waited for."""
Port = Annotated[int, Field(ge=0, le=65535)]


class RuntimeSettings(BaseSettings):
    """An OpenAI-compatible server over an engine that schedules at every iteration."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="python -m guidevane_runtime",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    model: str
    """HuggingFace directory, GGUF file, or file:// of either. A folder with exactly one *.gguf means that file."""
    served_model_name: str = ""
    """Name that clients send as `model`. Default: the last part of --model."""
    host: str = "0.0.0.0"  # noqa: S104 - a server in a pod is reached from outside it
    """Address to listen on."""
    port: Port = 8000
    """Serving port: OpenAI's routes, /metrics, /health, /livez, /readyz. 0: any free one, named in the log."""
    admin_port: Port = 8001
    """Admin port: /admin/limits, /admin/tenants, /admin/requests. Open only with --admin-token-file."""
    admin_token_file: Path | None = None
    """File with the bearer token of the admin port."""
    limits_file: Path | None = None
    """JSON of the start-up limits, for example {"maxNumSeqs": 16}. What it leaves out has its default."""
    tenants_file: Path | None = None
    """JSON of who shares the server: tenants with weight, caps and key digests, and the shares of the two classes. A
    change is live. Default: no tenants, and no key is asked for."""
    envelope_max_num_seqs: Count = 256
    """Upper bound of limits.maxNumSeqs."""
    envelope_max_num_batched_tokens: Tokens = 8192
    """Upper bound of limits.maxNumBatchedTokens."""
    envelope_max_model_len: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Upper bound of limits.maxModelLen. 0: what the model says."""
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in one KV-cache block."""
    kv_cache_memory: Quantity | None = None
    """Size of the KV cache, for example 512Mi. Default: on CPU a quarter of the memory limit, 4Gi at most; on CUDA what
    --gpu-memory-utilization-percent leaves."""
    prefix_caching: Literal["on", "off"] = "on"
    """Keep the KV blocks of ended requests for others that begin with the same tokens. Outputs are the same."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and arithmetic. auto: bfloat16 where the device has it natively, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 90
    """Share of GPU memory to use."""
    num_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads of the engine. Default: the container's CPU limit."""
    guard: Literal["off", "dry-run", "on"] | None = None
    """Give way, step by step, while an --slo-* line is breached; dry-run only reports. Default: on with a line."""
    slo_file: Path | None = None
    """JSON of the protection lines, for example {"itlP95Milliseconds": 120}, in place of --guard and --slo-*. A change
    of the file takes effect within seconds."""
    slo_ttft_p95_ms: Milliseconds | None = None
    """Protection line: p95 of the time to the first token, in ms."""
    slo_itl_p95_ms: Milliseconds | None = None
    """Protection line: p95 of the gap between two tokens, in ms. While the guard is on prefill is cut to it."""
    slo_queue_wait_p95_ms: Milliseconds | None = None
    """Protection line: p95 of the wait before the first step, in ms."""
    slo_kv_cache_utilization_max_percent: Percent | None = None
    """Protection line: KV-cache blocks in use, in percent."""
    slo_admission_reject_rate_max_percent: Percent | None = None
    """Protection line: requests refused because of load, in percent. Above it the guard takes steps back."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people or for machines."""
    drain_seconds: Annotated[int, Field(ge=0, le=MAX_SECONDS)] = 30
    """After SIGTERM: time for requests in flight to finish."""
    hang_seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS)] = 30
    """Silence of the engine after which /readyz says 503 and requests are refused. Above its longest step.
    After four times that, and 120 s at least, the engine is ended and started again."""

    @model_validator(mode="after")
    def _guard_has_a_line(self) -> Self:
        has_a_line = bool(self.protection.given())
        if self.slo_file is not None and (self.guard is not None or has_a_line):
            raise ValueError(
                f"the lines are in --slo-file {self.slo_file}; leave out --guard and --slo-*, or leave out the file"
            )
        if self.guard not in (None, "off") and not has_a_line:
            raise ValueError(
                f"guard is {self.guard} and has no line to protect; give one, for example --slo-itl-p95-ms 120"
            )
        return self

    @property
    def protection(self) -> ProtectionLines:
        """What the flags say of the guard."""
        lines = ProtectionLines(
            ttft_p95_milliseconds=self.slo_ttft_p95_ms,
            itl_p95_milliseconds=self.slo_itl_p95_ms,
            queue_wait_p95_milliseconds=self.slo_queue_wait_p95_ms,
            kv_cache_utilization_max_percent=self.slo_kv_cache_utilization_max_percent,
            admission_reject_rate_max_percent=self.slo_admission_reject_rate_max_percent,
        )
        return lines.model_copy(update={"mode": GuardMode(self.guard or ("on" if lines.given() else "off"))})

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        # Resolved: "." has no name.
        return self.served_model_name or Path(self.model.rstrip("/")).resolve().name

    @property
    def envelope(self) -> Envelope:
        return Envelope(
            max_num_seqs=self.envelope_max_num_seqs,
            max_num_batched_tokens=self.envelope_max_num_batched_tokens,
            max_model_len=self.envelope_max_model_len,
        )

    def read_startup_limits(self) -> PartialLimits:
        """The limits file, or no limits."""
        if self.limits_file is None:
            return PartialLimits()
        try:
            return PartialLimits.model_validate_json(self.limits_file.read_bytes(), strict=True)
        except (OSError, ValidationError) as error:
            raise StartError(f"can't read --limits-file {self.limits_file}: {sentence_of(error)}") from error

    def read_admin_token(self) -> str | None:
        """The admin port's token; None: no admin port."""
        if self.admin_token_file is None:
            return None
        try:
            token = self.admin_token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"can't read --admin-token-file {self.admin_token_file}: {error}") from error
        if not token:
            raise StartError(f"--admin-token-file {self.admin_token_file} is empty; write a token into it")
        return token

    def engine_settings(self, model_path: str, limits: SchedulerLimits) -> EngineSettings:
        """The part that goes to the engine."""
        return EngineSettings(
            model_path=model_path,
            limits=limits,
            envelope=self.envelope,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            kv_cache_bytes=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization_percent / 100,
            num_threads=self.num_threads,
            enable_prefix_caching=self.prefix_caching == "on",
        )


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> RuntimeSettings:
    """Flags and environment. Raises StartError for a bad value and for an unknown flag or variable."""
    _refuse_misspelt_environment(os.environ if environment is None else environment)
    try:
        return CliApp.run(RuntimeSettings, cli_args=list(arguments))
    except (ValidationError, SettingsError) as error:
        raise StartError(f"settings are not valid: {sentence_of(error)}") from error


def _refuse_misspelt_environment(environment: Mapping[str, str]) -> None:
    """Other programs of guidevane have variables of their own; one that nearly has a setting's name is a mistake."""
    known = [name.upper() for name in RuntimeSettings.model_fields]
    for variable in environment:
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name.upper() in known:
            continue
        if meant := get_close_matches(name.upper(), known, n=1, cutoff=SIMILAR):
            raise StartError(f"environment variable {variable} is no setting of the runtime; {ENV_PREFIX}{meant[0]} is")


def sentence_of(error: Exception) -> str:
    """An error of a file or of a model in one line, without the value that is wrong: it may be a secret."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)]
    return "; ".join(f"{field}: {message}" if field else message for field, message in found)
