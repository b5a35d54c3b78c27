import pytest

from guidevane_runtime.core.block_pool import BlockPool


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
