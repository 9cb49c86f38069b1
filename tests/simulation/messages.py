"""One of each message with sensible values, and a bench that drives one core by hand.

`Bench` gives a core its office, feeds it events at a virtual time and keeps what it said; every event that it says
comes back to it once, as over the bus, and must change nothing the second time.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from tests.simulation.harness import START_MS, Engine, report

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, Times
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementRequested, Work
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.room import RoomOffered

E = TypeVar("E", bound=Event)


def make_ask(request_id: str = "r1", **changes: Any) -> Ask:
    """A chat of 1,000 tokens in and up to 100 out, at entry a in zone eu."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "gateway": "gateway-a",
        "gateway_incarnation": "1",
        "entry": "a",
        "entry_zone": "eu",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m",
        "model": "m",
        "version": "1",
        "input_tokens": 1000,
        "output_budget_tokens": 100,
        "received_unix_ms": int(START_MS),
        "ttft_ms": 1000.0,
        "patience_ms": 10_000.0,
    }
    return Ask(**{**values, **changes})


def received(ask: Ask, *, revision: int = 0, attempt: int = 1, elapsed_ms: float = 0.0) -> RequestReceived:
    return RequestReceived(
        id=f"{ask.request_id}:received:{attempt}:{revision}",
        site=ask.entry,
        ask=ask,
        attempt=attempt,
        revision=revision,
        elapsed_ms=elapsed_ms,
    )


def admitted(ask: Ask, *, revision: int = 0, attempt: int = 1, **changes: Any) -> AdmissionDecided:
    values: dict[str, Any] = {
        "id": f"{ask.request_id}:decided:{attempt}:{revision}:1",
        "site": ask.entry,
        "ask": ask,
        "attempt": attempt,
        "revision": revision,
        "admitted": True,
    }
    return AdmissionDecided(**{**values, **changes})


def requested(ask: Ask, site: str, *, revision: int = 0, attempt: int = 1, **changes: Any) -> PlacementRequested:
    values: dict[str, Any] = {
        "id": f"{ask.request_id}:requested:{attempt}:{revision}:1",
        "site": site,
        "ask": ask,
        "attempt": attempt,
        "revision": revision,
    }
    return PlacementRequested(**{**values, **changes})


def held(ask: Ask, site: str = "b", *, revision: int = 0, attempt: int = 1, **changes: Any) -> PlacementHeld:
    values: dict[str, Any] = {
        "id": f"{ask.request_id}:held:{attempt}:{revision}:{changes.get('after_release', 0)}",
        "site": site,
        "request_id": ask.request_id,
        "gateway": ask.gateway,
        "entry": ask.entry,
        "tenant": ask.tenant,
        "service_class": ask.service_class,
        "model": ask.model,
        "version": ask.version,
        "attempt": attempt,
        "revision": revision,
        "home_instance": f"{site}-0",
        "work": Work(prefill_tokens=ask.input_tokens, decode_tokens=50, kv_tokens=ask.input_tokens + 50),
        "predicted_wait_ms": 800.0,
        "predicted_own_ms": 100.0,
        "slack_ms": ask.ttft_ms,
        "patience_left_ms": ask.patience_ms,
        "received_unix_ms": ask.received_unix_ms,
        "lacks": "prefill_tokens",
    }
    return PlacementHeld(**{**values, **changes})


def assigned(ask: Ask, site: str = "b", *, revision: int = 0, attempt: int = 1, **changes: Any) -> PlacementAssigned:
    values: dict[str, Any] = {
        "id": f"{ask.request_id}:assigned:{attempt}:{revision}:1",
        "site": site,
        "request_id": ask.request_id,
        "gateway": ask.gateway,
        "tenant": ask.tenant,
        "service_class": ask.service_class,
        "model": ask.model,
        "version": ask.version,
        "attempt": attempt,
        "revision": revision,
        "instance": f"{site}-0",
        "incarnation": "1",
        "endpoint_url": "http://127.0.0.1:1",
        "work": Work(prefill_tokens=ask.input_tokens, decode_tokens=50, kv_tokens=ask.input_tokens + 50),
    }
    return PlacementAssigned(**{**values, **changes})


def offered(instance: str = "b-0", revision: int = 1, **changes: Any) -> RoomOffered:
    values: dict[str, Any] = {
        "id": f"{instance}:offered:{revision}",
        "site": instance.partition("-")[0],
        "model": "m",
        "version": "1",
        "instance": instance,
        "revision": revision,
        "prefill_tokens": 2048,
        "idle": True,
        "sequences": 8,
        "kv_tokens": 100_000,
        "last_released": 0,
        "held": 1,
    }
    return RoomOffered(**{**values, **changes})


def finished(
    ask: Ask, outcome: Any = "completed", *, attempt: int = 1, final: bool = True, **changes: Any
) -> OutcomeFinished:
    values: dict[str, Any] = {
        "id": f"{ask.request_id}:finished:{attempt}",
        "site": ask.entry,
        "request_id": ask.request_id,
        "attempt": attempt,
        "final": final,
        "outcome": outcome,
        "gateway": ask.gateway,
        "gateway_incarnation": ask.gateway_incarnation,
        "tenant": ask.tenant,
        "service_class": ask.service_class,
        "model_asked": ask.model_asked,
        "model": ask.model,
        "version": ask.version,
        "input_tokens": ask.input_tokens,
        "received_unix_ms": ask.received_unix_ms,
        "times": Times(e2e_ms=100.0),
        "ask": None if final else ask,
    }
    return OutcomeFinished(**{**values, **changes})


def leased(revision: int, open_ids: Iterable[str] = (), **changes: Any) -> GatewayLeased:
    values: dict[str, Any] = {
        "id": f"gateway-a:{changes.get('gateway_incarnation', '1')}:{revision}",
        "site": "a",
        "gateway": "gateway-a",
        "gateway_incarnation": "1",
        "revision": revision,
        "open": tuple(OpenRequest(request_id=rid, attempt=1, phase="waiting") for rid in open_ids),
    }
    return GatewayLeased(**{**values, **changes})


class Bench:
    """One core with all its offices on a virtual clock."""

    def __init__(self, core: Any, fleet: Fleet, *, office: bool = True) -> None:
        self.core = core
        self.fleet = fleet
        self.now_ms = START_MS
        self.said: list[Event] = []
        self.notes: list[Note] = []
        self.wake_ms = float("inf")
        self.reports = 0
        self.term = 10
        if office:
            self.take_office()

    def take_office(self) -> None:
        for scope in self.core.scopes():
            self.term += 1
            self.feed(self.core.mark(scope, self.term, self.now_ms))

    def feed(self, *events: Event) -> list[Event]:
        """Hand events over now; returns what was said to them."""
        before = len(self.said)
        for event in events:
            self._take(self.core.handle(event, self.now_ms))
        return self.said[before:]

    def report(self, *instances: str, **changes: Any) -> None:
        """The agents report these instances (default: all declared)."""
        self.reports += 1
        for name in instances or [n for site in self.fleet.sites.values() for n in site.instances]:
            event: CapacityReported = report(self.fleet, name, Engine(10_000), self.reports, self.now_ms)
            self.feed(msgspec.structs.replace(event, **changes))

    def run(self, ms: float, *, lease: Iterable[str] | None = None, reports: bool = True) -> list[Event]:
        """Let time pass in steps of the core's wishes; agents report and the gateway leases every second."""
        before = len(self.said)
        end_ms = self.now_ms + ms
        beat_ms = self.now_ms + 1000
        while True:
            next_ms = min(end_ms, beat_ms, max(self.wake_ms, self.now_ms))
            self.now_ms = next_ms
            if self.now_ms >= self.wake_ms:
                self.wake_ms = float("inf")
                self._take(self.core.wake(self.now_ms))
                self.wake_ms = max(self.wake_ms, self.now_ms + 1)
            if self.now_ms >= beat_ms:
                beat_ms += 1000
                if reports:
                    self.report()
                if lease is not None:
                    self.feed(leased(int(self.now_ms), lease))
            if self.now_ms >= end_ms:
                return self.said[before:]

    def of(self, kind: type[E], events: Iterable[Event] | None = None) -> list[E]:
        return [e for e in (self.said if events is None else events) if isinstance(e, kind)]

    def count(self, name: str) -> float:
        """Sum of a gauge over its labels."""
        return float(sum(self.core.gauges()[name].values()))

    def check_zero(self) -> None:
        for name in self.core.gauges().keys() - {"share", "greedy_tenants"}:  # not of what is open
            if name.startswith("plan_"):
                continue  # nor is a target: a plan stands until it is changed
            assert self.count(name) == 0, (name, self.core.gauges()[name])

    def _take(self, effects: Iterable[Effect]) -> None:
        own: list[Event] = []
        for effect in effects:
            if isinstance(effect, Publish):
                own.append(effect.event)
            elif isinstance(effect, WakeAt):
                self.wake_ms = min(self.wake_ms, effect.at_ms)
            elif isinstance(effect, Note):
                self.notes.append(effect)
        self.said += own
        for event in own:
            echoes = [e.event for e in self.core.handle(event, self.now_ms) if isinstance(e, Publish)]
            assert not echoes, f"its own {event.id} made it say {[e.id for e in echoes]}"
