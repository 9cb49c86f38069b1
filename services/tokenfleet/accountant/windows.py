"""Goodput over sliding windows, per class × tenant × model × served site. Pure.

Decides which attempts a window (end − length, end] holds, by the time at which they finished, and what it says of them.
All figures are exact: samples are kept for the longest window and enter and leave each window's sums and sorted lists
as its end moves on. A sample that comes after its window was said makes that window be said again with a higher
revision. Refuses to know about messages, repeats and offices.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tokenfleet.accountant.policy import GROUP_OF
from tokenfleet_schemas.goodput import Percentiles
from tokenfleet_schemas.outcome import Outcome

#: (service class, tenant, model, served site)
Group = tuple[str, str, str, str]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One attempt, as the windows see it."""

    at_ms: float
    request_id: str
    attempt: int
    group: Group
    outcome: Outcome
    final: bool
    compliant: bool
    output_tokens: int
    wasted_tokens: int
    wasted_cause: str
    ttft_ms: float | None
    tpot_ms: float | None
    #: actual − predicted
    ttft_error_ms: float | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one window says of one group."""

    group: Group
    window_s: int
    end_ms: int
    revision: int
    counts: dict[str, int]
    output_tokens: int
    compliant_tokens: int
    wasted_tokens: dict[str, int]
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    ttft_error_ms_p50: float | None

    @property
    def output_tokens_per_s(self) -> float:
        """All delivered tokens by the window's length."""
        return self.output_tokens / self.window_s

    @property
    def goodput_tokens_per_s(self) -> float:
        """Tokens of compliant requests by the window's length."""
        return self.compliant_tokens / self.window_s

    @property
    def compliance_requests(self) -> float | None:
        """Compliant over offered requests; None when nothing was offered."""
        offered = self.counts["offered"]
        return self.counts["compliant"] / offered if offered else None


def nearest_rank(ordered: Sequence[float], quantile: float) -> float | None:
    """The smallest value that at least this share of the samples does not exceed; None without samples."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def percentiles(ordered: Sequence[float]) -> Percentiles:
    """Of sorted milliseconds, by nearest rank."""

    def at(quantile: float) -> float | None:
        value = nearest_rank(ordered, quantile)
        return None if value is None else round(value, 3)

    return Percentiles(count=len(ordered), p50=at(0.5), p90=at(0.9), p95=at(0.95), p99=at(0.99))


_COUNTS = ("offered", "completed", "compliant", "refused", "cancelled", "failed", "repeated")


class _Window:
    """Sums over the samples of one group in (low_ms, high_ms]."""

    def __init__(self, window_s: int, high_ms: int) -> None:
        self.window_s = window_s
        self.high_ms = high_ms
        #: of the present end: how often it has been said
        self.revision = 0
        #: differs from what was last said
        self.changed = False
        self.clear()

    @property
    def low_ms(self) -> int:
        return self.high_ms - self.window_s * 1000

    def clear(self) -> None:
        self.samples = 0
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.output_tokens = 0
        self.compliant_tokens = 0
        self.wasted: dict[str, int] = {}
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.error: list[float] = []

    def add(self, sample: Sample, sign: int = 1) -> None:
        """Let a sample in, or out again with sign −1."""
        self.changed = True
        self.samples += sign
        counts = self.counts
        if sample.final:
            counts["offered"] += sign
            counts[GROUP_OF[sample.outcome]] += sign
        else:
            counts["repeated"] += sign
        self.output_tokens += sign * sample.output_tokens
        if sample.compliant:
            counts["compliant"] += sign
            self.compliant_tokens += sign * sample.output_tokens
        if sample.wasted_tokens:
            left = self.wasted.get(sample.wasted_cause, 0) + sign * sample.wasted_tokens
            if left:
                self.wasted[sample.wasted_cause] = left
            else:
                del self.wasted[sample.wasted_cause]
        for values, value in (
            (self.ttft, sample.ttft_ms),
            (self.tpot, sample.tpot_ms),
            (self.error, sample.ttft_error_ms),
        ):
            if value is None:
                continue
            if sign > 0:
                bisect.insort(values, value)
            else:
                del values[bisect.bisect_left(values, value)]

    def move(self, samples: Sequence[Sample], end_ms: int) -> None:
        """Slide to a later end."""
        old_low, old_high = self.low_ms, self.high_ms
        self.high_ms, self.revision = end_ms, 0
        if self.low_ms >= old_high:
            self.changed = self.changed or self.samples > 0
            self.clear()
            old_high = self.low_ms
        else:
            for sample in _between(samples, old_low, self.low_ms):
                self.add(sample, -1)
        for sample in _between(samples, old_high, end_ms):
            self.add(sample)

    def measured(self, group: Group) -> Measured:
        """What it says now."""
        self.changed = False
        error = nearest_rank(self.error, 0.5)
        said = Measured(
            group=group,
            window_s=self.window_s,
            end_ms=self.high_ms,
            revision=self.revision,
            counts=dict(self.counts),
            output_tokens=self.output_tokens,
            compliant_tokens=self.compliant_tokens,
            wasted_tokens=dict(sorted(self.wasted.items())),
            ttft_ms=percentiles(self.ttft),
            tpot_ms=percentiles(self.tpot),
            ttft_error_ms_p50=None if error is None else round(error, 3),
        )
        self.revision += 1
        return said


def _finished(sample: Sample) -> float:
    return sample.at_ms


def _between(samples: Sequence[Sample], low_ms: float, high_ms: float) -> Sequence[Sample]:
    """Samples in (low, high]."""
    start = bisect.bisect_right(samples, low_ms, key=_finished)
    return samples[start : bisect.bisect_right(samples, high_ms, lo=start, key=_finished)]


class _Group:
    def __init__(self, windows_s: Iterable[int], end_ms: int) -> None:
        self.samples: list[Sample] = []
        self.windows = [_Window(window_s, end_ms) for window_s in windows_s]


class Windows:
    """All windows of all groups. Their ends move together, in whole steps."""

    def __init__(self, windows_s: Sequence[int], *, step_ms: int) -> None:
        self.windows_s = tuple(sorted(set(windows_s)))
        self.step_ms = step_ms
        self.end_ms = 0
        self._groups: dict[Group, _Group] = {}

    def __len__(self) -> int:
        return sum(len(group.samples) for group in self._groups.values())

    def samples(self) -> Iterator[Sample]:
        """Everything that is kept, for a checkpoint."""
        for group in self._groups.values():
            yield from group.samples

    def add(self, sample: Sample) -> bool:
        """Count a sample; False if it finished before every window that could still be said."""
        if self.end_ms and sample.at_ms <= self.end_ms - self.windows_s[-1] * 1000:
            return False
        group = self._groups.get(sample.group)
        if group is None:
            group = self._groups[sample.group] = _Group(self.windows_s, self.end_ms)
        bisect.insort_right(group.samples, sample, key=_finished)
        for window in group.windows:
            if window.low_ms < sample.at_ms <= window.high_ms:
                window.add(sample)
        return True

    def remove(self, sample: Sample) -> None:
        """Take a sample back, as if it had never been; one that is gone already is fine."""
        group = self._groups.get(sample.group)
        if group is None or sample not in _between(group.samples, math.nextafter(sample.at_ms, 0.0), sample.at_ms):
            return
        group.samples.remove(sample)
        for window in group.windows:
            if window.low_ms < sample.at_ms <= window.high_ms:
                window.add(sample, -1)

    def reconfigure(self, windows_s: Sequence[int]) -> None:
        """Other lengths from now on; a longer one fills up as time goes by."""
        wanted = tuple(sorted(set(windows_s)))
        if wanted == self.windows_s:
            return
        self.windows_s = wanted
        kept = list(self.samples())
        self._groups = {}
        for sample in kept:
            self.add(sample)

    def advance(self, now_ms: float) -> list[Measured]:
        """Move to the newest whole step; what must be said: late changes of the last end first, then the new end's.

        A window is said when it differs from what was last said of its length, so an emptied one is said once.
        """
        end_ms = int(now_ms // self.step_ms) * self.step_ms
        if end_ms <= self.end_ms:
            return []
        said: list[Measured] = []
        for key, group in list(self._groups.items()):
            if self.end_ms:
                said += [window.measured(key) for window in group.windows if window.changed]
            for window in group.windows:
                window.move(group.samples, end_ms)
            said += [window.measured(key) for window in group.windows if window.changed]
            gone = bisect.bisect_right(group.samples, float(end_ms - self.windows_s[-1] * 1000), key=_finished)
            del group.samples[:gone]
            if not group.samples:
                del self._groups[key]
        self.end_ms = end_ms
        return said
