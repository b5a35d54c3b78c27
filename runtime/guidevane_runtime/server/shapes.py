"""The JSON of answers, as OpenAI's clients read it. Pure: choices and deltas in, dicts out."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from guidevane_runtime.core.messages import TokenLogprobs
from guidevane_runtime.server.choices import Choice, Delta
from guidevane_runtime.server.text.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


class AnswerShape(Protocol):
    """One of the two APIs: how an answer looks, whole and in pieces."""

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        """Chunks before the first token."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> Json: ...

    def usage_chunk(self, choices: Sequence[Choice]) -> Json: ...

    def whole(self, choices: Sequence[Choice], answers: Sequence[Delta]) -> Json: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one answer share."""

    answer_id: str
    created: int
    """Unix time in s; the same in every chunk."""
    model: str
    include_usage: bool = False
    continuous_usage: bool = False

    def around(self, kind: str, choices: list[Json], of: Sequence[Choice], *, whole: bool = False) -> Json:
        body: Json = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if whole or self.continuous_usage:
            body["usage"] = usage(of)
        elif self.include_usage:
            body["usage"] = usage(of) if not choices else None
        return body


def usage(choices: Sequence[Choice]) -> Json:
    """Token counts of a request: a prompt that several choices share counts once, with what its first choice found."""
    prompts = {id(choice.prompt_token_ids): choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.prompt_token_ids) for choice in prompts)
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in prompts)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@dataclass(slots=True)
class CompletionShape:
    """/v1/completions."""

    envelope: Envelope
    tokenizer: Tokenizer
    num_logprobs: int | None
    _offsets: dict[int, int] = field(default_factory=dict)
    """Characters of token texts given out so far, per choice: text_offset goes on from there."""

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        return []

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        return self.envelope.around("text_completion", [self._choice(choice, delta)], [choice])

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        return self.envelope.around("text_completion", [], choices)

    def whole(self, choices: Sequence[Choice], answers: Sequence[Delta]) -> Json:
        parts = [self._choice(choice, answer) for choice, answer in zip(choices, answers, strict=True)]
        return self.envelope.around("text_completion", parts, choices, whole=True)

    def _choice(self, choice: Choice, delta: Delta) -> Json:
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": None if self.num_logprobs is None else self._logprobs(choice.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, index: int, tokens: Iterable[TokenLogprobs]) -> Json:
        tokens = list(tokens)
        texts = [self._text(token.token_id) for token in tokens]
        start = self._offsets.get(index, 0)
        ends = list(itertools.accumulate(map(len, texts), initial=start))
        self._offsets[index] = ends[-1]
        return {
            "text_offset": ends[:-1],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "tokens": texts,
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: TokenLogprobs) -> Json:
        likeliest = {self._text(token_id): finite(logprob) for token_id, logprob in token.top}
        return {**likeliest, self._text(token.token_id): finite(token.logprob)}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")


@dataclass(slots=True)
class ChatShape:
    """/v1/chat/completions."""

    envelope: Envelope
    tokenizer: Tokenizer
    num_logprobs: int | None

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk(choice, {"index": choice.index, "delta": role, **_NO_END}) for choice in choices]

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        return self._chunk(
            choice,
            {
                "index": choice.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.logprobs),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            },
        )

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        return self.envelope.around("chat.completion.chunk", [], choices)

    def whole(self, choices: Sequence[Choice], answers: Sequence[Delta]) -> Json:
        parts = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for choice, answer in zip(choices, answers, strict=True)
        ]
        return self.envelope.around("chat.completion", parts, choices, whole=True)

    def _chunk(self, choice: Choice, part: Json) -> Json:
        return self.envelope.around("chat.completion.chunk", [part], [choice])

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json | None:
        if self.num_logprobs is None or not tokens:
            return None
        return {"content": [self._token(token) for token in tokens]}

    def _token(self, token: TokenLogprobs) -> Json:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": finite(logprob)}


_NO_END: Json = {"logprobs": None, "finish_reason": None, "stop_reason": None}


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
