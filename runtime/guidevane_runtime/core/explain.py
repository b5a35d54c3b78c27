"""Why a request is not running: which limit holds it back right now, and its place in the queue. Pure, changes nothing.

It asks the scheduler's own objects in the order in which the next step will: what is said here is what will happen, if
no mail comes in between.
"""

from collections.abc import Iterable
from typing import NamedTuple

from guidevane_runtime.core.budget import PrefillLanes, StepPlan
from guidevane_runtime.core.messages import Explanation, Hold
from guidevane_runtime.core.request import Request, RequestState
from guidevane_runtime.core.scheduler import Scheduler


class Held(NamedTuple):
    """By what, and at which value of which bound."""

    hold: Hold
    why: str
    value: int | None = None
    bound: int | None = None
    at: Request | None = None
    """The request that it really is about, where that is another one."""


LEFT_BY_SHORT = Held(Hold.QUEUE_ORDER, "short prompts are before it in the next step, and it has what they leave")


def explain(scheduler: Scheduler, request_ids: Iterable[str], now_s: float) -> tuple[Explanation, ...]:
    """One explanation per request that is live, in the order asked for."""
    view = _View(scheduler, now_s)
    found = (scheduler.live(request_id) for request_id in request_ids)
    return tuple(view.explanation(request, now_s) for request in found if request is not None)


class _View:
    """The scheduler as it stands before its next step; made once for all requests of a question."""

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        self._scheduler = scheduler
        self._limits = scheduler.limits.target
        self._running = scheduler.running
        self._step = scheduler.next_step(now_s)
        self._lanes = PrefillLanes(self._step, self._running)
        self._gate = scheduler.memory_gate()
        waiting = scheduler.waiting
        self._positions = {request: i for i, request in enumerate(waiting, start=1)}
        self._head = next((request for request in waiting if scheduler.has_lane(request, self._lanes)), None)
        self._reserve = scheduler.next_reserve(now_s)
        self._short = self._first_short(waiting)

    def explanation(self, request: Request, now_s: float) -> Explanation:
        held = self._hold_running(request) if request.state is RequestState.RUNNING else self._hold_waiting(request)
        return Explanation(
            request_id=request.request_id,
            state=str(request.state),
            position=self._positions.get(request),
            hold=held.hold,
            value=held.value,
            bound=held.bound,
            held_at=held.at.request_id if held.at else None,
            why=held.why,
            age_s=max(0.0, now_s - request.submit.arrival_s),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_preemptions=request.num_preemptions,
        )

    def _first_short(self, waiting: Iterable[Request]) -> Request | None:
        """The first short prompt that passes prefills in progress. How many come after it, only the step shows."""
        if not self._reserve.budget.is_for_short or self._hold_slots() is not None:
            return None
        short = next((request for request in waiting if self._is_short(request)), None)
        return short if short and self._reserve.budget.affordable(short) and self._gate.admits(short) else None

    def _is_short(self, request: Request) -> bool:
        return self._scheduler.has_lane(request, PrefillLanes(self._reserve, ()))

    def _hold_running(self, request: Request) -> Held:
        num_planned = self._step.num_planned(request)
        if not num_planned:
            return _short_of_tokens(self._step, request)
        if self._short and request.num_uncomputed_tokens > 1:
            return LEFT_BY_SHORT
        if self._step.is_cut_by_slack(request):
            return Held(Hold.NOTHING, f"it is part of the next step, with {num_planned} tokens: {_slack(self._step)}")
        return Held(Hold.NOTHING, "it is part of the next step")

    def _hold_waiting(self, request: Request) -> Held:
        if request is self._short:
            return Held(Hold.NOTHING, "it is part of the next step")
        held = self._hold_in_line(request)
        if self._short and (held.hold is Hold.NOTHING or self._is_short(request)):
            return LEFT_BY_SHORT
        return held

    def _hold_in_line(self, request: Request) -> Held:
        """What holds everybody, then the prefill lanes, which each request meets for itself, then the first in line."""
        held = self._hold_all(request) or self._hold_at_lanes(request)
        if held is not None:
            return held
        assert self._head is not None, "a request that has room in the prefill lanes is not behind one that has"
        held = self._hold_head(self._head)
        if self._head is request:
            return held or Held(Hold.NOTHING, "it is part of the next step")
        if held is None:
            before = self._positions[request] - 1
            return Held(Hold.QUEUE_ORDER, f"{before} requests are before it, and the first comes in now", before)
        return held._replace(why=f"the first in line is held back: {held.why}", at=self._head)

    def _hold_all(self, request: Request) -> Held | None:
        if self._step.budget.is_spent:
            return _short_of_tokens(self._step, request)
        return self._hold_slots()

    def _hold_slots(self) -> Held | None:
        num_running, max_num_seqs = len(self._running), self._limits.max_num_seqs
        if self._scheduler.is_cooling_down:
            return Held(Hold.COOL_DOWN, "a request was preempted in the last step; nobody comes in in the next one")
        if num_running >= max_num_seqs:
            why = f"{num_running} requests run, limit maxNumSeqs {max_num_seqs}"
            return Held(Hold.MAX_NUM_SEQS, why, num_running, max_num_seqs)
        return None

    def _hold_at_lanes(self, request: Request) -> Held | None:
        if self._scheduler.has_lane(request, self._lanes):
            return None
        if self._lanes.waits_for_long(request):
            tokens, threshold = request.num_prompt_tokens, self._limits.long_context_threshold_tokens
            why = f"a long prompt is in prefill; {tokens} tokens are above longContextThresholdTokens {threshold}"
            return Held(Hold.LONG_PREFILL_LANE, why, tokens, threshold)
        used, lanes = len(self._lanes), self._limits.max_partial_prefills
        return Held(Hold.PREFILL_LANES, f"{used} prompts are in prefill, limit maxPartialPrefills {lanes}", used, lanes)

    def _hold_head(self, head: Request) -> Held | None:
        if not self._step.budget.affordable(head):
            return _short_of_tokens(self._step, head)
        if not self._running or self._gate.admits(head):
            return None
        blocks, max_blocks = self._gate.blocks_now(head), self._gate.max_blocks
        if blocks > max_blocks:
            return Held(Hold.KV_LIMIT, f"{blocks} KV blocks with it, limit {max_blocks}", blocks, max_blocks)
        peak, max_tokens = self._gate.peak_tokens(head), max_blocks * self._scheduler.pool.block_size
        why = f"{peak} KV tokens expected at the peak with it, limit {max_tokens}"
        return Held(Hold.PEAK_KV, why, peak, max_tokens)


def _short_of_tokens(step: StepPlan, request: Request) -> Held:
    left, limits = step.budget.left, step.limits
    if left.total < 1:
        hold, used, bound = Hold.TOTAL_BUDGET, limits.max_num_batched_tokens - left.total, limits.max_num_batched_tokens
    elif request.num_uncomputed_tokens == 1:
        hold, used, bound = Hold.DECODE_BUDGET, limits.decode_token_budget - left.decode, limits.decode_token_budget
    elif left.prefill < 1:
        hold, used, bound = Hold.PREFILL_BUDGET, limits.prefill_token_budget - left.prefill, limits.prefill_token_budget
    else:
        return Held(Hold.ITL_SLACK, _slack(step))
    return Held(hold, f"others take {used} tokens of the next step, limit {hold} {bound}", used, bound)


def _slack(step: StepPlan) -> str:
    slack = step.budget.slack
    assert slack is not None, "nothing but the ITL target holds back what the token budgets have room for"
    expected_ms, aim_ms = 1000 * slack.expected_s, 1000 * slack.aim_s
    return f"the step is expected to take {expected_ms:.1f} ms, {aim_ms:.1f} ms keep the ITL target"
