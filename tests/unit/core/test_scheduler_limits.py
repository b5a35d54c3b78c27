"""Limits that change while requests run."""

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import FinishReason


def test_lowering_concurrency_drains_and_nobody_is_cut_off(make_rig) -> None:
    rig = make_rig(max_num_seqs=3)
    for name in "abc":
        rig.submit(name, max_tokens=10)
    rig.step()
    rig.set_limits(max_num_seqs=1)
    rig.submit("d")
    rig.step()
    assert rig.running() == set("abc") and rig.scheduler.effective_limits.max_num_seqs == 3
    rig.run_to_end()
    assert all(rig.ends(name) == [FinishReason.LENGTH] for name in "abcd")
    assert rig.scheduler.effective_limits.max_num_seqs == 1
    assert rig.scheduler.stats(0.0).num_preemptions == 0


def test_raising_concurrency_admits_in_the_next_step(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    for name in "abc":
        rig.submit(name)
    rig.step()
    rig.set_limits(max_num_seqs=3)
    rig.step()
    assert rig.running() == set("abc")


def test_a_step_carries_the_epoch_that_it_obeyed(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    epochs = [rig.plan().epoch]
    rig.finish(rig.batches[-1])
    rig.set_limits(prefill_chunk_size=7)
    epochs.append(rig.plan().epoch)
    assert epochs == [0, 1]


def test_limits_that_arrive_during_a_step_count_from_the_next_one(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name)
    batch = rig.plan()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.finish(batch)
    assert len(rig.tokens("a")) == len(rig.tokens("b")) == 1
    rig.step()
    assert rig.running() == {"a"}


def test_a_chunk_in_progress_goes_on_with_the_new_size(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=8)
    rig.submit("a", 20)
    rig.step()
    rig.set_limits(prefill_chunk_size=3)
    assert [rig.step()["a"] for _ in range(4)] == [3, 3, 3, 3]


def test_lengths_of_an_accepted_request_are_its_own(make_rig) -> None:
    """I10: lower bounds are for those who come later."""
    rig = make_rig()
    rig.submit("a", 10, max_tokens=20)
    rig.step()
    rig.set_limits(max_model_len=12, max_output_tokens=2, max_prompt_tokens=5)
    rig.submit("b", 4, max_tokens=20)
    rig.submit("c", 6)
    rig.run_to_end()
    assert {name: len(rig.tokens(name)) for name in "abc"} == {"a": 20, "b": 2, "c": 0}
    assert rig.ends("c") == [FinishReason.ERROR]


def test_the_model_bounds_what_limits_leave_open(make_rig) -> None:
    rig = make_rig(num_blocks=2000, max_model_len=8192)
    rig.submit("a", 4090, max_tokens=500)
    rig.submit("b", 4096)
    rig.run_to_end()
    assert (len(rig.tokens("a")), rig.ends("a")) == (6, [FinishReason.LENGTH])
    assert "limit maxModelLen 4096" in rig.end_output("b").error
