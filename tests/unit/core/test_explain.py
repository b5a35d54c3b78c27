"""Each reason for which a request does not run, brought about with the real scheduler and told by explain()."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import AbortCause, Explanation, Hold, SetTargets, SetTenants
from guidevane_runtime.core.step_time import CostModel
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms


def told(rig: Any, name: str) -> Explanation:
    (explanation,) = explain(rig.scheduler, [name], rig.now_s)
    return explanation


def held(rig: Any, name: str) -> tuple[Hold, int | None, int | None]:
    explanation = told(rig, name)
    return explanation.hold, explanation.value, explanation.bound


def test_a_request_that_runs_is_held_by_nothing(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", 6)
    rig.step(2)
    rig.now_s += 5.0
    explanation = told(rig, "a")
    assert (explanation.state, explanation.position, explanation.hold) == ("running", None, Hold.NOTHING)
    assert (explanation.num_prompt_tokens, explanation.num_output_tokens, explanation.num_computed_tokens) == (6, 2, 7)
    assert explanation.age_s == pytest.approx(5.001)


def test_a_request_that_comes_in_with_the_next_step_is_held_by_nothing(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    explanation = told(rig, "a")
    assert (explanation.state, explanation.position, explanation.hold) == ("waiting", 1, Hold.NOTHING)


def test_all_slots_are_taken(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "abcd":
        rig.submit(name)
    rig.step()
    assert held(rig, "c") == held(rig, "d") == (Hold.MAX_NUM_SEQS, 2, 2)
    assert [told(rig, name).position for name in "cd"] == [1, 2]
    assert told(rig, "d").why == "2 requests run, limit maxNumSeqs 2"


def test_more_run_than_a_limit_that_was_lowered(make_rig) -> None:
    rig = make_rig()
    for name in "abc":
        rig.submit(name)
    rig.step()
    rig.set_limits(max_num_seqs=1)
    rig.submit("d")
    assert held(rig, "d") == (Hold.MAX_NUM_SEQS, 3, 1)


def test_its_blocks_do_not_fit_under_the_kv_limit(make_rig) -> None:
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=50)
    rig.submit("a", 12, max_tokens=1000)
    rig.step()
    rig.submit("b", 12, max_tokens=1)
    assert rig.pool.num_used == 3
    assert held(rig, "b") == (Hold.KV_LIMIT, 6, 5)


def test_the_peak_of_both_does_not_fit(make_rig) -> None:
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=100)
    rig.submit("a", 4, max_tokens=60)
    rig.step()
    rig.submit("b", 4, max_tokens=60)
    hold, value, bound = held(rig, "b")
    assert (hold, bound) == (Hold.PEAK_KV, 80)
    assert value is not None and value > 80


def test_what_fits_exactly_now_can_still_be_too_much_at_the_peak(make_rig) -> None:
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=60)
    rig.submit("a", 12, max_tokens=20)
    rig.step()
    rig.submit("b", 12, max_tokens=20)
    assert told(rig, "b").hold is Hold.PEAK_KV


def test_all_prefill_lanes_are_taken(make_rig) -> None:
    rig = make_rig(max_partial_prefills=1, prefill_chunk_size=4)
    rig.submit("a", 40)
    rig.step()
    rig.submit("b", 40)
    assert held(rig, "b") == (Hold.PREFILL_LANES, 1, 1)
    assert told(rig, "b").why == "1 prompts are in prefill, limit maxPartialPrefills 1"


def test_without_a_slot_it_does_not_matter_that_there_is_no_lane(make_rig) -> None:
    rig = make_rig(max_partial_prefills=1, prefill_chunk_size=4, max_num_seqs=1)
    rig.submit("a", 40)
    rig.step()
    rig.submit("b", 40)
    assert held(rig, "b") == (Hold.MAX_NUM_SEQS, 1, 1)


def test_who_needs_no_lane_passes_and_is_held_by_nothing(make_rig) -> None:
    rig = make_rig(max_partial_prefills=1, prefill_chunk_size=4)
    rig.submit("a", 40)
    rig.step()
    rig.submit("b", 40)
    rig.submit("c", 3)
    explanation = told(rig, "c")
    assert (explanation.position, explanation.hold) == (2, Hold.NOTHING)
    assert "c" in rig.step()


def test_a_long_prompt_waits_for_the_one_in_prefill(make_rig) -> None:
    rig = make_rig(max_partial_prefills=4, prefill_chunk_size=4, long_context_threshold_tokens=20)
    rig.submit("a", 40)
    rig.step()
    rig.submit("b", 30)
    assert held(rig, "b") == (Hold.LONG_PREFILL_LANE, 30, 20)
    assert told(rig, "b").why == ("a long prompt is in prefill; 30 tokens are above longContextThresholdTokens 20")


@pytest.mark.parametrize(
    ("limits", "hold"),
    [
        ({"max_num_batched_tokens": 4, "prefill_token_budget": 4, "prefill_chunk_size": 4}, Hold.TOTAL_BUDGET),
        ({"prefill_token_budget": 4, "prefill_chunk_size": 4}, Hold.PREFILL_BUDGET),
        ({"max_num_batched_tokens": 5, "prefill_token_budget": 4, "prefill_chunk_size": 4}, Hold.PREFILL_BUDGET),
    ],
)
def test_the_tokens_of_a_step_are_spent_on_a_prefill(make_rig, limits: dict[str, int], hold: Hold) -> None:
    rig = make_rig(**limits)
    rig.submit("a", 40)
    rig.step()
    rig.submit("b", 4)
    assert held(rig, "b") == (hold, 4, 4)


def test_a_decode_that_has_no_turn_in_the_next_step(make_rig) -> None:
    rig = make_rig(decode_token_budget=1)
    for name in "ab":
        rig.submit(name)
    rig.step(2)
    by_hold = {told(rig, name).hold: told(rig, name) for name in "ab"}
    assert set(by_hold) == {Hold.NOTHING, Hold.DECODE_BUDGET}
    assert (by_hold[Hold.DECODE_BUDGET].value, by_hold[Hold.DECODE_BUDGET].bound) == (1, 1)
    assert set(rig.step()) == {by_hold[Hold.NOTHING].request_id}


def test_after_a_preemption_nobody_comes_in(make_rig) -> None:
    rig = make_rig(num_blocks=12, kv_cache_utilization_limit_percent=100)
    for number in range(20):
        rig.submit(f"short{number}", 2, max_tokens=1)
    rig.run_to_end()
    for name in "ab":
        rig.submit(name, 4, max_tokens=40)
    while not rig.scheduler.stats(0.0).num_preemptions:
        rig.step()
    explanation = told(rig, "b")
    assert (explanation.hold, explanation.num_preemptions) == (Hold.COOL_DOWN, 1)
    assert explanation.why == "a request was preempted in the last step; nobody comes in in the next one"


def test_an_order_to_shrink_cools_down_too(make_rig) -> None:
    rig = make_rig()
    for name in "ab":
        rig.submit(name)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=8)
    assert {told(rig, name).hold for name in "ab"} == {Hold.NOTHING, Hold.COOL_DOWN}


def test_a_tenant_at_its_cap_waits_for_itself_while_others_pass(make_rig) -> None:
    rig = make_rig()
    rig.scheduler.set_tenants(SetTenants(TenantPolicy((TenantTerms("hog", max_in_flight=2),)), epoch=1))
    for name in "abc":
        rig.submit(name, tenant="hog")
    rig.submit("d", tenant="small")
    rig.step()
    rig.submit("e", tenant="small")
    assert rig.running() == set("abd")
    assert held(rig, "c") == (Hold.TENANT_CAP, 2, 2)
    assert told(rig, "c").why == "2 requests of its tenant run, its maxInFlight is 2"
    assert [told(rig, name).position for name in "ec"] == [1, 2]
    assert told(rig, "e").hold is Hold.NOTHING


def test_a_tenant_whose_cap_was_lowered_drains_and_is_told_so(make_rig) -> None:
    rig = make_rig()
    for name in "abc":
        rig.submit(name, tenant="hog")
    rig.step()
    rig.scheduler.set_tenants(SetTenants(TenantPolicy((TenantTerms("hog", max_in_flight=1),)), epoch=1))
    rig.submit("d", tenant="hog")
    rig.step()
    assert rig.running() == set("abc")
    assert held(rig, "d") == (Hold.TENANT_CAP, 3, 1)


def test_behind_one_that_is_held_back_it_is_held_by_the_same_limit(make_rig) -> None:
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=50)
    rig.submit("a", 12, max_tokens=1000)
    rig.step()
    rig.submit("b", 12, max_tokens=1)
    rig.submit("c", 1, max_tokens=1)
    explanation = told(rig, "c")
    assert (explanation.hold, explanation.held_at, explanation.position) == (Hold.KV_LIMIT, "b", 2)
    assert explanation.why.startswith("the first in line is held back: 6 KV blocks with it, limit 5")


def test_behind_one_that_comes_in_it_is_held_by_its_place(make_rig) -> None:
    rig = make_rig()
    for name in "abc":
        rig.submit(name)
    assert held(rig, "c") == (Hold.QUEUE_ORDER, 2, None)


def test_a_better_priority_is_ahead(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    rig.submit("b", priority=-1)
    assert [told(rig, name).position for name in "ab"] == [2, 1]


def test_who_is_not_live_is_left_out(make_rig) -> None:
    rig = make_rig()
    for name in "ab":
        rig.submit(name)
    rig.scheduler.abort("a", AbortCause.CANCELLED)
    assert [one.request_id for one in explain(rig.scheduler, ["a", "b", "c"], rig.now_s)] == ["b"]


@settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 20), st.sampled_from("ab")), max_size=14
    ),
    cap=st.integers(1, 3),
    min_awaited_tokens=st.sampled_from([1, 10, 64]),
    limits=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(1, 30),
            "prefill_token_budget": st.integers(1, 30),
            "decode_token_budget": st.integers(1, 4),
            "prefill_chunk_size": st.integers(1, 16),
            "max_partial_prefills": st.integers(1, 3),
            "kv_cache_utilization_limit_percent": st.integers(30, 100),
            "long_context_threshold_tokens": st.integers(1, 30),
        }
    ),
    itl_s=st.sampled_from([None, 1e-6, 0.02]),
)
def test_what_is_told_is_what_happens_and_asking_changes_nothing(
    make_rig, arrivals, cap, min_awaited_tokens, limits, itl_s
) -> None:
    given = {"num_blocks": 16, "min_awaited_tokens": min_awaited_tokens, "costs": CostModel(1e-3, 1e-3, 1e-3)}
    asked, silent = (make_rig(**given, **limits) for _ in range(2))
    for rig in (asked, silent):
        rig.scheduler.set_targets(SetTargets(itl_s))
        rig.scheduler.set_tenants(SetTenants(TenantPolicy((TenantTerms("a", max_in_flight=cap),)), epoch=1))
    for i, (pause, num_prompt, max_tokens, tenant) in enumerate(arrivals):
        for rig in (asked, silent):
            rig.submit(f"{i % 3}-{i}", num_prompt, tenant=tenant, max_tokens=max_tokens)
        for _ in range(pause):
            check_next_step(asked)
            silent.step()
    for _ in range(400):
        check_next_step(asked)
        silent.step()
    assert not asked.scheduler.has_work
    assert asked.batches == silent.batches


def check_next_step(rig: Any) -> None:
    preempted, findable = rig.scheduler.stats(rig.now_s).num_preemptions, set(rig.pool._by_key)
    told_now = {one.request_id: one for one in explain(rig.scheduler, list(rig.scheduler._live), rig.now_s)}
    batch = rig.plan()
    took_from_others = rig.scheduler.stats(rig.now_s).num_preemptions > preempted or findable - set(rig.pool._by_key)
    rig.finish(batch)
    if took_from_others:
        # A decode lacked a block, of a request or of the cache: seen only when the step is planned.
        return
    planned = {seq.request_id for seq in batch.seqs}
    for name, one in told_now.items():
        if one.hold is Hold.NOTHING:
            assert name in planned, one
        elif one.hold is not Hold.QUEUE_ORDER:
            assert name not in planned, one
