"""What the operator knows about a service's load, and how well it knows it.

A signal that is not Known has no value that arithmetic could use by accident: a failed query, an empty vector, a
NaN and "no traffic" all read as something else than zero.
"""

from dataclasses import dataclass, field

from guidevane_api.status import MetricsState


@dataclass(frozen=True)
class Known:
    """A finite, fresh value from every ready pod."""

    value: float
    """In the unit that the field of `Signals` names."""
    age_s: float = 0.0
    """Age of the oldest scrape behind the value, seconds."""
    samples: float | None = None
    """Observations in the window behind a quantile. None for gauges and counters."""


@dataclass(frozen=True)
class Partial:
    """A finite value, but some ready pods are missing from it."""

    value: float
    fresh: int
    expected: int


@dataclass(frozen=True)
class Stale:
    """There was a value, but its scrape is too old to act on."""

    age_s: float


@dataclass(frozen=True)
class Absent:
    """There is no value: no traffic, no pod, no such series, or no answer."""

    why: str


@dataclass(frozen=True)
class Invalid:
    """There is a value that cannot be one: NaN, infinite, negative or absurd."""

    what: str


Signal = Known | Partial | Stale | Absent | Invalid


NOT_OBSERVED = Absent("not observed yet")


@dataclass(frozen=True)
class Signals:
    """The signals of one service at one moment. Latencies in milliseconds, over the window of the retune block."""

    state: MetricsState = MetricsState.ABSENT
    why: str = "not observed yet"
    """A sentence for people when `state` is not Known."""
    unreachable: bool = False
    """The source itself gave no answer: nothing is known about the pods."""
    fresh_pods: int = 0
    expected_pods: int = 0
    kv_percent: Signal = NOT_OBSERVED
    """Share of KV-cache blocks in use now, highest pod, 0..100."""
    running_per_pod: Signal = NOT_OBSERVED
    """Running requests per pod: peak of each pod in the window, averaged over pods."""
    waiting: Signal = NOT_OBSERVED
    """Waiting requests of all pods, peak in the window."""
    preemptions: Signal = NOT_OBSERVED
    """Preemptions in the window, all pods."""
    finished: Signal = NOT_OBSERVED
    """Finished requests in the window, all pods."""
    prompt_tokens: Signal = NOT_OBSERVED
    """Prompt tokens in the window, all pods."""
    generation_tokens: Signal = NOT_OBSERVED
    """Generated tokens in the window, all pods."""
    ttft_p95_ms: Signal = NOT_OBSERVED
    itl_p95_ms: Signal = NOT_OBSERVED
    itl_p99_ms: Signal = NOT_OBSERVED
    queue_wait_p95_ms: Signal = NOT_OBSERVED
    guard_level: Signal = NOT_OBSERVED
    """Steps by which the guard gives way now, highest pod. Known only if every ready pod says its own."""
    guard_lines: tuple[str, ...] = ()
    """Protection lines that a pod is over now, by their names in spec.slo."""


MAX_VALUE = 1e12
"""No signal is above it. Status holds whole numbers, and a lie that the API server refuses would block all of it."""


def fault_of(name: str, value: float) -> Invalid | None:
    """Why this value cannot be true; None if it can."""
    return None if 0 <= value <= MAX_VALUE else Invalid(f"{name} is {value:g}")  # no comparison holds for NaN


def known_value(signal: Signal, min_samples: float = 0) -> float | None:
    """The value of a Known signal with at least `min_samples` observations behind it, else None."""
    if not isinstance(signal, Known):
        return None
    if signal.samples is not None and signal.samples < min_samples:
        return None
    return signal.value


def guard_words(signals: Signals) -> str:
    """How far the guards give way, for people: "level 2, over itlP95Milliseconds"."""
    level = known_value(signals.guard_level)
    words = "level ?" if level is None else f"level {level:.0f}"
    return f"{words}, over {', '.join(signals.guard_lines)}" if signals.guard_lines else words


@dataclass
class SignalHistory:
    """Turns single observations into a steady metrics state: one lost scrape is not an outage.

    Only what is shown (state, condition, event) is damped. Decisions look at the newest signals and hold at once.
    """

    looks: int = 2
    """Observations in a row that must agree, in both directions, before the shown state flips."""
    latest: Signals = field(default_factory=Signals)
    shown: MetricsState = MetricsState.ABSENT
    had_data: bool = False
    """True once all pods gave a sample: before that there is nothing that could be lost."""
    _candidate: MetricsState | None = None
    _streak: int = 0

    def observe(self, signals: Signals) -> tuple[MetricsState, MetricsState]:
        """Take one observation in; return the shown state before and after it."""
        before = self.shown
        seen = signals.state
        if self.had_data and seen is MetricsState.ABSENT and signals.expected_pods:
            seen = MetricsState.STALE  # there was data: it is old now, not missing from the start
        self.latest = signals
        self._streak = self._streak + 1 if seen is self._candidate else 1
        self._candidate = seen
        if self._streak >= self.looks or not self.had_data:
            self.shown = seen
        if seen is MetricsState.KNOWN:
            self.had_data = True
        return before, self.shown
