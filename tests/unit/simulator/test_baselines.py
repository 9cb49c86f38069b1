"""Each baseline's rule on a bench of instances whose answer is known by hand."""

from collections import Counter
from typing import Any

import pytest
from tests.simulation.harness import Engine, report, small_fleet
from tests.simulation.messages import make_ask, requested

from tokenfleet.eligibility import Heard
from tokenfleet.simulator.baselines import ORDERS, RULES, HoldForBest, WithRoom, best
from tokenfleet.simulator.policies import choose
from tokenfleet.slomax.policy import Level
from tokenfleet.slomax.state import Held, Pool
from tokenfleet.tokenpilot.policy import Candidate, Situation
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import Load
from tokenfleet_schemas.placement import Work

FLEET = small_fleet({"b": 4})


def bench(
    *loads: dict[str, Any], input_tokens: int = 1000, request_id: str = "r1"
) -> tuple[Situation, list[Candidate]]:
    """Candidates b-0 … with these loads: hit, sequences, prefill, decoding, kv."""
    situation = Situation(FLEET, requested(make_ask(request_id, input_tokens=input_tokens), "b"), 0.0, Knobs(), 1000.0)
    found = []
    for n, load in enumerate(loads):
        heard = Heard(report(FLEET, f"b-{n}", Engine(10_000), 1, 0.0), 0.0)
        booked = Load(
            sequences=load.get("sequences", 0),
            prefill_tokens=load.get("prefill", 0),
            kv_tokens=load.get("kv", 0),
            decoding=load.get("decoding", 0),
            shared_kv_tokens=load.get("shared", 0),
            unstarted_shared=load.get("shared", 0),
        )
        hit = load.get("hit", 0)
        work = Work(prefill_tokens=max(1, input_tokens - hit), decode_tokens=100, kv_tokens=input_tokens + 100)
        one = Candidate(f"b-{n}", heard, booked, hit, work, 10_000.0)
        wait_ms, own_ms = booked.prefill_tokens / 10.0, work.prefill_tokens / 10.0
        one.terms = {"wait_ms": wait_ms, "own_ms": own_ms, "total_ms": wait_ms + own_ms}
        found.append(one)
    return situation, found


def chosen(rule: str, *loads: dict[str, Any]) -> str:
    situation, candidates = bench(*loads)
    found = best(RULES[rule], situation, candidates)
    assert found is not None
    return found.name


@pytest.mark.parametrize(
    ("rule", "loads", "name"),
    [
        ("least-requests", [{"sequences": 3}, {"sequences": 1}, {"sequences": 2}], "b-1"),
        # 900 of 1000 cached and a little queue, against an idle one without the prefix
        ("llm-d", [{"hit": 900, "sequences": 2, "decoding": 1}, {}], "b-0"),
        ("llm-d", [{"hit": 100, "sequences": 9, "kv": 150_000}, {}], "b-1"),
        # a match below 0.3 is no match
        ("cache-aware", [{"hit": 250, "sequences": 3}, {"sequences": 1}], "b-1"),
        ("cache-aware", [{"hit": 400, "sequences": 3}, {"sequences": 1}], "b-0"),
        ("cache-aware", [{"hit": 900, "sequences": 90}, {"sequences": 1}], "b-1"),
        # affinity is kept up to 18 s of prefill, 180,000 tokens here
        ("affinity", [{"hit": 850, "prefill": 150_000}, {}], "b-0"),
        ("affinity", [{"hit": 850, "prefill": 190_000}, {}], "b-1"),
        ("affinity", [{"hit": 700, "prefill": 5000}, {}], "b-1"),
        ("dynamo", [{"kv": 5000}, {"hit": 500, "kv": 5200}], "b-1"),
        ("mooncake", [{"prefill": 600}, {"hit": 500, "prefill": 1000}], "b-1"),
        # (0+1000)·(5+1) against (3000+1000)·(0+1)
        ("lmetric", [{"sequences": 5}, {"prefill": 3000}], "b-1"),
        # KV that sequences hold in common fills an engine once: everybody's gauge says so, not ours alone
        ("llm-d", [{"kv": 150_000, "shared": 120_000}, {"kv": 60_000}], "b-0"),
        ("dynamo", [{"kv": 50_000, "shared": 40_000}, {"kv": 12_000}], "b-0"),
        # 100 ms own, six times priced, against 20 ms own and a wait of 300 ms
        ("j", [{}, {"hit": 800, "prefill": 3000}], "b-1"),
        ("j", [{}, {"hit": 800, "prefill": 9000}], "b-0"),
    ],
)
def test_a_rule_takes_what_it_would_take_by_hand(rule: str, loads: list[dict[str, Any]], name: str) -> None:
    """A baseline that is not the published rule makes every comparison with it worthless."""
    assert chosen(rule, *loads) == name


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"prefix-hash"}))
def test_ties_go_everywhere(rule: str) -> None:
    """An argmin that sends every tie to the first instance makes a rule look up to 70% worse than it is."""
    seen: Counter[str] = Counter()
    for n in range(400):
        situation, candidates = bench({}, {}, {}, {}, request_id=f"r{n}")
        found = best(RULES[rule], situation, candidates)
        assert found is not None
        seen[found.name] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 50


def test_power_of_two_looks_at_two() -> None:
    """With one loaded instance of four, it is taken only by those that drew nothing else: nobody, as two are drawn."""
    for n in range(50):
        situation, candidates = bench({"sequences": 9}, {}, {}, {}, request_id=f"r{n}")
        found = best(RULES["power-of-two"], situation, candidates)
        assert found is not None
        assert found.name != "b-0"
        assert sum(score < float("inf") for score in RULES["power-of-two"](situation, candidates)) == 2


def test_the_prefix_hash_stays_where_it_was_until_the_bound() -> None:
    """The same beginning goes to the same instance, and spills over when that has a quarter more than the mean."""
    situation, candidates = bench({}, {}, {}, {})
    scores = RULES["prefix-hash"](situation, candidates)
    assert scores == RULES["prefix-hash"](situation, candidates)
    home = scores.index(min(scores))
    loads: list[dict[str, Any]] = [{"sequences": 2}] * 4
    loads[home] = {"sequences": 9}
    situation, candidates = bench(*loads)
    scores = RULES["prefix-hash"](situation, candidates)
    assert scores.index(min(scores)) != home


def waiting(name: str, *, since: int, deadline: float, own: float) -> Held:
    return Held(
        request_id=name,
        gateway="g",
        entry="a",
        tenant="acme",
        service_class="chat",
        attempt=1,
        revision=0,
        event=f"{name}:held",
        home_instance="b-0",
        work=Work(prefill_tokens=int(own * 10), decode_tokens=10, kv_tokens=int(own * 10)),
        own_ms=own,
        wait_ms=0.0,
        deadline_ms=deadline,
        patience_until_ms=1e9,
        received_unix_ms=since,
        since_ms=0.0,
    )


def test_orders() -> None:
    """First come, earliest deadline, shortest, and earliest deadline that can still be kept."""
    pool = Pool()
    for held in (
        waiting("old", since=1, deadline=9000.0, own=500.0),
        waiting("late", since=2, deadline=100.0, own=400.0),
        waiting("soon", since=3, deadline=1000.0, own=300.0),
        waiting("short", since=4, deadline=5000.0, own=50.0),
    ):
        pool.add(held)
    room = Level(100_000, True, 9, 100_000)
    first = {name: order(FLEET, pool, "b-0", room, 0.0).held for name, order in ORDERS.items()}
    assert {name: held.request_id for name, held in first.items() if held is not None} == {
        "fcfs": "old",
        "edf": "late",
        "sjf": "short",
        "feasible-edf": "soon",
        "priced-edf": "soon",
    }
    assert ORDERS["fcfs"](FLEET, pool, "b-0", Level(0, False, 9, 100_000), 0.0).reason == "nothing_fits"


def test_names() -> None:
    """A baseline alone leaves the queue to the engine; with `+queue` it has ours."""
    alone, queued, ordered = choose("llm-d"), choose("llm-d+queue"), choose("j+queue/home-first/edf")
    assert alone.applied(FLEET).policy.placement == "round-robin"
    assert queued.applied(FLEET).policy.placement == "least-work"
    assert queued.applied(FLEET).policy.admission == "pools"
    assert ordered.applied(FLEET).policy.admission == "none"


def test_holding_for_the_best_waits_where_a_queue_would_spread() -> None:
    """The prompt's own instance is full: with `+queue` it goes where room is, with `+hold` it waits."""
    situation, candidates = bench({"hit": 900}, {})
    candidates[0].lacks = "kv_tokens"
    spread, waits = WithRoom(RULES["j"])(situation, candidates), HoldForBest(RULES["j"])(situation, candidates)
    assert spread is not None
    assert spread.name == "b-1"
    assert waits is None
