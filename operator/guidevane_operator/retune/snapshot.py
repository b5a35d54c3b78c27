"""What the tuner decides on, and what it can decide: plain frozen values, no clock, no client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic.alias_generators import to_snake

from guidevane_api.limits import SchedulerLimits
from guidevane_api.spec_control import Knob
from guidevane_operator.signals import Signals


class Direction(StrEnum):
    """Towards more work at once, or towards less."""

    RAISE = "raise"
    CUT = "cut"


class Rule(StrEnum):
    """Why a knob moves. Written into status and events."""

    PREEMPTIONS_HIGH = "PreemptionsHigh"
    """KV cache too small for what runs: preemptions recompute work."""
    ITL_HIGH = "ItlHigh"
    """Prefill stalls decoding streams, and TTFT has room or prefill is most of the work."""
    QUEUE_WAIT_HIGH = "QueueWaitHigh"
    """Requests wait while every slot is taken, and streams and KV cache have room."""
    TTFT_HIGH = "TtftHigh"
    """First tokens are late from prefill, and streams have room."""


class HoldReason(StrEnum):
    """Why nothing moves."""

    METRICS_UNKNOWN = "MetricsUnknown"
    TOO_FEW_SAMPLES = "TooFewSamples"
    LIMITS_NOT_IN_SYNC = "LimitsNotInSync"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    GUARD_ACTS = "GuardActs"
    SETTLING = "Settling"
    CONFIRMING = "Confirming"
    WITHIN_TARGETS = "WithinTargets"
    AT_BOUND = "AtBound"
    NO_REMEDY = "NoRemedy"


@dataclass(frozen=True)
class Hold:
    """Nothing moves."""

    reason: HoldReason
    message: str
    rule: Rule | None = None
    """The rule that matched all the same: confirmed by the next look, or held by its bound."""


@dataclass(frozen=True)
class Move:
    """One knob moves."""

    knob: Knob
    from_value: int
    to_value: int
    rule: Rule
    evidence: str
    """The numbers the rule saw, in one line."""

    @property
    def direction(self) -> Direction:
        """Raise if the value grows."""
        return Direction.RAISE if self.to_value > self.from_value else Direction.CUT


Decision = Hold | Move


def limit_field(knob: Knob) -> str:
    """The name of the knob's field in SchedulerLimits."""
    return to_snake(knob.value)


@dataclass(frozen=True)
class Bound:
    """Inclusive range of one knob, already inside the envelope."""

    low: int
    high: int


@dataclass(frozen=True)
class LastMove:
    """The move whose effect is not yet in the window."""

    at_s: float
    """On the tuner's monotonic clock, seconds."""
    direction: Direction


@dataclass(frozen=True)
class Targets:
    """The SLO of the service, in milliseconds and percent."""

    ttft_p95_ms: int
    itl_p95_ms: int
    itl_p99_ms: int | None
    queue_wait_p95_ms: int
    kv_max_percent: int


@dataclass(frozen=True)
class Policy:
    """How far and how often a knob moves. From the retune block of the spec."""

    min_samples: int
    settle_raise_s: int
    settle_cut_s: int
    raise_percent: int
    cut_percent: int
    chunk_raise_percent: int
    chunk_cut_percent: int
    deadband_low_percent: int
    """Below this share of a target there is room."""
    deadband_high_percent: int
    """Above this share of a target it is missed."""

    def settle_s(self, direction: Direction) -> int:
        """Time after a move in which nothing moves, seconds."""
        return self.settle_raise_s if direction is Direction.RAISE else self.settle_cut_s


@dataclass(frozen=True)
class Snapshot:
    """Everything `decide` looks at."""

    now_s: float
    """Monotonic clock, seconds."""
    limits: SchedulerLimits
    """The limits that are desired now."""
    signals: Signals
    targets: Targets
    policy: Policy
    bounds: Mapping[Knob, Bound] = field(default_factory=dict)
    """A knob that is not in here is never moved."""
    block_size: int = 16
    """Chunks are whole KV blocks where the bound allows it."""
    last_move: LastMove | None = None
    previous_rule: Rule | None = None
    """The rule that matched at the look before: a small breach moves nothing on its first look."""
    in_sync: bool = True
    """Every ready pod obeys `limits`."""
    rollout: bool = False
    """Pods of two revisions are alive."""
    guard_may_act: bool = True
    """The guards' levels count: in a dry run they move nothing, so that the tuner may look past them."""
