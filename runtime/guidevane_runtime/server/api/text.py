"""POST /tokenize and /detokenize."""

from aiohttp import web

from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.jobs import render_chat
from guidevane_runtime.server.sampling import check_token_id
from guidevane_runtime.server.schemas import DetokenizeRequest, TokenizeRequest, parse_body
from guidevane_runtime.server.services import SERVICES

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = parse_body(await request.read(), TokenizeRequest)
    services.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        # A template writes the special tokens itself.
        text = render_chat(services, body.messages, body.add_generation_prompt)
        special = bool(body.add_special_tokens)
    ids = await services.encode(text, add_special_tokens=special)
    answer = {"count": len(ids), "max_model_len": services.limits.target.max_model_len, "tokens": ids}
    names = [services.tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
    return web.json_response({**answer, "token_strs": names})


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = parse_body(await request.read(), DetokenizeRequest)
    services.check_model(body.model)
    if body.tokens is None:
        raise InvalidRequest("send tokens, a list of token ids", param="tokens")
    for token_id in body.tokens:
        check_token_id(token_id, services.vocab_size, "tokens")
    return web.json_response({"prompt": services.tokenizer.decode(body.tokens)})
