"""What FleetMind knows: the road of every open request and what each site has taken on. No decision is made here.

Load is the size of maps keyed by request and whole sums over them, so that it is exactly zero when nothing is open;
only the prefill that cannot be done yet, and what is learned of a pool's pace, are estimates. An end before its
beginning leaves a tombstone.
"""

from itertools import takewhile
from typing import Literal

import msgspec

from tokenfleet.eligibility import CapacityView
from tokenfleet.fleetmind.longcycle import PlanState
from tokenfleet.offices import Office
from tokenfleet.presence import Presence
from tokenfleet_schemas.request import Ask

#: site, model, version
PoolKey = tuple[str, str, str]
INFINITY = float("inf")
#: prefill rate of a pool of which nobody knows one, tokens/s; as TokenPilot's, for comparing only
UNKNOWN_PREFILL_TOKENS_PER_S = 2_000.0
TOMBSTONE_MS = 600_000.0
#: sequences booked are compared with a report over the time in which it may have been sampled, ms
PEAK_MS = 1_000.0
#: weight of one more request in what is learned of a pool's pace, once enough have been seen
PACE_WEIGHT = 0.03
#: what was learned of a pool's pace counts for nothing after so long without an answer from it, ms: a site that was
#: slow gets no work, so without this nobody would ever see that it is well again. Longer while something of ours is
#: there, whose end will tell
PACE_IDLE_MS = 20_000.0
PACE_BUSY_MS = 60_000.0
#: answers that come closer together than this forget nothing of what was learned before them, ms
PACE_STEADY_MS = 5_000.0
#: prompts shorter than this say little of a prefill rate: overheads are as long
RATE_PROMPT_TOKENS = 512
#: weights of a prefill that was faster or slower than what was learned. Who waited behind others shows a part of the
#: rate only, so the upper edge is followed: an expectile (Newey, Powell, 1987) of 0.3 / (0.3 + 0.02) = 0.94
RATE_FASTER_WEIGHT, RATE_SLOWER_WEIGHT = 0.3, 0.02


class Road(msgspec.Struct):
    """One request between its admission and its final outcome."""

    ask: Ask
    #: our clock's time of the gateway's receipt
    received_ms: float
    #: id of the message that the next request follows from
    cause: str
    #: first home of its entry
    home: str = ""
    phase: Literal["new", "asked", "held", "assigned", "refused"] = "new"
    attempt: int = 1
    #: of the last request for a site in this attempt; -1: none yet
    revision: int = -1
    #: highest (attempt, revision) that was admitted
    wanted: tuple[int, int] = (1, 0)
    site: str = ""
    excluded: tuple[str, ...] = ()
    #: sites that stayed silent in this round of asking
    tried: list[str] = []
    rounds: int = 0
    watch_until_ms: float = INFINITY
    #: id of the `held` or `assigned` that answered
    answer: str = ""
    #: prompt tokens to compute at its site: expected, then as its TokenPilot says
    prefill_tokens: int = 0
    #: site → prompt tokens that are probably cached there
    hits: dict[str, int] = {}
    kv_tokens: int = 0
    moves: int = 0
    held_ms: float = 0.0
    wait_ms: float = 0.0
    own_ms: float = 0.0
    prefix_hit_tokens: int = 0
    #: first token late after this, our clock
    deadline_ms: float = INFINITY
    #: SLOMax let it go at that time; not moved while its TokenPilot may be assigning it
    released_ms: float = -INFINITY

    @property
    def place(self) -> tuple[int, int]:
        """Which request for a site is the present one."""
        return (self.attempt, self.revision)


class Pace(msgspec.Struct):
    """How requests of a pool have lately gone: means over those that completed, the latest weigh most."""

    seen: int = 0
    #: from dispatch to end
    stay_ms: float = 0.0
    tpot_ms: float = 0.0
    #: mean distance of a request's pace from `tpot_ms`
    tpot_spread_ms: float = 0.0
    decode_tokens: float = 0.0
    #: of the last answer with a pace, our clock
    heard_ms: float = 0.0
    #: of one instance, tokens/s; 0: not seen yet
    prefill_tokens_per_s: float = 0.0

    def learn_rate(self, tokens: float, ms: float) -> None:
        """Take in a prefill of so many tokens; `ms` from its dispatch to its first token, without the network."""
        if tokens < RATE_PROMPT_TOKENS or ms <= 0:
            return
        seen = 1000.0 * tokens / ms
        weight = RATE_FASTER_WEIGHT if seen > self.prefill_tokens_per_s else RATE_SLOWER_WEIGHT
        if not self.prefill_tokens_per_s:
            weight = 1.0
        self.prefill_tokens_per_s += weight * (seen - self.prefill_tokens_per_s)

    def believed(self, now_ms: float, *, idle: bool) -> float:
        """How much its slowness still counts, 0 to 1; `idle`: nothing that we sent is there."""
        lasts_ms = PACE_IDLE_MS if idle else PACE_BUSY_MS
        return max(0.0, 1.0 - max(0.0, now_ms - self.heard_ms) / lasts_ms)

    def learn(self, stay_ms: float, tpot_ms: float | None, decode_tokens: float, now_ms: float) -> None:
        """Take in one completed request. The longer nothing came before it, the more it weighs."""
        forgotten = 1.0 - self.believed(now_ms - PACE_STEADY_MS, idle=True)
        fresh = max(PACE_WEIGHT, 1.0 / (self.seen + 1))
        weight = max(fresh, forgotten)
        self.seen += 1
        self.stay_ms += weight * (stay_ms - self.stay_ms)
        self.decode_tokens += weight * (decode_tokens - self.decode_tokens)
        if tpot_ms is not None:
            self.heard_ms = now_ms
            if not self.tpot_ms:
                self.tpot_ms = tpot_ms
            # a new level after a silence is no spread
            self.tpot_ms += forgotten * (tpot_ms - self.tpot_ms)
            self.tpot_spread_ms *= 1.0 - forgotten
            self.tpot_spread_ms += fresh * (abs(tpot_ms - self.tpot_ms) - self.tpot_spread_ms)
            self.tpot_ms += fresh * (tpot_ms - self.tpot_ms)


#: before anything has ended anywhere: a chat answer of 256 tokens at 30 ms
GUESS = Pace(stay_ms=8_000.0, tpot_ms=30.0, decode_tokens=256.0)


class Path(msgspec.Struct):
    """The network between two sites as last probed; None: unknown."""

    heard_ms: float
    rtt_ms: float | None = None
    loss: float | None = None
    #: from the second to the first, and when that was measured
    bytes_per_s: float | None = None
    bytes_ms: float = 0.0


class Load(msgspec.Struct, dict=True):
    """What one site has taken on of one model version, as far as we know before it reports it."""

    #: request → prompt tokens to compute: asked, not answered
    asked: dict[str, int] = {}
    #: request → prompt tokens to compute: held
    held: dict[str, int] = {}
    #: those of the held whose first home this is
    natives: dict[str, None] = {}
    #: request → KV tokens: booked
    booked: dict[str, int] = {}
    #: request → prompt tokens to compute: booked
    prefills: dict[str, int] = {}
    #: prompt tokens of what was assigned, less what the pool's rate has computed since
    ahead_tokens: float = 0.0
    ahead_ms: float = 0.0
    #: by which they are computed, tokens/s; never 0: what nobody computes would be ahead for good
    rate: float = UNKNOWN_PREFILL_TOKENS_PER_S
    #: most sequences booked at once in this `PEAK_MS` and in the one before
    peak: int = 0
    peak_before: int = 0
    peak_ms: float = 0.0
    pace: Pace = msgspec.field(default_factory=Pace)
    #: wait that its TokenPilot predicted for the last one that it held, and when, ms
    told_wait_ms: float = 0.0
    told_ms: float = 0.0
    #: its TokenPilot stayed silent; asked last until then
    silent_until_ms: float = 0.0

    def __post_init__(self) -> None:
        #: sums of the maps, whole numbers: summed anew for every request they would be dear in a large pool
        self.asked_tokens = sum(self.asked.values())
        self.held_tokens = sum(self.held.values())
        self.booked_kv_tokens = sum(self.booked.values())
        self.prefill_tokens = sum(self.prefills.values())

    @property
    def idle(self) -> bool:
        """Nothing that we sent is there."""
        return not (self.booked or self.asked or self.held)

    def drop(self, request_id: str, now_ms: float) -> None:
        """The request is nowhere here."""
        if request_id in self.booked:
            self.mark_peak(now_ms)
        self.asked_tokens -= self.asked.pop(request_id, 0)
        self.held_tokens -= self.held.pop(request_id, 0)
        self.natives.pop(request_id, None)
        self.booked_kv_tokens -= self.booked.pop(request_id, 0)
        self.prefill_tokens -= self.prefills.pop(request_id, 0)
        # what has ended is computed: the estimate of what is not may not outlive those who brought it
        self.ahead_tokens = min(self.backlog(now_ms), float(self.prefill_tokens))
        self.ahead_ms = max(self.ahead_ms, now_ms)

    def ask(self, request_id: str, tokens: int) -> None:
        self.asked_tokens += tokens - self.asked.get(request_id, 0)
        self.asked[request_id] = tokens

    def hold(self, request_id: str, tokens: int) -> None:
        self.held_tokens += tokens - self.held.get(request_id, 0)
        self.held[request_id] = tokens

    def book(self, request_id: str, kv_tokens: int, prefill_tokens: int, now_ms: float) -> None:
        self.booked_kv_tokens += kv_tokens - self.booked.get(request_id, 0)
        self.booked[request_id] = kv_tokens
        self.prefill_tokens += prefill_tokens - self.prefills.get(request_id, 0)
        self.prefills[request_id] = prefill_tokens
        self.add_ahead(prefill_tokens, now_ms)

    def backlog(self, now_ms: float) -> float:
        """Prompt tokens that were assigned and cannot have been computed yet; none where nothing is booked."""
        return max(0.0, self.ahead_tokens - self.rate * max(0.0, now_ms - self.ahead_ms) / 1000.0)

    def add_ahead(self, tokens: float, now_ms: float) -> None:
        """Somebody was assigned who brings so many."""
        self.ahead_tokens = self.backlog(now_ms) + tokens
        self.ahead_ms = max(self.ahead_ms, now_ms)

    def set_rate(self, rate: float, now_ms: float) -> None:
        """Another rate from now on."""
        self.add_ahead(0.0, now_ms)
        self.rate = rate

    def mark_peak(self, now_ms: float) -> None:
        """Note how many are booked now, before that changes."""
        if now_ms - self.peak_ms >= PEAK_MS:
            self.peak_before = self.peak if now_ms - self.peak_ms < 2 * PEAK_MS else len(self.booked)
            self.peak, self.peak_ms = 0, now_ms
        self.peak = max(self.peak, len(self.booked))

    def lately_booked(self, now_ms: float) -> int:
        """Most sequences booked at once in the time in which a report that came now may have been sampled."""
        most = len(self.booked)
        if now_ms - self.peak_ms < 2 * PEAK_MS:
            most = max(most, self.peak)
        if now_ms - self.peak_ms < PEAK_MS:
            most = max(most, self.peak_before)
        return most


class State(msgspec.Struct):
    """The whole fold; its msgpack is the checkpoint."""

    capacity: CapacityView = msgspec.field(default_factory=CapacityView)
    presence: Presence = msgspec.field(default_factory=Presence)
    roads: dict[str, Road] = {}
    #: closed request → forget after
    closed: dict[str, float] = {}
    loads: dict[PoolKey, Load] = {}
    #: what probes say of the network between sites
    paths: dict[tuple[str, str], Path] = {}
    #: model and choice of sites → requests placed in turn (round robin)
    turns: dict[str, int] = {}
    offices: dict[str, Office] = {}
    plan: PlanState = msgspec.field(default_factory=PlanState)

    def load(self, key: PoolKey) -> Load:
        found = self.loads.get(key)
        if found is None:
            found = self.loads[key] = Load()
        return found

    def pace_elsewhere(self, model: str) -> Pace:
        """What is expected of a pool that has not ended a request yet: as the model's slowest other, else a guess."""
        seen = [load.pace for (_, name, _), load in self.loads.items() if name == model and load.pace.seen]
        return max(seen, key=lambda pace: pace.stay_ms, default=GUESS)

    def key(self, road: Road) -> PoolKey:
        return (road.site, road.ask.model, road.ask.version)

    def drop_load(self, road: Road, now_ms: float) -> None:
        """The request is nowhere: not asked, held or booked."""
        load = self.loads.get(self.key(road))
        if load is not None:
            load.drop(road.ask.request_id, now_ms)

    def take_load(self, road: Road, now_ms: float) -> None:
        """Count a request where it is now, by its phase."""
        rid, load = road.ask.request_id, self.load(self.key(road))
        if road.phase == "asked":
            road.prefill_tokens = max(1, road.ask.input_tokens - road.hits.get(road.site, 0))
            load.ask(rid, road.prefill_tokens)
        elif road.phase == "held":
            load.hold(rid, road.prefill_tokens)
            load.told_wait_ms, load.told_ms = road.wait_ms, now_ms
            if road.home == road.site:
                load.natives[rid] = None
        elif road.phase == "assigned":
            load.book(rid, road.kv_tokens, road.prefill_tokens, now_ms)
            load.mark_peak(now_ms)

    def sweep(self, now_ms: float) -> None:
        """Forget tombstones that have served their time; they were added in order of time, near enough."""
        # tens of thousands: no copy of them
        for request_id in list(takewhile(lambda one: self.closed[one] <= now_ms, self.closed)):
            del self.closed[request_id]
