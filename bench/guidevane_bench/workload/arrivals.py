"""Arrival times from generators: memoryless, bursty, ramps, on and off, day and night, or a recorded rate curve.

A rate that changes is thinned from a Poisson stream at its peak (Lewis & Shedler 1979): exact for any bounded curve.
"""

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from guidevane_bench.errors import InputError, SpecError, sentence_of
from guidevane_bench.workload.specs import Known, Spec, parse_spec

KINDS: Known = {
    "poisson": {"rate": None},
    "gamma": {"rate": None, "cv": None},
    "ramp": {"start": None, "end": None},
    "onoff": {"rate": None, "on": 30.0, "off": 30.0},
    "diurnal": {"rate": None, "amplitude": 0.8, "period": 86400.0},
}
"""Rates in requests per second, times in seconds. gamma: cv is that of the gaps, 1 is Poisson, more is burstier."""


def arrival_times(text: str, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Times in [0, duration_s), ascending. `text` is a kind of KINDS, or curve:FILE=peak rate."""
    if text.startswith("curve:"):
        return _curve(text, duration_s, rng)
    spec = parse_spec("--arrivals", text, KINDS)
    if spec.kind == "poisson":
        return _renewal(lambda: rng.expovariate(spec["rate"]), duration_s)
    if spec.kind == "gamma":
        shape = spec["cv"] ** -2
        return _renewal(lambda: rng.gammavariate(shape, 1 / (shape * spec["rate"])), duration_s)
    rate_at, peak = _changing_rate(spec, duration_s)
    return thinned(rate_at, peak, duration_s, rng)


def _renewal(gap_s: Callable[[], float], duration_s: float) -> Iterator[float]:
    now_s = gap_s()
    while now_s < duration_s:
        yield now_s
        now_s += gap_s()


def thinned(rate_at: Callable[[float], float], peak: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """A Poisson stream whose rate is rate_at(t), nowhere above `peak`."""
    return (t for t in _renewal(lambda: rng.expovariate(peak), duration_s) if rng.random() * peak < rate_at(t))


def _changing_rate(spec: Spec, duration_s: float) -> tuple[Callable[[float], float], float]:
    """The rate as a function of time, and its peak."""
    if spec.kind == "ramp":
        start, end = spec["start"], spec["end"]
        return (lambda t: start + (end - start) * t / duration_s), max(start, end)
    rate = spec["rate"]
    if spec.kind == "onoff":
        on_s, cycle_s = spec["on"], spec["on"] + spec["off"]
        return (lambda t: rate if t % cycle_s < on_s else 0.0), rate
    amplitude, period_s = spec["amplitude"], spec["period"]
    if amplitude > 1:
        raise SpecError(f"--arrivals diurnal has amplitude {amplitude}, the rate would fall below 0; give 1 at most")
    # A day begins at its trough.
    return (lambda t: rate * (1 - amplitude * math.cos(2 * math.pi * t / period_s))), rate * (1 + amplitude)


def _curve(text: str, duration_s: float, rng: random.Random) -> Iterator[float]:
    name, _, peak_text = text.removeprefix("curve:").rpartition("=")
    if not name:
        raise SpecError(f"--arrivals {text!r} has no peak; write curve:FILE=PEAK_RATE")
    peak = parse_spec("--arrivals", f"poisson:rate={peak_text}", KINDS)["rate"]
    times, rates = read_rate_curve(Path(name))
    return thinned(lambda t: peak * rates[max(0, bisect_right(times, t) - 1)], peak, duration_s, rng)


def read_rate_curve(path: Path) -> tuple[list[float], list[float]]:
    """Columns t_s and relative_rate (0 to 1, piecewise constant) of a CSV."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(float(row["t_s"]), float(row["relative_rate"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"rate curve {path} can't be read: {error.strerror}; give the path of a CSV") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(
            f"rate curve {path}: {sentence_of(error)}; it has the columns t_s and relative_rate"
        ) from error
    if not rows or any(not (0 <= rate <= 1 and 0 <= t < math.inf) for t, rate in rows):
        raise InputError(f"rate curve {path} needs at least one row, times from 0 on and rates between 0 and 1")
    rows.sort()
    return [t for t, _ in rows], [rate for _, rate in rows]
