"""Request bodies. Every optional field accepts null; a field that nobody knows is ignored: SDKs send new ones often.

A field that would change the answer but is not supported is known here, and refused by `refuse_unsupported`.
"""

import re
from typing import Any, TypeVar

import msgspec

from guidevane_runtime.errors import InvalidRequest


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None

    # Known, and refused unless they say what happens anyway.
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Other servers' names for a grammar.
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    logits_processors: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    """A text, texts, token ids, or lists of token ids."""
    logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    # As in a chat: known, and refused.
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    tools: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body")

_ACCEPTED: dict[str, tuple[Any, ...]] = {
    # field -> values that mean "as usual"; absent and null are always accepted
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "echo": (False,),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode JSON of the given kind. NaN, Infinity and numbers out of a double's range are no JSON and are refused."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not valid: {error}", param=_param_of(str(error))) from error
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from error


def refuse_unsupported(request: SamplingFields | TokenizeRequest) -> None:
    """Name the first field that asks for what this server can't do: better than an answer that ignores it."""
    for name, accepted in _ACCEPTED.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == usual and type(value) is type(usual) for usual in accepted):
            raise InvalidRequest(f"{name} is not supported; leave it out", code="unsupported_field", param=name)


def _param_of(message: str) -> str | None:
    found = re.search(r"`\$\.(\w+)", message)
    return found and found.group(1)
