"""One run: a fleet's services, gateways, engines and agents on one virtual clock, from first arrival to last outcome.

Decides how the parts are wired and what a client sees; every scheduling decision is a core's. The cores are the live
ones, one replica each: a TokenPilot per site with instances, SLOMax, FleetMind and the accountant at the hub, a
gateway per entry. Offices are theirs from the beginning; elections are the runtime's affair and not simulated.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tokenfleet.accountant.core import Accountant
from tokenfleet.effects import Effect, Publish
from tokenfleet.engine_model import PROFILES, Sequence
from tokenfleet.fleet import Fleet, Instance
from tokenfleet.gateway.core import Gateway
from tokenfleet.gateway.state import Dispatch, End, Interrupt, Refuse
from tokenfleet.replay.records import Outcome, Record
from tokenfleet.simulator.arrivals import Arrival, draw
from tokenfleet.simulator.bus import Bus, Node
from tokenfleet.simulator.errors import InvariantError, SimulationError
from tokenfleet.simulator.faults import plan_faults
from tokenfleet.simulator.instances import SimulatedInstance, Work
from tokenfleet.simulator.kv import Answering, Teller, summaries
from tokenfleet.simulator.loop import START_MS, ZERO_MS, Loop
from tokenfleet.simulator.policies import Choice
from tokenfleet.simulator.scaling import Scaling, scaled, solver
from tokenfleet.simulator.scenario import Scenario
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.request import Ask

#: virtual time after the last outcome, for the last messages to arrive
SETTLE_MS = 2_500.0
#: of a prompt as it travels, and of an answer as it is streamed (one chunk of an SSE stream per token)
BYTES_PER_TOKEN = 4
STREAMED_BYTES_PER_TOKEN = 200
#: how often a run looks whether it is over, and tells its progress
LOOK_MS = 1_000.0
#: a gauge with one of these beginnings counts something of which a quiet fleet has none
COUNTERS = ("held", "booked", "open", "running", "waiting", "in_flight", "reserved", "queued", "pending")
_OUTCOMES: dict[str, Outcome] = {"completed": "completed", "refused": "refused", "cancelled": "cancelled"}


class Attempt:
    """One dispatched attempt: the connection between a gateway and an instance."""

    __slots__ = ("first_byte_ms", "instance", "last_token_ms", "live", "way_ms", "work_id")

    def __init__(self, live: "Live", instance: SimulatedInstance, work_id: str, way_ms: float) -> None:
        self.live, self.instance, self.work_id, self.way_ms = live, instance, work_id, way_ms
        self.first_byte_ms: float | None = None

    def _later(self, action: Callable[..., None], *args: Any) -> None:
        loop = self.live.entry.world.loop
        loop.at(loop.now_ms + self.way_ms, action, *args)

    def first_token(self) -> None:
        self._later(self.live.entry.first_token, self)

    def finished(self, sequence: Sequence) -> None:
        self._later(self.live.entry.completed, self, sequence.generated, sequence.cached_tokens)

    def broken(self, reason: str, tokens: int) -> None:
        self._later(self.live.entry.broken, self, reason, tokens)

    def rejected(self) -> None:
        self._later(self.live.entry.rejected, self)


class Live:
    """One open request at its gateway."""

    __slots__ = ("arrival", "attempt", "entry", "record")

    def __init__(self, entry: "Entry", arrival: Arrival, record: Record) -> None:
        self.entry, self.arrival, self.record = entry, arrival, record
        self.attempt: Attempt | None = None


class Entry:
    """A gateway: the real core, with clients on one side and modelled connections on the other."""

    def __init__(self, world: "World", site: str, incarnation: int) -> None:
        self.world, self.site = world, site
        self.name = f"gateway-{site}"
        self.incarnation = str(incarnation)
        self.core = Gateway(world.fleet, site=site, name=self.name, incarnation=self.incarnation)
        self.node = Node(self.name, "gateway", site, self.core, world.bus, self._perform)
        self.node.on_publish = self._published
        self.live: dict[str, Live] = {}
        self.up = True
        world.bus.join(self.node)
        self._lease()

    # ------------------------------------------------------------------ clients

    def open(self, arrival: Arrival) -> None:
        """A client sends a request."""
        world, now_ms = self.world, self.world.loop.now_ms
        record = world.records[arrival.index]
        record.planned_ms = record.sent_ms = now_ms - world.zero_ms
        if not self.up:
            world.close(record, "failed", now_ms, error_code="connection")
            return
        ask = self._ask(arrival, now_ms)
        record.request_id = ask.request_id
        self.live[ask.request_id] = Live(self, arrival, record)
        if self.core.full:
            self.node.perform(self.core.refused(ask, "gateway_full", now_ms, received_ms=now_ms))
            return
        self.node.perform(self.core.open(ask, now_ms))
        world.give_ups.at(now_ms + world.scenario.info.client_timeout_s * 1000.0, self._give_up, ask.request_id)

    def _ask(self, arrival: Arrival, now_ms: float) -> Ask:
        fleet = self.world.fleet
        resolved = fleet.resolve_model(arrival.model)
        model, version = resolved if resolved is not None else (arrival.model, "")
        cls = fleet.classes[arrival.service_class]
        packed, stride = arrival.digests()
        ends = [limit for limit in (cls.e2e_ms, arrival.deadline_ms) if limit is not None]
        return Ask(
            request_id=arrival.request_id or f"{self.world.seed}-{arrival.index}",
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            entry=self.site,
            entry_zone=fleet.sites[self.site].zone,
            tenant=arrival.tenant,
            service_class=arrival.service_class,
            task=arrival.task,
            model_asked=arrival.model,
            model=model,
            version=version,
            stream=True,
            input_tokens=arrival.input_tokens,
            output_budget_tokens=arrival.output_budget_tokens,
            request_bytes=BYTES_PER_TOKEN * arrival.input_tokens,
            prefix=packed,
            prefix_stride=stride,
            received_unix_ms=int(now_ms),
            ttft_ms=cls.ttft_ms,
            tpot_ms=cls.tpot_ms,
            e2e_ms=min(ends) if ends else None,
            patience_ms=cls.patience_ms,
        )

    def _give_up(self, request_id: str) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        now_ms = self.world.loop.now_ms
        if live.attempt is None:
            self.node.perform(self.core.left(request_id, now_ms))
        else:
            self._end(live.attempt, "cancelled", "client_left", self._hang_up(live.attempt))

    # ------------------------------------------------------------------ the core's effects

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Dispatch):
            self._dispatch(effect)
        elif isinstance(effect, Interrupt):
            live = self.live.get(effect.request_id)
            if live is not None and live.attempt is not None:
                tokens = self._hang_up(live.attempt)
                kind = "timed_out" if effect.reason == "first_token_timeout" else "failed"
                self._end(live.attempt, kind, effect.reason, tokens)
        elif not isinstance(effect, Refuse):  # the client hears what the final outcome says
            raise InvariantError([f"{self.name}: nobody performs {type(effect).__name__}"])

    def _dispatch(self, effect: Dispatch) -> None:
        world, live = self.world, self.live[effect.request_id]
        instance = world.instances[effect.assigned.instance]
        way_ms = world.bus.one_way_ms(self.site, instance.site)
        attempt = Attempt(live, instance, f"{effect.request_id}#{effect.attempt}", way_ms)
        live.attempt = attempt
        arrival = live.arrival
        work = Work(
            id=attempt.work_id,
            prompt_tokens=arrival.input_tokens,
            output_tokens=arrival.output_tokens,
            block_names=arrival.block_names(instance.profile.block_tokens),
            priority=world.fleet.classes[arrival.service_class].tier,
        )
        world.traffic[self.site, instance.site, arrival.tenant] += BYTES_PER_TOKEN * arrival.input_tokens
        world.loop.at(world.loop.now_ms + way_ms, self._send, attempt, work)

    def _send(self, attempt: Attempt, work: Work) -> None:
        if attempt.live.attempt is attempt and self._knows(attempt):
            attempt.instance.submit(work, attempt)

    def _knows(self, attempt: Attempt) -> bool:
        """Whether the gateway still follows it: not ended, not repeated, not of a gateway that died."""
        live = attempt.live
        return live.attempt is attempt and self.live.get(live.record.request_id) is live

    def _hang_up(self, attempt: Attempt) -> int:
        return attempt.instance.cancel(attempt.work_id)

    # ------------------------------------------------------------------ what engines say, at the gateway's time

    def first_token(self, attempt: Attempt) -> None:
        if not self._knows(attempt):
            return
        now_ms = self.world.loop.now_ms
        attempt.first_byte_ms = now_ms
        attempt.live.record.first_token_ms = now_ms - self.world.zero_ms
        self.node.perform(self.core.started(attempt.live.record.request_id, now_ms))

    def completed(self, attempt: Attempt, tokens: int, cached_tokens: int) -> None:
        if self._knows(attempt):
            self._end(attempt, "completed", "", tokens, cached_tokens=max(0, cached_tokens))

    def broken(self, attempt: Attempt, reason: str, tokens: int) -> None:
        if self._knows(attempt):
            self._end(attempt, "failed" if attempt.first_byte_ms is None else "failed_midstream", reason, tokens)

    def rejected(self, attempt: Attempt) -> None:
        if self._knows(attempt):
            self._end(attempt, "rejected", "context_length", 0, status=400)

    def _end(
        self,
        attempt: Attempt,
        outcome: Any,
        reason: str,
        tokens: int,
        *,
        cached_tokens: int | None = None,
        status: int = 0,
    ) -> None:
        live, now_ms = attempt.live, self.world.loop.now_ms
        way = (self.site, attempt.instance.site, live.arrival.tenant)
        self.world.traffic[way] += STREAMED_BYTES_PER_TOKEN * tokens
        live.attempt = None
        if outcome == "completed":
            status = 200
            live.record.last_token_ms = now_ms - self.world.zero_ms
        end = End(
            outcome=outcome,
            reason=reason,
            status=status,
            output_tokens=tokens if attempt.first_byte_ms is not None else 0,
            input_tokens=live.arrival.input_tokens,
            cached_tokens=cached_tokens,
            usage_seen=outcome == "completed",
            finish_reason="stop" if outcome == "completed" else "",
            model_served=live.arrival.model,
            first_byte_ms=attempt.first_byte_ms,
            last_token_ms=now_ms if attempt.first_byte_ms is not None else None,
        )
        self.node.perform(self.core.ended(live.record.request_id, end, now_ms))

    def _published(self, event: Event) -> None:
        """The gateway's word on how a request ended is what its client saw."""
        if isinstance(event, OutcomeFinished) and event.final:
            live = self.live.pop(event.request_id)
            record = live.record
            record.output_tokens = event.output_tokens
            record.prompt_tokens, record.cached_tokens = event.input_tokens, event.cached_tokens
            record.site, record.attempts = event.served_site, event.attempt
            record.finish_reason = event.finish_reason
            if event.times.ttft_ms is None:
                record.first_token_ms = None
            outcome = _OUTCOMES.get(event.outcome, "failed")
            now_ms = self.world.loop.now_ms
            self.world.close(record, outcome, now_ms, status=event.status or None, error_code=event.reason)

    # ------------------------------------------------------------------ life

    def _lease(self) -> None:
        world = self.world
        if not self.up:
            return
        if self.node.missed is None:
            self.node.perform([Publish(self.core.lease(world.loop.now_ms))])
        world.loop.at(world.loop.now_ms + world.scenario.gateways.lease_s * 1000.0, self._lease)

    def die(self) -> None:
        """Killed with everything it had open: its clients see the connection break."""
        world = self.world
        self.up = False
        world.bus.leave(self.node)
        for live in list(self.live.values()):
            if live.attempt is not None:
                live.record.output_tokens = self._hang_up(live.attempt)
            world.orphans.add(live.record.request_id)
            world.close(live.record, "failed", world.loop.now_ms, error_code="connection")
        self.live.clear()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    policy: str
    seed: int
    records: list[Record]
    #: virtual time from the first arrival's clock zero to the end
    ended_ms: float
    events: int
    messages: dict[str, int]
    notes: dict[str, int]
    #: engines' hit tokens over prompt tokens of first admissions
    prefix_hit: float


class World:
    """Everything of one run; `run` lets it happen."""

    def __init__(
        self,
        scenario: Scenario,
        choice: Choice,
        seed: int,
        *,
        arrivals: list[Arrival] | None = None,
        on_progress: Callable[[int, int, float], None] | None = None,
        probe: Callable[["World"], None] | None = None,
    ) -> None:
        self.scenario, self.choice, self.seed = scenario, choice, seed
        self.fleet: Fleet = choice.applied(scenario.fleet)
        if scenario.scaling.kind != "none":
            self.fleet = scaled(self.fleet, scenario.scaling)
        self.loop = Loop()
        #: when clients lose patience
        self.give_ups = self.loop.row()
        self.zero_ms = ZERO_MS
        self.bus = Bus(self.loop, self.fleet, scenario.bus, scenario.hub, seed=seed)
        self.arrivals = draw(scenario, seed) if arrivals is None else arrivals
        self.records = [self._record(arrival) for arrival in self.arrivals]
        #: requests whose gateway died: the accountant closes them
        self.orphans: set[str] = set()
        #: entry, site that served, tenant → bytes of bodies and answers between them
        self.traffic: Counter[tuple[str, str, str]] = Counter()
        self._open = len(self.arrivals)
        self._on_progress = on_progress
        #: called every virtual second, for tests
        self._probe = probe
        self.instances = {
            name: self._instance(site, name, declared)
            for site, one in self.fleet.sites.items()
            for name, declared in one.instances.items()
        }
        #: what each site's agent looks after
        self._agents: dict[str, list[SimulatedInstance]] = {}
        #: what says which prefixes their instances hold, by site
        self._tellers: dict[str, dict[str, Teller]] = {site: {} for site in self.fleet.sites}
        self._finals: dict[str, int] = {}
        self._join_services()
        self.entries = {name: Entry(self, name, 1) for name, site in self.fleet.sites.items() if site.entry}
        #: who starts and stops replicas, if anybody does
        self.scaling = Scaling(self) if scenario.scaling.kind != "none" else None
        self._start_agents()
        row = self.loop.row()
        for arrival in self.arrivals:
            if not arrival.follows:
                row.at(self.zero_ms + arrival.at_ms, self._arrive, arrival)
        plan_faults(self)
        if choice.frozen_s is not None:
            self.loop.at(self.zero_ms + 1000.0 * choice.frozen_s, self._freeze)

    # ------------------------------------------------------------------ making

    def _join_services(self) -> None:
        fleet, hub = self.fleet, self.scenario.hub
        cores: list[tuple[str, str, str, Any]] = [
            ("slomax", "slomax", hub, self.choice.slomax(fleet, "slomax")),
            ("fleetmind", "fleetmind", hub, self.choice.fleetmind(fleet, "fleetmind")),
        ]
        for site, one in fleet.sites.items():
            if one.instances:
                name = f"tokenpilot@{site}"
                pilot = self.choice.tokenpilot(fleet, site, name)
                pilot.exact.asks = self.scenario.agents.kv_events
                cores.append((name, "tokenpilot", site, pilot))
        accountant = Accountant(fleet)
        accountant.take_office(1)
        nodes = [
            Node(name, service, site, core, self.bus, solver(self, name) if service == "fleetmind" else None)
            for name, service, site, core in cores
        ]
        for node in [*nodes, Node("accountant", "accountant", hub, accountant, self.bus)]:
            self.bus.join(node)
            self.loop.at(START_MS, node.perform, _waking(node, START_MS))
        self.loop.at(START_MS, self._take_offices, nodes)

    def _take_offices(self, nodes: list[Node]) -> None:
        for node in nodes:
            core: Any = node.core
            for scope in core.scopes():
                self.bus.publish(core.mark(scope, 1, self.loop.now_ms), node.site, durable=True)

    def _instance(self, site: str, name: str, declared: Instance) -> SimulatedInstance:
        scenario = self.scenario
        profiles = {**PROFILES, **scenario.profiles}
        made = SimulatedInstance(self.loop, self.fleet, site, name, declared, scenario.engines, profiles)
        made.prefill_tokens_per_s *= scenario.agents.rate_error
        made.says_rate = scenario.agents.declare_rates or declared.prefill_tokens_per_s > 0
        return made

    def _freeze(self) -> None:
        """As a reload of the fleet file does it: nothing is learned from outcomes any more."""
        self.fleet = msgspec.structs.replace(
            self.fleet, policy=msgspec.structs.replace(self.fleet.policy, feedback="frozen")
        )
        for node in list(self.bus.nodes.values()):
            reconfigure = getattr(node.core, "reconfigure", None)
            if reconfigure is not None:
                node.perform(reconfigure(self.fleet, self.loop.now_ms))

    def _start_agents(self) -> None:
        for instance in self.instances.values():
            self._agents.setdefault(instance.site, []).append(instance)
        for number, site in enumerate(sorted(self._agents)):
            # Agents of different sites are not in step with each other.
            self.loop.at(START_MS + 100.0 + 37.0 * number, self._sample, site)
        if self.scenario.agents.kv_events:
            for site, tellers in self._tellers.items():
                self.bus.join(Node(f"siteagent@{site}", "siteagent", site, Answering(site, tellers), self.bus))
            for instance in self.instances.values():
                self._tell_kv(instance)
            if self.scenario.agents.kv_summary_s > 0:
                for number, site in enumerate(sorted(self._tellers)):
                    self.loop.at(START_MS + 150.0 + 37.0 * number, self._summarise, site, 1)

    def _summarise(self, site: str, sequence: int) -> None:
        """A site agent's word on what its instances hold, model by model, as late as its other words on caches."""
        agents, now_ms = self.scenario.agents, self.loop.now_ms
        for event in summaries(site, self._tellers[site].values(), sequence, now_ms):
            self.loop.at(now_ms + agents.kv_late_ms, self.bus.publish, event, site)
        self.loop.at(now_ms + agents.kv_summary_s * 1000.0, self._summarise, site, sequence + 1)

    def _tell_kv(self, instance: SimulatedInstance) -> None:
        def say(event: KvChanged) -> None:
            if instance.silent_until_ms <= self.loop.now_ms:  # else the reader finds a gap, and asks
                self.loop.at(self.loop.now_ms + self.scenario.agents.kv_late_ms, self.bus.publish, event, instance.site)

        model, block_tokens = instance.declared.model, instance.profile.block_tokens
        teller = Teller(instance.site, instance.name, model, block_tokens, say)
        self._tellers[instance.site][instance.name] = teller
        instance.tell(teller)

    def _sample(self, site: str) -> None:
        now_ms, late_ms, instances = self.loop.now_ms, self.scenario.agents.late_ms, self._agents[site]
        for one in instances:
            if one.draining and not one.open:
                one.stop()
        reports = [one.report(now_ms, late_ms) for one in instances if one.silent_until_ms <= now_ms]
        self._agents[site] = [one for one in instances if not one.stopped]
        if self.scaling is not None:
            reports = self.scaling.reports(site, reports, now_ms, late_ms)
        self.loop.at(now_ms + late_ms, self._say_capacity, site, reports)
        self.loop.at(now_ms + self.scenario.agents.every_s * 1000.0, self._sample, site)

    def _say_capacity(self, site: str, reports: list[CapacityReported]) -> None:
        self.bus.publish_together(reports, site)

    # ------------------------------------------------------------------ replicas

    def add_instance(self, site: str, name: str, declared: Instance, *, cold_start_ms: float | None = None) -> None:
        """Start a replica that the fleet file does not declare; it serves after its cold start (None: its profile's).

        Raises `SimulationError` where the name is taken, or where the site declares nothing of its model version:
        no TokenPilot would look after it.
        """
        if name in self.instances:
            raise SimulationError(f"there is an instance {name!r} already")
        if (declared.model, declared.version) not in self.fleet.pools(site):
            raise SimulationError(f"site {site!r} has no pool of {declared.model}@{declared.version}")
        self.instances[name] = self._instance(site, name, declared)
        self.bus.place_instance(name, site)
        if self.scenario.agents.kv_events:
            self._tell_kv(self.instances[name])
        self._start(self.instances[name], cold_start_ms)

    def drain_instance(self, name: str) -> None:
        """Take a replica out: nothing new goes there, and when it is empty its accelerators are free."""
        self.instances[name].drain()

    def start_instance(self, name: str, *, cold_start_ms: float | None = None) -> None:
        """Start a replica again that was stopped; one that still drains goes on at once, without a cold start."""
        instance = self.instances[name]
        if instance.stopped:
            self._start(instance, cold_start_ms)
        else:
            instance.draining = False

    def stop_instance(self, name: str) -> None:
        """Take a replica away at once, with all it had open; before the first arrival: it never was there."""
        self.instances[name].stop()

    def _start(self, instance: SimulatedInstance, cold_start_ms: float | None) -> None:
        factor = self.scenario.engines.cold_start
        instance.start(instance.profile.cold_start_s * 1000.0 * factor if cold_start_ms is None else cold_start_ms)
        looked_after = self._agents.setdefault(instance.site, [])
        if instance not in looked_after:
            looked_after.append(instance)

    def gpu_hours(self) -> dict[str, float]:
        """What each site's replicas have occupied until now, cold starts included."""
        found = dict.fromkeys(self.fleet.sites, 0.0)
        for instance in self.instances.values():
            found[instance.site] += instance.gpu_ms() / 3_600_000.0
        return found

    def _record(self, arrival: Arrival) -> Record:
        return Record(
            index=arrival.index,
            tenant=arrival.tenant,
            cls=arrival.service_class,
            task=arrival.task,
            model=arrival.model,
            outcome="unfinished",
            input_tokens=arrival.input_tokens,
            stated_output_tokens=arrival.stated_output_tokens,
            deadline_ms=arrival.deadline_ms,
            planned_ms=arrival.at_ms,
            sent_ms=arrival.at_ms,
        )

    # ------------------------------------------------------------------ happening

    def _arrive(self, arrival: Arrival) -> None:
        self.entries[arrival.entry].open(arrival)

    def close(
        self, record: Record, outcome: Outcome, now_ms: float, *, status: int | None = None, error_code: str = ""
    ) -> None:
        """A client has its answer, or knows that it gets none."""
        record.outcome = outcome
        record.ended_ms = now_ms - self.zero_ms
        record.status, record.error_code = status, error_code
        self._finals[record.request_id] = self._finals.get(record.request_id, 0) + 1
        self._open -= 1
        arrival = self.arrivals[record.index]
        if arrival.then is not None:
            self.loop.at(now_ms + arrival.pause_ms, self._arrive, self.arrivals[arrival.then])

    def restart_gateway(self, site: str) -> None:
        """A new process under the old name."""
        self.entries[site] = Entry(self, site, int(self.entries[site].incarnation) + 1)

    def run(self) -> Run:
        """Let it all happen, until everybody has an answer or the drain time is over."""
        last_ms = self.zero_ms + max(arrival.at_ms for arrival in self.arrivals)
        horizon_ms = max(last_ms, self.zero_ms + self.scenario.info.duration_s * 1000.0)
        horizon_ms += self.scenario.info.drain_s * 1000.0
        total = len(self.arrivals)
        while self._open and self.loop.now_ms < horizon_ms:
            self.loop.run_until(min(horizon_ms, self.loop.now_ms + LOOK_MS))
            if self._probe is not None:
                self._probe(self)
            if self._on_progress is not None:
                self._on_progress(total - self._open, total, self.loop.now_ms - self.zero_ms)
        ended_ms = self.loop.now_ms - self.zero_ms
        self.loop.run_until(self.loop.now_ms + SETTLE_MS)
        queries = sum(i.engine.stats().prefix_queries_tokens_total for i in self.instances.values())
        hits = sum(i.engine.stats().prefix_hits_tokens_total for i in self.instances.values())
        return Run(
            policy=self.choice.name,
            seed=self.seed,
            records=self.records,
            ended_ms=ended_ms,
            events=self.loop.ended,
            messages=dict(sorted(self.bus.said.items())),
            notes={" ".join(name): count for name, count in sorted(self.bus.notes.items())},
            prefix_hit=round(hits / queries, 6) if queries else 0.0,
        )

    # ------------------------------------------------------------------ what must hold

    def findings(self) -> list[str]:
        """What does not hold at the end of a run and must, whatever any core decides; empty when all does."""
        found = [f"{rid or 'unsent'}: {n} final outcomes" for rid, n in self._finals.items() if n != 1 and rid]
        for instance in self.instances.values():
            instance.engine.settle(self.loop.now_ms)
            try:
                instance.engine.check()
            except RuntimeError as error:
                found.append(f"{instance.name}: {error}")
        if self._open:
            return [*found, f"{self._open} requests have no outcome"]
        found += [f"{one.name}: {one.open} requests inside" for one in self.instances.values() if one.open]
        for node in self.bus.nodes.values():
            gauges: dict[str, dict[Any, float]] = getattr(node.core, "gauges", dict)()
            for name, values in gauges.items():
                if name.startswith(COUNTERS):
                    left = {str(labels): value for labels, value in values.items() if value}
                    if left:
                        found.append(f"{node.name}: {name} is not zero: {left}")
        return found

    def check(self) -> None:
        """Raise `InvariantError` unless `findings` is empty."""
        found = self.findings()
        if found:
            raise InvariantError(found)


def _waking(node: Node, now_ms: float) -> Iterator[Effect]:
    effects: Iterable[Effect] = node.core.wake(now_ms)
    yield from effects
