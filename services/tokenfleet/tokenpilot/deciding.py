"""What is answered: an instance, a hold, a refusal; said, booked, and said again when it was lost.

Decides under an office only. Refuses to know where messages come from and when room is offered.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.choosing import Choosing
from tokenfleet.tokenpilot.desk import INFINITY
from tokenfleet.tokenpilot.policy import Candidate, Situation
from tokenfleet.tokenpilot.state import NO_INSTANCE, Booking, Pool, Waiting
from tokenfleet_schemas.admission import REASONS
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementHeld,
    PlacementRefused,
    PlacementRequested,
)
from tokenfleet_schemas.request import Ask


class Deciding(Choosing):
    """See the module."""

    def _answer(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        """Decide for a newcomer: while anything is held, the room is not for newcomers."""
        request = waiting.request
        if self.fleet.policy.placement in policy.AT_ONCE:
            yield from self._at_once(scope, pool, waiting, now_ms)
            return
        situation, candidates = self._consider(request, waiting, now_ms)
        chosen, lacks = self._for_newcomer(pool, waiting, situation, candidates)
        if chosen is None:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms, lacks=lacks)
        else:
            how = "fallback" if request.fallback else "room"
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how=how)

    def _for_newcomer(
        self, pool: Pool, waiting: Waiting, situation: Situation, candidates: Sequence[Candidate]
    ) -> tuple[Candidate | None, str]:
        """The choice, without the room that others wait for; and what a hold then lacks."""
        if self._queued(pool, waiting) > 0:
            return None, "newcomer"
        able = [c for c in candidates if not c.out]
        for candidate in able:
            if candidate.name in pool.bound and not candidate.lacks:
                candidate.lacks = "newcomer"
        return self.picker(situation, able), ""

    def _place(
        self, scope: str, pool: Pool, waiting: Waiting, now_ms: float, *, how: str, only: str = "", number: int = 0
    ) -> Iterator[Effect]:
        """Place a held request whose turn has come; held again if the room it needs is not there."""
        situation, candidates = self._consider(waiting.request, waiting, now_ms, force=True, only=only)
        able = [c for c in candidates if not c.out and only in ("", c.name)]
        chosen = self.picker(situation, able)
        if chosen is not None:
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how=how, number=number)
        elif not only:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms, number=number)

    def _at_once(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        """Round robin: the next usable instance, room or not. Least requests: the one with the fewest booked."""
        situation, candidates = self._consider(waiting.request, waiting, now_ms, force=True)
        able = [c for c in candidates if not c.out]
        if able:
            if self.fleet.policy.placement == "round-robin":
                chosen = able[pool.turn % len(able)]
            else:
                chosen = min(able, key=lambda c: (c.load.sequences, c.tie))
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how="room")
        elif waiting.held is None:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms)

    def _answer_all(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """A new office, or another policy: everything unanswered is answered, in order of arrival."""
        at_once = self.fleet.policy.placement in policy.AT_ONCE
        for waiting in list(pool.waiting.values()):
            if waiting.release_number:
                yield from self._place(scope, pool, waiting, now_ms, how="released", number=waiting.release_number)
            elif waiting.held is None or at_once:
                yield from self._answer(scope, pool, waiting, now_ms)

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
        model = self._model(chosen.name, chosen.heard)
        by_model = "tpot_ms" in chosen.terms and model.known
        if chosen.rate is not None or by_model:
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
            predicted_tpot_ms=chosen.terms["tpot_ms"] if by_model else chosen.load.tpot_ms,
            how=how,
            release_number=number,
            candidates=policy.considered(candidates, chosen),
            sites=request.sites,
        )
        self._book_assigned(pool, assigned, now_ms, request=request)
        yield Publish(assigned)
        yield Note("assigned", {"how": how})
        # After the answer has left: nobody waits for it.
        self._pin(assigned, ask)
        self._expect_cached(ask, assigned.instance)

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
            forecast=self._forecast(assigned, waiting.request.ask.entry if waiting is not None else "", now_ms),
        )
        self.state.book(booking)
        work_ms = self._work_ms(assigned.instance, assigned.work)
        pool.sizes.learn(assigned.work.prefill_tokens, now_ms, work_ms)
        if not booking.confirmed:
            self._unconfirmed.pop(booking.id, None)
            self._unconfirmed[booking.id] = booking
        load = self.state.load(assigned.instance)
        if load.anchor_ms == now_ms and booking.forecast is not None:
            load.anchor_ms += booking.forecast.delay_ms
        self.state.load(assigned.instance).breaker.booked(booking.id, now_ms, self.knobs)
        self.state.presence.open(request_id, assigned.gateway, "", now_ms)
        self._touch(assigned.instance)

    def _think_again(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        """Hold a bound request anew where its home is no longer worth waiting for, or is another."""
        held = waiting.held
        if held is None or not held.bound or waiting.release_number:
            return
        waiting.thought_ms = now_ms
        situation, candidates = self._consider(waiting.request, waiting, now_ms)
        home = min((c for c in candidates if not c.out), key=policy.preference, default=None)
        if home is None or home.name != held.home_instance or not policy.bound(situation, home):
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms, number=held.after_release)

    def _pin(self, assigned: PlacementAssigned, ask: Ask) -> None:
        """The prompt will be held in that instance's KV until the booking ends."""
        self.pins.pin(assigned.id, assigned.instance, self._chain(ask), ask.prefix_stride)
        self.state.load(assigned.instance).shared_kv_tokens = self.pins.shared_tokens(assigned.instance)

    def _expect_cached(self, ask: Ask, instance: str) -> None:
        """The prompt will be in that instance's cache."""
        chain = self._chain(ask)
        if chain.size:
            self.index.add(instance, chain, ask.prefix_stride)

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
        home = min(able, key=policy.preference, default=None)
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
            wait_ms += max(prefill_ms, before * home.terms["slot_ms"]) / situation.able
        else:
            work = policy.work_of(ask, 0, situation.decode_tokens, None)
            # Nobody could serve it now, so nobody knows: as long as it would wait at all.
            wait_ms = max(0.0, patience_left_ms)
            own_ms = 1000.0 * work.prefill_tokens / self.knobs.unknown_prefill_tokens_per_s
        term = self.offices.term(scope)
        held = PlacementHeld(
            id=f"{ask.request_id}:held:{self.site}:{request.attempt}:{request.revision}:{number}:{waiting.turns}:{term}",
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
            bound=home is not None and policy.bound(situation, home),
            turn=waiting.turns,
            candidates=policy.considered(candidates, None),
        )
        first = self._queued(pool, waiting) == 0
        pool.hold(waiting, held)
        waiting.turns += 1
        waiting.confirmed, waiting.said_ms, waiting.thought_ms = False, now_ms, now_ms
        waiting.release_number, waiting.release_id = 0, ""
        yield Publish(held)
        yield Note("held", {"lacks": held.lacks})
        # Room that nobody waited for was not offered, and room that was left empty may be right for this one.
        board = situation.board
        if board is None:
            return
        if not first and number:
            return
        again = situation.able_rows if first else situation.roomy_rows
        for row in [board.row[held.home_instance]] if held.bound else np.flatnonzero(again).tolist():
            name = board.names[row]
            offer = self._offer_of(name)
            if first or (offer.unanswered_since_ms is None and situation.roomy_rows[row]):
                offer.declined_until_ms, offer.last_released = -INFINITY, -1
                self._ask_about(name)

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
            detail = "held beyond its patience and refused by nobody else"
            yield from self._refuse(scope, pool, waiting, "patience", now_ms, detail=detail)
            yield Note("refused", {"reason": "patience"}, {"request": waiting.request.ask.request_id}, level="warning")

    def _refuse(
        self, scope: str, pool: Pool, waiting: Waiting, reason: str, now_ms: float, *, detail: str = ""
    ) -> Iterator[Effect]:
        """Say no for good, and forget it; `reason` is of `REASONS`. Whoever calls notes it."""
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
                reason=reason,
                status=REASONS[reason],
                retry_after_s=1.0,
                detail=detail,
            )
        )
        self._drop_waiting(pool, ask.request_id)

    def _repeat_unconfirmed(self, now_ms: float) -> Iterator[Effect]:
        """Plain messages can be lost before a stream has them: what did not come back is said again."""
        for key, booking in list(self._unconfirmed.items()):
            if booking.confirmed or self.state.bookings.get(key) is not booking:
                del self._unconfirmed[key]
                continue
            if booking.assigned is None or now_ms - booking.said_ms < self.knobs.unconfirmed_ms:
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

    def _undo(self, booking: Booking, now_ms: float) -> Iterator[Effect]:
        """Our decision came after a later owner's mark: it does not count, the request waits again."""
        self._release(booking.id, now_ms)
        self._touch(booking.instance)
        request = booking.request
        if request is not None and not self.state.ended(booking.request_id, booking.attempt):
            scope = self._scope(request.ask.model, request.ask.version)
            pool = self.state.pools.get(scope)
            if pool is not None and booking.request_id not in pool.waiting:
                waiting = pool.waiting[booking.request_id] = Waiting(request, booking.booked_ms)
                if self.offices.term(scope):
                    yield from self._answer(scope, pool, waiting, now_ms)
        self.state.settle(booking.request_id, booking.gateway)

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
            chosen, lacks = self._for_newcomer(pool, waiting, situation, candidates)
            if chosen is not None:
                yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how="room")
            else:
                yield from self._hold(
                    scope, pool, waiting, situation, candidates, now_ms, lacks=lacks, number=held.after_release
                )
