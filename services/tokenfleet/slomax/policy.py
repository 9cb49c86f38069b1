"""SLOMax's rule of order: who goes next into offered room.

Decides on values it is given and returns its reasons. First what would starve, of a class that is owed its floor; then,
by deadlines and size, as many of the backlog as can be on time, where what takes more than its share, or is of a
lower tier, gives way; then the rest, and last what is late anyway, shortest first (plain EDF collapses once overload
persists; relegation as in Niyama, arXiv:2503.22562). The room never stays empty while anything fits. Refuses to know
how the answers travel and how shares come about (`fairness`).
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet.slomax import fairness, reserve
from tokenfleet.slomax.state import INFINITY, Held, Pool, Room, Tried

#: so often may smaller requests pass a head that needs an idle instance; then its home instance is left to drain
BYPASS_MAX = 4
#: a release that found too little room is not tried again for the same room within this time
TRIED_MS = 1_000.0
#: GPU-time of 1 ms that its tenant is owed by the others of its class weighs as much as so many ms of time left
CREDIT_PRICE = 3.0
#: more time left than this is all the same, ms
SLACK_MAX_MS = 300_000.0
#: requests of a class that are looked at for one offer
LOOK_MAX = 64
#: a prefill that takes more than this part of a more urgent class's first-token time stalls it
LONG_PART = 0.5
#: a class is about while it had something here within this time, ms
ABOUT_MS = 10_000.0
#: who owes its class, and with it the pool, so much GPU-time sends more than its share, ms
GREEDY_MS = 1_000.0
#: part of a pool's instances, and at least one of several, that long prefills leave free while a more urgent class is
#: about
SPARED_PART = 0.25
#: part of a prefill's estimate that a deadline must leave beside it
MARGIN = 0.1


class Level(msgspec.Struct):
    """Room that is really left: an offer less the releases that it does not include."""

    prefill_tokens: int
    idle: bool
    sequences: int
    kv_tokens: int
    #: a longer prefill is not for this room; 0: no limit
    longest_tokens: int = 0


def level(pool: Pool, instance: str, room: Room) -> Level:
    """Subtract our own releases to this instance with a number above the offer's `last_released`."""
    left = Level(room.prefill_tokens, room.idle, room.sequences, room.kv_tokens, room.longest_tokens)
    for number, release in pool.releases.items():
        if number > room.last_released and release.instance == instance:
            left.prefill_tokens = max(0, left.prefill_tokens - release.work.prefill_tokens)
            left.kv_tokens -= release.work.own_kv_tokens
            left.sequences -= 1
            left.idle = False
    return left


class Least(msgspec.Struct, frozen=True):
    """The least that any of some holds needs, each number for itself: where that does not fit, none of them does."""

    prefill_tokens: int
    kv_tokens: int


def least(waiting: Iterable[Held]) -> Least | None:
    """What the smallest of these need; None: there are none."""
    works = [held.work for held in waiting]
    if not works:
        return None
    return Least(min(work.prefill_tokens for work in works), min(work.own_kv_tokens for work in works))


def may_fit(least: Least | None, room: Level) -> bool:
    """Whether a room could be large enough for any of them; `fits` says for whom it is."""
    if least is None or room.sequences < 1 or least.kv_tokens > room.kv_tokens:
        return False
    return room.idle or least.prefill_tokens <= room.prefill_tokens


def fits(held: Held, instance: str, room: Level, now_ms: float) -> bool:
    """Whether a hold can go into this room, and a failed release does not forbid it."""
    if not held.home_instance:
        return False  # no instance can serve it now; TokenPilot holds it again, with a home, once one can
    if held.bound and held.home_instance != instance:
        return False  # its prefix is cached at home; TokenPilot holds it again, unbound, once that is not worth it
    if room.sequences < 1 or held.work_on(instance).own_kv_tokens > room.kv_tokens:
        return False
    if not room.idle and held.work.prefill_tokens > room.prefill_tokens:
        return False
    if _too_long(held, room):
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
    #: `floor`, `deadline`, `spare`, `fifo`; of an empty choice `nothing_held`, `nothing_fits`, `reserved`,
    #: `shared_gpus`
    reason: str


class Chooser(Protocol):
    """Who goes next into the room of one instance."""

    def __call__(self, fleet: Fleet, pool: Pool, instance: str, room: Level, now_ms: float) -> Choice: ...


def choose(fleet: Fleet, pool: Pool, instance: str, room: Level, now_ms: float) -> Choice:
    """The hold that should fill this room. Counts how often one that does not fit was passed."""
    if fleet.policy.admission == "none":
        able = [held for held in pool.held.values() if not held.released and fits(held, instance, room, now_ms)]
        first = min(able, key=lambda held: (held.received_unix_ms, held.request_id), default=None)
        return Choice(first, "fifo" if first is not None else _empty(pool))
    waiting = [held for held in pool.held.values() if not held.released]
    if not may_fit(least(waiting), room) or not any(fits(held, instance, room, now_ms) for held in waiting):
        large = any(_waits_for_idle(held, instance, room) for held in waiting)
        return Choice(None, "reserved" if large else _empty(pool))
    passed: dict[str, Held] = {}
    full = long_full(pool, instance, now_ms)
    # What must be left free is the same for all of a class whose tenants take no more than their part, or all do.
    left: dict[tuple[str, bool], reserve.Kept] = {}
    for held, reason in order(fleet, pool, now_ms):
        if full and is_long(fleet, pool, held, now_ms):
            continue
        if reason != "floor":
            kind = (held.service_class, held.tenant in pool.greedy)
            kept = left.get(kind)
            if kept is None:
                kept = left[kind] = reserve.kept(fleet, pool, held, now_ms)
            if not leaves(held, instance, room, kept):
                continue
        if fits(held, instance, room, now_ms):
            for one in passed.values():
                one.bypassed += one.home_instance == instance
            return Choice(held, reason)
        if held.service_class not in passed:
            passed[held.service_class] = held
            if _waits_for_idle(held, instance, room):
                return Choice(None, "reserved")
    return Choice(None, _empty(pool))


def is_long(fleet: Fleet, pool: Pool, held: Held, now_ms: float) -> bool:
    """Whether its prefill would stall a more urgent class that is about: its first tokens, and its answers' pace."""
    tier = _tier(fleet, held)
    for name, at_ms in pool.recent_ms.items():
        cls = fleet.classes.get(name)
        if cls is None or cls.tier >= tier or cls.ttft_ms is None or now_ms - at_ms > ABOUT_MS:
            continue
        if held.own_ms > LONG_PART * cls.ttft_ms:
            return True
    return False


def leaves(held: Held, instance: str, room: Level, kept: reserve.Kept) -> bool:
    """Whether a request leaves of this room what is kept for others. An instance without requests keeps nothing."""
    kv_left = room.kv_tokens - held.work_on(instance).own_kv_tokens
    return room.sequences > kept.sequences and kv_left >= kept.kv_tokens


def long_full(pool: Pool, instance: str, now_ms: float) -> bool:
    """Whether as many instances as may already compute long prefills. A pool of one instance has nothing to spare."""
    count = len(pool.rooms)
    spared = max(1, int(SPARED_PART * count))
    busy = sum(1 for name, until_ms in pool.long_until_ms.items() if name != instance and until_ms > now_ms)
    return count > 1 and busy >= count - spared


def order(fleet: Fleet, pool: Pool, now_ms: float) -> Iterator[tuple[Held, str]]:
    """Everything that waits in a pool in the order of service, with the reason of its place.

    `floor`: its class is owed its floor, or its tenant much of the class, and its deadline would not bring it there.
    `deadline`: those that can all be on time, by deadline, as in another order they might not; what its tenant is owed
    by others of its class is taken off. `spare`: those that cannot, likewise; then what has no deadline; then what is
    late, shortest first.
    """
    reserve.look(fleet, pool, now_ms)
    timely, late = _queues(pool, now_ms)
    kept = keep(fleet, pool, timely, now_ms)
    rest = [held for held in (*timely, *late) if held.request_id not in kept]
    owed: dict[str, Held] = {}
    on_time = {fairness.tenant_key(held.service_class, held.tenant) for held in kept.values()}
    for held in rest:
        floor = fairness.floor_key(held.service_class)
        if floor not in owed and fairness.owed(pool, floor, held.cost_ms):
            owed[floor] = held
        mine = fairness.tenant_key(held.service_class, held.tenant)
        if mine not in owed and mine not in on_time and fairness.owed(pool, mine, max(held.cost_ms, GREEDY_MS)):
            owed[mine] = held
    first = {owed[key].request_id: owed[key] for key in sorted(owed, key=lambda key: (-pool.credit[key], key))}
    yield from ((held, "floor") for held in first.values())

    greedy = pool.greedy

    def urgency(held: Held) -> tuple[bool, float, str]:
        credit_ms = pool.credit.get(fairness.tenant_key(held.service_class, held.tenant), 0.0)
        credit_ms -= min(GREEDY_MS, max(-GREEDY_MS, credit_ms))  # less is the course of things
        left_ms = min(held.deadline_ms - now_ms, SLACK_MAX_MS)
        return (held.tenant in greedy, left_ms - CREDIT_PRICE * credit_ms, held.request_id)

    yield from ((held, "deadline") for held in sorted(kept.values(), key=urgency))

    def spare(held: Held) -> tuple[bool, bool, float, str]:
        return (held.late, *((held.tenant in greedy, held.own_ms, held.request_id) if held.late else urgency(held)))

    yield from ((held, "spare") for held in sorted(rest, key=spare) if held.request_id not in first)


def keep(fleet: Fleet, pool: Pool, timely: Sequence[Held], now_ms: float) -> dict[str, Held]:
    """Those of a backlog, in deadline order, that can all be on time at the pool's pace.

    Moore's algorithm (1968), which keeps the most jobs on time: go through the deadlines, and whenever one would be
    missed give up the one that costs most. Given up first is here what has taken more than its share (its class's, then
    its tenant's), then the lower tier, then what takes most prefill per output token. Nobody is given up for good: the
    backlog is looked at anew for every room.
    """
    factor = pool.pace.factor(len(pool.rooms))
    #: when those kept so far will have started, and the next one can
    at_ms = now_ms
    kept: dict[str, Held] = {}
    heap: list[tuple[bool, bool, bool, int, float, str]] = []
    greedy = pool.greedy
    for held in timely:
        if held.deadline_ms == INFINITY:
            break  # sorted by deadline: these and those behind them are nobody's hurry
        kept[held.request_id] = held
        takes_ms = (1.0 + MARGIN) * held.own_ms
        mine = fairness.tenant_key(held.service_class, held.tenant)
        heappush(
            heap,
            (
                held.tenant not in greedy,
                not fairness.overdrawn(pool, held.service_class, held.cost_ms),
                not fairness.overdrawn(pool, mine, held.cost_ms),
                -_tier(fleet, held),
                -held.own_ms / max(1, held.work.decode_tokens),
                held.request_id,
            ),
        )
        while at_ms + takes_ms > held.deadline_ms:
            given_up = kept.pop(heappop(heap)[-1])
            if given_up is held:
                break
            at_ms -= factor * given_up.own_ms
        else:
            at_ms += factor * held.own_ms
    return kept


def would_keep(fleet: Fleet, pool: Pool, newcomer: Held, now_ms: float) -> bool:
    """Whether a pool could have a newcomer on time, beside all of its backlog that it keeps (`keep`)."""
    timely, _ = _queues(pool, now_ms)
    insort(timely, newcomer, key=Held.key)
    return newcomer.request_id in keep(fleet, pool, timely, now_ms)


def _queues(pool: Pool, now_ms: float) -> tuple[list[Held], list[Held]]:
    """What waits for a release: those that can make their deadlines, in that order, and those that cannot."""
    timely: list[Held] = []
    late: list[Held] = []
    for queue in pool.queues.values():
        for held in [pool.held[entry[-1]] for entry in queue.timely[:LOOK_MAX]]:
            if now_ms > held.latest_start_ms:
                pool.relegate(held)
            elif not held.released:
                timely.append(held)
        late += [pool.held[entry[-1]] for entry in queue.late[:LOOK_MAX] if not pool.held[entry[-1]].released]
    timely.sort(key=Held.key)
    pool.spare.see(now_ms, bool(late))
    return timely, late


def _tier(fleet: Fleet, held: Held) -> int:
    cls = fleet.classes.get(held.service_class)
    return cls.tier if cls is not None else 1_000_000  # a class that a reload removed still drains


def _empty(pool: Pool) -> str:
    return "nothing_fits" if pool.waiting() else "nothing_held"


def _waits_for_idle(head: Held, instance: str, room: Level) -> bool:
    """One that only an idle instance can take and that was passed often enough: let its home run dry for it."""
    if _too_long(head, room):
        return False  # dry or not, the instance is for shorter ones
    return head.home_instance == instance and head.bypassed >= BYPASS_MAX and head.work.own_kv_tokens <= room.kv_tokens


def _too_long(held: Held, room: Level) -> bool:
    return 0 < room.longest_tokens < held.work.prefill_tokens
