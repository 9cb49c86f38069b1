"""What a site would cost a request: expected wait, own compute, network and money, in milliseconds.

Decides numbers only; which site is taken is the policy's affair. A site's pool (one model version) is taken as a
fluid: prefill queues for the summed rate of its ready instances; sequences and KV free as requests end, at the pace
that was seen there (Little's law). What was asked, held and booked since the last report is counted at once, so that
a burst between two reports is seen. Unknown is never attractive: an unknown rate counts as the slowest known, an
unknown distance as far, an old report adds its age, and an unknown price is the dearest. Refuses to know who asks and
how the answer travels.
"""

from collections.abc import Sequence

import msgspec

from tokenfleet.eligibility import UNKNOWN_RTT_MS, Heard
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.state import UNKNOWN_PREFILL_TOKENS_PER_S, Load, Pace, Path, Road, State
from tokenfleet_schemas.request import Ask

#: a report this old is as good as a fresh one: agents report every second
CURRENT_MS = 2_500.0
#: a probe older than this no longer says that a path is short
PROBED_MS = 45_000.0
#: a bandwidth measured longer ago makes no path fast
BANDWIDTH_MS = 300_000.0
#: what a transfer gets where nobody measured it, bytes/s
UNKNOWN_BYTES_PER_S = 12_500_000.0
#: what a lost packet costs beside the round trip: the initial retransmission time-out of TCP (RFC 6298), ms
RETRANSMIT_MS = 1_000.0
#: price of compute that a prefill burns, in its own time: takes room from everybody behind it (as TokenPilot's mu)
BURN_PRICE = 5.0
#: prefill backlog that counts as a full site, ms of the pool's rate
BACKLOG_FULL_MS = 2_000.0
#: bytes of an answer per token as it is streamed (an SSE chunk of a chat completion)
STREAM_BYTES_PER_TOKEN = 200.0


class Pool(msgspec.Struct):
    """A site's ready instances of one model version, summed; None: unknown."""

    instances: int = 0
    rate: float | None = None
    #: of one instance, the mean
    rate_one: float | None = None
    sequences_max: int = 0
    kv_total: int | None = None
    kv_used: float = 0.0
    #: sequences that run or wait there, as reported
    sequences: int = 0
    token_budget: int = 0
    #: of the oldest of its last reports, our clock, ms
    heard_ms: float = 0.0

    @property
    def rate_guess(self) -> float:
        """Its rate, or what is assumed where nobody says one, tokens/s."""
        return self.rate or UNKNOWN_PREFILL_TOKENS_PER_S * max(1, self.instances)


def pool_of(fleet: Fleet, ready: Sequence[Heard]) -> Pool:
    """Sum up the ready instances of a site."""
    pool = Pool(instances=len(ready))
    rates: list[float] = []
    kv_known = bool(ready)
    kv_total = 0
    oldest_ms = float("inf")
    for heard in ready:
        report = heard.report
        own = fleet.sites[report.site].instances.get(report.instance)
        rate = report.prefill_tokens_per_s or (own.prefill_tokens_per_s if own is not None else 0.0)
        if rate and rate > 0:
            rates.append(rate)
        pool.sequences_max += report.max_sequences or (own.max_sequences if own is not None else 1)
        pool.sequences += (report.running or 0) + (report.waiting or 0)
        total = report.kv_tokens_total or (own.kv_tokens if own is not None else 0)
        kv_known = kv_known and total > 0
        kv_total += total
        pool.kv_used += (report.kv_usage or 0.0) * total
        pool.token_budget += report.token_budget
        oldest_ms = min(oldest_ms, heard.heard_ms)
    pool.heard_ms = oldest_ms if ready else 0.0
    pool.kv_total = kv_total if kv_known else None
    if rates:
        # An instance that says no rate is taken for the slowest of its pool.
        pool.rate = sum(rates) + min(rates) * (len(ready) - len(rates))
        pool.rate_one = pool.rate / len(ready)
    return pool


class Site(msgspec.Struct):
    """What is known of one site for one request."""

    name: str
    place: int
    pool: Pool
    load: Load | None
    rtt_ms: float
    #: prompt tokens that are probably cached there
    hit_tokens: int = 0
    #: sequences on it, and prompt tokens asked or assigned and not computed yet
    there: float = 0.0
    backlog_tokens: float = 0.0
    terms: dict[str, float] = {}

    @property
    def cost_ms(self) -> float:
        """What is compared."""
        return self.terms["cost_ms"]


def path_rtt_ms(path: Path | None, declared: float | None, now_ms: float) -> float:
    """Round trip, ms: measured while the probe is fresh, else the longer of declared and last measured.

    Lost probes add what their repetition costs. Without either nobody knows: far.
    """
    if path is None or path.rtt_ms is None:
        known = UNKNOWN_RTT_MS if declared is None else declared
    elif now_ms - path.heard_ms <= PROBED_MS:
        known = path.rtt_ms
    else:
        known = max(path.rtt_ms, UNKNOWN_RTT_MS if declared is None else declared)
    if path is not None and path.loss and now_ms - path.heard_ms <= PROBED_MS:
        known += min(path.loss, 0.9) / (1.0 - min(path.loss, 0.9)) * RETRANSMIT_MS
    return known


def rtt_ms(fleet: Fleet, state: State, one: str, other: str, now_ms: float) -> float:
    """Round trip between two sites, ms, by whichever end measured it last."""
    if one == other:
        return 0.0
    if not state.paths:  # nobody probes
        declared = fleet.rtt_ms(one, other)
        return UNKNOWN_RTT_MS if declared is None else declared
    there, back = state.paths.get((one, other)), state.paths.get((other, one))
    path = there if back is None or (there is not None and there.heard_ms >= back.heard_ms) else back
    return path_rtt_ms(path, fleet.rtt_ms(one, other), now_ms)


def bytes_per_s(state: State, to: str, of: str, now_ms: float) -> float:
    """What a transfer between two sites gets, bytes/s: as measured in its direction, else in the other, else assumed.

    What was measured long ago makes no path faster than one of which nobody knows anything.
    """
    if not state.paths:
        return UNKNOWN_BYTES_PER_S
    for path in (state.paths.get((to, of)), state.paths.get((of, to))):
        if path is not None and path.bytes_per_s:
            known = max(1.0, path.bytes_per_s)
            return known if now_ms - path.bytes_ms <= BANDWIDTH_MS else min(known, UNKNOWN_BYTES_PER_S)
    return UNKNOWN_BYTES_PER_S


def transfer_ms(state: State, ask: Ask, site: str, now_ms: float) -> float:
    """How long the body takes on the wire before anything can begin, ms."""
    if ask.entry == site:
        return 0.0
    return 1000.0 * ask.request_bytes / bytes_per_s(state, site, ask.entry, now_ms)


def stream_tpot_ms(state: State, ask: Ask, site: str, now_ms: float) -> float:
    """The pace at which the way back alone would bring tokens, ms each: a stream is no faster."""
    if ask.entry == site:
        return 0.0
    return 1000.0 * STREAM_BYTES_PER_TOKEN / bytes_per_s(state, ask.entry, site, now_ms)


def shares(site: Site) -> dict[str, float]:
    """Shares of a site's room that are taken; `load` is the largest. A site that holds anything is above 1.

    A number that nobody knows makes no term.
    """
    pool, load = site.pool, site.load
    terms: dict[str, float] = {}
    if pool.sequences_max:
        terms["sequences"] = site.there / pool.sequences_max
    if pool.kv_total:
        terms["kv"] = kv_taken(pool, load) / pool.kv_total
    if load is not None and pool.rate:
        terms["prefill"] = site.backlog_tokens / (pool.rate * BACKLOG_FULL_MS / 1000.0)
    if load is not None and load.held:
        terms["held"] = 1.0 + (load.held_tokens / pool.rate if pool.rate else float(len(load.held)))
    terms["load"] = max(terms.values(), default=0.0)
    return terms


def sequences_there(pool: Pool, load: Load | None, now_ms: float) -> float:
    """Sequences on a site: ours, which we know before its agent does, and what others run beside them."""
    if load is None:
        return float(pool.sequences)
    ours = len(load.booked) + len(load.asked)
    return float(ours + max(0, pool.sequences - load.lately_booked(now_ms)))


def count(site: Site, now_ms: float) -> None:
    """Fill in what is on a site now."""
    load = site.load
    site.there = sequences_there(site.pool, load, now_ms)
    site.backlog_tokens = load.backlog(now_ms) + load.asked_tokens if load is not None else 0.0


def wait_ms(site: Site, pace: Pace, own_kv: float, now_ms: float) -> dict[str, float]:
    """Expected time until a newcomer can begin there: the longest of prefill, sequence and KV queues, ms."""
    pool, load = site.pool, site.load
    rate = pool.rate_guess
    there = site.there
    if pool.token_budget:
        # Sequences that decode take their token of every step's budget.
        rate *= max(0.1, 1.0 - there / pool.token_budget)
    queued_tokens, queued, queued_kv = 0.0, 0, 0.0
    if load is not None:
        queued_tokens = site.backlog_tokens + load.held_tokens
        queued = len(load.held)
        queued_kv = load.asked_tokens + load.held_tokens + queued * pace.decode_tokens
    found = {"prefill_ms": 1000.0 * queued_tokens / rate}
    slots = max(1, pool.sequences_max)
    # Asked for every site of every request: comparisons, which cost a third of `max`.
    beyond = there + queued + 1.0 - slots
    found["slot_ms"] = beyond * pace.stay_ms / slots if beyond > 0.0 else 0.0
    if pool.kv_total:
        short = kv_taken(pool, load) + queued_kv + own_kv - pool.kv_total
        found["kv_ms"] = short * pace.stay_ms / pool.kv_total if short > 0.0 else 0.0
    if load is not None and load.held:
        # What its TokenPilot told the last one that it holds is known better there than here.
        found["told_ms"] = max(0.0, load.told_wait_ms - (now_ms - load.told_ms))
    found["wait_ms"] = max(found.values())
    # Whatever an old report hides has had that long to gather.
    age_ms = now_ms - pool.heard_ms - CURRENT_MS
    found["age_ms"] = age_ms if age_ms > 0.0 else 0.0
    return found


def kv_taken(pool: Pool, load: Load | None) -> float:
    """KV tokens that are taken: as reported, or booked by us, whichever is more."""
    if load is None or load.booked_kv_tokens <= pool.kv_used:
        return pool.kv_used
    return float(load.booked_kv_tokens)


def slack_of(road: Road, pace: Pace, now_ms: float) -> float | None:
    """Time left until the first token is late, ms; None: no objective."""
    ask, elapsed = road.ask, now_ms - road.received_ms
    if ask.ttft_ms is not None:
        return ask.ttft_ms - elapsed
    if ask.e2e_ms is not None:
        return ask.e2e_ms - elapsed - pace.decode_tokens * pace.tpot_ms
    return None


def objective_ms(ask: Ask) -> float:
    """What a gain is measured against: the promise, or the patience where there is none, ms."""
    return ask.ttft_ms or ask.e2e_ms or ask.patience_ms


def cost(state: State, road: Road, site: Site, pace: Pace, dearness: float, now_ms: float) -> None:
    """Fill in a site's terms; `cost_ms` without the price of being late, which depends on the others."""
    ask = road.ask
    own_tokens = max(1, ask.input_tokens - site.hit_tokens)
    rate_one = site.pool.rate_one or UNKNOWN_PREFILL_TOKENS_PER_S
    own_ms = 1000.0 * own_tokens / rate_one
    waits = wait_ms(site, pace, ask.input_tokens + pace.decode_tokens, now_ms)
    # The question to its TokenPilot and the request itself each take a round trip before the first token.
    network_ms = 2.0 * site.rtt_ms + transfer_ms(state, ask, site.name, now_ms)
    ttft_ms = waits["wait_ms"] + waits["age_ms"] + own_ms + network_ms
    slow_ms = 0.0
    if ask.tpot_ms is not None:
        slower_ms = pace.tpot_ms + pace.tpot_spread_ms - ask.tpot_ms
        if slower_ms > 0.0:
            slower_ms *= pace.believed(now_ms, idle=site.load is None or site.load.idle)
        else:
            slower_ms = 0.0
        slow_ms = pace.decode_tokens * max(slower_ms, stream_tpot_ms(state, ask, site.name, now_ms) - ask.tpot_ms)
    terms = site.terms
    terms.update(waits)
    terms["own_ms"] = own_ms
    terms["network_ms"] = network_ms
    terms["prefix_hit_tokens"] = float(site.hit_tokens)
    terms["ttft_ms"] = ttft_ms
    terms["slow_ms"] = slow_ms
    terms["cost_ms"] = ttft_ms + slow_ms + BURN_PRICE * own_ms * dearness


def dearness(fleet: Fleet, sites: Sequence[Site]) -> dict[str, float]:
    """What a GPU hour costs at each site over the cheapest; where nobody says a price, all are 1.

    A site without a price among sites that have one is taken for the dearest of them.
    """
    prices = {site.name: fleet.sites[site.name].gpu_hour_price for site in sites}
    known = [price for price in prices.values() if price is not None and price > 0]
    if not known:
        return dict.fromkeys(prices, 1.0)
    low, high = min(known), max(known)
    return {name: (price if price is not None and price > 0 else high) / low for name, price in prices.items()}
