"""Fair turns against first come, first served, on one trace and in virtual time. docs/fairness.md explains the table.

`python -m guidevane_bench.fairness_report TRACE`, a CSV with arrival_s, prompt_tokens, output_tokens, tenant.
The same scheduler runs twice; the second time all requests are of one nameless tenant, so they come in as they arrived.
"""

import csv
import itertools
import sys
from dataclasses import dataclass, field, replace
from math import nan
from statistics import mean, median

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import EQUAL_TERMS

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


@dataclass
class Figures:
    """Services are prices of tokens; a tenant is backlogged while a request of it waits."""

    served: dict[str, float]
    waits_s: dict[str, float]
    """Longest wait of each tenant for a first step."""
    gap: float = 0.0
    """The most by which the services of two tenants moved apart while both were backlogged."""
    jain: list[float] = field(default_factory=list)
    """Jain's index of each window, over the services of those that were backlogged throughout it."""
    leads: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def note_backlog(self, tenants: set[str]) -> None:
        before, self.leads = self.leads, {}
        for pair in itertools.combinations(sorted(tenants), 2):
            lead = self.served[pair[0]] - self.served[pair[1]]
            low, high = before.get(pair, (lead, lead))
            low, high = self.leads[pair] = min(low, lead), max(high, lead)
            self.gap = max(self.gap, high - low)

    def close_window(self, tenants: set[str], before: dict[str, float]) -> None:
        gains = [self.served[tenant] - before[tenant] for tenant in tenants]
        if len(gains) > 1 and any(gains):
            self.jain.append(sum(gains) ** 2 / (len(gains) * sum(gain**2 for gain in gains)))

    def rows(self) -> dict[str, float]:
        equal_share = mean(self.served.values())
        light = [wait_s for tenant, wait_s in self.waits_s.items() if self.served[tenant] < equal_share]
        return {
            "widest service gap of two backlogged tenants": self.gap,
            "its VTC bound": 2 * EQUAL_TERMS.output_price * NUM_BLOCKS * BLOCK_SIZE,
            "Jain index of backlogged tenants, mean of windows": mean(self.jain) if self.jain else nan,
            "longest wait of any tenant, s": max(self.waits_s.values()),
            "longest wait of a tenant that asks for less than an equal share, s": max(light),
            "longest wait of the median tenant, s": median(self.waits_s.values()),
        }


def replay(trace: list[Submit], *, is_fair: bool) -> Figures:
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), LIMITS, max_model_len=4096, eos_token_ids=frozenset())
    tenants = dict.fromkeys((submit.tenant for submit in trace), 0.0)
    figures, by_id = Figures({**tenants}, {**tenants}), {submit.request_id: submit for submit in trace}
    fresh = dict(by_id)
    now_s, due, live, window_end_s, steady, before = 0.0, trace[::-1], set[str](), WINDOW_S, set[str](), tenants
    while due or live:
        now_s = now_s if live else max(now_s, due[-1].arrival_s)
        while due and due[-1].arrival_s <= now_s:
            live.add(due[-1].request_id)
            scheduler.submit(due[-1] if is_fair else replace(due[-1], tenant=""))
            del due[-1]
        batch = scheduler.schedule(now_s)
        for submit in (fresh.pop(seq.request_id) for seq in batch.seqs if seq.request_id in fresh):
            figures.served[submit.tenant] += EQUAL_TERMS.input_price * len(submit.prompt_token_ids)
            figures.waits_s[submit.tenant] = max(figures.waits_s[submit.tenant], now_s - submit.arrival_s)
        scheduler.apply(batch, StepOutput(tuple(SampledToken(1) if seq.samples else None for seq in batch.seqs)))
        now_s += step_s(batch)
        for output in scheduler.take_outputs():
            figures.served[by_id[output.request_id].tenant] += EQUAL_TERMS.output_price * len(output.new_token_ids)
            live -= {output.request_id} if output.finish_reason else set()
        backlogged = {by_id[name].tenant for name in live.difference(r.request_id for r in scheduler.running)}
        figures.note_backlog(backlogged)
        steady &= backlogged
        if now_s >= window_end_s:
            figures.close_window(steady, before)
            window_end_s, steady, before = now_s + WINDOW_S, backlogged, {**figures.served}
    return figures


def read(path: str) -> list[Submit]:
    """Prompts have no token in common, so a prefix cache would find nothing."""
    with open(path, newline="") as file:
        lines = [
            (float(at), int(p), int(o), tenant) for at, p, o, tenant in itertools.islice(csv.reader(file), 1, None)
        ]
    return [Submit(str(n), (n,) * p, SamplingParams(o, seed=0), at, tenant=t) for n, (at, p, o, t) in enumerate(lines)]


if __name__ == "__main__":
    fair, fcfs = (replay(read(sys.argv[1]), is_fair=is_fair).rows() for is_fair in (True, False))
    for name, value in fair.items():
        sys.stdout.write(f"| {name} | {value:,.2f} | {fcfs[name]:,.2f} |\n")
