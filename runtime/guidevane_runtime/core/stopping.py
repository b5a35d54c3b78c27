"""When a request has enough: the checks after each sampled token, in their order."""

from typing import NamedTuple

from guidevane_runtime.core.messages import FinishReason
from guidevane_runtime.core.request import Request


class Stop(NamedTuple):
    """Why it ends, and the stop_token_ids member that did it."""

    reason: FinishReason
    stop_token_id: int | None = None


def find_stop(request: Request, eos_token_ids: frozenset[int]) -> Stop | None:
    """Look at the last token: EOS, then stop ids, both only from min_tokens on; then the length."""
    token_ids, submit = request.token_ids, request.submit
    token_id, params = token_ids[-1], submit.params
    if len(token_ids) - len(submit.prompt_token_ids) >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
    if len(token_ids) >= request.max_num_tokens:
        return Stop(FinishReason.LENGTH)
    return None
