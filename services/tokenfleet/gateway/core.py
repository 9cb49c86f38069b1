"""The gateway's pure half: the road of every open request, from receipt to its one final outcome.

Decides when a silent road is asked again, when the gateway stands in for a silent service, which assignment is used
and which declined, whether an attempt that failed is repeated elsewhere, and what is said about all of it. It never
decides *where* as long as anybody else does. Refuses to know HTTP, bytes and engines: its shell tells it `open`,
`started`, `ended` and `left`, and does what the effects say.

The ladder of a silent road (each rung one revision): `request.received` once more; the gateway's own conservative
admission (SLOMax is silent); `placement.requested` to the allowed ready sites in order, round after round (FleetMind
is silent); refusal when the patience ends. Permission and residency hold on every rung (`tokenfleet.eligibility`).
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import count

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import HOP_BASE_MS, CapacityView, allowed_ready_sites, hop_timeout_ms, retry_after_s
from tokenfleet.fleet import Fleet
from tokenfleet.gateway.policy import FAILED_STATUS, first_token_limit_ms, road_timeout_ms
from tokenfleet.gateway.settings import Limits
from tokenfleet.gateway.state import Dispatch, End, Interrupt, Open, Refuse, Stage
from tokenfleet_schemas.admission import REASONS, AdmissionDecided
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted, Times
from tokenfleet_schemas.placement import (
    Considered,
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementRefused,
    PlacementRequested,
)
from tokenfleet_schemas.request import Ask, RequestReceived

#: assignments that were used or declined and are remembered, so that their repetition changes nothing
_ANSWERED_MAX = 8192
#: refusals of a single site, after which the gateway's own round goes on to the next
_ONE_SITE = frozenset({"model_not_ready", "no_capacity"})


class Gateway:
    """All open requests of one gateway process. `now_ms` is its clock: ms since the epoch, never backwards."""

    def __init__(self, fleet: Fleet, *, site: str, name: str, incarnation: str, limits: Limits | None = None) -> None:
        self.fleet = fleet
        self.site = site
        self.name = name
        self.incarnation = incarnation
        self.limits = limits or Limits()
        self.requests: dict[str, Open] = {}
        self.capacity = CapacityView()
        #: the road was silent to the end for somebody and has answered nobody since
        self.road_silent = False
        self._timers: list[tuple[float, int, str, int]] = []
        self._numbers = count(1)
        self._assignments: dict[str, None] = {}
        #: instance → requests waiting for its first token
        self._awaiting: dict[str, set[str]] = {}
        self._leases = count(1)
        self._roads_ms: dict[str, float] = {}

    # --- what the shell asks -----------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """No further request may be opened."""
        return len(self.requests) >= self.limits.max_open

    @property
    def next_wake_ms(self) -> float:
        """When `wake` is due."""
        timers = self._timers
        while timers:
            at_ms, _, request_id, step = timers[0]
            one = self.requests.get(request_id)
            if one is not None and (step < 0 or step == one.step):
                return at_ms
            heapq.heappop(timers)  # its request is further on: most timers end so, and nobody need wake for them
        return float("inf")

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterator[Effect]:
        """Another fleet file holds from now on; what is placed stays placed."""
        self.fleet = fleet
        self._roads_ms.clear()
        yield from ()

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Open requests by phase: all zero when nothing is open."""
        phases = {"waiting": 0, "held": 0, "dispatched": 0, "streaming": 0}
        for one in self.requests.values():
            phases[one.stage.phase] += 1
        return {"open_requests": {(("phase", phase),): float(n) for phase, n in phases.items()}}

    # --- what the shell tells ----------------------------------------------------------------------------------

    def open(self, ask: Ask, now_ms: float, *, received_ms: float | None = None) -> Iterator[Effect]:
        """A client's request was read and found in order; `received_ms` is when its headers came."""
        received_ms = now_ms if received_ms is None else received_ms
        patience_ms = min(ask.patience_ms, self.limits.hold_ms)
        one = Open(ask=ask, received_ms=received_ms, patience_ms=received_ms + patience_ms)
        self.requests[ask.request_id] = one
        self._at(one, one.patience_ms + self.limits.patience_grace_ms, step=-1)
        yield from self._submit(one, now_ms)
        yield self._wake_at()

    def refused(self, ask: Ask, reason: str, now_ms: float, *, received_ms: float) -> Iterator[Effect]:
        """The gateway itself refused a request before it opened it (`gateway_full`, `unavailable`)."""
        one = Open(ask=ask, received_ms=received_ms, patience_ms=now_ms)
        end = End(outcome="refused", reason=reason, status=REASONS[reason])
        yield Publish(self._finished(one, end, now_ms, attempt=0, final=True), durable=True)

    def started(self, request_id: str, now_ms: float) -> Iterator[Effect]:
        """The first content, reasoning or tool token of the present attempt is here."""
        one = self.requests.get(request_id)
        if one is None or one.stage is not Stage.DISPATCHED or one.assigned is None or one.dispatched_ms is None:
            return
        self._enter(one, Stage.STREAMING)
        one.first_token_ms = now_ms
        assigned, ask = one.assigned, one.ask
        yield Publish(
            OutcomeStarted(
                id=f"{request_id}:started:{one.attempt}",
                cause=assigned.id,
                time_unix_ms=int(now_ms),
                site=self.site,
                request_id=request_id,
                attempt=one.attempt,
                gateway=self.name,
                tenant=ask.tenant,
                service_class=ask.service_class,
                model=ask.model,
                version=ask.version,
                served_site=assigned.site,
                instance=assigned.instance,
                booking=assigned.id,
                ttft_ms=now_ms - one.received_ms,
                engine_ttft_ms=now_ms - one.dispatched_ms,
                predicted_ttft_ms=assigned.predicted_ttft_ms,
                ttft_objective_ms=ask.ttft_ms,
                input_tokens=ask.input_tokens,
                kv_tokens=assigned.work.kv_tokens,
            )
        )

    def ended(self, request_id: str, end: End, now_ms: float) -> Iterator[Effect]:
        """The present attempt ended as its relay says: the request is closed, or waits for its next attempt."""
        one = self.requests.get(request_id)
        if one is None or one.assigned is None:
            return
        instance = one.assigned.instance
        failed_early = end.outcome in ("failed", "timed_out") and one.first_token_ms is None
        if failed_early and one.attempt < self.limits.max_attempts:
            if instance not in one.excluded:
                one.excluded = (*one.excluded, instance)
            yield Publish(self._finished(one, end, now_ms, attempt=one.attempt, final=False), durable=True)
            yield Note("attempt_repeated", {"reason": end.reason})
            self._enter(one, Stage.ROAD)
            one.attempt += 1
            one.sends, one.sites, one.asked_site = 0, [], ""
            one.assigned = one.dispatched_ms = None
            patience_ms = max(one.patience_ms, now_ms + self.limits.again_ms)
            if patience_ms > one.patience_ms:
                one.patience_ms = patience_ms
            self._at(one, patience_ms + self.limits.patience_grace_ms, step=-1)
            self._at(one, now_ms + self._road_ms(one))
        else:
            self._close(one)
            if failed_early:
                end = End(
                    outcome=end.outcome,
                    reason=end.reason,
                    status=FAILED_STATUS.get(end.reason, 502),
                    first_byte_ms=end.first_byte_ms,
                    response_bytes=end.response_bytes,
                )
                retry_s = retry_after_s(request_id, 2000.0) if end.status == 503 else None
                yield Refuse(request_id, end.reason, end.status, retry_s)
            yield Publish(self._finished(one, end, now_ms, attempt=one.attempt, final=True), durable=True)
        yield self._wake_at()

    def left(self, request_id: str, now_ms: float, *, reason: str = "client_left") -> Iterator[Effect]:
        """The client left while nothing was dispatched for it."""
        one = self.requests.get(request_id)
        if one is None:
            return
        end = End(outcome="cancelled", reason=reason)
        attempt = 0 if one.assigned is None else one.attempt
        self._close(one)
        yield Publish(self._finished(one, end, now_ms, attempt=attempt, final=True), durable=True)

    def stop(self, now_ms: float) -> Iterator[Effect]:
        """The gateway stops: what is not placed is refused. What an instance works on, its relay ends."""
        for one in list(self.requests.values()):
            if one.stage.unplaced:
                retry_s = retry_after_s(one.ask.request_id, 1000.0)
                yield from self._refuse(one, "unavailable", REASONS["unavailable"], retry_s, now_ms)

    def lease(self, now_ms: float, *, closing: bool = False) -> GatewayLeased:
        """The sign of life: everything that is open."""
        revision = next(self._leases)
        return GatewayLeased(
            id=f"{self.name}:{self.incarnation}:leased:{revision}",
            time_unix_ms=int(now_ms),
            site=self.site,
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            revision=revision,
            open=tuple([_open(request_id, one) for request_id, one in self.requests.items()]),
            closing=closing,
        )

    def reconnected(self, now_ms: float) -> Iterator[Effect]:
        """The bus is back: silence counts from here, and what may have been lost on the way is said again."""
        self.capacity.renew(now_ms)
        for one in list(self.requests.values()):
            if one.stage.unplaced:
                self._enter(one, Stage.ROAD)
                yield from self._submit(one, now_ms)
        yield self._wake_at()

    # --- Core protocol -----------------------------------------------------------------------------------------

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold one event; see `tokenfleet.effects.Core`."""
        if isinstance(message, CapacityReported):  # by far the most
            return self._on_capacity(message, now_ms)
        if isinstance(message, PlacementAssigned):
            return self._on_assigned(message, now_ms)
        if isinstance(message, PlacementHeld):
            return self._on_held(message, now_ms)
        if isinstance(message, PlacementRefused):
            return self._on_refused(message, now_ms)
        return ()

    def wake(self, now_ms: float) -> Iterator[Effect]:
        """Do what is due; see `tokenfleet.effects.Core`."""
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            _, _, request_id, step = heapq.heappop(timers)
            one = self.requests.get(request_id)
            if one is None:
                continue
            if step < 0:
                if one.stage.unplaced and now_ms >= one.patience_ms + self.limits.patience_grace_ms:
                    yield from self._out_of_patience(one, now_ms)
            elif step == one.step:
                yield from self._overdue(one, now_ms)
        yield self._wake_at()

    # --- events ------------------------------------------------------------------------------------------------

    def _on_assigned(self, event: PlacementAssigned, now_ms: float) -> Iterator[Effect]:
        if event.gateway != self.name or event.id in self._assignments:
            return
        self._assignments[event.id] = None
        if len(self._assignments) > _ANSWERED_MAX:
            del self._assignments[next(iter(self._assignments))]
        one = self.requests.get(event.request_id)
        unfit = self._unfit(one, event)
        if one is None or unfit:
            yield from self._decline(event, unfit, event.instance, now_ms)
            return
        self._answered(one)
        self._enter(one, Stage.DISPATCHED)
        one.assigned, one.dispatched_ms = event, now_ms
        one.fallback = one.fallback or event.how == "fallback"
        self._awaiting.setdefault(event.instance, set()).add(event.request_id)
        self._at(one, now_ms + first_token_limit_ms(one.ask, event, self.limits))
        yield Dispatch(event.request_id, one.attempt, event)
        yield self._wake_at()

    def _unfit(self, one: Open | None, event: PlacementAssigned) -> str:
        """Why an assignment is not used; empty if it is."""
        if one is None:
            return "closed"
        if event.attempt != one.attempt or not one.stage.unplaced:
            return "superseded"
        if event.instance in one.excluded:
            return "excluded"
        if event.model != one.ask.model or event.version != one.ask.version:
            return "other_version"
        # the last gate before bytes leave: a placement that breaks the tenant's residency is never followed
        if self.fleet.site_denial(one.ask.tenant, one.ask.model, event.site):
            return "not_permitted"
        if self.fleet.instance_site(event.instance) not in (None, event.site):
            return "declared_elsewhere"
        return ""

    def _on_held(self, event: PlacementHeld, now_ms: float) -> Iterator[Effect]:
        if event.gateway != self.name:
            return
        one = self.requests.get(event.request_id)
        if one is None or event.attempt != one.attempt:
            yield from self._decline(event, "closed" if one is None else "superseded", "", now_ms)
        elif not one.stage.unplaced:
            # the booking that is in use was made from this hold, or beats it: holds before it are no news
            if one.assigned is None or event.revision > one.assigned.revision:
                yield from self._decline(event, "superseded", "", now_ms)
        else:
            self._answered(one)
            self._enter(one, Stage.HELD)
            one.was_held = True

    def _on_refused(self, event: PlacementRefused, now_ms: float) -> Iterator[Effect]:
        if event.gateway != self.name:
            return
        one = self.requests.get(event.request_id)
        if one is None or event.attempt != one.attempt or not one.stage.unplaced:
            return
        self._answered(one)
        if one.stage is Stage.INSTANCE and event.site == one.asked_site and event.reason in _ONE_SITE:
            yield from self._ask_next_site(one, now_ms)
            yield self._wake_at()
            return
        status = event.status or REASONS.get(event.reason, 503)
        yield from self._refuse(one, event.reason, status, event.retry_after_s, now_ms)

    def _on_capacity(self, event: CapacityReported, now_ms: float) -> Iterable[Effect]:
        before = self.capacity.instances(event.site).get(event.instance)
        if not self.capacity.fold(event, now_ms):
            return ()
        awaiting = self._awaiting.get(event.instance)
        if not awaiting:
            return ()
        was = before.report.incarnation if before is not None else ""
        return self._interrupt_awaiting(awaiting, was, event)

    def _interrupt_awaiting(self, awaiting: Iterable[str], was: str, event: CapacityReported) -> Iterator[Effect]:
        """End what waits for an instance that is gone, or that was another until now."""
        # a draining instance finishes what it has; anything else that is not ready is not waited for
        gone = not event.ready and not event.draining and event.reason != "draining"
        for request_id in sorted(awaiting):
            one = self.requests[request_id]
            restarted = one.assigned is not None and was == one.assigned.incarnation != event.incarnation
            if gone or restarted:
                yield Interrupt(request_id, one.attempt, "instance_gone")

    # --- time --------------------------------------------------------------------------------------------------

    def _overdue(self, one: Open, now_ms: float) -> Iterator[Effect]:
        """Whoever this request waits for stayed silent."""
        if one.stage is Stage.DISPATCHED:
            yield Interrupt(one.ask.request_id, one.attempt, "first_token_timeout")
        elif one.stage is Stage.ROAD:
            if one.attempt > 1 or one.fallback:
                yield from self._ask_next_site(one, now_ms)
            elif one.sends < 2 and not self.road_silent:
                yield from self._submit(one, now_ms)
            else:
                self.road_silent = True
                yield from self._admit(one, now_ms)
        elif one.stage in (Stage.SITE, Stage.INSTANCE):
            yield from self._ask_next_site(one, now_ms)

    def _submit(self, one: Open, now_ms: float) -> Iterator[Effect]:
        """Say `request.received`, again with the next revision."""
        if one.sends or one.attempt > 1 or one.revision:
            one.revision += 1
            yield Note("fallback", {"kind": "resubmitted"})
        one.sends += 1
        ask = one.ask
        yield Publish(
            RequestReceived(
                id=f"{ask.request_id}:received:{one.attempt}:{one.revision}",
                time_unix_ms=int(now_ms),
                site=self.site,
                ask=ask,
                attempt=one.attempt,
                revision=one.revision,
                elapsed_ms=now_ms - one.received_ms,
            )
        )
        # while the road is known to be silent, one hop shows whether it is back
        self._at(one, now_ms + (HOP_BASE_MS if self.road_silent else self._road_ms(one)))

    def _admit(self, one: Open, now_ms: float) -> Iterator[Effect]:
        """SLOMax is silent: the gateway's own conservative limit."""
        own = sum(1 for other in self.requests.values() if other.fallback)
        admitted = own < self.limits.fallback_open
        ask = one.ask
        one.revision += 1
        retry_s = None if admitted else retry_after_s(ask.request_id, 2000.0)
        yield Publish(
            AdmissionDecided(
                id=f"{ask.request_id}:decided:{self.name}:{one.attempt}:{one.revision}",
                cause=f"{ask.request_id}:received:{one.attempt}:{one.revision - 1}",
                time_unix_ms=int(now_ms),
                site=self.site,
                ask=ask,
                attempt=one.attempt,
                revision=one.revision,
                elapsed_ms=now_ms - one.received_ms,
                admitted=admitted,
                reason="" if admitted else "unavailable",
                status=0 if admitted else REASONS["unavailable"],
                retry_after_s=retry_s,
                fallback=True,
            )
        )
        yield Note("fallback", {"kind": "admitted" if admitted else "refused"}, level="info")
        if not admitted:
            yield from self._refuse(one, "unavailable", REASONS["unavailable"], retry_s, now_ms)
            return
        one.fallback = True
        self._enter(one, Stage.SITE)
        self._at(one, now_ms + self._road_ms(one) - HOP_BASE_MS)

    def _ask_next_site(self, one: Open, now_ms: float) -> Iterator[Effect]:
        """FleetMind is silent: the next allowed ready site, home sites first; after the last, from the start."""
        ask = one.ask
        self._enter(one, Stage.INSTANCE)
        considered: tuple[Considered, ...] = ()
        if not one.sites:
            found, considered = allowed_ready_sites(self.fleet, self.capacity, ask, now_ms, one.excluded)
            one.sites = list(found)
            one.no_site = not found
        if not one.sites:
            one.asked_site = ""
            self._at(one, now_ms + self.limits.round_ms)
            return
        site = one.sites.pop(0)
        one.asked_site = site
        one.fallback = True
        one.revision += 1
        yield Publish(
            PlacementRequested(
                id=f"{ask.request_id}:requested:{self.name}:{one.attempt}:{one.revision}",
                cause=f"{ask.request_id}:received:{one.attempt}:0",
                time_unix_ms=int(now_ms),
                site=site,
                ask=ask,
                attempt=one.attempt,
                revision=one.revision,
                elapsed_ms=now_ms - one.received_ms,
                excluded=one.excluded,
                sites=considered,
                fallback="gateway",
            )
        )
        yield Note("fallback", {"kind": "asked_site"}, {"site": site}, level="info")
        last = 0.0 if one.sites else self.limits.round_ms
        self._at(one, now_ms + hop_timeout_ms(self.fleet, self.site, site) + last)

    def _out_of_patience(self, one: Open, now_ms: float) -> Iterator[Effect]:
        """Nobody placed it in time, and nobody said so."""
        if one.was_held:
            reason = "patience"
        elif one.no_site:
            zones = self.fleet.tenants[one.ask.tenant].zones if one.ask.tenant in self.fleet.tenants else ()
            reason = "no_capacity" if "*" in zones else "residency_no_capacity"
        else:
            reason = "unavailable"
        retry_s = retry_after_s(one.ask.request_id, 2000.0)
        yield from self._refuse(one, reason, REASONS[reason], retry_s, now_ms)

    # --- small parts -------------------------------------------------------------------------------------------

    def _refuse(self, one: Open, reason: str, status: int, retry_s: float | None, now_ms: float) -> Iterator[Effect]:
        self._close(one)
        end = End(outcome="refused", reason=reason, status=status)
        yield Publish(self._finished(one, end, now_ms, attempt=0, final=True), durable=True)
        yield Refuse(one.ask.request_id, reason, status, retry_s)

    def _decline(
        self, event: PlacementAssigned | PlacementHeld, reason: str, instance: str, now_ms: float
    ) -> Iterator[Effect]:
        yield Publish(
            PlacementDeclined(
                id=f"{event.id}:declined",
                cause=event.id,
                time_unix_ms=int(now_ms),
                site=event.site,
                request_id=event.request_id,
                gateway=self.name,
                model=event.model,
                version=event.version,
                attempt=event.attempt,
                revision=event.revision,
                declined=event.id,
                instance=instance,
                reason=reason,
            )
        )
        yield Note("declined", {"reason": reason})

    def _answered(self, one: Open) -> None:
        """Somebody of the road answered; if the gateway had not stood in, the road is not silent any more."""
        if not one.fallback:
            self.road_silent = False

    def _enter(self, one: Open, stage: Stage) -> None:
        if one.stage is Stage.DISPATCHED and one.assigned is not None:
            self._no_longer_awaited(one)
        one.stage = stage
        one.step += 1

    def _no_longer_awaited(self, one: Open) -> None:
        assert one.assigned is not None
        awaiting = self._awaiting.get(one.assigned.instance)
        if awaiting is not None:
            awaiting.discard(one.ask.request_id)
            if not awaiting:
                del self._awaiting[one.assigned.instance]

    def _close(self, one: Open) -> None:
        if one.assigned is not None:
            self._no_longer_awaited(one)
        del self.requests[one.ask.request_id]
        if len(self._timers) > 4 * len(self.requests) + 1024:
            self._timers = [timer for timer in self._timers if timer[2] in self.requests]
            heapq.heapify(self._timers)

    def _at(self, one: Open, at_ms: float, *, step: int | None = None) -> None:
        number = next(self._numbers)
        heapq.heappush(self._timers, (at_ms, number, one.ask.request_id, one.step if step is None else step))

    def _wake_at(self) -> WakeAt:
        return WakeAt(self.next_wake_ms)

    def _road_ms(self, one: Open) -> float:
        model = one.ask.model
        found = self._roads_ms.get(model)
        if found is None:
            found = self._roads_ms[model] = road_timeout_ms(self.fleet, self.site, model)
        return found

    def _finished(self, one: Open, end: End, now_ms: float, *, attempt: int, final: bool) -> OutcomeFinished:
        ask, assigned = one.ask, one.assigned
        received_ms = one.received_ms

        def since(at_ms: float | None) -> float | None:
            return None if at_ms is None else max(0.0, at_ms - received_ms)

        tpot_ms = None
        if end.output_tokens > 1 and one.first_token_ms is not None and end.last_token_ms is not None:
            tpot_ms = max(0.0, end.last_token_ms - one.first_token_ms) / (end.output_tokens - 1)
        return OutcomeFinished(
            id=f"{ask.request_id}:finished:{attempt}",
            cause=assigned.id if assigned is not None else "",
            time_unix_ms=int(now_ms),
            site=self.site,
            request_id=ask.request_id,
            attempt=attempt,
            final=final,
            outcome=end.outcome,
            reason=end.reason,
            status=end.status,
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            tenant=ask.tenant,
            service_class=ask.service_class,
            task=ask.task,
            model_asked=ask.model_asked,
            model=ask.model,
            version=ask.version,
            model_served=end.model_served,
            served_site=assigned.site if assigned is not None else "",
            instance=assigned.instance if assigned is not None else "",
            booking=assigned.id if assigned is not None else "",
            stream=ask.stream,
            input_tokens=ask.input_tokens if end.input_tokens is None else end.input_tokens,
            output_tokens=end.output_tokens,
            cached_tokens=end.cached_tokens,
            prefix_hit_tokens_predicted=assigned.prefix_hit_tokens if assigned is not None else 0,
            usage_source="engine" if end.usage_seen else "estimated",
            output_budget_tokens=ask.output_budget_tokens,
            request_bytes=ask.request_bytes,
            response_bytes=end.response_bytes,
            received_unix_ms=ask.received_unix_ms,
            times=Times(
                queue_ms=since(one.dispatched_ms),
                first_byte_ms=since(end.first_byte_ms),
                ttft_ms=since(one.first_token_ms),
                tpot_ms=tpot_ms,
                e2e_ms=max(0.0, now_ms - received_ms),
            ),
            predicted_ttft_ms=assigned.predicted_ttft_ms if assigned is not None else None,
            predicted_tpot_ms=assigned.predicted_tpot_ms if assigned is not None else None,
            ttft_objective_ms=ask.ttft_ms,
            tpot_objective_ms=ask.tpot_ms,
            e2e_objective_ms=ask.e2e_ms,
            finish_reason=end.finish_reason,
            ask=None if final else ask,
            excluded=() if final else one.excluded,
            fallback=one.fallback,
        )


def _open(request_id: str, one: Open) -> OpenRequest:
    assigned = one.assigned
    if assigned is None:
        return OpenRequest(request_id=request_id, attempt=one.attempt, phase=one.stage.phase)
    return OpenRequest(
        request_id=request_id,
        attempt=one.attempt,
        phase=one.stage.phase,
        booking=assigned.id,
        served_site=assigned.site,
        instance=assigned.instance,
    )
