"""The bus in memory: every message goes to whom its route names, as late as the network makes it, in stream order.

Decides who hears what and when. It delivers the message objects themselves (they are frozen), so nothing is encoded.
A message travels from its sender's site to where its stream captures it and from there to each reader's site; a fixed
delay on both legs keeps every reader in the order of capture, as ordered consumers are. Refuses to know what messages
mean, beyond the filters that the live readers use: a TokenPilot hears its own site's, a gateway what names it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenfleet.effects import Core, Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import UNKNOWN_RTT_MS
from tokenfleet.fleet import Fleet
from tokenfleet.simulator.errors import CoreFailedError, SimulationError
from tokenfleet.simulator.loop import Loop
from tokenfleet.simulator.scenario import BusSpec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementRefused
from tokenfleet_schemas.routes import BY_MESSAGE

_INFINITY = float("inf")
#: what gateways read by their name
_ANSWERS = (PlacementAssigned, PlacementHeld, PlacementRefused)


class Node:
    """One process: a core, where it runs, and the wake-up it asked for."""

    def __init__(
        self,
        name: str,
        service: str,
        site: str,
        core: Core,
        bus: "Bus",
        perform: Callable[[Effect], None] | None = None,
    ) -> None:
        self.name, self.service, self.site, self.core = name, service, site, core
        self._bus = bus
        self._perform_other = perform
        self._wake_ms = _INFINITY
        self.alive = True
        #: while paused, what it will hear when it goes on
        self.missed: list[Event] | None = None
        #: called with every event that it publishes, before the bus takes it
        self.on_publish: Callable[[Event], None] | None = None

    def hear(self, event: Event) -> None:
        """A message arrives."""
        if not self.alive:
            return
        if self.missed is not None:
            self.missed.append(event)
            return
        try:
            self.perform(self.core.handle(event, self._bus.loop.now_ms))
        except SimulationError:
            raise
        except Exception as error:
            raise CoreFailedError(self.name, event.id, error) from error

    def wake(self, due_ms: float) -> None:
        """Time for the wake-up that was asked for, unless an earlier one took its place."""
        if due_ms != self._wake_ms or self.missed is not None or not self.alive:
            return
        self._wake_ms = _INFINITY
        try:
            self.perform(self.core.wake(self._bus.loop.now_ms))
        except SimulationError:
            raise
        except Exception as error:
            raise CoreFailedError(self.name, "wake", error) from error

    def perform(self, effects: Iterable[Effect]) -> None:
        """Do what the core asks for."""
        bus = self._bus
        for effect in effects:
            kind = type(effect)
            if kind is Publish:
                event = effect.event  # type: ignore[attr-defined]  # its type was just asked for
                if self.on_publish is not None:
                    self.on_publish(event)
                bus.publish(event, self.site, durable=effect.durable)  # type: ignore[attr-defined]
            elif kind is WakeAt:
                at_ms = effect.at_ms  # type: ignore[attr-defined]
                if at_ms < self._wake_ms:
                    self._wake_ms = at_ms
                    bus.loop.at(at_ms, self.wake, at_ms)
            elif kind is Note:
                bus.notes[self.service, effect.name, *effect.labels.values()] += 1  # type: ignore[attr-defined]
            elif self._perform_other is not None:
                self._perform_other(effect)
            else:
                raise SimulationError(f"{self.name}: nobody performs {kind.__name__}")

    def pause(self) -> None:
        """Stopped (SIGSTOP): it hears and does nothing until it goes on."""
        if self.missed is None:
            self.missed = []

    def go_on(self) -> None:
        """Continued: everything that came meanwhile is heard, and what is due is done."""
        missed, self.missed = self.missed or [], None
        for event in missed:
            self.hear(event)
        now_ms = self._bus.loop.now_ms
        if self._wake_ms <= now_ms:
            self._wake_ms = now_ms
            self.wake(now_ms)


class Bus:
    """All nodes and the way between them."""

    def __init__(self, loop: Loop, fleet: Fleet, spec: BusSpec, hub: str, *, seed: int) -> None:
        self.loop = loop
        self.fleet = fleet
        self.spec = spec
        self.hub = hub
        self.loss = spec.loss
        #: site → virtual time until which nothing reaches or leaves it
        self.cut_until_ms: dict[str, float] = {}
        self.notes: Counter[tuple[str, ...]] = Counter()
        #: messages published, by type
        self.said: Counter[str] = Counter()
        self.lost = 0
        #: told of every message when it is published, before anybody else
        self.listeners: list[Callable[[Event], None]] = []
        #: every node, by name
        self.nodes: dict[str, Node] = {}
        self._dice = random.Random(f"bus {seed}")
        self._whole: dict[str, list[Node]] = {}
        self._pilots: dict[str, Node] = {}
        self._gateways: dict[str, Node] = {}
        self._one_way: dict[tuple[str, str], float] = {}
        self._instance_site = {name: site for site, one in fleet.sites.items() for name in one.instances}
        #: (type, site of capture) → readers that hear every such message, by delay
        self._static: dict[tuple[type[Event], str], list[tuple[float, tuple[Node, ...]]]] = {}
        #: the same and those that hear this one, which end the key
        self._known: dict[tuple[Any, ...], list[tuple[float, tuple[Node, ...]]]] = {}

    def join(self, node: Node) -> None:
        """A process starts; a TokenPilot is known by its site, a gateway by its name."""
        self.nodes[node.name] = node
        if node.service == "tokenpilot":
            self._pilots[node.site] = node
        elif node.service == "gateway":
            self._gateways[node.name] = node
        else:
            self._whole.setdefault(node.service, []).append(node)
        self._static.clear()
        self._known.clear()

    def place_instance(self, name: str, site: str) -> None:
        """An instance that the fleet file does not name: what concerns it goes to this site's TokenPilot."""
        self._instance_site[name] = site

    def leave(self, node: Node) -> None:
        """A gateway's process is gone."""
        node.alive = False
        del self.nodes[node.name]
        self._gateways.pop(node.name, None)
        self._static.clear()
        self._known.clear()

    def one_way_ms(self, one: str, other: str) -> float:
        """Network time between two sites, ms: half the round trip that the fleet file says."""
        found = self._one_way.get((one, other))
        if found is None:
            rtt_ms = self.fleet.rtt_ms(one, other)
            found = self._one_way[one, other] = (UNKNOWN_RTT_MS if rtt_ms is None else rtt_ms) / 2
        return found

    def publish(self, event: Event, sender_site: str, *, durable: bool = False) -> None:
        """Take a message; it reaches its readers later, or never if it is plain and the bus loses it."""
        kind = type(event)
        self.said[kind.__name__] += 1
        for listener in self.listeners:
            listener(event)
        now_ms = self.loop.now_ms
        capture_site = event.site if self.spec.topology == "sites" and event.site else self.hub
        if self.cut_until_ms:
            held_back_ms = self._held_back_ms(sender_site, capture_site)
            if held_back_ms > now_ms:
                if durable:  # the outbox keeps it until the way is open
                    self.loop.at(held_back_ms, self._again, event, sender_site)
                else:
                    self.lost += 1
                return
        if self.loss and not durable and self._dice.random() < self.loss:
            self.lost += 1
            return
        captured_ms = now_ms + self.spec.hop_ms / 2 + self.one_way_ms(sender_site, capture_site)
        twice = self.spec.duplicates and self._dice.random() < self.spec.duplicates
        for delay_ms, nodes in self._readers(event, kind, capture_site):
            if nodes:
                self.loop.at(captured_ms + delay_ms, self._deliver, event, nodes, capture_site)
                if twice:
                    self.loop.at(captured_ms + delay_ms, self._deliver, event, nodes, capture_site)

    def publish_together(self, events: Sequence[Event], sender_site: str) -> None:
        """Plain messages of one type and site, in the same instant: the same as one after the other, with less to do.

        They reach a reader in one go, because nothing can come between them.
        """
        if not events or self.cut_until_ms or self.loss or self.spec.duplicates or self.listeners:
            for event in events:
                self.publish(event, sender_site)
            return
        first = events[0]
        kind = type(first)
        self.said[kind.__name__] += len(events)
        capture_site = first.site if self.spec.topology == "sites" and first.site else self.hub
        captured_ms = self.loop.now_ms + self.spec.hop_ms / 2 + self.one_way_ms(sender_site, capture_site)
        for delay_ms, nodes in self._readers(first, kind, capture_site):
            self.loop.at(captured_ms + delay_ms, self._deliver_all, events, nodes, capture_site)

    def _deliver_all(self, events: Sequence[Event], nodes: tuple[Node, ...], capture_site: str) -> None:
        for event in events:
            self._deliver(event, nodes, capture_site)

    def _again(self, event: Event, sender_site: str) -> None:
        self.publish(event, sender_site, durable=True)

    def _held_back_ms(self, one: str, other: str) -> float:
        if one == other:
            return 0.0
        return max(self.cut_until_ms.get(one, 0.0), self.cut_until_ms.get(other, 0.0))

    def _deliver(self, event: Event, nodes: tuple[Node, ...], capture_site: str) -> None:
        now_ms = self.loop.now_ms
        for node in nodes:
            if self.cut_until_ms:
                open_ms = self._held_back_ms(capture_site, node.site)
                if open_ms > now_ms:  # its reader goes on where it was
                    self.loop.at(open_ms, self._deliver, event, (node,), capture_site)
                    continue
            node.hear(event)

    def _readers(self, event: Event, kind: type[Event], capture_site: str) -> list[tuple[float, tuple[Node, ...]]]:
        key = (kind, capture_site)
        static = self._static.get(key)
        if static is None:
            static = self._static[key] = self._by_delay(self._always(kind), capture_site)
        some = self._sometimes(event, kind)
        if not some:
            return static
        whole = (kind, capture_site, *some)
        found = self._known.get(whole)
        if found is None:
            found = self._known[whole] = [*static, *self._by_delay(some, capture_site)]
        return found

    def _always(self, kind: type[Event]) -> list[Node]:
        """Nodes that hear every message of a type."""
        consumers = BY_MESSAGE[kind].consumers
        found = [node for service, nodes in self._whole.items() if service in consumers for node in nodes]
        if kind is CapacityReported:
            found += self._gateways.values()
        if "tokenpilot" in consumers and BY_MESSAGE[kind].family in ("gateway", "goodput"):
            found += self._pilots.values()
        return found

    def _sometimes(self, event: Any, kind: type[Event]) -> list[Node]:
        """Nodes that hear this one because of what it names: the filters of the live readers."""
        found: list[Node] = []
        route = BY_MESSAGE[kind]
        if kind in _ANSWERS:
            gateway = self._gateways.get(event.gateway)
            if gateway is not None:
                found.append(gateway)
        if "tokenpilot" in route.consumers:
            if kind is OutcomeFinished or kind is OutcomeStarted:
                if event.instance:
                    pilot = self._pilots.get(self._instance_site.get(event.instance, ""))
                    if pilot is not None:
                        found.append(pilot)
                else:
                    found += self._pilots.values()
            elif route.family not in ("gateway", "goodput"):
                pilot = self._pilots.get(event.site)
                if pilot is not None:
                    found.append(pilot)
        return found

    def _by_delay(self, nodes: Iterable[Node], capture_site: str) -> list[tuple[float, tuple[Node, ...]]]:
        groups: dict[float, list[Node]] = {}
        for node in nodes:
            delay_ms = self.spec.hop_ms / 2 + self.one_way_ms(capture_site, node.site)
            groups.setdefault(delay_ms, []).append(node)
        return [(delay_ms, tuple(group)) for delay_ms, group in groups.items()]
