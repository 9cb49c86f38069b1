"""SLOMax's quotas: how much of a tenant's limits is an entry's to give away, and what it lends to another entry.

Several entries, each with an owner of its own, admit requests of one tenant at once, and no message may stand between a
request and its answer. So every entry has a part of the tenant's concurrency and token rate, decides against that part
alone, and the parts never sum to more than the quota (escrow: O'Neil, ACM TODS 1986; bounded counters: Balegas et al.,
SRDS 2015). Whoever has more left than another entry that decides lends to it: it gives its part away by saying so, the
receiver has it by hearing so, and what is on the way is nobody's. Totals are said, not steps: a message that is lost or
comes twice changes nothing. Errs towards refusing: a tenant whose last places are at another entry is told to come
again, and has them by then. Refuses to know why a request came and whether it can be served.
"""

import msgspec

from tokenfleet.fleet import Fleet, Tenant
from tokenfleet.slomax.state import Account, Lent, State
from tokenfleet_schemas.admission import AdmissionLent

#: an entry lends where it has more than this times what the other has left
UNEQUAL = 2.0
#: and not less than this part of the whole rate at once: decisions are many, loans should be few
LEAST_RATE = 0.02
#: it keeps this part of the rate that it had at first, so that whoever comes to it is not refused before it can ask
KEPT_RATE = 0.1
#: reserved for output when the client sets no limit: trued up at the end, and a model's whole length would block it
UNBOUNDED_OUTPUT_TOKENS = 1024


class Part(msgspec.Struct, frozen=True):
    """An entry's part of one tenant's quota; 0 in both: the tenant has none of that kind."""

    concurrent: int
    tokens_per_minute: float


def entries(fleet: Fleet) -> list[str]:
    """Sites that clients come in at; all replicas agree on their order."""
    return sorted(name for name, site in fleet.sites.items() if site.entry)


def first_part(fleet: Fleet, tenant: Tenant, entry: str) -> Part:
    """What an entry has before anything is lent: an equal part, odd places to the first ones by name."""
    names = entries(fleet)
    if entry not in names:
        return Part(0, 0.0)
    each, odd = divmod(tenant.max_concurrent, len(names))
    return Part(each + (names.index(entry) < odd), tenant.tokens_per_minute / len(names))


def part(fleet: Fleet, state: State, name: str, entry: str) -> Part:
    """What an entry has of a tenant's quota now. Over all entries, and what is on the way, they sum to the quota."""
    tenant = fleet.tenants.get(name)
    if tenant is None:
        return Part(0, 0.0)
    first = first_part(fleet, tenant, entry)
    concurrent, rate = first.concurrent, first.tokens_per_minute
    for (whose, giver, receiver), lent in state.lent.items():
        if whose == name and entry in (giver, receiver):
            sign = 1 if entry == receiver else -1
            concurrent += sign * lent.concurrent
            rate += sign * lent.tokens_per_minute
    return Part(concurrent, rate)


def account(fleet: Fleet, state: State, name: str, entry: str, now_ms: float) -> Account:
    """A tenant's account at an entry as of now; it begins with a full bucket."""
    rate = part(fleet, state, name, entry).tokens_per_minute
    found = state.accounts.setdefault((name, entry), Account(rate, now_ms))
    found.refill(rate, now_ms)
    return found


def reserved_tokens(input_tokens: int, budget_tokens: int | None) -> float:
    """What an admission takes from the tenant's bucket until the end says what it really was."""
    return float(input_tokens + (UNBOUNDED_OUTPUT_TOKENS if budget_tokens is None else budget_tokens))


def loan(fleet: Fleet, state: State, name: str, giver: str, receiver: str, reason: str, now_ms: float) -> Lent | None:
    """What one entry has lent to another in all once it has lent what it should now; None: nothing to lend.

    `reason` is that of the receiver's decision: what it had to refuse is owed to it before what it may need.
    """
    tenant = fleet.tenants.get(name)
    if tenant is None or giver == receiver:
        return None
    slots = _slots(fleet, state, tenant, name, giver, receiver, reason, now_ms)
    rate, tokens = _rate(fleet, state, tenant, name, giver, receiver, reason, now_ms)
    if not slots and not rate:
        return None
    known = state.lent.get((name, giver, receiver), Lent())
    return Lent(
        known.concurrent + slots, known.tokens_per_minute + rate, known.tokens + tokens, revision=known.revision + 1
    )


def _slots(
    fleet: Fleet, state: State, tenant: Tenant, name: str, giver: str, receiver: str, reason: str, now_ms: float
) -> int:
    if not tenant.max_concurrent:
        return 0

    def free(entry: str) -> int:
        return part(fleet, state, name, entry).concurrent - len(account(fleet, state, name, entry, now_ms).open)

    mine, theirs = free(giver), free(receiver)
    if mine < 1 or (theirs > 0 and mine <= UNEQUAL * theirs):
        return 0
    if theirs < 1 and reason == "tenant_concurrency":
        return max(1, mine // 2)
    return min(mine, (mine - theirs) // 2)


def _rate(
    fleet: Fleet, state: State, tenant: Tenant, name: str, giver: str, receiver: str, reason: str, now_ms: float
) -> tuple[float, float]:
    """Tokens per minute to lend, and the tokens that lie in that part of the bucket."""
    if not tenant.tokens_per_minute:
        return 0.0, 0.0
    mine = account(fleet, state, name, giver, now_ms).level
    theirs = max(0.0, account(fleet, state, name, receiver, now_ms).level)
    if mine <= (1.0 if reason == "tenant_rate" else UNEQUAL) * theirs or mine <= 0.0:
        return 0.0, 0.0
    have = part(fleet, state, name, giver).tokens_per_minute
    keep = KEPT_RATE * first_part(fleet, tenant, giver).tokens_per_minute
    rate = min(have * (mine - theirs) / (2.0 * mine), have - keep)
    if rate < LEAST_RATE * tenant.tokens_per_minute:
        return 0.0, 0.0
    return rate, mine * rate / have


def say(fleet: Fleet, name: str, giver: str, receiver: str, lent: Lent, term: int, now_ms: float) -> AdmissionLent:
    """The loan as its message; names the quota that it is of, so that it ends with it."""
    tenant = fleet.tenants[name]
    return AdmissionLent(
        id=f"{giver}:{name}:lent:{receiver}:{lent.revision}:{term}",
        term=term,
        time_unix_ms=int(now_ms),
        site=giver,
        tenant=name,
        receiver=receiver,
        revision=lent.revision,
        concurrent=lent.concurrent,
        tokens_per_minute=lent.tokens_per_minute,
        tokens=lent.tokens,
        of_concurrent=tenant.max_concurrent,
        of_tokens_per_minute=tenant.tokens_per_minute,
        of_entries=len(entries(fleet)),
    )


def fold(fleet: Fleet, state: State, message: AdmissionLent, now_ms: float) -> None:
    """Take a loan into account; one of another quota than the present one, or an older total, changes nothing."""
    tenant = fleet.tenants.get(message.tenant)
    if tenant is None or (message.of_concurrent, message.of_tokens_per_minute, message.of_entries) != (
        tenant.max_concurrent,
        tenant.tokens_per_minute,
        len(entries(fleet)),
    ):
        return
    key = (message.tenant, message.site, message.receiver)
    known = state.lent.get(key, Lent())
    if message.revision <= known.revision:
        return
    # Both buckets are filled at their old rates up to now.
    giver = account(fleet, state, message.tenant, message.site, now_ms)
    receiver = account(fleet, state, message.tenant, message.receiver, now_ms)
    giver.level -= message.tokens - known.tokens
    receiver.level += message.tokens - known.tokens
    state.lent[key] = Lent(message.concurrent, message.tokens_per_minute, message.tokens, revision=message.revision)


def reload(before: Fleet, fleet: Fleet, state: State, now_ms: float) -> None:
    """The fleet file changed: where a quota did, its parts are what they were at first and its buckets full."""
    several = len(entries(before)) != len(entries(fleet))
    for name, new in fleet.tenants.items():
        old = before.tenants.get(name)
        if (
            not several
            and old is not None
            and (old.max_concurrent, old.tokens_per_minute) == (new.max_concurrent, new.tokens_per_minute)
        ):
            continue
        for key in [key for key in state.lent if key[0] == name]:
            del state.lent[key]
        for (whose, entry), one in state.accounts.items():
            if whose == name:
                one.level, one.at_ms = first_part(fleet, new, entry).tokens_per_minute, now_ms
