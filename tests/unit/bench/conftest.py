"""Small fleets with costs that are easy to reckon with: 10 ms a step, 1 ms per prefill token, 1 ms per decode."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from guidevane_api.limits import PartialLimits, SchedulerLimits
from guidevane_bench.simulator.control import UNBOUNDED
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.simulator.fleet import Fleet, FleetSpec, Outcome
from guidevane_bench.simulator.pod import PodShape
from guidevane_bench.workload.request import LoadRequest


@pytest.fixture
def data() -> Path:
    return Path(__file__).parents[2] / "data" / "bench"


@pytest.fixture
def trace(data: Path) -> Path:
    return data / "arena_tenants_first200.csv"


@pytest.fixture
def costs() -> CostModel:
    return CostModel(step_s=0.010, prefill_token_s=0.001, decode_s=0.001)


@pytest.fixture
def limits_of() -> Callable[..., SchedulerLimits]:
    return lambda **given: SchedulerLimits.resolve(PartialLimits(**given), UNBOUNDED)


@pytest.fixture
def burst() -> Callable[..., list[LoadRequest]]:
    """So many requests alike, one every gap_s."""

    def make(count: int, *, prompt: int = 10, output: int = 5, gap_s: float = 0.0) -> list[LoadRequest]:
        return [LoadRequest(number, number * gap_s, prompt, output) for number in range(count)]

    return make


@pytest.fixture
def play(costs: CostModel, limits_of: Callable[..., SchedulerLimits]) -> Callable[..., Outcome]:
    """Run a load on a fleet; keyword arguments are fields of FleetSpec and PodShape."""

    def play_it(requests: Sequence[LoadRequest], *, controller: Any = None, **given: Any) -> Outcome:
        shape_names = (
            "limits",
            "num_blocks",
            "block_size",
            "is_static",
            "tenants",
            "enable_prefix_caching",
            "is_optimistic",
            "guard",
        )
        shape = {"limits": limits_of(), "num_blocks": 1000, **{k: given.pop(k) for k in shape_names if k in given}}
        return Fleet(FleetSpec(PodShape(**shape), **{"costs": costs, **given}), controller).run(requests)

    return play_it
