"""What the simulator's faults found in the cores, each as the few messages that show it."""

from tests.simulation.harness import small_fleet
from tests.simulation.messages import Bench, assigned, held, make_ask, offered, requested

from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.placement import PlacementReleased


def test_a_lost_release_does_not_keep_an_idle_instance_from_everybody() -> None:
    """A release was lost and TokenPilot filled the room itself: its offers never name that number.

    SLOMax subtracted the release from every later offer, called an idle instance full and declined until the patience
    of all that waited had ended: with 1% of plain messages lost, a quarter of an overloaded fleet's requests.
    """
    fleet = small_fleet()
    bench = Bench(SLOMax(fleet, replica="slomax-1"), fleet)
    bench.report()
    first, second = make_ask("r1", patience_ms=60_000.0), make_ask("r2", patience_ms=60_000.0, input_tokens=5000)
    bench.feed(requested(first, "b"), held(first))
    (lost,) = bench.of(PlacementReleased, bench.feed(offered()))
    assert lost.number == 1
    bench.feed(assigned(first, how="unanswered"))
    bench.feed(requested(second, "b"), held(second))
    bench.run(3000, lease=["r1", "r2"])
    released = bench.of(PlacementReleased, bench.feed(offered(revision=2, last_released=0)))
    assert [one.request_id for one in released] == ["r2"]
