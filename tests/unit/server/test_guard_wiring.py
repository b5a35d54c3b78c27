"""What the guard needs of the server: samples, and limits in force beside the target."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_api.pod_files import GuardMode, ProtectionLines
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision
from guidevane_runtime.core.guard_steps import GuardEffect, Line
from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.messages import (
    EngineReady,
    EngineStats,
    RequestOutput,
    SamplingParams,
    SetTargets,
    StepReport,
)
from guidevane_runtime.errors import StartError
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.guard_watch import LINES, build_guard, protect, targets_of
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.live_requests import LiveRequests
from guidevane_runtime.server.metrics import RequestTimes, ServerMetrics
from guidevane_runtime.server.text.tokenizer import Tokenizer
from guidevane_runtime.server.watched_file import WatchedFile
from guidevane_runtime.settings import read_settings

STARTUP = SchedulerLimits(max_num_seqs=8)

# ------------------------------------------------------------------------------------------------------------ limits


class Halving:
    """A guard that halves max_num_seqs while it acts."""

    acts = False

    def __call__(self, target: SchedulerLimits) -> SchedulerLimits:
        return target.model_copy(update={"max_num_seqs": target.max_num_seqs // 2}) if self.acts else target


@pytest.fixture
def halving() -> Halving:
    return Halving()


@pytest.fixture
def keeper(halving: Halving) -> LimitsKeeper:
    made = LimitsKeeper(STARTUP, Envelope(max_num_seqs=16), lambda: 100.0, halving)
    made.engine_ready(EngineReady("b1", 8192, 100, 10, 16, "float32", "cpu", STARTUP, 1.0))
    return made


def patch(epoch: int, max_num_seqs: int) -> LimitsPatch:
    return LimitsPatch(epoch=epoch, limits=PartialLimits(max_num_seqs=max_num_seqs))


def test_a_guard_that_does_nothing_sends_nothing(keeper: LimitsKeeper) -> None:
    assert keeper.follow_guard() is None


def test_limits_that_the_engine_fitted_to_its_model_are_in_force(halving: Halving) -> None:
    keeper = LimitsKeeper(STARTUP, Envelope(), lambda: 100.0, halving)
    fitted = STARTUP.model_copy(update={"max_model_len": 512, "max_prompt_tokens": 512, "max_output_tokens": 512})
    keeper.engine_ready(EngineReady("b1", 512, 100, 10, 16, "float32", "cpu", fitted, 1.0))
    assert keeper.in_force == fitted
    assert keeper.follow_guard() is None


def test_the_guard_moves_what_is_in_force_and_not_the_target(keeper: LimitsKeeper, halving: Halving) -> None:
    halving.acts = True
    command = keeper.follow_guard()
    assert command is not None and command.limits.max_num_seqs == keeper.in_force.max_num_seqs == 4
    assert (keeper.target, keeper.epoch, keeper.startup) == (STARTUP, 0, STARTUP)
    assert keeper.follow_guard() is None
    halving.acts = False
    back = keeper.follow_guard()
    assert back is not None and back.limits == STARTUP and back.epoch > command.epoch


def test_a_patch_while_the_guard_acts_sets_the_target_and_is_guarded(keeper: LimitsKeeper, halving: Halving) -> None:
    halving.acts = True
    guarded, command = keeper.follow_guard(), keeper.change(patch(7, 6))
    assert guarded and command and command.epoch > guarded.epoch
    assert (keeper.target.max_num_seqs, command.limits.max_num_seqs) == (6, 3)
    assert keeper.follow_guard() is None


# ----------------------------------------------------------------------------------------------------------- samples


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics(CollectorRegistry(), "m", 8192)


@pytest.fixture
def samples(metrics: ServerMetrics) -> list[tuple[Line, float]]:
    heard: list[tuple[Line, float]] = []
    metrics.on_sample = lambda line, value: heard.append((line, round(value, 3)))
    return heard


def test_the_latencies_of_a_request_are_samples_in_ms(
    metrics: ServerMetrics, samples: list[tuple[Line, float]], tokenizer: Tokenizer
) -> None:
    choice, times = Choice(0, (1, 2), SamplingParams(max_tokens=9, seed=1), tokenizer), RequestTimes(arrival_s=10.0)
    for now_s in (12.5, 12.75):
        metrics.output_arrived(times, RequestOutput("r", (5,), first_scheduled_s=11.0), choice, 1, now_s)
    assert samples == [(Line.QUEUE_WAIT, 1000.0), (Line.TTFT, 2500.0), (Line.ITL, 250.0)]


def test_kv_use_is_a_sample_of_every_report(metrics: ServerMetrics, samples: list[tuple[Line, float]]) -> None:
    metrics.step(StepReport(1.0, stats=EngineStats(num_blocks_total=50, num_blocks_used=10)))
    metrics.step(StepReport(2.0))
    assert samples == [(Line.KV_USE, 20.0)]


def test_only_refusals_that_tell_of_load_count_as_rejects(
    metrics: ServerMetrics, samples: list[tuple[Line, float]]
) -> None:
    for reason in Rejection:
        metrics.rejected(reason)
    metrics.request_accepted(5, 5)
    assert samples == [(Line.REJECTS, 100.0)] * 4 + [(Line.REJECTS, 0.0)]


def test_level_and_lines_are_exported_from_the_start(metrics: ServerMetrics) -> None:
    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    assert value("guidevane_guard_level") == 0
    assert {value("guidevane_guard_line_breached", line=str(line)) for line in Line} == {0}
    decision = GuardDecision(2, Line.ITL, frozenset({Line.ITL, Line.REJECTS}), GuardEffect(STARTUP))
    metrics.guard_ticked(decision)
    assert value("guidevane_guard_level") == 2
    breached = {line for line in Line if value("guidevane_guard_line_breached", line=str(line))}
    assert breached == {Line.ITL, Line.REJECTS}


# ------------------------------------------------------------------------------------------------------------- flags


def guard_of(*flags: str) -> GuardConfig | None:
    guard = build_guard(read_settings(["--model", "m", *flags], {}).protection, None)
    return guard.config if guard else None


def test_without_a_line_the_guard_is_off() -> None:
    assert guard_of() is None


def test_a_line_turns_the_guard_on() -> None:
    config = guard_of("--slo-ttft-p95-ms", "1500", "--slo-itl-p95-ms", "120")
    assert config is not None and not config.dry_run
    assert config.lines == {Line.TTFT: 1500, Line.ITL: 120}


@pytest.mark.parametrize(("mode", "is_dry"), [("on", False), ("dry-run", True)])
def test_the_mode_is_a_flag(mode: str, is_dry: bool) -> None:
    flags = ["--guard", mode, "--slo-kv-cache-utilization-max-percent", "88"]
    flags += ["--slo-queue-wait-p95-ms", "500", "--slo-admission-reject-rate-max-percent", "1"]
    config = guard_of(*flags)
    assert config is not None and config.dry_run == is_dry
    assert config.lines == {Line.KV_USE: 88, Line.QUEUE_WAIT: 500, Line.REJECTS: 1}


def test_off_is_off_with_lines_too() -> None:
    assert guard_of("--guard", "off", "--slo-itl-p95-ms", "120") is None


@pytest.mark.parametrize(
    ("flags", "target_s"),
    [
        (["--slo-itl-p95-ms", "120"], 0.12),
        (["--slo-itl-p95-ms", "120", "--guard", "dry-run"], None),
        (["--slo-ttft-p95-ms", "1500"], None),
    ],
)
def test_steps_have_a_target_where_the_guard_may_act_on_the_itl_line(flags: list[str], target_s: float | None) -> None:
    guard = build_guard(read_settings(["--model", "m", *flags], {}).protection, None)
    assert guard is not None and targets_of(guard) == SetTargets(target_s)


def test_a_guard_that_stands_down_leaves_steps_without_a_target() -> None:
    guard = Guard(GuardConfig({Line.ITL: 120.0}))
    protect(guard, ProtectionLines(itl_p95_milliseconds=120, mode=GuardMode.OFF))
    assert targets_of(guard) == SetTargets(None)


def test_a_guard_without_a_line_stops_the_start() -> None:
    with pytest.raises(StartError, match="no line to protect; give one, for example --slo-itl-p95-ms 120"):
        read_settings(["--model", "m", "--guard", "on"], {})


# -------------------------------------------------------------------------------------------------------------- file


@pytest.fixture
def slo_file(tmp_path: Path) -> Path:
    file = tmp_path / "slo.json"
    file.write_text('{"mode": "on", "itlP95Milliseconds": 120}')
    return file


def watched(file: Path) -> WatchedFile[ProtectionLines]:
    return WatchedFile(file, "--slo-file", ProtectionLines)


@pytest.mark.parametrize("flags", [("--guard", "off"), ("--slo-itl-p95-ms", "120")])
def test_lines_from_a_file_and_from_flags_stop_the_start(slo_file: Path, flags: tuple[str, str]) -> None:
    with pytest.raises(StartError, match=r"slo.json; leave out --guard and --slo-\*, or leave out the file"):
        read_settings(["--model", "m", "--slo-file", str(slo_file), *flags], {})


def test_the_lines_of_a_file_turn_the_guard_on(slo_file: Path) -> None:
    guard = build_guard(ProtectionLines(), watched(slo_file))
    assert guard is not None and guard.config.lines == {Line.ITL: 120.0}


def test_a_file_that_says_off_leaves_a_guard_that_it_can_switch_on(slo_file: Path) -> None:
    slo_file.write_text('{"mode": "off", "itlP95Milliseconds": 120}')
    file = watched(slo_file)
    guard = build_guard(ProtectionLines(), file)
    assert guard is not None and guard.config.lines == {}
    slo_file.write_text('{"mode": "dry-run", "itlP95Milliseconds": 90, "kvCacheUtilizationMaxPercent": 88}')
    changed = file.changed()
    assert changed is not None
    protect(guard, changed)
    assert (guard.config.lines, guard.config.dry_run) == ({Line.ITL: 90.0, Line.KV_USE: 88.0}, True)


def test_every_line_that_a_file_can_name_is_guarded() -> None:
    assert {*LINES} == {*ProtectionLines.model_fields} - {"mode"}
    assert {*LINES.values()} == {*Line}


# ---------------------------------------------------------------------------------------------------- live requests


def test_a_request_is_found_under_both_of_its_ids_until_it_ends() -> None:
    live = LiveRequests()
    for request_id, client_id in (("e1", "c1"), ("e2", "c2"), ("e3", "c1")):
        live.add(request_id, client_id, Standing())
    assert live.named("c1", 10) == ["e1", "e3"] and live.named("c1", 1) == ["e1"]
    assert live.named("e2", 10) == ["e2"] and live.origin("e2") == ("c2", Standing())
    live.forget("e1")
    live.forget("e1")
    assert (live.named("c1", 10), live.oldest(1), len(live), live.origin("e1")) == (["e3"], ["e2"], 2, None)
