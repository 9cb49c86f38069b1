"""Other systems' admission: limits of requests per instance, the saturation gate, pools split once and for all."""

import msgspec
import pytest
from tests.simulation.harness import small_fleet

from tokenfleet.replay.records import Record
from tokenfleet.simulator.errors import UnknownPolicyError
from tokenfleet.simulator.gates import Bands, Concurrency, Gate, Saturation, Split, gate_named, owners
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import Scenario, parse
from tokenfleet.simulator.world import World
from tokenfleet.slomax.policy import Level
from tokenfleet.slomax.state import Held, Pool
from tokenfleet.tokenpilot.state import Load
from tokenfleet_schemas.placement import Work

FLEET = small_fleet({"b": 8})

#: four times what the reference fleet carries, for a moment
BURST = b"""
fleet = "reference"
[scenario]
name = "burst"
duration_s = 4
drain_s = 90
[[workload]]
trace = "builtin"
rate_per_s = 40
"""


def load(sequences: int = 0, decoding: int = 0, kv: int = 0) -> tuple[Load, int]:
    return Load(sequences=sequences, decoding=decoding, kv_tokens=kv), 100_000


@pytest.mark.parametrize(
    ("gate", "loads", "places"),
    [
        (Concurrency(8), [load(), load(8), load(9)], [8, 0, 0]),
        (Concurrency(), [load(99)], [1]),
        # a queue of 4 (6 in flight, 2 of them decoding) and an idle one: a mean of 0.4
        (Saturation(), [load(6, 2), load()], [1, 5]),
        # queues of 6 and 4 waiting: a mean of 1, full although the second is below its own limit
        (Saturation(), [load(6), load(4)], [0, 0]),
        # KV at 0.9 of one of two: a mean of 0.5625, but that instance is beyond its limit
        (Saturation(), [load(3, 3, 90_000), load()], [0, 5]),
        # nothing queued at all, and KV beyond 0.8 everywhere
        (Saturation(), [load(3, 3, 85_000), load(3, 3, 80_000)], [0, 0]),
        (Saturation(), [], []),
    ],
)
def test_a_gate_opens_as_it_would_by_hand(gate: Gate, loads: list[tuple[Load, int]], places: list[int]) -> None:
    """A gate that is not the published one makes every comparison with it worthless."""
    assert gate(loads) == places


def test_names() -> None:
    """The limit is part of the name; another word or none is a mistake."""
    named = gate_named("concurrency-12")
    assert isinstance(named, Concurrency)
    assert named.limit == 12
    assert isinstance(gate_named("gate"), Saturation)
    assert gate_named("pools") is None
    assert choose("llm-d//concurrency-12").applied(FLEET).policy.placement == "least-work"
    assert choose("llm-d//split").applied(FLEET).policy.placement == "round-robin"
    for wrong in ("llm-d//concurrency-", "llm-d//concurrency-0", "llm-d//concurrency-x", "llm-d//gates"):
        with pytest.raises(UnknownPolicyError):
            choose(wrong)


def held(name: str, cls: str, received: int) -> Held:
    return Held(
        request_id=name,
        gateway="g",
        entry="a",
        tenant="acme",
        service_class=cls,
        attempt=1,
        revision=0,
        event=f"{name}:held",
        home_instance="b-0",
        work=Work(prefill_tokens=100, decode_tokens=10, kv_tokens=100),
        own_ms=10.0,
        wait_ms=0.0,
        deadline_ms=1e9,
        patience_until_ms=1e9,
        received_unix_ms=received,
        since_ms=0.0,
    )


def test_a_lower_tier_goes_first_and_inside_it_who_came_first() -> None:
    """Strict priority: batch starves beside chat, which is what such a queue does."""
    tiers = {name: cls.tier for name, cls in FLEET.classes.items()}
    urgent, patient = min(tiers, key=lambda name: tiers[name]), max(tiers, key=lambda name: tiers[name])
    assert tiers[urgent] < tiers[patient]
    pool = Pool()
    for one in (held("old", patient, 1), held("second", urgent, 3), held("first", urgent, 2)):
        pool.add(one)
    found = Bands()(FLEET, pool, "b-0", Level(10_000, True, 9, 100_000), 0.0).held
    assert found is not None
    assert found.request_id == "first"


def test_a_split_gives_every_instance_to_somebody_and_every_class_something() -> None:
    """By share, whole instances; a class without any would never be served."""
    shares = {"chat": 5.0, "document": 1.0}
    classes = {name: msgspec.structs.replace(cls, share=shares.get(name, 1.0)) for name, cls in FLEET.classes.items()}
    found = owners(msgspec.structs.replace(FLEET, classes=classes), "b", "m", "1")
    assert sorted(found) == [f"b-{n}" for n in range(8)]
    counts = {cls: sum(cls in whose for whose in found.values()) for cls in classes}
    assert sum(counts.values()) == 8
    assert min(counts.values()) >= 1
    assert counts["chat"] == max(counts.values()) >= 4
    few = owners(small_fleet({"b": 1}), "b", "m", "1")
    assert few == {"b-0": frozenset(FLEET.classes)}


def test_a_split_releases_into_its_own_instances_only() -> None:
    """Room of another class's instance is not offered room."""
    split = Split(FLEET)
    whose = {cls: name for name, classes in split.of.items() for cls in classes}
    mine, other = sorted(FLEET.classes)[:2]
    pool = Pool()
    pool.add(held("r", mine, 1))
    room = Level(10_000, True, 9, 100_000)
    assert split(FLEET, pool, whose[other], room, 0.0).held is None
    assert split(FLEET, pool, whose[mine], room, 0.0).held is not None


def run(policy: str, scenario: Scenario | None = None) -> tuple[World, list[Record], int]:
    """A run, its records, and the most requests that any instance had at a look."""
    most = 0

    def look(world: World) -> None:
        nonlocal most
        most = max([most, *(one.open for one in world.instances.values())])

    world = World(scenario or parse(BURST), choose(policy), 1, probe=look)
    records = world.run().records
    assert world.findings() == []
    return world, records, most


def test_a_limit_holds_at_every_moment_and_nobody_is_lost() -> None:
    """A burst meets a limit of three: what is beyond it waits at the router, and everybody has one outcome."""
    _, records, most = run("llm-d//concurrency-3")
    assert most == 3
    assert {record.outcome for record in records} <= {"completed", "refused"}
    assert sum(record.outcome == "completed" for record in records) > len(records) / 2
    _, _, unlimited = run("llm-d")
    assert unlimited > 3


def test_a_saturated_pool_sheds_what_may_be_shed_and_nothing_else() -> None:
    """Batch is refused at the door while chat waits."""
    scenario = parse(BURST)
    classes = {
        name: msgspec.structs.replace(cls, sheddable=name == "batch", patience_ms=300_000)
        for name, cls in scenario.fleet.classes.items()
    }
    scenario = msgspec.structs.replace(scenario, fleet=msgspec.structs.replace(scenario.fleet, classes=classes))
    _, records, _ = run("llm-d//gate", scenario)
    refused = [record for record in records if record.error_code == "saturated"]
    assert refused
    assert {record.cls for record in refused} == {"batch"}
    assert any(record.cls == "batch" and record.outcome == "completed" for record in records)


@pytest.mark.parametrize("policy", ["llm-d//split", "llm-d+queue//split", "predicted-latency//split"])
def test_split_classes_never_meet(policy: str) -> None:
    """Each class on its own instances, with our queue or without; chat's idle ones do not help documents."""
    pool = b"""
[[pools]]
site = "b"
model = "chat-8b"
version = "1"
profile = "8b-a100"
count = 6
"""
    scenario = parse(BURST + pool)
    served: dict[str, set[str]] = {}

    def look(world: World) -> None:
        for entry in world.entries.values():
            for live in entry.live.values():
                if live.attempt is not None:
                    served.setdefault(live.attempt.instance.name, set()).add(live.arrival.service_class)

    world = World(scenario, choose(policy), 1, probe=look)
    records = world.run().records
    assert world.findings() == []
    assert sum(record.outcome == "completed" for record in records) > len(records) / 2
    whose = Split(world.fleet).of
    assert any(len(classes) == 1 for classes in whose.values())
    assert all(classes <= whose[name] for name, classes in served.items())
    assert len(served) > 3
