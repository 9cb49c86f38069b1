"""What goes wrong in a run, and when: a scenario's faults as things to do on the virtual clock.

Decides nothing about how anybody reacts.
"""

from collections.abc import Mapping
from typing import Protocol

from tokenfleet.simulator.bus import Bus
from tokenfleet.simulator.instances import SimulatedInstance
from tokenfleet.simulator.loop import Loop
from tokenfleet.simulator.scenario import Fault, Scenario


class Mortal(Protocol):
    """A gateway, as far as faults know it."""

    def die(self) -> None:
        """Killed with everything it had open."""


class Stage(Protocol):
    """A run, as far as faults know it."""

    scenario: Scenario
    loop: Loop
    bus: Bus
    #: when the scenario's time begins
    zero_ms: float
    instances: dict[str, SimulatedInstance]

    @property
    def entries(self) -> Mapping[str, Mortal]:
        """Gateways by site."""

    def restart_gateway(self, site: str) -> None:
        """A new process under the old name."""


def plan_faults(world: Stage) -> None:
    """Put every fault's beginning and end on the clock; times count from the first second of the scenario."""
    for fault in world.scenario.faults:
        begin_ms = world.zero_ms + fault.at_s * 1000.0
        world.loop.at(begin_ms, _begin, world, fault)
        world.loop.at(begin_ms + fault.for_s * 1000.0, _end, world, fault)


def _begin(world: Stage, fault: Fault) -> None:
    until_ms = world.loop.now_ms + fault.for_s * 1000.0
    match fault.kind:
        case "engine_down":
            world.instances[fault.target].go_down()
        case "engine_slow":
            world.instances[fault.target].slow_down(fault.factor)
        case "engine_stalled":
            world.instances[fault.target].stall()
        case "agent_silent":
            for instance in world.instances.values():
                if fault.target in (instance.name, instance.site):
                    instance.silent_until_ms = max(instance.silent_until_ms, until_ms)
        case "service_paused":
            world.bus.nodes[fault.target].pause()
        case "site_cut":
            world.bus.cut_until_ms[fault.target] = until_ms
        case "messages_lost":
            world.bus.loss = fault.share
        case "gateway_down":
            world.entries[fault.target].die()


def _end(world: Stage, fault: Fault) -> None:
    match fault.kind:
        case "engine_down":
            world.instances[fault.target].come_up()
        case "engine_slow":
            world.instances[fault.target].slow_down(1.0)
        case "engine_stalled":
            world.instances[fault.target].go_on()
        case "agent_silent":
            pass  # it speaks again by itself
        case "service_paused":
            world.bus.nodes[fault.target].go_on()
        case "site_cut":
            if world.bus.cut_until_ms.get(fault.target, 0.0) <= world.loop.now_ms:
                world.bus.cut_until_ms.pop(fault.target, None)
        case "messages_lost":
            world.bus.loss = world.scenario.bus.loss
        case "gateway_down":
            world.restart_gateway(fault.target)
