"""The engine's loop in virtual time: a list for a mailbox, a clock that its waits move."""

from typing import Any

import pytest

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    Abort,
    AbortCause,
    FinishReason,
    SamplingParams,
    SetLimits,
    SetTargets,
    Shutdown,
    StepReport,
    Submit,
)
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.loop import EngineLoop


class ListMailbox:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.commands: list[Any] = []
        self.reports: list[StepReport] = []
        self.waits_s: list[float] = []

    def take(self, timeout_s: float) -> list[Any]:
        taken, self.commands = self.commands, []
        self.waits_s.append(timeout_s)
        if not taken:
            self.now_s += timeout_s
        return taken

    def put(self, message: Any) -> None:
        self.reports.append(message)


class SlowRunner(FakeRunner):
    """Every step takes 50 ms."""

    def __init__(self, mailbox: ListMailbox) -> None:
        super().__init__(50, 4, 1000)
        self._mailbox = mailbox

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self._mailbox.now_s += 0.05
        return super().execute(batch)


@pytest.fixture
def mailbox() -> ListMailbox:
    return ListMailbox()


@pytest.fixture
def loop(mailbox: ListMailbox) -> EngineLoop:
    scheduler = Scheduler(BlockPool(50, 4), SchedulerLimits(), max_model_len=200, eos_token_ids=frozenset())
    return EngineLoop(mailbox, scheduler, SlowRunner(mailbox), lambda: mailbox.now_s)


def request(name: str, num_prompt_tokens: int = 3, max_tokens: int = 3) -> Submit:
    prompt = tuple(range(num_prompt_tokens))
    return Submit(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0), arrival_s=0.0)


def test_each_step_is_one_report_with_its_tokens_and_its_time(loop: EngineLoop, mailbox: ListMailbox) -> None:
    mailbox.commands = [request("a"), request("b", 5)]
    loop.run_once()
    loop.run_once()
    first, second = mailbox.reports
    assert [(r.num_prefill_tokens, r.num_decode_tokens, round(r.step_s, 3)) for r in (first, second)] == [
        (8, 0, 0.05),
        (0, 2, 0.05),
    ]
    assert [len(output.new_token_ids) for output in first.outputs] == [1, 1]
    assert (first.stats.num_running, first.stats.num_steps, second.stats.num_steps) == (2, 1, 2)


def test_a_busy_engine_never_waits_for_mail(loop: EngineLoop, mailbox: ListMailbox) -> None:
    mailbox.commands = [request("a", max_tokens=10)]
    for _ in range(5):
        loop.run_once()
    assert mailbox.waits_s == [0.0] * 5


def test_an_idle_engine_waits_for_mail_and_beats_once_a_second(loop: EngineLoop, mailbox: ListMailbox) -> None:
    for _ in range(4):
        loop.run_once()
    assert mailbox.waits_s == [0.0, 1.0, 1.0, 1.0]
    assert [report.time_s for report in mailbox.reports] == [0.0, 1.0, 2.0, 3.0]
    assert not any(report.outputs or report.step_s for report in mailbox.reports)


def test_an_abort_in_the_mail_frees_the_blocks_in_that_iteration(loop: EngineLoop, mailbox: ListMailbox) -> None:
    mailbox.commands = [request("a", max_tokens=100)]
    loop.run_once()
    mailbox.commands = [Abort("a", AbortCause.CLIENT_GONE)]
    loop.run_once()
    assert mailbox.reports[-1].stats.num_blocks_used == 0
    assert [output.finish_reason for output in mailbox.reports[-1].outputs] == [FinishReason.ABORT]


def test_submit_and_abort_in_one_mail_never_run(loop: EngineLoop, mailbox: ListMailbox) -> None:
    """A3, A18"""
    mailbox.commands = [request("a"), Abort("a", AbortCause.CLIENT_GONE)]
    loop.run_once()
    assert mailbox.reports[-1].stats.num_steps == 0 and len(mailbox.reports[-1].outputs) == 1


def test_limits_are_reported_at_once_even_when_idle_and_once_only(loop: EngineLoop, mailbox: ListMailbox) -> None:
    loop.run_once()
    limits = SchedulerLimits(max_num_seqs=5)
    mailbox.commands = [SetLimits(limits, 4, LimitsSource.SPEC)]
    loop.run_once()
    loop.run_once()
    assert [(report.epoch, report.effective) for report in mailbox.reports] == [
        (0, SchedulerLimits()),
        (4, limits),
        (4, None),
    ]


def test_stale_limits_leave_the_epoch(loop: EngineLoop, mailbox: ListMailbox) -> None:
    mailbox.commands = [
        SetLimits(SchedulerLimits(max_num_seqs=5), 4, LimitsSource.SPEC),
        SetLimits(SchedulerLimits(max_num_seqs=9), 3, LimitsSource.SPEC),
    ]
    loop.run_once()
    assert mailbox.reports[-1].epoch == 4
    assert mailbox.reports[-1].effective == SchedulerLimits(max_num_seqs=5)


def test_shutdown_aborts_what_is_left_and_ends_the_loop(loop: EngineLoop, mailbox: ListMailbox) -> None:
    mailbox.commands = [request("a", max_tokens=100)]
    loop.run_once()
    mailbox.commands = [request("b"), Shutdown()]
    loop.run()
    assert {o.request_id: o.finish_reason for o in mailbox.reports[-1].outputs} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ABORT,
    }
    assert mailbox.reports[-1].stats.num_blocks_used == 0


class LaboriousRunner(SlowRunner):
    """Every token takes another millisecond."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self._mailbox.now_s += 0.001 * batch.num_tokens
        return super().execute(batch)


def test_steps_are_measured_and_prefill_is_cut_to_the_target(mailbox: ListMailbox) -> None:
    """No step is as short as the target, so beside a stream a prompt gets the least there is."""
    scheduler = Scheduler(BlockPool(50, 4), SchedulerLimits(), max_model_len=200, eos_token_ids=frozenset())
    loop = EngineLoop(mailbox, scheduler, LaboriousRunner(mailbox), lambda: mailbox.now_s)
    mailbox.commands = [SetTargets(0.02)]
    for number in range(40):
        mailbox.commands += [request(f"w{number}", 3 + number)]
        loop.run_once()
    while scheduler.has_work:
        loop.run_once()
    mailbox.commands = [request("stream", max_tokens=100)]
    loop.run_once()
    mailbox.commands = [request("prompt", 60)]
    loop.run_once()
    loop.run_once()
    assert [report.num_prefill_tokens for report in mailbox.reports[-2:]] == [16, 16]
