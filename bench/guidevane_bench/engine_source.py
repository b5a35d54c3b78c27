"""The one place where this package reaches into the engine: to measure it. Imports torch; nothing else here does."""

from collections.abc import Sequence
from time import monotonic, process_time, sleep

from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_bench.recorder import Clock, MeasuredRunner, ReplayMailbox
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import EngineSettings, SetTargets
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.loop import EngineLoop
from guidevane_runtime.engine.runner import LoadedModel, load_runner


def load(model: str, limits: SchedulerLimits, dtype: str, num_threads: int | None) -> LoadedModel:
    """Load a model; on CPU its KV cache is sized by the memory there is."""
    settings = EngineSettings(
        model,
        limits,
        Envelope(max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens),
        dtype=dtype,
        num_threads=num_threads,
    )
    return load_runner(settings)


class CpuClock:
    """Passes while this process computes, and jumps over its waits: what other processes take does not count.

    On one thread, and on CPU only: it sees no GPU, and counts every thread.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return process_time() + self._waited_s

    def sleep(self, seconds: float) -> None:
        self._waited_s += seconds


def clock_of(name: str) -> Clock:
    """wall, or cpu."""
    if name == "wall":
        return Clock(monotonic, sleep)
    cpu = CpuClock()
    return Clock(cpu.now_s, cpu.sleep)


def replay(
    loaded: LoadedModel,
    limits: SchedulerLimits,
    num_blocks: int,
    load: Sequence[LoadRequest],
    clock: Clock,
    itl_target_s: float | None = None,
) -> ReplayMailbox:
    """Run the engine's loop until every request has ended."""
    scheduler = Scheduler(
        BlockPool(num_blocks, loaded.block_size),
        limits,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
    )
    scheduler.set_targets(SetTargets(itl_target_s))
    runner = MeasuredRunner(loaded.runner)
    mailbox = ReplayMailbox(load, clock, runner, scheduler, loaded.config.vocab_size)
    EngineLoop(mailbox, scheduler, runner, clock.now_s).run()
    mailbox.ledger.ensure_all_ended()
    return mailbox
