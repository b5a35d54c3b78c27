"""The recorder drives the real engine loop. With a model that takes the cost model's time, it sees the simulation."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.fit import fit_costs
from guidevane_bench.recorder import Clock, MeasuredRunner, ReplayMailbox
from guidevane_bench.simulator.costs import CostModel, load_of
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.loop import EngineLoop


@dataclass
class Time:
    """Passes when somebody waits or computes."""

    now_s: float = 1000.0

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


class CostlyRunner:
    """The fake model, taking as long as a cost model says."""

    def __init__(self, runner: FakeRunner, costs: CostModel, time: Time) -> None:
        self._runner, self._costs, self._time = runner, costs, time

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self._time.pass_by(self._costs.seconds(load_of(batch)))
        return self._runner.execute(batch)


def recorded(requests: list[LoadRequest], costs: CostModel, limits: SchedulerLimits) -> ReplayMailbox:
    time = Time()
    scheduler = Scheduler(BlockPool(1000, 16), limits, max_model_len=4096, eos_token_ids=frozenset())
    runner = MeasuredRunner(CostlyRunner(FakeRunner(1000, 16, 50), costs, time))
    mailbox = ReplayMailbox(requests, Clock(lambda: time.now_s, time.pass_by), runner, scheduler, 50)
    EngineLoop(mailbox, scheduler, runner, lambda: time.now_s).run()
    mailbox.ledger.ensure_all_ended()
    return mailbox


@pytest.fixture
def requests() -> list[LoadRequest]:
    return [LoadRequest(n, 0.03 * n + 2.0 * (n > 20), 5 + 13 * n % 90, 1 + 7 * n % 40, "ab"[n % 2]) for n in range(40)]


def test_recording_of_a_model_with_known_costs_equals_its_simulation(
    requests: list[LoadRequest],
    costs: CostModel,
    play: Callable[..., Outcome],
    limits_of: Callable[..., SchedulerLimits],
) -> None:
    limits = limits_of(max_num_seqs=6, prefill_chunk_size=32)
    measured, simulated = recorded(requests, costs, limits), play(requests, limits=limits)
    pairs = list(zip(measured.ledger.entries, simulated.ledger.entries, strict=True))
    assert len(pairs) == 40
    for ours, theirs in pairs:
        assert ours.ttft_s == pytest.approx(theirs.ttft_s, abs=1e-6)
        assert ours.queue_wait_s == pytest.approx(theirs.queue_wait_s, abs=1e-6)
        assert ours.e2e_s == pytest.approx(theirs.e2e_s, abs=1e-6)
        assert (ours.num_tokens, ours.end) == (theirs.num_tokens, theirs.end)
    assert len(measured.steps) == simulated.num_steps


def test_recorded_steps_give_back_the_costs_that_made_them(
    requests: list[LoadRequest], costs: CostModel, limits_of: Callable[..., SchedulerLimits]
) -> None:
    fit = fit_costs(recorded(requests, costs, limits_of(max_num_seqs=6)).steps)
    assert fit.costs.step_s == pytest.approx(0.010, rel=1e-3)
    assert fit.costs.prefill_token_s == pytest.approx(0.001, rel=1e-3)
    assert fit.costs.decode_s == pytest.approx(0.001, rel=1e-3)
