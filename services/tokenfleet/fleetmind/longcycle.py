"""The long cycle inside FleetMind: what it hears becomes history and facts, plans become events, promises are given.

Decides when to plan (not more often than `planning.every_s`) and what of a plan is news; promises are `promises`'. The
arithmetic is `planning`'s; the solver runs outside the core, which asks for it (`MakePlan`) and hears the answer
(`PlanMade`), because a program with integers may take seconds and a request must not wait for it. Without the office
`plan:fleet` it folds and says nothing. Plan and reality are compared all the time: only what agents report counts as
running, and what an actuator failed to start is not counted on.

Refuses to know single placements, and how a replica is started.
"""

from collections.abc import Iterator

import msgspec

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.eligibility import FRESH_MS, CapacityView, permitted_sites
from tokenfleet.engine_model import cold_start_s
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.planning.forecast import Series
from tokenfleet.fleetmind.planning.planner import Planned, PoolFacts, Rules, Stream
from tokenfleet.fleetmind.planning.reservations import site_gpus
from tokenfleet.fleetmind.planning.warmpool import Idle
from tokenfleet.fleetmind.planning.work import Curve, Demand, Engine
from tokenfleet.fleetmind.promises import HEARD, PLAN_SCOPE, Promises, PromiseState
from tokenfleet.offices import Offices
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.plan import PlanApplied, PlanIssued, Target
from tokenfleet_schemas.reservation import ReservationOwned

#: a plan that is not reality after so many cold starts is overdue
OVERDUE = 2.0
#: what plans are made of is looked through so often for what is missing, ms
STALE_MS = 2_000.0
#: a solver that has not answered after so many rounds is given up
SOLVING_MAX = 5
#: reasons of refusals that are demand all the same: the fleet was full, or the model slept
_DEMAND_REASONS = frozenset(
    {"saturated", "queue_full", "patience", "residency_no_capacity", "no_capacity", "model_not_ready", "unavailable"}
)

#: reasons for which a replica is not ready and an actuator can do something about it
_STARTABLE = frozenset({"starting", "stopped", "unreachable", "draining"})

#: model, version, entry, class, allowed sites
StreamKey = tuple[str, str, str, str, tuple[str, ...]]
PoolKey = tuple[str, str, str]


class MakePlan(Effect, frozen=True, tag=True):
    """Solve this away from the core and hand the answer back as `PlanMade`."""

    pools: tuple[PoolFacts, ...]
    streams: tuple[Stream, ...]
    gpus: dict[str, int]
    rules: Rules
    #: the warm pools' memory, a copy that the solver changes
    idle: dict[str, Idle]
    now_s: float
    number: int

    def solve(self) -> "PlanMade":
        """Do it; never raises for a problem without an answer, which is one."""
        from tokenfleet.fleetmind.planning.optimiser import PlanningError
        from tokenfleet.fleetmind.planning.planner import decide

        name = f"plan:made:{self.number}"
        try:
            plan = decide(self.pools, self.streams, self.gpus, self.rules, self.idle, self.now_s)
        except (PlanningError, ModuleNotFoundError) as error:  # without scipy there is no plan, and that is said
            return PlanMade(id=name, number=self.number, failure=str(error))
        return PlanMade(
            id=name,
            number=self.number,
            targets={" ".join(key): planned for key, planned in plan.targets.items()},
            unserved=plan.unserved,
            gpus=plan.gpus,
            idle=self.idle,
        )


class PlanMade(Event, frozen=True, kw_only=True, tag="fleetmind.plan_made"):
    """The solver's answer: an input of the shell's, never published."""

    number: int
    #: `SITE MODEL VERSION` → what is to run there
    targets: dict[str, Planned] = {}
    #: stream → replicas' worth that nobody serves
    unserved: dict[str, float] = {}
    #: GPUs that the targets take, by site
    gpus: dict[str, int] = {}
    idle: dict[str, Idle] = {}
    #: why there is no plan; empty: there is one
    failure: str = ""


class PlanState(msgspec.Struct):
    """What the long cycle remembers; part of FleetMind's checkpoint."""

    series: dict[StreamKey, Series] = {}
    #: model, class → what its requests are like
    demands: dict[tuple[str, str], Demand] = {}
    curves: dict[PoolKey, Curve] = {}
    idle: dict[str, Idle] = {}
    promises: PromiseState = msgspec.field(default_factory=PromiseState)
    #: site, model → the last plan, and what its agent made of it
    issued: dict[tuple[str, str], PlanIssued] = {}
    applied: dict[tuple[str, str], PlanApplied] = {}
    decided_ms: float = 0.0
    #: pool → since when it has had fewer replicas than planned
    short_ms: dict[PoolKey, float] = {}
    unserved: dict[str, float] = {}


#: messages that change something here, whether anybody plans or not
_HEARD: frozenset[type[Event]] = HEARD | {
    AdmissionDecided,
    OutcomeFinished,
    PlanMade,
    PlanIssued,
    PlanApplied,
    ReservationOwned,
}


class LongCycle:
    """The long cycle of one FleetMind replica."""

    def __init__(self, replica: str, offices: Offices) -> None:
        self.replica = replica
        self.offices = offices
        self.promises = Promises(replica, offices)
        self._state = PlanState(promises=self.promises.state)
        self._number = 0
        #: pool → declared replicas of which nobody has said anything for a while
        self._stale: dict[PoolKey, int] = {}
        self._stale_ms = 0.0
        self._solving = False
        self._allowed: dict[tuple[str, str], tuple[str, ...]] = {}
        self._allowed_of: Fleet | None = None
        self._filed_of: Fleet | None = None

    @property
    def state(self) -> PlanState:
        """All that the long cycle remembers."""
        return self._state

    @state.setter
    def state(self, state: PlanState) -> None:
        self._state, self.promises.state = state, state.promises

    # ------------------------------------------------------------------ what FleetMind calls

    def concerns(self, fleet: Fleet, message: Event) -> bool:
        """Whether `hear` has anything to do: of a dozen messages per request two are for it, unless it plans."""
        return type(message) in _HEARD or fleet.planning.mode == "on"

    def hear(self, fleet: Fleet, capacity: CapacityView, message: Event, now_ms: float) -> Iterator[Effect]:
        """Fold one event; `capacity` is FleetMind's own view."""
        if fleet.planning.mode == "on" and now_ms >= self._stale_ms:
            self._stale_ms = now_ms + STALE_MS
            yield from self._inputs(fleet, capacity, now_ms)
        if isinstance(message, AdmissionDecided):
            self._decided(fleet, message, now_ms)
        elif isinstance(message, OutcomeFinished):
            self._finished(fleet, capacity, message, now_ms)
        elif isinstance(message, PlanMade):
            yield from self._made(fleet, capacity, message, now_ms)
        elif isinstance(message, PlanIssued):
            self._issued(message)
        elif isinstance(message, PlanApplied):
            self.state.applied[message.site, message.model] = message
        elif isinstance(message, ReservationOwned) and self.offices.fold(message.scope, message.term, message.owner):
            yield Note("fleetmind_office", {"what": "taken"}, {"scope": message.scope}, level="info")
            self._filed_of = None
            self._solving = False
            yield from self.promises.answer(fleet, now_ms)
            yield from self.wake(fleet, capacity, now_ms)
        else:
            yield from self.promises.hear(fleet, message, now_ms)

    def next_ms(self, fleet: Fleet) -> float:
        """When `wake` has something to do; infinity when never."""
        if not self._term:
            return float("inf")
        if self._filed_of is not fleet:
            return 0.0
        if fleet.planning.mode == "off":
            return float("inf")
        return self.state.decided_ms + self._every_ms(fleet)

    def wake(self, fleet: Fleet, capacity: CapacityView, now_ms: float) -> Iterator[Effect]:
        """Ask for the fleet file's promises, and for a plan when it is time for one."""
        if not self._term:
            return
        if self._filed_of is not fleet:
            self._filed_of = fleet
            yield from self.promises.file(fleet, now_ms)
        since_ms, every_ms = now_ms - self.state.decided_ms, self._every_ms(fleet)
        # an answer that is so late will not come any more
        waiting = self._solving and since_ms < SOLVING_MAX * every_ms
        if fleet.planning.mode == "off" or waiting or since_ms < every_ms:
            return
        self.state.decided_ms = now_ms
        self.promises.state.book.sweep(now_ms)
        self._solving = True
        self._number += 1
        yield from self._look(fleet, capacity, now_ms)
        for site, model, version in _unmeasured(fleet):
            detail = {"version": version, "reason": "gpus_unknown"}
            yield Note("plan_refused", {"site": site, "model": model}, detail, level="error")
        yield self._problem(fleet, capacity, now_ms)

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Targets and what is missing of them, promises, demand that no replica can be found for: for operators."""
        targets: dict[tuple[tuple[str, str], ...], float] = {}
        missing: dict[tuple[tuple[str, str], ...], float] = {}
        failed: dict[tuple[tuple[str, str], ...], float] = {}
        for (site, model), plan in self.state.issued.items():
            applied = self.state.applied.get((site, model))
            for target in plan.targets:
                labels = (("site", site), ("model", model), ("version", target.version))
                targets[labels] = float(target.replicas)
                if applied is not None:
                    missing[labels] = float(max(0, target.replicas - applied.replicas.get(target.version, 0)))
                    failed[labels] = float(applied.failed.get(target.version, 0))
        given: dict[tuple[tuple[str, str], ...], float] = {
            (("reservation", one.name), ("site", one.site), ("model", one.model)): one.gpu_seconds_per_s
            for one in self.promises.state.book.given.values()
        }
        return {
            "plan_target_replicas": targets,
            "plan_missing_replicas": missing,
            "plan_failed_replicas": failed,
            "plan_stale_replicas": {
                (("site", site), ("model", model), ("version", version)): float(count)
                for (site, model, version), count in self._stale.items()
            },
            "plan_unserved_replicas": {(): float(sum(self.state.unserved.values()))},
            "reservation_gpus": given,
        }

    # ------------------------------------------------------------------ history

    def _decided(self, fleet: Fleet, message: AdmissionDecided, now_ms: float) -> None:
        """A request was asked for: demand, unless its sender had no right to it."""
        ask = message.ask
        if message.attempt != 1 or message.revision or (not message.admitted and message.reason not in _DEMAND_REASONS):
            return
        self.promises.seen(ask, now_ms)
        if fleet.planning.mode == "off" or ask.model not in fleet.models:
            return
        key = (ask.model, ask.version, ask.entry, ask.service_class, self._sites(fleet, ask.tenant, ask.model))
        series = self.state.series.get(key)
        if series is None:
            plan = fleet.planning
            scale = plan.time_scale
            series = self.state.series[key] = Series(plan.every_s / scale, plan.season_s / scale, plan.season_bins)
        series.add(now_ms / 1000.0)

    def _sites(self, fleet: Fleet, tenant: str, model: str) -> tuple[str, ...]:
        """Where a tenant's requests may go: the filter that holds everywhere, and fails closed."""
        if self._allowed_of is not fleet:
            self._allowed_of, self._allowed = fleet, {}
        found = self._allowed.get((tenant, model))
        if found is None:
            found = self._allowed[tenant, model] = tuple(sorted(permitted_sites(fleet, tenant, model)))
        return found

    def _finished(self, fleet: Fleet, capacity: CapacityView, message: OutcomeFinished, now_ms: float) -> None:
        """What a request was like, and how fast its tokens came beside how many others."""
        if message.outcome != "completed" or fleet.planning.mode == "off":
            return
        key = (message.model, message.service_class)
        demand = self.state.demands.get(key)
        if demand is None:
            demand = self.state.demands[key] = Demand()
        times = message.times
        serving_s = max(0.0, times.e2e_ms - (times.queue_ms or 0.0)) / 1000.0
        demand.observe(message.input_tokens, message.cached_tokens, message.output_tokens, serving_s)
        heard = capacity.instances(message.served_site).get(message.instance)
        if heard is None or times.tpot_ms is None or now_ms - heard.heard_ms > FRESH_MS:
            return
        pool = (message.served_site, message.model, message.version)
        curve = self.state.curves.get(pool)
        if curve is None:
            curve = self.state.curves[pool] = Curve()
        curve.observe(float(max(1, heard.report.running or 1)), times.tpot_ms)

    # ------------------------------------------------------------------ planning

    @property
    def _term(self) -> int:
        return self.offices.term(PLAN_SCOPE)

    def _every_ms(self, fleet: Fleet) -> float:
        return 1000.0 * fleet.planning.every_s / fleet.planning.time_scale

    def _inputs(self, fleet: Fleet, capacity: CapacityView, now_ms: float) -> Iterator[Effect]:
        """Say of which replicas nobody says anything: a plan that holds still for that must not look like a choice."""
        for site in fleet.sites:
            for (model, version), names in fleet.pools(site).items():
                heards = [capacity.instances(site).get(name) for name in names]
                stale = sum(heard is None or now_ms - heard.heard_ms > FRESH_MS for heard in heards)
                key = (site, model, version)
                if stale > self._stale.get(key, 0):
                    labels = {"site": site, "model": model}
                    yield Note("plan_stale_inputs", labels, {"version": version, "replicas": str(stale)}, "warning")
                self._stale[key] = stale

    def _problem(self, fleet: Fleet, capacity: CapacityView, now_ms: float) -> MakePlan:
        plan, now_s = fleet.planning, now_ms / 1000.0
        every_s = plan.every_s / plan.time_scale
        gpus = {site: site_gpus(fleet, site) for site in fleet.sites}
        pools = []
        for site in fleet.sites:
            for (model, version), names in fleet.pools(site).items():
                facts, unknown = self._facts(fleet, capacity, (site, model, version), names, now_ms)
                pools.append(facts)
                gpus[site] = max(0, gpus[site] - unknown)
        cold_s = max((pool.cold_start_s for pool in pools), default=0.0)
        near_s = cold_s + every_s
        later_s = near_s + cold_s + every_s
        streams = []
        for key, series in self.state.series.items():
            model, version, entry, service_class, sites = key
            if model not in fleet.models or entry not in fleet.sites or service_class not in fleet.classes:
                continue
            series.advance(now_s)
            series.promise(now_s, near_s)
            streams.append(
                Stream(
                    model=model,
                    version=version,
                    entry=entry,
                    service_class=service_class,
                    sites=self._reachable(fleet, entry, model, version, sites),
                    near_per_s=series.peak(now_s, near_s),
                    later_per_s=series.peak(now_s, later_s),
                    error=series.margin(),
                    seasonal=series.usual(now_s + later_s) is not None,
                    demand=msgspec.structs.replace(self._demand(model, service_class)),
                    weight=1.0 + 1.0 / (1.0 + fleet.classes[service_class].tier),
                )
            )
        rules = Rules(
            utilisation=plan.utilisation,
            burst=plan.burst,
            every_s=every_s,
            period_s=900.0 / plan.time_scale,
            at_least=plan.min_replicas,
        )
        idle = {name: Idle(one.since_s, one.surplus) for name, one in self.state.idle.items()}
        return MakePlan(tuple(pools), tuple(streams), gpus, rules, idle, now_s, self._number)

    def _reachable(
        self, fleet: Fleet, entry: str, model: str, version: str, sites: tuple[str, ...]
    ) -> dict[str, float]:
        """Of the allowed sites, those with an instance that the entry's gateways can reach, with the round trip."""
        zone = fleet.sites[entry].zone
        found: dict[str, float] = {}
        for site in sites:
            declared = fleet.sites[site].instances.values() if site in fleet.sites else ()
            mine = [one for one in declared if (one.model, one.version) == (model, version)]
            if any("*" in one.routable_from or zone in one.routable_from for one in mine):
                rtt = fleet.rtt_ms(entry, site)
                found[site] = 200.0 if rtt is None else rtt
        return found

    def _demand(self, model: str, service_class: str) -> Demand:
        """What the class's requests are like; where none ended yet, what the model's others are like."""
        known = self.state.demands.get((model, service_class))
        if known is not None:
            return known
        others = [one for (name, _), one in sorted(self.state.demands.items()) if name == model]
        if others:
            return max(others, key=lambda one: one.seen)
        return Demand(seen=0, input_tokens=500.0, output_tokens=150.0, serving_s=3.0)

    def _facts(
        self, fleet: Fleet, capacity: CapacityView, key: PoolKey, names: list[str], now_ms: float
    ) -> tuple[PoolFacts, int]:
        """A pool as its agent reports it, and the GPUs of those replicas of which nobody knows anything."""
        site, model, version = key
        declared = [fleet.sites[site].instances[name] for name in names]
        running = starting = unknown = unknown_gpus = 0
        limits: list[tuple[int, int, float]] = []
        for name, one in zip(names, declared, strict=True):
            heard = capacity.instances(site).get(name)
            report = heard.report if heard is not None and now_ms - heard.heard_ms <= FRESH_MS else None
            if report is None or (not report.ready and report.reason not in _STARTABLE):
                # unknown, or there and sick: it serves nobody, and its GPUs are not free
                unknown += 1
                unknown_gpus += one.gpus
                continue
            if report.draining:
                unknown_gpus += one.gpus  # until it is gone
            running += report.ready and not report.draining
            starting += not report.ready and report.reason == "starting"
            limits.append(
                (
                    report.max_sequences or one.max_sequences,
                    report.kv_tokens_total or one.kv_tokens,
                    report.prefill_tokens_per_s or one.prefill_tokens_per_s,
                )
            )
        applied = self.state.applied.get((site, model))
        failed = applied.failed.get(version, 0) if applied is not None else 0
        first = limits[0] if limits else (declared[0].max_sequences, declared[0].kv_tokens, 0.0)
        # of unlike replicas the weakest is counted on
        engine = Engine(
            max_sequences=min((limit[0] for limit in limits), default=first[0]),
            kv_tokens=min((limit[1] for limit in limits), default=first[1]),
            prefill_tokens_per_s=min((limit[2] for limit in limits), default=first[2]),
            objective_ms=min((c.tpot_ms for c in fleet.classes.values() if c.tpot_ms is not None), default=100.0),
        )
        # of a pool whose size in GPUs nobody says no replica is started for a guess, and none stopped
        fixed = fleet.sites[site].actuator is None or key in _unmeasured(fleet)
        facts = PoolFacts(
            site=site,
            model=model,
            version=version,
            gpus=max(one.gpus for one in declared),
            price=fleet.sites[site].gpu_hour_price or 1.0,
            running=running,
            starting=starting,
            planned=self._planned(key),
            startable=max(running + starting, len(names) - unknown - failed),
            fixed=fixed,
            cold_start_s=max(
                cold_start_s(one.cold_start_s, one.profile, fleet.planning.cold_start_s) for one in declared
            )
            / fleet.planning.time_scale,
            engine=engine,
            curve=msgspec.structs.replace(self.state.curves.get(key, Curve())),
            reserved=self._reserved(fleet, key, now_ms),
        )
        return facts, unknown_gpus

    def _planned(self, key: PoolKey) -> int | None:
        """What the last plan wanted of a pool."""
        issued = self.state.issued.get(key[:2])
        return next((t.replicas for t in issued.targets if t.version == key[2]), None) if issued is not None else None

    def _reserved(self, fleet: Fleet, key: PoolKey, now_ms: float) -> float:
        """Replicas that open (or soon open) promises want of a pool; a model's promise is for its default version."""
        site, model, version = key
        if version != fleet.models[model].default_version:
            return 0.0
        lead_ms = 1000.0 * (fleet.planning.cold_start_s + fleet.planning.every_s) / fleet.planning.time_scale
        gpus = max((one.gpus for one in fleet.sites[site].instances.values() if one.model == model), default=1)
        wanted = [
            one for one in self.promises.state.book.within(now_ms, lead_ms) if (one.site, one.model) == (site, model)
        ]
        return sum(one.gpu_seconds_per_s for one in wanted) / gpus if gpus else 0.0

    def _made(self, fleet: Fleet, capacity: CapacityView, made: PlanMade, now_ms: float) -> Iterator[Effect]:
        """The solver answered: publish what changed of it."""
        if not self._solving or made.number != self._number:
            return
        self._solving = False
        term = self._term
        if not term:
            return
        if made.failure:
            yield Note("plan_failed", {}, {"error": made.failure}, level="error")
            return
        self.state.idle = made.idle
        self.state.unserved = made.unserved
        yield Note("plan_decided", {})
        for name, work in made.unserved.items():
            yield Note("plan_unserved", {}, {"demand": name, "replicas": str(work)}, level="warning")
        by_model: dict[tuple[str, str], list[tuple[str, Planned]]] = {}
        for key, planned in made.targets.items():
            site, model, version = key.split(" ")
            if fleet.sites[site].actuator is not None and (site, model, version) not in _unmeasured(fleet):
                by_model.setdefault((site, model), []).append((version, planned))
        for (site, model), versions in sorted(by_model.items()):
            targets = tuple(
                Target(
                    version=version,
                    replicas=planned.replicas,
                    prewarmed=planned.warm,
                    reason=planned.reason,
                    demand=planned.demand,
                    now=self._now(fleet, capacity, (site, model, version), now_ms),
                )
                for version, planned in sorted(versions)
            )
            before = self.state.issued.get((site, model))
            if before is not None and _counts(before.targets) == _counts(targets):
                continue
            revision = before.revision + 1 if before is not None else 0
            issued = PlanIssued(
                id=f"plan:{site}:{model}:{term}:{revision}",
                term=term,
                time_unix_ms=int(now_ms),
                site=site,
                model=model,
                revision=revision,
                targets=targets,
                horizon_s=round((fleet.planning.cold_start_s + fleet.planning.every_s), 1),
                gpus=site_gpus(fleet, site),
                gpus_planned=made.gpus.get(site, 0),
            )
            self.state.issued[site, model] = issued
            yield Publish(issued, durable=True)
            yield Note("plan_issued", {"site": site, "model": model}, {"targets": str(_counts(targets))}, level="info")

    def _now(self, fleet: Fleet, capacity: CapacityView, key: PoolKey, now_ms: float) -> int:
        site, model, version = key
        names = fleet.pools(site).get((model, version), [])
        return self._facts(fleet, capacity, key, names, now_ms)[0].now if names else 0

    def _issued(self, message: PlanIssued) -> None:
        """A plan over the bus: our own, or a predecessor's that goes on until we change it."""
        known = self.state.issued.get((message.site, message.model))
        if known is None or (message.term, message.revision) > (known.term, known.revision):
            self.state.issued[message.site, message.model] = message

    def _look(self, fleet: Fleet, capacity: CapacityView, now_ms: float) -> Iterator[Effect]:
        """Compare the plans with what runs; say what has been missing for longer than starting takes."""
        limit_ms = OVERDUE * 1000.0 * fleet.planning.cold_start_s / fleet.planning.time_scale + self._every_ms(fleet)
        for (site, model), plan in self.state.issued.items():
            if site not in fleet.sites or fleet.sites[site].actuator is None:
                continue
            for target in plan.targets:
                key = (site, model, target.version)
                names = fleet.pools(site).get((model, target.version), [])
                ready = self._facts(fleet, capacity, key, names, now_ms)[0].running if names else 0
                if ready >= target.replicas:
                    self.state.short_ms.pop(key, None)
                    continue
                since_ms = self.state.short_ms.setdefault(key, now_ms)
                if now_ms - since_ms >= limit_ms:
                    self.state.short_ms[key] = now_ms
                    detail = {"planned": str(target.replicas), "ready": str(ready), "version": target.version}
                    yield Note("plan_overdue", {"site": site, "model": model}, detail, level="error")


def _unmeasured(fleet: Fleet) -> list[PoolKey]:
    """Pools with a replica of which the fleet file says that its GPUs are unknown (`gpus = 0`)."""
    return [
        (site, *pool)
        for site, declared in fleet.sites.items()
        if declared.actuator is not None
        for pool, names in fleet.pools(site).items()
        if any(declared.instances[name].gpus < 1 for name in names)
    ]


def _counts(targets: tuple[Target, ...]) -> dict[str, int]:
    return {target.version: target.replicas for target in targets}
