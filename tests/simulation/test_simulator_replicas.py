"""Replicas that come and go in a run: what they cost, and that nobody loses an answer by it."""

import msgspec
import pytest
from tests.simulation.test_simulator_runs import scenario

from tokenfleet.simulator.errors import SimulationError
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.world import World


def test_a_new_replica_costs_from_its_decision_and_serves_after_its_cold_start() -> None:
    """A planner that takes replicas for free and instant scales up at every burst and looks brilliant."""
    world = World(scenario("[engines]\ncold_start = 0.1\n"), choose("tokenfleet"), 1)
    declared = next(iter(world.fleet.sites["b"].instances.values()))
    ready_s = world.instances[next(iter(world.fleet.sites["b"].instances))].profile.cold_start_s * 0.1
    began_ms = world.zero_ms + 2_000.0
    world.loop.at(began_ms, world.add_instance, "b", "b-new", declared)
    seen: dict[str, float] = {}

    def look(at: World) -> None:
        new = at.instances.get("b-new")
        if new is not None and new.up:
            seen.setdefault("up", at.loop.now_ms)
        if new is not None and new.open:
            seen.setdefault("serving", at.loop.now_ms)

    world._probe = look
    world.run()
    world.check()
    new = world.instances["b-new"]
    assert 0 <= seen["up"] - began_ms - ready_s * 1000.0 < 1_001.0
    assert seen["serving"] >= seen["up"]
    assert new.tokens_total > 0
    assert new.gpu_ms() == pytest.approx((world.loop.now_ms - began_ms) * max(1, declared.gpus))
    assert world.gpu_hours()["b"] == pytest.approx(
        sum(one.gpu_ms() for one in world.instances.values() if one.site == "b") / 3_600_000.0
    )


def test_a_drained_replica_finishes_what_it_has_and_is_gone() -> None:
    """Scaling down must not break a stream, and must end: a drain that never ends saves nothing."""
    world = World(scenario(), choose("tokenfleet"), 1)
    name = next(iter(world.fleet.sites["b"].instances))
    instance = world.instances[name]
    at_drain: list[int] = []

    def drain() -> None:
        at_drain.append(instance.open)
        world.drain_instance(name)

    world.loop.at(world.zero_ms + 5_000.0, drain)
    run = world.run()
    world.check()
    assert at_drain[0] > 0
    assert instance.stopped
    assert not instance.up
    assert {record.outcome for record in run.records} <= {"completed", "refused"}
    assert all(record.attempts <= 1 for record in run.records)
    assert instance.gpu_ms() < world.loop.now_ms - world.zero_ms + 2_000.0


def test_a_stopped_replica_starts_again_cold_and_a_draining_one_goes_on() -> None:
    """Declared slots are what a planner fills: the same name comes back as a new incarnation with an empty cache."""
    world = World(scenario("[engines]\ncold_start = 0.05\n"), choose("tokenfleet"), 1)
    name = next(iter(world.fleet.sites["b"].instances))
    instance = world.instances[name]
    world.stop_instance(name)
    assert (instance.stopped, instance.gpu_ms()) == (True, 0.0)
    world.loop.at(world.zero_ms + 3_000.0, world.start_instance, name)
    other = list(world.fleet.sites["b"].instances)[1]
    world.loop.at(world.zero_ms + 4_000.0, world.drain_instance, other)
    world.loop.at(world.zero_ms + 4_100.0, world.start_instance, other)
    world.run()
    world.check()
    assert (instance.up, instance.incarnation) == (True, 2)
    assert instance.tokens_total > 0
    assert (world.instances[other].up, world.instances[other].incarnation) == (True, 1)


def test_a_replica_that_nobody_would_look_after_is_refused() -> None:
    """A planner's slip must not become an instance that is paid for and never used."""
    world = World(scenario(), choose("tokenfleet"), 1)
    name, declared = next(iter(world.fleet.sites["b"].instances.items()))
    with pytest.raises(SimulationError, match="already"):
        world.add_instance("b", name, declared)
    with pytest.raises(SimulationError, match="no pool"):
        world.add_instance("b", "b-new", msgspec.structs.replace(declared, version="none"))
