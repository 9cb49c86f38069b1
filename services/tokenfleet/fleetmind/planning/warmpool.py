"""Whether a replica that is not needed now is kept warm or dropped: the ski-rental rule, adjusted by the forecast.

Decides per pool how far a plan may fall below what runs. A replica that idles costs its GPUs' time; one that is dropped
and needed again costs a whole load before it serves. Keeping it until its idling has cost as much as a load is never
worse than twice the best that a prophet could do (Karlin et al. 1988). The forecast shortens or lengthens that: what
is needed again before a load would have paid off is kept, what a known season does not need for long goes after half
the time. Refuses to know why a replica is not needed.
"""

import msgspec


class Idle(msgspec.Struct):
    """Since when a pool has had more replicas than it needs."""

    since_s: float
    #: fewest surplus replicas since then: those have been idle all the time
    surplus: int


class Kept(msgspec.Struct, frozen=True):
    """What a pool should run, and why it is not what is needed."""

    replicas: int
    #: of them kept without need
    warm: int
    reason: str


def decide(
    idle: dict[str, Idle], pool: str, *, now: int, needed: int, soon: int, reload_s: float, sure: bool, now_s: float
) -> Kept:
    """Replicas of a pool: `needed` from the plan, `soon` what it will need before a reload pays off.

    `idle` holds the memory of the rule and is changed. `reload_s` is what a cold start costs in seconds of the replica,
    `sure` whether a season stands behind `soon`.
    """
    if needed >= now:
        idle.pop(pool, None)
        return Kept(needed, 0, "starts" if needed > now else "as it is")
    lower = max(needed, min(now, soon))
    surplus = now - lower
    if not surplus:
        idle.pop(pool, None)
        return Kept(now, now - needed, "needed again soon")
    known = idle.get(pool)
    if known is None:
        known = idle[pool] = Idle(now_s, surplus)
    known.surplus = min(known.surplus, surplus)
    patience_s = reload_s / 2 if sure else reload_s
    if now_s - known.since_s >= patience_s:
        kept = now - known.surplus
        rest = surplus - known.surplus
        if rest:
            idle[pool] = Idle(now_s, rest)
        else:
            del idle[pool]
        return Kept(kept, max(0, kept - needed), "idle for as long as a load takes")
    return Kept(now, now - needed, "kept warm: idle for less than a load takes")
