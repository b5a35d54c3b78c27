"""The server's client against engines that fail, hang and die at any point: A26 and I3, from the client's side.

Whatever becomes of an engine, each request gets exactly one terminal output, with the right tokens before it; limits
and questions get an answer or a refusal; and a new engine starts with nothing of the old one.
"""

import asyncio
import logging
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    AbortCause,
    EngineSettings,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SetLimits,
    StepReport,
    Submit,
)
from guidevane_runtime.engine.client import EngineClient, EngineState
from guidevane_runtime.engine.stream import RequestStream
from guidevane_runtime.errors import EngineUnavailable
from tests.property.lockstep import Fate, Launcher, Load, SteppedEngine, VirtualLoop
from tests.property.machine import Machine, size_of
from tests.property.traffic import VOCAB_SIZE, prompt_st

HANG_TIMEOUT_S = 20.0
SETTINGS = EngineSettings(model_path="/models/fake", limits=SchedulerLimits(), envelope=Envelope())


class Reader:
    """One request as its client sees it."""

    def __init__(self, submit: Submit) -> None:
        self.expected = FakeRunner(1, 1, VOCAB_SIZE).continuation(submit.prompt_token_ids, submit.params.max_tokens)
        self.received: list[int] = []
        self.ends: list[FinishReason] = []
        self.may_abort = False

    async def read(self, stream: RequestStream) -> None:
        async for output in stream:
            self.hear(output)

    def hear(self, output: RequestOutput) -> None:
        assert not self.ends, "an output after the terminal one"
        self.received += output.new_token_ids
        assert tuple(self.received) == self.expected[: len(self.received)]
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            assert output.finish_reason is not FinishReason.ABORT or self.may_abort
            assert output.finish_reason is not FinishReason.LENGTH or tuple(self.received) == self.expected


class EngineMachine(Machine):
    @initialize(is_up=st.sampled_from([True, True, True, False]))
    def boot(self, is_up: bool) -> None:
        logging.disable()  # each failure is logged with its traceback
        self.faults: list[dict[str, Any]] = []
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(lambda loop, context: self.faults.append(context))
        self.launch = Launcher(self.loop)
        self.client = EngineClient(self.launch, hang_timeout_s=HANG_TIMEOUT_S, on_report=self.hear)
        self.readers: dict[str, Reader] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.epoch = 0
        self.last_reports: dict[int, StepReport] = {}
        """By the number of its engine."""
        self.begin(self.client.start(SETTINGS))
        if is_up:
            self.go()

    def begin(self, coroutine: Any) -> asyncio.Task[Any]:
        task = self.loop.begin(coroutine)
        self.tasks.append(task)
        return task

    @property
    def engine(self) -> SteppedEngine | None:
        """The present one."""
        last = self.launch.engines[-1] if self.launch.engines else None
        return last if last and last.is_alive else None

    # ------------------------------------------------------------------------------------------------ actions

    @rule(prompts=st.lists(prompt_st, min_size=1, max_size=4), max_tokens=st.sampled_from([1, 5, 40]))
    def submit(self, prompts: list[tuple[int, ...]], max_tokens: int) -> None:
        for prompt in prompts:
            name = str(len(self.readers))
            submit = Submit(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0), self.loop.now_s)
            if self.client.state is not EngineState.READY:
                with pytest.raises(EngineUnavailable):
                    self.loop.do(self.client.submit, submit)
                return
            reader = self.readers[name] = Reader(submit)
            self.begin(reader.read(self.loop.do(self.client.submit, submit)))

    @rule(back=st.integers(-1, 6), cause=st.sampled_from([AbortCause.CLIENT_GONE, AbortCause.CANCELLED]))
    def abort(self, back: int, cause: AbortCause) -> None:
        name = str(len(self.readers) - 1 - back)
        if name in self.readers:
            self.readers[name].may_abort = True
        self.loop.do(self.client.abort, name, cause)

    @rule(max_num_seqs=st.integers(1, 4))
    def set_limits(self, max_num_seqs: int) -> None:
        self.epoch += 1
        command = SetLimits(SchedulerLimits(max_num_seqs=max_num_seqs), self.epoch, LimitsSource.SPEC)
        self.begin(self.obeyed(command))

    @rule()
    def ask(self) -> None:
        self.begin(self.explained())

    @precondition(lambda self: self.engine)
    @rule(num_iterations=st.integers(1, 6))
    def go_on(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.go()

    @precondition(lambda self: self.engine)
    @rule(fate=st.sampled_from(Fate).filter(lambda fate: fate is not Fate.GOES_ON))
    def meet(self, fate: Fate) -> None:
        self.go(fate)

    @precondition(lambda self: self.engine)
    @rule(failing=st.sets(st.integers(0, 3), min_size=1))
    def step_with_bad_rows(self, failing: set[int]) -> None:
        self.go(failing=failing)

    @rule(load=st.sampled_from([Load.WORKS, Load.WORKS, Load.FAILS, Load.FAILS_FOR_GOOD]))
    def choose_how_the_next_engine_starts(self, load: Load) -> None:
        self.launch.next_load = load

    @precondition(lambda self: self.client.state is EngineState.RESTARTING)
    @rule()
    def come_back(self) -> None:
        self.loop.advance(4.0)
        self.go()

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, HANG_TIMEOUT_S + 1]))
    def wait(self, seconds: float) -> None:
        """Longer than the time after which a silent engine is taken for dead, too."""
        was_ready = self.client.state is EngineState.READY
        self.loop.advance(seconds)
        assert not (was_ready and seconds > HANG_TIMEOUT_S) or self.client.state is not EngineState.READY

    def go(self, fate: Fate = Fate.GOES_ON, failing: set[int] | frozenset[int] = frozenset()) -> None:
        was_ready = self.client.state is EngineState.READY
        if self.engine:
            self.engine.go(fate, failing)
            self.loop.run_forever()
        if was_ready and fate is Fate.GOES_ON:
            # The mail is obeyed in the iteration that finds it.
            assert self.client.last_report is not None and self.client.last_report.epoch == self.epoch
            assert all(reader.ends for reader in self.readers.values() if reader.may_abort)

    async def obeyed(self, command: SetLimits) -> None:
        try:
            report = await self.client.set_limits(command)
        except EngineUnavailable:
            assert self.client.state in (EngineState.FAILED, EngineState.STOPPED)
        else:
            assert report.epoch >= command.epoch

    async def explained(self) -> None:
        try:
            told = await self.client.explain(list(self.readers))
        except EngineUnavailable:
            return
        assert {one.request_id for one in told} <= set(self.readers)

    def hear(self, report: StepReport) -> None:
        number = len(self.launch.engines)
        stats, last = report.stats, self.last_reports.get(number)
        if last is None:
            # Nothing of the engine before: what it computes is its own first step.
            assert stats.num_steps <= 1 and stats.num_preemptions == 0
        else:
            assert report.epoch >= last.epoch and stats.num_steps >= last.stats.num_steps
        self.last_reports[number] = report

    # --------------------------------------------------------------------------------------------- invariants

    @invariant()
    def each_request_is_live_or_has_ended_once(self) -> None:
        num_live = sum(not reader.ends for reader in self.readers.values())
        assert self.client.num_in_flight == num_live
        assert num_live == 0 or self.client.state is EngineState.READY

    @invariant()
    def the_client_is_ready_when_its_engine_is(self) -> None:
        assert (self.client.state is EngineState.READY) == (self.client.ready is not None)
        assert self.client.last_report is None or self.client.ready is not None
        assert sum(engine.is_alive for engine in self.launch.engines) <= 1

    @invariant()
    def no_fault_goes_unheard(self) -> None:
        assert not self.faults
        for task in self.tasks:
            assert not task.done() or task.exception() is None
        self.tasks = [task for task in self.tasks if not task.done()]

    def teardown(self) -> None:
        """What a living engine has it brings to its end; what is stopped has ended too. Nothing is left running."""
        if not hasattr(self, "loop"):
            return
        try:
            self.drain()
            self.begin(self.client.stop())
            self.go()
            self.loop.advance(10.0)
            assert all(len(reader.ends) == 1 for reader in self.readers.values())
            assert not asyncio.all_tasks(self.loop) and not self.engine and self.client.num_in_flight == 0
            self.no_fault_goes_unheard()
        finally:
            logging.disable(logging.NOTSET)
            self.loop.close()

    def drain(self) -> None:
        for _ in range(60 * len(self.readers)):
            if self.client.state is not EngineState.READY or not self.client.num_in_flight:
                break
            self.go()
        if self.client.state is EngineState.READY:
            assert self.client.num_in_flight == 0
            self.loop.advance(1.0)
            self.go()
            assert self.client.last_report is not None
            stats = self.client.last_report.stats
            assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = size_of(EngineMachine)
