"""What one step may hold: decode first, then prefills in progress, then new ones."""

from collections import Counter

from guidevane_runtime.core.messages import FinishReason


def test_decodes_come_before_the_prefill_of_a_newcomer(make_rig) -> None:
    rig = make_rig()
    rig.submit("a")
    rig.step()
    rig.submit("b", 6)
    batch = rig.plan()
    assert [(seq.request_id, seq.is_decode, len(seq.token_ids)) for seq in batch.seqs] == [
        ("a", True, 1),
        ("b", False, 6),
    ]


def test_a_prompt_is_computed_in_chunks_and_samples_with_the_last(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=4)
    rig.submit("a", 10)
    chunks = [
        (seq.start, len(seq.token_ids), seq.samples)
        for _ in range(3)
        for seq in [rig.plan().seqs[0]]
        if rig.finish(rig.batches[-1]) is None
    ]
    assert chunks == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_decodes_and_prefills_share_the_step_budget(make_rig) -> None:
    rig = make_rig(max_num_batched_tokens=8)
    for name in "abc":
        rig.submit(name, 2)
    rig.step(2)
    rig.submit("d", 20)
    assert rig.step() == {"a": 1, "b": 1, "c": 1, "d": 5}


def test_prefill_stays_inside_its_own_budget(make_rig) -> None:
    rig = make_rig(prefill_token_budget=6)
    rig.submit("a", 4)
    rig.submit("b", 4)
    assert rig.step() == {"a": 4, "b": 2}
    assert rig.step() == {"a": 1, "b": 2}


def test_a_decode_budget_below_the_running_goes_round(make_rig) -> None:
    """I7: everyone is served once in ceil(n / budget) steps."""
    rig = make_rig(decode_token_budget=2)
    for name in "abcde":
        rig.submit(name, 3, max_tokens=50)
    rig.step()
    turns = [set(rig.step()) for _ in range(15)]
    assert all(len(turn) == 2 for turn in turns)
    assert all(set.union(*turns[i : i + 3]) == set("abcde") for i in range(13))
    assert max(Counter(name for turn in turns for name in turn).values()) == 6


def test_prefills_in_progress_go_on_before_anyone_starts(make_rig) -> None:
    rig = make_rig(prefill_token_budget=4, prefill_chunk_size=4)
    rig.submit("a", 10)
    rig.step()
    rig.submit("urgent", 4, priority=-1)
    assert rig.step() == {"a": 4}


def test_two_prompts_are_in_mid_prefill_at_most(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=4, max_partial_prefills=2)
    for name in "abc":
        rig.submit(name, 12)
    assert [rig.step(), rig.step(), rig.step(), rig.step()] == [
        {"a": 4, "b": 4},
        {"a": 4, "b": 4},
        {"a": 4, "b": 4, "c": 4},
        {"a": 1, "b": 1, "c": 4},
    ]


def test_a_prompt_that_ends_in_its_step_needs_no_lane(make_rig) -> None:
    """C7: short prompts pass the long ones that wait for a lane."""
    rig = make_rig(prefill_chunk_size=4, max_partial_prefills=1)
    rig.submit("a", 12)
    rig.submit("b", 12)
    rig.submit("c", 3)
    assert rig.step() == {"a": 4, "c": 3}
    assert rig.running() == {"a", "c"}


def test_a_prompt_that_leaves_one_token_is_a_decode_then_and_needs_no_lane(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=4, max_partial_prefills=1)
    rig.submit("a", 12)
    rig.submit("b", 6)
    rig.submit("c", 5)
    assert rig.step() == {"a": 4, "c": 4}


def test_of_long_prompts_one_is_in_prefill_at_a_time(make_rig) -> None:
    """C7: the short one does not wait for two long ones."""
    rig = make_rig(prefill_chunk_size=8, long_context_threshold_tokens=16, max_partial_prefills=4)
    rig.submit("long", 30)
    rig.submit("queued", 30)
    rig.submit("short", 12)
    assert rig.step() == {"long": 8, "short": 8}
    assert rig.step(2) == {"long": 8, "short": 1}
    assert rig.step() == {"long": 6, "short": 1, "queued": 8}


def test_a_prompt_at_the_threshold_is_not_long(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=8, long_context_threshold_tokens=16, max_partial_prefills=4)
    rig.submit("a", 16)
    rig.submit("b", 16)
    assert rig.step() == {"a": 8, "b": 8}


def test_one_token_prompts_count_as_decodes(make_rig) -> None:
    rig = make_rig(decode_token_budget=2)
    for name in "abc":
        rig.submit(name, 1)
    batch = rig.plan()
    assert [seq.request_id for seq in batch.seqs if seq.is_decode] == ["a", "b"]
    rig.finish(batch)
    rig.run_to_end()
    assert all(rig.ends(name) == [FinishReason.LENGTH] for name in "abc")


def test_a_step_of_one_token_still_gets_through(make_rig) -> None:
    """C3: the smallest limits there are."""
    rig = make_rig(max_num_batched_tokens=1, prefill_token_budget=1, decode_token_budget=1, prefill_chunk_size=1)
    for name in "abc":
        rig.submit(name, 5)
    rig.run_to_end()
    assert {name: rig.tokens(name) for name in "abc"} == {
        name: rig.runner.continuation(tuple(ord(name) + i for i in range(5)), 8) for name in "abc"
    }


def test_a_decode_that_has_to_wait_for_its_turn_takes_no_lane(make_rig) -> None:
    rig = make_rig(decode_token_budget=1, prefill_chunk_size=4, max_partial_prefills=1)
    for name in "ab":
        rig.submit(name, 4)
    rig.step()
    rig.submit("c", 12)
    assert rig.step() == {"a": 1, "c": 4}


def test_two_tokens_left_is_still_a_prefill_in_progress(make_rig) -> None:
    rig = make_rig(prefill_chunk_size=4, max_partial_prefills=1)
    rig.submit("a", 6)
    rig.submit("b", 12)
    assert [rig.step(), rig.step()] == [{"a": 4}, {"a": 2, "b": 4}]


def test_one_token_that_is_left_after_a_step_takes_no_prefill_lane(make_rig) -> None:
    """It is a decode then, for those in a lane and for those who want one."""
    rig = make_rig(max_partial_prefills=1, prefill_chunk_size=4)
    rig.submit("a", 5)
    rig.submit("b", 40)
    rig.submit("c", 5)
    assert rig.step() == {"a": 4, "b": 4, "c": 4}


def test_a_prompt_as_long_as_the_threshold_is_not_long(make_rig) -> None:
    rig = make_rig(max_partial_prefills=3, prefill_chunk_size=4, long_context_threshold_tokens=20)
    for name, num_prompt_tokens in (("a", 40), ("b", 21), ("c", 20)):
        rig.submit(name, num_prompt_tokens)
    assert rig.step() == {"a": 4, "c": 4}
