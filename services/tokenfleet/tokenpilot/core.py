"""TokenPilot's core: books, holds, offers room, fills it when nobody else does. Pure: `(message, now) -> effects`.

Decides which instance, under the office of a pool, and folds everything whether it decides or not. A request waits in
exactly one of two states: not answered, or held. Whatever ends it (assigned, withdrawn, declined, refused, finished,
its gateway's lease) removes it once; tombstones catch what comes late. Refuses to know who should go first: it offers
room as levels and waits for `released`, unless an offer stays unanswered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tokenfleet.effects import Effect, Note
from tokenfleet.fleet import Fleet
from tokenfleet.offices import Office
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.desk import INFINITY
from tokenfleet.tokenpilot.fold import Folding
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import State
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementOwned,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.room import RoomDeclined


class TokenPilot(Folding):
    """The TokenPilot of one site; see the module."""

    def __init__(
        self,
        fleet: Fleet,
        site: str,
        *,
        replica: str,
        knobs: Knobs | None = None,
        filters: Sequence[policy.Filter] = policy.FILTERS,
        scorer: policy.Scorer | None = None,
        picker: policy.Picker | None = None,
    ) -> None:
        super().__init__(fleet, site, replica=replica, knobs=knobs, filters=filters, scorer=scorer, picker=picker)
        self._handlers: dict[type[Event], Callable[[Any, float], Iterable[Effect]]] = {
            CapacityReported: self._reported,
            PlacementRequested: self._requested,
            PlacementWithdrawn: self._withdrawn,
            PlacementHeld: self._held,
            PlacementReleased: self._released,
            PlacementAssigned: self._assigned,
            PlacementDeclined: self._declined,
            PlacementRefused: self._refused,
            PlacementOwned: self._owned,
            RoomDeclined: self._room_declined,
            OutcomeStarted: self._started,
            OutcomeFinished: self._finished,
            GatewayLeased: self._leased,
            KvChanged: self._kv_changed,
        }

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        """Fold one event and say what follows from it."""
        if self.state.presence.hear(now_ms):
            self._start_anew(now_ms)
        handler = self._handlers.get(type(message))
        if handler is not None:
            yield from handler(message, now_ms)
            # Where nothing changed and a wake-up is asked for, it is early enough: the next is never later than a tick.
            if self._touched or self._stirred or self._wake_ms == INFINITY:
                yield from self._after(now_ms)
            # After what was said has left: the next request finds its columns up to date and waits for none of this.
            for model in [model for model, board in self._boards.items() if board.dirty]:
                self._board(model, now_ms)

    def wake(self, now_ms: float) -> Iterator[Effect]:
        """What time alone makes due: silent gateways, unanswered offers, lost messages, patience."""
        self._wake_ms = INFINITY
        for request_id in self.state.presence.silent(now_ms):
            yield from self._expire(request_id, "gateway_silent", now_ms)
        overdue = self._any_overdue(now_ms)
        for scope, pool in self.state.pools.items():
            if self.offices.term(scope):
                yield from self._refuse_overdue(scope, pool, now_ms)
                if overdue:
                    yield from self._fill_unanswered(scope, pool, now_ms)
                yield from self._think_due(scope, pool, now_ms)
                self._touch_due(pool, now_ms)
        answer_ms = self._answer_ms()
        for offer in self._offers.values():
            # Whatever was due is done by now, or its pool holds nothing any more.
            if offer.due_ms <= now_ms:
                offer.due_ms = INFINITY
            if offer.unanswered_since_ms is not None and offer.unanswered_since_ms + answer_ms <= now_ms:
                offer.unanswered_since_ms = None
        yield from self._repeat_unconfirmed(now_ms)
        for load in self.state.loads.values():
            if load.breaker.opened_ms is not None:
                load.breaker.settle(now_ms, self.knobs)
        self.state.prune(now_ms - self.knobs.tombstone_ms)
        self._forget(now_ms)
        yield from self._after(now_ms)

    def scopes(self) -> tuple[str, ...]:
        """An office for every model version that the site declares."""
        return tuple(self._scope(model, version) for model, version in self.fleet.pools(self.site))

    def mark(self, scope: str, term: int, now_ms: float) -> PlacementOwned:
        """The event that begins a term of office when it is read back."""
        self.offices.issue(scope, term)
        return PlacementOwned(
            id=f"{scope}:{term}:{self.replica}",
            term=term,
            time_unix_ms=int(now_ms),
            site=self.site,
            scope=scope,
            owner=self.replica,
            model=self.state.pools[scope].model,
        )

    def resign(self, scope: str, now_ms: float) -> Iterator[Effect]:
        """The lease is lost: fold on, say nothing."""
        self.offices.resign(scope)
        self._forget_offers(scope)
        yield Note("office_lost", {"scope": scope}, level="info")

    def resumed(self, now_ms: float) -> Iterator[Effect]:
        """The listener was deaf until now: every silence counts from here."""
        self._start_anew(now_ms)
        self.exact.renew(now_ms)
        yield from self._after(now_ms)

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterator[Effect]:
        """A new fleet file: other pools, another placement policy."""
        self.fleet = fleet
        self._stirred.update(self._offers)  # another fleet's entries may be nearer
        self._ensure_pools()
        for scope, pool in self.state.pools.items():
            if self.offices.term(scope):
                yield from self._answer_all(scope, pool, now_ms)
                self._touch_pool(pool)
        yield from self._after(now_ms)

    def snapshot(self) -> bytes:
        """The fold: state and marks. Offers and the prefix index are left out, they come again by themselves."""
        return msgspec.msgpack.encode(_Snapshot(self.state, self.offices.marks))

    def restore(self, data: bytes) -> None:
        """Take over a fold; raises ValueError for one of another release or site."""
        try:
            found = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise ValueError(f"no snapshot of this release: {error}") from None
        if found.state.site != self.site:
            raise ValueError(f"a snapshot of site {found.state.site!r}, not {self.site!r}")
        self.state = found.state
        self._boards.clear()
        self.pins.clear()
        for load in self.state.loads.values():
            load.shared_kv_tokens = 0
        self._few = None
        self._unconfirmed = {one.id: one for one in self.state.bookings.values() if not one.confirmed}
        self.offices.marks = found.marks
        self._ensure_pools()

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Held and booked: exactly zero when nothing is open."""
        held: dict[tuple[tuple[str, str], ...], float] = {}
        waiting: dict[tuple[tuple[str, str], ...], float] = {}
        for pool in self.state.pools.values():
            labels = (("model", pool.model), ("version", pool.version))
            held[labels] = float(pool.held)
            waiting[labels] = float(len(pool.waiting) - pool.held)
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {
            "held_requests": held,
            "waiting_requests": waiting,
            "booked_requests": {},
            "booked_prefill_tokens": {},
            "booked_kv_tokens": {},
            "booked_decoding": {},
            "breaker_open": {},
            "lookahead_budgets": {},
            "paced_sequences": {},
            "prediction_error": {},
            "prefix_exact": {},
            "prefix_trust": {},
        }
        for name, load in self.state.loads.items():
            here = (("instance", name),)
            found["booked_requests"][here] = float(load.sequences)
            found["booked_prefill_tokens"][here] = float(load.prefill_tokens)
            found["booked_kv_tokens"][here] = float(load.kv_tokens)
            found["booked_decoding"][here] = float(load.decoding)
            found["lookahead_budgets"][here] = load.lookahead(self.knobs)
            if load.paced is not None:
                found["paced_sequences"][here] = float(int(load.paced))
            found["prefix_exact"][here] = float(self.exact.is_exact(name))
            found["prefix_trust"][here] = self.exact.trust(name)
            if name in self.state.models:
                found["prediction_error"][here] = self.state.models[name].error
            found["breaker_open"][here] = float(load.breaker.opened_ms is not None)
        return found


class _Snapshot(msgspec.Struct):
    state: State
    marks: dict[str, Office]
