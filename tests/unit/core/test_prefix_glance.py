"""What a waiting request would find is judged in every step, at a glance; who comes in is judged by what is there."""

from typing import Any

import pytest

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import Request

NUM_BLOCKS = 400
"""Of the text that all have in common."""


class CountingPool(BlockPool):
    num_found = 0

    def find(self, key: bytes) -> int | None:
        self.num_found += 1
        return super().find(key)


def cached(pool: BlockPool, cache: PrefixCache, num_blocks: int) -> Request:
    """A waiting request, so many of whose blocks are in the cache; its text goes on for one more."""
    tokens = tuple(range((num_blocks + 1) * pool.block_size))
    requests = []
    for name in "ab":
        submit = Submit(name, tokens, SamplingParams(max_tokens=1, seed=0), 0.0)
        requests.append(Request(submit, len(tokens) + 1, pool.table()))
        cache.open(requests[-1])
    first, request = requests
    assert first.blocks.try_grow_to(len(tokens))
    first.num_computed_tokens = num_blocks * pool.block_size
    cache.publish(first)
    first.blocks.release()
    return request


def test_a_second_glance_costs_the_same_whatever_was_found() -> None:
    pool = CountingPool(500, 4)
    cache = PrefixCache(pool)
    request = cached(pool, cache, NUM_BLOCKS)
    cache.glance(request)
    assert request.num_computed_tokens == NUM_BLOCKS * 4
    pool.num_found = 0
    cache.glance(request)
    assert request.num_computed_tokens == NUM_BLOCKS * 4 and pool.num_found <= 2


@pytest.mark.parametrize("num_left", [0, 1, 7, 8])
def test_a_glance_follows_a_text_that_is_evicted_from_its_end(num_left: int) -> None:
    pool = BlockPool(9, 4)
    cache = PrefixCache(pool)
    request = cached(pool, cache, 8)
    cache.glance(request)
    taken = pool.table()
    assert taken.try_grow_to((9 - num_left) * 4)
    cache.glance(request)
    assert request.num_computed_tokens == num_left * 4 == len(cache.look(request).block_ids) * 4


def test_a_look_sees_the_gap_that_a_glance_does_not_and_later_glances_stop_there() -> None:
    pool = BlockPool(9, 4)
    cache = PrefixCache(pool)
    request = cached(pool, cache, 8)
    hit = cache.look(request)
    pool.share(hit.block_ids)
    pool.withdraw(hit.block_ids[3:4])
    cache.glance(request)
    assert request.num_computed_tokens == 8 * 4
    assert len(cache.look(request).block_ids) == 3
    cache.glance(request)
    assert request.num_computed_tokens == 3 * 4


def crowd(make_rig: Any, **limits: int) -> Any:
    """Sixty prompts that begin with a long text that is in the cache, and have too much after it for one step."""
    rig = make_rig(
        num_blocks=3000,
        max_num_seqs=100,
        max_num_batched_tokens=100,
        kv_cache_utilization_limit_percent=100,
        **limits,
    )
    rig.submit("text", NUM_BLOCKS * 4, max_tokens=1)
    rig.run_to_end()
    for number in range(60):
        prompt = tuple((ord("t") + i) % 1000 for i in range(NUM_BLOCKS * 4)) + (number,) * 500
        rig.scheduler.submit(Submit(f"q{number}", prompt, SamplingParams(max_tokens=2, seed=0), rig.now_s))
    return rig


def test_a_step_does_not_look_up_all_of_everybody_who_waits_for_a_lane(make_rig) -> None:
    rig = crowd(make_rig)
    rig.step(2)
    pool = rig.scheduler.prefix_cache._pool = CountingPool.__new__(CountingPool)
    pool.__dict__.update(rig.pool.__dict__)
    rig.step()
    assert rig.running() == {"q0"}
    assert 0 < pool.num_found < 60 * 5 + 2 * NUM_BLOCKS


def test_who_is_let_in_by_a_glance_is_judged_by_what_is_there(make_rig) -> None:
    """All but its last token seemed to be cached, so it needed no lane; half of that is gone."""
    rig = make_rig(num_blocks=1000, max_num_batched_tokens=64, max_partial_prefills=1)
    rig.submit("text", NUM_BLOCKS * 4, max_tokens=1)
    rig.run_to_end()
    rig.submit("long", 500, max_tokens=2)
    rig.step()
    rig.scheduler.limits.target = rig.scheduler.limits.target.model_copy(update={"max_num_seqs": 1})
    rig.submit("t", NUM_BLOCKS * 4, max_tokens=2)
    request = rig.scheduler.live("t")
    rig.scheduler.prefix_cache.glance(request)
    hole = rig.pool.find(request.block_keys.key(NUM_BLOCKS // 2))
    rig.pool._cached.pop(hole)
    rig.pool._forget(hole)
    rig.pool._blank.append(hole)
    rig.set_limits(max_num_seqs=10)
    rig.step()
    assert rig.running() == {"long"} and request.num_computed_tokens == NUM_BLOCKS // 2 * 4
    rig.run_to_end()
    prompt = tuple((ord("t") + i) % 1000 for i in range(NUM_BLOCKS * 4))
    assert rig.tokens("t") == rig.runner.continuation(prompt, 2)
