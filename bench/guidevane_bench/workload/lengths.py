"""How long prompts and outputs are, for arrivals that come from a generator."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from guidevane_bench.errors import SpecError
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.specs import Known, parse_spec

KINDS: Known = {
    "fixed": {"prompt": None, "output": None},
    "lognormal": {"prompt": None, "output": None, "cv": 1.0},
    "longtail": {"prompt": None, "output": None, "long": None, "share": 0.05},
}
"""Means in tokens. longtail: outputs are exponential around `output`, and a `share` of them `long` tokens."""


DrawRequest = Callable[[random.Random], LoadRequest]
"""A request that has no number and no arrival yet."""


def lengths_of(rows: Sequence[LoadRequest]) -> DrawRequest:
    """Lengths, tenant, class, priority and deadline of a request of a trace, drawn as one: they depend on each other.

    Its prompt is its own: what the rows of a trace share they share in their order.
    """
    return lambda rng: replace(rng.choice(rows), prefix_ids=())


def parse_lengths(text: str) -> DrawRequest:
    """A kind of KINDS with its numbers."""
    spec = parse_spec("--lengths", text, KINDS)
    prompt, output = spec["prompt"], spec["output"]
    if spec.kind == "fixed":
        return lambda _: _sized(prompt, output)
    if spec.kind == "lognormal":
        return _lognormal(prompt, output, spec["cv"])
    share, long = spec["share"], spec["long"]
    if share > 1:
        raise SpecError(f"--lengths longtail has share {share}; it is a share, 1 at most")

    def draw(rng: random.Random) -> LoadRequest:
        is_long = rng.random() < share
        return _sized(prompt, long if is_long else rng.expovariate(1 / output))

    return draw


def _lognormal(prompt: float, output: float, cv: float) -> DrawRequest:
    sigma = math.sqrt(math.log1p(cv * cv))
    mu_prompt, mu_output = (math.log(mean) - sigma * sigma / 2 for mean in (prompt, output))

    return lambda rng: _sized(rng.lognormvariate(mu_prompt, sigma), rng.lognormvariate(mu_output, sigma))


def _sized(prompt: float, output: float) -> LoadRequest:
    return LoadRequest(0, 0.0, max(1, round(prompt)), max(1, round(output)))
