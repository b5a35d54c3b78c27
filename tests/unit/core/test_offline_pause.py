"""While the guard pauses the offline class: held back, not refused, and never in an engine that would idle."""

from typing import Any

from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import Hold, SamplingParams, SetTenants, Submit
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms


def submit(rig: Any, name: str, *, tenant: str = "", max_tokens: int = 4) -> None:
    """A request of the class that its name begins with."""
    request_class = RequestClass.OFFLINE if name.startswith("offline") else RequestClass.INTERACTIVE
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    rig.scheduler.submit(Submit(name, (1, 2, 3), params, rig.now_s, tenant=tenant, request_class=request_class))
    rig.now_s += 0.001


def pause(rig: Any, is_paused: bool, epoch: int, *tenants: TenantTerms) -> None:
    assert rig.scheduler.set_tenants(SetTenants(TenantPolicy(tenants, pauses_offline=is_paused), epoch))


def test_offline_work_waits_while_anything_runs_and_goes_on_afterwards(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=4)
    pause(rig, True, 1)
    submit(rig, "live", max_tokens=50)
    rig.step()
    submit(rig, "offline")
    rig.step(5)
    assert rig.running() == {"live"}
    pause(rig, False, 2)
    rig.step()
    assert rig.running() == {"live", "offline"}


def test_what_runs_when_the_pause_begins_runs_on(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=4)
    submit(rig, "offline", max_tokens=50)
    rig.step()
    pause(rig, True, 1)
    rig.step(5)
    assert rig.running() == {"offline"}


def test_an_engine_that_would_idle_takes_offline_work_one_by_one(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=4)
    pause(rig, True, 1)
    for name in ("offline0", "offline1"):
        submit(rig, name, max_tokens=3)
    rig.step()
    assert rig.running() == {"offline0"}
    rig.run_to_end()
    assert rig.first_step("offline1") > rig.first_step("offline0")


def test_of_tenants_in_a_pause_the_least_served_is_first_in_an_engine_that_would_idle(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=1)
    submit(rig, "live", tenant="a")
    rig.run_to_end()
    pause(rig, True, 1)
    submit(rig, "offline0", tenant="a")
    submit(rig, "offline1", tenant="b")
    rig.step()
    assert rig.running() == {"offline1"}


def test_interactive_work_goes_first_in_an_engine_that_would_idle(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=1)
    pause(rig, True, 1)
    submit(rig, "offline", tenant="a")
    submit(rig, "live", tenant="b")
    rig.step()
    assert rig.running() == {"live"}


def test_time_in_a_pause_is_no_credit_afterwards(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=1)
    pause(rig, True, 1, TenantTerms("a"), TenantTerms("b"))
    for number in range(20):
        submit(rig, f"live{number}", tenant="a", max_tokens=1)
    for number in range(20):
        submit(rig, f"offline{number}", tenant="b", max_tokens=1)
    rig.step(10)
    pause(rig, False, 2, TenantTerms("a"), TenantTerms("b"))
    for number in range(20, 40):
        submit(rig, f"live{number}", tenant="a", max_tokens=1)
    rig.step(10)
    came_in = {seq.request_id for batch in rig.batches for seq in batch.seqs if seq.request_id.startswith("offline")}
    # They take turns from here on: b does not get what a was served meanwhile.
    assert 4 <= len(came_in) <= 6


def test_explain_says_that_a_request_is_held_by_the_pause_and_by_nothing_else(make_rig: Any) -> None:
    rig = make_rig(max_num_seqs=4)
    submit(rig, "live", max_tokens=50)
    rig.step()
    submit(rig, "offline")
    pause(rig, True, 1)
    (found,) = explain(rig.scheduler, ["offline"], rig.now_s)
    assert (found.hold, found.position) == (Hold.OFFLINE_PAUSED, 1)
    assert found.why == "the guard holds offline work back while anything runs"
    pause(rig, False, 2)
    (found,) = explain(rig.scheduler, ["offline"], rig.now_s)
    assert found.hold is Hold.NOTHING
