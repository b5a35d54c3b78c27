import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_runtime.core.messages import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from guidevane_runtime.errors import EngineUnavailable, ServerError, WaitedTooLong
from guidevane_runtime.server.choices import Choice, Delta
from guidevane_runtime.server.text.tokenizer import Tokenizer


def make_choice(tokenizer: Tokenizer, *stops: str, min_tokens: int = 0, include_stop: bool = False) -> Choice:
    params = SamplingParams(max_tokens=100, seed=1, min_tokens=min_tokens)
    return Choice(0, (1,), params, tokenizer, stops=stops, include_stop=include_stop)


def output(ids: list[int], finish: FinishReason | None = None, **more: object) -> RequestOutput:
    logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in ids)
    return RequestOutput("r", tuple(ids), logprobs, finish, **more)  # type: ignore[arg-type]


def feed_all(choice: Choice, tokenizer: Tokenizer, text: str, sizes: list[int]) -> Delta:
    """Feed a text, `sizes` tokens at a time, and end it by its length."""
    ids, whole, position = tokenizer.encode(text), Delta(), 0
    for size in [*sizes, len(ids)]:
        part = ids[position : position + size]
        position += size
        is_last = position >= len(ids)
        whole.merge(choice.feed(output(part, FinishReason.LENGTH if is_last else None)))
        if is_last or choice.finish_reason:
            break
    return whole


@given(text=st.text(min_size=1, max_size=30), sizes=st.lists(st.integers(1, 5), max_size=20))
def test_deltas_join_to_the_decoded_tokens(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    choice = make_choice(tokenizer)
    whole = feed_all(choice, tokenizer, text, sizes)
    assert whole.text == text
    assert choice.num_tokens == len(tokenizer.encode(text)) == len(whole.logprobs)


def test_tokens_beyond_a_stop_string_are_neither_shown_nor_counted(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, "cd")
    delta = choice.feed(output(tokenizer.encode("abcdef")))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "cd")
    assert choice.num_tokens == 4 == len(delta.logprobs)


def test_a_stop_string_within_min_tokens_is_ignored(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, "b", min_tokens=3)
    delta = choice.feed(output(tokenizer.encode("abcab")))
    assert (delta.text, choice.num_tokens) == ("abca", 5)


def test_the_eos_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer)
    delta = choice.feed(output([*tokenizer.encode("hi"), *tokenizer.encode("</s>")], FinishReason.STOP))
    assert (delta.text, delta.finish_reason, delta.stop_reason, choice.num_tokens) == ("hi", "stop", None, 3)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_shown_only_if_asked(tokenizer: Tokenizer, include_stop: bool, text: str) -> None:
    ids = tokenizer.encode("ab")
    choice = make_choice(tokenizer, include_stop=include_stop)
    delta = choice.feed(output(ids, FinishReason.STOP, stop_token_id=ids[1]))
    assert (delta.text, delta.stop_reason) == (text, ids[1])


def test_log_probabilities_wait_for_the_text_that_they_belong_to(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer)
    first, second = tokenizer.encode("é")
    assert choice.feed(output([first])).logprobs == []
    assert [token.token_id for token in choice.feed(output([second])).logprobs] == [first, second]


def test_what_was_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, "abc")
    assert choice.feed(output(tokenizer.encode("ab"))).text == ""
    assert choice.feed(output([], FinishReason.LENGTH)).text == "ab"


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    [
        (FinishReason.TIMEOUT, WaitedTooLong, 504),
        (FinishReason.ERROR, ServerError, 500),
        (FinishReason.ABORT, EngineUnavailable, 503),
    ],
)
def test_a_request_that_the_engine_gave_up_is_an_error(
    tokenizer: Tokenizer, reason: FinishReason, error: type[ServerError], status: int
) -> None:
    with pytest.raises(error) as raised:
        make_choice(tokenizer).feed(RequestOutput("r", finish_reason=reason))
    assert raised.value.status == status
