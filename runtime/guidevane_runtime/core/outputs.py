"""What happened to requests, collected until the engine's loop reports it."""

from guidevane_runtime.core.messages import RequestOutput
from guidevane_runtime.core.plan import SampledToken
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.stopping import Stop


class Outputs:
    """One RequestOutput per token that came out, and a terminal one per request."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []

    def take(self) -> tuple[RequestOutput, ...]:
        """All since the last call."""
        taken, self._outputs = tuple(self._outputs), []
        return taken

    def add(self, request: Request, *, sampled: SampledToken | None, stop: Stop | None = None, error: str = "") -> None:
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                new_token_ids=(sampled.token_id,) if sampled else (),
                logprobs=(sampled.logprobs,) if sampled and sampled.logprobs else (),
                finish_reason=stop.reason if stop else None,
                stop_token_id=stop.stop_token_id if stop else None,
                error=error,
                first_scheduled_s=request.first_scheduled_s,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
            )
        )
