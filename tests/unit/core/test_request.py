import itertools

import pytest

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.request import ALLOWED_TRANSITIONS, Request, RequestState


def make_request(**params: float) -> Request:
    submit = Submit("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=9, seed=1, **params), arrival_s=0.0)  # type: ignore[arg-type]
    return Request(submit, max_num_tokens=14, blocks=BlockPool(10, 4).table())


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, repeat=2)))
def test_only_the_transitions_of_the_table_are_allowed(old: RequestState, new: RequestState) -> None:
    request = make_request()
    request.state = old
    if new in ALLOWED_TRANSITIONS[old]:
        request.move_to(new)
        assert request.state is new
    else:
        with pytest.raises(RuntimeError, match=f"can't go from {old} to {new}"):
            request.move_to(new)


def test_a_preempted_request_keeps_its_tokens_and_waits_to_compute_them_again() -> None:
    """B5, B7: what was emitted stays, what was computed does not."""
    request = make_request()
    request.move_to(RequestState.RUNNING)
    request.blocks.try_grow_to(6)
    request.note_computed(5)
    request.token_ids.append(77)
    request.preempt()
    assert request.state is RequestState.WAITING
    assert (request.token_ids, request.num_uncomputed_tokens) == ([1, 2, 3, 4, 5, 77], 6)
    assert (request.blocks.block_ids, request.num_preemptions) == ((), 1)


def test_every_preemption_counts() -> None:
    request = make_request()
    for _ in range(3):
        request.move_to(RequestState.RUNNING)
        request.preempt()
    assert request.num_preemptions == 3


def test_a_preempted_request_has_published_and_shares_nothing() -> None:
    request = make_request()
    request.move_to(RequestState.RUNNING)
    request.num_published_blocks = request.num_shared_blocks = 1
    request.preempt()
    assert (request.num_published_blocks, request.num_shared_blocks) == (0, 0)


def test_recomputed_tokens_are_those_below_the_high_water_mark() -> None:
    request = make_request()
    request.move_to(RequestState.RUNNING)
    request.note_computed(4)
    request.preempt()
    assert (request.num_recomputed(3), request.num_recomputed(5)) == (3, 4)
    request.note_computed(3)
    assert request.num_recomputed(2) == 1


def test_what_a_prefix_hit_brought_was_not_computed_before_a_preemption() -> None:
    request = make_request()
    request.num_computed_tokens = 4
    assert request.num_recomputed(1) == 0


def test_a_chunk_samples_only_when_it_ends_with_the_last_known_token() -> None:
    request = make_request()
    assert request.scheduled(4).samples is False
    request.note_computed(4)
    last = request.scheduled(1)
    assert (last.samples, last.is_decode, last.start, last.token_ids) == (True, True, 4, (5,))
    assert last.params is request.params


@pytest.mark.parametrize(
    ("params", "is_told"), [({}, False), ({"presence_penalty": 0.5}, True), ({"repetition_penalty": 1.1}, True)]
)
def test_its_history_travels_only_with_penalties(params: dict[str, float], is_told: bool) -> None:
    request = make_request(**params)
    request.token_ids.append(9)
    seq = request.scheduled(1)
    told = (seq.history.token_ids, seq.history.num_prompt_tokens) if seq.history else None
    assert told == (([1, 2, 3, 4, 5, 9], 5) if is_told else None)
    assert seq.num_output_tokens == 1
