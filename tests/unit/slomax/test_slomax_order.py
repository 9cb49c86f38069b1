"""Who goes next in a pool that cannot serve everybody: deadlines, floors, tenants. Incident by incident."""

import itertools
from collections import Counter
from typing import Any

from tests.simulation.messages import Bench, assigned, finished, held, make_ask, offered, received
from tests.unit.slomax.test_slomax_core import bench_of, fleet_with, work

from tokenfleet.slomax import fairness, policy
from tokenfleet.slomax.state import Pool
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementReleased, Work

TENANTS = """
[tenants.ant]
zones = ["*"]
classes = ["chat", "batch"]
[tenants.bee]
zones = ["*"]
classes = ["chat", "batch"]
[tenants.cow]
zones = ["*"]
classes = ["chat", "batch"]
weight = 3.0
"""


class Server:
    """One instance that computes what is released to it, one request after the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.offers = itertools.count(1)
        self.names = itertools.count()
        self.due: dict[str, float] = {}
        self.of: dict[str, str] = {}
        self.on_time: Counter[str] = Counter()
        self.offered: Counter[str] = Counter()
        self.served: list[str] = []

    def arrive(self, flow: str, *, slack_ms: float | None, own_ms: float = 100.0, **changes: Any) -> str:
        """A hold of a flow; its tenant and class are in `changes`."""
        rid = f"{flow}-{next(self.names)}"
        ask = make_ask(rid, **changes)
        self.offered[flow] += 1
        self.of[rid] = flow
        self.due[rid] = self.bench.now_ms + (float("inf") if slack_ms is None else slack_ms)
        self.bench.feed(held(ask, slack_ms=slack_ms, predicted_own_ms=own_ms, patience_left_ms=100_000.0))
        return rid

    def pool(self) -> Pool:
        found: Pool = self.bench.core.state.pools[("b", "m", "1")]
        return found

    def serve(self) -> str:
        """Room for one: who gets it; its first token is there once it is computed."""
        offer = offered(
            revision=next(self.offers), prefill_tokens=1000, idle=False, held=9, last_released=self.pool().number
        )
        (released,) = self.bench.of(PlacementReleased, self.bench.feed(offer))
        rid = released.request_id
        ends_ms = self.bench.now_ms + self.pool().held[rid].own_ms
        self.bench.feed(assigned(make_ask(rid), release_number=released.number))
        self.on_time[self.of[rid]] += ends_ms <= self.due[rid]
        self.served.append(self.of[rid])
        return rid


class TestDeadlines:
    """As many as can be are on time, and those are chosen on purpose."""

    def test_one_that_costs_much_gives_way_to_two_that_cost_little(self) -> None:
        """Deadline order alone served the long one and made both short ones late."""
        server = Server(bench_of())
        long = server.arrive("long", slack_ms=1000.0, own_ms=800.0)
        short = [server.arrive("short", slack_ms=1050.0 + n, own_ms=200.0) for n in range(2)]
        order = [held.request_id for held, _ in policy.order(server.bench.fleet, server.pool(), server.bench.now_ms)]
        assert order == [*short, long]
        assert [why for _, why in policy.order(server.bench.fleet, server.pool(), server.bench.now_ms)] == [
            "deadline",
            "deadline",
            "spare",
        ]

    def test_a_lower_tier_gives_way_only_where_not_all_can_be_on_time(self) -> None:
        """A document whose deadline is nearer goes before a chat that can wait, and after one that cannot."""
        server = Server(bench_of())
        document = server.arrive("document", slack_ms=400.0, own_ms=300.0, service_class="document")
        chat = server.arrive("chat", slack_ms=900.0, own_ms=300.0)
        assert server.serve() == document
        server.bench.now_ms += 300
        assert server.serve() == chat
        document = server.arrive("document", slack_ms=400.0, own_ms=300.0, service_class="document")
        chat = server.arrive("chat", slack_ms=450.0, own_ms=300.0)
        assert server.serve() == chat

    def test_a_deadline_for_the_whole_answer_counts(self) -> None:
        """Batch promised within minutes was sorted as if nothing had been promised, and refused in the end."""
        bench = bench_of()
        batch = make_ask("batch", service_class="batch", ttft_ms=None, e2e_ms=5_000.0)
        chat = make_ask("chat", ttft_ms=20_000.0)
        bench.feed(received(batch), held(batch, slack_ms=None), received(chat), held(chat, slack_ms=20_000.0))
        (released,) = bench.of(PlacementReleased, bench.feed(offered(prefill_tokens=1000, idle=False, held=2)))
        assert released.request_id == "batch"

    def test_the_pool_s_pace_is_learned_from_its_releases(self) -> None:
        """Prefill times said 100 ms each, room came every 300: half of what was thought to be on time was not."""
        server = Server(bench_of())
        for _ in range(40):
            server.arrive("chat", slack_ms=100_000.0)
        assert server.pool().pace.factor(1) == 1.0
        for _ in range(30):
            server.serve()
            server.bench.now_ms += 300
        assert 2.0 < server.pool().pace.factor(1) < 3.0


class TestLength:
    """Long prefills beside short requests."""

    def long(self, bench: Bench, rid: str) -> None:
        """An agent's history of 9,000 tokens: 900 ms, while chats are promised their first token in 1,000."""
        ask = make_ask(rid, service_class="document")
        slack_ms = 9_000.0 + int(rid[-1])
        bench.feed(held(ask, slack_ms=slack_ms, predicted_own_ms=900.0, work=work(9_000)))

    def releases(self, bench: Bench, instance: str, revision: int) -> list[str]:
        number = bench.core.state.pools[("b", "m", "1")].number
        said = bench.feed(offered(instance, revision=revision, held=4, last_released=number))
        names = [one.request_id for one in bench.of(PlacementReleased, said)]
        for name in names:
            bench.feed(assigned(make_ask(name, service_class="document"), instance=instance, release_number=number + 1))
        return names

    def test_one_of_two_instances_stays_free_of_long_prefills_while_chats_are_about(self) -> None:
        """Two documents on both instances: every chat of the next second waited longer than it was promised."""
        bench = bench_of()
        bench.feed(held(make_ask("chat-0")), assigned(make_ask("chat-0")))  # a chat was here just now
        for n in range(3):
            self.long(bench, f"long-{n}")
        assert self.releases(bench, "b-0", 1) == ["long-0"]
        assert self.releases(bench, "b-1", 2) == []
        bench.feed(held(make_ask("chat-1")))
        assert [r.request_id for r in bench.of(PlacementReleased)][-1] == "chat-1"
        bench.now_ms += 1_000  # the first one is done
        assert self.releases(bench, "b-0", 3) == ["long-1"]

    def test_without_chats_every_instance_takes_long_prefills(self) -> None:
        """At night documents have the pool for themselves: nothing is spared for nobody."""
        bench = bench_of()
        for n in range(3):
            self.long(bench, f"long-{n}")
        assert self.releases(bench, "b-0", 1) == ["long-0"]
        assert self.releases(bench, "b-1", 2) == ["long-1"]

    def test_a_pool_of_one_instance_has_nothing_to_spare(self) -> None:
        """Documents would wait for ever."""
        bench = bench_of()
        bench.feed(held(make_ask("chat-0")), assigned(make_ask("chat-0")))
        self.long(bench, "long-0")
        assert self.releases(bench, "b-0", 1) == ["long-0"]


class TestFloors:
    """A02: nobody starves, whatever the others need."""

    def test_batch_trickles_through_a_storm_of_urgent_chats(self) -> None:
        """Interactive at 120 % for ever; batch without a deadline gets 5 % of the work in every window of 60 s."""
        server = Server(bench_of())
        for n in range(1_800):
            for _ in range(2 if n % 5 == 0 else 1):
                server.arrive("chat", slack_ms=2_000.0)
            while sum(1 for held in server.pool().held.values() if held.service_class == "batch") < 3:
                server.arrive("batch", slack_ms=None, service_class="batch")
            server.serve()
            server.bench.now_ms += 100
        for start in range(0, 1_800, 600):
            share = server.served[start : start + 600].count("batch") / 600
            assert 0.04 <= share <= 0.06, (start, share)

    def test_a_floor_is_at_most_its_share(self) -> None:
        """A class that was given one part in a hundred gets one, not five."""
        fleet = fleet_with(**{"share = 4": "share = 97", "share = 1\n": "share = 1\n"})
        assert fairness.floor_of(fleet, "batch") == 0.01
        assert fairness.floor_of(fleet, "chat") == fairness.FLOOR


class TestTenants:
    """Inside a class."""

    def test_a_tenant_that_sends_ten_times_its_share_costs_the_others_nothing(self) -> None:
        """One client's loop took the whole queue: everybody else's chats were late. Goal: at most 2 % of theirs."""
        server = Server(bench_of(fleet_with(TENANTS)))
        for n in range(400):
            for _ in range(10):
                if n % 4 == 0:
                    server.arrive("ant", slack_ms=1_000.0, tenant="ant")
            if n % 4 == 0:
                server.arrive("bee", slack_ms=1_000.0, tenant="bee")
            if server.pool().held:
                server.serve()
            server.bench.now_ms += 100
        assert server.on_time["bee"] >= 0.98 * server.offered["bee"]
        assert server.served.count("ant") >= 250, "what the others leave is the greedy one's"

    def test_weights_divide_what_is_contended(self) -> None:
        """Three parts for one tenant, one for each of two others, in work and not in requests."""
        server = Server(bench_of(fleet_with(TENANTS)))
        own_ms = {"ant": 200.0, "bee": 100.0, "cow": 100.0}
        got: Counter[str] = Counter()
        for name in own_ms:
            server.arrive(name, slack_ms=1_500.0, own_ms=own_ms[name], tenant=name)
        for _ in range(2_000):
            for name, cost_ms in own_ms.items():
                while sum(1 for held in server.pool().held.values() if held.tenant == name) < 8:
                    server.arrive(name, slack_ms=1_500.0, own_ms=cost_ms, tenant=name)
            flow = server.of[server.serve()]
            got[flow] += int(own_ms[flow])
            server.bench.now_ms += own_ms[flow]
        total = sum(got.values())
        assert abs(got["cow"] / total - 0.6) < 0.05, got
        assert abs(got["ant"] / total - 0.2) < 0.07, got  # within a class equals go by cost, where it is a draw

    def test_a_tenant_pays_what_its_answers_really_cost(self) -> None:
        """It asked for short answers and got long ones: by estimates alone it had twice its share."""
        bench = bench_of(fleet_with(TENANTS))
        ask = make_ask("r1", tenant="ant", input_tokens=1000)
        rest = [make_ask(f"rest-{n}", tenant="ant") for n in range(2)]
        bench.feed(received(ask), held(ask, work=Work(prefill_tokens=1000, decode_tokens=50, kv_tokens=1050)))
        bench.feed(*(held(one) for one in rest), held(make_ask("bee", tenant="bee")))
        bench.feed(offered(prefill_tokens=1000, idle=False, held=4))
        bench.feed(assigned(ask, release_number=1))
        pool = bench.core.state.pools[("b", "m", "1")]
        before = pool.credit["chat ant"]
        bench.feed(finished(ask, output_tokens=550, cached_tokens=0, times=Times(e2e_ms=9.0, tpot_ms=20.0)))
        # 500 tokens more than expected, each twice a prompt token of 0.1 ms
        assert pool.credit["chat ant"] == before - 100.0
        assert bench.core.state.bills == {}

    def test_who_has_nothing_waiting_saves_nothing(self) -> None:
        """A tenant idle for an hour came back and pushed everybody aside with what it had saved."""
        bench = bench_of(fleet_with(TENANTS))
        bench.feed(held(make_ask("a", tenant="ant")), held(make_ask("b", tenant="bee"), slack_ms=500.0))
        bench.feed(offered(prefill_tokens=1000, idle=False, held=2))
        bench.feed(assigned(make_ask("b"), release_number=1))
        pool = bench.core.state.pools[("b", "m", "1")]
        assert set(pool.credit) == {"chat", "floor chat", "chat ant"}
        bench.feed(assigned(make_ask("a")))
        assert pool.credit == {}


def test_a_release_that_came_to_nothing_costs_nobody_anything() -> None:
    """The room was gone: class and tenant had paid for work that was never done."""
    bench = bench_of(fleet_with(TENANTS))
    bench.feed(held(make_ask("a", tenant="ant"), slack_ms=500.0), held(make_ask("b", tenant="bee"), slack_ms=900.0))
    pool = bench.core.state.pools[("b", "m", "1")]
    bench.feed(offered(prefill_tokens=1000, idle=False, held=2))
    assert pool.credit["chat ant"] < 0
    bench.feed(held(make_ask("a", tenant="ant"), work=work(1500), after_release=1, slack_ms=500.0))
    assert [r.request_id for r in bench.of(PlacementReleased)] == ["a", "b"]
    assert (pool.credit["chat ant"], pool.credit["chat bee"]) == (55.0, -55.0)  # b went instead: b paid, a earned
