"""Replicas that follow demand in simulated days: plans, the reactive baseline, and what must hold whoever scales."""

from typing import Any

import msgspec
import pytest

from tokenfleet.simulator import scenario as scenarios
from tokenfleet.simulator.arrivals import Arrival
from tokenfleet.simulator.days import Clients, days, rate_per_s
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.world import World

#: a day in twelve minutes
DAY_S = 720.0
PACE = 86_400.0 / DAY_S


def made(kind: str, *, begin: dict[str, int], zones: tuple[str, ...] = ("*",)) -> scenarios.Scenario:
    """An entry a, its home b in the same zone, and d elsewhere; four replicas of one model at each."""
    sites: dict[str, Any] = {"a": {"zone": "eu", "entry": True, "homes": {"m": ["b"]}}}
    for site, zone in (("b", "eu"), ("d", "us")):
        instances = {
            f"{site}-{n}": {
                "model": "m", "version": "1", "url": "http://simulated", "profile": "8b-a100", "max_sequences": 4,
                "kv_tokens": 24_000, "token_budget": 1024, "cold_start_s": 155.0,
            }
            for n in range(4)
        }  # fmt: skip
        sites[site] = {"zone": zone, "gpus": 4, "instances": instances}
    tables: dict[str, Any] = {
        "scenario": {"name": "days", "duration_s": DAY_S, "drain_s": 60},
        "fleet": {
            "fleet": {"name": "days", "default_class": "chat"},
            "sites": sites,
            "models": {"m": {"versions": ["1"], "default_version": "1", "max_model_len": 8192, "tokenizer": "bytes"}},
            "classes": {"chat": {"ttft_ms": 2000, "tpot_ms": 100, "patience_ms": 15000}},
            "tenants": {"all": {"zones": list(zones), "classes": ["chat"]}},
            "network": {"rtt_ms": {"a-b": 5, "a-d": 80, "b-d": 80}},
            # requests are not faster than in life: neither is their drain
            "planning": {"time_scale": PACE, "every_s": 180.0, "drain_s": 60.0 * PACE},
        },
        "workload": [{"trace": "builtin", "rate_per_s": 1.0}],
        "scaling": {"kind": kind, "begin": begin},
    }
    return scenarios.parse(msgspec.toml.encode(tables), source="days")


def clients(**changes: Any) -> Clients:
    values = {"entry": "a", "tenant": "all", "service_class": "chat", "model": "m", "peak_per_s": 3.0}
    return Clients(**{**values, "output_tokens_median": 120.0, **changes})


def lived(
    kind: str, arrivals: list[Arrival], begin: dict[str, int], *, most: dict[str, int] | None = None, **changes: Any
) -> tuple[World, dict[str, int]]:
    """A run, sound to the end; how the requests ended. `most` hears how many replicas of a site ran at once."""

    def look(world: World) -> None:
        for site in world.fleet.sites:
            running = sum(one.site == site and not one.stopped for one in world.instances.values())
            if most is not None:
                most[site] = max(most.get(site, 0), running)

    world = World(made(kind, begin=begin, **changes), choose("tokenfleet"), 1, arrivals=arrivals, probe=look)
    run = world.run()
    world.check()
    ends: dict[str, int] = {}
    for record in run.records:
        ends[record.outcome] = ends.get(record.outcome, 0) + 1
    return world, ends


def test_the_rate_of_a_day_is_between_trough_and_peak() -> None:
    """Peak to trough as stated, at the hour that is stated, and the whole day around it."""
    for shape in ("sine", "shift"):
        one = clients(shape=shape, swing=3.0, peak_at=0.9)
        rates = [rate_per_s(one, hour / 24) for hour in range(24)]
        assert max(rates) == pytest.approx(3.0, rel=0.02)
        assert min(rates) == pytest.approx(1.0, rel=0.02)
        assert rate_per_s(one, 0.9) == pytest.approx(3.0)
        assert rate_per_s(one, 0.4) == pytest.approx(1.0)


def test_a_days_arrivals_are_the_seeds_and_as_many_as_expected() -> None:
    """The same seed gives the same day to every way of scaling."""
    one, again, other = (days([clients()], seed, day_s=DAY_S) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert len(one) == pytest.approx(2.0 * DAY_S, rel=0.1)


def test_plans_follow_the_day_and_break_no_stream() -> None:
    """Fewer GPU-hours than the peak all day long, no request that fails, and replicas that came and went."""
    arrivals = days([clients(peak_at=0.75)], 3, day_s=DAY_S)
    static, still = lived("static", arrivals, {"b/m": 4, "d/m": 0})
    planned, ends = lived("plan", arrivals, {"b/m": 2, "d/m": 0})
    assert ends.get("failed", 0) == 0
    assert ends["completed"] > 0.97 * still["completed"]
    assert sum(planned.gpu_hours().values()) < 0.85 * sum(static.gpu_hours().values())
    assert planned.bus.said["PlanIssued"] >= 2


def test_the_reactive_baseline_scales_up_and_down() -> None:
    """The autoscaler that we are compared with works: it follows the load, within its limits."""
    arrivals = days([clients(peak_at=0.5, swing=6.0)], 3, day_s=DAY_S)
    counts: list[int] = []

    def look(world: World) -> None:
        counts.append(sum(one.site == "b" and not one.stopped for one in world.instances.values()))

    world = World(made("reactive", begin={"b/m": 2, "d/m": 0}), choose("tokenfleet"), 1, arrivals=arrivals, probe=look)
    run = world.run()
    world.check()
    assert min(counts) == 1
    assert max(counts) == 4
    assert all(one.site == "b" or one.stopped for one in world.instances.values())
    assert sum(record.outcome == "failed" for record in run.records) == 0


def test_no_replica_is_planned_where_nobody_may_send_anything() -> None:
    """All tenants are bound to one zone: the other's replicas stay off, however full the first is."""
    arrivals = days([clients(peak_per_s=30.0)], 3, day_s=DAY_S)[:1500]
    most: dict[str, int] = {}
    _, ends = lived("plan", arrivals, {"b/m": 1, "d/m": 0}, zones=("eu",), most=most)
    assert most == {"a": 0, "b": 4, "d": 0}
    assert ends.get("failed", 0) == 0


def test_one_without_the_bond_overflows_to_the_other_site() -> None:
    """The same load, free to go: the plan pre-warms abroad, and more of it is served."""
    arrivals = days([clients(peak_per_s=30.0)], 3, day_s=DAY_S)[:1500]
    _, bound = lived("plan", arrivals, {"b/m": 1, "d/m": 0}, zones=("eu",))
    most: dict[str, int] = {}
    _, free = lived("plan", arrivals, {"b/m": 1, "d/m": 0}, most=most)
    assert most["d"] > 0
    assert free["completed"] > bound["completed"]
