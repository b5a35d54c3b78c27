from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from guidevane_runtime.server.text.detokenizer import Detokenizer

texts = st.text(max_size=60)
cuts = st.lists(st.integers(0, 400), max_size=30)


def pieces_of(data: bytes, cut_at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cut_at if cut < len(data))})
    return [data[start:end] for start, end in pairwise(edges)]


def detokenize(pieces: list[bytes]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [detokenizer.push((i,)) for i in range(len(pieces))], detokenizer.flush()


@given(texts, cuts)
def test_deltas_join_to_the_text_whatever_the_token_split(text: str, cut_at: list[int]) -> None:
    deltas, rest = detokenize(pieces_of(text.encode(), cut_at))
    assert "".join(deltas) + rest == text


@given(texts.filter(lambda text: "�" not in text), cuts)
def test_no_replacement_character_appears_in_a_delta_of_valid_text(text: str, cut_at: list[int]) -> None:
    deltas, rest = detokenize(pieces_of(text.encode(), cut_at))
    assert "�" not in "".join(deltas) and rest == ""


@given(st.binary(max_size=80), cuts)
def test_any_bytes_give_the_same_text_as_a_full_decode(data: bytes, cut_at: list[int]) -> None:
    deltas, rest = detokenize(pieces_of(data, cut_at))
    assert "".join(deltas) + rest == data.decode("utf-8", "replace")


def test_half_a_character_waits_and_is_replaced_only_at_the_end() -> None:
    deltas, rest = detokenize(["é".encode()[:1]])
    assert (deltas, rest) == ([""], "�")
