"""What must hold of one planned step, told from outside: from the plan, the limits and who ran and waited before.

Numbers I1 to I16 are those of the invariants in docs/testing.md.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import Explanation, Hold, Submit
from guidevane_runtime.core.plan import ScheduledBatch
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import TenantPolicy


class Before(NamedTuple):
    """The scheduler before it planned the step."""

    turns: dict[Request, tuple[int, int]]
    """Who ran, and when each had its last turn."""
    num_preemptions: int
    num_steps: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Before":
        turns = {request: request.last_turn for request in scheduler.running}
        stats = scheduler.stats(0.0)
        return cls(turns, stats.num_preemptions, stats.num_steps)


class Step:
    """One planned step of a scheduler, before it is applied."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: ScheduledBatch,
        before: Before,
        now_s: float,
        min_awaited_tokens: int | None,
    ) -> None:
        """min_awaited_tokens: text that is worth waiting for; None without a prefix cache."""
        self.scheduler = scheduler
        self.batch = batch
        self.before = before
        self.now_s = now_s
        self.min_awaited_tokens = min_awaited_tokens
        self.limits = scheduler.limits.target
        self.running = tuple(scheduler.running)
        planned = {seq.request_id: len(seq.token_ids) for seq in batch.seqs}
        self.in_prefill = [r for r in self.running if r.num_uncomputed_tokens > 1 and r.request_id in planned]
        self.partial = [r for r in self.running if r.num_uncomputed_tokens - planned.get(r.request_id, 0) > 1]
        self.newcomers = [r for r in self.running if r not in before.turns]
        self.has_prefill = any(r in before.turns and r.num_uncomputed_tokens > 1 for r in self.running)
        """Whether one was in progress before."""
        self.num_decodes = sum(seq.is_decode for seq in batch.seqs)
        self.has_preempted = scheduler.stats(0.0).num_preemptions > before.num_preemptions

    def check(self, policy: TenantPolicy, cool_until: int) -> None:
        """cool_until: the last step in which nobody comes in beside others, because of a preemption."""
        self.check_budgets()
        self.check_turns()
        self.check_lanes()
        self.check_writes()
        self.check_times()
        self.check_caps(policy)
        self.check_places()
        if self.before.num_steps >= cool_until and not self.has_preempted:
            self.check_work_conservation(policy)

    def check_budgets(self) -> None:
        """I4. I6, A27, C1: whoever waits or runs, something is in the step."""
        limits, batch = self.limits, self.batch
        assert self.num_decodes <= limits.decode_token_budget
        assert batch.num_tokens - self.num_decodes <= limits.prefill_token_budget
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

    def check_places(self) -> None:
        """I7: inside a class of a tenant nobody passes an earlier place, but those that may be passed.

        While a prefill is in progress, a prompt that ends in this step may pass: it does not wait for long ones.
        """
        for late in self.newcomers:
            if self.has_prefill and late not in self.partial:
                continue
            for early in self.scheduler.waiting:
                if _flow(early) == _flow(late) and not self._may_be_passed(early):
                    assert due_s(late.submit) <= due_s(early.submit)

    def check_work_conservation(self, policy: TenantPolicy) -> None:
        """I9: the first in turn waits only for a slot, tokens, a lane, text in flight, memory or its tenant's cap."""
        waiting = self.scheduler.waiting
        if not waiting:
            return
        first = waiting[0]
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
        num_tokens, limits = self.batch.num_tokens, self.limits
        if request.num_uncomputed_tokens == 1:
            has_own = self.num_decodes < limits.decode_token_budget
        else:
            has_own = num_tokens - self.num_decodes < limits.prefill_token_budget
        return has_own and num_tokens < limits.max_num_batched_tokens

    def _may_be_passed(self, request: Request) -> bool:
        """It waits for a prefill lane, or for text that this step computes."""
        return self._may_lack_lane(request) or any(self._may_await(request, other) for other in self.in_prefill)

    def _may_await(self, request: Request, other: Request) -> bool:
        if self.min_awaited_tokens is None or request.submit.cache_scope != other.submit.cache_scope:
            return False
        num_equal = request.num_computed_tokens + self.min_awaited_tokens
        return num_equal < request.num_tokens and request.token_ids[:num_equal] == other.token_ids[:num_equal]

    def _may_lack_lane(self, request: Request) -> bool:
        is_behind_long = self._is_long(request) and any(map(self._is_long, self.partial))
        return is_behind_long or len(self.partial) >= self.limits.max_partial_prefills

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self.limits.long_context_threshold_tokens

    def _running_of(self, tenant: str) -> int:
        return sum(request.submit.tenant == tenant for request in self.running)


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


def check_told(told: Sequence[Explanation], batch: ScheduledBatch) -> None:
    """What explain() said before the step is what the step did, when no mail came and no time passed in between."""
    planned = {seq.request_id for seq in batch.seqs}
    for one in told:
        if one.hold is Hold.NOTHING:
            assert one.request_id in planned, one
        elif one.hold is not Hold.QUEUE_ORDER:
            assert one.request_id not in planned, one
