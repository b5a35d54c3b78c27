"""Prefill beside decodes is cut to the time that decodes have left, and never to nothing."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import AbortCause, Hold, SamplingParams, SetTargets, Submit
from guidevane_runtime.core.plan import StepLoad
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.slack import AIM, MIN_PREFILL_SHARE, MIN_PREFILL_TOKENS, PrefillSlack
from guidevane_runtime.core.step_time import CostModel, StepTimeModel

COSTS = CostModel(step_s=0.005, prefill_token_s=1e-4, decode_s=1e-4, kv_token_s=1e-6, prefill_pair_s=1e-8)
TARGET_S = 0.05


def decode(num_tokens: int = 10, deadline_s: float | None = None, num_left: int = 8) -> Request:
    submit = Submit("d", (1,) * num_tokens, SamplingParams(num_left, seed=0), 0.0, deadline_s=deadline_s)
    request = Request(submit, num_tokens + num_left, BlockPool(1, 16).table())
    request.num_computed_tokens = num_tokens - 1
    return request


cost_st = st.floats(0.0, 1e-3, allow_subnormal=False)
costs_st = st.builds(CostModel, st.floats(1e-3, 0.02), cost_st, cost_st, st.floats(0.0, 1e-5), st.floats(0.0, 1e-6))


@given(costs=costs_st, start=st.integers(0, 5000), target_s=st.floats(0.03, 0.3), num_decodes=st.integers(1, 5))
def test_what_is_affordable_is_the_most_that_keeps_the_target(costs, start, target_s, num_decodes) -> None:
    decodes = [decode()] * num_decodes
    slack = PrefillSlack(costs, target_s, decodes, 0.0)
    num_tokens = slack.affordable(start, 10_000)

    def expected_s(num_tokens: int) -> float:
        context = start + num_tokens
        return costs.seconds(StepLoad(num_tokens, num_decodes, 10 * num_decodes + context, num_tokens * context))

    most_s = max(AIM * target_s, expected_s(0) - costs.kv_token_s * start + MIN_PREFILL_SHARE * AIM * target_s)
    assert num_tokens <= MIN_PREFILL_TOKENS or expected_s(num_tokens) <= most_s * (1 + 1e-9)
    assert num_tokens == 10_000 or expected_s(num_tokens + 1) >= most_s * (1 - 1e-9)


def test_what_one_prefill_takes_the_next_one_has_not() -> None:
    slack = PrefillSlack(COSTS, TARGET_S, [decode()], 0.0)
    first = slack.affordable(0, 10_000)
    slack.spend(0, first)
    assert first > 100 and slack.affordable(0, 10_000) == 0
    assert slack.expected_s == pytest.approx(AIM * TARGET_S, rel=0.01)


def test_prefills_have_a_tenth_of_the_time_though_decodes_take_it_all() -> None:
    slack = PrefillSlack(COSTS, 0.005, [decode()] * 100, 0.0)
    assert slack.affordable(0, 10_000) == MIN_PREFILL_TOKENS
    slack = PrefillSlack(COSTS, TARGET_S, [decode()] * 1000, 0.0)
    num_tokens = slack.affordable(0, 10_000)
    assert num_tokens * COSTS.prefill_token_s == pytest.approx(MIN_PREFILL_SHARE * AIM * TARGET_S, rel=0.03)


def test_the_least_number_of_tokens_is_for_all_prefills_of_a_step_together() -> None:
    slack = PrefillSlack(COSTS, 1e-6, [decode()], 0.0)
    slack.spend(0, slack.affordable(0, 6))
    assert (slack.affordable(0, 100), slack.affordable(0, 4)) == (MIN_PREFILL_TOKENS - 6, 4)


def test_a_last_token_whose_deadline_is_nearer_than_the_target_has_less_slack() -> None:
    decodes = [decode(), decode(deadline_s=9.0, num_left=1)]
    far, near = PrefillSlack(COSTS, TARGET_S, decodes, 0.0), PrefillSlack(COSTS, TARGET_S, decodes, 8.98)
    assert (far.aim_s, near.aim_s) == (AIM * TARGET_S, pytest.approx(0.02))
    assert near.affordable(0, 10_000) < far.affordable(0, 10_000)


def test_a_deadline_that_the_next_token_does_not_meet_takes_no_slack() -> None:
    """With one of many about to pass at any time prefills would get a tenth of each step for nobody's sake."""
    slack = PrefillSlack(COSTS, TARGET_S, [decode(deadline_s=9.0, num_left=2)], 8.98)
    assert slack.aim_s == AIM * TARGET_S


# ------------------------------------------------------------------------------------------------ in the scheduler

LIMITS = {"prefill_chunk_size": 2048, "max_num_batched_tokens": 4096}


@pytest.fixture
def rig(make_rig: Any) -> Any:
    """Streams run and the model of step times knows what they and prefills cost."""
    rig = make_rig(num_blocks=4000, costs=COSTS, **LIMITS)
    rig.scheduler.set_targets(SetTargets(TARGET_S))
    for number in range(40):
        rig.submit(f"w{number}", 50 + number, max_tokens=2)
        rig.step()
    rig.run_to_end()
    for name in "ab":
        rig.submit(name, 20, max_tokens=2000)
    rig.step(2)
    return rig


def gaps_while(rig: Any, name: str) -> list[float]:
    """Times between two tokens of the streams until a prompt has its first token. Seconds."""
    gaps = []
    while not rig.tokens(name):
        before_s = rig.now_s
        rig.step()
        gaps.append(rig.now_s - before_s)
    return gaps


def test_streams_keep_their_target_while_a_long_prompt_comes_in(rig) -> None:
    rig.submit("p", 1500, max_tokens=1)
    assert max(gaps_while(rig, "p")) <= TARGET_S


def test_without_a_target_they_do_not(rig) -> None:
    rig.scheduler.set_targets(SetTargets(None))
    rig.submit("p", 1500, max_tokens=1)
    assert max(gaps_while(rig, "p")) > 2 * TARGET_S


def test_the_target_changes_from_one_step_to_the_next(rig) -> None:
    rig.submit("p", 3000, max_tokens=1)
    first = rig.step()["p"]
    rig.scheduler.set_targets(SetTargets(TARGET_S / 2))
    second = rig.step()["p"]
    rig.scheduler.set_targets(SetTargets(None))
    assert (0 < second < first / 1.5, rig.step()["p"]) == (True, 2048)


def test_a_spent_decode_budget_takes_no_bound_off_prompts(rig) -> None:
    rig.set_limits(decode_token_budget=1, **LIMITS)
    rig.submit("p", 3000, max_tokens=1)
    planned = rig.step()
    assert set(planned) > {"p"} and 0 < planned["p"] < 1000


def test_a_prompt_beside_no_stream_has_no_bound(rig) -> None:
    rig.scheduler.abort_all(AbortCause.CANCELLED)
    rig.submit("p", 1500, max_tokens=1)
    assert rig.step() == {"p": 1500}


def test_a_target_that_decodes_alone_miss_still_lets_prompts_get_on(rig) -> None:
    """Liveness: TTFT is bounded by the pace of the floor."""
    rig.scheduler.set_targets(SetTargets(1e-6))
    rig.submit("p", 160, max_tokens=1)
    assert len(gaps_while(rig, "p")) == 160 / MIN_PREFILL_TOKENS


def test_before_step_times_are_known_nothing_is_cut(make_rig) -> None:
    rig = make_rig(num_blocks=1000, costs=COSTS, **LIMITS)
    rig.scheduler.set_targets(SetTargets(TARGET_S))
    rig.submit("a", 20, max_tokens=100)
    rig.step(StepTimeModel.MIN_STEPS + 1)
    rig.submit("p", 1500, max_tokens=1)
    assert rig.step()["p"] == 1500


def test_token_budgets_bound_the_step_as_before(rig) -> None:
    rig.set_limits(prefill_chunk_size=100, prefill_token_budget=150)
    for name in "pq":
        rig.submit(name, 1000, max_tokens=1)
    assert rig.step() == {"a": 1, "b": 1, "p": 100, "q": 50}


def test_output_is_the_same_with_and_without_a_target(rig) -> None:
    """I10"""
    rig.submit("p", 1500, max_tokens=20)
    rig.run_to_end()
    for name, num_prompt, num_tokens in (("p", 1500, 20), ("a", 20, 2000)):
        prompt = tuple((ord(name) + i) % 1000 for i in range(num_prompt))
        assert rig.tokens(name) == rig.runner.continuation(prompt, num_tokens)


def test_a_prompt_that_is_held_back_or_cut_is_told_so(rig) -> None:
    rig.submit("p", 3000, max_tokens=1)
    rig.step()
    rig.submit("q", 1000, max_tokens=1)
    first, second = explain(rig.scheduler, ["p", "q"], rig.now_s)
    planned = rig.step()
    assert (first.hold, second.hold) == (Hold.NOTHING, Hold.ITL_SLACK)
    assert first.why.startswith(f"it is part of the next step, with {planned['p']} tokens: the step is expected to ")
    assert second.why.endswith("45.0 ms keep the ITL target") and "q" not in planned
    expected_ms = float(second.why.split()[6])
    assert expected_ms == pytest.approx(45.0, rel=0.05)
