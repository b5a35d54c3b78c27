"""Each rule of the tuner by an example of its kind."""

import dataclasses
from typing import Any

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.spec_control import Knob
from guidevane_api.status import MetricsState
from guidevane_operator.retune.decide import decide
from guidevane_operator.retune.setup import bounds_of, policy_of, targets_of
from guidevane_operator.retune.snapshot import Bound, Direction, Hold, HoldReason, LastMove, Move, Rule, Snapshot
from guidevane_operator.signals import Absent, Known, Signal, Signals

SPEC = LLMServiceSpec.model_validate({"model": {"uri": "file:///m"}})


def signals(**values: float) -> Signals:
    """A service in calm load, with some signals set otherwise."""
    calm = {
        "kv_percent": 40,
        "running_per_pod": 10,
        "waiting": 0,
        "preemptions": 0,
        "finished": 100,
        "prompt_tokens": 10000,
        "generation_tokens": 10000,
        "guard_level": 0,
        "ttft_p95_ms": 500,
        "itl_p95_ms": 50,
        "itl_p99_ms": 60,
        "queue_wait_p95_ms": 20,
    }
    latencies = {name: Known(value, 1.0, 500) for name, value in (calm | values).items() if name.endswith("_ms")}
    amounts = {name: Known(value) for name, value in (calm | values).items() if not name.endswith("_ms")}
    return Signals(state=MetricsState.KNOWN, fresh_pods=1, expected_pods=1, **latencies, **amounts)


def snapshot(found: Signals, **changes: Any) -> Snapshot:
    limits = SchedulerLimits()
    base = Snapshot(
        now_s=1000.0,
        limits=limits,
        signals=found,
        targets=targets_of(SPEC),
        policy=policy_of(SPEC),
        bounds=bounds_of(SPEC, limits),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("values", "rule", "knob", "to"),
    [
        ({"preemptions": 5}, Rule.PREEMPTIONS_HIGH, Knob.MAX_NUM_SEQS, 28),
        ({"itl_p95_ms": 200}, Rule.ITL_HIGH, Knob.PREFILL_CHUNK_SIZE, 1024),
        (
            {"itl_p95_ms": 200, "ttft_p95_ms": 5000, "prompt_tokens": 90000, "generation_tokens": 3000},
            Rule.ITL_HIGH,
            Knob.PREFILL_CHUNK_SIZE,
            1024,
        ),
        ({"queue_wait_p95_ms": 900, "running_per_pod": 31}, Rule.QUEUE_WAIT_HIGH, Knob.MAX_NUM_SEQS, 35),
        ({"ttft_p95_ms": 3000}, Rule.TTFT_HIGH, Knob.PREFILL_CHUNK_SIZE, 3072),
    ],
)
def test_each_rule_moves_its_knob(values: dict[str, float], rule: Rule, knob: Knob, to: int) -> None:
    decision = decide(snapshot(signals(**values)))
    assert isinstance(decision, Move), decision
    assert (decision.rule, decision.knob, decision.to_value) == (rule, knob, to)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, HoldReason.WITHIN_TARGETS),
        ({"itl_p95_ms": 200, "ttft_p95_ms": 5000}, HoldReason.NO_REMEDY),
        ({"queue_wait_p95_ms": 900, "running_per_pod": 10}, HoldReason.NO_REMEDY),
        ({"queue_wait_p95_ms": 900, "running_per_pod": 32, "kv_percent": 80}, HoldReason.NO_REMEDY),
        ({"queue_wait_p95_ms": 900, "running_per_pod": 32, "itl_p95_ms": 110}, HoldReason.NO_REMEDY),
        ({"ttft_p95_ms": 3000, "queue_wait_p95_ms": 2900}, HoldReason.NO_REMEDY),
        ({"kv_percent": 99}, HoldReason.WITHIN_TARGETS),
    ],
    ids=str,
)
def test_a_breach_without_a_remedy_moves_nothing(values: dict[str, float], reason: HoldReason) -> None:
    decision = decide(snapshot(signals(**values)))
    assert isinstance(decision, Hold)
    assert decision.reason is reason


def test_protection_comes_before_a_raise() -> None:
    both = signals(preemptions=5, queue_wait_p95_ms=900, running_per_pod=32)
    decision = decide(snapshot(both))
    assert isinstance(decision, Move)
    assert decision.rule is Rule.PREEMPTIONS_HIGH


def test_a_cut_at_its_bound_does_not_turn_into_a_raise_elsewhere() -> None:
    bounds = {Knob.PREFILL_CHUNK_SIZE: Bound(2048, 4096), Knob.MAX_NUM_SEQS: Bound(1, 256)}
    decision = decide(snapshot(signals(itl_p95_ms=300), bounds=bounds))
    assert isinstance(decision, Hold)
    assert (decision.reason, decision.rule) == (HoldReason.AT_BOUND, Rule.ITL_HIGH)


def test_a_knob_that_the_user_left_out_is_never_moved() -> None:
    decision = decide(snapshot(signals(itl_p95_ms=300), bounds={Knob.MAX_NUM_SEQS: Bound(1, 256)}))
    assert isinstance(decision, Hold)
    assert "spec.retune.knobs" in decision.message


def test_settling_is_shorter_after_a_cut_than_after_a_raise() -> None:
    breach = signals(itl_p95_ms=300)
    after_cut = decide(snapshot(breach, last_move=LastMove(1000.0 - 60, Direction.CUT)))
    after_raise = decide(snapshot(breach, last_move=LastMove(1000.0 - 60, Direction.RAISE)))
    assert isinstance(after_cut, Move)
    assert isinstance(after_raise, Hold)
    assert after_raise.reason is HoldReason.SETTLING


def test_p99_itl_counts_only_where_it_has_a_target() -> None:
    stalls = signals(itl_p95_ms=50, itl_p99_ms=900)
    with_target = dataclasses.replace(targets_of(SPEC), itl_p99_ms=200)
    assert isinstance(decide(snapshot(stalls)), Hold)
    assert isinstance(decide(snapshot(stalls, targets=with_target)), Move)


def test_no_traffic_is_a_reason_of_its_own() -> None:
    quiet = dataclasses.replace(
        signals(),
        **dict.fromkeys(("ttft_p95_ms", "itl_p95_ms", "itl_p99_ms", "queue_wait_p95_ms"), Absent("no traffic")),
    )
    decision = decide(snapshot(quiet))
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.TOO_FEW_SAMPLES


@pytest.mark.parametrize(
    ("level", "reason"),
    [(Known(2.0), HoldReason.GUARD_ACTS), (Absent("no such series"), HoldReason.METRICS_UNKNOWN)],
)
def test_the_tuner_waits_while_the_guard_acts_or_may_act(level: Signal, reason: HoldReason) -> None:
    breach = dataclasses.replace(signals(itl_p95_ms=300), guard_level=level, guard_lines=("itlP95Milliseconds",))
    decision = decide(snapshot(breach))
    assert isinstance(decision, Hold)
    assert decision.reason is reason
    assert isinstance(decide(snapshot(breach, guard_may_act=False)), Move), "a dry run moves nothing"


def test_a_small_breach_that_the_guard_came_between_needs_no_second_look_afterwards() -> None:
    small, guarded = signals(itl_p95_ms=150), signals(itl_p95_ms=80, guard_level=1)
    first = decide(snapshot(small))
    between = decide(snapshot(guarded, previous_rule=first.rule))
    after = decide(snapshot(small, previous_rule=between.rule))
    assert [type(decision) for decision in (first, between, after)] == [Hold, Hold, Move]


def test_a_guard_that_acts_is_named_with_its_level_and_lines() -> None:
    breach = dataclasses.replace(signals(guard_level=2), guard_lines=("itlP95Milliseconds",))
    decision = decide(snapshot(breach))
    assert isinstance(decision, Hold)
    assert decision.message == "the guard gives way: level 2, over itlP95Milliseconds"


def test_bounds_default_to_a_quarter_of_the_spec_and_the_envelope() -> None:
    spec = LLMServiceSpec.model_validate(
        {"model": {"uri": "file:///m"}, "limits": {"maxNumSeqs": 16}, "envelope": {"maxNumSeqs": 64}}
    )
    bounds = bounds_of(spec, SchedulerLimits.resolve(spec.limits, spec.envelope))
    assert bounds[Knob.MAX_NUM_SEQS] == Bound(4, 64)
    assert bounds[Knob.PREFILL_CHUNK_SIZE] == Bound(512, 4096)
