"""Who comes in from the waiting room, and who never can."""

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import FinishReason


def test_no_more_run_than_max_num_seqs(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "abc":
        rig.submit(name)
    rig.step()
    assert rig.running() == {"a", "b"}


def test_lower_priority_numbers_are_admitted_first(make_rig) -> None:
    """C11: priority counts while slots are full."""
    rig = make_rig(max_num_seqs=1)
    rig.submit("a")
    rig.step()
    rig.submit("b")
    rig.submit("urgent", priority=-1)
    rig.run_to_end()
    assert sorted(["a", "b", "urgent"], key=rig.first_step) == ["a", "urgent", "b"]


def test_admission_stops_at_the_kv_limit(make_rig) -> None:
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=50)
    for name in "abc":
        rig.submit(name, 16, max_tokens=1)
    rig.step()
    assert rig.ends("a") == rig.ends("b") == [FinishReason.LENGTH] and not rig.ends("c")


def test_a_newcomer_must_fit_with_what_the_others_will_grow_to(make_rig) -> None:
    """Half of the pool is free, but the one that runs may need it."""
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=100)
    rig.submit("a", 8, max_tokens=60)
    rig.submit("b", 8, max_tokens=60)
    rig.step()
    assert rig.running() == {"a"}


def test_finished_outputs_teach_how_long_the_next_ones_get(make_rig) -> None:
    rig = make_rig(num_blocks=40, eos=frozenset(range(0, 1000, 2)), kv_cache_utilization_limit_percent=100)
    rig.submit("a", 8, max_tokens=140)
    rig.submit("b", 8, max_tokens=140)
    rig.step()
    assert rig.running() <= {"a"}
    rig.run_to_end()
    for name in "abcd":
        rig.submit(f"{name}2", 8, max_tokens=140, ignore_eos=True)
    rig.step()
    assert len(rig.running()) > 1


def test_an_idle_engine_admits_whatever_fits_the_empty_pool(make_rig) -> None:
    """A27, B19, C1: no limit keeps the only request out."""
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=1)
    rig.submit("a", 39, max_tokens=500)
    assert rig.step() == {"a": 39}


def test_the_head_that_lacks_memory_is_not_passed(make_rig) -> None:
    """No starvation: those behind it wait until it has had its turn."""
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=100)
    rig.submit("a", 8, max_tokens=4)
    rig.step()
    rig.submit("big", 36, max_tokens=2)
    rig.submit("small", 4, max_tokens=2)
    rig.step()
    assert rig.running() == {"a"}
    rig.run_to_end()
    assert rig.first_step("big") < rig.first_step("small")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "limits", "why"),
    [
        (
            40,
            {},
            "prompt has 40 tokens and needs room for one more, the KV cache holds 40; "
            "shorten it or give the KV cache more memory",
        ),
        (
            20,
            {"max_model_len": 20},
            "prompt has 20 tokens and needs room for one more, limit maxModelLen 20; shorten it or raise the limit",
        ),
        (
            21,
            {"max_prompt_tokens": 20},
            "prompt has 21 tokens, limit maxPromptTokens 20; shorten it or raise the limit",
        ),
        (0, {}, "prompt has 0 tokens, at least 1 is needed; send a prompt"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_at_once(make_rig, num_prompt_tokens, limits, why) -> None:
    """B19, C3: not queued for ever."""
    rig = make_rig(num_blocks=10, **limits)
    rig.submit("a", num_prompt_tokens)
    assert rig.ends("a") == [FinishReason.ERROR] and rig.end_output("a").error == why
    assert not rig.scheduler.has_work


@pytest.mark.parametrize(
    ("num_prompt_tokens", "limits"), [(39, {}), (19, {"max_model_len": 20}), (20, {"max_prompt_tokens": 20})]
)
def test_a_prompt_at_the_limit_runs(make_rig, num_prompt_tokens, limits) -> None:
    rig = make_rig(num_blocks=10, **limits)
    rig.submit("a", num_prompt_tokens)
    rig.run_to_end()
    assert rig.ends("a") == [FinishReason.LENGTH] and rig.tokens("a")


def test_a_thousand_refusals_leave_nothing_behind(make_rig) -> None:
    """A1: the refused path leaks no block and no place."""
    rig = make_rig(num_blocks=10)
    for number in range(1000):
        rig.submit(str(number), 41)
    assert rig.pool.num_free == 10 and rig.scheduler.stats(0.0).num_waiting == 0


def test_a_request_that_waited_too_long_times_out(make_rig) -> None:
    rig = make_rig(max_num_seqs=1, waiting_timeout_milliseconds=1000)
    rig.submit("a", max_tokens=100)
    rig.step()
    rig.submit("b")
    rig.now_s = 1.001
    rig.step()
    assert not rig.ends("b")
    rig.now_s = 1.1
    rig.step()
    assert rig.ends("b") == [FinishReason.TIMEOUT] and not rig.ends("a")


def test_a_preempted_request_does_not_time_out(make_rig) -> None:
    """Its client is reading already."""
    rig = make_rig(num_blocks=100, max_num_seqs=2, waiting_timeout_milliseconds=1000)
    for name in "ab":
        rig.submit(name, max_tokens=100)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.now_s = 100.0
    rig.run_to_end()
    assert rig.ends("a") == rig.ends("b") == [FinishReason.LENGTH]
