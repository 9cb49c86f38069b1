"""SLOMax's gate: who is let in, who is refused and with what reason.

Decides on values it is given: permission and residency (fail closed), quotas, then load. Refuses to know in which
order what was let in is served.
"""

from statistics import median

import msgspec

from tokenfleet.eligibility import (
    fraction,
    permitted_sites,
    ready_instances,
    retry_after_s,
    sites_out,
    zone_bound,
)
from tokenfleet.fleet import Fleet, Tenant
from tokenfleet.slomax import policy, quota, reserve
from tokenfleet.slomax.state import Held, Pool, State
from tokenfleet_schemas.admission import REASONS
from tokenfleet_schemas.placement import Work
from tokenfleet_schemas.request import Ask

#: a pool is saturated when what it holds waits so long: a queue of some milliseconds is how look-ahead works.
#: Sheddable requests begin to be refused at half of it, each at its own point: no cliff
SATURATED_MS = 1_000.0
#: an optimistic wait over the one that is predicted: one in ten is shorter
OPTIMISTIC = 0.5


class Verdict(msgspec.Struct, frozen=True):
    """Admitted, or the reason against it."""

    reason: str = ""
    status: int = 0
    retry_after_s: float | None = None

    @property
    def admitted(self) -> bool:
        """Nothing stood against it."""
        return not self.reason


def refusal(request_id: str, reason: str, reset_ms: float = 0.0) -> Verdict:
    """A refusal with its status; Retry-After for everything that time can mend, never for a 403."""
    status = REASONS[reason]
    return Verdict(reason, status, retry_after_s(request_id, reset_ms) if status in (429, 503) else None)


def judge(fleet: Fleet, state: State, ask: Ask, now_ms: float) -> Verdict:
    """Let a request in or refuse it; the first rule that fails is the reason."""
    tenant = fleet.tenants.get(ask.tenant)
    if tenant is None or ask.service_class not in tenant.classes or ask.service_class not in fleet.classes:
        return refusal(ask.request_id, "not_permitted")
    model = fleet.models.get(ask.model)
    if model is None or ask.version not in model.versions:
        return refusal(ask.request_id, "not_permitted")
    if not permitted_sites(fleet, ask.tenant, ask.model):
        denials = {fleet.site_denial(ask.tenant, ask.model, s) for s, site in fleet.sites.items() if site.instances}
        return refusal(ask.request_id, "residency" if "residency" in denials else "not_permitted")
    verdict = _quota(fleet, state, tenant, ask, now_ms)
    if not verdict.admitted or fleet.policy.admission == "none":
        return verdict
    return _load(fleet, state, ask, now_ms)


def _quota(fleet: Fleet, state: State, tenant: Tenant, ask: Ask, now_ms: float) -> Verdict:
    """Against the entry's own part of the quota alone: another entry that decides at this moment has its own."""
    if not (tenant.max_concurrent or tenant.tokens_per_minute):
        return Verdict()
    mine = quota.part(fleet, state, ask.tenant, ask.entry)
    account = quota.account(fleet, state, ask.tenant, ask.entry, now_ms)
    if tenant.max_concurrent and len(account.open) >= mine.concurrent:
        return refusal(ask.request_id, "tenant_concurrency", 1_000.0)
    if tenant.tokens_per_minute:
        # A request larger than a minute's tokens waits for a full bucket and then runs it into debt.
        need = min(quota.reserved_tokens(ask.input_tokens, ask.output_budget_tokens), mine.tokens_per_minute)
        if account.level < need:
            return refusal(ask.request_id, "tenant_rate", (need - account.level) * 60_000.0 / mine.tokens_per_minute)
    return Verdict()


def _load(fleet: Fleet, state: State, ask: Ask, now_ms: float) -> Verdict:
    """Refuse for load only where nothing better is left: no allowed and ready site would take it without holding it."""
    busy = _without_room(fleet, state, ask, now_ms)
    if not busy:
        return Verdict()
    for pool in busy:
        reserve.look(fleet, pool, now_ms)
    cls = fleet.classes[ask.service_class]
    wait_ms = min(drain_ms(fleet, pool, cls.tier, ask.tenant) for pool in busy)
    point_ms = SATURATED_MS * (0.5 + 0.5 * fraction(ask.request_id, "shed"))
    if cls.sheddable and all(saturated(pool, now_ms, point_ms) for pool in busy):
        return refusal(ask.request_id, "saturated", max(wait_ms, min(predicted_wait_ms(pool) for pool in busy)))
    if all(pool.count(ask.service_class) >= cls.max_held for pool in busy):
        return refusal(ask.request_id, "queue_full", wait_ms)
    comers = [_newcomer(state, pool, ask, now_ms) for pool in busy]
    if any(policy.would_keep(fleet, pool, one, now_ms) for pool, one in zip(busy, comers, strict=True)):
        return Verdict()
    late_ms = min(late_wait_ms(pool, one, now_ms) for pool, one in zip(busy, comers, strict=True))
    if OPTIMISTIC * late_ms > ask.patience_ms:
        # It would be refused when its patience ends; said now, its client can go elsewhere.
        bound = zone_bound(fleet, ask.tenant, ask.model, ask.version)
        reason = "residency_no_capacity" if bound else "saturated"
        return refusal(ask.request_id, reason, wait_ms - ask.patience_ms)
    return Verdict()


def _newcomer(state: State, pool: Pool, ask: Ask, now_ms: float) -> Held:
    """A request at the door as the pool would hold it: as dear as those of its class that it holds, else as all.

    Without a name, so that of equals it is the one that gives way.
    """
    alike = [held for held in pool.held.values() if held.service_class == ask.service_class] or [*pool.held.values()]
    own_ms = ask.input_tokens * median(held.own_ms / max(1, _prompt_tokens(state, held)) for held in alike)
    decode_tokens = median(held.work.decode_tokens for held in alike)
    mine = state.open.get(ask.request_id)
    came_ms = mine.received_ms if mine is not None else now_ms
    tokens = int(decode_tokens if ask.output_budget_tokens is None else min(decode_tokens, ask.output_budget_tokens))
    return Held(
        request_id="",
        gateway=ask.gateway,
        entry=ask.entry,
        tenant=ask.tenant,
        service_class=ask.service_class,
        attempt=0,
        revision=0,
        event="",
        home_instance="",
        work=Work(prefill_tokens=ask.input_tokens, decode_tokens=tokens, kv_tokens=ask.input_tokens + tokens),
        own_ms=own_ms,
        wait_ms=0.0,
        deadline_ms=state.due_ms(ask, came_ms, tokens, None if ask.ttft_ms is None else came_ms + ask.ttft_ms),
        patience_until_ms=came_ms + ask.patience_ms,
        received_unix_ms=int(came_ms),
        since_ms=now_ms,
    )


def _prompt_tokens(state: State, held: Held) -> int:
    """A hold's whole prompt, also what of it is cached; what must be computed where its receipt was not heard."""
    one = state.open.get(held.request_id)
    return one.ask.input_tokens if one is not None else held.work.prefill_tokens


def late_wait_ms(pool: Pool, newcomer: Held, now_ms: float) -> float:
    """How long a request waits that cannot be on time: for those late ones that go before it, and its own turn, ms.

    Late ones get what the others leave. How much that is, the pool has shown since they wait. Shorter ones go first,
    but for those of a tenant that wants more than its part (`reserve`).
    """
    behind = pool.greedy if newcomer.tenant not in pool.greedy else ()
    own_ms = newcomer.own_ms
    pool.spare.see(now_ms, pool.any_late())
    first = [held for held in pool.held.values() if held.late and held.own_ms <= own_ms and held.tenant not in behind]
    return (sum(held.own_ms for held in first) + own_ms) / max(1e-6, pool.spare.rate(pool.pace.factor(len(pool.rooms))))


def _without_room(fleet: Fleet, state: State, ask: Ask, now_ms: float) -> list[Pool]:
    """The pools that hold requests, if no allowed and ready site has room; empty if one has, or nobody holds anything.

    A site away from home has none above its load ceiling either: nothing is diverted there.
    """
    busy: list[Pool] = []
    able = (site for site, why in sites_out(fleet, state.capacity, ask, now_ms) if not why)
    for place, site in enumerate(able):
        pool = state.pools.get((site, ask.model, ask.version))
        if pool is not None and pool.held:
            busy.append(pool)
        elif not place or not _above_ceiling(fleet, state, ask, site, now_ms):
            return []
    return busy


def _above_ceiling(fleet: Fleet, state: State, ask: Ask, site: str, now_ms: float) -> bool:
    """Whether the reports of a site's instances say that it takes nothing diverted now; not where they do not say."""
    reports = [heard.report for heard in ready_instances(fleet, state.capacity, ask, site, now_ms)]
    if any(one.running is None or one.max_sequences is None for one in reports):
        return False
    # One more sequence must fit below the ceiling.
    running = sum((one.running or 0) + (one.waiting or 0) for one in reports)
    room = fleet.sites[site].load_ceiling * sum(one.max_sequences or 0 for one in reports)
    return running >= room - 1.0


def drain_ms(fleet: Fleet, pool: Pool, tier: int, tenant: str = "") -> float:
    """How long a pool takes, at its pace, for what it holds of this tier and those before it, ms.

    For a tenant that wants no more than its part (`reserve`): without what goes after it because its tenant does.
    """
    greedy = pool.greedy if tenant and tenant not in pool.greedy else ()
    own_ms = sum(
        queue.own_ms - sum(queue.tenant_ms.get(one, 0.0) for one in greedy)
        for name, queue in pool.queues.items()
        if name in fleet.classes and fleet.classes[name].tier <= tier
    )
    return max(0.0, own_ms) * pool.pace.factor(len(pool.rooms))


def saturated(pool: Pool, now_ms: float, point_ms: float = SATURATED_MS) -> bool:
    """Whether a pool holds more than the moment explains: its engines have no place at all, or the wait is long."""
    first = next(iter(pool.held.values()), None)
    if first is None:
        return False
    if first.lacks in ("sequences", "kv_tokens", "instance") or now_ms - first.since_ms >= point_ms:
        return True
    return next(reversed(pool.held.values())).wait_ms >= point_ms


def predicted_wait_ms(pool: Pool) -> float:
    """How long the last request that came into a pool is predicted to wait; a second where nobody says."""
    last = next(reversed(pool.held.values()), None)
    return max(1_000.0, last.wait_ms) if last is not None else 1_000.0


def shed(fleet: Fleet, state: State, pool: Pool, held: Held, ask: Ask | None, now_ms: float) -> Verdict:
    """Whether a newcomer to a pool must be refused instead of held: sheddable at saturation, or its class is full."""
    cls = fleet.classes.get(held.service_class)
    if cls is None or fleet.policy.admission == "none":
        return Verdict()
    if pool.count(held.service_class) > cls.max_held:
        return refusal(held.request_id, "queue_full", max(1_000.0, drain_ms(fleet, pool, cls.tier)))
    if cls.sheddable and ask is not None:
        return _load(fleet, state, ask, now_ms)
    return Verdict()


def outlived(fleet: Fleet, key: tuple[str, str, str], held: Held, pool: Pool) -> Verdict:
    """The refusal of a hold whose patience ended; says so when residency is what kept it from other sites."""
    _, model, version = key
    bound = zone_bound(fleet, held.tenant, model, version)
    cls = fleet.classes.get(held.service_class)
    wait_ms = predicted_wait_ms(pool) if cls is None else max(1_000.0, drain_ms(fleet, pool, cls.tier))
    return refusal(held.request_id, "residency_no_capacity" if bound else "patience", wait_ms)
