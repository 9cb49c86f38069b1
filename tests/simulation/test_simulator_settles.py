"""After a step of the load the shares settle: no swing, and as good as a split that somebody chose for the new load."""

from collections import defaultdict

import pytest

from tokenfleet.replay import report
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import Scenario, parse
from tokenfleet.simulator.world import World
from tokenfleet_schemas.admission import AdmissionShared
from tokenfleet_schemas.event import Event

#: the load changes at STEP_S; from SETTLED_S on the shares must be as good as fixed ones
STEP_S, SETTLED_S, END_S = 30.0, 90.0, 120.0
#: answers of these classes take less than 20 s at P95; a class whose answers take longer may take longer to settle
FIXED = ("interactive:12", "chat:12")

STEP = f"""
fleet = "reference"
[scenario]
name = "step"
duration_s = {END_S}
drain_s = 200
[[workload]]
trace = "builtin"
rate_per_s = 8
tasks = ["assistant", "helpdesk", "coding"]
[[workload]]
trace = "builtin"
rate_per_s = 5
tasks = ["helpdesk"]
from_s = {STEP_S}
"""


def after(scenario: Scenario, policy: str) -> tuple[float, list[tuple[float, AdmissionShared]]]:
    """Token compliance of what came once it had to be settled, and every word on shares."""
    world = World(scenario, choose(policy), 1)
    said: list[tuple[float, AdmissionShared]] = []

    def listen(event: Event) -> None:
        if isinstance(event, AdmissionShared):
            said.append(((world.loop.now_ms - world.zero_ms) / 1000.0, event))

    world.bus.listeners.append(listen)
    records = [one for one in world.run().records if one.planned_ms >= SETTLED_S * 1000.0]
    made = report.make(records, scenario.fleet.classes, policy=policy, seed=1, duration_s=END_S - SETTLED_S)
    return made.overall.compliance, said


def reversals(values: list[float]) -> int:
    """How often a share turned back by more than two points; the first way that it goes is no turn."""
    turns, extreme, way = 0, values[0], 0
    for value in values[1:]:
        if way * (value - extreme) > 0.0:
            extreme = value
        elif abs(value - extreme) > 0.02:
            turns += way != 0
            extreme, way = value, 1 if value > extreme else -1
    return turns


def test_a_turn_is_more_than_two_points_back() -> None:
    """What counts as one, so that the bound on them says something."""
    assert reversals([0.2, 0.3, 0.4, 0.39, 0.5]) == 0
    assert reversals([0.2, 0.1, 0.05, 0.04]) == 0
    assert reversals([0.2, 0.3, 0.27, 0.25, 0.3]) == 2
    assert reversals([0.2] * 5) == 0


@pytest.mark.timeout(300)
def test_a_step_of_the_load_settles_within_a_minute() -> None:
    """Shares swung between two classes for minutes, each step late for the one before; or never left the old load's."""
    scenario = parse(STEP.encode())
    ours, said = after(scenario, "tokenfleet")
    shares: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for at_s, event in said:
        if STEP_S <= at_s <= END_S:
            for one in event.shares:
                shares[event.site, event.model, event.version, one.service_class].append(one.share)
    assert any(max(values) - min(values) > 0.02 for values in shares.values()), "nothing moved: nothing was tried"
    assert {key: reversals(values) for key, values in shares.items() if reversals(values) > 2} == {}
    best = max(after(scenario, f"tokenfleet@shares={fixed}")[0] for fixed in FIXED)
    assert ours >= 0.95 * best
