"""Which instance: filters, a scorer and a picker, each replaceable alone; and what room an instance has.

Decides from one request, the last reports and the bookings; keeps nothing and changes nothing. A filter gives the
reason why an instance cannot serve the request now; a scorer gives terms in milliseconds, of which `total_ms` is
compared; a picker takes the best that has room and is worth using. Ties break by a hash of (request id, instance), so
that replicas agree and no instance is first by its name (P03). Refuses to know holds, offers and offices.

Least estimated work: the booked prefill that has not started over the instance's prefill rate, slowed by the
decoding sequences, which take their token of every step's budget (chunked prefill, Sarathi-Serve, arXiv:2403.02310).
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from tokenfleet.eligibility import Heard, fraction, instance_out
from tokenfleet.fleet import Fleet
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import Load
from tokenfleet_schemas.placement import Considered, PlacementRequested, Work
from tokenfleet_schemas.request import Ask

Lack = Literal["", "sequences", "kv_tokens", "prefill_tokens"]


class Room(msgspec.Struct, frozen=True):
    """What an instance can take now."""

    prefill_tokens: int
    #: nothing booked waits for prefill there
    idle: bool
    sequences: int
    kv_tokens: int
    #: nothing at all is booked there
    empty: bool = False

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
        if work.kv_tokens > self.kv_tokens and not self.empty:
            return "kv_tokens"
        if work.prefill_tokens > self.prefill_tokens and not self.idle:
            return "prefill_tokens"
        return ""


NO_ROOM = Room(0, False, 0, 0)


class Candidate(msgspec.Struct):
    """One instance under consideration."""

    name: str
    heard: Heard
    load: Load
    room: Room
    #: tokens of the prompt that are probably cached there
    hit_tokens: int
    work: Work
    #: prompt tokens per second; None: unknown
    rate: float | None
    #: why it cannot serve the request; empty when it can
    out: str = ""
    lacks: Lack = ""
    terms: dict[str, float] = {}

    @property
    def total_ms(self) -> float:
        """Estimated time to the first token there."""
        return self.terms["total_ms"]


class Situation(msgspec.Struct, frozen=True):
    """What a decision is about, beside the candidates."""

    fleet: Fleet
    request: PlacementRequested
    now_ms: float
    knobs: Knobs
    #: time left until the first token is late; None: no objective
    slack_ms: float | None
    #: place it now if anything has room: it was released, or nobody else decides
    force: bool = False


class Filter(Protocol):
    """Says why an instance cannot serve the request now, in one word of a closed set; empty when it can."""

    def __call__(self, situation: Situation, candidate: Candidate) -> str: ...


class Scorer(Protocol):
    """Fills `terms` of all candidates that are not out; lower `total_ms` is better."""

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> None: ...


class Picker(Protocol):
    """Takes one of the scored candidates, or none when waiting is better."""

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None: ...


# ---------------------------------------------------------------------------------------------- filters


def usable(situation: Situation, candidate: Candidate) -> str:
    """Ready, fresh, exact version, adapter, routable, not draining, not excluded: as every other part filters."""
    request = situation.request
    return instance_out(situation.fleet, candidate.heard, request.ask, situation.now_ms, request.excluded)


def reachable(situation: Situation, candidate: Candidate) -> str:
    """An instance that says no address cannot be dispatched to."""
    return "" if candidate.heard.report.endpoint_url else "no_endpoint"


def long_enough(situation: Situation, candidate: Candidate) -> str:
    """The prompt and one token must fit the model's length and the instance's whole KV."""
    report, tokens = candidate.heard.report, situation.request.ask.input_tokens
    if report.max_model_len is not None and tokens >= report.max_model_len:
        return "too_long"
    if report.kv_tokens_total is not None and tokens >= report.kv_tokens_total:
        return "kv_too_small"
    return ""


def unbroken(situation: Situation, candidate: Candidate) -> str:
    """Its last outcomes do not forbid it."""
    return "breaker" if candidate.load.breaker.blocks(situation.now_ms, situation.knobs) else ""


FILTERS: tuple[Filter, ...] = (usable, reachable, long_enough, unbroken)


# ---------------------------------------------------------------------------------------------- scorer, picker


def least_work(situation: Situation, candidates: Sequence[Candidate]) -> None:
    """Wait (for the booked prefill ahead, or for a sequence to end) plus own uncached prefill, ms.

    An unknown rate counts as the slowest known of the pool: unknown is never fast.
    """
    known = [c.rate for c in candidates if c.rate is not None]
    fallback = min(known, default=situation.knobs.unknown_prefill_tokens_per_s)
    for c in candidates:
        rate = c.rate if c.rate is not None else fallback
        decoding = c.load.decoding + c.load.foreign_sequences
        share = max(0.1, 1.0 - decoding / max(1, c.heard.report.token_budget))
        per_token_ms = 1000.0 / (rate * share)
        wait_ms = max(c.load.prefill_tokens * per_token_ms, slot_ms(c))
        own_ms = c.work.prefill_tokens * per_token_ms
        c.terms = {
            "wait_ms": wait_ms,
            "own_ms": own_ms,
            "decoding": float(decoding),
            "prefix_hit_tokens": float(c.hit_tokens),
            "total_ms": wait_ms + own_ms,
        }


def slot_ms(candidate: Candidate) -> float:
    """Expected time until a sequence ends on a full instance: length × pace over the sequences that run there.

    Zero where sequences are left, and where no pace has been learned: then nobody knows, and prefill alone ranks.
    """
    load = candidate.load
    if candidate.room.sequences > 0 or load.tpot_ms is None:
        return 0.0
    return candidate.work.decode_tokens * load.tpot_ms / max(1, load.sequences + load.foreign_sequences)


def worth_waiting(situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best with room; none when it would be late there and the best of all, without room, is better.

    A request that was released (`force`) takes the best with room whatever it costs: its turn has come.
    """
    roomy = [c for c in candidates if not c.lacks]
    if not roomy:
        return None
    request_id = situation.request.ask.request_id
    best = min(roomy, key=lambda c: preference(request_id, c))
    if situation.force or situation.slack_ms is None or best.total_ms <= max(0.0, situation.slack_ms):
        return best
    return best if best.total_ms <= min(c.total_ms for c in candidates) else None


def preference(request_id: str, candidate: Candidate) -> tuple[float, float]:
    """Order of scored candidates; less than a tenth of a millisecond is no difference."""
    return round(candidate.total_ms, 1), fraction(request_id, candidate.name)


# ---------------------------------------------------------------------------------------------- numbers


def prefill_rate(fleet: Fleet, site: str, heard: Heard) -> float | None:
    """Prompt tokens per second: what the agent says (observed, or declared), else the fleet file, else unknown."""
    report = heard.report
    if report.prefill_tokens_per_s is not None and report.prefill_tokens_per_s > 0:
        return report.prefill_tokens_per_s
    declared = fleet.sites[site].instances.get(report.instance)
    if declared is not None and declared.prefill_tokens_per_s > 0:
        return declared.prefill_tokens_per_s
    return None


def work_of(ask: Ask, hit_tokens: int, decode_tokens: float, kv_tokens_total: int | None) -> Work:
    """What a request will occupy, with the expected (not the permitted) output.

    A hit never saves the last token: the engine computes at least one to have logits.
    """
    expected = max(1, round(decode_tokens))
    if ask.output_budget_tokens is not None:
        expected = max(1, min(expected, ask.output_budget_tokens))
    kv_tokens = ask.input_tokens + expected
    if kv_tokens_total is not None:
        kv_tokens = min(kv_tokens, kv_tokens_total)
    return Work(prefill_tokens=max(1, ask.input_tokens - hit_tokens), decode_tokens=expected, kv_tokens=kv_tokens)


def room_of(fleet: Fleet, site: str, heard: Heard, load: Load, now_ms: float, knobs: Knobs) -> Room:
    """Room of an instance: its limits less what is booked and what others persistently run there.

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
    sequences = max(0, sequences_max - load.sequences - load.foreign_sequences)
    state = load.breaker.state(now_ms, knobs)
    if state != "closed":
        sequences = min(sequences, 1) if state == "half_open" and not load.breaker.trial else 0
    if total is None:
        longest = report.max_model_len
        if longest is None:
            longest = fleet.models[report.model].max_model_len if report.model in fleet.models else 0
        kv_tokens = sequences * longest
    else:
        kv_tokens = max(0, total - load.kv_tokens - load.foreign_kv_tokens)
    return Room(
        prefill_tokens=max(0, int(knobs.lookahead_budgets * report.token_budget) - load.prefill_tokens),
        idle=load.prefill_tokens == 0,
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
