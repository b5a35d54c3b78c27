"""Capacity: the search by itself, the setups by their names, and the command."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.__main__ import main
from guidevane_bench.capacity import PRECISION, Figures, Trial, capacity, parse_setup
from guidevane_bench.errors import SpecError
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.workload.load import LoadSpec
from guidevane_runtime.core.guard_steps import Line

LINES = {Line.TTFT: 500.0, Line.ITL: 50.0}


@given(st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_capacity_is_the_highest_rate_that_holds_wherever_the_search_begins(truth: float, start: float) -> None:
    found = capacity(lambda rate: rate <= truth, start)
    assert found <= truth < found * PRECISION**1.01


@pytest.mark.parametrize("answer", [True, False])
def test_slo_that_holds_always_or_never_is_told(answer: bool) -> None:
    with pytest.raises(SpecError, match="always or never holds"):
        capacity(lambda rate: answer, 4.0)


def figures(ttft_ms: float | None = 400.0, itl_ms: float | None = 40.0, unserved_percent: float = 0.0) -> Figures:
    return Figures(1.0, ttft_ms, itl_ms, unserved_percent, 100.0, 0)


def test_slo_holds_when_both_lines_do_and_nearly_all_were_served() -> None:
    assert figures().holds(LINES)
    assert not figures(ttft_ms=501).holds(LINES)
    assert not figures(itl_ms=51).holds(LINES)
    # Refusing must not look like serving.
    assert not figures(unserved_percent=1.1).holds(LINES)


def test_setups_differ_in_what_their_names_say(limits_of: Callable[..., SchedulerLimits]) -> None:
    def setup(name: str):  # type: ignore[no-untyped-def]
        return parse_setup(name, limits_of(), 1000, LINES)

    assert (setup("guidevane").shape.limits, setup("guidevane").shape.is_optimistic) == (limits_of(), False)
    assert setup("guidevane+guard").shape.guard.lines == LINES
    static, peak_kv = setup("static-64"), setup("peak-kv-64")
    assert static.shape.limits == peak_kv.shape.limits
    assert (static.shape.limits.max_num_seqs, static.shape.limits.kv_cache_utilization_limit_percent) == (64, 99)
    assert (static.shape.is_optimistic, peak_kv.shape.is_optimistic) == (True, False)
    assert setup("static-64+combined").controller == "combined"


@pytest.mark.parametrize("name", ["", "static", "static-0", "static-x", "fast", "guidevane+fast", "static-4+x"])
def test_setup_of_no_known_name_is_refused_with_its_name(name: str, limits_of: Callable[..., SchedulerLimits]) -> None:
    with pytest.raises(SpecError, match="--setups has '"):
        parse_setup(name, limits_of(), 1000, LINES)


@pytest.fixture
def trial(costs: CostModel) -> Trial:
    return Trial(LoadSpec(lengths="fixed:prompt=20,output=10", duration_s=20.0, seed=1), costs, LINES)


def test_everything_at_once_is_served_whatever_the_queue_limits_say(
    trial: Trial, limits_of: Callable[..., SchedulerLimits]
) -> None:
    limits = limits_of(max_num_seqs=4, max_queued_requests=2, waiting_timeout_milliseconds=10)
    found = trial.saturated(parse_setup("guidevane", limits, 1000, LINES), 50)
    assert found.unserved_percent == 0
    assert found.output_tokens_per_s > 0


def test_more_slots_serve_a_higher_rate_until_the_streams_are_too_slow(
    trial: Trial, limits_of: Callable[..., SchedulerLimits]
) -> None:
    def found(name: str) -> float:
        setup = parse_setup(name, limits_of(), 1000, LINES)
        return capacity(lambda rate: trial.at_rate(setup, rate).holds(LINES), 4.0)

    assert found("static-1") < found("static-4")


def test_command_makes_a_row_for_each_setup_and_the_same_ones_again(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capacity", "--costs", str(data / "costs_demo_cpu.json"), "--lengths", "fixed:prompt=20,output=10"]
    command += ["--duration", "10", "--requests", "20", "--setups", "static-4,guidevane+guard"]
    pages = []
    for _ in range(2):
        assert main(command) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    rows = pages[0].splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| static-4", "| guidevane+guard"]


@pytest.mark.parametrize("extra", [["--arrivals", "poisson:rate=1"], ["--requests", "0"], ["--start-rate", "0"]])
def test_options_that_the_search_sets_itself_are_refused(
    extra: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capacity", "--costs", str(data / "costs_demo_cpu.json"), "--lengths", "fixed:prompt=20,output=10"]
    assert main([*command, *extra]) == 2
    assert extra[0] in capsys.readouterr().err
