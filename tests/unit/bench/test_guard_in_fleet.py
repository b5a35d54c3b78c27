"""The guard in the simulator: I19 and L11 over whole runs, and its options and report."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.__main__ import main
from guidevane_bench.cli.options import slo_option
from guidevane_bench.report.build import Slo, build_report, to_bytes
from guidevane_bench.simulator.faults import Fault, FaultKind
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.simulator.guard_log import GuardLog
from guidevane_bench.simulator.ledger import End
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.guard import GuardConfig
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.settings import RuntimeSettings

Play = Callable[..., Outcome]
LimitsOf = Callable[..., SchedulerLimits]

OVERLOAD_S, TRICKLE_S, SETTLED_S = 150.0, 200.0, 90.0
"""Three times what the pod can do, then a tenth of it; from SETTLED_S on the guard has had its say."""
RATE, PROMPT, OUTPUT = 75.0, 20, 10
CONFIG = GuardConfig({Line.TTFT: 1500.0, Line.ITL: 120.0})


def step_load() -> list[LoadRequest]:
    """Every twentieth prompt is long."""
    gaps = [1 / RATE] * int(RATE * OVERLOAD_S) + [20 / RATE] * int(RATE / 20 * TRICKLE_S)
    requests, now_s = [], 0.0
    for number, gap_s in enumerate(gaps):
        requests.append(LoadRequest(number, now_s, PROMPT if number % 20 else 5 * PROMPT, OUTPUT))
        now_s += gap_s
    return requests


@pytest.fixture(scope="module")
def overload() -> list[LoadRequest]:
    return step_load()


@pytest.fixture
def limits(limits_of: LimitsOf) -> SchedulerLimits:
    return limits_of(max_num_seqs=8, max_queued_requests=256, long_context_threshold_tokens=50)


def log_of(outcome: Outcome) -> GuardLog:
    assert outcome.guard_log is not None
    return outcome.guard_log


def finished_settled(outcome: Outcome) -> int:
    return sum(
        entry.end is End.FINISHED and SETTLED_S <= (entry.ended_s or 0) < OVERLOAD_S for entry in outcome.ledger.entries
    )


def ttft_p95_settled_s(outcome: Outcome) -> float:
    """Of requests that came when the guard had settled."""
    values = sorted(
        entry.ttft_s
        for entry in outcome.ledger.entries
        if entry.ttft_s is not None and SETTLED_S <= entry.request.arrival_s < OVERLOAD_S
    )
    return values[int(0.95 * len(values))]


def bytes_of(outcome: Outcome) -> bytes:
    return to_bytes(build_report(outcome.ledger, Slo(), outcome.ended_s))


# --------------------------------------------------------------------------------------------------------------- I19


def test_guard_holds_the_line_under_overload_at_no_cost_of_finished_work(
    play: Play, limits: SchedulerLimits, overload: list[LoadRequest]
) -> None:
    """g = 0.95 of what the pod does without it."""
    without, with_it = play(overload, limits=limits), play(overload, limits=limits, guard=CONFIG)
    assert ttft_p95_settled_s(with_it) < ttft_p95_settled_s(without) / 3
    assert finished_settled(with_it) >= 0.95 * finished_settled(without)


def test_guard_is_back_at_normal_after_the_load_and_says_how_long_it_took(
    play: Play, limits: SchedulerLimits, overload: list[LoadRequest]
) -> None:
    log = log_of(play(overload, limits=limits, guard=CONFIG))
    top = max(level for _, level in log.highest)
    assert top >= 3
    assert (log.level, log.highest[-1][1]) == (0, 0)
    # Its window has to run empty of what was over, then one step back each t_down; the first of them has failed once,
    # so it waits for twice as long.
    assert log.recovery_s is not None
    assert log.recovery_s <= CONFIG.window_s + (top + 1) * (CONFIG.t_down_s + 1)
    # Before the trickle ends: it needs no silence.
    assert log.highest[-1][0] < OVERLOAD_S + TRICKLE_S


def test_guard_never_takes_a_step_back_sooner_than_t_down_after_another_move(
    play: Play, limits: SchedulerLimits, overload: list[LoadRequest]
) -> None:
    moves = log_of(play(overload, limits=limits, guard=CONFIG)).moves
    for before, after in pairwise(moves):
        is_back = "taken back" in after.reason
        assert after.time_s - before.time_s >= (CONFIG.t_down_s if is_back else CONFIG.t_up_s) - 1e-6


def test_guard_locks_nobody_out(play: Play, limits: SchedulerLimits, overload: list[LoadRequest]) -> None:
    """L11: in every ten seconds of overload requests finish; afterwards nobody is refused, long or short."""
    entries = play(overload, limits=limits, guard=CONFIG).ledger.entries
    finished_in = {int((entry.ended_s or 0) // 10) for entry in entries if entry.end is End.FINISHED}
    assert finished_in >= set(range(int(OVERLOAD_S // 10)))
    late = [entry for entry in entries if entry.request.arrival_s > OVERLOAD_S + 100]
    assert {entry.end for entry in late} == {End.FINISHED}
    assert any(entry.request.num_prompt_tokens > PROMPT for entry in late)


@settings(max_examples=15)
@given(
    bursts=st.lists(
        st.tuples(st.integers(1, 400), st.floats(0.001, 0.2), st.floats(0.0, 60.0)), min_size=1, max_size=4
    ),
    line_ms=st.sampled_from((50.0, 500.0, 5000.0)),
    lines=st.sets(st.sampled_from((Line.TTFT, Line.ITL, Line.QUEUE_WAIT)), min_size=1),
)
def test_whatever_comes_the_guard_ends_at_normal_and_never_swings_faster_than_t_down(
    play: Play,
    limits: SchedulerLimits,
    bursts: list[tuple[int, float, float]],
    line_ms: float,
    lines: set[Line],
) -> None:
    requests, now_s = [], 0.0
    for count, gap_s, pause_s in bursts:
        for _ in range(count):
            requests.append(LoadRequest(len(requests), now_s, PROMPT, OUTPUT))
            now_s += gap_s
        now_s += pause_s
    config = GuardConfig({**dict.fromkeys(lines, line_ms), Line.REJECTS: 5.0})
    log = log_of(play(requests, limits=limits, guard=config))
    assert log.level == 0
    for before, after in pairwise(log.moves):
        assert "taken back" not in after.reason or after.time_s - before.time_s >= config.t_down_s - 1e-6


# ----------------------------------------------------------------------------------------------------------- wiring


def test_guard_without_a_breach_changes_nothing(play: Play, limits: SchedulerLimits) -> None:
    requests = [LoadRequest(number, number * 0.5, PROMPT, OUTPUT) for number in range(100)]
    guarded = play(requests, limits=limits, guard=CONFIG)
    assert log_of(guarded).share_of_time_percent() == {0: 100.0}
    assert bytes_of(guarded) == bytes_of(play(requests, limits=limits))


def test_dry_run_tells_of_moves_and_makes_none(
    play: Play, limits: SchedulerLimits, overload: list[LoadRequest]
) -> None:
    dry = play(overload, limits=limits, guard=GuardConfig(CONFIG.lines, dry_run=True))
    assert log_of(dry).moves
    assert bytes_of(dry) == bytes_of(play(overload, limits=limits))


def test_long_prompts_are_refused_with_their_reason_while_the_guard_says_so(
    play: Play, limits: SchedulerLimits, overload: list[LoadRequest]
) -> None:
    entries = play(overload, limits=limits, guard=CONFIG).ledger.entries
    refused = [entry for entry in entries if entry.reason == Rejection.LONG_CONTEXT]
    assert refused
    assert min(entry.request.num_prompt_tokens for entry in refused) > limits.long_context_threshold_tokens


def test_guard_of_a_dead_pod_is_forgotten(play: Play, limits: SchedulerLimits, overload: list[LoadRequest]) -> None:
    death = Fault(45.0, 0, FaultKind.POD_DEATH, 5.0)
    log = log_of(play(overload[: int(RATE * 60)], limits=limits, guard=CONFIG, faults=(death,)))
    assert (45.0, 0) in log.highest
    again = [move.level for move in log.moves if move.time_s > 50]
    assert again[0] == 1


def test_same_run_gives_the_same_log(play: Play, limits: SchedulerLimits, overload: list[LoadRequest]) -> None:
    load = overload[: int(RATE * 60)]
    first, second = (log_of(play(load, limits=limits, guard=CONFIG, num_pods=2)).to_json() for _ in range(2))
    assert first == second
    assert {move["pod"] for move in first["moves"]} == {0, 1}
    assert sum(first["share_of_time_percent"].values()) == pytest.approx(100, abs=0.01)


# ---------------------------------------------------------------------------------------------------------- options


@pytest.fixture
def simulate(data: Path, trace: Path) -> list[str]:
    return ["simulate", "--trace", str(trace), "--limit", "60", "--costs", f"{data}/costs_demo_cpu.json"]


def test_lines_have_the_runtimes_names() -> None:
    names = {slo_option(line).removeprefix("--").replace("-", "_") for line in Line}
    assert len(names) == len(Line)
    assert names <= set(RuntimeSettings.model_fields)


def test_report_tells_what_the_guard_did(simulate: list[str], tmp_path: Path) -> None:
    path, text = tmp_path / "report.json", tmp_path / "report.md"
    assert main([*simulate, "--slo-ttft-p95-ms", "100", "--json", str(path), "--markdown", str(text)]) == 0
    guard = json.loads(path.read_text())["guard"]
    assert guard["lines"] == {"ttft_p95_ms": 100}
    assert guard["moves"][0]["reason"].startswith("ttft_p95_ms is ")
    assert guard["recovery_s"] > 0
    page = text.read_text()
    assert "## Guard" in page and "refusing long prompts" in page


def test_guard_that_is_off_is_not_in_the_report(simulate: list[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main([*simulate, "--slo-ttft-p95-ms", "100", "--guard", "off", "--json", str(path)]) == 0
    assert "guard" not in json.loads(path.read_text())


@pytest.mark.parametrize(
    ("extra", "named"), [(["--guard", "on"], "--slo-itl-p95-ms"), (["--slo-itl-p95-ms", "0"], "itl")]
)
def test_guard_that_makes_no_sense_ends_with_a_way_out(
    simulate: list[str], extra: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*simulate, *extra]) == 2
    assert named in capsys.readouterr().err
