"""The guard over the real scheduler, in virtual time: three times what the engine can do, then little (I19, L11)."""

from dataclasses import dataclass, field

import pytest

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import SamplingParams, SetLimits, Submit
from guidevane_runtime.core.scheduler import Scheduler

TARGET = SchedulerLimits(max_num_seqs=8, max_queued_requests=256, max_model_len=64)
NUM_PROMPT, NUM_OUTPUT = 16, 8
OVERLOAD_S, CALM_S, SETTLED_S = 120.0, 150.0, 90.0
"""Three times the capacity, then a tenth; from SETTLED_S on the guard has had its say."""
CAPACITY_PER_S = 60.0
"""What the step costs below allow at full batches."""


def step_cost_s(num_prefill: int, num_decodes: int) -> float:
    """A fixed part, and a little per token: the shape of a memory-bound decode."""
    return 0.010 + 0.0002 * num_prefill + 0.0005 * num_decodes


@dataclass
class World:
    """One engine behind a queue cap, with or without its guard."""

    guard: Guard | None
    now_s: float = 0.0
    num_finished_settled: int = 0
    waits_settled_s: list[float] = field(default_factory=list)
    decisions: list[GuardDecision] = field(default_factory=list)
    in_force: SchedulerLimits = TARGET

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(BlockPool(64, 16), TARGET, max_model_len=64, eos_token_ids=frozenset())
        self.runner = FakeRunner(64, 16, 100)
        self.arrivals: dict[str, float] = {}
        self.last_token_s: dict[str, float] = {}
        self.next_arrival_s = self.next_tick_s = 0.0

    def run(self) -> "World":
        while self.now_s < OVERLOAD_S + CALM_S:
            self.arrive()
            self.step()
            self.tick()
        return self

    def arrive(self) -> None:
        while self.next_arrival_s <= self.now_s:
            rate = CAPACITY_PER_S * (3.0 if self.next_arrival_s < OVERLOAD_S else 0.1)
            has_room = self.scheduler.stats(self.now_s).num_waiting < self.in_force.max_queued_requests
            self.observe(Line.REJECTS, 0.0 if has_room else 100.0)
            if has_room:
                self.submit(f"r{self.next_arrival_s:.6f}")
            self.next_arrival_s += 1 / rate

    def submit(self, name: str) -> None:
        self.arrivals[name] = self.next_arrival_s
        params = SamplingParams(max_tokens=NUM_OUTPUT, seed=0)
        self.scheduler.submit(Submit(name, tuple(range(NUM_PROMPT)), params, self.next_arrival_s))

    def step(self) -> None:
        batch = self.scheduler.schedule(self.now_s)
        num_decodes = sum(seq.is_decode for seq in batch.seqs)
        self.now_s += step_cost_s(batch.num_tokens - num_decodes, num_decodes)
        if batch.seqs:
            self.scheduler.apply(batch, self.runner.execute(batch))
        for output in self.scheduler.take_outputs():
            self.note(output.request_id, output.first_scheduled_s, has_ended=output.finish_reason is not None)

    def note(self, name: str, first_scheduled_s: float | None, *, has_ended: bool) -> None:
        is_settled = SETTLED_S <= self.now_s < OVERLOAD_S
        if first_scheduled_s is not None and name not in self.last_token_s:
            wait_s = first_scheduled_s - self.arrivals[name]
            self.observe(Line.QUEUE_WAIT, wait_s * 1000)
            self.waits_settled_s += [wait_s] * is_settled
        elif name in self.last_token_s:
            self.observe(Line.ITL, (self.now_s - self.last_token_s[name]) * 1000)
        self.last_token_s[name] = self.now_s
        self.num_finished_settled += has_ended and is_settled

    def observe(self, line: Line, value: float) -> None:
        if self.guard is not None:
            self.guard.observe(Sample(line, self.now_s, value))

    def tick(self) -> None:
        if self.guard is None or self.now_s < self.next_tick_s:
            return
        self.next_tick_s = self.now_s + 1.0
        decision = self.guard.tick(self.now_s, TARGET, self.scheduler.stats(self.now_s).oldest_interactive_waiting_s)
        self.decisions.append(decision)
        if decision.effect.limits != self.in_force:
            self.in_force = decision.effect.limits
            epoch = self.scheduler.limits.epoch + 1
            self.scheduler.set_limits(SetLimits(self.in_force, epoch, LimitsSource.SPEC))

    def wait_p95_s(self) -> float:
        return sorted(self.waits_settled_s)[int(0.95 * len(self.waits_settled_s))]


@pytest.fixture(scope="module")
def guarded() -> World:
    lines = {Line.QUEUE_WAIT: 500.0, Line.ITL: 120.0, Line.REJECTS: 1.0}
    return World(Guard(GuardConfig(lines))).run()


@pytest.fixture(scope="module")
def unguarded() -> World:
    return World(None).run()


def test_under_sustained_overload_it_holds_the_line_that_was_breached(guarded: World, unguarded: World) -> None:
    assert unguarded.wait_p95_s() > 3.0
    assert guarded.wait_p95_s() < 1.0


def test_under_sustained_overload_goodput_stays(guarded: World, unguarded: World) -> None:
    """I19, with g = 0.95."""
    assert guarded.num_finished_settled >= 0.95 * unguarded.num_finished_settled


def test_it_gives_way_in_order_then_probes_and_is_back_at_normal_after_the_load(guarded: World) -> None:
    levels = [decision.level for decision in guarded.decisions]
    top, end = levels.index(3), int(OVERLOAD_S) + 30
    assert levels[:top] == sorted(levels[:top]) and max(levels) == 3
    assert set(levels[top : int(OVERLOAD_S)]) <= {2, 3}
    assert levels[end:] == sorted(levels[end:], reverse=True)
    assert (levels[-1], guarded.in_force) == (0, TARGET)
