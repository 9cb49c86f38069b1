"""SLOMax's rules: who is let in, and who goes next into offered room.

Decides on values it is given and returns its reasons. Between classes: each has a guaranteed share of released work,
kept as a deficit (Shreedhar and Varghese, deficit round robin, 1995) in estimated work; a class that has earned its
next request goes first, else the lowest tier borrows what nobody earned, so nothing idles and nobody starves. Within
a class: feasible earliest deadline first (plain EDF collapses once overload persists; relegation as in Niyama,
arXiv:2503.22562). Refuses to know how the answers travel.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from tokenfleet.eligibility import allowed_ready_sites, permitted_sites, retry_after_s, zone_bound
from tokenfleet.fleet import Fleet, Tenant
from tokenfleet.slomax.state import Account, Held, Pool, Release, Room, State, Tried
from tokenfleet_schemas.admission import REASONS
from tokenfleet_schemas.request import Ask

#: reserved for output when the client sets no limit: trued up at the end, and a model's whole length would block it
UNBOUNDED_OUTPUT_TOKENS = 1024
#: bound of what a class may be owed, prompt-token equivalents; dearer requests are earned at this price
CREDIT_MAX = 65_536.0
#: so often may smaller requests pass a head that needs an idle instance; then its home instance is left to drain
BYPASS_MAX = 4
#: a release that found too little room is not tried again for the same room within this time
TRIED_MS = 1_000.0
#: a pool is saturated when what it holds waits so long: a queue of some milliseconds is how look-ahead works
SATURATED_MS = 1_000.0
#: requests of a class that are looked at for one offer
LOOK_MAX = 64


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


def reserved_tokens(ask: Ask) -> float:
    """What an admission takes from the tenant's bucket until the end says what it really was."""
    budget = ask.output_budget_tokens
    return float(ask.input_tokens + (UNBOUNDED_OUTPUT_TOKENS if budget is None else budget))


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
    verdict = _quota(tenant, state.accounts.get(ask.tenant), ask, now_ms)
    if not verdict.admitted or fleet.policy.admission == "none":
        return verdict
    return _load(fleet, state, ask, now_ms)


def _quota(tenant: Tenant, account: Account | None, ask: Ask, now_ms: float) -> Verdict:
    if account is None:
        return Verdict()
    if tenant.max_concurrent and len(account.open) >= tenant.max_concurrent:
        return refusal(ask.request_id, "tenant_concurrency", 1_000.0)
    if tenant.tokens_per_minute:
        account.refill(tenant.tokens_per_minute, now_ms)
        # A request larger than a minute's tokens waits for a full bucket and then runs it into debt.
        need = min(reserved_tokens(ask), float(tenant.tokens_per_minute))
        if account.level < need:
            return refusal(ask.request_id, "tenant_rate", (need - account.level) * 60_000.0 / tenant.tokens_per_minute)
    return Verdict()


def _load(fleet: Fleet, state: State, ask: Ask, now_ms: float) -> Verdict:
    sites, _ = allowed_ready_sites(fleet, state.capacity, ask, now_ms)
    pools = [state.pools.get((site, ask.model, ask.version)) for site in sites]
    busy = [pool for pool in pools if pool is not None and pool.held]
    if not sites or len(busy) < len(pools):
        return Verdict()
    wait_ms = min(predicted_wait_ms(pool) for pool in busy)
    cls = fleet.classes[ask.service_class]
    if cls.sheddable and all(saturated(pool, now_ms) for pool in busy):
        return refusal(ask.request_id, "saturated", wait_ms)
    if all(pool.count(ask.service_class) >= cls.max_held for pool in busy):
        return refusal(ask.request_id, "queue_full", wait_ms)
    return Verdict()


def saturated(pool: Pool, now_ms: float) -> bool:
    """Whether a pool holds more than the moment explains: its engines have no place at all, or the wait is long."""
    first = next(iter(pool.held.values()), None)
    if first is None:
        return False
    if first.lacks in ("sequences", "kv_tokens", "instance") or now_ms - first.since_ms >= SATURATED_MS:
        return True
    return next(reversed(pool.held.values())).wait_ms >= SATURATED_MS


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
        return refusal(held.request_id, "queue_full", predicted_wait_ms(pool))
    if cls.sheddable and ask is not None:
        return _load(fleet, state, ask, now_ms)
    return Verdict()


def outlived(fleet: Fleet, key: tuple[str, str, str], held: Held, pool: Pool) -> Verdict:
    """The refusal of a hold whose patience ended; says so when residency is what kept it from other sites."""
    _, model, version = key
    bound = zone_bound(fleet, held.tenant, model, version)
    return refusal(held.request_id, "residency_no_capacity" if bound else "patience", predicted_wait_ms(pool))


class Level(msgspec.Struct):
    """Room that is really left: an offer less the releases that it does not include."""

    prefill_tokens: int
    idle: bool
    sequences: int
    kv_tokens: int


def level(pool: Pool, instance: str, room: Room) -> Level:
    """Subtract our own releases to this instance with a number above the offer's `last_released`."""
    left = Level(room.prefill_tokens, room.idle, room.sequences, room.kv_tokens)
    for number, release in pool.releases.items():
        if number > room.last_released and release.instance == instance:
            left.prefill_tokens = max(0, left.prefill_tokens - release.work.prefill_tokens)
            left.kv_tokens -= release.work.kv_tokens
            left.sequences -= 1
            left.idle = False
    return left


def fits(held: Held, instance: str, room: Level, now_ms: float) -> bool:
    """Whether a hold can go into this room, and a failed release does not forbid it."""
    if not held.home_instance:
        return False  # no instance can serve it now; TokenPilot holds it again, with a home, once one can
    if held.bound and held.home_instance != instance:
        return False  # its prefix is cached at home; TokenPilot holds it again, unbound, once that is not worth it
    if room.sequences < 1 or held.work.kv_tokens > room.kv_tokens:
        return False
    if not room.idle and held.work.prefill_tokens > room.prefill_tokens:
        return False
    tried = held.tried.get(instance)
    return tried is None or now_ms - tried.at_ms > TRIED_MS or _more(tried, room)


def _more(tried: Tried, room: Level) -> bool:
    if tried.lacks == "sequences":
        return room.sequences > tried.sequences
    if tried.lacks == "kv_tokens":
        return room.kv_tokens > tried.kv_tokens
    if tried.lacks == "prefill_tokens":
        return room.prefill_tokens > tried.prefill_tokens or (room.idle and not tried.idle)
    return True


class Choice(msgspec.Struct, frozen=True):
    """Who goes next, or why nobody does."""

    held: Held | None
    #: `earned`, `borrowed`, `fifo`; of an empty choice `nothing_held`, `nothing_fits`, `reserved`
    reason: str


class Chooser(Protocol):
    """Who goes next into the room of one instance."""

    def __call__(self, fleet: Fleet, pool: Pool, instance: str, room: Level, now_ms: float) -> Choice: ...


def choose(fleet: Fleet, pool: Pool, instance: str, room: Level, now_ms: float) -> Choice:
    """The hold that should fill this room. Counts how often a head that does not fit was passed."""
    if fleet.policy.admission == "none":
        waiting = [held for held in pool.held.values() if not held.released and fits(held, instance, room, now_ms)]
        first = min(waiting, key=lambda held: (held.received_unix_ms, held.request_id), default=None)
        return Choice(first, "fifo" if first is not None else _empty(pool))
    passed: list[Held] = []
    for name, earned in _class_order(fleet, pool, now_ms):
        head: Held | None = None
        for held in _in_order(pool, name, now_ms):
            if head is None:
                head = held
            if fits(held, instance, room, now_ms):
                for one in passed if held is head else [*passed, head]:
                    one.bypassed += one.home_instance == instance
                return Choice(held, "earned" if earned else "borrowed")
            if held is head and _waits_for_idle(head, instance, room):
                return Choice(None, "reserved")
        if head is not None:
            passed.append(head)
    return Choice(None, _empty(pool))


def _empty(pool: Pool) -> str:
    return "nothing_fits" if pool.waiting() else "nothing_held"


def _waits_for_idle(head: Held, instance: str, room: Level) -> bool:
    """A head that only an idle instance can take and that was passed often enough: let its home run dry for it."""
    return head.home_instance == instance and head.bypassed >= BYPASS_MAX and head.work.kv_tokens <= room.kv_tokens


def _class_order(fleet: Fleet, pool: Pool, now_ms: float) -> list[tuple[str, bool]]:
    """Classes with something to release, those that have earned their head's work first."""
    earned: list[tuple[float, int, str]] = []
    rest: list[tuple[int, float, str]] = []
    for name in list(pool.queues):
        head = next(_in_order(pool, name, now_ms), None)
        if head is None:
            continue
        cls = fleet.classes.get(name)
        tier = cls.tier if cls is not None else 1_000_000  # a class that a reload removed still drains
        credit = pool.credit.get(name, 0.0)
        if credit >= min(head.cost, CREDIT_MAX):
            earned.append((-credit, tier, name))
        else:
            rest.append((tier, -credit, name))
    return [(name, True) for _, _, name in sorted(earned)] + [(name, False) for _, _, name in sorted(rest)]


def _in_order(pool: Pool, name: str, now_ms: float) -> Iterator[Held]:
    """Unreleased holds of a class in the order of service; relegates those found to be too late."""
    queue = pool.queues.get(name)
    if queue is None:
        return
    seen = [pool.held[entry[-1]] for entry in queue.timely[:LOOK_MAX]]
    for held in seen:
        if now_ms > held.latest_start_ms:
            pool.relegate(held)
        elif not held.released:
            yield held
    for entry in queue.late[:LOOK_MAX]:
        held = pool.held[entry[-1]]
        if not held.released:
            yield held


def charges(fleet: Fleet, pool: Pool, held: Held) -> dict[str, float]:
    """How a release changes every backlogged class's credit: each earns its share of the work, one pays it."""
    shares = {name: fleet.classes[name].share if name in fleet.classes else 0.01 for name in pool.queues}
    shares.setdefault(held.service_class, 0.01)
    total = sum(shares.values())
    changes = {name: held.cost * share / total for name, share in shares.items()}
    changes[held.service_class] -= held.cost
    return changes


def settle(pool: Pool, changes: dict[str, float], sign: float = 1.0) -> None:
    """Apply charges (or with -1 take them back) to the classes that are still backlogged."""
    for name, change in changes.items():
        if name in pool.queues:
            pool.credit[name] = min(CREDIT_MAX, max(-CREDIT_MAX, pool.credit.get(name, 0.0) + sign * change))


def release(fleet: Fleet, pool: Pool, held: Held, instance: str, number: int, now_ms: float) -> None:
    """Book a release in the pool: its number, the room it takes, the work it costs its class."""
    changes = charges(fleet, pool, held)
    settle(pool, changes)
    pool.number = max(pool.number, number)
    pool.releases[number] = Release(held.request_id, instance, held.work, now_ms, changes, held.service_class)
    pool.used[held.service_class] = pool.used.get(held.service_class, 0.0) + held.cost
    pool.changed = True
    held.released = number


def take_back(pool: Pool, number: int) -> Release | None:
    """A release came to nothing: its room and its cost are given back."""
    found = pool.releases.pop(number, None)
    if found is not None:
        settle(pool, found.charges, -1.0)
        cost = max(1.0, found.work.prefill_tokens + 2.0 * found.work.decode_tokens)
        pool.used[found.service_class] = max(0.0, pool.used.get(found.service_class, 0.0) - cost)
    return found


def share_of(fleet: Fleet, name: str) -> float:
    """A class's guaranteed part of every pool when all classes are backlogged, 0..1."""
    total = sum(cls.share for cls in fleet.classes.values())
    cls = fleet.classes.get(name)
    return 0.0 if cls is None else cls.share / total
