"""How fast requests end and prompts are computed: what waits are reckoned from. It is told times and reads no clock."""


class Rate:
    """Seconds per unit, as the ratio of two moving sums: a tiny sample counts for little, a large one for much."""

    WEIGHT = 0.1
    """Of the newest sample: about the last twenty count."""

    def __init__(self, prior_s: float) -> None:
        self._seconds, self._amount = prior_s, 1.0
        self.num_busy = 0
        """Samples that were taken while something waited."""

    @property
    def s_per_unit(self) -> float:
        return self._seconds / self._amount

    def add(self, amount: float, seconds: float, *, is_busy: bool) -> None:
        """While nothing waits the pace is that of the arrivals: then only a sample that is faster says something."""
        if not is_busy and seconds >= amount * self.s_per_unit:
            return
        self.num_busy += is_busy
        self._seconds += self.WEIGHT * (seconds - self._seconds)
        self._amount += self.WEIGHT * (amount - self._amount)


class Pace:
    """Of one engine, as its reports and the ends of its requests tell."""

    MIN_SAMPLES = 10
    """Of each, under load, before anybody is refused for what is expected of the pace."""

    def __init__(self) -> None:
        # Until measured: a small model on two CPU cores.
        self._ends = Rate(1.0)
        self._prefill = Rate(0.001)
        self._last_end_s = 0.0

    @property
    def is_known(self) -> bool:
        return min(self._ends.num_busy, self._prefill.num_busy) >= self.MIN_SAMPLES

    def begin(self, now_s: float) -> None:
        """An idle engine gets something to do: the time before was a pause."""
        self._last_end_s = now_s

    def request_ended(self, now_s: float, *, is_busy: bool) -> None:
        self._ends.add(1, now_s - self._last_end_s, is_busy=is_busy)
        self._last_end_s = now_s

    def step_ended(self, num_prompt_tokens: int, step_s: float, *, is_busy: bool) -> None:
        """num_prompt_tokens: computed in the step, or found in the prefix cache."""
        if num_prompt_tokens and step_s > 0:
            self._prefill.add(num_prompt_tokens, step_s, is_busy=is_busy)

    def wait_for_ends_s(self, num_requests: float) -> float:
        return num_requests * self._ends.s_per_unit

    def wait_for_prefill_s(self, num_tokens: float) -> float:
        return num_tokens * self._prefill.s_per_unit
