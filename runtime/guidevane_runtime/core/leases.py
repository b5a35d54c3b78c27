"""Who is between the door and its end, and what that takes up: one lease per request, and the sums of all leases.

A sum changes only by a lease that replaces what it held by what it holds, so it can't drift from the leases.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.core.waiting import due_of


class Standing(NamedTuple):
    """Whose a request is, and how it stands in line; all choices of one body share it."""

    arrival_s: float = 0.0
    tenant: str = ""
    request_class: RequestClass = RequestClass.INTERACTIVE
    priority: int = 0
    """Lower runs earlier, inside its tenant and class."""
    deadline_s: float | None = None
    """On the clock of arrival_s."""


class Occupancy(NamedTuple):
    """What one lease takes up, or several together."""

    num_live: int = 0
    num_waiting: int = 0
    """Of those, without a first token: they wait or are in prefill."""
    num_queued_tokens: int = 0
    """Prompt tokens of those that wait."""

    def replaced(self, old: "Occupancy", new: "Occupancy") -> "Occupancy":
        return Occupancy(
            self.num_live - old.num_live + new.num_live,
            self.num_waiting - old.num_waiting + new.num_waiting,
            self.num_queued_tokens - old.num_queued_tokens + new.num_queued_tokens,
        )


NOTHING = Occupancy()
ENTERED = Occupancy(1, 1)
"""Its prompt is not tokenised yet."""
STARTED = Occupancy(1)


class Lease:
    """One place of one choice, from the door to its end."""

    __slots__ = ("_ledger", "due_s", "held", "standing")

    def __init__(self, ledger: "Ledger", standing: Standing) -> None:
        self._ledger = ledger
        self.standing = standing
        self.due_s = due_of(standing.arrival_s, standing.deadline_s, standing.priority)
        """Where it stands in the waiting room."""
        self.held = NOTHING

    def enter(self) -> None:
        self._hold(ENTERED)

    def charge(self, num_prompt_tokens: int) -> None:
        """Its prompt is known now."""
        self._hold(ENTERED._replace(num_queued_tokens=num_prompt_tokens))

    def start(self) -> None:
        """Its first token is out. May be called again."""
        if self.held.num_waiting:
            self._hold(STARTED)

    def release(self) -> None:
        """Give the place back. May be called again, from any end that the request comes to."""
        if self.held.num_live:
            self._hold(NOTHING)

    def _hold(self, held: Occupancy) -> None:
        before, self.held = self.held, held
        self._ledger.note(self, before)


@dataclass(slots=True)
class _Account:
    """Of one tenant."""

    sum: Occupancy = NOTHING
    leases: dict[Lease, None] = field(default_factory=dict)


class Ledger:
    """The live leases, and their sums in all, by class and by tenant. A tenant is known to it while it has a lease."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """on_end: called when a lease ends that had started. What never started is no pace of the engine."""
        self.total = NOTHING
        self._by_class = dict.fromkeys(RequestClass, NOTHING)
        self._accounts: dict[str, _Account] = {}
        self._on_end = on_end

    def enter(self, standing: Standing, count: int) -> list[Lease]:
        leases = [Lease(self, standing) for _ in range(count)]
        for lease in leases:
            lease.enter()
        return leases

    def of(self, tenant: str) -> Occupancy:
        account = self._accounts.get(tenant)
        return account.sum if account else NOTHING

    def of_class(self, request_class: RequestClass) -> Occupancy:
        return self._by_class[request_class]

    @property
    def tenants(self) -> Collection[str]:
        """Those that have a lease."""
        return self._accounts.keys()

    def leases_of(self, tenant: str) -> Iterable[Lease]:
        """In the order in which they came in."""
        account = self._accounts.get(tenant)
        return account.leases if account else ()

    def __iter__(self) -> Iterator[Lease]:
        return (lease for account in self._accounts.values() for lease in account.leases)

    def note(self, lease: Lease, before: Occupancy) -> None:
        """A lease replaced what it held; only leases call this."""
        tenant = lease.standing.tenant
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        self.total = self.total.replaced(before, lease.held)
        account.sum = account.sum.replaced(before, lease.held)
        request_class = lease.standing.request_class
        self._by_class[request_class] = self._by_class[request_class].replaced(before, lease.held)
        if not before.num_live:
            account.leases[lease] = None
        elif not lease.held.num_live:
            self._close(account, lease, had_started=not before.num_waiting)

    def _close(self, account: _Account, lease: Lease, *, had_started: bool) -> None:
        del account.leases[lease]
        if not account.leases:
            del self._accounts[lease.standing.tenant]
        if had_started:
            self._on_end()
