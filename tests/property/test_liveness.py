"""I6: whatever the limits, tenants, targets and step times, live work gets on in every step and ends within a bound.

The bound of docs/scheduler.md: B is one step. A step computes a token at least, a request has so many to compute as it
may have tokens, and once more for each preemption; so all of it ends in the sum of that. More of it:
`HYPOTHESIS_EXAMPLES=5000 python -m pytest tests/property/test_liveness.py`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import hypothesis.strategies as st
from hypothesis import given, settings

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import MAX_PREEMPTIONS_ON_ESTIMATE
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    AbortCause,
    FinishReason,
    SamplingParams,
    SetLimits,
    SetTargets,
    SetTenants,
    Submit,
)
from guidevane_runtime.core.plan import load_of
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.slack import MIN_PREFILL_TOKENS
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms

MODEL_LEN = 60
TENANTS = "abc"
MAX_PREEMPTIONS = MAX_PREEMPTIONS_ON_ESTIMATE + 1
"""Of one request for lack of blocks; each order to shrink may add one."""


@dataclass
class World:
    """A scheduler at work, and the most steps that all it was given can take."""

    scheduler: Scheduler
    runner: FakeRunner
    now_s: float = 0.0
    num_steps: int = 0
    num_shrink_orders: int = 0
    num_submitted: int = 0
    num_tokens: int = 0
    """Of all requests together, prompt and output, at most."""
    ends: dict[str, FinishReason] = field(default_factory=dict)

    @property
    def most_steps(self) -> int:
        return self.num_tokens * (1 + MAX_PREEMPTIONS + self.num_shrink_orders)

    def step(self, took_s: float) -> None:
        batch = self.scheduler.schedule(self.now_s)
        self.listen()
        assert bool(batch.seqs) == self.scheduler.has_work, "there is work, and a step without any of it"
        self.scheduler.apply(batch, self.runner.execute(batch))
        self.scheduler.note_step_time(load_of(batch), took_s)
        self.now_s += took_s
        self.num_steps += bool(batch.seqs)
        self.listen()

    def listen(self) -> None:
        for output in self.scheduler.take_outputs():
            if output.finish_reason is not None:
                assert output.request_id not in self.ends, "a request ended twice"
                self.ends[output.request_id] = output.finish_reason


Action = Callable[[World], None]


def submit(
    num_prompt: int, max_tokens: int, tenant: str, priority: int, request_class: RequestClass, patience_s: float | None
) -> Action:
    def act(world: World) -> None:
        world.num_submitted += 1
        world.num_tokens += min(num_prompt + max_tokens, MODEL_LEN)
        name = str(world.num_submitted)
        prompt = tuple((world.num_submitted * 7 + place) % 11 for place in range(num_prompt))
        world.scheduler.submit(
            Submit(
                name,
                prompt,
                SamplingParams(max_tokens, seed=0),
                world.now_s,
                priority,
                tenant=tenant,
                request_class=request_class,
                deadline_s=None if patience_s is None else world.now_s + patience_s,
            )
        )
        world.listen()

    return act


def abort_running(cause: AbortCause) -> Action:
    """All that run: after a preemption too, when nobody comes in beside others."""

    def act(world: World) -> None:
        for request in world.scheduler.running:
            world.scheduler.abort(request.request_id, cause)
        world.listen()

    return act


def set_limits(limits: SchedulerLimits, mode: ShrinkMode) -> Action:
    def act(world: World) -> None:
        world.num_shrink_orders += mode is ShrinkMode.PREEMPT
        epoch = world.scheduler.limits.epoch + 1
        world.scheduler.set_limits(SetLimits(limits, epoch, LimitsSource.SPEC, mode))

    return act


def set_tenants(caps: list[int | None]) -> Action:
    def act(world: World) -> None:
        terms = tuple(TenantTerms(name, max_in_flight=cap) for name, cap in zip(TENANTS, caps, strict=True))
        world.scheduler.set_tenants(SetTenants(TenantPolicy(terms), world.num_steps + world.num_submitted + 1))

    return act


def set_targets(itl_s: float | None) -> Action:
    return lambda world: world.scheduler.set_targets(SetTargets(itl_s))


def run(num_steps: int, took_s: float) -> Action:
    def act(world: World) -> None:
        for _ in range(num_steps):
            world.step(took_s)

    return act


budget_st = st.one_of(st.just(1), st.integers(1, 40))
limits_st = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=budget_st,
    prefill_token_budget=budget_st,
    decode_token_budget=budget_st,
    prefill_chunk_size=budget_st,
    max_partial_prefills=st.integers(1, 3),
    max_model_len=st.just(MODEL_LEN),
    max_prompt_tokens=st.just(MODEL_LEN),
    max_output_tokens=st.just(MODEL_LEN),
    kv_cache_utilization_limit_percent=st.one_of(st.just(1), st.integers(1, 100)),
    long_context_threshold_tokens=st.integers(1, 40),
)
submit_st = st.builds(
    submit,
    st.integers(1, MODEL_LEN - 1),
    st.integers(1, MODEL_LEN),
    st.sampled_from(TENANTS),
    st.integers(-2, 2),
    st.sampled_from(RequestClass),
    st.one_of(st.none(), st.floats(0.1, 5.0)),
)
action_st = st.one_of(
    submit_st,
    submit_st,
    submit_st,
    st.builds(run, st.sampled_from([1, 1, 4, 15]), st.sampled_from([0.0, 1e-3, 0.02, 0.5])),
    st.builds(set_limits, limits_st, st.sampled_from(ShrinkMode)),
    st.builds(abort_running, st.just(AbortCause.CANCELLED)),
    st.builds(set_tenants, st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=3, max_size=3)),
    st.builds(set_targets, st.sampled_from([None, 1e-9, 1e-3, 0.05])),
)


@settings(max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "300")))
@given(
    num_blocks=st.integers(1, 30),
    block_size=st.sampled_from([1, 2, 4, 16]),
    limits=limits_st,
    shares=st.booleans(),
    actions=st.lists(action_st, max_size=40),
)
def test_something_runs_in_every_step_and_everything_ends_within_the_bound(
    num_blocks: int, block_size: int, limits: SchedulerLimits, shares: bool, actions: list[Action]
) -> None:
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(
        pool,
        limits,
        max_model_len=MODEL_LEN,
        eos_token_ids=frozenset(),
        prefix_cache=PrefixCache(pool, is_enabled=shares),
    )
    world = World(scheduler, FakeRunner(num_blocks, block_size, vocab_size=11))
    for act in actions:
        act(world)
    while scheduler.has_work:
        world.step(0.0)
        assert world.num_steps <= world.most_steps, "there was more work than there is in these requests"
    assert len(world.ends) == world.num_submitted and pool.num_used == 0


@settings(max_examples=100)
@given(
    num_streams=st.integers(1, 6),
    budget=st.integers(8, 40),
    num_prompt=st.integers(2, MODEL_LEN - 1),
    itl_s=st.sampled_from([1e-9, 1e-3, 0.05]),
    took_s=st.sampled_from([1e-6, 0.02, 3.0]),
)
def test_a_prompt_beside_streams_has_its_first_token_within_a_bound_of_steps(
    num_streams: int, budget: int, num_prompt: int, itl_s: float, took_s: float
) -> None:
    """The ITL target leaves it MIN_PREFILL_TOKENS a step, or what the streams leave of a smaller budget."""
    scheduler = Scheduler(
        BlockPool(1000, 4),
        SchedulerLimits(max_num_batched_tokens=budget, max_model_len=1000, max_output_tokens=1000),
        max_model_len=1000,
        eos_token_ids=frozenset(),
    )
    world = World(scheduler, FakeRunner(1000, 4, vocab_size=11))
    set_targets(itl_s)(world)
    for number in range(40):
        submit(1 + number % 9, 1, "a", 0, RequestClass.INTERACTIVE, None)(world)
        world.step(took_s * (1 + number % 9))
    for _ in range(num_streams):
        submit(1, 500, "a", 0, RequestClass.INTERACTIVE, None)(world)
    run(2, took_s)(world)
    submit(num_prompt, 1, "b", 0, RequestClass.INTERACTIVE, None)(world)
    num_before = world.num_steps
    while str(world.num_submitted) not in world.ends:
        world.step(took_s)
    pace = min(MIN_PREFILL_TOKENS, budget - num_streams)
    assert world.num_steps - num_before <= ceil(num_prompt / pace)
