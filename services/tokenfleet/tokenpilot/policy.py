"""Which instance: filters, a scorer and a picker, each replaceable alone; and what room an instance has.

Decides from one request, the last reports and the bookings; keeps nothing and changes nothing. A filter gives the
reason why an instance cannot serve the request now; a scorer gives terms in milliseconds, of which `total_ms` is
compared; a picker takes the best that has room and is worth using. Ties break by a hash of (request id, instance), so
that replicas agree and no instance is first by its name (P03). Refuses to know holds, offers and offices.

Least estimated work: the booked prefill that has not started over the instance's prefill rate, slowed by the
decoding sequences, which take their token of every step's budget (chunked prefill, Sarathi-Serve, arXiv:2403.02310).
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenfleet.eligibility import Heard
from tokenfleet.fleet import Fleet
from tokenfleet.tokenpilot.board import CODE, Board, Codes, Column, Mask
from tokenfleet.tokenpilot.predictor import SPREAD_TOKENS
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import Load
from tokenfleet_schemas.placement import Considered, PlacementRequested, Work
from tokenfleet_schemas.request import Ask

Lack = Literal["", "sequences", "kv_tokens", "prefill_tokens", "newcomer"]


#: standard deviation of a pace around what is predicted, as a part of what is promised (predictions, and the batch that
#: changes while an answer goes on); and the slope of the logistic function that is next to the normal distribution's
PACE_SPREAD, LOGISTIC = 0.15, 1.702
#: learned costs closer than this share are alike
_ALIKE = 0.03


class Room(msgspec.Struct, frozen=True):
    """What an instance can take now."""

    prefill_tokens: int
    #: nothing booked waits for prefill there
    idle: bool
    sequences: int
    kv_tokens: int
    #: nothing at all is booked there
    empty: bool = False
    #: a longer prefill must not begin there now: shorter ones need the instance; 0: no limit
    longest_tokens: int = 0

    def any(self) -> bool:
        """Whether some request could fit."""
        return self.sequences > 0 and (self.prefill_tokens > 0 or self.idle) and (self.kv_tokens > 0 or self.empty)

    def lacks(self, work: Work) -> Lack:
        """What is missing for this work; empty when it fits.

        Larger than the look-ahead fits an instance without backlog, and an empty instance takes whatever its filters
        let through: otherwise the largest requests would wait for ever.
        """
        if self.sequences < 1:
            return "sequences"
        if work.own_kv_tokens > self.kv_tokens and not self.empty:
            return "kv_tokens"
        if work.prefill_tokens > self.prefill_tokens and not self.idle:
            return "prefill_tokens"
        return "prefill_tokens" if 0 < self.longest_tokens < work.prefill_tokens else ""


NO_ROOM = Room(0, False, 0, 0)


class Candidate(msgspec.Struct):
    """One instance under consideration."""

    name: str
    heard: Heard
    load: Load
    #: tokens of the prompt that are probably cached there
    hit_tokens: int
    work: Work
    #: prompt tokens per second; None: unknown
    rate: float | None
    #: why it cannot serve the request; empty when it can
    out: str = ""
    lacks: Lack = ""
    terms: dict[str, float] = {}
    #: decides between equals, in [0, 1)
    tie: float = 0.0

    @property
    def total_ms(self) -> float:
        """Estimated time to the first token there."""
        return self.terms["total_ms"]

    @property
    def cost_ms(self) -> float:
        """What is compared: the time to the first token, and what else the scorer prices."""
        return self.terms.get("cost_ms", self.total_ms)


class Situation(msgspec.Struct):
    """What a decision is about, beside the candidates."""

    fleet: Fleet
    request: PlacementRequested
    now_ms: float
    knobs: Knobs
    #: time left until the first token is late; None: no objective
    slack_ms: float | None
    #: place it now if anything has room: it was released, or nobody else decides
    force: bool = False
    #: output tokens expected
    decode_tokens: int = 1
    #: share by which predictions of its class must be widened to hold
    margin: float = 0.0
    #: residual by bucket, to be added to 1; None: physics alone
    residual: Column | None = None
    #: how many can serve it, with room or without; which these are, and which of them have room
    able: int = 0
    board: Board | None = None
    #: price of compute that a prefill burns, in its own time
    burn_price: float = 0.0
    #: booked prefill that cannot be computed yet by now; None: not reckoned
    left: Column | None = None
    #: prefill of others that waits for each instance's room and for no other; None: nobody's
    bound_tokens: Column | None = None
    #: and how many they are
    bound: Column | None = None
    terms: dict[str, Column] = {}
    able_rows: Mask = np.zeros(0, np.bool_)
    roomy_rows: Mask = np.zeros(0, np.bool_)


class Asked(msgspec.Struct):
    """What the request would be on each instance: columns beside the board's."""

    hit_tokens: Column
    prefill_tokens: Column
    #: KV that it refers to, and what of it no sequence there holds already
    kv_tokens: Column
    own_kv_tokens: Column
    #: instances with a place for it, and those without the KV; None: all, and none
    has_place: Mask | None
    lacks_kv: Mask | None

    def shared_kv_tokens(self, rows: npt.NDArray[np.intp]) -> list[float]:
        """What of its KV sequences hold already on each of these instances, tokens."""
        if self.own_kv_tokens is self.kv_tokens:
            return [0.0] * len(rows)
        shared: list[float] = (self.kv_tokens[rows] - self.own_kv_tokens[rows]).tolist()
        return shared


class Filter(Protocol):
    """Says for each instance why it cannot serve the request now, as a code of `board.REASONS`; 0 where it can.

    None where all can. Nobody changes what it says.
    """

    def __call__(self, situation: Situation, board: Board, /) -> Codes | None: ...


class Scorer(Protocol):
    """Terms in columns, ms; lower `cost_ms` (or `total_ms`, where it is all there is) is better."""

    def __call__(self, situation: Situation, board: Board, asked: Asked) -> dict[str, Column]: ...


class Picker(Protocol):
    """Takes one of the scored candidates, or none when waiting is better.

    It is given the best with room and the best of all, or everybody where its `everybody` is true.
    """

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None: ...


# ---------------------------------------------------------------------------------------------- filters


def usable(situation: Situation, board: Board) -> Codes:
    """Ready, fresh, exact version, adapter, routable, not draining, not excluded: as every other part filters."""
    return board.eligible(situation.request.ask, situation.request.excluded, situation.now_ms)


def reachable(_situation: Situation, board: Board) -> Codes | None:
    """An instance that says no address cannot be dispatched to."""
    if not board.unreachable:
        return None
    return np.where(board.reachable > 0, 0, CODE["no_endpoint"]).astype(np.int8)


def long_enough(situation: Situation, board: Board) -> Codes | None:
    """The prompt and one token must fit the model's length and the instance's whole KV."""
    tokens = situation.request.ask.input_tokens
    if tokens < board.fits_all_tokens:
        return None
    codes = np.where((tokens >= board.kv_total) & (board.kv_known > 0), CODE["kv_too_small"], 0)
    return np.where(tokens >= board.model_len, CODE["too_long"], codes).astype(np.int8)


def unbroken(_situation: Situation, board: Board) -> Codes | None:
    """Its last outcomes do not forbid it."""
    return (board.breaker * CODE["breaker"]).astype(np.int8) if board.broken else None


FILTERS: tuple[Filter, ...] = (usable, reachable, long_enough, unbroken)


# ---------------------------------------------------------------------------------------------- scorers


def least_work(situation: Situation, board: Board, asked: Asked) -> dict[str, Column]:
    """Wait (for the booked prefill ahead, or for a sequence to end) plus own uncached prefill, ms.

    An unknown rate counts as the slowest known of the pool: unknown is never fast.
    """
    known = board.rate[~np.isnan(board.rate)]
    fallback = float(known.min()) if known.size else situation.knobs.unknown_prefill_tokens_per_s
    rate = np.where(np.isnan(board.rate), fallback, board.rate)
    decoding = board.decoders
    share = np.maximum(0.1, 1.0 - decoding / np.maximum(1.0, board.token_budget))
    per_token_ms = 1000.0 / (rate * share)
    slot_ms = slots_ms(situation, board, asked)
    wait_ms = np.maximum(board.prefill_tokens * per_token_ms, slot_ms)
    own_ms = asked.prefill_tokens * per_token_ms
    return {
        "wait_ms": wait_ms,
        "own_ms": own_ms,
        "slot_ms": slot_ms,
        "decoding": decoding,
        "prefix_hit_tokens": asked.hit_tokens,
        "total_ms": wait_ms + own_ms,
    }


def slots_ms(situation: Situation, board: Board, asked: Asked) -> Column:
    """Expected time until a sequence ends on a full instance: length x pace over the sequences that run there.

    Zero where sequences are left, and where no pace has been learned: then nobody knows, and prefill alone ranks.
    """
    if asked.has_place is None:
        return np.zeros(len(board.names))
    pace = np.where(np.isnan(board.tpot_seen_ms), 0.0, board.tpot_seen_ms)
    stay_ms = situation.decode_tokens * pace / np.maximum(1.0, board.running)
    return np.where(asked.has_place, 0.0, stay_ms)


def predicted_latency(situation: Situation, board: Board, asked: Asked) -> dict[str, Column]:
    """J: the request's own time to the first token, and a price on the compute that it burns and the delay it inflicts.

    J = wait + own + kv + (mu + w N) own, where mu grows with the load of the pool (`Situation.burn_price`) and N counts
    the sequences there: a prefill delays all of them. Time by which the first token (with the class's margin) would be
    late costs extra, as much as compute where another would be in time. A broken pace costs a part of the promised
    time, by its probability. The time to the first token is the predictor's, from the prefill ahead as it must be by
    now.
    """
    knobs, ask = situation.knobs, situation.request.ask
    own, hit = asked.prefill_tokens, asked.hit_tokens
    decoding = board.decoders
    left = situation.left
    if left is None:
        left = board.prefill_tokens - progress(board, situation.now_ms)
    ahead = left if situation.bound_tokens is None else left + situation.bound_tokens
    ahead_pairs = board.pairs * (left / board.prefill_least_one)
    own_pairs = own * (hit + own / 2.0)
    steps = np.maximum(1.0, (ahead + own) / board.step_room) + board.half_step
    ttft_ms = (
        board.delay_ms
        + board.token_ms * (ahead + own + steps * decoding)
        + board.pair_ms * (ahead_pairs + own_pairs)
        + steps * board.step_cost_ms
    )
    if situation.residual is not None:
        ttft_ms = ttft_ms * (1.0 + situation.residual[buckets(board, ahead)])
    burnt_ms = own * board.per_token_ms + board.pair_ms * own_pairs
    tpot_ms = board.tpot_alone_ms + board.tpot_prefill_ms * (left + own) / SPREAD_TOKENS
    if situation.bound is not None:
        # Who is bound there will be in its batch as those are that are there already: otherwise all take the emptiest.
        tpot_ms = tpot_ms + situation.bound * (board.tpot_sequence_ms + board.tpot_kv_ms * asked.kv_tokens)
    stay_ms = situation.decode_tokens * tpot_ms
    own_ms = np.minimum(board.delay_ms + burnt_ms, ttft_ms)
    wait_ms = ttft_ms - own_ms
    # Terms that are nothing for all of them are not worth a pass over the columns.
    slot_ms = kv_ms = np.zeros(len(board.names))
    if asked.has_place is not None:
        slot_ms = np.where(asked.has_place, 0.0, stay_ms / np.maximum(1.0, board.running))
        wait_ms = np.maximum(wait_ms, slot_ms)
    total_ms = wait_ms + own_ms
    if asked.lacks_kv is not None:
        short_ms = (asked.own_kv_tokens - board.kv_left) * stay_ms / np.maximum(1.0, board.kv_tokens)
        kv_ms = np.where(asked.lacks_kv, short_ms, 0.0)
        total_ms = total_ms + kv_ms
    cost_ms = total_ms + (situation.burn_price + knobs.delay_price * board.sequences) * burnt_ms
    # KV is held as long as the request stays; a full instance makes whoever comes next wait for it.
    share = np.minimum(1.0, (board.kv_booked + asked.own_kv_tokens) / board.kv_total)
    cost_ms = cost_ms + knobs.kv_price * share**4 * stay_ms * asked.own_kv_tokens / board.kv_total
    if situation.slack_ms is not None:
        late_ms = np.maximum(0.0, total_ms * (1.0 + situation.margin) - max(0.0, situation.slack_ms))
        late = np.count_nonzero(late_ms)
        if late:
            # Late everywhere, it is late: then nobody's cache is worth less for it.
            cost_ms = cost_ms + (knobs.late_price if late < len(late_ms) else 1.0) * late_ms
    if ask.tpot_ms is not None:
        beyond = (tpot_ms / ask.tpot_ms - 1.0) * (1.0 / PACE_SPREAD)
        near = beyond > -3.0
        if np.count_nonzero(near):
            # Broken it is broken: beyond that a slower pace costs nothing, else all that are slow anyway would wait
            # for whichever is least so.
            broken = 1.0 / (1.0 + np.exp(-LOGISTIC * np.minimum(beyond, 3.0)))
            cost_ms = cost_ms + knobs.pace_price * situation.decode_tokens * ask.tpot_ms * broken
    idle = situation.now_ms - board.booked_ms > knobs.retry_ms
    if np.count_nonzero(idle):
        # Slow is what it was when it last got something. One request that would be on time even so sees it as its
        # equals: nobody else can find out whether it has recovered (F14).
        usual = board.usual_slowness()
        retried = idle & (board.slowness > usual)
        if situation.slack_ms is not None:
            retried &= total_ms * (1.0 + situation.margin) < situation.slack_ms
        if np.count_nonzero(retried):
            cost_ms = np.where(retried, np.minimum(cost_ms, cost_ms * usual / board.slowness), cost_ms)
    if board.cold and len(board.cold) < len(board.names):
        # Slow start: only a growing share of requests sees a newcomer as it is; the others see the worst of the rest.
        shy = (board.warmth < 1.0) & (board.ties(ask.request_id + " warm") >= board.warmth)
        cost_ms = np.where(shy, cost_ms + float(cost_ms.max()), cost_ms)
    return {
        "wait_ms": wait_ms,
        "own_ms": own_ms,
        "slot_ms": slot_ms,
        "kv_ms": kv_ms,
        "burnt_ms": burnt_ms,
        "ahead_tokens": ahead,
        "decoding": decoding,
        "prefix_hit_tokens": hit,
        "tpot_ms": tpot_ms,
        "total_ms": total_ms,
        "cost_ms": cost_ms,
    }


def progress(board: Board, now_ms: float) -> Column:
    """Prompt tokens that must have been computed of what is booked: the queue between two signs of life."""
    found: Column = np.minimum(np.maximum(now_ms - board.anchor_ms, 0.0) / board.queue_token_ms, board.done_max)
    return found


def buckets(board: Board, ahead: Column) -> npt.NDArray[np.intp]:
    """`predictor.bucket` for columns."""
    queue = np.minimum(4, (ahead / board.step_room * 2.0).astype(np.intp))
    return queue * 5 + board.full_bucket.astype(np.intp)


def bound(situation: Situation, home: Candidate) -> bool:
    """Whether a request that is held should wait for its home's room only.

    It should when waiting there, all who wait for the same included, costs less than the same request would elsewhere
    if there were no wait at all: whatever room comes first would be worse.
    """
    terms = situation.terms
    if "cost_ms" not in terms or situation.board is None:
        return False
    elsewhere = (terms["cost_ms"] - terms["wait_ms"] - terms["kv_ms"])[situation.able_rows]
    if elsewhere.size < 2:
        return False
    # The home is not elsewhere.
    own = home.cost_ms - home.terms["wait_ms"] - home.terms["kv_ms"]
    least = np.partition(elsewhere, 1)[:2]
    other = float(least[1] if least[0] >= own - 1e-6 else least[0])
    return home.cost_ms < (1.0 - _ALIKE) * other


#: placements that assign at once, room or not, and leave the queue to the engines
AT_ONCE = frozenset({"round-robin", "least-requests"})

SCORERS: dict[str, Scorer] = {"least-work": least_work, "predicted-latency": predicted_latency}


# ---------------------------------------------------------------------------------------------- pickers


def worth_waiting(situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best with room; none when it would be late there and the best of all, without room, is better.

    A request that was released (`force`) takes the best with room whatever it costs: its turn has come.
    """
    roomy = [c for c in candidates if not c.lacks]
    if not roomy:
        return None
    best = min(roomy, key=preference)
    widened = best.total_ms * (1.0 + situation.margin)
    if situation.force or situation.slack_ms is None or widened <= max(0.0, situation.slack_ms):
        return best
    return best if best.total_ms <= min(c.total_ms for c in candidates) else None


def home_or_room(situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
    """The cheapest with room, unless it should wait for its home's room only (`bound`)."""
    roomy = [c for c in candidates if not c.lacks]
    if not roomy:
        return None
    best, home = min(roomy, key=preference), min(candidates, key=preference)
    return None if home is not best and bound(situation, home) else best


PICKERS: dict[str, Picker] = {"least-work": worth_waiting, "predicted-latency": home_or_room}


def preference(candidate: Candidate) -> tuple[float, float]:
    """Order of scored candidates; less than a tenth of a millisecond, or of 3% where costs are learned, is none.

    Estimates differ by that much among equal instances: without it the luckiest one would get every request.
    """
    if "cost_ms" in candidate.terms:
        return float(round(math.log1p(candidate.cost_ms) / _ALIKE)), candidate.tie
    return round(candidate.total_ms, 1), candidate.tie


def preferences(terms: dict[str, Column], ties: Column) -> Column:
    """`preference` as one number each."""
    if "cost_ms" in terms:
        return np.rint(np.log1p(terms["cost_ms"]) / _ALIKE) + 0.5 * ties
    return np.round(terms["total_ms"], 1) + 0.05 * ties


# ---------------------------------------------------------------------------------------------- numbers


def expected_tokens(ask: Ask, tokens: float) -> int:
    """Output to expect: what was learned, never more than the client permits, at least one token."""
    expected = max(1, round(tokens))
    if ask.output_budget_tokens is not None:
        expected = max(1, min(expected, ask.output_budget_tokens))
    return expected


def work_of(
    ask: Ask, hit_tokens: int, decode_tokens: int, kv_tokens_total: int | None, shared_kv_tokens: int = 0
) -> Work:
    """What a request will occupy, with the expected (not the permitted) output.

    A hit never saves the last token: the engine computes at least one to have logits.
    """
    kv_tokens = ask.input_tokens + decode_tokens
    if kv_tokens_total is not None:
        kv_tokens = min(kv_tokens, kv_tokens_total)
    return Work(
        prefill_tokens=max(1, ask.input_tokens - hit_tokens),
        decode_tokens=decode_tokens,
        kv_tokens=kv_tokens,
        shared_kv_tokens=min(shared_kv_tokens, kv_tokens),
    )


def room_of(
    fleet: Fleet,
    site: str,
    heard: Heard,
    load: Load,
    now_ms: float,
    knobs: Knobs,
    done_tokens: float,
    soon_tokens: float,
    kv_ahead: float,
) -> Room:
    """Room of an instance: its limits less what is booked and what others persistently run there.

    Of the booked prefill, `done_tokens` must have been computed by now; less than `soon_tokens` is as good as none.
    Of its KV a share of `kv_ahead` may be booked beyond what there is: that waits in the engine.

    Where nobody knows the KV capacity, sequences alone judge, and few of them (`unknown_kv_sequences`); the KV room
    said is then the longest context for each of those, a number that never decides.
    """
    report = heard.report
    declared = fleet.sites[site].instances.get(report.instance)
    sequences_max = report.max_sequences
    if sequences_max is None:
        sequences_max = declared.max_sequences if declared is not None else knobs.unknown_kv_sequences
    total = report.kv_tokens_total
    if total is None and declared is not None and declared.kv_tokens > 0:
        total = declared.kv_tokens
    if total is None:
        sequences_max = min(sequences_max, knobs.unknown_kv_sequences)
    sequences = max(0, int(load.places(sequences_max)) - load.sequences - load.foreign_sequences)
    state = load.breaker.state(now_ms, knobs)
    if state != "closed":
        sequences = min(sequences, 1) if state == "half_open" and not load.breaker.trial else 0
    if total is None:
        longest = report.max_model_len
        if longest is None:
            longest = fleet.models[report.model].max_model_len if report.model in fleet.models else 0
        kv_tokens = sequences * longest
    else:
        kv_tokens = max(0, int(total * (1.0 + kv_ahead) - load.kv_tokens_expected - load.foreign_kv_tokens))
    ahead = load.prefill_tokens - done_tokens
    return Room(
        prefill_tokens=max(0, int(int(load.lookahead(knobs) * report.token_budget) - ahead)),
        idle=ahead <= soon_tokens,
        sequences=sequences,
        kv_tokens=kv_tokens,
        empty=load.sequences == 0 and load.foreign_sequences == 0,
    )


def considered(candidates: Sequence[Candidate], chosen: Candidate | None) -> tuple[Considered, ...]:
    """The reasons of a decision, for `explain` and for tests."""
    return tuple(
        Considered(
            name=c.name,
            out=c.out or (f"lacks_{c.lacks}" if c.lacks else ""),
            terms=c.terms,
            chosen=c is chosen,
        )
        for c in candidates
    )
