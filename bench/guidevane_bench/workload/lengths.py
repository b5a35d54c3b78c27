"""How long prompts and outputs are, for arrivals that come from a generator."""

import math
import random
from collections.abc import Callable, Sequence

from guidevane_bench.errors import SpecError
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.specs import Known, parse_spec

KINDS: Known = {
    "fixed": {"prompt": None, "output": None},
    "lognormal": {"prompt": None, "output": None, "cv": 1.0},
    "longtail": {"prompt": None, "output": None, "long": None, "share": 0.05},
}
"""Means in tokens. longtail: outputs are exponential around `output`, and a `share` of them `long` tokens."""


class Lengths:
    """Draws (prompt tokens, output tokens, tenant)."""

    def __init__(self, draw: Callable[[random.Random], tuple[int, int, str]]) -> None:
        self._draw = draw

    def request(self, number: int, arrival_s: float, rng: random.Random) -> LoadRequest:
        prompt, output, tenant = self._draw(rng)
        return LoadRequest(number, arrival_s, max(1, prompt), max(1, output), tenant)


def lengths_of(rows: Sequence[LoadRequest]) -> Lengths:
    """Prompt, output and tenant of a request of a trace, drawn as one: they depend on each other."""

    def draw(rng: random.Random) -> tuple[int, int, str]:
        row = rng.choice(rows)
        return row.num_prompt_tokens, row.num_output_tokens, row.tenant

    return Lengths(draw)


def parse_lengths(text: str) -> Lengths:
    """A kind of KINDS with its numbers."""
    spec = parse_spec("--lengths", text, KINDS)
    prompt, output = spec["prompt"], spec["output"]
    if spec.kind == "fixed":
        return Lengths(lambda _: (round(prompt), round(output), ""))
    if spec.kind == "lognormal":
        return _lognormal(prompt, output, spec["cv"])
    share, long = spec["share"], spec["long"]
    if share > 1:
        raise SpecError(f"--lengths longtail has share {share}; it is a share, 1 at most")

    def draw(rng: random.Random) -> tuple[int, int, str]:
        is_long = rng.random() < share
        return round(prompt), round(long if is_long else rng.expovariate(1 / output)), ""

    return Lengths(draw)


def _lognormal(prompt: float, output: float, cv: float) -> Lengths:
    sigma = math.sqrt(math.log1p(cv * cv))
    mu_prompt, mu_output = (math.log(mean) - sigma * sigma / 2 for mean in (prompt, output))

    def draw(rng: random.Random) -> tuple[int, int, str]:
        return round(rng.lognormvariate(mu_prompt, sigma)), round(rng.lognormvariate(mu_output, sigma)), ""

    return Lengths(draw)
