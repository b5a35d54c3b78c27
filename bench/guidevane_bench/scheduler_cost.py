"""What the scheduler itself costs, on one core and without a model: `python -m guidevane_bench.scheduler_cost`.

Times are CPU time of the thread, so other processes don't count. Not part of the scheduler: here there is a clock.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import thread_time

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 128
UNBOUNDED = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_running: int = 256
    num_waiting: tuple[int, ...] = (0, 1_000, 10_000)
    num_blocks: int = 100_000
    num_queued: int = 10_000
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


def answer_to(batch: ScheduledBatch) -> StepOutput:
    return StepOutput(tuple(SampledToken(7) if seq.samples else None for seq in batch.seqs))


def make_submits(count: int, *, first: int = 0, num_prompt_tokens: int = NUM_PROMPT_TOKENS) -> list[Submit]:
    """Requests of which no two share a token, and which don't end by themselves.

    Lengths differ by up to a block, so that not all of them need their next block in the same step.
    """
    params, room = SamplingParams(max_tokens=10_000, seed=0), num_prompt_tokens + BLOCK_SIZE
    lengths = {number: num_prompt_tokens + number % BLOCK_SIZE for number in range(first, first + count)}
    return [
        Submit(f"{number}", tuple(range(number * room, number * room + length)), params, float(number))
        for number, length in lengths.items()
    ]


def step_rows(sizes: Sizes) -> Iterator[str]:
    """A step of many running requests beside more and more waiting ones."""
    yield f"| step: {sizes.num_running} running, waiting | plan, us | apply, us | report, us | all, us | all p99, us |"
    yield "|---|---|---|---|---|---|"
    for num_waiting in sizes.num_waiting:
        rig = BenchRig(num_blocks=sizes.num_blocks, max_num_seqs=sizes.num_running)
        rig.submit(make_submits(sizes.num_running + num_waiting))
        rig.step()
        times = [rig.step() for _ in range(sizes.num_steps)]
        sums = [sum(parts) for parts in times]
        medians = [statistics.median(column) for column in (*zip(*times, strict=True), sums)]
        p99 = statistics.quantiles(sums, n=100)[-1]
        yield f"| {num_waiting} | " + " | ".join(f"{value * 1e6:.0f}" for value in (*medians, p99)) + " |"


def admission_rows(sizes: Sizes) -> Iterator[str]:
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
    yield f"| beside {num_running} running | requests/s |"
    yield "|---|---|"
    yield f"| put in the queue, {sizes.num_queued} of them | {1 / min(queued_s):.0f} |"
    yield f"| taken from it into one step, {num_running} of them | {1 / min(started_s):.0f} |"


def lookup_rows(sizes: Sizes) -> Iterator[str]:
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
    yield f"| prefix look-up, {num_tokens} tokens | ms |"
    yield "|---|---|"
    yield f"| first | {min(first_s) * 1e3:.2f} |"
    yield f"| again, while it waits | {min(again_s) * 1e3:.2f} |"


def tables(sizes: Sizes) -> Iterator[str]:
    for rows in (step_rows, admission_rows, lookup_rows):
        yield from rows(sizes)
        yield ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables: medians per step, best of several rounds for the rest."""
    parser = argparse.ArgumentParser(prog="python -m guidevane_bench.scheduler_cost", description=main.__doc__)
    parser.add_argument("--scale", type=int, default=1, help="multiplies every size (default: %(default)s)")
    for line in tables(Sizes().times(parser.parse_args(arguments).scale)):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
