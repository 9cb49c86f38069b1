"""Lanes: long prefills leave instances to short ones, and are not forgotten for it."""

import numpy as np
import pytest
from tests.unit.tokenpilot.driver import Pilot, only

from tokenfleet.tokenpilot.lanes import EDGES, LONG, Sizes, longest
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld
from tokenfleet_schemas.room import RoomOffered

POLICY = 'placement = "predicted-latency"'
SECONDS = 120


def sizes(*streams: tuple[int, float]) -> Sizes:
    """Streams of (prefill tokens, per second) for two minutes."""
    found = Sizes()
    moments = sorted((n / rate, tokens) for tokens, rate in streams for n in range(int(SECONDS * rate)))
    for at_s, tokens in moments:
        found.learn(tokens, 1e6 + 1000.0 * at_s)
    return found


def test_needs_follow_the_load_of_what_is_shorter() -> None:
    """Two borders set by hand fitted one trace: the next one had its median where the first had its tail."""
    mixed = sizes((1000, 14.0), (40_000, 0.5))  # 14,000 and 20,000 tokens/s
    needs = mixed.needs(10, 10_000.0)
    assert needs[EDGES < 1000].max() == 0
    between = needs[(EDGES > 1000) & (EDGES <= 40_000)]
    assert set(between) == {2.0}, "14,000 tokens/s at 70% of 10,000 each"
    assert needs[-1] < 10, "never all instances"
    assert mixed.needs(1, 10_000.0).max() == 0, "who has one instance has nothing to leave"
    assert Sizes().needs(10, 10_000.0).max() == 0


def test_needs_are_no_more_than_the_share_of_the_short() -> None:
    """Overload by short prompts: they needed every instance, and long ones never began again."""
    needs = sizes((1000, 300.0), (40_000, 7.5)).needs(10, 10_000.0)  # as much of either, six times too much
    assert needs.max() <= 9
    assert needs[(EDGES > 1000) & (EDGES <= 40_000)].max() == 5


def test_what_was_sent_long_ago_is_forgotten() -> None:
    """Half of it in a minute."""
    found = sizes((1000, 14.0))
    before = found.needs(10, 5000.0).max()
    found.learn(300, found.at_ms + 600_000.0)
    assert before >= 3
    assert found.needs(10, 5000.0).max() == 0


def test_a_long_one_may_begin_while_enough_others_are_free() -> None:
    """The limit is where the next long prefill would take the last instance that short ones need."""
    needs, everybody = np.where(EDGES > 1000, 2.0, 0.0), np.ones(4, np.bool_)
    first = float(EDGES[EDGES > 1000][0])
    assert longest(needs, np.zeros(4), everybody) is None
    two_busy = longest(needs, np.array([50_000.0, 50_000.0, 0.0, 0.0]), everybody)
    assert two_busy is not None
    assert two_busy[2:].tolist() == [LONG * first] * 2
    assert two_busy[:2].min() > 50_000, "behind a long one it takes nobody's place"
    out = longest(needs, np.array([50_000.0, 0.0, 0.0, 0.0]), np.array([True, True, True, False]))
    assert out is not None, "an instance that serves nobody is not free"


def busy() -> tuple[Pilot, PlacementHeld, set[str]]:
    """A pool that sent many short prompts and few long ones, all done; then long ones until one of them is held.

    Also the instances that are left to short ones.
    """
    p = Pilot(instances=4, token_budget=2048, kv_tokens=1_000_000, max_sequences=256, policy=POLICY)
    for n in range(400):
        tokens = 30_000 if n % 40 == 0 else 2000
        assigned = only(p.request(f"r{n}", input_tokens=tokens, ttft_ms=60_000), PlacementAssigned)
        ttft_ms = 15 + tokens / 10
        p.start(assigned)
        p.finish(assigned, times=Times(queue_ms=0.0, ttft_ms=ttft_ms, tpot_ms=20.0, e2e_ms=ttft_ms + 400))
        p.now_ms += 250
        if n % 4 == 0:
            p.report_all()
    p.report_all()
    for n in range(4):
        said = p.request(f"long-{n}", input_tokens=30_000, ttft_ms=60_000, patience_ms=120_000)
        if isinstance(said[0], PlacementHeld):
            return p, said[0], set(p.engines) - {b.instance for b in p.core.state.bookings.values()}
    raise AssertionError("every instance took a long prefill")


def test_the_last_free_instances_are_for_short_prompts() -> None:
    """A burst of documents took every instance: chats waited for 3 s at a third of the load."""
    p, held, free = busy()
    assert held.lacks == "prefill_tokens"
    assert 1 <= len(free) <= 3
    offers = {e.instance: e for e in p.said if isinstance(e, RoomOffered)}
    assert not any(e.longest_tokens == 0 or e.longest_tokens >= 30_000 for n, e in offers.items() if n in free)
    short = only(p.request("chat", input_tokens=1500), PlacementHeld)
    assert short.lacks == "newcomer", "whoever waits goes in SLOMax's order"
    only(p.release(short, 1, instance=min(free)), PlacementAssigned)


def test_what_ends_elsewhere_lifts_the_limit() -> None:
    """A document was held until its own instance said something, though another document had long been done."""
    p, held, free = busy()
    p.now_ms += 100
    done = next(b.assigned for b in p.core.state.bookings.values() if b.request_id == "long-0")
    assert done is not None
    said = p.start(done)
    assert any(isinstance(e, RoomOffered) and not 0 < e.longest_tokens < 30_000 and e.idle for e in said), said
    only(p.release(held, 1, instance=min(free)), PlacementAssigned)


def test_nobody_waits_for_its_lane_for_ever() -> None:
    """Short prompts never stopped coming; a document waited until its client gave up beside an idle instance."""
    p, held, free = busy()
    again = {"input_tokens": 30_000, "ttft_ms": 60_000, "patience_ms": 120_000}
    held = only(p.request(held.request_id, revision=1, elapsed_ms=29_500, **again), PlacementHeld)
    only(p.release(held, 1, instance=min(free)), PlacementHeld)
    p.now_ms += 1_000
    p.report_all()
    offers = [e for e in p.said if isinstance(e, RoomOffered) and e.instance in free]
    assert offers[-1].idle
    assert not 0 < offers[-1].longest_tokens < 30_000
    assert only(p.release(held, 2, instance=min(free)), PlacementAssigned).instance in free


@pytest.mark.parametrize("lanes", [False, True])
def test_a_pool_without_long_prompts_knows_no_lanes(lanes: bool) -> None:
    """All of a size: then nobody is short."""
    found = sizes((4000, 20.0))
    if lanes:
        found.learn(4500, found.at_ms)
    needs = found.needs(8, 10_000.0)
    limits = longest(needs, np.array([5000.0] * 7 + [0.0]), np.ones(8, np.bool_))
    assert limits is None or limits.min() > 4500
