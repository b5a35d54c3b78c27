"""What is refused, with which status, code and parameter; nothing of it reaches the engine."""

import json
from typing import Any

import pytest

VOCAB_SIZE, CONTEXT = 258, 2048

OVER_64_BITS = 10**40

COMPLETION_CASES: list[tuple[str, dict[str, Any], int, str | None]] = [
    # why, fields, status, param
    ("no prompt", {"prompt": None}, 400, "prompt"),
    ("empty prompt", {"prompt": ""}, 400, "prompt"),
    ("empty list", {"prompt": []}, 400, "prompt"),
    ("empty list of ids", {"prompt": [[]]}, 400, "prompt"),
    ("one empty of two", {"prompt": ["a", ""]}, 400, "prompt"),
    ("texts and ids mixed", {"prompt": ["a", 1]}, 400, "prompt"),
    ("prompt is a number", {"prompt": 7}, 400, "prompt"),
    ("negative id", {"prompt": [-1]}, 400, "prompt"),
    ("id beyond the vocabulary", {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
    ("id beyond 64 bits", {"prompt": [OVER_64_BITS]}, 400, "prompt"),
    ("unknown model", {"model": "other"}, 404, "model"),
    ("model is a number", {"model": 3}, 400, "model"),
    ("max_tokens 0", {"max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens negative", {"max_tokens": -1}, 400, "max_tokens"),
    ("max_tokens a float", {"max_tokens": 1.5}, 400, "max_tokens"),
    ("max_tokens a bool", {"max_tokens": True}, 400, "max_tokens"),
    ("max_tokens beyond 64 bits", {"max_tokens": OVER_64_BITS}, 400, "max_tokens"),
    ("max_tokens above the limit", {"max_tokens": 1501}, 400, "max_tokens"),
    ("n 0", {"n": 0}, 400, "n"),
    ("n above what an idle engine takes", {"n": 73}, 400, "n"),
    ("a token that the model has no row for", {"prompt": "a<beyond>"}, 400, "prompt"),
    ("n above the cap", {"n": 129}, 400, "n"),
    ("prompts times n above the cap", {"prompt": ["a"] * 65, "n": 2}, 400, "n"),
    ("temperature negative", {"temperature": -0.1}, 400, "temperature"),
    ("temperature above 2", {"temperature": 2.1}, 400, "temperature"),
    ("top_p 0", {"top_p": 0}, 400, "top_p"),
    ("top_p above 1", {"top_p": 1.01}, 400, "top_p"),
    ("top_k -2", {"top_k": -2}, 400, "top_k"),
    ("min_p above 1", {"min_p": 1.1}, 400, "min_p"),
    ("presence_penalty", {"presence_penalty": 2.1}, 400, "presence_penalty"),
    ("frequency_penalty", {"frequency_penalty": -2.1}, 400, "frequency_penalty"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, 400, "repetition_penalty"),
    ("repetition_penalty that overflows", {"repetition_penalty": 1e-40, "top_p": 0.9}, 400, "repetition_penalty"),
    ("logprobs negative", {"logprobs": -1}, 400, "logprobs"),
    ("logprobs above the cap", {"logprobs": 21}, 400, "logprobs"),
    ("logit_bias key no number", {"logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ("logit_bias key negative", {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ("logit_bias key beyond the vocabulary", {"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias"),
    ("logit_bias value", {"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ("logit_bias too long", {"logit_bias": {str(i): 0 for i in range(1025)}}, 400, "logit_bias"),
    ("stop_token_ids beyond the vocabulary", {"stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids"),
    ("stop_token_ids too long", {"stop_token_ids": [1] * 129}, 400, "stop_token_ids"),
    ("empty stop", {"stop": ""}, 400, "stop"),
    ("empty stop in a list", {"stop": ["a", ""]}, 400, "stop"),
    ("too many stops", {"stop": ["a"] * 65}, 400, "stop"),
    ("a stop too long", {"stop": "a" * 1025}, 400, "stop"),
    ("min_tokens above max_tokens", {"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    ("min_tokens above the default", {"min_tokens": 17}, 400, "min_tokens"),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("seed beyond 64 bits", {"seed": 1 << 64}, 400, "seed"),
    ("echo", {"echo": True}, 400, "echo"),
    ("suffix", {"suffix": "end"}, 400, "suffix"),
    ("best_of", {"best_of": 3}, 400, "best_of"),
    ("beam search", {"use_beam_search": True}, 400, "use_beam_search"),
    ("prompt_logprobs", {"prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ("structured outputs", {"structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
    ("response_format", {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ("another server's schema", {"json_schema": "{}"}, 400, "json_schema"),
    ("another server's regex", {"regex": "a+"}, 400, "regex"),
    ("another server's ebnf", {"ebnf": 'root ::= "a"'}, 400, "ebnf"),
    ("another server's grammar", {"grammar": 'root ::= "a"'}, 400, "grammar"),
    ("logits processors", {"logits_processors": ["x"]}, 400, "logits_processors"),
    ("arguments of another server's plugins", {"vllm_xargs": {"a": 1}}, 400, "vllm_xargs"),
    ("cache_salt", {"cache_salt": ""}, 400, "cache_salt"),
    ("service_tier", {"service_tier": "priority"}, 400, "service_tier"),
]

CHAT_CASES: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("no messages", {"messages": None}, 400, "messages"),
    ("empty messages", {"messages": []}, 400, "messages"),
    ("a role that is none", {"messages": [{"role": "god", "content": "x"}]}, 400, "messages"),
    ("a role that is a list", {"messages": [{"role": [], "content": "x"}]}, 400, "messages"),
    ("no role", {"messages": [{"content": "x"}]}, 400, "messages"),
    ("an image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ("content is a number", {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    ("what a tool said", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "messages"),
    ("a call of a tool", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages"),
    ("a call of a function", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, 400, "messages"),
    ("a message that is a text", {"messages": ["hello"]}, 400, "messages"),
    ("tools", {"tools": [{"type": "function"}]}, 400, "tools"),
    ("tool_choice", {"tool_choice": "required"}, 400, "tool_choice"),
    ("top_logprobs without logprobs", {"top_logprobs": 2}, 400, "top_logprobs"),
    ("top_logprobs above the cap", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("json schema", {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("max_completion_tokens 0", {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("max_completion_tokens above the limit", {"max_completion_tokens": 1501}, 400, "max_completion_tokens"),
    ("audio", {"modalities": ["audio"]}, 400, "modalities"),
]


def assert_is_error(body: Any, headers: Any) -> dict[str, Any]:
    error: dict[str, Any] = body["error"]
    assert set(error) >= {"message", "type", "param", "code", "request_id", "trace_id"}
    assert isinstance(error["code"], str) and error["message"]
    assert len(json.dumps(body)) <= 4096
    assert headers["X-Request-Id"] == error["request_id"]
    assert headers["traceparent"].split("-")[1] == error["trace_id"]
    return error


@pytest.mark.parametrize(("why", "fields", "status", "param"), COMPLETION_CASES, ids=[c[0] for c in COMPLETION_CASES])
async def test_a_bad_completion_is_refused_by_name(
    client: Any, why: str, fields: dict[str, Any], status: int, param: str
) -> None:
    got, body, headers = await client.post("/v1/completions", {"model": "tiny", "prompt": "a", **fields})
    error = assert_is_error(body, headers)
    assert (got, error["param"]) == (status, param), error["message"]


@pytest.mark.parametrize(("why", "fields", "status", "param"), CHAT_CASES, ids=[c[0] for c in CHAT_CASES])
async def test_a_bad_chat_is_refused_by_name(
    client: Any, why: str, fields: dict[str, Any], status: int, param: str
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    got, body, headers = await client.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})
    error = assert_is_error(body, headers)
    assert (got, error["param"]) == (status, param), error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
async def test_numbers_that_are_none_are_refused(client: Any, field: str, number: str) -> None:
    raw = f'{{"prompt": "a", "{field}": {number}}}'.encode()
    status, body, headers = await client.post("/v1/completions", raw)
    assert_is_error(body, headers)
    assert status == 400


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"x":' + b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_refused(client: Any, raw: bytes) -> None:
    status, body, headers = await client.post("/v1/completions", raw)
    assert_is_error(body, headers)
    assert status == 400


async def test_a_body_above_the_limit_is_413_in_json(client: Any) -> None:
    status, body, headers = await client.post("/v1/completions", b" " * (33 << 20))
    assert (status, assert_is_error(body, headers)["code"]) == (413, "body_too_large")


async def test_a_route_that_is_none_is_404_in_json(client: Any) -> None:
    status, body, headers = await client.post("/v1/embeddings", {})
    assert (status, assert_is_error(body, headers)["type"]) == (404, "not_found_error")


async def test_a_method_that_is_not_allowed_is_405_in_json(client: Any) -> None:
    async with client.session.get(f"{client.runtime.url}/v1/completions") as response:
        assert_is_error(await response.json(), response.headers)
        assert (response.status, response.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"),
    [
        (CONTEXT - 1, 1, 200),
        (CONTEXT - 1, None, 200),
        (CONTEXT - 1, 2, 400),
        (CONTEXT, 1, 400),
        (CONTEXT, None, 400),
        (CONTEXT + 1, None, 400),
    ],
)
async def test_prompt_and_output_must_fit_the_context(
    client: Any, num_prompt: int, max_tokens: int | None, status: int
) -> None:
    got, body, _ = await client.post("/v1/completions", {"prompt": [65] * num_prompt, "max_tokens": max_tokens})
    assert got == status
    if status == 400:
        assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", "prompt")
        assert str(num_prompt) in body["error"]["message"] and str(CONTEXT) in body["error"]["message"]


@pytest.mark.parametrize(
    ("content", "code"), [("a" * CONTEXT, "context_length_exceeded"), ("a<beyond>", "invalid_request")]
)
async def test_a_conversation_is_called_messages_in_what_is_wrong_with_its_prompt(
    client: Any, content: str, code: str
) -> None:
    status, body, _ = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, "messages")


async def test_a_method_that_a_client_made_up_is_no_label_of_its_own(client: Any) -> None:
    async with client.session.request("PROPFIND", f"{client.runtime.url}/v1/models") as response:
        assert response.status == 405
    _, page = await client.get("/metrics")
    assert b"PROPFIND" not in page and b'method="other"' in page


async def test_the_template_refuses_with_its_own_words(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]
    status, body, _ = await client.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "a system message must come first" in body["error"]["message"]


async def test_explicit_nulls_mean_the_default(client: Any) -> None:
    names = "max_tokens n stream stream_options temperature top_p top_k min_p seed stop logit_bias tools tool_choice"
    names += " response_format user presence_penalty frequency_penalty logprobs top_logprobs functions metadata"
    body = {"messages": [{"role": "user", "content": "hi"}], **dict.fromkeys(names.split())}
    status, answer, _ = await client.post("/v1/chat/completions", {**body, "max_completion_tokens": 1})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


async def test_fields_that_nobody_knows_are_ignored(client: Any) -> None:
    status, _, _ = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "from_the_future": {"x": 1}})
    assert status == 200


async def test_a_body_of_any_content_type_is_read(client: Any) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        status, _, _ = await client.post("/v1/completions", {"prompt": "a"}, headers={"Content-Type": kind})
        assert status == 200


async def test_refusals_are_counted_by_reason(client: Any) -> None:
    before = await client.metrics()
    await client.post("/v1/completions", {"prompt": ""})
    await client.post("/v1/completions", {"prompt": [1] * (CONTEXT + 1)})
    after = await client.metrics()
    for reason in ("validation", "context_length"):
        name = f"guidevane_admission_rejections_total{{reason={reason}}}"
        assert after[name] == before[name] + 1
