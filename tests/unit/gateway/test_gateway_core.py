"""The gateway's core: one road, one dispatch per attempt, one final outcome, whatever the others do."""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import pytest
from tests.simulation.harness import small_fleet

from tokenfleet.effects import Core, Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import hop_timeout_ms
from tokenfleet.gateway.core import Gateway
from tokenfleet.gateway.policy import engine_priority, first_token_limit_ms, road_timeout_ms
from tokenfleet.gateway.settings import Limits
from tokenfleet.gateway.state import Dispatch, End, Interrupt, Refuse, Stage
from tokenfleet_schemas import codec
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementRequested,
    Work,
)
from tokenfleet_schemas.request import Ask, RequestReceived

FLEET = small_fleet()
NOW = 1_800_000_000_000.0
E = TypeVar("E")
WORK = Work(prefill_tokens=100, decode_tokens=10, kv_tokens=110)


class Bench:
    """A gateway, the time, and everything that it said."""

    def __init__(self, **limits: Any) -> None:
        self.now_ms = NOW
        self.gateway = Gateway(FLEET, site="a", name="gw", incarnation="i1", limits=Limits(**limits))
        self.core: Core = self.gateway
        self.said: list[Event] = []
        self.effects: list[Effect] = []
        self.wake_at_ms = float("inf")

    def do(self, effects: Iterable[Effect]) -> list[Effect]:
        new = list(effects)
        for effect in new:
            if isinstance(effect, WakeAt):
                self.wake_at_ms = effect.at_ms
            elif isinstance(effect, Publish):
                assert codec.decode(codec.encode(effect.event)) == effect.event
                assert effect.durable == isinstance(effect.event, OutcomeFinished)
                self.said.append(effect.event)
        self.effects += new
        return new

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.said if isinstance(event, kind)]

    def open(self, request_id: str = "r", **changes: Any) -> Ask:
        ask = msgspec.structs.replace(_ask(request_id), **changes)
        self.do(self.gateway.open(ask, self.now_ms))
        return ask

    def hear(self, event: Event) -> list[Effect]:
        return self.do(self.core.handle(event, self.now_ms))

    def advance(self, ms: float) -> None:
        """Let time pass, waking the core whenever it asked for it."""
        end = self.now_ms + ms
        while self.wake_at_ms <= end:
            self.now_ms = max(self.now_ms, self.wake_at_ms)
            self.wake_at_ms = float("inf")
            self.do(self.core.wake(self.now_ms))
        self.now_ms = end

    def report(self, site: str = "b", instance: str = "b-0", **changes: Any) -> list[Effect]:
        values: dict[str, Any] = {
            "id": f"{instance}:{self.now_ms}:{changes}",
            "site": site,
            "zone": FLEET.sites[site].zone,
            "instance": instance,
            "incarnation": "e1",
            "revision": 1,
            "model": "m",
            "version": "1",
            "ready": True,
            "endpoint_url": "http://127.0.0.1:1",
            "routable_from": ("*",),
        }
        return self.hear(CapacityReported(**{**values, **changes}))

    def check_empty(self) -> None:
        """What must hold when nothing is open."""
        assert self.gateway.requests == {}
        assert self.gateway._awaiting == {}
        assert all(value == 0 for value in self.gateway.gauges()["open_requests"].values())
        finals: dict[str, int] = {}
        for event in self.events(OutcomeFinished):
            finals[event.request_id] = finals.get(event.request_id, 0) + event.final
        assert set(finals.values()) <= {1}, finals
        keys = [(event.request_id, event.attempt) for event in self.events(OutcomeFinished)]
        assert len(keys) == len(set(keys)), "one row per request and attempt"


def _ask(request_id: str = "r") -> Ask:
    cls = FLEET.classes["chat"]
    return Ask(
        request_id=request_id,
        gateway="gw",
        gateway_incarnation="i1",
        entry="a",
        entry_zone="eu",
        tenant="acme",
        service_class="chat",
        model_asked="m",
        model="m",
        version="1",
        input_tokens=100,
        output_budget_tokens=10,
        received_unix_ms=int(NOW),
        ttft_ms=cls.ttft_ms,
        tpot_ms=cls.tpot_ms,
        patience_ms=cls.patience_ms,
    )


def assigned(request_id: str = "r", **changes: Any) -> PlacementAssigned:
    values: dict[str, Any] = {
        "site": "b",
        "request_id": request_id,
        "gateway": "gw",
        "tenant": "acme",
        "service_class": "chat",
        "model": "m",
        "version": "1",
        "attempt": 1,
        "revision": 0,
        "instance": "b-0",
        "incarnation": "e1",
        "endpoint_url": "http://127.0.0.1:1",
        "work": WORK,
        **changes,
    }
    values.setdefault("id", f"{request_id}:assigned:{values['attempt']}:{values['revision']}:{values['instance']}")
    return PlacementAssigned(**values)


def held(request_id: str = "r", **changes: Any) -> PlacementHeld:
    values: dict[str, Any] = {
        "site": "b",
        "request_id": request_id,
        "gateway": "gw",
        "entry": "a",
        "tenant": "acme",
        "service_class": "chat",
        "model": "m",
        "version": "1",
        "attempt": 1,
        "revision": 0,
        "home_instance": "b-0",
        "work": WORK,
        "predicted_wait_ms": 100.0,
        "predicted_own_ms": 10.0,
        "patience_left_ms": 1000.0,
        "received_unix_ms": int(NOW),
        "lacks": "prefill_tokens",
        **changes,
    }
    values.setdefault("id", f"{request_id}:held:{values['attempt']}:{values['revision']}")
    return PlacementHeld(**values)


def refused(request_id: str = "r", reason: str = "saturated", status: int = 429, **changes: Any) -> PlacementRefused:
    values: dict[str, Any] = {
        "id": f"{request_id}:refused:{reason}",
        "site": "a",
        "request_id": request_id,
        "gateway": "gw",
        "model": "m",
        "version": "1",
        "attempt": 1,
        "revision": 0,
        "reason": reason,
        "status": status,
        "retry_after_s": 3.0,
        **changes,
    }
    return PlacementRefused(**values)


def test_an_uncongested_request_is_dispatched_once_and_finished_once() -> None:
    """The four hops: received, assigned, started, finished; the times are this gateway's own."""
    bench = Bench()
    bench.open()
    (received,) = bench.events(RequestReceived)
    assert (received.attempt, received.revision, received.site) == (1, 0, "a")
    bench.advance(20)
    booking = assigned()
    (dispatch,) = [e for e in bench.hear(booking) if isinstance(e, Dispatch)]
    assert dispatch == Dispatch("r", 1, booking)
    assert bench.hear(booking) == [], "the same assignment again changes nothing"
    bench.advance(80)
    bench.do(bench.gateway.started("r", bench.now_ms))
    (started,) = bench.events(OutcomeStarted)
    assert (started.ttft_ms, started.engine_ttft_ms, started.booking) == (100, 80, booking.id)
    bench.advance(900)
    last_ms = bench.now_ms
    end = End(outcome="completed", status=200, output_tokens=10, usage_seen=True, last_token_ms=last_ms)
    bench.do(bench.gateway.ended("r", end, bench.now_ms))
    (finished,) = bench.events(OutcomeFinished)
    assert (finished.attempt, finished.final, finished.instance, finished.served_site) == (1, True, "b-0", "b")
    assert (finished.times.queue_ms, finished.times.ttft_ms, finished.times.tpot_ms) == (20, 100, 100)
    assert finished.times.e2e_ms == 1000
    assert finished.usage_source == "engine"
    bench.check_empty()


def test_any_other_assignment_or_hold_is_declined() -> None:
    """Two TokenPilots answered (one late): the first is used, the other's booking must not stay."""
    bench = Bench()
    bench.open()
    bench.hear(assigned())
    late = assigned(site="c", instance="c-0", revision=1)
    bench.hear(late)
    bench.hear(held(revision=2, site="c"))
    bench.do(bench.gateway.ended("r", End(outcome="completed", status=200), bench.now_ms))
    bench.hear(assigned("gone"))
    bench.hear(held("gone"))
    declined = bench.events(PlacementDeclined)
    assert [(d.declined, d.reason) for d in declined] == [
        (late.id, "superseded"),
        ("r:held:1:2", "superseded"),
        ("gone:assigned:1:0:b-0", "closed"),
        ("gone:held:1:0", "closed"),
    ]
    assert declined[0].site == "c"
    bench.hear(assigned())  # the used one, delivered again after the end: its booking is closed already
    assert len(bench.events(PlacementDeclined)) == 4
    bench.check_empty()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "2"}, "other_version"),
        ({"site": "c", "instance": "b-0"}, "declared_elsewhere"),
        ({"attempt": 2}, "superseded"),
    ],
)
def test_an_assignment_that_does_not_fit_is_never_followed(changes: dict[str, Any], reason: str) -> None:
    """The last gate before bytes leave holds even if a service above it errs."""
    bench = Bench()
    bench.open()
    effects = bench.hear(assigned(**changes))
    assert not [e for e in effects if isinstance(e, Dispatch)]
    assert bench.events(PlacementDeclined)[0].reason == reason
    assert bench.gateway.requests["r"].stage is Stage.ROAD


def test_a_placement_outside_the_tenants_zones_is_never_followed() -> None:
    """F01: a fallback quietly left the allowed region; here even an assignment cannot."""
    bench = Bench()
    bench.open(tenant="local")
    bench.hear(assigned(site="c", instance="c-0"))
    assert bench.events(PlacementDeclined)[0].reason == "not_permitted"
    (dispatch,) = [e for e in bench.hear(assigned()) if isinstance(e, Dispatch)]
    assert dispatch.assigned.site == "b"


def test_a_failed_attempt_is_placed_again_elsewhere_with_its_place_kept() -> None:
    """The instance died before its first token: attempt 2 excludes it, and the first row is not final."""
    bench = Bench()
    ask = bench.open()
    bench.hear(assigned())
    bench.do(bench.gateway.ended("r", End(outcome="failed", reason="upstream_disconnected"), bench.now_ms))
    (first,) = bench.events(OutcomeFinished)
    assert (first.attempt, first.final, first.ask, first.excluded) == (1, False, ask, ("b-0",))
    assert bench.gateway.requests["r"].attempt == 2
    bench.hear(assigned(revision=1))  # of attempt 1, late
    assert bench.events(PlacementDeclined)[-1].reason == "superseded"
    bench.hear(assigned(attempt=2))  # the excluded instance
    assert bench.events(PlacementDeclined)[-1].reason == "excluded"
    bench.hear(assigned(attempt=2, instance="b-1"))
    bench.do(bench.gateway.started("r", bench.now_ms))
    bench.do(bench.gateway.ended("r", End(outcome="completed", status=200), bench.now_ms))
    assert [(f.attempt, f.final) for f in bench.events(OutcomeFinished)] == [(1, False), (2, True)]
    bench.check_empty()


def test_the_third_failure_is_the_clients_error() -> None:
    """At most three attempts; the status says whether the engines were busy or broken."""
    bench = Bench()
    bench.open()
    for attempt, instance, reason in ((1, "b-0", "upstream_error"), (2, "b-1", "x"), (3, "c-0", "upstream_busy")):
        bench.hear(assigned(attempt=attempt, instance=instance, site=instance[0]))
        bench.do(bench.gateway.ended("r", End(outcome="failed", reason=reason), bench.now_ms))
    (refuse,) = [e for e in bench.effects if isinstance(e, Refuse)]
    assert (refuse.reason, refuse.status) == ("upstream_busy", 503)
    assert refuse.retry_after_s is not None
    assert refuse.retry_after_s >= 1
    assert [(f.attempt, f.final, f.status) for f in bench.events(OutcomeFinished)] == [
        (1, False, 0),
        (2, False, 0),
        (3, True, 503),
    ]
    bench.check_empty()


def test_after_the_first_token_nothing_is_repeated() -> None:
    """G02: a retry after the first token doubled the text. Here the attempt is final."""
    bench = Bench()
    bench.open()
    bench.hear(assigned())
    bench.do(bench.gateway.started("r", bench.now_ms))
    end = End(outcome="timed_out", reason="token_timeout", status=200, output_tokens=5)
    bench.do(bench.gateway.ended("r", end, bench.now_ms))
    (finished,) = bench.events(OutcomeFinished)
    assert (finished.final, finished.output_tokens, finished.status) == (True, 5, 200)
    assert not [e for e in bench.effects if isinstance(e, Refuse)]
    bench.check_empty()


def test_a_refusal_keeps_its_status_and_has_a_row_of_attempt_0() -> None:
    """Nothing was dispatched, and the ledger must still count it as offered."""
    bench = Bench()
    bench.open()
    effects = bench.hear(refused())
    assert [e for e in effects if isinstance(e, Refuse)] == [Refuse("r", "saturated", 429, 3.0)]
    (finished,) = bench.events(OutcomeFinished)
    assert (finished.attempt, finished.final, finished.outcome, finished.reason) == (0, True, "refused", "saturated")
    assert bench.hear(refused()) == []
    bench.check_empty()


def test_a_client_that_leaves_while_held_is_cancelled_with_one_row() -> None:
    """G06: a queued call whose client left must leave the queue; its row frees the hold."""
    bench = Bench()
    bench.open()
    bench.hear(held())
    assert bench.gateway.lease(bench.now_ms).open[0].phase == "held"
    bench.do(bench.gateway.left("r", bench.now_ms))
    (finished,) = bench.events(OutcomeFinished)
    assert (finished.attempt, finished.outcome, finished.final) == (0, "cancelled", True)
    bench.hear(assigned())
    assert bench.events(PlacementDeclined)[-1].reason == "closed"
    bench.check_empty()


def test_slomax_silent_the_gateway_admits_by_its_own_conservative_limit() -> None:
    """Resubmitted once, then admitted here, marked as fallback; FleetMind takes it from there."""
    bench = Bench(fallback_open=1)
    bench.open("r1")
    bench.open("r2")
    road_ms = road_timeout_ms(FLEET, "a", "m")
    assert road_ms == 250 + 2 * hop_timeout_ms(FLEET, "a", "c")
    bench.advance(road_ms + 1)
    assert [(e.ask.request_id, e.revision) for e in bench.events(RequestReceived)][2:] == [("r1", 1), ("r2", 1)]
    bench.advance(road_ms + 1)
    decided = bench.events(AdmissionDecided)
    assert [(d.ask.request_id, d.admitted, d.fallback, d.revision) for d in decided] == [
        ("r1", True, True, 2),
        ("r2", False, True, 2),
    ]
    assert [(r.request_id, r.reason, r.status) for r in bench.effects if isinstance(r, Refuse)] == [
        ("r2", "unavailable", 503)
    ]
    bench.hear(assigned("r1"))
    bench.do(bench.gateway.ended("r1", End(outcome="completed", status=200), bench.now_ms))
    assert bench.events(OutcomeFinished)[-1].fallback
    bench.check_empty()


def test_while_the_road_is_known_to_be_silent_newcomers_wait_one_hop_only() -> None:
    """SLOMax is down for a minute: each request would otherwise lose two whole road time-outs."""
    bench = Bench()
    bench.open("r1")
    bench.advance(2 * road_timeout_ms(FLEET, "a", "m") + 2)
    bench.hear(assigned("r1"))
    bench.open("r2")
    bench.advance(251)
    assert [d.ask.request_id for d in bench.events(AdmissionDecided)] == ["r1", "r2"]
    bench.open("r3")
    bench.hear(assigned("r3"))  # it is back
    bench.open("r4")
    bench.advance(251)
    assert [d.ask.request_id for d in bench.events(AdmissionDecided)] == ["r1", "r2"]


def test_fleetmind_silent_the_allowed_ready_sites_are_asked_in_order() -> None:
    """Home first, then the next; revisions rise, so that every fold sees the latest."""
    bench = Bench()
    bench.report("b", "b-0")
    bench.report("c", "c-0")
    bench.open()
    bench.advance(4000)
    bench.report("b", "b-0")
    bench.report("c", "c-0")
    requested = bench.events(PlacementRequested)
    assert [r.site for r in requested][:2] == ["b", "c"]
    assert all(r.fallback == "gateway" for r in requested)
    revisions = [r.revision for r in requested]
    assert revisions == sorted(set(revisions))
    assert revisions[0] == 3
    bench.hear(held(site="c", revision=revisions[-1]))
    asked = len(bench.events(PlacementRequested))
    bench.advance(1000)
    assert len(bench.events(PlacementRequested)) == asked, "a held request asks nobody"
    bench.hear(assigned(site="c", instance="c-0", revision=revisions[-1]))
    assert bench.gateway.requests["r"].stage is Stage.DISPATCHED


def test_a_fallback_asks_no_site_outside_the_tenants_zones() -> None:
    """F01 in the fallback: fails closed, and says so when the patience ends."""
    bench = Bench()
    bench.report("c", "c-0")
    bench.open(tenant="local")
    for _ in range(12):
        bench.advance(1000)
        bench.report("c", "c-0")
    assert bench.events(PlacementRequested) == []
    (refuse,) = [e for e in bench.effects if isinstance(e, Refuse)]
    assert (refuse.reason, refuse.status) == ("residency_no_capacity", 503)
    bench.check_empty()


def test_a_site_that_has_nothing_sends_the_gateways_own_round_on() -> None:
    """`model_not_ready` of one site is not the end while the gateway stands in for FleetMind."""
    bench = Bench()
    bench.report("b", "b-0")
    bench.report("c", "c-0")
    bench.open()
    while not bench.events(PlacementRequested):
        bench.advance(100)
    effects = bench.hear(refused(reason="model_not_ready", status=503, site="b"))
    assert [e.event.site for e in effects if isinstance(e, Publish)] == ["c"]
    assert "r" in bench.gateway.requests


def test_patience_ends_a_hold_that_nobody_ends() -> None:
    """SLOMax should refuse; if it is gone, the gateway does after a grace. Nothing waits for ever."""
    bench = Bench(patience_grace_ms=500)
    bench.open()
    bench.hear(held())
    bench.advance(10_400)
    assert "r" in bench.gateway.requests
    bench.advance(200)
    (refuse,) = [e for e in bench.effects if isinstance(e, Refuse)]
    assert (refuse.reason, refuse.status) == ("patience", 503)
    bench.check_empty()


def test_no_hold_is_longer_than_the_limit_whatever_its_class_says() -> None:
    """Held at most min(class patience, 300 s)."""
    bench = Bench(hold_ms=1000, patience_grace_ms=0)
    bench.open(patience_ms=250_000)
    bench.hear(held())
    bench.advance(1001)
    bench.check_empty()


def test_an_instance_without_a_first_token_is_given_up_in_time() -> None:
    """G04, G17: frozen but TCP-open; the attempt is broken off and placed elsewhere."""
    bench = Bench(first_token_min_ms=5000)
    ask = bench.open()
    booking = assigned()
    bench.hear(booking)
    assert first_token_limit_ms(ask, booking, bench.gateway.limits) == 10_000
    bench.advance(9_999)
    assert not [e for e in bench.effects if isinstance(e, Interrupt)]
    bench.advance(2)
    assert [e for e in bench.effects if isinstance(e, Interrupt)] == [Interrupt("r", 1, "first_token_timeout")]
    bench.do(bench.gateway.ended("r", End(outcome="timed_out", reason="first_token_timeout"), bench.now_ms))
    assert bench.gateway.requests["r"].attempt == 2


@pytest.mark.parametrize(
    ("changes", "interrupted"),
    [
        ({"ready": False, "reason": "unreachable"}, True),
        ({"ready": False, "reason": "version_mismatch"}, True),
        ({"ready": False, "draining": True, "reason": "draining"}, False),
        ({"incarnation": "e2"}, True),
        ({}, False),
    ],
)
def test_requests_waiting_at_an_instance_that_goes_are_freed(changes: dict[str, Any], interrupted: bool) -> None:
    """G04: the removal of an instance ends every wait for its first byte; a draining one finishes what it has."""
    bench = Bench()
    bench.report()
    bench.open("waiting")
    bench.open("streaming")
    bench.hear(assigned("waiting"))
    bench.hear(assigned("streaming"))
    bench.do(bench.gateway.started("streaming", bench.now_ms))
    bench.advance(10)
    effects = bench.report(**changes)
    wanted = [Interrupt("waiting", 1, "instance_gone")] if interrupted else []
    assert [e for e in effects if isinstance(e, Interrupt)] == wanted


def test_after_a_silence_of_the_bus_what_may_be_lost_is_said_again() -> None:
    """NATS restarted: plain messages in flight are gone; waiting requests are resubmitted, streams are let be."""
    bench = Bench()
    bench.open("waiting")
    bench.open("held")
    bench.open("running")
    bench.hear(held("held"))
    bench.hear(assigned("running"))
    before = len(bench.said)
    bench.do(bench.gateway.reconnected(bench.now_ms))
    again = bench.said[before:]
    assert all(isinstance(event, RequestReceived) and event.revision == 1 for event in again)
    assert [event.ask.request_id for event in again if isinstance(event, RequestReceived)] == ["waiting", "held"]
    assert bench.gateway.requests["running"].stage is Stage.DISPATCHED


def test_the_lease_names_everything_that_is_open() -> None:
    """Two leases that omit a booking expire it: an omission here would free a live request's place."""
    bench = Bench()
    for name in ("waiting", "held", "dispatched", "streaming"):
        bench.open(name)
    bench.hear(held("held"))
    for name in ("dispatched", "streaming"):
        bench.hear(assigned(name))
    bench.do(bench.gateway.started("streaming", bench.now_ms))
    lease = bench.gateway.lease(bench.now_ms)
    assert {(o.request_id, o.phase) for o in lease.open} == {(n, n) for n in bench.gateway.requests}
    assert {o.booking for o in lease.open if o.booking} == {
        "dispatched:assigned:1:0:b-0",
        "streaming:assigned:1:0:b-0",
    }
    assert bench.gateway.lease(bench.now_ms).revision == lease.revision + 1


def test_a_stop_refuses_what_is_not_placed() -> None:
    """An orderly stop leaves no client without an answer."""
    bench = Bench()
    bench.open("waiting")
    bench.open("running")
    bench.hear(assigned("running"))
    bench.do(bench.gateway.stop(bench.now_ms))
    assert [e.request_id for e in bench.effects if isinstance(e, Refuse)] == ["waiting"]
    assert set(bench.gateway.requests) == {"running"}


def test_a_full_gateway_refuses_with_a_row() -> None:
    """The refusal counts as offered, though the request was never opened."""
    bench = Bench(max_open=1)
    bench.open("r1")
    assert bench.gateway.full
    bench.do(bench.gateway.refused(_ask("r2"), "gateway_full", bench.now_ms, received_ms=bench.now_ms - 5))
    (finished,) = bench.events(OutcomeFinished)
    assert (finished.request_id, finished.attempt, finished.status, finished.times.e2e_ms) == ("r2", 0, 429, 5)


def test_timers_of_closed_requests_do_not_pile_up() -> None:
    """Patience timers of up to 300 s outlive most requests; the heap must stay in proportion."""
    bench = Bench()
    for number in range(5000):
        name = f"r{number}"
        bench.open(name)
        bench.hear(assigned(name))
        bench.do(bench.gateway.ended(name, End(outcome="completed", status=200), bench.now_ms))
    assert len(bench.gateway._timers) <= 2048
    assert len(bench.gateway._assignments) <= 8192
    bench.check_empty()


def test_notes_have_closed_labels() -> None:
    """O02: metrics must not grow with what clients or requests are called."""
    bench = Bench()
    bench.report("b", "b-0")
    bench.open()
    bench.advance(5000)
    bench.hear(assigned("strange"))
    notes = {(n.name, tuple(n.labels.items())) for n in bench.effects if isinstance(n, Note)}
    assert notes == {
        ("fallback", (("kind", "resubmitted"),)),
        ("fallback", (("kind", "admitted"),)),
        ("fallback", (("kind", "asked_site"),)),
        ("declined", (("reason", "closed"),)),
    }


@pytest.mark.parametrize(("engine", "priorities"), [("vllm", [0, 1, 2]), ("sglang", [None] * 3), ("", [None] * 3)])
def test_priority_is_said_in_the_engines_own_sense(engine: str, priorities: list[int | None]) -> None:
    """A06: lower is sooner in vLLM; an engine whose sense is not known is told nothing."""
    assert [engine_priority(engine, tier) for tier in range(3)] == priorities
