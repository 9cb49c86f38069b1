"""TokenPilot's core: books, holds, offers room, fills it when nobody else does. Pure: `(message, now) -> effects`.

Decides which instance, under the office of a pool, and folds everything whether it decides or not. A request waits in
exactly one of two states: not answered, or held. Whatever ends it (assigned, withdrawn, declined, refused, finished,
its gateway's lease) removes it once; tombstones catch what comes late. Refuses to know who should go first: it offers
room as levels and waits for `released`, unless an offer stays unanswered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tokenfleet import prefix
from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import FRESH_MS, UNKNOWN_RTT_MS
from tokenfleet.fleet import Fleet
from tokenfleet.offices import Office, Offices
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.policy import NO_ROOM, Candidate, Room, Situation
from tokenfleet.tokenpilot.prefix_index import PrefixIndex
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import NO_INSTANCE, Booking, Pool, State, Waiting
from tokenfleet_schemas.admission import REASONS
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
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
    Work,
)
from tokenfleet_schemas.request import Ask
from tokenfleet_schemas.room import RoomDeclined, RoomOffered

#: the core asks to be woken at least this often, so that silence and patience are noticed, ms
TICK_MS = 1000.0
#: instances that nobody reported for so long are forgotten, ms
FORGET_MS = 600_000.0
_INFINITY = float("inf")


class Offer(msgspec.Struct):
    """What was last said of one instance's room. Not part of the fold: a new owner offers anew."""

    revision: int = 0
    id: str = ""
    room: Room = NO_ROOM
    last_released: int = -1
    said_ms: float = -_INFINITY
    #: first offer since the last answer; None: answered, or nothing was offered
    unanswered_since_ms: float | None = None
    declined_until_ms: float = -_INFINITY
    #: when a postponed offer is due
    due_ms: float = _INFINITY


class TokenPilot:
    """The TokenPilot of one site; see the module."""

    def __init__(
        self,
        fleet: Fleet,
        site: str,
        *,
        replica: str,
        knobs: Knobs | None = None,
        filters: Sequence[policy.Filter] = policy.FILTERS,
        scorer: policy.Scorer = policy.least_work,
        picker: policy.Picker = policy.worth_waiting,
    ) -> None:
        self.fleet = fleet
        self.site = site
        self.replica = replica
        self.knobs = knobs or Knobs()
        self.filters, self.scorer, self.picker = filters, scorer, picker
        self.offices = Offices(replica)
        self.index = PrefixIndex(self.knobs.prefix_digests)
        self.state = State(site)
        self._offers: dict[str, Offer] = {}
        #: instances whose room changed while this message was handled
        self._touched: set[str] = set()
        self._wake_ms = _INFINITY
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
        }
        self._ensure_pools()

    # ------------------------------------------------------------------------------------------ core protocol

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        """Fold one event and say what follows from it."""
        if self.state.presence.hear(now_ms):
            self._start_anew(now_ms)
        handler = self._handlers.get(type(message))
        if handler is not None:
            yield from handler(message, now_ms)
            yield from self._after(now_ms)

    def wake(self, now_ms: float) -> Iterator[Effect]:
        """What time alone makes due: silent gateways, unanswered offers, lost messages, patience."""
        self._wake_ms = _INFINITY
        for request_id in self.state.presence.silent(now_ms):
            yield from self._expire(request_id, "gateway_silent", now_ms)
        for scope, pool in self.state.pools.items():
            if self.offices.term(scope):
                yield from self._refuse_overdue(scope, pool, now_ms)
                yield from self._fill_unanswered(scope, pool, now_ms)
                self._touch_due(pool, now_ms)
        for offer in self._offers.values():
            # Whatever was due is done by now, or its pool holds nothing any more.
            if offer.due_ms <= now_ms:
                offer.due_ms = _INFINITY
            if offer.unanswered_since_ms is not None and offer.unanswered_since_ms + self._answer_ms() <= now_ms:
                offer.unanswered_since_ms = None
        yield from self._repeat_unconfirmed(now_ms)
        for load in self.state.loads.values():
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
        yield from self._after(now_ms)

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterator[Effect]:
        """A new fleet file: other pools, another placement policy."""
        self.fleet = fleet
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
        }
        for name, load in self.state.loads.items():
            here = (("instance", name),)
            found["booked_requests"][here] = float(load.sequences)
            found["booked_prefill_tokens"][here] = float(load.prefill_tokens)
            found["booked_kv_tokens"][here] = float(load.kv_tokens)
            found["booked_decoding"][here] = float(load.decoding)
            found["breaker_open"][here] = float(load.breaker.opened_ms is not None)
        return found

    # ------------------------------------------------------------------------------------------ requests

    def _requested(self, message: PlacementRequested, now_ms: float) -> Iterator[Effect]:
        ask = message.ask
        if message.site != self.site or self.state.ended(ask.request_id, message.attempt):
            return
        if not message.fallback and self._outdated(f"model:{ask.model}", message.term):
            yield Note("void_decision", {"kind": "requested"}, {"id": message.id})
            return
        scope = self._scope(ask.model, ask.version)
        pool = self.state.pools.get(scope)
        if pool is None:
            yield Note("request_unplaceable", {"reason": "unknown_pool"}, {"id": message.id}, level="warning")
            return
        denial = self.fleet.site_denial(ask.tenant, ask.model, self.site)
        if denial:
            # Silence is the answer that sends the sender to another site; nothing may be placed here.
            yield Note("request_unplaceable", {"reason": denial}, {"id": message.id}, level="warning")
            return
        for booking in self.state.bookings_of(ask.request_id):
            if booking.attempt > message.attempt:
                return
            if booking.attempt == message.attempt:
                if message.revision > booking.revision:
                    booking.revision = message.revision
                    yield from self._say_again(scope, booking, now_ms)
                return
        waiting = pool.waiting.get(ask.request_id)
        if waiting is None:
            waiting = pool.waiting[ask.request_id] = Waiting(message, now_ms)
            self.state.presence.open(ask.request_id, ask.gateway, ask.gateway_incarnation, now_ms)
        else:
            known = waiting.request
            if (message.attempt, message.revision) <= (known.attempt, known.revision):
                return
            pool.hold(waiting, None)  # the place in `waiting` is kept
            waiting.request, waiting.heard_ms = message, now_ms
        if self.offices.term(scope):
            yield from self._answer(scope, pool, waiting, now_ms)

    def _answer(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        """Decide for a newcomer: while anything is held, the room is not for newcomers."""
        request = waiting.request
        if self.fleet.policy.placement == "round-robin":
            yield from self._in_turn(scope, pool, waiting, now_ms)
            return
        situation, candidates = self._consider(request, waiting, now_ms)
        closed = self._queued(pool, waiting) > 0
        chosen = None if closed else self.picker(situation, [c for c in candidates if not c.out])
        if chosen is None:
            lacks = "newcomer" if closed else ""
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms, lacks=lacks)
        else:
            how = "fallback" if request.fallback else "room"
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how=how)

    def _place(
        self, scope: str, pool: Pool, waiting: Waiting, now_ms: float, *, how: str, only: str = "", number: int = 0
    ) -> Iterator[Effect]:
        """Place a held request whose turn has come; held again if the room it needs is not there."""
        situation, candidates = self._consider(waiting.request, waiting, now_ms, force=True)
        able = [c for c in candidates if not c.out and only in ("", c.name)]
        chosen = self.picker(situation, able)
        if chosen is not None:
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how=how, number=number)
        elif not only:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms, number=number)

    def _in_turn(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        """Round robin: the next usable instance, room or not."""
        situation, candidates = self._consider(waiting.request, waiting, now_ms, force=True)
        able = [c for c in candidates if not c.out]
        if able:
            chosen = able[pool.turn % len(able)]
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how="room")
        elif waiting.held is None:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms)

    def _answer_all(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """A new office, or another policy: everything unanswered is answered, in order of arrival."""
        in_turn = self.fleet.policy.placement == "round-robin"
        for waiting in list(pool.waiting.values()):
            if waiting.release_number:
                yield from self._place(scope, pool, waiting, now_ms, how="released", number=waiting.release_number)
            elif waiting.held is None or in_turn:
                yield from self._answer(scope, pool, waiting, now_ms)

    def _consider(
        self, request: PlacementRequested, waiting: Waiting, now_ms: float, *, force: bool = False
    ) -> tuple[Situation, list[Candidate]]:
        ask, state = request.ask, self.state
        rtt_ms = self.fleet.rtt_ms(ask.entry, self.site) or 0.0
        slack_ms = None if ask.ttft_ms is None else ask.ttft_ms - waiting.elapsed_ms(now_ms) - rtt_ms
        situation = Situation(self.fleet, request, now_ms, self.knobs, slack_ms, force)
        chain = self._chain(ask)
        decode_tokens = self._expected_tokens(ask)
        candidates: list[Candidate] = []
        for name, heard in sorted(state.view.instances(self.site).items()):
            report = heard.report
            if report.model != ask.model:
                continue
            load = state.load(name)
            hit = self.index.hit_tokens(name, chain, ask.prefix_stride) if chain else 0
            work = policy.work_of(ask, hit, decode_tokens, report.kv_tokens_total)
            room = policy.room_of(self.fleet, self.site, heard, load, now_ms, self.knobs)
            rate = policy.prefill_rate(self.fleet, self.site, heard)
            one = Candidate(name, heard, load, room, hit, work, rate)
            one.out = next((why for f in self.filters if (why := f(situation, one))), "")
            one.lacks = "" if one.out else room.lacks(work)
            candidates.append(one)
        self.scorer(situation, [c for c in candidates if not c.out])
        return situation, candidates

    def _chain(self, ask: Ask) -> tuple[bytes, ...]:
        if not ask.prefix:
            return ()
        try:
            return prefix.unpack(ask.prefix)
        except prefix.PrefixError:
            return ()  # a foreign publisher's garbage costs that request its affinity, nothing else

    def _expected_tokens(self, ask: Ask) -> float:
        length = self.state.lengths.get(f"{ask.model} {ask.service_class} {ask.task}")
        return length.mean_tokens if length is not None and length.count else float(self.knobs.prior_decode_tokens)

    # ------------------------------------------------------------------------------------------ decisions said

    def _assign(
        self,
        scope: str,
        pool: Pool,
        waiting: Waiting,
        candidates: Sequence[Candidate],
        chosen: Candidate,
        now_ms: float,
        *,
        how: str,
        number: int = 0,
    ) -> Iterator[Effect]:
        request, ask, report = waiting.request, waiting.request.ask, chosen.heard.report
        predicted_ttft_ms = None
        if chosen.rate is not None:
            rtt_ms = self.fleet.rtt_ms(ask.entry, self.site) or 0.0
            predicted_ttft_ms = waiting.elapsed_ms(now_ms) + chosen.total_ms + rtt_ms
        term = self.offices.term(scope)
        assigned = PlacementAssigned(
            id=f"{ask.request_id}:assigned:{self.site}:{request.attempt}:{request.revision}:{term}",
            cause=waiting.release_id or request.id,
            term=term,
            time_unix_ms=int(now_ms),
            site=self.site,
            request_id=ask.request_id,
            gateway=ask.gateway,
            tenant=ask.tenant,
            service_class=ask.service_class,
            model=ask.model,
            version=ask.version,
            attempt=request.attempt,
            revision=request.revision,
            instance=chosen.name,
            incarnation=report.incarnation,
            endpoint_url=report.endpoint_url,
            credential=report.credential,
            work=chosen.work,
            prefix_hit_tokens=chosen.hit_tokens,
            predicted_ttft_ms=predicted_ttft_ms,
            predicted_tpot_ms=chosen.load.tpot_ms,
            how=how,
            release_number=number,
            candidates=policy.considered(candidates, chosen),
            sites=request.sites,
        )
        self._book_assigned(pool, assigned, now_ms, request=request)
        yield Publish(assigned)
        yield Note("assigned", {"how": how})

    def _book_assigned(
        self, pool: Pool, assigned: PlacementAssigned, now_ms: float, *, request: PlacementRequested | None
    ) -> None:
        """Book what was said: `request` when it was said by us and has not come back yet."""
        request_id = assigned.request_id
        waiting = pool.drop(request_id)
        pool.turn += 1
        booking = Booking(
            id=assigned.id,
            request_id=request_id,
            attempt=assigned.attempt,
            gateway=assigned.gateway,
            instance=assigned.instance,
            work=assigned.work,
            booked_ms=now_ms,
            assigned=assigned,
            confirmed=request is None,
            said_ms=now_ms,
            request=request,
            revision=assigned.revision,
            release_number=assigned.release_number,
        )
        self.state.book(booking)
        self.state.load(assigned.instance).breaker.booked(booking.id, now_ms, self.knobs)
        self.state.presence.open(request_id, assigned.gateway, "", now_ms)
        if waiting is not None:
            chain = self._chain(waiting.request.ask)
            if chain:
                self.index.add(assigned.instance, chain)
        self._touched.add(assigned.instance)

    def _hold(
        self,
        scope: str,
        pool: Pool,
        waiting: Waiting,
        situation: Situation,
        candidates: Sequence[Candidate],
        now_ms: float,
        *,
        lacks: str = "",
        number: int = 0,
    ) -> Iterator[Effect]:
        request, ask = waiting.request, waiting.request.ask
        able = [c for c in candidates if not c.out]
        home = min(able, key=lambda c: policy.preference(ask.request_id, c), default=None)
        patience_left_ms = waiting.patience_left_ms(now_ms, self.knobs.hold_max_ms)
        if home is None:
            lacks = NO_INSTANCE
        lacks = lacks or (home.lacks if home is not None else "") or "prefill_tokens"
        if home is not None:
            work, wait_ms, own_ms = home.work, home.terms["wait_ms"], home.terms["own_ms"]
            # Everybody held before waits for the same: their prefill, or as many sequences to end.
            mine = waiting.held
            before = pool.held - (mine is not None)
            before_tokens = pool.held_prefill_tokens - (mine.work.prefill_tokens if mine is not None else 0)
            prefill_ms = before_tokens * own_ms / max(1, work.prefill_tokens)
            wait_ms += max(prefill_ms, before * policy.slot_ms(home)) / len(able)
        else:
            work = policy.work_of(ask, 0, self._expected_tokens(ask), None)
            # Nobody could serve it now, so nobody knows: as long as it would wait at all.
            wait_ms = max(0.0, patience_left_ms)
            own_ms = 1000.0 * work.prefill_tokens / self.knobs.unknown_prefill_tokens_per_s
        term = self.offices.term(scope)
        held = PlacementHeld(
            id=f"{ask.request_id}:held:{self.site}:{request.attempt}:{request.revision}:{number}:{lacks}:{term}",
            cause=waiting.release_id or request.id,
            term=term,
            time_unix_ms=int(now_ms),
            site=self.site,
            request_id=ask.request_id,
            gateway=ask.gateway,
            entry=ask.entry,
            tenant=ask.tenant,
            service_class=ask.service_class,
            model=ask.model,
            version=ask.version,
            attempt=request.attempt,
            revision=request.revision,
            home_instance=home.name if home is not None else "",
            prefix_hit_tokens=home.hit_tokens if home is not None else 0,
            work=work,
            predicted_wait_ms=wait_ms,
            predicted_own_ms=own_ms,
            slack_ms=situation.slack_ms,
            patience_left_ms=max(0.0, patience_left_ms),
            received_unix_ms=ask.received_unix_ms,
            lacks=lacks,
            after_release=number,
            candidates=policy.considered(candidates, None),
        )
        first = self._queued(pool, waiting) == 0
        pool.hold(waiting, held)
        waiting.confirmed, waiting.said_ms = False, now_ms
        waiting.release_number, waiting.release_id = 0, ""
        yield Publish(held)
        yield Note("held", {"lacks": held.lacks})
        # Room that nobody waited for was not offered, and room that was left empty may be right for this one.
        for candidate in able:
            offer = self._offer_of(candidate.name)
            if first or (offer.unanswered_since_ms is None and number == 0 and not candidate.lacks):
                offer.declined_until_ms, offer.last_released = -_INFINITY, -1
                self._touched.add(candidate.name)

    def _say_again(self, scope: str, booking: Booking, now_ms: float) -> Iterator[Effect]:
        """Answer a repeated question with the same decision: the same id, so the same booking."""
        term = self.offices.term(scope)
        if not term or booking.assigned is None or booking.started:
            return
        if booking.assigned.term != term:
            # A decision of a former term would be void now; its id, and with it the booking, stays.
            booking.assigned = msgspec.structs.replace(booking.assigned, term=term)
        booking.said_ms = now_ms
        yield Publish(booking.assigned)
        yield Note("assigned_again")

    def _refuse_overdue(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """SLOMax refuses what outlives its patience; when it does not, nothing waits for ever all the same."""
        for waiting in list(pool.waiting.values()):
            late_ms = -waiting.patience_left_ms(now_ms, self.knobs.hold_max_ms)
            if late_ms < self.knobs.patience_grace_ms:
                continue
            request, ask = waiting.request, waiting.request.ask
            term = self.offices.term(scope)
            yield Publish(
                PlacementRefused(
                    id=f"{ask.request_id}:refused:{self.site}:{request.attempt}:{request.revision}:{term}",
                    cause=request.id,
                    term=term,
                    time_unix_ms=int(now_ms),
                    site=self.site,
                    request_id=ask.request_id,
                    gateway=ask.gateway,
                    model=ask.model,
                    version=ask.version,
                    attempt=request.attempt,
                    revision=request.revision,
                    reason="patience",
                    status=REASONS["patience"],
                    retry_after_s=1.0,
                    detail="held beyond its patience and refused by nobody else",
                )
            )
            yield Note("refused", {"reason": "patience"}, {"request": ask.request_id}, level="warning")
            self._drop_waiting(pool, ask.request_id)

    def _repeat_unconfirmed(self, now_ms: float) -> Iterator[Effect]:
        """Plain messages can be lost before a stream has them: what did not come back is said again."""
        for booking in self.state.bookings.values():
            if booking.confirmed or booking.assigned is None or now_ms - booking.said_ms < self.knobs.unconfirmed_ms:
                continue
            scope = self._scope(booking.assigned.model, booking.assigned.version)
            yield from self._say_again(scope, booking, now_ms)
        for scope, pool in self.state.pools.items():
            if not self.offices.term(scope):
                continue
            for waiting in pool.waiting.values():
                held = waiting.held
                if held is None or waiting.confirmed or now_ms - waiting.said_ms < self.knobs.unconfirmed_ms:
                    continue
                waiting.said_ms = now_ms
                yield Publish(held)

    # ------------------------------------------------------------------------------------------ the fold of placement

    def _withdrawn(self, message: PlacementWithdrawn, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site or self._outdated(f"model:{message.model}", message.term):
            return
        pool = self._pool(message.model, message.version)
        waiting = pool.waiting.get(message.request_id) if pool is not None else None
        if pool is None or waiting is None:
            return
        known = waiting.request
        if (known.attempt, known.revision) <= (message.attempt, message.revision):
            self._drop_waiting(pool, message.request_id)
            yield Note("withdrawn")

    def _held(self, message: PlacementHeld, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        pool = self._decided_here(message)
        if pool is None:
            yield Note("void_decision", {"kind": "held"}, {"id": message.id})
            return
        waiting = pool.waiting.get(message.request_id)
        if waiting is None:
            return
        known = waiting.request
        if (known.attempt, known.revision) != (message.attempt, message.revision):
            return
        if waiting.held is not None and waiting.held.after_release > message.after_release:
            return
        if waiting.held is not None and waiting.held.id == message.id:
            waiting.confirmed = True
            return
        pool.hold(waiting, message)
        waiting.confirmed = True
        if waiting.release_number <= message.after_release:
            waiting.release_number, waiting.release_id = 0, ""

    def _released(self, message: PlacementReleased, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        if self._outdated("release", message.term):
            yield Note("void_decision", {"kind": "released"}, {"id": message.id})
            return
        scope = self._scope(message.model, message.version)
        pool = self.state.pools.get(scope)
        if pool is None:
            return
        if message.term > pool.release_term:
            pool.release_term, pool.last_released = message.term, message.number
        pool.last_released = max(pool.last_released, message.number)
        offer = self._offers.get(message.instance)
        if offer is not None:
            offer.unanswered_since_ms = None
        self._touched.add(message.instance)
        waiting = pool.waiting.get(message.request_id)
        if waiting is None:
            for booking in self.state.bookings_of(message.request_id):
                if booking.attempt == message.attempt and booking.release_number < message.number:
                    booking.release_number = message.number
                    yield from self._say_again(scope, booking, now_ms)
            return
        if waiting.request.attempt != message.attempt or waiting.release_number >= message.number:
            return
        if waiting.held is not None and waiting.held.after_release >= message.number:
            return
        waiting.release_number, waiting.release_id = message.number, message.id
        if self.offices.term(scope):
            yield from self._place(scope, pool, waiting, now_ms, how="released", number=message.number)

    def _assigned(self, message: PlacementAssigned, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        pool = self._decided_here(message)
        booking = self.state.bookings.get(message.id)
        if pool is None:
            yield Note("void_decision", {"kind": "assigned"}, {"id": message.id})
            if booking is not None and not booking.confirmed:
                yield from self._undo(booking, now_ms)
            return
        if booking is not None:
            booking.confirmed, booking.request = True, None
            booking.assigned = booking.assigned or message
            booking.revision = max(booking.revision, message.revision)
            self._drop_answered(pool, message)
            return
        if self.state.ended(message.request_id, message.attempt) or f"booking {message.id}" in self.state.gone:
            self._drop_answered(pool, message)
            return
        self._book_assigned(pool, message, now_ms, request=None)

    def _undo(self, booking: Booking, now_ms: float) -> Iterator[Effect]:
        """Our decision came after a later owner's mark: it does not count, the request waits again."""
        self.state.release(booking.id, now_ms)
        self._touched.add(booking.instance)
        request = booking.request
        if request is not None and not self.state.ended(booking.request_id, booking.attempt):
            scope = self._scope(request.ask.model, request.ask.version)
            pool = self.state.pools.get(scope)
            if pool is not None and booking.request_id not in pool.waiting:
                waiting = pool.waiting[booking.request_id] = Waiting(request, booking.booked_ms)
                if self.offices.term(scope):
                    yield from self._answer(scope, pool, waiting, now_ms)
        self.state.settle(booking.request_id, booking.gateway)

    def _declined(self, message: PlacementDeclined, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        booking = self.state.release(message.declined, now_ms)
        if booking is not None:
            self._touched.add(booking.instance)
        pool = self._pool(message.model, message.version)
        waiting = pool.waiting.get(message.request_id) if pool is not None else None
        if pool is not None and waiting is not None:
            known = waiting.request
            if (known.attempt, known.revision) <= (message.attempt, message.revision):
                pool.drop(message.request_id)
        self.state.settle(message.request_id, message.gateway)
        yield Note("declined", {"reason": message.reason})

    def _refused(self, message: PlacementRefused, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        pool = self._pool(message.model, message.version)
        waiting = pool.waiting.get(message.request_id) if pool is not None else None
        if pool is not None and waiting is not None and waiting.request.attempt <= message.attempt:
            self._drop_waiting(pool, message.request_id)
        yield from ()

    def _owned(self, message: PlacementOwned, now_ms: float) -> Iterator[Effect]:
        pool = self.state.pools.get(message.scope)
        if pool is None:
            if message.scope.startswith("model:"):
                self._outdated(message.scope, message.term)
            return
        was_owner = self.offices.term(message.scope) > 0
        if self.offices.fold(message.scope, message.term, message.owner):
            self._forget_offers(message.scope)
            yield Note("office_taken", {"scope": message.scope}, level="info")
            yield from self._answer_all(message.scope, pool, now_ms)
            self._touch_pool(pool)
        elif was_owner and not self.offices.term(message.scope):
            self._forget_offers(message.scope)
            yield Note("office_lost", {"scope": message.scope}, {"to": message.owner}, level="warning")

    # ------------------------------------------------------------------------------------------ outcomes and leases

    def _started(self, message: OutcomeStarted, now_ms: float) -> Iterator[Effect]:
        if not self._is_ours(message.instance) or self.state.ended(message.request_id, message.attempt):
            return
        booking = self.state.bookings.get(message.booking)
        if booking is None:
            key = message.booking or f"{message.request_id}:started:{message.attempt}"
            if key in self.state.bookings:
                return
            length = self.state.lengths.get(f"{message.model} {message.service_class} ")
            expected = round(length.mean_tokens) if length is not None else self.knobs.prior_decode_tokens
            booking = Booking(
                id=key,
                request_id=message.request_id,
                attempt=message.attempt,
                gateway=message.gateway,
                instance=message.instance,
                work=Work(
                    prefill_tokens=max(1, message.input_tokens),
                    decode_tokens=expected,
                    kv_tokens=message.kv_tokens or message.input_tokens + expected,
                ),
                booked_ms=now_ms,
                started=True,
            )
            self.state.book(booking)
            self.state.presence.open(message.request_id, message.gateway, "", now_ms)
            pool = self._pool(message.model, message.version)
            waiting = pool.waiting.get(message.request_id) if pool is not None else None
            if pool is not None and waiting is not None and waiting.request.attempt <= message.attempt:
                pool.drop(message.request_id)
            self._touched.add(message.instance)
            yield Note("booked_by_start")
        elif self.state.start(booking):
            booking.confirmed, booking.request = True, None
            self._touched.add(booking.instance)

    def _finished(self, message: OutcomeFinished, now_ms: float) -> Iterator[Effect]:
        state, request_id = self.state, message.request_id
        known = f"outcome {message.id}" in state.gone
        state.gone[f"outcome {message.id}"] = now_ms
        if message.attempt > 0:
            state.gone[f"attempt {request_id}#{message.attempt}"] = now_ms
        if message.final:
            state.gone[f"request {request_id}"] = now_ms
        booked_ms = now_ms
        for booking in state.bookings_of(request_id):
            if message.final or booking.attempt <= message.attempt or booking.id == message.booking:
                if booking.id == message.booking:
                    booked_ms = booking.booked_ms
                state.release(booking.id, now_ms)
                self._touched.add(booking.instance)
        for pool in state.pools.values():
            waiting = pool.waiting.get(request_id)
            if waiting is not None and (message.final or waiting.request.attempt <= message.attempt):
                pool.drop(request_id)
        state.settle(request_id, message.gateway)
        if not known and message.instance and self._is_ours(message.instance):
            yield from self._learn(message, booked_ms, now_ms)

    def _learn(self, message: OutcomeFinished, booked_ms: float, now_ms: float) -> Iterator[Effect]:
        load = self.state.load(message.instance)
        if load.breaker.judge(message.outcome, booked_ms, now_ms, self.knobs):
            yield Note("breaker_opened", {"instance": message.instance}, {"outcome": message.outcome}, level="warning")
        self._touched.add(message.instance)
        if message.outcome != "completed":
            return  # a cut answer teaches neither length nor pace
        self.state.length(message.model, message.service_class, message.task).learn(message.output_tokens)
        self.state.length(message.model, message.service_class, "").learn(message.output_tokens)
        tpot_ms = message.times.tpot_ms
        if tpot_ms is not None:
            load.tpot_ms = tpot_ms if load.tpot_ms is None else load.tpot_ms + 0.1 * (tpot_ms - load.tpot_ms)

    def _leased(self, message: GatewayLeased, now_ms: float) -> Iterator[Effect]:
        for request_id in self.state.presence.lease(message, now_ms):
            yield from self._expire(request_id, "lease_omits", now_ms)

    def _expire(self, request_id: str, why: str, now_ms: float) -> Iterator[Effect]:
        """The gateway does not have it open any more: whatever is here of it ends."""
        for booking in self.state.bookings_of(request_id):
            self.state.release(booking.id, now_ms)
            self._touched.add(booking.instance)
            yield Note("expired", {"what": "booking", "why": why}, {"booking": booking.id}, level="warning")
        for pool in self.state.pools.values():
            if pool.drop(request_id) is not None:
                yield Note("expired", {"what": "hold", "why": why}, {"request": request_id}, level="warning")
        for gateway in self.state.presence.gateways:
            self.state.presence.close(request_id, gateway)

    # ------------------------------------------------------------------------------------------ room

    def _reported(self, message: CapacityReported, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site or not self.state.view.fold(message, now_ms):
            return
        load = self.state.load(message.instance)
        if load.incarnation != message.incarnation:
            if load.incarnation:
                # The engine began anew: its gauges and its cache are gone, what we booked there is not (P01).
                load.breaker.reset()
                load.foreign = []
                self.index.clear(message.instance)
                yield Note("incarnation_changed", {"instance": message.instance}, level="info")
            load.incarnation = message.incarnation
        load.sample(message)
        self._touched.add(message.instance)
        scope = self._scope(message.model, message.version)
        pool = self.state.pools.get(scope)
        if pool is not None and pool.blocked and self.offices.term(scope) and self._usable(message.instance, now_ms):
            yield from self._unblock(scope, pool, now_ms)

    def _unblock(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """An instance may have come (back): who waited for one is placed, or waits for room from now on."""
        for waiting in list(pool.waiting.values()):
            held = waiting.held
            if held is None or held.lacks != NO_INSTANCE:
                continue
            situation, candidates = self._consider(waiting.request, waiting, now_ms)
            able = [c for c in candidates if not c.out]
            if not able:
                continue
            closed = self._queued(pool, waiting) > 0
            chosen = None if closed else self.picker(situation, able)
            if chosen is not None:
                yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how="room")
            else:
                lacks = "newcomer" if closed else ""
                yield from self._hold(
                    scope, pool, waiting, situation, candidates, now_ms, lacks=lacks, number=held.after_release
                )

    def _room_declined(self, message: RoomDeclined, now_ms: float) -> Iterator[Effect]:
        offer = self._offers.get(message.instance)
        if message.site == self.site and offer is not None:
            offer.unanswered_since_ms = None
            offer.declined_until_ms = now_ms + max(0.0, message.for_ms)
        yield from ()

    def _after(self, now_ms: float) -> Iterator[Effect]:
        """Offer the room that changed, then ask to be woken when something is due."""
        touched, self._touched = self._touched, set()
        for name in sorted(touched):
            heard = self.state.view.instances(self.site).get(name)
            if heard is None:
                continue
            scope = self._scope(heard.report.model, heard.report.version)
            pool = self.state.pools.get(scope)
            if pool is None or not pool.held or not self.offices.term(scope):
                continue
            if self.fleet.policy.placement == "round-robin":
                yield from self._answer_all(scope, pool, now_ms)
            else:
                yield from self._offer(scope, pool, name, now_ms)
        due_ms = self._next_due_ms(now_ms)
        if due_ms < self._wake_ms:
            self._wake_ms = due_ms
            yield WakeAt(due_ms)

    def _offer(self, scope: str, pool: Pool, name: str, now_ms: float) -> Iterator[Effect]:
        offer, room = self._offer_of(name), self._room(name, now_ms)
        usable = self._usable(name, now_ms)
        if usable and not any(work and not room.lacks(work) for work in map(_queued_work, pool.waiting.values())):
            return  # no held request fits: asking would only be declined
        if not usable and not offer.room.any():
            return  # nothing was offered, nothing is taken back
        same = (room, pool.last_released) == (offer.room, offer.last_released)
        if same and (
            offer.unanswered_since_ms is not None
            or now_ms < offer.declined_until_ms
            or (offer.declined_until_ms <= offer.said_ms and now_ms - offer.said_ms < self.knobs.offer_repeat_ms)
        ):
            return
        if now_ms - offer.said_ms < self.knobs.offer_gap_ms:
            offer.due_ms = offer.said_ms + self.knobs.offer_gap_ms
            return
        term = self.offices.term(scope)
        offer.revision += 1
        offer.id = f"{name}:room:{term}:{offer.revision}"
        offer.room, offer.last_released = room, pool.last_released
        offer.said_ms, offer.due_ms = now_ms, _INFINITY
        if not room.any():
            offer.unanswered_since_ms = None
        elif offer.unanswered_since_ms is None:
            offer.unanswered_since_ms = now_ms
        yield Publish(
            RoomOffered(
                id=offer.id,
                term=term,
                time_unix_ms=int(now_ms),
                site=self.site,
                model=pool.model,
                version=pool.version,
                instance=name,
                revision=offer.revision,
                prefill_tokens=room.prefill_tokens,
                idle=room.idle,
                sequences=room.sequences,
                kv_tokens=room.kv_tokens,
                last_released=pool.last_released,
                held=pool.held,
            )
        )
        yield Note("offered")

    def _fill_unanswered(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """SLOMax is silent: fill the instances that it was offered, earliest deadline first, and say so."""
        answer_ms = self._answer_ms()
        for name in self._instances_of(pool):
            offer = self._offers.get(name)
            if offer is None or offer.unanswered_since_ms is None or now_ms < offer.unanswered_since_ms + answer_ms:
                continue
            offer.unanswered_since_ms = None
            filled = 0
            for waiting in sorted(pool.waiting.values(), key=_by_deadline):
                work = _queued_work(waiting)
                if work is None or waiting.patience_left_ms(now_ms, self.knobs.hold_max_ms) <= 0:
                    continue
                room = self._room(name, now_ms)
                if not room.any():
                    break
                if room.lacks(work):
                    continue
                for effect in self._place(scope, pool, waiting, now_ms, how="unanswered", only=name):
                    filled += isinstance(effect, Publish)
                    yield effect
            # Its next room is offered as usual; what is left unfilled now is not worth asking about at once.
            offer.declined_until_ms = now_ms + self.knobs.offer_repeat_ms
            yield Note("offer_unanswered", {"filled": "yes" if filled else "no"}, {"instance": name}, level="info")

    def _room(self, name: str, now_ms: float) -> Room:
        """Room to offer; none where no request may go at all."""
        if not self._usable(name, now_ms):
            return NO_ROOM
        heard = self.state.view.instances(self.site)[name]
        return policy.room_of(self.fleet, self.site, heard, self.state.load(name), now_ms, self.knobs)

    def _usable(self, name: str, now_ms: float) -> bool:
        """Whether requests may go to the instance, as far as that does not depend on the request."""
        heard = self.state.view.instances(self.site).get(name)
        if heard is None:
            return False
        report = heard.report
        fresh = now_ms - heard.heard_ms <= FRESH_MS
        return report.ready and not report.draining and fresh and bool(report.endpoint_url)

    def _answer_ms(self) -> float:
        """How long SLOMax may take: it may run at any entry."""
        entries = [name for name, site in self.fleet.sites.items() if site.entry]
        rtts = [self.fleet.rtt_ms(self.site, entry) for entry in entries]
        slowest = max((UNKNOWN_RTT_MS if rtt is None else rtt for rtt in rtts), default=UNKNOWN_RTT_MS)
        return max(self.knobs.offer_answer_ms, 3 * slowest)

    def _touch_due(self, pool: Pool, now_ms: float) -> None:
        for name in self._instances_of(pool):
            offer = self._offers.get(name)
            if pool.held and (offer is None or offer.due_ms <= now_ms or offer.declined_until_ms <= now_ms):
                self._touched.add(name)

    def _next_due_ms(self, now_ms: float) -> float:
        due = now_ms + TICK_MS
        answer_ms = self._answer_ms() if self._offers else 0.0
        for offer in self._offers.values():
            due = min(due, offer.due_ms)
            if offer.unanswered_since_ms is not None:
                due = min(due, offer.unanswered_since_ms + answer_ms)
            if offer.declined_until_ms > now_ms:
                due = min(due, offer.declined_until_ms)
        return max(due, now_ms)

    # ------------------------------------------------------------------------------------------ small things

    def _queued(self, pool: Pool, but: Waiting) -> int:
        """How many others wait for room here; who waits for an instance does not close the pool to newcomers."""
        return pool.held - pool.blocked - (_queued_work(but) is not None)

    def _scope(self, model: str, version: str) -> str:
        return f"pool:{self.site}:{model}:{version}"

    def _pool(self, model: str, version: str) -> Pool | None:
        return self.state.pools.get(self._scope(model, version))

    def _ensure_pools(self) -> None:
        for model, version in self.fleet.pools(self.site):
            self.state.pools.setdefault(self._scope(model, version), Pool(model, version))

    def _instances_of(self, pool: Pool) -> list[str]:
        return sorted(
            name
            for name, heard in self.state.view.instances(self.site).items()
            if heard.report.model == pool.model and heard.report.version == pool.version
        )

    def _forget_offers(self, scope: str) -> None:
        """Another owner offers now, or this one offers anew."""
        for name in self._instances_of(self.state.pools[scope]):
            self._offers.pop(name, None)

    def _touch_pool(self, pool: Pool) -> None:
        self._touched.update(self._instances_of(pool))

    def _offer_of(self, name: str) -> Offer:
        return self._offers.setdefault(name, Offer())

    def _is_ours(self, instance: str) -> bool:
        return instance in self.state.view.instances(self.site) or instance in self.fleet.sites[self.site].instances

    def _outdated(self, office: str, term: int) -> bool:
        """Whether a command of another office comes from before its present owner; fallbacks have no term."""
        known = self.state.terms.get(office, 0)
        if term > known:
            self.state.terms[office] = term
        return 0 < term < known

    def _decided_here(self, message: PlacementHeld | PlacementAssigned) -> Pool | None:
        """The pool that a TokenPilot of this site decided for, unless a later owner's mark came before it."""
        scope = self._scope(message.model, message.version)
        return None if self.offices.void(scope, message.term) else self.state.pools.get(scope)

    def _drop_answered(self, pool: Pool, message: PlacementAssigned) -> None:
        waiting = pool.waiting.get(message.request_id)
        if waiting is not None:
            known = waiting.request
            if (known.attempt, known.revision) <= (message.attempt, message.revision):
                pool.drop(message.request_id)
        self.state.settle(message.request_id, message.gateway)

    def _drop_waiting(self, pool: Pool, request_id: str) -> None:
        waiting = pool.drop(request_id)
        if waiting is not None:
            self.state.settle(request_id, waiting.request.ask.gateway)

    def _start_anew(self, now_ms: float) -> None:
        self.state.view.renew(now_ms)
        for offer in self._offers.values():
            if offer.unanswered_since_ms is not None:
                offer.unanswered_since_ms = now_ms
        for sign in self.state.presence.gateways.values():
            sign.heard_ms = max(sign.heard_ms, now_ms)

    def _forget(self, now_ms: float) -> None:
        """Drop what is left of instances that are gone."""
        self.state.view.forget(now_ms - FORGET_MS)
        present = self.state.view.instances(self.site)
        for name in [n for n, load in self.state.loads.items() if n not in present and load.sequences == 0]:
            del self.state.loads[name]
            self._offers.pop(name, None)
            self.index.clear(name)


class _Snapshot(msgspec.Struct):
    state: State
    marks: dict[str, Office]


def _queued_work(waiting: Waiting) -> Work | None:
    """The work of a hold that waits for room; None when it waits for an instance, or for its first answer."""
    held = waiting.held
    return held.work if held is not None and held.lacks != NO_INSTANCE else None


def _by_deadline(waiting: Waiting) -> tuple[float, int, str]:
    ask = waiting.request.ask
    return waiting.deadline_ms(), ask.received_unix_ms, ask.request_id
