import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from guidevane_bench.errors import BenchError
from guidevane_bench.workload.arrivals import arrival_times
from guidevane_bench.workload.load import LoadSpec

HOUR_S = 3600.0
EVERY_KIND = [
    "poisson:rate=2",
    "gamma:rate=2,cv=3",
    "ramp:start=1,end=3",
    "onoff:rate=4,on=30,off=30",
    "diurnal:rate=2,amplitude=0.9,period=600",
]


def times(text: str, seed: int = 0, duration_s: float = HOUR_S) -> list[float]:
    return list(arrival_times(text, duration_s, random.Random(seed)))


@pytest.mark.parametrize("text", EVERY_KIND)
def test_times_ascend_within_the_duration_at_the_mean_rate(text: str) -> None:
    arrivals = times(text)
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < HOUR_S
    assert len(arrivals) / HOUR_S == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("text", EVERY_KIND)
def test_same_seed_gives_the_same_times_and_another_gives_others(text: str) -> None:
    assert times(text, seed=1) == times(text, seed=1) != times(text, seed=2)


def test_gamma_gaps_are_as_bursty_as_asked() -> None:
    arrivals = times("gamma:rate=20,cv=3")
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(3, rel=0.1)


def test_ramp_ends_busier_than_it_began() -> None:
    arrivals = times("ramp:start=1,end=9")
    assert sum(t < HOUR_S / 2 for t in arrivals) / len(arrivals) == pytest.approx(0.3, abs=0.03)


def test_nothing_comes_while_it_is_off() -> None:
    assert all(t % 60 < 30 for t in times("onoff:rate=4,on=30,off=30"))


def test_day_begins_at_its_trough() -> None:
    arrivals = times("diurnal:rate=5,amplitude=1,period=3600")
    assert sum(t < 600 for t in arrivals) < sum(1500 <= t < 2100 for t in arrivals) / 4


def test_recorded_curve_is_followed(tmp_path: Path) -> None:
    curve = tmp_path / "curve.csv"
    curve.write_text("t_s,relative_rate\n0,0.0\n1800,1.0\n")
    arrivals = times(f"curve:{curve}=2")
    assert arrivals[0] >= 1800
    assert len(arrivals) == pytest.approx(3600, rel=0.1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pareto:rate=1", "pareto"),
        ("poisson", "rate"),
        ("poisson:rate=1,burst=2", "burst"),
        ("poisson:rate=fast", "rate=fast"),
        ("poisson:rate=-1", "above 0"),
        ("diurnal:rate=1,amplitude=2", "amplitude"),
        ("curve:gone.csv=2", "gone.csv"),
    ],
)
def test_arrivals_that_make_no_sense_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(BenchError, match=named):
        times(text)


def test_generated_load_draws_lengths_of_the_trace_with_their_tenant(trace: Path) -> None:
    requests = LoadSpec(trace=trace, arrivals="poisson:rate=5").requests()
    recorded = {(row.num_prompt_tokens, row.num_output_tokens, row.tenant) for row in LoadSpec(trace=trace).requests()}
    assert {(row.num_prompt_tokens, row.num_output_tokens, row.tenant) for row in requests} <= recorded


def test_other_lengths_do_not_move_an_arrival() -> None:
    loads = [
        LoadSpec(arrivals="poisson:rate=5", lengths=lengths).requests()
        for lengths in ("fixed:prompt=9,output=9", "lognormal:prompt=90,output=90,cv=2")
    ]
    assert [row.arrival_s for row in loads[0]] == [row.arrival_s for row in loads[1]]


def test_drawn_lengths_have_the_asked_mean() -> None:
    rows = LoadSpec(arrivals="poisson:rate=100", lengths="lognormal:prompt=200,output=50,cv=1").requests()
    assert mean(row.num_prompt_tokens for row in rows) == pytest.approx(200, rel=0.1)
    assert mean(row.num_output_tokens for row in rows) == pytest.approx(50, rel=0.1)


def test_long_tail_has_its_share_of_long_outputs() -> None:
    rows = LoadSpec(arrivals="poisson:rate=100", lengths="longtail:prompt=9,output=20,long=900,share=0.1").requests()
    assert sum(row.num_output_tokens == 900 for row in rows) / len(rows) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec(),
        LoadSpec(arrivals="poisson:rate=1"),
        LoadSpec(arrivals="poisson:rate=1", lengths="longtail:prompt=9,output=2,long=9,share=2"),
    ],
)
def test_load_without_a_source_is_refused(spec: LoadSpec) -> None:
    with pytest.raises(BenchError, match="--"):
        spec.requests()
