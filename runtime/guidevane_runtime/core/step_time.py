"""How long a step takes, learned from the steps themselves: linear in what a step computes and reads.

Prefill and decode are apart because a decode reads all the weights for one token; context is apart because attention
reads it whatever the token; pairs are apart because attention of a prefill grows with the product of chunk and context.
This module sees loads and seconds that others measured; it knows no request, no target and no clock.
`guidevane-bench fit` is the offline twin of what learns here.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median

from guidevane_runtime.core.plan import StepLoad


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds: fixed per step, and per unit of a StepLoad."""

    step_s: float
    prefill_token_s: float = 0.0
    decode_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_pair_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return (
            self.step_s
            + self.prefill_token_s * load.num_prefill_tokens
            + self.decode_s * load.num_decodes
            + self.kv_token_s * load.num_kv_tokens
            + self.prefill_pair_s * load.num_prefill_pairs
        )


class Verdict(Enum):
    """What becomes of a measured step."""

    LEARN = "learn"
    DROP = "drop"
    """Something else held it up."""
    RESET = "reset"
    """The machine is another one: learn it, and trust what was learned before much less."""


class OutlierGate:
    """Tells a step that something else held up from a machine that has changed, by the errors of predictions.

    Against the median absolute deviation: nearly half of the errors may be outliers without moving it much. A step that
    was faster than expected is always learned from: what disturbs a step makes it longer.
    """

    WINDOW = 32
    """Errors that count. Odd disturbances are forgotten within a second."""
    MIN_ERRORS = 8
    """With fewer, nothing is an outlier."""
    MADS = 6.0
    """As in `guidevane-bench fit`: four standard deviations where errors are normal."""
    TOLERANCE = 0.1
    """A smaller error is none, however exact the others are."""
    NUM_IN_A_ROW = 8
    """Out of bounds on end, they are the new regime: of steps disturbed by chance, one in ten, that is 1 in 10^8."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._ratios: list[float] = []

    def judge(self, ratio: float) -> Verdict:
        """ratio: measured time over the predicted one."""
        is_off = self._is_off(abs(ratio - 1))
        self._note(abs(ratio - 1))
        if not is_off:
            self._ratios.clear()
            return Verdict.LEARN
        self._ratios.append(ratio)
        if len(self._ratios) == self.NUM_IN_A_ROW:
            return Verdict.RESET
        return Verdict.DROP if ratio > 1 else Verdict.LEARN

    def begin_regime(self) -> float:
        """Forget all errors; returns how many times as long as before steps take now."""
        slowdown = median(self._ratios)
        self._recent.clear()
        self._sorted.clear()
        self._ratios.clear()
        return slowdown

    def _is_off(self, error: float) -> bool:
        num_errors = len(self._sorted)
        return num_errors >= self.MIN_ERRORS and error > max(self.MADS * self._sorted[num_errors // 2], self.TOLERANCE)

    def _note(self, error: float) -> None:
        self._recent.append(error)
        insort(self._sorted, error)
        if len(self._recent) > self.WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]


NUM_COEFFICIENTS = 5


class StepTimeModel:
    """Least squares of relative errors with exponential forgetting, no coefficient below 0.

    Normal equations are kept up step by step, and solved by coordinate descent from the last answer (Franc, Hlavac &
    Navara 2005, "Sequential coordinate-wise algorithm for the non-negative least squares problem"). Nothing is
    inverted: an hour of steps that say nothing of prefill leaves its costs as they were. A new regime scales what was
    learned, as a throttled clock or a neighbour slows down everything, and cuts its weight (covariance resetting,
    Goodwin & Sin 1984), in case it does not.
    """

    MEMORY_STEPS = 500
    """A step's weight fades to 1/e over so many: some 10 s, so that a machine that slowly changes is followed."""
    MIN_STEPS = 32
    """Learned from before anything is predicted. With 10 % of noise 95 of 100 predictions are then within 10 %."""
    MIN_PREFILL_STEPS = 8
    """Of them with prefill: without any, prompts would seem to be free."""
    NUM_SWEEPS = 2
    """Over the coefficients, per step. One lags behind, four are no better."""
    RESET_WEIGHT = 100.0
    """Of a step of a new regime, counted in steps of the old one."""
    MAX_SLOWDOWN = 10.0
    """Between measured and predicted time, as far as it is believed at once."""
    MAX_WEIGHT = 1e100
    """Weights grow instead of all sums fading; at this one all are scaled down."""

    def __init__(self) -> None:
        self._costs = [0.0] * NUM_COEFFICIENTS
        self._products = [[0.0] * NUM_COEFFICIENTS for _ in range(NUM_COEFFICIENTS)]
        """Weighted sums of feature times feature."""
        self._targets = [0.0] * NUM_COEFFICIENTS
        """Weighted sums of feature times measured seconds."""
        self._weight = 1.0
        self._num_steps = 0
        self._num_prefill_steps = 0
        # Apart: where steps with prefill are rare, their costs may change and no row of outliers would show it.
        self._decode_gate = OutlierGate()
        self._prefill_gate = OutlierGate()

    @property
    def costs(self) -> CostModel | None:
        """None until enough was seen."""
        return CostModel(*self._costs) if self._is_known else None

    def learn(self, load: StepLoad, took_s: float) -> None:
        """Take in a step that was measured, unless something else held it up."""
        if took_s <= 0 or self._was_held_up(load, took_s):
            return
        self._num_steps += 1
        self._num_prefill_steps += load.num_prefill_tokens > 0
        self._accumulate(load, took_s)
        self._solve()

    @property
    def _is_known(self) -> bool:
        return self._num_steps >= self.MIN_STEPS and self._num_prefill_steps >= self.MIN_PREFILL_STEPS

    def _expected_s(self, load: StepLoad, took_s: float) -> float:
        """Before anything is known, what was measured."""
        if not self._is_known:
            return took_s
        prefill, decodes, kv, pairs = load
        step_s, prefill_token_s, decode_s, kv_token_s, prefill_pair_s = self._costs
        expected_s = step_s + prefill_token_s * prefill + decode_s * decodes + kv_token_s * kv + prefill_pair_s * pairs
        return max(expected_s, took_s / self.MAX_SLOWDOWN)

    def _was_held_up(self, load: StepLoad, took_s: float) -> bool:
        """Whether it says nothing about what steps cost. A new regime begins here."""
        if not self._is_known:
            return False
        gate = self._prefill_gate if load.num_prefill_tokens else self._decode_gate
        verdict = gate.judge(took_s / self._expected_s(load, took_s))
        if verdict is Verdict.RESET:
            slowdown = gate.begin_regime()
            self._costs = [cost * slowdown for cost in self._costs]
            self._targets = [target * slowdown for target in self._targets]
            self._weight *= self.RESET_WEIGHT
        return verdict is Verdict.DROP

    def _accumulate(self, load: StepLoad, took_s: float) -> None:
        self._weight *= 1 + 1 / self.MEMORY_STEPS
        if self._weight > self.MAX_WEIGHT:
            self._scale_down()
        weight = self._weight / self._expected_s(load, took_s) ** 2
        prefill, decodes, kv, pairs = load
        for i, feature in enumerate((1.0, *load)):
            if feature:
                weighted, row = weight * feature, self._products[i]
                row[0] += weighted
                row[1] += weighted * prefill
                row[2] += weighted * decodes
                row[3] += weighted * kv
                row[4] += weighted * pairs
                self._targets[i] += weighted * took_s

    def _solve(self) -> None:
        costs = self._costs
        for _ in range(self.NUM_SWEEPS):
            for i, row in enumerate(self._products):
                if row[i]:
                    said = row[0] * costs[0] + row[1] * costs[1] + row[2] * costs[2] + row[3] * costs[3]
                    costs[i] = max(0.0, costs[i] + (self._targets[i] - said - row[4] * costs[4]) / row[i])

    def _scale_down(self) -> None:
        self._products = [[value / self._weight for value in row] for row in self._products]
        self._targets = [value / self._weight for value in self._targets]
        self._weight = 1.0
