"""The tuner's decision, over any snapshot: the lines of reference/operator.md section 6 for pure decide()."""

import dataclasses
import math
from collections.abc import Mapping

from hypothesis import assume, given
from hypothesis import strategies as st

from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits, limit_violations
from guidevane_api.spec_control import Knob
from guidevane_api.status import MetricsState
from guidevane_operator.retune.decide import decide
from guidevane_operator.retune.snapshot import (
    Bound,
    Direction,
    Hold,
    HoldReason,
    LastMove,
    Move,
    Policy,
    Rule,
    Snapshot,
    Targets,
    limit_field,
)
from guidevane_operator.signals import Absent, Invalid, Known, Partial, Signal, Signals, Stale

POLICY = Policy(
    min_samples=30,
    settle_raise_s=90,
    settle_cut_s=45,
    raise_percent=10,
    cut_percent=15,
    chunk_raise_percent=50,
    chunk_cut_percent=50,
    deadband_low_percent=80,
    deadband_high_percent=100,
)
TARGETS = Targets(ttft_p95_ms=1500, itl_p95_ms=120, itl_p99_ms=None, queue_wait_p95_ms=500, kv_max_percent=88)
ENVELOPE = Envelope(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)

milliseconds = st.floats(0, 1e5, allow_nan=False)
counts = st.floats(0, 1e6, allow_nan=False)
latencies = st.builds(Known, milliseconds, st.just(1.0), st.one_of(st.just(1000.0), st.floats(0, 60)))
amounts = st.builds(Known, counts)
percents = st.builds(Known, st.floats(0, 100, allow_nan=False))
unknown: st.SearchStrategy[Signal] = st.one_of(
    st.builds(Partial, counts, st.just(1), st.just(2)),
    st.builds(Stale, st.floats(0, 1e4)),
    st.just(Absent("gone")),
    st.just(Invalid("NaN")),
)


def any_signal(known: st.SearchStrategy[Known]) -> st.SearchStrategy[Signal]:
    return st.one_of(known, known, known, unknown)


@st.composite
def signal_sets(draw: st.DrawFn, known_only: bool = False) -> Signals:
    pick = (lambda known: known) if known_only else any_signal
    state = MetricsState.KNOWN if known_only else draw(st.sampled_from(MetricsState))
    latency = {name: draw(pick(latencies)) for name in ("ttft_p95_ms", "itl_p95_ms", "itl_p99_ms", "queue_wait_p95_ms")}
    amount = {
        name: draw(pick(amounts))
        for name in ("running_per_pod", "waiting", "preemptions", "finished", "prompt_tokens", "generation_tokens")
    }
    level = Known(0.0) if known_only else draw(any_signal(st.sampled_from((Known(0.0), Known(0.0), Known(2.0)))))
    return Signals(state=state, kv_percent=draw(pick(percents)), guard_level=level, **latency, **amount)


@st.composite
def snapshots(draw: st.DrawFn, known_only: bool = False) -> Snapshot:
    batched = draw(st.integers(64, 8192))
    limits = SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 256)),
        max_num_batched_tokens=batched,
        prefill_token_budget=batched,
        decode_token_budget=batched,
        prefill_chunk_size=draw(st.integers(1, batched)),
    )
    bounds: dict[Knob, Bound] = {}
    for knob, ceiling in ((Knob.MAX_NUM_SEQS, 256), (Knob.PREFILL_CHUNK_SIZE, batched)):
        if draw(st.integers(0, 5)):
            low = draw(st.integers(1, ceiling))
            bounds[knob] = Bound(low, draw(st.integers(low, ceiling)))
    moved = st.builds(LastMove, st.floats(0, 1000), st.sampled_from(Direction))
    return Snapshot(
        now_s=draw(st.floats(1000, 2000)),
        limits=limits,
        signals=draw(signal_sets(known_only)),
        targets=draw(st.sampled_from((TARGETS, dataclasses.replace(TARGETS, itl_p99_ms=200)))),
        policy=POLICY,
        bounds=bounds,
        block_size=draw(st.sampled_from((1, 16, 32))),
        last_move=draw(st.none() | moved),
        previous_rule=draw(st.none() | st.sampled_from(Rule)),
        in_sync=draw(st.booleans()) or known_only,
        rollout=draw(st.booleans()) and not known_only,
        guard_may_act=draw(st.booleans()),
    )


@given(snapshots())
def test_a_move_stays_inside_its_bounds_and_the_envelope(snapshot: Snapshot) -> None:
    decision = decide(snapshot)
    if isinstance(decision, Move):
        bound = snapshot.bounds[decision.knob]
        assert bound.low <= decision.to_value <= bound.high
        moved = snapshot.limits.merged(PartialLimits(**{limit_field(decision.knob): decision.to_value}))
        assert limit_violations(moved, ENVELOPE) == {}


@given(snapshots())
def test_a_decision_moves_one_knob_in_the_direction_of_its_rule(snapshot: Snapshot) -> None:
    directions = {
        Rule.PREEMPTIONS_HIGH: (Knob.MAX_NUM_SEQS, Direction.CUT),
        Rule.ITL_HIGH: (Knob.PREFILL_CHUNK_SIZE, Direction.CUT),
        Rule.QUEUE_WAIT_HIGH: (Knob.MAX_NUM_SEQS, Direction.RAISE),
        Rule.TTFT_HIGH: (Knob.PREFILL_CHUNK_SIZE, Direction.RAISE),
    }
    decision = decide(snapshot)
    if isinstance(decision, Move):
        assert (decision.knob, decision.direction) == directions[decision.rule]
        assert decision.from_value == getattr(snapshot.limits, limit_field(decision.knob)) != decision.to_value


@given(snapshots())
def test_the_same_snapshot_gives_the_same_decision(snapshot: Snapshot) -> None:
    assert decide(snapshot) == decide(dataclasses.replace(snapshot))


@given(snapshots(), st.sampled_from([state for state in MetricsState if state is not MetricsState.KNOWN]))
def test_nothing_moves_unless_the_metrics_are_known(snapshot: Snapshot, state: MetricsState) -> None:
    blind = dataclasses.replace(snapshot, signals=dataclasses.replace(snapshot.signals, state=state))
    decision = decide(blind)
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.METRICS_UNKNOWN


@given(snapshots(known_only=True), unknown)
def test_nothing_moves_on_signals_that_are_all_unknown(snapshot: Snapshot, signal: Signal) -> None:
    names = [f.name for f in dataclasses.fields(Signals) if isinstance(getattr(snapshot.signals, f.name), Known)]
    signals = dataclasses.replace(snapshot.signals, **dict.fromkeys(names, signal))
    assert isinstance(decide(dataclasses.replace(snapshot, signals=signals)), Hold)


@given(snapshots(known_only=True))
def test_nothing_moves_while_a_move_settles(snapshot: Snapshot) -> None:
    for direction in Direction:
        last = LastMove(snapshot.now_s - POLICY.settle_s(direction) + 1, direction)
        assert isinstance(decide(dataclasses.replace(snapshot, last_move=last)), Hold)


@given(snapshots(known_only=True))
def test_nothing_moves_during_a_rollout_or_out_of_sync(snapshot: Snapshot) -> None:
    assert isinstance(decide(dataclasses.replace(snapshot, rollout=True)), Hold)
    assert isinstance(decide(dataclasses.replace(snapshot, in_sync=False)), Hold)


@given(snapshots(), st.one_of(unknown, st.builds(Known, st.integers(1, 20).map(float))))
def test_nothing_moves_while_the_guard_acts_or_may_act(snapshot: Snapshot, level: Signal) -> None:
    signals = dataclasses.replace(snapshot.signals, guard_level=level)
    assert isinstance(decide(dataclasses.replace(snapshot, signals=signals, guard_may_act=True)), Hold)


@given(snapshots(known_only=True), st.floats(0.81, 1.0))
def test_nothing_moves_inside_the_deadband(snapshot: Snapshot, share: float) -> None:
    inside = {
        "ttft_p95_ms": Known(share * TARGETS.ttft_p95_ms, 1.0, 1000),
        "itl_p95_ms": Known(share * TARGETS.itl_p95_ms, 1.0, 1000),
        "itl_p99_ms": Absent("not looked at"),
        "queue_wait_p95_ms": Known(share * TARGETS.queue_wait_p95_ms, 1.0, 1000),
        "preemptions": Known(0.0),
    }
    calm = dataclasses.replace(
        snapshot, targets=TARGETS, signals=dataclasses.replace(snapshot.signals, **inside), last_move=None
    )
    decision = decide(calm)
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.WITHIN_TARGETS


@given(snapshots(known_only=True))
def test_high_kv_use_alone_never_cuts(snapshot: Snapshot) -> None:
    full = dataclasses.replace(snapshot.signals, kv_percent=Known(100.0), preemptions=Known(0.0))
    decision = decide(dataclasses.replace(snapshot, signals=full))
    if isinstance(decision, Move):
        assert (decision.knob, decision.direction) != (Knob.MAX_NUM_SEQS, Direction.CUT)
        assert (decision.knob, decision.direction) != (Knob.MAX_NUM_SEQS, Direction.RAISE), "no room to raise either"


@given(snapshots(known_only=True))
def test_a_small_breach_needs_two_looks(snapshot: Snapshot) -> None:
    first = decide(dataclasses.replace(snapshot, previous_rule=None))
    if isinstance(first, Hold) and first.reason is HoldReason.CONFIRMING:
        second = decide(dataclasses.replace(snapshot, previous_rule=first.rule))
        assert isinstance(second, Move)
        assert second.rule is first.rule


@given(snapshots(known_only=True))
def test_too_few_samples_are_no_ground_for_a_move(snapshot: Snapshot) -> None:
    few: Mapping[str, Known] = {
        name: dataclasses.replace(getattr(snapshot.signals, name), samples=POLICY.min_samples - 1)
        for name in ("ttft_p95_ms", "itl_p95_ms", "itl_p99_ms", "queue_wait_p95_ms")
    }
    signals = dataclasses.replace(snapshot.signals, preemptions=Known(0.0), **few)
    assert isinstance(decide(dataclasses.replace(snapshot, signals=signals)), Hold)


@given(snapshots())
def test_what_people_read_has_no_nan(snapshot: Snapshot) -> None:
    decision = decide(snapshot)
    text = decision.evidence if isinstance(decision, Move) else decision.message
    assert 0 < len(text) <= 1024
    assert "nan" not in text and "inf" not in text


@given(snapshots(known_only=True), st.integers(1, 30))
def test_a_knob_never_passes_its_bound_however_often_it_moves(snapshot: Snapshot, looks: int) -> None:
    assume(snapshot.bounds)
    for _ in range(looks):
        decision = decide(dataclasses.replace(snapshot, last_move=None))
        if isinstance(decision, Hold):
            snapshot = dataclasses.replace(snapshot, previous_rule=decision.rule)
            continue
        bound = snapshot.bounds[decision.knob]
        assert bound.low <= decision.to_value <= bound.high
        assert math.isfinite(decision.to_value)
        limits = snapshot.limits.merged(PartialLimits(**{limit_field(decision.knob): decision.to_value}))
        snapshot = dataclasses.replace(snapshot, limits=limits, previous_rule=decision.rule)
