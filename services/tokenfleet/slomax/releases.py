"""The release room: keeps what is held, fills offered room, repeats what was lost, ends what outlived its patience.

Who goes next is `policy.choose`'s; refuses to know instances beyond the room that TokenPilot offers.
"""

from tokenfleet.effects import Note
from tokenfleet.fleet import Fleet
from tokenfleet.slomax import devices, fairness, gate, policy
from tokenfleet.slomax.desk import Desk
from tokenfleet.slomax.state import INFINITY, Bill, Held, Pool, PoolKey, Room, Tried
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementReleased,
    PlacementWithdrawn,
)
from tokenfleet_schemas.room import RoomDeclined, RoomOffered

#: an offer older than this says nothing about the room now: TokenPilot has filled it itself or offers again
OFFER_MS = 1_000.0
#: how long a declined offer stays empty unless something that fits comes
DECLINE_MS = 500.0
#: a release that nobody answered may be repeated after this
RELEASE_MS = 1_500.0


class Releases(Desk):
    """When."""

    def __init__(self, fleet: Fleet, *, replica: str, choose: policy.Chooser) -> None:
        super().__init__(fleet, replica=replica)
        self.choose = choose

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
        pool.recent_ms[held.service_class] = now_ms
        pool.count_crowd(fairness.tenant_key(held.service_class, held.tenant), now_ms)
        state.where[rid] = key
        state.presence.open(rid, message.gateway, one.ask.gateway_incarnation if one is not None else "", now_ms)
        self._arm("patience", held.patience_until_ms, rid)
        if not self.offices.term(f"release:{message.site}"):
            return
        if known is None:
            ask = one.ask if one is not None else None
            verdict = gate.shed(self.fleet, state, pool, held, ask, now_ms)
            if not verdict.admitted:
                self._refuse_held(key, held, verdict, now_ms)
                return
        # Where a newcomer does not fit, nothing has changed for those who wait already.
        fresh = known is None
        least = policy.least(held for held in ((held,) if fresh else pool.held.values()) if not held.released)
        for instance, room in list(pool.rooms.items()):
            if room.answered:
                left = policy.level(pool, instance, room)
                if not policy.may_fit(least, left) or (fresh and not policy.fits(held, instance, left, now_ms)):
                    continue
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
            deadline_ms=self._deadline_ms(message, now_ms),
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

    def _deadline_ms(self, message: PlacementHeld, now_ms: float) -> float:
        """See `State.due_ms`; TokenPilot knows what is left of the first token's time."""
        first_ms = None if message.slack_ms is None else now_ms + message.slack_ms
        one = self.state.open.get(message.request_id)
        if one is None:
            return INFINITY if first_ms is None else first_ms
        return self.state.due_ms(one.ask, one.received_ms, message.work.decode_tokens, first_ms)

    def _give_back(self, pool: Pool, known: Held, message: PlacementHeld, held: Held, now_ms: float) -> None:
        """A release found too little room: it took nothing, and is not repeated for as little."""
        if message.after_release and message.after_release != known.released:
            held.released = known.released  # answers an older release than the one under way
            return
        release = fairness.take_back(pool, known.released)
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
        key = (message.site, message.model, message.version)
        pool = self.state.pool(key)
        if message.number <= pool.number:
            return
        held = pool.held.get(message.request_id)
        pool.number = message.number
        if held is not None and not held.released:
            fairness.release(self.fleet, pool, held, message.instance, message.number, now_ms)
            devices.charge(self.fleet, self.state, key, message.instance, held.cost_ms, now_ms)

    def _assigned(self, message: PlacementAssigned, now_ms: float) -> None:
        rid = message.request_id
        one = self.state.open.get(rid)
        if one is not None:
            one.answered = max(one.answered, (message.attempt, message.revision))
            one.watch_until_ms = INFINITY
        key = (message.site, message.model, message.version)
        known = self.state.pools.get(key)
        if known is not None:
            known.recent_ms[message.service_class] = now_ms
        held = self._find_held(rid)
        if held is not None and message.attempt >= held.attempt:
            if known is not None and policy.is_long(self.fleet, known, held, now_ms):
                known.long_until_ms[message.instance] = now_ms + held.own_ms
            self._leaves_queue(held, message.instance)
        if one is not None or held is not None:  # what nobody asked for has no end that would take it away again
            account = fairness.tenant_key(message.service_class, message.tenant)
            self.state.enter(rid, key, account, now_ms, kv_tokens=message.work.own_kv_tokens)

    def _leaves_queue(self, held: Held, instance: str) -> None:
        """A hold was assigned: it pays if it has not, and what it costs in the end is compared with that."""
        key = self.state.where[held.request_id]
        pool = self.state.pools[key]
        if held.released:
            release = pool.releases.get(held.released)
            if release is not None and release.instance != instance:
                del pool.releases[held.released]  # it went elsewhere: the room it was meant for is still there
        else:
            changes = fairness.charges(self.fleet, pool, held)  # TokenPilot filled the room itself: same price
            fairness.settle(pool, changes)
            pool.used[held.service_class] = pool.used.get(held.service_class, 0.0) + held.cost_ms
        self.state.bills[held.request_id] = Bill(key, held.service_class, held.tenant, held.cost_ms, held.token_ms)
        self.state.unhold(held.request_id)

    def _declined(self, message: PlacementDeclined, now_ms: float) -> None:
        held = self._find_held(message.request_id)
        if held is not None and message.declined == held.event:
            self._unhold(message.request_id)

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
            longest_tokens=message.longest_tokens,
            last_released=message.last_released,
            held=message.held,
            heard_ms=now_ms,
        )
        if message.idle:
            pool.long_until_ms.pop(message.instance, None)
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
            if devices.held_back(self.fleet, self.state, key, instance, now_ms):
                choice = policy.Choice(None, "shared_gpus")
                break
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
        fairness.release(self.fleet, pool, held, instance, number, now_ms)
        devices.charge(self.fleet, self.state, key, instance, held.cost_ms, now_ms)
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
                    fairness.take_back(pool, number)
                    held.released = 0
                else:
                    del pool.releases[number]

    def _patience_due(self, request_id: str, now_ms: float) -> None:
        held = self._find_held(request_id)
        if held is None or held.patience_until_ms > now_ms or self.fleet.policy.admission == "none":
            return
        key = self.state.where[request_id]
        if self.offices.term(f"release:{key[0]}"):
            self._refuse_held(key, held, gate.outlived(self.fleet, key, held, self.state.pools[key]), now_ms)

    def _refuse_held(self, key: PoolKey, held: Held, verdict: gate.Verdict, now_ms: float) -> None:
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
