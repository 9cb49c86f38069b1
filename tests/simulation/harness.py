"""Several cores, one virtual clock and a bus made of the contract's routes: protocol tests without a network.

Delivers every `Publish` of one core to the cores that the routes name, after a hop, in order within a stream and in any
order across streams; may lose plain messages before capture, and deliver captured ones twice. It knows leases of
office, pauses and restarts. It refuses to know what any core decides: what must hold whatever they decide is in
`Harness.check`.

    fleet = small_fleet()
    harness = Harness(fleet, seed=7, jitter_ms=3)
    world = World(fleet)
    harness.join("agent-b", Agent(fleet, "b", world), "siteagent")
    harness.join("pilot-b", TokenPilot(fleet, "b", replica="pilot-b"), "tokenpilot")
    gateway = Gateway(fleet, "a", world)
    harness.join(gateway.name, gateway, "gateway")
    harness.elect()
    gateway.request(harness.now_ms + 100, "r1", input_tokens=500, output_tokens=20)
    harness.run_for(30_000)
    harness.check()
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tokenfleet import fleet as fleets
from tokenfleet.effects import Core, Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet_schemas import codec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted, Times
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementRequested,
)
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.routes import BY_MESSAGE, subject_of

START_MS = 1_800_000_000_000.0
E = TypeVar("E", bound=Event)

SMALL = """
[fleet]
name = "small"
default_class = "chat"

[sites.a]
zone = "eu"
entry = true
homes = {{ m = ["b", "c"] }}

[sites.b]
zone = "eu"
[sites.c]
zone = "us"
{instances}

[models.m]
versions = ["1", "2"]
default_version = "1"
max_model_len = 131072
tokenizer = "bytes"

[classes.chat]
ttft_ms = 1000
tpot_ms = 100
tier = 0
patience_ms = 10000
share = 4
[classes.document]
ttft_ms = 10000
tier = 1
patience_ms = 60000
share = 2
[classes.batch]
e2e_ms = 300000
tier = 2
patience_ms = 120000
share = 1
sheddable = true

[tenants.acme]
zones = ["*"]
classes = ["chat", "document", "batch"]
[tenants.local]
zones = ["eu"]
classes = ["chat"]

[network.rtt_ms]
a-b = 5
a-c = 80
b-c = 80
"""


def small_fleet(
    instances: dict[str, int] | None = None,
    *,
    prefill_tokens_per_s: float = 10_000,
    token_budget: int = 2048,
    max_sequences: int = 32,
    kv_tokens: int = 200_000,
    policy: str = "",
) -> Fleet:
    """Entry a, existing site b and expansion c of model `m@1`, so many instances each (default two and two).

    Instances are named `<site>-0`, `<site>-1` …; `policy` is TOML for `[policy]`.
    """
    found = "\n".join(
        f"""[sites.{site}.instances.{site}-{n}]
model = "m"
version = "1"
url = "http://127.0.0.1:1/{site}-{n}"
token_budget = {token_budget}
max_sequences = {max_sequences}
kv_tokens = {kv_tokens}
prefill_tokens_per_s = {prefill_tokens_per_s}
"""
        for site, count in (instances or {"b": 2, "c": 2}).items()
        for n in range(count)
    )
    text = SMALL.format(instances=found)
    if policy:
        text += f"\n[policy]\n{policy}\n"
    return fleets.parse(text.encode(), source="small.toml")


def matches(pattern: str, subject: str) -> bool:
    """NATS subject matching: `*` one token, `>` the rest."""
    want, have = pattern.split("."), subject.split(".")
    for n, token in enumerate(want):
        if token == ">":
            return len(have) > n
        if n >= len(have) or token not in ("*", have[n]):
            return False
    return len(want) == len(have)


@dataclass
class Captured:
    """One event as its stream has it."""

    at_ms: float
    stream: str
    sender: str
    event: Event


@dataclass
class Node:
    """One process: a core and what it reads."""

    name: str
    core: Core
    service: str
    filters: tuple[str, ...]
    wake_at_ms: float = float("inf")
    paused: bool = False
    alive: bool = True
    missed: list[Captured] = field(default_factory=list)
    #: per stream, when the last delivery happens: a stream is read in order
    busy_until_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def reads(self, event: Event) -> bool:
        if self.service not in BY_MESSAGE[type(event)].consumers:
            return False
        return not self.filters or any(matches(f, subject_of(event)) for f in self.filters)


class Harness:
    """The bus, the clock and the offices. Same seed, same run."""

    #: a gauge with one of these beginnings counts something that a quiet fleet has none of
    COUNTERS = ("held", "booked", "open", "waiting", "in_flight", "reserved", "queued", "pending")

    def __init__(
        self,
        fleet: Fleet,
        *,
        seed: int = 0,
        hop_ms: float = 1.0,
        jitter_ms: float = 0.0,
        duplicate: float = 0.0,
        loss: float = 0.0,
        start_ms: float = START_MS,
    ) -> None:
        self.fleet = fleet
        self.now_ms = start_ms
        self.hop_ms, self.jitter_ms, self.duplicate, self.loss = hop_ms, jitter_ms, duplicate, loss
        self.nodes: dict[str, Node] = {}
        self.log: list[Captured] = []
        self.notes: Counter[tuple[str, str]] = Counter()
        self.lost: list[Event] = []
        self.other_effects: list[tuple[str, Effect]] = []
        self.owners: dict[str, str] = {}
        self._term = 0
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    # ------------------------------------------------------------------ what a test does

    def join(self, name: str, core: Core, service: str, *filters: str) -> Node:
        """Start a process; without `filters` it reads every message whose route names `service` as a consumer."""
        node = Node(name, core, service, filters)
        self.nodes[name] = node
        if isinstance(core, Gateway):
            core.poke = lambda at_ms: self._perform(node, (WakeAt(at_ms),))
        self.at(self.now_ms, lambda: self._wake(node))
        return node

    def elect(self, name: str | None = None) -> None:
        """Give each vacant scope to the first living process that stands for it (or every scope of `name` to it)."""
        for node in list(self.nodes.values()):
            if not node.alive or node.paused or (name is not None and node.name != name):
                continue
            for scope in getattr(node.core, "scopes", tuple)():
                owner = self.nodes.get(self.owners.get(scope, ""))
                if name is not None or owner is None or not owner.alive or owner.paused:
                    self.take_office(node.name, scope)

    def take_office(self, name: str, scope: str) -> None:
        """`name` wins the lease of `scope`: its mark goes into the stream, with a term above every earlier one.

        The former owner is not told: it learns from the mark, as after a partition.
        """
        self._term += 1
        self.owners[scope] = name
        core: Any = self.nodes[name].core
        self._publish(self.nodes[name], Publish(core.mark(scope, self._term, self.now_ms)))

    def resign(self, name: str, scope: str) -> None:
        """`name` notices that it lost the lease."""
        node: Any = self.nodes[name]
        self._perform(node, node.core.resign(scope, self.now_ms))

    def at(self, when_ms: float, action: Callable[[], None]) -> None:
        """Run `action` at a virtual time."""
        self._order += 1
        heapq.heappush(self._queue, (max(when_ms, self.now_ms), self._order, action))

    def publish(self, event: Event, sender: str = "test") -> None:
        """Put an event on the bus as if `sender` had said it."""
        self._publish(Node(sender, _Silent(), "test", ()), Publish(event))

    def run_for(self, ms: float) -> None:
        """Let virtual time pass."""
        self.run_until(self.now_ms + ms)

    def run_until(self, when_ms: float) -> None:
        while self._queue and self._queue[0][0] <= when_ms:
            at_ms, _, action = heapq.heappop(self._queue)
            self.now_ms = max(self.now_ms, at_ms)
            action()
        self.now_ms = max(self.now_ms, when_ms)

    def pause(self, name: str) -> None:
        """SIGSTOP: the process does nothing, its messages pile up."""
        self.nodes[name].paused = True

    def resume(self, name: str) -> None:
        node = self.nodes[name]
        node.paused = False
        missed, node.missed = node.missed, []
        for captured in missed:
            self._deliver(node, captured)
        if node.wake_at_ms <= self.now_ms:
            self._wake(node)

    def kill(self, name: str) -> None:
        """SIGKILL: gone with its state."""
        self.nodes[name].alive = False

    def restart(self, name: str, core: Core) -> None:
        """A new process under the old name refolds the streams, says nothing meanwhile, then goes on."""
        old = self.nodes[name]
        old.alive = False
        node = Node(name, core, old.service, old.filters)
        self.nodes[name] = node
        for captured in list(self.log):
            if node.reads(captured.event):
                for effect in core.handle(captured.event, captured.at_ms):
                    if isinstance(effect, WakeAt):
                        node.wake_at_ms = min(node.wake_at_ms, effect.at_ms)
        for scope, owner in list(self.owners.items()):
            if owner == name:
                self.take_office(name, scope)
        self.at(self.now_ms, lambda: self._wake(node))

    # ------------------------------------------------------------------ what a test asks

    def said(self, kind: type[E], **fields: Any) -> list[E]:
        """Captured events of a type whose fields have these values (`ask__request_id` reaches inside)."""

        def has(event: Event, path: str, value: Any) -> bool:
            found: Any = event
            for name in path.split("__"):
                found = getattr(found, name)
            return bool(found == value)

        return [
            c.event
            for c in self.log
            if isinstance(c.event, kind) and all(has(c.event, p, v) for p, v in fields.items())
        ]

    def story(self, request_id: str) -> list[str]:
        """What happened to one request, for a failing test's message."""
        found = []
        for c in self.log:
            ask = getattr(c.event, "ask", None)
            if getattr(c.event, "request_id", None) == request_id or (ask is not None and ask.request_id == request_id):
                tag = c.event.__struct_config__.tag
                found.append(f"{c.at_ms - START_MS:>10.1f} {c.sender:<12} {tag} {c.event.id} @{c.event.site}")
        return found

    def check(self) -> None:
        """What must hold after any run that has become quiet. Raises AssertionError with the story."""
        self._check_outcomes()
        self._check_assignments()
        self._check_offices()
        for node in self.nodes.values():
            if not node.alive:
                continue
            for name, values in getattr(node.core, "gauges", dict)().items():
                if name.startswith(self.COUNTERS):
                    left = {labels: value for labels, value in values.items() if value != 0}
                    assert not left, f"{node.name}: gauge {name} is not zero at the end: {left}"

    def _check_outcomes(self) -> None:
        finals: Counter[str] = Counter()
        seen: set[str] = set()
        for event in self.said(OutcomeFinished):
            if event.id not in seen and event.final:
                finals[event.request_id] += 1
            seen.add(event.id)
        asked = {event.ask.request_id for event in self.said(RequestReceived)}
        asked |= {event.ask.request_id for event in self.said(PlacementRequested)}
        for request_id in asked:
            assert finals[request_id] == 1, (
                f"{request_id}: {finals[request_id]} final outcomes",
                *self.story(request_id),
            )

    def _check_assignments(self) -> None:
        dispatched: Counter[tuple[str, int]] = Counter()
        started: set[str] = set()
        for event in self.said(OutcomeStarted):
            if event.id not in started:
                started.add(event.id)
                dispatched[event.request_id, event.attempt] += 1
        for (request_id, attempt), times in dispatched.items():
            assert times == 1, (
                f"{request_id}: attempt {attempt} was dispatched {times} times",
                *self.story(request_id),
            )
        for assigned in self.said(PlacementAssigned):
            denial = self.fleet.site_denial(assigned.tenant, assigned.model, assigned.site)
            assert not denial, (f"{assigned.request_id} assigned at {assigned.site}: {denial}",)
            owner = self.fleet.instance_site(assigned.instance)
            assert owner == assigned.site, (assigned.instance, owner, assigned.site)

    def _check_offices(self) -> None:
        """The mark of a new owner carries a higher term than every earlier mark of its scope."""
        marks: dict[str, int] = {}
        for captured in self.log:
            scope = getattr(captured.event, "scope", None)
            if scope is not None:
                assert captured.event.term > marks.get(scope, -1), f"term of {scope} did not rise"
                marks[scope] = captured.event.term

    # ------------------------------------------------------------------ how it works

    def _publish(self, sender: Node, effect: Publish) -> None:
        event = effect.event
        decoded = codec.decode(codec.encode(event))
        assert decoded == event, f"{sender.name} says what does not survive the wire: {event}"
        if not effect.durable and self.loss and self._random.random() < self.loss:
            self.lost.append(event)
            return
        route = BY_MESSAGE[type(event)]
        captured = Captured(self.now_ms + self.hop_ms / 2, route.stream or route.prefix, sender.name, event)
        self.at(captured.at_ms, lambda: self._capture(captured))

    def _capture(self, captured: Captured) -> None:
        self.log.append(captured)
        copies = 2 if self.duplicate and self._random.random() < self.duplicate else 1
        for node in self.nodes.values():
            if not node.alive or not node.reads(captured.event):
                continue
            for _ in range(copies):
                due = self.now_ms + self.hop_ms / 2 + self._random.random() * self.jitter_ms
                due = max(due, node.busy_until_ms[captured.stream])
                node.busy_until_ms[captured.stream] = due
                self.at(due, lambda node=node: self._deliver(node, captured))  # type: ignore[misc] # default binds

    def _deliver(self, node: Node, captured: Captured) -> None:
        if not node.alive:
            return
        if node.paused:
            node.missed.append(captured)
            return
        self._perform(node, node.core.handle(captured.event, self.now_ms))

    def _wake(self, node: Node) -> None:
        if not node.alive or node.paused:
            return
        node.wake_at_ms = float("inf")
        self._perform(node, node.core.wake(self.now_ms))

    def _perform(self, node: Node, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self._publish(node, effect)
            elif isinstance(effect, WakeAt):
                if effect.at_ms < node.wake_at_ms:
                    node.wake_at_ms = effect.at_ms
                    self.at(effect.at_ms, lambda: self._due(node))
            elif isinstance(effect, Note):
                self.notes[node.name, effect.name] += 1
            else:
                self.other_effects.append((node.name, effect))

    def _due(self, node: Node) -> None:
        if node.wake_at_ms <= self.now_ms:
            self._wake(node)


class _Silent:
    """A sender that hears nothing."""

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        return ()

    def wake(self, now_ms: float) -> Iterable[Effect]:
        return ()


# ---------------------------------------------------------------------- the world around the control plane


@dataclass
class Engine:
    """First come, first served prefill at one rate; decode at one pace. Faults on command."""

    prefill_tokens_per_s: float
    tpot_ms: float = 20.0
    free_at_ms: float = 0.0
    #: `refuse`: fails at once; `hang`: never answers; empty: serves
    fault: str = ""
    incarnation: str = "1"
    ready: bool = True
    running: set[str] = field(default_factory=set)
    served: Counter[str] = field(default_factory=Counter)


class World:
    """All engines of a fleet, as gateways and agents meet them."""

    def __init__(self, fleet: Fleet, *, tpot_ms: float = 20.0) -> None:
        self.engines = {
            name: Engine(instance.prefill_tokens_per_s or 10_000.0, tpot_ms)
            for site in fleet.sites.values()
            for name, instance in site.instances.items()
        }


class Agent:
    """Reports every declared instance of a site, once per second."""

    def __init__(self, fleet: Fleet, site: str, world: World, *, every_ms: float = 1000.0) -> None:
        self.fleet, self.site, self.world, self.every_ms = fleet, site, world, every_ms
        self.revision = 0
        self.next_ms = 0.0

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        yield from ()

    def wake(self, now_ms: float) -> Iterator[Effect]:
        if now_ms >= self.next_ms:
            self.revision += 1
            self.next_ms = now_ms + self.every_ms
            for name in self.fleet.sites[self.site].instances:
                yield Publish(report(self.fleet, name, self.world.engines[name], self.revision, now_ms))
        yield WakeAt(self.next_ms)


def report(fleet: Fleet, name: str, engine: Engine, revision: int, now_ms: float) -> CapacityReported:
    """What a site agent says about one instance."""
    site = fleet.instance_site(name)
    assert site is not None
    declared = fleet.sites[site].instances[name]
    return CapacityReported(
        id=f"{name}:{engine.incarnation}:{revision}",
        site=site,
        zone=fleet.sites[site].zone,
        time_unix_ms=int(now_ms),
        instance=name,
        incarnation=engine.incarnation,
        revision=revision,
        model=declared.model,
        version=declared.version,
        ready=engine.ready,
        reason="" if engine.ready else "unhealthy",
        endpoint_url=declared.url,
        routable_from=declared.routable_from,
        max_model_len=fleet.models[declared.model].max_model_len,
        running=len(engine.running),
        waiting=0,
        kv_tokens_total=declared.kv_tokens or None,
        kv_usage=0.0,
        token_budget=declared.token_budget,
        max_sequences=declared.max_sequences,
        prefill_tokens_per_s=engine.prefill_tokens_per_s,
    )


@dataclass
class Open:
    """One request of a scripted gateway."""

    ask: Ask
    at_ms: float
    output_tokens: int
    attempt: int = 1
    revision: int = 0
    asked_at_ms: float = 0.0
    phase: str = "waiting"
    assigned: PlacementAssigned | None = None
    first_ms: float = float("inf")
    end_ms: float = float("inf")
    started: bool = False
    excluded: tuple[str, ...] = ()
    ttft_ms: float | None = None


class Gateway:
    """A scripted gateway: submits, dispatches once per attempt, declines the rest, leases, retries before first token.

    `direct` asks the TokenPilot of that site itself (no SLOMax, no FleetMind); `closed` keeps what came of requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        site: str,
        world: World,
        *,
        name: str = "",
        incarnation: str = "1",
        direct: str = "",
        resubmit_ms: float = 1500.0,
        silent_ms: float = 20_000.0,
        max_attempts: int = 3,
    ) -> None:
        self.fleet, self.site, self.world = fleet, site, world
        self.name = name or f"gateway-{site}"
        self.incarnation, self.direct = incarnation, direct
        self.resubmit_ms, self.silent_ms, self.max_attempts = resubmit_ms, silent_ms, max_attempts
        self.script: list[tuple[float, int, str, Open | None]] = []
        self.open: dict[str, Open] = {}
        self.closed: dict[str, OutcomeFinished] = {}
        self._order = 0
        self.lease_revision = 0
        self.next_lease_ms = 0.0
        #: set by the harness: a script may grow while it runs
        self.poke: Callable[[float], None] = lambda at_ms: None

    # ---- script

    def request(
        self,
        at_ms: float,
        request_id: str,
        *,
        input_tokens: int = 1000,
        output_tokens: int = 10,
        tenant: str = "acme",
        service_class: str = "chat",
        **changes: Any,
    ) -> Ask:
        """A client asks at this time; `changes` are further fields of the Ask."""
        cls = self.fleet.classes[service_class]
        model, version = self.fleet.resolve_model(changes.pop("model_asked", "m")) or ("m", "1")
        ask = Ask(
            request_id=request_id,
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            entry=self.site,
            entry_zone=self.fleet.sites[self.site].zone,
            tenant=tenant,
            service_class=service_class,
            model_asked=model,
            model=model,
            version=version,
            input_tokens=input_tokens,
            output_budget_tokens=max(output_tokens, 1),
            received_unix_ms=int(at_ms),
            ttft_ms=cls.ttft_ms,
            tpot_ms=cls.tpot_ms,
            e2e_ms=cls.e2e_ms,
            patience_ms=cls.patience_ms,
        )
        ask = msgspec.structs.replace(ask, **changes)
        self._order += 1
        self.script.append((at_ms, self._order, request_id, Open(ask, at_ms, output_tokens)))
        self.script.sort(key=lambda entry: entry[:2])
        self.poke(at_ms)
        return ask

    def cancel(self, at_ms: float, request_id: str) -> None:
        """The client leaves at this time."""
        self._order += 1
        self.script.append((at_ms, self._order, request_id, None))
        self.script.sort(key=lambda entry: entry[:2])
        self.poke(at_ms)

    # ---- core

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        if isinstance(message, PlacementAssigned) and message.gateway == self.name:
            yield from self._assigned(message, now_ms)
        elif isinstance(message, PlacementHeld) and message.gateway == self.name:
            one = self.open.get(message.request_id)
            if one is None or message.attempt != one.attempt:
                yield self._decline(message, "closed", now_ms)
            elif one.phase == "waiting":
                one.phase = "held"
        elif isinstance(message, PlacementRefused) and message.gateway == self.name:
            one = self.open.get(message.request_id)
            if one is not None and one.phase in ("waiting", "held") and message.attempt == one.attempt:
                yield from self._finish(one, "refused", now_ms, reason=message.reason, status=message.status)
        yield from self._next()

    def wake(self, now_ms: float) -> Iterator[Effect]:
        while self.script and self.script[0][0] <= now_ms:
            _, _, request_id, one = self.script.pop(0)
            if one is None:
                if request_id in self.open:
                    yield from self._finish(self.open[request_id], "cancelled", now_ms)
            else:
                self.open[request_id] = one
                yield from self._ask(one, now_ms)
        for one in list(self.open.values()):
            yield from self._progress(one, now_ms)
        if now_ms >= self.next_lease_ms:
            self.lease_revision += 1
            self.next_lease_ms = now_ms + 2000.0
            yield Publish(self._lease(now_ms))
        yield from self._next()

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        return {"open": {(): float(len(self.open))}}

    # ---- inside

    def _next(self) -> Iterator[Effect]:
        wishes = [self.next_lease_ms]
        if self.script:
            wishes.append(self.script[0][0])
        for one in self.open.values():
            if one.phase == "waiting":
                wishes.append(one.asked_at_ms + self.resubmit_ms)
            if one.phase in ("waiting", "held"):
                wishes.append(one.at_ms + one.ask.patience_ms + self.silent_ms)
            elif one.started:
                wishes.append(one.end_ms)
            else:
                wishes.append(min(one.first_ms, one.asked_at_ms + self.silent_ms))
        yield WakeAt(min(wishes))

    def _ask(self, one: Open, now_ms: float) -> Iterator[Effect]:
        one.asked_at_ms = now_ms
        common: dict[str, Any] = {
            "ask": one.ask,
            "attempt": one.attempt,
            "revision": one.revision,
            "elapsed_ms": now_ms - one.at_ms,
            "time_unix_ms": int(now_ms),
        }
        key = f"{one.ask.request_id}:{{}}:{one.attempt}:{one.revision}"
        if self.direct:
            yield Publish(
                PlacementRequested(id=key.format("requested"), site=self.direct, excluded=one.excluded, **common)
            )
        else:
            yield Publish(RequestReceived(id=key.format("received"), site=self.site, **common))

    def _assigned(self, message: PlacementAssigned, now_ms: float) -> Iterator[Effect]:
        one = self.open.get(message.request_id)
        if one is not None and one.assigned is not None and one.assigned.id == message.id:
            return
        if one is None or one.phase not in ("waiting", "held") or message.attempt != one.attempt:
            yield self._decline(message, "closed" if one is None else "superseded", now_ms)
            return
        one.assigned, one.phase, one.asked_at_ms = message, "dispatched", now_ms
        engine = self.world.engines[message.instance]
        if engine.fault == "refuse":
            one.first_ms = now_ms
        elif engine.fault != "hang":
            uncached = max(1, one.ask.input_tokens - message.prefix_hit_tokens)
            engine.free_at_ms = max(engine.free_at_ms, now_ms) + 1000 * uncached / engine.prefill_tokens_per_s
            one.first_ms = engine.free_at_ms
            one.end_ms = one.first_ms + one.output_tokens * engine.tpot_ms
            engine.running.add(one.ask.request_id)

    def _progress(self, one: Open, now_ms: float) -> Iterator[Effect]:
        if one.phase in ("waiting", "held"):
            if now_ms >= one.at_ms + one.ask.patience_ms + self.silent_ms:
                yield from self._finish(one, "refused", now_ms, reason="unavailable", status=503)
            elif one.phase == "waiting" and now_ms >= one.asked_at_ms + self.resubmit_ms:
                one.revision += 1
                yield from self._ask(one, now_ms)
            return
        assert one.assigned is not None
        engine = self.world.engines[one.assigned.instance]
        if not one.started:
            if engine.fault == "refuse" and now_ms >= one.first_ms:
                yield from self._finish(one, "failed", now_ms, reason="upstream_disconnected", status=502)
                return
            if now_ms >= one.asked_at_ms + self.silent_ms:
                yield from self._finish(one, "timed_out", now_ms, reason="first_byte", status=504)
                return
            if now_ms >= one.first_ms:
                one.started, one.phase, one.ttft_ms = True, "streaming", now_ms - one.at_ms
                yield Publish(self._started(one, one.assigned, now_ms))
        if one.started and now_ms >= one.end_ms:
            engine.served[one.ask.request_id] += 1
            yield from self._finish(one, "completed", now_ms, status=200)

    def _started(self, one: Open, assigned: PlacementAssigned, now_ms: float) -> OutcomeStarted:
        return OutcomeStarted(
            id=f"{one.ask.request_id}:started:{one.attempt}",
            cause=assigned.id,
            site=self.site,
            time_unix_ms=int(now_ms),
            request_id=one.ask.request_id,
            attempt=one.attempt,
            gateway=self.name,
            tenant=one.ask.tenant,
            service_class=one.ask.service_class,
            model=one.ask.model,
            version=one.ask.version,
            served_site=assigned.site,
            instance=assigned.instance,
            booking=assigned.id,
            ttft_ms=one.ttft_ms or 0.0,
            engine_ttft_ms=now_ms - one.asked_at_ms,
            predicted_ttft_ms=assigned.predicted_ttft_ms,
            ttft_objective_ms=one.ask.ttft_ms,
            input_tokens=one.ask.input_tokens,
            kv_tokens=assigned.work.kv_tokens,
        )

    def _finish(self, one: Open, outcome: Any, now_ms: float, *, reason: str = "", status: int = 0) -> Iterator[Effect]:
        ask, assigned = one.ask, one.assigned
        again = outcome in ("failed", "timed_out") and not one.started and one.attempt < self.max_attempts
        if assigned is not None:
            self.world.engines[assigned.instance].running.discard(ask.request_id)
            if again:
                one.excluded = (*one.excluded, assigned.instance)
        finished = OutcomeFinished(
            id=f"{ask.request_id}:finished:{one.attempt if assigned else 0}",
            cause=assigned.id if assigned else "",
            site=self.site,
            time_unix_ms=int(now_ms),
            request_id=ask.request_id,
            attempt=one.attempt if assigned else 0,
            final=not again,
            outcome=outcome,
            reason=reason,
            status=status,
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            tenant=ask.tenant,
            service_class=ask.service_class,
            model_asked=ask.model_asked,
            model=ask.model,
            version=ask.version,
            served_site=assigned.site if assigned else "",
            instance=assigned.instance if assigned else "",
            booking=assigned.id if assigned else "",
            input_tokens=ask.input_tokens,
            output_tokens=one.output_tokens if outcome == "completed" else 0,
            received_unix_ms=ask.received_unix_ms,
            times=Times(ttft_ms=one.ttft_ms, e2e_ms=now_ms - one.at_ms),
            predicted_ttft_ms=assigned.predicted_ttft_ms if assigned else None,
            ttft_objective_ms=ask.ttft_ms,
            tpot_objective_ms=ask.tpot_ms,
            e2e_objective_ms=ask.e2e_ms,
            ask=ask if again else None,
            excluded=one.excluded if again else (),
        )
        yield Publish(finished, durable=True)
        if again:
            one.attempt, one.phase, one.assigned = one.attempt + 1, "waiting", None
            one.first_ms = one.end_ms = float("inf")
            one.asked_at_ms = now_ms
            if self.direct:
                yield from self._ask(one, now_ms)
        else:
            self.closed[ask.request_id] = finished
            del self.open[ask.request_id]

    def _decline(self, message: PlacementAssigned | PlacementHeld, reason: str, now_ms: float) -> Effect:
        return Publish(
            PlacementDeclined(
                id=f"{message.id}:declined",
                cause=message.id,
                site=message.site,
                time_unix_ms=int(now_ms),
                request_id=message.request_id,
                gateway=self.name,
                model=message.model,
                version=message.version,
                attempt=message.attempt,
                revision=message.revision,
                declined=message.id,
                instance=message.instance if isinstance(message, PlacementAssigned) else "",
                reason=reason,
            )
        )

    def _lease(self, now_ms: float) -> GatewayLeased:
        def phase(one: Open) -> Any:
            return one.phase

        return GatewayLeased(
            id=f"{self.name}:{self.incarnation}:{self.lease_revision}",
            site=self.site,
            time_unix_ms=int(now_ms),
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            revision=self.lease_revision,
            open=tuple(
                OpenRequest(
                    request_id=one.ask.request_id,
                    attempt=one.attempt,
                    phase=phase(one),
                    booking=one.assigned.id if one.assigned else "",
                )
                for one in self.open.values()
            ),
        )
