"""POST /v1/completions and /v1/chat/completions, GET /v1/models."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from guidevane_runtime.core.door import Refused
from guidevane_runtime.core.leases import Lease
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.generation import Generation
from guidevane_runtime.server.jobs import Job, read_chat, read_completion
from guidevane_runtime.server.sampling import check_token_ids
from guidevane_runtime.server.schemas import ChatCompletionRequest, CompletionRequest, parse_body
from guidevane_runtime.server.services import SERVICES, Services
from guidevane_runtime.server.shapes import AnswerShape, ChatShape, CompletionShape, Envelope
from guidevane_runtime.server.standing import Wishes
from guidevane_runtime.server.streams import answer_stream, answer_whole
from guidevane_runtime.server.tracing import IDS

ReadJob = Callable[[bytes, Services], Job]
MakeShape = Callable[[Envelope, Job, Services], AnswerShape]

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, _read_completion, "cmpl", _completion_shape)


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, _read_chat, "chatcmpl", _chat_shape)


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    services.tenants.tenant_of(request.headers)
    return web.json_response({"object": "list", "data": [_model(services)]})


@routes.get("/v1/models/{name:.+}")
async def model(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    services.tenants.tenant_of(request.headers)
    services.check_model(request.match_info["name"])
    return web.json_response(_model(services))


def _model(services: Services) -> dict[str, object]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "guidevane",
        "root": services.model_name,
        "parent": None,
        "max_model_len": services.limits.target.max_model_len,
        "permission": [],
    }


def _read_completion(raw: bytes, services: Services) -> Job:
    return read_completion(parse_body(raw, CompletionRequest), services)


def _read_chat(raw: bytes, services: Services) -> Job:
    return read_chat(parse_body(raw, ChatCompletionRequest), services)


def _completion_shape(envelope: Envelope, job: Job, services: Services) -> AnswerShape:
    return CompletionShape(envelope, services.tokenizer, job.num_logprobs)


def _chat_shape(envelope: Envelope, job: Job, services: Services) -> AnswerShape:
    return ChatShape(envelope, services.tokenizer, job.num_logprobs)


async def _answer(request: web.Request, read: ReadJob, prefix: str, make_shape: MakeShape) -> web.StreamResponse:
    """Up the ladder: open, key, body, places, tokens; then the answer. What is not awaited is one tick of the loop."""
    services = request.app[SERVICES]
    with services.door():
        services.check_open()
        tenant = services.tenants.tenant_of(request.headers)
    with services.door(tenant):
        wishes = Wishes.of(request.headers)
        async with services.bodies.read(request) as raw:
            job = await services.off_loop(len(raw), lambda: read(raw, services))
        standing = wishes.standing(tenant, job, services.clock())
        leases = services.gate.enter(standing, job.count)
    try:
        with services.door(tenant), _blaming(job.prompt_field):
            choices = await _choices(job, services, leases)
        envelope = Envelope(
            answer_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=services.model_name,
            include_usage=job.include_usage,
            continuous_usage=job.continuous_usage,
        )
        ids = request[IDS]
        generation = Generation(services, choices, leases, client_id=ids.request_id, cache_salt=job.cache_salt)
        return await _generate(request, job, generation, make_shape(envelope, job, services), envelope)
    finally:
        for lease in leases:
            lease.release()


async def _generate(
    request: web.Request, job: Job, generation: Generation, shape: AnswerShape, envelope: Envelope
) -> web.StreamResponse:
    services = request.app[SERVICES]
    try:
        async with generation:
            if job.stream:
                return await answer_stream(request, generation, shape, envelope)
            return await answer_whole(generation, shape)
    except (asyncio.CancelledError, ConnectionError):
        services.metrics.client_gone()
        raise
    finally:
        services.metrics.answer_ended(job.sampling.n, max(choice.num_tokens for choice in generation.choices))


@contextmanager
def _blaming(prompt_field: str) -> Iterator[None]:
    """What is refused of tokens and blames no other field is the prompt's own size."""
    try:
        yield
    except Refused as refused:
        if refused.wait_s is None:
            refused.param = refused.param or prompt_field
        raise


async def _choices(job: Job, services: Services, leases: Sequence[Lease]) -> list[Choice]:
    """Tokenise, check what each prompt asks for, and charge the leases: nothing is awaited after the first check."""
    gate, n, wanted = services.gate, job.sampling.n, job.sampling.max_tokens
    prompts = await _prompts(job, services)
    max_tokens = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; send at least one character", param=job.prompt_field)
        gate.check_prompt(len(prompt), wanted.value, wanted.name)
        # Of texts too: a tokenizer may know tokens that were added after the model's last row.
        check_token_ids(prompt, services.vocab_size, job.prompt_field)
        limit = wanted.value or gate.default_max_tokens(len(prompt), job.default_max_tokens)
        if job.sampling.template.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens is {job.sampling.template.min_tokens}, above max_tokens {limit}", param="min_tokens"
            )
        max_tokens.append(limit)
    gate.charge(leases, [len(prompt) for prompt in prompts for _ in range(n)])
    return [
        _choice(job, services, prompt, limit, row * n + i, i)
        for row, (prompt, limit) in enumerate(zip(map(tuple, prompts), max_tokens, strict=True))
        for i in range(n)
    ]


async def _prompts(job: Job, services: Services) -> list[list[int]]:
    """Token ids of every prompt. A text that is too long in any case is refused before it costs anything."""
    texts = [prompt for prompt in job.prompts if isinstance(prompt, str)]
    for text in texts:
        services.gate.check_text(len(text), services.tokenizer.max_token_chars)
    encoded = iter(await services.encode_all(texts, add_special_tokens=job.add_special_tokens))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in job.prompts]


def _choice(job: Job, services: Services, prompt: tuple[int, ...], max_tokens: int, index: int, sibling: int) -> Choice:
    services.metrics.request_accepted(len(prompt), max_tokens)
    return Choice(
        index,
        prompt,
        job.sampling.params(max_tokens, sibling),
        services.tokenizer,
        stops=job.sampling.stops,
        include_stop=job.sampling.include_stop,
        skip_special_tokens=job.sampling.skip_special_tokens,
    )
