"""POST /tokenize and /detokenize."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.jobs import render_chat
from guidevane_runtime.server.sampling import check_token_ids
from guidevane_runtime.server.schemas import DetokenizeRequest, TokenizeRequest, parse_body, refuse_unsupported
from guidevane_runtime.server.services import SERVICES, Services

MAX_TEXT_BYTES = 4 << 20
"""Of a body. These routes pass no admission: without a bound they would take the threads that prompts wait for."""

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    return await _answer(request, _tokenized)


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    return await _answer(request, _detokenized)


async def _answer(request: web.Request, work: Callable[[bytes, Services], dict[str, object]]) -> web.Response:
    services = request.app[SERVICES]
    services.tenants.tenant_of(request.headers)
    async with services.bodies.read(request, MAX_TEXT_BYTES) as raw:
        body = await services.off_loop(len(raw), lambda: msgspec.json.encode(work(raw, services)))
    return web.Response(body=body, content_type="application/json")


def _tokenized(raw: bytes, services: Services) -> dict[str, object]:
    body = parse_body(raw, TokenizeRequest)
    services.check_model(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        # A template writes the special tokens itself.
        text = render_chat(services, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        special = bool(body.add_special_tokens)
    ids = services.tokenizer.encode(text, add_special_tokens=special)
    answer = {"count": len(ids), "max_model_len": services.limits.target.max_model_len, "tokens": ids}
    names = [services.tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
    return {**answer, "token_strs": names}


def _detokenized(raw: bytes, services: Services) -> dict[str, object]:
    body = parse_body(raw, DetokenizeRequest)
    services.check_model(body.model)
    if body.tokens is None:
        raise InvalidRequest("send tokens, a list of token ids", param="tokens")
    check_token_ids(body.tokens, services.vocab_size, "tokens")
    return {"prompt": services.tokenizer.decode(body.tokens)}
