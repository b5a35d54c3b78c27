from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import PartialLimits, SchedulerLimits
from guidevane_bench.errors import InputError
from guidevane_bench.simulator.control import FleetSample, LimitsOrder, LimitsScript, ScriptLine, read_script
from guidevane_bench.simulator.faults import Fault, FaultKind
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.workload.request import LoadRequest

Play = Callable[..., Outcome]
Burst = Callable[..., list[LoadRequest]]
LimitsOf = Callable[..., SchedulerLimits]


@dataclass
class ScriptedController:
    """Keeps what it sees; answers from a list, then with nothing."""

    orders: list[LimitsOrder | None] = field(default_factory=list)
    seen: list[FleetSample] = field(default_factory=list)

    def decide(self, sample: FleetSample) -> LimitsOrder | None:
        self.seen.append(sample)
        return self.orders.pop(0) if self.orders else None


def script_of(folder: Path, text: str, limits: SchedulerLimits) -> LimitsScript:
    path = folder / "script.jsonl"
    path.write_text(text)
    return read_script(path, limits)


def test_script_is_a_function_of_time_and_lines_add_up(tmp_path: Path, limits_of: LimitsOf) -> None:
    late = '{"at_s": 60, "limits": {"maxNumSeqs": 4}, "mode": "preempt"}'
    text = late + '\n{"at_s": 30, "limits": {"prefillChunkSize": 64}}\n'
    script = script_of(tmp_path, text, limits_of(max_num_seqs=8))
    seen = [script.order_at(at_s) for at_s in (0, 29.9, 30, 60)]
    assert [order.limits.max_num_seqs for order in seen] == [8, 8, 8, 4]
    assert [order.limits.prefill_chunk_size for order in seen] == [2048, 2048, 64, 64]
    assert seen[-1].mode is ShrinkMode.PREEMPT
    assert script.times == (30, 60)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        '{"limits": {}}',
        '{"at_s": 1, "limits": {"speed": 1}}',
        '{"at_s": 1, "limits": {}, "mode": "soon"}',
        '{"at_s": 1, "limits": {"maxNumBatchedTokens": 16}}',
    ],
)
def test_script_that_makes_no_sense_is_refused(tmp_path: Path, limits_of: LimitsOf, text: str) -> None:
    with pytest.raises(InputError):
        script_of(tmp_path, text, limits_of())


def test_script_changes_the_limits_of_running_pods_at_its_time(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    limits = limits_of(max_num_seqs=1)
    script = LimitsScript(limits, [ScriptLine(1.0, PartialLimits(max_num_seqs=4))])
    outcome = play(burst(4, output=200), limits=limits, script=script)
    starts = [entry.first_scheduled_s for entry in outcome.ledger.entries]
    assert starts[0] == 0
    assert starts[1:] == pytest.approx([1.0] * 3, abs=0.02)


def test_controller_sees_latencies_of_its_interval_and_moves_limits(
    play: Play, burst: Burst, limits_of: LimitsOf
) -> None:
    limits = limits_of(max_num_seqs=1)
    controller = ScriptedController([LimitsOrder(limits_of(max_num_seqs=4))])
    outcome = play(burst(4, output=200), limits=limits, controller=controller, scrape_interval_s=1.0)
    first, second = controller.seen[:2]
    (pod,) = first.pods
    assert pod is not None
    assert (pod.stats.num_running, pod.stats.num_waiting) == (1, 3)
    assert pod.meter.ttft.num_samples == 1
    assert pod.meter.itl.quantile(0.5) == pytest.approx(0.011, rel=0.01)
    assert (first.limits.max_num_seqs, second.limits.max_num_seqs) == (1, 4)
    assert second.pods[0] is not None
    assert second.pods[0].meter.ttft.num_samples == 3
    assert outcome.ledger.entries[3].first_scheduled_s == pytest.approx(1.0, abs=0.02)


def test_pod_whose_metrics_are_missing_is_unknown_and_not_zero(play: Play, burst: Burst) -> None:
    gap = Fault(0.5, 0, FaultKind.METRICS_GAP, 1.0)
    controller = ScriptedController()
    play(burst(2, output=300), num_pods=2, faults=(gap,), controller=controller, scrape_interval_s=1.0)
    known = [[pod is not None for pod in sample.pods] for sample in controller.seen]
    assert known[:2] == [[False, True], [True, True]]
    after = controller.seen[1].pods[0]
    assert after is not None
    assert after.meter.ttft.num_samples == 1


def test_overlapping_gaps_end_with_the_last(play: Play, burst: Burst) -> None:
    gaps = tuple(Fault(0.5, 0, FaultKind.METRICS_GAP, duration_s) for duration_s in (1.0, 2.0))
    controller = ScriptedController()
    play(burst(1, output=400), faults=gaps, controller=controller, scrape_interval_s=1.0)
    assert [sample.pods[0] is None for sample in controller.seen[:3]] == [True, True, False]


def test_restarted_pod_has_the_limits_of_the_hour(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    controller = ScriptedController([LimitsOrder(limits_of(max_num_seqs=1))])
    fault = Fault(1.5, 0, FaultKind.POD_DEATH, 0.1)
    requests = [LoadRequest(0, 0.0, 10, 500), *(LoadRequest(n, 2.0, 10, 50) for n in (1, 2))]
    outcome = play(requests, controller=controller, faults=(fault,), scrape_interval_s=1.0)
    second, third = outcome.ledger.entries[1:]
    assert third.first_scheduled_s is not None
    assert second.ended_s is not None
    assert third.first_scheduled_s >= second.ended_s
