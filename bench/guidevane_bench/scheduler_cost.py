"""What the scheduler itself costs, on one core and without a model: `python -m guidevane_bench.scheduler_cost`.

Times are CPU time of the thread, so other processes don't count. Not part of the scheduler: here there is a clock.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import thread_time

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, StepReport, Submit
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.waiting import WaitingQueue
from guidevane_runtime.engine.loop import EngineLoop
from guidevane_runtime.engine.mailbox import FrameBuffer, Mailbox

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 128
MAX_TOKENS = 10_000
UNBOUNDED = 1 << 20
BENCH_ROOT = Path(__file__).parents[1]
RATE = "requests/s"
"""The one unit of which more is better."""

Figures = dict[str, float]
"""Each with its unit at the end of its name."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_running: int = 256
    num_waiting: tuple[int, ...] = (0, 1_000, 10_000)
    num_blocks: int = 100_000
    num_queued: int = 10_000
    num_tenants: int = 64
    num_long_prompt_tokens: int = 50_000
    num_steps: int = 300
    num_rounds: int = 5

    def times(self, scale: int) -> "Sizes":
        return replace(
            self,
            num_running=self.num_running * scale,
            num_waiting=tuple(count * scale for count in self.num_waiting),
            num_blocks=self.num_blocks * scale,
            num_queued=self.num_queued * scale,
            num_tenants=self.num_tenants * scale,
            num_long_prompt_tokens=self.num_long_prompt_tokens * scale,
        )


class BenchRig:
    """A scheduler whose model answers at once and never ends."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.prefix_cache = PrefixCache(self.pool, model_digest=b"bench")
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=UNBOUNDED,
            prefill_token_budget=UNBOUNDED,
            decode_token_budget=UNBOUNDED,
            prefill_chunk_size=UNBOUNDED,
            max_model_len=UNBOUNDED,
            max_prompt_tokens=UNBOUNDED,
            max_output_tokens=UNBOUNDED,
            kv_cache_utilization_limit_percent=100,
        )
        self.scheduler = Scheduler(
            self.pool, limits, max_model_len=UNBOUNDED, eos_token_ids=frozenset(), prefix_cache=self.prefix_cache
        )

    def submit(self, submits: Sequence[Submit]) -> float:
        """Put them in the queue. Seconds."""
        start_s = thread_time()
        for submit in submits:
            self.scheduler.submit(submit)
        return thread_time() - start_s

    def step(self) -> tuple[float, float, float]:
        """Plan a step, apply an answer to it, take the report. Seconds of each."""
        planned_s = thread_time()
        batch = self.scheduler.schedule(0.0)
        answered_s = thread_time()
        answer = answer_to(batch)
        applied_s = thread_time()
        self.scheduler.apply(batch, answer)
        reported_s = thread_time()
        self.scheduler.take_outputs()
        self.scheduler.stats(0.0)
        return answered_s - planned_s, reported_s - applied_s, thread_time() - reported_s


class InstantRunner:
    """Answers at once, and knows how long that took."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        start_s = thread_time()
        answer = answer_to(batch)
        self.spent_s += thread_time() - start_s
        return answer


class LoopRig:
    """The engine's loop round a scheduler, with a real mailbox, whose reports are read at once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._runner = InstantRunner()
        ours, theirs = socket.socketpair()
        self._socket, self._mailbox = ours, Mailbox(theirs)
        self._loop = EngineLoop(self._mailbox, scheduler, self._runner, lambda: 0.0)

    def iterate(self) -> tuple[float, float]:
        """Once round the loop, without the model; and what it takes the server to read the report. Seconds of each."""
        self._runner.spent_s, start_s = 0.0, thread_time()
        self._loop.run_once()
        iterated_s = thread_time()
        buffer = FrameBuffer()
        report = None
        while report is None:
            buffer.feed(self._socket.recv(UNBOUNDED))
            report = next(buffer.messages(), None)
        assert isinstance(report, StepReport), "the loop said something else"
        return iterated_s - start_s - self._runner.spent_s, thread_time() - iterated_s

    def close(self) -> None:
        self._socket.close()
        self._mailbox.close()


def answer_to(batch: ScheduledBatch) -> StepOutput:
    return StepOutput(tuple(SampledToken(7) if seq.samples else None for seq in batch.seqs))


def make_submits(
    count: int, *, first: int = 0, num_prompt_tokens: int = NUM_PROMPT_TOKENS, num_tenants: int = 1
) -> list[Submit]:
    """Requests of which no two share a token, and which don't end by themselves.

    Lengths differ by up to a block, so that not all of them need their next block in the same step.
    """
    params, room = SamplingParams(max_tokens=MAX_TOKENS, seed=0), num_prompt_tokens + BLOCK_SIZE
    lengths = {number: num_prompt_tokens + number % BLOCK_SIZE for number in range(first, first + count)}
    return [
        Submit(
            f"{number}",
            tuple(range(number * room, number * room + length)),
            params,
            float(number),
            tenant=f"{number % num_tenants}",
        )
        for number, length in lengths.items()
    ]


def step_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """A step of many running requests beside more and more waiting ones, for which there is no sequence."""
    for num_waiting in sizes.num_waiting:
        rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=sizes.num_running)
        rig.submit(make_submits(sizes.num_running + num_waiting))
        yield from _steps(rig, f"step, {num_waiting} waiting", sizes)


def tenant_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """A step beside many that wait, of many tenants; and the search alone for who is next, with one and with many."""
    num_running, num_waiting, num_tenants = sizes.num_running, sizes.num_waiting[-1], sizes.num_tenants
    rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=num_running)
    rig.submit(make_submits(num_running + num_waiting, num_tenants=num_tenants))
    yield from _steps(rig, f"step, {num_waiting} waiting of {num_tenants} tenants", sizes)
    cases: dict[str, Callable[[Request], bool]] = {"": lambda _: True, " if all are blocked": lambda _: False}
    for count in (1, num_tenants):
        queue = WaitingQueue()
        for submit in make_submits(num_waiting, num_tenants=count):
            queue.add(Request(submit, UNBOUNDED, rig.pool.table()))
        for case, is_eligible in cases.items():
            start_s = thread_time()
            for _ in range(sizes.num_steps):
                queue.first(is_eligible)
            search_s = (thread_time() - start_s) / sizes.num_steps
            yield f"who is next of {num_waiting} of {count} tenants{case}, us", search_s * 1e6


def held_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """The same where the first in line is held back by memory: the peak is estimated in every step."""
    num_running, num_waiting = sizes.num_running, sizes.num_waiting[-1]
    # Nothing has ended yet, so each is expected to need 256 tokens of output, and rounds up to a block.
    num_blocks = num_running * (NUM_PROMPT_TOKENS + 256 + 3 * BLOCK_SIZE // 2) // BLOCK_SIZE
    rig = BenchRig(num_blocks=num_blocks, max_num_seqs=2 * num_running)
    rig.submit(make_submits(num_running + num_waiting))
    yield from _steps(rig, f"step, {num_waiting} waiting for memory", sizes)


def _steps(rig: BenchRig, name: str, sizes: Sizes) -> Iterator[tuple[str, float]]:
    rig.step()
    times = [rig.step() for _ in range(sizes.num_steps)]
    both = [planned_s + applied_s for planned_s, applied_s, _ in times]
    for part, column in zip(("plan", "apply", "take outputs"), zip(*times, strict=True), strict=True):
        yield f"{name}: {part}, us", statistics.median(column) * 1e6
    yield f"{name}: plan and apply, us", statistics.median(both) * 1e6
    yield f"{name}: plan and apply p99, us", statistics.quantiles(both, n=100)[-1] * 1e6


def loop_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """What is round a step: mail, the report made, pickled and sent; and read on the other side."""
    rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=sizes.num_running)
    rig.submit(make_submits(sizes.num_running))
    loop = LoopRig(rig.scheduler)
    loop.iterate()
    times = [loop.iterate() for _ in range(sizes.num_steps)]
    loop.close()
    iterated, read = zip(*times, strict=True)
    yield "once round the engine's loop without the model, us", statistics.median(iterated) * 1e6
    yield "the same p99, us", statistics.quantiles(iterated, n=100)[-1] * 1e6
    yield "its report read by the server, us", statistics.median(read) * 1e6


def admission_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Requests that come in while many run: into the queue, and from there into a step, which plans the others too."""
    num_running = sizes.num_running
    queued_s, started_s = [], []
    for _ in range(sizes.num_rounds):
        rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=2 * num_running)
        rig.submit(make_submits(num_running))
        rig.step()
        rig.submit(make_submits(num_running, first=num_running))
        started_s.append(rig.step()[0] / num_running)
        queued_s.append(rig.submit(make_submits(sizes.num_queued, first=2 * num_running)) / sizes.num_queued)
    yield f"put in the queue, {RATE}", 1 / min(queued_s)
    yield f"taken from it into one step, {RATE}", 1 / min(started_s)


def lookup_figures(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """A long prompt whose blocks are all cached: keys made anew, and again with the keys at hand."""
    num_tokens = sizes.num_long_prompt_tokens
    rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=1)
    (submit,) = make_submits(1, num_prompt_tokens=num_tokens)
    rig.submit([submit])
    rig.step()
    first_s: list[float] = []
    again_s: list[float] = []
    for _ in range(sizes.num_rounds):
        request = Request(submit, num_tokens + 1, rig.pool.table())
        rig.prefix_cache.open(request)
        for times_s in (first_s, again_s):
            start_s = thread_time()
            hit = rig.prefix_cache.look(request)
            times_s.append(thread_time() - start_s)
        assert len(hit.block_ids) == (num_tokens - 1) // BLOCK_SIZE, "the bench measured a miss"
    yield f"prefix look-up of {num_tokens} tokens, ms", min(first_s) * 1e3
    yield "the same again, while it waits, ms", min(again_s) * 1e3


def measure(sizes: Sizes) -> Figures:
    parts = (step_figures, tenant_figures, held_figures, loop_figures, admission_figures, lookup_figures)
    return {name: value for part in parts for name, value in part(sizes)}


def measure_in(checkout: Path, scale: int) -> Figures:
    """The same with the scheduler of another checkout, in a process of its own."""
    path = os.pathsep.join(map(str, (checkout / "crds", checkout / "runtime", BENCH_ROOT)))
    command = [sys.executable, "-m", __spec__.name, "--json", "--scale", str(scale)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)  # noqa: S603
    figures: Figures = json.loads(done.stdout)
    return figures


def best_of(rounds: Sequence[Figures]) -> Figures:
    return {name: (max if name.endswith(RATE) else min)(each[name] for each in rounds) for name in rounds[0]}


def table(sizes: Sizes, columns: dict[str, Figures]) -> Iterator[str]:
    yield f"| {sizes.num_running} running, {sizes.num_blocks} blocks | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(_shown(figures[name]) for figures in columns.values())} |"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: medians of a round, and of all rounds the best."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    parser.add_argument("--scale", type=int, default=1, help="multiplies every size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="in turn where there is a before (default: %(default)s)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure another checkout too, as `before`")
    parser.add_argument("--json", action="store_true", help="one round of this checkout, for programs")
    options = parser.parse_args(arguments)
    sizes = Sizes().times(options.scale)
    if options.json:
        sys.stdout.write(json.dumps(measure(sizes)))
        return
    checkouts = {"before": options.against} if options.against else {}
    rounds = _rounds({**checkouts, "now": BENCH_ROOT.parent}, options.rounds, options.scale)
    sys.stdout.writelines(line + "\n" for line in table(sizes, rounds))


def _rounds(checkouts: dict[str, Path], count: int, scale: int) -> dict[str, Figures]:
    rounds: dict[str, list[Figures]] = {name: [] for name in checkouts}
    for _ in range(count):
        for name, checkout in checkouts.items():
            rounds[name].append(measure_in(checkout, scale))
    return {name: best_of(figures) for name, figures in rounds.items()}


if __name__ == "__main__":
    main()
