"""One model's instances as columns, so that a decision costs vector operations and not a loop over instances.

Decides nothing: it mirrors reports, bookings and what was learned, row by row when one of them changed. What depends
on the request's origin (routable, adapter, version) is kept per such origin, and asked of `eligibility` once per
change, so that this filter and everybody else's stay the same one. Refuses to know requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tokenfleet.eligibility import FRESH_MS, Heard, instance_out
from tokenfleet.fleet import Fleet
from tokenfleet.tokenpilot.predictor import Model
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import Load
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.request import Ask

_INFINITY, _UNKNOWN = float("inf"), float("nan")
Column = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]

#: why an instance is out, by code; 0 is not out
REASONS = (
    "",
    "declared_elsewhere",
    "zone_mismatch",
    "other_version",
    "no_adapter",
    "not_routable",
    "stale",
    "draining",
    "not_ready",
    "excluded",
    "no_endpoint",
    "too_long",
    "kv_too_small",
    "breaker",
)
CODE = {reason: code for code, reason in enumerate(REASONS)}
#: columns by what changes them: a report; a booking, a breaker, time; what was learned
_REPORTED = ("token_budget", "kv_total", "kv_known", "model_len", "rate", "reachable")
_BOOKED = (
    "heard_ms", "sequences", "prefill_tokens", "done_max", "pairs", "kv_tokens", "lookahead_tokens", "anchor_ms",
    "tpot_seen_ms", "warmth", "booked_ms", "breaker",
)  # fmt: skip
_LEARNED = (
    "delay_ms", "token_ms", "pair_ms", "step_ms", "kv_ms", "tpot_base_ms", "tpot_sequence_ms", "tpot_kv_ms",
    "tpot_prefill_ms", "slowness",
)  # fmt: skip
#: what scorers need of all these together: worked out per row when one of them changes, not per decision
_DERIVED = (
    "running", "decoders", "kv_booked", "kv_left", "places_left", "step_room", "kv_read", "step_cost_ms", "half_step",
    "per_token_ms", "queue_token_ms", "prefill_least_one", "tpot_alone_ms", "full_bucket", "soon_tokens",
)  # fmt: skip
_COLUMNS = (*_REPORTED, *_LEARNED, *_BOOKED, *_DERIVED)
_LEARNED_AT, _BOOKED_AT = len(_REPORTED), len(_REPORTED) + len(_LEARNED)
#: origins remembered (zone, adapter, version)
_ORIGINS_MAX = 256


class Board:
    """Columns by name; every row is an instance, in order of names."""

    heard_ms: Column
    sequences: Column
    prefill_tokens: Column
    #: of it, at most so much is computed
    done_max: Column
    pairs: Column
    kv_tokens: Column
    token_budget: Column
    #: infinite where unknown
    kv_total: Column
    kv_known: Column
    model_len: Column
    lookahead_tokens: Column
    #: since when the engine has computed at what is booked
    anchor_ms: Column
    #: declared or observed prefill rate, tokens/s; NaN: unknown
    rate: Column
    delay_ms: Column
    token_ms: Column
    pair_ms: Column
    step_ms: Column
    kv_ms: Column
    tpot_base_ms: Column
    tpot_sequence_ms: Column
    tpot_kv_ms: Column
    tpot_prefill_ms: Column
    #: learned time per output token, whatever it depends on; NaN: none seen
    tpot_seen_ms: Column
    #: share of requests that may go there as to any other: below 1 for an instance that began a moment ago
    warmth: Column
    #: last booking made there; and learned prefill time over what its kind of hardware was said to take
    booked_ms: Column
    slowness: Column
    reachable: Column
    breaker: Column
    #: sequences there, foreign ones included; of them, those that decode
    running: Column
    decoders: Column
    #: KV tokens booked or foreign, and what is left of what may be booked
    kv_booked: Column
    kv_left: Column
    #: sequences that it can take, its breaker's word included
    places_left: Column
    #: prompt tokens per step; KV tokens that a step's decodes read; what a step costs beside its tokens
    step_room: Column
    kv_read: Column
    step_cost_ms: Column
    #: half of the step that is under way
    half_step: Column
    #: time per prompt token, and per token of the prefill that is booked, its attention included
    per_token_ms: Column
    queue_token_ms: Column
    #: `prefill_tokens`, to be divided by
    prefill_least_one: Column
    #: time per output token without any prefill beside it
    tpot_alone_ms: Column
    #: `predictor.bucket` of how full of decodes it is
    full_bucket: Column
    #: less prefill than that is as good as none
    soon_tokens: Column

    def __init__(self, fleet: Fleet, site: str, knobs: Knobs, kv_ahead: float = 0.0) -> None:
        self.fleet, self.site, self.knobs = fleet, site, knobs
        #: share of the KV capacity that may be booked beyond it
        self.kv_ahead = kv_ahead
        self.names: list[str] = []
        self.row: dict[str, int] = {}
        self.heards: list[Heard] = []
        self.hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._data: npt.NDArray[np.float64] = np.zeros((len(_COLUMNS), 0))
        self._origins: dict[tuple[str, str, str], Codes] = {}
        self._asks: dict[tuple[str, str, str], Ask] = {}
        self._statics: list[object] = []
        #: of each row, the report and the coefficients' lists that it shows, and these coefficients
        self._reports: list[CapacityReported | None] = []
        self._learned_ttft: list[tuple[list[float] | None, Sequence[float]]] = []
        self._learned_tpot: list[tuple[list[float] | None, Sequence[float]]] = []
        #: of each row: KV tokens that may be booked, sequences that it takes
        self._limits: list[tuple[float, float]] = []
        #: row → bit of the prefix index
        self.numbers: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        #: nothing at all runs there
        self.empty: Mask = np.zeros(0, np.bool_)
        #: instances that time alone changes: their breaker is not simply closed, or they began a moment ago
        self.watched: set[str] = set()
        #: instances without an address, whose breaker blocks them, that began a moment ago
        self.unreachable: set[str] = set()
        self.broken: set[str] = set()
        self.cold: set[str] = set()
        #: no prompt below this is too long for any of them, tokens
        self.fits_all_tokens = np.inf
        self._usual_slowness: float | None = None
        #: none was heard before this
        self._oldest_ms = -_INFINITY
        #: instances that changed since they were mirrored
        self.dirty: set[str] = set()

    def lay_out(self, names: Iterable[str]) -> None:
        """Other instances than before: every row must be set anew."""
        self.names = sorted(names)
        self.row = {name: n for n, name in enumerate(self.names)}
        self.heards = [None] * len(self.names)  # type: ignore[list-item]  # set before anything is read
        self._data = np.zeros((len(_COLUMNS), len(self.names)))
        for n, column in enumerate(_COLUMNS):
            setattr(self, column, self._data[n])
        digests = [blake2b(name.encode(), digest_size=8).digest() for name in self.names]
        self.hashes = np.frombuffer(b"".join(digests), np.uint64)
        self._origins, self._asks = {}, {}
        self._statics = [None] * len(self.names)
        self._reports = [None] * len(self.names)
        self._learned_ttft = [(None, ())] * len(self.names)
        self._learned_tpot = [(None, ())] * len(self.names)
        self._limits = [(0.0, 0.0)] * len(self.names)
        self.numbers = np.zeros(len(self.names), np.intp)
        self.empty = np.zeros(len(self.names), np.bool_)
        self.watched, self.dirty = set(), set()
        self.unreachable, self.broken, self.cold = set(), set(), set()
        self.fits_all_tokens, self._usual_slowness = np.inf, None
        self._oldest_ms = -_INFINITY

    def set(self, name: str, heard: Heard, load: Load, model: Model, number: int, now_ms: float) -> None:
        """Mirror one instance: what has not changed since the last time is left as it is."""
        row, report, knobs = self.row[name], heard.report, self.knobs
        self.heards[row] = heard
        if report is not self._reports[row]:
            self._reports[row] = report
            self._report(row, name, heard, number)
        breaker, cap = load.breaker, _INFINITY
        blocked, warmth = False, 1.0 if load.cold_since_ms is None else load.warmth(now_ms)
        if breaker.opened_ms is not None:
            state = breaker.state(now_ms, knobs)
            blocked = breaker.blocks(now_ms, knobs)
            if state != "closed":
                cap = 1.0 if state == "half_open" and not breaker.trial else 0.0
        if breaker.opened_ms is not None or warmth < 1.0:
            self.watched.add(name)
            for there, those in ((blocked, self.broken), (warmth < 1.0, self.cold)):
                if there:
                    those.add(name)
                else:
                    those.discard(name)
        elif name in self.watched:
            for those in (self.watched, self.broken, self.cold):
                those.discard(name)
        # Learning makes new lists; those of equal instances may be the same.
        multiples, ttft = self._learned_ttft[row]
        if multiples is not model.ttft.multiples:
            ttft = model.ttft.coefficients()
            self._learned_ttft[row] = model.ttft.multiples, ttft
            self._data[_LEARNED_AT : _LEARNED_AT + len(ttft), row] = ttft
            self.slowness[row] = model.slowness
            self._usual_slowness = None
        multiples, tpot = self._learned_tpot[row]
        if multiples is not model.tpot.multiples:
            tpot = model.tpot.coefficients()
            self._learned_tpot[row] = model.tpot.multiples, tpot
            self._data[_LEARNED_AT + len(ttft) : _BOOKED_AT - 1, row] = tpot
        _, token_ms, pair_ms, step_ms, kv_ms = ttft
        tpot_base, tpot_sequence, tpot_kv, _ = tpot
        budget, pairs, prefill, sequences = report.token_budget, load.pairs, load.prefill_tokens, load.sequences
        foreign, foreign_kv = load.foreign_sequences, load.foreign_kv_tokens
        kv_tokens = load.kv_tokens_expected
        kv_most, sequences_max = self._limits[row]
        places = sequences_max if load.paced is None else load.places(sequences_max)
        running, kv_booked = sequences + foreign, kv_tokens + foreign_kv
        decoders, kv_read = load.decoding + foreign, load.decoding_kv_tokens * load.kv_scale + foreign_kv
        step_cost_ms = step_ms + kv_ms * kv_read
        step_room = max(budget / 8.0, budget - decoders)
        per_token_ms = token_ms + (step_cost_ms + token_ms * decoders) / step_room
        self.empty[row] = not running
        self._data[_BOOKED_AT:, row] = (
            heard.heard_ms,
            sequences,
            prefill,
            load.done_max(budget),
            pairs,
            kv_tokens,
            int(load.lookahead(knobs) * budget),
            load.anchor_ms,
            _UNKNOWN if load.tpot_ms is None else load.tpot_ms,
            warmth,
            load.booked_ms,
            blocked,
            running,
            decoders,
            kv_booked,
            max(0.0, kv_most - kv_tokens - foreign_kv),
            min(max(places - sequences - foreign, 0.0), cap),
            step_room,
            kv_read,
            step_cost_ms,
            0.5 if decoders > 0 else 0.0,
            per_token_ms,
            per_token_ms + pair_ms * pairs / max(1.0, prefill),
            max(1.0, prefill),
            # Beside all that is booked, begun or not: they will decode beside it.
            tpot_base + tpot_sequence * (running + 1.0) + tpot_kv * (load.kv_tokens * load.kv_scale + foreign_kv),
            min(4, int(5.0 * decoders / max(1.0, sequences_max))),
            knobs.feedback_ms / per_token_ms,
        )

    def teach(self, taught: Mapping[str, Model]) -> None:
        """Mirror instances that were given the same coefficients of prefill, prior and multiples: all rows at once.

        Their multiples are one list.
        """
        row_of = self.row
        known = [row_of[name] for name in taught if name in row_of]
        if not known:
            return
        model = next(iter(taught.values()))
        found = model.ttft.coefficients()
        learned = model.ttft.multiples, found
        for row in known:
            self._learned_ttft[row] = learned
        rows = np.array(known)
        self._data[_LEARNED_AT : _LEARNED_AT + len(found), rows] = np.array(found)[:, None]
        self.slowness[rows] = model.slowness
        self._usual_slowness = None
        _, token_ms, pair_ms, step_ms, kv_ms = found
        step_cost_ms = step_ms + kv_ms * self.kv_read[rows]
        per_token_ms = token_ms + (step_cost_ms + token_ms * self.decoders[rows]) / self.step_room[rows]
        self.step_cost_ms[rows] = step_cost_ms
        self.per_token_ms[rows] = per_token_ms
        attention_ms = pair_ms * self.pairs[rows] / self.prefill_least_one[rows]
        self.queue_token_ms[rows] = per_token_ms + attention_ms
        self.soon_tokens[rows] = self.knobs.feedback_ms / per_token_ms

    def _report(self, row: int, name: str, heard: Heard, number: int) -> None:
        report, knobs = heard.report, self.knobs
        declared = self.fleet.sites[self.site].instances.get(name)
        sequences_max = report.max_sequences
        if sequences_max is None:
            sequences_max = declared.max_sequences if declared is not None else knobs.unknown_kv_sequences
        total = report.kv_tokens_total
        if total is None and declared is not None and declared.kv_tokens > 0:
            total = declared.kv_tokens
        if total is None:
            sequences_max = min(sequences_max, knobs.unknown_kv_sequences)
        rate = prefill_rate(self.fleet, self.site, heard)
        kv_total = np.inf if total is None else float(total)
        model_len = np.inf if report.max_model_len is None else float(report.max_model_len)
        self.numbers[row] = number
        self._limits[row] = kv_total * (1.0 + self.kv_ahead), float(sequences_max)
        self.fits_all_tokens = min(self.fits_all_tokens, kv_total, model_len)
        if report.endpoint_url:
            self.unreachable.discard(name)
        else:
            self.unreachable.add(name)
        self._data[:_LEARNED_AT, row] = (
            report.token_budget,
            kv_total,
            report.kv_tokens_total is not None,
            model_len,
            np.nan if rate is None else rate,
            bool(report.endpoint_url),
        )
        static = (
            report.ready, report.draining, report.zone, report.model, report.version, report.routable_from,
            report.adapters, report.instance, report.site,
        )  # fmt: skip
        if static != self._statics[row]:
            self._statics[row] = static
            for origin, codes in self._origins.items():
                codes[row] = self._code(row, self._asks[origin])

    def eligible(self, ask: Ask, excluded: Sequence[str], now_ms: float) -> Codes:
        """Why each is out, as `eligibility.instance_out` says it; to be read only."""
        origin = (ask.entry_zone, ask.adapter, ask.version)
        known = self._origins.get(origin)
        if known is None:
            if len(self._origins) >= _ORIGINS_MAX:
                self._origins, self._asks = {}, {}
            known = np.array([self._code(row, ask) for row in range(len(self.names))], np.int8)
            self._origins[origin], self._asks[origin] = known, ask
        any_stale = now_ms - self._oldest_ms > FRESH_MS
        if any_stale:
            self._oldest_ms = float(self.heard_ms.min()) if self.names else now_ms
            any_stale = now_ms - self._oldest_ms > FRESH_MS
        if not any_stale and not excluded:
            return known
        codes = known.copy()
        if any_stale:
            stale = now_ms - self.heard_ms > FRESH_MS
            codes[stale & ((codes == 0) | (codes == CODE["draining"]) | (codes == CODE["not_ready"]))] = CODE["stale"]
        for name in excluded:
            row = self.row.get(name)
            if row is not None and codes[row] == 0:
                codes[row] = CODE["excluded"]
        return codes

    def _code(self, row: int, ask: Ask) -> int:
        heard = self.heards[row]
        return CODE[instance_out(self.fleet, heard, ask, heard.heard_ms)]

    def usual_slowness(self) -> float:
        """The median of `slowness`."""
        if self._usual_slowness is None:
            count = len(self.names)
            low, high = (count - 1) // 2, count // 2
            ordered = np.partition(self.slowness, (low, high))
            self._usual_slowness = float((ordered[low] + ordered[high]) / 2.0)
        return self._usual_slowness

    def ties(self, request_id: str) -> Column:
        """A number in [0, 1) per row, from names alone: replicas agree and no instance is first by its place."""
        seed = np.frombuffer(blake2b(request_id.encode(), digest_size=8).digest(), np.uint64)[0]
        mixed = (self.hashes ^ seed) * _MIX
        mixed ^= mixed >> _29
        mixed *= _MIX
        fractions: Column = (mixed >> _11) * 2.0**-53
        return fractions


#: an odd 64-bit constant that spreads bits (splitmix64's)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_11, _29 = np.uint64(11), np.uint64(29)


def prefill_rate(fleet: Fleet, site: str, heard: Heard) -> float | None:
    """Prompt tokens per second: what the agent says (observed, or declared), else the fleet file, else unknown."""
    report = heard.report
    if report.prefill_tokens_per_s is not None and report.prefill_tokens_per_s > 0:
        return report.prefill_tokens_per_s
    declared = fleet.sites[site].instances.get(report.instance)
    if declared is not None and declared.prefill_tokens_per_s > 0:
        return declared.prefill_tokens_per_s
    return None
