"""Goodput over sliding windows, per class × tenant × model × served site. Pure.

Decides which attempts a window (end − length, end] holds, by the time at which they finished, and what it says of them.
Attempts are summed into buckets of one step; a window is the sum of its buckets, to which they are added and from which
they are taken away as its end moves on. So memory follows the groups and not the load: counts and sums are exact,
percentiles come from a sketch (`sketch`) with a relative error of 0.5 %.

What comes late changes windows that were said already. Said again, with a higher revision, are the newest end and
every end that is a multiple of its window's length: those tile time, so that whoever adds them up is right in the end.
Refuses to know about messages, repeats and offices.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tokenfleet.accountant import sketch
from tokenfleet.accountant.policy import GROUP_OF
from tokenfleet.accountant.sketch import Sketch
from tokenfleet_schemas.goodput import Percentiles
from tokenfleet_schemas.outcome import Outcome

#: (service class, tenant, model, served site)
Group = tuple[str, str, str, str]

_COUNTS = ("offered", "completed", "compliant", "refused", "cancelled", "failed", "repeated")


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
    tpot_error_ms: float | None = None


class Sums(msgspec.Struct, array_like=True):
    """Of any number of attempts of one group; can be added to and taken from one another."""

    samples: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    output_tokens: int = 0
    compliant_tokens: int = 0
    wasted: dict[str, int] = {}
    ttft: Sketch = {}
    tpot: Sketch = {}
    ttft_error: Sketch = {}
    tpot_error: Sketch = {}

    def count(self, sample: Sample, places: "Places", sign: int = 1) -> None:
        """Let an attempt in, or out again with sign −1; `places` are its buckets in the sketches."""
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
            _tally(self.wasted, sample.wasted_cause, sign * sample.wasted_tokens)
        for values, place in zip((self.ttft, self.tpot, self.ttft_error, self.tpot_error), places, strict=True):
            if place is not None:
                sketch.add(values, place, sign)

    def merge(self, other: "Sums", sign: int = 1) -> None:
        """Let all attempts of another in, or out again."""
        self.samples += sign * other.samples
        for name, value in other.counts.items():
            self.counts[name] += sign * value
        self.output_tokens += sign * other.output_tokens
        self.compliant_tokens += sign * other.compliant_tokens
        for cause, tokens in other.wasted.items():
            _tally(self.wasted, cause, sign * tokens)
        sketch.merge(self.ttft, other.ttft, sign)
        sketch.merge(self.tpot, other.tpot, sign)
        sketch.merge(self.ttft_error, other.ttft_error, sign)
        sketch.merge(self.tpot_error, other.tpot_error, sign)


#: a sample's buckets in the sketches of TTFT, TPOT and their prediction errors; null: it has no such value
Places = tuple[int | None, int | None, int | None, int | None]


def places_of(sample: Sample) -> Places:
    """Worked out once for all sums that a sample goes into: a logarithm is what costs most of counting it."""
    bucket_of = sketch.bucket_of
    return (
        None if sample.ttft_ms is None else bucket_of(sample.ttft_ms),
        None if sample.tpot_ms is None else bucket_of(sample.tpot_ms),
        None if sample.ttft_error_ms is None else bucket_of(sample.ttft_error_ms),
        None if sample.tpot_error_ms is None else bucket_of(sample.tpot_error_ms),
    )


def _tally(tallies: dict[str, int], key: str, value: int) -> None:
    left = tallies.get(key, 0) + value
    if left:
        tallies[key] = left
    else:
        del tallies[key]


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
    #: final attempts that had a first token and a prediction of it
    predicted: int
    ttft_error_ms_p50: float | None
    ttft_abs_error_ms: Percentiles
    tpot_error_ms_p50: float | None

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

    @property
    def prediction_coverage(self) -> float | None:
        """Predicted over all final attempts with a first token; None without any."""
        return self.predicted / self.ttft_ms.count if self.ttft_ms.count else None


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What finished in one step, for a checkpoint."""

    group: Group
    end_ms: int
    sums: Sums


class _Window:
    """Sums over the buckets of one group in (low_ms, high_ms]."""

    def __init__(self, window_s: int, high_ms: int, kept_ms: int) -> None:
        self.length_ms = window_s * 1000
        self.kept_ms = kept_ms
        self.window_s = window_s
        self.high_ms = high_ms
        self.sums = Sums()
        #: differs from what was last said
        self.changed = False
        #: end → how often it has been said; of the present end and of earlier multiples of the length
        self.revisions: dict[int, int] = {}
        #: earlier multiples of the length that must be said (again)
        self.late: set[int] = set()

    @property
    def low_ms(self) -> int:
        return self.high_ms - self.length_ms

    def note(self, bucket_ms: int) -> bool:
        """A bucket changed: mark what must be said again; whether it is in the present window."""
        tile_ms = -(-bucket_ms // self.length_ms) * self.length_ms
        if tile_ms < self.high_ms and self._whole(tile_ms, self.high_ms):
            self.late.add(tile_ms)
        if self.low_ms < bucket_ms <= self.high_ms:
            self.changed = True
            return True
        return False

    def _whole(self, end_ms: int, high_ms: int) -> bool:
        """Whether all buckets of an earlier end are still kept."""
        return end_ms - self.length_ms >= high_ms - self.kept_ms

    def move(self, buckets: dict[int, Sums], end_ms: int, bucket_ms: int) -> None:
        """Slide to a later end."""
        old_low_ms, old_high_ms = self.low_ms, self.high_ms
        self.high_ms = end_ms
        if self.low_ms >= old_high_ms:
            self.changed = self.changed or self.sums.samples > 0
            self.sums = Sums()
        else:
            for one in _between(buckets, old_low_ms, self.low_ms, bucket_ms):
                self.sums.merge(one, -1)
                self.changed = True
        for one in _between(buckets, max(old_high_ms, self.low_ms), end_ms, bucket_ms):
            self.sums.merge(one)
            self.changed = True
        if not old_high_ms:
            return
        if end_ms % self.length_ms == 0 and self.sums.samples:
            self.changed = True
        # time jumped over ends that tile it: nobody has said what was in them
        tile_ms = (old_high_ms // self.length_ms + 1) * self.length_ms
        while tile_ms < end_ms:
            held = _between(buckets, tile_ms - self.length_ms, tile_ms, bucket_ms)
            if self._whole(tile_ms, old_high_ms) and any(one.samples for one in held):
                self.late.add(tile_ms)
            tile_ms += self.length_ms

    def said(self, group: Group, end_ms: int, sums: Sums) -> Measured:
        """What it says of one end."""
        revision = self.revisions.get(end_ms, 0)
        self.revisions[end_ms] = revision + 1
        return Measured(
            group=group,
            window_s=self.window_s,
            end_ms=end_ms,
            revision=revision,
            counts=dict(sums.counts),
            output_tokens=sums.output_tokens,
            compliant_tokens=sums.compliant_tokens,
            wasted_tokens=dict(sorted(sums.wasted.items())),
            ttft_ms=sketch.percentiles(sums.ttft),
            tpot_ms=sketch.percentiles(sums.tpot),
            predicted=sum(sums.ttft_error.values()),
            ttft_error_ms_p50=sketch.quantile(sums.ttft_error, 0.5),
            ttft_abs_error_ms=sketch.percentiles(sketch.absolute(sums.ttft_error)),
            tpot_error_ms_p50=sketch.quantile(sums.tpot_error, 0.5),
        )

    def say_again(self, buckets: dict[int, Sums], bucket_ms: int) -> None:
        """Nobody heard the last words: mark every end that tiles time, may still be mended, and is not empty."""
        tile_ms = self.high_ms // self.length_ms * self.length_ms
        while self._whole(tile_ms, self.high_ms):
            if any(one.samples for one in _between(buckets, tile_ms - self.length_ms, tile_ms, bucket_ms)):
                if tile_ms == self.high_ms:
                    self.changed = True
                else:
                    self.late.add(tile_ms)
            tile_ms -= self.length_ms
        self.changed = self.changed or self.sums.samples > 0

    def present(self, group: Group) -> Iterator[Measured]:
        """The present end, if there is news of it."""
        if self.changed:
            self.changed = False
            yield self.said(group, self.high_ms, self.sums)

    def corrected(self, group: Group, buckets: dict[int, Sums], bucket_ms: int) -> Iterator[Measured]:
        """Earlier ends that late arrivals changed, or that were never said."""
        for end_ms in sorted(self.late):
            sums = Sums()
            for one in _between(buckets, end_ms - self.length_ms, end_ms, bucket_ms):
                sums.merge(one)
            yield self.said(group, end_ms, sums)
        self.late.clear()

    def forget(self, before_ms: int) -> None:
        """Revisions of ends that cannot be said any more."""
        for end_ms in [one for one in self.revisions if one != self.high_ms]:
            if end_ms <= before_ms or end_ms % self.length_ms:
                del self.revisions[end_ms]


def _between(buckets: dict[int, Sums], low_ms: int, high_ms: int, bucket_ms: int) -> Iterator[Sums]:
    """Buckets that end in (low, high]."""
    if (high_ms - low_ms) // bucket_ms > len(buckets):
        yield from (sums for end_ms, sums in buckets.items() if low_ms < end_ms <= high_ms)
        return
    for end_ms in range((low_ms // bucket_ms + 1) * bucket_ms, high_ms + 1, bucket_ms):
        sums = buckets.get(end_ms)
        if sums is not None:
            yield sums


class _Group:
    def __init__(self, windows_s: Iterable[int], end_ms: int, kept_ms: int) -> None:
        self.buckets: dict[int, Sums] = {}
        self.windows = [_Window(window_s, end_ms, kept_ms) for window_s in windows_s]


class Windows:
    """All windows of all groups. Their ends move together, in whole steps."""

    def __init__(self, windows_s: Sequence[int], *, step_ms: int) -> None:
        self.step_ms = step_ms
        self.end_ms = 0
        self._groups: dict[Group, _Group] = {}
        self._measure(windows_s)

    def _measure(self, windows_s: Sequence[int]) -> None:
        self.windows_s = tuple(sorted(set(windows_s)))
        #: ends of windows and their beginnings are both ends of buckets
        self.bucket_ms = math.gcd(self.step_ms, *(1000 * window_s for window_s in self.windows_s))
        #: buckets are kept for twice the longest window, so that one that ended up to its own length ago can be mended
        self.kept_ms = 2000 * self.windows_s[-1]

    def __len__(self) -> int:
        return sum(sums.samples for group in self._groups.values() for sums in group.buckets.values())

    def buckets(self) -> Iterator[Bucket]:
        """Everything that is kept, for a checkpoint."""
        for key, group in self._groups.items():
            for end_ms, sums in group.buckets.items():
                yield Bucket(key, end_ms, sums)

    def load(self, buckets: Iterable[Bucket]) -> None:
        """Take over a checkpoint's buckets; those of another width cannot be divided and are left out."""
        for bucket in buckets:
            if bucket.end_ms % self.bucket_ms == 0:
                self._put(bucket)

    def _put(self, bucket: Bucket) -> None:
        group = self._group(bucket.group)
        group.buckets.setdefault(bucket.end_ms, Sums()).merge(bucket.sums)
        for window in group.windows:
            if window.low_ms < bucket.end_ms <= window.high_ms:
                window.sums.merge(bucket.sums)
                window.changed = True

    def _group(self, key: Group) -> _Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self.windows_s, self.end_ms, self.kept_ms)
        return group

    def _bucket_of(self, at_ms: float) -> int:
        return math.ceil(at_ms / self.bucket_ms) * self.bucket_ms

    def add(self, sample: Sample) -> bool:
        """Count a sample; False if it finished before every window that could still be said."""
        bucket_ms = self._bucket_of(sample.at_ms)
        if self.end_ms and bucket_ms <= self.end_ms - self.kept_ms:
            return False
        self._change(sample, bucket_ms, 1)
        return True

    def remove(self, sample: Sample) -> None:
        """Take back a sample that was added, as if it had never been; one that is gone already is fine."""
        bucket_ms = self._bucket_of(sample.at_ms)
        group = self._groups.get(sample.group)
        if group is not None and bucket_ms in group.buckets and bucket_ms > self.end_ms - self.kept_ms:
            self._change(sample, bucket_ms, -1)

    def _change(self, sample: Sample, bucket_ms: int, sign: int) -> None:
        group, places = self._group(sample.group), places_of(sample)
        group.buckets.setdefault(bucket_ms, Sums()).count(sample, places, sign)
        for window in group.windows:
            if self.end_ms and window.note(bucket_ms):
                window.sums.count(sample, places, sign)

    def reconfigure(self, windows_s: Sequence[int]) -> None:
        """Other lengths from now on; a longer one fills up as time goes by."""
        if tuple(sorted(set(windows_s))) == self.windows_s:
            return
        kept, width_ms = list(self.buckets()), self.bucket_ms
        self._groups = {}
        self._measure(windows_s)
        # a bucket is counted as of its end: of narrower steps than before none can be told apart
        if width_ms % self.bucket_ms == 0:
            for bucket in kept:
                self._put(bucket)

    def say_again(self) -> None:
        """With the next step, say all that is not empty once more, under higher revisions."""
        for group in self._groups.values():
            for window in group.windows:
                window.say_again(group.buckets, self.bucket_ms)

    def advance(self, now_ms: float) -> list[Measured]:
        """Move to the newest whole step; what must be said: late changes of earlier ends first, then the new end's.

        A window is said when it differs from what was last said of its length, so an emptied one is said once. At ends
        that are multiples of its length it is also said when it does not differ, unless it is empty.
        """
        end_ms = int(now_ms // self.step_ms) * self.step_ms
        if end_ms <= self.end_ms:
            return []
        said: list[Measured] = []
        gone_ms = end_ms - self.kept_ms
        for key, group in list(self._groups.items()):
            for window in group.windows:
                mended = list(window.corrected(key, group.buckets, self.bucket_ms))
                said += mended
                if self.end_ms:
                    said += window.present(key)
                window.move(group.buckets, end_ms, self.bucket_ms)
                jumped = list(window.corrected(key, group.buckets, self.bucket_ms))
                said += jumped
                # whoever takes the newest word for the present must not be left with an old end's
                window.changed = window.changed or bool(mended or jumped)
                said += window.present(key)
                window.forget(gone_ms)
            for bucket_ms in [one for one in group.buckets if one <= gone_ms]:
                del group.buckets[bucket_ms]
            if not group.buckets:
                del self._groups[key]
        self.end_ms = end_ms
        return said
