"""What a model runner has room for beside tokens and blocks: each as an object of its own, given to the scheduler."""

from collections.abc import Collection
from typing import Protocol

from guidevane_runtime.core.budget import StepPlan
from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import AdmissionRule, Held

ADAPTER_PATIENCE_S = 2.0
"""How long others pass a request that waits for an adapter slot. Far below the default waiting timeout of 30 s, so that
several adapters in turn have theirs before it."""


class PlanConstraint(Protocol):
    def rule(self, step: StepPlan, running: Collection[Request]) -> AdmissionRule:
        """What it allows of that step, beside those that run. Made for explain() too: it may change nothing itself."""


class AdapterSlots:
    """At most max_adapters adapters among the running requests, told apart by digest; the model as it is needs none.

    Who has a slot is read off the running requests, so a preempted or ended one can't leave it taken.
    """

    def __init__(self, max_adapters: int, patience_s: float = ADAPTER_PATIENCE_S) -> None:
        if max_adapters < 1:
            raise ValueError(f"max_adapters is {max_adapters}, at least 1 is needed; leave the constraint out instead")
        self.max_adapters = max_adapters
        self.patience_s = patience_s
        self.seated: tuple[bytes, ...] = ()
        """Adapters that had a slot when one came in last, the longest seated first."""

    def rule(self, step: StepPlan, running: Collection[Request]) -> "AdapterRule":
        return AdapterRule(self, step.now_s, running)


class AdapterRule:
    """Own rule: a request whose adapter has no slot waits for one, and others pass.

    Who has waited longer than the patience claims a slot: the adapter that is seated longest takes nobody more from
    behind it in line, until its running requests have ended. So the queue's order holds here too: nobody starves.
    """

    def __init__(self, slots: AdapterSlots, now_s: float, running: Collection[Request]) -> None:
        self._slots = slots
        self._claims_before_s = now_s - slots.patience_s
        in_use = {request.adapter for request in running} - {b""}
        self._seated = [adapter for adapter in slots.seated if adapter in in_use]
        self._claims: set[bytes] = set()
        """Adapters of those asked so far that have waited for too long."""

    def held(self, request: Request) -> Held | None:
        adapter, seated, max_adapters = request.adapter, self._seated, self._slots.max_adapters
        if not adapter:
            return None
        if adapter in seated[: len(self._claims)]:
            return Held(Hold.ADAPTER_SLOTS, "its adapter gives way to one that has waited for longer")
        if adapter in seated or len(seated) < max_adapters:
            return None
        if request.submit.arrival_s <= self._claims_before_s:
            self._claims.add(adapter)
        why = "{value} other adapters are in use, the model runner has room for {bound}"
        return Held(Hold.ADAPTER_SLOTS, why, len(seated), max_adapters)

    def enter(self, request: Request) -> None:
        if request.adapter and request.adapter not in self._seated:
            self._seated.append(request.adapter)
        self._slots.seated = tuple(self._seated)
