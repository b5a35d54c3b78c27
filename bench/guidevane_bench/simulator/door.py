"""The admission ladder of one pod, as its server applies it: cheapest rung first, each with its reason.

The rungs and their arithmetic are those of guidevane_runtime.server.admission. Draining, auth and validation have no
place in a simulation.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.simulator.ledger import Entry
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.block_pool import BlockPool


class Rejection(StrEnum):
    """Label `reason` of guidevane_admission_rejections_total; NO_POD is the router's."""

    QUEUE_FULL = "concurrency"
    QUEUED_TOKENS = "token_budget"
    CONTEXT_LENGTH = "context_length"
    NEVER_FITS = "memory"
    LONG_CONTEXT = "long_context"
    NO_POD = "no_pod"


class Reported(NamedTuple):
    """What the server knows of the engine: as it stood after the last step."""

    num_running: int
    num_waiting: int


def find_rejection(
    request: LoadRequest,
    live: Collection[Entry],
    reported: Reported,
    limits: SchedulerLimits,
    pool: BlockPool,
    *,
    refuses_long_context: bool = False,
) -> Rejection | None:
    """Why a pod that holds `live` refuses one more; None when it does not."""
    running = reported.num_running if reported.num_waiting else max(limits.max_num_seqs, reported.num_running)
    if len(live) + 1 > running + limits.max_queued_requests:
        return Rejection.QUEUE_FULL
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    if prompt > limits.max_prompt_tokens or output > limits.max_output_tokens:
        return Rejection.CONTEXT_LENGTH
    if prompt + output > limits.max_model_len:
        return Rejection.CONTEXT_LENGTH
    if prompt + 1 > pool.num_tokens:
        return Rejection.NEVER_FITS
    queued = sum(entry.request.num_prompt_tokens for entry in live if not entry.num_tokens)
    if queued and queued + prompt > limits.max_queued_tokens:
        return Rejection.QUEUED_TOKENS
    if refuses_long_context and live and prompt > limits.long_context_threshold_tokens:
        return Rejection.LONG_CONTEXT
    return None
