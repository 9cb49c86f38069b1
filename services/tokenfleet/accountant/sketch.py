"""Percentiles of any number of values in little memory, that can be merged and taken back. Pure.

The buckets of DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with relative-error
guarantees", VLDB 2019): value x falls into bucket ⌈log_γ x⌉, γ = (1 + α) ÷ (1 − α), and the bucket answers with a value
that is at most α off. Kept as counts per bucket, because a sliding window must take away what left it, which the
published implementations, made to be merged only, do not offer. No bucket is ever collapsed: from a microsecond to an
hour there are about 2,200.
"""

import math

from tokenfleet_schemas.goodput import Percentiles

#: largest relative error of a value that is answered
RELATIVE_ERROR = 0.005
#: what is smaller counts as zero
SMALLEST = 0.001
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)

#: bucket → values in it; buckets of negative values are negative, zero is zero
Sketch = dict[int, int]


def bucket_of(value: float) -> int:
    """The bucket of a finite value."""
    size = abs(value)
    if size < SMALLEST:
        return 0
    bucket = math.ceil(math.log(size / SMALLEST) / _LOG_GAMMA) + 1
    return bucket if value > 0 else -bucket


def value_of(bucket: int) -> float:
    """What a bucket answers: at most `RELATIVE_ERROR` off every value in it."""
    if bucket == 0:
        return 0.0
    size: float = SMALLEST * 2 * _GAMMA ** (abs(bucket) - 1) / (_GAMMA + 1)
    return size if bucket > 0 else -size


def add(sketch: Sketch, value: float, times: int = 1) -> None:
    """Let a value in, or out again with −1."""
    _change(sketch, bucket_of(value), times)


def merge(sketch: Sketch, other: Sketch, sign: int = 1) -> None:
    """Let all values of another in, or out again with sign −1."""
    for bucket, times in other.items():
        _change(sketch, bucket, sign * times)


def _change(sketch: Sketch, bucket: int, times: int) -> None:
    left = sketch.get(bucket, 0) + times
    if left:
        sketch[bucket] = left
    else:
        del sketch[bucket]


def absolute(sketch: Sketch) -> Sketch:
    """Of the values without their signs."""
    folded: Sketch = {}
    for bucket, times in sketch.items():
        _change(folded, abs(bucket), times)
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
