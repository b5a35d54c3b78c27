"""One request's outputs on their way from the engine to whoever reads them."""

import asyncio

from guidevane_runtime.core.messages import RequestOutput


class RequestStream:
    """Async iterator of outputs; the last one has a finish_reason.

    What a slow reader has not taken yet comes merged into one output, so it holds its request's tokens and no more,
    and the engine never waits for it.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._unread: list[RequestOutput] = []
        self._arrived = asyncio.Event()
        self._has_ended = False

    def put(self, output: RequestOutput) -> None:
        """Nothing comes after a terminal output, so a second one is dropped."""
        if self._has_ended:
            return
        self._has_ended = output.finish_reason is not None
        self._unread.append(output)
        self._arrived.set()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._has_ended:
                raise StopAsyncIteration
            await self._arrived.wait()
        unread, self._unread = self._unread, []
        self._arrived.clear()
        return merged(unread)


def merged(outputs: list[RequestOutput]) -> RequestOutput:
    """One output that says what all of them said; they follow each other in one request."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        new_token_ids=tuple(token_id for output in outputs for token_id in output.new_token_ids),
        logprobs=tuple(logprobs for output in outputs for logprobs in output.logprobs),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        first_scheduled_s=last.first_scheduled_s,
        num_cached_tokens=last.num_cached_tokens,
        num_preemptions=last.num_preemptions,
    )
