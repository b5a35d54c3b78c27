"""Faults of other engines in prefix-cache keys and counts; docs/faults.md has the whole list."""

import hashlib
from array import array

from guidevane_runtime.core.messages import CacheScope
from guidevane_runtime.core.prefix import BlockKeys, cache_root


def test_a_key_is_a_whole_sha256_of_the_key_before_and_the_token_ids() -> None:
    """D6: nothing shorter or weaker stands in for it, so equal keys need no look at the tokens."""
    root = cache_root(CacheScope(), model_digest=b"m", block_size=2)
    keys = BlockKeys(root, [1, 2, 3, 70_000], 2)
    first = hashlib.sha256(root + array("I", [1, 2]).tobytes()).digest()
    assert keys.key(0) == first
    assert keys.key(1) == hashlib.sha256(first + array("I", [3, 70_000]).tobytes()).digest()


def test_look_ups_that_led_to_no_start_count_nowhere(make_rig) -> None:
    """K5: a request that is looked up at each step while it lacks memory is one query and one hit."""
    rig = make_rig(num_blocks=14, kv_cache_utilization_limit_percent=100)
    rig.submit("a1", 18, max_tokens=1)
    rig.run_to_end()
    rig.submit("x", 32, max_tokens=8)
    rig.step()
    rig.submit("a2", 30, max_tokens=1)
    rig.step(3)
    assert rig.scheduler.stats(0.0).num_prefix_queried_tokens == 18 + 32
    rig.run_to_end()
    stats = rig.scheduler.stats(0.0)
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (18 + 32 + 30, 16)
