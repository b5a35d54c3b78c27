"""Equal prompts that come at the same time: the first computes their text, the others wait for its blocks."""

from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import AbortCause, CacheScope, FinishReason, Hold, SetTenants
from guidevane_runtime.core.plan import SampledToken, StepOutput
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms

NUM_SIBLINGS = 8
SIBLINGS = [f"a{number}" for number in range(NUM_SIBLINGS)]


def expected(rig: Any, name: str, num_prompt_tokens: int, num_tokens: int = 8) -> tuple[int, ...]:
    prompt = tuple((ord(name[0]) + i) % 1000 for i in range(num_prompt_tokens))
    return rig.runner.continuation(prompt, num_tokens)


def num_computed(rig: Any) -> int:
    return sum(batch.num_tokens for batch in rig.batches)


def tokens_before_the_first(rig: Any, name: str) -> int:
    """What was computed up to the end of the step that brought the first token of a request: its TTFT in tokens."""
    total = 0
    for batch in rig.batches:
        total += batch.num_tokens
        if any(seq.request_id == name and seq.samples for seq in batch.seqs):
            return total
    raise AssertionError(f"{name} got no token")


def burst(rig: Any, num_prompt_tokens: int = 1000, **fields: Any) -> None:
    for name in SIBLINGS:
        rig.submit(name, num_prompt_tokens, **fields)


def assert_all_answered(rig: Any, num_prompt_tokens: int = 1000) -> None:
    assert all(rig.tokens(name) == expected(rig, name, num_prompt_tokens) for name in SIBLINGS)


def test_eight_siblings_compute_their_prompt_once_and_hold_it_once(make_rig) -> None:
    """n > 1: each computes the last 8 tokens, a partial block, for itself."""
    rig = make_rig(num_blocks=1000, block_size=16)
    burst(rig)
    rig.step()
    assert rig.running() == {"a0"}
    rig.step()
    assert rig.running() == set(SIBLINGS)
    assert num_computed(rig) == 1000 + 1 + 7 * 8
    assert rig.pool.num_used == 63 + 7
    rig.run_to_end()
    assert_all_answered(rig)


def test_a_prompt_in_chunks_is_waited_for_to_its_end(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100)
    burst(rig)
    while rig.running() != set(SIBLINGS):
        rig.step()
    assert num_computed(rig) <= 1000 + 7 * 64 + 7
    rig.run_to_end()
    assert_all_answered(rig)


def test_waiting_brings_the_first_token_no_later_than_computing_apart(make_rig) -> None:
    together, apart = (make_rig(num_blocks=1000, block_size=16, shares=shares) for shares in (True, False))
    for rig in (together, apart):
        burst(rig)
        rig.run_to_end()
    for name in SIBLINGS:
        assert tokens_before_the_first(together, name) <= tokens_before_the_first(apart, name)
    assert max(map(together.first_step, SIBLINGS)) <= max(map(apart.first_step, SIBLINGS))


def test_somebody_else_passes_those_who_wait(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16)
    burst(rig)
    rig.submit("x", 100)
    rig.step()
    assert rig.running() == {"a0", "x"}


def test_who_waits_is_told_for_what(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100)
    rig.submit("a0", 1000)
    rig.step()
    rig.submit("a1", 1000)
    (told,) = explain(rig.scheduler, ["a1"], rig.now_s)
    assert (told.hold, told.value, told.bound) == (Hold.PREFIX_IN_FLIGHT, None, None)
    assert "a1" not in rig.step()


@pytest.mark.parametrize(("num_prompt_tokens", "waits"), [(64, False), (65, True), (80, True)])
def test_less_than_what_a_step_costs_is_not_waited_for(make_rig, num_prompt_tokens: int, waits: bool) -> None:
    """Four blocks of 16; the last token is never shared."""
    rig = make_rig(num_blocks=1000, block_size=16)
    for name in ("a0", "a1"):
        rig.submit(name, num_prompt_tokens)
    assert ("a1" not in rig.step()) == waits


def test_without_a_prefix_cache_nobody_waits(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, shares=False)
    burst(rig, 500)
    rig.step()
    assert rig.running() == set(SIBLINGS)


@pytest.mark.parametrize(
    "other", [CacheScope(tenant="b"), CacheScope(tenant="a", salt="s"), CacheScope(tenant="a", adapter_digest=b"x")]
)
def test_nobody_waits_for_another_scope(make_rig, other: CacheScope) -> None:
    rig = make_rig(num_blocks=1000, block_size=16)
    rig.submit("a0", 500, scope=CacheScope(tenant="a"))
    rig.submit("a1", 500, scope=other)
    rig.step()
    assert rig.running() == {"a0", "a1"}


def test_a_longer_prompt_waits_for_the_start_that_it_shares_and_goes_on_alone(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16)
    rig.submit("a0", 500)
    rig.submit("a1", 900)
    assert rig.step() == {"a0": 500}
    assert rig.step() == {"a0": 1, "a1": 900 - 31 * 16}


def test_one_that_gets_no_tokens_is_not_waited_for(make_rig) -> None:
    """A promise that makes no progress is none."""
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100, max_partial_prefills=3)
    rig.submit("a0", 1000)
    rig.submit("x", 1000, priority=-1)
    rig.step()
    rig.set_limits(prefill_token_budget=100)
    rig.submit("a1", 1000)
    (told,) = explain(rig.scheduler, ["a1"], rig.now_s)
    assert told.hold is Hold.PREFILL_BUDGET
    assert rig.step() == {"x": 100}


STEPS = range(1, 13)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("in_flight", [False, True])
def test_the_end_of_the_first_frees_the_others(make_rig, step: int, in_flight: bool) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100)
    burst(rig)
    rig.step(step)
    batch = rig.plan() if in_flight else None
    rig.scheduler.abort("a0", AbortCause.CLIENT_GONE)
    if batch:
        rig.finish(batch)
    assert rig.scheduler.schedule(rig.now_s).seqs, "the others wait for one that is gone"


@pytest.mark.parametrize("step", STEPS)
def test_after_an_abort_of_the_first_the_others_are_answered_as_ever(make_rig, step: int) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100)
    burst(rig)
    rig.step(step)
    rig.scheduler.abort("a0", AbortCause.CLIENT_GONE)
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 1000) for name in SIBLINGS[1:])
    assert num_computed(rig) <= 2000 + 7 * (64 + 8)


@pytest.mark.parametrize("step", STEPS)
def test_after_a_preemption_of_the_first_all_are_answered_as_ever(make_rig, step: int) -> None:
    rig = make_rig(num_blocks=1000, block_size=16, prefill_chunk_size=100)
    rig.submit("x", 100, max_tokens=40)
    rig.step()
    burst(rig, priority=1)
    rig.step(step)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    assert rig.running() == {"x"}
    rig.set_limits(max_num_seqs=32)
    rig.run_to_end()
    assert_all_answered(rig)


def test_a_row_that_fails_is_waited_for_by_nobody_and_found_by_nobody(make_rig) -> None:
    rig = make_rig(num_blocks=1000, block_size=16)
    burst(rig)
    batch = rig.plan()
    rig.runner.execute(batch)
    rig.scheduler.apply(batch, StepOutput((SampledToken(0, error="logits are not finite"),)))
    rig.listen()
    assert rig.ends("a0") == [FinishReason.ERROR]
    assert rig.step() == {"a1": 1000}
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 1000) for name in SIBLINGS[1:])


def test_tenants_that_share_a_scope_keep_their_turns(make_rig) -> None:
    """The one who computes pays; those who waited pay for the rest only, and nobody else is held up by them."""
    rig = make_rig(num_blocks=1000, block_size=16)
    rig.scheduler.set_tenants(SetTenants(TenantPolicy((TenantTerms("a"), TenantTerms("b"))), epoch=1))
    rig.submit("a0", 1000, tenant="a")
    rig.submit("a1", 1000, tenant="b")
    rig.submit("x", 200, tenant="b")
    rig.step()
    assert rig.running() == {"a0", "x"}
    rig.run_to_end()
    service = [rig.scheduler._waiting.virtual_service(tenant) for tenant in "ab"]
    assert service == [1000 + 2 * 8, 200 + 8 + 2 * 16]
