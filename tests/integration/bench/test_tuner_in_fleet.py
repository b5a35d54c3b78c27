"""The operator's tuner, unchanged, over a simulated fleet: a breach is mended within its bounds, calm is left alone.

The adapter between the two lives here, as neither room may know the other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from guidevane_api.limits import PartialLimits, SchedulerLimits
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.spec_control import Knob
from guidevane_api.status import MetricsState
from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.simulator.control import FleetSample, LimitsOrder, PodSample
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.simulator.faults import Fault, FaultKind
from guidevane_bench.simulator.fleet import Fleet, FleetSpec
from guidevane_bench.simulator.pod import PodShape
from guidevane_bench.workload.request import LoadRequest
from guidevane_operator.retune.decide import decide
from guidevane_operator.retune.setup import bounds_of, policy_of, targets_of
from guidevane_operator.retune.snapshot import (
    Decision,
    Direction,
    Hold,
    HoldReason,
    LastMove,
    Move,
    Rule,
    Snapshot,
    limit_field,
)
from guidevane_operator.signals import Known, Signal, Signals
from guidevane_runtime.core.guard import GuardConfig
from guidevane_runtime.core.guard_steps import Line

SLO_ITL_MS = 80
SPEC = LLMServiceSpec.model_validate({"model": {"uri": "file:///model"}, "slo": {"itlP95Milliseconds": SLO_ITL_MS}})
SCRAPE_S = float(SPEC.monitoring.scrape_interval_seconds)
NUM_SCRAPES = SPEC.retune.window_seconds // SPEC.monitoring.scrape_interval_seconds
COSTS = CostModel(step_s=0.020, prefill_token_s=0.0001, decode_s=0.001)
BREACH_S, BREACH_END_S, END_S = 200.0, 600.0, 700.0
"""Long prompts come among the streams: 120 ms a step at first, 71 ms in chunks of 512."""
FIRST_MOVE_WITHIN_S = 75.0


@dataclass(frozen=True)
class Look:
    """One look of the tuner."""

    now_s: float
    itl_p95_ms: float | None
    guard_level: float | None
    decision: Decision


@dataclass
class TunerController:
    """Asked at every scrape; looks as often as the spec says, at what the last window of scrapes showed."""

    looks: list[Look] = field(default_factory=list)
    _window: deque[Sequence[PodSample | None]] = field(default_factory=lambda: deque(maxlen=NUM_SCRAPES + 1))
    _last_move: LastMove = field(default_factory=lambda: LastMove(0.0, Direction.RAISE))
    """As after a start of the operator: it settles first."""
    _previous_rule: Rule | None = None

    def decide(self, sample: FleetSample) -> LimitsOrder | None:
        self._window.append(sample.pods)
        if sample.now_s % SPEC.retune.interval_seconds:
            return None
        signals = signals_of(self._window)
        decision = decide(self._snapshot(sample, signals))
        self.looks.append(Look(sample.now_s, value_of(signals.itl_p95_ms), value_of(signals.guard_level), decision))
        if not isinstance(decision, Move):
            self._previous_rule = decision.rule
            return None
        self._previous_rule, self._last_move = None, LastMove(sample.now_s, decision.direction)
        return LimitsOrder(sample.limits.merged(PartialLimits(**{limit_field(decision.knob): decision.to_value})))

    @property
    def moves(self) -> list[tuple[float, Move]]:
        return [(look.now_s, look.decision) for look in self.looks if isinstance(look.decision, Move)]

    def _snapshot(self, sample: FleetSample, signals: Signals) -> Snapshot:
        return Snapshot(
            now_s=sample.now_s,
            limits=sample.limits,
            signals=signals,
            targets=targets_of(SPEC),
            policy=policy_of(SPEC),
            bounds=bounds_of(SPEC, sample.limits),
            last_move=self._last_move,
            previous_rule=self._previous_rule,
        )


def signals_of(window: Sequence[Sequence[PodSample | None]]) -> Signals:
    """What Prometheus would say of the scrapes of a window. A pod that is missing now makes all of it stale."""
    newest, oldest = window[-1], window[0]
    now = [pod for pod in newest if pod is not None]
    before = [pod for pod in oldest if pod is not None]
    if len(now) < len(newest) or len(before) < len(oldest):
        return Signals(MetricsState.STALE, why="a pod is missing", fresh_pods=len(now), expected_pods=len(newest))
    seen = [[pod for pod in pods if pod is not None] for pods in list(window)[1:]]
    count = len(newest)
    return Signals(
        state=MetricsState.KNOWN,
        fresh_pods=count,
        expected_pods=count,
        kv_percent=Known(max(100 * pod.stats.num_blocks_used / pod.stats.num_blocks_total for pod in now)),
        running_per_pod=Known(max((sum(pod.stats.num_running for pod in pods) / count for pods in seen), default=0)),
        waiting=Known(max((sum(pod.stats.num_waiting for pod in pods) for pods in seen), default=0)),
        preemptions=Known(grown(before, now, lambda pod: pod.stats.num_preemptions)),
        finished=Known(grown(before, now, lambda pod: pod.num_ended)),
        ttft_p95_ms=p95_of([pod.meter.ttft for pods in seen for pod in pods]),
        itl_p95_ms=p95_of([pod.meter.itl for pods in seen for pod in pods]),
        queue_wait_p95_ms=p95_of([pod.meter.queue_wait for pods in seen for pod in pods]),
        guard_level=Known(max(pod.guard_level for pod in now)),
    )


def grown(before: Sequence[PodSample], now: Sequence[PodSample], count: Callable[[PodSample], int]) -> int:
    return sum(map(count, now)) - sum(map(count, before))


def p95_of(histograms: Sequence[LatencyHistogram]) -> Known:
    merged = LatencyHistogram()
    for histogram in histograms:
        merged.merge(histogram)
    return Known(1000 * (merged.quantile(0.95) or 0.0), samples=merged.num_samples)


def value_of(signal: Signal) -> float | None:
    return signal.value if isinstance(signal, Known) else None


# ------------------------------------------------------------------------------------------------------------- loads


def streams(until_s: float, gap_s: float) -> list[tuple[float, int, int]]:
    """(arrival, prompt, output): short prompts, evenly spaced."""
    return [(index * gap_s, 100, 60) for index in range(int(until_s / gap_s))]


def breach() -> list[LoadRequest]:
    """Streams all the time; in the breach, beside them, prompts of 1,000 tokens that answer in five."""
    long = [(BREACH_S + 0.4 * index, 1000, 5) for index in range(int((BREACH_END_S - BREACH_S) / 0.4))]
    return numbered(sorted(streams(END_S, 2.0) + long))


def numbered(rows: Sequence[tuple[float, int, int]]) -> list[LoadRequest]:
    return [LoadRequest(number, *row) for number, row in enumerate(rows)]


ITL_GUARD = GuardConfig({Line.ITL: float(SLO_ITL_MS)})


def run(requests: Sequence[LoadRequest], *, faults: tuple[Fault, ...] = (), **shape: Any) -> TunerController:
    """shape: fields of PodShape."""
    controller = TunerController()
    limits = SchedulerLimits.resolve(SPEC.limits, SPEC.envelope)
    pods = PodShape(limits, 8192, **shape)
    Fleet(FleetSpec(pods, COSTS, faults=faults, scrape_interval_s=SCRAPE_S), controller).run(requests)
    return controller


@pytest.fixture(scope="module")
def breached() -> TunerController:
    return run(breach())


# ------------------------------------------------------------------------------------------------------------- tests


def test_tuner_acts_within_75_s_of_a_breach_and_on_the_knob_that_helps(breached: TunerController) -> None:
    at_s, move = breached.moves[0]
    assert BREACH_S < at_s <= BREACH_S + FIRST_MOVE_WITHIN_S
    assert (move.knob, move.rule) == (Knob.PREFILL_CHUNK_SIZE, Rule.ITL_HIGH)


def test_tuner_brings_itl_back_inside_the_slo_while_the_load_lasts(breached: TunerController) -> None:
    worst = max(look.itl_p95_ms or 0 for look in breached.looks)
    last_move_s = breached.moves[-1][0]
    settled = [look for look in breached.looks if last_move_s + 90 <= look.now_s <= BREACH_END_S]
    assert worst > 1.4 * SLO_ITL_MS
    assert last_move_s < BREACH_S + 240 and len(settled) > 5
    assert all(look.itl_p95_ms is not None and look.itl_p95_ms <= SLO_ITL_MS for look in settled)


def test_tuner_moves_in_steps_within_its_bounds_and_settles_after_each(breached: TunerController) -> None:
    startup = SchedulerLimits.resolve(SPEC.limits, SPEC.envelope)
    bound = bounds_of(SPEC, startup)[Knob.PREFILL_CHUNK_SIZE]
    times = [at_s for at_s, _ in breached.moves]
    for _, move in breached.moves:
        assert bound.low <= move.to_value < move.from_value
        assert move.to_value >= move.from_value * (100 - SPEC.retune.max_step_percent.chunk_cut) // 100
    assert all(after - before >= SPEC.retune.settle_seconds.cut for before, after in pairwise(times))


def test_tuner_changes_nothing_in_an_hour_of_calm() -> None:
    calm = run(numbered(streams(3600.0, 4.0)))
    assert len(calm.looks) >= 119
    assert calm.moves == []
    assert calm.looks[-1].decision.reason is HoldReason.WITHIN_TARGETS  # type: ignore[union-attr]


def test_tuner_holds_while_metrics_are_missing_and_acts_when_they_are_back() -> None:
    gap = Fault(BREACH_S - 20, 0, FaultKind.METRICS_GAP, 200.0)
    blind = run(breach(), faults=(gap,))
    during = [look.decision for look in blind.looks if gap.at_s < look.now_s <= gap.at_s + gap.duration_s]
    assert {decision.reason for decision in during if not isinstance(decision, Move)} == {HoldReason.METRICS_UNKNOWN}
    assert not any(isinstance(decision, Move) for decision in during)
    assert blind.moves and blind.moves[0][0] > gap.at_s + gap.duration_s


def test_tuner_holds_while_the_guard_acts() -> None:
    # So wide a target cuts no prefill: the line is the guard's alone to hold.
    guarded = run(breach(), guard=ITL_GUARD, itl_target_s=10.0)
    acting = [look.decision for look in guarded.looks if look.guard_level]
    assert len(acting) > 5
    assert {decision.reason for decision in acting if isinstance(decision, Hold)} == {HoldReason.GUARD_ACTS}
    assert not any(isinstance(decision, Move) for decision in acting)


def test_guard_and_tuner_have_nothing_to_do_where_prefill_is_cut_to_the_itl_line() -> None:
    kept = run(breach(), guard=ITL_GUARD)
    assert not any(look.guard_level for look in kept.looks)
    assert kept.moves == []


def test_same_load_gives_the_same_looks(breached: TunerController) -> None:
    assert run(breach()).looks == breached.looks
