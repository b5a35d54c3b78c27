"""How far a simulation is, for a person at a terminal: a log file has no such lines, a report no wall clock in it."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from guidevane_bench.workload.request import LoadRequest

INTERVAL_S = 0.5
"""Between two looks at the terminal; a run that is over sooner says nothing."""
CLEAR_LINE = "\r\x1b[K"


@contextmanager
def shown(
    requests: list[LoadRequest], stream: TextIO, now_s: Callable[[], float] = time.monotonic
) -> Iterator[Iterable[LoadRequest]]:
    """The same requests; each that is taken moves the line on. It is gone at the end, whatever comes then."""
    if not stream.isatty():
        yield requests
        return
    try:
        yield _followed(requests, stream, now_s)
    finally:
        stream.write(CLEAR_LINE)
        stream.flush()


def _followed(requests: list[LoadRequest], stream: TextIO, now_s: Callable[[], float]) -> Iterator[LoadRequest]:
    begun_s = last_s = now_s()
    last_arrival_s = requests[-1].arrival_s if requests else 0.0
    for number, request in enumerate(requests):
        elapsed_s = now_s() - begun_s
        if begun_s + elapsed_s - last_s >= INTERVAL_S:
            last_s = begun_s + elapsed_s
            stream.write(
                f"{CLEAR_LINE}{request.arrival_s:.0f} of {last_arrival_s:.0f} s simulated, "
                f"{number} of {len(requests)} requests, {elapsed_s:.0f} s so far"
            )
            stream.flush()
        yield request
