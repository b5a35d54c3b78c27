"""Tenants, classes and deadlines under the real scheduler."""

from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import AbortCause, FinishReason, SamplingParams, SetTenants, Submit
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms


def submit(rig, name: str, num_prompt_tokens: int = 4, *, max_tokens: int = 4, **fields: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    rig.scheduler.submit(Submit(name, tuple(range(1, num_prompt_tokens + 1)), params, rig.now_s, **fields))
    rig.listen()
    rig.now_s += 0.001


def set_tenants(rig, *tenants: TenantTerms, epoch: int = 1) -> bool:
    return rig.scheduler.set_tenants(SetTenants(TenantPolicy(tenants), epoch))


def test_a_hog_does_not_make_others_wait_for_its_queue(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    for number in range(50):
        submit(rig, f"hog{number}", tenant="hog")
    submit(rig, "small", tenant="small")
    rig.run_to_end()
    assert rig.first_step("small") < rig.first_step("hog2")


def test_new_terms_hold_from_the_next_step_on_and_stale_ones_never(make_rig) -> None:
    rig = make_rig(max_num_seqs=4)
    assert set_tenants(rig, TenantTerms("a", max_in_flight=1), epoch=3)
    assert not set_tenants(rig, epoch=3)
    for number in range(4):
        submit(rig, f"a{number}", tenant="a")
    rig.step()
    assert rig.running() == {"a0"}
    assert set_tenants(rig, epoch=4)
    rig.step()
    assert rig.running() == {"a0", "a1", "a2", "a3"}


def test_an_abort_gives_back_what_was_not_computed(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=10, prefill_token_budget=10)
    submit(rig, "long", 35, tenant="a")
    rig.step(2)
    rig.scheduler.abort("long", AbortCause.CLIENT_GONE)
    assert rig.scheduler._waiting.virtual_service("a") == 20


def test_what_a_step_in_flight_computes_is_not_given_back(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=10, prefill_token_budget=10)
    submit(rig, "long", 35, tenant="a")
    rig.plan()
    rig.scheduler.abort("long", AbortCause.CLIENT_GONE)
    assert rig.scheduler._waiting.virtual_service("a") == 35


def test_an_abort_before_the_first_step_costs_nothing(make_rig) -> None:
    rig = make_rig()
    submit(rig, "gone", 35, tenant="a")
    rig.scheduler.abort("gone", AbortCause.CLIENT_GONE)
    assert rig.scheduler._waiting.virtual_service("a") == 0


def test_prompt_and_output_are_billed_once_also_under_preemption(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        submit(rig, name, 6, max_tokens=9, tenant=name)
    rig.step(4)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.run_to_end()
    assert rig.scheduler.stats(0.0).num_recomputed_tokens > 0
    assert rig.scheduler._waiting.virtual_service("a") == 6 + 2 * 9
    # b comes to an empty queue when it is preempted, after a was served as much: it is lifted to nothing more.
    assert rig.scheduler._waiting.virtual_service("b") == 6 + 2 * 9


def test_a_deadline_ends_a_request_that_waits(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    submit(rig, "a", max_tokens=50)
    submit(rig, "b", deadline_s=5.0, priority=1)
    rig.step()
    rig.now_s = 5.0
    rig.step()
    assert rig.ends("b") == [FinishReason.TIMEOUT] and rig.tokens("b") == ()


def test_a_deadline_ends_a_request_that_runs_and_frees_its_blocks(make_rig) -> None:
    """I16: no token comes after it."""
    rig = make_rig()
    submit(rig, "a", max_tokens=50, deadline_s=5.0)
    rig.step(3)
    rig.now_s = 5.25
    rig.plan()
    end = rig.end_output("a")
    assert (end.finish_reason, len(rig.tokens("a")), rig.pool.num_used) == (FinishReason.TIMEOUT, 3, 0)
    assert end.error == "the deadline passed 0.250 s ago, after 3 tokens; ask for fewer or give it more time"


def test_the_earliest_deadline_ends_first_whoever_came_first(make_rig) -> None:
    rig = make_rig()
    submit(rig, "late", max_tokens=50, deadline_s=9.0)
    submit(rig, "soon", max_tokens=50, deadline_s=5.0)
    rig.step()
    rig.now_s = 6.0
    rig.step()
    assert (rig.ends("soon"), rig.ends("late")) == ([FinishReason.TIMEOUT], [])


def test_a_deadline_that_is_kept_is_forgotten(make_rig) -> None:
    rig = make_rig()
    submit(rig, "a", deadline_s=5.0)
    rig.run_to_end()
    rig.now_s = 9.0
    rig.step()
    assert rig.ends("a") == [FinishReason.LENGTH] and len(rig.scheduler._deadlines) == 0


@pytest.mark.parametrize(
    ("victim", "other"),
    [
        ({"request_class": RequestClass.OFFLINE}, {"priority": 5}),
        ({"priority": 1}, {"request_class": RequestClass.INTERACTIVE}),
        ({}, {"deadline_s": 99.0}),
        ({"deadline_s": 99.0}, {"deadline_s": 50.0}),
        ({"priority": 1, "deadline_s": 50.0}, {"deadline_s": 99.0}),
        ({"deadline_s": 99.0, "num_prompt_tokens": 40}, {"deadline_s": 50.0}),
    ],
)
def test_offline_then_low_priority_then_the_latest_deadline_is_preempted(make_rig, victim, other) -> None:
    rig = make_rig(max_num_seqs=2)
    submit(rig, "victim", max_tokens=30, **victim)
    submit(rig, "other", max_tokens=30, **other)
    rig.step(2)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.plan()
    assert rig.running() == {"other"}


def test_a_low_priority_is_served_in_bounded_time_under_a_stream_of_higher_ones(make_rig) -> None:
    """C11, I7: one urgent arrival a second, each worth a second; the low one is three levels below."""
    rig = make_rig(max_num_seqs=1, waiting_timeout_milliseconds=86_400_000)
    submit(rig, "low", priority=3, max_tokens=1)
    for number in range(300):
        rig.now_s = float(number)
        submit(rig, f"high{number}", priority=0, max_tokens=1)
        rig.step()
    assert 180 <= rig.first_step("low") <= 183


def test_one_nameless_tenant_is_served_in_the_order_of_arrival(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        submit(rig, name, 1 + int(name) % 7, max_tokens=1 + int(name) % 3)
    rig.run_to_end()
    assert sorted(names, key=rig.first_step) == names
