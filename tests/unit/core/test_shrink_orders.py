"""An order to shrink by force, and other changes of limits that come before the step that would carry it out."""

from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode


def busy(make_rig: Any, **limits: int) -> Any:
    """Six requests that decode, of three blocks each."""
    rig = make_rig(num_blocks=100, max_num_seqs=6, kv_cache_utilization_limit_percent=100, **limits)
    for name in "abcdef":
        rig.submit(name, 10, max_tokens=30)
    rig.step(2)
    assert len(rig.running()) == 6
    return rig


def test_a_change_that_drains_does_not_call_off_an_order_to_shrink(make_rig) -> None:
    """The guard's limits come once a second while they recover: one such change may meet any order of an operator."""
    rig = busy(make_rig)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=2)
    rig.set_limits(prefill_chunk_size=100)
    rig.step()
    assert len(rig.running()) == 2 and rig.scheduler.effective_limits.max_num_seqs == 2


def test_an_order_to_shrink_memory_outlives_a_change_that_drains_too(make_rig) -> None:
    rig = busy(make_rig)
    rig.set_limits(ShrinkMode.PREEMPT, kv_cache_utilization_limit_percent=8)
    rig.set_limits(prefill_chunk_size=100)
    rig.step()
    assert rig.pool.num_used <= 8


@pytest.mark.parametrize(("ordered", "then", "left"), [(4, 1, 4), (2, 5, 5), (2, 6, 6)])
def test_nobody_is_preempted_for_limits_that_drain(make_rig, ordered: int, then: int, left: int) -> None:
    """Lower ones drain down from what was ordered; higher ones leave less to be done."""
    rig = busy(make_rig)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=ordered)
    rig.set_limits(max_num_seqs=then)
    rig.step()
    assert len(rig.running()) == left


def test_the_last_order_holds(make_rig) -> None:
    rig = busy(make_rig)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=2)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=4)
    rig.step()
    assert len(rig.running()) == 4


def test_an_order_is_carried_out_once(make_rig) -> None:
    rig = busy(make_rig)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=5)
    rig.step()
    rig.set_limits(max_num_seqs=3)
    rig.step(2)
    assert len(rig.running()) == 5
