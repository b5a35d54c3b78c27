"""Every request of a run, and how it ended: exactly once, or the run stops.

The simulator and the recorder of the real engine write the same ledger, so their figures mean the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.messages import FinishReason, RequestOutput
from guidevane_runtime.core.tenants import RequestClass


class End(StrEnum):
    """How a request ended, seen from its client. A rejection carries its reason beside it."""

    FINISHED = "finished"
    TIMEOUT = "timeout"
    """Waited longer than waitingTimeoutMilliseconds; or, with that reason, had not ended by its deadline."""
    REJECTED = "rejected"
    """Refused at the door, or by the scheduler because it can never run."""
    LOST = "lost"
    """Its pod died."""
    FAILED = "failed"


END_OF = {
    FinishReason.STOP: End.FINISHED,
    FinishReason.LENGTH: End.FINISHED,
    FinishReason.TIMEOUT: End.TIMEOUT,
    FinishReason.ERROR: End.FAILED,
    FinishReason.ABORT: End.FAILED,
}


class Group(NamedTuple):
    """Requests whose gaps are counted together: a report adds them up by tenant and by class."""

    tenant: str
    request_class: RequestClass


@dataclass(slots=True, eq=False)
class Entry:
    """One request. Times in seconds since the run began."""

    request: LoadRequest
    group_itl: LatencyHistogram
    """Of its group: it adds its gaps to those of the others."""
    pod: int = -1
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0
    ended_s: float | None = None
    end: End | None = None
    reason: str = ""

    @property
    def group(self) -> Group:
        return Group(self.request.tenant, self.request.request_class)

    @property
    def queue_wait_s(self) -> float | None:
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.request.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; 0 for a single token."""
        if self.first_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.request.arrival_s


class ConservationError(RuntimeError):
    """A request ended twice, or not at all, or got a token after its end: a fault of ours."""


class PodMeter:
    """Latencies of one pod since it was last read, for a controller."""

    def __init__(self) -> None:
        self.ttft, self.itl, self.queue_wait = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()


@dataclass(slots=True)
class Ledger:
    """Entries in order of arrival; those without an end by request id."""

    entries: list[Entry] = field(default_factory=list)
    itl_by_group: dict[Group, LatencyHistogram] = field(default_factory=dict)
    _live: dict[str, Entry] = field(default_factory=dict)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def open(self, request_id: str, request: LoadRequest) -> Entry:
        group = Group(request.tenant, request.request_class)
        entry = Entry(request, self.itl_by_group.setdefault(group, LatencyHistogram()))
        self.entries.append(entry)
        if request_id in self._live:
            raise ConservationError(f"request {request_id} came in twice")
        self._live[request_id] = entry
        return entry

    def take(
        self, outputs: Iterable[RequestOutput], now_s: float, meter: PodMeter | None = None
    ) -> list[tuple[str, Entry]]:
        """Note what a step brought; returns the requests that ended with it."""
        ended = []
        live = self._live
        for output in outputs:
            request_id = output.request_id
            entry = live.get(request_id)
            if entry is None:
                raise ConservationError(f"request {request_id} got an output after its end")
            if output.new_token_ids:
                self._token(entry, output, now_s, meter)
            if output.finish_reason is not None:
                entry.num_preemptions = output.num_preemptions
                entry.first_scheduled_s = output.first_scheduled_s
                end = END_OF[output.finish_reason]
                # The core answers ERROR at once to what can never run: nothing of it was computed.
                never_ran = end is End.FAILED and output.first_scheduled_s is None
                reason = Rejection.DEADLINE_EXCEEDED if end is End.TIMEOUT and output.error else output.error
                self.close(request_id, End.REJECTED if never_ran else end, now_s, reason)
                ended.append((request_id, entry))
        return ended

    def _token(self, entry: Entry, output: RequestOutput, now_s: float, meter: PodMeter | None) -> None:
        if entry.num_tokens:
            gap_s = now_s - entry.last_token_s
            entry.group_itl.add(gap_s)
            if meter is not None:
                meter.itl.add(gap_s)
        else:
            entry.first_token_s = now_s
            if meter is not None and output.first_scheduled_s is not None:
                meter.ttft.add(now_s - entry.request.arrival_s)
                meter.queue_wait.add(output.first_scheduled_s - entry.request.arrival_s)
        entry.last_token_s = now_s
        entry.num_tokens += 1

    def close(self, request_id: str, end: End, now_s: float, reason: str = "") -> Entry:
        """The one place where requests end."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            raise ConservationError(f"request {request_id} ended twice, now as {end}")
        entry.end, entry.reason, entry.ended_s = end, reason, now_s
        return entry

    def ensure_all_ended(self) -> None:
        """Raises ConservationError when the run is over and a request has no end."""
        if self._live:
            raise ConservationError(f"{len(self._live)} requests never ended, first {min(self._live)}")
