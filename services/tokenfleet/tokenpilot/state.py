"""What TokenPilot knows: the fold of its site. Books and gives back; decides nothing.

Every aggregate (tokens, sequences, KV booked per instance) changes in `book`, `start` and `release` only, and each
booking remembers what it added, so that exactly that is taken back: once, whatever ends it and however often it is
told. An end that comes before its beginning leaves a tombstone.
"""

from itertools import takewhile
from operator import itemgetter

import msgspec

from tokenfleet.eligibility import CapacityView
from tokenfleet.presence import Presence
from tokenfleet.tokenpilot.breaker import Breaker
from tokenfleet.tokenpilot.lanes import Sizes
from tokenfleet.tokenpilot.lengths import LengthBook
from tokenfleet.tokenpilot.predictor import Margin, Model, Residual
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.tempo import Promised, Tempo
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementRequested, Work

#: reports over which foreign load must persist to be believed: a sample is always a little older than the bookings
FOREIGN_SAMPLES = 3
#: what a hold lacks that no instance here can serve now
NO_INSTANCE = "instance"


INFINITY = float("inf")
#: first tokens between two changes of the look-ahead, and the longest time between two that says anything of it, ms
FED_MIN, LONGEST_MS = 5, 10_000.0
#: sequences that must decode for the KV gauge to say what a booked token occupies; the least that is believed of what
#: has not begun, which may share nothing, and of what decodes
KV_SAMPLES, KV_SCALE_MIN, KV_SHARE_MIN = 4, 0.6, 0.05
#: weight of a gauge that is lower than what is believed: a higher one is believed at once
KV_WEIGHT = 0.2
#: a new incarnation is seen as any other after so many first tokens, or so long, ms
WARM_TOKENS, WARM_MS = 8, 10_000.0


_TOKENS = itemgetter(1)


class BookingError(ValueError):
    """A booking was made twice: a bug in the core, never an input's fault."""


class Forecast(msgspec.Struct):
    """A prediction with all that is needed to learn from its outcome."""

    ttft_features: list[float]
    #: from dispatch to first token, by physics alone; and with the residual, as it was said
    physics_ms: float
    said_ms: float
    #: of the residual
    bucket: int
    tpot_features: list[float]
    #: round trip between gateway and instance, part of what the gateway sees
    rtt_ms: float = 0.0
    #: until the engine begins with it if it is idle
    delay_ms: float = 0.0
    #: nothing had been booked there for a while
    stale: bool = False


class Booking(msgspec.Struct):
    """Work on an instance between its assignment (or its first token) and its end."""

    id: str
    request_id: str
    attempt: int
    gateway: str
    instance: str
    work: Work
    booked_ms: float
    #: moved from prefill to decode
    started: bool = False
    #: what was said; None: learned from `started`
    assigned: PlacementAssigned | None = None
    #: seen in the stream, or learned from there
    confirmed: bool = True
    said_ms: float = 0.0
    #: kept until confirmed: a later owner's mark may have come first, and then it waits again
    request: PlacementRequested | None = None
    #: highest revision that this booking answers
    revision: int = 0
    #: highest release number that this booking answers
    release_number: int = 0
    #: what the prediction for its instance was made from, and what it was; None: nothing was predicted
    forecast: Forecast | None = None


class Waiting(msgspec.Struct):
    """A request at this site without an instance: not answered yet, or held."""

    request: PlacementRequested
    #: our clock when this revision arrived
    heard_ms: float
    held: PlacementHeld | None = None
    #: how often this revision was answered with `held`
    turns: int = 0
    #: when its home was last thought over
    thought_ms: float = 0.0
    confirmed: bool = True
    said_ms: float = 0.0
    #: a release that has not been answered yet; 0: none
    release_number: int = 0
    release_id: str = ""

    def elapsed_ms(self, now_ms: float) -> float:
        """Since the gateway's receipt, as far as it can be known here."""
        return self.request.elapsed_ms + max(0.0, now_ms - self.heard_ms)

    def patience_left_ms(self, now_ms: float, hold_max_ms: float) -> float:
        """Until it must be refused."""
        return min(self.request.ask.patience_ms, hold_max_ms) - self.elapsed_ms(now_ms)

    def deadline_ms(self) -> float:
        """When its first token (or its end, or its patience) is due, our clock."""
        ask = self.request.ask
        due = next((d for d in (ask.ttft_ms, ask.e2e_ms) if d is not None), ask.patience_ms)
        return self.heard_ms - self.request.elapsed_ms + due


class Load(msgspec.Struct):
    """What is booked on one instance, and what its outcomes taught."""

    incarnation: str = ""
    sequences: int = 0
    #: of bookings without a first token
    prefill_tokens: int = 0
    kv_tokens: int = 0
    #: bookings with a first token, and their part of the KV tokens
    decoding: int = 0
    decoding_kv_tokens: int = 0
    #: what a booked KV token is really read as, and occupies before it has begun: sequences are not at their full
    #: length yet; and what those that decode occupy of theirs: they share blocks too, where prompts begin alike
    kv_scale: float = 1.0
    kv_share: float = 1.0
    #: KV tokens that are booked more than once, as sequences hold them in common (`pins`), and those of them that
    #: bookings without a first token found there
    shared_kv_tokens: int = 0
    unstarted_shared: int = 0
    #: last samples of sequences and KV tokens that are not ours, and the least of each: what persisted
    foreign: list[tuple[int, float]] = []
    foreign_sequences: int = 0
    foreign_kv_tokens: int = 0
    #: learned time per output token, ms; None: nothing learned
    tpot_ms: float | None = None
    #: attention of the prefill that is booked and has no first token, pairs of tokens
    pairs: int = 0
    #: booking → its prefill tokens, in order of booking: those without a first token
    unstarted: dict[str, int] = {}
    #: since when the engine has computed at that prefill; infinite: nothing is booked
    anchor_ms: float = INFINITY
    #: look-ahead beyond the knob's, prefill chunks
    lookahead_more: float = 0.0
    #: time that it lost by running dry while requests waited, and in which, both forgetting, ms; last first token
    lost_ms: float = 0.0
    fed_ms: float = 0.0
    fed_at_ms: float = -INFINITY
    #: first tokens since the look-ahead was last changed
    fed: int = 0
    #: when this incarnation was first heard of, and first tokens since; None: from the beginning, as all others
    cold_since_ms: float | None = None
    first_tokens: int = 0
    #: last booking made here
    booked_ms: float = 0.0
    #: what it has shown of its pace, and the sequences at once by which most of what was promised is kept
    tempo: Tempo = msgspec.field(default_factory=Tempo)
    paced: float | None = None
    paced_ms: float = 0.0
    breaker: Breaker = msgspec.field(default_factory=Breaker)

    def places(self, sequences_max: float) -> float:
        """Sequences at once, of so many that the engine takes."""
        return sequences_max if self.paced is None else min(sequences_max, float(int(self.paced)))

    def lookahead(self, knobs: Knobs) -> float:
        """Prefill chunks that the engine may have ahead."""
        return min(knobs.lookahead_max, knobs.lookahead_budgets + self.lookahead_more)

    def feed(self, starved: bool, now_ms: float, knobs: Knobs) -> None:
        """A first token came: more look-ahead while running dry costs time, less once it does not.

        An engine that ran dry while requests waited lost what it takes until the next one is there. A little of that is
        worth it: what waits inside the engine cannot be reordered, and every further chunk of it is waited for by the
        shortest request too.
        """
        keep = 1.0 - 1.0 / knobs.lookahead_patience
        self.lost_ms = keep * self.lost_ms + (knobs.feedback_ms if starved else 0.0)
        self.fed_ms = keep * self.fed_ms + min(LONGEST_MS, now_ms - self.fed_at_ms)
        self.fed_at_ms = now_ms
        self.fed += 1
        lost = self.lost_ms / max(self.fed_ms, knobs.feedback_ms)
        if starved and lost > knobs.dry_share and self.fed >= FED_MIN:
            most = knobs.lookahead_max - knobs.lookahead_budgets
            self.lookahead_more = min(most, self.lookahead_more + knobs.lookahead_step)
            self.fed = 0
        elif lost < knobs.dry_share / 2.0 and self.fed >= knobs.lookahead_patience:
            self.lookahead_more = max(0.0, self.lookahead_more - knobs.lookahead_step)
            self.fed = 0

    def warmth(self, now_ms: float) -> float:
        """Share of requests that may see a new incarnation as it is: grows with first tokens and with time."""
        if self.cold_since_ms is None:
            return 1.0
        return min(1.0, max((1 + self.first_tokens) / WARM_TOKENS, (now_ms - self.cold_since_ms) / WARM_MS))

    def __post_init__(self) -> None:
        self._see_foreign()

    def _see_foreign(self) -> None:
        """Sequences and KV tokens beyond our bookings that persisted over the last reports."""
        self.foreign_sequences = min(self.foreign)[0] if self.foreign else 0
        self.foreign_kv_tokens = int(min(map(_TOKENS, self.foreign))) if self.foreign else 0

    def forget_foreign(self) -> None:
        """The engine began anew: nobody else's work is there."""
        self.foreign = []
        self._see_foreign()

    def done_max(self, token_budget: int) -> int:
        """Prefill that can have been computed without a first token having come: the oldest's, and one step's."""
        return min(self.prefill_tokens, max(next(iter(self.unstarted.values()), 0), token_budget))

    def decode_kv_tokens(self) -> float:
        """KV tokens that the decodes of a step read: of what is booked, the share that decodes."""
        return self.decoding_kv_tokens * self.kv_scale + self.foreign_kv_tokens

    @property
    def kv_tokens_expected(self) -> float:
        """KV tokens that our bookings occupy, as the engine's gauge has shown of those that decode."""
        unstarted = self.kv_tokens - self.decoding_kv_tokens - min(self.unstarted_shared, self.shared_kv_tokens)
        return max(0, unstarted) * self.kv_scale + self._decoding_alone() * self.kv_share

    def _decoding_alone(self) -> int:
        """KV tokens of the bookings with a first token, those that they share once."""
        shared = max(0, self.shared_kv_tokens - self.unstarted_shared)
        return max(0, self.decoding_kv_tokens - shared)

    @property
    def kv_tokens_taken(self) -> float:
        """KV tokens that are taken: by our bookings, as expected, and by what is not ours."""
        return self.kv_tokens_expected + self.foreign_kv_tokens

    def all_kv_tokens(self) -> float:
        """KV tokens that the decodes of a step will read once all that is booked has begun."""
        return self.kv_tokens * self.kv_scale + self.foreign_kv_tokens

    def sample(self, report: CapacityReported) -> None:
        """Fold a report's load: what our bookings do not explain is foreign. An unknown sample teaches nothing."""
        if report.running is None or report.waiting is None:
            return
        sequences = max(0, report.running + report.waiting - self.sequences)
        tokens = 0.0
        if report.kv_usage is not None and report.kv_tokens_total is not None:
            used = report.kv_usage * report.kv_tokens_total
            tokens = max(0.0, used - self.kv_tokens + self.shared_kv_tokens)
            if self.decoding >= KV_SAMPLES:
                # Too high while somebody prefills, never too low: only who has a first token is surely in the gauge.
                share = min(1.0, max(KV_SHARE_MIN, used / max(1, self._decoding_alone())))
                self.kv_scale += KV_WEIGHT * (max(KV_SCALE_MIN, share) - self.kv_scale)
                self.kv_share = max(share, self.kv_share + KV_WEIGHT * (share - self.kv_share))
        self.foreign = [*self.foreign[1 - FOREIGN_SAMPLES :], (sequences, tokens)]
        self._see_foreign()


def pairs(work: Work) -> int:
    """Attention of a prefill: pairs of a computed token and one before it; the context is what the hit saves."""
    hit_tokens = max(0, work.kv_tokens - work.decode_tokens - work.prefill_tokens)
    return work.prefill_tokens * (2 * hit_tokens + work.prefill_tokens) // 2


class Pool(msgspec.Struct):
    """One model version here. `waiting` is in order of arrival."""

    model: str
    version: str
    waiting: dict[str, Waiting] = {}
    #: of them, answered with `held`
    held: int = 0
    #: of those, held because no instance can serve them at all now: they wait for an instance, not for room
    blocked: int = 0
    #: prefill tokens of the held
    held_prefill_tokens: int = 0
    #: of the held, those that wait for their home instance's room only: instance → how many
    bound: dict[str, int] = {}
    #: and their prefill tokens
    bound_tokens: dict[str, int] = {}
    #: number of the last release heard
    last_released: int = 0
    #: term of the SLOMax owner that numbered it
    release_term: int = 0
    #: round robin's place
    turn: int = 0
    #: prefills that were sent to its instances lately
    sizes: Sizes = msgspec.field(default_factory=Sizes)
    #: and what was asked of it, by the promised pace
    promised: Promised = msgspec.field(default_factory=Promised)

    def hold(self, waiting: Waiting, held: PlacementHeld | None) -> None:
        """Set or clear the answer `held` of a waiting request."""
        if waiting.held is not None:
            self.held -= 1
            self.blocked -= waiting.held.lacks == NO_INSTANCE
            self.held_prefill_tokens -= waiting.held.work.prefill_tokens
            self._bind(waiting.held, -1)
        waiting.held = held
        if held is not None:
            self.held += 1
            self.blocked += held.lacks == NO_INSTANCE
            self.held_prefill_tokens += held.work.prefill_tokens
            self._bind(held, 1)

    def _bind(self, held: PlacementHeld, sign: int) -> None:
        if not held.bound:
            return
        home = held.home_instance
        self.bound[home] = self.bound.get(home, 0) + sign
        self.bound_tokens[home] = self.bound_tokens.get(home, 0) + sign * held.work.prefill_tokens
        if not self.bound[home]:
            del self.bound[home], self.bound_tokens[home]

    def drop(self, request_id: str) -> Waiting | None:
        """The request waits here no more."""
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            self.hold(waiting, None)
        return waiting


class State(msgspec.Struct):
    """Everything that a checkpoint keeps."""

    site: str
    pools: dict[str, Pool] = {}
    bookings: dict[str, Booking] = {}
    #: request → its bookings here
    of_request: dict[str, list[str]] = {}
    loads: dict[str, Load] = {}
    view: CapacityView = msgspec.field(default_factory=CapacityView)
    presence: Presence = msgspec.field(default_factory=Presence)
    #: `request ID`, `attempt ID#n`, `booking ID`, `outcome ID` → when it ended
    gone: dict[str, float] = {}
    lengths: LengthBook = msgspec.field(default_factory=LengthBook)
    #: instance → what was learned of it
    models: dict[str, Model] = {}
    #: model version → what the physics of its instances miss
    residuals: dict[str, Residual] = {}
    #: class → margin of its predictions
    margins: dict[str, Margin] = {}
    #: highest term heard of each other office that commands us
    terms: dict[str, int] = {}

    # ---- bookings

    def load(self, instance: str) -> Load:
        """The load of an instance, empty if new."""
        found = self.loads.get(instance)
        if found is None:
            found = self.loads[instance] = Load()
        return found

    def book(self, booking: Booking) -> None:
        """Count its work; raises `BookingError` if it is counted already."""
        if booking.id in self.bookings:
            raise BookingError(f"{booking.id} is booked already")
        self.bookings[booking.id] = booking
        self.of_request.setdefault(booking.request_id, []).append(booking.id)
        load = self.load(booking.instance)
        load.sequences += 1
        load.booked_ms = max(load.booked_ms, booking.booked_ms)
        load.kv_tokens += booking.work.kv_tokens
        if booking.started:
            load.decoding += 1
            load.decoding_kv_tokens += booking.work.kv_tokens
        else:
            if not load.prefill_tokens:
                load.anchor_ms = booking.booked_ms
            load.prefill_tokens += booking.work.prefill_tokens
            load.pairs += pairs(booking.work)
            load.unstarted[booking.id] = booking.work.prefill_tokens
            load.unstarted_shared += booking.work.shared_kv_tokens

    def start(self, booking: Booking) -> bool:
        """Move it from prefill to decode; False if it had been moved."""
        if booking.started:
            return False
        booking.started = True
        load = self.loads[booking.instance]
        self._computed(load, booking)
        load.decoding += 1
        load.decoding_kv_tokens += booking.work.kv_tokens
        return True

    def release(self, booking_id: str, now_ms: float) -> Booking | None:
        """Take back exactly what it added, once; None if it is not booked."""
        self.gone[f"booking {booking_id}"] = now_ms
        booking = self.bookings.pop(booking_id, None)
        if booking is None:
            return None
        ids = self.of_request[booking.request_id]
        ids.remove(booking_id)
        if not ids:
            del self.of_request[booking.request_id]
        load = self.loads[booking.instance]
        load.sequences -= 1
        load.kv_tokens -= booking.work.kv_tokens
        if booking.started:
            load.decoding -= 1
            load.decoding_kv_tokens -= booking.work.kv_tokens
        else:
            self._computed(load, booking)
        load.breaker.released(booking_id)
        return booking

    def _computed(self, load: Load, booking: Booking) -> None:
        """Prefill that is no longer ahead of anybody."""
        load.prefill_tokens -= booking.work.prefill_tokens
        load.pairs -= pairs(booking.work)
        load.unstarted.pop(booking.id, None)
        load.unstarted_shared -= booking.work.shared_kv_tokens
        if not load.prefill_tokens:
            load.anchor_ms = INFINITY

    def bookings_of(self, request_id: str) -> list[Booking]:
        """Bookings of a request at this site, oldest first."""
        return [self.bookings[b] for b in self.of_request.get(request_id, ())]

    # ---- ends and tombstones

    def settle(self, request_id: str, gateway: str) -> None:
        """Stop watching the gateway for a request of which nothing is left here."""
        if request_id not in self.of_request and not any(request_id in p.waiting for p in self.pools.values()):
            self.presence.close(request_id, gateway)

    def ended(self, request_id: str, attempt: int) -> bool:
        """Whether the request, or that attempt of it, is over."""
        return f"request {request_id}" in self.gone or f"attempt {request_id}#{attempt}" in self.gone

    def prune(self, before_ms: float) -> None:
        """Forget old tombstones; they are in order of their making, or nearly."""
        # looked at every second and long: no copy of it
        for key in list(takewhile(lambda key: self.gone[key] < before_ms, self.gone)):
            del self.gone[key]
