"""SLOMax's core, incident by incident: every effect of a decision is asserted, every counter ends at zero."""

import itertools
from typing import Any

import pytest
from tests.simulation.harness import SMALL, START_MS, small_fleet
from tests.simulation.messages import (
    Bench,
    admitted,
    assigned,
    finished,
    held,
    leased,
    make_ask,
    offered,
    received,
    requested,
)

from tokenfleet import fleet as fleets
from tokenfleet.fleet import Fleet
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionShared
from tokenfleet_schemas.placement import (
    PlacementDeclined,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
    Work,
)
from tokenfleet_schemas.room import RoomDeclined

INSTANCES = """
[sites.b.instances.b-0]
model = "m"
version = "1"
url = "http://127.0.0.1:1/b-0"
[sites.c.instances.c-0]
model = "m"
version = "1"
url = "http://127.0.0.1:1/c-0"
"""


def fleet_with(tenants: str = "", **replace: str) -> Fleet:
    text = SMALL.format(instances=INSTANCES)
    for old, new in replace.items():
        assert old in text
        text = text.replace(old, new)
    return fleets.parse((text + tenants).encode())


def bench_of(fleet: Fleet | None = None, *, ready: bool = True, office: bool = True) -> Bench:
    fleet = fleet or fleet_with()
    bench = Bench(SLOMax(fleet, replica="slomax-1"), fleet, office=office)
    if ready:
        bench.report()
    return bench


def work(prefill: int = 1000, decode: int = 50, kv: int | None = None) -> Work:
    return Work(prefill_tokens=prefill, decode_tokens=decode, kv_tokens=kv if kv is not None else prefill + decode)


class TestAdmission:
    """Whether."""

    def test_a_permitted_request_is_admitted_once(self) -> None:
        """A redelivered request is no second request; the decision carries its term and its cause."""
        bench = bench_of()
        said = bench.feed(received(make_ask(), elapsed_ms=3.0))
        (decided,) = said
        assert isinstance(decided, AdmissionDecided)
        assert decided.admitted
        assert (decided.reason, decided.status, decided.fallback) == ("", 0, False)
        assert decided.cause == "r1:received:1:0"
        assert decided.term > 0
        assert decided.elapsed_ms == 3.0
        assert decided.site == "a"
        assert bench.feed(received(make_ask())) == []

    def test_a_submission_that_is_repeated_hears_the_same_decision_again(self) -> None:
        """The decision was lost on its way: the gateway raises the revision; nothing is reserved twice."""
        bench = bench_of(fleet_with('[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent=1\n'))
        ask = make_ask(tenant="few")
        bench.feed(received(ask))
        (again,) = bench.feed(received(ask, revision=1))
        assert isinstance(again, AdmissionDecided)
        assert again.admitted
        assert again.revision == 1
        assert bench.count("reserved_tokens") == 1100
        bench.feed(finished(ask, output_tokens=5))
        bench.check_zero()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"tenant": "nobody"}, "not_permitted"),
            ({"tenant": "local", "service_class": "batch"}, "not_permitted"),
            ({"version": "9"}, "not_permitted"),
            ({"tenant": "far"}, "residency"),
            ({"tenant": "elsewhere"}, "not_permitted"),
        ],
    )
    def test_what_is_not_permitted_is_refused_at_once_and_for_good(self, changes: dict[str, Any], reason: str) -> None:
        """F01: a missing rule denies. A 403 has no Retry-After: asking again cannot help (G11)."""
        tenants = '[sites.d]\nzone="moon"\n[tenants.far]\nzones=["moon"]\nclasses=["chat"]\n'
        tenants += '[tenants.elsewhere]\nzones=["*"]\nclasses=["chat"]\nmodels=[]\n'
        bench = bench_of(fleet_with(tenants))
        decided, refused = bench.feed(received(make_ask(**changes)))
        assert isinstance(decided, AdmissionDecided)
        assert isinstance(refused, PlacementRefused)
        assert not decided.admitted
        assert (decided.reason, decided.status, decided.retry_after_s) == (reason, 403, None)
        assert (refused.reason, refused.status, refused.retry_after_s) == (reason, 403, None)
        assert refused.gateway == "gateway-a"
        bench.feed(finished(make_ask(**changes), "refused", attempt=0))
        bench.check_zero()

    def test_a_tenant_has_so_many_open_requests_and_no_more(self) -> None:
        """A10: whatever else a client says, its tenant is one flow; the slot is free when the first one ends."""
        bench = bench_of(fleet_with('[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent=2\n'))
        asks = [make_ask(f"r{n}", tenant="few", task=f"task-{n}", gateway=f"g{n}") for n in range(4)]
        for ask in asks[:3]:
            bench.feed(received(ask))
        refused = bench.of(PlacementRefused)
        assert [(r.request_id, r.reason, r.status) for r in refused] == [("r2", "tenant_concurrency", 429)]
        assert refused[0].retry_after_s is not None
        assert refused[0].retry_after_s >= 1
        bench.feed(finished(asks[0], "cancelled"), finished(asks[0], "cancelled"))
        bench.feed(received(asks[3]))
        assert bench.of(AdmissionDecided)[-1].admitted
        for ask in asks[1:]:
            bench.feed(finished(ask, "completed"))
        bench.check_zero()

    def test_the_token_bucket_says_when_it_will_have_enough(self) -> None:
        """G11: Retry-After is the bucket's true reset ± 1 s, and after it the request is let in."""
        bench = bench_of(fleet_with('[tenants.slow]\nzones=["*"]\nclasses=["chat"]\ntokens_per_minute=6000\n'))
        ask = make_ask(tenant="slow", input_tokens=4000, output_budget_tokens=1000)
        again = make_ask("r2", tenant="slow", input_tokens=4000, output_budget_tokens=1000)
        bench.feed(received(ask))
        _, refused = bench.feed(received(again))
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.status) == ("tenant_rate", 429)
        assert refused.retry_after_s is not None
        assert abs(refused.retry_after_s - 40) <= 1  # 4,000 tokens are missing at 100 a second
        bench.feed(finished(again, "refused", attempt=0))
        bench.run(41_000, lease=["r1"])
        bench.feed(received(make_ask("r3", tenant="slow", input_tokens=4000, output_budget_tokens=1000)))
        assert bench.of(AdmissionDecided)[-1].admitted

    def test_cancelled_streams_give_their_reservation_back(self) -> None:
        """A08: worst-case holds of cancelled calls piled up: a key was blocked at 805.8 while its spend was 280."""
        bench = bench_of(fleet_with('[tenants.slow]\nzones=["*"]\nclasses=["chat"]\ntokens_per_minute=1000000\n'))
        for n in range(200):
            ask = make_ask(f"r{n}", tenant="slow", input_tokens=100, output_budget_tokens=4096)
            bench.feed(received(ask))
            assert bench.of(AdmissionDecided)[-1].admitted, n
            bench.feed(finished(ask, "cancelled", output_tokens=10))
        assert bench.count("reserved_tokens") == 0
        account = bench.core.state.accounts["slow", "a"]
        assert account.level == pytest.approx(1_000_000 - 200 * 110)
        bench.check_zero()

    def test_reservations_of_a_killed_gateway_expire(self) -> None:
        """A08: kill -9 of a gateway with 50 reservations open: none is left once it has been silent for 6 s."""
        bench = bench_of(fleet_with('[tenants.slow]\nzones=["*"]\nclasses=["chat"]\ntokens_per_minute=1000000\n'))
        bench.feed(leased(1))
        for n in range(50):
            bench.feed(received(make_ask(f"r{n}", tenant="slow")))
        assert bench.count("reserved_tokens") == 50 * 1100
        bench.run(8_500)
        bench.check_zero()
        assert bench.feed(received(make_ask("r1", tenant="slow"))) == []  # a late redelivery wakes nothing up

    def test_sheddable_work_is_refused_at_once_at_saturation_and_others_are_not(self) -> None:
        """A01: best effort was queued to its TTL instead of an early 429; its queue stays empty, chats are held."""
        bench = bench_of()
        for n, site in enumerate("bc"):
            chat = make_ask(f"chat-{n}")
            bench.feed(received(chat), held(chat, site, predicted_wait_ms=2_500.0))
        bench.feed(received(make_ask("batch", service_class="batch", ttft_ms=None)))
        decided, refused = bench.said[-2:]
        assert isinstance(decided, AdmissionDecided)
        assert isinstance(refused, PlacementRefused)
        assert (decided.admitted, refused.reason, refused.status) == (False, "saturated", 429)
        assert refused.retry_after_s is not None
        bench.feed(received(make_ask("chat-9")))
        assert bench.of(AdmissionDecided)[-1].admitted

    def test_sheddable_work_that_would_be_held_at_saturation_is_refused_instead(self) -> None:
        """A01: it was admitted while there was room; its hold is the first sign of saturation everywhere."""
        bench = bench_of()
        chat, batch = make_ask("chat"), make_ask("batch", service_class="batch", ttft_ms=None)
        bench.feed(received(batch), received(chat), held(chat, "c", lacks="sequences"))
        (refused,) = bench.of(PlacementRefused, bench.feed(held(batch, "b", lacks="kv_tokens")))
        assert (refused.request_id, refused.reason, refused.status) == ("batch", "saturated", 429)
        assert bench.core.state.pools[("b", "m", "1")].count("batch") == 0

    def test_a_queue_of_milliseconds_is_no_saturation(self) -> None:
        """At half load two sites hold something for a moment now and then: batch was shed for it."""
        bench = bench_of()
        for n, site in enumerate("bc"):
            bench.feed(held(make_ask(f"chat-{n}"), site, predicted_wait_ms=200.0))
        bench.feed(received(make_ask("batch", service_class="batch", ttft_ms=None)))
        assert bench.of(AdmissionDecided)[-1].admitted
        bench.run(1_000, lease=["chat-0", "chat-1", "batch"])
        bench.feed(received(make_ask("batch-2", service_class="batch", ttft_ms=None)))
        assert bench.of(AdmissionDecided)[-1].reason == "saturated"  # they are still there: the estimate was wrong

    def test_with_room_elsewhere_sheddable_work_is_held(self) -> None:
        """One full site is no saturation: FleetMind may still move it."""
        bench = bench_of()
        batch = make_ask("batch", service_class="batch", ttft_ms=None)
        assert bench.of(PlacementRefused, bench.feed(received(batch), held(batch, "b"))) == []

    def test_a_full_class_refuses_newcomers(self) -> None:
        """`max_held` bounds a class per pool: more would only wait for their patience to end."""
        fleet = fleet_with(**{"patience_ms = 10000": "patience_ms = 10000\nmax_held = 2"})
        bench = bench_of(fleet)
        for n, site in enumerate("bbcc"):
            ask = make_ask(f"r{n}")
            bench.feed(received(ask), held(ask, site))
        _, refused = bench.feed(received(make_ask("r9")))
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.status) == ("queue_full", 429)

    def test_without_admission_control_nothing_is_refused_for_load(self) -> None:
        """`policy.admission = none` is the baseline of every comparison: residency still holds."""
        bench = bench_of(fleet_with('\n[policy]\nadmission="none"\n'))
        for n, site in enumerate("bc"):
            chat = make_ask(f"chat-{n}")
            bench.feed(received(chat), held(chat, site))
        bench.feed(received(make_ask("batch", service_class="batch")))
        assert bench.of(AdmissionDecided)[-1].admitted
        bench.run(30_000, lease=["chat-0", "chat-1", "batch"])
        assert bench.of(PlacementRefused) == []
        bench.feed(received(make_ask("no", tenant="nobody")))
        assert bench.of(PlacementRefused)[-1].status == 403

    def test_what_a_gateway_let_in_itself_counts_and_is_not_decided_again(self) -> None:
        """SLOMax was silent: the gateway's own decision is the first, so it is the decision."""
        bench = bench_of()
        assert bench.feed(admitted(make_ask(), fallback=True, id="r1:decided:gateway")) == []
        assert bench.count("reserved_tokens") == 1100
        assert bench.feed(received(make_ask())) == []

    def test_an_end_before_its_beginning_leaves_nothing_open(self) -> None:
        """Streams are not ordered against each other: the outcome may be read first."""
        bench = bench_of()
        bench.feed(finished(make_ask()))
        assert bench.feed(received(make_ask()), held(make_ask())) == []
        bench.check_zero()


class TestHops:
    """Nothing waits for ever: FleetMind silent."""

    def test_a_silent_fleetmind_is_replaced_by_the_home_sites_in_order(self) -> None:
        """250 ms + 2 RTT after the admission SLOMax asks the first home site itself, marked as a fallback."""
        bench = bench_of()
        bench.feed(received(make_ask()))
        assert bench.of(PlacementRequested, bench.run(255, reports=False)) == []
        (asked,) = bench.of(PlacementRequested, bench.run(10, reports=False))
        assert (asked.site, asked.fallback, asked.attempt, asked.revision) == ("b", "slomax", 1, 0)
        assert [(one.name, one.chosen) for one in asked.sites] == [("b", True), ("c", False)]
        (then,) = bench.of(PlacementRequested, bench.run(300, reports=False))  # b's TokenPilot is silent too
        assert (then.site, then.revision) == ("c", 1)
        bench.feed(assigned(make_ask(), "c", revision=1))
        assert bench.run(3_000, lease=["r1"]) == []

    def test_fleetminds_word_in_time_stops_the_watch(self) -> None:
        """The uncongested road has no fallback in it."""
        bench = bench_of()
        bench.feed(received(make_ask()), requested(make_ask(), "b"))
        assert bench.run(2_000, lease=["r1"]) == []

    def test_the_fallback_never_leaves_the_tenants_zones(self) -> None:
        """F01: home site down, the site over the border ready: 503 and not one byte over there."""
        bench = bench_of(ready=False)
        bench.report("c-0")
        bench.feed(received(make_ask(tenant="local")))
        (refused,) = bench.run(300, reports=False)
        assert isinstance(refused, PlacementRefused)
        assert (refused.reason, refused.status) == ("residency_no_capacity", 503)
        assert {one.name: one.out for one in refused.sites} == {"b": "no_instance", "c": "residency"}

    def test_the_next_attempt_is_watched_like_the_first(self) -> None:
        """An instance failed before the first token; FleetMind owes another site, and the failed one stays out."""
        bench = bench_of()
        ask = make_ask()
        bench.feed(received(ask), requested(ask, "b"), assigned(ask, "b"))
        bench.feed(finished(ask, "failed", final=False, instance="b-0", excluded=("b-0",)))
        (asked,) = bench.of(PlacementRequested, bench.run(300, reports=False))
        assert (asked.site, asked.attempt, asked.excluded) == ("c", 2, ("b-0",))


class TestRoom:
    """When: what goes next into offered room."""

    def test_an_offer_is_answered_with_the_request_that_is_due_first(self) -> None:
        """Earliest deadline first, numbered per pool, and not more than fits."""
        bench = bench_of()
        for n, slack in enumerate((900.0, 500.0, 700.0)):
            bench.feed(held(make_ask(f"r{n}"), slack_ms=slack))
        released = bench.of(PlacementReleased, bench.feed(offered(prefill_tokens=2100, idle=False, held=3)))
        assert [(r.request_id, r.number, r.instance, r.reason) for r in released] == [
            ("r1", 1, "b-0", "deadline"),
            ("r2", 2, "b-0", "deadline"),
        ]
        assert released[0].cause == "b-0:offered:1"
        assert released[0].term > 0

    def test_own_releases_that_an_offer_does_not_include_are_subtracted(self) -> None:
        """The level was measured before the last release arrived: it would be filled twice."""
        bench = bench_of()
        for n in range(3):
            bench.feed(held(make_ask(f"r{n}"), slack_ms=500.0 + n))
        bench.feed(offered(prefill_tokens=1000, idle=False, held=3))
        assert bench.feed(offered(revision=2, prefill_tokens=1000, idle=False, held=3, last_released=0)) == [
            bench.of(RoomDeclined)[-1]
        ]
        bench.feed(assigned(make_ask("r0"), release_number=1))
        (next_one,) = bench.of(
            PlacementReleased, bench.feed(offered(revision=3, prefill_tokens=1000, held=2, last_released=1))
        )
        assert (next_one.request_id, next_one.number) == ("r1", 2)

    def test_nothing_that_fits_is_said_so(self) -> None:
        """TokenPilot must not wait for an answer that does not come, nor fill the room itself at once."""
        bench = bench_of()
        bench.feed(held(make_ask(), work=work(prefill=5000)))
        (declined,) = bench.feed(offered(prefill_tokens=2048, idle=False))
        assert isinstance(declined, RoomDeclined)
        assert (declined.offer, declined.reason, declined.for_ms) == ("b-0:offered:1", "nothing_fits", 500.0)

    def test_an_offer_that_overtakes_its_hold_is_filled_when_the_hold_arrives(self) -> None:
        """Rooms and holds travel in two streams: the first to arrive waits for the other."""
        bench = bench_of()
        assert bench.feed(offered(held=1)) == []
        (released,) = bench.feed(held(make_ask()))
        assert isinstance(released, PlacementReleased)

    def test_a_request_held_again_keeps_its_place_and_is_not_released_for_as_little(self) -> None:
        """The room was gone when the release arrived: no ping-pong of release and hold."""
        bench = bench_of()
        first, second = make_ask("r0", received_unix_ms=1), make_ask("r1", received_unix_ms=2)
        bench.feed(held(first, work=work(1500)), held(second))
        bench.feed(offered(prefill_tokens=1500, idle=False, held=2))
        assert [r.request_id for r in bench.of(PlacementReleased)] == ["r0"]
        again = bench.feed(held(first, work=work(1500), after_release=1, slack_ms=1000.0))
        assert [r.request_id for r in bench.of(PlacementReleased, again)] == ["r1"]
        said = bench.feed(offered(revision=2, prefill_tokens=1500, idle=False, held=1, last_released=2))
        assert bench.of(PlacementReleased, said) == []
        said = bench.feed(offered(revision=3, prefill_tokens=2500, idle=False, held=1, last_released=2))
        assert [r.request_id for r in bench.of(PlacementReleased, said)] == ["r0"]

    def test_the_hopeless_go_last_and_shortest_first(self) -> None:
        """Plain EDF collapses under overload: it serves exactly those that miss anyway."""
        bench = bench_of()
        bench.feed(
            held(make_ask("late-long"), slack_ms=100.0, predicted_own_ms=400.0),
            held(make_ask("late-short"), slack_ms=50.0, predicted_own_ms=200.0),
            held(make_ask("feasible"), slack_ms=900.0),
        )
        bench.now_ms += 1
        bench.feed(offered(prefill_tokens=3000, idle=False, held=3))
        assert [r.request_id for r in bench.of(PlacementReleased)] == ["feasible", "late-short", "late-long"]

    def test_a_large_request_gets_an_idle_instance_in_the_end(self) -> None:
        """Small requests kept its home instance from ever running dry: after four of them passed, it is left to."""
        bench = bench_of()
        bench.feed(held(make_ask("large"), work=work(9000), slack_ms=500.0, predicted_own_ms=10.0))
        released: list[str] = []
        for n in range(6):
            bench.feed(held(make_ask(f"s{n}"), slack_ms=900.0))
            said = bench.feed(offered(revision=n + 1, prefill_tokens=1000, idle=False, held=2, last_released=n))
            released += [r.request_id for r in bench.of(PlacementReleased, said)]
            for rid in released[-1:]:
                bench.feed(assigned(make_ask(rid)))
        assert released == ["s0", "s1", "s2", "s3"]
        assert bench.of(RoomDeclined)[-1].reason == "reserved"
        said = bench.feed(offered(revision=9, idle=True, held=3, last_released=99))
        assert bench.of(PlacementReleased, said)[0].request_id == "large"

    def test_the_freed_slot_goes_to_the_higher_tier(self) -> None:
        """A05: all slots are held by batch; a chat arrives: the next freed slot is its, whoever came first."""
        bench = bench_of()
        for n in range(20):
            bench.feed(held(make_ask(f"batch-{n}", service_class="batch"), slack_ms=None))
        bench.feed(held(make_ask("chat")))
        said = bench.feed(offered(prefill_tokens=1000, idle=False, held=21))
        assert [r.request_id for r in bench.of(PlacementReleased, said)] == ["chat"]

    def test_patience_that_ends_is_a_503(self) -> None:
        """A hold past its patience is refused by SLOMax, with the time after which asking again helps."""
        bench = bench_of()
        bench.feed(received(make_ask()), requested(make_ask(), "b"), held(make_ask(), patience_left_ms=3_000.0))
        assert bench.of(PlacementRefused, bench.run(2_990, lease=["r1"])) == []
        (refused,) = bench.of(PlacementRefused, bench.run(20, lease=["r1"]))
        assert (refused.reason, refused.status, refused.site) == ("patience", 503, "b")
        assert refused.retry_after_s is not None
        bench.feed(finished(make_ask(), "refused", attempt=0))
        bench.check_zero()

    def test_patience_within_a_border_says_so(self) -> None:
        """The tenant's zones kept it from the free site: that is the operator's answer, not a queue too long."""
        bench = bench_of()
        bench.feed(held(make_ask(tenant="local"), patience_left_ms=3_000.0))
        (refused,) = bench.of(PlacementRefused, bench.run(3_100, lease=["r1"]))
        assert refused.reason == "residency_no_capacity"

    @pytest.mark.parametrize("how", ["assigned", "withdrawn", "declined", "finished", "moved", "omitted"])
    def test_every_end_of_a_hold_drops_it(self, how: str) -> None:
        """G06: a client that leaves while held leaves the queue; no end may be forgotten."""
        bench = bench_of()
        ask = make_ask()
        bench.feed(received(ask), requested(ask, "b"), held(ask))
        common: dict[str, Any] = {
            "request_id": "r1",
            "gateway": "gateway-a",
            "model": "m",
            "version": "1",
            "attempt": 1,
            "revision": 0,
        }
        if how == "assigned":
            bench.feed(assigned(ask))
        elif how == "withdrawn":
            bench.feed(PlacementWithdrawn(id="w", site="b", moved_to="c", **common))
            bench.feed(held(ask, id="late"))  # the withdrawn hold, repeated
        elif how == "declined":
            bench.feed(PlacementDeclined(id="d", site="b", declined="r1:held:1:0:0", reason="closed", **common))
        elif how == "finished":
            bench.feed(finished(ask, "cancelled", attempt=0))
        elif how == "moved":
            bench.feed(requested(ask, "c", revision=1))
        elif how == "omitted":
            bench.feed(leased(1), leased(2))
        assert bench.count("held_requests") == 0
        assert bench.of(PlacementReleased, bench.feed(offered())) == []
        bench.feed(finished(ask, "cancelled", attempt=0))
        bench.check_zero()

    def test_a_release_that_is_lost_is_repeated(self) -> None:
        """A plain message may be lost when the bus hiccups: the request must not wait for its patience to end."""
        bench = bench_of()
        bench.feed(held(make_ask()))
        bench.feed(offered())
        bench.run(1_600, lease=["r1"])
        (again,) = bench.of(PlacementReleased, bench.feed(offered(revision=2)))
        assert (again.request_id, again.number) == ("r1", 2)


class TestShares:
    """Between classes."""

    def test_no_class_starves_and_none_idles(self) -> None:
        """A02: interactive offered at 120 % for ever, batch always waiting with a share of 5 %."""
        fleet = fleet_with(**{"share = 4": "share = 95", "share = 2": "share = 1e-9", "share = 1\n": "share = 5\n"})
        bench = bench_of(fleet)
        numbers = itertools.count()
        waiting = {"chat": 0, "batch": 0}

        def top_up(chats: int) -> None:
            while waiting["batch"] < 3:
                bench.feed(held(make_ask(f"batch-{next(numbers)}", service_class="batch"), slack_ms=None))
                waiting["batch"] += 1
            for _ in range(chats):
                bench.feed(held(make_ask(f"chat-{next(numbers)}"), slack_ms=100_000.0))
                waiting["chat"] += 1

        def serve() -> str:
            done = bench.core.state.pools[("b", "m", "1")].number
            offer = offered(revision=next(numbers), prefill_tokens=1000, idle=False, held=3, last_released=done)
            (released,) = bench.of(PlacementReleased, bench.feed(offer))
            name = released.request_id.partition("-")[0]
            bench.feed(assigned(make_ask(released.request_id, service_class=name), release_number=released.number))
            waiting[name] -= 1
            return name

        served = []
        for n in range(600):
            top_up(2 if n % 5 == 0 else 1)  # 120 % of what is served
            served.append(serve())
        for start in range(0, 600, 100):
            window = served[start : start + 100]
            assert 4 <= window.count("batch") <= 6, (start, window.count("batch"))
        while waiting["chat"]:
            top_up(0)
            serve()
        served = []
        for n in range(100):
            top_up(1 if n % 10 < 3 else 0)  # interactive drops to 30 %
            served.append(serve())
        assert served.count("batch") > 60

    def test_shares_are_said_with_what_became_of_them(self) -> None:
        """Every five seconds where something changed: guaranteed and used, so that borrowing can be seen."""
        bench = bench_of()
        bench.feed(held(make_ask()))
        bench.feed(offered())
        bench.feed(assigned(make_ask(), release_number=1))
        (shared,) = bench.of(AdmissionShared, bench.run(5_100, lease=["r1"]))
        assert (shared.site, shared.model, shared.version, shared.revision) == ("b", "m", "1", 1)
        chat = next(s for s in shared.shares if s.service_class == "chat")
        assert (chat.share, chat.used, chat.held, chat.cause) == (4 / 7, 1.0, 0, "borrowed")
        assert bench.of(AdmissionShared, bench.run(11_000, lease=["r1"])) == []


class TestOffice:
    """One decides, the others know."""

    def test_a_standby_says_nothing_and_takes_over_everything(self) -> None:
        """The owner died between request and decision: the standby decides that one, and only that one."""
        fleet = fleet_with()
        owner, standby = bench_of(fleet), bench_of(fleet, office=False)
        first, second = make_ask("r1"), make_ask("r2")
        said = owner.feed(received(first))
        for event in [received(first), *said, received(second), held(first)]:
            assert standby.feed(event) == []
        standby.feed(offered())
        assert standby.said == []
        standby.term = 100
        standby.take_office()
        assert [e.ask.request_id for e in standby.of(AdmissionDecided)] == ["r2"]
        assert [e.request_id for e in standby.of(PlacementReleased)] == ["r1"]
        assert all(e.term > 100 for e in standby.said)

    def test_a_decision_under_an_older_term_is_void_after_the_mark(self) -> None:
        """Two owners for a moment after a pause: the older one's word does not count."""
        bench = bench_of()
        bench.feed(admitted(make_ask(), term=1))
        assert bench.count("reserved_tokens") == 0
        (decided,) = bench.feed(received(make_ask()))
        assert isinstance(decided, AdmissionDecided)

    def test_who_lost_the_lease_decides_nothing(self) -> None:
        """It notices the loss before the successor's mark comes."""
        bench = bench_of()
        for scope in bench.core.scopes():
            bench.core.resign(scope, bench.now_ms)
        assert bench.feed(received(make_ask()), held(make_ask("r2")), offered()) == []

    def test_a_mark_of_a_former_life_gives_no_office(self) -> None:
        """A replica with a fixed name restarts and reads its own old mark: it has not won the lease again."""
        core = SLOMax(fleet_with(), replica="slomax-1")
        mark = SLOMax(fleet_with(), replica="slomax-1").mark("admission:a", 5, START_MS)
        core.handle(mark, START_MS)
        assert core.offices.term("admission:a") == 0

    def test_a_checkpoint_is_the_state(self) -> None:
        """A restart resumes from it: holds, reservations and tombstones survive; foreign bytes are refused."""
        bench = bench_of()
        bench.feed(received(make_ask()), requested(make_ask(), "b"), held(make_ask()), finished(make_ask("gone")))
        again = SLOMax(bench.fleet, replica="slomax-2")
        again.restore(bench.core.snapshot())
        assert again.gauges() == bench.core.gauges()
        assert list(again.state.closed) == ["gone"]
        assert again.state.pools == bench.core.state.pools
        with pytest.raises(ValueError, match="checkpoint"):
            again.restore(b"\x93\x01\x02\x03")

    def test_a_reload_changes_quotas_at_once(self) -> None:
        """An operator raises a limit during an incident: no restart."""
        bench = bench_of(fleet_with('[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent=1\n'))
        bench.feed(received(make_ask("r1", tenant="few")), received(make_ask("r2", tenant="few")))
        assert not bench.of(AdmissionDecided)[-1].admitted
        bench.core.reconfigure(
            fleet_with('[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent=3\n'), bench.now_ms
        )
        bench.feed(received(make_ask("r3", tenant="few")))
        assert bench.of(AdmissionDecided)[-1].admitted


def test_small_fleet_stands_for_its_scopes() -> None:
    """Every entry's admissions, every site's releases; an entry without engines releases nothing."""
    assert SLOMax(small_fleet(), replica="x").scopes() == ("admission:a", "release:b", "release:c")
