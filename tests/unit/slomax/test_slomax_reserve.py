"""What stays free, and for whom: floods of one tenant, urgent work beside patient work. Incident by incident."""

import random

import pytest
from tests.simulation.messages import Bench, assigned, finished, held, make_ask, offered, received, requested
from tests.unit.slomax.test_slomax_core import bench_of, fleet_with, work
from tests.unit.slomax.test_slomax_order import TENANTS, Server

from tokenfleet.slomax import gate, policy, reserve
from tokenfleet.slomax.state import Crowd, Pool
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.placement import PlacementReleased

LONG = {"ttft_ms": 90_000.0, "patience_ms": 100_000.0}


def pool_of(bench: Bench) -> Pool:
    found: Pool = bench.core.state.pools[("b", "m", "1")]
    return found


def flood(bench: Bench, count: int, tenant: str = "ant", **changes: object) -> None:
    """One tenant's loop: so many requests that wait."""
    for n in range(count):
        ask = make_ask(f"{tenant}-{n}", tenant=tenant, **{**LONG, **changes})
        bench.feed(held(ask, slack_ms=90_000.0 + n, work=work(100)))


def run_once(bench: Bench, tenant: str, count: int, **changes: object) -> None:
    """So many requests of a tenant run at once, and end."""
    asks = [make_ask(f"{tenant}-ran-{n}", tenant=tenant, **changes) for n in range(count)]
    bench.feed(*(one for ask in asks for one in (received(ask), assigned(ask, work=work(100)))))
    bench.now_ms += 2_000
    bench.feed(*(finished(ask) for ask in asks))


def releases(bench: Bench, revision: int, **changes: object) -> list[str]:
    """Who is released into this room; what is released starts at once."""
    pool = pool_of(bench)
    room = {"prefill_tokens": 5_000, "idle": False, "held": len(pool.held), "last_released": pool.number, **changes}
    said = bench.of(PlacementReleased, bench.feed(offered(revision=revision, **room)))
    for one in said:
        mine = pool.held[one.request_id]
        ask = make_ask(one.request_id, tenant=mine.tenant, service_class=mine.service_class)
        bench.feed(assigned(ask, release_number=one.number, work=mine.work))
    return [one.request_id for one in said]


class TestFlood:
    """A tenant that wants far more than its part."""

    def test_it_leaves_the_places_that_others_had_lately(self) -> None:
        """One client's loop took every sequence: whoever came next waited for one of its answers to end."""
        bench = bench_of(fleet_with(TENANTS))
        run_once(bench, "bee", 4)
        flood(bench, 40)
        bench.now_ms += 15_000
        assert releases(bench, 1, sequences=6) == ["ant-0", "ant-1", "ant-2", "ant-3"]
        assert pool_of(bench).greedy == ("ant",)
        bench.feed(held(make_ask("bee-now", tenant="bee", **LONG), slack_ms=90_000.0, work=work(100)))
        assert [one.request_id for one in bench.of(PlacementReleased)][-1] == "bee-now"

    def test_it_goes_after_everybody_who_can_be_on_time(self) -> None:
        """By deadlines alone its oldest went first, for there was always one that was about to be late."""
        bench = bench_of(fleet_with(TENANTS))
        flood(bench, 40)
        bench.now_ms += 20_000
        bench.feed(held(make_ask("bee-0", tenant="bee", **LONG), slack_ms=85_000.0, work=work(100)))
        first = [one.tenant for one, _ in policy.order(bench.fleet, pool_of(bench), bench.now_ms)]
        assert first[0] == "bee"
        assert set(first[1:]) == {"ant"}

    def test_alone_it_has_the_pool_for_itself(self) -> None:
        """At night its loop is all there is: places stayed empty for nobody."""
        bench = bench_of(fleet_with(TENANTS))
        flood(bench, 20)
        bench.now_ms += 15_000
        assert len(releases(bench, 1, sequences=8)) == 8
        assert pool_of(bench).greedy == ()

    def test_what_nobody_came_back_for_is_given_away(self) -> None:
        """The others went home an hour ago."""
        bench = bench_of(fleet_with(TENANTS))
        run_once(bench, "bee", 4)
        flood(bench, 20)
        bench.now_ms += 60_000
        assert len(releases(bench, 1, sequences=4)) == 4
        assert "chat bee" not in pool_of(bench).crowds

    def test_an_empty_instance_takes_what_waits(self) -> None:
        """What is kept for others is never all: nobody ran, nobody came, and the flood waited for ever."""
        bench = bench_of(fleet_with(TENANTS))
        run_once(bench, "bee", 8)
        flood(bench, 90)
        bench.now_ms += 10_000
        assert len(releases(bench, 1, sequences=8, idle=True)) == 4
        assert len(releases(bench, 2, sequences=1, idle=True, last_released=4)) == 0

    def test_others_demand_that_is_a_little_above_theirs_is_no_flood(self) -> None:
        """Everybody's demand passes its part now and then: serving by part cost four points of compliance."""
        bench = bench_of(fleet_with(TENANTS))
        flood(bench, 8)
        flood(bench, 4, "bee")
        bench.now_ms += 15_000
        releases(bench, 1, sequences=6)
        assert pool_of(bench).greedy == ()

    def test_others_are_not_refused_for_its_queue(self) -> None:
        """Its forty seconds of backlog closed the door for everybody, though they would have passed it."""
        bench = bench_of(fleet_with(TENANTS))
        for site in "bc":
            for n in range(40):
                ask = make_ask(f"{site}-{n}", tenant="ant", **LONG)
                bench.feed(held(ask, site, slack_ms=500.0, predicted_own_ms=1_000.0, patience_left_ms=90_000.0))
        bench.now_ms += 2_000
        bench.feed(
            received(make_ask("ant-new", tenant="ant")), received(make_ask("bee-new", tenant="bee", ttft_ms=5_000.0))
        )
        said = {one.ask.request_id: one for one in bench.of(AdmissionDecided)}
        assert said["ant-new"].reason == "saturated"
        for pool in bench.core.state.pools.values():
            pool.greedy = ("ant",)
        bench.feed(received(make_ask("bee-2", tenant="bee")))
        assert bench.of(AdmissionDecided)[-1].admitted
        pool = pool_of(bench)
        assert gate.drain_ms(bench.fleet, pool, 0, "bee") == 0.0
        assert gate.drain_ms(bench.fleet, pool, 0, "ant") == gate.drain_ms(bench.fleet, pool, 0) > 10_000

    def test_kv_is_kept_as_well(self) -> None:
        """Places were left, but no memory for the others' long histories."""
        bench = bench_of(fleet_with(TENANTS))
        asks = [make_ask(f"bee-ran-{n}", tenant="bee") for n in range(2)]
        bench.feed(*(one for ask in asks for one in (received(ask), assigned(ask, work=work(4_000)))))
        flood(bench, 40)
        bench.now_ms += 3_000
        bench.feed(*(finished(ask) for ask in asks))
        bench.now_ms += 12_000
        assert len(releases(bench, 1, sequences=40, kv_tokens=4_500)) == pytest.approx(2_250 / 150, abs=1)
        assert reserve.kept(
            bench.fleet, pool_of(bench), next(iter(pool_of(bench).held.values())), bench.now_ms
        ).kv_tokens


class TestUrgent:
    """Classes whose first token cannot wait for a place."""

    def test_a_patient_class_leaves_what_an_urgent_one_has_on_average(self) -> None:
        """Documents took all places for ten seconds each: every chat of that time was late."""
        bench = bench_of()
        pool = bench.core.state.pool(("b", "m", "1"))
        pool.crowds["chat acme"] = Crowd(mean=2.0, count=2, peak=4.0, at_ms=bench.now_ms)
        chats = [make_ask(f"chat-{n}") for n in range(2)]
        bench.feed(*(one for ask in chats for one in (received(ask), assigned(ask, work=work(100)))))
        bench.now_ms += 30_000
        bench.feed(*(finished(ask) for ask in chats))
        for n in range(6):
            bench.feed(held(make_ask(f"d-{n}", service_class="document"), slack_ms=9_000.0 + n, work=work(100)))
        assert releases(bench, 1, sequences=4) == ["d-0", "d-1"]
        bench.feed(held(make_ask("chat-now"), work=work(100)))
        assert [one.request_id for one in bench.of(PlacementReleased)][-1] == "chat-now"

    def test_the_floor_of_a_class_is_not_kept_from_it(self) -> None:
        """Nobody starves: what batch is owed it gets, whoever else may come."""
        bench = bench_of()
        pool = bench.core.state.pool(("b", "m", "1"))
        pool.crowds["chat acme"] = Crowd(mean=5.0, peak=5.0, at_ms=bench.now_ms)
        for n in range(2):
            ask = make_ask(f"batch-{n}", service_class="batch")
            bench.feed(held(ask, slack_ms=None, work=work(100)))
        assert releases(bench, 1, sequences=2) == ["batch-0"]
        assert releases(bench, 2, sequences=1) == []
        pool.credit["floor batch"] = 10_000.0
        assert releases(bench, 3, sequences=1) == ["batch-1"]


class TestBooks:
    """What is counted is released exactly once."""

    def test_every_way_out_ends_what_runs(self) -> None:
        """An end said twice, a failed attempt, a dead gateway, an end before its beginning: nothing is left."""
        bench = bench_of()
        for rid in ("done", "failed", "lost"):
            ask = make_ask(rid)
            bench.feed(received(ask), requested(ask, "b"), assigned(ask))
        pool = pool_of(bench)
        assert pool.crowds["chat acme"].running == {"done", "failed", "lost"}
        bench.feed(finished(make_ask("done")), finished(make_ask("done")))
        bench.feed(finished(make_ask("failed"), "failed", final=False, excluded=("b-0",)))
        assert pool.crowds["chat acme"].running == {"lost"}
        bench.feed(assigned(make_ask("failed"), "c", attempt=2))
        bench.feed(finished(make_ask("early")), assigned(make_ask("early")))
        bench.feed(assigned(make_ask("made-up")))  # nobody asked, so nobody will say its end
        bench.run(8_000)  # the gateway is silent for more than six seconds
        assert pool.crowds["chat acme"].running == set()
        assert bench.core.state.inside == {}
        bench.check_zero()

    def test_a_checkpoint_knows_who_runs(self) -> None:
        """A standby that took over kept nothing for anybody until everybody had come again."""
        bench = bench_of(fleet_with(TENANTS))
        run_once(bench, "bee", 2)
        bench.feed(received(make_ask("bee-runs", tenant="bee")), assigned(make_ask("bee-runs", tenant="bee")))
        other = bench_of(fleet_with(TENANTS), ready=False)
        other.core.restore(bench.core.snapshot())
        assert pool_of(other).crowds == pool_of(bench).crowds
        assert other.core.state.inside == bench.core.state.inside


def test_parts_are_max_min_fair() -> None:
    """Who wants less than its part has all it wants; the rest is shared by weight."""
    assert reserve.fair_parts({}, {}, 8.0) == {}
    even = dict.fromkeys("abc", 1.0)
    assert reserve.fair_parts({"a": 1.0, "b": 2.0, "c": 90.0}, even, 9.0) == {"a": 1.0, "b": 2.0, "c": 6.0}
    assert reserve.fair_parts({"a": 50.0, "b": 50.0}, {"a": 3.0, "b": 1.0}, 8.0) == {"a": 6.0, "b": 2.0}


def test_a_thousand_arrivals_never_wait_behind_a_lower_class() -> None:
    """A05: batch had every slot, and an older batch item the next one. The order of engines' priorities is not needed.

    Of 1,000 random arrivals no batch is released while a chat that fits and can still be on time waits, other than the
    floor that batch is owed; and nobody is released twice.
    """
    dice = random.Random(5)
    server = Server(bench_of())
    inversions, floors, work_ms = [], 0.0, 0.0
    freed_ms = arrives_ms = server.bench.now_ms
    arrived = 0
    while arrived < 1_000 or (("b", "m", "1") in server.bench.core.state.pools and server.pool().waiting()):
        arrives = arrived < 1_000
        if arrives and (arrives_ms <= freed_ms or not server.bench.core.state.where):
            server.bench.now_ms = arrives_ms
            own_ms = dice.uniform(20.0, 180.0)
            if dice.random() < 0.6:
                server.arrive("chat", slack_ms=dice.uniform(300.0, 3_000.0), own_ms=own_ms)
            else:
                server.arrive("batch", slack_ms=None, own_ms=own_ms, service_class="batch")
            arrived += 1
            arrives_ms += dice.expovariate(1 / 110.0)
            freed_ms = max(freed_ms, server.bench.now_ms)
            continue
        server.bench.now_ms = freed_ms
        pool = server.pool()
        waiting = [one for one in pool.held.values() if not one.released]
        rid = server.serve()
        (released,) = [one for one in server.bench.of(PlacementReleased) if one.request_id == rid]
        one = next(one for one in waiting if one.request_id == rid)
        work_ms += one.cost_ms
        if one.service_class == "batch":
            if released.reason == "floor":
                floors += one.cost_ms
            else:
                inversions += [
                    (rid, chat.request_id)
                    for chat in waiting
                    if chat.service_class == "chat" and server.bench.now_ms <= chat.latest_start_ms
                ]
        freed_ms += one.own_ms
    assert len(server.served) == 1_000
    assert inversions == []
    assert floors <= 0.06 * work_ms
    assert server.on_time["chat"] > 0.9 * server.offered["chat"]
