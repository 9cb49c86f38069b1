"""Refusal that helps: early where nothing else is left, without a cliff, with a Retry-After that is true."""

import pytest
from tests.simulation.messages import Bench, assigned, finished, held, make_ask, offered, received, requested
from tests.unit.slomax.test_slomax_core import bench_of, fleet_with

from tokenfleet.slomax import gate
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.placement import PlacementRefused, PlacementReleased


def backlog(
    bench: Bench, seconds: float, *, tier_class: str = "chat", sites: str = "bc", slack_ms: float = 1_000.0
) -> None:
    """So much prefill held at each site, in requests of one second with so much time left."""
    for site in sites:
        for n in range(int(seconds)):
            ask = make_ask(f"{tier_class}-{site}-{n}", service_class=tier_class)
            bench.feed(held(ask, site, predicted_own_ms=1_000.0, slack_ms=slack_ms, patience_left_ms=250_000.0))


def decided(bench: Bench) -> AdmissionDecided:
    return bench.of(AdmissionDecided)[-1]


class TestEarly:
    """Only what even a lucky prediction cannot serve."""

    def test_what_would_outlive_its_patience_is_told_at_once(self) -> None:
        """It was held for its ten seconds and then refused: its client could have gone elsewhere at once."""
        bench = bench_of()
        backlog(bench, 30)
        bench.feed(received(make_ask("r1")))
        assert (decided(bench).reason, decided(bench).status) == ("saturated", 429)
        # 30 s at the pool's pace, less the 10 s that it would have waited itself
        assert decided(bench).retry_after_s == pytest.approx(20, abs=1)

    def test_what_may_still_be_served_late_is_held(self) -> None:
        """Half of a prediction's waits are shorter: 15 s predicted is no reason against a patience of ten."""
        bench = bench_of()
        backlog(bench, 15)
        bench.feed(received(make_ask("r1")))
        assert decided(bench).admitted

    def test_one_site_without_a_queue_is_reason_enough_to_let_it_in(self) -> None:
        """Every allowed and ready site must be hopeless."""
        bench = bench_of()
        backlog(bench, 60, sites="b")
        bench.feed(received(make_ask("r1")))
        assert decided(bench).admitted

    def test_a_site_above_its_ceiling_is_no_room(self) -> None:
        """Nothing is diverted to it, so it never holds anything: by holds alone the fleet never was saturated."""
        bench = bench_of()
        backlog(bench, 60, sites="b")
        bench.report("c-0", running=28, max_sequences=32)
        bench.feed(received(make_ask("r1")))
        assert decided(bench).reason == "saturated"
        bench.report("c-0", running=20, max_sequences=32)
        bench.feed(received(make_ask("r2")))
        assert decided(bench).admitted

    def test_a_burst_is_refused_for_no_shorter_wait_than_others(self) -> None:
        """Who wanted more than its part was refused at four times its promise: agents, whose calls come in bursts, lost
        five points of their compliance at plain overload, and a flood is refused as much without it.
        """
        bench = bench_of()
        backlog(bench, 12)
        for site in "bc":
            pool = bench.core.state.pools[(site, "m", "1")]
            pool.greedy, pool.looked_ms = ("acme",), bench.now_ms
        bench.feed(received(make_ask("greedy")), received(make_ask("modest", tenant="local")))
        assert [one.admitted for one in bench.of(AdmissionDecided)] == [True, True]

    def test_what_waits_behind_it_does_not_count(self) -> None:
        """A chat was refused because of a night's batch that it would have passed."""
        bench = bench_of()
        backlog(bench, 60, tier_class="document", slack_ms=200_000.0)
        bench.feed(received(make_ask("r1", ttft_ms=5_000.0)))
        assert decided(bench).admitted
        late = bench_of()
        backlog(late, 60, tier_class="document")
        late.feed(received(make_ask("r2", service_class="document")))
        assert decided(late).reason == "saturated"

    def test_late_ones_do_not_close_the_door_for_what_can_be_on_time(self) -> None:
        """At half again of what the fleet could do, chats were refused for what was late anyway and went after them: a
        tenth less was answered, and five points fewer in time, than without any door.
        """
        bench = bench_of()
        backlog(bench, 60)  # with a second left for a second's work: late
        bench.feed(received(make_ask("r1", ttft_ms=3_000.0)))
        assert decided(bench).admitted

    def test_where_late_ones_get_nothing_the_next_is_told_at_once(self) -> None:
        """Two late ones ahead are two seconds by the pool's pace; but nobody late was served for a minute."""
        bench = bench_of()
        backlog(bench, 2)
        for pool in bench.core.state.pools.values():
            pool.spare.waited_ms, pool.spare.at_ms = 60_000.0, bench.now_ms
        bench.feed(received(make_ask("r1")))
        assert decided(bench).reason == "saturated"


class TestNoCliff:
    """Lower tiers yield before saturation, more of them the nearer it is."""

    def test_sheddable_requests_are_refused_one_after_the_other(self) -> None:
        """At 1,000 ms all batch vanished at once, at 999 none: the fleet swung between full and empty."""

        def refused(wait_ms: float) -> int:
            bench = bench_of()
            for site in "bc":
                bench.feed(held(make_ask(f"chat-{site}"), site, predicted_wait_ms=wait_ms))
            for n in range(200):
                bench.feed(received(make_ask(f"batch-{n}", service_class="batch", ttft_ms=None)))
            return len(bench.of(PlacementRefused))

        assert refused(400.0) == 0
        assert 60 < refused(750.0) < 140
        assert refused(1_000.0) == 200

    def test_the_same_request_hears_the_same_from_every_replica(self) -> None:
        """No dice: a repeated submission is not let in where the first was refused."""
        pool_states = []
        for _ in range(2):
            bench = bench_of()
            for site in "bc":
                bench.feed(held(make_ask(f"chat-{site}"), site, predicted_wait_ms=750.0))
            for n in range(50):
                bench.feed(received(make_ask(f"batch-{n}", service_class="batch", ttft_ms=None)))
            pool_states.append([e.request_id for e in bench.of(PlacementRefused)])
        assert pool_states[0] == pool_states[1] != []


class TestSurvival:
    """A dead owner loses nothing and lets nothing in twice."""

    QUOTA = '[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent=2\ntokens_per_minute=6000\n'

    def test_quotas_survive_a_takeover(self) -> None:
        """The successor began with full buckets: a tenant had its quota twice."""
        fleet = fleet_with(self.QUOTA)
        owner, standby = bench_of(fleet), bench_of(fleet, office=False)
        asks = [make_ask(f"r{n}", tenant="few") for n in range(4)]
        for ask in asks[:2]:
            said = owner.feed(received(ask))
            assert standby.feed(received(ask), *said) == []
        standby.term = 100
        standby.take_office()
        assert standby.of(AdmissionDecided) == [], "nothing was unanswered"
        standby.feed(received(asks[2]))
        assert decided(standby).reason == "tenant_concurrency"
        standby.feed(finished(asks[0], output_tokens=100), finished(asks[1], output_tokens=100))
        big = make_ask("r9", tenant="few", input_tokens=4_000)
        standby.feed(finished(asks[2], "refused", attempt=0), received(big))
        assert decided(standby).reason == "tenant_rate"  # 2,200 of 6,000 were used under the owner before

    def test_quotas_survive_a_restart_from_a_checkpoint(self) -> None:
        """The same through a checkpoint: reservations are in it."""
        bench = bench_of(fleet_with(self.QUOTA))
        for n in range(2):
            bench.feed(received(make_ask(f"r{n}", tenant="few")))
        again = SLOMax(bench.fleet, replica="slomax-2")
        again.restore(bench.core.snapshot())
        verdict = gate.judge(bench.fleet, again.state, make_ask("r9", tenant="few"), bench.now_ms)
        assert verdict.reason == "tenant_concurrency"

    def test_resubmissions_to_a_successor_are_not_admitted_twice(self) -> None:
        """Gateways submit again what was not answered in time: one reservation, one release, one hold."""
        fleet = fleet_with()
        owner, standby = bench_of(fleet), bench_of(fleet, office=False)
        ask = make_ask()
        said = owner.feed(received(ask))
        standby.feed(received(ask), *said, requested(ask, "b"), held(ask))
        standby.term = 100
        standby.take_office()
        (again,) = standby.of(AdmissionDecided, standby.feed(received(ask, revision=1)))
        assert again.admitted
        assert standby.count("reserved_tokens") == 1100
        assert standby.count("held_requests") == 1
        owner.feed(*standby.said)
        assert owner.count("reserved_tokens") == 1100
        standby.feed(assigned(ask), finished(ask))
        standby.check_zero()

    def test_two_requests_of_one_moment_share_one_quota(self) -> None:
        """Check and reservation are one step: the second of two concurrent requests sees the first one's."""
        bench = bench_of(fleet_with('[tenants.few]\nzones=["*"]\nclasses=["chat"]\ntokens_per_minute=1200\n'))
        for effects in (bench.core.handle(received(make_ask(f"r{n}", tenant="few")), bench.now_ms) for n in range(2)):
            bench._take(effects)
        assert [e.admitted for e in bench.of(AdmissionDecided)] == [True, False]

    def test_released_before_the_takeover_is_not_released_again(self) -> None:
        """Its predecessor's last release is on its way: the successor waits until it is surely lost."""
        fleet = fleet_with()
        owner, standby = bench_of(fleet), bench_of(fleet, office=False)
        said = [*owner.feed(held(make_ask())), *owner.feed(offered())]
        standby.feed(held(make_ask()), offered(), *said)
        standby.term = 100
        standby.take_office()
        assert standby.of(PlacementReleased) == []
