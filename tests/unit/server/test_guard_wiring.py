"""What the guard needs of the server: samples, a door that refuses long prompts, limits in force beside the target."""

import pytest
from prometheus_client import CollectorRegistry

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_runtime.core.guard import GuardDecision
from guidevane_runtime.core.guard_steps import GuardEffect, Line
from guidevane_runtime.core.messages import EngineReady, EngineStats, RequestOutput, SamplingParams, StepReport
from guidevane_runtime.errors import StartError
from guidevane_runtime.server.admission import AdmissionGate, Capacity, Refused, Rejection
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.live_requests import LiveRequests
from guidevane_runtime.server.metrics import RequestTimes, ServerMetrics
from guidevane_runtime.server.text.tokenizer import Tokenizer
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


# -------------------------------------------------------------------------------------------------------------- door


@pytest.fixture
def gate() -> AdmissionGate:
    limits = SchedulerLimits(long_context_threshold_tokens=100)
    made = AdmissionGate(limits=lambda: limits, clock=lambda: 0.0)
    made.capacity = Capacity(num_blocks=1000, block_size=16)
    made.enter(1)
    return made


def test_long_prompts_are_refused_while_the_guard_says_so(gate: AdmissionGate) -> None:
    gate.long_context_pause_s = 30.0
    with pytest.raises(Refused, match="the prompt has 101 tokens") as raised:
        gate.charge(gate.enter(2), [5, 101])
    assert (raised.value.reason, raised.value.status) == (Rejection.LONG_CONTEXT, 503)
    assert (raised.value.code, raised.value.retry_after_s) == ("long_context", 30)


def test_short_prompts_come_in_while_long_ones_are_refused(gate: AdmissionGate) -> None:
    gate.long_context_pause_s = 30.0
    gate.charge(gate.enter(1), [100])


def test_long_prompts_come_in_when_the_guard_is_calm(gate: AdmissionGate) -> None:
    gate.charge(gate.enter(1), [5000])


def test_a_long_prompt_that_is_alone_is_never_locked_out() -> None:
    gate = AdmissionGate(limits=lambda: SchedulerLimits(long_context_threshold_tokens=100), clock=lambda: 0.0)
    gate.capacity = Capacity(num_blocks=1000, block_size=16)
    gate.long_context_pause_s = 30.0
    gate.charge(gate.enter(2), [5000, 5000])


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


def test_without_a_line_the_guard_is_off() -> None:
    assert read_settings(["--model", "m"], {}).guard_config is None


def test_a_line_turns_the_guard_on() -> None:
    settings = read_settings(["--model", "m", "--slo-ttft-p95-ms", "1500", "--slo-itl-p95-ms", "120"], {})
    assert settings.guard_config is not None
    assert settings.guard_config.lines == {Line.TTFT: 1500, Line.ITL: 120}
    assert not settings.guard_config.dry_run


@pytest.mark.parametrize(("mode", "is_dry"), [("on", False), ("dry-run", True)])
def test_the_mode_is_a_flag(mode: str, is_dry: bool) -> None:
    flags = ["--model", "m", "--guard", mode, "--slo-kv-cache-utilization-max-percent", "88"]
    flags += ["--slo-queue-wait-p95-ms", "500", "--slo-admission-reject-rate-max-percent", "1"]
    config = read_settings(flags, {}).guard_config
    assert config is not None and config.dry_run == is_dry
    assert config.lines == {Line.KV_USE: 88, Line.QUEUE_WAIT: 500, Line.REJECTS: 1}


def test_off_is_off_with_lines_too() -> None:
    assert read_settings(["--model", "m", "--guard", "off", "--slo-itl-p95-ms", "120"], {}).guard_config is None


@pytest.mark.parametrize(
    ("flags", "target_s"),
    [
        (["--slo-itl-p95-ms", "120"], 0.12),
        (["--slo-itl-p95-ms", "120", "--guard", "dry-run"], None),
        (["--slo-ttft-p95-ms", "1500"], None),
    ],
)
def test_steps_have_a_target_where_the_guard_may_act_on_the_itl_line(flags: list[str], target_s: float | None) -> None:
    config = read_settings(["--model", "m", *flags], {}).guard_config
    assert config is not None and config.itl_target_s == target_s


def test_a_guard_without_a_line_stops_the_start() -> None:
    with pytest.raises(StartError, match="no line to protect; give one, for example --slo-itl-p95-ms 120"):
        read_settings(["--model", "m", "--guard", "on"], {})


# ---------------------------------------------------------------------------------------------------- live requests


def test_a_request_is_found_under_both_of_its_ids_until_it_ends() -> None:
    live = LiveRequests()
    for request_id, client_id in (("e1", "c1"), ("e2", "c2"), ("e3", "c1")):
        live.add(request_id, client_id)
    assert live.named("c1", 10) == ["e1", "e3"] and live.named("c1", 1) == ["e1"]
    assert live.named("e2", 10) == ["e2"] and live.client_id("e2") == "c2"
    live.forget("e1")
    live.forget("e1")
    assert (live.named("c1", 10), live.oldest(1), len(live), live.client_id("e1")) == (["e3"], ["e2"], 2, "")
