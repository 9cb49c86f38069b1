"""The simulated bus: who hears what, when, in which order."""

import pytest
from tests.simulation.harness import START_MS, Engine, report, small_fleet

from tokenfleet.effects import Effect
from tokenfleet.simulator.bus import Bus, Node
from tokenfleet.simulator.loop import Loop
from tokenfleet.simulator.scenario import BusSpec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event

FLEET = small_fleet()


class Ear:
    """A core that notes what it hears."""

    def __init__(self, heard: list[tuple[float, str, str]], name: str) -> None:
        self.heard, self.name = heard, name

    def handle(self, message: Event, now_ms: float) -> list[Effect]:
        self.heard.append((now_ms, self.name, message.id))
        return []

    def wake(self, now_ms: float) -> list[Effect]:
        return []


def reports(name: str, count: int) -> list[CapacityReported]:
    return [report(FLEET, name, Engine(10_000), revision, START_MS) for revision in range(count)]


def hear(spec: BusSpec, *, together: bool, cut: bool = False) -> list[tuple[float, str, str]]:
    """What three readers hear of two sites' reports, said at once or one by one."""
    loop = Loop()
    heard: list[tuple[float, str, str]] = []
    bus = Bus(loop, FLEET, spec, "b", seed=3)
    for name, service, site in (("slomax", "slomax", "b"), ("gateway-b", "gateway", "b"), ("far", "fleetmind", "c")):
        bus.join(Node(name, service, site, Ear(heard, name), bus))
    if cut:
        bus.cut_until_ms["c"] = loop.now_ms + 50.0
    for site in ("b", "c"):
        if together:
            bus.publish_together(reports(f"{site}-0", 5), site)
        else:
            for one in reports(f"{site}-0", 5):
                bus.publish(one, site)
    loop.run_until(loop.now_ms + 1_000.0)
    return heard


@pytest.mark.parametrize("spec", [BusSpec(), BusSpec(topology="hub"), BusSpec(loss=0.3), BusSpec(duplicates=0.3)])
@pytest.mark.parametrize("cut", [False, True])
def test_said_together_is_heard_as_said_one_by_one(spec: BusSpec, cut: bool) -> None:
    """Two hundred reports a site and second travel as one: no reader may notice."""
    one_by_one = hear(spec, together=False, cut=cut)
    assert one_by_one
    assert hear(spec, together=True, cut=cut) == one_by_one
