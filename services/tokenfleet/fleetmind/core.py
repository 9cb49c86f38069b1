"""FleetMind's core: asks a site for every admitted request, and sees to it that somebody answers.

Pure: `(message, now_ms) -> effects`. Without the office of a model it folds the same events and says nothing, so that
a standby that takes over asks only for what was never asked for.
"""

from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush, nsmallest
from operator import attrgetter
from typing import Any

import msgspec

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import retry_after_s
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind import costs, policy
from tokenfleet.fleetmind.caches import Caches
from tokenfleet.fleetmind.longcycle import LongCycle
from tokenfleet.fleetmind.promises import PLAN_SCOPE
from tokenfleet.fleetmind.state import INFINITY, TOMBSTONE_MS, Path, Road, State
from tokenfleet.fleetmind.view import View
from tokenfleet.offices import Offices
from tokenfleet_schemas.admission import REASONS, AdmissionDecided, AdmissionOwned
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvSummarised
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.placement import (
    Considered,
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementOwned,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.request import Ask

#: dispatches of one request at most
ATTEMPTS_MAX = 3
#: a site whose TokenPilot was silent is asked last for so long
SILENT_MS = 5_000.0
#: longest pause between two rounds of asking
ROUND_MAX_MS = 8_000.0
#: held requests are looked at so often, and sooner when a place becomes free, but not more often than this
MOVE_EVERY_MS = 100.0
MOVE_GAP_MS = 10.0
#: of those that the same sites could serve, so many are looked at, the most urgent first
MOVE_LOOK_MAX = 64
LOOK_MS = 1_000.0
_held = attrgetter("held")


class FleetMind:
    """One replica of FleetMind, for every model."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        replica: str,
        ranker: policy.Ranker = policy.rank,
        mover: policy.Mover = policy.move,
    ) -> None:
        self.fleet = fleet
        self.replica = replica
        self.ranker, self.mover = ranker, mover
        self.state = State()
        #: advice, not state: left out of checkpoints
        self.caches = Caches()
        self.offices = Offices(replica)
        self.long = LongCycle(replica, self.offices)
        self.view = View(fleet, self.state, self.long.promises)
        self._timers: list[tuple[float, str]] = []
        self._out: list[Effect] = []
        self._look_ms = 0.0
        self._move_ms = 0.0
        self._moved_ms = 0.0
        self._sweep_ms = 0.0
        self._folds: dict[type[Event], Callable[[Any, float], None]] = {
            AdmissionDecided: self._decided,
            AdmissionOwned: self._owned,
            PlacementOwned: self._owned,
            PlacementRequested: self._requested,
            PlacementWithdrawn: self._withdrawn,
            PlacementHeld: self._held,
            PlacementReleased: self._released,
            PlacementAssigned: self._assigned,
            PlacementDeclined: self._declined,
            PlacementRefused: self._refused,
            CapacityReported: self._reported,
            CapacityProbed: self._probed,
            KvSummarised: self.caches.summarised,
            OutcomeFinished: self._finished,
            GatewayLeased: self._leased,
        }

    # ------------------------------------------------------------------ what the shell calls

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold one event and return what follows; unknown kinds are ignored."""
        if self.state.presence.hear(now_ms):
            self._renew(now_ms)
        fold = self._folds.get(type(message))
        if self.long.concerns(self.fleet, message):
            self._out += self.long.hear(self.fleet, self.state.capacity, message, now_ms)
        if fold is not None:
            fold(message, now_ms)
        return self._effects(now_ms)

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Ask on where a TokenPilot is silent, move held requests, expire those whose gateway is gone."""
        if now_ms >= self._look_ms:
            self._look_ms = now_ms + LOOK_MS
            for request_id in self.state.presence.silent(now_ms):
                self._expire(request_id, now_ms)
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + 10_000.0
            self.state.sweep(now_ms)
            self.state.capacity.forget(now_ms - 3_600_000.0)
        while self._timers and self._timers[0][0] <= now_ms:
            _, request_id = heappop(self._timers)
            self._hop_due(request_id, now_ms)
        if now_ms >= self._move_ms and self._holds():
            self._move_ms, self._moved_ms = now_ms + MOVE_EVERY_MS, now_ms
            self._move_held(now_ms)
        self._out += self.long.wake(self.fleet, self.state.capacity, now_ms)
        return self._effects(now_ms)

    def scopes(self) -> tuple[str, ...]:
        """Every model, and the long cycle."""
        return (*(f"model:{name}" for name in self.fleet.models), PLAN_SCOPE)

    def mark(self, scope: str, term: int, now_ms: float) -> Event:
        """The mark that opens this replica's term for a model."""
        self.offices.issue(scope, term)
        if scope == PLAN_SCOPE:
            return self.long.promises.mark(term, now_ms)
        return PlacementOwned(
            id=f"{scope}:owned:{term}",
            term=term,
            time_unix_ms=int(now_ms),
            scope=scope,
            owner=self.replica,
            model=scope.partition(":")[2],
        )

    def resign(self, scope: str, now_ms: float) -> Iterable[Effect]:
        """The lease is lost."""
        self.offices.resign(scope)
        return [Note("fleetmind_office", {"what": "resigned"}, {"scope": scope}, level="info")]

    def resumed(self, now_ms: float) -> Iterable[Effect]:
        """The bus is back after a silence: nobody is late because of it."""
        self.state.presence.heard_ms = now_ms
        for sign in self.state.presence.gateways.values():
            sign.heard_ms = max(sign.heard_ms, now_ms)
        self._renew(now_ms)
        return self._effects(now_ms)

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterable[Effect]:
        """Take a reloaded fleet file: it holds for what is decided from now on."""
        self.fleet = fleet
        self.view = View(fleet, self.state, self.long.promises)
        return self._effects(now_ms)

    def snapshot(self) -> bytes:
        """The fold as msgpack."""
        self.state.offices, self.state.plan = dict(self.offices.marks), self.long.state
        return msgspec.msgpack.encode(self.state)

    def restore(self, data: bytes) -> None:
        """Take a checkpoint over; raises ValueError for one of another shape."""
        try:
            self.state = msgspec.msgpack.decode(data, type=State)
        except msgspec.DecodeError as error:
            raise ValueError(f"no checkpoint of this version: {error}") from None
        self.offices.marks, self.long.state = dict(self.state.offices), self.state.plan
        self.view = View(self.fleet, self.state, self.long.promises)
        self._timers = []
        for request_id, road in self.state.roads.items():
            self._arm(road.watch_until_ms, request_id)

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Open requests and what each site has of them: all exactly zero when nothing is open."""
        held: dict[tuple[tuple[str, str], ...], float] = {}
        booked: dict[tuple[tuple[str, str], ...], float] = {}
        asked: dict[tuple[tuple[str, str], ...], float] = {}
        for (site, model, version), load in self.state.loads.items():
            labels = (("site", site), ("model", model), ("version", version))
            held[labels] = float(len(load.held))
            booked[labels] = float(len(load.booked))
            asked[labels] = float(len(load.asked))
        return {
            "open_requests": {(): float(len(self.state.roads))},
            "held_requests": held,
            "booked_requests": booked,
            "pending_requests": asked,
            **self.long.gauges(),
        }

    # ------------------------------------------------------------------ asking for a site

    def _decided(self, message: AdmissionDecided, now_ms: float) -> None:
        ask, rid = message.ask, message.ask.request_id
        if not message.admitted or rid in self.state.closed:
            return
        if not message.fallback and self.offices.void(f"admission:{ask.entry}", message.term):
            return
        road = self.state.roads.get(rid)
        if road is None:
            road = self._open(ask, message.id, message.elapsed_ms, now_ms)
            road.attempt = message.attempt
            road.wanted = (message.attempt, message.revision)
        elif (message.attempt, message.revision) <= road.wanted:
            if road.phase != "new":
                return
        else:
            road.wanted = (message.attempt, message.revision)
            road.cause = message.id
        term = self._term(ask)
        if not term or road.phase == "refused" or message.attempt != road.attempt:
            return
        if road.phase == "new":
            self._place(road, term, now_ms)
        elif road.revision < message.revision:
            # Submitted again: an answer was lost on its way. The same site repeats it, unless it can serve no more.
            self._ask_again(road, term, now_ms)

    def _open(self, ask: Ask, cause: str, elapsed_ms: float, now_ms: float) -> Road:
        road = self.state.roads[ask.request_id] = Road(ask, now_ms - elapsed_ms, cause)
        road.home = next(iter(self.view.order(ask.entry, ask.model)), "")
        self.state.presence.open(ask.request_id, ask.gateway, ask.gateway_incarnation, now_ms)
        return road

    def _place(self, road: Road, term: int, now_ms: float, *, avoid: Iterable[str] = ()) -> None:
        """Rank the sites and ask the best, or refuse when nobody may or can serve the request."""
        road.hits = self.caches.hits(road.ask, now_ms)
        ranking = self.ranker(self.view, road, now_ms, avoid=tuple(avoid))
        if ranking.site:
            if ranking.turn:
                self.state.turns[ranking.turn] = self.state.turns.get(ranking.turn, 0) + 1
            self._request(road, ranking.site, ranking.considered, ranking.why, term, now_ms)
        else:
            self._refuse(road, ranking.reason, ranking.reset_ms, term, now_ms, ranking.considered)

    def _ask_again(self, road: Road, term: int, now_ms: float) -> None:
        ranking = self.ranker(self.view, road, now_ms)
        out = {one.name: one.out for one in ranking.considered}
        if out.get(road.site) == "":
            chosen = tuple(msgspec.structs.replace(c, chosen=c.name == road.site) for c in ranking.considered)
            self._request(road, road.site, chosen, "again", term, now_ms)
        elif ranking.site:
            self._withdraw(road, ranking.site, term, now_ms)
            self._request(road, ranking.site, ranking.considered, ranking.why, term, now_ms)
        else:
            self._refuse(road, ranking.reason, ranking.reset_ms, term, now_ms, ranking.considered)

    def _request(
        self, road: Road, site: str, considered: tuple[Considered, ...], why: str, term: int, now_ms: float
    ) -> None:
        ask = road.ask
        revision = road.revision + 1
        if road.wanted[0] == road.attempt:
            revision = max(revision, road.wanted[1])
        requested = PlacementRequested(
            id=f"{ask.request_id}:requested:{road.attempt}:{revision}:{term}",
            cause=road.cause,
            term=term,
            time_unix_ms=int(now_ms),
            site=site,
            ask=ask,
            attempt=road.attempt,
            revision=revision,
            elapsed_ms=max(0.0, now_ms - road.received_ms),
            excluded=road.excluded,
            sites=policy.said(considered),
        )
        self._out.append(Publish(requested))
        self._out.append(Note("fleetmind_requested", {"site": site, "why": why}))
        self._asked(road, requested, now_ms)

    def _asked(self, road: Road, message: PlacementRequested, now_ms: float) -> None:
        """Fold a request for a site: ours, a predecessor's, or a fallback's."""
        self.state.drop_load(road, now_ms)
        road.attempt, road.revision = message.attempt, message.revision
        road.site, road.phase, road.answer = message.site, "asked", ""
        road.excluded = message.excluded
        self.state.take_load(road, now_ms)
        wait_ms = policy.hop_ms(self.fleet, self.state, road.ask.entry, road.site, now_ms)
        road.watch_until_ms = now_ms + min(ROUND_MAX_MS, wait_ms * 2.0**road.rounds)
        self._arm(road.watch_until_ms, road.ask.request_id)

    def _withdraw(self, road: Road, moved_to: str, term: int, now_ms: float) -> None:
        """Take the present request back from its site; `revision` names what is taken back."""
        ask = road.ask
        self._out.append(
            Publish(
                PlacementWithdrawn(
                    id=f"{ask.request_id}:withdrawn:{road.attempt}:{road.revision}:{term}",
                    cause=road.answer or road.cause,
                    term=term,
                    time_unix_ms=int(now_ms),
                    site=road.site,
                    request_id=ask.request_id,
                    gateway=ask.gateway,
                    model=ask.model,
                    version=ask.version,
                    attempt=road.attempt,
                    revision=road.revision,
                    moved_to=moved_to,
                )
            )
        )

    def _refuse(
        self,
        road: Road,
        reason: str,
        reset_ms: float,
        term: int,
        now_ms: float,
        considered: tuple[Considered, ...] = (),
    ) -> None:
        ask, status = road.ask, REASONS[reason]
        refused = PlacementRefused(
            id=f"{ask.request_id}:refused:{road.attempt}:{max(0, road.revision)}:{term}",
            cause=road.cause,
            term=term,
            time_unix_ms=int(now_ms),
            site=ask.entry,
            request_id=ask.request_id,
            gateway=ask.gateway,
            model=ask.model,
            version=ask.version,
            attempt=road.attempt,
            revision=max(0, road.revision),
            reason=reason,
            status=status,
            retry_after_s=retry_after_s(ask.request_id, reset_ms) if status in (429, 503) else None,
            sites=policy.said(considered),
        )
        self._out.append(Publish(refused))
        self._out.append(Note("fleetmind_refused", {"reason": reason}, {"request": ask.request_id}))
        self._refused(refused, now_ms)

    def _hop_due(self, request_id: str, now_ms: float) -> None:
        """A TokenPilot answered neither held nor assigned: take the request to the next site, or ask on."""
        road = self.state.roads.get(request_id)
        if road is None or road.phase != "asked" or road.watch_until_ms > now_ms:
            return
        term = self._term(road.ask)
        if not term:
            return
        self.state.load(self.state.key(road)).silent_until_ms = now_ms + SILENT_MS
        labels = {"site": road.site}
        self._out.append(Note("fleetmind_silent", labels, {"request": request_id}, level="warning"))
        road.tried.append(road.site)
        ranking = self.ranker(self.view, road, now_ms, avoid=road.tried)
        if not ranking.site:
            # All were asked: begin a new round, with a longer pause each time.
            road.tried, road.rounds = [], road.rounds + 1
            ranking = self.ranker(self.view, road, now_ms)
        if not ranking.site:
            self._refuse(road, ranking.reason, ranking.reset_ms, term, now_ms, ranking.considered)
            return
        if ranking.site != road.site:
            self._withdraw(road, ranking.site, term, now_ms)
        self._request(road, ranking.site, ranking.considered, "silent", term, now_ms)

    # ------------------------------------------------------------------ moving what is held

    def _holds(self) -> bool:
        return any(map(_held, self.state.loads.values()))

    def _room_at(self, now_ms: float) -> None:
        """A place may be free: whoever is held elsewhere need not wait for the next look."""
        self._move_ms = min(self._move_ms, max(now_ms, self._moved_ms + MOVE_GAP_MS))

    def _move_held(self, now_ms: float) -> None:
        """Move held requests to sites with room; each move counts there at once, so they do not herd."""
        groups: dict[tuple[str, ...], list[Road]] = {}
        for load in self.state.loads.values():
            for request_id in load.held:
                road = self.state.roads.get(request_id)
                if road is not None:
                    ask = road.ask
                    key = (ask.model, ask.version, ask.adapter, ask.entry, ask.entry_zone)
                    groups.setdefault(key, []).append(road)
        for roads in groups.values():
            term = self._term(roads[0].ask)
            if term:
                self._move_group(roads, term, now_ms)

    def _move_group(self, roads: list[Road], term: int, now_ms: float) -> None:
        """Held requests that the same sites could serve, but for their tenants' rights."""
        ask = roads[0].ask
        stuck = {site for site in {road.site for road in roads} if self.view.pool(ask, site, now_ms)[1]}
        for road in [road for road in roads if road.site in stuck or road.excluded]:
            self._move(road, (), term, now_ms)
        places = policy.places(self.view, ask, now_ms)
        if not places:
            return
        waiting = [road for road in roads if road.phase == "held" and policy.movable(road, now_ms)]
        for road in nsmallest(MOVE_LOOK_MAX, waiting, key=lambda one: policy.urgency(one, now_ms)):
            if self._move(road, places, term, now_ms):
                places = policy.places(self.view, ask, now_ms)
                if not places:
                    return

    def _move(self, road: Road, among: Collection[str], term: int, now_ms: float) -> bool:
        found = self.mover(self.view, road, now_ms, among=among)
        if found is None:
            return False
        labels = {"from": road.site, "to": found.site, "why": found.why}
        self._out.append(Note("fleetmind_moved", labels, {"request": road.ask.request_id}))
        self._withdraw(road, found.site, term, now_ms)
        road.moves += 1
        road.cause = road.answer or road.cause
        road.tried, road.rounds = [], 0
        self._request(road, found.site, found.considered, "moved", term, now_ms)
        return True

    # ------------------------------------------------------------------ the road, folded

    def _requested(self, message: PlacementRequested, now_ms: float) -> None:
        ask, rid = message.ask, message.ask.request_id
        if rid in self.state.closed:
            return
        if not message.fallback and self.offices.void(f"model:{ask.model}", message.term):
            return
        road = self.state.roads.get(rid)
        if road is None:
            road = self._open(ask, message.cause or message.id, message.elapsed_ms, now_ms)
            road.wanted = (message.attempt, message.revision)
        elif (message.attempt, message.revision) <= road.place or road.phase == "refused":
            return
        self._asked(road, message, now_ms)

    def _withdrawn(self, message: PlacementWithdrawn, now_ms: float) -> None:
        """A predecessor's; ours is followed by the new request in the same breath."""
        road = self.state.roads.get(message.request_id)
        if road is None or (message.attempt, message.revision) < road.place or road.phase != "held":
            return
        if not self.offices.void(f"model:{message.model}", message.term):
            self.state.drop_load(road, now_ms)
            road.phase = "asked"
            road.watch_until_ms = now_ms + policy.hop_ms(self.fleet, self.state, road.ask.entry, road.site, now_ms)
            self._arm(road.watch_until_ms, message.request_id)

    def _held(self, message: PlacementHeld, now_ms: float) -> None:
        road = self.state.roads.get(message.request_id)
        if road is None or road.phase == "refused" or message.id == road.answer:
            return
        if (message.attempt, message.revision) < road.place or road.phase == "assigned":
            return
        self._answered(road, message.site, message.id, message.work.prefill_tokens, now_ms)
        road.attempt, road.revision = message.attempt, message.revision
        road.phase = "held"
        road.held_ms, road.released_ms = now_ms, -INFINITY
        road.wait_ms, road.own_ms = message.predicted_wait_ms, message.predicted_own_ms
        road.prefix_hit_tokens = message.prefix_hit_tokens
        road.deadline_ms = policy.deadline_ms(message.slack_ms, now_ms)
        self.state.take_load(road, now_ms)

    def _answered(self, road: Road, site: str, answer: str, prefill_tokens: int, now_ms: float) -> None:
        """A TokenPilot spoke: the hop is done, its silence over, and the prefix hit known."""
        self.state.drop_load(road, now_ms)
        road.site, road.answer = site, answer
        road.watch_until_ms, road.tried, road.rounds = INFINITY, [], 0
        load = self.state.load(self.state.key(road))
        load.silent_until_ms = 0.0
        road.prefill_tokens = prefill_tokens

    def _released(self, message: PlacementReleased, now_ms: float) -> None:
        road = self.state.roads.get(message.request_id)
        if road is not None and road.phase == "held" and (message.attempt, message.revision) == road.place:
            road.released_ms = now_ms

    def _assigned(self, message: PlacementAssigned, now_ms: float) -> None:
        road = self.state.roads.get(message.request_id)
        if road is None or message.attempt < road.attempt or message.id == road.answer or road.phase == "refused":
            return
        if road.phase == "assigned" and message.site != road.site:
            return  # the gateway dispatches the first; it declines this one
        self._answered(road, message.site, message.id, message.work.prefill_tokens, now_ms)
        road.attempt, road.revision = max(road.place, (message.attempt, message.revision))
        road.phase, road.kv_tokens = "assigned", message.work.own_kv_tokens
        self.state.take_load(road, now_ms)
        pool, _ = self.view.pool(road.ask, road.site, now_ms)
        self.caches.sent(self.state.key(road), road.ask, pool.kv_total)

    def _declined(self, message: PlacementDeclined, now_ms: float) -> None:
        """The gateway does not use what we counted; whatever it does use says so itself."""
        road = self.state.roads.get(message.request_id)
        if road is not None and message.declined == road.answer:
            self.state.drop_load(road, now_ms)

    def _refused(self, message: PlacementRefused, now_ms: float) -> None:
        """Whoever refused: nothing is owed any more; the gateway's final outcome closes it."""
        road = self.state.roads.get(message.request_id)
        if road is not None and message.attempt >= road.attempt:
            self.state.drop_load(road, now_ms)
            road.phase, road.watch_until_ms = "refused", INFINITY

    def _finished(self, message: OutcomeFinished, now_ms: float) -> None:
        rid = message.request_id
        self._room_at(now_ms)
        if message.final:
            self._learn(message, now_ms)
            self._close(rid, message.gateway, now_ms)
            return
        if rid in self.state.closed:
            return
        road = self.state.roads.get(rid)
        if road is None:
            if message.ask is None:
                return
            road = self._open(message.ask, message.id, message.times.e2e_ms, now_ms)
        elif message.attempt < road.attempt:
            return
        self.state.drop_load(road, now_ms)
        road.phase, road.attempt, road.revision = "new", message.attempt + 1, -1
        road.wanted = max(road.wanted, (road.attempt, 0))
        road.cause, road.answer, road.tried, road.rounds = message.id, "", [], 0
        road.watch_until_ms = INFINITY
        failed = (message.instance,) if message.instance else ()
        road.excluded = tuple(dict.fromkeys((*road.excluded, *message.excluded, *failed)))
        term = self._term(road.ask)
        if term:
            self._retry(road, term, now_ms)

    def _learn(self, message: OutcomeFinished, now_ms: float) -> None:
        """How long requests stay at a site, how fast their prompts are computed, and at what pace they are answered."""
        times = message.times
        if message.outcome != "completed" or not message.served_site or times.queue_ms is None:
            return
        road = self.state.roads.get(message.request_id)
        if road is None:
            return  # a repeated message
        stay_ms = max(0.0, times.e2e_ms - times.queue_ms)
        pace = self.state.load((message.served_site, message.model, message.version)).pace
        pace.learn(stay_ms, times.tpot_ms, float(message.output_tokens), now_ms)
        if times.ttft_ms is not None and message.stream:
            cached = message.cached_tokens
            computed = road.prefill_tokens if cached is None else message.input_tokens - cached
            first_ms = times.ttft_ms - times.queue_ms
            away_ms = costs.rtt_ms(self.fleet, self.state, road.ask.entry, message.served_site, now_ms)
            # a distance that is only supposed must not turn into a rate without bounds
            pace.learn_rate(computed, max(first_ms - away_ms, first_ms / 2))

    def _retry(self, road: Road, term: int, now_ms: float) -> None:
        """The next attempt, elsewhere: its instance failed before the first token."""
        if road.attempt > ATTEMPTS_MAX:
            self._refuse(road, "unavailable", 1_000.0, term, now_ms)
        else:
            self._place(road, term, now_ms)

    def _close(self, rid: str, gateway: str, now_ms: float) -> None:
        road = self.state.roads.pop(rid, None)
        if road is not None:
            self.state.drop_load(road, now_ms)
        self.state.presence.close(rid, gateway)
        self.state.closed[rid] = now_ms + TOMBSTONE_MS

    def _expire(self, rid: str, now_ms: float) -> None:
        """The gateway is gone, or has forgotten it: nobody will say the end."""
        road = self.state.roads.get(rid)
        if road is not None:
            self._close(rid, road.ask.gateway, now_ms)
            self._out.append(Note("fleetmind_expired", {}, {"request": rid}, level="warning"))

    def _leased(self, message: GatewayLeased, now_ms: float) -> None:
        for request_id in self.state.presence.lease(message, now_ms):
            self._expire(request_id, now_ms)

    def _reported(self, message: CapacityReported, now_ms: float) -> None:
        if not message.instance:
            labels = {"site": message.site, "reason": "no_instance_name"}
            self._out.append(Note("capacity_rejected", labels, {"id": message.id}, level="error"))
            return
        known = self.state.capacity.instances(message.site)
        before = known.get(message.instance)
        if before is not None and before.report.incarnation != message.incarnation and len(known) == 1:
            self.caches.forget(message.site, message.model, message.version)
        self.state.capacity.fold(message, now_ms)

    def _probed(self, message: CapacityProbed, now_ms: float) -> None:
        self.state.paths[message.site, message.other_site] = Path(
            now_ms, message.rtt_ms, message.loss, message.bytes_per_s, now_ms - (message.bandwidth_age_ms or 0.0)
        )

    # ------------------------------------------------------------------ offices, time

    def _term(self, ask: Ask) -> int:
        return self.offices.term(f"model:{ask.model}")

    def _owned(self, message: PlacementOwned | AdmissionOwned, now_ms: float) -> None:
        if not self.offices.fold(message.scope, message.term, message.owner):
            return
        self._out.append(Note("fleetmind_office", {"what": "taken"}, {"scope": message.scope}, level="info"))
        for road in list(self.state.roads.values()):
            if f"model:{road.ask.model}" != message.scope:
                continue
            if road.phase == "new":
                self._retry(road, message.term, now_ms)
            elif road.phase == "asked":
                road.watch_until_ms = now_ms + policy.hop_ms(self.fleet, self.state, road.ask.entry, road.site, now_ms)
                self._arm(road.watch_until_ms, road.ask.request_id)

    def _renew(self, now_ms: float) -> None:
        """We were deaf: judge nobody by what was not heard meanwhile."""
        self.state.capacity.renew(now_ms)
        for request_id, road in self.state.roads.items():
            if road.phase == "asked":
                road.watch_until_ms = now_ms + policy.hop_ms(self.fleet, self.state, road.ask.entry, road.site, now_ms)
                self._arm(road.watch_until_ms, request_id)

    def _arm(self, at_ms: float, request_id: str) -> None:
        if at_ms < INFINITY:
            heappush(self._timers, (at_ms, request_id))

    def _is_over(self, at_ms: float, request_id: str) -> bool:
        """Nothing is due then any more: most hops are answered long before, and nobody need wake for them."""
        road = self.state.roads.get(request_id)
        return road is None or road.watch_until_ms != at_ms

    def _effects(self, now_ms: float) -> list[Effect]:
        out, self._out = self._out, []
        while self._timers and self._is_over(*self._timers[0]):
            heappop(self._timers)
        wishes = [self._timers[0][0]] if self._timers else []
        quiet = self.state.presence.next_ms()
        if quiet < INFINITY:
            wishes.append(max(quiet, self._look_ms))
        if self._holds():
            wishes.append(self._move_ms)
        if self.state.closed:
            wishes.append(self._sweep_ms)
        planning_ms = self.long.next_ms(self.fleet)
        if planning_ms < INFINITY:
            wishes.append(planning_ms)
        if wishes:
            out.append(WakeAt(max(min(wishes), now_ms)))
        return out
