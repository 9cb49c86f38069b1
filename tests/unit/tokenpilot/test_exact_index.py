"""Exact prefix knowledge: followed without a gap or not relied on; compared with what engines report."""

import random
import tracemalloc
from array import array
from typing import Any

import pytest

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.tokenpilot.exact_index import ASK_MS, Digests, ExactIndex
from tokenfleet_schemas.kv import KvChanged, KvRequested


def packed(*digests: int) -> bytes:
    """Digests as a message carries them."""
    return array("Q", digests).tobytes()


def changed(sequence: int, *, instance: str = "b1", incarnation: str = "1.000", **more: Any) -> KvChanged:
    """A message of the site agent."""
    return KvChanged(
        id=f"kv:{sequence}",
        site="b",
        model="m",
        instance=instance,
        incarnation=incarnation,
        sequence=sequence,
        stored=packed(*more.pop("stored", ())),
        removed=packed(*more.pop("removed", ())),
        **more,
    )


def index(**options: Any) -> tuple[ExactIndex, Digests]:
    """An index over a plain content."""
    content = Digests(**options)
    return ExactIndex("b", replica="r", content=content, asks=True), content


def said(effects: Any) -> list[str]:
    """Names of notes and messages."""
    found: list[Effect] = list(effects)
    return [
        one.name if isinstance(one, Note) else type(one.event).__name__
        for one in found
        if isinstance(one, Note | Publish)
    ]


def test_a_snapshot_and_what_follows_it_is_the_content() -> None:
    """Stored, removed and cleared in sequence; a hit ends at the first digest that is not held."""
    exact, content = index()
    assert said(exact.changed(changed(7, snapshot=True, stored=[1, 2, 3]), 0)) == ["kv_exact"]
    assert content.hit_tokens("b1", [1, 2, 3, 4]) == 3 * 64
    assert said(exact.changed(changed(8, stored=[4, 5], removed=[2]), 0)) == []
    assert content.hit_tokens("b1", [1, 2, 3, 4]) == 64
    assert content.hit_tokens("b1", [3, 5], stride=4) == 2 * 4 * 64
    assert content.hit_tokens("b2", [1]) == 0
    list(exact.changed(changed(9, cleared=True, stored=[9]), 0))
    assert content.hit_tokens("b1", [1]) == 0
    assert content.hit_tokens("b1", [9]) == 64
    # a message that comes twice changes nothing
    list(exact.changed(changed(8, stored=[4, 5]), 0))
    assert content.count("b1") == 1


def test_a_gap_makes_approximate_until_a_snapshot_comes() -> None:
    """A lost removal would be believed for ever; the reader asks, ever more rarely, and returns."""
    exact, content = index()
    list(exact.changed(changed(1, snapshot=True, stored=[1]), 0))
    assert said(exact.changed(changed(3, stored=[2]), 1000)) == ["kv_gap", "KvRequested"]
    assert not exact.is_exact("b1")
    assert content.count("b1") == 0
    assert said(exact.changed(changed(4, stored=[3]), 1000 + ASK_MS / 2)) == []
    assert said(exact.changed(changed(5, stored=[4]), 1000 + ASK_MS)) == ["KvRequested"]
    assert said(exact.changed(changed(6, stored=[4]), 1000 + 2 * ASK_MS)) == []
    assert content.count("b1") == 0
    assert said(exact.changed(changed(7, snapshot=True, stored=[1, 2, 3]), 9000)) == ["kv_exact"]
    assert exact.exact() == ["b1"]
    assert content.count("b1") == 3


def test_a_reader_that_begins_asks_each_instance() -> None:
    """After a restart of TokenPilot nothing changes at an idle engine, so nothing would ever be said."""
    exact, _ = index()
    (effect,) = exact.reported("b1", "1.000", "m", 0)
    assert isinstance(effect, Publish)
    assert isinstance(effect.event, KvRequested)
    assert (effect.event.site, effect.event.instance, effect.event.sequence) == ("b", "b1", -1)
    assert list(exact.reported("b1", "1.000", "m", 10)) == []  # engines without KV events never answer
    quiet = ExactIndex("b", replica="r")
    assert list(quiet.reported("b1", "1.000", "m", 0)) == []


def test_a_reader_that_was_deaf_asks_and_keeps_what_it_knew() -> None:
    """Its connection broke; what was said meanwhile may have been removals, and an idle engine says nothing more."""
    exact, content = index()
    list(exact.changed(changed(1, snapshot=True, stored=[1]), 0))
    list(exact.reported("b1", "1.000", "m", 0))
    exact.renew(500)
    assert not exact.is_exact("b1")
    assert content.hit_tokens("b1", [1]) == 64
    assert said(exact.reported("b1", "1.000", "m", 600)) == ["KvRequested"]
    assert said(exact.changed(changed(4, snapshot=True), 700)) == ["kv_exact"]
    assert content.count("b1") == 0


@pytest.mark.parametrize("report_first", [True, False])
def test_a_restarted_engine_has_no_old_blocks(report_first: bool) -> None:
    """S09: 5,000 blocks of the old process; whichever of report and snapshot comes first."""
    exact, content = index()
    list(exact.reported("b1", "1.000", "m", 0))
    list(exact.changed(changed(1, snapshot=True, stored=range(5000)), 0))
    fresh = changed(3, incarnation="2.000", snapshot=True, stored=[7001])
    if report_first:
        list(exact.reported("b1", "2.000", "m", 0))
        assert content.count("b1") == 0
        assert not exact.is_exact("b1")
        # what the old process said is still on its way
        list(exact.changed(changed(2, stored=[5001]), 0))
        list(exact.changed(changed(2, snapshot=True, stored=[5001]), 0))
        assert content.count("b1") == 0
        list(exact.changed(fresh, 0))
    else:
        list(exact.changed(fresh, 0))
        list(exact.reported("b1", "2.000", "m", 0))
    assert content.hit_tokens("b1", [7001]) == 64
    assert content.count("b1") == 1
    assert exact.is_exact("b1", "2.000")
    assert not exact.is_exact("b1", "1.000")


def test_a_new_agent_begins_above_the_old_one() -> None:
    """Its first word is a snapshot; what the old one still had in flight is old."""
    exact, content = index()
    list(exact.changed(changed(100, snapshot=True, stored=[1]), 0))
    list(exact.changed(changed(5000, snapshot=True, stored=[2]), 0))
    list(exact.changed(changed(101, stored=[3]), 0))
    assert content.hit_tokens("b1", [2]) == 64
    assert content.count("b1") == 1


def test_a_removed_instance_leaves_nothing() -> None:
    """S10: after the drain of an instance no digest of it is left."""
    exact, content = index()
    list(exact.changed(changed(1, snapshot=True, stored=range(1000)), 0))
    exact.forget("b1")
    assert len(content) == 0
    # its late messages are of no instance that anybody follows: without a snapshot they leave nothing
    for n in range(2, 100):
        list(exact.changed(changed(n, stored=[n]), 0))
    assert len(content) == 0


# --- trust ------------------------------------------------------------------------------------------------------


def test_hits_that_never_come_lower_trust_and_raise_an_alarm() -> None:
    """P13: the router hashed without the salt; its predicted hits were all wrong and nobody compared."""
    exact, _ = index()
    alarms = [n for n in range(200) if "hash_mismatch" in said(exact.compare("b1", 4096, 0))]
    assert alarms == [49]
    assert exact.trust("b1") < 0.02  # one stride of each is not counted
    assert list(exact.distrusted) == ["b1"]
    assert exact.trust("b2") == 1.0
    # repaired: the window forgets, the alarm ends
    said_then = [name for _ in range(300) for name in said(exact.compare("b1", 4096, 4096))]
    assert said_then == ["hash_match"]
    assert exact.trust("b1") == 1.0


def test_hits_that_nobody_foresaw_are_an_alarm_where_the_content_is_known() -> None:
    """P13: on one path the overlap was always 0. An approximate index misses hits by nature, an exact one cannot."""
    exact, _ = index()
    assert [said(exact.compare("b1", 0, 4096)) for _ in range(100)] == [[]] * 100
    list(exact.changed(changed(1, instance="b2", snapshot=True, stored=[1]), 0))
    alarms = [n for n in range(200) if "hash_mismatch" in said(exact.compare("b2", 0, 4096))]
    assert alarms == [49]
    assert exact.trust("b2") == 1.0  # what it does foresee is not the less worth


def test_block_edges_and_a_few_evictions_are_no_mismatch() -> None:
    """An engine's blocks end elsewhere than the chain's chunks, and one prompt in ten was just thrown out."""
    exact, _ = index()
    dice = random.Random(1)
    for n in range(400):
        foreseen = 64 * dice.randrange(10, 100)
        reported = 0 if n % 10 == 0 else foreseen + dice.randrange(-63, 64)
        assert said(exact.compare("b1", foreseen, reported)) == []
    assert said(exact.compare("b1", 4096, None)) == []
    assert exact.trust("b1") == 1.0


# --- bounds -----------------------------------------------------------------------------------------------------


def test_the_content_is_bounded_and_a_block_costs_less_than_a_hundred_bytes() -> None:
    """P11: an event-based index grew to hundreds of GB."""
    dice = random.Random(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        content = Digests(digests_max=30_000)
        exact = ExactIndex("b", replica="r", content=content)
        list(exact.changed(changed(0, snapshot=True), 0))
        worst = 0.0
        for n in range(1, 120):
            list(exact.changed(changed(n, stored=[dice.getrandbits(64) for _ in range(1000)]), 0))
            assert content.count("b1") <= 30_000
            used = tracemalloc.get_traced_memory()[0] - before
            if n >= 10:
                worst = max(worst, used / content.count("b1"))
    finally:
        tracemalloc.stop()
    # a digest is 64 tokens: four blocks of 16, two of 32
    assert worst / 2 <= 100
