"""Whose wait stands in for latencies that the guard has not heard of: of interactive requests without a first step."""

from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.guard import Guard, GuardConfig, Sample
from guidevane_runtime.core.guard_steps import Line, Step
from guidevane_runtime.core.messages import FinishReason, SetTenants
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy

OFFLINE = RequestClass.OFFLINE


def pause(rig: Any, is_paused: bool, epoch: int) -> None:
    assert rig.scheduler.set_tenants(SetTenants(TenantPolicy(pauses_offline=is_paused), epoch))


def oldest_s(rig: Any, now_s: float) -> float:
    return rig.scheduler.stats(now_s).oldest_interactive_waiting_s


def test_a_preempted_request_does_not_wait_for_its_first_token(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, max_tokens=50)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    assert rig.scheduler.stats(60.0).num_waiting == 1 and oldest_s(rig, 60.0) == 0.0
    rig.now_s = 50.0
    rig.submit("c")
    assert oldest_s(rig, 60.0) == pytest.approx(10.0)


def test_offline_work_has_nobody_who_waits_for_it(make_rig) -> None:
    rig = make_rig()
    rig.submit("batch", request_class=OFFLINE)
    assert oldest_s(rig, 60.0) == 0.0
    rig.now_s = 50.0
    rig.submit("next")
    assert oldest_s(rig, 60.0) == pytest.approx(10.0)
    assert rig.scheduler.stats(60.0).oldest_waiting_s == pytest.approx(60.0, abs=0.1)


def test_both_classes_time_out_and_the_preempted_do_not(make_rig) -> None:
    rig = make_rig(max_num_seqs=2, waiting_timeout_milliseconds=5000)
    for name in "ab":
        rig.submit(name, max_tokens=50)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.submit("batch", request_class=OFFLINE)
    rig.submit("live")
    rig.now_s = 60.0
    rig.step()
    assert rig.ends("batch") == rig.ends("live") == [FinishReason.TIMEOUT]
    assert rig.ends("a") == rig.ends("b") == []


def test_a_guard_that_pauses_offline_work_is_not_kept_at_it_by_what_it_pauses(make_rig) -> None:
    """One stream runs, too few others come to have a p95, and offline work is there all the time (L11)."""
    rig = make_rig(num_blocks=1000, max_num_seqs=4, max_output_tokens=4000)
    guard = Guard(GuardConfig({Line.TTFT: 1500.0}))
    for second in range(25):
        for _ in range(10):
            guard.observe(Sample(Line.TTFT, float(second), 9000.0))
        guard.tick(float(second), rig.scheduler.limits.target)
    assert guard.steps == (Step.REFUSE_LONG_CONTEXT, Step.PAUSE_OFFLINE)
    rig.now_s = 25.0
    rig.submit("live", max_tokens=2000)
    levels, is_paused = [], False
    for second in range(26, 146):
        rig.now_s = float(second)
        rig.submit(f"batch{second}", max_tokens=2, request_class=OFFLINE)
        rig.step(4)
        decision = guard.tick(rig.now_s, rig.scheduler.limits.target, oldest_s(rig, rig.now_s))
        levels.append(decision.level)
        if decision.effect.pauses_offline != is_paused:
            is_paused = decision.effect.pauses_offline
            pause(rig, is_paused, second)
    # The last samples of the overload are in the window for the first ten seconds.
    assert levels[10:] == sorted(levels[10:], reverse=True) and levels[-1] == 0
    assert rig.ends("batch145") or "batch145" in rig.running()
