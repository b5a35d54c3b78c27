"""A door in virtual time, for the tests of its rungs."""

from collections.abc import Callable

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity, Refused, Reported
from guidevane_runtime.core.leases import Lease, Standing
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms

HERE = Standing(arrival_s=100.0)
A, B = Standing(arrival_s=100.0, tenant="a"), Standing(arrival_s=100.0, tenant="b")
WIDE = dict.fromkeys(("max_model_len", "max_prompt_tokens", "max_output_tokens", "max_queued_tokens"), 1 << 20)
BUSY = Reported(num_running=1, num_waiting=1)


class House:
    """A gate, and what it is made of: clock, limits and terms, all live."""

    def __init__(self, *tenants: TenantTerms, **limits: int) -> None:
        self.now_s = 100.0
        self.limits = SchedulerLimits(**(WIDE | limits))
        self.policy = TenantPolicy(tenants)
        self.gate = AdmissionGate(limits=lambda: self.limits, clock=lambda: self.now_s, policy=lambda: self.policy)
        self.gate.engine_ready(Capacity(num_blocks=1 << 16, block_size=16), load_s=2.0)

    def agree(self, *tenants: TenantTerms) -> None:
        self.policy = TenantPolicy(tenants)

    def change(self, **limits: int) -> None:
        self.limits = self.limits.model_copy(update=limits)

    def enter(self, standing: Standing = HERE, count: int = 1) -> list[Lease]:
        return self.gate.enter(standing, count)

    def wait(self, num_tokens: int, standing: Standing = HERE) -> Lease:
        """One that waits with so many prompt tokens."""
        return self.gate.admit(standing, num_tokens, 1)

    def learn_prefill(self, tokens_per_s: int) -> None:
        """Steps of 0.1 s with a queue behind them."""
        for _ in range(200):
            self.gate.observe(BUSY._replace(num_prompt_tokens=tokens_per_s // 10, step_s=0.1))

    def learn_ends(self, gap_s: float, standing: Standing = HERE) -> None:
        """Requests that end one after the other, with a queue behind them."""
        self.gate.observe(BUSY)
        for _ in range(200):
            (lease,) = self.enter(standing)
            lease.start()
            self.now_s += gap_s
            lease.release()


def refusal(attempt: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as raised:
        attempt()
    return raised.value
