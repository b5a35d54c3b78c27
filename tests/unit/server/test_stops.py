from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_runtime.server.text.stops import StopMatcher

words = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
cuts = st.lists(st.integers(0, 24), max_size=24)


def shown_of(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The rule itself: the stop that is complete first; of those complete together, the one that began first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include_stop else text[: end - len(stop)], stop
    return text, None


def run(text: str, stops: list[str], cut_at: list[int], *, include_stop: bool) -> tuple[str, str | None, int]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    edges = sorted({0, len(text), *(cut for cut in cut_at if cut < len(text))})
    shown, longest_held = "", 0
    for start, end in pairwise(edges):
        match = matcher.push(text[start:end])
        shown += match.text
        if match.stop is not None:
            return shown, match.stop, longest_held
        longest_held = max(longest_held, end - len(shown))
    return shown + matcher.flush(), None, longest_held


@given(words, stop_lists, cuts, st.booleans())
def test_the_same_text_is_shown_whatever_the_split(
    text: str, stops: list[str], cut_at: list[int], include_stop: bool
) -> None:
    shown, stop, _ = run(text, stops, cut_at, include_stop=include_stop)
    assert (shown, stop) == shown_of(text, stops, include_stop=include_stop)


@given(words, stop_lists, cuts)
def test_no_stop_string_is_ever_visible(text: str, stops: list[str], cut_at: list[int]) -> None:
    shown, _, _ = run(text, stops, cut_at, include_stop=False)
    assert not any(stop in shown for stop in stops)


@given(words, stop_lists, cuts)
def test_no_more_is_held_back_than_the_longest_proper_prefix(text: str, stops: list[str], cut_at: list[int]) -> None:
    _, _, longest_held = run(text, stops, cut_at, include_stop=False)
    assert longest_held <= max((len(stop) - 1 for stop in stops), default=0)


def test_text_that_can_no_longer_become_a_stop_is_shown_at_once() -> None:
    matcher = StopMatcher(["END!"])
    assert matcher.push("EN").text == ""
    assert matcher.push("T").text == "ENT"


@pytest.mark.parametrize("split", range(1, 5))
def test_a_stop_cut_anywhere_between_two_pieces_is_found(split: int) -> None:
    matcher = StopMatcher(["STOP!"])
    first = matcher.push("ok " + "STOP!"[:split])
    second = matcher.push("STOP!"[split:] + " tail")
    assert (first.text + second.text, second.stop) == ("ok ", "STOP!")
