"""Whom to preempt when memory or slots run out, and for how long nobody comes in afterwards."""

from collections.abc import Collection, Iterable

from guidevane_runtime.core.budget import StepPlan
from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.request import Request, RequestState
from guidevane_runtime.core.rules import Held
from guidevane_runtime.core.running import RunningRequests
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.core.waiting import WaitingQueue, deadline_of


def choose_victim(running: Iterable[Request]) -> Request:
    """Not the same one again and again; then offline; lowest priority; latest deadline; least work lost; newest."""
    return min(
        running,
        key=lambda r: (
            r.num_preemptions,
            r.submit.request_class is not RequestClass.OFFLINE,
            -r.submit.priority,
            -deadline_of(r),
            r.num_computed_tokens,
            -r.submit.arrival_s,
        ),
    )


class Preemptions:
    """Sends running requests back to the queue, counts that, and remembers when it last was."""

    def __init__(self, running: RunningRequests, waiting: WaitingQueue) -> None:
        self._running = running
        self._waiting = waiting
        self.num_so_far = 0
        self._last_step = -1

    def preempt_one(self, step: StepPlan) -> None:
        victim = choose_victim(self._running.all)
        step.drop(victim)
        self._running.remove(victim)
        victim.preempt()
        self._waiting.add(victim)
        self.num_so_far += 1
        self._last_step = step.number

    def ensure_block(self, request: Request, step: StepPlan) -> bool:
        """Make room for the next token of a decode, at the cost of others if need be. False: it can't run now."""
        while request.state is RequestState.RUNNING:
            if request.blocks.try_grow_to(request.num_tokens):
                return True
            self.preempt_one(step)
        return False  # it was the victim itself, of its own need or of another's before it

    def cool_down(self, step: StepPlan) -> "CoolDown":
        return CoolDown(step, self._last_step, self._running.all)


class CoolDown:
    """In the step of a preemption and the one after it nobody comes in: what was freed is for those who run."""

    def __init__(self, step: StepPlan, last_preemption_step: int, running: Collection[Request]) -> None:
        self._is_settled = step.number > last_preemption_step + 1
        self._running = running

    def held(self) -> Held | None:
        """An idle engine has nobody to keep room for."""
        if self._is_settled or not self._running:
            return None
        return Held(Hold.COOL_DOWN, "a request was preempted in the last step; nobody comes in in the next one")
