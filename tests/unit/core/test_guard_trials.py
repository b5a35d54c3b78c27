"""Steps back on trial: what failed is over at once, as deep as before, and tried again later each time."""

import itertools

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.guard import Guard, GuardConfig, Sample
from guidevane_runtime.core.guard_steps import Line, Step
from guidevane_runtime.core.guard_trials import StepTrials

TARGET = SchedulerLimits()
BOUND_MS = 1000.0
CALM, OVER = 0.5, 2.0
"""Shares of a line."""


class Load:
    """What the line is at while the guard's last step is taken, and while it isn't; second by second."""

    def __init__(self) -> None:
        self.guard = Guard(GuardConfig({Line.TTFT: BOUND_MS}))
        self.now_s = 1000.0
        self.moves: list[tuple[float, int]] = []
        """(time, level after it)"""

    def run(self, seconds: int, share: float) -> "Load":
        for _ in range(seconds):
            self._second(share)
        return self

    def run_against_top(self, seconds: int, top: int) -> "Load":
        """Over below this level, calm at it: an overload that lasts."""
        for _ in range(seconds):
            self._second(CALM if self.guard.level >= top else OVER)
        return self

    def waits_s(self, top: int) -> list[float]:
        """From each time the top was reached to the step back from it."""
        return [b[0] - a[0] for a, b in itertools.pairwise(self.moves) if a[1] == top and b[1] == top - 1]

    def trials_s(self, top: int) -> list[float]:
        """From each step back from the top to the step on that undid it."""
        return [b[0] - a[0] for a, b in itertools.pairwise(self.moves) if a[1] == top - 1 and b[1] == top][1:]

    @property
    def queue(self) -> int:
        return self.guard.effect(TARGET).limits.max_queued_requests

    def _second(self, share: float) -> None:
        for i in range(20):
            self.guard.observe(Sample(Line.TTFT, self.now_s + i / 20, share * BOUND_MS))
        self.now_s += 1.0
        level = self.guard.level
        self.guard.tick(self.now_s, TARGET)
        if self.guard.level != level:
            self.moves.append((self.now_s, self.guard.level))


def test_under_an_overload_that_lasts_each_trial_comes_after_twice_the_wait_and_300_s_at_the_latest() -> None:
    first, *others = Load().run_against_top(2000, 3).waits_s(3)
    # The window holds what was over for 10 s more.
    assert 30 <= first <= 41
    assert others[:6] == [60, 120, 240, 300, 300, 300][: len(others)] and len(others) >= 5


def test_a_trial_that_fails_is_over_t_up_after_it_began_and_not_when_a_breach_has_lasted() -> None:
    trials = Load().run_against_top(2000, 3).trials_s(3)
    assert trials and set(trials) == {10.0}


def test_of_two_trials_that_fail_the_second_is_over_t_up_after_the_first() -> None:
    load = Load().run_against_top(85, 3).run(90, CALM)
    assert load.guard.level == 1 and load.moves[-1][1] == 1
    load.moves.clear()
    load.run(45, OVER)
    assert [level for _, level in load.moves] == [2, 3]
    assert load.moves[1][0] - load.moves[0][0] >= 10


def test_after_a_failed_trial_a_limit_is_what_it_was_before() -> None:
    load = Load().run(62, OVER)
    before = load.queue
    assert before == 16
    load.run(41, CALM)
    assert load.guard.level == 2
    load.run(9, CALM)
    assert load.queue > before
    load.run(3, OVER)
    assert (load.guard.level, load.queue) == (3, before)


def test_a_step_back_that_held_for_as_long_as_its_wait_is_forgotten() -> None:
    load = Load().run_against_top(500, 3)
    assert load.waits_s(3)[-1] > 100
    load.run(900, CALM)
    assert load.guard.level == 0
    load.moves.clear()
    load.run_against_top(80, 3)
    assert load.waits_s(3) and load.waits_s(3)[0] <= 41


@pytest.mark.parametrize(("lines", "is_forgotten"), [({Line.TTFT: 900.0}, True), ({Line.TTFT: BOUND_MS}, False)])
def test_other_lines_forget_what_failed_under_the_old_ones(lines: dict[Line, float], is_forgotten: bool) -> None:
    load = Load().run_against_top(300, 3)
    assert load.guard.level == 3
    load.guard.protect(lines)
    load.run(45, CALM)
    assert load.guard.level == (2 if is_forgotten else 3)


def test_a_guard_that_stands_down_forgets_what_failed() -> None:
    load = Load().run_against_top(300, 3)
    load.guard.stand_down()
    load.guard.protect({Line.TTFT: BOUND_MS})
    load.moves.clear()
    assert load.run_against_top(90, 3).waits_s(3)[0] <= 41


def test_each_step_has_a_wait_of_its_own() -> None:
    trials = StepTrials(30.0, 300.0)
    for step in (Step.CUT_QUEUE, Step.PAUSE_OFFLINE):
        trials.end(step, 0.0)
        trials.begin(step, {"max_queued_requests": 0.25}, 100.0)
    assert trials.end(Step.CUT_QUEUE, 110.0) == {"max_queued_requests": 0.25}
    assert trials.end(Step.PAUSE_OFFLINE, 130.0) == {}, "it has held for as long as its wait"
    assert (trials.may_begin(Step.CUT_QUEUE, 169.0), trials.may_begin(Step.CUT_QUEUE, 170.0)) == (False, True)
    assert (trials.may_begin(Step.PAUSE_OFFLINE, 159.0), trials.may_begin(Step.PAUSE_OFFLINE, 160.0)) == (False, True)


def test_a_step_that_was_never_taken_is_not_on_trial() -> None:
    assert not StepTrials(30.0, 300.0).is_running(Step.CUT_QUEUE, 0.0)
