"""Drives one TokenPilot core by hand and checks, after every message, that its sums are the sums of its parts."""

from collections import Counter
from typing import Any, TypeVar

import msgspec
import numpy as np
from tests.simulation.harness import START_MS, Engine, report, small_fleet

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet.tokenpilot.board import Board
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import pairs
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted, Times
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.request import Ask
from tokenfleet_schemas.room import RoomOffered

E = TypeVar("E", bound=Event)
SCOPE = "pool:b:m:1"
#: rules of holding and releasing are shown with two chunks of look-ahead
KNOBS = Knobs(lookahead_budgets=2.0)


def ask(request_id: str, **changes: Any) -> Ask:
    """A chat request from entry a; `changes` are fields."""
    base = Ask(
        request_id=request_id,
        gateway="gw",
        gateway_incarnation="1",
        entry="a",
        entry_zone="eu",
        tenant="acme",
        service_class="chat",
        model_asked="m",
        model="m",
        version="1",
        input_tokens=1000,
        received_unix_ms=int(START_MS),
        ttft_ms=1000,
        patience_ms=10_000,
    )
    return msgspec.structs.replace(base, **changes)


class Pilot:
    """One core in office for `pool:b:m:1`, its clock and what it said."""

    def __init__(self, fleet: Fleet | None = None, *, instances: int = 2, elected: bool = True, **limits: Any) -> None:
        # Rules that hold under any scorer are tested under the one whose numbers can be reckoned by hand.
        limits = {"policy": 'placement = "least-work"', **limits}
        self.fleet = fleet or small_fleet({"b": instances}, **limits)
        self.core = TokenPilot(self.fleet, "b", replica="p0", knobs=KNOBS)
        self.now_ms = START_MS
        self.said: list[Event] = []
        self.notes: list[Note] = []
        self.wakes: list[float] = []
        self.revision = 0
        self.engines = {name: Engine(0.0) for name in self.fleet.sites["b"].instances}
        for name, engine in self.engines.items():
            engine.prefill_tokens_per_s = self.fleet.sites["b"].instances[name].prefill_tokens_per_s
        self.report_all()
        if elected:
            self.take_office(1)

    # ---- driving

    def do(self, effects: Any) -> list[Event]:
        """Perform effects; returns what was published."""
        published = []
        for effect in effects:
            assert isinstance(effect, Effect)
            if isinstance(effect, Publish):
                published.append(effect.event)
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, WakeAt):
                self.wakes.append(effect.at_ms)
        self.said += published
        validate(self.core)
        validate_columns(self.core, self.now_ms)
        return published

    def hear(self, event: Event) -> list[Event]:
        return self.do(self.core.handle(event, self.now_ms))

    def echo(self) -> None:
        """Everything said so far comes back from the streams."""
        for event in list(self.said):
            self.do(self.core.handle(event, self.now_ms))

    def wake(self, after_ms: float = 0.0) -> list[Event]:
        self.now_ms += after_ms
        return self.do(self.core.wake(self.now_ms))

    def take_office(self, term: int) -> list[Event]:
        return self.hear(self.core.mark(SCOPE, term, self.now_ms))

    def report(self, name: str, **changes: Any) -> list[Event]:
        self.revision += 1
        event = report(self.fleet, name, self.engines[name], self.revision, self.now_ms)
        return self.hear(msgspec.structs.replace(event, **changes))

    def report_all(self) -> None:
        for name in self.engines:
            self.report(name)

    # ---- what others say

    def request(self, request_id: str, *, attempt: int = 1, revision: int = 0, **changes: Any) -> list[Event]:
        extra = {k: changes.pop(k) for k in ("excluded", "elapsed_ms", "fallback", "term") if k in changes}
        return self.hear(
            PlacementRequested(
                id=f"{request_id}:requested:{attempt}:{revision}",
                site="b",
                ask=ask(request_id, **changes),
                attempt=attempt,
                revision=revision,
                **extra,
            )
        )

    def release(self, held: PlacementHeld, number: int, instance: str = "b-0", term: int = 5) -> list[Event]:
        return self.hear(
            PlacementReleased(
                id=f"released:{term}:{number}",
                site="b",
                term=term,
                request_id=held.request_id,
                gateway=held.gateway,
                model="m",
                version="1",
                attempt=held.attempt,
                revision=held.revision,
                number=number,
                instance=instance,
            )
        )

    def withdraw(self, request_id: str, attempt: int = 1, revision: int = 0) -> list[Event]:
        return self.hear(
            PlacementWithdrawn(
                id=f"{request_id}:withdrawn:{attempt}:{revision}",
                site="b",
                request_id=request_id,
                gateway="gw",
                model="m",
                version="1",
                attempt=attempt,
                revision=revision,
                moved_to="c",
            )
        )

    def decline(self, event: PlacementAssigned | PlacementHeld) -> list[Event]:
        return self.hear(
            PlacementDeclined(
                id=f"{event.id}:declined",
                site="b",
                request_id=event.request_id,
                gateway="gw",
                model="m",
                version="1",
                attempt=event.attempt,
                revision=event.revision,
                declined=event.id,
                reason="superseded",
            )
        )

    def start(self, assigned: PlacementAssigned, **changes: Any) -> list[Event]:
        event = OutcomeStarted(
            id=f"{assigned.request_id}:started:{assigned.attempt}",
            site="a",
            request_id=assigned.request_id,
            attempt=assigned.attempt,
            gateway="gw",
            tenant="acme",
            service_class="chat",
            model="m",
            version="1",
            served_site="b",
            instance=assigned.instance,
            booking=assigned.id,
            ttft_ms=100,
            engine_ttft_ms=90,
            input_tokens=1000,
        )
        return self.hear(msgspec.structs.replace(event, **changes))

    def finish(self, assigned: PlacementAssigned, outcome: Any = "completed", **changes: Any) -> list[Event]:
        event = OutcomeFinished(
            id=f"{assigned.request_id}:finished:{assigned.attempt}",
            site="a",
            request_id=assigned.request_id,
            attempt=assigned.attempt,
            final=True,
            outcome=outcome,
            gateway="gw",
            gateway_incarnation="1",
            tenant="acme",
            service_class="chat",
            model_asked="m",
            model="m",
            version="1",
            instance=assigned.instance,
            booking=assigned.id,
            input_tokens=1000,
            output_tokens=20,
            received_unix_ms=int(START_MS),
            times=Times(e2e_ms=1000, ttft_ms=100, tpot_ms=20),
        )
        return self.hear(msgspec.structs.replace(event, **changes))

    def lease(self, revision: int, *open_: str, incarnation: str = "1", closing: bool = False) -> list[Event]:
        return self.hear(
            GatewayLeased(
                id=f"gw:{incarnation}:{revision}",
                site="a",
                gateway="gw",
                gateway_incarnation=incarnation,
                revision=revision,
                open=tuple(OpenRequest(request_id=r, attempt=1, phase="dispatched") for r in open_),
                closing=closing,
            )
        )

    # ---- asking

    def load(self, name: str = "b-0") -> tuple[int, int, int, int]:
        """(sequences, prefill tokens, KV tokens, decoding) booked."""
        load = self.core.state.load(name)
        return load.sequences, load.prefill_tokens, load.kv_tokens, load.decoding

    def held(self) -> float:
        return sum(self.core.gauges()["held_requests"].values())

    def quiet(self) -> None:
        """Nothing is left of anything."""
        for name, values in self.core.gauges().items():
            if name.startswith(("held", "booked", "waiting")):
                assert not any(values.values()), (name, values)
        assert not self.core.state.bookings
        assert not self.core.state.of_request
        assert not any(sign.open for sign in self.core.state.presence.gateways.values())


def only(events: list[Event], kind: type[E]) -> E:
    """The one event of a type among what was said."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


def none_of(events: list[Event], *kinds: type[Event]) -> bool:
    return not any(isinstance(event, kinds) for event in events)


def validate(core: TokenPilot) -> None:
    """Every aggregate is the sum of its bookings; nothing is below zero; nobody is in two places."""
    state = core.state
    sums: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in state.loads}
    for booking in state.bookings.values():
        one = sums[booking.instance]
        one[0] += 1
        one[1] += 0 if booking.started else booking.work.prefill_tokens
        one[2] += booking.work.kv_tokens
        one[3] += booking.started
        if not booking.started:
            assert state.loads[booking.instance].unstarted[booking.id] == booking.work.prefill_tokens
        assert booking.id in state.of_request[booking.request_id]
    for name, load in state.loads.items():
        assert [load.sequences, load.prefill_tokens, load.kv_tokens, load.decoding] == sums[name], name
        assert min(sums[name]) >= 0
        assert sum(load.unstarted.values()) == load.prefill_tokens
        mine = [b for b in state.bookings.values() if b.instance == name]
        assert load.pairs == sum(pairs(b.work) for b in mine if not b.started)
        assert load.decoding_kv_tokens == sum(b.work.kv_tokens for b in mine if b.started)
        assert load.unstarted_shared == sum(b.work.shared_kv_tokens for b in mine if not b.started)
        assert load.shared_kv_tokens == core.pins.shared_tokens(name)
        assert load.kv_tokens_expected >= 0
        assert load.breaker.trial == "" or load.breaker.trial in state.bookings
    assert sum(len(ids) for ids in state.of_request.values()) == len(state.bookings)
    assert set(core.pins.bookings()) <= set(state.bookings)
    for pool in state.pools.values():
        held = [w.held for w in pool.waiting.values() if w.held is not None]
        assert pool.held == len(held)
        bound = [h for h in held if h.bound]
        assert pool.bound == Counter(h.home_instance for h in bound)
        assert sum(pool.bound_tokens.values()) == sum(h.work.prefill_tokens for h in bound)
        assert pool.blocked == sum(h.lacks == "instance" for h in held)
        assert pool.held_prefill_tokens == sum(h.work.prefill_tokens for h in held)
    watched = {r for sign in state.presence.gateways.values() for r in sign.open}
    here = set(state.of_request) | {r for pool in state.pools.values() for r in pool.waiting}
    assert watched == here, (watched, here)


def validate_columns(core: TokenPilot, now_ms: float) -> None:
    """What a decision reads is what a look at every instance would say; what time alone changes is looked at anew."""
    instances = core.state.view.instances(core.site)
    for model, board in core._boards.items():
        if board.fleet is not core.fleet:
            continue  # made anew at the next decision
        settled = [n for n in board.names if n not in board.dirty | board.watched and n in instances]
        fresh = Board(core.fleet, core.site, core.knobs, board.kv_ahead)
        core._lay_out(model, fresh, {name: instances[name] for name in settled}, now_ms)
        rows = [board.row[name] for name in settled]
        assert np.array_equal(board._data[:, rows], fresh._data, equal_nan=True), settled
        assert np.array_equal(board.numbers[rows], fresh.numbers)
        assert np.array_equal(board.empty[rows], fresh.empty)
        assert board.fits_all_tokens <= fresh.fits_all_tokens
        assert (board.broken | board.cold) <= board.watched
        assert board.unreachable & set(settled) == fresh.unreachable


__all__ = ["SCOPE", "Pilot", "RoomOffered", "ask", "none_of", "only", "validate", "validate_columns"]
