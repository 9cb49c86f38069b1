"""What FleetMind knows: the road of every open request and what each site has taken on. No decision is made here.

Load is the size of maps keyed by request and whole sums over them, so that it is exactly zero when nothing is open;
only the recent flow of prompt tokens is a decaying number. An end before its beginning leaves a tombstone.
"""

from itertools import takewhile
from math import exp
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
TOMBSTONE_MS = 600_000.0
#: horizon over which asked prompt tokens count against a site's prefill rate: two reports and some
FLOW_MS = 2_000.0


class Road(msgspec.Struct):
    """One request between its admission and its final outcome."""

    ask: Ask
    #: our clock's time of the gateway's receipt
    received_ms: float
    #: id of the message that the next request follows from
    cause: str
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
    #: prompt tokens that it added to its site's flow
    flow_tokens: int = 0
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


class Load(msgspec.Struct, dict=True):
    """What one site has taken on of one model version, as far as we know before it reports it."""

    #: request → prompt tokens: asked, not answered
    asked: dict[str, int] = {}
    #: request → prompt tokens: held
    held: dict[str, int] = {}
    #: request → KV tokens: booked
    booked: dict[str, int] = {}
    flow_tokens: float = 0.0
    flow_ms: float = 0.0
    #: its TokenPilot stayed silent; asked last until then
    silent_until_ms: float = 0.0

    def __post_init__(self) -> None:
        #: sums of the maps, whole numbers: summed anew for every request they would be dear in a large pool
        self.held_tokens = sum(self.held.values())
        self.booked_kv_tokens = sum(self.booked.values())

    def drop(self, request_id: str) -> None:
        """The request is nowhere here."""
        self.asked.pop(request_id, None)
        self.held_tokens -= self.held.pop(request_id, 0)
        self.booked_kv_tokens -= self.booked.pop(request_id, 0)

    def hold(self, request_id: str, tokens: int) -> None:
        self.held_tokens += tokens - self.held.get(request_id, 0)
        self.held[request_id] = tokens

    def book(self, request_id: str, kv_tokens: int) -> None:
        self.booked_kv_tokens += kv_tokens - self.booked.get(request_id, 0)
        self.booked[request_id] = kv_tokens

    def flow(self, now_ms: float) -> float:
        """Prompt tokens asked of it lately, decayed over `FLOW_MS`."""
        return self.flow_tokens * exp(-max(0.0, now_ms - self.flow_ms) / FLOW_MS)

    def add_flow(self, tokens: float, now_ms: float) -> None:
        self.flow_tokens = max(0.0, self.flow(now_ms) + tokens)
        self.flow_ms = max(self.flow_ms, now_ms)


class State(msgspec.Struct):
    """The whole fold; its msgpack is the checkpoint."""

    capacity: CapacityView = msgspec.field(default_factory=CapacityView)
    presence: Presence = msgspec.field(default_factory=Presence)
    roads: dict[str, Road] = {}
    #: closed request → forget after
    closed: dict[str, float] = {}
    loads: dict[PoolKey, Load] = {}
    #: measured round trips between sites, ms
    rtt: dict[tuple[str, str], float] = {}
    #: model and choice of sites → requests placed in turn (round robin)
    turns: dict[str, int] = {}
    offices: dict[str, Office] = {}
    plan: PlanState = msgspec.field(default_factory=PlanState)

    def load(self, key: PoolKey) -> Load:
        found = self.loads.get(key)
        if found is None:
            found = self.loads[key] = Load()
        return found

    def key(self, road: Road) -> PoolKey:
        return (road.site, road.ask.model, road.ask.version)

    def drop_load(self, road: Road) -> None:
        """The request is nowhere: not asked, held or booked."""
        load = self.loads.get(self.key(road))
        if load is not None:
            load.drop(road.ask.request_id)

    def take_load(self, road: Road, now_ms: float) -> None:
        """Count a request where it is now, by its phase."""
        rid, load = road.ask.request_id, self.load(self.key(road))
        if road.phase == "asked":
            road.flow_tokens = road.ask.input_tokens
            load.add_flow(road.flow_tokens, now_ms)
            load.asked[rid] = road.ask.input_tokens
        elif road.phase == "held":
            load.hold(rid, road.flow_tokens)
        elif road.phase == "assigned":
            load.book(rid, road.kv_tokens)

    def sweep(self, now_ms: float) -> None:
        """Forget tombstones that have served their time; they were added in order of time, near enough."""
        # tens of thousands: no copy of them
        for request_id in list(takewhile(lambda one: self.closed[one] <= now_ms, self.closed)):
            del self.closed[request_id]
