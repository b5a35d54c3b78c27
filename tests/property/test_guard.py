"""Any load against the guard: I19 and L11 of the runtime's design, tick by tick.

Load is a list of phases, each a value per line, a rate and a duration; ticks come at any pace.
"""

import os
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from guidevane_api.limits import Envelope, SchedulerLimits, limit_violations
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision, Sample
from guidevane_runtime.core.guard_steps import CUTS, LADDERS, Line, Step

EXAMPLES = settings(max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")))
LINES = {Line.TTFT: 1500.0, Line.ITL: 120.0, Line.QUEUE_WAIT: 500.0, Line.KV_USE: 88.0, Line.REJECTS: 1.0}

RECOVERY_S = 600
"""After a load: a step whose trials failed waits for 300 s at most, then each of the seven goes within 30 s, and what
is left of its limits grows back."""


@dataclass(frozen=True)
class Phase:
    excess: dict[Line, float]
    """Values in units of their line; a line left out is silent."""
    num_ticks: int
    tick_s: float
    per_tick: int
    waiting_s: float


@dataclass(frozen=True)
class Tick:
    now_s: float
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    decision: GuardDecision


phases_st = st.lists(
    st.builds(
        Phase,
        excess=st.dictionaries(st.sampled_from(Line), st.sampled_from([0.1, 0.5, 0.89, 0.95, 1.05, 2.0, 50.0])),
        num_ticks=st.integers(1, 40),
        tick_s=st.sampled_from([0.25, 1.0, 1.7, 7.0]),
        per_tick=st.integers(1, 12),
        waiting_s=st.sampled_from([0.0, 0.1, 3.0]),
    ),
    min_size=1,
    max_size=12,
)
configs_st = st.builds(
    GuardConfig,
    lines=st.dictionaries(st.sampled_from(Line), st.just(0.0), min_size=1).map(
        lambda chosen: {line: LINES[line] for line in chosen}
    ),
    t_up_s=st.sampled_from([10.0, 15.0]),
    t_down_s=st.sampled_from([10.0, 30.0]),
    hysteresis=st.sampled_from([0.0, 0.1, 0.3]),
)
limits_st = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 64),
    prefill_token_budget=st.integers(1, 4096),
    prefill_chunk_size=st.integers(1, 4096),
    kv_cache_utilization_limit_percent=st.integers(1, 100),
    max_queued_requests=st.integers(1, 300),
    max_queued_tokens=st.integers(1, 300_000),
)


def run(guard: Guard, target: SchedulerLimits, phases: list[Phase], now_s: float = 100.0) -> list[Tick]:
    ticks = []
    for phase in phases:
        for _ in range(phase.num_ticks):
            for line, excess in phase.excess.items():
                for _ in range(phase.per_tick):
                    guard.observe(Sample(line, now_s, excess * LINES[line]))
            now_s += phase.tick_s
            before = guard.steps
            decision = guard.tick(now_s, target, phase.waiting_s)
            ticks.append(Tick(now_s, before, guard.steps, decision))
    return ticks


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_it_never_swings_back_sooner_than_t_down(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    """I19: a step back comes t_down after the last step of any kind; a step on t_up after it."""
    last_move_s = float("-inf")
    for tick in run(Guard(config), target, phases):
        change = len(tick.after) - len(tick.before)
        assert abs(change) <= 1 and tick.decision.level == len(tick.after)
        if change:
            assert tick.now_s - last_move_s >= (config.t_up_s if change > 0 else config.t_down_s)
            last_move_s = tick.now_s


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_no_limit_rises_within_t_down_of_its_fall(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    fell_s = dict.fromkeys(CUTS, float("-inf"))
    now = target
    for tick in run(Guard(config), target, phases):
        new = tick.decision.effect.limits
        for name in CUTS:
            if getattr(new, name) < getattr(now, name):
                fell_s[name] = tick.now_s
            elif getattr(new, name) > getattr(now, name):
                assert tick.now_s - fell_s[name] >= config.t_down_s
        now = new


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_floors_and_targets_bound_every_limit_and_nothing_else_moves(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    for tick in run(Guard(config), target, phases):
        limits = tick.decision.effect.limits
        for name, value in target.model_dump().items():
            floor = min(CUTS[name].floor, value) if name in CUTS else value
            assert floor <= getattr(limits, name) <= value
        assert min(limits.max_num_seqs, limits.max_queued_requests, limits.prefill_token_budget) >= 1
        assert limit_violations(limits, Envelope()).keys() <= limit_violations(target, Envelope()).keys()


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_it_gives_way_only_to_a_breached_line_and_in_its_order(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    for tick in run(Guard(config), target, phases):
        if len(tick.after) > len(tick.before):
            line = tick.decision.line
            assert line is not None and line in tick.decision.breached
            left = [step for step in LADDERS[line] if step not in tick.before]
            assert tick.after == (*tick.before, left[0])
        else:
            assert tick.after == tick.before[: len(tick.after)]


@EXAMPLES
@given(configs_st, limits_st, phases_st, st.booleans())
def test_after_the_load_it_is_back_at_normal(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase], is_silent: bool
) -> None:
    """I19, L11: calm, or no samples at all because everybody was refused."""
    guard = Guard(config)
    ticks = run(guard, target, phases)
    calm = Phase({} if is_silent else dict.fromkeys(LINES, 0.1), RECOVERY_S, 1.0, 12, 0.0)
    last = run(guard, target, [calm], ticks[-1].now_s)[-1].decision
    assert (last.level, last.effect.limits, last.effect.refuses_long_context) == (0, target, False)


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_who_is_refused_while_no_resource_is_over_is_let_in_again(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    """L11: a reject rate over its line never leaves the guard where it is."""
    guard = Guard(GuardConfig({**config.lines, Line.REJECTS: 1.0}, t_up_s=config.t_up_s, t_down_s=config.t_down_s))
    ticks = run(guard, target, phases)
    locked = Phase({**dict.fromkeys(LINES, 0.95), Line.REJECTS: 50.0}, RECOVERY_S, 1.0, 12, 0.0)
    assert run(guard, target, [locked], ticks[-1].now_s)[-1].decision.level == 0


@EXAMPLES
@given(configs_st, limits_st, phases_st)
def test_a_dry_run_decides_the_same_and_changes_nothing(
    config: GuardConfig, target: SchedulerLimits, phases: list[Phase]
) -> None:
    dry = GuardConfig(
        config.lines, dry_run=True, t_up_s=config.t_up_s, t_down_s=config.t_down_s, hysteresis=config.hysteresis
    )
    for wet, tick in zip(run(Guard(config), target, phases), run(Guard(dry), target, phases), strict=True):
        assert (tick.decision.level, tick.decision.line) == (wet.decision.level, wet.decision.line)
        assert tick.decision.effect.limits is target
        assert not tick.decision.effect.refuses_long_context and not tick.decision.effect.pauses_offline
