"""The prefix cache alone: what a request's keys say, and who takes part."""

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import CacheScope, SamplingParams, Submit
from guidevane_runtime.core.prefix import BlockKeys, cache_root
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import Request

SCOPE = CacheScope(tenant="acme")


def make(pool: BlockPool) -> Request:
    submit = Submit("a", tuple(range(20)), SamplingParams(max_tokens=9, seed=0), arrival_s=0.0, cache_scope=SCOPE)
    return Request(submit, max_num_tokens=29, blocks=pool.table())


def test_the_keys_of_a_request_say_its_scope_the_model_and_the_block_size() -> None:
    pool = BlockPool(10, 8)
    request = make(pool)
    PrefixCache(pool, model_digest=b"m").open(request)
    keys = BlockKeys(cache_root(SCOPE, model_digest=b"m", block_size=8), list(range(20)), 8)
    assert request.block_keys is not None
    assert [request.block_keys.key(index) for index in range(2)] == [keys.key(index) for index in range(2)]


def test_blocks_that_are_cached_but_in_no_table_are_not_in_use() -> None:
    pool = BlockPool(10, 8)
    cache, first, second, third = PrefixCache(pool), make(pool), make(pool), make(pool)
    for request in (first, second, third):
        cache.open(request)
    cache.take(first)
    first.blocks.try_grow_to(20)
    first.note_computed(16)
    cache.publish(first)
    first.blocks.release()
    alone = cache.look(second)
    cache.take(second)
    assert (len(alone.block_ids), alone.num_in_use) == (2, 0)
    assert cache.look(third) == (alone.block_ids, 2)
