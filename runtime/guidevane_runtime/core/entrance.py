"""Who comes in from the queue in one step: the loop of admissions, and the rules that it obeys and explain() reads."""

from collections.abc import Sequence

from guidevane_runtime.core.admission import MemoryGate, OutputForecast, SeqSlots
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import PrefillLanes, ShortOnly, StepPlan, StepTokens, UnspentStep
from guidevane_runtime.core.constraints import PlanConstraint
from guidevane_runtime.core.preemption import Preemptions
from guidevane_runtime.core.prefix_cache import PrefixCache, PrefixInFlight, WholePrefix
from guidevane_runtime.core.request import Request, RequestState
from guidevane_runtime.core.rules import AdmissionRules, Door
from guidevane_runtime.core.running import RunningRequests
from guidevane_runtime.core.waiting import WaitingQueue


class Entrance:
    """Between the queue and those that run."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningRequests,
        preemptions: Preemptions,
        *,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        forecast: OutputForecast,
        constraints: Sequence[PlanConstraint],
        short_reserve: float,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._preemptions = preemptions
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._forecast = forecast
        self._constraints = constraints
        self._short_reserve = short_reserve

    def admit_short(self, step: StepPlan) -> None:
        """Short prompts pass those in mid-prefill, which could take all there is, and whoever waits, in their reserve.

        Nobody is passed for ever: once no prefill goes on, the queue's own order holds.
        """
        if self._waiting and self.open_reserve(step):
            self.admit(step)
            step.budget.close_reserve()

    def admit(self, step: StepPlan) -> None:
        """First in turn first; only those who wait for something of their own let others pass."""
        door = self.door(step)
        if not self._waiting or door.held():
            return
        rules = self.rules(step)
        while (head := self.head(rules)) and not rules.line_hold(head):
            self._start(head, step)
            rules.enter(head)
            if door.held():
                return

    # ------------------------------------------------------------------------- what explain() asks too, before a step

    def open_reserve(self, step: StepPlan) -> bool:
        """Set the share of short prompts aside. False: no prefill is in progress, so they pass nobody."""
        if not self._running.prefills():
            return False
        step.budget.open_reserve(self._short_reserve)
        return True

    def door(self, step: StepPlan) -> Door:
        """What may keep everybody outside in that step."""
        slots = SeqSlots(self._running.all, step.limits)
        return Door(UnspentStep(step), self._preemptions.cool_down(step), slots)

    def rules(self, step: StepPlan) -> AdmissionRules:
        """What each waiting request meets in that step, decodes and prefills in progress being planned."""
        running, prefills = self._running.all, self._running.prefills()
        in_flight = PrefixInFlight(self._prefix_cache, step, prefills)
        lanes = ShortOnly(step) if step.budget.is_for_short else PrefillLanes(step, prefills)
        return AdmissionRules(
            own=(
                self._waiting,
                *(constraint.rule(step, running) for constraint in self._constraints),
                in_flight,
                lanes,
                WholePrefix(self._prefix_cache, in_flight, lanes),
            ),
            line=(StepTokens(step), MemoryGate(self._pool, step.limits, self._forecast, running)),
        )

    def head(self, rules: AdmissionRules) -> Request | None:
        """The first in turn that has nothing of its own to wait for."""
        return self._waiting.first(lambda request: rules.own_hold(request) is None)

    def _start(self, request: Request, step: StepPlan) -> None:
        self._prefix_cache.take(request)
        has_blocks = request.blocks.try_grow_to(request.num_tokens)
        assert has_blocks, "the gate let in a request that the pool has no blocks for"
        self._waiting.admit(request)
        request.move_to(RequestState.RUNNING)
        self._running.add(request)
        step.add(request, step.budget.affordable(request))
