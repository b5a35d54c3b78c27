"""From the blocks of a spec to what the tuner works with."""

from guidevane_api.limits import SchedulerLimits
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.spec_control import Knob
from guidevane_operator.retune.snapshot import Bound, Policy, Targets, limit_field

TUNABLE = (Knob.PREFILL_CHUNK_SIZE, Knob.MAX_NUM_SEQS)
"""Knobs that have rules."""

DEFAULT_FLOOR_DIVISOR = 4
"""Without spec.retune.bounds a knob goes down to this part of what the spec says, no further."""


def policy_of(spec: LLMServiceSpec) -> Policy:
    """The retune block as the tuner's policy."""
    retune = spec.retune
    return Policy(
        min_samples=retune.min_samples_per_window,
        settle_raise_s=retune.settle_seconds.raise_,
        settle_cut_s=retune.settle_seconds.cut,
        raise_percent=retune.max_step_percent.raise_,
        cut_percent=retune.max_step_percent.cut,
        chunk_raise_percent=retune.max_step_percent.chunk_raise,
        chunk_cut_percent=retune.max_step_percent.chunk_cut,
        deadband_low_percent=retune.deadband_percent.low,
        deadband_high_percent=retune.deadband_percent.high,
    )


def targets_of(spec: LLMServiceSpec) -> Targets:
    """The slo block as the tuner's targets."""
    slo = spec.slo
    return Targets(
        ttft_p95_ms=slo.ttft_p95_milliseconds,
        itl_p95_ms=slo.itl_p95_milliseconds,
        itl_p99_ms=slo.itl_p99_milliseconds,
        queue_wait_p95_ms=slo.queue_wait_p95_milliseconds,
        kv_max_percent=slo.kv_cache_utilization_max_percent,
    )


def bounds_of(spec: LLMServiceSpec, desired: SchedulerLimits) -> dict[Knob, Bound]:
    """How far each knob may go: the user's bounds inside the envelope, and never across another limit."""
    resolved = SchedulerLimits.resolve(spec.limits, spec.envelope)
    ceilings = {
        Knob.MAX_NUM_SEQS: spec.envelope.max_num_seqs,
        Knob.PREFILL_CHUNK_SIZE: min(desired.max_num_batched_tokens, spec.envelope.max_num_batched_tokens),
    }
    given = {bound.knob: bound for bound in spec.retune.bounds}
    found: dict[Knob, Bound] = {}
    for knob in TUNABLE:
        if knob not in spec.retune.knobs:
            continue
        ceiling = ceilings[knob]
        floor = max(1, getattr(resolved, limit_field(knob)) // DEFAULT_FLOOR_DIVISOR)
        low, high = (given[knob].min, given[knob].max) if knob in given else (floor, ceiling)
        high = min(high, ceiling)
        found[knob] = Bound(min(low, high), high)
    return found
