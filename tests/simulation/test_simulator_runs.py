"""The simulator's own promises: what holds at the end of any run, with faults and lost messages too."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from tokenfleet.replay.traces import Row, Trace
from tokenfleet.simulator.arrivals import draw
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import Scenario, parse
from tokenfleet.simulator.world import World
from tokenfleet.tokenpilot.core import TokenPilot

HEAD = """
fleet = "reference"
[scenario]
name = "test"
duration_s = {duration_s}
drain_s = 400
[[workload]]
trace = "builtin"
rate_per_s = {rate}
"""


def scenario(extra: str = "", *, duration_s: float = 15, rate: float = 12) -> Scenario:
    return parse((HEAD.format(duration_s=duration_s, rate=rate) + extra).encode())


def test_everybody_gets_one_answer_and_nothing_is_left() -> None:
    """Counters that drift are found by the operator a week later, as a pool that holds requests for nobody."""
    for policy in ("tokenfleet", "round-robin", "least-work/home-first/none"):
        world = World(scenario(), choose(policy), 1)
        run = world.run()
        world.check()
        assert {record.outcome for record in run.records} <= {"completed", "refused"}
        assert all(r.output_tokens == r.stated_output_tokens for r in run.records if r.outcome == "completed")
        delivered = sum(record.output_tokens for record in run.records)
        assert delivered == sum(instance.tokens_total for instance in world.instances.values())


def test_policies_meet_the_same_arrivals_and_seeds_others() -> None:
    """A comparison on different load compares the load."""
    one = scenario()
    assert draw(one, 1) == draw(one, 1)
    assert draw(one, 1) != draw(one, 2)


def test_a_coarse_clock_is_spread_by_the_seed() -> None:
    """Ten requests of one 3 s stamp sent at once are a burst that never happened (Mooncake's conversation trace)."""
    rows = tuple(Row(t_s=3.0 * (n // 10) + 0.3 * (n % 10), input_tokens=10, output_tokens=1) for n in range(100))
    made = scenario()
    source = msgspec.structs.replace(made.sources[0], trace="coarse", rate_per_s=0.0, default_tenant="studio")
    trace = Trace(name="coarse", rows=rows, tick_s=3.0)
    made = msgspec.structs.replace(
        made, sources=(source,), traces=(trace,), info=msgspec.structs.replace(made.info, duration_s=0.0)
    )
    drawn = [[arrival.at_ms for arrival in draw(made, seed)] for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    for arrivals in drawn:
        assert Counter(int(at_ms // 3000) for at_ms in arrivals) == dict.fromkeys(range(10), 10)


def test_a_closed_loop_waits_for_the_answer() -> None:
    """Open-loop replay sends an agent's next turn before it has the answer that the turn is about."""
    rows = tuple(
        Row(t_s=0.01 * n, input_tokens=200, output_tokens=50, session="s", think_s=2.0, blocks=()) for n in range(3)
    )
    made = scenario()
    source = msgspec.structs.replace(
        made.sources[0], trace="agent", rate_per_s=0.0, default_tenant="studio", closed_loop=True
    )
    made = msgspec.structs.replace(made, sources=(source,), traces=(Trace(name="agent", rows=rows),))
    world = World(made, choose("tokenfleet"), 1)
    first, second, third = world.run().records
    assert first.ended_ms is not None
    assert second.ended_ms is not None
    assert second.sent_ms == pytest.approx(first.ended_ms + 2000)
    assert third.sent_ms == pytest.approx(second.ended_ms + 2000)
    world.check()


FAULTS = """
[bus]
loss = 0.01
duplicates = 0.05
[[faults]]
kind = "engine_down"
target = "b-chat-1"
at_s = 3
for_s = 6
[[faults]]
kind = "engine_slow"
target = "c-chat-1"
factor = 4
at_s = 2
for_s = 8
[[faults]]
kind = "engine_stalled"
target = "c-doc-1"
at_s = 5
for_s = 5
[[faults]]
kind = "agent_silent"
target = "d"
at_s = 4
for_s = 9
[[faults]]
kind = "service_paused"
target = "slomax"
at_s = 6
for_s = 2
[[faults]]
kind = "service_paused"
target = "tokenpilot@b"
at_s = 9
for_s = 1.5
[[faults]]
kind = "service_paused"
target = "fleetmind"
at_s = 11
for_s = 2
[[faults]]
kind = "messages_lost"
share = 0.3
at_s = 13
for_s = 1
[[faults]]
kind = "site_cut"
target = "c"
at_s = 8
for_s = 3
"""


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("policy", ["tokenfleet", "round-robin"])
def test_nothing_is_lost_or_left_whatever_breaks(policy: str, seed: int) -> None:
    """Engines die, slow down and hang, services pause, a site is cut off, messages vanish and come twice."""
    world = World(scenario(FAULTS), choose(policy), seed)
    run = world.run()
    world.check()
    outcomes = Counter(record.outcome for record in run.records)
    assert outcomes["completed"] > 0.5 * len(run.records), outcomes
    assert not outcomes["unfinished"]


def test_a_gateway_that_dies_leaves_no_bookings() -> None:
    """Its clients see a broken connection; what it had booked is free again within seconds, not for ever."""
    extra = '[[faults]]\nkind = "gateway_down"\ntarget = "a"\nat_s = 5\nfor_s = 3\n'
    world = World(scenario(extra), choose("tokenfleet"), 1)
    run = world.run()
    assert world.orphans
    world.loop.run_until(world.loop.now_ms + 12_000)
    world.check()
    assert {r.error_code for r in run.records if r.outcome == "failed"} == {"connection"}


@pytest.mark.parametrize(
    "policy",
    [
        *("random", "least-requests", "power-of-two", "prefix-hash", "cache-aware", "llm-d", "affinity", "dynamo"),
        *(
            "mooncake",
            "lmetric",
            "j",
            "j+queue",
            "llm-d+queue/home-first/edf",
            "least-work/home-first/sjf",
            "j+hold//priced-edf",
        ),
        *("least-work/home-only/pools", "least-work/least-load/none", "least-work/local-first/pools"),
    ],
)
def test_baselines_keep_the_same_promises(policy: str) -> None:
    """A baseline that loses requests is no baseline."""
    world = World(scenario(duration_s=8, rate=10), choose(policy), 1)
    run = world.run()
    world.check()
    assert Counter(record.outcome for record in run.records)["completed"] > 0.8 * len(run.records)


def test_frozen_feedback_knows_nothing_that_came_later() -> None:
    """What feedback is worth can only be said against the same run without it: until the moment nothing differs, and
    after it nothing is learned, while everything else goes on."""
    made = scenario(duration_s=20)
    alive = World(made, choose("tokenfleet"), 1)
    frozen = World(made, choose("tokenfleet@frozen=8"), 1)
    before = [
        [record.first_token_ms for record in world.run().records if (record.first_token_ms or 8000.0) < 8000.0]
        for world in (alive, frozen)
    ]
    assert before[0] == before[1]
    assert len(before[0]) > 20
    frozen.check()
    learned = [
        sum(model.samples for site in "bcd" for model in pilot(world, site).state.models.values())
        for world in (alive, frozen)
    ]
    assert 0 < learned[1] < learned[0]


def pilot(world: World, site: str) -> TokenPilot:
    core = world.bus.nodes[f"tokenpilot@{site}"].core
    assert isinstance(core, TokenPilot)
    return core


def test_fixed_shares_are_those_of_the_whole_run() -> None:
    """The best fixed setting is searched for: a share that feedback moves on is none."""
    world = World(scenario(rate=25), choose("tokenfleet@shares=interactive:6,batch:2"), 1)
    world.run()
    assert world.fleet.classes["interactive"].share == 6.0
    assert world.fleet.classes["chat"].share == scenario().fleet.classes["chat"].share
    slomax: Any = world.bus.nodes["slomax"].core
    assert all(pool.shares == {} for pool in slomax.state.pools.values())
