"""Server's client and engine in two real processes, with a fake model."""

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import (
    AbortCause,
    EngineFailed,
    EngineSettings,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SetLimits,
    SetTargets,
    SetTenants,
    StepReport,
    Submit,
)
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms
from guidevane_runtime.engine.client import EngineClient, EngineState
from guidevane_runtime.engine.link import EngineProcess, process_launcher
from guidevane_runtime.engine.local import thread_launcher
from guidevane_runtime.engine.stream import RequestStream
from guidevane_runtime.errors import EngineUnavailable, StartError

HERE = Path(__file__).parent
SETTINGS = EngineSettings(model_path="/models/fake", limits=SchedulerLimits(), envelope=Envelope())
HANG_TOKEN, CRASH_TOKEN, COUNT_TOKEN, VOCAB_SIZE = 777, 778, 779, 1000


class Engine:
    """A client whose engine's process id is known, with what it was told."""

    def __init__(self, loader: str, **options: float) -> None:
        self.pids: list[int] = []
        self.reports: list[StepReport] = []
        self.failures: list[EngineFailed] = []
        self._inner = process_launcher(["--loader", f"fake_model:{loader}"])
        self.client = EngineClient(
            self._launch, on_report=self.reports.append, on_failure=self.failures.append, **options
        )

    async def _launch(self, sock: socket.socket) -> EngineProcess:
        handle = await self._inner(sock)
        assert isinstance(handle, EngineProcess)
        self.pids.append(handle.pid)
        return handle


@pytest.fixture(autouse=True)
def fake_model_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


@asynccontextmanager
async def running(
    loader: str = "load_runner", settings: EngineSettings = SETTINGS, **options: float
) -> AsyncIterator[Engine]:
    engine = Engine(loader, **options)
    await engine.client.start(settings)
    try:
        yield engine
    finally:
        await engine.client.stop()


def request(name: str, *prompt: int, max_tokens: int = 20) -> Submit:
    return Submit(
        name, prompt or (1, 2, 3), SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0), arrival_s=monotonic()
    )


def monotonic() -> float:
    return asyncio.get_running_loop().time()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that nobody tells us of."""
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def read(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def tokens(outputs: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token_id for output in outputs for token_id in output.new_token_ids)


async def test_tokens_stream_from_the_engine_process() -> None:
    async with running() as engine:
        ready = await engine.client.wait_ready()
        outputs = await read(engine.client.submit(request("a")))
    assert tokens(outputs) == FakeRunner(1, 1, VOCAB_SIZE).continuation((1, 2, 3), 20)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.LENGTH]
    assert ready.vocab_size == VOCAB_SIZE and ready.limits.max_model_len == 512 and ready.boot_id


@pytest.mark.parametrize(("is_on", "num_cached"), [(True, 8), (False, 0)])
async def test_a_prompt_that_comes_again_is_found_if_the_settings_say_so(is_on: bool, num_cached: int) -> None:
    async with running(settings=replace(SETTINGS, enable_prefix_caching=is_on)) as engine:
        ready = await engine.client.wait_ready()
        first, second = [await read(engine.client.submit(request(name, *range(10)))) for name in "ab"]
    assert ready.enable_prefix_caching is is_on
    assert tokens(first) == tokens(second)
    assert [outputs[-1].num_cached_tokens for outputs in (first, second)] == [0, num_cached]


async def test_a_killed_engine_fails_each_request_once_and_a_new_one_serves() -> None:
    """A26: an engine that dies takes no request's end with it."""
    async with running() as engine:
        boot_id = (await engine.client.wait_ready()).boot_id
        streams = [engine.client.submit(request(str(number), max_tokens=400)) for number in range(8)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: any(report.outputs for report in engine.reports))
        os.kill(engine.pids[-1], signal.SIGKILL)
        results = await asyncio.gather(*readers)
        with pytest.raises(EngineUnavailable, match="restarting"):
            engine.client.submit(request("too early"))
        assert (await engine.client.wait_ready()).boot_id != boot_id
        after = await read(engine.client.submit(request("after")))
    ends = [[output.finish_reason for output in outputs if output.finish_reason] for outputs in results]
    assert ends == [[FinishReason.ERROR]] * 8
    assert "exit status -9" in results[0][-1].error
    assert len(tokens(after)) == 20
    assert engine.client.num_restarts == 1 and len(engine.failures) == 1 and not engine.failures[0].fatal


async def test_a_step_that_raises_ends_the_engine_with_its_reason() -> None:
    async with running() as engine:
        await engine.client.wait_ready()
        outputs = await read(engine.client.submit(request("crash", CRASH_TOKEN)))
        await engine.client.wait_ready()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error == "ZeroDivisionError: the model divided by zero"


async def test_what_was_loaded_is_never_walked_by_the_garbage_collector_again() -> None:
    """With torch's modules it would hold up a step, and so every stream, for more than 100 ms."""
    async with running() as engine:
        await engine.client.wait_ready()
        outputs = await read(engine.client.submit(request("count", COUNT_TOKEN)))
    error, count, rest = outputs[-1].error.split(maxsplit=2)
    assert (error, rest) == ("RuntimeError:", "objects are frozen") and int(count) > 10_000


async def test_a_hung_engine_is_ended_and_replaced() -> None:
    async with running(hang_timeout_s=3.0) as engine:
        await engine.client.wait_ready()
        outputs = await read(engine.client.submit(request("hang", HANG_TOKEN, 1, 2)))
        await engine.client.wait_ready()
        after = await read(engine.client.submit(request("after")))
    assert "silent for 3.0 s" in outputs[-1].error
    assert len(tokens(after)) == 20


async def test_a_model_that_is_not_there_is_fatal_and_not_tried_again() -> None:
    async with running("load_nothing") as engine:
        with pytest.raises(StartError, match="no model at /models/fake"):
            await engine.client.wait_ready()
        assert engine.client.state is EngineState.FAILED
    assert len(engine.pids) == 1
    assert [failure.fatal for failure in engine.failures] == [True]


async def test_an_engine_that_never_gets_ready_is_given_up_after_three_starts() -> None:
    async with running("load_badly") as engine:
        with pytest.raises(StartError, match="the disk is gone"):
            await engine.client.wait_ready()
    assert len(engine.pids) == 3


async def test_a_start_that_fails_in_an_unforeseen_way_is_not_waited_for() -> None:
    async def launch(sock: socket.socket) -> EngineProcess:
        raise RuntimeError("can't start new thread")

    failures: list[EngineFailed] = []
    client = EngineClient(launch, on_failure=failures.append)
    await client.start(SETTINGS)
    async with asyncio.timeout(5):
        with pytest.raises(StartError, match="can't start new thread"):
            await client.wait_ready()
    await client.stop()
    assert [failure.fatal for failure in failures] == [True]


async def test_limits_change_between_two_steps_and_outlive_the_engine() -> None:
    limits = SetLimits(SchedulerLimits(max_num_seqs=3), epoch=7, source=LimitsSource.SPEC)
    async with running() as engine:
        await engine.client.wait_ready()
        report = await engine.client.set_limits(limits)
        assert report.epoch == 7 and report.effective == limits.limits
        os.kill(engine.pids[-1], signal.SIGKILL)
        await until(lambda: engine.client.state is not EngineState.READY)
        assert (await engine.client.wait_ready()).limits.max_num_seqs == 3
        streams = [engine.client.submit(request(str(number))) for number in range(6)]
        await asyncio.gather(*map(read, streams))
        assert engine.client.last_report is not None and engine.client.last_report.epoch == 7
    assert max(report.stats.num_running for report in engine.reports if report.epoch == 7) == 3


async def test_limits_that_are_set_while_the_engine_restarts_take_effect_when_it_is_back() -> None:
    async with running() as engine:
        await engine.client.wait_ready()
        os.kill(engine.pids[-1], signal.SIGKILL)
        await until(lambda: engine.client.state is not EngineState.READY)
        report = await engine.client.set_limits(SetLimits(SchedulerLimits(), epoch=2, source=LimitsSource.SPEC))
    assert report.epoch == 2 and len(engine.pids) == 2


async def test_terms_of_tenants_are_there_before_the_first_request_and_outlive_the_engine() -> None:
    terms = SetTenants(TenantPolicy((TenantTerms("acme", max_in_flight=1),)), epoch=1)

    async def serve_four() -> int:
        """Most of the tenant's requests that ran at once."""
        engine.reports.clear()
        submits = [replace(request(f"{number}-{len(engine.pids)}"), tenant="acme") for number in range(4)]
        await asyncio.gather(*(read(engine.client.submit(submit)) for submit in submits))
        return max(report.stats.num_running for report in engine.reports)

    async with running() as engine:
        engine.client.set_tenants(terms)
        await engine.client.wait_ready()
        assert await serve_four() == 1
        os.kill(engine.pids[-1], signal.SIGKILL)
        await until(lambda: engine.client.state is not EngineState.READY)
        await engine.client.wait_ready()
        assert await serve_four() == 1
        engine.client.set_tenants(SetTenants(TenantPolicy(), epoch=2))
        assert await serve_four() == 4


async def test_targets_are_set_at_any_time_and_outlive_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first engine, while one runs, and between two: an engine hears the last of them before any request."""
    caplog.set_level(logging.INFO)
    monkeypatch.syspath_prepend(str(HERE))
    client = EngineClient(thread_launcher(importlib.import_module("fake_model").load_runner))
    client.set_targets(SetTargets(0.1))
    await client.start(SETTINGS)
    await client.wait_ready()
    await read(client.submit(request("a")))
    client.set_targets(SetTargets(0.2))
    await read(client.submit(request("crash", CRASH_TOKEN)))
    client.set_targets(SetTargets(None))
    await client.wait_ready()
    await read(client.submit(request("b")))
    await client.stop()
    heard = [vars(record)["itl_s"] for record in caplog.records if record.message == "targets changed"]
    assert heard == [0.1, 0.2, None]


async def test_an_abort_ends_the_stream_and_frees_the_blocks() -> None:
    """A7, A9: abort while it streams, twice, and again when it has ended."""
    async with running() as engine:
        await engine.client.wait_ready()
        stream = engine.client.submit(request("a", max_tokens=400))
        await anext(stream)
        engine.client.abort("a", AbortCause.CLIENT_GONE)
        engine.client.abort("a", AbortCause.CLIENT_GONE)
        outputs = await read(stream)
        engine.client.abort("a", AbortCause.CLIENT_GONE)
        await read(engine.client.submit(request("b", max_tokens=1)))
        assert engine.client.last_report is not None
        assert engine.client.last_report.stats.num_blocks_used == 0
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert engine.client.num_in_flight == 0


async def test_an_idle_engine_beats_once_a_second() -> None:
    async with running() as engine:
        await engine.client.wait_ready()
        await until(lambda: len(engine.reports) >= 3)
        age_s = engine.client.heartbeat_age_s(monotonic())
    pause_s = engine.reports[2].time_s - engine.reports[1].time_s
    assert 0.9 < pause_s < 5 and age_s is not None and age_s < 5


async def test_stop_aborts_what_is_left() -> None:
    async with running() as engine:
        await engine.client.wait_ready()
        stream = engine.client.submit(request("a", max_tokens=400))
        await anext(stream)
    assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
    assert engine.client.state is EngineState.STOPPED and not engine.failures
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pids[0], 0)


async def test_the_engine_ignores_signals_that_are_the_servers_to_answer() -> None:
    async with running() as engine:
        await engine.client.wait_ready()
        os.kill(engine.pids[0], signal.SIGTERM)
        os.kill(engine.pids[0], signal.SIGINT)
        outputs = await read(engine.client.submit(request("a")))
    assert len(tokens(outputs)) == 20 and len(engine.pids) == 1


PARENT = """
import asyncio
from guidevane_runtime.engine.client import EngineClient
from guidevane_runtime.engine.link import process_launcher
from test_engine_process import SETTINGS, Engine

async def main():
    engine = Engine("load_runner")
    await engine.client.start(SETTINGS)
    await engine.client.wait_ready()
    print(engine.pids[0], flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_the_engine_dies_with_its_server() -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    engine_pid = int(await server.stdout.readline())
    server.kill()
    await server.communicate()
    await until(lambda: not is_alive(engine_pid))


def is_alive(pid: int) -> bool:
    """A zombie that its new parent has not collected yet counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_same_loop_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    load_runner = importlib.import_module("fake_model").load_runner
    client = EngineClient(thread_launcher(load_runner))
    await client.start(SETTINGS)
    await client.wait_ready()
    outputs = await read(client.submit(request("a")))
    await client.stop()
    assert tokens(outputs) == FakeRunner(1, 1, VOCAB_SIZE).continuation((1, 2, 3), 20)


async def test_a_listener_that_raises_does_not_take_the_engine_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: a fault in metrics is not a fault of the engine."""
    monkeypatch.syspath_prepend(str(HERE))
    load_runner = importlib.import_module("fake_model").load_runner
    client = EngineClient(thread_launcher(load_runner), on_report=lambda report: {}[report.time_s])
    await client.start(SETTINGS)
    await client.wait_ready()
    outputs = await read(client.submit(request("a")))
    await client.stop()
    assert outputs[-1].finish_reason is FinishReason.LENGTH
