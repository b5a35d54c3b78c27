"""From engine outputs to what a client reads, one choice at a time. It knows tokens and text; it never sees HTTP."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from guidevane_runtime.core.messages import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from guidevane_runtime.errors import DeadlineExceeded, EngineUnavailable, ServerError, WaitedTooLong
from guidevane_runtime.server.text.detokenizer import Detokenizer
from guidevane_runtime.server.text.stops import StopMatcher
from guidevane_runtime.server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """News of one choice. Deltas that nobody has read yet are merged, so a slow reader costs one output's memory."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def merge(self, later: "Delta") -> None:
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason

    @property
    def is_empty(self) -> bool:
        return not self.text and self.finish_reason is None


class Choice:
    """One answer in the making. The text of its deltas, joined, is the whole text, and nothing after a stop."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        stops: Iterable[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.num_tokens = 0
        """Output tokens. What the engine computed beyond a stop string is not counted."""
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._include_stop = include_stop
        self._detokenizer = Detokenizer(tokenizer.visible_bytes if skip_special_tokens else tokenizer.token_bytes)
        self._stops = StopMatcher(tuple(stops), include_stop=include_stop)
        self._waiting_logprobs: list[TokenLogprobs] = []

    def feed(self, output: RequestOutput) -> Delta:
        """Take what one step brought. Raises what the client is to be told if the engine gave the request up."""
        _raise_if_given_up(output)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        delta = Delta()
        last = len(output.new_token_ids) - 1
        for i, token_id in enumerate(output.new_token_ids):
            ends_it = i == last and output.finish_reason is FinishReason.STOP
            self._take_token(delta, token_id, output.logprobs[i : i + 1], hidden=ends_it and not self._include_stop)
            if delta.finish_reason:
                return self._released(delta)
        if output.finish_reason is not None:
            self._finish(delta, output)
        return self._released(delta)

    def _take_token(self, delta: Delta, token_id: int, logprobs: Iterable[TokenLogprobs], *, hidden: bool) -> None:
        self.num_tokens += 1
        self._waiting_logprobs += logprobs
        if not hidden:
            self._take_text(delta, self._detokenizer.push((token_id,)))

    def _take_text(self, delta: Delta, text: str) -> None:
        if self.num_tokens <= self.params.min_tokens:
            # Stop strings count from the first token after min_tokens.
            delta.text += text
            return
        match = self._stops.push(text)
        delta.text += match.text
        if match.stop is not None:
            self.finish_reason = delta.finish_reason = "stop"
            delta.stop_reason = match.stop

    def _finish(self, delta: Delta, output: RequestOutput) -> None:
        self._take_text(delta, self._detokenizer.flush())
        if delta.finish_reason:
            return
        delta.text += self._stops.flush()
        self.finish_reason = delta.finish_reason = str(output.finish_reason)
        delta.stop_reason = output.stop_token_id

    def _released(self, delta: Delta) -> Delta:
        """Log probabilities go out with the text they belong to, or at the end."""
        if not delta.is_empty:
            delta.logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        return delta


def _raise_if_given_up(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.TIMEOUT:
        if output.error:
            raise DeadlineExceeded(output.error)
        raise WaitedTooLong("the request waited longer than limits.waitingTimeoutMilliseconds; send it again later")
    if output.finish_reason is FinishReason.ERROR:
        raise ServerError(output.error or "the engine failed this request", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable(output.error or "the request was ended: the server shuts down", code="shutdown")
