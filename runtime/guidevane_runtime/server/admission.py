"""The door. Every rung that needs no engine: draining, readiness, queue length, queued tokens, context, never fits.

Counts are derived from live leases, so they can't drift; a check and the lease it allows happen in one tick of the
event loop, so a burst can't slip past a limit between the two.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import EngineStats
from guidevane_runtime.errors import GuidevaneError, InvalidRequest, Overloaded

MAX_RETRY_AFTER_S = 120
"""The OpenAI SDKs ignore a Retry-After above it."""


class Rejection(StrEnum):
    """Label `reason` of guidevane_admission_rejections_total."""

    DRAINING = "draining"
    NOT_READY = "not_ready"
    VALIDATION = "validation"
    QUEUE_FULL = "concurrency"
    QUEUED_TOKENS = "token_budget"
    CONTEXT_LENGTH = "context_length"
    NEVER_FITS = "memory"
    LONG_CONTEXT = "long_context"
    TIMEOUT = "timeout"


@dataclass(eq=False, slots=True)
class Lease:
    """One place of one choice, from the door to its end. Its fields say what it holds."""

    gate: "AdmissionGate" = field(repr=False)
    num_tokens: int = 0
    """Prompt tokens, once they are known."""
    started: bool = False
    """Whether its first token is out: it waits and prefills no more."""

    def release(self) -> None:
        """Give the place back. May be called again, from any end that the request comes to."""
        self.gate.forget(self)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine can hold at all."""

    num_blocks: int
    block_size: int


class AdmissionGate:
    """Knows limits, leases and the engine's last statistics; it never sees HTTP or a prompt."""

    def __init__(self, *, limits: Callable[[], SchedulerLimits], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._leases: set[Lease] = set()
        self._stats = EngineStats()
        self._pace = _Pace()
        self.capacity: Capacity | None = None
        """None while the engine is not ready."""
        self.long_context_pause_s: float | None = None
        """While the guard refuses long prompts: in how many seconds it may let them in again. None: they are let in."""
        self._drain_deadline_s: float | None = None

    # ------------------------------------------------------------------------------------------------ what it knows

    @property
    def num_live(self) -> int:
        """Requests between the door and their end."""
        return len(self._leases)

    def drain(self, deadline_s: float) -> None:
        """Refuse everything from now on; `deadline_s` is when the process will be gone, on the gate's clock."""
        self._drain_deadline_s = deadline_s

    def observe(self, stats: EngineStats, num_prefill_tokens: int, step_s: float) -> None:
        """Take the statistics of a step."""
        self._stats = stats
        self._pace.step(num_prefill_tokens, step_s)

    def forget(self, lease: Lease) -> None:
        """End of a lease."""
        if lease in self._leases:
            self._leases.remove(lease)
            # What was refused right behind the door, or left the queue, is no pace of the engine.
            if lease.started:
                self._pace.ended(self._clock())

    # ---------------------------------------------------------------------------------------------------- the rungs

    def check_open(self) -> None:
        """Refuse while draining or without an engine."""
        if self._drain_deadline_s is not None:
            left = self._drain_deadline_s - self._clock()
            raise Refused(Rejection.DRAINING, "the server is shutting down; send this to another replica", left)
        if self.capacity is None:
            raise Refused(Rejection.NOT_READY, "the engine is not ready: the model is being loaded", 5)

    def enter(self, count: int) -> list[Lease]:
        """Places for `count` choices, all or none. More than an idle engine has places for: 400, waiting can't help."""
        self.check_open()
        limits = self._limits()
        most = limits.max_num_seqs + limits.max_queued_requests
        if count > most:
            raise InvalidRequest(
                f"this asks for {count} choices, limits.maxNumSeqs and limits.maxQueuedRequests have room for {most}; "
                "send fewer at once",
                param="n",
            )
        room = self._room()
        if len(self._leases) + count > room:
            raise Refused(
                Rejection.QUEUE_FULL,
                f"{self._num_waiting()} requests wait, this asks for {count} more, "
                f"limits.maxQueuedRequests is {limits.max_queued_requests}",
                self._pace.wait_for_ends_s(len(self._leases) + count - room),
            )
        leases = [Lease(self) for _ in range(count)]
        self._leases.update(leases)
        return leases

    def charge(self, leases: Sequence[Lease], prompt_tokens: Sequence[int]) -> None:
        """Add the prompt tokens of leases just entered. More than may wait: 503, unless nothing else waits."""
        queued, added = self.num_queued_tokens(), sum(prompt_tokens)
        limit = self._limits().max_queued_tokens
        if queued and queued + added > limit:
            raise Refused(
                Rejection.QUEUED_TOKENS,
                f"{queued} prompt tokens wait, this adds {added}, limits.maxQueuedTokens is {limit}",
                self._pace.wait_for_prefill_s(queued + added - limit),
            )
        self._check_long_context(leases, max(prompt_tokens, default=0))
        for lease, num_tokens in zip(leases, prompt_tokens, strict=True):
            lease.num_tokens = num_tokens

    def check_text(self, num_chars: int, max_token_chars: int) -> None:
        """400 for a text that is too long whatever its tokens are: tokenising it would take a core from the engine."""
        limit, least = self._limits().max_prompt_tokens, num_chars // max_token_chars
        if least > limit:
            raise TooLong(
                f"the prompt has {num_chars} characters, which are {least} tokens or more, limits.maxPromptTokens is "
                f"{limit}; shorten the prompt"
            )

    def check_prompt(self, num_prompt_tokens: int, max_tokens: int | None, param: str = "max_tokens") -> None:
        """400 for a request that can never run, with both numbers; `param` is the client's name of max_tokens."""
        limits = self._limits()
        if num_prompt_tokens > limits.max_prompt_tokens:
            raise TooLong(
                f"the prompt has {num_prompt_tokens} tokens, limits.maxPromptTokens is {limits.max_prompt_tokens}; "
                "shorten the prompt"
            )
        if max_tokens is not None and max_tokens > limits.max_output_tokens:
            raise InvalidRequest(
                f"{param} is {max_tokens}, limits.maxOutputTokens is {limits.max_output_tokens}", param=param
            )
        wanted = num_prompt_tokens + (max_tokens or 1)
        if wanted > limits.max_model_len:
            raise TooLong(
                f"the prompt has {num_prompt_tokens} tokens and asks for {max_tokens or 1} more, {wanted} together, "
                f"above the context length {limits.max_model_len}; shorten the prompt or lower {param}"
            )
        self._check_memory(num_prompt_tokens)

    def default_max_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """max_tokens of a request that gives none: `wanted` or what is left, clipped to the limits."""
        limits = self._limits()
        left = min(limits.max_model_len - num_prompt_tokens, limits.max_output_tokens)
        return left if wanted is None else min(wanted, left)

    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(lease.num_tokens for lease in self._leases if not lease.started)

    # ------------------------------------------------------------------------------------------------------- inside

    def _check_memory(self, num_prompt_tokens: int) -> None:
        if self.capacity is None:
            return
        num_cached = self.capacity.num_blocks * self.capacity.block_size
        if num_prompt_tokens + 1 > num_cached:
            raise NeverFits(
                f"the prompt has {num_prompt_tokens} tokens and needs room for one more, the KV cache holds "
                f"{num_cached}; shorten the prompt or give the runtime more KV cache"
            )

    def _check_long_context(self, leases: Sequence[Lease], longest: int) -> None:
        """A long prompt that would be alone is let in, so nobody is locked out."""
        threshold = self._limits().long_context_threshold_tokens
        if self.long_context_pause_s is not None and longest > threshold and len(self._leases) > len(leases):
            raise Refused(
                Rejection.LONG_CONTEXT,
                f"the prompt has {longest} tokens; while the guard protects the SLO, those above "
                f"limits.longContextThresholdTokens {threshold} are refused",
                self.long_context_pause_s,
            )

    def _room(self) -> int:
        """Live requests at most: those that run or could at once, and the waiting room."""
        limits = self._limits()
        running = self._stats.num_running if self._stats.num_waiting else limits.max_num_seqs
        return max(running, self._stats.num_running) + limits.max_queued_requests

    def _num_waiting(self) -> int:
        return max(0, len(self._leases) - self._stats.num_running)


class Refused(Overloaded):
    """503 at the door."""

    def __init__(self, reason: Rejection, message: str, wait_s: float) -> None:
        code = {Rejection.QUEUE_FULL: "queue_full", Rejection.QUEUED_TOKENS: "queue_full"}.get(reason, reason.value)
        seconds = min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S)
        super().__init__(f"{message}; retry after {seconds} s", code=code)
        self.reason = reason
        self.retry_after_s = seconds
        """An estimate, not a constant: SDKs retry at once without one, and three times as many come back."""


class TooLong(InvalidRequest):
    """More tokens than a request may have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="context_length_exceeded")


class NeverFits(InvalidRequest):
    """More tokens than the KV cache holds: waiting would not help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="kv_capacity_exceeded")


def rejection_reason(error: GuidevaneError) -> Rejection:
    """The reason label of an error raised at the door."""
    if isinstance(error, Refused):
        return error.reason
    reasons: dict[type[GuidevaneError], Rejection] = {
        TooLong: Rejection.CONTEXT_LENGTH,
        NeverFits: Rejection.NEVER_FITS,
    }
    return reasons.get(type(error), Rejection.VALIDATION)


class _Pace:
    """How fast requests end and prompts are computed, as moving averages: the source of Retry-After."""

    _WEIGHT = 0.1
    """Of the newest sample: about the last twenty count."""

    def __init__(self) -> None:
        self._gap_s = 1.0
        """Between two ends. 1 s until measured."""
        self._prefill_tokens_per_s = 1000.0
        """Until measured: a small model on two CPU cores."""
        self._last_end_s: float | None = None

    def ended(self, now_s: float) -> None:
        if self._last_end_s is not None:
            # A pause is no pace: without traffic nothing ends.
            gap_s = min(now_s - self._last_end_s, 30.0)
            self._gap_s += self._WEIGHT * (gap_s - self._gap_s)
        self._last_end_s = now_s

    def step(self, num_prefill_tokens: int, step_s: float) -> None:
        if num_prefill_tokens and step_s > 0:
            self._prefill_tokens_per_s += self._WEIGHT * (num_prefill_tokens / step_s - self._prefill_tokens_per_s)

    def wait_for_ends_s(self, count: int) -> float:
        return count * self._gap_s

    def wait_for_prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self._prefill_tokens_per_s
