"""How the guard gives way: the steps, their order by line, and what each does to the limits. Pure functions.

Order after design.md: long context first, then offline work, then the prefill budget (ITL) or concurrency (KV), then
the queue. A line's own first step comes before it: ITL starts with smaller chunks, which would only make TTFT worse; KV
lowers its limit for admission before it takes slots away.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits


class Line(StrEnum):
    """A protection line; also the label `line` of guidevane_guard_line_breached. ms for latencies, else percent."""

    TTFT = "ttft_p95_ms"
    ITL = "itl_p95_ms"
    QUEUE_WAIT = "queue_wait_p95_ms"
    KV_USE = "kv_cache_utilization_max"
    REJECTS = "admission_reject_rate_max"


class Step(StrEnum):
    """One way to give way; its value says what is done, for people."""

    REFUSE_LONG_CONTEXT = "refusing long prompts"
    PAUSE_OFFLINE = "pausing the offline class"
    CUT_CHUNKS = "smaller prefill chunks"
    CUT_PREFILL = "a smaller prefill budget"
    CUT_KV_LIMIT = "a lower KV limit for admission"
    CUT_CONCURRENCY = "fewer running requests"
    CUT_QUEUE = "a shorter queue"


LADDERS: Mapping[Line, tuple[Step, ...]] = {
    Line.ITL: (
        Step.CUT_CHUNKS,
        Step.REFUSE_LONG_CONTEXT,
        Step.PAUSE_OFFLINE,
        Step.CUT_PREFILL,
        Step.CUT_QUEUE,
    ),
    Line.TTFT: (Step.REFUSE_LONG_CONTEXT, Step.PAUSE_OFFLINE, Step.CUT_QUEUE),
    Line.QUEUE_WAIT: (Step.REFUSE_LONG_CONTEXT, Step.PAUSE_OFFLINE, Step.CUT_QUEUE),
    Line.KV_USE: (
        Step.REFUSE_LONG_CONTEXT,
        Step.CUT_KV_LIMIT,
        Step.PAUSE_OFFLINE,
        Step.CUT_CONCURRENCY,
        Step.CUT_QUEUE,
    ),
    # Nothing: giving way refuses more. This line only loosens what the others tightened.
    Line.REJECTS: (),
}

MIN_PREFILL_TOKENS = 64
"""Least prefill budget and chunk: a step that computes fewer costs as much."""
NUM_CLASSES = 2
"""interactive and offline: each keeps a waiting place."""


class Cut(NamedTuple):
    """What a step leaves of one limit, and where it ends."""

    step: Step
    share: float
    floor: int


CUTS: Mapping[str, Cut] = {
    # A half is what AIMD halves by; a quarter, because a chunk is what one stall of a decode is made of; 0.85, because
    # a lower KV limit only acts through requests that end. Chosen, not measured.
    "prefill_chunk_size": Cut(Step.CUT_CHUNKS, 0.25, MIN_PREFILL_TOKENS),
    "prefill_token_budget": Cut(Step.CUT_PREFILL, 0.5, MIN_PREFILL_TOKENS),
    "kv_cache_utilization_limit_percent": Cut(Step.CUT_KV_LIMIT, 0.85, 10),
    "max_num_seqs": Cut(Step.CUT_CONCURRENCY, 0.5, 1),
    "max_queued_requests": Cut(Step.CUT_QUEUE, 0.5, NUM_CLASSES),
    "max_queued_tokens": Cut(Step.CUT_QUEUE, 0.5, 1024),
}
"""By field of SchedulerLimits. A floor never lifts a limit that is below it already."""


@dataclass(frozen=True, slots=True)
class GuardEffect:
    """What holds while the guard acts."""

    limits: SchedulerLimits
    refuses_long_context: bool = False
    """New prompts above limits.longContextThresholdTokens are refused at the door, reason `long_context`."""
    pauses_offline: bool = False
    """No request of the offline class is admitted."""


def effect_of(limits: SchedulerLimits, steps: Collection[Step], shares: Mapping[str, float]) -> GuardEffect:
    """Limits as they are obeyed under these steps. `shares`: what is left of a limit; one left out is whole."""
    changed = {name: _shrunk(getattr(limits, name), share, CUTS[name].floor) for name, share in shares.items()}
    return GuardEffect(
        limits=limits.model_copy(update=changed),
        refuses_long_context=Step.REFUSE_LONG_CONTEXT in steps,
        pauses_offline=Step.PAUSE_OFFLINE in steps,
    )


def cuts_of(step: Step) -> Mapping[str, Cut]:
    """The limits that a step cuts; none for those that act at the door."""
    return {name: cut for name, cut in CUTS.items() if cut.step is step}


def next_step(line: Line, steps: Collection[Step]) -> Step | None:
    """The first step of the line's ladder that is not taken; None at its end."""
    return next((step for step in LADDERS[line] if step not in steps), None)


def _shrunk(limit: int, share: float, floor: int) -> int:
    return min(limit, max(floor, int(limit * share)))
