"""The door: a ladder of rungs, the cheapest first, between a request and the engine.

A body is looked at twice. `enter` takes its places while its prompts are still text; `check_prompt` and `charge` look
again once they are tokens. Between a check and the lease that it allows nothing is awaited, so a burst can't slip past
a limit. The gate knows limits, terms, leases and what the engine reported last; it never sees HTTP or a prompt.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.leases import Lease, Ledger, Occupancy, Standing
from guidevane_runtime.core.pace import Pace
from guidevane_runtime.core.tenants import EQUAL_TERMS, RequestClass, TenantPolicy, TenantUse, cap_refusal

MAX_LOOKED_AT = 1024
"""Requests of a tenant that one with a deadline is compared with: admission costs the same however many wait."""


class Rejection(StrEnum):
    """Why somebody is refused, in the order of the rungs; label `reason` of guidevane_admission_rejections_total."""

    DRAINING = "draining"
    NOT_READY = "not_ready"
    AUTH = "auth"
    BODIES = "bodies_in_flight"
    """Request bodies that are being read hold too many bytes."""
    VALIDATION = "validation"
    QUEUE_FULL = "concurrency"
    TENANT_CONCURRENCY = "tenant_concurrency"
    CONTEXT_LENGTH = "context_length"
    NEVER_FITS = "memory"
    QUEUED_TOKENS = "token_budget"
    TENANT_TOKENS = "tenant_token_budget"
    LONG_CONTEXT = "long_context"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    TIMEOUT = "timeout"
    """In the queue, for waitingTimeoutMilliseconds."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """In the queue, its own deadline."""


OVERLOAD = frozenset((Rejection.QUEUE_FULL, Rejection.QUEUED_TOKENS, Rejection.LONG_CONTEXT, Rejection.TIMEOUT))
"""Refusals that say something of the load: the guard's reject line. A tenant's own cap and deadline say nothing."""


class Refused(Exception):  # noqa: N818 - a name says what happened
    """One rung said no."""

    def __init__(
        self, reason: Rejection, message: str, wait_s: float | None = None, *, param: str | None = None
    ) -> None:
        """wait_s: after which another try is worth it, an estimate; None: waiting does not help."""
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.wait_s = wait_s
        self.param = param
        """Name of the request field at fault."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine can hold at all."""

    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


class Reported(NamedTuple):
    """What the engine said of its last step."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    """Computed in the step, or found in the prefix cache."""
    step_s: float = 0.0


class AdmissionGate:
    """Hands out leases, or raises Refused with the first rung that says no."""

    def __init__(
        self,
        *,
        limits: Callable[[], SchedulerLimits],
        clock: Callable[[], float],
        policy: Callable[[], TenantPolicy] = lambda: EQUAL_TERMS,
        target: Callable[[], SchedulerLimits] | None = None,
    ) -> None:
        """target: what the limits will be again once the guard has taken back what it left of them."""
        self._limits = limits
        self._target = target or limits
        self._clock = clock
        self._policy = policy
        self._ledger = Ledger(self._note_end)
        self._reported = Reported()
        self._pace = Pace()
        self.capacity: Capacity | None = None
        """None while the engine is not ready."""
        self._load_s = 0.0
        self._lost_at_s = clock()
        self.long_context_pause_s: float | None = None
        """While the guard refuses long prompts: in how many seconds it may let them in again. None: they are let in."""
        self.is_draining = False

    # ------------------------------------------------------------------------------------------------ what it knows

    @property
    def num_live(self) -> int:
        """Requests between the door and their end."""
        return self._ledger.total.num_live

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._ledger.total.num_queued_tokens

    @property
    def tenants(self) -> Collection[str]:
        """Those that have something inside."""
        return self._ledger.tenants

    def use_of(self, tenant: str) -> Occupancy:
        """What a tenant has inside."""
        return self._ledger.of(tenant)

    @property
    def load_wait_s(self) -> float:
        """Until an engine is there: what is left of a load like the last one, or as long again as it has taken."""
        if self.capacity is not None:
            return 0.0
        elapsed_s = self._clock() - self._lost_at_s
        return max(elapsed_s, self._load_s - elapsed_s)

    def drain(self) -> None:
        """Refuse everything from now on."""
        self.is_draining = True

    def engine_ready(self, capacity: Capacity, load_s: float) -> None:
        """load_s: what the engine took to start."""
        self.capacity, self._load_s = capacity, load_s
        self._pace.begin(self._clock())

    def engine_lost(self) -> None:
        self.capacity, self._reported = None, Reported()
        self._lost_at_s = self._clock()

    def observe(self, reported: Reported) -> None:
        """Take the report of a step, or of an idle second."""
        self._reported = reported
        self._pace.step_ended(reported.num_prompt_tokens, reported.step_s, is_busy=reported.num_waiting > 0)

    # ---------------------------------------------------------------------------------------------------- the rungs

    def check_open(self) -> None:
        """Refuse while draining or without an engine."""
        if self.is_draining:
            # At once: another replica may serve it now, and this one will not later.
            raise Refused(Rejection.DRAINING, "the server is shutting down; send this to another replica", 0.0)
        if self.capacity is None:
            raise Refused(Rejection.NOT_READY, "the engine is not ready: the model is being loaded", self.load_wait_s)

    def enter(self, standing: Standing, count: int = 1) -> list[Lease]:
        """Places for the choices of one body, all or none."""
        self.check_open()
        self._check_size(standing, count)
        self._check_queue(standing, count)
        self._check_tenant_places(standing.tenant, count)
        if not self.num_live:
            self._pace.begin(self._clock())
        return self._ledger.enter(standing, count)

    def check_text(self, num_chars: int, max_token_chars: int) -> None:
        """A text that is too long whatever its tokens are: tokenising it would take a core from the engine."""
        limit, least = self._limits().max_prompt_tokens, num_chars // max_token_chars
        if least > limit:
            raise Refused(
                Rejection.CONTEXT_LENGTH,
                f"the prompt has {num_chars} characters, which are {least} tokens or more, limits.maxPromptTokens is "
                f"{limit}; shorten the prompt",
            )

    def check_prompt(self, num_prompt_tokens: int, max_tokens: int | None, param: str = "max_tokens") -> None:
        """What can never run, with both numbers; `param` is the client's name of max_tokens."""
        limits = self._limits()
        if num_prompt_tokens > limits.max_prompt_tokens:
            raise Refused(
                Rejection.CONTEXT_LENGTH,
                f"the prompt has {num_prompt_tokens} tokens, limits.maxPromptTokens is {limits.max_prompt_tokens}; "
                "shorten the prompt",
            )
        if max_tokens is not None and max_tokens > limits.max_output_tokens:
            message = f"{param} is {max_tokens}, limits.maxOutputTokens is {limits.max_output_tokens}; lower {param}"
            raise Refused(Rejection.VALIDATION, message, param=param)
        wanted = num_prompt_tokens + (max_tokens or 1)
        if wanted > limits.max_model_len:
            raise Refused(
                Rejection.CONTEXT_LENGTH,
                f"the prompt has {num_prompt_tokens} tokens and asks for {max_tokens or 1} more, {wanted} together, "
                f"above the context length {limits.max_model_len}; shorten the prompt or lower {param}",
            )
        self._check_memory(num_prompt_tokens)

    def charge(self, leases: Sequence[Lease], prompt_tokens: Sequence[int]) -> None:
        """Add the prompt tokens of leases just entered, of one body: all, or none and Refused."""
        standing, added = leases[0].standing, sum(prompt_tokens)
        self._check_queued_tokens(standing, added)
        self._check_tenant_tokens(standing.tenant, added)
        self._check_long_context(leases, max(prompt_tokens))
        self._check_deadline(leases[0], added)
        for lease, num_tokens in zip(leases, prompt_tokens, strict=True):
            lease.charge(num_tokens)

    def admit(self, standing: Standing, num_prompt_tokens: int, max_tokens: int) -> Lease:
        """All rungs at once, for one request whose tokens are known."""
        (lease,) = leases = self.enter(standing)
        try:
            self.check_prompt(num_prompt_tokens, max_tokens)
            self.charge(leases, (num_prompt_tokens,))
        except Refused:
            lease.release()
            raise
        return lease

    def default_max_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """max_tokens of a request that gives none: `wanted` or what is left, clipped to the limits."""
        limits = self._limits()
        left = min(limits.max_model_len - num_prompt_tokens, limits.max_output_tokens)
        return left if wanted is None else min(wanted, left)

    # --------------------------------------------------------------------------------------- places, before tokens

    def _check_size(self, standing: Standing, count: int) -> None:
        """More than could come in if nobody else were there, nor the guard: waiting can't help."""
        limits, tenant = self._target(), standing.tenant
        cap = self._policy().terms_of(tenant).max_in_flight
        most = self._open_to(standing, limits.max_num_seqs + limits.max_queued_requests, count, count)
        if count > most:
            message = f"limits.maxNumSeqs and limits.maxQueuedRequests have room for {most}"
        elif cap is not None and count > cap:
            message = f"maxInFlight of tenant {tenant!r} is {cap}"
        else:
            return
        message = f"this asks for {count} choices, {message}; send fewer at once"
        raise Refused(Rejection.VALIDATION, message, param="n")

    def _check_queue(self, standing: Standing, count: int) -> None:
        of_tenant = self._ledger.of(standing.tenant).num_live + count
        of_class = self._ledger.of_class(standing.request_class).num_live + count
        room = self._open_to(standing, self._room(), of_tenant, of_class)
        excess = self.num_live + count - room
        if excess > 0:
            raise Refused(
                Rejection.QUEUE_FULL,
                f"{max(0, self.num_live - self._reported.num_running)} requests wait, this asks for {count} more, "
                f"limits.maxQueuedRequests is {self._limits().max_queued_requests}",
                self._pace.wait_for_ends_s(excess),
            )

    def _check_tenant_places(self, tenant: str, count: int) -> None:
        terms, num_live = self._policy().terms_of(tenant), self._ledger.of(tenant).num_live
        if terms.max_in_flight is None:
            return
        if why := cap_refusal(terms, TenantUse(num_live, 0), count, 0):
            excess = num_live + count - terms.max_in_flight
            # Of all ends, those of this tenant help it.
            wait_s = self._pace.wait_for_ends_s(excess * self.num_live / num_live)
            raise Refused(Rejection.TENANT_CONCURRENCY, why, wait_s)

    def _room(self) -> int:
        """Live requests at most: those that run or could at once, and the waiting room."""
        limits, reported = self._limits(), self._reported
        running = reported.num_running if reported.num_waiting else limits.max_num_seqs
        return max(running, reported.num_running) + limits.max_queued_requests

    # -------------------------------------------------------------------------------------------------- tokens

    def _check_memory(self, num_prompt_tokens: int) -> None:
        if self.capacity is not None and num_prompt_tokens + 1 > self.capacity.num_tokens:
            raise Refused(
                Rejection.NEVER_FITS,
                f"the prompt has {num_prompt_tokens} tokens and needs room for one more, the KV cache holds "
                f"{self.capacity.num_tokens}; shorten the prompt or give the runtime more KV cache",
            )

    def _check_queued_tokens(self, standing: Standing, added: int) -> None:
        """One body alone may be above the limit: it would never come in otherwise, and waits only to be alone."""
        queued, limit = self.num_queued_tokens, self._limits().max_queued_tokens
        of_tenant = self._ledger.of(standing.tenant).num_queued_tokens + added
        of_class = self._ledger.of_class(standing.request_class).num_queued_tokens + added
        room = self._open_to(standing, limit, of_tenant, of_class)
        if queued and queued + added > room:
            raise Refused(
                Rejection.QUEUED_TOKENS,
                f"{queued} prompt tokens wait, this adds {added}, limits.maxQueuedTokens is {limit}",
                self._pace.wait_for_prefill_s(min(queued, queued + added - room)),
            )

    def _check_tenant_tokens(self, tenant: str, added: int) -> None:
        terms, queued = self._policy().terms_of(tenant), self._ledger.of(tenant).num_queued_tokens
        if terms.max_queued_tokens is None:
            return
        if why := cap_refusal(terms, TenantUse(0, queued), 0, added):
            excess = min(queued, queued + added - terms.max_queued_tokens)
            wait_s = self._pace.wait_for_prefill_s(excess / self._share_of(tenant))
            raise Refused(Rejection.TENANT_TOKENS, why, wait_s)

    def _open_to(self, standing: Standing, total: int, of_tenant: int, of_class: int) -> int:
        """What may be filled of all places or tokens, if its tenant and its class have so many of them then."""
        return min(
            self._open_to_tenant(standing.tenant, total, of_tenant),
            self._open_to_class(standing.request_class, total, of_class),
        )

    def _open_to_tenant(self, tenant: str, total: int, wanted: int) -> int:
        """What a tenant may fill of all places or tokens.

        One above its share leaves the last tenth to the others: a hog that comes back at once would have each place
        that gets free.
        """
        weights = {terms.name: terms.weight for terms in self._policy().tenants}
        own = weights.setdefault(tenant, 1)
        everybody = sum(weights.values())
        is_hog = own < everybody and wanted * everybody > total * own
        return total - total // 10 if is_hog else total

    def _open_to_class(self, request_class: RequestClass, total: int, wanted: int) -> int:
        """What a class may fill: offline work above its share leaves the last tenth to what somebody awaits."""
        if request_class is RequestClass.INTERACTIVE:
            return total
        policy = self._policy()
        own, everybody = policy.offline_share, policy.offline_share + policy.interactive_share
        return total - total // 10 if wanted * everybody > total * own else total

    def _check_long_context(self, leases: Sequence[Lease], longest: int) -> None:
        """A long prompt that would be alone is let in, so nobody is locked out."""
        threshold = self._limits().long_context_threshold_tokens
        if self.long_context_pause_s is not None and longest > threshold and self.num_live > len(leases):
            raise Refused(
                Rejection.LONG_CONTEXT,
                f"the prompt has {longest} tokens; while the guard protects the SLO, those above "
                f"limits.longContextThresholdTokens {threshold} are refused",
                self.long_context_pause_s,
            )

    def _check_deadline(self, lease: Lease, added: int) -> None:
        """A first token after the deadline is of no use. Only where something waits, and the pace is known."""
        deadline_s = lease.standing.deadline_s
        if deadline_s is None or not self.num_queued_tokens or not self._pace.is_known:
            return
        left_s, ttft_s = deadline_s - self._clock(), self._least_ttft_s(lease, added)
        if ttft_s > left_s:
            raise Refused(
                Rejection.DEADLINE_UNREACHABLE,
                f"the deadline is in {max(0.0, left_s):.3f} s, the first token is expected in {ttft_s:.3f} s; "
                "give it more time or send it to another replica",
                ttft_s - left_s,
            )

    def _least_ttft_s(self, lease: Lease, added: int) -> float:
        """Behind what surely comes before it: what is due earlier in its tenant and class, at the tenant's share."""
        tenant, request_class, due_s = lease.standing.tenant, lease.standing.request_class, lease.due_s
        ahead = [
            other.held.num_queued_tokens
            for other in islice(self._ledger.leases_of(tenant), MAX_LOOKED_AT)
            if other.due_s <= due_s and other.held.num_queued_tokens and other.standing.request_class is request_class
        ]
        share, total = self._share_of(tenant), self._ledger.total
        num_tokens = min(sum(ahead) / share, total.num_queued_tokens)
        num_requests = min(len(ahead) / share, total.num_waiting)
        num_free = max(0, self._limits().max_num_seqs - self._reported.num_running)
        return max(
            self._pace.wait_for_prefill_s(num_tokens + added),
            self._pace.wait_for_ends_s(max(0.0, num_requests + 1 - num_free)),
        )

    def _share_of(self, tenant: str) -> float:
        """Of the service, against the tenants that have something waiting; above 0, at most 1."""
        weights = {terms.name: terms.weight for terms in self._policy().tenants}
        own = weights.get(tenant, 1)
        others = (name for name in self._ledger.tenants if name != tenant and self._ledger.of(name).num_waiting)
        return own / (own + sum(weights.get(name, 1) for name in others))

    def _note_end(self) -> None:
        """What an engine takes with it when it is lost says nothing of its pace."""
        if self.capacity is not None:
            self._pace.request_ended(self._clock(), is_busy=self._reported.num_waiting > 0)
