"""Sliding windows against the plainest possible computation of the same thing."""

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from ddsketch import DDSketch
from ddsketch.mapping import LogarithmicMapping

from tokenfleet.accountant import sketch
from tokenfleet.accountant.policy import GROUP_OF
from tokenfleet.accountant.sketch import RELATIVE_ERROR
from tokenfleet.accountant.windows import Group, Measured, Sample, Windows
from tokenfleet_schemas.outcome import Outcome

WINDOWS_S = (10, 60, 300)
T0 = 1_800_000_000_000
CHAT: Group = ("chat", "acme", "m", "b")
OUTCOMES: tuple[Outcome, ...] = ("completed", "completed", "completed", "refused", "cancelled", "failed_midstream")


def sample(
    at_ms: float, number: int = 0, *, group: Group = CHAT, outcome: Outcome = "completed", compliant: bool = True,
    final: bool = True, tokens: int = 10, ttft_ms: float | None = 100.0,
) -> Sample:  # fmt: skip
    compliant = compliant and outcome == "completed" and final
    return Sample(
        at_ms=at_ms,
        request_id=f"r{number}",
        attempt=1,
        group=group,
        outcome=outcome,
        final=final,
        compliant=compliant,
        output_tokens=tokens,
        wasted_tokens=0 if compliant else tokens,
        wasted_cause="" if compliant else outcome,
        ttft_ms=ttft_ms,
        tpot_ms=None if ttft_ms is None else ttft_ms / 10,
        ttft_error_ms=None,
    )


def close(found: float | None, exact: float | None) -> bool:
    """Within the sketch's stated error, and the millisecond's thousandth to which it is said."""
    if found is None or exact is None:
        return found is exact
    return abs(found - exact) <= RELATIVE_ERROR * abs(exact) + 0.001


class Approximate:
    """A count, which must be equal, and a percentile, which must be close."""

    def __init__(self, count: int, p95: float | None) -> None:
        self.count, self.p95 = count, p95

    def __eq__(self, other: object) -> bool:
        # in either order: what is compared is one exact and one answered value, or two answered ones
        assert isinstance(other, Approximate)
        return self.count == other.count and (close(self.p95, other.p95) or close(other.p95, self.p95))

    __hash__ = None  # type: ignore[assignment]  # equality is not transitive


def brute(samples: Sequence[Sample], group: Group, window_s: int, end_ms: int) -> dict[str, object]:
    """What a window holds, computed from scratch."""
    held = [s for s in samples if s.group == group and end_ms - window_s * 1000 < s.at_ms <= end_ms]
    counts = dict.fromkeys(("offered", "completed", "compliant", "refused", "cancelled", "failed", "repeated"), 0)
    for one in held:
        counts["offered" if one.final else "repeated"] += 1
        if one.final:
            counts[GROUP_OF[one.outcome]] += 1
        counts["compliant"] += one.compliant
    ttft = sorted(s.ttft_ms for s in held if s.ttft_ms is not None)
    wasted: dict[str, int] = {}
    for one in held:
        if one.wasted_tokens:
            wasted[one.wasted_cause] = wasted.get(one.wasted_cause, 0) + one.wasted_tokens
    return {
        "counts": counts,
        "output_tokens": sum(s.output_tokens for s in held),
        "compliant_tokens": sum(s.output_tokens for s in held if s.compliant),
        "wasted": wasted,
        "ttft": Approximate(len(ttft), ttft[math.ceil(0.95 * len(ttft)) - 1] if ttft else None),
    }


def told(measured: Measured) -> dict[str, object]:
    return {
        "counts": measured.counts,
        "output_tokens": measured.output_tokens,
        "compliant_tokens": measured.compliant_tokens,
        "wasted": measured.wasted_tokens,
        "ttft": Approximate(measured.ttft_ms.count, measured.ttft_ms.p95),
    }


@pytest.mark.parametrize("seed", range(12))
def test_windows_say_what_a_plain_recount_says(seed: int) -> None:
    """Late, withdrawn and burst arrivals over ten minutes: after every step the last word on each window is right."""
    rng = random.Random(seed)
    windows = Windows(WINDOWS_S, step_ms=2000)
    groups: list[Group] = [CHAT, ("batch", "acme", "m", "c"), ("chat", "other", "n", "")]
    kept: list[Sample] = []
    last: dict[tuple[Group, int, int], Measured] = {}
    now_ms, number = float(T0), 0
    while now_ms < T0 + 600_000:
        now_ms += rng.choice((100, 700, 1500, 2500, 30_000 if rng.random() < 0.05 else 400))
        quiet = T0 + 250_000 < now_ms < T0 + 280_000
        for _ in range(0 if quiet else rng.randrange(6)):
            number += 1
            late_ms = rng.choice((0.0, 5.0, 900.0, 3100.0, 15_000.0, 100_000.0))
            one = sample(
                now_ms - late_ms,
                number,
                group=rng.choice(groups),
                outcome=rng.choice(OUTCOMES),
                compliant=rng.random() < 0.7,
                final=rng.random() < 0.9,
                tokens=rng.randrange(50),
                ttft_ms=rng.choice((None, round(rng.uniform(1, 999), 3))),
            )
            assert windows.add(one)
            kept.append(one)
        recent = [one for one in kept if one.at_ms > now_ms - 120_000]
        if recent and rng.random() < 0.2:
            gone = rng.choice(recent)
            kept.remove(gone)
            windows.remove(gone)
        before = windows.end_ms
        said = windows.advance(now_ms)
        if windows.end_ms == before:
            continue
        for measured in said:
            known = last.get((measured.group, measured.window_s, measured.end_ms))
            assert known is None or measured.revision == known.revision + 1
            last[measured.group, measured.window_s, measured.end_ms] = measured
        for end_ms in {before, windows.end_ms} - {0}:
            for group in groups:
                for window_s in WINDOWS_S:
                    expected = brute(kept, group, window_s, end_ms)
                    found = last.get((group, window_s, end_ms))
                    if found is not None:
                        assert told(found) == expected, (group, window_s, end_ms)
                    elif end_ms == windows.end_ms:
                        # silent: nothing entered or left since it was last said
                        ends = [end for (g, w, end) in last if (g, w) == (group, window_s)]
                        earlier = told(last[group, window_s, max(ends)]) if ends else None
                        assert expected == (earlier or brute([], group, window_s, end_ms))
    # of the ends that tile time, also the old ones were mended; silence means that there was nothing
    for measured in windows.advance(now_ms + 2000):
        last[measured.group, measured.window_s, measured.end_ms] = measured
    for group in groups:
        for window_s in WINDOWS_S:
            for end_ms in range(T0 + 1000 * window_s, int(now_ms), 1000 * window_s):
                found = last.get((group, window_s, end_ms))
                said_last = told(found) if found else brute([], group, window_s, end_ms)
                assert said_last == brute(kept, group, window_s, end_ms), (group, window_s, end_ms)
    now_ms += 2000
    assert len(windows) <= len(kept)
    assert windows.advance(now_ms + 400_000) != [] or not kept
    assert windows.advance(now_ms + 1_200_000) == []
    assert len(windows) == 0


def test_rates_are_over_the_windows_length_and_refusals_count_as_offered() -> None:
    """Shedding must not look like serving: a refused request weighs in compliance, not in goodput."""
    windows = Windows((10,), step_ms=2000)
    windows.add(sample(T0 + 1, 1, tokens=100))
    windows.add(sample(T0 + 2, 2, outcome="refused", tokens=0, ttft_ms=None))
    (measured,) = windows.advance(T0 + 2000)
    assert measured.counts["offered"] == 2
    assert measured.compliance_requests == 0.5
    assert (measured.output_tokens_per_s, measured.goodput_tokens_per_s) == (10.0, 10.0)
    assert measured.ttft_ms.count == 1


def test_a_window_that_empties_is_said_once_and_then_is_still() -> None:
    """A consumer that hears nothing more would act for ever on the last busy window."""
    windows = Windows((10,), step_ms=2000)
    windows.add(sample(T0 + 1, 1))
    assert [m.counts["offered"] for m in windows.advance(T0 + 2000)] == [1]
    assert windows.advance(T0 + 4000) == []
    # time jumped over an end that tiles it: that one is said too
    told = [(m.end_ms, m.counts["offered"], m.compliance_requests) for m in windows.advance(T0 + 12_000)]
    assert told == [(T0 + 10_000, 1, 1.0), (T0 + 12_000, 0, None)]
    assert windows.advance(T0 + 14_000) == []
    assert windows.advance(T0 + 40_000) == []
    assert len(windows) == 0


def test_a_late_outcome_makes_its_window_be_said_again() -> None:
    """An outbox delivers after a bus outage: the last window is corrected under a higher revision."""
    windows = Windows((10,), step_ms=2000)
    windows.add(sample(T0 + 1, 1))
    windows.advance(T0 + 2000)
    windows.add(sample(T0 + 5, 2))
    windows.add(sample(T0 + 2001, 4))
    again, fresh = windows.advance(T0 + 4000)
    assert (again.end_ms, again.revision, again.counts["offered"]) == (T0 + 2000, 1, 2)
    assert (fresh.end_ms, fresh.revision, fresh.counts["offered"]) == (T0 + 4000, 0, 3)
    # nobody can know any more what else was in the window before
    assert windows.add(sample(T0 - 10_000, 3))
    assert not windows.add(sample(T0 - 20_000, 3))


def test_an_outage_longer_than_a_window_is_mended_where_windows_tile_time() -> None:
    """The bus was away for 40 s: outcomes of then change 10 s windows of which four others were said since."""
    windows = Windows((10, 60), step_ms=2000)
    windows.add(sample(T0 + 1, 1))
    for now_ms in range(T0 + 2000, T0 + 50_000, 2000):
        windows.advance(now_ms)
    windows.add(sample(T0 + 15_000, 2))
    windows.add(sample(T0 + 9_000, 3))
    said = {(m.window_s, m.end_ms): m for m in windows.advance(T0 + 50_000)}
    assert {key: (m.revision, m.counts["offered"]) for key, m in said.items()} == {
        (10, T0 + 10_000): (1, 2),
        # nobody had said anything of this end: it was empty
        (10, T0 + 20_000): (0, 1),
        (60, T0 + 48_000): (0, 3),
        # the newest word is always on the newest end
        (10, T0 + 50_000): (0, 0),
    }
    windows.add(sample(T0 + 15_500, 4))
    said = {(m.window_s, m.end_ms): m for m in windows.advance(T0 + 52_000)}
    assert (said[10, T0 + 20_000].revision, said[10, T0 + 20_000].counts["offered"]) == (1, 2)


def test_memory_follows_the_groups_and_not_the_load() -> None:
    """A fleet a hundred times as busy must not need a hundred times the memory for its windows."""

    def size(per_s: int) -> int:
        rng = random.Random(1)
        windows = Windows((10, 60), step_ms=2000)
        for number in range(30 * per_s):
            at_ms = T0 + number * 1000 / per_s
            windows.add(sample(at_ms, number, ttft_ms=rng.lognormvariate(5, 1)))
            windows.advance(at_ms)
        assert len(windows) == 30 * per_s
        return len(msgspec.msgpack.encode(list(windows.buckets())))

    assert size(4_000) < 2 * size(1_000)


@pytest.mark.parametrize("seed", range(5))
def test_the_sketch_keeps_its_promise(seed: int) -> None:
    """Every percentile of any values, merged in any parts and with parts taken back, within the stated error."""
    rng = random.Random(seed)
    whole: sketch.Sketch = {}
    values: list[float] = []
    for _ in range(20):
        part = [
            rng.choice((0.0, rng.lognormvariate(4, 2), -rng.lognormvariate(2, 3))) for _ in range(rng.randrange(99))
        ]
        mine: sketch.Sketch = {}
        for value in part:
            sketch.add(mine, sketch.bucket_of(value))
        sketch.merge(whole, mine)
        if rng.random() < 0.3:
            sketch.merge(whole, mine, -1)
        else:
            values += part
    values.sort()
    for percent in range(1, 100):
        exact = values[max(0, math.ceil(percent / 100 * len(values)) - 1)]
        assert close(sketch.quantile(whole, percent / 100), exact), percent
    assert sum(whole.values()) == len(values)
    for value in values:
        sketch.add(whole, sketch.bucket_of(value), -1)
    assert (whole, sketch.quantile(whole, 0.5)) == ({}, None)


def test_a_reconfigured_length_counts_what_is_known() -> None:
    """An operator asks for other windows while the fleet runs."""
    windows = Windows((10,), step_ms=2000)
    windows.add(sample(T0 + 1, 1))
    windows.advance(T0 + 2000)
    windows.reconfigure((4, 10))
    windows.add(sample(T0 + 2500, 2))
    assert [(m.window_s, m.counts["offered"]) for m in windows.advance(T0 + 4000) if m.end_ms == T0 + 4000] == [
        (4, 2),
        (10, 2),
    ]


def test_the_buckets_are_those_of_the_published_sketch() -> None:
    """Whoever merges our counts with a DDSketch of Datadog's must not be off by a bucket: same places, same answers."""
    rng = random.Random(3)
    values = [rng.lognormvariate(4, 2) for _ in range(2000)]
    theirs, mapping = DDSketch(RELATIVE_ERROR), LogarithmicMapping(RELATIVE_ERROR)
    ours: sketch.Sketch = {}
    for value in values:
        theirs.add(value)
        sketch.add(ours, sketch.bucket_of(value))
    for value in values:
        theirs_says = mapping.value(mapping.key(value))
        assert sketch.value_of(sketch.bucket_of(value)) == pytest.approx(theirs_says, rel=1e-9)
    for percent in (1, 50, 90, 99):
        found = sketch.quantile(ours, percent / 100)
        # their rank is rounded down: at most one value beside ours
        neighbours = sorted(values)[max(0, percent * 20 - 2) : percent * 20 + 1]
        assert found is not None
        assert any(close(found, one) for one in neighbours)
        assert any(close(theirs.get_quantile_value(percent / 100), one) for one in neighbours)
