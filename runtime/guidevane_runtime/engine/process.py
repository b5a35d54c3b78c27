"""The engine process: read the settings, load the model, run the loop, and never outlive the server."""

import ctypes
import gc
import importlib
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import EngineFailed, EngineReady, EngineSettings
from guidevane_runtime.core.plan import ModelRunner
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.device import prepare_environment
from guidevane_runtime.engine.loop import EngineLoop
from guidevane_runtime.engine.mailbox import Mailbox, MailboxClosedError
from guidevane_runtime.errors import StartError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""prctl(2): the kernel sends this process a signal when its parent dies."""


class ModelShape(Protocol):
    @property
    def vocab_size(self) -> int: ...


class LoadedModel(Protocol):
    """What a loader hands over: a runner, and what the scheduler must know about it."""

    @property
    def runner(self) -> ModelRunner: ...
    @property
    def config(self) -> ModelShape: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


Loader = Callable[[EngineSettings], LoadedModel]


def main(mailbox_fd: int, loader_name: str) -> int:
    """Body of `python -m guidevane_runtime.engine`. Returns the exit status."""
    die_with_parent()
    # Signals go to the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(socket.socket(fileno=mailbox_fd))
    return serve(mailbox, lambda settings: load_model(settings, loader_name))


def die_with_parent() -> None:
    """Linux only; elsewhere the closed mailbox ends the engine at its next iteration."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_model(settings: EngineSettings, loader_name: str) -> LoadedModel:
    """Import the loader, `module:function`, only now: OpenMP reads its environment when torch is imported."""
    prepare_environment(settings.num_threads)
    module_name, _, function_name = loader_name.partition(":")
    loader: Loader = getattr(importlib.import_module(module_name), function_name)
    model = loader(settings)
    # It stays to the end of the process. Walking torch's objects again would hold a step up for 120 ms.
    gc.collect()
    gc.freeze()
    return model


def serve(mailbox: Mailbox, load: Loader, clock: Callable[[], float] = time.monotonic) -> int:
    """From the settings in the mailbox to its end. Returns the exit status: 0 after Shutdown, 1 after a failure."""
    try:
        loop = _start(mailbox, load, clock)
        loop.run()
    except MailboxClosedError:
        logger.info("server is gone, engine ends")
        return 1
    except StartError as error:
        return _give_up(mailbox, EngineFailed(str(error), fatal=True))
    except Exception as error:
        # The edge of the process: whatever it is, the server has to hear of it.
        logger.exception("engine failed")
        return _give_up(mailbox, EngineFailed(f"{type(error).__name__}: {error}", fatal=False))
    finally:
        mailbox.close()
    return 0


def _start(mailbox: Mailbox, load: Loader, clock: Callable[[], float]) -> EngineLoop:
    settings = _first_message(mailbox)
    started_s = clock()
    model = load(settings)
    max_model_len = min(model.max_model_len, settings.envelope.max_model_len or model.max_model_len)
    limits = fit_to_model(settings.limits, max_model_len)
    pool = BlockPool(model.num_blocks, model.block_size)
    boot_id = uuid.uuid4()
    scheduler = Scheduler(
        pool,
        limits,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        # A cache lives as long as this process and its one model, so the boot's id names the weights; it is random too.
        prefix_cache=PrefixCache(pool, model_digest=boot_id.bytes, is_enabled=settings.enable_prefix_caching),
    )
    ready = EngineReady(
        boot_id=boot_id.hex,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        dtype=model.dtype,
        device=model.device,
        limits=limits,
        load_s=clock() - started_s,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    logger.info("engine ready", extra={"boot_id": ready.boot_id, "load_s": round(ready.load_s, 3)})
    mailbox.put(ready)
    return EngineLoop(mailbox, scheduler, model.runner, clock)


def _first_message(mailbox: Mailbox) -> EngineSettings:
    # One message only: what the server sends while the model is loaded is for the loop.
    settings = mailbox.take_first()
    assert isinstance(settings, EngineSettings), "the server spoke before it sent the settings"
    return settings


def fit_to_model(limits: SchedulerLimits, max_model_len: int) -> SchedulerLimits:
    """Start-up limits with lengths that the model has; the server learns them from EngineReady."""
    names = ("max_model_len", "max_prompt_tokens", "max_output_tokens")
    tighter = {name: max_model_len for name in names if getattr(limits, name) > max_model_len}
    if tighter:
        logger.info("limits fitted to the model", extra=tighter)
    return limits.model_copy(update=tighter)


def _give_up(mailbox: Mailbox, failure: EngineFailed) -> int:
    try:
        mailbox.put(failure)
    except MailboxClosedError:
        logger.info("server is gone, nobody hears of the failure")
    return 1
