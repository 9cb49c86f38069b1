"""FleetMind's costs and margins, one by one: what attracts, what does not, and how much of it goes where."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.simulation.harness import small_fleet
from tests.simulation.messages import Bench, admitted, assigned, finished, held, make_ask, requested

from tokenfleet import fleet as fleets
from tokenfleet import prefix
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind import costs, policy
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.fleetmind.costs import Pool, Site
from tokenfleet.fleetmind.state import Pace, Path, State
from tokenfleet_schemas.capacity import CapacityProbed
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementRequested

WIDE = """
[fleet]
name = "wide"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
homes = { m = ["b"] }
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 131072
[classes.chat]
ttft_ms = 1000
tpot_ms = 100
patience_ms = 10000
[tenants.acme]
zones = ["*"]
classes = ["chat"]
[network.rtt_ms]
a-b = 5
a-c = 30
a-d = 30
b-c = 30
b-d = 30
c-d = 30
"""


def wide(counts: dict[str, int], *, sequences: int = 8, price: dict[str, float] | None = None) -> Fleet:
    """A's home is b; c and d are no homes."""
    text = "".join(line for line in WIDE.splitlines(True) if "-d =" not in line or "d" in counts)
    for site, count in counts.items():
        text += f'[sites.{site}]\nzone = "eu"\n'
        if price and site in price:
            text += f"gpu_hour_price = {price[site]}\n"
        for n in range(count):
            text += (
                f'[sites.{site}.instances.{site}-{n}]\nmodel = "m"\nversion = "1"\nurl = "http://x/{site}{n}"\n'
                f"max_sequences = {sequences}\nprefill_tokens_per_s = 10000\nkv_tokens = 200000\n"
            )
    return fleets.parse(text.encode())


def bench_of(fleet: Fleet) -> Bench:
    bench = Bench(FleetMind(fleet, replica="fleetmind-1"), fleet)
    bench.report()
    return bench


def ask(bench: Bench, name: str, **changes: Any) -> PlacementRequested:
    (found,) = bench.of(PlacementRequested, bench.feed(admitted(make_ask(name, **changes))))
    return found


def fill(bench: Bench, site: str, count: int) -> None:
    for n in range(count):
        one = make_ask(f"{site}-full-{n}")
        bench.feed(requested(one, site), assigned(one, site))


def queue_at_home(bench: Bench) -> None:
    blocker = make_ask("blocker")
    bench.feed(requested(blocker, "b"), held(blocker, "b", predicted_wait_ms=60_000.0))


def test_of_eight_places_overflow_takes_seven() -> None:
    """0.85 of 8 is 6.8: rounded down a small site would lose a quarter of its room to its ceiling."""
    bench = bench_of(wide({"b": 1, "c": 1}))
    queue_at_home(bench)
    sites = [ask(bench, f"r{n}", input_tokens=64).site for n in range(10)]
    assert sites == ["c"] * 7 + ["b"] * 3


def test_a_home_is_filled_to_its_last_place() -> None:
    """The ceiling keeps others' overflow off; the second home is there for this entry."""
    fleet = small_fleet({"b": 1, "c": 1}, max_sequences=8)
    bench = bench_of(fleet)
    queue_at_home(bench)
    assert [ask(bench, f"r{n}", input_tokens=64).site for n in range(8)] == ["c"] * 8


def test_overflow_is_spread_in_proportion_to_spare_rate() -> None:
    """d has three times c's instances: a burst that all see at once goes three to one, by hash, and not to one site."""
    bench = bench_of(wide({"b": 1, "c": 2, "d": 6}, sequences=256))
    queue_at_home(bench)
    went = Counter(ask(bench, f"r{n}", input_tokens=64).site for n in range(400))
    assert went["b"] == 0
    assert went["d"] == pytest.approx(300, abs=45)


def test_between_equals_the_cheaper_site_is_taken() -> None:
    """A GPU hour at d costs five times that at c; nobody says c's distance or speed is worse."""
    bench = bench_of(wide({"b": 1, "c": 1, "d": 1}, sequences=256, price={"b": 2.0, "c": 2.0, "d": 10.0}))
    queue_at_home(bench)
    assert [ask(bench, f"r{n}", input_tokens=2_000).site for n in range(2)] == ["c", "c"]


def test_an_unknown_price_is_the_dearest() -> None:
    """A site that keeps silent about money must not look like a gift."""
    fleet = wide({"b": 1, "c": 1, "d": 1}, price={"b": 2.0, "c": 4.0})
    sites = [Site(name, n, Pool(), None, 0.0) for n, name in enumerate("bcd")]
    assert costs.dearness(fleet, sites) == {"b": 1.0, "c": 2.0, "d": 2.0}
    assert set(costs.dearness(wide({"b": 1, "c": 1}), sites[:2]).values()) == {1.0}


def test_an_old_report_adds_its_age() -> None:
    """c's agent was last heard 6 s ago: whatever it hides has had so long to gather. Older still, c is out."""
    bench = bench_of(wide({"b": 1, "c": 1}))
    for _ in range(6):
        bench.now_ms += 1_000
        bench.report("b-0")
    found = ask(bench, "r1")
    assert {one.name: one.terms["age_ms"] for one in found.sites}["c"] == pytest.approx(6_000 - costs.CURRENT_MS)
    for _ in range(5):
        bench.now_ms += 1_000
        bench.report("b-0")
    assert {one.name: one.out for one in ask(bench, "r2").sites}["c"] == "stale"


def test_an_unknown_rate_is_the_slowest_known() -> None:
    """An agent that cannot say its speed attracts nobody by it."""
    fleet = small_fleet({"b": 1, "c": 1}, prefill_tokens_per_s=0)
    bench = bench_of(fleet)
    bench.report("b-0", prefill_tokens_per_s=4_000.0)
    bench.report("c-0", prefill_tokens_per_s=None)
    assert {one.terms["own_ms"] for one in ask(bench, "r1", input_tokens=2_000).sites} == {500.0}
    bench.report("b-0", prefill_tokens_per_s=None)
    # nobody knows one: as TokenPilot assumes
    assert {one.terms["own_ms"] for one in ask(bench, "r2", input_tokens=2_000).sites} == {1_000.0}


@pytest.mark.parametrize(
    ("path", "declared", "expected"),
    [
        (None, None, 200.0),
        (None, 30.0, 30.0),
        (Path(heard_ms=0.0, rtt_ms=12.0, loss=0.0), 30.0, 12.0),
        (Path(heard_ms=-60_000.0, rtt_ms=12.0, loss=0.0), 30.0, 30.0),
        (Path(heard_ms=-60_000.0, rtt_ms=90.0, loss=0.5), 30.0, 90.0),
        (Path(heard_ms=0.0, rtt_ms=12.0, loss=0.5), 30.0, 1_012.0),
        (Path(heard_ms=0.0, rtt_ms=None, loss=1.0), 30.0, 9_030.0),
    ],
)
def test_a_path_is_as_short_as_somebody_lately_measured(
    path: Path | None, declared: float | None, expected: float
) -> None:
    """Unknown is far; an old probe cannot make it shorter than declared; loss costs its repetitions."""
    assert costs.path_rtt_ms(path, declared, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ({}, 12.5e6),
        ({("a", "c"): (1e6, 0.0)}, 1e6),
        # measured in the direction of the transfer: c took from a
        ({("a", "c"): (1e6, 0.0), ("c", "a"): (4e6, 0.0)}, 4e6),
        # long ago: no faster than unknown, but not forgotten to be slow
        ({("c", "a"): (90e6, -600_000.0)}, 12.5e6),
        ({("c", "a"): (1e6, -600_000.0)}, 1e6),
    ],
)
def test_a_path_is_as_wide_as_somebody_lately_measured(
    paths: dict[tuple[str, str], tuple[float, float]], expected: float
) -> None:
    """Unknown bandwidth is neither endless nor nothing."""
    state = State(paths={ends: Path(0.0, 30.0, 0.0, *known) for ends, known in paths.items()})
    assert costs.bytes_per_s(state, "c", "a", 0.0) == expected


def test_a_large_body_does_not_take_a_narrow_way() -> None:
    """The link home carries 200 kB/s since a brown-out: a body of a megabyte goes to c, a short question stays."""
    bench = bench_of(small_fleet())
    probe = CapacityProbed(
        id="p1", site="b", other_site="a", revision=1, rtt_ms=5.0, loss=0.0, bytes_per_s=2e5, bandwidth_age_ms=9_000.0
    )
    bench.feed(probe)
    assert ask(bench, "long", request_bytes=1_000_000).site == "c"
    assert ask(bench, "short", request_bytes=2_000).site == "b"
    bench.feed(msgspec.structs.replace(probe, id="p2", revision=2, bytes_per_s=5e7))
    assert ask(bench, "well", request_bytes=1_000_000).site == "b"


def test_a_way_that_carries_no_stream_in_time_costs_extra() -> None:
    """2 kB/s bring ten tokens a second: every answer over that link would be late, however idle the site is."""
    bench = bench_of(small_fleet())
    bench.core.state.load(("b", "m", "1")).pace = Pace(seen=9, stay_ms=3e3, tpot_ms=30.0, decode_tokens=100.0)
    bench.core.state.load(("c", "m", "1")).pace = Pace(seen=9, stay_ms=3e3, tpot_ms=30.0, decode_tokens=100.0)
    bench.feed(
        CapacityProbed(id="p", site="a", other_site="b", revision=1, rtt_ms=5.0, bytes_per_s=2e3, bandwidth_age_ms=0.0)
    )
    assert ask(bench, "r1", tpot_ms=50.0, request_bytes=100).site == "c"
    assert ask(bench, "r2", tpot_ms=None, request_bytes=100).site == "b"


def test_time_that_the_promise_does_not_miss_is_not_worth_a_wan() -> None:
    """A second of queue at home: a chat that was promised one goes, a document that was promised ten stays."""
    bench = bench_of(small_fleet())
    fill(bench, "b", 10)
    blocker = make_ask("blocker")
    bench.feed(requested(blocker, "b"), held(blocker, "b", predicted_wait_ms=1_000.0))
    assert ask(bench, "r1").site == "c"
    assert ask(bench, "r2", service_class="document", ttft_ms=10_000.0).site == "b"


def test_a_site_where_answers_come_too_slowly_costs_extra() -> None:
    """Its requests keep the first token's promise and miss every other one: what is learned there counts."""
    bench = bench_of(small_fleet())
    for n in range(8):
        one = make_ask(f"slow-{n}")
        bench.feed(requested(one, "b"), assigned(one, "b"))
        end = finished(one, instance="b-0")
        times = msgspec.structs.replace(end.times, queue_ms=10.0, tpot_ms=180.0, e2e_ms=18_000.0)
        bench.feed(msgspec.structs.replace(end, served_site="b", output_tokens=100, times=times))
        two = make_ask(f"fast-{n}")
        bench.feed(requested(two, "c"), assigned(two, "c"))
        end = finished(two, instance="c-0")
        times = msgspec.structs.replace(end.times, queue_ms=10.0, tpot_ms=30.0, e2e_ms=3_000.0)
        bench.feed(msgspec.structs.replace(end, served_site="c", output_tokens=100, times=times))
    assert ask(bench, "r1", tpot_ms=100.0).site == "c"
    assert ask(bench, "r2", tpot_ms=None).site == "b"


def test_what_others_run_there_counts_until_it_is_ours() -> None:
    """Sequences of strangers are in the reports only; ours are known before, and are not counted twice."""
    bench = bench_of(small_fleet())
    fill(bench, "b", 6)
    state, view = bench.core.state, bench.core.view
    pool, _ = view.pool(make_ask(), "b", bench.now_ms)
    load = state.loads["b", "m", "1"]
    assert costs.sequences_there(msgspec.structs.replace(pool, sequences=6), load, bench.now_ms) == 6
    assert costs.sequences_there(msgspec.structs.replace(pool, sequences=20), load, bench.now_ms) == 20
    assert costs.sequences_there(msgspec.structs.replace(pool, sequences=2), load, bench.now_ms) == 6
    bench.feed(*(finished(make_ask(f"b-full-{n}"), instance="b-0") for n in range(6)))
    # the report may be from before they ended
    assert costs.sequences_there(msgspec.structs.replace(pool, sequences=6), load, bench.now_ms + 900) == 0
    assert costs.sequences_there(msgspec.structs.replace(pool, sequences=6), load, bench.now_ms + 2_500) == 6


def test_pace_follows_what_ends_and_forgets_slowly() -> None:
    """The first requests make it, later ones move it by a thirtieth each."""
    pace = Pace()
    for n in range(10):
        pace.learn(4_000.0, 40.0, 100.0, 100.0 * n)
    assert (pace.stay_ms, pace.tpot_ms, pace.decode_tokens) == pytest.approx((4_000.0, 40.0, 100.0))
    pace.learn(40_000.0, None, 100.0, 1_000.0)
    assert 4_000.0 < pace.stay_ms < 8_000.0
    assert pace.tpot_ms == pytest.approx(40.0)


def test_a_site_that_was_slow_is_tried_again() -> None:
    """A throttled home lost all its work, so no answer ever said that it was well again: it stayed empty for good."""
    bench = bench_of(small_fleet())

    def served(name: str, site: str, tpot_ms: float) -> None:
        one = make_ask(name)
        bench.feed(requested(one, site), assigned(one, site))
        end = finished(one, instance=f"{site}-0")
        times = msgspec.structs.replace(end.times, queue_ms=10.0, tpot_ms=tpot_ms, e2e_ms=100.0 * tpot_ms)
        bench.feed(msgspec.structs.replace(end, served_site=site, output_tokens=100, times=times))

    def next_site(name: str) -> str:
        bench.report()
        return ask(bench, name, tpot_ms=100.0).site

    for n in range(20):
        served(f"slow-{n}", "b", 180.0)
        served(f"fast-{n}", "c", 30.0)
    assert next_site("shunned") == "c"
    bench.now_ms += 10_000
    assert next_site("still-shunned") == "c"
    bench.now_ms += 15_000
    assert next_site("tried") == "b"
    served("well", "b", 30.0)
    assert next_site("home") == "b"
    bench.now_ms += 60_000
    for n in range(3):
        served(f"slow-again-{n}", "b", 180.0)
    assert next_site("shunned-again") == "c"


def silent_on_rates() -> Bench:
    """Engines of which nobody declares or reports a prefill rate, as most real ones."""
    fleet = wide({"b": 1, "c": 1})
    for site in "bc":
        ((name, own),) = fleet.sites[site].instances.items()
        fleet.sites[site].instances[name] = msgspec.structs.replace(own, prefill_tokens_per_s=0.0)
    bench = Bench(FleetMind(fleet, replica="fleetmind-1"), fleet)
    bench.report(prefill_tokens_per_s=None)
    return bench


def test_prefill_of_engines_that_tell_no_rate_is_computed_too() -> None:
    """No agent knew a prefill rate, so nothing that was assigned was ever computed: idle homes stayed full for good."""
    bench = silent_on_rates()
    for n in range(30):
        bench.report(prefill_tokens_per_s=None)
        one = make_ask(f"served-{n}", input_tokens=2_000)
        bench.feed(admitted(one), requested(one, "b"), assigned(one, "b"))
        bench.feed(finished(one, instance="b-0"))
        bench.now_ms += 1_000
    bench.now_ms += 2_000
    bench.report(prefill_tokens_per_s=None)
    said = ask(bench, "later", input_tokens=64)
    assert said.site == "b"
    assert {site.name: site.terms["prefill_ms"] for site in said.sites} == {"b": 0.0, "c": 0.0}


def test_a_rate_that_nobody_tells_is_seen_in_first_tokens() -> None:
    """Sites computed 8,000 tokens/s and counted as 2,000: a few prompts at home looked like seconds of backlog."""
    bench = silent_on_rates()
    for n in range(60):
        one = make_ask(f"served-{n}", input_tokens=2_000)
        bench.feed(admitted(one), requested(one, "b"), assigned(one, "b"))
        end = finished(one, instance="b-0", served_site="b", cached_tokens=400, stream=True)
        # every other one waited behind somebody else's prompt
        ttft_ms = 20.0 + 5.0 + (200.0 if n % 2 else 500.0)
        bench.feed(msgspec.structs.replace(end, times=Times(queue_ms=20.0, ttft_ms=ttft_ms, e2e_ms=900.0)))
        bench.now_ms += 100
    bench.now_ms += 5_000
    bench.report(prefill_tokens_per_s=None)
    said = ask(bench, "later", input_tokens=4_000)
    own_ms = {site.name: site.terms["own_ms"] for site in said.sites}
    assert own_ms["b"] == pytest.approx(4_000 / 8_000 * 1_000, rel=0.1)
    # of the other nothing was seen: it counts as the slowest known
    assert own_ms["c"] == own_ms["b"]


def test_what_is_ahead_is_computed_at_a_pools_rate_and_gone_with_who_brought_it() -> None:
    """Two instances that nobody knows compute 4,000 tokens/s together; an end takes what is left of its own along."""
    bench = bench_of(small_fleet(prefill_tokens_per_s=0))
    bench.report(prefill_tokens_per_s=None)
    one, two = make_ask("r1", input_tokens=10_000), make_ask("r2", input_tokens=6_000)
    bench.feed(requested(one, "b"), assigned(one, "b"), requested(two, "b"), assigned(two, "b"))
    load = bench.core.state.loads["b", "m", "1"]
    ask(bench, "r3")
    assert load.backlog(bench.now_ms) == 16_000
    bench.now_ms += 1_000
    assert load.backlog(bench.now_ms) == 12_000
    bench.feed(finished(one, instance="b-0"))
    assert load.backlog(bench.now_ms) == 6_000
    bench.feed(finished(two, "failed_midstream", instance="b-0"))
    assert load.backlog(bench.now_ms) == 0


def test_a_conversation_stays_where_its_last_turn_was() -> None:
    """Diverted for one turn, it went back with the next, though the end of what it had said was cached elsewhere."""
    bench = bench_of(small_fleet())

    def turn(chunks: int) -> dict[str, Any]:
        digests = bytes(n % 251 for n in range(8 * chunks))
        return {"input_tokens": 64 * chunks, "prefix": prefix.pack(digests)[0], "prefix_stride": 1}

    bench.core.caches.sent(("b", "m", "1"), make_ask(**turn(30)), 200_000)
    bench.core.caches.sent(("c", "m", "1"), make_ask(**turn(30)), 200_000)
    assert ask(bench, "both know the beginning", **turn(33)).site == "b"
    bench.core.caches.sent(("c", "m", "1"), make_ask(**turn(33)), 200_000)
    assert ask(bench, "its last turn was at c", **turn(36)).site == "c"
    fill(bench, "c", 60)
    assert ask(bench, "c is full", **turn(36)).site == "b"


def test_rescued_requests_move_before_those_that_can_wait() -> None:
    """One place becomes free at c: it goes to the one that would be late at home, whoever came first."""
    bench = bench_of(wide({"b": 1, "c": 1}))
    fill(bench, "c", 6)
    for name, slack in (("early", 60_000.0), ("urgent", 1_500.0)):
        one = make_ask(name, ttft_ms=slack)
        bench.feed(requested(one, "b"), held(one, "b", predicted_wait_ms=20_000.0, slack_ms=slack))
    said = bench.run(700, lease=["early", "urgent", *(f"c-full-{n}" for n in range(6))])
    moved = [event for event in bench.of(PlacementRequested, said) if event.site == "c"]
    assert [event.ask.request_id for event in moved] == ["urgent"]


def test_the_reasons_that_travel_are_bounded() -> None:
    """Fifty sites would make every message some 20 kB: figures of the cheapest travel, and the names of all."""
    bench = bench_of(wide(dict.fromkeys(("b", "c", "d", *(f"s{n}" for n in range(40))), 1)))
    found = ask(bench, "r1")
    assert len(found.sites) == 43
    assert sum(bool(one.terms) for one in found.sites) <= policy.SHORTLIST + 1
    assert next(one for one in found.sites if one.chosen).terms
