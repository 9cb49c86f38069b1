"""SLOMax's core: folds every request's road and answers what its offices owe an answer.

Pure: `(message, now_ms) -> effects`. While it holds no office for a scope it folds the same events and says nothing,
so that a standby that takes over knows what was decided and never decides a request twice. Three rooms share one fold
(`desk.py`): `admission.py` says whether, `releases.py` when, `shares.py` how much of a pool is whose.
"""

from collections.abc import Callable, Iterable
from heapq import heappop
from operator import attrgetter
from typing import Any

import msgspec

from tokenfleet.effects import Effect, Note, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet.slomax import fairness, gate, policy, quota
from tokenfleet.slomax.admission import Admission, at
from tokenfleet.slomax.releases import RELEASE_MS, Releases
from tokenfleet.slomax.shares import Shares
from tokenfleet.slomax.state import INFINITY, State
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionLent, AdmissionOwned, AdmissionShared
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.room import RoomOffered

SHARED_EVERY_MS = 5_000.0
#: what is lent of quotas is said so often, well within what the stream keeps
LENT_EVERY_MS = 300_000.0
#: gateways' silence is looked at so often at least
LOOK_MS = 1_000.0
#: a new owner's releases are numbered this far above the last seen, clear of what its predecessor still said
NUMBER_GAP = 100
_changed = attrgetter("changed")


class SLOMax(Admission, Releases, Shares):
    """One replica of SLOMax, for every entry's admissions and every site's releases."""

    def __init__(self, fleet: Fleet, *, replica: str, choose: policy.Chooser = policy.choose) -> None:
        super().__init__(fleet, replica=replica, choose=choose)
        self._look_ms = 0.0
        self._shared_ms = 0.0
        self._sweep_ms = 0.0
        self._lent_ms = 0.0
        self._folds: dict[type[Event], Callable[[Any, float], None]] = {
            RequestReceived: self._received,
            AdmissionDecided: self._decided,
            AdmissionLent: self._lent,
            AdmissionOwned: self._owned,
            AdmissionShared: self._shared,
            PlacementRequested: self._requested,
            PlacementWithdrawn: self._withdrawn,
            PlacementHeld: self._held,
            PlacementReleased: self._released,
            PlacementAssigned: self._assigned,
            PlacementDeclined: self._declined,
            PlacementRefused: self._refused,
            RoomOffered: self._offered,
            CapacityReported: self._reported,
            OutcomeFinished: self._finished,
            GatewayLeased: self._leased,
            GoodputMeasured: self._measured,
        }

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold one event and return what follows; unknown kinds are ignored."""
        if self.state.presence.hear(now_ms):
            self._renew(now_ms)
        fold = self._folds.get(type(message))
        if fold is not None:
            fold(message, now_ms)
        return self._effects(now_ms)

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Mend silent hops, end outlived holds, expire requests whose gateway is gone, publish shares."""
        if now_ms >= self._look_ms:
            self._look_ms = now_ms + LOOK_MS
            for request_id in self.state.presence.silent(now_ms):
                self._expire(request_id, now_ms)
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + 10_000.0
            self.state.sweep(now_ms)
            self.state.capacity.forget(now_ms - 3_600_000.0)
        while self._timers and self._timers[0][0] <= now_ms:
            _, kind, request_id = heappop(self._timers)
            if kind == "hop":
                self._hop_due(request_id, now_ms)
            elif kind == "patience":
                self._patience_due(request_id, now_ms)
            elif kind == "release":
                self._release_due(request_id, now_ms)
        if now_ms >= self._shared_ms:
            self._shared_ms = now_ms + SHARED_EVERY_MS
            self._share(now_ms)
        if now_ms >= self._lent_ms:
            self._lent_ms = now_ms + LENT_EVERY_MS
            self._lent_again(now_ms)
        return self._effects(now_ms)

    def scopes(self) -> tuple[str, ...]:
        """Admissions of every entry, releases of every site with instances."""
        entries = [f"admission:{name}" for name, site in self.fleet.sites.items() if site.entry]
        return (*entries, *(f"release:{name}" for name, site in self.fleet.sites.items() if site.instances))

    def mark(self, scope: str, term: int, now_ms: float) -> Event:
        """The mark that opens this replica's term for a scope."""
        self.offices.issue(scope, term)
        return AdmissionOwned(
            id=f"{scope}:owned:{term}",
            term=term,
            time_unix_ms=int(now_ms),
            site=scope.partition(":")[2],
            scope=scope,
            owner=self.replica,
        )

    def resign(self, scope: str, now_ms: float) -> Iterable[Effect]:
        """The lease is lost."""
        self.offices.resign(scope)
        return [Note("slomax_office", {"what": "resigned"}, {"scope": scope}, level="info")]

    def resumed(self, now_ms: float) -> Iterable[Effect]:
        """The bus is back after a silence: nobody is late because of it."""
        self.state.presence.heard_ms = now_ms
        for sign in self.state.presence.gateways.values():
            sign.heard_ms = max(sign.heard_ms, now_ms)
        self._renew(now_ms)
        return self._effects(now_ms)

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterable[Effect]:
        """Take a reloaded fleet file: quotas, shares and policy hold for what is decided from now on."""
        before, self.fleet = self.fleet, fleet
        quota.reload(before, fleet, self.state, now_ms)
        return self._effects(now_ms)

    def snapshot(self) -> bytes:
        """The fold as msgpack."""
        self.state.offices = dict(self.offices.marks)
        return msgspec.msgpack.encode(self.state)

    def restore(self, data: bytes) -> None:
        """Take a checkpoint over; raises ValueError for one of another shape."""
        try:
            self.state = msgspec.msgpack.decode(data, type=State)
        except msgspec.DecodeError as error:
            raise ValueError(f"no checkpoint of this version: {error}") from None
        self.offices.marks = dict(self.state.offices)
        self._timers = []
        for request_id, one in self.state.open.items():
            self._arm("hop", one.watch_until_ms, request_id)
        for key in self.state.where.values():
            for held in self.state.pools[key].held.values():
                self._arm("patience", held.patience_until_ms, held.request_id)

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Open requests, reserved tokens, holds per pool and class: all exactly zero when nothing is open."""
        held: dict[tuple[tuple[str, str], ...], float] = {}
        for (site, model, version), pool in self.state.pools.items():
            for name in self.fleet.classes:
                labels = (("site", site), ("model", model), ("version", version), ("service_class", name))
                held[labels] = float(pool.count(name))
        reserved: dict[tuple[tuple[str, str], ...], float] = {}
        for (name, _), account in self.state.accounts.items():
            reserved[(("tenant", name),)] = reserved.get((("tenant", name),), 0.0) + sum(account.open.values())
        shares: dict[tuple[tuple[str, str], ...], float] = {}
        for (site, model, version), pool in self.state.pools.items():
            for name, share in fairness.shares_of(self.fleet, pool).items():
                shares[("site", site), ("model", model), ("version", version), ("service_class", name)] = share
        greedy: dict[tuple[tuple[str, str], ...], float] = {}
        for (site, model, version), pool in self.state.pools.items():
            greedy[("site", site), ("model", model), ("version", version)] = float(len(pool.greedy))
        return {
            "open_requests": {(): float(len(self.state.open))},
            "running_requests": {(): float(len(self.state.inside))},
            "greedy_tenants": greedy,
            "held_requests": held,
            "reserved_tokens": reserved,
            "share": shares,
        }

    def _owned(self, message: AdmissionOwned, now_ms: float) -> None:
        if not self.offices.fold(message.scope, message.term, message.owner):
            return
        self._out.append(Note("slomax_office", {"what": "taken"}, {"scope": message.scope}, level="info"))
        kind, _, where = message.scope.partition(":")
        if kind == "admission":
            for one in list(self.state.open.values()):
                if one.ask.entry != where or one.refused is not None:
                    continue
                if one.decided is None or (one.attempt, one.revision) > at(one.decided):
                    self._answer(one, message.term, now_ms)
                elif not one.decided.admitted:
                    verdict = gate.Verdict(one.decided.reason, one.decided.status, one.decided.retry_after_s)
                    self._refuse_request(one, verdict, message.term, now_ms, cause=one.decided.id)
                else:
                    self._watch(one, now_ms)
            return
        for key, pool in self.state.pools.items():
            if key[0] != where:
                continue
            pool.number += NUMBER_GAP
            for held in list(pool.held.values()):
                self._arm("patience", held.patience_until_ms, held.request_id)
                self._arm("release", now_ms + RELEASE_MS, held.request_id)
            for instance in list(pool.rooms):
                self._fill(key, instance, now_ms)

    def _renew(self, now_ms: float) -> None:
        """We were deaf: judge nobody by what was not heard meanwhile."""
        self.state.capacity.renew(now_ms)
        for one in self.state.open.values():
            if one.watch_until_ms < INFINITY:
                one.watch_until_ms = INFINITY
                self._watch(one, now_ms)

    def _is_over(self, at_ms: float, kind: str, request_id: str) -> bool:
        """Nothing is due then any more: most hops are answered long before, and nobody need wake for them."""
        if kind == "hop":
            one = self.state.open.get(request_id)
            return one is None or one.watch_until_ms != at_ms
        return kind == "patience" and request_id not in self.state.where

    def _effects(self, now_ms: float) -> list[Effect]:
        out, self._out = self._out, []
        while self._timers and self._is_over(*self._timers[0]):
            heappop(self._timers)
        wishes = [self._timers[0][0]] if self._timers else []
        quiet = self.state.presence.next_ms()
        if quiet < INFINITY:
            wishes.append(max(quiet, self._look_ms))
        if self.state.seen or any(map(_changed, self.state.pools.values())):
            wishes.append(self._shared_ms)
        if self.state.lent:
            wishes.append(self._lent_ms)
        if self.state.closed:
            wishes.append(self._sweep_ms)
        if wishes:
            out.append(WakeAt(max(min(wishes), now_ms)))
        return out
