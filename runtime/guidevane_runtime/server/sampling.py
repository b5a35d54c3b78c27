"""From the fields of a request to SamplingParams: every range checked, so that the engine never sees a bad value."""

import hashlib
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.schemas import SamplingFields

Number = TypeVar("Number", int, float)

MAX_CHOICES = 128
"""Of one body: prompts times n. Each is a request of its own in the queue."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01
"""A logit is divided by it: by a smaller one it leaves float32's range, and nothing can be drawn."""
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
"""A temperature in [1e-5, 0.01) is raised to it: smaller ones overflow when logits are divided by them."""


class Range(NamedTuple):
    low: float
    high: float
    above_low: bool = False
    """Whether `low` itself is refused."""


_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(MIN_REPETITION_PENALTY, 100),
    "n": Range(1, MAX_CHOICES),
    "top_k": Range(-1, 1 << 31),
    "min_tokens": Range(0, 1 << 31),
    "seed": Range(-(1 << 63), (1 << 63) - 1),
    "priority": Range(MIN_PRIORITY, MAX_PRIORITY),
}


class Field(NamedTuple):
    """A field that the two routes call by different names; errors name it as the client wrote it."""

    name: str
    value: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one request asks for, before its prompts are known."""

    n: int
    max_tokens: Field
    """None: the default of the route, clipped to what fits."""
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    priority: int
    seed: int
    template: SamplingParams
    """Without max_tokens and seed, which differ from choice to choice."""

    def params(self, max_tokens: int, choice: int) -> SamplingParams:
        """Parameters of one choice. Choice 0 draws with the seed itself, so n=1 gives the first of n."""
        return replace(self.template, max_tokens=max_tokens, seed=derived_seed(self.seed, choice))


def read_sampling(request: SamplingFields, *, max_tokens: Field, num_logprobs: Field, vocab_size: int) -> Sampling:
    """Check every field, naming the first that is wrong."""
    for name, bounds in _RANGES.items():
        _check_range(name, getattr(request, name), bounds)
    _check_range(max_tokens.name, max_tokens.value, Range(1, 1 << 31))
    _check_range(num_logprobs.name, num_logprobs.value, Range(0, MAX_LOGPROBS))
    if max_tokens.value is not None and (request.min_tokens or 0) > max_tokens.value:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}, above {max_tokens.name} {max_tokens.value}", param="min_tokens"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
    return Sampling(
        n=request.n or 1,
        max_tokens=max_tokens,
        stops=_stops(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        priority=request.priority or 0,
        seed=secrets.randbits(63) if request.seed is None else request.seed & ((1 << 63) - 1),
        template=_template(request, num_logprobs.value, vocab_size),
    )


def derived_seed(seed: int, choice: int) -> int:
    """Seed of the choice-th answer of a request; 63 bits."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _template(request: SamplingFields, num_logprobs: int | None, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        seed=0,
        temperature=_temperature(request.temperature),
        top_p=_or(request.top_p, 1.0),
        top_k=max(_or(request.top_k, 0), 0),
        min_p=_or(request.min_p, 0.0),
        min_tokens=_or(request.min_tokens, 0),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=_stop_token_ids(request.stop_token_ids, vocab_size),
        num_logprobs=num_logprobs,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _check_range(name: str, value: float | None, bounds: Range) -> None:
    if value is None:
        return
    # Negated, so that NaN fails it too.
    if not (bounds.low <= value <= bounds.high and math.isfinite(value)) or (bounds.above_low and value == bounds.low):
        edge = "above" if bounds.above_low else "at least"
        raise InvalidRequest(
            f"{name} is {_shown(value)}, must be {edge} {bounds.low} and at most {bounds.high}", param=name
        )


def _shown(value: float) -> str:
    return f"{value}" if abs(value) < 1 << 64 else "beyond 64 bits"


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    return 0.0 if value < GREEDY_BELOW else max(value, MIN_TEMPERATURE)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, at most {MAX_STOPS}", param="stop")
    if not all(stops):
        raise InvalidRequest("stop holds an empty string, which would end every answer at once", param="stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(f"a stop string is longer than {MAX_STOP_CHARS} characters", param="stop")
    return stops


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> frozenset[int]:
    if ids and len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(ids)} entries, at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    check_token_ids(ids or (), vocab_size, "stop_token_ids")
    return frozenset(ids or ())


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if bias and len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS}", param="logit_bias")
    found = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequest(f"logit_bias key {key[:40]!r} is no token id", param="logit_bias")
        check_token_ids((int(key),), vocab_size, "logit_bias")
        if not (-100 <= value <= 100):
            raise InvalidRequest(f"logit_bias of {key} is {value}, must be -100 to 100", param="logit_bias")
        found[int(key)] = value
    return tuple(found.items())


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model has no row for: the engine would die of one."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {_shown(token_id)}, the model has 0 to {vocab_size - 1}", param=param
            )
