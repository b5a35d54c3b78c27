"""Prefix hits: what is shared, with whom, when, and that nobody sees it in the output."""

import dataclasses

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import AbortCause, CacheScope, FinishReason, SamplingParams, Submit
from guidevane_runtime.core.plan import SampledToken, StepOutput
from guidevane_runtime.core.scheduler import Scheduler


def expected(rig, name, num_prompt, num_tokens=8):
    return rig.runner.continuation(tuple(ord(name[0]) + i for i in range(num_prompt)), num_tokens)


def cached_tokens(rig, name):
    return rig.end_output(name).num_cached_tokens


def counters(rig):
    stats = rig.scheduler.stats(0.0)
    return stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens


def test_a_prompt_that_was_computed_before_is_not_computed_again(make_rig) -> None:
    rig = make_rig()
    rig.submit("a1", 18)
    rig.run_to_end()
    rig.submit("a2", 18)
    assert rig.step() == {"a2": 2}
    rig.run_to_end()
    assert rig.tokens("a2") == rig.tokens("a1") == expected(rig, "a", 18)
    assert (cached_tokens(rig, "a1"), cached_tokens(rig, "a2")) == (0, 16)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_last_token_of_a_prompt_is_always_computed(make_rig, block_size, num_blocks) -> None:
    """B11: a prompt of whole blocks, all of them cached, still has something to sample from."""
    rig = make_rig(block_size=block_size)
    num_prompt = block_size * num_blocks
    for name in ("a1", "a2"):
        rig.submit(name, num_prompt)
        rig.run_to_end()
    assert cached_tokens(rig, "a2") == num_prompt - block_size
    assert rig.tokens("a2") == expected(rig, "a", num_prompt)


def test_identical_prompts_of_one_step_each_compute_their_own(make_rig) -> None:
    """B13: nobody reads a block that the same step still fills."""
    rig = make_rig()
    for number in range(4):
        rig.submit(f"a{number}", 12)
    batch = rig.plan()
    assert [len(seq.token_ids) for seq in batch.seqs] == [12] * 4
    rig.finish(batch)
    rig.run_to_end()
    assert all(rig.tokens(f"a{number}") == expected(rig, "a", 12) for number in range(4))


def test_siblings_share_the_full_blocks_that_the_first_of_them_has_computed(make_rig) -> None:
    rig = make_rig()
    rig.submit("a1", 18)
    rig.step()
    num_used = rig.pool.num_used
    for name in ("a2", "a3"):
        rig.submit(name, 18)
    rig.step()
    assert rig.pool.num_used == num_used + 2
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, "a", 18) for name in ("a1", "a2", "a3"))


def test_chunks_are_found_by_others_as_soon_as_they_are_computed_and_not_before(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=6)
    rig.submit("a1", 20)
    batch = rig.plan()
    assert not any(rig.pool.is_published(block_id) for block_id in batch.seqs[0].block_ids)
    rig.finish(batch)
    assert [rig.pool.is_published(block_id) for block_id in batch.seqs[0].block_ids] == [True] + [False] * 4
    rig.submit("a2", 20)
    rig.plan()
    assert rig.batches[-1].seqs[1].start == 4


def test_generated_tokens_are_found_too(make_rig) -> None:
    """The next turn of a conversation begins with the answer to the last one."""
    rig = make_rig()
    submit = rig.submit("a", 10, max_tokens=20)
    rig.run_to_end()
    history = submit.prompt_token_ids + rig.tokens("a")
    rig.scheduler.submit(dataclasses.replace(submit, request_id="next", prompt_token_ids=(*history, 5)))
    rig.run_to_end()
    # The last token was drawn but never computed: 29 of 30 are in the cache, 7 whole blocks.
    assert cached_tokens(rig, "next") == 28


@pytest.mark.parametrize(
    "other", [CacheScope(tenant="b"), CacheScope(tenant="a", salt="s"), CacheScope(tenant="a", adapter_digest=b"x")]
)
def test_nobody_of_another_scope_hits(make_rig, other) -> None:
    """I15, D1, D2, D3, D8, D10"""
    rig = make_rig()
    rig.submit("a1", 18, scope=CacheScope(tenant="a"))
    rig.run_to_end()
    rig.submit("a2", 18, scope=other)
    rig.run_to_end()
    rig.submit("a3", 18, scope=CacheScope(tenant="a"))
    rig.run_to_end()
    assert [cached_tokens(rig, name) for name in ("a1", "a2", "a3")] == [0, 0, 16]


def test_switched_off_nothing_is_shared_and_nothing_counted(make_rig) -> None:
    rig = make_rig(shares=False)
    for name in ("a1", "a2"):
        rig.submit(name, 18)
        rig.run_to_end()
    assert cached_tokens(rig, "a2") == 0 and counters(rig) == (0, 0) and rig.pool.num_cached_free == 0


def test_a_scheduler_without_a_prefix_cache_shares_nothing() -> None:
    pool = BlockPool(10, 4)
    scheduler = Scheduler(pool, SchedulerLimits(), max_model_len=64, eos_token_ids=frozenset())
    runner = FakeRunner(10, 4, 100)
    for name in "ab":
        scheduler.submit(Submit(name, tuple(range(9)), SamplingParams(max_tokens=1, seed=0), arrival_s=0.0))
        batch = scheduler.schedule(0.0)
        scheduler.apply(batch, runner.execute(batch))
        assert len(batch.seqs[0].token_ids) == 9
    assert pool.num_cached_free == 0


def test_queries_and_hits_are_prompt_tokens_each_prompt_once(make_rig) -> None:
    """B15: what a preempted request finds of its own is no hit."""
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, 18, max_tokens=30)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=2)
    rig.run_to_end()
    assert rig.end_output("b").num_preemptions == 1
    assert counters(rig) == (36, 0) and cached_tokens(rig, "b") == 0
    rig.submit("a2", 18)
    rig.run_to_end()
    assert counters(rig) == (54, 16)
    rig.submit("a3", 18)
    rig.run_to_end()
    assert counters(rig) == (72, 32)


def test_a_preempted_request_finds_its_own_blocks_and_computes_only_the_rest(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    for name in "ab":
        rig.submit(name, 18, max_tokens=30)
    rig.step(3)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step()
    rig.set_limits(max_num_seqs=2)
    # 20 of 21 known tokens were computed, 5 whole blocks.
    assert rig.step(2)["b"] == 1
    rig.run_to_end()
    assert rig.tokens("b") == expected(rig, "b", 18, 30)
    assert rig.scheduler.stats(0.0).num_recomputed_tokens == 0


def test_blocks_of_an_aborted_step_are_not_found_though_its_earlier_ones_are(make_rig) -> None:
    """A24: what a step in flight writes is nobody's before it is over, and then nobody knows what is in it."""
    rig = make_rig(prefill_chunk_size=8)
    rig.submit("a1", 20)
    rig.step()
    batch = rig.plan()
    rig.scheduler.abort("a1", AbortCause.CLIENT_GONE)
    assert rig.pool.num_used == 5
    rig.finish(batch)
    assert (rig.pool.num_used, rig.pool.num_cached_free) == (0, 2)
    rig.submit("a2", 20)
    rig.run_to_end()
    assert cached_tokens(rig, "a2") == 8 and rig.tokens("a2") == expected(rig, "a", 20)


def test_one_that_shares_keeps_the_blocks_when_their_first_owner_is_gone(make_rig) -> None:
    """D11: no use after free."""
    rig = make_rig(num_blocks=12)
    rig.submit("a1", 18, max_tokens=3)
    rig.step()
    rig.submit("a2", 18, max_tokens=12)
    rig.step()
    rig.scheduler.abort("a1", AbortCause.CLIENT_GONE)
    rig.submit("x", 16, max_tokens=4)
    rig.run_to_end()
    assert rig.tokens("a2") == expected(rig, "a", 18, 12) and rig.tokens("x") == expected(rig, "x", 16, 4)


def test_a_row_that_can_not_be_sampled_leaves_nothing_to_find(make_rig) -> None:
    """Whatever made its logits bad may sit in its blocks."""
    rig = make_rig()
    rig.submit("a1", 18)
    batch = rig.plan()
    rig.scheduler.apply(batch, StepOutput((SampledToken(0, error="logits are not finite"),)))
    rig.listen()
    assert rig.ends("a1") == [FinishReason.ERROR] and rig.pool.num_cached_free == 0


def test_a_hit_makes_room_where_the_whole_prompt_would_not_fit(make_rig) -> None:
    """Memory is judged after the prefix hit: ten blocks, six of them shared."""
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=100)
    rig.submit("a1", 25, max_tokens=3)
    rig.step()
    rig.submit("a2", 25, max_tokens=3)
    assert rig.step() == {"a1": 1, "a2": 1}
    rig.run_to_end()
    assert rig.tokens("a2") == expected(rig, "a", 25, 3)


def test_room_that_is_left_by_a_first_owner_but_shared_on_is_not_given_out_twice(make_rig) -> None:
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=100)
    rig.submit("a1", 25, max_tokens=3)
    rig.step()
    rig.submit("a2", 25, max_tokens=8)
    rig.step()
    rig.scheduler.abort("a1", AbortCause.CLIENT_GONE)
    rig.submit("x", 9, max_tokens=3)
    rig.step()
    assert rig.running() == {"a2"}
    rig.run_to_end()
    assert rig.scheduler.stats(0.0).num_preemptions == 0


def test_a_long_prompt_that_is_nearly_all_cached_needs_no_lane(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=8, long_context_threshold_tokens=16, max_partial_prefills=1)
    rig.submit("a1", 30)
    rig.run_to_end()
    rig.submit("long", 60)
    rig.submit("a2", 30)
    assert rig.step() == {"long": 8, "a2": 2}


def test_a_hit_that_leaves_one_token_is_a_decode(make_rig) -> None:
    rig = make_rig(decode_token_budget=1)
    rig.submit("a1", 17)
    rig.run_to_end()
    rig.submit("x", 3)
    rig.step()
    rig.submit("a2", 17)
    rig.submit("a3", 17)
    assert rig.step() == {"x": 1}
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, "a", 17) for name in ("a2", "a3"))


def test_cached_blocks_count_as_free(make_rig) -> None:
    rig = make_rig(num_blocks=10)
    rig.submit("a", 20)
    rig.run_to_end()
    stats = rig.scheduler.stats(0.0)
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (0, 6)
    rig.submit("x", 39)
    rig.run_to_end()
    assert rig.tokens("x") == expected(rig, "x", 39, 2)


def test_what_it_would_find_is_looked_up_again_when_it_starts(make_rig) -> None:
    """A promise of the cache is none: blocks may be gone by then."""
    rig = make_rig(num_blocks=10, max_num_seqs=1)
    rig.submit("a1", 17, max_tokens=1)
    rig.run_to_end()
    rig.submit("x", 36, max_tokens=3)
    rig.step()
    rig.submit("a2", 17)
    rig.run_to_end()
    assert cached_tokens(rig, "a2") == 0 and rig.tokens("a2") == expected(rig, "a", 17)
