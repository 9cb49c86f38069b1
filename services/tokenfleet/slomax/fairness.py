"""SLOMax's books: who of a pool's classes and tenants is owed work and who has taken more than its part.

Deficit round robin (Shreedhar and Varghese, 1995; over token cost as VTC, arXiv:2401.00588) in estimated GPU-time: a
release of some cost is earned by everybody who waits, in proportion to shares, and paid by the one who got it. Three
accounts are kept: a class against the other classes by its share, a class's floor (work that it gets whatever the
others need), a tenant against the other tenants of its class by weight. Who has nothing waiting neither saves nor owes.
What an answer really cost is debited at its end. Refuses to know deadlines and who goes next.
"""

from tokenfleet.fleet import Fleet
from tokenfleet.slomax.state import Held, Pool, Release

#: bound of what anybody may be owed or owe, ms of GPU-time; dearer requests are earned at this price
CREDIT_MAX_MS = 10_000.0
#: GPU-time that may always be lent, ms: a share is kept over some requests, not by every single one
QUANTUM_MS = 3_000.0
#: no class's floor is above this part of a pool's work, nor above its share
FLOOR = 0.05
#: share of a class that a reload removed: it still drains
_REMOVED = 0.01


def share_of(fleet: Fleet, name: str) -> float:
    """A class's configured part of every pool when all classes are backlogged, 0..1."""
    total = sum(cls.share for cls in fleet.classes.values())
    cls = fleet.classes.get(name)
    return 0.0 if cls is None else cls.share / total


def shares_of(fleet: Fleet, pool: Pool) -> dict[str, float]:
    """Every class's part of this pool: as feedback has moved it, else as configured."""
    return {name: pool.shares.get(name, 0.0) or share_of(fleet, name) for name in fleet.classes}


def floor_of(fleet: Fleet, name: str) -> float:
    """The part of a pool's work that a class gets while it waits, whatever the others need, 0..1."""
    return min(FLOOR, share_of(fleet, name))


def floor_key(name: str) -> str:
    """Account of a class's floor."""
    return f"floor {name}"


def tenant_key(name: str, tenant: str) -> str:
    """Account of a tenant within a class; class names hold no spaces."""
    return f"{name} {tenant}"


def owed(pool: Pool, key: str, cost_ms: float) -> bool:
    """Whether an account has earned work of this cost."""
    return pool.credit.get(key, 0.0) >= min(cost_ms, CREDIT_MAX_MS)


def overdrawn(pool: Pool, key: str, cost_ms: float) -> bool:
    """Whether an account would owe more than one such request, or a quantum, after it: so much may always be lent."""
    return pool.credit.get(key, 0.0) <= -max(QUANTUM_MS, cost_ms)


def charges(fleet: Fleet, pool: Pool, held: Held) -> dict[str, float]:
    """How a release changes every waiting account: each earns its part of the work, its receivers pay it."""
    cost_ms, mine = held.cost_ms, held.service_class
    now = shares_of(fleet, pool)
    classes = {name: now.get(name, _REMOVED) for name in (*pool.queues, mine)}
    total = sum(classes.values())
    changes = {name: cost_ms * share / total for name, share in classes.items()}
    changes[mine] -= cost_ms
    for name in classes:
        changes[floor_key(name)] = cost_ms * floor_of(fleet, name)
    changes[floor_key(mine)] -= cost_ms
    queue = pool.queues.get(mine)
    tenants = dict.fromkeys((*(queue.tenants if queue is not None else ()), held.tenant), 1.0)
    for name in tenants:
        tenant = fleet.tenants.get(name)
        tenants[name] = tenant.weight if tenant is not None else 1.0
    total = sum(tenants.values())
    for name, weight in tenants.items():
        changes[tenant_key(mine, name)] = cost_ms * weight / total
    changes[tenant_key(mine, held.tenant)] -= cost_ms
    return changes


def settle(pool: Pool, changes: dict[str, float], sign: float = 1.0) -> None:
    """Apply charges (or with -1 take them back) to the accounts that still have something waiting."""
    for key, change in changes.items():
        if pool.backlogged(key):
            lowest = 0.0 if key.startswith("floor ") else -CREDIT_MAX_MS
            pool.credit[key] = min(CREDIT_MAX_MS, max(lowest, pool.credit.get(key, 0.0) + sign * change))


def true_up(pool: Pool, service_class: str, tenant: str, estimated_ms: float, actual_ms: float) -> None:
    """Debit what an answer really cost against what was charged for it when it was released."""
    settle(pool, {tenant_key(service_class, tenant): estimated_ms - actual_ms})


def release(fleet: Fleet, pool: Pool, held: Held, instance: str, number: int, now_ms: float) -> None:
    """Book a release in the pool: its number, the room it takes, the work it costs its class and tenant."""
    changes = charges(fleet, pool, held)
    settle(pool, changes)
    pool.number = max(pool.number, number)
    pool.releases[number] = Release(
        held.request_id, instance, held.work_on(instance), now_ms, changes, held.service_class, held.cost_ms
    )
    pool.used[held.service_class] = pool.used.get(held.service_class, 0.0) + held.cost_ms
    pool.changed = True
    held.released = number
    pool.spare.see(now_ms, pool.any_late())
    pool.spare.served_ms += held.own_ms if held.late else 0.0
    pool.pace.released(held.own_ms, now_ms, more=pool.waiting() > 0)


def take_back(pool: Pool, number: int) -> Release | None:
    """A release came to nothing: its room and its cost are given back."""
    found = pool.releases.pop(number, None)
    if found is not None:
        settle(pool, found.charges, -1.0)
        pool.used[found.service_class] = max(0.0, pool.used.get(found.service_class, 0.0) - found.cost_ms)
    return found
