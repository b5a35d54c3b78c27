"""The clockwork: one heap of events for all pods, taken in order of time and, at equal times, in order of making.

Between two events nothing happens, so virtual time jumps. Pods are alike, and each does what its engine loop does: take
the mail, plan, run, apply, report.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from math import prod

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.simulator.control import Controller, FleetSample, LimitsOrder, LimitsScript, PodSample
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.simulator.faults import Fault, FaultKind
from guidevane_bench.simulator.guard_log import GuardLog
from guidevane_bench.simulator.ledger import End, Ledger, PodMeter
from guidevane_bench.simulator.pod import PodShape, SimPod
from guidevane_bench.simulator.pod_guard import TICK_S
from guidevane_bench.simulator.router import LeastLoadedRouter
from guidevane_bench.simulator.series import Series, SeriesPoint
from guidevane_bench.workload.request import LoadRequest

NO_POD = "no_pod"
"""Why the router refuses a request; a pod's door has reasons of its own."""
EMPTY_PLAN_S = 1e-3
"""An engine whose plan came out empty plans again at once, and planning takes about this long."""
MAX_COOL_DOWN_S = 3600.0
"""How long guards may take to be back at normal after the last request; what takes longer is told as not recovered."""


class EventKind(IntEnum):
    """What an event of the heap is about."""

    STEP_END = 0
    PLAN = 1
    FAULT = 2
    FAULT_END = 3
    LIMITS = 4
    SCRAPE = 5
    GUARD = 6


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Everything that a run depends on, apart from its load and its seed."""

    shape: PodShape
    costs: CostModel
    num_pods: int = 1
    faults: tuple[Fault, ...] = ()
    script: LimitsScript | None = None
    scrape_interval_s: float = 5.0


@dataclass(slots=True)
class PodSlot:
    """A place in the fleet: the pod that is in it now, and what holds for its place."""

    pod: SimPod | None
    life: int = 0
    """Counts restarts: events of an earlier life are void."""
    num_ended: int = 0
    num_metrics_gaps: int = 0
    """Those that are under way; above 0 its metrics are missing."""
    slow_factors: list[float] = field(default_factory=list)
    """Of the slowdowns under way."""

    @property
    def slowdown(self) -> float:
        return prod(self.slow_factors)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind."""

    ledger: Ledger
    series: Series
    ended_s: float
    """Virtual time of the last event."""
    num_steps: int
    busy_s: float
    """Time in steps, summed over pods."""
    num_scheduler_preemptions: int
    num_recomputed_tokens: int
    prefix_hit_percent: float | None = None
    """Of the prompt tokens that were looked up in a prefix cache; None: none was."""
    guard_log: GuardLog | None = None
    """None: the guard was off."""


@dataclass(slots=True)
class _Totals:
    num_steps: int = 0
    busy_s: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0

    @property
    def prefix_hit_percent(self) -> float | None:
        queried = self.num_prefix_queried_tokens
        return round(100 * self.num_prefix_hit_tokens / queried, 3) if queried else None

    def add(self, pod: SimPod) -> None:
        stats = pod.stats(0.0)
        self.num_steps += pod.num_steps
        self.busy_s += pod.busy_s
        self.num_preemptions += stats.num_preemptions
        self.num_recomputed_tokens += stats.num_recomputed_tokens
        self.num_prefix_queried_tokens += stats.num_prefix_queried_tokens
        self.num_prefix_hit_tokens += stats.num_prefix_hit_tokens


Event = tuple[float, int, EventKind, int, int]
"""Time, order of making, kind, pod or index, life."""


@dataclass(slots=True)
class Fleet:
    """Runs once."""

    spec: FleetSpec
    controller: Controller | None = None
    now_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    _heap: list[Event] = field(default_factory=list)
    _num_events: int = 0
    _slots: list[PodSlot] = field(default_factory=list)
    _limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    _totals: _Totals = field(default_factory=_Totals)
    _router: LeastLoadedRouter = field(default_factory=lambda: LeastLoadedRouter(0))
    _series: Series = field(default_factory=Series)
    _guard_log: GuardLog | None = None

    def run(self, requests: Iterable[LoadRequest]) -> Outcome:
        """Play the whole load, in order of arrival, and let everything end."""
        self._start()
        for request in requests:
            self._advance_to(request.arrival_s)
            self._arrive(request)
        while self.ledger.num_live:
            self._next_event()
        self._sample()
        self.ledger.ensure_all_ended()
        for slot in self._slots:
            if slot.pod:
                self._totals.add(slot.pod)
        totals, ended_s = self._totals, self.now_s
        self._cool_down()
        return Outcome(
            self.ledger,
            self._series,
            ended_s,
            totals.num_steps,
            totals.busy_s,
            totals.num_preemptions,
            totals.num_recomputed_tokens,
            totals.prefix_hit_percent,
            self._guard_log,
        )

    def _start(self) -> None:
        spec = self.spec
        script = spec.script or LimitsScript(spec.shape.limits)
        self._limits = script.order_at(0.0).limits
        self._slots = [PodSlot(self._new_pod(1.0)) for _ in range(spec.num_pods)]
        self._router = LeastLoadedRouter(spec.num_pods)
        for index, fault in enumerate(spec.faults):
            self._push(fault.at_s, EventKind.FAULT, index)
        for at_s in script.times:
            if at_s > 0:
                self._push(at_s, EventKind.LIMITS)
        self._push(spec.scrape_interval_s, EventKind.SCRAPE)
        if spec.shape.guard:
            self._guard_log = GuardLog(spec.shape.guard)
            self._push(TICK_S, EventKind.GUARD)

    def _new_pod(self, slowdown: float) -> SimPod:
        """A restarted pod reads the limits of the hour, as a container does from its mounted ConfigMap."""
        meter = PodMeter() if self.controller else None
        pod = SimPod(self.spec.shape, self.spec.costs, self._limits, lambda: self.now_s, meter)
        pod.slowdown = slowdown
        return pod

    # ------------------------------------------------------------------------------------------------------ time

    def _push(self, at_s: float, kind: EventKind, index: int = 0, life: int = 0) -> None:
        self._num_events += 1
        heappush(self._heap, (at_s, self._num_events, kind, index, life))

    def _advance_to(self, at_s: float) -> None:
        """Everything that happens before. What comes as a step ends is in the mail that the next one begins with."""
        heap = self._heap
        while heap[0][0] < at_s:
            self._next_event()
        self._move_time(at_s)

    def _next_event(self) -> None:
        at_s, _, kind, index, life = heappop(self._heap)
        self._move_time(at_s)
        if kind == EventKind.STEP_END:
            self._end_step(index, life)
        elif kind == EventKind.PLAN:
            self._plan(index, life)
        elif kind == EventKind.FAULT:
            self._begin_fault(self.spec.faults[index], index)
        elif kind == EventKind.FAULT_END:
            self._end_fault(self.spec.faults[index], life)
        elif kind == EventKind.LIMITS:
            assert self.spec.script is not None, "a change of limits came from no script"
            self._order(self.spec.script.order_at(at_s))
        elif kind == EventKind.GUARD:
            self._tick_guards()
            self._push(at_s + TICK_S, EventKind.GUARD)
        else:
            self._scrape()

    def _move_time(self, at_s: float) -> None:
        assert at_s >= self.now_s, f"virtual time went back from {self.now_s} to {at_s}"
        self.now_s = at_s

    # -------------------------------------------------------------------------------------------------- requests

    def _arrive(self, request: LoadRequest) -> None:
        request_id = str(request.number)
        entry = self.ledger.open(request_id, request)
        number = self._router.choose()
        pod = None if number is None else self._slots[number].pod
        if number is None or pod is None:
            self.ledger.close(request_id, End.REJECTED, self.now_s, NO_POD)
            return
        entry.pod = number
        if why := pod.offer(request_id, request, entry):
            self.ledger.close(request_id, End.REJECTED, self.now_s, why)
            return
        self._router.sent(number)
        if not pod.is_stepping:
            # Not at once: who comes at the same moment is in the same mail.
            self._plan_at(self.now_s, number, pod)

    def _plan(self, number: int, life: int) -> None:
        slot = self._slots[number]
        pod = slot.pod
        if life != slot.life or pod is None or pod.is_stepping:
            return
        pod.is_plan_due = False
        end_s = pod.try_begin_step(self.now_s)
        if end_s is not None:
            self._push(end_s, EventKind.STEP_END, number, life)
            return
        self._listen(number, slot, pod)
        if pod.live:
            self._plan_at(self.now_s + EMPTY_PLAN_S, number, pod)

    def _plan_at(self, at_s: float, number: int, pod: SimPod) -> None:
        if not pod.is_plan_due:
            pod.is_plan_due = True
            self._push(at_s, EventKind.PLAN, number, self._slots[number].life)

    def _end_step(self, number: int, life: int) -> None:
        slot = self._slots[number]
        pod = slot.pod
        if life != slot.life or pod is None:
            return
        pod.end_step()
        self._listen(number, slot, pod)
        self._plan(number, life)

    def _listen(self, number: int, slot: PodSlot, pod: SimPod) -> None:
        for _ in self.ledger.take(pod.take_outputs(self.now_s), self.now_s, pod.meter):
            slot.num_ended += 1
            self._router.ended(number)
        pod.report(self.now_s)

    # ---------------------------------------------------------------------------------------------------- faults

    def _begin_fault(self, fault: Fault, index: int) -> None:
        slot = self._slots[fault.pod]
        if fault.kind is FaultKind.POD_DEATH:
            if slot.pod is None:
                return
            self._kill(fault.pod, slot, slot.pod)
        elif fault.kind is FaultKind.SLOW_POD:
            slot.slow_factors.append(fault.factor)
            self._set_pace(slot)
        else:
            slot.num_metrics_gaps += 1
        self._push(self.now_s + fault.duration_s, EventKind.FAULT_END, index, slot.life)

    def _end_fault(self, fault: Fault, life: int) -> None:
        slot = self._slots[fault.pod]
        if fault.kind is FaultKind.POD_DEATH:
            assert slot.life == life and slot.pod is None, "a pod came back that had not died"
            slot.pod = self._new_pod(slot.slowdown)
            self._router.bring_in(fault.pod)
        elif fault.kind is FaultKind.SLOW_POD:
            slot.slow_factors.remove(fault.factor)
            self._set_pace(slot)
        else:
            slot.num_metrics_gaps -= 1

    def _set_pace(self, slot: PodSlot) -> None:
        """The neighbour is on the host, so a restarted pod feels it too."""
        if slot.pod:
            slot.pod.slowdown = slot.slowdown

    def _kill(self, number: int, slot: PodSlot, pod: SimPod) -> None:
        for request_id, entry in pod.live.items():
            self.ledger.close(request_id, End.LOST, self.now_s, FaultKind.POD_DEATH)
            entry.pod = number
        self._totals.add(pod)
        self._router.take_out(number)
        if self._guard_log is not None:
            self._guard_log.forget(number, self.now_s)
        slot.pod = None
        slot.life += 1

    # --------------------------------------------------------------------------------------------------- control

    def _order(self, order: LimitsOrder) -> None:
        self._limits = order.limits
        for slot in self._slots:
            if slot.pod:
                slot.pod.set_limits(order.limits, order.mode)

    def _tick_guards(self) -> None:
        log = self._guard_log
        for number, slot in enumerate(self._slots):
            pod = slot.pod
            if pod and pod.guard and log is not None:
                log.note(number, self.now_s, pod.tick_guard(pod.guard, self.now_s))

    def _cool_down(self) -> None:
        """Nothing is left but the guards: tick until they are back at normal. Time of the run has ended before."""
        give_up_s = self.now_s + MAX_COOL_DOWN_S
        while self._guard_log is not None and self._guard_log.level and self.now_s < give_up_s:
            self.now_s += TICK_S
            self._tick_guards()

    def _scrape(self) -> None:
        self._sample()
        if self.controller is not None:
            pods = tuple(self._pod_sample(number, slot) for number, slot in enumerate(self._slots))
            order = self.controller.decide(FleetSample(self.now_s, self._limits, pods))
            if order is not None:
                self._order(order)
        self._push(self.now_s + self.spec.scrape_interval_s, EventKind.SCRAPE)

    def _pod_sample(self, number: int, slot: PodSlot) -> PodSample | None:
        pod = slot.pod
        if pod is None or slot.num_metrics_gaps or pod.meter is None:
            return None
        meter, pod.meter = pod.meter, PodMeter()
        level = pod.guard.level if pod.guard else 0
        return PodSample(number, pod.stats(self.now_s), meter, slot.num_ended, level)

    def _sample(self) -> None:
        pods = [slot.pod for slot in self._slots if slot.pod]
        self._series.points.append(SeriesPoint.of(self.now_s, pods))
