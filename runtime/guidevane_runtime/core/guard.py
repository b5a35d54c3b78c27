"""The guard: gives way, step by step, while a protection line of the SLO is breached, and takes it back afterwards.

It is the fast loop, of seconds, below the operator's tuner. It never moves the target limits, only what is obeyed of
them, and it can't lock itself out: every limit has a floor, what it does not hear of counts as calm, a reject rate over
its line loosens, and without a breach a step back is tried in the end. It knows samples and limits; time comes in as an
argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.guard_steps import GuardEffect, Line, Step, cuts_of, effect_of, next_step
from guidevane_runtime.core.guard_trials import StepTrials
from guidevane_runtime.core.guard_window import MeanWindow, QuantileWindow, Window

LATENCIES = (Line.TTFT, Line.ITL, Line.QUEUE_WAIT)
UNHEARD_OF_WHILE_WAITING = (Line.TTFT, Line.QUEUE_WAIT)
"""Latencies that have no sample until a wait ends."""
SMALLEST_SHARE = 1 / 1024
"""Of the queue, when it is cut again and again; below it every queue is at its floor."""


class Sample(NamedTuple):
    """One observation. Latencies in ms; KV use in percent of the blocks; of rejects 100 for refused, 0 for let in."""

    line: Line
    time_s: float
    value: float


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Lines and times. A line left out protects nothing."""

    lines: Mapping[Line, float]
    """Upper bounds, in the unit of their samples."""
    dry_run: bool = False
    """Decide and report, change nothing. Nothing gets better then, so the level climbs further than it would."""
    window_s: float = 10.0
    min_samples: int = 10
    """In a window, of latencies and rejects. The p95 of fewer is chance."""
    t_up_s: float = 10.0
    """A line is over for so long before each step, unless the step is on trial. At least window_s: a step is judged by
    samples from after it."""
    t_down_s: float = 30.0
    """All lines are well under for so long before each step back. Three windows: a pause between bursts is no calm. A
    step whose trial failed waits longer the next time."""
    t_probe_s: float = 300.0
    """No line is over, nor all well under, for so long before a step back is tried: what is refused is not for ever.
    No step waits longer."""
    hysteresis: float = 0.1
    """Well under is below (1 - hysteresis) of a line."""
    recovery_per_s: float = 0.05
    """Growth of a limit per second, as a share of what is left of it, once no step cuts it and while no line is over: a
    halved one is whole again in 15 s, a sixteenth in a minute. What is left is near what the load allows; the target
    may be far above that."""

    def __post_init__(self) -> None:
        if none := [f"{line} is {bound}" for line, bound in self.lines.items() if bound <= 0]:
            raise ValueError(f"{', '.join(none)}: a line is above 0; leave out one that is to protect nothing")
        if self.t_up_s < self.window_s:
            raise ValueError(
                f"t_up_s is {self.t_up_s}, below window_s {self.window_s}: a step would be judged by samples from "
                "before it; raise t_up_s"
            )

    @property
    def itl_target_s(self) -> float | None:
        """What the scheduler is to keep steps to. None: there is no such line, or nothing may be changed for it."""
        bound_ms = self.lines.get(Line.ITL)
        return None if self.dry_run or bound_ms is None else bound_ms / 1000


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """What a tick came to."""

    level: int
    """Steps that are taken; 0 is normal."""
    line: Line | None
    """The resource line that is breached most; None when none is."""
    breached: frozenset[Line]
    """All lines that are breached, the reject rate too."""
    effect: GuardEffect
    reason: str = ""
    """What was moved in this tick, and on what evidence; empty when nothing was."""


class Guard:
    """Owns the windows, the steps taken and what is left of each limit."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._windows = {line: _window(line, config) for line in config.lines}
        self._steps: list[Step] = []
        self._shares: dict[str, float] = {}
        self._over = _Lasting()
        self._calm = _Lasting()
        self._not_over = _Lasting()
        self._trials = self._no_trials()
        self._last_tick_s: float | None = None
        self._last_move_s = -inf

    @property
    def level(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which they were taken; they are taken back from the end."""
        return tuple(self._steps)

    def protect(self, lines: Mapping[Line, float], *, dry_run: bool = False) -> None:
        """Protect other lines from the next tick on; steps that were taken for the old ones are taken back as ever.

        Between dry run and earnest it starts from normal: steps of the one were never obeyed, nor are they to be.
        """
        if dry_run != self.config.dry_run:
            self.stand_down()
        if lines != self.config.lines:
            # What failed under other lines says nothing of these.
            self._trials = self._no_trials()
        self.config = replace(self.config, lines=lines, dry_run=dry_run)
        self._windows = {line: self._windows.get(line) or _window(line, self.config) for line in lines}

    def stand_down(self) -> None:
        """Take everything back at once and look at nothing, until there is something to protect again."""
        self.config = replace(self.config, lines={})
        self._windows, self._steps, self._shares = {}, [], {}
        self._over, self._calm, self._not_over = _Lasting(), _Lasting(), _Lasting()
        self._trials = self._no_trials()

    def observe(self, sample: Sample) -> None:
        """Take a sample; one of a line that has no bound is dropped."""
        if window := self._windows.get(sample.line):
            window.add(sample.time_s, sample.value)

    def tick(self, now_s: float, target: SchedulerLimits, oldest_waiting_s: float = 0.0) -> GuardDecision:
        """Look at all lines and move at most one level. Called about once a second.

        oldest_waiting_s: age of the interactive request that waits longest for its first step. Latencies of those that
        still wait are not in the windows yet, so where samples are too few it stands in for them: a standstill is no
        calm.
        """
        readings = self._read(now_s, oldest_waiting_s)
        over = {line: value / self.config.lines[line] for line, value in readings.items()}
        breached = frozenset(line for line, excess in over.items() if excess > 1)
        worst = max(breached - {Line.REJECTS}, key=over.__getitem__, default=None)
        is_calm = all(excess <= 1 - self.config.hysteresis for line, excess in over.items() if line is not Line.REJECTS)
        # Refusing many while no resource is over its line: what was tightened is not needed.
        may_loosen = is_calm or (Line.REJECTS in breached and worst is None)
        self._recover(now_s, is_over=worst is not None)
        reason = self._move(now_s, worst, may_loosen=may_loosen)
        evidence = worst or next(iter(breached), None)
        if reason and evidence is not None:
            reason = f"{evidence} is {readings[evidence]:.0f}, line {self.config.lines[evidence]:.0f}: {reason}"
        return GuardDecision(self.level, worst, breached, self.effect(target), reason)

    def effect(self, target: SchedulerLimits) -> GuardEffect:
        """What is obeyed of these target limits as things stand."""
        if self.config.dry_run:
            return GuardEffect(target)
        return effect_of(target, self._steps, self._shares)

    def _no_trials(self) -> StepTrials:
        return StepTrials(self.config.t_down_s, self.config.t_probe_s)

    def _read(self, now_s: float, oldest_waiting_s: float) -> dict[Line, float]:
        """Lines with a value; what is unknown is left out, and counts as calm."""
        readings = {}
        for line, window in self._windows.items():
            value = window.value(now_s)
            if value is None and line in UNHEARD_OF_WHILE_WAITING and oldest_waiting_s > 0:
                value = oldest_waiting_s * 1000
            if value is not None:
                readings[line] = value
        return readings

    def _recover(self, now_s: float, *, is_over: bool) -> None:
        """What no step cuts any more grows again, while no line is over."""
        elapsed_s = 0.0 if self._last_tick_s is None else now_s - self._last_tick_s
        self._last_tick_s = now_s
        if is_over:
            return
        cut = {name for step in self._steps for name in cuts_of(step)}
        grown = {name: share * (1 + self.config.recovery_per_s * elapsed_s) for name, share in self._shares.items()}
        self._shares = {
            name: share if name in cut else grown[name]
            for name, share in self._shares.items()
            if name in cut or grown[name] < 1.0
        }

    def _move(self, now_s: float, worst: Line | None, *, may_loosen: bool) -> str:
        """One step on, or one back, or none. Says which; empty for none."""
        has_lasted = self._over.lasted_s(worst is not None, now_s) >= self.config.t_up_s
        is_calm = self._calm.lasted_s(may_loosen, now_s) >= self.config.t_down_s
        may_probe = self._not_over.lasted_s(worst is None, now_s) >= self.config.t_probe_s
        if worst is not None and (has_lasted or self._has_failed(next_step(worst, self._steps), now_s)):
            self._over.restart(now_s)
            self._last_move_s = now_s
            return self._give_way(worst, now_s)
        if (is_calm or may_probe) and self._steps and self._trials.may_begin(self._steps[-1], now_s):
            self._calm.restart(now_s)
            self._not_over.restart(now_s)
            self._last_move_s = now_s
            return f"taken back: {self._take_back(now_s)}"
        return ""

    def _has_failed(self, step: Step | None, now_s: float) -> bool:
        """A line is over again, and the step that its ladder has next is on trial: no need to wait until it lasts."""
        may_move = now_s - self._last_move_s >= self.config.t_up_s
        return may_move and step is not None and self._trials.is_running(step, now_s)

    def _give_way(self, line: Line, now_s: float) -> str:
        step = next_step(line, self._steps)
        if step is None:
            return self._cut_again(Step.CUT_QUEUE)
        self._steps.append(step)
        # A trial that failed grew back too far: what was left before it had held.
        held = self._trials.end(step, now_s)
        for name, cut in cuts_of(step).items():
            self._shares[name] = min(cut.share, held.get(name, 1.0), self._shares.get(name, 1.0))
        return str(step)

    def _take_back(self, now_s: float) -> Step:
        step = self._steps.pop()
        self._trials.begin(step, {name: self._shares[name] for name in cuts_of(step)}, now_s)
        return step

    def _cut_again(self, step: Step) -> str:
        """At the end of a ladder the queue is cut further: refusing early costs no work that is done already."""
        deeper = {name: self._shares[name] * cut.share for name, cut in cuts_of(step).items()}
        if min(deeper.values()) < SMALLEST_SHARE:
            return ""
        self._shares |= deeper
        return f"{step}, again"


class _Lasting:
    """For how long a condition has held without a break."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def lasted_s(self, holds: bool, now_s: float) -> float:
        """Note whether it holds now. 0 when it does not, or only from now on."""
        if not holds:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        return 0.0 if self._since_s is None else now_s - self._since_s

    def restart(self, now_s: float) -> None:
        self._since_s = now_s


def _window(line: Line, config: GuardConfig) -> Window:
    if line in LATENCIES:
        return QuantileWindow(config.window_s, config.min_samples, 0.95)
    # KV use is a gauge: one sample is the truth of its moment.
    return MeanWindow(config.window_s, 1 if line is Line.KV_USE else config.min_samples)
