"""Where a prompt's beginning is cached, as far as FleetMind can know it."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.harness import small_fleet
from tests.simulation.messages import Bench, admitted, assigned, finished, held, make_ask

from tokenfleet import prefix
from tokenfleet.fleetmind.caches import SUMMARY_MS, Caches, masked, sampled
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet_schemas.kv import KvSummarised
from tokenfleet_schemas.placement import PlacementRequested
from tokenfleet_schemas.request import Ask

KEY = prefix.tenant_key("secret", "acme")


def tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100_000) for _ in range(count)]


def ask_of(prompt: list[int], request_id: str = "r", limit: int = prefix.MAX_DIGESTS) -> Ask:
    packed, stride = prefix.pack(prefix.digests(prompt, KEY), limit)
    return make_ask(request_id, input_tokens=len(prompt), prefix=packed, prefix_stride=stride)


def summary(prompts: list[list[int]], bits: int, *, site: str = "c", sequence: int = 1) -> KvSummarised:
    held_ = {d for p in prompts for _, d in masked(prefix.digests(p, KEY), 1, (1 << bits) - 1)}
    return KvSummarised(
        id=f"kv:{site}:{sequence}", site=site, model="m", sequence=sequence, digests=b"".join(sorted(held_)),
        sampled_bits=bits, hits=(),
    )  # fmt: skip


def test_the_next_turn_of_a_conversation_is_found_where_the_last_one_went() -> None:
    """The whole conversation is known there, within an eighth; a stranger's prompt is not."""
    caches = Caches()
    first = tokens(1, 4_000)
    caches.sent(("c", "m", "1"), ask_of(first), 200_000)
    hits = caches.hits(ask_of(first + tokens(2, 500)), 0.0)
    assert hits.keys() == {"c"}
    assert 0.875 * 4_000 - 64 <= hits["c"] <= 4_000
    assert caches.hits(ask_of(tokens(3, 4_000)), 0.0) == {}
    assert caches.hits(msgspec.structs.replace(ask_of(first), version="2"), 0.0) == {}


def test_a_prompt_of_a_million_tokens_costs_a_hundred_entries() -> None:
    """Bounded in work and memory, and comparable with shorter chains of another stride."""
    long = tokens(4, 300_000)
    full = prefix.digests(long, KEY)
    assert len(sampled(full, 1)) <= 100
    caches = Caches()
    caches.sent(("c", "m", "1"), ask_of(long), 1_000_000)
    assert caches.hits(ask_of(long[:100_000]), 0.0)["c"] >= 80_000


def test_what_a_site_has_no_room_for_is_forgotten_oldest_first() -> None:
    """A site that cannot hold it any more attracts nobody."""
    caches = Caches()
    prompts = [tokens(n, 2_000) for n in range(10)]
    for one in prompts:
        caches.sent(("c", "m", "1"), ask_of(one), 6_000)
    assert caches.hits(ask_of(prompts[0]), 0.0) == {}
    assert caches.hits(ask_of(prompts[9]), 0.0)["c"] >= 1_700
    caches.forget("c", "m", "1")
    assert caches.hits(ask_of(prompts[9]), 0.0) == {}


def test_a_summary_tells_of_what_others_sent_there_until_it_is_old() -> None:
    """A sample of one in eight finds a long prefix within some chunks; one that stopped coming says nothing."""
    caches = Caches()
    prompt = tokens(5, 16_000)
    caches.summarised(summary([prompt, tokens(6, 8_000)], 3), 1_000.0)
    hit = caches.hits(ask_of(prompt + tokens(7, 300)), 2_000.0)["c"]
    assert 12_000 <= hit <= 16_000
    caches.summarised(summary([tokens(8, 640)], 0, sequence=0), 3_000.0)  # a late older one changes nothing
    assert caches.hits(ask_of(prompt), 4_000.0)["c"] == hit
    assert caches.hits(ask_of(prompt), 1_001.0 + SUMMARY_MS) == {}


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from((1, 2, 4)))
def test_a_hit_is_never_more_than_what_is_shared(shared: int, own: int, stride: int) -> None:
    """A promised hit that is not there sends work where it must all be computed."""
    caches = Caches()
    opening = tokens(9, 64 * shared)
    caches.sent(("c", "m", "1"), ask_of(opening + tokens(10, 64 * own)), None)
    asked = opening + tokens(11, 64 * own)
    chain = prefix.digests(asked, KEY)
    kept = b"".join(chain[at - 8 : at] for at in range(8 * stride, len(chain) + 1, 8 * stride))
    hits = caches.hits(
        make_ask(input_tokens=max(1, len(asked)), prefix=prefix.pack(kept)[0], prefix_stride=stride), 0.0
    )
    assert hits.get("c", 0) <= (64 * shared if own else 64 * len(asked))


def test_a_conversation_that_moved_stays_for_all_its_turns() -> None:
    """Home was full for a moment: the next turns go where the cache is, not back and forth."""
    fleet = small_fleet()
    bench = Bench(FleetMind(fleet, replica="fleetmind-1"), fleet)
    bench.report()
    blocker = make_ask("blocker")
    bench.feed(admitted(blocker), held(blocker, predicted_wait_ms=9_000.0))
    talk = tokens(12, 9_000)
    sites = []
    for turn in range(6):
        if turn == 1:
            bench.feed(finished(blocker, "cancelled", attempt=0))
        ask = ask_of(talk[: 4_000 + 1_000 * turn], f"turn-{turn}")
        said = bench.feed(admitted(ask))
        (found,) = bench.of(PlacementRequested, said)
        sites.append(found.site)
        bench.feed(assigned(ask, found.site))
        bench.feed(finished(ask, instance=f"{found.site}-0"))
    assert sites == ["c"] * 6
    fresh = ask_of(tokens(13, 4_000), "fresh")
    (found,) = bench.of(PlacementRequested, bench.feed(admitted(fresh)))
    assert found.site == "b"


def test_summaries_reach_the_decision() -> None:
    """FleetMind has just begun and sent nothing itself: the site agent says where the prompt is cached."""
    fleet = small_fleet()
    bench = Bench(FleetMind(fleet, replica="fleetmind-1"), fleet)
    bench.report()
    prompt = tokens(14, 12_000)
    bench.feed(summary([prompt], 2))
    (found,) = bench.of(PlacementRequested, bench.feed(admitted(ask_of(prompt, "r1"))))
    assert found.site == "c"
    assert found.sites[1].terms["prefix_hit_tokens"] > 9_000
