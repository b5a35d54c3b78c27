"""What handlers work with. One object in the app; nothing is read from globals."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from guidevane_api.pod_files import ProtectionLines
from guidevane_runtime.core.door import AdmissionGate, Capacity, Refused, Rejection, Reported
from guidevane_runtime.core.guard import Guard
from guidevane_runtime.core.messages import EngineStats, StepReport
from guidevane_runtime.engine.client import EngineClient
from guidevane_runtime.errors import GuidevaneError, NotFound
from guidevane_runtime.server.admission import rejection_reason
from guidevane_runtime.server.bodies import BodyReader
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.live_requests import LiveRequests
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.tenants_keeper import TenantsKeeper
from guidevane_runtime.server.text.chat_template import ChatTemplate
from guidevane_runtime.server.text.tokenizer import Tokenizer
from guidevane_runtime.server.watched_file import WatchedFile

logger = logging.getLogger(__name__)

THREADED_SIZE = 32 << 10
"""Bytes or characters from which work goes to a thread: on the event loop it would hold up /health and every stream."""

Result = TypeVar("Result")


@dataclass(slots=True)
class Services:
    """The server's parts. `ready` comes and goes with the engine."""

    model_name: str
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    gate: AdmissionGate
    limits: LimitsKeeper
    tenants: TenantsKeeper
    bodies: BodyReader
    metrics: ServerMetrics
    pool: Executor
    hang_after_s: float
    """Silence of the engine after which the pod is not ready."""
    guard: Guard | None = None
    """None: it is off."""
    slo_file: WatchedFile[ProtectionLines] | None = None
    """Where the guard's lines come from, if they may change."""
    clock: Callable[[], float] = time.monotonic
    live: LiveRequests = field(default_factory=LiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in s; of the model's entry in /v1/models."""
    _num_hit_tokens: int = 0
    """Found in the prefix cache, as the present engine last said."""

    @property
    def vocab_size(self) -> int:
        """Ids that the model has rows for."""
        ready = self.engine.ready
        return ready.vocab_size if ready else self.tokenizer.num_tokens

    @property
    def stats(self) -> EngineStats:
        report = self.engine.last_report
        return report.stats if report else EngineStats()

    @property
    def is_hung(self) -> bool:
        """Whether the engine has been silent for too long."""
        age_s = self.engine.heartbeat_age_s(self.clock())
        return age_s is not None and age_s > self.hang_after_s

    def note_engine(self) -> None:
        """If an engine that was not known before takes requests now, tell everybody."""
        ready = self.engine.ready
        if ready is None or ready.boot_id == self.limits.boot_id:
            return
        if self.limits.boot_id:
            self.metrics.engine_restarted()
        self.limits.engine_ready(ready)
        self.metrics.engine_ready(ready)
        self.metrics.limits_target(self.limits.target)
        self.gate.engine_ready(Capacity(ready.num_blocks, ready.block_size), ready.load_s)
        details = {"model": self.model_name, "boot_id": ready.boot_id, "num_blocks": ready.num_blocks}
        logger.info("engine ready", extra={**details, "dtype": ready.dtype, "load_s": round(ready.load_s, 2)})

    def engine_reported(self, report: StepReport) -> None:
        """Take the report of a step or of an idle second."""
        self.note_engine()
        stats = report.stats
        num_prompt_tokens = report.num_prefill_tokens + stats.num_prefix_hit_tokens - self._num_hit_tokens
        self._num_hit_tokens = stats.num_prefix_hit_tokens
        self.gate.observe(Reported(stats.num_running, stats.num_waiting, num_prompt_tokens, report.step_s))
        self.metrics.step(report)
        if report.effective is not None:
            self.limits.effective = report.effective

    def engine_lost(self) -> None:
        """The engine is gone; its client has told every request."""
        self.gate.engine_lost()
        self._num_hit_tokens = 0
        self.metrics.engine_lost()

    def check_open(self) -> None:
        """503 unless a request sent now would be served: loaded, not draining, and the engine speaks."""
        self.gate.check_open()
        if self.is_hung:
            message = f"the engine has been silent for more than {self.hang_after_s:.0f} s"
            raise Refused(Rejection.NOT_READY, message, self.hang_after_s)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here; a body without one means the only one."""
        if name is not None and name != self.model_name:
            raise NotFound(
                f"model {name[:100]!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    async def off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """Do work on so many bytes or characters, in a thread if it is much."""
        if size <= THREADED_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. One piece of work each: what is left is not done for a client that is gone."""
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        size = sum(map(len, texts))
        return [await self.off_loop(size, functools.partial(encode, text)) for text in texts]

    @contextmanager
    def door(self, tenant: str | None = None) -> Iterator[None]:
        """Count what is refused inside, by reason; None: nobody knows yet whose it is."""
        try:
            yield
        except (Refused, GuidevaneError) as error:
            self.metrics.rejected(rejection_reason(error), tenant)
            raise


SERVICES = web.AppKey("services", Services)
