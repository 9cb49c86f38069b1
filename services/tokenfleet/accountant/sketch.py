"""Percentiles of any number of values in little memory, that can be merged and taken back. Pure.

The buckets are those of Datadog's `ddsketch` (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch
with relative-error guarantees", VLDB 2019): value x falls into bucket ⌈log_γ x⌉, γ = (1 + α) ÷ (1 − α), and the bucket
answers with a value that is at most α off. Counts per bucket are kept here and not in that library's stores (ADR 0014):
a sliding window must take away what left it, which they, made to be merged only, do not offer, and their quantiles
round a rank down where SQL's nearest rank rounds it up. No bucket is ever collapsed: from a microsecond to an hour
there are about 2,200.
"""

import math

from ddsketch.mapping import LogarithmicMapping

from tokenfleet_schemas.goodput import Percentiles

#: largest relative error of a value that is answered
RELATIVE_ERROR = 0.005
#: what is smaller counts as zero
SMALLEST = 0.001
#: shifts the buckets of values from `SMALLEST` on above zero
_OFFSET = 1 - math.ceil(math.log(SMALLEST, LogarithmicMapping(RELATIVE_ERROR).gamma))
_MAPPING = LogarithmicMapping(RELATIVE_ERROR, offset=_OFFSET)

#: bucket → values in it; buckets of negative values are negative, zero is zero
Sketch = dict[int, int]


def bucket_of(value: float) -> int:
    """The bucket of a finite value."""
    size = abs(value)
    if size < SMALLEST:
        return 0
    bucket: int = _MAPPING.key(size)
    return bucket if value > 0 else -bucket


def value_of(bucket: int) -> float:
    """What a bucket answers: at most `RELATIVE_ERROR` off every value in it."""
    if bucket == 0:
        return 0.0
    size: float = _MAPPING.value(abs(bucket))
    return size if bucket > 0 else -size


def add(sketch: Sketch, bucket: int, times: int = 1) -> None:
    """Let a value of this bucket in, or out again with −1."""
    left = sketch.get(bucket, 0) + times
    if left:
        sketch[bucket] = left
    else:
        del sketch[bucket]


def merge(sketch: Sketch, other: Sketch, sign: int = 1) -> None:
    """Let all values of another in, or out again with sign −1."""
    for bucket, times in other.items():
        add(sketch, bucket, sign * times)


def absolute(sketch: Sketch) -> Sketch:
    """Of the values without their signs."""
    folded: Sketch = {}
    for bucket, times in sketch.items():
        add(folded, abs(bucket), times)
    return folded


def quantiles(sketch: Sketch, wanted: tuple[float, ...]) -> list[float | None]:
    """By nearest rank: the smallest value that at least this share does not exceed; `wanted` must rise."""
    total = sum(sketch.values())
    if not total:
        return [None] * len(wanted)
    answers: list[float | None] = []
    seen = 0
    buckets = iter(sorted(sketch))
    bucket = 0
    for quantile in wanted:
        rank = max(1, math.ceil(quantile * total))
        while seen < rank:
            bucket = next(buckets)
            seen += sketch[bucket]
        answers.append(round(value_of(bucket), 3))
    return answers


def quantile(sketch: Sketch, wanted: float) -> float | None:
    """One of `quantiles`; None without values."""
    return quantiles(sketch, (wanted,))[0]


def percentiles(sketch: Sketch) -> Percentiles:
    """What is said of a window's times."""
    p50, p90, p95, p99 = quantiles(sketch, (0.5, 0.9, 0.95, 0.99))
    return Percentiles(count=sum(sketch.values()), p50=p50, p90=p90, p95=p95, p99=p99)
