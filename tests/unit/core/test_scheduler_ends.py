"""Ends: one terminal output each, and nothing held after it."""

import random

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import AbortCause, FinishReason
from guidevane_runtime.core.plan import SampledToken, StepOutput


def bring_to(rig, state):
    """Put request a into a state, with another one beside it."""
    rig.submit("other", 40, max_tokens=50)
    rig.step(2)
    rig.submit("a", 12, max_tokens=20)
    if state == "preempted":
        rig.step(4)
        rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
        rig.step()
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 5, "preempted": 0, "finished": 40}[state]):
        rig.step()


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "preempted", "finished"])
@pytest.mark.parametrize("num_aborts", [1, 2])
def test_an_abort_ends_a_request_in_any_state_and_frees_its_blocks(make_rig, state, num_aborts) -> None:
    """A2, A3, A4, A9, A14, A19: and a second one changes nothing."""
    rig = make_rig(prefill_chunk_size=8)
    bring_to(rig, state)
    for _ in range(num_aborts):
        rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    rig.listen()
    assert rig.ends("a") == [FinishReason.LENGTH if state == "finished" else FinishReason.ABORT]
    other = next(iter(rig.scheduler.running))
    assert (other.request_id, rig.pool.num_used) == ("other", len(other.blocks.block_ids))
    assert rig.scheduler.stats(0.0).num_waiting == 0


def test_an_abort_of_an_unknown_request_is_ignored(make_rig) -> None:
    rig = make_rig()
    rig.scheduler.abort("nobody", AbortCause.CANCELLED)
    rig.listen()
    assert not rig.outputs


def test_the_result_of_a_request_that_was_aborted_in_flight_is_dropped(make_rig) -> None:
    """A23, A24: its blocks are nobody else's before the step is over."""
    rig = make_rig(num_blocks=4)
    rig.submit("a", 12)
    batch = rig.plan()
    rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    rig.listen()
    assert rig.ends("a") == [FinishReason.ABORT] and rig.pool.num_used == 3
    rig.finish(batch)
    assert (rig.pool.num_used, rig.tokens("a"), rig.ends("a")) == (0, (), [FinishReason.ABORT])


def test_a_stop_string_ends_as_stop(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    rig.step()
    rig.scheduler.abort("a", AbortCause.STOP_STRING)
    rig.listen()
    assert rig.ends("a") == [FinishReason.STOP]


def test_a_row_that_can_not_be_sampled_ends_alone(make_rig) -> None:
    """A12: one request's fault is not the engine's."""
    rig = make_rig()
    for name in "ab":
        rig.submit(name)
    batch = rig.plan()
    good = rig.runner.execute(batch).sampled[1]
    rig.scheduler.apply(batch, StepOutput((SampledToken(0, error="logits are not finite"), good)))
    rig.run_to_end()
    assert rig.ends("a") == [FinishReason.ERROR] and rig.end_output("a").error == "logits are not finite"
    assert rig.ends("b") == [FinishReason.LENGTH] and len(rig.tokens("b")) == 8
    assert rig.end_output("b").error == "" and rig.pool.num_used == 0


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_runner_that_answers_for_too_few_or_too_many_is_found_out(make_rig, num_rows) -> None:
    """A row in the wrong place would be somebody else's token."""
    rig = make_rig()
    rig.submit("a")
    batch = rig.plan()
    with pytest.raises(ValueError, match="zip"):
        rig.scheduler.apply(batch, StepOutput((SampledToken(1),) * num_rows))


def test_an_end_token_ends_the_request_and_is_the_last_token_out(make_rig) -> None:
    rig = make_rig()
    submit = rig.submit("probe", max_tokens=8)
    rig.run_to_end()
    eos = rig.runner.continuation(submit.prompt_token_ids, 3)[-1]
    rig = make_rig(eos=frozenset({eos}))
    rig.submit("probe", max_tokens=8)
    rig.run_to_end()
    assert rig.ends("probe") == [FinishReason.STOP]
    assert (len(rig.tokens("probe")), rig.tokens("probe")[-1], rig.end_output("probe").stop_token_id) == (3, eos, None)


def test_never_more_tokens_than_asked_for(make_rig) -> None:
    """F16"""
    rig = make_rig(max_output_tokens=5, max_model_len=20)
    rig.submit("a", 4, max_tokens=3)
    rig.submit("b", 4, max_tokens=9)
    rig.submit("c", 18, max_tokens=9)
    rig.run_to_end()
    assert {name: len(rig.tokens(name)) for name in "abc"} == {"a": 3, "b": 5, "c": 2}


def test_blocks_are_free_in_the_iteration_of_the_end(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", max_tokens=2)
    rig.step(2)
    assert rig.ends("a") == [FinishReason.LENGTH] and rig.pool.num_used == 0


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(AbortCause.SHUTDOWN, FinishReason.ABORT), (AbortCause.STOP_STRING, FinishReason.STOP)],
)
def test_abort_all_ends_everyone_as_the_cause_says(make_rig, cause, reason) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "abc":
        rig.submit(name)
    rig.step()
    rig.scheduler.abort_all(cause)
    rig.listen()
    assert all(rig.ends(name) == [reason] for name in "abc")
    assert not rig.scheduler.has_work and rig.pool.num_used == 0


def test_two_hundred_aborts_at_random_moments_leave_nothing(make_rig) -> None:
    """A7: then the next one is served."""
    rig, dice = make_rig(num_blocks=60, max_num_seqs=8, prefill_chunk_size=5), random.Random(1)
    for number in range(200):
        rig.submit(str(number), dice.randrange(1, 40), max_tokens=dice.randrange(1, 30))
        batch = rig.plan()
        rig.scheduler.abort(str(dice.randrange(number + 1)), AbortCause.CLIENT_GONE)
        rig.finish(batch)
    for number in range(200):
        rig.scheduler.abort(str(number), AbortCause.CLIENT_GONE)
    rig.listen()
    stats = rig.scheduler.stats(rig.now_s)
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used, stats.oldest_waiting_s) == (0, 0, 0, 0.0)
    assert all(len(rig.ends(str(number))) == 1 for number in range(200))
    rig.submit("next")
    rig.run_to_end()
    assert len(rig.tokens("next")) == 8


def test_a_request_id_that_is_still_alive_is_refused_loudly(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    with pytest.raises(AssertionError, match="given out twice"):
        rig.submit("a")


def test_a_step_that_is_planned_before_the_last_one_was_applied_is_refused_loudly(make_rig) -> None:
    """Or a token would be computed twice."""
    rig = make_rig()
    rig.submit("a")
    rig.plan()
    with pytest.raises(AssertionError, match="planned before the last one was applied"):
        rig.plan()
