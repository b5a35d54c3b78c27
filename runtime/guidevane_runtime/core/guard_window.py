"""Sliding windows over samples: time-bucketed, in constant memory, empty again when nothing comes any more.

A window knows numbers and their times; it never sees what they measure.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field

NUM_BUCKETS = 10
"""Of one window: it slides in tenths of its length."""
RESOLUTION = 1.02
"""Ratio of two neighbouring classes of a histogram: a quantile is right within 1 %."""
SMALLEST = 1e-6
"""Values below it count as it: a logarithm needs one."""


@dataclass(slots=True)
class _Bucket:
    """The samples of one tenth of the window."""

    number: int
    count: int = 0
    total: float = 0.0
    classes: Counter[int] = field(default_factory=Counter)


class Window(ABC):
    """The samples of the last window_s seconds, as one number; None below min_samples: too few say nothing."""

    def __init__(self, window_s: float, min_samples: int) -> None:
        self._bucket_s = window_s / NUM_BUCKETS
        self._min_samples = min_samples
        self._buckets: deque[_Bucket] = deque()

    def add(self, time_s: float, value: float) -> None:
        number = math.floor(time_s / self._bucket_s)
        if not self._buckets or number > self._buckets[-1].number:
            self._buckets.append(_Bucket(number))
            self._forget_before(number)
        # A sample that is late counts now: the clocks of its senders may differ by a little.
        self._put(self._buckets[-1], value)

    def value(self, now_s: float) -> float | None:
        self._forget_before(math.floor(now_s / self._bucket_s))
        if sum(bucket.count for bucket in self._buckets) < self._min_samples:
            return None
        return self._summary(self._buckets)

    def _forget_before(self, number: int) -> None:
        while self._buckets and self._buckets[0].number <= number - NUM_BUCKETS:
            self._buckets.popleft()

    @abstractmethod
    def _put(self, bucket: _Bucket, value: float) -> None: ...

    @abstractmethod
    def _summary(self, buckets: deque[_Bucket]) -> float: ...


class MeanWindow(Window):
    """Mean of the samples. Of samples that are 0 or 100 it is a share in percent."""

    def _put(self, bucket: _Bucket, value: float) -> None:
        bucket.count += 1
        bucket.total += value

    def _summary(self, buckets: deque[_Bucket]) -> float:
        return sum(bucket.total for bucket in buckets) / sum(bucket.count for bucket in buckets)


class QuantileWindow(Window):
    """A quantile of the samples, by a histogram of logarithmic classes."""

    def __init__(self, window_s: float, min_samples: int, quantile: float) -> None:
        super().__init__(window_s, min_samples)
        self._quantile = quantile

    def _put(self, bucket: _Bucket, value: float) -> None:
        bucket.count += 1
        bucket.classes[math.floor(math.log(max(value, SMALLEST), RESOLUTION))] += 1

    def _summary(self, buckets: deque[_Bucket]) -> float:
        classes: Counter[int] = sum((bucket.classes for bucket in buckets), Counter())
        rank = math.ceil(self._quantile * classes.total())
        below = 0
        for number in sorted(classes):
            below += classes[number]
            if below >= rank:
                return float(RESOLUTION ** (number + 0.5))
        raise AssertionError("a quantile was asked of no samples; min_samples is at least 1")
