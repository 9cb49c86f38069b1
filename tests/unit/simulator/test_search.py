"""Stable load and knee on curves whose answer is known."""

import math

import pytest

from tokenfleet.replay.records import Record
from tokenfleet.simulator.search import Probe, Search, probe


def curve(speed: float, *, capacity: float = 4.0) -> Probe:
    """A queue's: 100 ms / (1 - load) below its capacity, a growing backlog above."""
    if speed >= capacity:
        return Probe(math.inf, 100, 900, 1000)
    return Probe(100 / (1 - speed / capacity), 3, 4, 1000)


def test_a_queue_is_stable_up_to_its_capacity() -> None:
    """P95(s) ≤ 3·P95(s/2): (1 - s/8) / (1 - s/4) = 3 at s = 3.2, and = 5 at s = 32/9."""
    search = Search(lambda speed: [curve(speed)], lowest=0.5, highest=8.0)
    found = search.find("x")
    assert found.stable == pytest.approx(3.2, rel=0.021)
    assert found.knee == pytest.approx(32 / 9, rel=0.021)
    assert found.stable is not None
    assert found.stable <= 3.2
    assert found.tried["8"] == (None,)


def test_the_worst_seed_decides() -> None:
    """Stable for all seeds; the knee is where the first of them breaks."""
    search = Search(lambda speed: [curve(speed), curve(speed, capacity=3.0)], lowest=0.5, highest=8.0)
    assert search.find("x").stable == pytest.approx(2.4, rel=0.021)


def test_a_growing_backlog_is_not_stable_however_short_the_wait_is() -> None:
    """In a short window the percentiles of an overloaded fleet still look fine."""
    search = Search(lambda speed: [Probe(100.0, 10, 10 if speed < 2 else 60, 1000)], lowest=0.5, highest=8.0)
    found = search.find("x")
    assert found.stable == pytest.approx(2.0, rel=0.021)
    assert found.knee is None


def test_the_backlog_counts_who_waits_for_a_first_token() -> None:
    """Refused and finished requests wait for nothing."""

    def record(sent: float, first: float | None, ended: float | None) -> Record:
        return Record(
            index=0, tenant="t", cls="c", model="m", outcome="completed", input_tokens=1, stated_output_tokens=1,
            planned_ms=sent, sent_ms=sent, first_token_ms=first, ended_ms=ended,
        )  # fmt: skip

    records = [
        record(0, 10, 20),
        record(40, 60, 90),
        record(45, None, 48),
        record(80, None, None),
        record(90, 130, 140),
    ]
    found = probe(records, 0, 100)
    assert (found.backlog_middle, found.backlog_end, found.arrived_late) == (1, 2, 2)
    assert found.ttft_ms_p95 == math.inf
