"""A share of the step's prefill tokens is kept for prompts that end in the step, and used by others when none come."""

from typing import Any

import pytest

from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import Hold, SetTargets
from guidevane_runtime.core.step_time import CostModel

LIMITS = {"prefill_token_budget": 8, "prefill_chunk_size": 8, "max_num_batched_tokens": 100}


@pytest.fixture
def rig(make_rig: Any) -> Any:
    """One prompt in mid-prefill takes all the prefill tokens there are."""
    rig = make_rig(**LIMITS)
    rig.submit("a", 80)
    rig.step()
    return rig


def test_a_short_prompt_comes_in_beside_a_long_one_that_would_take_all(rig) -> None:
    """C7"""
    rig.submit("s", 4)
    assert rig.step() == {"s": 4, "a": 4}


def test_what_no_short_prompt_wants_is_used_by_the_long_one(rig) -> None:
    """I9"""
    rig.submit("s", 2)
    assert rig.step() == {"s": 2, "a": 6}
    assert rig.step() == {"s": 1, "a": 8}


def test_a_prompt_that_does_not_fit_the_reserve_is_not_short(rig) -> None:
    rig.submit("m", 5)
    assert rig.step() == {"a": 8}


def test_short_prompts_share_the_reserve_in_their_turn(rig) -> None:
    for name in "stu":
        rig.submit(name, 2)
    assert rig.step() == {"s": 2, "t": 2, "a": 4}


def test_a_short_prompt_passes_one_that_waits_for_tokens(rig) -> None:
    rig.submit("m", 40)
    rig.submit("s", 4)
    assert rig.step() == {"s": 4, "a": 4}


def test_the_rest_of_a_prompt_after_its_prefix_hit_is_short(make_rig) -> None:
    rig = make_rig(**LIMITS)
    rig.submit("s1", 20, max_tokens=1)
    rig.run_to_end()
    rig.submit("a", 80)
    rig.step()
    rig.submit("s2", 20)
    assert rig.step() == {"s2": 4, "a": 4}


def test_without_a_prefill_in_progress_nobody_is_passed(make_rig) -> None:
    """Or a prompt that waits for memory could wait for ever."""
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=50, **LIMITS)
    rig.submit("a", 12, max_tokens=1000)
    rig.step(3)
    rig.submit("m", 12, max_tokens=1)
    rig.submit("s", 2, max_tokens=1)
    assert rig.step() == {"a": 1}


def test_a_short_prompt_needs_a_slot_and_memory_like_any_other(make_rig) -> None:
    rig = make_rig(num_blocks=22, kv_cache_utilization_limit_percent=100, **LIMITS)
    rig.submit("a", 80, max_tokens=1)
    rig.step()
    rig.submit("s", 4, max_tokens=8)
    assert rig.step() == {"a": 8}
    rig.set_limits(max_num_seqs=1)
    rig.submit("t", 2, max_tokens=1)
    assert rig.step() == {"a": 8}


def test_the_reserve_is_a_share_of_what_decodes_leave_of_the_time(make_rig) -> None:
    costs = CostModel(step_s=0.001, prefill_token_s=0.001)
    rig = make_rig(num_blocks=1000, costs=costs)
    rig.scheduler.set_targets(SetTargets(0.1))
    for number in range(40):
        rig.submit(f"w{number}", 20 + number, max_tokens=2)
        rig.step()
    rig.run_to_end()
    rig.submit("d", 1, max_tokens=100)
    rig.step()
    rig.submit("a", 600)
    rig.step()
    rig.submit("m", 50, max_tokens=1)
    rig.submit("s", 40, max_tokens=1)
    assert rig.step() == {"d": 1, "s": 40, "a": 48}


def test_who_comes_in_by_the_reserve_is_told_so(rig) -> None:
    rig.submit("m", 40)
    for name in "st":
        rig.submit(name, 2)
    told = {one.request_id: one for one in explain(rig.scheduler, "amst", rig.now_s)}
    assert {name: one.hold for name, one in told.items()} == {
        "a": Hold.QUEUE_ORDER,
        "m": Hold.PREFILL_BUDGET,
        "s": Hold.NOTHING,
        "t": Hold.QUEUE_ORDER,
    }
    assert told["t"].why == "short prompts are before it in the next step, and it has what they leave"


@pytest.mark.parametrize(("share", "is_bounded"), [(0.5, True), (0.0, False)])
def test_a_short_prompt_a_second_is_answered_at_once_beside_one_of_64k(make_rig, share, is_bounded) -> None:
    """C7, in virtual time: a step takes 100 ms at most, so a short prompt has its token within two of them."""
    rig = make_rig(
        num_blocks=30_000,
        model_len=70_000,
        costs=CostModel(step_s=0.01, prefill_token_s=9e-5),
        short_reserve=share,
        prefill_token_budget=1000,
        prefill_chunk_size=1000,
        max_model_len=70_000,
        max_prompt_tokens=70_000,
    )
    rig.submit("long", 64_000, max_tokens=1)
    arrivals_s, first_tokens_s = {}, {}
    while not rig.tokens("long"):
        if rig.now_s >= len(arrivals_s):
            name = f"s{len(arrivals_s)}"
            arrivals_s[name] = rig.now_s
            rig.submit(name, 200, max_tokens=1)
        rig.step()
        first_tokens_s |= {name: rig.now_s for name in arrivals_s if rig.tokens(name) and name not in first_tokens_s}
    longest_s = max(first_tokens_s.get(name, rig.now_s) - arrivals_s[name] for name in arrivals_s)
    assert len(arrivals_s) >= 6
    assert (longest_s < 0.21) == is_bounded, longest_s


def test_beside_decodes_alone_nobody_is_passed(make_rig) -> None:
    """The reserve is against prefills in progress; without one the queue's own order holds."""
    rig = make_rig(**LIMITS)
    rig.submit("d", 4, max_tokens=20)
    rig.step()
    rig.submit("long", 40)
    rig.submit("s", 4)
    assert rig.step() == {"d": 1, "long": 8}


def test_a_short_prompt_takes_its_tokens_once(make_rig) -> None:
    """What it and the prompt in prefill leave is there for the next one in line."""
    rig = make_rig(prefill_token_budget=40, prefill_chunk_size=16, max_num_batched_tokens=100)
    rig.submit("a", 80)
    rig.step()
    rig.submit("s", 12)
    rig.submit("t", 12)
    assert rig.step() == {"s": 12, "a": 16, "t": 12}
