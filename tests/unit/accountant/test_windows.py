"""Sliding windows against the plainest possible computation of the same thing."""

import math
import random
from collections.abc import Sequence

import pytest

from tokenfleet.accountant.policy import GROUP_OF
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
        "ttft": (len(ttft), ttft[math.ceil(0.95 * len(ttft)) - 1] if ttft else None),
    }


def told(measured: Measured) -> dict[str, object]:
    return {
        "counts": measured.counts,
        "output_tokens": measured.output_tokens,
        "compliant_tokens": measured.compliant_tokens,
        "wasted": measured.wasted_tokens,
        "ttft": (measured.ttft_ms.count, measured.ttft_ms.p95),
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
        if kept and rng.random() < 0.2:
            gone = kept.pop(rng.randrange(len(kept)))
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
                        earlier = [m for (g, w, _), m in last.items() if (g, w) == (group, window_s)]
                        assert expected == (told(earlier[-1]) if earlier else brute([], group, window_s, end_ms))
    assert len(windows) <= len(kept)
    assert windows.advance(now_ms + 400_000) != [] or not kept
    assert windows.advance(now_ms + 800_000) == []
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
    emptied = windows.advance(T0 + 12_000)
    assert [(m.counts["offered"], m.compliance_requests, m.ttft_ms.p50) for m in emptied] == [(0, None, None)]
    assert windows.advance(T0 + 14_000) == []
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
    assert not windows.add(sample(T0 - 10_000, 3))


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
