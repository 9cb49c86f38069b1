"""SLOMax's rule of order: who goes next into offered room.

Decides on values it is given and returns its reasons. Between classes: each has a guaranteed share of released work,
kept as a deficit (Shreedhar and Varghese, deficit round robin, 1995) in estimated work; a class that has earned its
next request goes first, else the lowest tier borrows what nobody earned, so nothing idles and nobody starves. Within
a class: feasible earliest deadline first (plain EDF collapses once overload persists; relegation as in Niyama,
arXiv:2503.22562). Refuses to know how the answers travel.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet.slomax.state import Held, Pool, Release, Room, Tried

#: bound of what a class may be owed, prompt-token equivalents; dearer requests are earned at this price
CREDIT_MAX = 65_536.0
#: so often may smaller requests pass a head that needs an idle instance; then its home instance is left to drain
BYPASS_MAX = 4
#: a release that found too little room is not tried again for the same room within this time
TRIED_MS = 1_000.0
#: requests of a class that are looked at for one offer
LOOK_MAX = 64


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
