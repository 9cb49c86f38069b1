"""FleetMind's rules: which site is asked, and which held requests move.

Decides on values it is given and returns every candidate with its reasons. Filters fail closed
(`tokenfleet.eligibility`). A request belongs to the first home of its entry, or to the site that holds most of its
prompt (a conversation stays where its cache is); it is diverted when another site's cost (`costs`) is lower by a margin
that grows with what was promised: time that the promise does not miss is not worth a WAN. Local first as SkyWalker
(arXiv:2505.24095), with a comparison of costs as GORGO proposes instead of its trigger "pending". Between others of
like cost a hash of the request id decides in proportion to their spare rate, so that nobody herds and replicas agree.

The load ceiling is a hard filter against diversion to a site that is no home of the entry; homes are there for its
requests and share their queues by cost. The last allowed site is asked all the same, and holds. Refuses to know how
the answers travel.
"""

from collections.abc import Collection, Sequence
from math import ceil, log
from typing import Protocol

import msgspec

from tokenfleet.eligibility import HOP_BASE_MS, fraction, no_site_reason
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind import costs
from tokenfleet.fleetmind.costs import Site
from tokenfleet.fleetmind.state import INFINITY, UNKNOWN_PREFILL_TOKENS_PER_S, Pace, Road, State
from tokenfleet.fleetmind.view import View
from tokenfleet_schemas.placement import Considered
from tokenfleet_schemas.request import Ask

#: a held request moves at most so often, and not before it has been held so long at its present site
MOVES_MAX = 2
DWELL_MS = 400.0
#: a diversion and a move must gain more than this part of the time that they leave
MARGIN_PART = 0.2
#: and more than this part of the time that was promised
MARGIN_PROMISE = 0.1
#: joining another site's queue must gain more than this part
MARGIN_QUEUED = 0.5
#: predictions are widened by this before they are called in time
SAFETY = 0.25
#: price of time by which the first token is late where another site would be in time (as TokenPilot's)
LATE_PRICE = 5.0
#: a conversation belongs where this part of its prompt more is cached than at home: where its last turn was. With a
#: larger part a conversation that was diverted for a turn went back with the next one, and away again
ANCHOR_PART = 0.05
#: costs closer than this share are alike
ALIKE = 0.1
#: price of own prefill against time left in the order of moves (3 to 10 give nearly the same), and the most time left
#: that matters, ms
OWN_PRICE = 3.0
SLACK_MAX_MS = 300_000.0
#: sites named with their figures in a message, the cheapest; the others with their names
SHORTLIST = 8


class Ranking(msgspec.Struct, frozen=True):
    """The site to ask, or the reason why there is none."""

    site: str
    #: `home`, `cache` (where its conversation is), `diverted`, `turn`
    why: str
    considered: tuple[Considered, ...]
    #: `turn`: the counter that this choice moves on
    turn: str = ""
    #: of `REASONS`, when there is no site
    reason: str = ""
    reset_ms: float = 0.0


def hop_ms(fleet: Fleet, state: State, entry: str, site: str, now_ms: float) -> float:
    """How long a TokenPilot may stay silent: 250 ms + 2 RTT; never less than the declared RTT says."""
    declared = fleet.rtt_ms(entry, site)
    return HOP_BASE_MS + 2 * max(costs.rtt_ms(fleet, state, entry, site, now_ms), declared or 0.0)


class Ranker(Protocol):
    """Chooses the site to ask for a request, or says why there is none."""

    def __call__(self, view: View, road: Road, now_ms: float, *, avoid: Collection[str] = ()) -> Ranking: ...


def rank(view: View, road: Road, now_ms: float, *, avoid: Collection[str] = ()) -> Ranking:
    """Choose the site to ask. `avoid` names sites that were asked in this round and stayed silent."""
    fleet, state, ask = view.fleet, view.state, road.ask
    ready, considered = view.eligible(ask, now_ms, road.excluded)
    if not ready:
        reason, reset_ms = no_site_reason(fleet, state.capacity, ask, now_ms, considered)
        return Ranking("", "", tuple(considered), reason=reason, reset_ms=reset_ms)
    sites = survey(view, road, ready, now_ms)
    # A breaker, not a ban: a site whose TokenPilot is silent is asked last, and first again when its time is over.
    left = [site for site in sites if site.name not in avoid]
    if not left:
        return Ranking("", "", _scored(considered, sites, ""), reason="unavailable", reset_ms=1_000.0)
    if fleet.policy.sites == "round-robin":
        heard = [site for site in left if not _silent(site, now_ms)] or left
        key = turn_key(ask.model, [site.name for site in heard])
        name = _turn(state.turns.get(key, 0), heard)
        return Ranking(name, "turn", _scored(considered, sites, name), key)
    chosen, why = choose(fleet, road, [site for site in left if not _silent(site, now_ms)] or left)
    return Ranking(chosen.name, why, _scored(considered, sites, chosen.name))


def survey(view: View, road: Road, names: Sequence[str], now_ms: float) -> list[Site]:
    """The figures of sites that may and can serve a request, in the order given."""
    fleet, state, ask = view.fleet, view.state, road.ask
    sites: list[Site] = []
    most_hit = ask.input_tokens - 1
    for place, name in enumerate(names):
        pool, _ = view.pool(ask, name, now_ms, road.excluded)
        distance_ms = costs.rtt_ms(fleet, state, ask.entry, name, now_ms)
        hit = max(0, min(road.hits[name], most_hit)) if name in road.hits else 0
        sites.append(Site(name, place, pool, state.loads.get((name, ask.model, ask.version)), distance_ms, hit))
    known = [site.pool.rate_one for site in sites if site.pool.rate_one]
    slowest = min(known) if known else None
    dear = costs.dearness(fleet, sites) if view.priced else None
    elsewhere: Pace | None = None
    in_time = False
    for site in sites:
        if site.pool.rate is None and slowest is not None:
            site.pool = msgspec.structs.replace(site.pool, rate=slowest * site.pool.instances, rate_one=slowest)
        costs.count(site, now_ms)
        site.terms = {
            "place": float(site.place),
            "rtt_ms": site.rtt_ms,
            "instances": float(site.pool.instances),
            **costs.shares(site),
        }
        pace = site.load.pace if site.load is not None else None
        if pace is None or not pace.seen:
            elsewhere = pace = elsewhere or state.pace_elsewhere(ask.model)
        costs.cost(state, road, site, pace, 1.0 if dear is None else dear[site.name], now_ms)
        site.terms["late_ms"] = late_ms = lateness_ms(road, site, pace, now_ms)
        in_time = in_time or late_ms <= 0.0
    price = LATE_PRICE if in_time else 1.0
    for site in sites:
        site.terms["cost_ms"] += price * site.terms["late_ms"]
        closed = view.closed(ask, site.name, now_ms) if view.promised else 0.0
        if closed:
            site.terms["closed"] = closed
            if not has_room(fleet, road, site):
                # what is left is promised to others: as dear as missing what this one was promised
                site.terms["cost_ms"] += costs.objective_ms(ask)
    return sites


def lateness_ms(road: Road, site: Site, pace: Pace, now_ms: float) -> float:
    """By how much the first token would be late there, its prediction widened, ms."""
    slack_ms = costs.slack_of(road, pace, now_ms)
    if slack_ms is None:
        return 0.0
    return max(0.0, site.terms["ttft_ms"] * (1.0 + SAFETY) - max(0.0, slack_ms))


def choose(fleet: Fleet, road: Road, sites: Sequence[Site]) -> tuple[Site, str]:
    """The site to ask among those that may, can and answer; the first home is the first of them.

    Where nobody could begin at once the request waits at its own site, and goes to whoever has room first (`move`):
    one queue that all serve is shorter than several. A queue is joined elsewhere only where its own work keeps that
    site from fetching, and only for half the cost.
    """
    own = anchor(road, sites)
    home = sites[0]
    if own is not home and not has_room(fleet, road, own):
        own = home
    open_: list[Site] = []
    for site in sites:
        if site is own or site.cost_ms >= own.cost_ms:
            continue
        part = MARGIN_PART if has_room(fleet, road, site) else MARGIN_QUEUED if is_loaded(fleet, road, site) else None
        if part is not None and gains(road, own, site, part):
            open_.append(site)
    if not open_:
        return own, "home" if own is home else "cache"
    least_ms = min(site.cost_ms for site in open_)
    alike = [site for site in open_ if site.cost_ms <= least_ms * (1.0 + ALIKE)]
    chosen = min(alike, key=lambda site: _drawn(road.ask.request_id, site))
    return chosen, "diverted"


def anchor(road: Road, sites: Sequence[Site]) -> Site:
    """Where the request belongs: home, unless much more of its prompt is cached elsewhere."""
    home = sites[0]
    best = max(sites, key=lambda site: (site.hit_tokens, -site.place))
    if best.hit_tokens - home.hit_tokens >= ANCHOR_PART * road.ask.input_tokens:
        return best
    return home


def gains(road: Road, own: Site, other: Site, part: float) -> bool:
    """Whether leaving its own site for another pays: by part of the time there or of the promise, and the way."""
    farther_ms = max(0.0, other.rtt_ms - own.rtt_ms)
    margin_ms = max(part * own.terms["ttft_ms"], MARGIN_PROMISE * costs.objective_ms(road.ask), 2.0 * farther_ms)
    return own.cost_ms - other.cost_ms > margin_ms


def is_home(fleet: Fleet, road: Road, site: Site) -> bool:
    """Whether a site is among the homes of the request's entry."""
    entry = fleet.sites.get(road.ask.entry)
    return entry is not None and site.name in entry.homes.get(road.ask.model, ())


def is_loaded(fleet: Fleet, road: Road, site: Site) -> bool:
    """Whether a home holds work that belongs to it, so that it will fetch none from others."""
    return is_home(fleet, road, site) and site.load is not None and bool(site.load.natives)


def has_room(fleet: Fleet, road: Road, site: Site) -> bool:
    """Whether a site would begin with the request at once: a home up to its last place, others below their ceiling.

    Neither counts what promises close to it (`terms["closed"]`).
    """
    ceiling = 1.0 if is_home(fleet, road, site) else fleet.sites[site.name].load_ceiling
    return below(ceiling * (1.0 - site.terms.get("closed", 0.0)), road, site)


def below(ceiling: float, road: Road, site: Site) -> bool:
    """Whether with the request no more than so much of a site's room would be taken.

    Rooms are whole sequences: of eight, 0.85 is rounded up to seven. One request larger than the rest of the room fits
    a site that has nothing else.
    """
    terms, pool = site.terms, site.pool
    if "held" in terms or terms.get("prefill", 0.0) >= ceiling:
        return False
    if "sequences" in terms and terms["sequences"] * pool.sequences_max + 1.0 > ceil(ceiling * pool.sequences_max):
        return False
    own = road.ask.input_tokens / pool.kv_total if pool.kv_total else 0.0
    return "kv" not in terms or terms["kv"] <= 0.0 or terms["kv"] + own <= ceiling


def _silent(site: Site, now_ms: float) -> bool:
    return site.load is not None and site.load.silent_until_ms > now_ms


def _drawn(request_id: str, site: Site) -> tuple[float, str]:
    """Weighted rendezvous: the least of these is drawn in proportion to spare rate (Efraimidis and Spirakis 2006)."""
    spare = (site.pool.rate or 1.0) * max(0.05, 1.0 - site.terms["load"])
    return -log(1.0 - fraction(request_id, site.name)) / spare, site.name


def turn_key(model: str, sites: Sequence[str]) -> str:
    """Whose turn it is counts per choice of sites: a tenant with fewer must not shift the others' turns."""
    return " ".join((model, *sorted(sites)))


def _turn(turn: int, sites: Sequence[Site]) -> str:
    """Sites in turn, weighted by ready instances, interleaved."""
    slots = [((n + 0.5) / site.pool.instances, site.name) for site in sites for n in range(site.pool.instances)]
    slots.sort()
    return slots[turn % len(slots)][1]


def _scored(considered: Sequence[Considered], sites: Sequence[Site], chosen: str) -> tuple[Considered, ...]:
    terms = {site.name: site.terms for site in sites}
    return tuple(
        Considered(name=one.name, out=one.out, terms=terms.get(one.name, {}), chosen=one.name == chosen)
        for one in considered
    )


def said(considered: Sequence[Considered]) -> tuple[Considered, ...]:
    """Reasons as they travel: rounded figures of the chosen and the cheapest, the names of all."""
    scored = sorted((one for one in considered if one.terms), key=lambda one: one.terms.get("cost_ms", 0.0))
    told = {one.name for one in scored[:SHORTLIST]}
    return tuple(
        Considered(
            name=one.name,
            out=one.out,
            terms=_rounded(one.terms) if one.chosen or one.name in told else {},
            chosen=one.chosen,
        )
        for one in considered
    )


def _rounded(terms: dict[str, float]) -> dict[str, float]:
    """To a thousandth. `round` would do the same by way of the digits, at three times the cost."""
    return {name: (1000.0 * value + 0.5) // 1.0 / 1000.0 if value else value for name, value in terms.items()}


class Move(msgspec.Struct, frozen=True):
    """A held request and where it should go instead."""

    request_id: str
    site: str
    considered: tuple[Considered, ...]
    why: str


def movable(road: Road, now_ms: float) -> bool:
    """Held long enough at its site, not moved too often, and no release under way."""
    return (
        road.phase == "held"
        and road.moves < MOVES_MAX
        and now_ms - road.held_ms >= DWELL_MS
        and now_ms - road.released_ms > 1_500.0
    )


def left_ms(road: Road, now_ms: float) -> float:
    """Wait that its TokenPilot predicted, less what is over, ms."""
    return max(0.0, road.wait_ms - (now_ms - road.held_ms))


def urgency(road: Road, now_ms: float) -> tuple[int, float, float]:
    """Order in which held requests may move: first those that would be late where they are and are not elsewhere.

    Among them by deadline and a price on their own work (SLOMax gives up what cannot be on time instead): with
    the deadline alone an overload that lasts would make everybody late. Who is late anyway goes last, shortest first.
    """
    tie = fraction(road.ask.request_id, "move")
    left = road.deadline_ms - now_ms
    if (1.0 + SAFETY) * road.own_ms > left:
        return (2, road.own_ms, tie)
    rescued = road.own_ms + left_ms(road, now_ms) > left
    return (0 if rescued else 1, min(left, SLACK_MAX_MS) + OWN_PRICE * road.own_ms, tie)


class Mover(Protocol):
    """Says where a held request should go instead of waiting on, if anywhere."""

    def __call__(self, view: View, road: Road, now_ms: float, *, among: Collection[str] = ()) -> Move | None: ...


def places(view: View, ask: Ask, now_ms: float) -> list[str]:
    """Sites that hold nothing and have a sequence left for somebody like this: where moves are worth a look."""
    found: list[str] = []
    for name in view.order(ask.entry, ask.model):
        pool, out = view.pool(ask, name, now_ms)
        load = view.state.loads.get((name, ask.model, ask.version))
        if out or (load is not None and (load.held or load.silent_until_ms > now_ms)):
            continue
        if costs.sequences_there(pool, load, now_ms) < pool.sequences_max:
            found.append(name)
    return found


def move(view: View, road: Road, now_ms: float, *, among: Collection[str] = ()) -> Move | None:
    """Where a held request should go instead of waiting on, if anywhere.

    Any allowed and ready site when its own can serve it no more; else one that holds nothing, has room below its
    ceiling, and gains more than the margin: the wait left here, less the longer way and the prefix computed anew.
    `among` names the sites worth a look (`places`); empty: all.
    """
    ask = road.ask
    ready, considered = view.eligible(ask, now_ms, road.excluded)
    stranded = road.site not in ready
    if not stranded and (view.fleet.policy.sites == "round-robin" or not movable(road, now_ms)):
        return None
    looked = [name for name in ready if stranded or not among or name in among or name == road.site]
    if looked == [road.site]:
        return None
    sites = survey(view, road, looked, now_ms)
    here = next((site for site in sites if site.name == road.site), None)
    others = [site for site in sites if site is not here and not _silent(site, now_ms)]
    if here is None:
        best = min(others, key=lambda site: (site.cost_ms, _drawn(ask.request_id, site)), default=None)
        return Move(ask.request_id, best.name, _scored(considered, sites, best.name), "stranded") if best else None
    waiting_ms = max(left_ms(road, now_ms), here.terms["wait_ms"])
    gaining: list[tuple[float, Site]] = []
    for site in others:
        if not has_room(view.fleet, road, site):
            continue
        farther_ms = max(0.0, 2.0 * (site.rtt_ms - here.rtt_ms))
        rate = site.pool.rate_one or UNKNOWN_PREFILL_TOKENS_PER_S
        lost_tokens = max(0, road.prefix_hit_tokens - site.hit_tokens)
        gain_ms = waiting_ms - site.terms["wait_ms"] - farther_ms - 1000.0 * lost_tokens / rate
        site.terms["gain_ms"] = gain_ms
        if gain_ms > max(MARGIN_PART * waiting_ms, MARGIN_PROMISE * costs.objective_ms(ask)):
            gaining.append((gain_ms, site))
    if not gaining:
        return None
    most_ms = max(gain_ms for gain_ms, _ in gaining)
    best = min(
        (site for gain_ms, site in gaining if gain_ms >= most_ms * (1.0 - ALIKE)),
        key=lambda site: _drawn(ask.request_id, site),
    )
    return Move(ask.request_id, best.name, _scored(considered, sites, best.name), "spare")


def deadline_ms(slack_ms: float | None, now_ms: float) -> float:
    """When the first token is late, our clock; infinity without an objective."""
    return INFINITY if slack_ms is None else now_ms + slack_ms
