"""SLOMax's devices: how much GPU-time a model may take of GPUs that it shares while another model waits there.

Instances of one `gpu_group` at a site run on the same GPUs, each with memory and sequences of its own. Their engines do
not know of each other: a burst of one model slows every answer of the others. Decides therefore whether a pool has had
more than its part of the group while another pool holds requests: parts are by the shares of the classes that each
holds, and GPU-time that nobody else waits for is free (deficit, as between classes: `fairness`). Without a group nobody
is ever held back. Refuses to know who goes next within a pool.
"""

from tokenfleet.fleet import Fleet
from tokenfleet.slomax import fairness
from tokenfleet.slomax.state import Meter, PoolKey, State

#: GPU-time that a pool may be ahead of its part, ms: a part is kept over some requests, not by every single one
AHEAD_MS = 1_000.0


def group_of(fleet: Fleet, site: str, instance: str) -> str:
    """The GPUs that an instance shares with others; empty: its own."""
    declared = fleet.sites[site].instances.get(instance) if site in fleet.sites else None
    return declared.gpu_group if declared is not None else ""


def held_back(fleet: Fleet, state: State, key: PoolKey, instance: str, now_ms: float) -> bool:
    """Whether a pool must leave an instance's room empty for now, because others wait for the same GPUs."""
    group = group_of(fleet, key[0], instance)
    return bool(group) and _meter(fleet, state, key, group, now_ms).ahead_ms > AHEAD_MS


def charge(fleet: Fleet, state: State, key: PoolKey, instance: str, cost_ms: float, now_ms: float) -> None:
    """A request of some GPU-time was released to an instance."""
    group = group_of(fleet, key[0], instance)
    if group:
        _meter(fleet, state, key, group, now_ms).ahead_ms += cost_ms


def _meter(fleet: Fleet, state: State, key: PoolKey, group: str, now_ms: float) -> Meter:
    """A pool's meter of a group as of now: what it took is paid off by its part of the time that passes."""
    meter = state.meters.setdefault((*key, group), Meter(at_ms=now_ms))
    part = _part(fleet, state, key, group)
    paid_ms = part * max(0.0, now_ms - meter.at_ms)
    # Alone it owes nothing: what it takes now is taken from nobody.
    meter.ahead_ms = 0.0 if part >= 1.0 else max(0.0, meter.ahead_ms - paid_ms)
    meter.at_ms = max(meter.at_ms, now_ms)
    return meter


def _part(fleet: Fleet, state: State, key: PoolKey, group: str) -> float:
    """A pool's part of the GPUs, 0..1: 1 where no other pool holds anything for them."""
    others = {
        (key[0], one.model, one.version)
        for one in fleet.sites[key[0]].instances.values()
        if one.gpu_group == group and (one.model, one.version) != key[1:]
    }
    theirs = sum(_weight(fleet, state, other) for other in others)
    mine = _weight(fleet, state, key)
    return 1.0 if theirs <= 0.0 else mine / (mine + theirs)


def _weight(fleet: Fleet, state: State, key: PoolKey) -> float:
    """Shares of the classes that a pool holds; nothing where it holds nothing."""
    pool = state.pools.get(key)
    return 0.0 if pool is None else sum(fairness.share_of(fleet, name) or 0.01 for name in pool.queues)
