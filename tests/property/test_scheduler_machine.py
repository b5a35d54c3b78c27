"""Random mail at any moment against the real scheduler and pool, with a runner whose KV cache tells lies apart.

Invariants I1 to I7, I9, I10, I15, I16 and I18 of docs/testing.md hold after every action, in any order of requests,
aborts, limits, terms and time, also while a step is in flight; its result may be late, or wrong for some.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import MAX_PREEMPTIONS_ON_ESTIMATE
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.constraints import AdapterSlots
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import CacheScope, FinishReason, SetLimits, SetTargets, SetTenants
from guidevane_runtime.core.plan import ScheduledBatch, load_of
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import TenantPolicy
from tests.property.checks import Before, House, Step, check_told
from tests.property.machine import Machine, size_of
from tests.property.traffic import (
    COSTS,
    EOS_TOKEN_IDS,
    LESSONS,
    MODEL_LEN,
    VOCAB_SIZE,
    Client,
    Compiled,
    Draft,
    FixedForecast,
    Leave,
    Mail,
    NewLimits,
    NewTarget,
    NewTerms,
    OfflinePause,
    Pause,
    ScriptedGrammar,
    SpoilingRunner,
    draft_st,
    leave_st,
    limits_st,
    mail_st,
    new_limits_st,
    new_terms_st,
    pause_st,
    surroundings_st,
)


class SchedulerMachine(Machine):
    @initialize(
        num_tokens=st.sampled_from([16, 60, 120, 180, 240, 360]),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        limits=limits_st,
        shares=st.sampled_from([True, True, False]),
        min_awaited_tokens=st.sampled_from([1, 10, 64]),
        max_adapters=st.integers(1, 3),
        num_expected_tokens=st.sampled_from([None, 0, 0, 10]),
        knows_costs=st.booleans(),
    )
    def boot(
        self,
        num_tokens: int,
        block_size: int,
        limits: SchedulerLimits,
        shares: bool,
        min_awaited_tokens: int,
        max_adapters: int,
        num_expected_tokens: int | None,
        knows_costs: bool,
    ) -> None:
        num_blocks = num_tokens // block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = SpoilingRunner(num_blocks, block_size, VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            limits,
            max_model_len=MODEL_LEN,
            eos_token_ids=EOS_TOKEN_IDS,
            prefix_cache=PrefixCache(self.pool, is_enabled=shares, min_awaited_tokens=min_awaited_tokens),
            constraints=[AdapterSlots(max_adapters)],
            forecast=None if num_expected_tokens is None else FixedForecast(num_expected_tokens),
        )
        self.house = House(min_awaited_tokens if shares else None, max_adapters)
        self.slowness = 1.0
        if knows_costs:
            self.scheduler.set_targets(SetTargets(0.04))
            for load in LESSONS:
                self.scheduler.note_step_time(load, COSTS.seconds(load))
        self.clients: dict[str, Client] = {}
        self.writers: dict[int, CacheScope] = {}
        """Who wrote last to a block."""
        self.policy = TenantPolicy()
        self.terms_epoch = 0
        self.now_s = 0.0
        self.num_shrink_orders = 0
        self.past_counters = (0, 0, 0, 0, 0)
        self.cool_until = 0
        self.is_in_step = False

    # ------------------------------------------------------------------------------------------------ actions

    @rule(drafts=st.lists(draft_st, min_size=1, max_size=8), num_steps=st.integers(0, 4))
    def submit(self, drafts: list[Draft], num_steps: int) -> None:
        for draft in drafts:
            self.deliver(draft)
        self.run(num_steps)

    @rule(leave=leave_st)
    def abort(self, leave: Leave) -> None:
        self.deliver(leave)

    @rule(limits=new_limits_st)
    def set_limits(self, limits: NewLimits) -> None:
        self.deliver(limits)

    @precondition(lambda self: len(self.scheduler.running) > 1)
    @rule(name=st.sampled_from(["max_num_seqs", "kv_cache_utilization_limit_percent"]), num_steps=st.integers(1, 3))
    def squeeze(self, name: str, num_steps: int) -> None:
        """Preempt down to one, and take it back: B16, B17."""
        usual = self.scheduler.limits.target
        self.take_limits(NewLimits(usual.model_copy(update={name: 1}), ShrinkMode.PREEMPT, 1))
        self.run(num_steps)
        self.take_limits(NewLimits(usual, ShrinkMode.DRAIN, 1))

    @rule(terms=new_terms_st)
    def set_tenants(self, terms: NewTerms) -> None:
        self.deliver(terms)

    @rule(mail=surroundings_st)
    def hear_of_surroundings(self, mail: Mail) -> None:
        self.deliver(mail)

    @rule(pause=pause_st)
    def wait(self, pause: Pause) -> None:
        self.deliver(pause)

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        self.run(num_steps)

    @rule(num_steps=st.integers(1, 4))
    def steps_that_were_explained(self, num_steps: int) -> None:
        for _ in range(num_steps if self.scheduler.has_work else 1):
            told = explain(self.scheduler, list(self.clients), self.now_s)
            self.listen()
            step = self.plan()
            # That a decode lacks a block is seen only when the step is planned.
            if not step.has_preempted:
                check_told(told, step)
            self.finish(step.batch)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(mail=st.lists(mail_st, max_size=6))
    def step_with_mail_in_flight(self, mail: list[Mail]) -> None:
        self.step(mail)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(failing=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def step_with_bad_rows(self, failing: set[int]) -> None:
        self.step(failing=failing)

    # ------------------------------------------------------------------------------------------------ the mail

    def deliver(self, mail: Mail) -> None:
        match mail:
            case Draft():
                self.take_draft(mail)
            case Leave():
                self.take_leave(mail)
            case NewLimits():
                self.take_limits(mail)
            case NewTerms():
                self.take_terms(mail)
            case OfflinePause():
                self.take_terms(NewTerms(replace(self.policy, pauses_offline=mail.is_on), 1))
            case NewTarget():
                self.scheduler.set_targets(SetTargets(mail.itl_s))
                self.slowness = mail.slowness
            case Compiled():
                self.take_compiled(mail)
            case Pause():
                self.now_s += mail.seconds

    def take_draft(self, draft: Draft) -> None:
        submit, grammar = draft.submit(str(len(self.clients)), self.now_s), draft.grammar()
        limits = self.scheduler.limits.target
        self.clients[submit.request_id] = Client(submit, grammar, limits, self.pool, self.runner)
        if grammar:
            self.runner.grammars[submit.request_id] = grammar
        self.scheduler.submit(submit, grammar=grammar)
        self.listen()

    def take_leave(self, leave: Leave) -> None:
        request_id = str(len(self.clients) - 1 - leave.back)
        client = self.clients.get(request_id)
        if client and not client.ends:
            client.aborted_as = leave.cause
        self.scheduler.abort(request_id, leave.cause)
        self.listen()
        assert client is None or client.ends

    def take_limits(self, new: NewLimits) -> None:
        """I18: a newer epoch is obeyed, a stale one changes nothing."""
        old, epoch = self.scheduler.limits.target, self.scheduler.limits.epoch
        is_newer = self.scheduler.set_limits(SetLimits(new.limits, epoch + new.ahead, LimitsSource.SPEC, new.mode))
        assert is_newer == (new.ahead > 0) and self.scheduler.limits.epoch == max(epoch, epoch + new.ahead)
        assert self.scheduler.limits.target == (new.limits if is_newer else old)
        self.num_shrink_orders += is_newer and new.mode is ShrinkMode.PREEMPT

    def take_terms(self, new: NewTerms) -> None:
        is_newer = self.scheduler.set_tenants(SetTenants(new.policy, self.terms_epoch + new.ahead))
        assert is_newer == (new.ahead > 0)
        if is_newer:
            self.policy, self.terms_epoch = new.policy, self.terms_epoch + new.ahead

    def take_compiled(self, compiled: Compiled) -> None:
        if compiling := self.compiling():
            grammar = compiling[compiled.place % len(compiling)]
            grammar.is_ready, grammar.error = not compiled.error, compiled.error

    def compiling(self) -> list[ScriptedGrammar]:
        """Of those that have not ended."""
        grammars = [client.grammar for client in self.clients.values() if client.grammar and not client.ends]
        return [grammar for grammar in grammars if grammar.is_compiling]

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, mail: list[Mail] | None = None, failing: Collection[int] = ()) -> None:
        batch = self.plan().batch
        for one in mail or []:
            self.deliver(one)
            self.check_blocks()
            # A23, A24: what the step reads and writes is nobody else's before it is over.
            assert all(self.pool.num_refs(block_id) for seq in batch.seqs for block_id in seq.block_ids)
        self.finish(batch, failing)

    def run(self, num_steps: int) -> None:
        """One of an idle engine tells as much as many."""
        for _ in range(num_steps if self.scheduler.has_work else 1):
            self.step()

    def plan(self) -> Step:
        before = Before.of(self.scheduler)
        self.is_in_step = True
        step = Step(self.scheduler, self.scheduler.schedule(self.now_s), before, self.now_s, self.house)
        self.listen()
        step.check(self.policy, self.cool_until)
        if step.has_preempted:
            self.cool_until = step.batch.step + 1
        return step

    def finish(self, batch: ScheduledBatch, failing: Collection[int] = ()) -> None:
        self.check_scopes(batch)
        output = self.runner.run(batch, failing)
        for seq, sampled in zip(batch.seqs, output.sampled, strict=True):
            client = self.clients[seq.request_id]
            client.is_failing |= bool(sampled and sampled.error and not client.ends)
        self.scheduler.apply(batch, output)
        load = load_of(batch)
        self.scheduler.note_step_time(load, self.slowness * COSTS.seconds(load))
        self.is_in_step = False
        self.listen()

    def listen(self) -> None:
        for output in self.scheduler.take_outputs():
            self.clients[output.request_id].hear(output, self.now_s)

    # --------------------------------------------------------------------------------------------- invariants

    def check_blocks(self) -> None:
        """I1, I2: a block is free, or in as many tables as it says; what is in several is full and can be found."""
        pool, live = self.pool, self.scheduler._live.values()
        tables = [request.blocks for request in live] + self.scheduler._in_flight.fenced
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

    def check_scopes(self, batch: ScheduledBatch) -> None:
        """I15: whatever a step reads was written by a request of the same scope."""
        size = self.pool.block_size
        for seq in batch.seqs:
            scope = self.clients[seq.request_id].submit.cache_scope
            num_read = self.pool.num_blocks_for(seq.start)
            assert all(self.writers[block_id] == scope for block_id in seq.block_ids[:num_read])
            self.writers.update(dict.fromkeys(seq.block_ids[seq.start // size :], scope))

    @invariant()
    def blocks_and_requests_are_consistent(self) -> None:
        self.check_blocks()
        assert not self.scheduler._in_flight.fenced
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
        assert stats.num_waiting_tokens == sum(request.num_tokens for request in self.scheduler.waiting)
        hits = (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens)
        assert hits[1] <= hits[0]
        counters = (stats.num_steps, stats.num_preemptions, stats.num_recomputed_tokens, *hits)
        assert all(new >= old for new, old in zip(counters, self.past_counters, strict=True))
        self.past_counters = counters

    @invariant()
    def effective_limits_are_the_target_or_the_floor_that_still_runs(self) -> None:
        """I18"""
        target, effective = self.scheduler.limits.target, self.scheduler.effective_limits
        assert effective.max_num_seqs == max(target.max_num_seqs, len(self.scheduler.running))
        assert all(getattr(effective, name) >= getattr(target, name) for name in type(target).model_fields)

    def teardown(self) -> None:
        """I3: whatever is left runs to its end in a bounded number of steps; then nothing is held."""
        if getattr(self, "is_in_step", True):
            return  # a step failed, or there was none
        for grammar in self.compiling():
            grammar.is_ready = True
        self.step()
        for _ in range(sum(len(client.expected) + MODEL_LEN for client in self.clients.values()) * 4):
            if not self.scheduler.has_work:
                break
            self.step()
        assert all(len(client.ends) == 1 for client in self.clients.values())
        assert FinishReason.ABORT not in {c.ends[0] for c in self.clients.values() if c.aborted_as is None}
        stats = self.scheduler.stats(self.now_s)
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.num_blocks_used) == (0, 0, 0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = size_of(SchedulerMachine)
