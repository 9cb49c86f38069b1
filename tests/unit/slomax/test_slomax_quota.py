"""One tenant's quota over several entries: their owners decide at once, and together never let in more than it."""

import random

import pytest
from tests.simulation.messages import Bench, admitted, finished, make_ask, received
from tests.unit.slomax.test_slomax_core import fleet_with

from tokenfleet import fleet as fleets
from tokenfleet.fleet import Fleet
from tokenfleet.slomax import quota
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionLent, AdmissionOwned
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.request import Ask

ENTRY = '[sites.{name}]\nzone = "eu"\nentry = true\nhomes = {{ m = ["b", "c"] }}\n'
TENANT = '[tenants.few]\nzones=["*"]\nclasses=["chat"]\nmax_concurrent={concurrent}\ntokens_per_minute={rate}\n'


def two_entries(concurrent: int = 0, rate: int = 0, *, names: str = "e") -> Fleet:
    more = "".join(ENTRY.format(name=name) for name in names)
    return fleet_with(more + TENANT.format(concurrent=concurrent, rate=rate))


class Pair:
    """The owners of two entries, whose messages arrive when the test says so."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.benches: dict[str, Bench] = {}
        self.read: dict[str, int] = {}
        for entry in quota.entries(fleet):
            bench = Bench(SLOMax(fleet, replica=f"slomax-{entry}"), fleet, office=False)
            bench.report()
            scope = f"admission:{entry}"
            bench.feed(bench.core.mark(scope, 11, bench.now_ms))
            self.benches[entry] = bench
            self.read[entry] = 0

    def ask(self, entry: str, request_id: str, **changes: object) -> AdmissionDecided:
        """A request comes in; what its entry's owner said to it."""
        ask = make_ask(request_id, tenant="few", entry=entry, gateway=f"gateway-{entry}", **changes)
        bench = self.benches[entry]
        return bench.of(AdmissionDecided, bench.feed(received(ask)))[-1]

    def end(self, entry: str, ask: Ask, output_tokens: int = 0) -> None:
        """An answer ends; everybody reads it."""
        event = finished(ask, output_tokens=output_tokens)
        for bench in self.benches.values():
            bench.feed(event)

    def deliver(self, rounds: int = 4) -> None:
        """Everybody reads what the others have said, until nobody says any more."""
        for _ in range(rounds):
            for giver, bench in self.benches.items():
                news, self.read[giver] = bench.said[self.read[giver] :], len(bench.said)
                for event in news:
                    if isinstance(event, AdmissionDecided | AdmissionLent):
                        for other, reader in self.benches.items():
                            if other != giver:
                                reader.feed(event)

    def part(self, entry: str, seen_by: str | None = None) -> quota.Part:
        return quota.part(self.fleet, self.benches[seen_by or entry].core.state, "few", entry)


class TestTogether:
    """Between two owners there is always a moment in which neither knows what the other just did."""

    def test_two_entries_of_one_moment_do_not_let_in_twice_the_quota(self) -> None:
        """Each saw its own requests only, or the other's a round trip later: 16 at once became 32."""
        pair = Pair(two_entries(concurrent=4))
        said = [pair.ask(entry, f"{entry}{n}") for n in range(4) for entry in "ae"]
        assert sum(one.admitted for one in said) == 4
        assert {one.reason for one in said if not one.admitted} == {"tenant_concurrency"}

    def test_tokens_are_reserved_from_the_entrys_part_of_the_bucket(self) -> None:
        """The same with a rate: a minute's tokens were there twice."""
        pair = Pair(two_entries(rate=8_800))
        said = [pair.ask(entry, f"{entry}{n}") for n in range(8) for entry in "ae"]
        assert sum(one.admitted for one in said) == 8  # of 1,100 tokens each
        assert {one.reason for one in said if not one.admitted} == {"tenant_rate"}

    def test_who_sends_everything_through_one_entry_has_all_of_it_there(self) -> None:
        """Halves alone would be half a quota for whoever has one entry near."""
        pair = Pair(two_entries(concurrent=16))
        asked = []
        for n in range(17):
            asked.append(pair.ask("a", f"a{n}"))
            pair.deliver()
        assert [n for n, one in enumerate(asked) if not one.admitted] == [15], "the last place comes once it was missed"
        assert pair.ask("a", "a17").reason == "tenant_concurrency"
        assert pair.ask("e", "e0").reason == "tenant_concurrency"
        assert pair.part("a").concurrent + pair.part("e").concurrent == 16

    def test_the_last_places_come_back_to_who_was_refused(self) -> None:
        """One of two places lay at the idle entry: it is the asking one's when it comes again."""
        pair = Pair(two_entries(concurrent=2))
        assert pair.ask("a", "a0").admitted
        refused = pair.ask("a", "a1")
        assert (refused.reason, refused.retry_after_s is not None) == ("tenant_concurrency", True)
        pair.deliver()
        assert pair.ask("a", "a2").admitted
        assert pair.ask("e", "e0").reason == "tenant_concurrency"
        pair.deliver()
        assert pair.ask("e", "e1").reason == "tenant_concurrency", "nobody has one to lend"
        pair.end("a", pair.benches["a"].of(AdmissionDecided)[0].ask)
        assert pair.ask("e", "e2").reason == "tenant_concurrency"
        pair.deliver()
        assert pair.ask("e", "e3").admitted

    def test_the_rate_follows_the_requests(self) -> None:
        """One entry idle: the other gets nearly the whole rate, not its half of it, and the idle one keeps a little."""
        pair = Pair(two_entries(rate=60_000))
        let_in = 0.0
        for second in range(180):
            for bench in pair.benches.values():
                bench.now_ms += 1_000.0
            for n in range(2):
                said = pair.ask("a", f"a{second}-{n}")
                let_in += 1_100 if said.admitted and second >= 60 else 0
                pair.deliver()
                if said.admitted:
                    pair.end("a", said.ask, output_tokens=100)
        assert 0.9 * 120_000 < let_in <= 120_000 * 1.01
        assert pair.part("e").tokens_per_minute >= quota.KEPT_RATE * 30_000 - 1e-6
        assert pair.ask("e", "e0").admitted

    @pytest.mark.parametrize("seed", range(5))
    def test_whatever_is_lost_late_or_repeated_the_parts_never_exceed_the_quota(self, seed: int) -> None:
        """Loans that crossed, came twice or not at all: as many places as the quota has, never more."""
        dice = random.Random(seed)
        fleet = two_entries(concurrent=9, rate=20_000, names="ef")
        pair = Pair(fleet)
        wires: dict[tuple[str, str], list[Event]] = {(x, y): [] for x in pair.benches for y in pair.benches if x != y}
        open_: list[Ask] = []
        for step in range(400):
            for bench in pair.benches.values():
                bench.now_ms += dice.choice((0.0, 50.0, 400.0))
            now_ms = max(bench.now_ms for bench in pair.benches.values())
            for bench in pair.benches.values():
                bench.now_ms = now_ms
            entry = dice.choice("aaaef") if step % 200 < 100 else dice.choice("aefff")
            said = pair.ask(entry, f"{entry}{step}", input_tokens=dice.randrange(10, 1_000))
            if said.admitted:
                open_.append(said.ask)
            for name, bench in pair.benches.items():
                news, pair.read[name] = bench.said[pair.read[name] :], len(bench.said)
                for (giver, _), wire in wires.items():
                    if giver == name:
                        wire += [e for e in news if isinstance(e, AdmissionDecided | AdmissionLent)]
            for (_, reader), wire in wires.items():
                while wire and dice.random() < 0.6:
                    event = wire.pop(0)
                    if isinstance(event, AdmissionLent) and dice.random() < 0.2:
                        continue  # lost; a later one says the total
                    for _ in range(dice.choice((1, 1, 2))):
                        pair.benches[reader].feed(event)
            if open_ and dice.random() < 0.8:
                pair.end("", open_.pop(dice.randrange(len(open_))), output_tokens=dice.randrange(100))
            # What every entry believes to have, as its own owner sees it.
            parts = [pair.part(name) for name in pair.benches]
            assert sum(one.concurrent for one in parts) <= 9
            assert sum(one.tokens_per_minute for one in parts) <= 20_000 * (1 + 1e-9)
            assert all(one.concurrent >= 0 and one.tokens_per_minute > 0 for one in parts)
            buckets = [quota.account(fleet, b.core.state, "few", n, now_ms) for n, b in pair.benches.items()]
            assert sum(max(0.0, one.level) for one in buckets) <= 20_000 * (1 + 1e-9)
            assert len(open_) <= 9


class TestSurvival:
    """Loans outlive their owners."""

    def test_a_successor_has_lent_what_its_predecessor_lent(self) -> None:
        """It began with its equal part again, and what had been lent was there twice."""
        pair = Pair(two_entries(concurrent=8))
        standby = Bench(SLOMax(pair.fleet, replica="slomax-9"), pair.fleet, office=False)
        for n in range(6):
            pair.ask("a", f"a{n}")
            pair.deliver()
        for event in [e for bench in pair.benches.values() for e in bench.said]:
            assert standby.feed(event) == []
        standby.feed(standby.core.mark("admission:e", 99, standby.now_ms))
        mine = quota.part(pair.fleet, standby.core.state, "few", "e")
        assert mine.concurrent == pair.part("e").concurrent < 4
        again = SLOMax(pair.fleet, replica="slomax-10")
        again.restore(standby.core.snapshot())
        assert quota.part(pair.fleet, again.state, "few", "e") == mine

    def test_a_loan_of_who_was_already_replaced_is_void(self) -> None:
        """A paused owner came back and lent what its successor had given away."""
        pair = Pair(two_entries(concurrent=8))
        reader = pair.benches["a"]
        reader.feed(AdmissionOwned(id="o", site="e", scope="admission:e", owner="slomax-9", term=50))
        lent = quota.Lent(concurrent=2, revision=1)
        reader.feed(quota.say(pair.fleet, "few", "e", "a", lent, 11, reader.now_ms))
        assert pair.part("a").concurrent == 4
        reader.feed(quota.say(pair.fleet, "few", "e", "a", lent, 50, reader.now_ms))
        assert pair.part("a").concurrent == 6

    def test_what_is_lent_is_said_again(self) -> None:
        """The stream forgets after hours, a loan does not: who then read it from its beginning did not know of it."""
        pair = Pair(two_entries(concurrent=8))
        for n in range(5):
            pair.ask("a", f"a{n}")
            pair.deliver()
        said = pair.benches["e"].of(AdmissionLent, pair.benches["e"].run(301_000.0))
        assert said
        fresh = Bench(SLOMax(pair.fleet, replica="slomax-9"), pair.fleet, office=False)
        fresh.feed(said[-1])
        assert quota.part(pair.fleet, fresh.core.state, "few", "e") == pair.part("e")

    def test_another_quota_begins_with_equal_parts(self) -> None:
        """A reload made the quota smaller than what had been lent: an entry's part became negative."""
        pair = Pair(two_entries(concurrent=16))
        for n in range(12):
            pair.ask("a", f"a{n}")
            pair.deliver()
        late = pair.benches["e"].of(AdmissionLent)[-1]
        smaller = two_entries(concurrent=4)
        for bench in pair.benches.values():
            bench.core.reconfigure(smaller, bench.now_ms)
            bench.feed(late)  # one of the quota before
        for entry in "ae":
            assert quota.part(smaller, pair.benches[entry].core.state, "few", entry).concurrent == 2


def test_one_entry_has_all_of_every_quota() -> None:
    """The common case: nothing is divided and nothing is lent."""
    fleet = fleet_with(TENANT.format(concurrent=5, rate=1_000))
    bench = Bench(SLOMax(fleet, replica="slomax-1"), fleet)
    assert quota.part(fleet, bench.core.state, "few", "a") == quota.Part(5, 1_000)
    for n in range(8):
        bench.feed(received(make_ask(f"r{n}", tenant="few", input_tokens=10, output_budget_tokens=10)))
    assert [one.admitted for one in bench.of(AdmissionDecided)] == [True] * 5 + [False] * 3
    assert bench.of(AdmissionLent) == []


def test_a_tenant_without_quotas_is_never_asked_for_one() -> None:
    """Zero means no limit, at every entry."""
    fleet = two_entries()
    bench = Bench(SLOMax(fleet, replica="slomax-1"), fleet)
    bench.report()
    bench.feed(admitted(make_ask("e0", tenant="few", entry="e")))
    for n in range(50):
        bench.feed(received(make_ask(f"r{n}", tenant="few")))
    assert all(one.admitted for one in bench.of(AdmissionDecided))
    assert bench.of(AdmissionLent) == []


def test_entries_agree_on_who_has_the_odd_place() -> None:
    """Three entries and a quota of two: by name, so that nobody needs to be asked."""
    fleet = two_entries(concurrent=2, names="ef")
    tenant = fleets.Tenant(zones=("*",), classes=("chat",), max_concurrent=2)
    assert [quota.first_part(fleet, tenant, name).concurrent for name in quota.entries(fleet)] == [1, 1, 0]
