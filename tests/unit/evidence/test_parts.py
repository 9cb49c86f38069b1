"""Cells must be able to differ in what their part compares."""

from collections import Counter

from benchmarks.evidence._simulated import load
from benchmarks.evidence.pilot_order import MIXED


def test_choosing_an_instance_is_compared_where_there_is_something_to_choose() -> None:
    """The mixed cell had one instance a pool: all routers' figures were the same to the last digit, and passed."""
    fleet = load(MIXED["scenario"], MIXED["overrides"], MIXED["speed"]).fleet
    pools = Counter(
        (name, one.model, one.version) for name, site in fleet.sites.items() for one in site.instances.values()
    )
    assert pools
    assert min(pools.values()) >= 3, pools
