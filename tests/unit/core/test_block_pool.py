import pytest

from guidevane_runtime.core.block_pool import BlockPool, BlockTable


def test_the_null_block_is_never_given_out() -> None:
    table = BlockPool(5, 4).table()
    assert table.try_grow_to(20)
    assert sorted(table.block_ids) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (257, 17)])
def test_a_table_holds_as_many_blocks_as_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    """B10: block boundary plus and minus one."""
    table = BlockPool(100, 16).table()
    table.try_grow_to(num_tokens)
    assert len(table.block_ids) == num_blocks


def test_growing_keeps_the_blocks_that_are_there() -> None:
    table = BlockPool(10, 4).table()
    table.try_grow_to(5)
    first = table.block_ids
    table.try_grow_to(13)
    assert table.block_ids[:2] == first and len(set(table.block_ids)) == 4


def test_a_table_that_can_not_have_all_takes_none() -> None:
    pool = BlockPool(3, 4)
    table = pool.table()
    table.try_grow_to(4)
    assert not table.try_grow_to(17)
    assert (pool.num_used, pool.num_free, len(table.block_ids)) == (1, 2, 1)


def test_release_gives_back_every_block_and_may_come_twice() -> None:
    pool = BlockPool(3, 4)
    table = pool.table()
    table.try_grow_to(12)
    table.release()
    table.release()
    assert pool.num_free == 3


def test_a_block_that_is_freed_twice_raises() -> None:
    """A25: a double free would hand one block to two owners."""
    pool = BlockPool(3, 4)
    table = pool.table()
    table.try_grow_to(4)
    block_ids = table.block_ids
    table.release()
    with pytest.raises(RuntimeError, match=f"block {block_ids[0]} was freed twice"):
        pool.give_back(block_ids)


def test_a_block_that_nobody_took_can_not_be_given_back() -> None:
    with pytest.raises(RuntimeError, match="block 1 was freed twice"):
        BlockPool(3, 4).give_back((1,))


def test_a_detached_table_takes_the_blocks_along() -> None:
    pool = BlockPool(3, 4)
    table = pool.table()
    table.try_grow_to(8)
    moved = table.detach()
    table.release()
    assert (pool.num_used, table.block_ids) == (2, ())
    moved.release()
    assert pool.num_used == 0


def test_the_last_block_of_a_request_is_the_first_to_be_reused() -> None:
    """So that the head of a prefix outlives its tail, once prefixes are kept."""
    pool = BlockPool(3, 1)
    table = pool.table()
    table.try_grow_to(3)
    held = table.block_ids
    table.release()
    again = pool.table()
    again.try_grow_to(3)
    assert again.block_ids == held[::-1]


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0 of 16"):
        BlockPool(0, 16)


def published(pool: BlockPool, *keys: bytes) -> BlockTable:
    """A table of full blocks that can be found by these keys."""
    table = pool.table()
    assert table.try_grow_to(len(keys) * pool.block_size)
    for block_id, key in zip(table.block_ids, keys, strict=True):
        pool.publish(block_id, key)
    return table


def sharing(pool: BlockPool, *keys: bytes) -> BlockTable:
    """A table that begins with the blocks of these keys."""
    table = pool.table()
    found = [pool.find(key) for key in keys]
    assert None not in found
    table.share(tuple(block_id for block_id in found if block_id is not None))
    return table


def test_a_block_counts_the_tables_that_hold_it_and_is_free_after_the_last() -> None:
    """I2, D11"""
    pool = BlockPool(4, 4)
    first = published(pool, b"a")
    second = sharing(pool, b"a")
    block_id = first.block_ids[0]
    counts = [pool.num_refs(block_id)]
    for table in (first, second):
        table.release()
        counts.append(pool.num_refs(block_id))
    assert counts == [2, 1, 0]
    assert (pool.num_used, pool.num_free, pool.num_cached_free) == (0, 4, 1)


def test_a_cached_block_is_in_use_only_while_a_table_holds_it() -> None:
    pool = BlockPool(4, 4)
    first = published(pool, b"a")
    (block_id,) = first.block_ids
    first.release()
    was_used = pool.is_used(block_id)
    sharing(pool, b"a")
    assert (was_used, pool.is_used(block_id)) == (False, True)


def test_a_shared_block_takes_no_room_twice() -> None:
    pool = BlockPool(4, 4)
    published(pool, b"a", b"b")
    table = sharing(pool, b"a", b"b")
    assert pool.num_used == 2
    assert table.try_grow_to(16) and pool.num_used == 4


def test_a_published_block_can_be_found_after_its_owner_is_gone_until_it_is_needed() -> None:
    pool = BlockPool(2, 4)
    published(pool, b"a").release()
    assert pool.find(b"a") is not None
    table = pool.table()
    assert table.try_grow_to(8)
    assert pool.find(b"a") is None and not any(map(pool.is_published, table.block_ids))


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 4)
    published(pool, b"a").release()
    pool.table().try_grow_to(8)
    assert pool.find(b"a") is not None and pool.num_free == 1


def test_the_block_unused_longest_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    for key in (b"a", b"b", b"c"):
        published(pool, key).release()
    sharing(pool, b"a").release()
    pool.table().try_grow_to(4)
    assert [pool.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """A tail without its head can't be found."""
    pool = BlockPool(3, 4)
    published(pool, b"head", b"middle", b"tail").release()
    there = []
    for _ in range(3):
        pool.table().try_grow_to(4)
        there.append([key for key in (b"head", b"middle", b"tail") if pool.find(key) is not None])
    assert there == [[b"head", b"middle"], [b"head"], []]


def test_a_block_in_use_is_never_evicted() -> None:
    """B1, D11"""
    pool = BlockPool(2, 4)
    published(pool, b"a").release()
    table = sharing(pool, b"a")
    other = pool.table()
    assert not other.try_grow_to(8) and other.try_grow_to(4)
    assert set(table.block_ids).isdisjoint(other.block_ids) and pool.find(b"a") == table.block_ids[0]


def test_of_two_blocks_with_the_same_text_the_first_stays_the_one_to_find() -> None:
    pool = BlockPool(3, 4)
    first, second = published(pool, b"a"), published(pool, b"a")
    assert pool.find(b"a") == first.block_ids[0]
    second.release()
    assert (pool.num_cached_free, pool.find(b"a")) == (0, first.block_ids[0])


def test_a_withdrawn_block_can_not_be_found_and_is_blank_when_it_is_free() -> None:
    pool = BlockPool(3, 4)
    table = published(pool, b"a", b"b")
    pool.withdraw(table.block_ids)
    table.release()
    assert pool.find(b"a") is pool.find(b"b") is None and pool.num_cached_free == 0


def test_only_an_empty_table_can_begin_with_a_prefix() -> None:
    pool = BlockPool(3, 4)
    published(pool, b"a")
    table = pool.table()
    table.try_grow_to(4)
    with pytest.raises(AssertionError, match="after the first block"):
        table.share((1,))


def test_a_table_that_shrinks_gives_back_its_tail_only() -> None:
    pool = BlockPool(6, 4)
    table = pool.table()
    table.try_grow_to(20)
    kept = table.block_ids[:3]
    table.shrink_to(9)
    assert table.block_ids == kept and pool.num_used == 3
    table.shrink_to(12)
    table.release()
    assert pool.num_used == 0
