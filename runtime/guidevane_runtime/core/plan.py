"""The border between scheduler and model: an immutable plan in, sampled tokens out."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from guidevane_runtime.core.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
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
    output_token_ids: tuple[int, ...] = ()
    """Tokens generated so far, for penalties; empty when params has none."""
    prompt_token_ids: tuple[int, ...] = ()
    """For repetition_penalty; empty when params has none."""
    num_output_tokens: int = 0
    """Tokens generated so far, always set: min_tokens counts them."""

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

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self.seqs)


class StepLoad(NamedTuple):
    """What one step computes and reads: all that its time depends on."""

    num_prefill_tokens: int
    num_decodes: int
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
        if length == 1 and seq.samples:
            decodes += 1
        else:
            prefill += length
            pairs += length * context
    return StepLoad(prefill, decodes, kv, pairs)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """Set when this row can't be sampled (say, non-finite logits): its request ends with it, the others go on."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to `batch.seqs[i]`; None where the sequence does not sample."""

    sampled: tuple[SampledToken | None, ...]


class ModelRunner(Protocol):
    """Runs one step. A fake one drives the scheduler in tests and in the simulator."""

    def execute(self, batch: ScheduledBatch) -> StepOutput: ...
