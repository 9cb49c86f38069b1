"""The long cycle in FleetMind's core: plans as events, promises under one office, reality before intentions."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.simulation.harness import START_MS, small_fleet
from tests.simulation.messages import Bench, admitted, finished, make_ask

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.fleet import Actuator, Fleet, Planning, Promise
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.fleetmind.longcycle import MakePlan, PlanMade
from tokenfleet.fleetmind.promises import PLAN_SCOPE
from tokenfleet.runtime.recording import Recorder, replay
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementRequested
from tokenfleet_schemas.plan import PlanApplied, PlanIssued
from tokenfleet_schemas.reservation import (
    ReservationGranted,
    ReservationOwned,
    ReservationRefused,
    ReservationRequested,
    ReservationRevoked,
    ReservationWithdrawn,
)


class PlanBench(Bench):
    """A bench whose solver answers at once."""

    def __init__(self, fleet: Fleet, *, office: bool = True) -> None:
        self.solved = 0
        super().__init__(FleetMind(fleet, replica="fleetmind-1"), fleet, office=office)

    def _take(self, effects: Iterable[Effect]) -> None:
        effects = list(effects)
        super()._take(effects)
        for effect in effects:
            if isinstance(effect, MakePlan):
                self.solved += 1
                self._take(self.core.handle(effect.solve(), self.now_ms))

    def targets(self) -> dict[tuple[str, str], int]:
        """(site, version) → replicas of the plans that hold."""
        return {
            (site, target.version): target.replicas
            for (site, _), plan in self.core.long.state.issued.items()
            for target in plan.targets
        }

    def traffic(self, per_s: float, seconds: float, *, ready: Iterable[str], tenant: str = "acme") -> None:
        """So many requests a second, answered; only `ready` instances run, the others are stopped."""
        names = [name for site in self.fleet.sites.values() for name in site.instances]
        count = 0
        for second in range(0, int(seconds), 5):
            self.report(*[n for n in names if n in set(ready)], running=2)
            self.report(*[n for n in names if n not in set(ready)], ready=False, reason="stopped")
            while count < per_s * (second + 5):
                ask = make_ask(f"{self.now_ms}-{count}", tenant=tenant)
                self.feed(admitted(ask))
                self.feed(
                    finished(
                        ask,
                        served_site="b",
                        instance="b-0",
                        output_tokens=100,
                        times=Times(queue_ms=10.0, ttft_ms=100.0, tpot_ms=20.0, e2e_ms=2_100.0),
                    )
                )
                count += 1
            self.run(5_000.0, reports=False)


def planned_fleet(*, planning: str = "on", actuators: Iterable[str] = ("b", "c"), **changes: Any) -> Fleet:
    fleet = small_fleet({"b": 4, "c": 4}, max_sequences=8)
    sites = {
        name: msgspec.structs.replace(site, actuator=Actuator(kind="emulator") if name in actuators else None)
        for name, site in fleet.sites.items()
    }
    rules = Planning(mode=planning, **changes)  # type: ignore[arg-type]  # "on" or "off"
    return msgspec.structs.replace(fleet, sites=sites, planning=rules)


class TestPlans:
    def test_demand_starts_replicas_and_its_end_stops_them(self) -> None:
        """From zero, and back to it: first after a minute of demand, last when its end is a cold start ago."""
        bench = PlanBench(planned_fleet())
        bench.traffic(1.0, 70, ready=())
        started = bench.targets()["b", "1"]
        assert 1 <= started <= 2
        (issued,) = [one for one in bench.of(PlanIssued) if one.site == "b" and one.targets[0].replicas == started]
        (target,) = issued.targets
        assert (target.reason, target.now) == ("starts", 0)
        assert target.demand is not None
        assert 0 < target.demand <= started
        bench.traffic(0.0, 2_400, ready=("b-0",))
        assert bench.targets()["b", "1"] == 0

    def test_a_plan_is_made_once_a_minute_and_said_only_when_it_changes(self) -> None:
        """A fold of the plans is small, and agents act on changes."""
        bench = PlanBench(planned_fleet())
        bench.traffic(2.0, 300, ready=("b-0",))
        assert 4 <= bench.solved <= 6
        assert len([one for one in bench.of(PlanIssued) if one.site == "b"]) <= 2

    def test_a_tenant_bound_to_a_zone_gets_no_replica_outside_it(self) -> None:
        """The pre-warm place obeys the filter: demand of `local` never starts anything in the other zone."""
        bench = PlanBench(planned_fleet())
        bench.traffic(60.0, 130, ready=(), tenant="local")
        assert bench.targets()["b", "1"] == 4
        assert bench.targets()["c", "1"] == 0
        assert bench.count("plan_unserved_replicas") > 0

    def test_the_same_demand_without_the_bond_overflows(self) -> None:
        """What B cannot take, C does."""
        bench = PlanBench(planned_fleet())
        bench.traffic(60.0, 130, ready=())
        assert bench.targets()["c", "1"] > 0

    def test_without_the_office_or_switched_off_nothing_is_said(self) -> None:
        """A standby folds; an operator who did not ask for plans gets none."""
        for bench in (PlanBench(planned_fleet(), office=False), PlanBench(planned_fleet(planning="off"))):
            bench.traffic(5.0, 130, ready=("b-0",))
            assert bench.of(PlanIssued) == []
            assert bench.solved == 0

    def test_nobody_scales_a_fleet_that_nobody_asks(self) -> None:
        """F09: two balancers took it up and down twelve times in six minutes without any traffic.

        The owner is paused, a standby takes its office, it wakes and speaks on: in ten quiet minutes each pool gets one
        order at most, and what the old owner says under its old term changes nothing.
        """
        fleet = planned_fleet()
        first, second, third = (PlanBench(fleet, office=n == 0) for n in range(3))
        for minute in range(10):
            if minute == 3:  # the first sleeps for twice its lease
                second.term = 100
                second.take_office()
            for bench in (first, second, third):
                for _ in range(4):
                    bench.report(running=0)
                    bench.run(15_000.0)
                for other in (first, second, third):
                    if other is not bench:
                        other.feed(*bench.of(PlanIssued))
        for bench in (first, second):
            for site in "bc":
                orders = [one for one in bench.of(PlanIssued) if one.site == site]
                assert len(orders) <= 1
                assert all(one.targets[0].replicas == 0 for one in orders)
        assert first.of(PlanIssued)
        assert third.of(PlanIssued) == []
        held = second.core.long.state.issued["b", "m"]
        second.feed(msgspec.structs.replace(held, id="late", term=0, revision=held.revision + 1, targets=()))
        assert second.core.long.state.issued["b", "m"] == held

    def test_a_site_without_an_actuator_gets_no_plan(self) -> None:
        """Nobody there could follow it."""
        bench = PlanBench(planned_fleet(actuators=["c"]))
        bench.traffic(60.0, 130, ready=("b-0",))
        assert {one.site for one in bench.of(PlanIssued)} == {"c"}

    def test_replicas_that_an_actuator_cannot_start_are_planned_elsewhere(self) -> None:
        """B's actuator is broken: the plan does not wait for it for ever."""
        bench = PlanBench(planned_fleet())
        bench.traffic(10.0, 70, ready=())
        wanted = bench.targets()["b", "1"]
        assert wanted > 0
        plan = bench.core.long.state.issued["b", "m"]
        failed = PlanApplied(
            id="x", site="b", model="m", revision=plan.revision, plan=plan.id, ok=False, replicas={}, failed={"1": 4}
        )
        bench.feed(failed)
        bench.traffic(10.0, 70, ready=())
        assert bench.targets()["b", "1"] == 0
        assert bench.targets()["c", "1"] > 0
        assert bench.count("plan_failed_replicas") == 4

    def test_unknown_is_not_free(self) -> None:
        """C's agent is silent: its replicas are not counted on, nor are its GPUs given to anybody."""
        bench = PlanBench(planned_fleet())
        for _ in range(130):
            bench.report("b-0", running=2)
            bench.report("b-1", "b-2", "b-3", ready=False, reason="stopped")
            for n in range(60):
                bench.feed(admitted(make_ask(f"{bench.now_ms}-{n}")))
            bench.run(1_000.0, reports=False)
        assert bench.targets()["b", "1"] == 4
        assert bench.targets()["c", "1"] == 0

    def test_a_report_of_nobody_is_rejected_and_silence_is_told(self) -> None:
        """F08: restored workers reported an empty id, the planner discarded all of it and held still without a word."""
        bench = PlanBench(planned_fleet())
        bench.report("b-0", "b-1", "b-2", "b-3", running=2)
        bench.run(4_000.0, lease=[], reports=False)
        assert bench.core.gauges()["plan_stale_replicas"][("site", "b"), ("model", "m"), ("version", "1")] == 0
        assert bench.core.gauges()["plan_stale_replicas"][("site", "c"), ("model", "m"), ("version", "1")] == 4
        for _ in range(12):
            bench.report("b-0", instance="", running=2)
            bench.run(1_000.0, lease=[], reports=False)
        rejected = [note for note in bench.notes if note.name == "capacity_rejected"]
        assert (len(rejected), {note.level for note in rejected}) == (12, {"error"})
        assert rejected[0].labels == {"site": "b", "reason": "no_instance_name"}
        assert bench.core.gauges()["plan_stale_replicas"][("site", "b"), ("model", "m"), ("version", "1")] == 4
        told = [note.labels for note in bench.notes if note.name == "plan_stale_inputs"]
        assert told == [{"site": "b", "model": "m"}, {"site": "c", "model": "m"}, {"site": "b", "model": "m"}]
        assert "" not in bench.core.state.capacity.instances("b")

    def test_an_unknown_number_of_gpus_is_refused_not_guessed(self) -> None:
        """F08: where nobody says how many GPUs a replica takes, a number was made up and planned with."""
        fleet = planned_fleet()
        for name, one in fleet.sites["b"].instances.items():
            fleet.sites["b"].instances[name] = msgspec.structs.replace(one, gpus=0)
        bench = PlanBench(fleet)
        bench.traffic(20.0, 130, ready=("b-0",))
        assert {one.site for one in bench.of(PlanIssued)} == {"c"}
        refused = [note for note in bench.notes if note.name == "plan_refused"]
        assert refused
        assert {(note.labels["site"], note.detail["reason"], note.level) for note in refused} == {
            ("b", "gpus_unknown", "error")
        }

    def test_a_plan_that_does_not_become_real_is_said_once_per_time_limit(self) -> None:
        """The agent says nothing and nothing starts: an alert, not silence."""
        bench = PlanBench(planned_fleet())
        bench.traffic(2.0, 600, ready=())
        overdue = [note for note in bench.notes if note.name == "plan_overdue"]
        assert 1 <= len([note for note in overdue if note.labels["site"] == "b"]) <= 2
        assert {note.level for note in overdue} == {"error"}

    def test_history_and_plans_survive_a_restart(self) -> None:
        """A new process goes on with the forecast and with the revision of the plans."""
        bench = PlanBench(planned_fleet())
        bench.traffic(2.0, 130, ready=("b-0",))
        before = bench.core.long.state
        again = FleetMind(bench.fleet, replica="fleetmind-1")
        again.restore(bench.core.snapshot())
        assert again.long.state.issued == before.issued
        assert again.long.state.series.keys() == before.series.keys()
        bench.core = again
        bench.take_office()
        bench.traffic(0.0, 1_500, ready=("b-0", "b-1"))
        last = bench.core.long.state.issued["b", "m"]
        assert last.revision > before.issued["b", "m"].revision or last is before.issued["b", "m"]

    def test_the_solvers_answer_can_be_recorded_and_told_again(self, tmp_path: Path) -> None:
        """A plan of last night as a test of today: told the same, the solver's word too, a core says the same."""
        recorder = Recorder(tmp_path / "told.jsonl")
        bench = PlanBench(planned_fleet(), office=False)
        handle, wake, mark = bench.core.handle, bench.core.wake, bench.core.mark

        def said(effects: Iterable[Effect]) -> list[Effect]:
            effects = list(effects)
            for effect in effects:
                if isinstance(effect, Publish):
                    recorder.event("said", effect.event)
            return effects

        def told(event: Event, now_ms: float) -> list[Effect]:
            recorder.event("handle", event, now_ms)
            return said(handle(event, now_ms))

        def woken(now_ms: float) -> list[Effect]:
            recorder.write("wake", now_ms)
            return said(wake(now_ms))

        def marked(scope: str, term: int, now_ms: float) -> Event:
            recorder.write("mark", now_ms, scope=scope, term=term)
            made: Event = mark(scope, term, now_ms)
            return made

        bench.core.handle, bench.core.wake, bench.core.mark = told, woken, marked
        bench.take_office()
        bench.traffic(1.0, 70, ready=())
        assert bench.targets()["b", "1"] > 0
        recorder.close()
        found = replay(tmp_path / "told.jsonl", FleetMind(bench.fleet, replica="fleetmind-1"), inputs=(PlanMade,))
        assert found.said > 0
        assert found.differences == []

    def test_a_solver_that_fails_leaves_the_plan_as_it_is(self) -> None:
        """No plan is better than a plan of nonsense, and the log says why."""
        bench = PlanBench(planned_fleet())
        bench.traffic(1.0, 70, ready=())
        before = bench.targets()
        effects = list(bench.core.long.wake(bench.fleet, bench.core.state.capacity, bench.now_ms + 60_000))
        (problem,) = [one for one in effects if isinstance(one, MakePlan)]
        answer = bench.core.handle(PlanMade(id="x", number=problem.number, failure="no time"), bench.now_ms)
        assert [one.name for one in answer if isinstance(one, Note)] == ["plan_failed"]
        assert bench.targets() == before


def request(name: str, gpus: float, *, at_ms: int = 0, site: str = "b", tenant: str = "acme") -> ReservationRequested:
    begin = int(START_MS) + 1_000
    return ReservationRequested(
        id=f"reservation:{name}:requested:{at_ms}",
        site=site,
        reservation=name,
        model="m",
        tenant=tenant,
        gpu_seconds_per_s=gpus,
        from_unix_ms=begin,
        until_unix_ms=begin + 600_000,
    )


def kinds(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


class TestPromises:
    def test_what_fits_is_granted_the_rest_refused_with_a_reason(self) -> None:
        """Two operators at the same moment: one answer each, and never more than the site has."""
        bench = PlanBench(planned_fleet(planning="off"))
        granted, refused = bench.feed(request("one", 3.0), request("two", 2.0))
        assert isinstance(granted, ReservationGranted)
        assert (granted.reservation, granted.gpu_seconds_per_s, granted.cause) == ("one", 3.0, request("one", 3.0).id)
        assert isinstance(refused, ReservationRefused)
        assert (refused.reservation, refused.reason) == ("two", "over_budget")
        assert bench.count("reservation_gpus") == 3.0

    def test_a_request_is_answered_once_however_often_it_is_delivered(self) -> None:
        """Redelivery, and the last value that a restarted reader sees again."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.feed(request("one", 3.0))
        assert bench.feed(request("one", 3.0)) == []

    def test_a_cancelled_promise_makes_room(self) -> None:
        """Withdrawn, revoked, and the GPUs are free for the next."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.feed(request("one", 3.0))
        (revoked,) = bench.feed(ReservationWithdrawn(id="w", site="b", reservation="one", model="m"))
        assert isinstance(revoked, ReservationRevoked)
        assert revoked.reason == "cancelled_by_operator"
        (granted,) = bench.feed(request("two", 4.0))
        assert isinstance(granted, ReservationGranted)

    def test_an_unknown_name_is_answered_too(self) -> None:
        """The command must not wait for ever."""
        bench = PlanBench(planned_fleet(planning="off"))
        (refused,) = bench.feed(ReservationWithdrawn(id="w", site="b", reservation="none", model="m"))
        assert isinstance(refused, ReservationRefused)
        assert refused.reason == "unknown_reservation"

    def test_what_nobody_answered_the_next_owner_answers(self) -> None:
        """Asked for while FleetMind was down."""
        bench = PlanBench(planned_fleet(planning="off"), office=False)
        assert bench.feed(request("one", 3.0)) == []
        bench.term += 1
        said = bench.feed(bench.core.mark(PLAN_SCOPE, bench.term, bench.now_ms))
        assert kinds(said) == ["ReservationGranted"]

    def test_a_grant_of_an_office_that_had_ended_is_void(self) -> None:
        """A deposed owner grants what its successor has promised to somebody else: the successor's word holds."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.feed(request("one", 4.0))
        (mine,) = bench.of(ReservationGranted)
        late = msgspec.structs.replace(mine, id="late", reservation="two", term=mine.term - 1)
        bench.feed(late)
        assert set(bench.core.long.promises.state.book.given) == {"one"}

    def test_grants_of_earlier_terms_stand(self) -> None:
        """A change of office revokes nothing: granted, then the mark of a new owner, then a standby folds both."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.feed(request("one", 3.0))
        (granted,) = bench.of(ReservationGranted)
        fresh = PlanBench(planned_fleet(planning="off"), office=False)
        fresh.feed(granted, ReservationOwned(id="m", scope=PLAN_SCOPE, owner="other", term=granted.term + 5))
        assert set(fresh.core.long.promises.state.book.given) == {"one"}

    def test_the_fleet_files_promises_are_asked_for_and_given_up_with_it(self) -> None:
        """A table in fleet.toml, changed, then deleted; one that does not fit is refused and said."""
        fleet = planned_fleet(planning="off")
        begin = _time(START_MS + 1_000)
        promise = Promise(
            site="b", model="m", tenant="acme", gpu_seconds_per_s=2.0, begin=begin, end=_time(START_MS + 9e6)
        )
        big = msgspec.structs.replace(promise, gpu_seconds_per_s=20.0)
        filed = msgspec.structs.replace(fleet, reservations={"big": big, "night": promise})
        bench = PlanBench(filed)
        assert [one.reservation for one in bench.of(ReservationGranted)] == ["night"]
        assert [one.reason for one in bench.of(ReservationRefused)] == ["over_budget"]
        bench._take(bench.core.reconfigure(fleet, bench.now_ms))
        bench.run(10.0)
        assert [one.reason for one in bench.of(ReservationRevoked)] == ["not_in_fleet_file"]

    def test_a_promise_keeps_replicas_running_within_its_window_only(self) -> None:
        """Two GPUs from a minute before the window until its end; before and after, nobody needs them."""
        bench = PlanBench(planned_fleet())
        bench.feed(request("one", 2.0))
        bench.traffic(0.0, 130, ready=())
        assert bench.targets()["b", "1"] == 2
        bench.traffic(0.0, 1_200, ready=("b-0", "b-1"))
        assert bench.targets()["b", "1"] == 0

    @pytest.mark.parametrize("holder", [True, False])
    def test_the_short_cycle_is_told_what_is_closed(self, holder: bool) -> None:
        """While the holder is there others leave its half of B alone; when it is gone they borrow it."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.report()
        bench.feed(request("one", 2.0, tenant="local"))
        bench.now_ms += 2_000
        if holder:
            bench.feed(admitted(make_ask("r1", tenant="local")))

        def closed(tenant: str) -> float:
            ask = make_ask("r2", tenant=tenant)
            found: float = bench.core.view.closed(ask, "b", bench.now_ms)
            return found

        assert closed("acme") == (0.5 if holder else 0.0)
        assert closed("local") == 0.0
        bench.now_ms += 31_000
        bench.report()
        assert closed("acme") == 0.0

    def test_others_go_elsewhere_while_the_holder_is_there_and_borrow_when_it_is_not(self) -> None:
        """B is promised whole to one tenant: while it asks, others are sent to C; a minute later B serves anybody."""
        bench = PlanBench(planned_fleet(planning="off"))
        bench.report()
        bench.feed(request("all", 4.0, tenant="local"))
        bench.now_ms += 2_000
        bench.report()

        def site_of(request_id: str, tenant: str) -> str:
            said = bench.feed(admitted(make_ask(request_id, tenant=tenant)))
            (asked,) = [one for one in said if isinstance(one, PlacementRequested)]
            return asked.site

        assert site_of("r1", "local") == "b"
        assert site_of("r2", "acme") == "c"
        assert site_of("r3", "local") == "b"
        bench.now_ms += 31_000
        bench.report()
        assert site_of("r4", "acme") == "b"


def _time(at_ms: float) -> Any:
    return datetime.fromtimestamp(at_ms / 1000.0, UTC)
