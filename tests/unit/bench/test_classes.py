"""Class, priority and deadline of simulated requests: where they come from, what pods do with them, what is told."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.__main__ import main
from guidevane_bench.errors import InputError, SpecError
from guidevane_bench.report.build import Slo, build_report
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.simulator.ledger import End, Entry
from guidevane_bench.workload.load import LoadSpec
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.traces import read_trace
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.guard import GuardConfig
from guidevane_runtime.core.guard_steps import Line, Step
from guidevane_runtime.core.tenants import RequestClass

Play = Callable[..., Outcome]
Burst = Callable[..., list[LoadRequest]]
LimitsOf = Callable[..., SchedulerLimits]
INTERACTIVE, OFFLINE = RequestClass.INTERACTIVE, RequestClass.OFFLINE


def generated(**given: object) -> LoadSpec:
    return LoadSpec(arrivals="poisson:rate=20", lengths="fixed:prompt=20,output=5", **given)  # type: ignore[arg-type]


def offline_of(spec: LoadSpec) -> set[int]:
    return {request.number for request in spec.requests() if request.request_class is OFFLINE}


def mixed(requests: list[LoadRequest], every: int = 2) -> list[LoadRequest]:
    """Every so manieth is offline."""
    return [replace(one, request_class=OFFLINE) if one.number % every == 0 else one for one in requests]


def of(outcome: Outcome, request_class: RequestClass) -> list[Entry]:
    return [entry for entry in outcome.ledger.entries if entry.request.request_class is request_class]


def last_start_s(entries: list[Entry]) -> float:
    return max(entry.first_scheduled_s or 0.0 for entry in entries)


# ------------------------------------------------------------------------------------------------------- the load


def test_share_of_offline_work_is_drawn_and_moves_nothing_else() -> None:
    plain, shared = generated().requests(), generated(offline_share=0.3).requests()
    assert 0.2 < len(offline_of(generated(offline_share=0.3))) / len(shared) < 0.4
    assert [replace(request, request_class=INTERACTIVE) for request in shared] == plain


def test_same_seed_draws_the_same_and_a_larger_share_only_adds() -> None:
    drawn = [offline_of(generated(offline_share=share)) for share in (0.0, 0.2, 0.2, 0.6, 1.0)]
    assert drawn[1] == drawn[2]
    assert set() == drawn[0] < drawn[1] < drawn[3] < drawn[4]
    assert offline_of(generated(offline_share=0.2, seed=1)) != drawn[1]


def test_tenants_of_a_trace_are_said_to_be_offline(trace: Path) -> None:
    requests = LoadSpec(trace=trace, offline_tenants=("0", "13")).requests()
    assert {request.tenant for request in requests if request.request_class is OFFLINE} == {"0", "13"}
    assert not {"0", "13"} & {request.tenant for request in requests if request.request_class is INTERACTIVE}


def test_trace_says_class_priority_and_deadline_itself_where_its_cells_are_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens,class,priority,deadline_ms\n9,2,offline,-3,1500\n9,2,,,\n")
    first, second = read_trace(path)
    assert (first.request_class, first.priority, first.within_s) == (OFFLINE, -3, 1.5)
    assert (second.request_class, second.priority, second.within_s) == (INTERACTIVE, 0, None)
    (drawn, *_) = LoadSpec(trace=path, arrivals="poisson:rate=5", seed=3).requests()
    assert drawn.request_class is OFFLINE or drawn.within_s is None


@pytest.mark.parametrize("cell", ["batch,,", ",high,", ",,soon", ",,0", ",,nan"])
def test_cell_that_says_no_class_priority_or_deadline_is_named(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"prompt_tokens,output_tokens,class,priority,deadline_ms\n9,2,{cell}\n")
    with pytest.raises(InputError, match=r"request 1: (class|priority|deadline_ms) is"):
        read_trace(path)


def test_two_answers_to_which_requests_are_offline_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens,class\n9,2,offline\n9,2,interactive\n")
    with pytest.raises(SpecError, match="--offline-share"):
        LoadSpec(trace=path, offline_share=0.5).requests()


def test_offline_tenant_of_whom_no_request_is_is_named(trace: Path) -> None:
    with pytest.raises(SpecError, match="--offline-tenants has 'nobody'"):
        LoadSpec(trace=trace, offline_tenants=("0", "nobody")).requests()


# ------------------------------------------------------------------------------------------------------- the pods


def test_interactive_work_starts_before_offline_work_that_came_with_it(
    play: Play, burst: Burst, limits_of: LimitsOf
) -> None:
    outcome = play(mixed(burst(40)), limits=limits_of(max_num_seqs=2))
    assert {entry.end for entry in outcome.ledger.entries} == {End.FINISHED}
    assert last_start_s(of(outcome, INTERACTIVE)) < last_start_s(of(outcome, OFFLINE)) / 1.5


def test_guard_that_pauses_offline_work_holds_it_back_and_lets_it_in_afterwards(
    play: Play, burst: Burst, limits_of: LimitsOf
) -> None:
    """Twice what the pod does, a quarter of it offline; then a trickle, in which everything comes to its end."""
    busy = mixed(burst(4500, gap_s=1 / 75), every=4)
    calm = [replace(one, number=one.number + 4500, arrival_s=one.arrival_s + 60) for one in burst(100, gap_s=1.0)]
    limits = limits_of(max_num_seqs=8, waiting_timeout_milliseconds=600_000, max_queued_requests=65536)
    guard = GuardConfig({Line.TTFT: 300.0})
    outcome = play([*busy, *calm], limits=limits, guard=guard)
    assert outcome.guard_log is not None
    moves = {move.reason.rpartition(": ")[2]: move.time_s for move in reversed(outcome.guard_log.moves)}
    paused_s = moves[Step.PAUSE_OFFLINE]
    started_s = {
        request_class: [entry.first_scheduled_s for entry in of(outcome, request_class) if entry.first_scheduled_s]
        for request_class in RequestClass
    }
    window = (paused_s + 1, paused_s + 9)
    assert not [start_s for start_s in started_s[OFFLINE] if window[0] < start_s < window[1]]
    assert [start_s for start_s in started_s[INTERACTIVE] if window[0] < start_s < window[1]]
    assert {entry.end for entry in of(outcome, OFFLINE)} <= {End.FINISHED, End.REJECTED}
    assert outcome.guard_log.level == 0


def test_lower_priority_starts_earlier(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    requests = [replace(one, priority=-1 if one.number >= 10 else 0) for one in burst(20)]
    outcome = play(requests, limits=limits_of(max_num_seqs=1))
    starts = [(entry.first_scheduled_s or 0.0, entry.request.priority) for entry in outcome.ledger.entries]
    assert [priority for _, priority in sorted(starts)] == [-1] * 10 + [0] * 10


def test_request_ends_at_its_deadline_and_the_guard_hears_nothing_of_it(
    play: Play, burst: Burst, limits_of: LimitsOf
) -> None:
    (late,) = (replace(one, within_s=0.5) for one in burst(1, output=1000))
    outcome = play([late], guard=GuardConfig({Line.REJECTS: 1.0}))
    (entry,) = outcome.ledger.entries
    assert (entry.end, entry.reason) == (End.TIMEOUT, Rejection.DEADLINE_EXCEEDED)
    assert entry.ended_s == pytest.approx(0.5, abs=0.02)
    assert build_report(outcome.ledger, Slo(), 1.0)["all"]["ends"] == {"timeout/deadline_exceeded": 1}


def test_door_refuses_a_deadline_that_can_not_be_met(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    requests = [replace(one, within_s=0.3) for one in burst(300, prompt=100, gap_s=0.02)]
    outcome = play(requests, limits=limits_of(max_num_seqs=1))
    assert Rejection.DEADLINE_UNREACHABLE in {entry.reason for entry in outcome.ledger.entries}


# ----------------------------------------------------------------------------------------------------- the report


def test_report_has_each_class_by_itself_and_both_make_up_all(play: Play, burst: Burst) -> None:
    report = build_report(play(mixed(burst(30, gap_s=0.01), every=3)).ledger, Slo(), 2.0)
    classes = report["classes"]
    assert {name: figures["num_requests"] for name, figures in classes.items()} == {"interactive": 20, "offline": 10}
    for key in ("output_tokens", "num_requests"):
        assert sum(figures[key] for figures in classes.values()) == report["all"][key]
    for name in ("ttft", "itl", "e2e"):
        num_samples = [figures[name]["num_samples"] for figures in classes.values()]
        assert sum(num_samples) == report["all"][name]["num_samples"]


def test_gaps_of_a_tenant_are_those_of_both_its_classes(play: Play, burst: Burst) -> None:
    requests = mixed([replace(one, tenant="ab"[one.number % 4 // 2]) for one in burst(40, gap_s=0.01)])
    report = build_report(play(requests).ledger, Slo(), 2.0)
    assert [report["tenants"][name]["itl"]["num_samples"] for name in "ab"] == [80, 80]
    assert [report["classes"][name]["itl"]["num_samples"] for name in RequestClass] == [80, 80]


@pytest.fixture
def simulate(data: Path) -> list[str]:
    load = ["--arrivals", "poisson:rate=5", "--lengths", "lognormal:prompt=100,output=20", "--duration", "20"]
    return ["simulate", *load, "--costs", str(data / "costs_8b_roofline.json")]


def test_command_tells_of_both_classes_and_the_same_each_time(simulate: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    text = tmp_path / "report.md"
    for path in paths:
        assert main([*simulate, "--offline-share", "0.4", "--json", str(path), "--markdown", str(text)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert set(json.loads(paths[0].read_bytes())["classes"]) == {"interactive", "offline"}
    assert "## Classes\n\n| class |" in text.read_text()


def test_report_of_one_class_has_no_table_of_classes(simulate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(simulate) == 0
    assert "## Classes" not in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_of_latencies_has_a_line_for_each_class(simulate: list[str], tmp_path: Path) -> None:
    assert main([*simulate, "--offline-share", "0.4", "--plots", str(tmp_path)]) == 0
    drawn = (tmp_path / "latency.svg").read_text()
    assert "TTFT interactive" in drawn and "ITL offline" in drawn
