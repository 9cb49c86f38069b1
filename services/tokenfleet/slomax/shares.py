"""The shares' room: what each class of a pool is guaranteed, what it got, and what the accountant's windows change.

Capacity feedback: every five seconds a class that keeps its promises less often than it should gains share from those
that keep them more often, φ_c ∝ φ_c · exp(η (target_c − compliance_c)), between a floor and a ceiling, and pulled
slowly back to what is configured. Nothing running is taken away: a share decides who gives way next time. No traffic
and no fresh window mean no step. Says `admission.shared`; refuses to know single requests.
"""

import math

from tokenfleet.effects import Note
from tokenfleet.fleet import Fleet
from tokenfleet.slomax import fairness
from tokenfleet.slomax.desk import Desk
from tokenfleet.slomax.state import PoolKey, Seen, State
from tokenfleet_schemas.admission import AdmissionShared, Share
from tokenfleet_schemas.goodput import GoodputMeasured

#: gain of a step
GAIN = 0.3
#: a step sees no larger error than this, so that no class changes by more than a sixth at once
ERROR_MAX = 0.5
#: part of the way back to the configured share in every step
RETURN = 0.02
#: no class ever has more of a pool than this
CEILING = 0.8
#: so many requests in a window make half of its error count
ENOUGH = 8.0
#: a window that was heard longer ago says nothing, ms
STALE_MS = 15_000.0


class Shares(Desk):
    """How much of a pool is whose."""

    def _measured(self, message: GoodputMeasured, now_ms: float) -> None:
        """The shortest window of a class and tenant, the newest revision of it."""
        if message.window_s != min(self.fleet.info.windows_s):
            return
        groups = self.state.seen.setdefault((message.model, message.site), {})
        known = groups.get((message.service_class, message.tenant))
        newest = (message.window_end_unix_ms, message.revision)
        if known is None or newest > (known.end_ms, known.revision):
            groups[message.service_class, message.tenant] = Seen(
                *newest, offered=message.offered, compliant=message.compliant, heard_ms=now_ms
            )

    def _share(self, now_ms: float) -> None:
        """Take a step of feedback and say what each class of a pool is guaranteed and got, where something changed."""
        for key, pool in self.state.pools.items():
            term = self.offices.term(f"release:{key[0]}")
            if not term:
                continue
            before = fairness.shares_of(self.fleet, pool)
            after, causes = before, dict.fromkeys(before, "configured" if not pool.shares else "kept")
            if self.fleet.policy.feedback == "on" and self.fleet.policy.admission != "none":
                after, causes = step(self.fleet, before, compliance(self.state, key, now_ms), causes)
            moved = any(abs(after[name] - before[name]) > 5e-4 for name in after)
            if not pool.changed and not moved:
                continue
            total = sum(pool.used.values())
            shares = []
            for name, share in after.items():
                used = pool.used.get(name, 0.0) / total if total else 0.0
                cause = causes[name]
                if cause in ("configured", "kept") and total:
                    cause = "borrowed" if used > share else "lent"
                shares.append(Share(service_class=name, share=share, used=used, held=pool.count(name), cause=cause))
                if causes[name] in ("raised", "lowered"):
                    self._out.append(Note("slomax_share", {"service_class": name, "step": causes[name]}))
            event = AdmissionShared(
                id=f"{key[0]}:{key[1]}:{key[2]}:shared:{term}:{pool.shared_revision + 1}",
                term=term,
                time_unix_ms=int(now_ms),
                site=key[0],
                model=key[1],
                version=key[2],
                revision=pool.shared_revision + 1,
                shares=tuple(shares),
            )
            self._publish(event)
            self._shared(event, now_ms)

    def _shared(self, message: AdmissionShared, now_ms: float) -> None:
        """Shares of this or another replica: a successor goes on from them."""
        pool = self.state.pool((message.site, message.model, message.version))
        if message.revision > pool.shared_revision:
            pool.shared_revision, pool.shared_ms = message.revision, now_ms
            pool.used, pool.changed = {}, bool(pool.held)
            if any(share.cause in ("raised", "lowered") for share in message.shares) or pool.shares:
                pool.shares = {share.service_class: share.share for share in message.shares}


def compliance(state: State, key: PoolKey, now_ms: float) -> dict[str, tuple[int, int]]:
    """(offered, compliant) requests of every class that the fresh windows of a pool's site hold.

    What was refused before any site had it counts for every site of the model.
    """
    found: dict[str, tuple[int, int]] = {}
    for site in (key[0], ""):
        for (name, _), seen in state.seen.get((key[1], site), {}).items():
            if now_ms - seen.heard_ms <= STALE_MS and seen.offered:
                offered, compliant = found.get(name, (0, 0))
                found[name] = (offered + seen.offered, compliant + seen.compliant)
    return found


def step(
    fleet: Fleet, shares: dict[str, float], seen: dict[str, tuple[int, int]], causes: dict[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """One step of feedback: the new shares, summing to 1, and why each is what it is.

    Nothing seen: no step. A class without traffic keeps its relative share. Few requests make a small step.
    """
    if not seen:
        return shares, causes
    wished: dict[str, float] = {}
    for name, share in shares.items():
        offered, compliant = seen.get(name, (0, 0))
        error = 0.0
        if offered:
            error = (fleet.classes[name].target - compliant / offered) * offered / (offered + ENOUGH)
        error = min(ERROR_MAX, max(-ERROR_MAX, error))
        home = fairness.share_of(fleet, name)
        wished[name] = share ** (1.0 - RETURN) * home**RETURN * math.exp(GAIN * error)
    after = bounded(wished, {name: fairness.floor_of(fleet, name) for name in wished}, CEILING)
    said = dict(causes)
    for name, share in after.items():
        if abs(share - shares[name]) > 5e-4:
            said[name] = "raised" if share > shares[name] else "lowered"
    return after, said


def bounded(weights: dict[str, float], floors: dict[str, float], ceiling: float) -> dict[str, float]:
    """Shares in proportion to weights that sum to 1, each between its floor and the ceiling.

    A single class has everything, whatever the ceiling.
    """
    if len(weights) == 1:
        return dict.fromkeys(weights, 1.0)
    fixed: dict[str, float] = {}
    while True:
        free = {name: weight for name, weight in weights.items() if name not in fixed}
        left = 1.0 - sum(fixed.values())
        total = sum(free.values())
        if not free or total <= 0.0:
            break
        shares = {name: left * weight / total for name, weight in free.items()}
        low = {name: floors[name] for name, share in shares.items() if share < floors[name]}
        high = {name: ceiling for name, share in shares.items() if share > ceiling}
        if not low and not high:
            return {name: fixed.get(name, shares.get(name, 0.0)) for name in weights}
        fixed |= high or low
    total = sum(fixed.values())
    return {name: fixed[name] / total for name in weights}
