"""Brings the desired limits to the pods, and finds out which of them obey.

Each pod is asked on its own: one call at a time, with its own timeout and its own pauses after a failure. A round waits
only a moment for answers; a call that takes longer goes on by itself and asks for another round when it ends. So a pod
that hangs delays neither other pods, nor the next change of limits, nor other services.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_api.spec_serving import EngineSpec
from guidevane_operator.admin_client import Accepted, AdminClient, Fenced, PushResult, Refused, Unreachable
from guidevane_operator.facts import PodFacts
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import DesiredLimits, obeys, outgoing
from guidevane_operator.record import Ack, Flight, ServiceRecord

logger = logging.getLogger(__name__)

DEFAULT_ADMIN_PORT = EngineSpec().admin_port
"""Admin port of a pod that names none, under a spec that cannot be read."""
PATIENCE_S = 0.5
"""A round waits so long for answers, seconds: most pods answer between two steps, and status is then written once."""
BEAT_S = 0.25
"""Answers that nobody waited for, and pauses that end, make one pass together in this time, seconds."""
MAX_PAUSE_S = 60.0
"""Longest pause before a pod that did not obey is asked again, seconds."""
MAX_SILENT_PAUSE_S = 4.0
"""Longest pause after a call without an answer: a pod that hung has its limits 5 s after it is back."""


@dataclass
class PushOutcome:
    """What came of one round over the pods."""

    fenced_at: int | None = None
    """Highest epoch that a pod holds against ours."""
    corrected: list[str] = field(default_factory=list)
    """Pods that obey again after their engine started anew."""


@dataclass
class LimitsPusher:
    """Asks the pods of services for their limits. Callers hold the record's lock."""

    admin: AdminClient
    clock: Callable[[], float]
    """Monotonic seconds."""
    ask_for_pass: Callable[[ServiceKey], None]
    """Queues a pass, which makes the next round."""

    async def push(self, record: ServiceRecord, renew: bool = False) -> PushOutcome:
        """PATCH every ready pod that does not obey yet; with `renew`, every ready pod, which renews its lease."""
        outcome = PushOutcome()
        self._drop_departed(record)
        self._take_answers(record, outcome)
        desired = record.desired
        if desired is None or not record.token:
            return outcome
        prompt = [self._start(record, pod, desired) for pod in self._due(record, desired, renew)]
        waited_for = [flight.task for flight in prompt if not flight.was_silent]
        if waited_for:
            await asyncio.wait(waited_for, timeout=PATIENCE_S)
        self._take_answers(record, outcome)
        for flight in prompt:
            if not flight.task.done():
                flight.task.add_done_callback(lambda _: self._ask_for_pass_in(record.key, 0))
        return outcome

    def _drop_departed(self, record: ServiceRecord) -> None:
        """Forget pods that are gone, and the pauses of those that are not ready: once they are, they are asked at once.

        Calls to a process that is gone are given up.
        """
        record.acks = {
            name: ack if record.pods[name].can_be_patched else replace(ack, failures=0, retry_at_s=0.0)
            for name, ack in record.acks.items()
            if name in record.pods
        }
        for name, flight in list(record.flights.items()):
            pod = record.pods.get(name)
            if pod is None or pod.incarnation != flight.incarnation:
                record.flights.pop(name).task.cancel()

    def _due(self, record: ServiceRecord, desired: DesiredLimits, renew: bool) -> list[PodFacts]:
        """Pods to ask now: not those with a call under way, nor those whose pause is not over."""
        in_sync, now_s = set(record.pods_in_sync()), self.clock()

        def waits(pod: PodFacts) -> bool:
            ack = record.acks.get(pod.name)
            same = ack is not None and (ack.incarnation, ack.epoch) == (pod.incarnation, desired.epoch)
            return ack is not None and same and now_s < ack.retry_at_s

        ready = [pod for pod in record.ready_pods() if pod.name not in record.flights]
        return [pod for pod in ready if renew or not (pod.name in in_sync or waits(pod))]

    def _start(self, record: ServiceRecord, pod: PodFacts, desired: DesiredLimits) -> Flight:
        """Begin one call."""
        patch = LimitsPatch(
            epoch=desired.epoch,
            limits=_asked(record, desired.limits),
            lease_seconds=record.lease_seconds,
            source=desired.source,
        )
        port = pod.admin_port or (record.spec.engine.admin_port if record.spec else DEFAULT_ADMIN_PORT)
        before = record.acks.get(pod.name)
        was_silent = before is not None and before.incarnation == pod.incarnation and before.silences > 0
        call = self.admin.patch(pod.ip, port, record.token, patch)
        task = asyncio.create_task(call, name=f"limits:{record.key.namespace}/{pod.name}")
        flight = Flight(task, pod.incarnation, patch, was_silent)
        record.flights[pod.name] = flight
        return flight

    def _take_answers(self, record: ServiceRecord, outcome: PushOutcome) -> None:
        """Note what the calls that have ended brought."""
        for name, flight in list(record.flights.items()):
            if not flight.task.done():
                continue
            del record.flights[name]
            before, result = record.acks.get(name), _result_of(flight.task)
            ack = record.acks[name] = self._ack(record, flight, result, before)
            if isinstance(result, Refused) and result.status in (401, 403):
                record.secrets_are_due = True  # somebody may have changed the Secret; the other pods know this token
            if isinstance(result, Fenced) and record.desired and flight.patch.epoch == record.desired.epoch:
                outcome.fenced_at = max(outcome.fenced_at or 0, result.epoch or 0)
            if _was_lost(before, ack):
                outcome.corrected.append(name)

    def _ack(self, record: ServiceRecord, flight: Flight, result: PushResult, before: Ack | None) -> Ack:
        """The pod's answer as a fact. One that does not obey is asked again after 1, 2, 4 ... seconds."""
        if isinstance(result, Accepted):
            view, epoch = result.view, flight.patch.epoch
            if view.epoch == epoch and obeys(view.target, flight.patch.limits):
                return Ack(flight.incarnation, epoch, True, result, view.boot_id)
        is_silent = isinstance(result, Unreachable)
        same_process = before if before and before.incarnation == flight.incarnation else None
        silences = (same_process.silences if same_process else 0) + 1 if is_silent else 0
        same_epoch = same_process if same_process and same_process.epoch == flight.patch.epoch else None
        failures = (same_epoch.failures if same_epoch else 0) + 1
        longest_s = MAX_SILENT_PAUSE_S if is_silent else MAX_PAUSE_S
        pause_s = float(min(longest_s, 2.0 ** min(failures - 1, 10)))
        self._ask_for_pass_in(record.key, pause_s + 0.01)
        return Ack(
            flight.incarnation,
            flight.patch.epoch,
            False,
            result,
            silences=silences,
            failures=failures,
            retry_at_s=self.clock() + pause_s,
        )

    def _ask_for_pass_in(self, key: ServiceKey, delay_s: float) -> None:
        """Queue a pass for then, together with what the service's other pods ask for about that time."""
        loop = asyncio.get_running_loop()
        beat = math.ceil((loop.time() + delay_s) / BEAT_S)
        loop.call_at(beat * BEAT_S, self.ask_for_pass, key)


def _asked(record: ServiceRecord, limits: SchedulerLimits) -> PartialLimits:
    """What is sent. Without an accepted spec, lengths are left as the pod has them: nobody says whose they are."""
    if record.spec is None:
        return outgoing(limits, PartialLimits(), Envelope(max_model_len=0))
    return outgoing(limits, record.spec.limits, record.spec.envelope)


def _result_of(task: asyncio.Task[PushResult]) -> PushResult:
    """What a call brought. One that fails as nobody foresaw is one pod without an answer, not a pass that fails."""
    try:
        return task.result()
    except Exception as error:
        logger.exception("call failed", extra={"task": task.get_name()})
        return Unreachable(f"{type(error).__name__}: {error}")


def _was_lost(before: Ack | None, now: Ack) -> bool:
    """The pod obeyed this epoch, came back as another process, and obeys again."""
    return before is not None and before.in_sync and now.in_sync and before.boot_id != now.boot_id
