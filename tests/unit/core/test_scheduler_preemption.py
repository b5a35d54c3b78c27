"""Preemption by recompute: only when a decode lacks a block, or when a limits change orders it."""

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.admission import MAX_PREEMPTIONS_ON_ESTIMATE
from guidevane_runtime.core.messages import AbortCause, FinishReason
from guidevane_runtime.core.tenants import RequestClass


def crowded(make_rig, **options):
    """Two requests that both fit now and can't both grow to their ends: the forecast believes in short outputs."""
    rig = make_rig(num_blocks=12, kv_cache_utilization_limit_percent=100, **options)
    for number in range(20):
        rig.submit(f"short{number}", 2, max_tokens=1)
    rig.run_to_end()
    return rig


def expected(rig, name, num_prompt, num_tokens):
    return rig.runner.continuation(tuple(ord(name[0]) + i for i in range(num_prompt)), num_tokens)


def preemptions(rig, name):
    return max(output.num_preemptions for output in rig.outputs if output.request_id == name)


def grow_together(rig, *names, num_prompt=4, max_tokens=40):
    """Admit all in one step while the forecast is for one token each."""
    for name in names:
        rig.submit(name, num_prompt, max_tokens=max_tokens)


def test_the_newest_request_with_the_least_work_is_preempted_when_no_block_is_free(make_rig) -> None:
    rig = crowded(make_rig)
    grow_together(rig, "a", "b")
    rig.run_to_end()
    assert preemptions(rig, "a") == 0 and preemptions(rig, "b") >= 1


def test_one_that_makes_room_for_itself_by_leaving_is_not_in_the_step(make_rig) -> None:
    rig = crowded(make_rig)
    rig.submit("a", 19, max_tokens=30)
    rig.submit("low", 21, max_tokens=30, priority=1)
    rig.step(4)
    assert (rig.pool.num_free, rig.step()) == (0, {"a": 1})
    assert rig.running() == {"a"} and rig.pool.num_used == 6


def test_one_that_gets_room_from_another_runs_in_the_same_step(make_rig) -> None:
    rig = crowded(make_rig)
    rig.submit("a", 21, max_tokens=30)
    rig.submit("low", 19, max_tokens=30, priority=1)
    rig.step(4)
    assert (rig.pool.num_free, rig.step()) == (0, {"a": 1})
    assert rig.running() == {"a"} and rig.pool.num_used == 7


@pytest.mark.parametrize("shares", [False, True])
def test_output_is_the_same_with_and_without_preemption(make_rig, shares) -> None:
    """B5, B7, I10: no token is lost, doubled or changed."""
    rig = crowded(make_rig, shares=shares)
    grow_together(rig, "a", "b", "c")
    rig.run_to_end()
    assert rig.scheduler.stats(0.0).num_preemptions > 0
    for name in "abc":
        assert (rig.tokens(name), rig.ends(name)) == (expected(rig, name, 4, 40), [FinishReason.LENGTH])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_preemption_at_a_block_boundary_loses_nothing(make_rig, block_size, offset, shares) -> None:
    """B10: lengths of a whole number of blocks, plus and minus one."""
    rig = make_rig(num_blocks=100, block_size=block_size, shares=shares, max_num_seqs=2)
    num_prompt = 3 * block_size + offset
    for name in "ab":
        rig.submit(name, num_prompt, max_tokens=3 * block_size)
    rig.step(block_size)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, num_prompt, 3 * block_size) for name in "ab")


def test_the_lower_priority_is_preempted_before_the_newer(make_rig) -> None:
    rig = crowded(make_rig)
    rig.submit("low", 4, max_tokens=40, priority=1)
    rig.submit("high", 4, max_tokens=40, priority=0)
    rig.run_to_end()
    assert (preemptions(rig, "low") > 0, preemptions(rig, "high")) == (True, 0)


def test_nobody_is_admitted_in_the_step_of_a_preemption_nor_in_the_next(make_rig) -> None:
    rig = crowded(make_rig)
    grow_together(rig, "a", "b")
    while "b" in rig.running() or rig.scheduler.stats(0.0).num_running == 0:
        rig.step()
    rig.submit("c", 2, max_tokens=1)
    assert rig.step() == {"a": 1}


def test_a_request_is_not_preempted_again_and_again(make_rig) -> None:
    """B16, B17: each return is on a safer estimate, the last on a certain one."""
    rig = crowded(make_rig)
    grow_together(rig, *"abcdef", num_prompt=3, max_tokens=44)
    rig.run_to_end()
    assert max(preemptions(rig, name) for name in "abcdef") <= MAX_PREEMPTIONS_ON_ESTIMATE + 1
    assert all(rig.ends(name) == [FinishReason.LENGTH] for name in "abcdef")


def test_an_output_that_outgrows_the_whole_pool_ends_as_length(make_rig) -> None:
    """B14: no crash, no wait for memory that does not exist."""
    rig = make_rig(num_blocks=5)
    rig.submit("a", 8, max_tokens=500)
    rig.run_to_end()
    assert rig.ends("a") == [FinishReason.LENGTH]
    assert rig.tokens("a") == expected(rig, "a", 8, 13)
    assert rig.pool.num_free == 5


def test_several_can_be_preempted_in_one_step(make_rig) -> None:
    """C9: nobody is skipped when the running set shrinks under the loop."""
    rig = make_rig(max_num_seqs=6)
    for name in "abcdef":
        rig.submit(name, max_tokens=30)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=2)
    assert set(rig.step()) == rig.running() == {"a", "b"}
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 4, 30) for name in "abcdef")


def test_preempted_requests_keep_their_place_in_the_queue(make_rig) -> None:
    """C10"""
    rig = make_rig(max_num_seqs=3)
    for name in "abc":
        rig.submit(name, max_tokens=30)
    rig.step()
    rig.submit("late", max_tokens=30)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=3)
    rig.step(3)
    assert rig.running() == {"a", "b", "c"}


def test_preempting_and_resuming_twenty_times_changes_nothing(make_rig) -> None:
    """B16"""
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, max_tokens=200)
    for _ in range(20):
        rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
        rig.step(2)
        rig.set_limits(max_num_seqs=2)
        rig.step(3)
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 4, 200) for name in "ab")


def test_recomputed_tokens_are_counted_once_computed(make_rig) -> None:
    """Both that were preempted come back in one step."""
    rig = make_rig(shares=False, max_num_seqs=3)
    for name in "abc":
        rig.submit(name, 4, max_tokens=30)
    rig.step(5)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    assert rig.scheduler.stats(0.0).num_recomputed_tokens == 0
    rig.set_limits(max_num_seqs=3)
    rig.run_to_end()
    assert rig.scheduler.stats(0.0).num_recomputed_tokens == 16


def test_first_scheduled_time_survives_a_preemption(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, 4, max_tokens=30)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.now_s = 50.0
    rig.run_to_end()
    assert len({output.first_scheduled_s for output in rig.outputs if output.request_id == "b"}) == 1


def test_shrinking_the_kv_limit_by_force_frees_blocks_and_keeps_one_running(make_rig) -> None:
    rig = make_rig(num_blocks=40)
    for name in "abc":
        rig.submit(name, 32, max_tokens=4)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, kv_cache_utilization_limit_percent=1)
    rig.step()
    assert len(rig.running()) == 1 and rig.scheduler.stats(0.0).num_preemptions == 2
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 32, 4) for name in "abc")


def test_what_runs_just_at_a_kv_limit_stays_when_it_is_lowered_by_force(make_rig) -> None:
    rig = make_rig(num_blocks=40)
    for name in "ab":
        rig.submit(name, 30, max_tokens=4)
    rig.step()
    assert rig.pool.num_used == 16
    rig.set_limits(ShrinkMode.PREEMPT, kv_cache_utilization_limit_percent=40)
    rig.step()
    assert rig.running() == {"a", "b"}


def test_a_freed_slot_stays_free_for_one_step_after_a_preemption(make_rig) -> None:
    """B17: what was just freed is not handed out again at once."""
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, max_tokens=30)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=2)
    assert [set(rig.step()), set(rig.step())] == [{"a"}, {"a", "b"}]


def test_one_that_was_preempted_before_is_spared(make_rig) -> None:
    """B17: though it has the least work to lose."""
    rig = make_rig(max_num_seqs=3)
    rig.submit("a", 60, max_tokens=30)
    rig.submit("b", 4, max_tokens=30)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.submit("c", 40, max_tokens=30)
    rig.step()
    rig.set_limits(max_num_seqs=3)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=2)
    rig.step()
    assert rig.running() == {"a", "b"}


def test_a_victim_that_was_planned_already_leaves_the_step(make_rig) -> None:
    """B18: the step has no sequence without blocks."""
    rig = crowded(make_rig)
    rig.submit("a", 2, max_tokens=16)
    rig.submit("b", 30, max_tokens=16)
    rig.run_to_end()
    assert preemptions(rig, "a") == 1
    assert rig.tokens("a") == expected(rig, "a", 2, 16) and rig.tokens("b") == expected(rig, "b", 30, 16)


def test_an_offline_request_that_was_preempted_is_spared_as_well(make_rig) -> None:
    """B17: what was lost once counts more than class or priority."""
    rig = make_rig(max_num_seqs=2)
    rig.submit("online", priority=-5, max_tokens=50)
    rig.submit("batch", request_class=RequestClass.OFFLINE, max_tokens=50)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=2)
    rig.step(2)
    assert rig.running() == {"online", "batch"}
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    assert rig.running() == {"batch"}


def test_outputs_that_defy_every_forecast_cost_little_recomputed_work(make_rig) -> None:
    """B17: one in twelve is twenty times as long. Without the estimate of the peak two fifths of all work is lost."""
    rig = make_rig(num_blocks=24, kv_cache_utilization_limit_percent=100, shares=False, max_num_seqs=16)
    for number in range(600):
        rig.submit(f"r{number}", 4, max_tokens=3 if number % 12 else 60)
    rig.run_to_end()
    stats, num_computed = rig.scheduler.stats(0.0), sum(batch.num_tokens for batch in rig.batches)
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens < 0.2 * num_computed


def test_a_preempted_request_comes_back_at_once_when_nobody_is_left_to_wait_for(make_rig) -> None:
    """C1: the pause after a preemption never leaves the engine idle."""
    rig = make_rig(max_num_seqs=2, shares=False)
    for name in "ab":
        rig.submit(name, max_tokens=30)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    assert rig.step() == {"a": 1}
    rig.scheduler.abort("a", AbortCause.CANCELLED)
    assert rig.step() == {"b": 5}
