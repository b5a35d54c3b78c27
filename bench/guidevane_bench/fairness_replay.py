"""One trace through the scheduler in virtual time, under a policy: what it is told of each request."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import FinishReason, RequestOutput, SetTenants, Submit
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import EQUAL_TERMS, RequestClass, TenantPolicy, TenantTerms

BLOCK_SIZE, NUM_BLOCKS = 16, 625
"""10,000 tokens of KV cache, the default of the VTC paper's artifact."""
WINDOW_S = 30.0
LIMITS = SchedulerLimits(
    kv_cache_utilization_limit_percent=100, waiting_timeout_milliseconds=86_400_000, max_partial_prefills=32
)


def step_s(batch: ScheduledBatch) -> float:
    """A cost model of no machine in particular, so slow that the tenant trace is an overload of a third."""
    num_decodes = sum(seq.is_decode for seq in batch.seqs)
    return 0.020 + 0.0012 * num_decodes + 0.0001 * (batch.num_tokens - num_decodes)


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    knows_tenants: bool = False
    """And classes."""
    knows_deadlines: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    """Of tenants; of one that is not here 1."""

    def told(self, submit: Submit) -> Submit:
        if not self.knows_tenants:
            submit = replace(submit, tenant="", request_class=RequestClass.INTERACTIVE)
        return submit if self.knows_deadlines else replace(submit, deadline_s=None)

    def terms(self) -> SetTenants:
        terms = tuple(TenantTerms(name, weight) for name, weight in self.weights.items())
        return SetTenants(TenantPolicy(terms), epoch=1)

    def weight_of(self, tenant: str) -> int:
        return self.weights.get(tenant, 1)


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    submit: Submit
    """With all that the scheduler may not have been told."""
    started_s: float | None = None
    """When it was first part of a step."""
    ended_s: float = 0.0
    is_whole: bool = False
    served: float = 0.0
    """Price of its tokens, as the tenant is charged for them."""

    @property
    def wait_s(self) -> float:
        """Until its first step, or until its end if that never came."""
        return (self.ended_s if self.started_s is None else self.started_s) - self.submit.arrival_s

    @property
    def time_s(self) -> float:
        """From arrival to end."""
        return self.ended_s - self.submit.arrival_s

    @property
    def is_in_time(self) -> bool:
        deadline_s = self.submit.deadline_s
        return self.is_whole and (deadline_s is None or self.ended_s <= deadline_s)


@dataclass
class Balance:
    """How evenly tenants are served that are backlogged: a request of theirs waits."""

    weights: dict[str, int]
    served: dict[str, float]
    """Price of each tenant's tokens over its weight."""
    gap: float = 0.0
    """The most by which the services of two tenants moved apart while both were backlogged."""
    jain: list[float] = field(default_factory=list)
    """Jain's index of each window, over the services of those that were backlogged throughout it."""
    leads: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    window_end_s: float = WINDOW_S
    steady: set[str] = field(default_factory=set)
    """Backlogged since the window began."""
    at_window_start: dict[str, float] = field(default_factory=dict)

    def charge(self, tenant: str, price: float) -> None:
        self.served[tenant] += price / self.weights[tenant]

    def note_backlog(self, tenants: set[str], now_s: float) -> None:
        before, self.leads = self.leads, {}
        for pair in itertools.combinations(sorted(tenants), 2):
            lead = self.served[pair[0]] - self.served[pair[1]]
            low, high = before.get(pair, (lead, lead))
            low, high = self.leads[pair] = min(low, lead), max(high, lead)
            self.gap = max(self.gap, high - low)
        self.steady &= tenants
        if now_s >= self.window_end_s:
            self._close_window()
            self.window_end_s, self.steady, self.at_window_start = now_s + WINDOW_S, tenants, {**self.served}

    def _close_window(self) -> None:
        gains = [self.served[tenant] - self.at_window_start[tenant] for tenant in self.steady]
        if len(gains) > 1 and any(gains):
            self.jain.append(sum(gains) ** 2 / (len(gains) * sum(gain**2 for gain in gains)))


class Replay:
    """Run to its end when it is made."""

    def __init__(self, trace: Sequence[Submit], policy: Policy) -> None:
        self.policy = policy
        self.outcomes = {submit.request_id: Outcome(submit) for submit in trace}
        weights = {submit.tenant: policy.weight_of(submit.tenant) for submit in trace}
        self.balance = Balance(weights, dict.fromkeys(weights, 0.0))
        self._scheduler = Scheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE), LIMITS, max_model_len=4096, eos_token_ids=frozenset()
        )
        self._scheduler.set_tenants(policy.terms())
        self._due = sorted(trace, key=lambda submit: submit.arrival_s, reverse=True)
        self._live: set[str] = set()
        now_s = 0.0
        while self._due or self._live:
            now_s = self._step(now_s if self._live else max(now_s, self._due[-1].arrival_s))

    def served_by_tenant(self) -> dict[str, float]:
        """Price of each tenant's tokens."""
        served = dict.fromkeys(self.balance.weights, 0.0)
        for outcome in self.outcomes.values():
            served[outcome.submit.tenant] += outcome.served
        return served

    def _step(self, now_s: float) -> float:
        """One step; when it ends."""
        while self._due and self._due[-1].arrival_s <= now_s:
            submit = self._due.pop()
            self._live.add(submit.request_id)
            self._scheduler.submit(self.policy.told(submit))
        batch = self._scheduler.schedule(now_s)
        for seq in batch.seqs:
            self._note_start(self.outcomes[seq.request_id], now_s)
        self._scheduler.apply(batch, StepOutput(tuple(SampledToken(1) if seq.samples else None for seq in batch.seqs)))
        end_s = now_s + step_s(batch)
        for output in self._scheduler.take_outputs():
            self._take(output, end_s)
        waiting = self._live.difference(request.request_id for request in self._scheduler.running)
        self.balance.note_backlog({self.outcomes[name].submit.tenant for name in waiting}, end_s)
        return end_s

    def _note_start(self, outcome: Outcome, now_s: float) -> None:
        if outcome.started_s is None:
            outcome.started_s = now_s
            self._charge(outcome, EQUAL_TERMS.input_price * len(outcome.submit.prompt_token_ids))

    def _take(self, output: RequestOutput, now_s: float) -> None:
        outcome = self.outcomes[output.request_id]
        self._charge(outcome, EQUAL_TERMS.output_price * len(output.new_token_ids))
        if output.finish_reason:
            self._live.remove(output.request_id)
            outcome.ended_s, outcome.is_whole = now_s, output.finish_reason is FinishReason.LENGTH

    def _charge(self, outcome: Outcome, price: float) -> None:
        outcome.served += price
        self.balance.charge(outcome.submit.tenant, price)
