"""The border between scheduler and model: an immutable plan in, sampled tokens out.

One ScheduledSeq and one SampledToken are made per running request and step. As msgspec structs they cost a tenth of
frozen dataclasses; gc=False: they can't be part of a cycle, so the garbage collector need not look at them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec import Struct

from guidevane_runtime.core.messages import SamplingParams, TokenLogprobs


class TokenHistory:
    """Tokens of one request, prompt first, for its penalties. It only grows, and lives as long as the request does.

    The sampler keeps its counts by it, weakly: each token is counted once, and nothing is left of a request that ended.
    """

    __slots__ = ("__weakref__", "num_prompt_tokens", "token_ids")

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens


class ScheduledSeq(Struct, frozen=True, gc=False):
    """One request's part of a step.

    # [0, start)                    in the KV cache already
    # [start, start + len(tokens))  this step
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Tokens to compute in this step, at least one."""
    start: int
    """num_computed_tokens before the step: position of token_ids[0]."""
    block_ids: tuple[int, ...]
    """Block table, long enough for start + len(token_ids) tokens."""
    samples: bool
    """Whether the last token's logits are sampled: it is the last known token of the request."""
    params: SamplingParams
    history: TokenHistory | None = None
    """Set when params has penalties. Of it, [0, start + len(token_ids)) is what this step knows."""
    num_output_tokens: int = 0
    """Tokens generated so far: min_tokens counts them."""

    @property
    def is_decode(self) -> bool:
        return self.samples and len(self.token_ids) == 1


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Decodes come first; sequences are in the order in which the runner lays out its tokens."""

    step: int
    seqs: tuple[ScheduledSeq, ...]
    epoch: int
    """Epoch of the limits that it was planned under."""
    num_drafts: Mapping[str, int] = field(default_factory=dict)
    """By request id, of decodes that carry drafts: how many of its last tokens are guesses, to be verified."""

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self.seqs)


class StepLoad(NamedTuple):
    """What one step computes and reads: all that its time depends on."""

    num_prefill_tokens: int
    num_decodes: int
    """Decode tokens, drafts included."""
    num_kv_tokens: int
    """Tokens of context, summed over the sequences of the step, its own tokens included."""
    num_prefill_pairs: int
    """Query tokens times context, summed over prefills."""


def load_of(batch: ScheduledBatch) -> StepLoad:
    """Measure a plan. One pass: it is done once per step."""
    prefill = decodes = kv = pairs = 0
    for seq in batch.seqs:
        length = len(seq.token_ids)
        context = seq.start + length
        kv += context
        if (length == 1 and seq.samples) or seq.request_id in batch.num_drafts:
            decodes += length
        else:
            prefill += length
            pairs += length * context
    return StepLoad(prefill, decodes, kv, pairs)


class SampledToken(Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """Set when this row can't be sampled (say, non-finite logits): its request ends with it, the others go on."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to `batch.seqs[i]`; None where the sequence does not sample."""

    sampled: tuple[SampledToken | None, ...]
    accepted: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    """By request id: its drafts up to the first that the model would not have drawn, each as the model drew it.
    `sampled` has the token after them. With num_drafts only."""

    def drawn(self, request_id: str, sampled: SampledToken | None) -> tuple[SampledToken, ...]:
        """All that a verified sequence brought, in order. Of a row that can't be sampled, only that."""
        assert sampled, "a sequence with drafts samples"
        return (sampled,) if sampled.error else (*self.accepted.get(request_id, ()), sampled)


class ModelRunner(Protocol):
    """Runs one step. A fake one drives the scheduler in tests and in the simulator."""

    def execute(self, batch: ScheduledBatch) -> StepOutput: ...
