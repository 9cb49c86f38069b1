"""SLOMax's core: folds every request's road and answers what its offices owe an answer.

Pure: `(message, now_ms) -> effects`. While it holds no office for a scope it folds the same events and says nothing,
so that a standby that takes over knows what was decided and never decides a request twice.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

import msgspec

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import allowed_ready_sites, hop_timeout_ms, no_site_reason, permitted_sites
from tokenfleet.fleet import Fleet
from tokenfleet.offices import Offices
from tokenfleet.slomax import policy
from tokenfleet.slomax.state import INFINITY, Account, Held, Open, Pool, PoolKey, Room, State, Tried
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionOwned, AdmissionShared, Share
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.placement import (
    Considered,
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.room import RoomDeclined, RoomOffered

#: an offer older than this says nothing about the room now: TokenPilot has filled it itself or offers again
OFFER_MS = 1_000.0
#: how long a declined offer stays empty unless something that fits comes
DECLINE_MS = 500.0
#: a release that nobody answered may be repeated after this
RELEASE_MS = 1_500.0
SHARED_EVERY_MS = 5_000.0
#: gateways' silence is looked at so often at least
LOOK_MS = 1_000.0
#: a new owner's releases are numbered this far above the last seen, clear of what its predecessor still said
NUMBER_GAP = 100


class SLOMax:
    """One replica of SLOMax, for every entry's admissions and every site's releases."""

    def __init__(self, fleet: Fleet, *, replica: str, choose: policy.Chooser = policy.choose) -> None:
        self.fleet = fleet
        self.replica = replica
        self.choose = choose
        self.state = State()
        self.offices = Offices(replica)
        self._timers: list[tuple[float, str, str]] = []
        self._out: list[Effect] = []
        self._look_ms = 0.0
        self._shared_ms = 0.0
        self._sweep_ms = 0.0
        self._folds: dict[type[Event], Callable[[Any, float], None]] = {
            RequestReceived: self._received,
            AdmissionDecided: self._decided,
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
        }

    # ------------------------------------------------------------------ what the shell calls

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
        for name, account in self.state.accounts.items():
            old, new = before.tenants.get(name), fleet.tenants.get(name)
            if new is not None and (old is None or old.tokens_per_minute != new.tokens_per_minute):
                account.level, account.at_ms = float(new.tokens_per_minute), now_ms  # a new bucket starts full
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
        reserved: dict[tuple[tuple[str, str], ...], float] = {
            (("tenant", name),): float(sum(account.open.values())) for name, account in self.state.accounts.items()
        }
        return {
            "open_requests": {(): float(len(self.state.open))},
            "held_requests": held,
            "reserved_tokens": reserved,
        }

    # ------------------------------------------------------------------ admission

    def _received(self, message: RequestReceived, now_ms: float) -> None:
        state, ask = self.state, message.ask
        rid = ask.request_id
        if rid in state.closed:
            return
        one = state.open.get(rid)
        if one is None:
            one = state.open[rid] = Open(
                ask, message.attempt, message.revision, now_ms - message.elapsed_ms, message.id
            )
            state.presence.open(rid, ask.gateway, ask.gateway_incarnation, now_ms)
        elif (message.attempt, message.revision) > (one.attempt, one.revision):
            one.attempt, one.revision, one.cause = message.attempt, message.revision, message.id
        elif one.decided is not None:
            return
        term = self.offices.term(f"admission:{ask.entry}")
        if term:
            self._answer(one, term, now_ms)

    def _answer(self, one: Open, term: int, now_ms: float) -> None:
        """Decide a request, or repeat what was decided for one that was submitted again."""
        rid, ask, before = one.ask.request_id, one.ask, one.decided
        if before is not None:
            if (one.attempt, one.revision) <= (before.attempt, before.revision):
                return
            verdict = policy.Verdict(before.reason, before.status, before.retry_after_s)
        else:
            verdict = policy.judge(self.fleet, self.state, ask, now_ms)
        decided = AdmissionDecided(
            id=f"{rid}:decided:{one.attempt}:{one.revision}:{term}",
            cause=one.cause,
            term=term,
            time_unix_ms=int(now_ms),
            site=ask.entry,
            ask=ask,
            attempt=one.attempt,
            revision=one.revision,
            elapsed_ms=max(0.0, now_ms - one.received_ms),
            admitted=verdict.admitted,
            reason=verdict.reason,
            status=verdict.status,
            retry_after_s=verdict.retry_after_s,
        )
        self._publish(decided)
        if before is None:
            labels = {
                "decision": "admitted" if verdict.admitted else verdict.reason,
                "service_class": ask.service_class,
            }
            self._out.append(Note("slomax_decided", labels))
        self._decided(decided, now_ms)
        if not verdict.admitted:
            self._refuse_request(one, verdict, term, now_ms, cause=decided.id)

    def _decided(self, message: AdmissionDecided, now_ms: float) -> None:
        """Fold a decision: ours, a predecessor's, or the one that a gateway took in our stead."""
        state, ask = self.state, message.ask
        rid = ask.request_id
        if rid in state.closed:
            return
        if not message.fallback and self.offices.void(f"admission:{ask.entry}", message.term):
            return
        one = state.open.get(rid)
        if one is None:
            one = state.open[rid] = Open(
                ask, message.attempt, message.revision, now_ms - message.elapsed_ms, message.id
            )
            state.presence.open(rid, ask.gateway, ask.gateway_incarnation, now_ms)
        first = one.decided is None
        if not first and (message.attempt, message.revision) <= _at(one.decided):
            return
        one.decided = message
        one.cause = message.id
        one.tried = []
        one.attempt, one.revision = max((one.attempt, one.revision), (message.attempt, message.revision))
        if message.admitted:
            if first:
                self._reserve(ask, now_ms)
            self._watch(one, now_ms)

    def _reserve(self, ask: Ask, now_ms: float) -> None:
        tenant = self.fleet.tenants.get(ask.tenant)
        per_minute = float(tenant.tokens_per_minute) if tenant is not None else 0.0
        account = self.state.accounts.setdefault(ask.tenant, Account(per_minute, now_ms))
        if ask.request_id in account.open:
            return
        tokens = policy.reserved_tokens(ask)
        account.refill(per_minute, now_ms)
        account.level -= tokens
        account.open[ask.request_id] = tokens

    def _watch(self, one: Open, now_ms: float) -> None:
        """FleetMind owes a request for a site, unless it has said one for this or a later revision."""
        if one.decided is None or not one.decided.admitted or one.place >= (one.attempt, one.revision):
            return
        if one.refused is not None and one.refused.attempt >= one.attempt:
            return  # the gateway has its answer
        sites = permitted_sites(self.fleet, one.ask.tenant, one.ask.model)
        near = next((s for s in self.fleet.home_order(one.ask.entry, one.ask.model) if s in sites), one.ask.entry)
        one.watch_until_ms = now_ms + hop_timeout_ms(self.fleet, one.ask.entry, near)
        self._arm("hop", one.watch_until_ms, one.ask.request_id)

    def _hop_due(self, request_id: str, now_ms: float) -> None:
        one = self.state.open.get(request_id)
        if one is None or one.watch_until_ms > now_ms:
            return
        term = self.offices.term(f"admission:{one.ask.entry}")
        one.watch_until_ms = INFINITY
        if term:
            self._fall_back(one, term, now_ms)

    def _fall_back(self, one: Open, term: int, now_ms: float) -> None:
        """FleetMind is silent: ask the next allowed and ready site ourselves, home sites first."""
        ask = one.ask
        ready, considered = allowed_ready_sites(self.fleet, self.state.capacity, ask, now_ms, one.excluded)
        site = next((s for s in ready if s not in one.tried), None)
        if site is None:
            if not one.tried:
                reason, wait_ms = no_site_reason(self.fleet, self.state.capacity, ask, now_ms, considered)
                verdict = policy.refusal(ask.request_id, reason, wait_ms)
                self._refuse_request(one, verdict, term, now_ms, cause=one.cause, sites=considered)
            return  # every site was asked: the gateway watches the whole road and submits again
        one.tried.append(site)
        one.attempt = max(one.attempt, one.place[0])
        revision = max(one.revision, one.place[1] + 1 if one.place[0] == one.attempt else 0)
        requested = PlacementRequested(
            id=f"{ask.request_id}:requested:{one.attempt}:{revision}:slomax",
            cause=one.cause,
            time_unix_ms=int(now_ms),
            site=site,
            ask=ask,
            attempt=one.attempt,
            revision=revision,
            elapsed_ms=max(0.0, now_ms - one.received_ms),
            excluded=one.excluded,
            sites=tuple(msgspec.structs.replace(c, chosen=c.name == site) for c in considered),
            fallback="slomax",
        )
        one.place = (one.attempt, revision)
        one.watch_until_ms = now_ms + hop_timeout_ms(self.fleet, ask.entry, site)
        self._arm("hop", one.watch_until_ms, ask.request_id)
        self._publish(requested)
        self._out.append(Note("slomax_fallback", {"site": site}, {"request": ask.request_id}, level="warning"))

    def _refuse_request(
        self,
        one: Open,
        verdict: policy.Verdict,
        term: int,
        now_ms: float,
        *,
        cause: str,
        sites: tuple[Considered, ...] = (),
    ) -> None:
        ask = one.ask
        refused = PlacementRefused(
            id=f"{ask.request_id}:refused:{one.attempt}:{one.revision}:{term}",
            cause=cause,
            term=term,
            time_unix_ms=int(now_ms),
            site=ask.entry,
            request_id=ask.request_id,
            gateway=ask.gateway,
            model=ask.model,
            version=ask.version,
            attempt=one.attempt,
            revision=one.revision,
            reason=verdict.reason,
            status=verdict.status,
            retry_after_s=verdict.retry_after_s,
            sites=sites,
        )
        self._publish(refused)
        self._refused(refused, now_ms)

    # ------------------------------------------------------------------ the road, folded

    def _requested(self, message: PlacementRequested, now_ms: float) -> None:
        ask, rid = message.ask, message.ask.request_id
        if rid in self.state.closed:
            return
        one = self.state.open.get(rid)
        if one is None:
            one = self.state.open[rid] = Open(
                ask, message.attempt, message.revision, now_ms - message.elapsed_ms, message.id
            )
            self.state.presence.open(rid, ask.gateway, ask.gateway_incarnation, now_ms)
        place = (message.attempt, message.revision)
        if place < one.place:
            return
        if message.attempt > one.attempt:
            one.attempt, one.tried = message.attempt, []
        one.excluded = message.excluded if place > one.place else one.excluded
        one.place = place
        if message.fallback != "slomax":
            one.watch_until_ms = INFINITY  # FleetMind, or a gateway, watches this hop itself
        held = self._find_held(rid)
        if held is not None and place > (held.attempt, held.revision):
            key = self.state.where[rid]
            if key[0] != message.site or message.attempt > held.attempt:
                self._unhold(rid)

    def _withdrawn(self, message: PlacementWithdrawn, now_ms: float) -> None:
        """`revision` names the request that is taken back; a hold that still comes from it is void."""
        one = self.state.open.get(message.request_id)
        if one is not None:
            one.place = max(one.place, (message.attempt, message.revision + 1))
        held = self._find_held(message.request_id)
        if held is not None and (held.attempt, held.revision) <= (message.attempt, message.revision):
            self._unhold(message.request_id)

    def _held(self, message: PlacementHeld, now_ms: float) -> None:
        rid, state = message.request_id, self.state
        if rid in state.closed:
            return
        one = state.open.get(rid)
        place = (message.attempt, message.revision)
        if one is not None:
            if one.refused is not None or place < one.place:
                return
            if place > one.answered:
                one.answered = place
            one.watch_until_ms = INFINITY
        key: PoolKey = (message.site, message.model, message.version)
        denial = self.fleet.site_denial(message.tenant, message.model, message.site)
        if denial:
            # Whoever sent it there was wrong: it is never released there. FleetMind's hop, or patience, ends it.
            self._out.append(Note("slomax_hold_denied", {"reason": denial}, {"request": rid}, level="warning"))
            return
        known = self._find_held(rid)
        if known is not None and (known.event == message.id or place < (known.attempt, known.revision)):
            return
        held = self._new_held(message, known if state.where.get(rid) == key else None, now_ms)
        if known is not None:
            if known.released:
                self._give_back(state.pools[state.where[rid]], known, message, held, now_ms)
            state.unhold(rid)
        pool = state.pool(key)
        pool.add(held)
        state.where[rid] = key
        state.presence.open(rid, message.gateway, one.ask.gateway_incarnation if one is not None else "", now_ms)
        self._arm("patience", held.patience_until_ms, rid)
        if not self.offices.term(f"release:{message.site}"):
            return
        if known is None:
            ask = one.ask if one is not None else None
            verdict = policy.shed(self.fleet, state, pool, held, ask, now_ms)
            if not verdict.admitted:
                self._refuse_held(key, held, verdict, now_ms)
                return
        for instance in list(pool.rooms):
            self._fill(key, instance, now_ms)

    def _new_held(self, message: PlacementHeld, known: Held | None, now_ms: float) -> Held:
        """A hold as its pool keeps it; held again at the same site, it keeps its place and what it has tried."""
        held = Held(
            request_id=message.request_id,
            gateway=message.gateway,
            entry=message.entry,
            tenant=message.tenant,
            service_class=message.service_class,
            attempt=message.attempt,
            revision=message.revision,
            event=message.id,
            home_instance=message.home_instance,
            work=message.work,
            own_ms=message.predicted_own_ms,
            wait_ms=message.predicted_wait_ms,
            deadline_ms=INFINITY if message.slack_ms is None else now_ms + message.slack_ms,
            patience_until_ms=now_ms + message.patience_left_ms,
            received_unix_ms=message.received_unix_ms,
            since_ms=now_ms,
            lacks=message.lacks,
            bound=message.bound,
        )
        if known is not None:
            held.since_ms, held.bypassed, held.tried = known.since_ms, known.bypassed, dict(known.tried)
            held.deadline_ms = min(held.deadline_ms, known.deadline_ms)
            held.patience_until_ms = min(held.patience_until_ms, known.patience_until_ms)
        return held

    def _give_back(self, pool: Pool, known: Held, message: PlacementHeld, held: Held, now_ms: float) -> None:
        """A release found too little room: it took nothing, and is not repeated for as little."""
        if message.after_release and message.after_release != known.released:
            held.released = known.released  # answers an older release than the one under way
            return
        release = policy.take_back(pool, known.released)
        room = pool.rooms.get(release.instance) if release is not None else None
        if release is None or room is None:
            return
        left = policy.level(pool, release.instance, room)
        held.tried[release.instance] = Tried(
            now_ms, left.prefill_tokens, left.sequences, left.kv_tokens, left.idle, message.lacks
        )

    def _released(self, message: PlacementReleased, now_ms: float) -> None:
        """Another replica's release; our own was folded when it was said."""
        if self.offices.void(f"release:{message.site}", message.term):
            return
        pool = self.state.pool((message.site, message.model, message.version))
        if message.number <= pool.number:
            return
        held = pool.held.get(message.request_id)
        pool.number = message.number
        if held is not None and not held.released:
            policy.release(self.fleet, pool, held, message.instance, message.number, now_ms)

    def _assigned(self, message: PlacementAssigned, now_ms: float) -> None:
        rid = message.request_id
        one = self.state.open.get(rid)
        if one is not None:
            one.answered = max(one.answered, (message.attempt, message.revision))
            one.watch_until_ms = INFINITY
        held = self._find_held(rid)
        if held is None or message.attempt < held.attempt:
            return
        pool = self.state.pools[self.state.where[rid]]
        if held.released:
            release = pool.releases.get(held.released)
            if release is not None and release.instance != message.instance:
                del pool.releases[held.released]  # it went elsewhere: the room it was meant for is still there
        else:
            changes = policy.charges(self.fleet, pool, held)  # TokenPilot filled the room itself: same price
            policy.settle(pool, changes)
            pool.used[held.service_class] = pool.used.get(held.service_class, 0.0) + held.cost
        self.state.unhold(rid)

    def _declined(self, message: PlacementDeclined, now_ms: float) -> None:
        held = self._find_held(message.request_id)
        if held is not None and message.declined == held.event:
            self._unhold(message.request_id)

    def _refused(self, message: PlacementRefused, now_ms: float) -> None:
        """Whoever refused: nothing is owed any more. What it reserved is given back when the gateway says the end."""
        self._unhold(message.request_id)
        one = self.state.open.get(message.request_id)
        if one is not None:
            one.refused = message
            one.watch_until_ms = INFINITY

    def _finished(self, message: OutcomeFinished, now_ms: float) -> None:
        rid = message.request_id
        held = self._find_held(rid)
        if message.final:
            tokens = 0.0 if message.attempt == 0 else float(message.input_tokens + message.output_tokens)
            self._close(rid, message.gateway, message.tenant, tokens, now_ms)
            return
        if held is not None and held.attempt <= message.attempt:
            self._unhold(rid)
        one = self.state.open.get(rid)
        if one is None or rid in self.state.closed or message.attempt < one.attempt:
            return
        # FleetMind owes the next attempt's site; the same hop is watched as after the admission.
        one.attempt, one.revision, one.tried, one.cause = message.attempt + 1, 0, [], message.id
        one.excluded = tuple(dict.fromkeys((*one.excluded, *message.excluded, message.instance)))
        self._watch(one, now_ms)

    def _close(self, rid: str, gateway: str, tenant: str, tokens: float, now_ms: float) -> None:
        self._unhold(rid)
        one = self.state.open.pop(rid, None)
        self.state.presence.close(rid, gateway)
        self.state.bury(rid, now_ms)
        account = self.state.accounts.get(one.ask.tenant if one is not None else tenant)
        if account is not None and rid in account.open:
            # The estimate goes back into the bucket, what was really used stays out.
            account.level += account.open.pop(rid) - tokens

    def _expire(self, rid: str, now_ms: float) -> None:
        """The gateway is gone, or has forgotten it: nobody will say the end."""
        one = self.state.open.get(rid)
        held = self._find_held(rid)
        gateway = one.ask.gateway if one is not None else held.gateway if held is not None else ""
        for name, sign in self.state.presence.gateways.items() if not gateway else ():
            if rid in sign.open:
                gateway = name
                break
        tokens = float(one.ask.input_tokens) if one is not None and one.answered[0] > 0 else 0.0
        self._close(rid, gateway, one.ask.tenant if one is not None else "", tokens, now_ms)
        self._out.append(Note("slomax_expired", {}, {"request": rid, "gateway": gateway}, level="warning"))

    def _leased(self, message: GatewayLeased, now_ms: float) -> None:
        for request_id in self.state.presence.lease(message, now_ms):
            self._expire(request_id, now_ms)

    def _reported(self, message: CapacityReported, now_ms: float) -> None:
        self.state.capacity.fold(message, now_ms)

    # ------------------------------------------------------------------ room

    def _offered(self, message: RoomOffered, now_ms: float) -> None:
        key: PoolKey = (message.site, message.model, message.version)
        pool = self.state.pool(key)
        known = pool.rooms.get(message.instance)
        if known is not None and known.offer == message.id:
            return
        pool.rooms[message.instance] = Room(
            offer=message.id,
            prefill_tokens=message.prefill_tokens,
            idle=message.idle,
            sequences=message.sequences,
            kv_tokens=message.kv_tokens,
            last_released=message.last_released,
            held=message.held,
            heard_ms=now_ms,
        )
        pool.number = max(pool.number, message.last_released)
        for number, release in list(pool.releases.items()):
            if release.instance == message.instance and number <= message.last_released:
                held = pool.held.get(release.request_id)
                if held is None or held.released != number:
                    del pool.releases[number]
        if self.offices.term(f"release:{message.site}"):
            self._fill(key, message.instance, now_ms)

    def _fill(self, key: PoolKey, instance: str, now_ms: float) -> None:
        """Answer an offer: release what should go next while it fits, or say for how long nothing does."""
        pool = self.state.pools[key]
        room = pool.rooms[instance]
        term = self.offices.term(f"release:{key[0]}")
        if not term or now_ms - room.heard_ms > OFFER_MS:
            return
        while True:
            choice = self.choose(self.fleet, pool, instance, policy.level(pool, instance, room), now_ms)
            if choice.held is None:
                break
            self._release(key, instance, choice.held, choice.reason, term, now_ms)
            room.answered = True
        # Holds that the offer counts and we do not know yet are on their way: their arrival answers it.
        if not room.answered and (pool.waiting() or room.held == 0):
            room.answered = True
            self._publish(
                RoomDeclined(
                    id=f"{room.offer}:declined:{term}",
                    cause=room.offer,
                    term=term,
                    time_unix_ms=int(now_ms),
                    site=key[0],
                    model=key[1],
                    version=key[2],
                    instance=instance,
                    offer=room.offer,
                    for_ms=DECLINE_MS,
                    reason=choice.reason,
                )
            )
            self._out.append(Note("slomax_declined", {"reason": choice.reason}))

    def _release(self, key: PoolKey, instance: str, held: Held, reason: str, term: int, now_ms: float) -> None:
        pool = self.state.pools[key]
        number = pool.number + 1
        policy.release(self.fleet, pool, held, instance, number, now_ms)
        self._arm("release", now_ms + RELEASE_MS, held.request_id)
        self._publish(
            PlacementReleased(
                id=f"{held.request_id}:released:{held.attempt}:{held.revision}:{number}:{term}",
                cause=pool.rooms[instance].offer,
                term=term,
                time_unix_ms=int(now_ms),
                site=key[0],
                request_id=held.request_id,
                gateway=held.gateway,
                model=key[1],
                version=key[2],
                attempt=held.attempt,
                revision=held.revision,
                number=number,
                instance=instance,
                reason=reason,
            )
        )
        labels = {"site": key[0], "service_class": held.service_class, "why": reason}
        self._out.append(Note("slomax_released", labels))

    def _release_due(self, request_id: str, now_ms: float) -> None:
        """Nobody counted a release in an offer: its message is lost, or its TokenPilot.

        If the request still waits for it, it may be released again. If TokenPilot placed it without having heard of
        the release, its offers will never name that number: the room is not taken twice for ever.
        """
        for pool in self.state.pools.values():
            for number, release in list(pool.releases.items()):
                if release.request_id != request_id or now_ms - release.at_ms < RELEASE_MS:
                    continue
                held = pool.held.get(request_id)
                if held is not None and held.released == number:
                    policy.take_back(pool, number)
                    held.released = 0
                else:
                    del pool.releases[number]

    def _patience_due(self, request_id: str, now_ms: float) -> None:
        held = self._find_held(request_id)
        if held is None or held.patience_until_ms > now_ms or self.fleet.policy.admission == "none":
            return
        key = self.state.where[request_id]
        if self.offices.term(f"release:{key[0]}"):
            self._refuse_held(key, held, policy.outlived(self.fleet, key, held, self.state.pools[key]), now_ms)

    def _refuse_held(self, key: PoolKey, held: Held, verdict: policy.Verdict, now_ms: float) -> None:
        term = self.offices.term(f"release:{key[0]}")
        refused = PlacementRefused(
            id=f"{held.request_id}:refused:{held.attempt}:{held.revision}:{term}",
            cause=held.event,
            term=term,
            time_unix_ms=int(now_ms),
            site=key[0],
            request_id=held.request_id,
            gateway=held.gateway,
            model=key[1],
            version=key[2],
            attempt=held.attempt,
            revision=held.revision,
            reason=verdict.reason,
            status=verdict.status,
            retry_after_s=verdict.retry_after_s,
            detail=f"held {max(0, int(now_ms - held.since_ms))} ms",
        )
        self._publish(refused)
        self._out.append(Note("slomax_refused_held", {"reason": verdict.reason, "service_class": held.service_class}))
        self._refused(refused, now_ms)

    # ------------------------------------------------------------------ shares, offices, time

    def _share(self, now_ms: float) -> None:
        """Say what each class of a pool was guaranteed and got, where something changed."""
        for (site, model, version), pool in self.state.pools.items():
            term = self.offices.term(f"release:{site}")
            if not pool.changed or not term:
                continue
            total = sum(pool.used.values())
            shares = []
            for name in self.fleet.classes:
                share = policy.share_of(self.fleet, name)
                used = pool.used.get(name, 0.0) / total if total else 0.0
                cause = "configured" if not total else "borrowed" if used > share else "lent"
                shares.append(Share(service_class=name, share=share, used=used, held=pool.count(name), cause=cause))
            event = AdmissionShared(
                id=f"{site}:{model}:{version}:shared:{term}:{pool.shared_revision + 1}",
                term=term,
                time_unix_ms=int(now_ms),
                site=site,
                model=model,
                version=version,
                revision=pool.shared_revision + 1,
                shares=tuple(shares),
            )
            self._publish(event)
            self._shared(event, now_ms)

    def _shared(self, message: AdmissionShared, now_ms: float) -> None:
        pool = self.state.pool((message.site, message.model, message.version))
        if message.revision > pool.shared_revision:
            pool.shared_revision, pool.shared_ms = message.revision, now_ms
            pool.used, pool.changed = {}, bool(pool.held)

    def _owned(self, message: AdmissionOwned, now_ms: float) -> None:
        if not self.offices.fold(message.scope, message.term, message.owner):
            return
        self._out.append(Note("slomax_office", {"what": "taken"}, {"scope": message.scope}, level="info"))
        kind, _, where = message.scope.partition(":")
        if kind == "admission":
            for one in list(self.state.open.values()):
                if one.ask.entry != where or one.refused is not None:
                    continue
                if one.decided is None or (one.attempt, one.revision) > _at(one.decided):
                    self._answer(one, message.term, now_ms)
                elif not one.decided.admitted:
                    verdict = policy.Verdict(one.decided.reason, one.decided.status, one.decided.retry_after_s)
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

    # ------------------------------------------------------------------ small things

    def _find_held(self, request_id: str) -> Held | None:
        key = self.state.where.get(request_id)
        return None if key is None else self.state.pools[key].held.get(request_id)

    def _unhold(self, request_id: str) -> None:
        """A hold ends without an assignment; a release under way to it takes no room."""
        held = self._find_held(request_id)
        if held is not None:
            if held.released:
                policy.take_back(self.state.pools[self.state.where[request_id]], held.released)
            self.state.unhold(request_id)

    def _publish(self, event: Event) -> None:
        self._out.append(Publish(event))

    def _arm(self, kind: str, at_ms: float, request_id: str) -> None:
        if at_ms < INFINITY:
            heappush(self._timers, (at_ms, kind, request_id))

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
        if any(pool.changed for pool in self.state.pools.values()):
            wishes.append(self._shared_ms)
        if self.state.closed:
            wishes.append(self._sweep_ms)
        if wishes:
            out.append(WakeAt(max(min(wishes), now_ms)))
        return out


def _at(decided: AdmissionDecided | None) -> tuple[int, int]:
    return (0, -1) if decided is None else (decided.attempt, decided.revision)
