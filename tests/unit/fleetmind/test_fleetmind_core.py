"""FleetMind's core, incident by incident: every effect of a decision is asserted, every counter ends at zero."""

from itertools import groupby
from typing import Any

import msgspec
import pytest
from tests.simulation.harness import START_MS, Engine, report, small_fleet
from tests.simulation.messages import (
    Bench,
    admitted,
    assigned,
    finished,
    held,
    leased,
    make_ask,
    requested,
)

from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet_schemas.capacity import CapacityProbed
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import (
    PlacementDeclined,
    PlacementRefused,
    PlacementRequested,
    PlacementWithdrawn,
    Work,
)


def bench_of(fleet: Fleet | None = None, *, ready: bool = True, office: bool = True) -> Bench:
    fleet = fleet or small_fleet()
    bench = Bench(FleetMind(fleet, replica="fleetmind-1"), fleet, office=office)
    if ready:
        bench.report()
    return bench


def asked(bench: Bench, said: list[Event]) -> PlacementRequested:
    (found,) = bench.of(PlacementRequested, said)
    return found


class TestRanking:
    """Which site."""

    def test_the_first_home_site_is_asked_with_all_reasons(self) -> None:
        """The uncongested road: one admission, one request, and `explain` can say why."""
        bench = bench_of()
        (found,) = bench.feed(admitted(make_ask(), elapsed_ms=4.0))
        assert isinstance(found, PlacementRequested)
        assert (found.site, found.attempt, found.revision, found.fallback) == ("b", 1, 0, "")
        assert found.cause == "r1:decided:1:0:1"
        assert found.term > 0
        assert found.elapsed_ms == 4.0
        home, other = found.sites
        assert (home.name, home.out, home.chosen) == ("b", "", True)
        assert (other.name, other.out, other.chosen) == ("c", "", False)
        assert {"place", "rtt_ms", "load", "instances", "sequences"} <= home.terms.keys()
        assert home.terms["rtt_ms"] == 5.0

    def test_an_admission_that_is_redelivered_asks_nobody_twice(self) -> None:
        """One decision, one request."""
        bench = bench_of()
        bench.feed(admitted(make_ask()))
        assert bench.feed(admitted(make_ask())) == []

    def test_a_refused_request_is_not_placed(self) -> None:
        """SLOMax said no."""
        assert bench_of().feed(admitted(make_ask(), admitted=False, reason="tenant_rate", status=429)) == []

    def test_a_home_that_is_down_gives_way_to_the_next_allowed_site(self) -> None:
        """The agent says that nothing is ready at b."""
        bench = bench_of()
        bench.report("b-0", "b-1", ready=False, reason="unreachable")
        found = asked(bench, bench.feed(admitted(make_ask())))
        assert found.site == "c"
        assert {one.name: one.out for one in found.sites} == {"b": "not_ready", "c": ""}

    @pytest.mark.parametrize("broken", ["down", "other_version", "never_reported", "stale", "saturated"])
    def test_a_request_never_leaves_its_zone(self, broken: str) -> None:
        """F01: tenant bound to eu; the eu site is down, saturated, has the model not loaded, or is unknown."""
        bench = bench_of(ready=False)
        bench.report("c-0", "c-1")
        if broken == "down":
            bench.report("b-0", "b-1", ready=False)
        elif broken == "other_version":
            bench.report("b-0", "b-1", version="2")
        elif broken == "stale":
            bench.report("b-0", "b-1")
            for _ in range(11):
                bench.now_ms += 1_000
                bench.report("c-0", "c-1")
        elif broken == "saturated":
            bench.report("b-0", "b-1", running=32, kv_usage=1.0)
        (said,) = bench.feed(admitted(make_ask(tenant="local")))
        if broken == "saturated":
            assert isinstance(said, PlacementRequested)
            assert said.site == "b"  # asked all the same: it holds, and patience ends it
            return
        assert isinstance(said, PlacementRefused)
        assert (said.reason, said.status) == ("residency_no_capacity", 503)
        assert said.retry_after_s is not None
        assert {one.name: one.out for one in said.sites}["c"] == "residency"

    @pytest.mark.parametrize(
        ("changes", "reason", "status"),
        [
            ({"tenant": "nobody"}, "not_permitted", 403),
            ({"version": "2"}, "model_not_ready", 503),
            ({"adapter": "tuned"}, "model_not_ready", 503),
            ({"entry_zone": "moon"}, "model_not_ready", 503),
        ],
    )
    def test_without_a_site_the_refusal_says_whether_asking_again_helps(
        self, changes: dict[str, Any], reason: str, status: int
    ) -> None:
        """G11, P17: 403 without Retry-After, 503 with it; never another version, never an unroutable instance."""
        fleet = small_fleet()
        bench = bench_of(fleet, ready=False)
        bench.report(routable_from=("eu", "us"))
        (refused,) = bench.feed(admitted(make_ask(**changes)))
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.status) == (reason, status)
        assert (refused.retry_after_s is None) == (status == 403)
        bench.feed(finished(make_ask(**changes), "refused", attempt=0))
        bench.check_zero()

    @pytest.mark.parametrize(
        ("changes", "term"),
        [
            ({"running": 32, "waiting": 30}, "slot_ms"),
            ({"running": 20, "kv_usage": 1.0}, "kv_ms"),
        ],
    )
    def test_a_home_whose_queue_costs_more_than_the_way_gives_work_away(
        self, changes: dict[str, Any], term: str
    ) -> None:
        """The agents' reports say that home is full: the next allowed site with room is asked."""
        bench = bench_of()
        bench.report("b-0", "b-1", **changes)
        found = asked(bench, bench.feed(admitted(make_ask(input_tokens=60_000))))
        assert found.site == "c"
        assert found.sites[0].terms[term] > 1_000.0
        assert found.sites[0].terms["cost_ms"] > found.sites[1].terms["cost_ms"]

    def test_when_all_are_above_their_ceilings_home_is_asked_and_holds(self) -> None:
        """The ceiling only stops diversion: nothing is refused by it."""
        bench = bench_of()
        bench.report(running=32)
        assert asked(bench, bench.feed(admitted(make_ask()))).site == "b"

    def test_a_site_that_holds_has_no_room_for_newcomers_elsewhere_has(self) -> None:
        """Offered room is closed to newcomers: the queue at b would only grow."""
        bench = bench_of()
        bench.feed(admitted(make_ask("r0")), held(make_ask("r0"), predicted_wait_ms=3_000.0))
        assert asked(bench, bench.feed(admitted(make_ask("r1")))).site == "c"

    def test_a_burst_between_two_reports_does_not_herd(self) -> None:
        """P04: 60 requests of 2,000 tokens in one report period, all seeing the same old report."""
        bench = bench_of()
        sites = [asked(bench, bench.feed(admitted(make_ask(f"r{n}", input_tokens=2000)))).site for n in range(60)]
        assert sites[:3] == ["b"] * 3  # no queue yet that would cost more than the way
        assert 10 <= sites.count("c") <= 40
        assert max(len(list(run)) for _, run in groupby(sites[10:40])) <= 20

    def test_round_robin_takes_allowed_sites_in_turn_by_their_instances(self) -> None:
        """The baseline: no load, no ceiling, but residency."""
        fleet = small_fleet({"b": 1, "c": 3}, policy='sites = "round-robin"')
        bench = bench_of(fleet)
        sites = [asked(bench, bench.feed(admitted(make_ask(f"r{n}")))).site for n in range(40)]
        assert sites.count("b") == 10
        assert sites[:4].count("b") == 1
        local = [asked(bench, bench.feed(admitted(make_ask(f"l{n}", tenant="local")))).site for n in range(4)]
        assert local == ["b"] * 4

    def test_measured_distance_rules_over_declared(self) -> None:
        """The path to b became slow: the hop time-out must not fire before an answer can come."""
        bench = bench_of()
        bench.feed(CapacityProbed(id="p", site="a", other_site="b", revision=1, rtt_ms=400.0))
        bench.feed(admitted(make_ask(tenant="local")))
        assert bench.run(1_000, lease=["r1"]) == []
        assert [e.id for e in bench.run(60, lease=["r1"])] != []

    @pytest.mark.parametrize("change", [{"rtt_ms": 700.0}, {"rtt_ms": 5.0, "loss": 0.5}])
    def test_a_brown_out_of_the_path_home_is_noticed(self, change: dict[str, float]) -> None:
        """The link to b loses half its packets, or has become slower than the way to c: c serves until it is well."""
        bench = bench_of()
        bench.feed(CapacityProbed(id="p1", site="b", other_site="a", revision=1, **change))
        assert asked(bench, bench.feed(admitted(make_ask("r1")))).site == "c"
        bench.feed(CapacityProbed(id="p2", site="a", other_site="b", revision=2, rtt_ms=5.0, loss=0.0))
        assert asked(bench, bench.feed(admitted(make_ask("r2")))).site == "b"


class TestHops:
    """TokenPilot silent."""

    def test_a_silent_site_loses_the_request_to_the_next(self) -> None:
        """260 ms after the request nobody has answered: withdrawn there, asked elsewhere, revision + 1."""
        bench = bench_of()
        bench.feed(admitted(make_ask()))
        assert bench.run(259, reports=False) == []
        withdrawn, again = bench.run(5, reports=False)
        assert isinstance(withdrawn, PlacementWithdrawn)
        assert isinstance(again, PlacementRequested)
        assert (withdrawn.site, withdrawn.revision, withdrawn.moved_to) == ("b", 0, "c")
        assert (again.site, again.revision) == ("c", 1)
        later = asked(bench, bench.feed(admitted(make_ask("r2"))))
        assert later.site == "c"  # b is asked last while it is silent
        bench.feed(held(make_ask("r3"), "b"), assigned(make_ask(), "c", revision=1), assigned(make_ask("r2"), "c"))
        bench.run(6_000, lease=["r1", "r2"])
        assert asked(bench, bench.feed(admitted(make_ask("r4")))).site == "b"  # and first again when its time is over

    def test_after_the_last_site_it_asks_on_with_growing_pauses(self) -> None:
        """Every TokenPilot is down for a while: the request is not lost, and nobody is flooded."""
        bench = bench_of()
        bench.feed(admitted(make_ask()))
        bench.run(20_000, lease=["r1"])
        found = bench.of(PlacementRequested)
        assert {one.site for one in found} == {"b", "c"}
        assert [one.revision for one in found] == list(range(len(found)))
        assert 6 <= len(found) <= 14
        bench.feed(finished(make_ask(), "refused", attempt=0))
        assert bench.run(20_000, lease=[]) == []
        bench.check_zero()

    def test_a_resubmission_is_asked_again_where_it_is(self) -> None:
        """The answer was lost on its way to the gateway: the same site repeats it."""
        bench = bench_of()
        bench.feed(admitted(make_ask()), assigned(make_ask()))
        (again,) = bench.feed(admitted(make_ask(), revision=1))
        assert isinstance(again, PlacementRequested)
        assert (again.site, again.attempt, again.revision) == ("b", 1, 1)
        assert bench.feed(admitted(make_ask(), revision=1)) == []

    def test_fallbacks_of_others_are_adopted_and_watched(self) -> None:
        """FleetMind was away; SLOMax asked in its stead; b stays silent: FleetMind takes it from there."""
        bench = bench_of()
        bench.feed(requested(make_ask(), "b", fallback="slomax", id="r1:requested:1:0:slomax"))
        assert bench.feed(admitted(make_ask())) == []
        withdrawn, again = bench.run(265, reports=False)
        assert isinstance(withdrawn, PlacementWithdrawn)
        assert isinstance(again, PlacementRequested)
        assert (again.site, again.revision, again.fallback) == ("c", 1, "")


class TestRetries:
    """An instance failed before the first token."""

    def test_the_next_attempt_goes_elsewhere_and_keeps_its_age(self) -> None:
        """Deadline and place are kept: the request is as old as it is; the failed instance stays out."""
        bench = bench_of(small_fleet({"b": 1, "c": 1}))
        ask = make_ask()
        bench.feed(admitted(ask, elapsed_ms=10.0), assigned(ask))
        bench.now_ms += 90
        found = asked(bench, bench.feed(finished(ask, "failed", final=False, instance="b-0", excluded=("b-0",))))
        assert (found.site, found.attempt, found.revision, found.excluded) == ("c", 2, 0, ("b-0",))
        assert found.elapsed_ms == pytest.approx(100.0)
        assert found.cause == "r1:finished:1"
        assert bench.feed(finished(ask, "failed", final=False, instance="b-0", excluded=("b-0",))) == []
        assert bench.count("booked_requests") == 0

    def test_three_attempts_and_no_more(self) -> None:
        """A request that kills what serves it must not go round the whole fleet."""
        bench = bench_of(small_fleet({"b": 3, "c": 3}))
        ask = make_ask()
        bench.feed(admitted(ask))
        for attempt in (1, 2):
            bench.feed(assigned(ask, attempt=attempt, instance=f"b-{attempt}"))
            bench.feed(finished(ask, "failed", attempt=attempt, final=False, instance=f"b-{attempt}"))
        assert bench.of(PlacementRequested)[-1].excluded == ("b-1", "b-2")
        bench.feed(assigned(ask, attempt=3))
        (refused,) = bench.feed(finished(ask, "failed", attempt=3, final=False, instance="b-0"))
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.status, refused.attempt) == ("unavailable", 503, 4)

    def test_without_another_instance_the_retry_is_refused(self) -> None:
        """The only instance of a model failed: a typed 503 instead of a request that nobody answers."""
        bench = bench_of(small_fleet({"b": 1, "c": 1}))
        ask = make_ask(tenant="local")
        bench.feed(admitted(ask), assigned(ask))
        (refused,) = bench.feed(finished(ask, "failed", final=False, instance="b-0"))
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.attempt) == ("residency_no_capacity", 2)

    def test_a_rejected_request_is_final_and_changes_nothing(self) -> None:
        """F11: the engine says 400 to an over-long prompt: no retry elsewhere, no site is thought worse of."""
        bench = bench_of()
        for n in range(100):
            ask = make_ask(f"bad-{n}")
            bench.feed(admitted(ask), assigned(ask))
            assert bench.feed(finished(ask, "rejected", instance="b-0", status=400)) == []
        bench.now_ms += 10_000
        bench.report()
        found = asked(bench, bench.feed(admitted(make_ask("good"))))
        assert (found.site, found.excluded) == ("b", ())


class TestMoves:
    """Held requests go where there is clear room."""

    def hold(self, bench: Bench, count: int, *, site: str = "b", wait_ms: float = 5_000.0, **changes: Any) -> None:
        """They came to b before c was ready."""
        for n in range(count):
            ask = make_ask(f"r{n}", **changes)
            bench.feed(requested(ask, site), held(ask, site, predicted_wait_ms=wait_ms))

    def test_a_held_request_moves_to_a_site_with_spare(self) -> None:
        """Withdrawn at b, requested at c, one revision more; the reasons say what it gains."""
        bench = bench_of()
        self.hold(bench, 1)
        assert bench.run(300, reports=False) == []  # dwell
        withdrawn, moved = bench.run(400, lease=["r0"])
        assert isinstance(withdrawn, PlacementWithdrawn)
        assert isinstance(moved, PlacementRequested)
        assert (withdrawn.site, withdrawn.revision, withdrawn.moved_to) == ("b", 0, "c")
        assert (moved.site, moved.revision, moved.attempt) == ("c", 1, 1)
        assert next(one for one in moved.sites if one.name == "c").terms["gain_ms"] > 4_000
        assert bench.count("held_requests") == 0

    @pytest.mark.parametrize("why", ["short_wait", "border", "target_holds", "target_full", "policy", "hot_prefix"])
    def test_it_stays_where_moving_gains_nothing_or_is_forbidden(self, why: str) -> None:
        """Ping-pong, crowding, a lost prefix and a crossed border cost more than the wait."""
        fleet = small_fleet(policy='sites = "round-robin"') if why == "policy" else small_fleet()
        bench = bench_of(fleet)
        if why == "border":
            self.hold(bench, 1, tenant="local")
        elif why == "short_wait":
            self.hold(bench, 1, wait_ms=300.0)
        elif why == "hot_prefix":
            ask = make_ask("r0", input_tokens=60_000)
            few = Work(prefill_tokens=1_000, decode_tokens=50, kv_tokens=60_050)
            bench.feed(requested(ask, "b"))
            bench.feed(held(ask, predicted_wait_ms=5_000.0, prefix_hit_tokens=59_000, work=few))
        else:
            self.hold(bench, 1)
        if why == "target_holds":
            other = make_ask("other")
            bench.feed(requested(other, "c"), held(other, "c", predicted_wait_ms=0.0))
        elif why == "target_full":
            bench.report("c-0", "c-1", running=32)
        assert bench.of(PlacementWithdrawn, bench.run(900, lease=["r0", "other"], reports=False)) == []

    def test_not_more_move_than_the_other_site_has_room_for(self) -> None:
        """A whole queue that moves at once only moves the queue."""
        bench = bench_of()
        self.hold(bench, 200, input_tokens=2000)
        bench.run(650, lease=[f"r{n}" for n in range(200)])
        moved = len(bench.of(PlacementWithdrawn))
        assert 5 <= moved <= 20

    def test_a_request_moves_at_most_twice(self) -> None:
        """Dwell: the sites that take turns in being full must not play with it."""
        bench = bench_of()
        ask = make_ask("r0")
        bench.feed(requested(ask, "b"), held(ask, "b", predicted_wait_ms=8_000.0))
        for _ in range(5):
            said = bench.run(1_000, lease=["r0"])
            for event in bench.of(PlacementRequested, said):
                bench.feed(
                    held(ask, event.site, revision=event.revision, predicted_wait_ms=8_000.0, id=f"h{event.revision}")
                )
        assert len(bench.of(PlacementWithdrawn)) == 2

    def test_a_stranded_request_moves_wherever_it_may(self) -> None:
        """All engines of b went down while it was held there: no ceiling and no dwell keep it."""
        bench = bench_of()
        self.hold(bench, 1, wait_ms=100.0)
        bench.report("b-0", "b-1", ready=False)
        bench.report("c-0", "c-1", running=32)
        said = bench.run(250, reports=False)
        assert [e.site for e in bench.of(PlacementRequested, said)] == ["c"]


class TestOffice:
    """One decides, the others know."""

    def test_a_standby_takes_over_what_was_never_asked_for(self) -> None:
        """kill -9 between an admission and its request: the standby asks for that one only."""
        standby = bench_of(office=False)
        standby.feed(admitted(make_ask("r1")), requested(make_ask("r1"), "b"), assigned(make_ask("r1")))
        standby.feed(admitted(make_ask("r2")))
        assert standby.said == []
        standby.term = 100
        standby.take_office()
        assert [(e.ask.request_id, e.term) for e in standby.of(PlacementRequested)] == [("r2", 101)]
        assert standby.count("booked_requests") == 1

    def test_a_request_under_an_older_term_is_void_after_the_mark(self) -> None:
        """F09: the paused leader resumes and speaks on under its old term."""
        bench = bench_of()
        bench.feed(requested(make_ask(), "c", term=1))
        assert bench.count("open_requests") == 0
        assert asked(bench, bench.feed(admitted(make_ask()))).site == "b"

    def test_who_lost_the_lease_decides_nothing(self) -> None:
        """It notices the loss before the successor's mark comes."""
        bench = bench_of()
        bench.core.resign("model:m", bench.now_ms)
        assert bench.feed(admitted(make_ask())) == []

    def test_a_checkpoint_is_the_state(self) -> None:
        """A restart resumes from it; foreign bytes are refused."""
        bench = bench_of()
        bench.feed(admitted(make_ask("r1")), held(make_ask("r1")), admitted(make_ask("r2")), assigned(make_ask("r2")))
        bench.feed(finished(make_ask("gone")))
        again = FleetMind(bench.fleet, replica="fleetmind-2")
        again.restore(bench.core.snapshot())
        assert again.gauges() == bench.core.gauges()
        assert list(again.state.closed) == ["gone"]
        assert again.state.roads.keys() == {"r1", "r2"}
        with pytest.raises(ValueError, match="checkpoint"):
            again.restore(b"\x93\x01\x02\x03")

    @pytest.mark.parametrize("end", ["completed", "cancelled", "gateway_gone", "omitted", "declined"])
    def test_every_end_returns_the_load_exactly_once(self, end: str) -> None:
        """P01: leaked counts sent all new work to one worker."""
        bench = bench_of()
        bench.feed(leased(1))
        for n in range(3):
            ask = make_ask(f"r{n}")
            bench.feed(admitted(ask))
            bench.feed(held(ask) if n == 1 else assigned(ask) if n == 2 else leased(1))
            if end == "declined":
                event = f"r{n}:{'held' if n == 1 else 'assigned'}:1:0:{0 if n == 1 else 1}"
                bench.feed(
                    PlacementDeclined(
                        id=f"d{n}",
                        site="b",
                        request_id=f"r{n}",
                        gateway="gateway-a",
                        model="m",
                        version="1",
                        attempt=1,
                        revision=0,
                        declined=event,
                        reason="closed",
                    )
                )
            if end in ("completed", "cancelled", "declined"):
                bench.feed(finished(ask, end if end != "declined" else "cancelled", attempt=1 if n == 2 else 0))
                bench.feed(finished(ask, end if end != "declined" else "cancelled", attempt=1 if n == 2 else 0))
                bench.feed(assigned(ask, id="late"))
        if end == "gateway_gone":
            bench.run(9_000)
        elif end == "omitted":
            bench.feed(leased(2), leased(3))
        bench.check_zero()

    def test_tombstones_do_not_stay_for_ever(self) -> None:
        """P08: per-request maps that are never cleared: memory grows with every request served."""
        bench = bench_of()
        for n in range(50):
            ask = make_ask(f"r{n}")
            bench.feed(admitted(ask), assigned(ask), finished(ask))
        assert len(bench.core.state.closed) == 50
        bench.now_ms += 700_000
        bench.report()
        bench.run(11_000)
        assert bench.core.state.closed == {}
        assert bench.core.state.roads == {}


def test_reports_of_an_agent_that_claims_another_sites_name_are_not_believed() -> None:
    """F01: a mis-configured agent in us says that it is b: its zone gives it away, and nothing goes there."""
    fleet = small_fleet()
    bench = bench_of(fleet, ready=False)
    forged = msgspec.structs.replace(report(fleet, "b-0", Engine(10_000), 1, START_MS), zone="us")
    bench.feed(forged)
    (refused,) = bench.feed(admitted(make_ask(tenant="local")))
    assert isinstance(refused, PlacementRefused)
    assert {one.name: one.out for one in refused.sites}["b"] == "zone_mismatch"
