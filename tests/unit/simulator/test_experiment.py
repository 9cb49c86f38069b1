"""Over seeds: intervals, fairness, and that the number of processes changes nothing."""

import msgspec
import pytest

from tokenfleet.replay.report import jain
from tokenfleet.simulator.experiment import Estimate, estimate, run_all, summarise, table
from tokenfleet.simulator.scenario import parse

SMALL = b"""
fleet = "reference"
[scenario]
name = "small"
duration_s = 6
warmup_s = 1
drain_s = 60
[[workload]]
trace = "builtin"
rate_per_s = 5
"""


def test_an_interval_is_students() -> None:
    """With three seeds a normal interval would be half as wide as the truth."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.ci95 == pytest.approx(4.303 / 3**0.5, abs=1e-5)
    assert estimate([1.0]) == Estimate(1.0, None)
    assert estimate([1.0, None]) == Estimate(None, None)


def test_jain() -> None:
    """One tenant of four served: a quarter."""
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.3, 0.3]) == pytest.approx(1.0)
    assert jain([0.0]) == 1.0


def test_the_warm_up_loads_the_fleet_and_is_not_counted() -> None:
    """Requests that meet an idle fleet with a cold cache would flatter or punish whoever came first."""
    scenario = parse(SMALL)
    (one,) = run_all(scenario, ["tokenfleet"], [3], processes=1, keep_records="first")
    assert one.report.duration_s == 5
    assert one.report.overall.offered == len(one.records)
    assert min(record.planned_ms for record in one.records) >= 1000
    assert one.findings == []


def test_processes_change_nothing_and_the_table_tells_them_apart() -> None:
    """The same seed gives the same bytes, wherever it was run: worker processes hash strings differently."""
    scenario = parse(SMALL)
    alone = run_all(scenario, ["tokenfleet", "round-robin"], [1, 2], processes=1)
    together = run_all(scenario, ["tokenfleet", "round-robin"], [1, 2], processes=2)
    assert [msgspec.json.encode(d.report) for d in alone] == [msgspec.json.encode(d.report) for d in together]
    assert [d.messages for d in alone] == [d.messages for d in together]
    offered = [d.report.overall.offered for d in alone]
    assert offered[:2] == offered[2:]
    text = table(summarise(alone))
    assert "round-robin" in text
    assert "±" in text
