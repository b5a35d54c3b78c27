"""Who changes limits during a run: a script that is a pure function of time, or a controller that sees samples.

A controller is anything with decide(FleetSample). The operator's tuner fits behind it: an adapter that lives with its
caller turns a FleetSample into the tuner's Snapshot and its Move into limits, so this package needs no operator.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits, limit_violations
from guidevane_bench.errors import InputError, sentence_of
from guidevane_bench.simulator.ledger import PodMeter
from guidevane_runtime.core.messages import EngineStats

UNBOUNDED = Envelope(max_num_seqs=65536, max_num_batched_tokens=1 << 22)
"""A simulated pod has no workspace that a limit could outgrow."""


@dataclass(frozen=True, slots=True)
class PodSample:
    """What a scrape of one pod shows."""

    pod: int
    stats: EngineStats
    meter: PodMeter
    """Latencies since the last scrape that succeeded."""
    num_ended: int
    """Requests that ended on it since the run began."""
    guard_level: int = 0


@dataclass(frozen=True, slots=True)
class FleetSample:
    """What a controller looks at. A pod that is dead, or whose metrics are missing, is None: unknown is never zero."""

    now_s: float
    limits: SchedulerLimits
    pods: tuple[PodSample | None, ...]


@dataclass(frozen=True, slots=True)
class LimitsOrder:
    """New limits for every pod."""

    limits: SchedulerLimits
    mode: ShrinkMode = ShrinkMode.DRAIN


class Controller(Protocol):
    """Called at every scrape; None changes nothing."""

    def decide(self, sample: FleetSample) -> LimitsOrder | None: ...


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """From at_s on, these fields have these values."""

    at_s: float
    limits: PartialLimits
    mode: ShrinkMode = ShrinkMode.DRAIN


class LimitsScript:
    """time -> limits. Each line adds to those before it."""

    def __init__(self, startup: SchedulerLimits, lines: Sequence[ScriptLine] = ()) -> None:
        ordered = sorted(lines, key=lambda line: line.at_s)
        self.times = tuple(line.at_s for line in ordered)
        self._modes = (ShrinkMode.DRAIN, *(line.mode for line in ordered))
        limits = [startup]
        for line in ordered:
            limits.append(limits[-1].merged(line.limits))
        self._limits = tuple(limits)
        self._ensure_consistent()

    def order_at(self, now_s: float) -> LimitsOrder:
        """What holds at a time."""
        index = bisect_right(self.times, now_s)
        return LimitsOrder(self._limits[index], self._modes[index])

    def _ensure_consistent(self) -> None:
        for at_s, limits in zip((0.0, *self.times), self._limits, strict=True):
            if found := limit_violations(limits, UNBOUNDED):
                raise InputError(f"limits at {at_s} s: {'; '.join(found.values())}")


def read_script(path: Path, startup: SchedulerLimits) -> LimitsScript:
    """JSON lines like {"at_s": 60, "limits": {"prefillChunkSize": 256}, "mode": "drain"}."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
        lines = [_script_line(number, text) for number, text in enumerate(texts, start=1) if text.strip()]
        return LimitsScript(startup, lines)
    except InputError as error:
        raise InputError(f"--limits-script {path}: {error}") from error
    except OSError as error:
        raise InputError(
            f"--limits-script {path} can't be read: {error.strerror}; give a file of JSON lines"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"--limits-script {path} is no text: {error}; give a file of JSON lines") from error


def _script_line(number: int, text: str) -> ScriptLine:
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or not {"at_s", "limits"} <= set(record) <= {"at_s", "limits", "mode"}:
            raise ValueError(f"it is {text.strip()}")
        at_s = float(record["at_s"])
        if not 0 <= at_s < inf:
            raise ValueError(f"at_s is {at_s}, which is no time of the run")
        mode = ShrinkMode(record.get("mode", ShrinkMode.DRAIN))
        return ScriptLine(at_s, PartialLimits.model_validate(record["limits"]), mode)
    except (TypeError, ValueError) as error:
        what = "a line is JSON with at_s in seconds, limits as in spec.limits, and mode where wanted"
        raise InputError(f"line {number}: {sentence_of(error)}; {what}") from error
