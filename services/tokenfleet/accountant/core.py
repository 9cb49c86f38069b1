"""The pure half of the accountant: windows of goodput, and requests that lost their owner.

Decides when an attempt counts (once, whatever is delivered how often and in what order), which window it belongs to,
when a window is said, and when an open request is closed as `owner_lost`. It knows no ledger, no database and no clock:
rows are written by the shell, from the same events, through the same `policy`.

A request is lost when its gateway is silent or restarted, or when two successive leases omit it and its outcome does
not come within a grace. It is closed by saying the missing `outcome.finished`, so that whoever books or queues for it
lets go too; a later true outcome replaces it here and in the ledger. Only the replica in office speaks; all fold.
"""

from collections.abc import Iterable

import msgspec

from tokenfleet.accountant.policy import OutputMedian, judge
from tokenfleet.accountant.settings import AccountantSettings
from tokenfleet.accountant.state import LAYOUT, Clock, Expired, OpenRequest, Saved, State
from tokenfleet.accountant.windows import Measured, Sample, Windows
from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted, Times
from tokenfleet_schemas.request import RequestReceived

#: phases in which an attempt has been dispatched
_DISPATCHED = ("dispatched", "streaming")


class Accountant:
    """One replica's fold."""

    def __init__(self, fleet: Fleet, settings: AccountantSettings | None = None) -> None:
        self.settings = settings or AccountantSettings()
        self.state = State()
        self.medians = OutputMedian()
        self.windows = Windows(fleet.info.windows_s, step_ms=self.settings.step_ms)
        #: term of the office; 0: this replica only folds
        self.term = 0
        #: woken before, so no longer catching up with the past
        self._awake = False
        self._folded = 0

    # --- office ---------------------------------------------------------------------------------------------

    def take_office(self, term: int) -> None:
        """Speak from the next wake on; what a predecessor did not get across is said again."""
        self.term = term
        self.windows.say_again()
        for expired in self.state.expired.values():
            expired.said = False

    def leave_office(self) -> None:
        """Fold only."""
        self.term = 0

    # --- inputs ---------------------------------------------------------------------------------------------

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold one event. Unknown messages are none of its business."""
        self._folded += 1
        if not self._awake and self._folded % 1024 == 0:
            # hours of history pass by while nobody wakes us: keep only what still matters
            self.windows.advance(now_ms)
            self._forget(now_ms)
        if isinstance(message, OutcomeFinished):
            return self._finished(message, now_ms)
        if isinstance(message, RequestReceived):
            self._received(message, now_ms)
        elif isinstance(message, OutcomeStarted):
            self._started(message)
        elif isinstance(message, GatewayLeased):
            self._leased(message, now_ms)
        return []

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Look for lost owners, say windows that are due, forget what is old."""
        effects: list[Effect] = []
        # being woken is proof that we were listening since the last time; a pause of ours starts every silence anew
        if self.state.presence.hear(now_ms) or not self._awake:
            self.resumed(now_ms)
        self._awake = True
        for request_id in self.state.presence.silent(now_ms):
            self._expire(request_id, "gateway_silent", now_ms)
        for request_id, expired in list(self.state.expired.items()):
            request = self.state.open.get(request_id)
            if request is None:
                del self.state.expired[request_id]
            elif expired.close_ms <= now_ms and self.term and not expired.said:
                expired.said = True
                lost = self._lost(request, expired.reason, now_ms)
                effects.append(Publish(lost, durable=True))
                effects.append(
                    Note(
                        "owner_lost",
                        {"reason": expired.reason},
                        {"request": request_id, "gateway": request.ask.gateway},
                        level="warning",
                    )
                )
        measured = self.windows.advance(now_ms)
        if self.term:
            effects.extend(Publish(self._measured(one, now_ms)) for one in measured)
        self._forget(now_ms)
        effects.append(WakeAt(now_ms + self.settings.tick_ms))
        return effects

    def resumed(self, now_ms: float) -> Iterable[Effect]:
        """The connection is back: nobody was silent while we could not hear."""
        for sign in self.state.presence.gateways.values():
            sign.heard_ms = max(sign.heard_ms, now_ms)
        self.state.expired.clear()
        self.windows.say_again()
        return []

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterable[Effect]:
        """Take over the fleet file's window lengths."""
        self.windows.reconfigure(fleet.info.windows_s)
        return []

    # --- requests and their owners --------------------------------------------------------------------------

    def _received(self, message: RequestReceived, now_ms: float) -> None:
        ask = message.ask
        if ask.request_id in self.state.closed:
            return
        if ask.request_id not in self.state.open:
            stripped = msgspec.structs.replace(ask, prefix="")
            self.state.open[ask.request_id] = OpenRequest(ask=stripped, seen_ms=now_ms)
            self.state.presence.open(ask.request_id, ask.gateway, ask.gateway_incarnation, now_ms)

    def _started(self, message: OutcomeStarted) -> None:
        request = self.state.open.get(message.request_id)
        if request is not None and message.attempt >= request.attempt:
            request.attempt = message.attempt
            request.booking = message.booking
            request.served_site, request.instance = message.served_site, message.instance
            request.ttft_ms, request.predicted_ttft_ms = message.ttft_ms, message.predicted_ttft_ms

    def _leased(self, message: GatewayLeased, now_ms: float) -> None:
        if message.time_unix_ms:
            self.state.clocks[message.gateway] = Clock(now_ms - message.time_unix_ms)
        for one in message.open:
            request = self.state.open.get(one.request_id)
            if request is not None and one.phase in _DISPATCHED and one.attempt >= request.attempt:
                if one.attempt > request.attempt:
                    request.attempt = one.attempt
                    request.served_site = request.instance = ""
                    request.ttft_ms = request.predicted_ttft_ms = None
                request.booking = one.booking
                if one.instance:  # else a first token may have said it
                    request.served_site, request.instance = one.served_site, one.instance
            expired = self.state.expired.get(one.request_id)
            if expired is not None and not expired.said:
                del self.state.expired[one.request_id]  # it lives after all
        restarted = self._restarted(message)
        for request_id in self.state.presence.lease(message, now_ms):
            self._expire(
                request_id,
                "gateway_restarted" if restarted else "lease_omitted",
                now_ms + self.settings.omitted_grace_ms,
            )

    def _restarted(self, message: GatewayLeased) -> bool:
        sign = self.state.presence.gateways.get(message.gateway)
        return sign is not None and sign.incarnation not in ("", message.gateway_incarnation)

    def _expire(self, request_id: str, reason: str, close_ms: float) -> None:
        if request_id in self.state.open:
            self.state.expired.setdefault(request_id, Expired(close_ms, reason))

    def _lost(self, request: OpenRequest, reason: str, now_ms: float) -> OutcomeFinished:
        ask = request.ask
        # an attempt that ended already has its own row: the loss belongs to the one that was to follow
        attempt = max(request.attempt, request.ended_attempt + 1 if request.ended_attempt else 0)
        dispatched = attempt == request.attempt
        return OutcomeFinished(
            id=f"{ask.request_id}:finished:{attempt}:owner_lost",
            cause=f"{ask.request_id}:{reason}",
            term=self.term,
            time_unix_ms=int(now_ms),
            site=ask.entry,
            request_id=ask.request_id,
            attempt=attempt,
            final=True,
            outcome="owner_lost",
            reason=reason,
            gateway=ask.gateway,
            gateway_incarnation=ask.gateway_incarnation,
            tenant=ask.tenant,
            service_class=ask.service_class,
            task=ask.task,
            model_asked=ask.model_asked,
            model=ask.model,
            version=ask.version,
            served_site=request.served_site if dispatched else "",
            instance=request.instance if dispatched else "",
            booking=request.booking if dispatched else "",
            stream=ask.stream,
            input_tokens=ask.input_tokens,
            output_budget_tokens=ask.output_budget_tokens,
            request_bytes=ask.request_bytes,
            received_unix_ms=ask.received_unix_ms,
            times=Times(
                ttft_ms=request.ttft_ms if dispatched else None,
                e2e_ms=max(0.0, now_ms - request.seen_ms),
            ),
            predicted_ttft_ms=request.predicted_ttft_ms if dispatched else None,
            ttft_objective_ms=ask.ttft_ms,
            tpot_objective_ms=ask.tpot_ms,
            e2e_objective_ms=ask.e2e_ms,
        )

    # --- outcomes -------------------------------------------------------------------------------------------

    def _finished(self, event: OutcomeFinished, now_ms: float) -> list[Effect]:
        effects = self._count(event, now_ms)
        if event.final:
            self.state.closed.setdefault(event.request_id, now_ms)
            self.state.open.pop(event.request_id, None)
            self.state.expired.pop(event.request_id, None)
            self.state.presence.close(event.request_id, event.gateway)
        else:
            request = self.state.open.get(event.request_id)
            if request is not None:
                request.ended_attempt = max(request.ended_attempt, event.attempt)
        return effects

    def _count(self, event: OutcomeFinished, now_ms: float) -> list[Effect]:
        """Let an attempt into the windows, once; the truth takes an `owner_lost` of its request back."""
        state, request_id = self.state, event.request_id
        key = f"{event.attempt}:{request_id}"
        lost = state.lost.get(request_id)
        if event.outcome == "owner_lost":
            if request_id in state.closed or key in state.counted:
                return [Note("repeats_ignored", {"kind": "owner_lost"})]
        elif lost is not None and (event.final or event.attempt == lost.attempt):
            self.windows.remove(lost)
            del state.lost[request_id]
            state.counted.pop(f"{lost.attempt}:{request_id}", None)
        elif event.final and request_id in state.closed and key not in state.counted:
            # its gateway broke the rule of one final outcome: the ledger has the second one in quarantine
            return [Note("repeats_ignored", {"kind": "second_final"})]
        if key in state.counted:
            return [Note("repeats_ignored", {"kind": "attempt"})]
        state.counted[key] = now_ms
        self.medians.learn(event)
        sample = self._sample(event, now_ms)
        if event.outcome == "owner_lost":
            state.lost[request_id] = sample
        if not self.windows.add(sample):
            return [Note("outcomes_too_late_for_windows")]
        return []

    def _sample(self, event: OutcomeFinished, now_ms: float) -> Sample:
        verdict = judge(event)
        times = event.times
        ttft_ms = _duration(times.ttft_ms) if event.final else None
        tpot_ms = _duration(times.tpot_ms) if event.final and event.outcome == "completed" else None
        predicted_ttft_ms, predicted_tpot_ms = event.predicted_ttft_ms, event.predicted_tpot_ms
        return Sample(
            at_ms=self._finished_at(event, now_ms),
            request_id=event.request_id,
            attempt=event.attempt,
            group=(event.service_class, event.tenant, event.model, event.served_site),
            outcome=event.outcome,
            final=event.final,
            compliant=verdict.compliant,
            # what cannot be negative is clamped, as in the ledger's row
            output_tokens=max(0, event.output_tokens),
            wasted_tokens=max(0, verdict.wasted_tokens),
            wasted_cause=verdict.wasted_cause,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            ttft_error_ms=None if ttft_ms is None or predicted_ttft_ms is None else ttft_ms - predicted_ttft_ms,
            tpot_error_ms=None if tpot_ms is None or predicted_tpot_ms is None else tpot_ms - predicted_tpot_ms,
        )

    def _finished_at(self, event: OutcomeFinished, now_ms: float) -> float:
        """When it finished: as the ledger says, unless its gateway's clock is wrong.

        An outbox may deliver late, so arrival would shift a whole outage's outcomes to its end. The ledger's time is
        the gateway's, the same for every reader and delivery. What its leases show of its clock mends it where that
        is more than the tolerance off; within the tolerance windows and ledger agree to the last outcome.
        """
        finished_ms = event.received_unix_ms + round(max(0.0, event.times.e2e_ms), 3)
        clock = self.state.clocks.get(event.gateway)
        tolerance_ms = self.settings.clock_tolerance_ms
        if clock is not None and abs(clock.offset_ms) > tolerance_ms:
            finished_ms += clock.offset_ms
        return now_ms if finished_ms > now_ms + tolerance_ms else finished_ms

    # --- what is said ---------------------------------------------------------------------------------------

    def _measured(self, measured: Measured, now_ms: float) -> GoodputMeasured:
        service_class, tenant, model, site = measured.group
        counts = measured.counts
        where = ":".join(part or "_" for part in measured.group)
        return GoodputMeasured(
            id=f"goodput:{where}:{measured.window_s}:{measured.end_ms}:{self.term}:{measured.revision}",
            term=self.term,
            time_unix_ms=int(now_ms),
            site=site,
            service_class=service_class,
            tenant=tenant,
            model=model,
            window_s=measured.window_s,
            window_end_unix_ms=measured.end_ms,
            revision=measured.revision,
            offered=counts["offered"],
            completed=counts["completed"],
            compliant=counts["compliant"],
            refused=counts["refused"],
            cancelled=counts["cancelled"],
            failed=counts["failed"],
            repeated=counts["repeated"],
            output_tokens=measured.output_tokens,
            compliant_tokens=measured.compliant_tokens,
            wasted_tokens=measured.wasted_tokens,
            output_tokens_per_s=round(measured.output_tokens_per_s, 3),
            goodput_tokens_per_s=round(measured.goodput_tokens_per_s, 3),
            compliance_requests=_share(measured.compliance_requests),
            ttft_ms=measured.ttft_ms,
            tpot_ms=measured.tpot_ms,
            predicted=measured.predicted,
            prediction_coverage=_share(measured.prediction_coverage),
            ttft_error_ms_p50=measured.ttft_error_ms_p50,
            ttft_abs_error_ms=measured.ttft_abs_error_ms,
            tpot_error_ms_p50=measured.tpot_error_ms_p50,
        )

    # --- memory ---------------------------------------------------------------------------------------------

    def _forget(self, now_ms: float) -> None:
        before = now_ms - self.settings.remembered_ms
        for memory in (self.state.closed, self.state.counted):
            # folded in the order of time, so the oldest come first
            while memory:
                oldest = next(iter(memory))
                if memory[oldest] >= before and len(memory) <= self.settings.remembered_max:
                    break
                del memory[oldest]
        for request_id in [rid for rid, sample in self.state.lost.items() if sample.at_ms < before]:
            del self.state.lost[request_id]
        if len(self.state.clocks) > 2 * len(self.state.presence.gateways) + 64:
            self.state.clocks = {
                name: clock for name, clock in self.state.clocks.items() if name in self.state.presence.gateways
            }

    def snapshot(self) -> bytes:
        """The fold as bytes."""
        return msgspec.msgpack.encode(
            Saved(
                layout=LAYOUT,
                state=self.state,
                buckets=list(self.windows.buckets()),
                medians=self.medians.dump(),
            )
        )

    def restore(self, data: bytes) -> None:
        """Take a snapshot over; raises ValueError for one of another layout."""
        try:
            saved = msgspec.msgpack.decode(data, type=Saved)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a checkpoint of this version: {error}") from None
        if saved.layout != LAYOUT:
            raise ValueError(f"checkpoint of layout {saved.layout}, this is {LAYOUT}")
        self.state = saved.state
        for expired in self.state.expired.values():
            expired.said = False
        self.windows = Windows(self.windows.windows_s, step_ms=self.settings.step_ms)
        self.windows.load(saved.buckets)
        self.medians.load(saved.medians)

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """What it holds; all but the samples return to zero when nothing is open."""
        return {
            "accountant_open_requests": {(): float(len(self.state.open))},
            "accountant_window_samples": {(): float(len(self.windows))},
            "accountant_in_office": {(): 1.0 if self.term else 0.0},
        }


def _duration(value_ms: float | None) -> float | None:
    return None if value_ms is None else max(0.0, value_ms)


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
