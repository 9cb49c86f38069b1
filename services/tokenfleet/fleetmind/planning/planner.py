"""One round of the long cycle: from what is known of demand and replicas to a target for every pool, with its reasons.

Decides replica targets. Demand is taken twice: the peak within the time that a new replica needs to serve (near), and
the peak until a replica that is dropped now would have paid for its next load (later). Both get the same margin: the
forecast's own late errors, and the square-root safety of a system with many small jobs (Halfin and Whitt 1981). The
optimiser fills the sites with each; near is what must run, later is what is not worth dropping (`warmpool`). Refuses
to know messages.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from tokenfleet.fleetmind.planning import optimiser, warmpool
from tokenfleet.fleetmind.planning.optimiser import Need, Pool, PoolKey
from tokenfleet.fleetmind.planning.work import Curve, Demand, Engine, Speed, speed

#: what a replica's worth of work costs in GPUs when it is served so far away, ms of round trip
FAR_MS = 100.0
FAR = 0.1
#: a forecast's margin for errors is at most so much of it
MARGIN_MAX = 0.5
#: band around a whole replica within which nothing is dropped
BAND = 0.05


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How cautious a plan is; seconds."""

    #: part of a replica's sustainable work that is planned with
    utilisation: float = 0.95
    #: standard deviations of the load in progress that are kept free
    burst: float = 1.0
    #: time between two plans
    every_s: float = 60.0
    #: period over which a start must pay off
    period_s: float = 900.0
    #: model → replicas over the fleet that never stop
    at_least: Mapping[str, int] = {}


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as it is."""

    site: str
    model: str
    version: str
    gpus: int = 1
    price: float = 1.0
    running: int = 0
    starting: int = 0
    #: what the last plan wanted; None: there was none
    planned: int | None = None
    #: replicas that could run: declared, and nobody failed to start them
    startable: int = 0
    #: nobody here can start or stop them: what runs is what there is
    fixed: bool = False
    cold_start_s: float = 155.0
    engine: Engine
    curve: Curve
    #: replicas that promises of capacity want, and what their holders are expected to use of it themselves
    reserved: float = 0.0

    @property
    def key(self) -> PoolKey:
        """Site, model, version."""
        return (self.site, self.model, self.version)

    @property
    def now(self) -> int:
        """Replicas that serve, or will without further ado."""
        return self.running + self.starting

    @property
    def ordered(self) -> int:
        """What is on its way to be: the last plan, where there is one. What it dropped is not there to be kept."""
        return self.now if self.planned is None or self.fixed else min(self.planned, self.startable)


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What clients of one entry are expected to ask for: one model version, one class, one set of allowed sites."""

    model: str
    version: str
    entry: str
    service_class: str
    #: site → round trip from the entry, ms; others are forbidden
    sites: Mapping[str, float]
    #: peaks of the forecast, requests/s
    near_per_s: float
    later_per_s: float
    #: relative error of such forecasts
    error: float = 0.0
    #: whether a season stands behind them
    seasonal: bool = False
    demand: Demand
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Unique over a plan."""
        return " ".join((self.model, self.version, self.entry, self.service_class, *sorted(self.sites)))


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The target of one pool."""

    replicas: int
    #: of them kept warm without need
    warm: int
    #: work meant for it, in its replicas, margin included
    demand: float
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One round's result."""

    targets: dict[PoolKey, Planned]
    #: stream → replicas' worth that nobody serves
    unserved: dict[str, float]
    #: GPUs that the targets take, by site
    gpus: dict[str, int]


def decide(
    pools: Sequence[PoolFacts],
    streams: Sequence[Stream],
    gpus: Mapping[str, int],
    rules: Rules,
    idle: dict[str, warmpool.Idle],
    now_s: float,
) -> Plan:
    """A target for every pool. Raises `PlanningError`; `idle` is the warm pools' memory and is changed."""
    speeds = {pool.key: _speed(pool, streams) for pool in pools}
    capacity = _capacities(pools, streams, speeds, rules)
    least = _least(pools, rules)
    offered = [
        Pool(
            site=pool.site,
            model=pool.model,
            version=pool.version,
            gpus=pool.gpus,
            price=pool.price,
            now=pool.now,
            least=pool.now if pool.fixed else min(least[pool.key], pool.startable),
            most=pool.now if pool.fixed else max(pool.startable, 0),
            capacity=capacity[pool.key],
            start=pool.gpus * pool.price * pool.cold_start_s / rules.period_s,
        )
        for pool in pools
    ]
    near = optimiser.solve(offered, _needs(pools, streams, speeds, rules, capacity, later=False), gpus)
    later = near
    if any(near.replicas[pool.key] < pool.ordered for pool in pools):  # else there is nothing to drop
        later = optimiser.solve(offered, _needs(pools, streams, speeds, rules, capacity, later=True), gpus)
    targets: dict[PoolKey, Planned] = {}
    for pool in sorted(pools, key=lambda one: one.key):
        key = pool.key
        needed = near.replicas[key]
        sure = all(s.seasonal for s in streams if (s.model, s.version) == key[1:] and pool.site in s.sites)
        kept = warmpool.decide(
            idle,
            " ".join(key),
            now=pool.ordered,
            needed=needed,
            soon=max(needed, later.replicas[key]),
            reload_s=pool.cold_start_s,
            sure=sure,
            now_s=now_s,
        )
        demand = near.load.get(key, 0.0) / capacity[key] if capacity[key] else 0.0
        reason = "fixed: no actuator" if pool.fixed else kept.reason
        targets[key] = Planned(replicas=kept.replicas, warm=kept.warm, demand=round(demand, 3), reason=reason)
    _fit(targets, pools, gpus)
    used = {site: sum(targets[p.key].replicas * p.gpus for p in pools if p.site == site) for site in gpus}
    return Plan(
        targets=targets,
        unserved={name: round(work, 3) for name, work in near.unserved.items() if work > 1e-3},
        gpus=used,
    )


def _fit(targets: dict[PoolKey, Planned], pools: Sequence[PoolFacts], gpus: Mapping[str, int]) -> None:
    """What is kept warm gives way where a site's GPUs are wanted for what is needed."""
    for site in sorted(gpus):
        mine = [pool for pool in pools if pool.site == site]
        over = sum(targets[pool.key].replicas * pool.gpus for pool in mine) - gpus[site]
        for pool in sorted(mine, key=lambda one: (-targets[one.key].warm, one.key)):
            planned = targets[pool.key]
            if over <= 0 or pool.fixed:
                continue
            given = min(planned.warm, math.ceil(over / pool.gpus))
            if given:
                over -= given * pool.gpus
                targets[pool.key] = Planned(
                    replicas=planned.replicas - given,
                    warm=planned.warm - given,
                    demand=planned.demand,
                    reason="its GPUs are needed",
                )


def _speed(pool: PoolFacts, streams: Sequence[Stream]) -> Speed:
    """A pool's speed for the mean of what it may be asked for."""
    total = tokens = 0.0
    for stream in streams:
        if (stream.model, stream.version) == (pool.model, pool.version) and pool.site in stream.sites:
            total += stream.later_per_s
            tokens += stream.later_per_s * stream.demand.kv_tokens
    return speed(pool.engine, pool.curve, tokens / total if total else 0.0)


def _reference(pools: Sequence[PoolFacts], model: str, version: str, speeds: Mapping[PoolKey, Speed]) -> Speed | None:
    """The speed in whose replicas a version's work is counted: the mean over its pools."""
    mine = [speeds[pool.key] for pool in pools if (pool.model, pool.version) == (model, version)]
    if not mine:
        return None
    return Speed(
        sum(one.sequences for one in mine) / len(mine),
        sum(one.decode_s_per_token for one in mine) / len(mine),
        sum(one.prefill_s_per_token for one in mine) / len(mine),
    )


def _capacities(
    pools: Sequence[PoolFacts], streams: Sequence[Stream], speeds: Mapping[PoolKey, Speed], rules: Rules
) -> dict[PoolKey, float]:
    """Work that a replica of each pool is planned with, in reference replicas."""
    found: dict[PoolKey, float] = {}
    for pool in pools:
        reference = _reference(pools, pool.model, pool.version, speeds)
        assert reference is not None
        mine = [s for s in streams if (s.model, s.version) == (pool.model, pool.version)]
        wanted = sum(s.later_per_s * s.demand.work_s(reference) for s in mine)
        here = sum(s.later_per_s * s.demand.work_s(speeds[pool.key]) for s in mine)
        found[pool.key] = rules.utilisation * (wanted / here if here > 0 else 1.0)
    return found


def _least(pools: Sequence[PoolFacts], rules: Rules) -> dict[PoolKey, int]:
    """Replicas that run whatever is asked for: a model's minimum, at the sites that run it now, first in name order."""
    least = dict.fromkeys((pool.key for pool in pools), 0)
    for model, count in rules.at_least.items():
        mine = sorted((p for p in pools if p.model == model), key=lambda p: (-p.now, p.key))
        for pool in mine:
            here = min(count, pool.startable)
            least[pool.key] = here
            count -= here
            if count <= 0:
                break
    return least


def _needs(
    pools: Sequence[PoolFacts],
    streams: Sequence[Stream],
    speeds: Mapping[PoolKey, Speed],
    rules: Rules,
    capacity: Mapping[PoolKey, float],
    *,
    later: bool,
) -> list[Need]:
    """Work with its margins. What is common to an entry's streams of a version is shared out by their work."""
    work: dict[str, float] = {}
    spread: dict[tuple[str, str, str], float] = {}
    total: dict[tuple[str, str, str], float] = {}
    for stream in streams:
        reference = _reference(pools, stream.model, stream.version, speeds)
        if reference is None:
            continue
        rate = stream.later_per_s * (1 + BAND) if later else stream.near_per_s
        mean = rate * stream.demand.work_s(reference)
        work[stream.name] = mean * (1.0 + min(MARGIN_MAX, stream.error))
        group = (stream.model, stream.version, stream.entry)
        spread[group] = spread.get(group, 0.0) + mean * stream.demand.grain(reference)
        total[group] = total.get(group, 0.0) + mean
    needs = []
    for stream in streams:
        if work.get(stream.name, 0.0) <= 1e-9:
            continue
        group = (stream.model, stream.version, stream.entry)
        reference = _reference(pools, stream.model, stream.version, speeds)
        assert reference is not None
        mean = (stream.later_per_s * (1 + BAND) if later else stream.near_per_s) * stream.demand.work_s(reference)
        free = rules.burst * math.sqrt(spread[group]) * mean / total[group]
        needs.append(
            Need(
                name=stream.name,
                model=stream.model,
                version=stream.version,
                work=work[stream.name] + free,
                sites={site: FAR * min(1.0, rtt / FAR_MS) for site, rtt in stream.sites.items()},
                weight=stream.weight,
            )
        )
    needs += [
        Need(
            name=f"reserved {' '.join(pool.key)}",
            model=pool.model,
            version=pool.version,
            work=pool.reserved * capacity[pool.key],
            sites={pool.site: 0.0},
            weight=10.0,
        )
        for pool in pools
        if pool.reserved > 0
    ]
    return needs
