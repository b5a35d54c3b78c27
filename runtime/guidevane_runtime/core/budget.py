"""What one step may still spend."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.plan import ScheduledBatch
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import Held
from guidevane_runtime.core.slack import ItlSlack, PrefillSlack
from guidevane_runtime.core.waiting import place_of

SHORT_RESERVE = 0.5
"""Share of a step's prefill tokens that short prompts may take before those in mid-prefill. A prompt is short when all
that is left of it fits. A half, so prefills keep half of their pace at worst; with a quarter a prompt of 200 tokens is
not short any more where the budget is 512 or the ITL target keeps steps small: see docs/scheduler.md."""


class BudgetLeft(NamedTuple):
    """Tokens that a step may still spend, by what bounds them."""

    total: int
    prefill: int
    decode: int


class StepBudget:
    """Tokens of one step. A request that needs one token is a decode, whatever brought it there."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._total = limits.max_num_batched_tokens
        self._decode = limits.decode_token_budget
        self._prefill = limits.prefill_token_budget
        self._chunk_size = limits.prefill_chunk_size
        self._reserve: int | None = None
        self.num_beside_reserve = 0
        """Tokens that prefills in progress have in this step, however much of the open reserve is used."""
        self.slack: PrefillSlack | None = None
        """Time that is left for prefills, once decodes are planned. None: no bound."""

    @property
    def left(self) -> BudgetLeft:
        return BudgetLeft(self._total, self._prefill, self._decode)

    @property
    def num_decodes_left(self) -> int:
        return min(self._total, self._decode)

    @property
    def is_spent(self) -> bool:
        return self._total < 1 or max(self._prefill, self._decode) < 1

    def affordable(self, request: Request) -> int:
        """Tokens of the request that fit what is left; 0 is none."""
        needed = request.num_uncomputed_tokens
        if needed == 1:
            return min(1, self.num_decodes_left)
        most = min(needed, self._chunk_size, self._prefill, self._total)
        if self.slack is not None:
            most = self.slack.affordable(request.num_computed_tokens, most)
        if self._reserve is not None:
            return needed if needed <= min(most, self._reserve) else 0
        return most

    def open_reserve(self, share: float) -> None:
        """Until it is closed prompts can be afforded only whole, and out of this share of what prefills may take."""
        most = min(self._prefill, self._total)
        most = self.slack.affordable(0, most) if self.slack else most
        self._reserve = int(share * most)
        self.num_beside_reserve = most - self._reserve

    def close_reserve(self) -> None:
        self._reserve = None

    @property
    def is_for_short(self) -> bool:
        """Whether the reserve is open."""
        return self._reserve is not None

    def spend(self, request: Request, num_tokens: int) -> None:
        self._book(request, num_tokens)

    def refund(self, request: Request, num_tokens: int) -> None:
        self._book(request, -num_tokens)

    def _book(self, request: Request, num_tokens: int) -> None:
        self._total -= num_tokens
        if request.num_uncomputed_tokens == 1:
            self._decode -= num_tokens
            return
        self._prefill -= num_tokens
        if self._reserve is not None:
            self._reserve -= num_tokens
        if self.slack is not None:
            self.slack.spend(request.num_computed_tokens, num_tokens)


class StepPlan:
    """A step while it is being planned; sealed into an immutable batch."""

    def __init__(self, number: int, now_s: float, limits: SchedulerLimits) -> None:
        self.number = number
        self.now_s = now_s
        self.limits = limits
        self.budget = StepBudget(limits)
        self.num_recomputed_tokens = 0
        self._parts: dict[Request, int] = {}
        self._drafts: dict[Request, tuple[int, ...]] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        self.budget.spend(request, num_tokens)
        self._parts[request] = num_tokens

    def add_drafts(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Let a planned decode carry guesses at what comes after it."""
        self.budget.spend(request, len(drafts))
        self._drafts[request] = drafts

    @property
    def decodes(self) -> list[Request]:
        return [request for request in self._parts if request.num_uncomputed_tokens == 1]

    def limit_prefills(self, itl_slack: ItlSlack) -> None:
        """All decodes are in: what they leave of the time to their next tokens bounds prefills from here on."""
        self.budget.slack = itl_slack.beside(tuple(self._parts), self.now_s)

    def num_planned(self, request: Request) -> int:
        """Its tokens in this step; 0 when it is left out."""
        return self._parts.get(request, 0)

    def getting_on(self, prefills: Iterable[Request]) -> list[Request]:
        """Of prefills in progress, those that compute something in this step.

        While the reserve is open they are not planned yet; then it is those that get on whatever short prompts take.
        """
        if not self.budget.is_for_short:
            return [request for request in prefills if self.num_planned(request)]
        num_left, found = self.budget.num_beside_reserve, list[Request]()
        for request in sorted(prefills, key=place_of):
            if num_left < 1:
                break
            found.append(request)
            num_left -= min(request.num_uncomputed_tokens, self.limits.prefill_chunk_size)
        return found

    def drop(self, request: Request) -> None:
        """Take a request that is being preempted out again; its tokens go back to the budget."""
        num_tokens = self._parts.pop(request, 0)
        if num_tokens:
            self.budget.refund(request, num_tokens)

    def can_end(self, request: Request) -> bool:
        """Whether what is left can take in all of its prompt, so that it is no prefill any more after this step."""
        return request.num_uncomputed_tokens - self.budget.affordable(request) <= 1

    def is_partial(self, request: Request) -> bool:
        """Whether the request will still be in mid-prefill after this step."""
        return request.num_uncomputed_tokens - self.num_planned(request) > 1

    def is_cut_by_slack(self, request: Request) -> bool:
        """Whether it has fewer tokens in this step than the budgets of tokens would still give it."""
        planned, left = self.num_planned(request), self.budget.left
        whole = min(request.num_uncomputed_tokens, self.limits.prefill_chunk_size)
        return planned < whole and min(left.prefill, left.total) > 0

    @property
    def slack_sentence(self) -> str:
        slack = self.budget.slack
        assert slack is not None, "nothing but the ITL target holds back what the token budgets have room for"
        expected_ms, aim_ms = 1000 * slack.expected_s, 1000 * slack.aim_s
        return f"the step is expected to take {expected_ms:.1f} ms, {aim_ms:.1f} ms keep the ITL target"

    def seal(self, epoch: int) -> ScheduledBatch:
        """Fix the plan: note the step on its requests, decodes first in the batch."""
        seqs = []
        for place, (request, num_tokens) in enumerate(self._parts.items()):
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self.now_s
            request.last_turn = (self.number, place)
            self.num_recomputed_tokens += request.num_recomputed(num_tokens)
            seqs.append(request.scheduled(num_tokens))
        for request, drafts in self._drafts.items():
            place = request.last_turn[1]
            seqs[place] = replace(seqs[place], token_ids=seqs[place].token_ids + drafts)
        seqs.sort(key=lambda seq: not seq.is_decode)
        num_drafts = {request.request_id: len(drafts) for request, drafts in self._drafts.items()}
        return ScheduledBatch(step=self.number, seqs=tuple(seqs), epoch=epoch, num_drafts=num_drafts)


class UnspentStep:
    """Door rule: a step whose tokens are spent brings in nobody."""

    def __init__(self, step: StepPlan) -> None:
        self._step = step

    def held(self) -> Held | None:
        return short_of_tokens(self._step, Hold.PREFILL_BUDGET) if self._step.budget.is_spent else None


class StepTokens:
    """Line rule: the first in line comes in only if it computes something in this step."""

    def __init__(self, step: StepPlan) -> None:
        self._step = step

    def held(self, request: Request) -> Held | None:
        return None if self._step.budget.affordable(request) else short_of_tokens(self._step, budget_of(request))

    def enter(self, request: Request) -> None:
        """Its tokens are spent already: it is part of the step."""


def budget_of(request: Request) -> Hold:
    return Hold.DECODE_BUDGET if request.num_uncomputed_tokens == 1 else Hold.PREFILL_BUDGET


def short_of_tokens(step: StepPlan, budget: Hold) -> Held:
    """Held by maxNumBatchedTokens if that is spent, else by the budget that is asked about, or the ITL target."""
    left, limits = step.budget.left, step.limits
    if left.total < 1:
        budget, bound, num_left = Hold.TOTAL_BUDGET, limits.max_num_batched_tokens, left.total
    elif budget is Hold.DECODE_BUDGET:
        bound, num_left = limits.decode_token_budget, left.decode
    elif left.prefill < 1:
        bound, num_left = limits.prefill_token_budget, left.prefill
    else:
        return Held(Hold.ITL_SLACK, step.slack_sentence)
    sentence = f"others take {{value}} tokens of the next step, limit {budget} {{bound}}"
    return Held(budget, sentence, bound - num_left, bound)


LEFT_BY_SHORT = Held(Hold.QUEUE_ORDER, "short prompts are before it in the next step, and it has what they leave")


class ShortOnly:
    """Own rule, instead of the lanes while the reserve is open: only prompts that end in this step come in."""

    def __init__(self, step: StepPlan) -> None:
        self._step = step

    def held(self, request: Request) -> Held | None:
        return None if self._step.can_end(request) else LEFT_BY_SHORT

    def enter(self, request: Request) -> None:
        """Its tokens are off the reserve already."""


class PrefillLanes:
    """Own rule: prefills that take more than one step: max_partial_prefills at once, and of long prompts only one."""

    def __init__(self, step: StepPlan, prefills: Iterable[Request]) -> None:
        self._step = step
        self._threshold = step.limits.long_context_threshold_tokens
        self._in_prefill: list[Request] = []
        for request in prefills:
            self.enter(request)

    def enter(self, request: Request) -> None:
        if self._step.is_partial(request):
            self._in_prefill.append(request)

    def has_room_for(self, request: Request) -> bool:
        if self._step.can_end(request):
            return True  # a short prompt, or the rest of a long one after its prefix hit
        if self.waits_for_long(request):
            return False
        return len(self._in_prefill) < self._step.limits.max_partial_prefills

    def held(self, request: Request) -> Held | None:
        if self.has_room_for(request):
            return None
        if self.waits_for_long(request):
            why = "a long prompt is in prefill; {value} tokens are above longContextThresholdTokens {bound}"
            return Held(Hold.LONG_PREFILL_LANE, why, request.num_prompt_tokens, self._threshold)
        why = "{value} prompts are in prefill, limit maxPartialPrefills {bound}"
        return Held(Hold.PREFILL_LANES, why, len(self._in_prefill), self._step.limits.max_partial_prefills)

    def waits_for_long(self, request: Request) -> bool:
        """Whether it is long, and so is one that is in prefill."""
        return self._is_long(request) and any(map(self._is_long, self._in_prefill))

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self._threshold
