"""Gauges and counters of the scheduler, as the metrics show them."""

import pytest

from guidevane_api.admin import ShrinkMode


def test_gauges_say_what_runs_what_waits_and_for_how_long(make_rig) -> None:
    rig = make_rig(num_blocks=10, max_num_seqs=1)
    rig.submit("a", 6)
    rig.submit("b", 5)
    rig.submit("c", 7)
    rig.step()
    stats = rig.scheduler.stats(8.0)
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 2, 12)
    assert (stats.num_blocks_total, stats.num_blocks_used, stats.num_blocks_cached) == (10, 2, 0)
    assert stats.oldest_waiting_s == pytest.approx(8.0 - 0.001)


def test_nobody_has_waited_for_less_than_no_time(make_rig) -> None:
    """A client's process may read the clock a moment later than the engine does."""
    rig = make_rig()
    rig.now_s = 5.0
    rig.submit("a")
    assert rig.scheduler.stats(4.9).oldest_waiting_s == 0.0


def test_each_step_with_work_and_each_preemption_is_counted_once(make_rig) -> None:
    rig = make_rig(max_num_seqs=3)
    for name in "abc":
        rig.submit(name, max_tokens=30)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=2)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    stats = rig.scheduler.stats(0.0)
    assert (stats.num_steps, stats.num_preemptions) == (5, 2)
    assert [batch.step for batch in rig.batches] == [1, 2, 3, 4, 5]


def test_a_step_without_work_is_not_counted(make_rig) -> None:
    rig = make_rig()
    batch = rig.plan()
    assert (batch.seqs, rig.scheduler.stats(0.0).num_steps) == ((), 0)
