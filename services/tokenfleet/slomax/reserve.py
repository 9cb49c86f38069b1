"""SLOMax's reserve: whose demand is above its part of a pool, and what stays free for those whose demand is not.

Nothing that runs is taken away, so a place that a flood has taken is gone until one of its answers ends, and half a
second's promise cannot wait for that. Decides therefore what a request must leave free: a tenant that wants far more
than its part leaves what the others had at most lately; a patient class leaves what a more urgent one has on average.
Parts are max-min fair by weight over what tenants want in all classes together. Refuses to know deadlines and who goes
next.
"""

from math import ceil

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet.slomax.state import Held, Pool

#: who is greedy is looked at so often at most, ms
LOOK_MS = 250.0
#: a tenant is greedy that wants more than this times its part, and more than so many places above it. Anybody's demand
#: passes its part now and then; to serve by part instead of by deadline then costs more than it gives
GREEDY_FACTOR = 4.0
GREEDY_PLACES = 4.0
#: at most this part of a pool is kept free
PART_MAX = 0.5


class Kept(msgspec.Struct, frozen=True):
    """What a request must leave free of one instance."""

    sequences: int = 0
    kv_tokens: int = 0


NOTHING = Kept()


def fair_parts(demands: dict[str, float], weights: dict[str, float], places: float) -> dict[str, float]:
    """Max-min fair parts of so many places, by weight, none above its demand."""
    left, total = places, sum(weights[name] for name in demands)
    parts: dict[str, float] = {}
    for name in sorted(demands, key=lambda name: (demands[name] / weights[name], name)):
        parts[name] = min(demands[name], left * weights[name] / total)
        left -= parts[name]
        total -= weights[name]
    return parts


def look(fleet: Fleet, pool: Pool, now_ms: float) -> None:
    """Find out who wants more than its part of a pool, and forget who is gone. Cheap where it was done just now."""
    if now_ms - pool.looked_ms < LOOK_MS:
        return
    pool.looked_ms = now_ms
    demands: dict[str, float] = {}
    missing: dict[str, float] = {}
    running = 0
    for account, crowd in list(pool.crowds.items()):
        pool.count_crowd(account, now_ms)
        if not crowd.count and crowd.lately(now_ms) < 0.5:
            del pool.crowds[account]
            continue
        tenant = account.partition(" ")[2]
        demands[tenant] = demands.get(tenant, 0.0) + crowd.average(now_ms)
        missing[tenant] = missing.get(tenant, 0.0) + max(0.0, crowd.lately(now_ms) - len(crowd.running))
        running += len(crowd.running)
    weights = {name: fleet.tenants[name].weight if name in fleet.tenants else 1.0 for name in demands}
    # A pool in which something waits has no more places than run, but for those that are kept for the others.
    others = sum(missing[name] for name in demands if name not in _greedy(demands, weights, running))
    places = running + min(others, sum(room.sequences for room in pool.rooms.values()))
    pool.greedy = _greedy(demands, weights, places)


def _greedy(demands: dict[str, float], weights: dict[str, float], places: float) -> tuple[str, ...]:
    if len(demands) < 2:
        return ()  # there is nobody to leave anything to
    parts = fair_parts(demands, weights, places)
    return tuple(
        name
        for name, demand in demands.items()
        if demand > max(GREEDY_FACTOR * parts[name], parts[name] + GREEDY_PLACES)
    )


def kept(fleet: Fleet, pool: Pool, held: Held, now_ms: float) -> Kept:
    """What this request must leave free of any instance of the pool."""
    look(fleet, pool, now_ms)
    greedy = held.tenant in pool.greedy
    mine = fleet.classes.get(held.service_class)
    tier = mine.tier if mine is not None else 1_000_000
    missing = missing_kv = running_kv = 0.0
    running = 0
    for account, crowd in pool.crowds.items():
        running += len(crowd.running)
        running_kv += len(crowd.running) * crowd.kv_tokens
        name, _, tenant = account.partition(" ")
        cls = fleet.classes.get(name)
        if cls is None or tenant in pool.greedy:
            continue
        if greedy or (cls.tier < tier and cls.ttft_ms is not None):
            had = crowd.lately(now_ms) if greedy else crowd.average(now_ms)
            lacks = max(0.0, had - len(crowd.running))
            missing += lacks
            missing_kv += lacks * crowd.kv_tokens if greedy else 0.0
    if not missing:
        return NOTHING
    rooms = pool.rooms.values()
    count = max(1, len(rooms))
    # At most a part of what there is, so that an instance that runs nothing takes whatever waits.
    most = int(PART_MAX * (running + sum(room.sequences for room in rooms)) / count)
    most_kv = int(PART_MAX * (running_kv + sum(room.kv_tokens for room in rooms)) / count)
    return Kept(min(most, ceil(missing / count)), min(most_kv, int(missing_kv / count)))
