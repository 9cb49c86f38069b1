"""The whole road: gateway, SLOMax, FleetMind, two TokenPilots and agents on one virtual bus.

Every run ends with `Harness.check`: one final outcome per request, no attempt dispatched twice, nothing outside its
allowed sites, and every counter of every core exactly zero.
"""

from typing import Any

import pytest
from tests.simulation.harness import Agent, Gateway, Harness, World, small_fleet

from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.slomax.core import SLOMax
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementHeld,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.room import RoomOffered


class Road:
    """The reference fleet in small: entry a, sites b and c."""

    def __init__(self, fleet: Fleet | None = None, *, sites: str = "bc", standby: bool = False, **options: Any) -> None:
        self.fleet = fleet or small_fleet()
        self.harness = Harness(self.fleet, **options)
        self.world = World(self.fleet)
        join = self.harness.join
        for site in sites:
            join(f"agent-{site}", Agent(self.fleet, site, self.world), "siteagent")
            join(f"pilot-{site}", TokenPilot(self.fleet, site, replica=f"pilot-{site}"), "tokenpilot")
        for n in range(2 if standby else 1):
            join(f"slomax-{n}", SLOMax(self.fleet, replica=f"slomax-{n}"), "slomax")
            join(f"fleetmind-{n}", FleetMind(self.fleet, replica=f"fleetmind-{n}"), "fleetmind")
        self.gateway = Gateway(self.fleet, "a", self.world)
        join(self.gateway.name, self.gateway, "gateway")
        self.harness.elect()
        self.harness.run_for(1_200)

    def ask(self, request_id: str, after_ms: float = 0.0, **changes: Any) -> None:
        self.gateway.request(self.harness.now_ms + after_ms, request_id, **changes)
        node = self.harness.nodes[self.gateway.name]
        self.harness.at(self.harness.now_ms + after_ms, lambda: self.harness._wake(node))

    def finish(self, ms: float = 60_000) -> None:
        """Let it become quiet, then check."""
        self.harness.run_for(ms)
        self.harness.check()

    def outcomes(self) -> dict[str, OutcomeFinished]:
        return {e.request_id: e for e in self.harness.said(OutcomeFinished) if e.final}


def test_the_uncongested_road_has_four_hops() -> None:
    """received → decided → requested → assigned: each caused by the one before, and nothing else is said."""
    road = Road()
    road.ask("r1")
    road.finish()
    said = road.harness.said
    (received,), (decided,) = said(RequestReceived), said(AdmissionDecided)
    (requested,), (assigned,) = said(PlacementRequested), said(PlacementAssigned)
    assert decided.cause == received.id
    assert requested.cause == decided.id
    assert assigned.cause == requested.id
    assert (assigned.site, assigned.how) == ("b", "room")
    assert said(PlacementHeld) == []
    assert said(RoomOffered) == []
    assert road.outcomes()["r1"].outcome == "completed"
    hops = [c.at_ms for c in road.harness.log if c.event.id in (received.id, assigned.id)]
    assert hops[1] - hops[0] < 10


def test_congestion_is_held_offered_and_released() -> None:
    """More prompt tokens than the look-ahead of the only allowed site: holds, offers, numbered releases, all served."""
    road = Road()
    for n in range(40):
        road.ask(f"r{n}", n * 5.0, tenant="local", input_tokens=2000, patience_ms=30_000.0)
    road.finish()
    said = road.harness.said
    assert len(said(PlacementHeld)) >= 20
    released = said(PlacementReleased)
    assert len(released) >= 20
    numbers = [r.number for r in released]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    hows = [a.how for a in said(PlacementAssigned)]
    assert hows.count("released") >= 20
    assert hows.count("unanswered") <= 1
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}
    assert {a.site for a in said(PlacementAssigned)} == {"b"}


def test_the_engines_never_idle_while_anything_is_held() -> None:
    """The price of holding is one round trip per release: throughput stays within a tenth of what engines can do."""
    road = Road(small_fleet({"b": 1, "c": 1}))
    for n in range(60):
        road.ask(f"r{n}", 0.0, tenant="local", input_tokens=2000, output_tokens=1, patience_ms=60_000.0)
    start_ms = road.harness.now_ms
    road.finish()
    first = {c.event.request_id: c.at_ms for c in road.harness.log if isinstance(c.event, OutcomeStarted)}
    assert len(first) == 60
    assert max(first.values()) - start_ms < 60 * 2000 / 10_000 * 1000 * 1.1


def test_chats_pass_documents_and_documents_are_not_starved() -> None:
    """A05, A02: chats arrive behind a backlog of documents and go first; the documents complete all the same."""
    road = Road(small_fleet({"b": 1, "c": 1}))
    for n in range(20):
        road.ask(f"doc{n}", n, service_class="document", tenant="acme", input_tokens=6000, ttft_ms=None)
    for n in range(10):
        road.ask(f"chat{n}", 400.0 + 150 * n, input_tokens=500)
    road.finish(120_000)
    outcomes = road.outcomes()
    assert {o.outcome for o in outcomes.values()} == {"completed"}
    chats = sorted(o.times.ttft_ms or 0.0 for rid, o in outcomes.items() if rid.startswith("chat"))
    docs = sorted(o.times.ttft_ms or 0.0 for rid, o in outcomes.items() if rid.startswith("doc"))
    assert chats[-1] < 1_500
    assert docs[-1] > 3 * chats[-1]


def test_what_is_held_moves_to_a_site_that_becomes_ready() -> None:
    """c comes up while a queue waits at b: some of it is withdrawn there and served at c, each at most twice moved."""
    fleet = small_fleet({"b": 1, "c": 2})
    road = Road(fleet)
    for name in ("c-0", "c-1"):
        road.world.engines[name].ready = False
    road.harness.run_for(1_500)
    for n in range(30):
        road.ask(f"r{n}", n, service_class="document", input_tokens=6000)
    road.harness.run_for(1_000)
    assert {a.site for a in road.harness.said(PlacementAssigned)} <= {"b"}
    for name in ("c-0", "c-1"):
        road.world.engines[name].ready = True
    road.finish(90_000)
    withdrawn = road.harness.said(PlacementWithdrawn)
    assert {(w.site, w.moved_to) for w in withdrawn} == {("b", "c")}
    moved = {w.request_id for w in withdrawn}
    served = {a.request_id: a.site for a in road.harness.said(PlacementAssigned)}
    assert any(served[rid] == "c" for rid in moved)
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}


def test_patience_ends_in_503_for_those_that_may_not_leave() -> None:
    """Residency holds under overload: what b cannot serve in time is refused, at once where sure; c never sees it."""
    road = Road(small_fleet({"b": 1, "c": 2}))
    for n in range(60):
        road.ask(f"r{n}", n, tenant="local", input_tokens=5000, patience_ms=5_000.0)
    road.finish(60_000)
    outcomes = road.outcomes()
    refused = [o for o in outcomes.values() if o.outcome == "refused"]
    assert len(refused) >= 20
    assert {(o.reason, o.status) for o in refused} == {("residency_no_capacity", 503)}
    assert all(o.times.e2e_ms <= 100 or 4_990 <= o.times.e2e_ms <= 5_100 for o in refused)
    assert {a.site for a in road.harness.said(PlacementAssigned)} == {"b"}
    refusals = road.harness.said(PlacementRefused)
    assert all(r.retry_after_s is not None and r.retry_after_s >= 1 for r in refusals)


def test_sheddable_work_is_shed_at_once_when_every_site_holds() -> None:
    """A01: 429 within a few hops, not a 503 after its patience."""
    road = Road(small_fleet({"b": 1, "c": 1}))
    for n in range(40):
        road.ask(f"r{n}", n, input_tokens=4000, patience_ms=60_000.0)
    for n in range(5):
        road.ask(f"batch{n}", 1_000.0 + n, service_class="batch", input_tokens=4000)
    road.finish(90_000)
    shed = [o for rid, o in road.outcomes().items() if rid.startswith("batch")]
    assert {(o.outcome, o.reason, o.status) for o in shed} == {("refused", "saturated", 429)}
    assert max(o.times.e2e_ms for o in shed) < 50


def test_fleetmind_silent_slomax_asks_in_its_stead() -> None:
    """FleetMind is stopped: one hop time-out later the home site is asked; nothing is lost, nothing served twice."""
    road = Road()
    road.harness.pause("fleetmind-0")
    for n in range(10):
        road.ask(f"r{n}", 20.0 * n)
    road.harness.run_for(3_000)
    requested = road.harness.said(PlacementRequested)
    assert {r.fallback for r in requested} == {"slomax"}
    assert {r.site for r in requested} == {"b"}
    assert len(requested) == 10
    road.harness.resume("fleetmind-0")
    road.finish()
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}
    ttft = max(o.times.ttft_ms or 0.0 for o in road.outcomes().values())
    assert ttft < 260 + 1_000


def test_tokenpilot_silent_the_next_site_is_asked() -> None:
    """b's TokenPilot is stopped: its requests go to c after one hop, later ones at once."""
    road = Road()
    road.harness.pause("pilot-b")
    road.ask("first")
    road.ask("later", 1_000)
    road.harness.run_for(5_000)
    said = road.harness.said(PlacementAssigned)
    assert {a.site for a in said} == {"c"}
    assert len(road.harness.said(PlacementRequested, ask__request_id="later")) == 1
    road.harness.resume("pilot-b")
    road.finish()
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}


def test_a_failing_instance_is_left_and_the_request_is_served_elsewhere() -> None:
    """b-0 refuses connections: attempt 2 excludes it, at most 3 attempts, one final outcome each."""
    road = Road(small_fleet({"b": 2, "c": 1}))
    road.world.engines["b-0"].fault = "refuse"
    for n in range(12):
        road.ask(f"r{n}", 30.0 * n)
    road.finish()
    again = [r for r in road.harness.said(PlacementRequested) if r.attempt == 2]
    assert again
    assert all(r.excluded == ("b-0",) for r in again)
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}


def test_a_model_whose_only_instance_fails_ends_in_a_typed_refusal() -> None:
    """No place is left for attempt 2: the gateway hears so at once, and does not wait for its patience."""
    road = Road(small_fleet({"b": 1, "c": 1}))
    road.world.engines["b-0"].fault = "refuse"
    road.ask("r1", tenant="local")
    road.finish()
    outcome = road.outcomes()["r1"]
    assert (outcome.outcome, outcome.reason, outcome.status) == ("refused", "residency_no_capacity", 503)
    assert outcome.times.e2e_ms < 100


def test_cancelled_while_held_leaves_every_queue() -> None:
    """G06: clients leave while their requests are held: engines never see them, no counter keeps them."""
    road = Road(small_fleet({"b": 1, "c": 1}))
    for n in range(30):
        road.ask(f"r{n}", n, tenant="local", input_tokens=4000)
    for n in range(15, 30):
        road.gateway.cancel(road.harness.now_ms + 300, f"r{n}")
    road.finish()
    cancelled = {rid for rid, o in road.outcomes().items() if o.outcome == "cancelled"}
    assert len(cancelled) >= 14
    assert not cancelled & set(road.world.engines["b-0"].served)


@pytest.mark.parametrize("who", ["slomax", "fleetmind"])
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_standby_takes_over_under_load(who: str, how: str) -> None:
    """kill -9, or a pause beyond the lease, in the middle of a congested run: nothing lost, nothing twice."""
    road = Road(standby=True)
    for n in range(60):
        road.ask(f"r{n}", 25.0 * n, tenant="local" if n % 3 else "acme", input_tokens=2500, patience_ms=40_000.0)
    road.harness.run_for(600)
    if how == "kill":
        road.harness.kill(f"{who}-0")
    else:
        road.harness.pause(f"{who}-0")
    road.harness.run_for(1_500)
    road.harness.elect()
    road.harness.run_for(2_000)
    if how == "pause":
        road.harness.resume(f"{who}-0")
    road.finish(90_000)
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}
    assert len(road.outcomes()) == 60


@pytest.mark.parametrize("who", ["slomax-0", "fleetmind-0"])
def test_a_restart_refolds_and_goes_on(who: str) -> None:
    """Restarted under load: it says nothing while it reads, then goes on where it was."""
    road = Road()
    for n in range(40):
        road.ask(f"r{n}", 25.0 * n, tenant="local", input_tokens=2500, patience_ms=40_000.0)
    road.harness.run_for(700)
    kind = SLOMax if who.startswith("slomax") else FleetMind
    road.harness.restart(who, kind(road.fleet, replica=who))
    road.finish(90_000)
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_bus_loses_and_repeats_but_the_fleet_does_not(seed: int) -> None:
    """Plain messages are lost before capture, captured ones delivered twice, streams overtake each other."""
    road = Road(seed=seed, jitter_ms=20, loss=0.03, duplicate=0.2)
    for n in range(80):
        tenant = "local" if n % 4 == 0 else "acme"
        fields: dict[str, Any] = {"tenant": tenant, "input_tokens": 500 + 400 * (n % 7)}
        if tenant == "acme" and n % 5 == 0:
            fields["service_class"] = "document"
        road.ask(f"r{n}", 20.0 * n, **fields)
        if n % 11 == 3:
            road.gateway.cancel(road.harness.now_ms + 20.0 * n + 150, f"r{n}")
    road.finish(150_000)
    assert len(road.outcomes()) == 80


def test_a_gateway_that_is_killed_leaves_nothing_behind() -> None:
    """kill -9 of the gateway under load: within three leases every hold, booking and reservation is gone."""
    road = Road()
    for n in range(40):
        road.ask(f"r{n}", n, tenant="local", input_tokens=3000, output_tokens=2_000)
    road.harness.run_for(500)
    road.harness.kill("gateway-a")
    road.harness.run_for(12_000)
    for name in ("slomax-0", "fleetmind-0", "pilot-b", "pilot-c"):
        gauges = road.harness.nodes[name].core.gauges()  # type: ignore[attr-defined]  # a core with gauges
        for gauge, values in gauges.items():
            if gauge.startswith(Harness.COUNTERS):
                assert not any(values.values()), (name, gauge, values)


def test_round_robin_without_admission_is_the_same_fleet_without_its_policies() -> None:
    """The baseline of the demo: assigned in turn at once, nothing refused, residency kept."""
    policy = 'placement = "round-robin"\nsites = "round-robin"\nadmission = "none"'
    road = Road(small_fleet(policy=policy))
    for n in range(80):
        road.ask(f"r{n}", n, tenant="local" if n % 2 else "acme", input_tokens=3000)
    road.finish(90_000)
    said = road.harness.said
    assert said(PlacementHeld) == []
    assert said(PlacementRefused) == []
    assert {o.outcome for o in road.outcomes().values()} == {"completed"}
    assert {a.site for a in said(PlacementAssigned, tenant="acme")} == {"b", "c"}
