"""Engines' KV events in a run: what readers are told is what the engines hold, late, and mended where it was lost."""

from collections import Counter

import msgspec
import pytest
from tests.simulation.test_simulator_runs import scenario

from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.simulator.experiment import Task, make
from tokenfleet.simulator.instances import SimulatedInstance
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import Scenario
from tokenfleet.simulator.world import World
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged

KV = "[agents]\nkv_events = true\n"


def with_kv(extra: str = "", *, block_tokens: int = 16, scheme: str = KV, rate: float = 12) -> Scenario:
    return scenario(f"{scheme}[engines]\nblock_tokens = {block_tokens}\nkv_tokens = 0.05\n{extra}", rate=rate)


def pilot_of(world: World, site: str) -> TokenPilot:
    core = world.bus.nodes[f"tokenpilot@{site}"].core
    assert isinstance(core, TokenPilot)
    return core


def held(instance: SimulatedInstance) -> Counter[int]:
    """Digest → blocks of it that the engine has cached, read from its pool."""
    engine, per = instance.engine, 64 // instance.profile.block_tokens
    names = [name for name in (*engine._shared, *engine._idle) if isinstance(name, int)]
    assert len(names) == len(engine._shared) + len(engine._idle)
    counted: Counter[int] = Counter()
    for name in names:
        top = name >> 44 << 44
        counted[top + (name - top) // per] += 1
    return counted


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_what_is_told_is_what_the_engine_holds(block_tokens: int) -> None:
    """A digest too many sends a request to a cache that is not there. Small caches, so that much is thrown out."""
    world = World(with_kv(block_tokens=block_tokens), choose("tokenfleet"), 1)
    compared: list[int] = []

    def look(at: World) -> None:
        for instance in at.instances.values():
            assert instance.teller is not None
            if not instance.engine.journal:
                told = instance.teller.content()
                whole = {d for d, blocks in held(instance).items() if blocks == 64 // block_tokens}
                assert set(told) == whole
                assert len(told) == len(whole)
                compared.append(len(told))

    world._probe = look
    world.run()
    world.check()
    assert max(compared) > 20
    assert world.bus.said["KvChanged"] > len(world.instances)
    for site in world.fleet.sites:
        if world.fleet.sites[site].instances:
            assert set(pilot_of(world, site).exact.exact()) == set(world.fleet.sites[site].instances)


def test_lost_messages_are_asked_for_again_and_a_restart_begins_anew() -> None:
    """S04: a gap must not leave an instance approximate for ever, nor an old cache outlive its engine."""
    name = next(iter(scenario().fleet.sites["b"].instances))
    down = f'[[faults]]\nkind = "engine_down"\ntarget = "{name}"\nat_s = 5\nfor_s = 3\n'
    world = World(with_kv("[bus]\nloss = 0.05\n" + down), choose("tokenfleet"), 1)
    run = world.run()
    world.check()
    assert run.notes["tokenpilot kv_gap"] > 0
    assert run.messages["KvRequested"] > 0
    pilot = pilot_of(world, "b")
    assert pilot.exact._places[name].incarnation == str(world.instances[name].incarnation) == "2"
    exact = [n for n in world.fleet.sites["b"].instances if pilot.exact.is_exact(n)]
    assert len(exact) >= len(world.fleet.sites["b"].instances) - 1  # the last message may have been lost


def test_events_come_as_late_as_the_scenario_says() -> None:
    """A policy that is told of caches at once is better in a simulation than anywhere else."""
    heard: dict[float, float] = {}
    for late_ms in (50.0, 3_000.0):
        made = msgspec.structs.replace(with_kv(), agents=msgspec.structs.replace(with_kv().agents, kv_late_ms=late_ms))
        world = World(made, choose("tokenfleet"), 1)

        def noting(event: Event, world: World = world, late_ms: float = late_ms) -> None:
            if isinstance(event, KvChanged):
                assert world.loop.now_ms - event.time_unix_ms >= late_ms - 1.0
                if event.stored:
                    heard.setdefault(late_ms, world.loop.now_ms)

        world.bus.listeners.append(noting)
        world.run()
        world.check()
    assert heard[3_000.0] - heard[50.0] == pytest.approx(2_950.0)


def test_fleetmind_hears_what_sites_hold_in_summary() -> None:
    """A FleetMind that has sent nothing itself (a new owner) knows where conversations are, within a few chunks."""
    made = with_kv()
    made = msgspec.structs.replace(made, agents=msgspec.structs.replace(made.agents, kv_summary_s=2.0))
    world = World(made, choose("tokenfleet"), 1)
    core = world.bus.nodes["fleetmind"].core
    assert isinstance(core, FleetMind)
    found: list[bool] = []

    def look(at: World) -> None:
        # of what it sent itself it is told nothing here
        core.caches._sent.clear()
        for instance in at.instances.values():
            if instance.teller is None:
                continue
            known = core.caches._summaries.get((instance.site, instance.declared.model))
            said = {digest.to_bytes(8, "little") for digest in instance.teller.content()}
            if known is not None and said:
                found.append(bool(known.digests & said))

    world._probe = look
    run = world.run()
    world.check()
    assert run.messages["KvSummarised"] > 4
    assert found.count(True) > 0.8 * len(found) > 0
    assert core.caches._summaries


def test_the_same_seed_gives_the_same_run() -> None:
    """Byte-identical reports, with KV events too."""
    one, other = (make(with_kv(), Task("tokenfleet", 2)) for _ in range(2))
    assert msgspec.json.encode(one.report) == msgspec.json.encode(other.report)
    assert one.messages == other.messages


def test_off_nothing_is_said() -> None:
    """The default: what is not switched on costs nothing and changes nothing."""
    done = make(scenario(duration_s=4), Task("tokenfleet", 1))
    assert "KvChanged" not in done.messages
