"""Promises of capacity inside FleetMind: who is answered what, under which office, and what they close to others.

Decides the answers to operators and to the fleet file, one after the other under the office `plan:fleet`, and which
grants stand when offices change. The arithmetic is `planning.reservations`'. Refuses to know plans and placements.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.eligibility import CapacityView
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.planning.reservations import Book, Reservation, closed_share
from tokenfleet.offices import Offices
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.request import Ask
from tokenfleet_schemas.reservation import (
    ReservationGranted,
    ReservationOwned,
    ReservationRefused,
    ReservationRequested,
    ReservationRevoked,
    ReservationWithdrawn,
)

#: what `Promises.hear` folds
HEARD: frozenset[type[Event]] = frozenset(
    {ReservationRequested, ReservationWithdrawn, ReservationGranted, ReservationRefused, ReservationRevoked}
)
#: the office that plans and grants; one for the whole fleet, because sites' GPUs are shared by all models
PLAN_SCOPE = "plan:fleet"
#: a holder that asked for nothing for so long lends its promise, ms
IDLE_MS = 30_000.0
#: what holders use of a pool is counted anew after this, ms
USE_MS = 250.0


class PromiseState(msgspec.Struct):
    """What is promised; part of FleetMind's checkpoint."""

    book: Book = msgspec.field(default_factory=Book)
    #: promise → when its holder was last seen
    holders_ms: dict[str, float] = {}
    #: promise → what an operator asked for last and nobody has answered
    asked: dict[str, ReservationRequested | ReservationWithdrawn] = {}


class Promises:
    """The promises of one FleetMind replica."""

    def __init__(self, replica: str, offices: Offices) -> None:
        self.replica = replica
        self.offices = offices
        self.state = PromiseState()
        self._used: dict[tuple[str, str], tuple[float, dict[str, float]]] = {}

    def mark(self, term: int, now_ms: float) -> Event:
        """The mark that opens this replica's term."""
        return ReservationOwned(
            id=f"{PLAN_SCOPE}:owned:{term}",
            term=term,
            time_unix_ms=int(now_ms),
            scope=PLAN_SCOPE,
            owner=self.replica,
        )

    def hear(self, fleet: Fleet, message: Event, now_ms: float) -> Iterator[Effect]:
        """Fold one event of the reservations' family; others are ignored."""
        if isinstance(message, ReservationRequested | ReservationWithdrawn):
            known = self.state.book.given.get(message.reservation)
            if known is None or known.granted != message.id:
                self.state.asked[message.reservation] = message
                yield from self.answer(fleet, now_ms)
        elif isinstance(message, ReservationGranted):
            self._answered(message.reservation, message.cause)
            yield from self._granted(message, now_ms)
        elif isinstance(message, ReservationRefused):
            self._answered(message.reservation, message.cause)
        elif isinstance(message, ReservationRevoked):
            self._answered(message.reservation, message.cause)
            self._revoked(message)

    def seen(self, ask: Ask, now_ms: float) -> None:
        """Somebody asks for something: its promises are not idle."""
        for one in self.state.book.given.values():
            if one.model == ask.model and one.covers(ask.tenant, ask.service_class):
                self.state.holders_ms[one.name] = now_ms

    @property
    def _term(self) -> int:
        return self.offices.term(PLAN_SCOPE)

    def closed(
        self,
        fleet: Fleet,
        capacity: CapacityView,
        site: str,
        ask: Ask,
        now_ms: float,
        open_asks: Callable[[], Iterable[Ask]],
    ) -> float:
        """Part of a site's room for this request's model that promises to others close to it, 0..1.

        `open_asks` gives the requests that are at the site now; asked for only where promises are open there, and not
        for each request.
        """
        book = self.state.book
        if not book.given:
            return 0.0
        given = [one for one in book.at(now_ms) if one.site == site and one.model == ask.model]
        if not given:
            return 0.0
        reports = [heard.report for heard in capacity.instances(site).values() if heard.report.ready]
        reports = [report for report in reports if report.model == ask.model]
        declared = fleet.sites[site].instances
        gpus = float(sum(r.gpus or (declared[r.instance].gpus if r.instance in declared else 0) for r in reports))
        key = (site, ask.model)
        known = self._used.get(key)
        if known is None or now_ms - known[0] >= USE_MS:
            room = sum(report.max_sequences or 0 for report in reports)
            used = dict.fromkeys((one.name for one in given), 0.0)
            for other in open_asks():
                for one in given:
                    if other.model == ask.model and one.covers(other.tenant, other.service_class):
                        used[one.name] += gpus / room if room else 0.0
                        break
            known = self._used[key] = (now_ms, used)
        active = {one.name for one in given if now_ms - self.state.holders_ms.get(one.name, -IDLE_MS) < IDLE_MS}
        return closed_share(
            given, used=known[1], active=active, gpus=gpus, tenant=ask.tenant, service_class=ask.service_class
        )

    def _answered(self, name: str, cause: str) -> None:
        pending = self.state.asked.get(name)
        if pending is not None and pending.id == cause:
            del self.state.asked[name]

    def answer(self, fleet: Fleet, now_ms: float) -> Iterator[Effect]:
        """What operators asked for, in their order; without the office it waits for who has it."""
        if not self._term:
            return
        for name, message in list(self.state.asked.items()):
            del self.state.asked[name]
            if isinstance(message, ReservationRequested):
                yield from self._ask(fleet, _promise(message), message.id, now_ms)
            elif name in self.state.book.given:
                yield self._revoke(name, "cancelled_by_operator", message.id, now_ms)
            else:
                yield self._refuse(message.site, name, message.model, "unknown_reservation", message.id, now_ms)

    def _refuse(self, site: str, name: str, model: str, why: str, cause: str, now_ms: float) -> Publish:
        return Publish(
            ReservationRefused(
                id=f"{cause}:refused",
                cause=cause,
                term=self._term,
                time_unix_ms=int(now_ms),
                site=site,
                reservation=name,
                model=model,
                reason=why,
            ),
            durable=True,
        )

    def _ask(self, fleet: Fleet, asked: Reservation, cause: str, now_ms: float) -> Iterator[Effect]:
        """Grant or refuse; what is granted is in the book before the next question is heard."""
        before = self.state.book.given.get(asked.name)
        revision = before.revision + 1 if before is not None else 0
        asked = msgspec.structs.replace(asked, granted=cause, term=self._term, revision=revision)
        why = self.state.book.ask(fleet, asked, now_ms)
        self._used.clear()
        labels = {"site": asked.site, "what": why or "granted"}
        yield Note("reservation", labels, {"reservation": asked.name}, level="warning" if why else "info")
        if why:
            yield self._refuse(asked.site, asked.name, asked.model, why, cause, now_ms)
            return
        yield Publish(
            ReservationGranted(
                id=f"{cause}:granted:{revision}",
                cause=cause,
                term=self._term,
                time_unix_ms=int(now_ms),
                site=asked.site,
                reservation=asked.name,
                model=asked.model,
                tenant=asked.tenant,
                service_class=asked.service_class,
                gpu_seconds_per_s=asked.gpu_seconds_per_s,
                from_unix_ms=int(asked.from_ms),
                until_unix_ms=int(asked.until_ms),
                revision=revision,
            ),
            durable=True,
        )

    def _revoke(self, name: str, reason: str, cause: str, now_ms: float) -> Publish:
        one = self.state.book.given.pop(name)
        self.state.holders_ms.pop(name, None)
        self._used.clear()
        return Publish(
            ReservationRevoked(
                id=f"reservation:{name}:revoked:{one.revision}:{self._term}",
                cause=cause,
                term=self._term,
                time_unix_ms=int(now_ms),
                site=one.site,
                reservation=name,
                model=one.model,
                reason=reason,
                revision=one.revision,
            ),
            durable=True,
        )

    def _granted(self, message: ReservationGranted, now_ms: float) -> Iterator[Effect]:
        """A grant over the bus: ours, or one that stood before we did. Of an office that had ended it is void."""
        known = self.state.book.given.get(message.reservation)
        if self.offices.void(PLAN_SCOPE, message.term) and (known is None or known.term != message.term):
            mark = self.offices.marks[PLAN_SCOPE]
            # a fold from the beginning reads the newest mark last: older grants come before it and are not void
            yield Note("reservation_void", {}, {"reservation": message.reservation, "mark": str(mark.term)}, "warning")
            return
        if known is not None and (known.term, known.revision) >= (message.term, message.revision):
            return
        if message.until_unix_ms <= now_ms:
            return
        self.state.book.given[message.reservation] = Reservation(
            name=message.reservation,
            site=message.site,
            model=message.model,
            tenant=message.tenant,
            service_class=message.service_class,
            gpu_seconds_per_s=message.gpu_seconds_per_s,
            from_ms=float(message.from_unix_ms),
            until_ms=float(message.until_unix_ms),
            granted=message.cause,
            term=message.term,
            revision=message.revision,
        )
        self._used.clear()

    def _revoked(self, message: ReservationRevoked) -> None:
        known = self.state.book.given.get(message.reservation)
        if known is not None and message.revision >= known.revision and message.term >= known.term:
            del self.state.book.given[message.reservation]
            self._used.clear()

    def file(self, fleet: Fleet, now_ms: float) -> Iterator[Effect]:
        """Ask for the promises of the fleet file that are new or changed; give up those that it no longer has."""
        for name, given in sorted(self.state.book.given.items()):
            if given.granted.startswith("fleet.toml:") and name not in fleet.reservations:
                yield self._revoke(name, "not_in_fleet_file", given.granted, now_ms)
        for name, promise in sorted(fleet.reservations.items()):
            asked = Reservation(
                name=name,
                site=promise.site,
                model=promise.model,
                tenant=promise.tenant,
                service_class=promise.service_class,
                gpu_seconds_per_s=promise.gpu_seconds_per_s,
                from_ms=promise.begin.timestamp() * 1000.0,
                until_ms=promise.end.timestamp() * 1000.0,
            )
            known = self.state.book.given.get(name)
            if asked.until_ms <= now_ms or (known is not None and _same(known, asked)):
                continue
            cause = (
                f"fleet.toml:{name}:{asked.site}:{asked.gpu_seconds_per_s}:{int(asked.from_ms)}-{int(asked.until_ms)}"
            )
            yield from self._ask(fleet, asked, cause, now_ms)


def _promise(message: ReservationRequested) -> Reservation:
    return Reservation(
        name=message.reservation,
        site=message.site,
        model=message.model,
        tenant=message.tenant,
        service_class=message.service_class,
        gpu_seconds_per_s=message.gpu_seconds_per_s,
        from_ms=float(message.from_unix_ms),
        until_ms=float(message.until_unix_ms),
    )


def _same(one: Reservation, other: Reservation) -> bool:
    """The same terms, whoever granted them."""
    return msgspec.structs.replace(one, granted="", term=0, revision=0) == other
