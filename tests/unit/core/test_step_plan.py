"""The books of one step while it is planned."""

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import StepPlan, short_of_tokens
from guidevane_runtime.core.messages import Hold, SamplingParams, Submit
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import Held

LIMITS = SchedulerLimits(max_num_batched_tokens=20, prefill_token_budget=12, decode_token_budget=4)


def make(name: str, num_uncomputed_tokens: int) -> Request:
    submit = Submit(name, (1,) * 30, SamplingParams(max_tokens=9, seed=0), arrival_s=0.0)
    request = Request(submit, max_num_tokens=39, blocks=BlockPool(10, 4).table())
    request.note_computed(30 - num_uncomputed_tokens)
    return request


def test_a_decode_and_a_prefill_are_each_booked_on_their_own_budget_and_on_the_whole() -> None:
    step = StepPlan(1, 0.0, LIMITS)
    step.add(make("decode", 1), 1)
    step.add(make("prefill", 30), 8)
    assert step.budget.left == (11, 4, 3)


@pytest.mark.parametrize(
    ("total", "prefill", "decode", "is_spent"),
    [(1, 1, 0, False), (1, 0, 1, False), (5, 0, 0, True), (0, 5, 5, True)],
)
def test_a_step_is_spent_when_all_its_tokens_are_or_both_its_shares(total, prefill, decode, is_spent) -> None:
    limits = LIMITS.model_copy(
        update={"max_num_batched_tokens": total, "prefill_token_budget": prefill, "decode_token_budget": decode}
    )
    assert StepPlan(1, 0.0, limits).budget.is_spent is is_spent


def test_what_was_planned_for_a_victim_goes_back_to_the_budget_it_came_from() -> None:
    step, decode, prefill = StepPlan(1, 0.0, LIMITS), make("decode", 1), make("prefill", 30)
    step.add(decode, 1)
    step.add(prefill, 8)
    lefts = []
    for victim in (decode, prefill):
        step.drop(victim)
        lefts.append(step.budget.left)
    assert lefts == [(12, 4, 4), (20, 12, 4)] and step.seal(0).seqs == ()


@pytest.mark.parametrize(
    ("planned", "asked", "hold", "value", "bound"),
    [
        (20, Hold.PREFILL_BUDGET, Hold.TOTAL_BUDGET, 20, 20),
        (12, Hold.PREFILL_BUDGET, Hold.PREFILL_BUDGET, 12, 12),
        (12, Hold.DECODE_BUDGET, Hold.DECODE_BUDGET, 1, 4),
    ],
)
def test_what_is_short_is_told_with_what_others_take_of_it(planned, asked, hold, value, bound) -> None:
    limits = LIMITS if planned == 12 else LIMITS.model_copy(update={"prefill_token_budget": 30})
    step = StepPlan(1, 0.0, limits)
    step.add(make("decode", 1), 1)
    step.add(make("prefill", 30), planned - (planned == 20))
    assert short_of_tokens(step, asked)._replace(sentence="") == Held(hold, "", value, bound)


class Slack:
    """Prefills have all the time that they have had."""

    expected_s, aim_s = 5.0, 4.5

    def affordable(self, start: int, num_tokens: int) -> int:
        return 0

    def spend(self, start: int, num_tokens: int) -> None:
        """It is spent already."""


@pytest.mark.parametrize(("num_planned", "is_cut"), [(11, True), (12, False)])
def test_a_prefill_is_cut_by_the_time_while_the_budgets_have_a_token_left(num_planned: int, is_cut: bool) -> None:
    step, prefill = StepPlan(1, 0.0, LIMITS), make("prefill", 30)
    step.add(prefill, num_planned)
    step.budget.slack = Slack()
    held = short_of_tokens(step, Hold.PREFILL_BUDGET)
    assert (step.is_cut_by_slack(prefill), held.hold is Hold.ITL_SLACK) == (is_cut, is_cut)
    assert step.slack_sentence == "the step is expected to take 5000.0 ms, 4500.0 ms keep the ITL target"


def test_a_victim_that_was_not_planned_gives_nothing_back() -> None:
    step = StepPlan(1, 0.0, LIMITS)
    step.drop(make("decode", 1))
    assert step.budget.left == (20, 12, 4)
