"""What SLOMax knows: the fold of requests, holds, offers, bookings against quotas. No decision is made here.

Every number that must return to zero (open requests, reserved tokens, holds) is the size or sum of a map keyed by
request, never a counter: an end that comes twice removes nothing twice. An end before its beginning leaves a
tombstone.
"""

from bisect import bisect_left, insort
from itertools import takewhile

import msgspec

from tokenfleet.eligibility import CapacityView, fraction
from tokenfleet.offices import Office
from tokenfleet.presence import Presence
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.placement import PlacementRefused, Work
from tokenfleet_schemas.request import Ask

#: site, model, version
PoolKey = tuple[str, str, str]
INFINITY = float("inf")
#: a closed request is remembered so long: longer than the longest hold and any resubmission
TOMBSTONE_MS = 600_000.0
#: output tokens are dearer than prompt tokens: 1 · in + 2 · out (VTC, arXiv:2401.00588)
DECODE_WEIGHT = 2.0


class Open(msgspec.Struct):
    """One request between its receipt and its final outcome."""

    ask: Ask
    attempt: int
    revision: int
    #: our clock's time of the gateway's receipt
    received_ms: float
    #: id of the message that the next decision follows from
    cause: str
    decided: AdmissionDecided | None = None
    refused: PlacementRefused | None = None
    #: highest (attempt, revision) for which a site was asked
    place: tuple[int, int] = (0, -1)
    #: highest (attempt, revision) that a TokenPilot answered (held or assigned)
    answered: tuple[int, int] = (0, -1)
    #: when the silent hop becomes ours to mend; infinity: nobody owes us anything
    watch_until_ms: float = INFINITY
    #: sites asked in FleetMind's stead for the present attempt
    tried: list[str] = []
    excluded: tuple[str, ...] = ()


class Tried(msgspec.Struct, frozen=True):
    """Room that a release found too small."""

    at_ms: float
    prefill_tokens: int
    sequences: int
    kv_tokens: int
    idle: bool
    lacks: str


class Held(msgspec.Struct):
    """One held request in its pool."""

    request_id: str
    gateway: str
    entry: str
    tenant: str
    service_class: str
    attempt: int
    revision: int
    #: id of the `held`
    event: str
    home_instance: str
    work: Work
    own_ms: float
    wait_ms: float
    #: first token late after this, our clock; infinity: no objective
    deadline_ms: float
    patience_until_ms: float
    received_unix_ms: int
    since_ms: float
    #: room that was lacking when it was held
    lacks: str = ""
    #: waits for its home instance's room only
    bound: bool = False
    #: number of the release under way; 0: none
    released: int = 0
    #: times that somebody behind it was released into its home instance's room because it did not fit
    bypassed: int = 0
    tried: dict[str, Tried] = {}
    #: sits in the queue of those that cannot make it any more
    late: bool = False

    @property
    def cost(self) -> float:
        """Estimated work in prompt-token equivalents."""
        return max(1.0, self.work.prefill_tokens + DECODE_WEIGHT * self.work.decode_tokens)

    @property
    def latest_start_ms(self) -> float:
        """Started after this it misses its deadline, with 10 % for the estimate's error."""
        return self.deadline_ms - 1.1 * self.own_ms

    def key(self) -> tuple[float, float, float, str]:
        """Place in its queue: earliest deadline first; of those that miss anyway, shortest first."""
        first = self.own_ms if self.late else self.deadline_ms
        return (first, float(self.received_unix_ms), fraction(self.request_id, "order"), self.request_id)


class Queue(msgspec.Struct):
    """Holds of one class in a pool, in order."""

    timely: list[tuple[float, float, float, str]] = []
    late: list[tuple[float, float, float, str]] = []

    def add(self, held: Held) -> None:
        insort(self.late if held.late else self.timely, held.key())

    def remove(self, held: Held) -> None:
        entries, key = (self.late if held.late else self.timely), held.key()
        at = bisect_left(entries, key)
        if at < len(entries) and entries[at] == key:
            del entries[at]


class Room(msgspec.Struct):
    """The last offer of one instance: a level."""

    offer: str
    prefill_tokens: int
    idle: bool
    sequences: int
    kv_tokens: int
    last_released: int
    held: int
    heard_ms: float
    #: answered by a release or a decline
    answered: bool = False


class Release(msgspec.Struct):
    """A release that an offer may not include yet."""

    request_id: str
    instance: str
    work: Work
    at_ms: float
    #: what it took from and gave to each class's credit
    charges: dict[str, float]
    service_class: str


class Pool(msgspec.Struct):
    """Everything held for one model version at one site."""

    held: dict[str, Held] = {}
    queues: dict[str, Queue] = {}
    #: number of the last release, over all terms
    number: int = 0
    rooms: dict[str, Room] = {}
    releases: dict[int, Release] = {}
    #: work that a class is owed (positive) or has borrowed (negative), prompt-token equivalents
    credit: dict[str, float] = {}
    #: work released since `shared_ms`, per class
    used: dict[str, float] = {}
    shared_ms: float = 0.0
    shared_revision: int = 0
    changed: bool = False

    def add(self, held: Held) -> None:
        self.held[held.request_id] = held
        self.queues.setdefault(held.service_class, Queue()).add(held)
        self.changed = True

    def remove(self, request_id: str) -> Held | None:
        held = self.held.pop(request_id, None)
        if held is None:
            return None
        queue = self.queues[held.service_class]
        queue.remove(held)
        if not queue.timely and not queue.late:
            # A class with nothing to serve neither saves nor owes: its share was lent for good.
            self.credit.pop(held.service_class, None)
            del self.queues[held.service_class]
        self.changed = True
        return held

    def relegate(self, held: Held) -> None:
        """Move a request that cannot make its deadline any more behind those that can."""
        queue = self.queues[held.service_class]
        queue.remove(held)
        held.late = True
        queue.add(held)

    def count(self, service_class: str) -> int:
        queue = self.queues.get(service_class)
        return 0 if queue is None else len(queue.timely) + len(queue.late)

    def waiting(self) -> int:
        """Holds that no release is under way for."""
        return sum(1 for held in self.held.values() if not held.released)


class Account(msgspec.Struct):
    """One tenant's quotas: a bucket of tokens, and what its open requests have reserved."""

    level: float
    at_ms: float
    #: request → tokens reserved
    open: dict[str, float] = {}

    def refill(self, tokens_per_minute: float, now_ms: float) -> None:
        if now_ms > self.at_ms:
            grown = self.level + (now_ms - self.at_ms) * tokens_per_minute / 60_000.0
            self.level = min(tokens_per_minute, grown)
            self.at_ms = now_ms


class State(msgspec.Struct):
    """The whole fold; its msgpack is the checkpoint."""

    capacity: CapacityView = msgspec.field(default_factory=CapacityView)
    presence: Presence = msgspec.field(default_factory=Presence)
    open: dict[str, Open] = {}
    #: closed request → forget after
    closed: dict[str, float] = {}
    pools: dict[PoolKey, Pool] = {}
    #: held request → its pool
    where: dict[str, PoolKey] = {}
    accounts: dict[str, Account] = {}
    offices: dict[str, Office] = {}

    def pool(self, key: PoolKey) -> Pool:
        found = self.pools.get(key)
        if found is None:
            found = self.pools[key] = Pool()
        return found

    def unhold(self, request_id: str) -> Held | None:
        key = self.where.pop(request_id, None)
        if key is None:
            return None
        pool = self.pools[key]
        held = pool.remove(request_id)
        if not pool.held:
            pool.rooms.clear()  # open to newcomers again: what was offered is nobody's to fill any more
        return held

    def bury(self, request_id: str, now_ms: float) -> None:
        self.closed[request_id] = now_ms + TOMBSTONE_MS

    def sweep(self, now_ms: float) -> None:
        """Forget tombstones that have served their time; they were added in order of time, near enough."""
        # tens of thousands: no copy of them
        for request_id in list(takewhile(lambda one: self.closed[one] <= now_ms, self.closed)):
            del self.closed[request_id]
