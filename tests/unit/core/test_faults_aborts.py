"""Faults of other engines at an abort or a preemption, by what must hold here; docs/faults.md has the whole list."""

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import AbortCause, FinishReason


def test_an_abort_in_the_step_of_the_last_token_leaves_one_end(make_rig) -> None:
    """A4: twice, while the step that would end it by itself is in flight."""
    rig = make_rig()
    rig.submit("a", max_tokens=2)
    rig.step()
    batch = rig.plan()
    for _ in range(2):
        rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    rig.finish(batch)
    assert rig.ends("a") == [FinishReason.ABORT] and len(rig.tokens("a")) == 1
    assert rig.pool.num_used == 0 and not rig.scheduler.has_work


def test_an_abort_after_the_last_token_changes_nothing(make_rig) -> None:
    """A4, A9"""
    rig = make_rig()
    rig.submit("a", max_tokens=1)
    batch = rig.plan()
    rig.scheduler.apply(batch, rig.runner.execute(batch))
    rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    rig.listen()
    assert rig.ends("a") == [FinishReason.LENGTH]


def test_fifty_who_leave_the_queue_cost_no_step(make_rig) -> None:
    """A18: their prompts are never computed, and the next one is served at once."""
    rig = make_rig(max_num_seqs=1)
    rig.submit("running", max_tokens=50)
    rig.step()
    for number in range(50):
        rig.submit(f"gone{number}", 20)
    for number in range(50):
        rig.scheduler.abort(f"gone{number}", AbortCause.CLIENT_GONE)
    assert rig.scheduler.stats(rig.now_s).num_waiting == rig.scheduler.stats(rig.now_s).num_waiting_tokens == 0
    rig.scheduler.abort("running", AbortCause.CLIENT_GONE)
    rig.submit("next")
    assert rig.step() == {"next": 4}


def test_an_abort_in_mid_prefill_costs_no_more_than_the_chunk_in_flight(make_rig) -> None:
    """A19, A20"""
    rig = make_rig(prefill_chunk_size=8)
    rig.submit("long", 80)
    rig.step()
    batch = rig.plan()
    rig.scheduler.abort("long", AbortCause.CLIENT_GONE)
    rig.finish(batch)
    assert [seq.token_ids for seq in batch.seqs] == [tuple(ord("l") + i for i in range(8, 16))]
    assert rig.pool.num_used == 0 and not rig.plan().seqs


@pytest.mark.parametrize("num_steps", range(1, 14))
def test_a_preemption_after_any_step_changes_no_output(make_rig, num_steps) -> None:
    """B2: in the middle of a prefill of three chunks, at its end, and in decode; while a step was in flight."""
    rig = make_rig(max_num_seqs=2, prefill_chunk_size=4)
    for name in "ab":
        rig.submit(name, 11, max_tokens=12)
    for _ in range(num_steps - 1):
        rig.step()
    batch = rig.plan()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.finish(batch)
    rig.run_to_end()
    assert rig.scheduler.stats(rig.now_s).num_preemptions == 1
    for name in "ab":
        whole = rig.runner.continuation(tuple(ord(name) + i for i in range(11)), 12)
        assert (rig.tokens(name), rig.ends(name)) == (whole, [FinishReason.LENGTH])
