"""Who shares the service, and on which terms. Frozen: swapped whole between two steps, as the limits are.

It knows names, weights, prices and caps; what each tenant has had so far is in waiting.py.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from guidevane_api.pod_files import TenantsFile


class RequestClass(StrEnum):
    """Two kinds of work of one tenant."""

    INTERACTIVE = "interactive"
    OFFLINE = "offline"


def _require_positive(what: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{what} is {value}, at least 1 is needed; raise it or leave it out")


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """One tenant: its share, and its caps. The defaults are those of a tenant that no policy names."""

    name: str
    weight: int = 1
    """Share of the service against other tenants."""
    max_in_flight: int | None = None
    """Requests at once, at most. The door counts all of them, the scheduler those that run. None: no cap."""
    max_queued_tokens: int | None = None
    """Prompt tokens waiting, at most; the door's to hold. None: no cap."""

    def __post_init__(self) -> None:
        for name in ("weight", "max_in_flight", "max_queued_tokens"):
            _require_positive(f"{name} of tenant {self.name!r}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """All terms together."""

    tenants: tuple[TenantTerms, ...] = ()
    """Each name once. A tenant that is not listed has weight 1 and no cap."""
    interactive_share: int = 9
    """Of a tenant's service, against offline_share, while both classes have something waiting."""
    offline_share: int = 1
    input_price: int = 1
    """Per prompt token. 1 and 2 are the prices of the VTC paper, arXiv:2401.00588."""
    output_price: int = 2
    """Per output token."""
    bills_cached_tokens: bool = False
    """Whether prompt tokens found in the prefix cache are paid for too, as in the paper. False rewards locality."""
    pauses_offline: bool = False
    """While the guard asks for it: offline work stays in the waiting room, except in an engine that would idle."""

    def __post_init__(self) -> None:
        for name in ("interactive_share", "offline_share", "input_price", "output_price"):
            _require_positive(name, getattr(self, name))
        for tenant, count in Counter(terms.name for terms in self.tenants).items():
            if count > 1:
                raise ValueError(f"tenant {tenant!r} is listed {count} times, at most 1 is allowed; merge its terms")

    def terms_of(self, name: str) -> TenantTerms:
        return next((terms for terms in self.tenants if terms.name == name), TenantTerms(name))

    def share_of(self, request_class: RequestClass) -> int:
        return self.interactive_share if request_class is RequestClass.INTERACTIVE else self.offline_share


EQUAL_TERMS = TenantPolicy()
"""Nobody is named: all tenants weigh the same and have no caps."""


def policy_of(file: TenantsFile) -> TenantPolicy:
    """The terms that a tenants file sets; who is which tenant is not among them."""
    return TenantPolicy(
        tuple(TenantTerms(one.name, one.weight, one.max_in_flight, one.max_queued_tokens) for one in file.tenants),
        interactive_share=file.classes.interactive,
        offline_share=file.classes.offline,
    )


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant has inside, as the door's leases say."""

    num_in_flight: int
    """Waiting and running."""
    num_queued_tokens: int


def cap_refusal(terms: TenantTerms, use: TenantUse, num_requests: int, num_prompt_tokens: int) -> str:
    """Why a tenant's caps keep num_requests more outside, with the way out; empty when they may come in.

    A lone request may be larger than max_queued_tokens: it would never come in otherwise.
    """
    in_flight, queued = use.num_in_flight + num_requests, use.num_queued_tokens + num_prompt_tokens
    if terms.max_in_flight is not None and in_flight > terms.max_in_flight:
        return (
            f"tenant {terms.name!r} would have {in_flight} requests at once, its maxInFlight is "
            f"{terms.max_in_flight}; wait for one to end or raise the cap"
        )
    if terms.max_queued_tokens is not None and use.num_queued_tokens and queued > terms.max_queued_tokens:
        return (
            f"tenant {terms.name!r} would have {queued} prompt tokens waiting, its maxQueuedTokens is "
            f"{terms.max_queued_tokens}; retry later or raise the cap"
        )
    return ""
