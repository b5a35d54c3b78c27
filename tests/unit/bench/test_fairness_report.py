"""The report on a small trace: two tenants ask for too much, three for little."""

from dataclasses import replace
from pathlib import Path

import pytest

from guidevane_bench.fairness_replay import Outcome, Policy, Replay
from guidevane_bench.fairness_report import (
    EDF,
    FAIR,
    FAIR_EDF,
    FCFS,
    balance_rows,
    deadline_rows,
    main,
    quantile,
    read,
    report,
    wait_rows,
    with_deadlines,
)
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.tenants import RequestClass

SMALL = ("small0", "small1", "small2")


@pytest.fixture
def trace(tmp_path: Path) -> list[Submit]:
    lines = ["arrival_s,prompt_tokens,output_tokens,tenant"]
    for number in range(120):
        tenant = "hog" if number % 2 else "busy"
        lines.append(f"{number / 100},200,300,{tenant}")
    lines += [f"{2 + number},20,10,{name}" for number, name in enumerate(SMALL)]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    return read(str(tmp_path / "trace.csv"))


def longest_wait_s(replay: Replay, tenant: str) -> float:
    return max(outcome.wait_s for outcome in replay.outcomes.values() if outcome.submit.tenant == tenant)


def test_everybody_is_served_the_same_in_the_end_and_the_small_wait_less(trace: list[Submit]) -> None:
    fair, fcfs = Replay(trace, FAIR), Replay(trace, FCFS)
    assert fair.served_by_tenant() == fcfs.served_by_tenant()
    assert fair.served_by_tenant()["hog"] == 60 * (200 + 2 * 300)
    assert fair.served_by_tenant()["small0"] == 20 + 2 * 10
    for name in SMALL:
        assert longest_wait_s(fair, name) < longest_wait_s(fcfs, name) / 2


def test_the_gap_of_fair_turns_is_within_its_bound_and_jain_is_a_share(trace: list[Submit]) -> None:
    rows = balance_rows(Replay(trace, FAIR))
    assert 0 < rows["widest service gap of two backlogged tenants"] <= rows["its VTC bound"]
    assert 0 < rows["Jain index of backlogged tenants, mean of windows"] <= 1


def test_weights_are_what_services_are_divided_by(trace: list[Submit]) -> None:
    """While both hogs have something waiting, the one with weight 4 gets four times as much."""
    weighted = replace(FAIR, weights={"hog": 4})
    evenly, unevenly = Replay(trace, FAIR).balance, Replay(trace, weighted).balance
    assert unevenly.served["hog"] == evenly.served["hog"] / 4
    assert unevenly.gap <= 2 * 2 * 10_000 and Replay(trace, replace(FCFS, weights={"hog": 4})).balance.gap > 20_000


def test_longer_waits_are_rarer_and_small_tenants_have_fewer(trace: list[Submit]) -> None:
    rows = wait_rows(Replay(trace, FAIR))
    shares = [rows[f"requests that wait more than {s} s, %"] for s in (10, 30, 100)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0
    assert rows["of small tenants' more than 30 s, %"] == 0 < shares[1]
    assert rows["longest wait of any tenant, s"] >= rows["p95 wait of the tenant that waits longest, s"] > 10


def test_a_known_deadline_ends_a_request_and_an_unknown_one_is_missed(trace: list[Submit]) -> None:
    timed = with_deadlines(trace, 5.0, 0.0)
    known, unknown = Replay(timed, EDF), Replay(timed, FCFS)
    late = [outcome for outcome in unknown.outcomes.values() if not outcome.is_in_time]
    assert late and all(outcome.is_whole and outcome.time_s > 5.0 for outcome in late)
    cut = [outcome for outcome in known.outcomes.values() if not outcome.is_in_time]
    assert cut and not any(outcome.is_whole for outcome in cut)


def test_what_never_started_has_waited_until_its_end() -> None:
    submit = Submit("a", (1,), SamplingParams(1, seed=0), arrival_s=2.0, deadline_s=5.0)
    assert Outcome(submit, ended_s=5.0).wait_s == 3.0
    assert Outcome(submit, started_s=3.0, ended_s=5.0).wait_s == 1.0


def test_known_deadlines_are_met_more_often_than_by_order_of_arrival(trace: list[Submit]) -> None:
    timed = with_deadlines(trace, 10.0, 0.1)
    met = {policy.name: deadline_rows(Replay(timed, policy))["deadlines met, %"] for policy in (FCFS, FAIR, FAIR_EDF)}
    assert met[FCFS.name] < met[FAIR_EDF.name]


def test_a_fifth_is_offline_and_has_no_deadline(trace: list[Submit]) -> None:
    timed = with_deadlines(trace, 10.0, 0.1)
    offline = [submit for submit in timed if submit.deadline_s is None]
    assert {submit.request_class for submit in offline} == {RequestClass.OFFLINE} and 15 < len(offline) < 35
    first = next(submit for submit in timed if submit.deadline_s is not None)
    assert first.deadline_s == first.arrival_s + 10.0 + 0.1 * 300


def test_a_policy_says_no_more_than_it_knows() -> None:
    submit = Submit(
        "a",
        (1,),
        SamplingParams(1, seed=0),
        0.0,
        tenant="t",
        request_class=RequestClass.OFFLINE,
        deadline_s=5.0,
    )
    assert Policy("all", knows_tenants=True, knows_deadlines=True).told(submit) == submit
    blind = Policy("nothing").told(submit)
    assert (blind.tenant, blind.request_class, blind.deadline_s) == ("", RequestClass.INTERACTIVE, None)


def test_a_quantile_is_a_value_that_was_there() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.95, 1.0)] == [1.0, 2.0, 4.0, 4.0]


def test_the_same_trace_gives_the_same_report(trace: list[Submit]) -> None:
    part = trace[::4]
    first, second = list(report(part)), list(report(part))
    assert first == second and sum(line.startswith("| |") for line in first) == 4


@pytest.mark.parametrize(
    "text", ["", "arrival_s,prompt_tokens,output_tokens,tenant\n", "a,b\n1,2\n", "a,b,c,d\nx,1,1,t\n"]
)
def test_a_file_that_is_no_trace_is_said_to_be_none(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "trace.csv")])
    assert end.value.code == 2
    assert "it is a CSV with arrival_s, prompt_tokens" in capsys.readouterr().err
