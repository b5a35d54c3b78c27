"""SchedulerLimits: the live gates of a runtime. One class for the CR, the admin route, status and the scheduler.

Envelope and limits are apart: the envelope is start-up capacity (a change is a rollout), limits are live
(a change is a PATCH that takes effect between two steps).
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_TOKENS = 1 << 22
"""Upper bound of every token count in the API: 4 Mi tokens."""

Count = Annotated[int, Field(ge=1, le=65536)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Percent = Annotated[int, Field(ge=1, le=100)]


class ApiModel(BaseModel):
    """Base of everything on the wire: camelCase there, snake_case in Python, unknown keys refused, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class PartialLimits(ApiModel):
    """Some of the live limits; a field left out keeps its value (in a PATCH) or its default (in a spec)."""

    max_num_seqs: Count | None = None
    """Requests running at once, at most. Default 32, or envelope.maxNumSeqs if that is smaller."""
    max_num_batched_tokens: Tokens | None = None
    """Tokens in one step, prefill and decode together, at most. Default 4096, or envelope.maxNumBatchedTokens if that
    is smaller."""
    prefill_token_budget: Tokens | None = None
    """Prefill tokens in one step, at most. Default: maxNumBatchedTokens."""
    decode_token_budget: Tokens | None = None
    """Decode tokens in one step, at most; fewer than running means round-robin. Default: maxNumBatchedTokens."""
    prefill_chunk_size: Tokens | None = None
    """Prefill tokens of one request in one step, at most: small favours ITL, large favours TTFT. Default 2048, or
    maxNumBatchedTokens if that is smaller."""
    max_partial_prefills: Count | None = None
    """Requests in mid-prefill at once, at most. Default 2."""
    max_model_len: Tokens | None = None
    """Prompt and output tokens of one request together, at most. Default 8192, or envelope.maxModelLen if that is
    smaller."""
    max_prompt_tokens: Tokens | None = None
    """Prompt tokens of one request, at most. Default: maxModelLen."""
    max_output_tokens: Tokens | None = None
    """Output tokens of one request, at most. Default: maxModelLen."""
    kv_cache_utilization_limit_percent: Percent | None = None
    """Share of KV-cache blocks in use, in percent, above which no request is admitted from the queue. Default 75."""
    max_queued_requests: Count | None = None
    """Requests waiting, at most; above it 503 with Retry-After. Default 256."""
    max_queued_tokens: Tokens | None = None
    """Prompt tokens waiting, at most; above it 503 with Retry-After. Default 262144."""
    waiting_timeout_milliseconds: Annotated[int, Field(ge=1, le=86_400_000)] | None = None
    """Longest wait before the first step, in milliseconds; then 504. Default 30000."""
    long_context_threshold_tokens: Tokens | None = None
    """A prompt of more tokens is long: at most one long prompt is in prefill at a time. Default 4096."""

    def given(self) -> dict[str, int]:
        """The fields that are set, by their Python names."""
        return self.model_dump(exclude_none=True)


class SchedulerLimits(ApiModel):
    """All live limits, resolved: what a scheduler obeys in one step. Defaults are the conservative baseline."""

    max_num_seqs: Count = 32
    max_num_batched_tokens: Tokens = 4096
    prefill_token_budget: Tokens = 4096
    decode_token_budget: Tokens = 4096
    prefill_chunk_size: Tokens = 2048
    max_partial_prefills: Count = 2
    max_model_len: Tokens = 8192
    max_prompt_tokens: Tokens = 8192
    max_output_tokens: Tokens = 8192
    kv_cache_utilization_limit_percent: Percent = 75
    max_queued_requests: Count = 256
    max_queued_tokens: Tokens = 262144
    waiting_timeout_milliseconds: Annotated[int, Field(ge=1, le=86_400_000)] = 30000
    long_context_threshold_tokens: Tokens = 4096

    @classmethod
    def resolve(cls, partial: PartialLimits, envelope: "Envelope") -> Self:
        """Fill what `partial` leaves out: dependent defaults first, then the baseline, clipped to the envelope.

        Only defaults are clipped. A value that was given and exceeds the envelope is an error for
        `limit_violations`, never a silent clamp.
        """
        given = partial.given()
        batched = given.get("max_num_batched_tokens", min(4096, envelope.max_num_batched_tokens))
        model_len = given.get("max_model_len", min(8192, envelope.max_model_len or 8192))
        baseline = {
            "max_num_seqs": min(32, envelope.max_num_seqs),
            "max_num_batched_tokens": batched,
            "prefill_token_budget": batched,
            "decode_token_budget": batched,
            "prefill_chunk_size": min(2048, batched),
            "max_model_len": model_len,
            "max_prompt_tokens": model_len,
            "max_output_tokens": model_len,
        }
        return cls(**{**baseline, **given})

    def merged(self, partial: PartialLimits) -> Self:
        """These limits with the given fields replaced."""
        return self.model_copy(update=partial.given())


class Envelope(ApiModel):
    """Start-up capacity of a runtime: what its memory and its kernels were sized for. A change is a rollout."""

    max_num_seqs: Count = 256
    """Upper bound of limits.maxNumSeqs, and the largest decode batch that kernels are prepared for."""
    max_num_batched_tokens: Tokens = 8192
    """Upper bound of limits.maxNumBatchedTokens: the workspace of one step is sized for it."""
    max_model_len: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Upper bound of limits.maxModelLen. 0: what the model's own configuration says."""


ENVELOPE_FIELDS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
"""Fields that limits and envelope share."""


def limit_violations(limits: SchedulerLimits, envelope: Envelope) -> dict[str, str]:
    """Why `limits` can't be obeyed: wire name of the field -> a sentence with value, bound and the way out."""
    found: dict[str, str] = {}
    for name in ENVELOPE_FIELDS:
        value, bound = getattr(limits, name), getattr(envelope, name)
        if bound and value > bound:
            wire = to_camel(name)
            found[wire] = (
                f"{wire} is {value}, above envelope.{wire} {bound}; raise the envelope (a rollout) or lower the limit"
            )
    for name in ("prefill_chunk_size", "prefill_token_budget", "decode_token_budget"):
        value = getattr(limits, name)
        if value > limits.max_num_batched_tokens:
            wire = to_camel(name)
            found[wire] = (
                f"{wire} is {value}, above maxNumBatchedTokens {limits.max_num_batched_tokens}; "
                "lower it or raise maxNumBatchedTokens"
            )
    for name in ("max_prompt_tokens", "max_output_tokens"):
        value = getattr(limits, name)
        if value > limits.max_model_len:
            wire = to_camel(name)
            found[wire] = f"{wire} is {value}, above maxModelLen {limits.max_model_len}; lower it or raise maxModelLen"
    return found
