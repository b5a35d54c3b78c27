"""Fairness, starvation and deadlines on one trace, in virtual time. docs/fairness.md explains the tables.

`python -m guidevane_bench.fairness_report TRACE`, a CSV with arrival_s, prompt_tokens, output_tokens, tenant.
"""

import argparse
import csv
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil, nan
from statistics import mean, median

from guidevane_bench.fairness_replay import BLOCK_SIZE, NUM_BLOCKS, Outcome, Policy, Replay
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.tenants import EQUAL_TERMS, RequestClass

FCFS = Policy("first come, first served")
EDF = Policy("earliest deadline first", knows_deadlines=True)
FAIR = Policy("fair turns", knows_tenants=True)
FAIR_EDF = Policy("fair turns, deadlines known", knows_tenants=True, knows_deadlines=True)

LONG_WAITS_S = (10, 30, 100)
WEIGHTS = (1, 2, 4)
"""Of the tenants in the order of their names, in turn."""
DEADLINES_S = ((2.0, 0.05), (10.0, 0.1))
"""From its arrival on an interactive request has so much time, and so much more for each token of its answer."""
OFFLINE_SHARE, OFFLINE_SEED = 0.2, 1
"""Share of requests that are offline work and have no deadline, and what they are drawn with."""

Rows = dict[str, float]


# ------------------------------------------------------------------------------------------------ one replay, in rows


def balance_rows(replay: Replay) -> Rows:
    balance = replay.balance
    return {
        "widest service gap of two backlogged tenants": balance.gap,
        "its VTC bound": 2 * EQUAL_TERMS.output_price * NUM_BLOCKS * BLOCK_SIZE / min(balance.weights.values()),
        "Jain index of backlogged tenants, mean of windows": mean(balance.jain) if balance.jain else nan,
    }


def wait_rows(replay: Replay) -> Rows:
    """A small tenant asks for less than an equal share."""
    waits_s, asked = waits_by_tenant(replay.outcomes.values()), replay.served_by_tenant()
    small = [waits for tenant, waits in waits_s.items() if asked[tenant] < mean(asked.values())]
    together = sorted(itertools.chain.from_iterable(waits_s.values()))
    return {
        "longest wait of any tenant, s": together[-1],
        "longest wait of a small tenant, s": max(map(max, small)),
        "longest wait of the median tenant, s": median(map(max, waits_s.values())),
        "p95 wait of the tenant that waits longest, s": max(quantile(waits, 0.95) for waits in waits_s.values()),
        "p95 wait of the small tenant that waits longest, s": max(quantile(waits, 0.95) for waits in small),
        "median wait of a request, s": median(together),
        **{f"requests that wait more than {s} s, %": percent(wait > s for wait in together) for s in LONG_WAITS_S},
        **{f"of small tenants' more than {s} s, %": percent(w > s for ws in small for w in ws) for s in LONG_WAITS_S},
    }


def deadline_rows(replay: Replay) -> Rows:
    outcomes = replay.outcomes.values()
    timed = [outcome for outcome in outcomes if outcome.submit.deadline_s is not None]
    offline_s = [outcome.time_s for outcome in outcomes if outcome.submit.deadline_s is None]
    by_tenant = defaultdict[str, list[bool]](list)
    for outcome in timed:
        by_tenant[outcome.submit.tenant].append(outcome.is_in_time)
    lost = sum(outcome.served for outcome in timed if not outcome.is_in_time)
    return {
        "deadlines met, %": percent(outcome.is_in_time for outcome in timed),
        "of the median tenant, %": median(map(percent, by_tenant.values())),
        "service that went into missed ones, %": 100 * lost / sum(outcome.served for outcome in outcomes),
        "median time to the end of an offline request, s": median(offline_s),
        "longest time to the end of an offline request, s": max(offline_s),
    }


def waits_by_tenant(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Shortest first. Seconds."""
    waits_s = defaultdict[str, list[float]](list)
    for outcome in outcomes:
        waits_s[outcome.submit.tenant].append(outcome.wait_s)
    return {tenant: sorted(waits) for tenant, waits in waits_s.items()}


def quantile(in_order: Sequence[float], share: float) -> float:
    """The least value that so large a share is not above."""
    return in_order[ceil(share * len(in_order)) - 1]


def percent(are_so: Iterable[bool]) -> float:
    return 100 * mean(are_so)


# ----------------------------------------------------------------------------------------------------------- tables


def table(columns: dict[str, Rows]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(f'{rows[name]:,.2f}' for rows in columns.values())} |"
    yield ""


def report(trace: Sequence[Submit]) -> Iterator[str]:
    replays = {policy.name: Replay(trace, policy) for policy in (FAIR, FCFS)}
    yield from table({name: balance_rows(replay) | wait_rows(replay) for name, replay in replays.items()})

    names = sorted({submit.tenant for submit in trace})
    weights = dict(zip(names, itertools.cycle(WEIGHTS), strict=False))
    yield f"Weights {':'.join(map(str, WEIGHTS))}"
    policies = [replace(policy, weights=weights) for policy in (FAIR, FCFS)]
    yield from table({policy.name: balance_rows(Replay(trace, policy)) for policy in policies})

    for base_s, per_token_s in DEADLINES_S:
        timed = with_deadlines(trace, base_s, per_token_s)
        yield f"Deadlines: arrival + {base_s:g} s + {per_token_s * 1000:g} ms per output token"
        yield from table({policy.name: deadline_rows(Replay(timed, policy)) for policy in (FCFS, EDF, FAIR, FAIR_EDF)})


def with_deadlines(trace: Iterable[Submit], base_s: float, per_token_s: float) -> list[Submit]:
    """Offline requests have none; who is offline is drawn from a seed."""
    draw = random.Random(OFFLINE_SEED)  # noqa: S311
    return [
        replace(submit, request_class=RequestClass.OFFLINE)
        if draw.random() < OFFLINE_SHARE
        else replace(submit, deadline_s=submit.arrival_s + base_s + per_token_s * submit.params.max_tokens)
        for submit in trace
    ]


def read(path: str) -> list[Submit]:
    """Prompts have no token in common, so a prefix cache would find nothing. Raises ValueError for another format."""
    with open(path, newline="") as file:
        lines = [
            (float(at), int(p), int(o), tenant) for at, p, o, tenant in itertools.islice(csv.reader(file), 1, None)
        ]
    if not lines:
        raise ValueError("it has no request")
    return [Submit(str(n), (n,) * p, SamplingParams(o, seed=0), at, tenant=t) for n, (at, p, o, t) in enumerate(lines)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of docs/fairness.md for one trace, in Markdown."""
    columns = "arrival_s, prompt_tokens, output_tokens, tenant"
    parser = argparse.ArgumentParser(prog="python -m guidevane_bench.fairness_report", description=main.__doc__)
    parser.add_argument("trace", help=f"CSV with a line of names first: {columns}")
    path = parser.parse_args(arguments).trace
    try:
        trace = read(path)
    except (OSError, ValueError) as error:
        parser.error(f"trace {path} can't be read: {error}; it is a CSV with {columns}")
    sys.stdout.writelines(line + "\n" for line in report(trace))


if __name__ == "__main__":
    main()
