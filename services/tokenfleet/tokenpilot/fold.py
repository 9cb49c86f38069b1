"""What is heard: every message's effect on the fold, whoever decides.

Decides which messages count (late, repeated and void ones do not) and passes on what asks for an answer.
"""

from collections.abc import Iterator

from tokenfleet.effects import Effect, Note
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.desk import FORGET_MS, INFINITY
from tokenfleet.tokenpilot.predictor import Margin, Model, Residual
from tokenfleet.tokenpilot.rooms import Rooms
from tokenfleet.tokenpilot.state import Booking, Forecast, Waiting
from tokenfleet_schemas.capacity import CapacityReported
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
    Work,
)
from tokenfleet_schemas.room import RoomDeclined

#: outcomes below which an instance is taken for what equal ones have been found to be
FEW = 20
#: the sequences that keep the promised pace are reckoned anew after this, ms
PACED_MS = 1_000.0


class Folding(Rooms):
    """See the module."""

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
            pool.promised.hear(ask.tpot_ms, policy.expected_tokens(ask, self._expected_tokens(ask)))
            self.state.presence.open(ask.request_id, ask.gateway, ask.gateway_incarnation, now_ms)
        else:
            known = waiting.request
            if (message.attempt, message.revision) <= (known.attempt, known.revision):
                return
            pool.hold(waiting, None)  # the place in `waiting` is kept
            waiting.request, waiting.heard_ms = message, now_ms
        if self.offices.term(scope):
            yield from self._answer(scope, pool, waiting, now_ms)

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
        if waiting.held is not None and waiting.held.term == message.term and waiting.held.turn > message.turn:
            return
        if waiting.held is not None and waiting.held.id == message.id:
            waiting.confirmed = True
            return
        pool.hold(waiting, message)
        waiting.confirmed, waiting.turns = True, max(waiting.turns, message.turn + 1)
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
        self._ask_about(message.instance)
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
        waiting = pool.waiting.get(message.request_id)
        self._book_assigned(pool, message, now_ms, request=None)
        if waiting is not None:
            self._pin(message, waiting.request.ask)
            self._expect_cached(waiting.request.ask, message.instance)

    def _declined(self, message: PlacementDeclined, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site:
            return
        booking = self._release(message.declined, now_ms)
        if booking is not None:
            self._touch(booking.instance)
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

    def _started(self, message: OutcomeStarted, now_ms: float) -> Iterator[Effect]:
        if not self._is_ours(message.instance) or self.state.ended(message.request_id, message.attempt):
            return
        booking = self.state.bookings.get(message.booking)
        if booking is None:
            key = message.booking or f"{message.request_id}:started:{message.attempt}"
            if key in self.state.bookings:
                return
            length = self.state.lengths.find(message.tenant, "", message.model)
            expected = max(1, round(length.mean_tokens)) if length is not None else self.knobs.prior_decode_tokens
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
            self._touch(message.instance)
            yield Note("booked_by_start")
        else:
            self._first_token(booking, message, now_ms)

    def _finished(self, message: OutcomeFinished, now_ms: float) -> Iterator[Effect]:
        state, request_id = self.state, message.request_id
        known = f"outcome {message.id}" in state.gone
        state.gone[f"outcome {message.id}"] = now_ms
        if message.attempt > 0:
            state.gone[f"attempt {request_id}#{message.attempt}"] = now_ms
        if message.final:
            state.gone[f"request {request_id}"] = now_ms
        booked_ms, judged = now_ms, None
        for booking in state.bookings_of(request_id):
            if message.final or booking.attempt <= message.attempt or booking.id == message.booking:
                if booking.id == message.booking:
                    booked_ms, judged = booking.booked_ms, booking
                self._release(booking.id, now_ms)
                self._touch(booking.instance)
        for pool in state.pools.values():
            waiting = pool.waiting.get(request_id)
            if waiting is not None and (message.final or waiting.request.attempt <= message.attempt):
                pool.drop(request_id)
        state.settle(request_id, message.gateway)
        if not known and message.instance and self._is_ours(message.instance):
            yield from self._judge(message, booked_ms, now_ms)
            # a cut answer teaches neither length nor pace
            if message.outcome == "completed" and self.fleet.policy.feedback != "frozen":
                yield from self._learn(message, judged, now_ms)

    def _first_token(self, booking: Booking, message: OutcomeStarted, now_ms: float) -> None:
        """Its prefill is done: what the engine has computed beyond it is credited to those that follow."""
        load = self.state.load(booking.instance)
        heard = self.state.view.instances(self.site).get(booking.instance)
        anchor_ms = load.anchor_ms
        model = self._model(booking.instance, heard) if heard is not None else None
        per_token_ms = self._per_token_ms(heard, load, model) if heard is not None and model is not None else 0.0
        if not self.state.start(booking):
            return
        booking.confirmed, booking.request = True, None
        load.first_tokens += 1
        if load.prefill_tokens and heard is not None:
            beyond = (now_ms - anchor_ms) / per_token_ms - booking.work.prefill_tokens
            credit = max(0.0, min(beyond, float(heard.report.token_budget), float(load.prefill_tokens)))
            load.anchor_ms = now_ms - credit * per_token_ms
        pool = self._pool(message.model, message.version)
        if pool is not None:
            # Dry while somebody waits for prefill room there: not for another instance, nor for KV or sequences.
            waits = booking.instance in pool.bound or pool.held > pool.blocked + sum(pool.bound.values())
            dry = waits and not load.prefill_tokens and self._room(booking.instance, now_ms).any()
            load.feed(dry, now_ms, self.knobs)
        self._touch(booking.instance)

    def _judge(self, message: OutcomeFinished, booked_ms: float, now_ms: float) -> Iterator[Effect]:
        """Whether the instance may be used further."""
        load = self.state.load(message.instance)
        if load.breaker.judge(message.outcome, booked_ms, now_ms, self.knobs):
            yield Note("breaker_opened", {"instance": message.instance}, {"outcome": message.outcome}, level="warning")
        self._touch(message.instance)

    def _learn(self, message: OutcomeFinished, booking: Booking | None, now_ms: float) -> Iterator[Effect]:
        """The feedback of one whole answer: prefix trust, lengths, pace, predictions."""
        load = self.state.load(message.instance)
        yield from self.exact.compare(message.instance, message.prefix_hit_tokens_predicted, message.cached_tokens)
        self.state.lengths.learn(message.tenant, message.task, message.model, message.output_tokens)
        tpot_ms = message.times.tpot_ms
        if tpot_ms is not None:
            load.tpot_ms = tpot_ms if load.tpot_ms is None else load.tpot_ms + 0.1 * (tpot_ms - load.tpot_ms)
        if booking is None:
            return
        if not booking.started:
            load.first_tokens += 1
        if booking.forecast is not None and booking.instance == message.instance:
            yield from self._learn_pace(message, booking.forecast)
            self._learn_tempo(message, booking, booking.forecast, now_ms)

    def _learn_pace(self, message: OutcomeFinished, forecast: Forecast) -> Iterator[Effect]:
        """What was predicted, against what came: only whole answers of the incarnation that it was predicted for."""
        heard = self.state.view.instances(self.site).get(message.instance)
        times = message.times
        if heard is None or times.ttft_ms is None or times.queue_ms is None:
            return
        model = self._model(message.instance, heard)
        if model.key != f"{message.model} {message.version}":
            return
        actual_ms = times.ttft_ms - times.queue_ms - forecast.rtt_ms
        if actual_ms > 0:
            self.state.margins.setdefault(message.service_class, Margin()).learn(forecast.said_ms, actual_ms)
            self.state.residuals.setdefault(model.key, Residual()).learn(
                forecast.bucket, forecast.physics_ms, actual_ms
            )
            drifts = model.learn_ttft(forecast.ttft_features, forecast.said_ms, actual_ms, stale=forecast.stale)
            if model.samples == FEW:
                self._novices(model.key).pop(message.instance, None)
            if drifts:
                yield Note("prediction_drift", {"instance": message.instance}, level="warning")
            # Whoever has had few requests is taken for what its equals are: by chance dear, it would never get more.
            limit, prior, multiples = min(FEW, model.samples), model.ttft.prior, model.ttft.multiples
            taught: dict[str, Model] = {}
            for name, other in self._novices(model.key).items():
                ttft = other.ttft
                if other.samples < limit and (ttft.prior is prior or ttft.prior == prior):
                    ttft.multiples = multiples  # learning makes new lists: nobody changes this one
                    taught[name] = other
            board = self._boards.get(message.model)
            if taught and board is not None:
                board.teach(taught)
        paced = times.tpot_ms is not None and message.output_tokens > 1
        if paced and model.learn_tpot(forecast.tpot_features, times.tpot_ms or 0.0):
            yield Note("prediction_drift", {"instance": message.instance}, level="warning")

    def _learn_tempo(self, message: OutcomeFinished, booking: Booking, forecast: Forecast, now_ms: float) -> None:
        """How many sequences keep the pace that is promised there."""
        heard = self.state.view.instances(self.site).get(message.instance)
        pool, tpot_ms = self._pool(message.model, message.version), message.times.tpot_ms
        if heard is None or pool is None or not tpot_ms or message.output_tokens < 2:
            return
        load, prior = self.state.load(message.instance), self._model(message.instance, heard).tpot.prior
        beside = 0.5 * (forecast.tpot_features[1] + 1.0 + load.decoding + load.foreign_sequences)
        kv_tokens = float(message.input_tokens + message.output_tokens)
        work = booking.work
        load.tempo.learn(prior, beside, work.prefill_tokens, message.output_tokens, kv_tokens, tpot_ms)
        if message.service_class in self.fleet.classes:
            promised_ms = self.fleet.objectives(message.tenant, message.service_class).tpot_ms
            load.tempo.judge(tpot_ms, promised_ms, message.output_tokens)
        if not self._reckons:
            load.paced = None  # a baseline that weighs declared rates only is left what it had
        elif now_ms - load.paced_ms >= PACED_MS:
            load.paced_ms = now_ms
            most = float(heard.report.max_sequences or self.knobs.unknown_kv_sequences)
            kv_total = float(heard.report.kv_tokens_total or INFINITY)
            load.paced = load.tempo.limit(load.paced, prior, pool.promised, most, kv_total)

    def _novices(self, key: str) -> dict[str, Model]:
        """The model version's instances that have learned from few requests: in a large pool soon none of hundreds."""
        if self._few is None:
            self._few = {}
            for name, model in self.state.models.items():
                if model.samples < FEW:
                    self._few.setdefault(model.key, {})[name] = model
        return self._few.setdefault(key, {})

    def _leased(self, message: GatewayLeased, now_ms: float) -> Iterator[Effect]:
        for request_id in self.state.presence.lease(message, now_ms):
            yield from self._expire(request_id, "lease_omits", now_ms)

    def _expire(self, request_id: str, why: str, now_ms: float) -> Iterator[Effect]:
        """The gateway does not have it open any more: whatever is here of it ends."""
        for booking in self.state.bookings_of(request_id):
            self._release(booking.id, now_ms)
            self._touch(booking.instance)
            yield Note("expired", {"what": "booking", "why": why}, {"booking": booking.id}, level="warning")
        for pool in self.state.pools.values():
            if pool.drop(request_id) is not None:
                yield Note("expired", {"what": "hold", "why": why}, {"request": request_id}, level="warning")
        for gateway in self.state.presence.gateways:
            self.state.presence.close(request_id, gateway)

    def _reported(self, message: CapacityReported, now_ms: float) -> Iterator[Effect]:
        if message.site != self.site or not self.state.view.fold(message, now_ms):
            return
        load = self.state.load(message.instance)
        if load.incarnation != message.incarnation:
            if load.incarnation:
                # The engine began anew: its gauges and its cache are gone, what we booked there is not (P01).
                load.breaker.reset()
                load.forget_foreign()
                load.cold_since_ms, load.first_tokens = now_ms, 0
                if not self.exact.is_exact(message.instance, message.incarnation):  # else its KV events came first
                    self.index.clear(message.instance)
                yield Note("incarnation_changed", {"instance": message.instance}, level="info")
            load.incarnation = message.incarnation
        load.sample(message)
        yield from self.exact.reported(message.instance, message.incarnation, message.model, now_ms)
        kv_tokens = message.kv_tokens_total
        if kv_tokens is not None and self.exact.is_exact(message.instance):
            kv_tokens *= 2  # the engine says what it drops: room for what was sent there and is not computed yet
        self.index.limit(message.instance, kv_tokens)
        self._touch(message.instance)
        scope = self._scope(message.model, message.version)
        pool = self.state.pools.get(scope)
        if pool is not None and pool.blocked and self.offices.term(scope) and self._usable(message.instance, now_ms):
            yield from self._unblock(scope, pool, now_ms)

    def _kv_changed(self, message: KvChanged, now_ms: float) -> Iterator[Effect]:
        if message.site == self.site and self._is_ours(message.instance):
            yield from self.exact.changed(message, now_ms)

    def _room_declined(self, message: RoomDeclined, now_ms: float) -> Iterator[Effect]:
        offer = self._offers.get(message.instance)
        if message.site == self.site and offer is not None:
            offer.unanswered_since_ms = None
            offer.declined_until_ms = now_ms + max(0.0, message.for_ms)
            self._stirred.add(message.instance)
        yield from ()

    def _start_anew(self, now_ms: float) -> None:
        self.state.view.renew(now_ms)
        self._boards.clear()
        for offer in self._offers.values():
            if offer.unanswered_since_ms is not None:
                offer.unanswered_since_ms = now_ms
        self._stirred.update(self._offers)
        for sign in self.state.presence.gateways.values():
            sign.heard_ms = max(sign.heard_ms, now_ms)

    def _forget(self, now_ms: float) -> None:
        """Drop what is left of instances that are gone."""
        known = len(self.state.view.instances(self.site))
        self.state.view.forget(now_ms - FORGET_MS)
        if len(self.state.view.instances(self.site)) != known:
            self._boards.clear()
        present = self.state.view.instances(self.site)
        for name in [n for n, load in self.state.loads.items() if n not in present and load.sequences == 0]:
            del self.state.loads[name]
            self.state.models.pop(name, None)
            self._few = None
            self._offers.pop(name, None)
            self._limited.discard(name)
            self.exact.forget(name)
            self.index.clear(name, gone=True)
