import pytest

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import FinishReason, SamplingParams, Submit
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.stopping import Stop, find_stop

EOS = frozenset({2, 3})


def stop_after(*output: int, max_num_tokens: int = 100, **params: object) -> Stop | None:
    submit = Submit("a", (7, 8), SamplingParams(max_tokens=50, seed=0, **params), arrival_s=0.0)  # type: ignore[arg-type]
    request = Request(submit, max_num_tokens, BlockPool(1, 1).table())
    request.token_ids += output
    return find_stop(request, EOS)


@pytest.mark.parametrize("eos", sorted(EOS))
def test_each_of_the_models_end_tokens_stops(eos: int) -> None:
    assert stop_after(5, eos) == Stop(FinishReason.STOP, None)


def test_an_end_token_is_a_token_like_others_when_it_is_ignored() -> None:
    assert stop_after(5, 2, ignore_eos=True) is None


def test_an_end_token_in_the_prompt_or_the_middle_does_not_stop() -> None:
    assert stop_after(2, 5) is None


def test_a_stop_id_stops_and_is_named() -> None:
    assert stop_after(5, 9, stop_token_ids=frozenset({9})) == Stop(FinishReason.STOP, 9)


def test_a_stop_id_that_is_an_end_token_still_stops_when_end_tokens_are_ignored() -> None:
    assert stop_after(2, ignore_eos=True, stop_token_ids=frozenset({2})) == Stop(FinishReason.STOP, 2)


def test_nothing_but_the_length_stops_before_min_tokens() -> None:
    params = {"min_tokens": 3, "stop_token_ids": frozenset({9})}
    assert [stop_after(*output, **params) for output in [(2,), (5, 9)]] == [None, None]
    assert stop_after(5, 5, 9, **params) == Stop(FinishReason.STOP, 9)
    assert stop_after(5, 2, max_num_tokens=4, **params) == Stop(FinishReason.LENGTH)


def test_an_end_token_at_the_length_limit_is_a_stop() -> None:
    """F16: the model ended, so it is no cut."""
    assert stop_after(5, 2, max_num_tokens=4) == Stop(FinishReason.STOP)
    assert stop_after(5, 5, max_num_tokens=4) == Stop(FinishReason.LENGTH)
