"""Carries the tuner's decisions out: shows them in mode Observe, persists and pushes them in mode Auto."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from guidevane_api.admin import LimitsSource
from guidevane_api.conditions import EventReason
from guidevane_api.limits import PartialLimits
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.spec_control import GuardAction, RetuneMode
from guidevane_api.status import MAX_HISTORY, RetuneMove, RetuneState, RetuneStatus, Verdict
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.push import LimitsPusher
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.retune.decide import decide
from guidevane_operator.retune.setup import bounds_of, policy_of, targets_of
from guidevane_operator.retune.snapshot import (
    Decision,
    Direction,
    HoldReason,
    LastMove,
    Move,
    Snapshot,
    limit_field,
)
from guidevane_operator.status.build import rfc3339
from guidevane_operator.status_writer import StatusWriter

logger = logging.getLogger(__name__)

STATES = {
    HoldReason.METRICS_UNKNOWN: RetuneState.BLIND,
    HoldReason.GUARD_ACTS: RetuneState.GUARDED,
    HoldReason.SETTLING: RetuneState.SETTLING,
    HoldReason.AT_BOUND: RetuneState.INFEASIBLE,
    HoldReason.NO_REMEDY: RetuneState.INFEASIBLE,
}
"""What status calls a hold; Idle for the others."""

STEADY_MESSAGES = {
    HoldReason.WITHIN_TARGETS: "every known signal is inside its line",
    HoldReason.SETTLING: "waiting until the last change, or a restart, no longer shows in the window",
    HoldReason.TOO_FEW_SAMPLES: "too few requests in the window",
}
"""Messages without numbers, where status would else change at every look."""


@dataclass
class Tuner:
    """Takes one look at a service and moves at most one knob."""

    directory: Directory
    pusher: LimitsPusher
    recorder: EventRecorder
    writer: StatusWriter
    clock: Callable[[], float]
    """Monotonic seconds."""

    def period_s(self, key: ServiceKey) -> float:
        """spec.retune.intervalSeconds."""
        record = self.directory.get(key)
        return float(record.spec.retune.interval_seconds) if record and record.spec else 5.0

    async def look(self, key: ServiceKey) -> None:
        """Decide, and act as far as the mode lets it."""
        record = self.directory.get(key)
        if record is None or record.needs_refresh:
            return
        async with record.lock:
            if record.deleting:
                return
            spec, desired = record.spec, record.desired
            if record.refused:
                await self.writer.write(record, RetuneStatus(state=RetuneState.DISABLED, history=_history(record)))
                return
            if spec is None or desired is None:
                return
            if spec.retune.mode is RetuneMode.OFF or not record.wanted_replicas:
                await self.writer.write(record, RetuneStatus(state=RetuneState.DISABLED, history=_history(record)))
                return
            self._remember_start(record, spec)
            decision = decide(self.snapshot(record, spec, desired))
            if isinstance(decision, Move) and spec.retune.mode is RetuneMode.AUTO and not record.paused:
                await self._carry_out(record, spec, desired, decision)
                return
            _note(record, decision)
            await self.writer.write(record, _shown(record, spec, decision))

    def snapshot(self, record: ServiceRecord, spec: LLMServiceSpec, desired: DesiredLimits) -> Snapshot:
        """Everything the decision looks at."""
        revisions = {pod.revision for pod in record.pods.values() if not pod.terminating}
        return Snapshot(
            now_s=self.clock(),
            limits=desired.limits,
            signals=record.history.latest,
            targets=targets_of(spec),
            policy=policy_of(spec),
            bounds=bounds_of(spec, desired.limits),
            block_size=spec.envelope.block_size,
            last_move=record.tuner.last_move,
            previous_rule=record.tuner.previous_rule,
            in_sync=len(record.pods_in_sync()) == len(record.ready_pods()),
            rollout=len(revisions) > 1,
            guard_may_act=spec.slo.guard is GuardAction.ON,
        )

    def _remember_start(self, record: ServiceRecord, spec: LLMServiceSpec) -> None:
        """The first window after a start may hold somebody else's move: settle before the first own one."""
        if record.tuner.last_move is None:
            self._settle(record, spec, Direction.RAISE)

    def _settle(self, record: ServiceRecord, spec: LLMServiceSpec, direction: Direction) -> None:
        record.tuner.last_move = LastMove(self.clock(), direction)
        record.tuner.settle_until = datetime.now(UTC) + timedelta(seconds=policy_of(spec).settle_s(direction))

    async def _carry_out(self, record: ServiceRecord, spec: LLMServiceSpec, desired: DesiredLimits, move: Move) -> None:
        """Persist epoch and history, then push, then tell."""
        limits = desired.limits.merged(PartialLimits(**{limit_field(move.knob): move.to_value}))
        entry = _entry(move, applied=True)
        history = (entry, *(_history(record) or ()))[:MAX_HISTORY]
        moved = desired.bumped(limits, LimitsSource.RETUNE)
        until = datetime.now(UTC) + timedelta(seconds=policy_of(spec).settle_s(move.direction))
        retune = RetuneStatus(
            state=RetuneState.SETTLING,
            message=STEADY_MESSAGES[HoldReason.SETTLING],
            settle_until=rfc3339(until),
            history=history,
        )
        if not await self.writer.persist_limits(record, moved, retune):
            return  # the next pass reads what somebody else wrote; the next look decides on that
        record.tuner.previous_rule = None
        self._settle(record, spec, move.direction)
        note = f"{move.knob} {move.from_value} -> {move.to_value}, {move.rule}: {move.evidence}"
        logger.info("limits retuned", extra={"service": record.key.name, "move": note, "epoch": moved.epoch})
        await self.pusher.push(record)
        await self.writer.write(record)
        await self.recorder.post(record.body, EventReason.LIMITS_RETUNED, note, f"{move.knob} at epoch {moved.epoch}")


def _note(record: ServiceRecord, decision: Decision) -> None:
    """Keep what the next look needs."""
    record.tuner.previous_rule = decision.rule


def _history(record: ServiceRecord) -> tuple[RetuneMove, ...] | None:
    """The moves made so far, newest first."""
    retune = record.status.retune
    return retune.history if retune else None


def _entry(move: Move, applied: bool) -> RetuneMove:
    """A move as status shows it."""
    return RetuneMove(
        time=rfc3339(datetime.now(UTC)),
        knob=move.knob.value,
        from_=move.from_value,
        to=move.to_value,
        rule=move.rule.value,
        evidence=move.evidence,
        applied=applied,
        verdict=Verdict.PENDING if applied else None,
    )


def _shown(record: ServiceRecord, spec: LLMServiceSpec, decision: Decision) -> RetuneStatus:
    """The tuner's block of status."""
    observing = spec.retune.mode is RetuneMode.OBSERVE or record.paused
    state, until = RetuneState.IDLE, None
    if isinstance(decision, Move):
        message, proposal = f"would move {decision.knob}", _entry(decision, applied=False)
    else:
        message, proposal = STEADY_MESSAGES.get(decision.reason, decision.message), None
        state = STATES.get(decision.reason, RetuneState.IDLE)
    if state is RetuneState.SETTLING and record.tuner.settle_until is not None:
        until = rfc3339(record.tuner.settle_until)
    if observing and state is not RetuneState.BLIND:
        state = RetuneState.OBSERVING
    return RetuneStatus(state=state, message=message, settle_until=until, proposal=proposal, history=_history(record))
