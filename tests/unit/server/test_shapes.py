import math
from typing import Any

from guidevane_runtime.core.messages import RequestOutput, SamplingParams, TokenLogprobs
from guidevane_runtime.server.choices import Choice, Delta
from guidevane_runtime.server.sampling import derived_seed
from guidevane_runtime.server.shapes import ChatShape, CompletionShape, Envelope, usage
from guidevane_runtime.server.text.tokenizer import Tokenizer
from guidevane_runtime.server.tracing import RequestIds

ENVELOPE = Envelope("id", 1, "m")


def make_choices(tokenizer: Tokenizer, prompts: list[tuple[int, ...]]) -> list[Choice]:
    return [Choice(i, prompt, SamplingParams(max_tokens=9, seed=1), tokenizer) for i, prompt in enumerate(prompts)]


def test_a_prompt_that_several_choices_share_counts_once(tokenizer: Tokenizer) -> None:
    shared, other = tuple(range(5)), tuple(range(3))
    choices = make_choices(tokenizer, [shared, shared, other])
    for choice in choices:
        choice.feed(RequestOutput("r", (1, 2)))
    found = usage(choices)
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (8, 6, 14)


def test_cached_tokens_of_a_shared_prompt_are_those_of_its_first_choice(tokenizer: Tokenizer) -> None:
    choices = make_choices(tokenizer, [tuple(range(40))] * 2)
    for choice, num_cached in zip(choices, (16, 32), strict=True):
        choice.feed(RequestOutput("r", (1,), num_cached_tokens=num_cached))
    assert usage(choices)["prompt_tokens_details"] == {"cached_tokens": 16}


def test_minus_infinity_is_a_number_in_json(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    (b,) = tokenizer.encode("b")
    delta = Delta("a", [TokenLogprobs(a, -math.inf, ((b, -0.5),))])
    (choice,) = make_choices(tokenizer, [(1,)])
    completion: Any = CompletionShape(ENVELOPE, tokenizer, 1).chunk(choice, delta)["choices"][0]["logprobs"]
    assert completion["token_logprobs"] == [-9999.0]
    # The sampled token is there although it is not among the likeliest.
    assert completion["top_logprobs"] == [{"b": -0.5, "a": -9999.0}]
    chat: Any = ChatShape(ENVELOPE, tokenizer, 1).chunk(choice, delta)["choices"][0]["logprobs"]
    assert chat["content"][0]["logprob"] == -9999.0


def test_half_a_character_shows_its_bytes_in_logprobs(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")
    delta = Delta("é", [TokenLogprobs(first, -1.0), TokenLogprobs(second, -1.0)])
    (choice,) = make_choices(tokenizer, [(1,)])
    chat: Any = ChatShape(ENVELOPE, tokenizer, 0).chunk(choice, delta)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]) == "é".encode()


def test_offsets_go_on_from_chunk_to_chunk(tokenizer: Tokenizer) -> None:
    shape = CompletionShape(ENVELOPE, tokenizer, 0)
    (choice,) = make_choices(tokenizer, [(1,)])
    ids = tokenizer.encode("abc")
    chunks: list[Any] = [shape.chunk(choice, Delta("x", [TokenLogprobs(token_id, -1.0)])) for token_id in ids]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2]]


def test_derived_seeds_differ_and_repeat() -> None:
    seeds = [derived_seed(5, choice) for choice in range(100)]
    assert seeds[0] == 5 and len(set(seeds)) == 100
    assert seeds == [derived_seed(5, choice) for choice in range(100)]
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_bad_ids_of_a_client_are_replaced() -> None:
    sent = {"X-Request-Id": "bad id\n", "traceparent": f"00-{'0' * 32}-{'1' * 16}-01"}
    ids = RequestIds.of(sent)
    assert " " not in ids.request_id and ids.trace_id.strip("0")
