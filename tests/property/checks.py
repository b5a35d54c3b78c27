"""What must hold of one planned step, told from outside: from the plan, the limits and who ran and waited before.

Numbers I1 to I16 are those of the invariants in docs/testing.md.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import Explanation, Hold, Submit
from guidevane_runtime.core.plan import ScheduledBatch, load_of
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.step_time import CostModel
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy

ADAPTER_PATIENCE_S = 2.0
NUM_UNCUT_TOKENS = 16
"""Of prefill in one step, whatever the ITL target."""


class House(NamedTuple):
    """What the scheduler was made with."""

    min_awaited_tokens: int | None
    """Text that is worth waiting for; None without a prefix cache."""
    max_adapters: int


class Before(NamedTuple):
    """The scheduler before it planned the step."""

    turns: dict[Request, tuple[int, int]]
    """Who ran, and when each had its last turn."""
    num_preemptions: int
    num_steps: int
    itl_s: float | None
    costs: CostModel | None
    """What it knows of step times."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Before":
        turns = {request: request.last_turn for request in scheduler.running}
        stats, slack = scheduler.stats(0.0), scheduler._itl_slack
        return cls(turns, stats.num_preemptions, stats.num_steps, slack.target_s, slack._times.costs)


class Step:
    """One planned step of a scheduler, before it is applied."""

    def __init__(self, scheduler: Scheduler, batch: ScheduledBatch, before: Before, now_s: float, house: House) -> None:
        self.scheduler = scheduler
        self.batch = batch
        self.before = before
        self.now_s = now_s
        self.house = house
        self.limits = scheduler.limits.target
        self.running = tuple(scheduler.running)
        self.waiting = tuple(scheduler.waiting)
        planned = {seq.request_id: len(seq.token_ids) for seq in batch.seqs}
        self.in_prefill = [r for r in self.running if r.num_uncomputed_tokens > 1 and r.request_id in planned]
        self.partial = [r for r in self.running if r.num_uncomputed_tokens - planned.get(r.request_id, 0) > 1]
        self.newcomers = [r for r in self.running if r not in before.turns]
        self.has_prefill = any(r in before.turns and r.num_uncomputed_tokens > 1 for r in self.running)
        """Whether one was in progress before."""
        self.num_decodes = sum(seq.is_decode for seq in batch.seqs)
        self.num_prefill_tokens = batch.num_tokens - self.num_decodes
        self.adapters = {request.adapter for request in self.running} - {b""}
        self.has_preempted = scheduler.stats(0.0).num_preemptions > before.num_preemptions

    def check(self, policy: TenantPolicy, cool_until: int) -> None:
        """cool_until: the last step in which nobody comes in beside others, because of a preemption."""
        self.check_budgets()
        self.check_turns()
        self.check_lanes()
        self.check_writes()
        self.check_times()
        self.check_caps(policy)
        self.check_pause(policy)
        self.check_adapters_and_grammars()
        self.check_slack()
        self.check_places()
        if self.before.num_steps >= cool_until and not self.has_preempted:
            self.check_work_conservation(policy)

    def check_budgets(self) -> None:
        """I4. I6, A27, C1: whoever waits or runs, something is in the step."""
        limits, batch = self.limits, self.batch
        assert self.num_decodes <= limits.decode_token_budget
        assert self.num_prefill_tokens <= limits.prefill_token_budget
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert all(len(seq.token_ids) <= limits.prefill_chunk_size for seq in batch.seqs if not seq.is_decode)
        assert len(self.running) <= max(limits.max_num_seqs, len(self.before.turns))
        assert all(seq.is_decode for seq in batch.seqs[: self.num_decodes])
        assert bool(batch.seqs) == self.scheduler.has_work

    def check_turns(self) -> None:
        """I7: a decode is left out only when the budget is spent, and then the others' last turns were longer ago."""
        turns = self.before.turns
        decodes = {seq.request_id for seq in self.batch.seqs if seq.is_decode}
        left_out = [r for r in self.running if r.num_uncomputed_tokens == 1 and r.request_id not in decodes]
        if left_out:
            assert len(decodes) == min(self.limits.decode_token_budget, self.limits.max_num_batched_tokens)
            served = [turn for request, turn in turns.items() if request.request_id in decodes]
            assert max(served) <= min(turns[request] for request in left_out)

    def check_lanes(self) -> None:
        if not set(self.partial) <= set(self.before.turns):
            assert len(self.partial) <= self.limits.max_partial_prefills
        long = set(filter(self._is_long, self.partial))
        if not long <= set(self.before.turns):
            assert len(long) == 1

    def check_writes(self) -> None:
        """I2, A24, B13: a block that is written has one owner and can't be found; every position has its slot."""
        pool, size = self.scheduler.pool, self.scheduler.pool.block_size
        for seq in self.batch.seqs:
            end = seq.start + len(seq.token_ids)
            assert len(seq.block_ids) * size >= end
            written = seq.block_ids[seq.start // size : pool.num_blocks_for(end)]
            assert all(pool.num_refs(block_id) == 1 and not pool.is_published(block_id) for block_id in written)

    def check_times(self) -> None:
        """I16: nobody is in a step after its deadline, and nobody starts after it waited too long."""
        timeout_s = self.limits.waiting_timeout_milliseconds / 1000
        for request in self.running:
            deadline_s = request.submit.deadline_s
            assert deadline_s is None or deadline_s > self.now_s
            if request in self.newcomers and request.num_preemptions == 0:
                assert self.now_s - request.submit.arrival_s <= timeout_s + 1e-6

    def check_caps(self, policy: TenantPolicy) -> None:
        """A cap that shrank drains, so what counts is that nobody comes in above it."""
        for tenant in {request.submit.tenant for request in self.newcomers}:
            cap = policy.terms_of(tenant).max_in_flight
            assert cap is None or self._running_of(tenant) <= cap

    def check_pause(self, policy: TenantPolicy) -> None:
        """While the guard pauses it, offline work begins in an engine that would idle, one by one."""
        if policy.pauses_offline and any(map(_is_offline, self.newcomers)):
            assert len(self.running) == 1

    def check_adapters_and_grammars(self) -> None:
        """Adapters in use have their slots. Nobody runs without its grammar, nor waits for one that will never be."""
        assert len(self.adapters) <= self.house.max_adapters
        assert all(request.grammar is None or request.grammar.is_ready for request in self.running)
        assert not any(request.grammar.error for request in self.waiting if request.grammar)
        assert not any(request.blocks.block_ids for request in self.waiting)

    def check_slack(self) -> None:
        """Prefill beside decodes is what the ITL target, or a nearer deadline of a last token, has time for."""
        before, ran_before = self.before, {request.request_id for request in self.before.turns}
        decodes = [seq for seq in self.batch.seqs if seq.is_decode and seq.request_id in ran_before]
        if before.itl_s is None or before.costs is None or not decodes or self.num_prefill_tokens <= NUM_UNCUT_TOKENS:
            return
        prefills = [seq for seq in self.batch.seqs if not seq.is_decode]
        decode_s, prefill_s = (
            before.costs.seconds(load_of(ScheduledBatch(0, tuple(seqs), 0))) for seqs in (decodes, prefills)
        )
        aim_s = min(0.9 * before.itl_s, *(self._last_token_due_s(seq.request_id) - self.now_s for seq in decodes))
        assert prefill_s - before.costs.step_s <= max(aim_s - decode_s, 0.1 * aim_s) + 1e-9

    def check_places(self) -> None:
        """I7: inside a class of a tenant nobody passes an earlier place, but those that may be passed.

        While a prefill is in progress, a prompt that ends in this step may pass: it does not wait for long ones.
        """
        for late in self.newcomers:
            if self.has_prefill and late not in self.partial:
                continue
            for early in self.waiting:
                if _flow(early) == _flow(late) and not self._may_be_passed(early):
                    assert due_s(late.submit) <= due_s(early.submit)

    def check_work_conservation(self, policy: TenantPolicy) -> None:
        """I9: the first in turn waits only for a slot, tokens or their time, memory, or for what others may pass it.

        With its tenant at its cap, or itself in the guard's pause, nobody is in turn.
        """
        first = next(iter(self.waiting), None)
        if first is None or (policy.pauses_offline and _is_offline(first) and self.running):
            return
        cap = policy.terms_of(first.submit.tenant).max_in_flight
        if cap is not None and self._running_of(first.submit.tenant) >= cap:
            return
        assert (
            len(self.running) >= self.limits.max_num_seqs
            or not self._has_tokens_for(first)
            or self._may_be_passed(first)
            or not surely_fits(self.scheduler.pool, self.limits, (*self.running, first))
        )

    def _has_tokens_for(self, request: Request) -> bool:
        limits = self.limits
        if request.num_uncomputed_tokens == 1:
            has_own = self.num_decodes < limits.decode_token_budget
        else:
            has_time = self.before.itl_s is None or self.num_prefill_tokens < NUM_UNCUT_TOKENS
            has_own = has_time and self.num_prefill_tokens < limits.prefill_token_budget
        return has_own and self.batch.num_tokens < limits.max_num_batched_tokens

    def _may_be_passed(self, request: Request) -> bool:
        """It waits for its grammar, a prefill lane, a slot for its adapter, or for text that this step computes."""
        return (
            (request.grammar is not None and not request.grammar.is_ready)
            or self._may_lack_lane(request)
            or self._may_lack_adapter_slot(request)
            or any(self._may_await(request, other) for other in self.in_prefill)
        )

    def _may_lack_adapter_slot(self, request: Request) -> bool:
        """All slots are taken by others, or its own adapter gives way to one that has waited for longer."""
        if not request.adapter or len(self.adapters) < self.house.max_adapters:
            return False
        return request.adapter not in self.adapters or any(
            other.adapter and other.adapter not in self.adapters
            for other in self.waiting
            if other.submit.arrival_s <= self.now_s - ADAPTER_PATIENCE_S
        )

    def _may_await(self, request: Request, other: Request) -> bool:
        min_awaited_tokens = self.house.min_awaited_tokens
        if min_awaited_tokens is None or request.submit.cache_scope != other.submit.cache_scope:
            return False
        num_equal = request.num_computed_tokens + min_awaited_tokens
        return num_equal < request.num_tokens and request.token_ids[:num_equal] == other.token_ids[:num_equal]

    def _may_lack_lane(self, request: Request) -> bool:
        is_behind_long = self._is_long(request) and any(map(self._is_long, self.partial))
        return is_behind_long or len(self.partial) >= self.limits.max_partial_prefills

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self.limits.long_context_threshold_tokens

    def _running_of(self, tenant: str) -> int:
        return sum(request.submit.tenant == tenant for request in self.running)

    def _last_token_due_s(self, request_id: str) -> float:
        """Its deadline if its next token is its last; before that it binds no step."""
        request = self.scheduler.live(request_id)
        assert request, "a step has a sequence of somebody who has ended"
        is_last = request.num_tokens + 1 == request.max_num_tokens
        return inf if request.submit.deadline_s is None or not is_last else request.submit.deadline_s


def _is_offline(request: Request) -> bool:
    return request.submit.request_class is RequestClass.OFFLINE


def _flow(request: Request) -> tuple[str, str]:
    return request.submit.tenant, request.submit.request_class


def due_s(submit: Submit) -> float:
    """Its place: docs/fairness.md, in numbers of its own."""
    due = submit.arrival_s + 30.0 if submit.deadline_s is None else submit.deadline_s
    return due + 60.0 * submit.priority


def surely_fits(pool: BlockPool, limits: SchedulerLimits, requests: Iterable[Request]) -> bool:
    """Whether all fit under the KV limit even when each gets as long as it ever may."""
    limit = max(1, pool.num_blocks * limits.kv_cache_utilization_limit_percent // 100) * pool.block_size
    return sum(request.max_num_tokens + pool.block_size - 1 for request in requests) <= limit


def check_told(told: Sequence[Explanation], step: Step) -> None:
    """What explain() said before a step is what the step did, when no mail came and no time passed in between."""
    planned = {seq.request_id for seq in step.batch.seqs}
    assert {one.request_id for one in told} == {request.request_id for request in (*step.running, *step.waiting)}
    for one in told:
        if one.hold is Hold.NOTHING:
            assert one.request_id in planned, one
        elif one.hold is not Hold.QUEUE_ORDER:
            assert one.request_id not in planned, one
