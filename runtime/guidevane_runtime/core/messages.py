"""What server and engine say to each other: one mailbox each way, frozen dataclasses only.

The engine drains its mailbox at the top of every iteration; nothing else changes engine state. It answers with one
StepReport per step. Times are seconds of CLOCK_MONOTONIC, which both processes of a pod share.
"""

from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from msgspec import Struct

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy


class FinishReason(StrEnum):
    """How a request ended; every accepted request ends in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    """waitingTimeoutMilliseconds passed before the first step, or the request's own deadline at any time."""


class AbortCause(StrEnum):
    """Why the server ends a request. STOP_STRING ends as `stop`, all others as `abort`."""

    STOP_STRING = "stop_string"
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Normalised and range-checked by the server: the engine never sees a bad value."""

    max_tokens: int
    seed: int
    """64-bit. Draws are keyed by (seed, position), so they do not depend on batch, chunking or preemption."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    min_tokens: int = 0
    """EOS and stop ids can't end the request before this many output tokens."""
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    """None: no logprobs. 0: of the sampled token only. k: of the k likeliest too."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


# ---------------------------------------------------------------------------------------------- to the engine


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may find whose KV blocks: requests of equal scopes, and no others.

    Set by the server from what it has checked itself, never from what a client says it is.
    """

    tenant: str = ""
    """Empty: tenants share, because the service says so or has none."""
    salt: str = ""
    """A client's own further division of its tenant."""
    adapter_digest: bytes = b""
    """Of the adapter's content, not of its name. Empty: the model as it is."""


SHARED_SCOPE = CacheScope()


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: str
    """Unique in the server's life; the client's own id never reaches the engine."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    """Lower runs earlier, inside its tenant and class."""
    _: KW_ONLY
    tenant: str = ""
    """Whose share of the service it uses. Empty: of those without a name, who share as one tenant."""
    request_class: RequestClass = RequestClass.INTERACTIVE
    deadline_s: float | None = None
    """When it ends with TIMEOUT if it has not ended before, on the clock of arrival_s; the earliest runs first."""
    cache_scope: CacheScope = SHARED_SCOPE


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    cause: AbortCause


@dataclass(frozen=True, slots=True)
class SetLimits:
    limits: SchedulerLimits
    epoch: int
    source: LimitsSource
    mode: ShrinkMode = ShrinkMode.DRAIN


@dataclass(frozen=True, slots=True)
class SetTenants:
    policy: TenantPolicy
    epoch: int
    """Its own count, apart from that of the limits."""


@dataclass(frozen=True, slots=True)
class SetTargets:
    """What steps are to keep to, as far as their plan can. The last one holds."""

    itl_s: float | None
    """Seconds between two tokens of a stream: prefill beside decodes is cut to it. None: it is not."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Abort what is left with AbortCause.SHUTDOWN, report it, exit.

    Draining is the server's: it stops submitting and waits.
    """


@dataclass(frozen=True, slots=True)
class Explain:
    """Ask what holds requests back; answered by one Explained, at the next iteration."""

    query_id: int
    request_ids: tuple[str, ...]


Command = Submit | Abort | SetLimits | SetTenants | SetTargets | Shutdown | Explain


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """First thing in the engine's mailbox: all it needs to start."""

    model_path: str
    """A HuggingFace directory (config.json and safetensors) or a GGUF file."""
    limits: SchedulerLimits
    envelope: Envelope
    block_size: int = 16
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16. auto: bfloat16 where the device has it natively, else float32."""
    device: str = "auto"
    """auto | cpu | cuda."""
    kv_cache_bytes: int | None = None
    """None: on CUDA by gpu_memory_utilization, on CPU a quarter of the memory limit, 4 GiB at most."""
    gpu_memory_utilization: float = 0.9
    num_threads: int | None = None
    """Intra-op threads on CPU. None: the container's CPU limit, else the CPUs this process may use."""
    enable_prefix_caching: bool = True


# -------------------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The model is loaded and the engine takes requests."""

    boot_id: str
    max_model_len: int
    """What the model and the envelope allow, whichever is less."""
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    limits: SchedulerLimits
    load_s: float
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine can't start or go on. `message` is for people: it names the field or path and the way out."""

    message: str
    fatal: bool = True
    """True: a restart will not help (bad model path, unknown architecture)."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(Struct, frozen=True, gc=False):
    """What one step brought to one request; with draft tokens there are several of them, in order."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop_token_ids member that ended it; None for EOS."""
    error: str = ""
    """Why it ended with ERROR or ABORT. With TIMEOUT: set if its own deadline passed, empty if it waited too long."""
    first_scheduled_s: float | None = None
    """When the request was first part of a step: a preemption does not reset it."""
    num_cached_tokens: int = 0
    """Prompt tokens that its first start found in the prefix cache."""
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they stand after a step, counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    oldest_waiting_s: float = 0.0
    """Of those that wait for their first step. The preempted don't: their client is reading already."""
    oldest_interactive_waiting_s: float = 0.0
    """Of those, of the class that somebody waits for."""
    num_blocks_total: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    """Held by nobody and free to be taken, but kept for the next request with the same prefix."""
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_steps: int = 0
    num_prefix_queried_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, each prompt once."""
    num_prefix_hit_tokens: int = 0
    """Of those, found."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One per step; when idle, one heartbeat a second without outputs."""

    time_s: float
    outputs: tuple[RequestOutput, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)
    step_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    epoch: int = 0
    """Epoch of the limits that this step obeyed."""
    effective: SchedulerLimits | None = None
    """Set when it differs from the last report's."""


class Hold(StrEnum):
    """Which limit holds a request back right now; those of the live limits have their wire names."""

    NOTHING = "nothing"
    """It is part of the next step."""
    QUEUE_ORDER = "queueOrder"
    """Others are before it, and nothing holds the first of them back."""
    MAX_NUM_SEQS = "maxNumSeqs"
    KV_LIMIT = "kvCacheUtilizationLimitPercent"
    """What it needs to come in does not fit beside what is in use. Blocks."""
    PEAK_KV = "peakKvEstimate"
    """There is room now, but not for all that run and it once their outputs have grown. Tokens."""
    PREFILL_LANES = "maxPartialPrefills"
    LONG_PREFILL_LANE = "longContextThresholdTokens"
    """A prompt above it waits for the one that is in prefill."""
    TOTAL_BUDGET = "maxNumBatchedTokens"
    PREFILL_BUDGET = "prefillTokenBudget"
    DECODE_BUDGET = "decodeTokenBudget"
    TENANT_CAP = "maxInFlight"
    """As many requests of its tenant run as its terms allow."""
    PREFIX_IN_FLIGHT = "prefixInFlight"
    """The next step computes the text that it begins with, for another request; it waits for those blocks."""
    ADAPTER_SLOTS = "maxAdapters"
    """Other adapters have all the slots, or its own gives one up."""
    GRAMMAR = "grammar"
    """The grammar of its output is not compiled yet."""
    ITL_SLACK = "itlSlack"
    """More prefill would make the step longer than the ITL target allows. The sentence has both times, in ms."""
    COOL_DOWN = "preemptionCoolDown"
    """Nobody comes in in the step of a preemption and the one after it."""
    OFFLINE_PAUSED = "offlinePaused"
    """The guard holds offline work back."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One live request, without a word of its prompt."""

    request_id: str
    state: str
    """`waiting` or `running`."""
    position: int | None
    """In the queue, 1 is first; None when it runs."""
    hold: Hold
    value: int | None
    """What is used or asked for, in the unit of `bound`; None where there is nothing to count."""
    bound: int | None
    held_at: str | None
    """Id of the request that is held back by it, when that is another one further ahead in the queue."""
    why: str
    """A sentence for people."""
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Explained:
    """Answer to an Explain; requests that are not live are missing."""

    query_id: int
    explanations: tuple[Explanation, ...]


Event = EngineReady | EngineFailed | StepReport | Explained
