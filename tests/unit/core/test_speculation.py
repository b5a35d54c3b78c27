"""Draft tokens: what they may cost, what is kept of them, and that nobody sees them in the output."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.messages import AbortCause, FinishReason
from guidevane_runtime.core.plan import SampledToken, StepOutput, load_of
from guidevane_runtime.core.speculation import Speculation

VOCAB_SIZE = 1000
NUM_DRAFTS = 4


class Guesses:
    """Drafts as a test wants them: `right` of them are what the model will draw, the rest are not."""

    def __init__(self, right: int = NUM_DRAFTS) -> None:
        self.right = right
        self.rig: Any = None

    def draft(self, token_ids: Sequence[int], max_drafts: int) -> Iterable[int]:
        truth = self.rig.runner.continuation(token_ids, NUM_DRAFTS)
        return [token if i < self.right else (token + 1) % VOCAB_SIZE for i, token in enumerate(truth)]


def drafting_rig(make_rig: Callable[..., Any], right: int = NUM_DRAFTS, **fields: Any) -> Any:
    guesses = Guesses(right)
    speculation = Speculation(guesses, max_drafts=NUM_DRAFTS, vocab_size=VOCAB_SIZE)
    rig = make_rig(speculation=speculation, **fields)
    guesses.rig, rig.speculation = rig, speculation
    return rig


def expected(rig: Any, name: str, num_tokens: int, num_prompt_tokens: int = 4) -> tuple[int, ...]:
    return rig.runner.continuation(tuple(ord(name[0]) + i for i in range(num_prompt_tokens)), num_tokens)


@pytest.mark.parametrize("right", range(NUM_DRAFTS + 1))
def test_each_step_brings_what_was_right_and_one_more(make_rig, right: int) -> None:
    rig = drafting_rig(make_rig, right)
    rig.submit("a", max_tokens=40)
    rig.step()
    assert len(rig.tokens("a")) == 1
    rig.step()
    assert len(rig.tokens("a")) == 1 + right + 1
    rig.run_to_end()
    assert rig.tokens("a") == expected(rig, "a", 40)
    assert rig.ends("a") == [FinishReason.LENGTH]


@pytest.mark.parametrize("right", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_output_gets_longer_than_it_may(make_rig, right: int, max_tokens: int) -> None:
    """F16."""
    rig = drafting_rig(make_rig, right)
    rig.submit("a", max_tokens=max_tokens)
    rig.run_to_end()
    assert rig.tokens("a") == expected(rig, "a", max_tokens)


@pytest.mark.parametrize("place", range(1, 8))
@pytest.mark.parametrize("kind", ["eos", "stop token"])
def test_a_stop_inside_an_accepted_run_cuts_it_there(make_rig, place: int, kind: str) -> None:
    """F16: nothing comes after it, and what was accepted behind it counts for nothing."""
    probe = drafting_rig(make_rig)
    stop = expected(probe, "a", 8)[place]
    rig = drafting_rig(make_rig, eos=frozenset({stop} if kind == "eos" else ()))
    rig.submit("a", max_tokens=8, stop_token_ids=frozenset({stop} if kind == "stop token" else ()))
    rig.run_to_end()
    assert rig.tokens("a") == expected(rig, "a", place + 1)
    assert rig.ends("a") == [FinishReason.STOP]
    assert rig.speculation.num_accepted <= place


def test_drafts_cost_tokens_of_the_decode_budget_and_get_only_what_is_left(make_rig) -> None:
    rig = drafting_rig(make_rig, decode_token_budget=5)
    for name in "ab":
        rig.submit(name, max_tokens=40)
    rig.step()
    assert rig.step() == {"a": 4, "b": 1}
    assert load_of(rig.batches[-1]).num_decodes == 5 and rig.batches[-1].num_drafts == {"a": 3}


def test_a_single_token_that_is_left_is_enough_for_a_draft(make_rig) -> None:
    rig = drafting_rig(make_rig, decode_token_budget=2)
    rig.submit("a", max_tokens=40)
    rig.step()
    assert rig.step() == {"a": 2}


def test_prefills_and_newcomers_come_before_drafts(make_rig) -> None:
    rig = drafting_rig(make_rig, max_num_batched_tokens=12, prefill_chunk_size=4)
    rig.submit("a", max_tokens=40)
    rig.step()
    rig.submit("x", 40)
    rig.submit("y", 4)
    assert rig.step() == {"a": 4, "x": 4, "y": 4}
    assert rig.batches[-1].num_drafts == {"a": 3}


def test_nobody_is_preempted_for_a_draft(make_rig) -> None:
    rig = drafting_rig(make_rig, num_blocks=4, kv_cache_utilization_limit_percent=100)
    for number in range(20):
        rig.submit(f"z{number}", 2, max_tokens=1)
    rig.run_to_end()
    rig.submit("a", 4, max_tokens=3)
    rig.submit("b", 8, max_tokens=3)
    rig.run_to_end()
    assert rig.scheduler.stats(0.0).num_preemptions == 0
    assert rig.tokens("a") == expected(rig, "a", 3) and rig.tokens("b") == expected(rig, "b", 3, 8)


def test_paused_there_are_none(make_rig) -> None:
    rig = drafting_rig(make_rig)
    rig.submit("a", max_tokens=40)
    rig.step(2)
    num_drafted = rig.speculation.num_drafted
    rig.speculation.is_paused = True
    assert rig.step() == {"a": 1}
    assert rig.speculation.num_drafted == num_drafted == NUM_DRAFTS


@pytest.mark.parametrize("right", range(NUM_DRAFTS + 1))
def test_the_tail_of_rejected_drafts_gives_its_blocks_back(make_rig, right: int) -> None:
    rig = drafting_rig(make_rig, right, block_size=1)
    rig.submit("a", max_tokens=40)
    rig.step()
    batch = rig.plan()
    assert rig.pool.num_used == 4 + 1 + NUM_DRAFTS
    rig.finish(batch)
    # Room for the token that comes next is kept where there is some.
    assert rig.pool.num_used == min(4 + 1 + right + 1, 4 + 1 + NUM_DRAFTS)


@pytest.mark.parametrize("right", range(NUM_DRAFTS + 1))
def test_no_block_with_an_unverified_token_is_ever_found(make_rig, right: int) -> None:
    rig = drafting_rig(make_rig, right, block_size=1)
    rig.submit("a", max_tokens=20)
    rig.step()
    while rig.scheduler.has_work:
        batch = rig.plan()
        (seq,) = batch.seqs
        assert not any(rig.pool.is_published(block_id) for block_id in seq.block_ids[seq.start :])
        rig.finish(batch)
    # All but the last token were computed.
    assert rig.pool.num_cached_free == 4 + 20 - 1


def test_what_is_drafted_is_accepted_or_rejected_and_usage_is_what_came_out(make_rig) -> None:
    rig = drafting_rig(make_rig, right=2)
    for name in "abc":
        rig.submit(name, max_tokens=17)
    rig.run_to_end()
    drafted = sum(sum(batch.num_drafts.values()) for batch in rig.batches)
    num_rows = sum(len(batch.seqs) for batch in rig.batches)
    assert rig.speculation.num_drafted == drafted
    assert rig.speculation.num_accepted + rig.speculation.num_rejected == drafted
    assert rig.speculation.num_accepted == 3 * 17 - num_rows
    assert rig.scheduler._waiting.virtual_service("") == 3 * (4 + 2 * 17)


def test_the_first_and_the_last_of_the_vocabulary_are_drafts_like_all(make_rig) -> None:
    class Edges:
        def draft(self, token_ids: Sequence[int], max_drafts: int) -> Iterable[int]:
            return [0, VOCAB_SIZE - 1]

    rig = make_rig(speculation=Speculation(Edges(), max_drafts=8, vocab_size=VOCAB_SIZE))
    rig.submit("a", max_tokens=9)
    rig.step()
    assert rig.step() == {"a": 3}


@pytest.mark.parametrize("nonsense", [-1, VOCAB_SIZE, 1 << 40])
def test_a_draft_outside_the_vocabulary_never_reaches_the_model(make_rig, nonsense: int) -> None:
    """I6: nor does what comes after it."""

    class Broken:
        def draft(self, token_ids: Sequence[int], max_drafts: int) -> Iterable[int]:
            return [1, nonsense, 2]

    rig = make_rig(speculation=Speculation(Broken(), max_drafts=8, vocab_size=VOCAB_SIZE))
    rig.submit("a", max_tokens=9)
    rig.step()
    assert rig.step() == {"a": 2}
    rig.run_to_end()
    assert rig.tokens("a") == expected(rig, "a", 9)


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("right", [0, 2, NUM_DRAFTS])
def test_a_preemption_between_drafts_changes_nothing(make_rig, num_steps: int, right: int) -> None:
    """B2."""
    rig = drafting_rig(make_rig, right, block_size=2, max_num_seqs=2)
    for name in "ab":
        rig.submit(name, max_tokens=25)
    rig.step(num_steps)
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    rig.step(2)
    rig.set_limits(max_num_seqs=2)
    rig.run_to_end()
    assert all(rig.tokens(name) == expected(rig, name, 25) for name in "ab")
    assert rig.scheduler.stats(0.0).num_preemptions == 1


def test_an_abort_while_drafts_are_in_flight_frees_all_its_blocks(make_rig) -> None:
    """A24."""
    rig = drafting_rig(make_rig, block_size=1)
    rig.submit("a", max_tokens=40)
    rig.step()
    batch = rig.plan()
    rig.scheduler.abort("a", AbortCause.CLIENT_GONE)
    assert all(rig.pool.num_refs(block_id) for block_id in batch.seqs[0].block_ids)
    rig.finish(batch)
    assert rig.pool.num_used == 0 and rig.speculation.num_drafted == 0


def test_a_row_that_fails_brings_none_of_its_drafts(make_rig) -> None:
    rig = drafting_rig(make_rig)
    rig.submit("a", max_tokens=40)
    rig.step()
    batch = rig.plan()
    agreed = (SampledToken(1), SampledToken(2))
    rig.scheduler.apply(batch, StepOutput((SampledToken(0, error="logits are not finite"),), {"a": agreed}))
    rig.listen()
    assert rig.ends("a") == [FinishReason.ERROR] and len(rig.tokens("a")) == 1
    assert (rig.pool.num_used, rig.pool.num_cached_free) == (0, 0)
    assert (rig.speculation.num_accepted, rig.speculation.num_rejected) == (0, NUM_DRAFTS)


def test_a_grammar_hears_of_accepted_tokens_only(make_rig) -> None:
    """I2."""
    heard: list[int] = []

    class Grammar:
        is_ready, error, accept = True, "", staticmethod(heard.append)

    rig = drafting_rig(make_rig, right=2)
    rig.submit("a", max_tokens=20, grammar=Grammar())
    rig.run_to_end()
    assert tuple(heard) == rig.tokens("a") == expected(rig, "a", 20)


def test_a_step_of_drafts_lays_plain_decodes_out_first(make_rig) -> None:
    rig = drafting_rig(make_rig, decode_token_budget=6)
    for name in "abc":
        rig.submit(name, max_tokens=40)
    rig.step()
    rig.step()
    kinds = [seq.is_decode for seq in rig.batches[-1].seqs]
    assert kinds == sorted(kinds, reverse=True) and not all(kinds)


class Eager:
    """A source that drafts all that it may."""

    def draft(self, token_ids: Sequence[int], max_drafts: int) -> Iterable[int]:
        return range(max_drafts)


def test_a_source_is_never_asked_for_more_drafts_than_set(make_rig) -> None:
    rig = make_rig(speculation=Speculation(Eager(), max_drafts=2, vocab_size=VOCAB_SIZE))
    rig.submit("a", max_tokens=40)
    rig.step()
    assert rig.step() == {"a": 3}


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 4)])
def test_drafts_go_up_to_the_last_token_but_one(make_rig, max_tokens: int, num_drafts: int) -> None:
    """The last token is drawn after what was verified; a draft of it would be computed for nothing."""
    rig = make_rig(speculation=Speculation(Eager(), max_drafts=NUM_DRAFTS, vocab_size=VOCAB_SIZE))
    rig.submit("a", max_tokens=max_tokens)
    rig.step()
    assert rig.step() == {"a": 1 + num_drafts}
