"""Slack of running decodes: how much prefill a step can take in before their next tokens are late.

The prefill of a step is the largest with a predicted step time within the slack (QoServe, arXiv:2503.22562), where the
prediction comes from a model that is learned online. Times come in as arguments.
"""

from collections.abc import Sequence
from functools import cached_property
from math import inf, sqrt

from guidevane_runtime.core.plan import StepLoad
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.step_time import CostModel, StepTimeModel
from guidevane_runtime.core.waiting import deadline_of

AIM = 0.9
"""Share of the target that is planned for: half of all steps take longer than predicted, and below it the guard calls
the ITL line calm."""
MIN_PREFILL_SHARE = 0.1
"""Of the time that is planned for, prefills have so much however long decodes take: where those miss the target by
themselves prompts still get on, and make it worse by a tenth at most."""
MIN_PREFILL_TOKENS = 16
"""And so many tokens, together: a block of the default size, where a tenth of the time pays for less."""


class PrefillSlack:
    """Seconds that prefills may add to one step; a budget like those of tokens, only that context costs too."""

    def __init__(self, costs: CostModel, target_s: float, decodes: Sequence[Request], now_s: float) -> None:
        self._costs = costs
        self._target_s = target_s
        self._decodes = decodes
        self._now_s = now_s
        self._num_planned = 0
        self._added_s = 0.0

    @property
    def expected_s(self) -> float:
        """What the step is expected to take, as far as it is planned."""
        return self._decode_s + self._added_s

    def affordable(self, start: int, num_tokens: int) -> int:
        """Tokens of one prefill, from position start on and num_tokens at most, that are not too many for the step."""
        costs = self._costs
        fixed_s = costs.kv_token_s * start
        per_token_s = costs.prefill_token_s + costs.kv_token_s + costs.prefill_pair_s * start
        left_s = max(self.aim_s - self._decode_s, MIN_PREFILL_SHARE * self.aim_s) - self._added_s - fixed_s
        most = _root(costs.prefill_pair_s, per_token_s, left_s)
        return min(num_tokens, max(int(min(most, num_tokens)), MIN_PREFILL_TOKENS - self._num_planned, 0))

    def spend(self, start: int, num_tokens: int) -> None:
        context = start + num_tokens
        load = StepLoad(num_tokens, 0, context, num_tokens * context)
        self._num_planned += num_tokens
        self._added_s += self._costs.seconds(load) - self._costs.step_s

    # Both are asked for only where there is some prefill: most steps have none.

    @cached_property
    def aim_s(self) -> float:
        """How long the step may take: less than the target for a last token whose deadline is nearer.

        A deadline is for the whole answer; to the tokens before the last it leaves more time than the target does.
        """
        last = (deadline_of(request) for request in self._decodes if request.num_tokens + 1 == request.max_num_tokens)
        return min(AIM * self._target_s, min(last, default=inf) - self._now_s)

    @cached_property
    def _decode_s(self) -> float:
        """What the step takes without any prefill."""
        num_kv = sum([request.num_computed_tokens for request in self._decodes]) + len(self._decodes)
        return self._costs.seconds(StepLoad(0, len(self._decodes), num_kv, 0))


class ItlSlack:
    """Knows the target and learns what steps cost, while there is a target."""

    def __init__(self) -> None:
        self.target_s: float | None = None
        """Of the time between two tokens of a stream. None: prefill has no bound but its token budgets."""
        self._times = StepTimeModel()

    def note_step(self, load: StepLoad, took_s: float) -> None:
        if self.target_s is not None:
            self._times.learn(load, took_s)

    def beside(self, decodes: Sequence[Request], now_s: float) -> PrefillSlack | None:
        """What a step with these decodes leaves for prefills. None: no bound, as nobody waits or costs are unknown."""
        if self.target_s is None or not decodes or (costs := self._times.costs) is None:
            return None
        return PrefillSlack(costs, self.target_s, decodes, now_s)


def _root(square: float, linear: float, value: float) -> float:
    """The x of 0 or more with square x^2 + linear x = value; infinity where x costs nothing. None is below 0."""
    if value <= 0:
        return 0.0
    divisor = linear + sqrt(linear * linear + 4 * square * value)
    return 2 * value / divisor if divisor else inf
