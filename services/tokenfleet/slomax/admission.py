"""Admission's room: answers every request, reserves its quota, watches FleetMind's hop, trues up at the end.

Folds a request's road from its receipt to its final outcome. The rules are `gate.judge`'s; refuses to know what is
released when.
"""

import msgspec

from tokenfleet.effects import Note
from tokenfleet.eligibility import allowed_ready_sites, hop_timeout_ms, no_site_reason, permitted_sites
from tokenfleet.slomax import fairness, gate, quota
from tokenfleet.slomax.desk import Desk
from tokenfleet.slomax.state import DECODE_WEIGHT, INFINITY, Open, Tempo
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionLent
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.placement import Considered, PlacementRefused, PlacementRequested
from tokenfleet_schemas.request import Ask, RequestReceived


class Admission(Desk):
    """Whether."""

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
            verdict = gate.Verdict(before.reason, before.status, before.retry_after_s)
        else:
            verdict = gate.judge(self.fleet, self.state, ask, now_ms)
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
        if not first and (message.attempt, message.revision) <= at(one.decided):
            return
        one.decided = message
        one.cause = message.id
        one.tried = []
        one.attempt, one.revision = max((one.attempt, one.revision), (message.attempt, message.revision))
        if message.admitted:
            if first:
                self._reserve(ask, now_ms)
            self._watch(one, now_ms)
        if first:
            self._lend(message, now_ms)

    def _reserve(self, ask: Ask, now_ms: float) -> None:
        account = quota.account(self.fleet, self.state, ask.tenant, ask.entry, now_ms)
        if ask.request_id not in account.open:
            tokens = quota.reserved_tokens(ask.input_tokens, ask.output_budget_tokens)
            account.level -= tokens
            account.open[ask.request_id] = tokens

    def _lend(self, decided: AdmissionDecided, now_ms: float) -> None:
        """Another entry let in or refused a tenant of ours: it may need more of the quota than it has left."""
        name, receiver = decided.ask.tenant, decided.ask.entry
        for giver in quota.entries(self.fleet):
            term = self.offices.term(f"admission:{giver}")
            if not term or giver == receiver:
                continue
            lent = quota.loan(self.fleet, self.state, name, giver, receiver, decided.reason, now_ms)
            if lent is not None:
                said = quota.say(self.fleet, name, giver, receiver, lent, term, now_ms)
                self._publish(said)
                self._lent(said, now_ms)
                self._out.append(Note("slomax_lent", {"tenant": name, "receiver": receiver}))

    def _lent(self, message: AdmissionLent, now_ms: float) -> None:
        if not self.offices.void(f"admission:{message.site}", message.term):
            quota.fold(self.fleet, self.state, message, now_ms)

    def _lent_again(self, now_ms: float) -> None:
        """Say what is lent once more: who reads the stream from its beginning must find it there."""
        for (name, giver, receiver), lent in self.state.lent.items():
            term = self.offices.term(f"admission:{giver}")
            if term and name in self.fleet.tenants:
                self._publish(quota.say(self.fleet, name, giver, receiver, lent, term, now_ms))

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
                verdict = gate.refusal(ask.request_id, reason, wait_ms)
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
        verdict: gate.Verdict,
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

    def _finished(self, message: OutcomeFinished, now_ms: float) -> None:
        rid = message.request_id
        held = self._find_held(rid)
        self._debit(message)
        self.state.leave(rid, now_ms)
        if message.final:
            tokens = 0.0 if message.attempt == 0 else float(message.input_tokens + message.output_tokens)
            self._close(rid, message.gateway, tokens, now_ms)
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

    def _debit(self, message: OutcomeFinished) -> None:
        """The tenant pays for what was computed, not for what was expected; answers teach how fast they come."""
        if message.outcome == "completed" and message.times.tpot_ms and self.fleet.policy.feedback != "frozen":
            self.state.tempos.setdefault(message.model, Tempo()).learn(message.times.tpot_ms)
        bill = self.state.bills.pop(message.request_id, None)
        pool = self.state.pools.get(bill.pool) if bill is not None else None
        if bill is None or pool is None:
            return
        cached = message.cached_tokens
        computed = message.input_tokens - (message.prefix_hit_tokens_predicted if cached is None else cached)
        actual_ms = bill.token_ms * (max(0, computed) + DECODE_WEIGHT * message.output_tokens)
        fairness.true_up(pool, bill.service_class, bill.tenant, bill.cost_ms, actual_ms)

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
        self._close(rid, gateway, tokens, now_ms)
        self._out.append(Note("slomax_expired", {}, {"request": rid, "gateway": gateway}, level="warning"))

    def _leased(self, message: GatewayLeased, now_ms: float) -> None:
        for request_id in self.state.presence.lease(message, now_ms):
            self._expire(request_id, now_ms)

    def _reported(self, message: CapacityReported, now_ms: float) -> None:
        self.state.capacity.fold(message, now_ms)


def at(decided: AdmissionDecided | None) -> tuple[int, int]:
    """Attempt and revision of a decision; below every one where there is none."""
    return (0, -1) if decided is None else (decided.attempt, decided.revision)
