"""Random mail for a scheduler, a runner that may fail, and requests as their clients see them."""

from collections.abc import Collection
from dataclasses import dataclass

import hypothesis.strategies as st

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import OutputForecast
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
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, ScheduledSeq, StepLoad, StepOutput
from guidevane_runtime.core.step_time import CostModel
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms

VOCAB_SIZE = 13
EOS_TOKEN_ID = 0
EOS_TOKEN_IDS = frozenset({EOS_TOKEN_ID})
MODEL_LEN = 60
TENANTS = ("", "a", "b", "c")
COSTS = CostModel(step_s=0.01, prefill_token_s=4e-4, decode_s=1e-3, kv_token_s=1e-5, prefill_pair_s=1e-6)
"""What steps take, when nothing holds them up."""
LESSONS = tuple(
    StepLoad(prefill, decodes, 20 * decodes + prefill, prefill * prefill)
    for decodes in range(8)
    for prefill in (0, 5, 20, 60, 0)
)
"""Steps enough to know that."""

# ------------------------------------------------------------------------------------------------------- the mail

WIDE = SchedulerLimits(
    max_num_seqs=8,
    max_num_batched_tokens=80,
    prefill_token_budget=80,
    decode_token_budget=8,
    prefill_chunk_size=40,
    max_partial_prefills=3,
    max_model_len=MODEL_LEN,
    max_prompt_tokens=MODEL_LEN,
    max_output_tokens=MODEL_LEN,
    kv_cache_utilization_limit_percent=100,
    max_queued_requests=10,
    max_queued_tokens=100,
    waiting_timeout_milliseconds=60_000,
    long_context_threshold_tokens=40,
)
"""Lets traffic get as far as to meet other traffic."""
TIGHTER: dict[str, list[int]] = {
    "max_num_seqs": [1, 2, 4],
    "max_num_batched_tokens": [1, 5, 20, 40],
    "prefill_token_budget": [1, 8, 40],
    "decode_token_budget": [1, 3],
    "prefill_chunk_size": [1, 4, 16],
    "max_partial_prefills": [1, 2],
    "max_model_len": [20, 40],
    "max_prompt_tokens": [20],
    "max_output_tokens": [1, 5],
    "kv_cache_utilization_limit_percent": [1, 50],
    "max_queued_requests": [1],
    "max_queued_tokens": [1],
    "waiting_timeout_milliseconds": [1000],
    "long_context_threshold_tokens": [1, 10, 20],
}
change_st = st.one_of([st.tuples(st.just(name), st.sampled_from(values)) for name, values in TIGHTER.items()])
limits_st = st.lists(change_st, max_size=6).map(lambda changes: WIDE.model_copy(update=dict(changes)))
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
ADAPTERS = tuple(CacheScope(adapter_digest=digest) for digest in (b"x", b"y", b"z"))
scope_st = st.sampled_from([*[CacheScope()] * 4, CacheScope(tenant="a"), CacheScope(salt="a"), *ADAPTERS])


class ScriptedGrammar:
    """Lets so many tokens of a text pass, then nothing but its end. Ready when somebody says so."""

    def __init__(self, num_free_tokens: int, *, is_ready: bool) -> None:
        self.num_free_tokens = num_free_tokens
        self.is_ready = is_ready
        self.error = ""
        self.accepted: list[int] = []

    @property
    def is_compiling(self) -> bool:
        return not (self.is_ready or self.error)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def masked(self, token_id: int) -> int:
        """What is drawn instead, as far as it has come."""
        return token_id if len(self.accepted) < self.num_free_tokens else EOS_TOKEN_ID


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
    num_free_tokens: int | None
    """That its grammar lets pass; None: it has none."""
    is_compiled: bool

    def grammar(self) -> ScriptedGrammar | None:
        if self.num_free_tokens is None:
            return None
        return ScriptedGrammar(self.num_free_tokens, is_ready=self.is_compiled)

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
class OfflinePause:
    """The guard's: terms that are the present ones, but for this."""

    is_on: bool


@dataclass(frozen=True)
class NewTarget:
    itl_s: float | None
    slowness: float
    """Steps take so many times what they cost from now on: some far too long to be learned from, or for ever."""


@dataclass(frozen=True)
class Compiled:
    """One of the compiles that go on is over."""

    place: int
    """Among them, and round again."""
    error: str


@dataclass(frozen=True)
class Pause:
    """Time passes, and with it deadlines."""

    seconds: float


Mail = Draft | Leave | NewLimits | NewTerms | OfflinePause | NewTarget | Compiled | Pause


def _terms(name: str) -> st.SearchStrategy[TenantTerms]:
    cap = st.sampled_from([None, None, 1, 2])
    return st.builds(TenantTerms, st.just(name), weight=st.integers(1, 4), max_in_flight=cap)


policy_st = st.builds(
    TenantPolicy,
    st.tuples(*map(_terms, TENANTS)),
    interactive_share=st.integers(1, 9),
    offline_share=st.integers(1, 9),
    bills_cached_tokens=st.booleans(),
    pauses_offline=st.sampled_from([False, False, True]),
)
ahead_st = st.sampled_from([-1, 0, 1, 1, 2])
draft_st = st.builds(
    Draft,
    prompt=prompt_st,
    params=params_st,
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(TENANTS),
    request_class=st.sampled_from(RequestClass),
    patience_s=st.sampled_from([None, None, None, 0.0, 0.03, 5.0, 40.0]),
    scope=scope_st,
    num_free_tokens=st.sampled_from([None, None, None, 0, 4, 30]),
    is_compiled=st.sampled_from([True, True, False]),
)
leave_st = st.builds(
    Leave,
    st.integers(-1, 8),
    st.sampled_from([AbortCause.CLIENT_GONE, AbortCause.CANCELLED, AbortCause.STOP_STRING]),
)
new_limits_st = st.builds(NewLimits, limits_st, st.sampled_from(ShrinkMode), ahead_st)
new_terms_st = st.builds(NewTerms, policy_st, ahead_st)
offline_pause_st = st.builds(OfflinePause, st.booleans())
new_target_st = st.builds(
    NewTarget, st.sampled_from([None, 1e-6, 0.02, 0.04, 0.1]), st.sampled_from([1.0, 1.0, 1.0, 0.2, 20.0])
)
compiled_st = st.builds(Compiled, st.integers(0, 8), st.sampled_from(["", "", "the schema is too large; split it"]))
pause_st = st.builds(Pause, st.sampled_from([0.01, 0.1, 1.0, 5.0, 31.0]))
surroundings_st = st.one_of(offline_pause_st, new_target_st, compiled_st)
"""What the guard, the machine and the compilers do."""
mail_st = st.one_of(leave_st, draft_st, new_limits_st, new_terms_st, surroundings_st, pause_st)

# ------------------------------------------------------------------------------------------------- runner and clients


class FixedForecast(OutputForecast):
    """Expects so much more of each output: the less, the more run together, and the more are preempted."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def num_more_tokens(self, num_so_far: int) -> int:
        return self._num_tokens


class SpoilingRunner(FakeRunner):
    """A runner some of whose rows come out wrong, and leave nonsense in the slots that they wrote."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.grammars: dict[str, ScriptedGrammar] = {}
        """Whose logits it masks, by request id."""

    def run(self, batch: ScheduledBatch, failing: Collection[int]) -> StepOutput:
        """`failing`: places in the batch."""
        output = self.execute(batch)
        sampled = list(output.sampled)
        for place, seq in enumerate(batch.seqs):
            if place in failing and seq.samples:
                self._spoil(seq)
                sampled[place] = SampledToken(0, error="logits are not finite")
            elif (drawn := sampled[place]) and (grammar := self.grammars.get(seq.request_id)):
                sampled[place] = SampledToken(grammar.masked(drawn.token_id))
        return StepOutput(tuple(sampled))

    def _spoil(self, seq: ScheduledSeq) -> None:
        for position in range(seq.start, seq.start + len(seq.token_ids)):
            block_id, offset = self._slot(seq, position)
            self._cache[block_id][offset] = 0


class Client:
    """One request as its client sees it, and what it must get."""

    def __init__(
        self,
        submit: Submit,
        grammar: ScriptedGrammar | None,
        limits: SchedulerLimits,
        pool: BlockPool,
        runner: FakeRunner,
    ) -> None:
        self.submit = submit
        self.grammar = grammar
        self.received: list[int] = []
        self.ends: list[FinishReason] = []
        self.is_failing = False
        num_prompt = len(submit.prompt_token_ids)
        room = min(limits.max_model_len, MODEL_LEN, pool.num_tokens + 1) - num_prompt
        self.can_run = room >= 1 and num_prompt + 1 <= pool.num_tokens and num_prompt <= limits.max_prompt_tokens
        num_tokens = min(submit.params.max_tokens, limits.max_output_tokens, max(room, 0))
        num_free = min(num_tokens, grammar.num_free_tokens) if grammar else num_tokens
        free = runner.continuation(submit.prompt_token_ids, num_free)
        whole = (*free, *[EOS_TOKEN_ID] * (num_tokens - num_free))
        self.expected, self.natural_end = cut_at_stop(whole, submit.params)
        self.aborted_as: AbortCause | None = None

    def has_passed(self, now_s: float) -> bool:
        """Its deadline."""
        return self.submit.deadline_s is not None and self.submit.deadline_s <= now_s

    def hear(self, output: RequestOutput, now_s: float) -> None:
        assert not self.ends, "an output after the terminal one"
        self.received += output.new_token_ids
        assert tuple(self.received) == self.expected[: len(self.received)]
        assert self.grammar is None or self.grammar.accepted == self.received
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.check_end(output, now_s)

    def check_end(self, output: RequestOutput, now_s: float) -> None:
        reason = output.finish_reason
        if self.grammar and self.grammar.error:
            assert not self.received and (reason is FinishReason.ERROR) == (output.error == self.grammar.error)
        else:
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
