"""Once a second: ask the guard, export what it says, and hand the engine what is obeyed now. Decides nothing itself."""

import asyncio
import logging
from collections.abc import Mapping

from guidevane_api.pod_files import GuardMode, ProtectionLines
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import SetLimits, SetTargets
from guidevane_runtime.errors import EngineUnavailable
from guidevane_runtime.server.services import Services
from guidevane_runtime.server.watched_file import WatchedFile

logger = logging.getLogger(__name__)

TICK_S = 1.0
HAND_OVER_TIMEOUT_S = 30.0
"""Longest wait for the engine's next iteration: above its longest step."""
LINES: Mapping[str, Line] = {
    "ttft_p95_milliseconds": Line.TTFT,
    "itl_p95_milliseconds": Line.ITL,
    "queue_wait_p95_milliseconds": Line.QUEUE_WAIT,
    "kv_cache_utilization_max_percent": Line.KV_USE,
    "admission_reject_rate_max_percent": Line.REJECTS,
}
"""By field of ProtectionLines."""


def build_guard(flags: ProtectionLines, slo_file: WatchedFile[ProtectionLines] | None) -> Guard | None:
    """None if it is off for good: a file may switch it on later. Raises StartError for a bad file."""
    if slo_file is None and flags.mode is GuardMode.OFF:
        return None
    guard = Guard(GuardConfig({}))
    protect(guard, slo_file.read() if slo_file else flags)
    return guard


async def watch_guard(
    services: Services, guard: Guard, slo_file: WatchedFile[ProtectionLines] | None = None, tick_s: float = TICK_S
) -> None:
    """Runs until cancelled. What slo_file says is protected from the next tick on."""
    while True:
        await asyncio.sleep(tick_s)
        if slo_file is not None and (changed := slo_file.changed()) is not None:
            protect(guard, changed)
            services.engine.set_targets(targets_of(guard))
            logger.info("protection lines changed", extra={"mode": changed.mode.value, **changed.given()})
        await tick(services, guard)


def protect(guard: Guard, protection: ProtectionLines) -> None:
    """Tell the guard what to protect, and whether to act."""
    if protection.mode is GuardMode.OFF:
        guard.stand_down()
        return
    lines = {LINES[name]: float(bound) for name, bound in protection.given().items()}
    guard.protect(lines, dry_run=protection.mode is GuardMode.DRY_RUN)


def targets_of(guard: Guard) -> SetTargets:
    """What the scheduler is to keep steps to while the guard protects what it does."""
    return SetTargets(guard.config.itl_target_s)


async def tick(services: Services, guard: Guard) -> None:
    decision = guard.tick(services.clock(), services.limits.target, services.stats.oldest_interactive_waiting_s)
    services.metrics.guard_ticked(decision)
    # The earliest time at which a step can be taken back is the best estimate of when to try again.
    services.gate.long_context_pause_s = guard.config.t_down_s if decision.effect.refuses_long_context else None
    if services.tenants.pause_offline(decision.effect.pauses_offline):
        services.engine.set_tenants(services.tenants.command)
    if decision.reason:
        _log(decision, dry_run=guard.config.dry_run)
    command = services.limits.follow_guard()
    if command is not None:
        await _hand_over(services, command)


async def _hand_over(services: Services, command: SetLimits) -> None:
    try:
        async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
            await services.engine.set_limits(command)
    except (TimeoutError, EngineUnavailable) as error:
        # The client hands the limits to the next engine, so nothing is lost.
        logger.warning("the guard's limits wait for the engine", extra={"reason": str(error)})


def _log(decision: GuardDecision, *, dry_run: bool) -> None:
    details = {"level": decision.level, "reason": decision.reason, "dry_run": dry_run}
    logger.warning("guard moved", extra={**details, "breached": ",".join(sorted(decision.breached))})
