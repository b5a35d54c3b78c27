"""What a body asks for: prompts, sampling, and how the answer looks. Read and checked before anything is reserved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.sampling import MAX_CHOICES, Field, Sampling, read_sampling
from guidevane_runtime.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    refuse_unsupported,
)
from guidevane_runtime.server.services import Services

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions; a chat answer may take what is left of the context."""

CLASS_OF_TIER: Mapping[str, RequestClass | None] = {
    "auto": None,
    "default": RequestClass.INTERACTIVE,
    "flex": RequestClass.OFFLINE,
}
"""OpenAI's service_tier; None: it does not say."""
MAX_SALT_CHARS = 256

ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


@dataclass(frozen=True, slots=True)
class Job:
    """One body, checked. Texts are not tokenised yet."""

    prompts: Sequence[str | list[int]]
    prompt_field: str
    """What the client calls them, for errors."""
    sampling: Sampling
    default_max_tokens: int | None
    """None: what is left of the context."""
    num_logprobs: int | None
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_class: RequestClass | None
    """None: the body does not say."""
    cache_salt: str

    @property
    def count(self) -> int:
        """Choices, which are requests to the engine."""
        return len(self.prompts) * self.sampling.n


def read_completion(body: CompletionRequest, services: Services) -> Job:
    """Check a body of /v1/completions."""
    services.check_model(body.model)
    refuse_unsupported(body)
    sampling = read_sampling(
        body,
        max_tokens=Field("max_tokens", body.max_tokens),
        num_logprobs=Field("logprobs", body.logprobs),
        vocab_size=services.vocab_size,
    )
    return _job(
        body,
        _prompts(body.prompt),
        sampling,
        prompt_field="prompt",
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        num_logprobs=body.logprobs,
        add_special_tokens=body.add_special_tokens is not False,
    )


def read_chat(body: ChatCompletionRequest, services: Services) -> Job:
    """Check a body of /v1/chat/completions and render its prompt."""
    services.check_model(body.model)
    refuse_unsupported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = Field("max_completion_tokens", body.max_completion_tokens)
    if max_tokens.value is None:
        max_tokens = Field("max_tokens", body.max_tokens)
    sampling = read_sampling(
        body,
        max_tokens=max_tokens,
        num_logprobs=Field("top_logprobs", num_logprobs),
        vocab_size=services.vocab_size,
    )
    prompt = render_chat(services, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    return _job(
        body,
        [prompt],
        sampling,
        prompt_field="messages",
        default_max_tokens=None,
        num_logprobs=num_logprobs,
        add_special_tokens=bool(body.add_special_tokens),
    )


def render_chat(
    services: Services,
    messages: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    extra: dict[str, Any] | None = None,
) -> str:
    """The prompt of a conversation by the model's template."""
    if services.template is None:
        raise InvalidRequest("the model has no chat template; use /v1/completions", code="no_chat_template")
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    checked = [_message(message, i) for i, message in enumerate(messages)]
    return services.template.render(checked, add_generation_prompt=add_generation_prompt is not False, extra=extra)


def _job(
    body: SamplingFields,
    prompts: Sequence[str | list[int]],
    sampling: Sampling,
    *,
    prompt_field: str,
    default_max_tokens: int | None,
    num_logprobs: int | None,
    add_special_tokens: bool,
) -> Job:
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n {sampling.n} is above {MAX_CHOICES} choices; send fewer at once", param="n"
        )
    if body.service_tier is not None and body.service_tier not in CLASS_OF_TIER:
        raise InvalidRequest(
            f"service_tier is {body.service_tier[:40]!r}, must be auto, default or flex", param="service_tier"
        )
    options = body.stream_options
    return Job(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=sampling,
        default_max_tokens=default_max_tokens,
        num_logprobs=num_logprobs,
        add_special_tokens=add_special_tokens,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        request_class=CLASS_OF_TIER[body.service_tier or "auto"],
        cache_salt=_cache_salt(body.cache_salt),
    )


def _cache_salt(salt: str | None) -> str:
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters, must have 1 to {MAX_SALT_CHARS}", param="cache_salt"
        )
    return salt or ""


def _prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(part, int) for part in prompt):
        prompts = [[part for part in prompt if isinstance(part, int)]]
    else:
        prompts = [part for part in prompt or [] if not isinstance(part, int)]
        if len({type(part) for part in prompt or []}) > 1:
            raise InvalidRequest("prompt mixes texts and token ids; send one kind", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt is empty; send at least one character or token id", param="prompt")
    return prompts


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {str(role)[:40]!r}, must be one of {', '.join(sorted(ROLES))}", param="messages"
        )
    if message.get("tool_calls") or message.get("function_call") or role == "tool":
        raise InvalidRequest(
            f"{where} is about tools, which are not supported; leave it out", code="unsupported_field", param="messages"
        )
    return {**message, "content": _content(message.get("content"), where)}


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param="messages")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(f"{where} must be a text part; images, audio and files are not supported", param="messages")
