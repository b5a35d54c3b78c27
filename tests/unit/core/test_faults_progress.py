"""States without progress that other engines were found in; docs/faults.md has the whole list."""


def test_who_lacked_memory_comes_in_with_the_first_step_that_has_it(make_rig) -> None:
    """A27: admission is asked anew at every step."""
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=100)
    rig.submit("a", 20, max_tokens=3)
    rig.step()
    rig.submit("b", 30, max_tokens=3)
    assert rig.step() == {"a": 1} and rig.step() == {"a": 1}
    assert rig.step() == {"b": 30}


def test_a_prompt_that_comes_in_has_all_its_blocks_so_two_never_wait_for_each_other(make_rig) -> None:
    """C1: hold and wait. Each fits alone, both together don't; a chunk of each would lock them."""
    rig = make_rig(num_blocks=10, prefill_chunk_size=4, kv_cache_utilization_limit_percent=100)
    for name in "ab":
        rig.submit(name, 28, max_tokens=2)
    rig.step()
    (running,) = rig.scheduler.running
    assert (running.request_id, len(running.blocks.block_ids), rig.pool.num_used) == ("a", 7, 7)
    rig.run_to_end()
    assert len(rig.tokens("a")) == len(rig.tokens("b")) == 2


def test_who_waits_holds_neither_a_slot_nor_a_block(make_rig) -> None:
    """C2: one that can't start now keeps nobody else out."""
    rig = make_rig(max_num_seqs=2, max_partial_prefills=1, prefill_chunk_size=8)
    rig.submit("a", 60)
    rig.step()
    rig.submit("no lane", 60)
    rig.submit("short", 4)
    num_used = rig.pool.num_used
    assert rig.step() == {"a": 8, "short": 4}
    assert rig.pool.num_used == num_used + 1
