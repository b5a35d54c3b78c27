"""Play a load against the real engine loop in this process, in real time, and note every step and every latency.

The loop, the scheduler and the runner are those of a pod; only the mailbox is ours: it hands over each request when it
is due, and what the loop reports goes into the same ledger that the simulator writes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from guidevane_bench.fit import MeasuredStep
from guidevane_bench.simulator.costs import StepLoad, load_of
from guidevane_bench.simulator.ledger import Entry, Ledger
from guidevane_bench.simulator.series import Series, SeriesPoint, num_slots_unfilled
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.messages import SamplingParams, Shutdown, StepReport, Submit
from guidevane_runtime.core.plan import ModelRunner, ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler

CLOCK_TOLERANCE_S = 1e-6
"""A wait may end so much early: sums of times round, and no sleep is finer."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time that passes: seconds, and a wait."""

    now_s: Callable[[], float]
    sleep: Callable[[float], None]


class MeasuredRunner:
    """A runner that remembers what its last step was asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.last_load = StepLoad(0, 0, 0, 0)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.last_load = load_of(batch)
        return self._runner.execute(batch)


class ReplayMailbox:
    """The loop's mailbox: requests come out of it when they are due, reports go into the ledger."""

    def __init__(
        self,
        requests: Sequence[LoadRequest],
        clock: Clock,
        runner: MeasuredRunner,
        scheduler: Scheduler,
        vocab_size: int,
    ) -> None:
        self.ledger = Ledger()
        self.series = Series()
        self.steps: list[MeasuredStep] = []
        self._requests = requests
        self._num_sent = 0
        self._clock = clock
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._start_s = clock.now_s()

    @property
    def duration_s(self) -> float:
        return self._clock.now_s() - self._start_s

    def take(self, timeout_s: float) -> list[Any]:
        """What is due; waits for it when the engine is idle. Shutdown after the last request has ended."""
        if self._num_sent == len(self._requests) and not self.ledger.num_live:
            return [Shutdown()]
        wait_s = min(timeout_s, self._next_due_s() - self.duration_s)
        if wait_s > 0:
            self._clock.sleep(wait_s)
        due = []
        while self._next_due_s() <= self.duration_s + CLOCK_TOLERANCE_S:
            due.append(self._submit(self._requests[self._num_sent]))
            self._num_sent += 1
        return due

    def put(self, message: object) -> None:
        """Take a report of the loop. Times are on the clock of the run, as they are in a simulation."""
        assert isinstance(message, StepReport), "the engine loop reports steps only"
        if message.step_s:
            self.steps.append(MeasuredStep(self._runner.last_load, message.step_s))
        time_s = message.time_s - self._start_s
        for _, entry in self.ledger.take(message.outputs, time_s):
            self._shift(entry)
        self._sample(time_s, message)

    def _next_due_s(self) -> float:
        return self._requests[self._num_sent].arrival_s if self._num_sent < len(self._requests) else float("inf")

    def _submit(self, request: LoadRequest) -> Submit:
        """Token ids are drawn: what they say does not matter, that they are in the vocabulary does."""
        rng = random.Random(request.number)  # noqa: S311
        prompt = tuple(rng.choices(range(self._vocab_size), k=request.num_prompt_tokens))
        params = SamplingParams(max_tokens=request.num_output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self.ledger.open(str(request.number), request)
        return Submit(str(request.number), prompt, params, **request.standing(self._start_s)._asdict())

    def _shift(self, entry: Entry) -> None:
        """The scheduler speaks of the clock, the ledger of the run."""
        if entry.first_scheduled_s is not None:
            entry.first_scheduled_s -= self._start_s

    def _sample(self, time_s: float, report: StepReport) -> None:
        points, stats = self.series.points, report.stats
        if points and time_s < points[-1].time_s + 1.0:
            return
        block_size = self._scheduler.pool.block_size
        points.append(
            SeriesPoint(
                time_s=time_s,
                num_pods=1,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_blocks=stats.num_blocks_total,
                num_blocks_used=stats.num_blocks_used,
                num_slots_used=stats.num_blocks_used * block_size,
                num_slots_unfilled=num_slots_unfilled(self._scheduler.running, block_size),
            )
        )
