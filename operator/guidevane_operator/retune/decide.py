"""The tuner's decision: a pure function from a snapshot to one move or a reason to hold.

The order of the rules is the one that people use by hand: give way at the protection lines first (preemptions, ITL),
then raise decode concurrency while streams have room, then the prefill chunk. KV use alone is never a reason to cut:
a full cache is efficient, only preemptions prove harm.
"""

from collections.abc import Callable
from dataclasses import dataclass

from guidevane_api.spec_control import Knob
from guidevane_api.status import MetricsState
from guidevane_operator.retune.snapshot import (
    Decision,
    Direction,
    Hold,
    HoldReason,
    Move,
    Rule,
    Snapshot,
    limit_field,
)
from guidevane_operator.signals import Absent, Known, Signal, guard_words, known_value

STRONG_BREACH = 1.5
"""A ratio above this acts on its first look; below, a rule must match twice in a row."""

PREEMPTION_SHARE = 0.01
"""Preemptions per finished request above which the KV cache is too small for what runs."""

NEAR_LIMIT = 0.9
"""Share of maxNumSeqs above which concurrency is what holds requests back."""

PREFILL_SHARE = 2.0
"""Prompt tokens per generated token above which prefill is most of a step's work."""


@dataclass(frozen=True)
class Ratios:
    """Measured over target; None where the signal is not known or has too few samples."""

    itl: float | None
    ttft: float | None
    queue: float | None


@dataclass(frozen=True)
class Proposal:
    """A rule that matched: what it would do, before bounds and confirmation."""

    rule: Rule
    knob: Knob
    direction: Direction
    strength: float
    """Highest ratio behind it."""
    evidence: str


def decide(snapshot: Snapshot) -> Decision:
    """Return the one move that the snapshot calls for, or why there is none."""
    held = _gate(snapshot)
    if held is not None:
        return held
    ratios = _ratios(snapshot)
    blocked: Hold | None = None
    for rule in RULES:
        proposal = rule(snapshot, ratios)
        if proposal is None:
            continue
        decision = _apply(snapshot, proposal)
        if isinstance(decision, Move) or decision.reason is HoldReason.CONFIRMING:
            return decision
        if proposal.direction is Direction.CUT:
            return decision  # what is under protection may not be raised either
        blocked = blocked or decision
    return blocked or _nothing_to_do(snapshot, ratios)


def _gate(snapshot: Snapshot) -> Hold | None:
    """Reasons to hold before any rule is looked at."""
    signals = snapshot.signals
    if signals.state is not MetricsState.KNOWN:
        return Hold(HoldReason.METRICS_UNKNOWN, f"metrics are {signals.state}: {signals.why}")
    if snapshot.rollout:
        return Hold(HoldReason.ROLLOUT_IN_PROGRESS, "pods of two revisions are running")
    if not snapshot.in_sync:
        return Hold(HoldReason.LIMITS_NOT_IN_SYNC, "not every ready pod obeys the limits yet")
    if snapshot.guard_may_act and (guarded := _guard(snapshot)):
        return guarded
    last = snapshot.last_move
    if last is not None:
        left_s = last.at_s + snapshot.policy.settle_s(last.direction) - snapshot.now_s
        if left_s > 0:
            return Hold(HoldReason.SETTLING, f"{left_s:.0f} s until the last change shows in the window")
    return None


def _guard(snapshot: Snapshot) -> Hold | None:
    """The fast loop goes first: while it acts, signals tell of its doing, not of the limits that we would move."""
    signals = snapshot.signals
    level = known_value(signals.guard_level)
    if level is None:
        return Hold(HoldReason.METRICS_UNKNOWN, "the guards' level is not known")
    if level <= 0:
        return None
    # A breach that was seen before is none the less confirmed: the guard acts because of one.
    return Hold(HoldReason.GUARD_ACTS, f"the guard gives way: {guard_words(signals)}", snapshot.previous_rule)


def _ratios(snapshot: Snapshot) -> Ratios:
    """The latency signals as shares of their targets."""
    signals, targets = snapshot.signals, snapshot.targets

    def ratio(signal: Signal, target: int | None) -> float | None:
        value = known_value(signal, snapshot.policy.min_samples)
        return None if value is None or target is None else value / target

    itl = [
        r
        for r in (ratio(signals.itl_p95_ms, targets.itl_p95_ms), ratio(signals.itl_p99_ms, targets.itl_p99_ms))
        if r is not None
    ]
    return Ratios(
        itl=max(itl, default=None),
        ttft=ratio(signals.ttft_p95_ms, targets.ttft_p95_ms),
        queue=ratio(signals.queue_wait_p95_ms, targets.queue_wait_p95_ms),
    )


def _preemptions_high(snapshot: Snapshot, _: Ratios) -> Proposal | None:
    """Cut concurrency where the KV cache is proven too small: work is preempted and computed again."""
    preemptions = known_value(snapshot.signals.preemptions)
    finished = known_value(snapshot.signals.finished)
    kv = known_value(snapshot.signals.kv_percent)
    if preemptions is None or finished is None or kv is None or preemptions < 1:
        return None
    share = preemptions / max(finished, 1.0)
    if share <= PREEMPTION_SHARE and kv <= snapshot.targets.kv_max_percent:
        return None
    evidence = f"preemptions {preemptions:.0f} for {finished:.0f} finished, kv {kv:.0f}%"
    return Proposal(Rule.PREEMPTIONS_HIGH, Knob.MAX_NUM_SEQS, Direction.CUT, share / PREEMPTION_SHARE, evidence)


def _itl_high(snapshot: Snapshot, ratios: Ratios) -> Proposal | None:
    """Cut the chunk where prefill stalls the streams, if TTFT can afford it or prefill is most of the work."""
    if ratios.itl is None or ratios.itl <= _high(snapshot):
        return None
    ttft_has_room = ratios.ttft is not None and ratios.ttft <= NEAR_LIMIT
    if not (ttft_has_room or _prefill_dominates(snapshot)):
        return None
    return Proposal(
        Rule.ITL_HIGH, Knob.PREFILL_CHUNK_SIZE, Direction.CUT, ratios.itl, _evidence(snapshot, "itl", "ttft", "tokens")
    )


def _queue_wait_high(snapshot: Snapshot, ratios: Ratios) -> Proposal | None:
    """Raise concurrency where all slots are taken, requests wait, and streams and cache have room."""
    running = known_value(snapshot.signals.running_per_pod)
    if ratios.queue is None or ratios.queue <= _high(snapshot) or running is None:
        return None
    if not _streams_have_room(snapshot, ratios) or not _cache_has_room(snapshot):
        return None
    if running < NEAR_LIMIT * snapshot.limits.max_num_seqs:
        return None
    return Proposal(
        Rule.QUEUE_WAIT_HIGH,
        Knob.MAX_NUM_SEQS,
        Direction.RAISE,
        ratios.queue,
        _evidence(snapshot, "queue", "itl", "running", "kv"),
    )


def _ttft_high(snapshot: Snapshot, ratios: Ratios) -> Proposal | None:
    """Raise the chunk where first tokens are late from prefill itself, not from waiting for a slot."""
    if ratios.ttft is None or ratios.ttft <= _high(snapshot) or not _streams_have_room(snapshot, ratios):
        return None
    ttft, queue = known_value(snapshot.signals.ttft_p95_ms), known_value(snapshot.signals.queue_wait_p95_ms)
    if ttft is None or queue is None or queue > ttft / 2:
        return None
    return Proposal(
        Rule.TTFT_HIGH,
        Knob.PREFILL_CHUNK_SIZE,
        Direction.RAISE,
        ratios.ttft,
        _evidence(snapshot, "ttft", "queue", "itl"),
    )


RULES: tuple[Callable[[Snapshot, Ratios], Proposal | None], ...] = (
    _preemptions_high,
    _itl_high,
    _queue_wait_high,
    _ttft_high,
)
"""First match wins."""


def _high(snapshot: Snapshot) -> float:
    return snapshot.policy.deadband_high_percent / 100


def _streams_have_room(snapshot: Snapshot, ratios: Ratios) -> bool:
    """ITL is known and well below its target."""
    return ratios.itl is not None and ratios.itl < snapshot.policy.deadband_low_percent / 100


def _cache_has_room(snapshot: Snapshot) -> bool:
    """KV use is below both the protection line and the share at which admission stops anyway."""
    kv = known_value(snapshot.signals.kv_percent)
    line = min(snapshot.targets.kv_max_percent, snapshot.limits.kv_cache_utilization_limit_percent)
    return kv is not None and kv < line and known_value(snapshot.signals.preemptions) is not None


def _prefill_dominates(snapshot: Snapshot) -> bool:
    prompt = known_value(snapshot.signals.prompt_tokens)
    generated = known_value(snapshot.signals.generation_tokens)
    return prompt is not None and generated is not None and prompt > PREFILL_SHARE * max(generated, 1.0)


def _apply(snapshot: Snapshot, proposal: Proposal) -> Decision:
    """Turn a proposal into a move inside its bounds, once it is confirmed."""
    bound = snapshot.bounds.get(proposal.knob)
    current = int(getattr(snapshot.limits, limit_field(proposal.knob)))
    if bound is None:
        return Hold(HoldReason.NO_REMEDY, f"{proposal.knob} is not in spec.retune.knobs", proposal.rule)
    value = max(bound.low, min(bound.high, _stepped(snapshot, proposal, current)))
    moves_the_right_way = value > current if proposal.direction is Direction.RAISE else value < current
    if not moves_the_right_way:
        edge = bound.high if proposal.direction is Direction.RAISE else bound.low
        message = f"{proposal.knob} {current} is at its bound {edge} ({proposal.evidence})"
        return Hold(HoldReason.AT_BOUND, message, proposal.rule)
    if proposal.strength <= STRONG_BREACH and snapshot.previous_rule is not proposal.rule:
        return Hold(HoldReason.CONFIRMING, f"one more look at: {proposal.evidence}", proposal.rule)
    return Move(proposal.knob, current, value, proposal.rule, proposal.evidence)


def _stepped(snapshot: Snapshot, proposal: Proposal, current: int) -> int:
    """The value one step away: at least 1 for requests, at least one block for chunks, whole blocks for chunks."""
    policy, up = snapshot.policy, proposal.direction is Direction.RAISE
    if proposal.knob is Knob.MAX_NUM_SEQS:
        step = max(1, current * (policy.raise_percent if up else policy.cut_percent) // 100)
        return current + step if up else current - step
    percent = policy.chunk_raise_percent if up else policy.chunk_cut_percent
    step = max(snapshot.block_size, current * percent // 100)
    value = current + step if up else current - step
    return max(snapshot.block_size, value // snapshot.block_size * snapshot.block_size)


def _nothing_to_do(snapshot: Snapshot, ratios: Ratios) -> Hold:
    """Name the reason why no rule matched."""
    missing = [name for name, ratio in vars(ratios).items() if ratio is None]
    if len(missing) == len(vars(ratios)):
        signals = snapshot.signals
        why = signals.ttft_p95_ms.why if isinstance(signals.ttft_p95_ms, Absent) else _sample_counts(snapshot)
        return Hold(HoldReason.TOO_FEW_SAMPLES, why)
    if any(ratio is not None and ratio > _high(snapshot) for ratio in vars(ratios).values()):
        evidence = _evidence(snapshot, "ttft", "itl", "queue", "running", "kv")
        return Hold(HoldReason.NO_REMEDY, f"no knob helps; more replicas or a wider SLO may: {evidence}")
    return Hold(HoldReason.WITHIN_TARGETS, _evidence(snapshot, "ttft", "itl", "queue"))


def _sample_counts(snapshot: Snapshot) -> str:
    """How many observations there were, and how many are asked for."""
    signal = snapshot.signals.ttft_p95_ms
    count = signal.samples if isinstance(signal, Known) and signal.samples is not None else 0.0
    return f"{count:.0f} first tokens in the window, minSamplesPerWindow {snapshot.policy.min_samples}"


def _evidence(snapshot: Snapshot, *names: str) -> str:
    """The named numbers, each beside its limit."""
    signals, targets, limits = snapshot.signals, snapshot.targets, snapshot.limits
    texts: dict[str, Callable[[], str]] = {
        "ttft": lambda: f"ttftP95 {_ms(signals.ttft_p95_ms)}/{targets.ttft_p95_ms}ms",
        "itl": lambda: _itl_evidence(snapshot),
        "queue": lambda: f"queueWaitP95 {_ms(signals.queue_wait_p95_ms)}/{targets.queue_wait_p95_ms}ms",
        "running": lambda: f"running {_ms(signals.running_per_pod)}/{limits.max_num_seqs}",
        "kv": lambda: f"kv {_ms(signals.kv_percent)}/{targets.kv_max_percent}%",
        "tokens": lambda: f"tokens {_ms(signals.prompt_tokens)} prompt {_ms(signals.generation_tokens)} generated",
    }
    return ", ".join(texts[name]() for name in names)


def _itl_evidence(snapshot: Snapshot) -> str:
    """ITL p95, and p99 where it has a target."""
    signals, targets = snapshot.signals, snapshot.targets
    text = f"itlP95 {_ms(signals.itl_p95_ms)}/{targets.itl_p95_ms}ms"
    if targets.itl_p99_ms is not None:
        text += f", itlP99 {_ms(signals.itl_p99_ms)}/{targets.itl_p99_ms}ms"
    return text


def _ms(signal: Signal) -> str:
    """A number for people, or a question mark."""
    value = known_value(signal)
    return "?" if value is None else f"{value:.0f}"
