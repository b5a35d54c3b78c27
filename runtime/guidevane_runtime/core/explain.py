"""Why a request is not running: which limit holds it back right now, and its place in the queue.

It asks the very rules that the next step's admissions will ask: what is said here is what will happen, if no mail comes
in between and nobody is preempted. It changes nothing, but ends what is due by now, as that step would first of all.
"""

from collections.abc import Iterable
from typing import NamedTuple

from guidevane_runtime.core.budget import LEFT_BY_SHORT, StepPlan, budget_of, short_of_tokens
from guidevane_runtime.core.entrance import Entrance
from guidevane_runtime.core.messages import Explanation, Hold
from guidevane_runtime.core.request import Request, RequestState
from guidevane_runtime.core.rules import AdmissionRules, Held
from guidevane_runtime.core.scheduler import Scheduler

NEXT_STEP = Held(Hold.NOTHING, "it is part of the next step")


class Told(NamedTuple):
    """What is said of a request."""

    held: Held
    at: Request | None = None
    """The request that it really is about, where that is another one."""

    @property
    def why(self) -> str:
        return f"the first in line is held back: {self.held.why}" if self.at else self.held.why


def explain(scheduler: Scheduler, request_ids: Iterable[str], now_s: float) -> tuple[Explanation, ...]:
    """One explanation per request that is live, in the order asked for."""
    scheduler.catch_up(now_s)
    view = _View(scheduler, now_s)
    found = [request for request_id in request_ids if (request := scheduler.live(request_id))]
    # As the step will ask: a rule may hold who comes later for the sake of who came first.
    explanations = {request: view.explanation(request, now_s) for request in sorted(found, key=view.position)}
    return tuple(explanations[request] for request in found)


class _View:
    """The scheduler as it stands before its next step; made once for all requests of a question."""

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        entrance = scheduler.entrance
        self._step = scheduler.next_step(now_s)
        self._door = entrance.door(self._step)
        self._rules = entrance.rules(self._step)
        self._head = entrance.head(self._rules)
        self._reserve = _reserve_rules(entrance, scheduler.next_decodes(now_s))
        self._short = self._first_short(entrance)
        self._positions = {request: i for i, request in enumerate(scheduler.waiting, start=1)}

    def position(self, request: Request) -> int:
        """In the queue, 1 is first; 0 when it runs."""
        return self._positions.get(request, 0)

    def explanation(self, request: Request, now_s: float) -> Explanation:
        is_running = request.state is RequestState.RUNNING
        told = Told(self._hold_running(request)) if is_running else self._hold_waiting(request)
        return Explanation(
            request_id=request.request_id,
            state=str(request.state),
            position=self.position(request) or None,
            hold=told.held.hold,
            value=told.held.value,
            bound=told.held.bound,
            held_at=told.at.request_id if told.at else None,
            why=told.why,
            age_s=max(0.0, now_s - request.submit.arrival_s),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_preemptions=request.num_preemptions,
        )

    def _first_short(self, entrance: Entrance) -> Request | None:
        """The first short prompt that passes prefills in progress. How many come after it, only the step shows."""
        short = entrance.head(self._reserve) if self._reserve else None
        return short if self._reserve and short and not self._reserve.line_hold(short) else None

    def _is_short(self, request: Request) -> bool:
        return self._reserve is not None and self._reserve.own_hold(request) is None

    def _hold_running(self, request: Request) -> Held:
        num_planned = self._step.num_planned(request)
        if not num_planned:
            return short_of_tokens(self._step, budget_of(request))
        if self._short and request.num_uncomputed_tokens > 1:
            return LEFT_BY_SHORT
        if self._step.is_cut_by_slack(request):
            why = f"it is part of the next step, with {num_planned} tokens: {self._step.slack_sentence}"
            return Held(Hold.NOTHING, why)
        return NEXT_STEP

    def _hold_waiting(self, request: Request) -> Told:
        if request is self._short:
            return Told(NEXT_STEP)
        told = self._hold_in_line(request)
        if self._short and (told.held.hold is Hold.NOTHING or self._is_short(request)):
            return Told(LEFT_BY_SHORT)
        return told

    def _hold_in_line(self, request: Request) -> Told:
        """The door is everybody's; what is its own each request meets for itself; the rest is the first in line's."""
        if held := self._door.held() or self._rules.own_hold(request):
            return Told(held)
        held = self._rules.line_hold(self._head) if self._head else None
        if self._head is request:
            return Told(held or NEXT_STEP)
        if held is None:
            why = "{value} requests are before it in the queue"
            return Told(Held(Hold.QUEUE_ORDER, why, self.position(request) - 1))
        return Told(held, at=self._head)


def _reserve_rules(entrance: Entrance, step: StepPlan) -> AdmissionRules | None:
    """What short prompts meet once the decodes of a step are planned. None: they pass nobody in it."""
    if not entrance.open_reserve(step) or entrance.door(step).held():
        return None
    return entrance.rules(step)
