"""Latencies as counts per logarithmic bucket: any number of samples in a few hundred integers, within 1 %."""

import math
from collections.abc import Mapping
from typing import Self

GROWTH = 1.01
"""Width of a bucket as a ratio: a percentile is off by half of it."""

SMALLEST_S = 1e-6

_SCALE = 1 / math.log(GROWTH)


class LatencyHistogram:
    """Seconds. What is below a microsecond counts as 0."""

    __slots__ = ("_counts", "_last_bucket", "_last_s", "largest_s", "num_samples", "total_s")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num_samples = 0
        self.total_s = 0.0
        self.largest_s = 0.0
        self._last_s = -1.0
        self._last_bucket = 0

    def add(self, seconds: float) -> None:
        # All decodes of a step see the same gap: its bucket is looked up once.
        if seconds != self._last_s:
            self._last_s = seconds
            self._last_bucket = int(math.log(seconds / SMALLEST_S) * _SCALE) + 1 if seconds >= SMALLEST_S else 0
            if seconds > self.largest_s:
                self.largest_s = seconds
        bucket = self._last_bucket
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.num_samples += 1
        self.total_s += seconds

    def merge(self, other: Self) -> None:
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.num_samples += other.num_samples
        self.total_s += other.total_s
        self.largest_s = max(self.largest_s, other.largest_s)

    def quantile(self, share: float) -> float | None:
        """The middle of the bucket that holds the sample of that rank; None without samples."""
        rank = math.ceil(share * self.num_samples)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return min(_middle_s(bucket), self.largest_s)
        return None

    @property
    def mean_ms(self) -> float | None:
        """Milliseconds; None without samples."""
        return 1000 * self.total_s / self.num_samples if self.num_samples else None

    def summary(self) -> Mapping[str, float | int | None]:
        """Milliseconds, rounded to a microsecond."""
        largest_s = self.largest_s if self.num_samples else None
        return {
            "num_samples": self.num_samples,
            "mean_ms": None if self.mean_ms is None else round(self.mean_ms, 3),
            "p50_ms": _ms(self.quantile(0.50)),
            "p95_ms": _ms(self.quantile(0.95)),
            "p99_ms": _ms(self.quantile(0.99)),
            "max_ms": _ms(largest_s),
        }

    def curve(self) -> list[tuple[float, float]]:
        """(milliseconds, share of samples at or below), ascending: a cumulative distribution to plot."""
        points, seen = [], 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            points.append((round(_middle_s(bucket) * 1000, 3), round(seen / self.num_samples, 6)))
        return points


def _middle_s(bucket: int) -> float:
    return SMALLEST_S * GROWTH ** (bucket - 0.5) if bucket else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
