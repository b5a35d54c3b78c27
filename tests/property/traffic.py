"""Random mail for a scheduler, a runner that may fail, and requests as their clients see them."""

from collections.abc import Collection
from dataclasses import dataclass

import hypothesis.strategies as st

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    AbortCause,
    CacheScope,
    FinishReason,
    RequestOutput,
    SamplingParams,
    Submit,
)
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, ScheduledSeq, StepOutput
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms

VOCAB_SIZE = 13
EOS_TOKEN_IDS = frozenset({0})
MODEL_LEN = 60
TENANTS = ("", "a", "b", "c")

# ------------------------------------------------------------------------------------------------------- the mail

# Most values let much of the traffic get as far as to meet other traffic; some are extreme.
limits_st = st.builds(
    SchedulerLimits,
    max_num_seqs=st.sampled_from([1, 2, 4, 8, 8]),
    max_num_batched_tokens=st.sampled_from([1, 5, 20, 40, 80, 80]),
    prefill_token_budget=st.sampled_from([1, 8, 40, 80, 80]),
    decode_token_budget=st.sampled_from([1, 3, 8, 8]),
    prefill_chunk_size=st.sampled_from([1, 4, 16, 40, 40]),
    max_partial_prefills=st.integers(1, 3),
    max_model_len=st.sampled_from([20, 40, MODEL_LEN, MODEL_LEN]),
    max_prompt_tokens=st.sampled_from([20, MODEL_LEN, MODEL_LEN]),
    max_output_tokens=st.sampled_from([1, 5, MODEL_LEN, MODEL_LEN]),
    kv_cache_utilization_limit_percent=st.sampled_from([1, 50, 100, 100, 100]),
    max_queued_requests=st.integers(1, 10),
    max_queued_tokens=st.integers(1, 100),
    waiting_timeout_milliseconds=st.sampled_from([1000, 60_000, 60_000]),
    long_context_threshold_tokens=st.sampled_from([1, 10, 20, 40, 40]),
)
params_st = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 3, 10, 25, 25, MODEL_LEN]),
    seed=st.just(0),
    min_tokens=st.sampled_from([0, 0, 8]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(), frozenset({3})]),
)
PREFIXES = tuple(tuple((place * factor + 1) % VOCAB_SIZE for place in range(48)) for factor in (1, 5))
prompt_st = st.builds(
    lambda prefix, length, rest: (*prefix[:length], *rest) or prefix[:1],
    st.sampled_from(PREFIXES),
    st.sampled_from([0, 2, 4, 8, 8, 12, 16, 17, 32, 48]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
)
"""Much of a prompt, or all of it, is often somebody else's too; some are too long for some limits or pools."""
scope_st = st.sampled_from([CacheScope(), CacheScope(), CacheScope(tenant="a"), CacheScope(salt="a")])


@dataclass(frozen=True)
class Draft:
    """A request before it has an id and an arrival."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    tenant: str
    request_class: RequestClass
    patience_s: float | None
    """From arrival to deadline."""
    scope: CacheScope

    def submit(self, request_id: str, now_s: float) -> Submit:
        return Submit(
            request_id,
            self.prompt,
            self.params,
            now_s,
            self.priority,
            tenant=self.tenant,
            request_class=self.request_class,
            deadline_s=None if self.patience_s is None else now_s + self.patience_s,
            cache_scope=self.scope,
        )


@dataclass(frozen=True)
class Leave:
    """An abort of one of the last requests, living or dead, or of one unheard of."""

    back: int
    """How many came after it; below 0 nobody has that id."""
    cause: AbortCause


@dataclass(frozen=True)
class NewLimits:
    limits: SchedulerLimits
    mode: ShrinkMode
    ahead: int
    """Of the present epoch; stale when below 1."""


@dataclass(frozen=True)
class NewTerms:
    policy: TenantPolicy
    ahead: int


@dataclass(frozen=True)
class Pause:
    """Time passes, and with it deadlines."""

    seconds: float


Mail = Draft | Leave | NewLimits | NewTerms | Pause


def _terms(name: str) -> st.SearchStrategy[TenantTerms]:
    cap = st.sampled_from([None, None, 1, 2])
    return st.builds(TenantTerms, st.just(name), weight=st.integers(1, 4), max_in_flight=cap)


policy_st = st.builds(
    TenantPolicy,
    st.tuples(*map(_terms, TENANTS)),
    interactive_share=st.integers(1, 9),
    offline_share=st.integers(1, 9),
    bills_cached_tokens=st.booleans(),
)
ahead_st = st.sampled_from([-1, 0, 1, 1, 2])
draft_st = st.builds(
    Draft,
    prompt=prompt_st,
    params=params_st,
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(TENANTS),
    request_class=st.sampled_from(RequestClass),
    patience_s=st.sampled_from([None, None, None, 0.0, 5.0, 40.0]),
    scope=scope_st,
)
leave_st = st.builds(
    Leave,
    st.integers(-1, 8),
    st.sampled_from([AbortCause.CLIENT_GONE, AbortCause.CANCELLED, AbortCause.STOP_STRING]),
)
new_limits_st = st.builds(NewLimits, limits_st, st.sampled_from(ShrinkMode), ahead_st)
new_terms_st = st.builds(NewTerms, policy_st, ahead_st)
pause_st = st.builds(Pause, st.sampled_from([0.01, 0.1, 1.0, 5.0, 31.0]))
mail_st = st.one_of(leave_st, draft_st, new_limits_st, new_terms_st, pause_st)

# ------------------------------------------------------------------------------------------------- runner and clients


class SpoilingRunner(FakeRunner):
    """A runner some of whose rows come out wrong, and leave nonsense in the slots that they wrote."""

    def run(self, batch: ScheduledBatch, failing: Collection[int]) -> StepOutput:
        """`failing`: places in the batch."""
        output = self.execute(batch)
        sampled = list(output.sampled)
        for place, seq in enumerate(batch.seqs):
            if place in failing and seq.samples:
                self._spoil(seq)
                sampled[place] = SampledToken(0, error="logits are not finite")
        return StepOutput(tuple(sampled))

    def _spoil(self, seq: ScheduledSeq) -> None:
        for position in range(seq.start, seq.start + len(seq.token_ids)):
            block_id, offset = self._slot(seq, position)
            self._cache[block_id][offset] = 0


class Client:
    """One request as its client sees it, and what it must get."""

    def __init__(self, submit: Submit, limits: SchedulerLimits, pool: BlockPool, runner: FakeRunner) -> None:
        self.submit = submit
        self.received: list[int] = []
        self.ends: list[FinishReason] = []
        self.is_failing = False
        num_prompt = len(submit.prompt_token_ids)
        room = min(limits.max_model_len, MODEL_LEN, pool.num_tokens + 1) - num_prompt
        self.can_run = room >= 1 and num_prompt + 1 <= pool.num_tokens and num_prompt <= limits.max_prompt_tokens
        num_tokens = min(submit.params.max_tokens, limits.max_output_tokens, max(room, 0))
        whole = runner.continuation(submit.prompt_token_ids, num_tokens)
        self.expected, self.natural_end = cut_at_stop(whole, submit.params)
        self.aborted_as: AbortCause | None = None

    def has_passed(self, now_s: float) -> bool:
        """Its deadline."""
        return self.submit.deadline_s is not None and self.submit.deadline_s <= now_s

    def hear(self, output: RequestOutput, now_s: float) -> None:
        assert not self.ends, "an output after the terminal one"
        self.received += output.new_token_ids
        assert tuple(self.received) == self.expected[: len(self.received)]
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.check_end(output, now_s)

    def check_end(self, output: RequestOutput, now_s: float) -> None:
        reason = output.finish_reason
        assert (reason is FinishReason.ERROR) == (not self.can_run or self.is_failing)
        if reason is FinishReason.TIMEOUT:
            assert self.has_passed(now_s) or not (self.received or output.first_scheduled_s is not None)
        elif reason is FinishReason.ABORT:
            assert self.aborted_as is not None
        elif self.aborted_as is AbortCause.STOP_STRING:
            assert reason is FinishReason.STOP
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tuple(self.received), reason) == (self.expected, self.natural_end)


def cut_at_stop(token_ids: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else EOS_TOKEN_IDS)
    for num_tokens, token_id in enumerate(token_ids, start=1):
        if token_id in ends and num_tokens >= params.min_tokens:
            return token_ids[:num_tokens], FinishReason.STOP
    return token_ids, FinishReason.LENGTH
