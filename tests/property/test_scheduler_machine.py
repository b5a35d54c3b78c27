"""Random traffic, aborts and limits changes against the real scheduler and pool, with a runner whose KV cache tells.

Invariants I1 to I7, I10 and I15 of the runtime's design hold after every action. A failure prints the steps that lead
to it and a blob for `@reproduce_failure`. More of it: `HYPOTHESIS_EXAMPLES=2000 python -m pytest tests/property`.
"""

import os
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import MAX_PREEMPTIONS_ON_ESTIMATE
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    AbortCause,
    CacheScope,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SetLimits,
    Submit,
)
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, ScheduledSeq, StepOutput
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.scheduler import Scheduler

VOCAB_SIZE = 13
EOS_TOKEN_IDS = frozenset({0})
MODEL_LEN = 60

limits_st = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    prefill_token_budget=st.integers(1, 40),
    decode_token_budget=st.integers(1, 8),
    prefill_chunk_size=st.integers(1, 16),
    max_partial_prefills=st.integers(1, 3),
    max_model_len=st.integers(20, MODEL_LEN),
    max_prompt_tokens=st.just(MODEL_LEN),
    max_output_tokens=st.integers(1, MODEL_LEN),
    kv_cache_utilization_limit_percent=st.integers(1, 100),
    waiting_timeout_milliseconds=st.integers(1000, 60_000),
    long_context_threshold_tokens=st.integers(1, 40),
)

params_st = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, MODEL_LEN),
    seed=st.just(0),
    min_tokens=st.integers(0, 8),
    ignore_eos=st.booleans(),
    stop_token_ids=st.frozensets(st.integers(1, VOCAB_SIZE - 1), max_size=1),
)

PREFIXES = tuple(tuple((place * factor + 1) % VOCAB_SIZE for place in range(48)) for factor in (1, 5))
prompt_st = st.builds(
    lambda prefix, length, rest: (*prefix[:length], *rest) or prefix[:1],
    st.sampled_from(PREFIXES),
    st.sampled_from([0, 4, 6, 16, 17, 32, 48]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MODEL_LEN - 43),
)
"""Much of a prompt, or all of it, is often somebody else's too; some are too long to run."""
scope_st = st.sampled_from([CacheScope(), CacheScope(), CacheScope(tenant="a"), CacheScope(salt="a")])


Turns = dict[Request, tuple[int, int]]
"""Who ran before a step, and when each had its last turn."""


class SpoilingRunner(FakeRunner):
    """A runner some of whose rows come out wrong, and leave nonsense in the slots that they wrote."""

    def run(self, batch: ScheduledBatch, failing: frozenset[str]) -> StepOutput:
        output = self.execute(batch)
        sampled = list(output.sampled)
        for place, seq in enumerate(batch.seqs):
            if seq.request_id in failing and seq.samples:
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
        self.received: list[int] = []
        self.ends: list[FinishReason] = []
        self.is_failing = False
        num_prompt = len(submit.prompt_token_ids)
        room = min(limits.max_model_len, MODEL_LEN, pool.num_tokens + 1) - num_prompt
        self.can_run = room >= 1 and num_prompt + 1 <= pool.num_tokens
        num_tokens = min(submit.params.max_tokens, limits.max_output_tokens, max(room, 0))
        whole = runner.continuation(submit.prompt_token_ids, num_tokens)
        self.expected, self.natural_end = cut_at_stop(whole, submit.params)

    def hear(self, output: RequestOutput) -> None:
        assert not self.ends, "an output after the terminal one"
        self.received += output.new_token_ids
        assert tuple(self.received) == self.expected[: len(self.received)]
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.check_end(output)

    def check_end(self, output: RequestOutput) -> None:
        assert (output.finish_reason is FinishReason.ERROR) == (not self.can_run or self.is_failing)
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tuple(self.received), output.finish_reason) == (self.expected, self.natural_end)
        if output.finish_reason is FinishReason.TIMEOUT:
            assert not self.received and output.first_scheduled_s is None


def cut_at_stop(token_ids: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else EOS_TOKEN_IDS)
    for num_tokens, token_id in enumerate(token_ids, start=1):
        if token_id in ends and num_tokens >= params.min_tokens:
            return token_ids[:num_tokens], FinishReason.STOP
    return token_ids, FinishReason.LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 30),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        limits=limits_st,
        shares=st.sampled_from([True, True, False]),
    )
    def boot(self, num_blocks: int, block_size: int, limits: SchedulerLimits, shares: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = SpoilingRunner(num_blocks, block_size, VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            limits,
            max_model_len=MODEL_LEN,
            eos_token_ids=EOS_TOKEN_IDS,
            prefix_cache=PrefixCache(self.pool, is_enabled=shares),
        )
        self.clients: dict[str, Client] = {}
        self.now_s = 0.0
        self.num_shrink_orders = 0
        self.past_counters = (0, 0, 0, 0, 0)

    # ------------------------------------------------------------------------------------------------ actions

    @rule(prompt=prompt_st, params=params_st, priority=st.integers(-1, 1), scope=scope_st)
    def submit(self, prompt: tuple[int, ...], params: SamplingParams, priority: int, scope: CacheScope) -> None:
        submit = Submit(str(len(self.clients)), prompt, params, self.now_s, priority=priority, cache_scope=scope)
        self.clients[submit.request_id] = Client(submit, self.scheduler.limits.target, self.pool, self.runner)
        self.scheduler.submit(submit)
        self.listen()

    @rule(number=st.integers(0, 40), cause=st.sampled_from([AbortCause.CLIENT_GONE, AbortCause.CANCELLED]))
    def abort(self, number: int, cause: AbortCause) -> None:
        """Living, dead and unheard of alike."""
        self.scheduler.abort(str(number), cause)
        self.listen()
        assert str(number) not in self.clients or self.clients[str(number)].ends

    @rule(limits=limits_st, mode=st.sampled_from(ShrinkMode), ahead=st.integers(-1, 2))
    def set_limits(self, limits: SchedulerLimits, mode: ShrinkMode, ahead: int) -> None:
        epoch = self.scheduler.limits.epoch
        is_newer = self.scheduler.set_limits(SetLimits(limits, epoch + ahead, LimitsSource.SPEC, mode))
        assert is_newer == (ahead > 0) and self.scheduler.limits.epoch == max(epoch, epoch + ahead)
        self.num_shrink_orders += is_newer and mode is ShrinkMode.PREEMPT

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(())

    @precondition(lambda self: self.scheduler.has_work)
    @rule(aborted=st.lists(st.integers(0, 40), max_size=4))
    def step_with_aborts_in_flight(self, aborted: list[int]) -> None:
        self.step(tuple(map(str, aborted)))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(failing=st.sets(st.integers(0, 40), max_size=3))
    def step_with_bad_rows(self, failing: set[int]) -> None:
        self.step((), frozenset(map(str, failing)))

    def step(self, aborted: tuple[str, ...], failing: frozenset[str] = frozenset()) -> None:
        before = {request: request.last_turn for request in self.scheduler.running}
        batch = self.scheduler.schedule(self.now_s)
        self.listen()
        self.check_plan(batch, before)
        for request_id in aborted:
            self.scheduler.abort(request_id, AbortCause.CLIENT_GONE)
            self.check_blocks()
            # A23, A24: what the step reads and writes is nobody else's before it is over.
            assert all(self.pool.num_refs(block_id) for seq in batch.seqs for block_id in seq.block_ids)
        output = self.runner.run(batch, failing)
        for seq, sampled in zip(batch.seqs, output.sampled, strict=True):
            self.clients[seq.request_id].is_failing |= bool(sampled and sampled.error)
        self.scheduler.apply(batch, output)
        self.listen()

    def listen(self) -> None:
        for output in self.scheduler.take_outputs():
            self.clients[output.request_id].hear(output)

    # --------------------------------------------------------------------------------------------- invariants

    def check_plan(self, batch: ScheduledBatch, before: Turns) -> None:
        limits, running = self.scheduler.limits.target, self.scheduler.running
        decodes = [seq for seq in batch.seqs if seq.is_decode]
        num_prefill = batch.num_tokens - len(decodes)
        # I4
        assert len(decodes) <= limits.decode_token_budget
        assert num_prefill <= limits.prefill_token_budget
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert all(len(seq.token_ids) <= limits.prefill_chunk_size for seq in batch.seqs if not seq.is_decode)
        assert len(running) <= max(limits.max_num_seqs, len(before))
        assert list(batch.seqs[: len(decodes)]) == decodes
        # I6, A27, C1
        assert bool(batch.seqs) == self.scheduler.has_work
        self.check_turns(batch, running, before)
        self.check_lanes(batch, running, before)
        self.check_writes(batch)

    def check_turns(self, batch: ScheduledBatch, running: tuple[Request, ...], before: Turns) -> None:
        """I7: a decode is left out only when the budget is spent, and then the others' last turns were longer ago."""
        limits = self.scheduler.limits.target
        decodes = {seq.request_id for seq in batch.seqs if seq.is_decode}
        left_out = [r for r in running if r.num_uncomputed_tokens == 1 and r.request_id not in decodes]
        if left_out:
            assert len(decodes) == min(limits.decode_token_budget, limits.max_num_batched_tokens)
            served = [turn for request, turn in before.items() if request.request_id in decodes]
            assert max(served) <= min(before[request] for request in left_out)

    def check_lanes(self, batch: ScheduledBatch, running: tuple[Request, ...], before: Turns) -> None:
        limits = self.scheduler.limits.target
        planned = {seq.request_id: len(seq.token_ids) for seq in batch.seqs}
        partial = {r for r in running if r.num_uncomputed_tokens - planned.get(r.request_id, 0) > 1}
        long = {r for r in partial if r.num_prompt_tokens > limits.long_context_threshold_tokens}
        if partial - set(before):
            assert len(partial) <= limits.max_partial_prefills
        if long - set(before):
            assert len(long) == 1

    def check_writes(self, batch: ScheduledBatch) -> None:
        """I2, A24, B13: a block that is written has one owner and can't be found; every position has its slot."""
        size = self.pool.block_size
        for seq in batch.seqs:
            written = seq.block_ids[seq.start // size : self.pool.num_blocks_for(seq.start + len(seq.token_ids))]
            assert all(self.pool.num_refs(block_id) == 1 for block_id in written)
            assert not any(self.pool.is_published(block_id) for block_id in written)
        assert all(len(seq.block_ids) * self.pool.block_size >= seq.start + len(seq.token_ids) for seq in batch.seqs)

    def check_blocks(self) -> None:
        """I1, I2: a block is free, or in as many tables as it says; what is in several is full and can be found."""
        pool, live = self.pool, self.scheduler._live.values()
        tables = [request.blocks for request in live] + self.scheduler._fenced
        held = Counter(block_id for table in tables for block_id in table.block_ids)
        assert all(pool.num_refs(block_id) == held[block_id] for block_id in range(pool.num_blocks + 1))
        free = [*pool._blank, *pool._cached]
        assert sorted([*free, *held]) == list(range(1, pool.num_blocks + 1))
        assert (pool.num_used, pool.num_free, pool.num_cached_free) == (len(held), len(free), len(pool._cached))
        assert all(pool.is_published(block_id) for block_id in pool._cached)
        assert not any(map(pool.is_published, pool._blank))
        for request in live:
            num_full = request.num_computed_tokens // pool.block_size
            assert all(held[block_id] == 1 for block_id in request.blocks.block_ids[num_full:])

    def check_scopes(self) -> None:
        """I15: whoever holds a block is of one scope."""
        scopes: dict[int, CacheScope] = {}
        for request in self.scheduler._live.values():
            scope = request.submit.cache_scope
            assert all(scopes.setdefault(block_id, scope) == scope for block_id in request.blocks.block_ids)

    @invariant()
    def blocks_and_requests_are_consistent(self) -> None:
        self.check_blocks()
        self.check_scopes()
        assert not self.scheduler._fenced
        for request in self.scheduler._live.values():
            # I5
            assert 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens
            assert request.num_published_blocks * self.pool.block_size <= request.num_computed_tokens
            forced = self.num_shrink_orders
            assert request.num_preemptions <= MAX_PREEMPTIONS_ON_ESTIMATE + 1 + forced

    @invariant()
    def gauges_follow_and_counters_never_fall(self) -> None:
        stats = self.scheduler.stats(self.now_s)
        unfinished = [client for client in self.clients.values() if not client.ends]
        assert stats.num_running + stats.num_waiting == len(unfinished)
        assert stats.num_blocks_used == self.pool.num_used
        assert stats.num_waiting_tokens == sum(request.num_tokens for request in self.scheduler._waiting)
        hits = (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens)
        assert hits[1] <= hits[0]
        counters = (stats.num_steps, stats.num_preemptions, stats.num_recomputed_tokens, *hits)
        assert all(new >= old for new, old in zip(counters, self.past_counters, strict=True))
        self.past_counters = counters

    def teardown(self) -> None:
        """I3: whatever is left runs to its end in a bounded number of steps; then nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(sum(len(client.expected) + MODEL_LEN for client in self.clients.values()) * 4):
            if not self.scheduler.has_work:
                break
            self.step(())
        assert all(len(client.ends) == 1 for client in self.clients.values())
        stats = self.scheduler.stats(self.now_s)
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.num_blocks_used) == (0, 0, 0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "500")),
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
)
