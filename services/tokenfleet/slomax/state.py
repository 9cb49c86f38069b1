"""What SLOMax knows: the fold of requests, holds, offers, bookings against quotas. No decision is made here.

Every number that must return to zero (open requests, reserved tokens, holds) is the size or sum of a map keyed by
request, never a counter: an end that comes twice removes nothing twice. An end before its beginning leaves a
tombstone.
"""

from bisect import bisect_left, insort
from itertools import takewhile
from math import exp2

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
#: what a tenant had at once counts half after this, ms
PEAK_HALF_MS = 15_000.0
#: what was served of late requests counts half after this; the pool's pace is believed as much as so long a wait, ms
SPARE_HALF_MS, SPARE_PRIOR_MS = 30_000.0, 5_000.0


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
    def token_ms(self) -> float:
        """GPU-time of one uncached prompt token at its home instance, ms."""
        return self.own_ms / max(1, self.work.prefill_tokens)

    @property
    def cost_ms(self) -> float:
        """Estimated GPU-time, ms: its uncached prefill, and its output at a fixed multiple of prompt tokens."""
        return max(0.01, self.own_ms + DECODE_WEIGHT * self.work.decode_tokens * self.token_ms)

    @property
    def latest_start_ms(self) -> float:
        """Started after this it misses its deadline, with 10 % for the estimate's error."""
        return self.deadline_ms - 1.1 * self.own_ms

    def work_on(self, instance: str) -> Work:
        """What it will occupy there: only of its home is it known what sequences there hold of it already."""
        if instance == self.home_instance or not self.work.shared_kv_tokens:
            return self.work
        return msgspec.structs.replace(self.work, shared_kv_tokens=0)

    def key(self) -> tuple[float, float, float, str]:
        """Place in its queue: earliest deadline first; of those that miss anyway, shortest first."""
        first = self.own_ms if self.late else self.deadline_ms
        return (first, float(self.received_unix_ms), fraction(self.request_id, "order"), self.request_id)


class Queue(msgspec.Struct):
    """Holds of one class in a pool, in order."""

    timely: list[tuple[float, float, float, str]] = []
    late: list[tuple[float, float, float, str]] = []
    #: tenant → how many of them are its
    tenants: dict[str, int] = {}
    #: tenant → their prefill, ms
    tenant_ms: dict[str, float] = {}
    #: their prefill, ms; the queue is dropped when it is empty, so no error stays
    own_ms: float = 0.0

    def add(self, held: Held) -> None:
        insort(self.late if held.late else self.timely, held.key())
        self.tenants[held.tenant] = self.tenants.get(held.tenant, 0) + 1
        self.own_ms += held.own_ms
        self.tenant_ms[held.tenant] = self.tenant_ms.get(held.tenant, 0.0) + held.own_ms

    def remove(self, held: Held) -> None:
        self.own_ms -= held.own_ms
        left = self.tenants.get(held.tenant, 0) - 1
        if left > 0:
            self.tenants[held.tenant] = left
            self.tenant_ms[held.tenant] = self.tenant_ms.get(held.tenant, 0.0) - held.own_ms
        else:
            self.tenant_ms.pop(held.tenant, None)
            self.tenants.pop(held.tenant, None)
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
    #: a longer prefill is not for this room; 0: no limit
    longest_tokens: int = 0
    #: answered by a release or a decline
    answered: bool = False


class Release(msgspec.Struct):
    """A release that an offer may not include yet."""

    request_id: str
    instance: str
    work: Work
    at_ms: float
    #: what it took from and gave to each account
    charges: dict[str, float]
    service_class: str
    cost_ms: float = 0.0


class Pace(msgspec.Struct):
    """How fast a pool really takes what it holds: time between releases over the prefill time that they had.

    Below 1 with several instances in parallel, above it where sequences or KV are short and where answers travel far.
    Learned over about the last twenty releases that had others waiting behind them.
    """

    spent_ms: float = 0.0
    own_ms: float = 0.0
    #: the last release and its prefill; 0: nobody waited behind it, so the time after it says nothing
    last_ms: float = 0.0
    last_own_ms: float = 0.0

    def released(self, own_ms: float, now_ms: float, *, more: bool) -> None:
        """Take one release into account; `more`: others wait behind it."""
        if self.last_ms:
            self.spent_ms = 0.95 * self.spent_ms + (now_ms - self.last_ms)
            self.own_ms = 0.95 * self.own_ms + self.last_own_ms
        self.last_ms, self.last_own_ms = (now_ms, own_ms) if more else (0.0, 0.0)

    def factor(self, instances: int) -> float:
        """Time that the pool takes for a prefill of 1 ms, from 0.01 to 10; begins with the instances in parallel."""
        weight_ms = 1_000.0
        return min(10.0, max(0.01, (self.spent_ms + weight_ms / max(1, instances)) / (self.own_ms + weight_ms)))


class Spare(msgspec.Struct):
    """How much a pool does of what is late anyway, beside what can be on time: over about the last half a minute."""

    served_ms: float = 0.0
    waited_ms: float = 0.0
    at_ms: float = 0.0
    #: something late waited at `at_ms`
    waiting: bool = False

    def see(self, now_ms: float, waiting: bool) -> None:
        """Let time pass: whether anything late waits from now on."""
        passed_ms = max(0.0, now_ms - self.at_ms)
        kept = exp2(-passed_ms / SPARE_HALF_MS)
        self.served_ms *= kept
        self.waited_ms = kept * self.waited_ms + (passed_ms if self.waiting else 0.0)
        self.at_ms, self.waiting = max(self.at_ms, now_ms), waiting

    def rate(self, factor: float) -> float:
        """Prefill of late requests per time, ms/ms; the pool's whole pace (`Pace.factor`) until they have waited."""
        return (SPARE_PRIOR_MS / factor + self.served_ms) / (SPARE_PRIOR_MS + self.waited_ms)


class Tempo(msgspec.Struct):
    """Mean time per output token that a model's answers had lately, ms."""

    tpot_ms: float = 50.0

    def learn(self, tpot_ms: float) -> None:
        """Take one answer into account."""
        self.tpot_ms += 0.05 * (tpot_ms - self.tpot_ms)


class Crowd(msgspec.Struct):
    """One tenant's requests of one class in a pool: those that run, and how many there lately were at once."""

    running: set[str] = set()
    #: most that ran or waited at once, fading
    peak: float = 0.0
    #: how many ran or waited on average of late
    mean: float = 0.0
    #: how many run or wait
    count: int = 0
    #: KV that one of them takes
    kv_tokens: float = 0.0
    at_ms: float = 0.0

    def lately(self, now_ms: float) -> float:
        """The peak as it has faded by now."""
        return self.peak * exp2(-max(0.0, now_ms - self.at_ms) / PEAK_HALF_MS)

    def average(self, now_ms: float) -> float:
        """The mean by now."""
        return self.count + (self.mean - self.count) * exp2(-max(0.0, now_ms - self.at_ms) / PEAK_HALF_MS)

    def see(self, count: int, now_ms: float) -> None:
        """Take into account that so many run or wait from now on."""
        self.peak, self.mean = max(float(count), self.lately(now_ms)), self.average(now_ms)
        self.count, self.at_ms = count, now_ms


class Bill(msgspec.Struct, frozen=True):
    """What a released request was charged, until its end says what it cost."""

    pool: PoolKey
    service_class: str
    tenant: str
    cost_ms: float
    #: GPU-time of an uncached prompt token, ms
    token_ms: float


class Seen(msgspec.Struct, frozen=True):
    """The last goodput window of one class and tenant, as feedback reads it."""

    end_ms: int
    revision: int
    offered: int
    compliant: int
    heard_ms: float


class Pool(msgspec.Struct):
    """Everything held for one model version at one site."""

    held: dict[str, Held] = {}
    queues: dict[str, Queue] = {}
    #: number of the last release, over all terms
    number: int = 0
    rooms: dict[str, Room] = {}
    releases: dict[int, Release] = {}
    #: account (`fairness`) → GPU-time that it is owed (positive) or has borrowed (negative), ms
    credit: dict[str, float] = {}
    #: work released since `shared_ms`, per class, ms of GPU-time
    used: dict[str, float] = {}
    #: part of every class as feedback has moved it; empty: as configured
    shares: dict[str, float] = {}
    pace: Pace = msgspec.field(default_factory=Pace)
    spare: Spare = msgspec.field(default_factory=Spare)
    #: instance → when the long prefill that was sent there should be over
    long_until_ms: dict[str, float] = {}
    #: class → when it last had anything here, held or not
    recent_ms: dict[str, float] = {}
    #: account of a tenant in a class (`fairness`) → what it has here
    crowds: dict[str, Crowd] = {}
    #: tenants that want more than their part (`reserve`), as of `looked_ms`
    greedy: tuple[str, ...] = ()
    looked_ms: float = 0.0
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
        name = held.service_class
        queue = self.queues[name]
        queue.remove(held)
        # Who has nothing to serve neither saves nor owes: its share was lent for good.
        if held.tenant not in queue.tenants:
            self.credit.pop(f"{name} {held.tenant}", None)
        if not queue.timely and not queue.late:
            self.credit.pop(name, None)
            self.credit.pop(f"floor {name}", None)
            del self.queues[name]
        if not self.held:
            self.pace.last_ms = 0.0
        self.changed = True
        return held

    def count_crowd(self, account: str, now_ms: float) -> None:
        """Something of an account came, began or ended here."""
        crowd = self.crowds.setdefault(account, Crowd())
        name, _, tenant = account.partition(" ")
        queue = self.queues.get(name)
        waiting = queue.tenants.get(tenant, 0) if queue is not None else 0
        crowd.see(len(crowd.running) + waiting, now_ms)

    def backlogged(self, key: str) -> bool:
        """Whether an account's class, or tenant of a class, has anything here."""
        if key.startswith("floor "):
            return key.removeprefix("floor ") in self.queues
        name, _, tenant = key.partition(" ")
        queue = self.queues.get(name)
        return queue is not None and (not tenant or tenant in queue.tenants)

    def relegate(self, held: Held) -> None:
        """Move a request that cannot make its deadline any more behind those that can."""
        queue = self.queues[held.service_class]
        queue.remove(held)
        held.late = True
        queue.add(held)

    def any_late(self) -> bool:
        """Whether anything waits that cannot make its deadline any more."""
        return any(queue.late for queue in self.queues.values())

    def count(self, service_class: str) -> int:
        queue = self.queues.get(service_class)
        return 0 if queue is None else len(queue.timely) + len(queue.late)

    def waiting(self) -> int:
        """Holds that no release is under way for."""
        return sum(1 for held in self.held.values() if not held.released)


class Account(msgspec.Struct):
    """One tenant's quotas at one entry: a bucket of tokens, and what its open requests have reserved."""

    level: float
    at_ms: float
    #: request → tokens reserved
    open: dict[str, float] = {}

    def refill(self, tokens_per_minute: float, now_ms: float) -> None:
        """Fill the bucket for the time that passed; it holds a minute's tokens."""
        if now_ms >= self.at_ms:
            grown = self.level + (now_ms - self.at_ms) * tokens_per_minute / 60_000.0
            self.level = min(tokens_per_minute, grown)
            self.at_ms = now_ms


class Lent(msgspec.Struct, frozen=True):
    """What an entry has lent another of a tenant's quota, in all (`quota`)."""

    concurrent: int = 0
    tokens_per_minute: float = 0.0
    tokens: float = 0.0
    revision: int = 0


class Meter(msgspec.Struct):
    """GPU-time of shared GPUs that a pool took ahead of its part (`devices`)."""

    at_ms: float
    ahead_ms: float = 0.0


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
    #: (tenant, entry) → its quotas there
    accounts: dict[tuple[str, str], Account] = {}
    #: (tenant, entry that lends, entry that has it) → how much
    lent: dict[tuple[str, str, str], Lent] = {}
    #: running request → its pool and account
    inside: dict[str, tuple[PoolKey, str]] = {}
    #: request → what it was charged when it left its pool
    bills: dict[str, Bill] = {}
    #: model → how fast its answers come
    tempos: dict[str, Tempo] = {}
    #: (model, served site or empty) → (class, tenant) → its last window
    seen: dict[tuple[str, str], dict[tuple[str, str], Seen]] = {}
    #: (site, model, version, GPU group) → its meter
    meters: dict[tuple[str, str, str, str], Meter] = {}
    offices: dict[str, Office] = {}

    def pool(self, key: PoolKey) -> Pool:
        found = self.pools.get(key)
        if found is None:
            found = self.pools[key] = Pool()
        return found

    def due_ms(self, ask: Ask, received_ms: float, decode_tokens: int, first_ms: float | None) -> float:
        """When its first token is late: for itself (`first_ms`), or because the whole answer then is; infinity: never.

        The time that the answer takes is its expected output at the pace of the model's answers.
        """
        due_ms = INFINITY if first_ms is None else first_ms
        if ask.e2e_ms is not None:
            tempo = self.tempos.get(ask.model, Tempo())
            due_ms = min(due_ms, received_ms + ask.e2e_ms - decode_tokens * tempo.tpot_ms)
        return due_ms

    def enter(self, request_id: str, key: PoolKey, account: str, now_ms: float, *, kv_tokens: int) -> None:
        """A request runs in a pool, on account of its tenant in its class."""
        self.leave(request_id, now_ms)
        self.inside[request_id] = (key, account)
        crowd = self.pool(key).crowds.setdefault(account, Crowd())
        crowd.running.add(request_id)
        crowd.kv_tokens += (kv_tokens - crowd.kv_tokens) * (0.1 if crowd.kv_tokens else 1.0)
        self.pool(key).count_crowd(account, now_ms)

    def leave(self, request_id: str, now_ms: float) -> None:
        """It runs no more."""
        inside = self.inside.pop(request_id, None)
        if inside is not None:
            pool = self.pools[inside[0]]
            pool.crowds[inside[1]].running.discard(request_id)
            pool.count_crowd(inside[1], now_ms)

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
