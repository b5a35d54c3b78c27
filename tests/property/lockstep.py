"""A client and its engine in lockstep: the real mailbox between them, virtual time, and nothing left to chance.

The engine's `serve` runs in a thread, one iteration at a time and only while the client's event loop stands still.
"""

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.engine.link import EngineHandle
from guidevane_runtime.engine.mailbox import Mailbox, encode
from guidevane_runtime.engine.process import serve
from guidevane_runtime.errors import ModelNotFound
from tests.property.traffic import VOCAB_SIZE, SpoilingRunner

T = TypeVar("T")
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 40, 4, 120


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_StopWhenIdle(self.stop))

    def time(self) -> float:
        return self.now_s

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let it go as far as it comes at this time."""
        task = self.create_task(coroutine)
        self.run_forever()
        return task

    def do(self, function: Callable[..., T], *arguments: object) -> T:
        """Call it on the loop, as the server does."""

        async def call() -> T:
            return function(*arguments)

        return self.begin(call()).result()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.run_forever()


class _StopWhenIdle(selectors.DefaultSelector):
    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop = stop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self._stop()
        return ready


class Fate(Enum):
    """What becomes of an engine in its next iteration."""

    GOES_ON = auto()
    STEP_RAISES = auto()
    DIES_AT_REST = auto()
    DIES_IN_STEP = auto()
    DIES_IN_REPORT = auto()
    """With half of it sent."""


class Load(Enum):
    """What becomes of its start."""

    WORKS = auto()
    FAILS = auto()
    FAILS_FOR_GOOD = auto()


class _Killed(BaseException):
    """Ends the thread as a signal ends a process: without a last word."""


@dataclass(frozen=True)
class _Shape:
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True)
class _Model:
    runner: "_FatedRunner"
    config: _Shape = field(default_factory=_Shape)
    max_model_len: int = MAX_MODEL_LEN
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    dtype: str = "float32"
    device: str = "cpu"


class SteppedEngine:
    """Stands before it reads its mail until it is told to go on."""

    def __init__(self, sock: socket.socket, load: Load, clock: Callable[[], float]) -> None:
        self.load = load
        self.fate = Fate.GOES_ON
        self.failing: Collection[int] = ()
        """Places in the next batch whose rows come out wrong."""
        self._sock = sock
        self._may_go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._is_killed = self._has_ended = False
        self._thread = threading.Thread(target=self._serve, args=(clock,), daemon=True)
        self._thread.start()
        self._stands.acquire()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def go(self, fate: Fate = Fate.GOES_ON, failing: Collection[int] = ()) -> None:
        """One iteration, or its start."""
        self.fate, self.failing = fate, failing
        self._is_killed = fate is Fate.DIES_AT_REST
        self._may_go.release()
        self._stands.acquire()
        if self._has_ended:
            self._thread.join()

    async def end(self, grace_s: float) -> str:
        if self.is_alive:
            self.go(Fate.DIES_AT_REST)
        return "exit status -9"

    # ------------------------------------------------------------------------------------------ in its own thread

    def _serve(self, clock: Callable[[], float]) -> None:
        try:
            serve(_FatedMailbox(self._sock, self), self._load_model, clock)
        except _Killed:
            pass
        finally:
            self._has_ended = True
            self._stands.release()

    def stand(self) -> None:
        self._stands.release()
        self._may_go.acquire()
        if self._is_killed:
            raise _Killed

    def _load_model(self, settings: EngineSettings) -> _Model:
        if self.load is Load.FAILS:
            raise OSError("the disk is gone")
        if self.load is Load.FAILS_FOR_GOOD:
            raise ModelNotFound("no model there")
        return _Model(_FatedRunner(self))


class _FatedMailbox(Mailbox):
    def __init__(self, sock: socket.socket, engine: SteppedEngine) -> None:
        super().__init__(sock)
        self._engine = engine

    def take_first(self) -> Any:
        self._engine.stand()
        return super().take_first()

    def take(self, timeout_s: float) -> list[Any]:
        self._engine.stand()
        return super().take(0.0)

    def put(self, message: object) -> None:
        if self._engine.fate is Fate.DIES_IN_REPORT:
            wire = encode(message)
            self._sock.sendall(wire[: len(wire) // 2])
            raise _Killed
        super().put(message)


class _FatedRunner:
    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._runner = SpoilingRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        if self._engine.fate is Fate.STEP_RAISES:
            raise ZeroDivisionError("the model divided by zero")
        if self._engine.fate is Fate.DIES_IN_STEP:
            raise _Killed
        return self._runner.run(batch, self._engine.failing)


class Launcher:
    """Starts engines in lockstep, and knows them all."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.next_load = Load.WORKS
        self.engines: list[SteppedEngine] = []

    async def __call__(self, sock: socket.socket) -> EngineHandle:
        engine = SteppedEngine(sock.dup(), self.next_load, self._loop.time)
        self.engines.append(engine)
        return engine
