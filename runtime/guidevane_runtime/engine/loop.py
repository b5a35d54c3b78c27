"""The engine's loop: take the mail, plan, run, apply, report. One thread, and nothing else changes engine state."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import (
    Abort,
    AbortCause,
    Command,
    Explain,
    Explained,
    SetLimits,
    SetTargets,
    SetTenants,
    Shutdown,
    StepReport,
    Submit,
)
from guidevane_runtime.core.plan import ModelRunner, ScheduledBatch, load_of
from guidevane_runtime.core.scheduler import Scheduler

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""An idle engine reports this often, so that silence means trouble."""


class CommandBox(Protocol):
    """Where commands come from and reports go to."""

    def take(self, timeout_s: float) -> list[Any]: ...

    def put(self, message: object) -> None: ...


class EngineLoop:
    """Runs until Shutdown, until the mailbox closes (MailboxClosedError), or until the runner raises."""

    def __init__(
        self, mailbox: CommandBox, scheduler: Scheduler, runner: ModelRunner, clock: Callable[[], float]
    ) -> None:
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._last_report: StepReport | None = None
        self._last_effective: object = None
        self._is_stopping = False

    def run(self) -> None:
        while not self._is_stopping:
            self.run_once()

    def run_once(self) -> None:
        """One iteration. An idle engine waits in it for mail, until its next heartbeat at most."""
        for command in self._mailbox.take(self._patience_s()):
            self._obey(command)
        started_s = self._clock()
        batch = self._scheduler.schedule(started_s)
        if batch.seqs:
            self._scheduler.apply(batch, self._runner.execute(batch))
        self._report(batch, started_s)

    def _patience_s(self) -> float:
        if self._scheduler.has_work or self._last_report is None:
            return 0.0
        return max(0.0, self._last_report.time_s + HEARTBEAT_S - self._clock())

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._scheduler.submit(command)
            case Abort():
                self._scheduler.abort(command.request_id, command.cause)
            case SetLimits():
                self._set_limits(command)
            case SetTenants():
                self._set_tenants(command)
            case SetTargets():
                self._scheduler.set_targets(command)
                logger.info("targets changed", extra={"itl_s": command.itl_s})
            case Explain():
                explanations = explain(self._scheduler, command.request_ids, self._clock())
                self._mailbox.put(Explained(command.query_id, explanations))
            case Shutdown():
                self._is_stopping = True
                self._scheduler.abort_all(AbortCause.SHUTDOWN)

    def _set_limits(self, command: SetLimits) -> None:
        old = self._scheduler.limits.target.model_dump()
        if not self._scheduler.set_limits(command):
            logger.info("stale limits ignored", extra={"epoch": command.epoch})
            return
        new = command.limits.model_dump()
        changes = {name: f"{old[name]} -> {new[name]}" for name in new if new[name] != old[name]}
        logger.info("limits changed", extra={"epoch": command.epoch, "source": str(command.source), **changes})

    def _set_tenants(self, command: SetTenants) -> None:
        is_newer = self._scheduler.set_tenants(command)
        logger.info("tenants changed" if is_newer else "stale tenants ignored", extra={"epoch": command.epoch})

    def _report(self, batch: ScheduledBatch, started_s: float) -> None:
        """One report per step; an idle engine reports what changed, and its heartbeat."""
        now_s = self._clock()
        outputs = self._scheduler.take_outputs()
        if not (batch.seqs or outputs or self._is_report_due(now_s)):
            return
        load, step_s = load_of(batch), now_s - started_s if batch.seqs else 0.0
        self._scheduler.note_step_time(load, step_s)
        report = StepReport(
            time_s=now_s,
            outputs=outputs,
            stats=self._scheduler.stats(now_s),
            step_s=step_s,
            num_prefill_tokens=load.num_prefill_tokens,
            num_decode_tokens=load.num_decodes,
            epoch=batch.epoch,
            effective=self._changed_effective(),
        )
        self._mailbox.put(report)
        self._last_report = report

    def _is_report_due(self, now_s: float) -> bool:
        last = self._last_report
        return last is None or last.epoch != self._scheduler.limits.epoch or now_s >= last.time_s + HEARTBEAT_S

    def _changed_effective(self) -> Any:
        effective = self._scheduler.effective_limits
        if effective == self._last_effective:
            return None
        self._last_effective = effective
        return effective
