"""More adapters than a model runner has room for: who waits, who passes, and that everybody has a turn."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.constraints import ADAPTER_PATIENCE_S, AdapterSlots
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import AbortCause, CacheScope, Explanation, FinishReason, Hold


def submit(rig: Any, name: str, adapter: str, **fields: Any) -> None:
    rig.submit(name, scope=CacheScope(adapter_digest=adapter.encode()), **fields)


def told(rig: Any, name: str) -> Explanation:
    (explanation,) = explain(rig.scheduler, [name], rig.now_s)
    return explanation


def adapters(rig: Any) -> set[bytes]:
    return {request.adapter for request in rig.scheduler.running} - {b""}


def slots_rig(make_rig: Any, max_adapters: int, **limits: int) -> Any:
    return make_rig(num_blocks=1000, constraints=[AdapterSlots(max_adapters)], **limits)


def test_one_adapter_too_many_waits_and_others_pass(make_rig) -> None:
    """C15: max_adapters + 1 of them."""
    rig = slots_rig(make_rig, 2)
    for name in "xyz":
        submit(rig, name, name)
    submit(rig, "x2", "x")
    rig.submit("base")
    rig.step()
    assert rig.running() == {"x", "y", "x2", "base"}
    explanation = told(rig, "z")
    assert (explanation.hold, explanation.value, explanation.bound) == (Hold.ADAPTER_SLOTS, 2, 2)
    assert explanation.why == "2 other adapters are in use, the model runner has room for 2"
    rig.run_to_end()
    assert all(rig.ends(name) == [FinishReason.LENGTH] for name in ("x", "y", "z", "x2", "base"))


def test_without_the_constraint_there_is_room_for_all(make_rig) -> None:
    rig = make_rig()
    for name in "uvwxyz":
        submit(rig, name, name)
    rig.step()
    assert len(adapters(rig)) == 6


@pytest.mark.parametrize("max_adapters", [1, 2, 3])
def test_adapters_that_take_turns_all_have_theirs(make_rig, max_adapters: int) -> None:
    """C14: one more than there are slots, each with more work than it can get done."""
    rig = slots_rig(make_rig, max_adapters, max_num_seqs=4)
    names = "wxyz"[: max_adapters + 1]
    served = dict.fromkeys(names, 0)
    for round_number in range(300):
        for name in names:
            submit(rig, f"{name}{round_number}", name, max_tokens=3)
        rig.now_s += 0.2
        rig.step()
        assert len(adapters(rig)) <= max_adapters
        for request in rig.scheduler.running:
            served[request.request_id[0]] += 1
    assert min(served.values()) > max(served.values()) / 4


def test_a_stream_of_newcomers_keeps_a_slot_no_longer_than_the_patience_and_its_running_requests(make_rig) -> None:
    rig = slots_rig(make_rig, 1)
    submit(rig, "z-first", "x", max_tokens=5)
    rig.step()
    submit(rig, "z", "z")
    asked_s = rig.now_s
    for number in range(200):
        submit(rig, f"x{number}", "x", max_tokens=5)
        rig.now_s += 0.1
        rig.step()
        if "z" in rig.running():
            break
    assert rig.now_s - asked_s <= ADAPTER_PATIENCE_S + 10 * 0.1


def test_within_the_patience_others_pass(make_rig) -> None:
    rig = slots_rig(make_rig, 1)
    submit(rig, "x0", "x", max_tokens=50)
    rig.step()
    submit(rig, "z", "z")
    submit(rig, "x1", "x")
    rig.now_s += ADAPTER_PATIENCE_S / 2
    rig.step()
    assert rig.running() == {"x0", "x1"}


@pytest.mark.parametrize(("waited_s", "gives_way"), [(1.9375, False), (2.0, True)])
def test_the_patience_ends_when_it_says(make_rig, waited_s: float, gives_way: bool) -> None:
    rig = slots_rig(make_rig, 1)
    submit(rig, "x0", "x", max_tokens=50)
    rig.step()
    rig.now_s = 1.0
    submit(rig, "z", "z")
    submit(rig, "x1", "x")
    rig.now_s = 1.0 + waited_s
    rig.step()
    assert ("x1" not in rig.running()) == gives_way


def test_an_adapter_that_gives_way_is_told_so_and_only_the_longest_seated_does(make_rig) -> None:
    rig = slots_rig(make_rig, 2)
    submit(rig, "x0", "x", max_tokens=500)
    rig.step()
    submit(rig, "y0", "y", max_tokens=500)
    rig.step()
    submit(rig, "z0", "z")
    rig.now_s += ADAPTER_PATIENCE_S
    submit(rig, "x1", "x")
    submit(rig, "y1", "y")
    assert told(rig, "x1").why == "its adapter gives way to one that has waited for longer"
    assert told(rig, "x1").hold is Hold.ADAPTER_SLOTS
    rig.step()
    assert rig.running() == {"x0", "y0", "y1"}
    rig.scheduler.abort("x0", AbortCause.CANCELLED)
    rig.step()
    assert "z0" in rig.running() and told(rig, "x1").hold is Hold.ADAPTER_SLOTS


def test_as_many_adapters_give_way_as_others_have_waited_for_too_long(make_rig) -> None:
    rig = slots_rig(make_rig, 2)
    for name in "xy":
        submit(rig, f"{name}0", name, max_tokens=500)
        rig.step()
    for name in "vw":
        submit(rig, f"{name}0", name)
    rig.now_s += ADAPTER_PATIENCE_S
    for name in "xy":
        submit(rig, f"{name}1", name)
    rig.step()
    assert rig.running() == {"x0", "y0"}


@pytest.mark.parametrize("end", ["preempted", "aborted", "finished"])
def test_the_last_one_to_use_an_adapter_frees_its_slot(make_rig, end: str) -> None:
    """C16."""
    rig = slots_rig(make_rig, 1)
    rig.submit("base", max_tokens=500)
    submit(rig, "x", "x", max_tokens=2 if end == "finished" else 500, priority=5)
    rig.step()
    submit(rig, "z", "z")
    if end == "preempted":
        rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
        rig.step()
        rig.set_limits(max_num_seqs=2)
    elif end == "aborted":
        rig.scheduler.abort("x", AbortCause.CANCELLED)
    rig.step(2)
    assert rig.running() == {"base", "z"}


def test_a_slot_for_no_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="max_adapters is 0, at least 1 is needed"):
        AdapterSlots(0)


@settings(max_examples=60)
@given(
    max_adapters=st.integers(1, 3),
    max_num_seqs=st.integers(1, 5),
    traffic=st.lists(
        st.tuples(st.sampled_from(["", "u", "v", "w", "x"]), st.integers(1, 12), st.integers(0, 3), st.integers(0, 9)),
        max_size=25,
    ),
)
def test_slots_are_never_exceeded_nobody_is_left_behind_and_what_is_told_is_what_happens(
    make_rig, max_adapters, max_num_seqs, traffic
) -> None:
    rig = slots_rig(make_rig, max_adapters, max_num_seqs=max_num_seqs, waiting_timeout_milliseconds=86_400_000)
    for number, (adapter, max_tokens, num_steps, num_aborted) in enumerate(traffic):
        submit(rig, str(number), adapter, max_tokens=max_tokens)
        if num_aborted == 0:
            rig.scheduler.abort(str(number // 2), AbortCause.CLIENT_GONE)
        for _ in range(num_steps):
            step_as_told(rig, max_adapters)
    for _ in range(sum(max_tokens for _, max_tokens, _, _ in traffic) + 1):
        step_as_told(rig, max_adapters)
    assert not rig.scheduler.has_work


def step_as_told(rig: Any, max_adapters: int) -> None:
    rig.now_s += 0.5
    waiting = [request.request_id for request in reversed(rig.scheduler.waiting)]
    holds = {one.request_id: one.hold for one in explain(rig.scheduler, waiting, rig.now_s)}
    planned = rig.step()
    assert len(adapters(rig)) <= max_adapters
    assert planned or not waiting
    for name, hold in holds.items():
        assert (name in planned) if hold is Hold.NOTHING else (hold is Hold.QUEUE_ORDER or name not in planned)
