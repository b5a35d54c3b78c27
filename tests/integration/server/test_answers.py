"""The shapes of answers, whole and streamed, as OpenAI's clients read them."""

import asyncio
from typing import Any

import openai
import pytest

PROMPT = "Once upon a time"


def joined(events: list[Any], index: int = 0) -> str:
    """Text of one choice of a stream."""
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"seed": -1, "top_k": 5}])
async def test_a_stream_says_the_same_as_a_whole_answer(client: Any, sampling: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, **sampling}
    _, whole, _ = await client.post("/v1/completions", body)
    events = await client.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert joined(events) == whole["choices"][0]["text"]
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 40
    assert whole["usage"]["prompt_tokens"] == len(PROMPT)


async def test_a_completion_stream_has_the_shape_of_openai(client: Any) -> None:
    events = await client.events(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "stream_options": {"include_usage": True}}
    )
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert {event["id"] for event in [*chunks, usage]} == {chunks[0]["id"]}
    assert {event["created"] for event in [*chunks, usage]} == {chunks[0]["created"]}
    assert all(event["object"] == "text_completion" and event["usage"] is None for event in chunks)
    assert all("finish_reason" in event["choices"][0] for event in chunks)
    assert [event["choices"][0]["finish_reason"] for event in chunks if event["choices"][0]["finish_reason"]] == [
        chunks[-1]["choices"][0]["finish_reason"]
    ]
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == len(PROMPT)


async def test_a_chat_stream_opens_with_the_role_and_ends_with_a_reason(client: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2, "ignore_eos": True}
    events = await client.events("/v1/chat/completions", body)
    *chunks, done = events
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks[:2]) == [0, 1]
    ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted((end["index"], end["finish_reason"]) for end in ends) == [(0, "length"), (1, "length")]
    assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage_is_in_every_chunk(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] >= 1


async def test_choices_of_several_prompts_are_in_order(client: Any) -> None:
    prompts = ["a", "bb", "ccc"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    _, answer, _ = await client.post("/v1/completions", body)
    alone = [(await client.post("/v1/completions", {**body, "prompt": prompt, "n": 1}))[1] for prompt in prompts]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts[::2] == texts[1::2] == [one["choices"][0]["text"] for one in alone]
    assert answer["usage"] == {
        **answer["usage"],
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
    }


async def test_the_first_of_n_is_what_n_1_says_and_the_others_differ(client: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 3, "ignore_eos": True}
    _, one, _ = await client.post("/v1/completions", body)
    _, three, _ = await client.post("/v1/completions", {**body, "n": 3})
    texts = [choice["text"] for choice in three["choices"]]
    assert texts[0] == one["choices"][0]["text"] and len(set(texts)) == 3


async def test_text_and_its_token_ids_are_the_same_prompt(client: Any) -> None:
    _, tokens, _ = await client.post("/tokenize", {"prompt": PROMPT})
    body = {"max_tokens": 10, "temperature": 0}
    _, by_text, _ = await client.post("/v1/completions", {**body, "prompt": PROMPT})
    _, by_ids, _ = await client.post("/v1/completions", {**body, "prompt": tokens["tokens"]})
    assert by_text["choices"] == by_ids["choices"]


async def test_a_stop_string_ends_the_text_and_is_reported(client: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    _, free, _ = await client.post("/v1/completions", body)
    text = free["choices"][0]["text"]
    stop = text[20:23]
    expected = text[: text.index(stop)]
    _, whole, _ = await client.post("/v1/completions", {**body, "stop": [stop]})
    events = await client.events("/v1/completions", {**body, "stop": stop})
    assert whole["choices"][0]["text"] == expected == joined(events)
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", stop)
    _, shown, _ = await client.post("/v1/completions", {**body, "stop": [stop], "include_stop_str_in_output": True})
    assert shown["choices"][0]["text"] == expected + stop
    await client.wait_until_idle()


async def test_a_stop_token_ends_the_text_and_is_reported(client: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    _, free, _ = await client.post("/v1/completions", body)
    _, ids, _ = await client.post("/tokenize", {"prompt": free["choices"][0]["logprobs"]["tokens"][0]})
    body |= {"stop_token_ids": ids["tokens"]} if ids["count"] == 1 else {"stop_token_ids": list(range(258))}
    _, stopped, _ = await client.post("/v1/completions", body)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] in body["stop_token_ids"]
    assert stopped["usage"]["completion_tokens"] == 1


async def test_completion_logprobs_have_one_entry_per_token(client: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 3, "temperature": 0, "ignore_eos": True}
    _, whole, _ = await client.post("/v1/completions", body)
    found = whole["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == 12
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    assert all(logprob <= 0 for logprob in found["token_logprobs"])
    events = await client.events("/v1/completions", body)
    streamed = [token for event in events[:-1] for token in event["choices"][0]["logprobs"]["tokens"]]
    assert streamed == found["tokens"]


async def test_chat_logprobs_carry_bytes_and_alternatives(client: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    _, whole, _ = await client.post("/v1/chat/completions", {**body, "ignore_eos": True})
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert all(len(entry["top_logprobs"]) == 2 and isinstance(entry["bytes"], list) for entry in content)


async def test_min_tokens_hold_off_the_end(client: Any) -> None:
    bias = {"257": 100}
    _, soon, _ = await client.post("/v1/completions", {"prompt": "a", "logit_bias": bias, "temperature": 0})
    assert (soon["usage"]["completion_tokens"], soon["choices"][0]["finish_reason"]) == (1, "stop")
    assert soon["choices"][0]["text"] == ""
    body = {"prompt": "a", "logit_bias": bias, "temperature": 0, "min_tokens": 5}
    _, later, _ = await client.post("/v1/completions", body)
    assert later["usage"]["completion_tokens"] >= 5


async def test_chat_content_may_come_in_parts(client: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"max_tokens": 5, "temperature": 0}
    _, by_parts, _ = await client.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": parts}]}
    )
    _, by_text, _ = await client.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "a\nb"}]}
    )
    assert by_parts["choices"] == by_text["choices"]


async def test_tokenize_and_detokenize_are_inverse(client: Any) -> None:
    text = "héllo 🙂 </s>"
    _, tokens, _ = await client.post("/tokenize", {"prompt": text, "return_token_strs": True})
    _, back, _ = await client.post("/detokenize", {"tokens": tokens["tokens"]})
    assert back == {"prompt": text}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048


async def test_tokenize_renders_a_chat(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, tokens, _ = await client.post("/tokenize", {"messages": messages})
    _, back, _ = await client.post("/detokenize", {"tokens": tokens["tokens"]})
    assert back["prompt"] == "user: hi\nassistant:"


async def test_tokenize_counts_what_a_chat_with_the_same_arguments_has(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "chat_template_kwargs": {"tone": "gently"}}
    _, tokens, _ = await client.post("/tokenize", chat)
    _, answer, _ = await client.post("/v1/chat/completions", {**chat, "max_tokens": 1})
    _, plain, _ = await client.post("/tokenize", {"messages": messages})
    assert tokens["count"] == answer["usage"]["prompt_tokens"] == plain["count"] + len("gently")


@pytest.mark.parametrize("field", ["tools", "documents", "chat_template", "continue_final_message"])
async def test_tokenize_refuses_what_a_chat_refuses(client: Any, field: str) -> None:
    status, body, _ = await client.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}], field: True})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_field", field)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"model": "other", "prompt": "a"}])
async def test_a_bad_tokenize_is_refused(client: Any, body: dict[str, Any]) -> None:
    status, _, _ = await client.post("/tokenize", body)
    assert status in (400, 404)


@pytest.mark.parametrize("body", [{}, {"tokens": [-1]}, {"tokens": [258]}, {"tokens": ["a"]}])
async def test_a_bad_detokenize_is_refused(client: Any, body: dict[str, Any]) -> None:
    status, _, _ = await client.post("/detokenize", body)
    assert status == 400


async def test_ids_of_the_client_come_back(client: Any) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"X-Request-Id": "my-id", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    answers = await asyncio.gather(
        *(client.post("/v1/completions", {"prompt": "a"}, headers=headers) for _ in range(2)),
        client.post("/v1/completions", {"prompt": ""}, headers=headers),
    )
    for _, _, got in answers:
        assert got["X-Request-Id"] == "my-id"
        assert got["traceparent"].startswith(f"00-{trace}-") and got["traceparent"].endswith("-01")
    assert answers[2][1]["error"]["trace_id"] == trace


@pytest.fixture
def sdk(runtime: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{runtime.url}/v1", api_key="none", max_retries=0)


async def test_the_openai_sdk_lists_the_model(sdk: openai.AsyncOpenAI) -> None:
    async with sdk:
        listed = await sdk.models.list()
        assert [model.id for model in listed.data] == ["tiny"]
        assert (await sdk.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("other")


async def test_the_openai_sdk_chats_and_streams(sdk: openai.AsyncOpenAI) -> None:
    async with sdk:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 12}
        asked["messages"] = [{"role": "user", "content": "hello"}]
        whole = await sdk.chat.completions.create(**asked)
        text, reason = "", None
        stream = await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            usage = chunk.usage
        assert (text, reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
        # The second of the two may find the prompt in the prefix cache.
        assert usage is not None and whole.usage is not None
        assert (usage.prompt_tokens, usage.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)


async def test_the_openai_sdk_raises_its_own_errors(sdk: openai.AsyncOpenAI) -> None:
    async with sdk:
        with pytest.raises(openai.BadRequestError) as raised:
            await sdk.completions.create(model="tiny", prompt="a", max_tokens=5000)
        assert raised.value.param == "max_tokens" and raised.value.request_id


async def test_a_prompt_that_comes_again_is_answered_from_the_prefix_cache(client: Any) -> None:
    """Usage and metrics say so, and the text is the same."""
    body = {"prompt": "Nobody asked this before. " * 4, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = await client.metrics()
    answers = [(await client.post("/v1/completions", body))[1] for _ in range(2)]
    after = await client.metrics()
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    # 104 tokens in blocks of 16; the last token is always computed.
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 96]
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_total")
    assert [after[name] - before[name] for name in names] == [208, 96, 96]
