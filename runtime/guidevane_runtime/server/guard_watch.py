"""Once a second: ask the guard, export what it says, and hand the engine what is obeyed now. Decides nothing itself."""

import asyncio
import logging

from guidevane_runtime.core.guard import Guard, GuardDecision
from guidevane_runtime.core.messages import SetLimits
from guidevane_runtime.errors import EngineUnavailable
from guidevane_runtime.server.services import Services

logger = logging.getLogger(__name__)

TICK_S = 1.0
HAND_OVER_TIMEOUT_S = 30.0
"""Longest wait for the engine's next iteration: above its longest step."""


async def watch_guard(services: Services, guard: Guard, tick_s: float = TICK_S) -> None:
    """Runs until cancelled."""
    while True:
        await asyncio.sleep(tick_s)
        await tick(services, guard)


async def tick(services: Services, guard: Guard) -> None:
    decision = guard.tick(services.clock(), services.limits.target, services.stats.oldest_waiting_s)
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
