"""How many replicas each site should run, as a small mixed-integer program, solved by HiGHS (`scipy.optimize.milp`).

Decides replica counts per pool (site × model version) and which demand they are meant for: the cheapest in GPU-time, in
starts, in network and, above all, in demand left unserved, within every site's GPUs. Demand may flow only to the sites
that it is allowed at: the filter was applied before, and there is no variable for what it forbids. Refuses to know
where demand comes from, what is running and what a plan looks like; raises `PlanningError` where there is no answer.

    minimise  sum over pools of gpus*price*n + start*up + stop*down  +  sum of network*flow  +  sum of weight*unserved
    subject to  flows of a demand + unserved = its work;  flows into a pool <= capacity*n;
                sum of gpus*n of a site <= its GPUs;  up >= n - now;  down >= now - n;  least <= n <= most, n whole

Up to some sixty pools the search runs to its end. Beyond, the linear relaxation is solved (milliseconds), its largest
fractions are made whole where the site has the GPUs, and the rest is solved anew until nothing is left to round
("diving", Achterberg 2007, chapter 9): no limit of time cuts it off, so the same numbers give the same plan anywhere.

Source of the shape: SageServe's (Jaiswal et al. 2025) ILP over forecasts; the rest is ours.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

#: seconds that the solver may take; what it has by then is used
TIME_LIMIT_S = 2.0
#: a plan this close to the best is the best: demand is not known to a part in a thousand
GAP = 1e-3
#: with more pools than this no proof of the best plan is sought: fractions are rounded one after the other
POOLS_WHOLE = 60
#: of the fractions this part is made whole at a time
ROUNDED = 12
#: what unserved work of weight 1 costs, in GPUs
UNSERVED = 200.0

PoolKey = tuple[str, str, str]


class PlanningError(RuntimeError):
    """There is no plan: the solver found none in time, or the numbers contradict each other."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one model version at one site."""

    site: str
    model: str
    version: str
    #: of one replica
    gpus: int = 1
    #: of one GPU's time at this site, relative to others
    price: float = 1.0
    #: running or starting now
    now: int = 0
    #: fewest and most that may run
    least: int = 0
    most: int = 0
    #: work that one replica serves, in replicas: the utilisation aimed at
    capacity: float = 1.0
    #: what a start and a stop cost, in GPU-time of the period planned for
    start: float = 0.0
    stop: float = 0.0

    @property
    def key(self) -> PoolKey:
        """Site, model, version."""
        return (self.site, self.model, self.version)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one model version that wants serving: replicas' worth, with its margin."""

    name: str
    model: str
    version: str
    work: float
    #: site → what a replica's worth of it costs there in network, in GPUs; sites that are not named are forbidden
    sites: Mapping[str, float]
    #: how much worse it is to leave it unserved than other demand
    weight: float = 1.0


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas per pool, and where each need's work goes."""

    replicas: dict[PoolKey, int]
    #: need → site → work
    flows: dict[str, dict[str, float]]
    #: need → work that nobody serves
    unserved: dict[str, float]
    #: pool → work meant for it
    load: dict[PoolKey, float]


def solve(pools: Sequence[Pool], needs: Sequence[Need], gpus: Mapping[str, int]) -> Solution:
    """The cheapest plan. Raises `PlanningError`, ModuleNotFoundError where scipy is not installed.

    A site's pools that must run (`least`) count even where they exceed its GPUs: what runs, runs.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    pools = sorted(pools, key=lambda pool: pool.key)
    if not pools:
        return Solution(replicas={}, flows={}, unserved={need.name: need.work for need in needs}, load={})
    groups = _alike(needs)
    wanted = [sum(need.work for need in group) for group in groups]
    pool_at = {pool.key: p for p, pool in enumerate(pools) if pool.most}
    ways: list[tuple[int, int]] = []
    into: list[list[int]] = [[] for _ in pools]
    out: list[list[int]] = [[] for _ in groups]
    for d, (need, *_) in enumerate(groups):
        for site in sorted(need.sites):
            at = pool_at.get((site, need.model, need.version))
            if at is not None:
                out[d].append(len(ways))
                into[at].append(len(ways))
                ways.append((d, at))
    count = len(pools)
    stops = [p for p, pool in enumerate(pools) if pool.stop]
    up, down = count, 2 * count
    flow = down + len(stops)
    unserved = flow + len(ways)
    size = unserved + len(groups)
    cost = np.zeros(size)
    least, most = np.zeros(size), np.full(size, np.inf)
    for p, pool in enumerate(pools):
        if pool.least > pool.most:
            raise PlanningError(f"{pool.key}: at least {pool.least} but at most {pool.most} replicas")
        cost[p], cost[up + p] = pool.gpus * pool.price, pool.start
        least[p], most[p] = pool.least, pool.most
    for number, p in enumerate(stops):
        cost[down + number] = pools[p].stop
    for number, (d, p) in enumerate(ways):
        cost[flow + number] = groups[d][0].sites[pools[p].site]
    for d, (need, *_) in enumerate(groups):
        cost[unserved + d] = UNSERVED * need.weight
        most[unserved + d] = wanted[d]
    rows: list[tuple[int, int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def row(terms: Sequence[tuple[int, float]], at_least: float, at_most: float) -> None:
        rows.extend((len(low), column, value) for column, value in terms)
        low.append(at_least)
        high.append(at_most)

    for d, work in enumerate(wanted):
        row([*((flow + number, 1.0) for number in out[d]), (unserved + d, 1.0)], work, work)
    for p, pool in enumerate(pools):
        row([*((flow + number, 1.0) for number in into[p]), (p, -pool.capacity)], -np.inf, 0.0)
        row([(up + p, 1.0), (p, -1.0)], -pool.now, np.inf)
    for number, p in enumerate(stops):
        row([(down + number, 1.0), (p, 1.0)], pools[p].now, np.inf)
    for site in sorted({pool.site for pool in pools}):
        mine = [(p, float(pool.gpus)) for p, pool in enumerate(pools) if pool.site == site]
        must = sum(pools[p].gpus * pools[p].least for p, _ in mine)
        row(mine, -np.inf, max(gpus.get(site, 0), must))
    matrix = coo_array(
        ([value for *_, value in rows], ([at for at, *_ in rows], [column for _, column, _ in rows])),
        shape=(len(low), size),
    ).tocsc()
    whole = np.zeros(size)
    whole[:count] = 1

    def search(least: Any, most: Any, *, integral: bool = True) -> Any:
        found: Any = milp(
            cost,
            integrality=whole if integral else np.zeros(size),
            bounds=Bounds(least, most),
            constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        if found.x is None:
            raise PlanningError(f"HiGHS found no plan: {found.message}")
        return found

    if count <= POOLS_WHOLE:
        found = search(least, most)
    else:
        # Too many for a search: the best fractions are made whole a few at a time, the largest first, and the rest is
        # thought over each time. There is always a plan: fewer replicas leave work unserved.
        found = search(least, most, integral=False)
        while True:
            parts = found.x[:count] - np.floor(found.x[:count] + 1e-6)
            open_ = [p for p in range(count) if parts[p] > 1e-6]
            if not open_:
                break
            least[:count] = np.maximum(least[:count], np.floor(found.x[:count] + 1e-6))
            for p in sorted(open_, key=lambda p: (-parts[p], pools[p].key))[: max(1, len(open_) // ROUNDED)]:
                pool = pools[p]
                free = gpus.get(pool.site, 0) - sum(
                    one.gpus * least[q] for q, one in enumerate(pools) if one.site == pool.site
                )
                if free >= pool.gpus:
                    least[p] = math.ceil(found.x[p])
                else:
                    most[p] = least[p]
            found = search(least, most, integral=False)
    values = found.x
    flows: dict[str, dict[str, float]] = {need.name: {} for need in needs}
    left: dict[str, float] = {need.name: 0.0 for need in needs}
    load: dict[PoolKey, float] = dict.fromkeys((pool.key for pool in pools), 0.0)
    for d, group in enumerate(groups):
        for need in group:
            part = need.work / wanted[d] if wanted[d] else 0.0
            left[need.name] = max(0.0, part * float(values[unserved + d]))
            for number in out[d]:
                amount = float(values[flow + number])
                if amount > 1e-6:
                    flows[need.name][pools[ways[number][1]].site] = part * amount
    for number, (_, p) in enumerate(ways):
        load[pools[p].key] += max(0.0, float(values[flow + number]))
    return Solution(
        replicas={pool.key: round(float(values[p])) for p, pool in enumerate(pools)},
        flows=flows,
        unserved=left,
        load=load,
    )


def _alike(needs: Sequence[Need]) -> list[list[Need]]:
    """Needs that the same sites serve at the same costs: one flow stands for all of them."""
    groups: dict[tuple[object, ...], list[Need]] = {}
    for need in sorted(needs, key=lambda need: need.name):
        same = (need.model, need.version, need.weight, *sorted(need.sites.items()))
        groups.setdefault(same, []).append(need)
    return list(groups.values())
