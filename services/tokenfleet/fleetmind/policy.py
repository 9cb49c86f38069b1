"""FleetMind's rules: which site is asked, and which held requests move.

Decides on values it is given and returns every candidate with its reasons. Filters fail closed
(`tokenfleet.eligibility`); the load ceiling only stops diversion, so that the last allowed site is still asked and
holds. Diversion as SkyWalker (arXiv:2505.24095): local first, away only from a site that cannot serve at once, to one
that can. Refuses to know how the answers travel.
"""

from collections.abc import Collection, Sequence
from typing import Protocol, cast

import msgspec

from tokenfleet.eligibility import (
    HOP_BASE_MS,
    UNKNOWN_RTT_MS,
    Heard,
    Roster,
    allowed_ready_sites,
    fraction,
    no_site_reason,
    ready_instances,
    site_out,
)
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.state import FLOW_MS, INFINITY, Load, Road, State
from tokenfleet_schemas.placement import Considered

#: a held request moves at most so often, and not before it has been held so long at its present site
MOVES_MAX = 2
DWELL_MS = 400.0
#: a move must gain more than this, and more than this part of the wait that it leaves
MARGIN_MS = 250.0
MARGIN_PART = 0.2


class Ranking(msgspec.Struct, frozen=True):
    """The site to ask, or the reason why there is none."""

    site: str
    #: `home`, `diverted`, `full` (all above their ceilings: the first holds), `turn`
    why: str
    considered: tuple[Considered, ...]
    #: `turn`: the counter that this choice moves on
    turn: str = ""
    #: of `REASONS`, when there is no site
    reason: str = ""
    reset_ms: float = 0.0


def rtt_ms(fleet: Fleet, state: State, one: str, other: str) -> float:
    """Round trip between two sites, ms: measured, else declared, else `UNKNOWN_RTT_MS`."""
    if one == other:
        return 0.0
    found = state.rtt.get((one, other))
    if found is None:
        found = state.rtt.get((other, one))
    if found is None:
        found = fleet.rtt_ms(one, other)
    return UNKNOWN_RTT_MS if found is None else found


def hop_ms(fleet: Fleet, state: State, entry: str, site: str) -> float:
    """How long a TokenPilot may stay silent: 250 ms + 2 RTT; never less than the declared RTT says."""
    declared = fleet.rtt_ms(entry, site)
    return HOP_BASE_MS + 2 * max(rtt_ms(fleet, state, entry, site), declared or 0.0)


def load_terms(fleet: Fleet, load: Load | None, ready: Sequence[Heard], now_ms: float) -> dict[str, float]:
    """Shares of a site's room that are taken, for one model version; `load` is the largest.

    Sequences and KV: the larger of what its agent reports and what we know to be booked there, which covers what
    was assigned since the report. Prefill: prompt tokens asked of it lately over what it computes meanwhile. A site
    that holds anything has no room: above 1. A number that nobody knows makes no term.
    """
    supply = _supply(fleet, ready)
    terms: dict[str, float] = {}
    if supply.sequences:
        ours = len(load.booked) + len(load.asked) if load is not None else 0
        terms["sequences"] = max(supply.running, ours) / supply.sequences
    if supply.kv_tokens:
        booked = load.booked_kv_tokens if load is not None else 0
        terms["kv"] = max(supply.kv_used, booked) / supply.kv_tokens
    rate = supply.prefill_tokens_per_s
    if load is not None and rate > 0:
        terms["prefill"] = load.flow(now_ms) / (rate * FLOW_MS / 1000.0)
    if load is not None and load.held:
        terms["held"] = 1.0 + (load.held_tokens / rate if rate > 0 else float(len(load.held)))
    terms["load"] = max(terms.values(), default=0.0)
    return terms


class Supply(msgspec.Struct, frozen=True):
    """What ready instances have together, and what they say is taken of it."""

    #: 0: unknown
    sequences: int
    #: running and waiting
    running: int
    #: 0: unknown of some
    kv_tokens: int
    kv_used: float
    prefill_tokens_per_s: float


def _supply(fleet: Fleet, ready: Sequence[Heard]) -> Supply:
    """Summed once per report, not once per request."""
    if isinstance(ready, Roster):
        found = ready.sums.get("supply")
        if found is None:
            found = ready.sums["supply"] = _add_up(fleet, ready)
        return cast("Supply", found)
    return _add_up(fleet, ready)


def _add_up(fleet: Fleet, ready: Sequence[Heard]) -> Supply:
    sequences, running, kv_used, rate = 0, 0, 0.0, 0.0
    totals: list[int] = []
    for report in (heard.report for heard in ready):
        own = fleet.sites[report.site].instances.get(report.instance)
        sequences += report.max_sequences or (own.max_sequences if own is not None else 0)
        running += (report.running or 0) + (report.waiting or 0)
        totals.append(report.kv_tokens_total or (own.kv_tokens if own is not None else 0))
        kv_used += (report.kv_usage or 0.0) * totals[-1]
        rate += report.prefill_tokens_per_s or 0.0
    return Supply(sequences, running, sum(totals) if all(totals) else 0, kv_used, rate)


class Ranker(Protocol):
    """Chooses the site to ask for a request, or says why there is none."""

    def __call__(
        self, fleet: Fleet, state: State, road: Road, now_ms: float, *, avoid: Collection[str] = ()
    ) -> Ranking: ...


def rank(fleet: Fleet, state: State, road: Road, now_ms: float, *, avoid: Collection[str] = ()) -> Ranking:
    """Choose the site to ask. `avoid` names sites that were asked in this round and stayed silent."""
    ask = road.ask
    ready, considered = allowed_ready_sites(fleet, state.capacity, ask, now_ms, road.excluded)
    if not ready:
        reason, reset_ms = no_site_reason(fleet, state.capacity, ask, now_ms, considered)
        return Ranking("", "", considered, reason=reason, reset_ms=reset_ms)
    terms: dict[str, dict[str, float]] = {}
    open_sites: list[str] = []
    silent: list[str] = []
    for place, site in enumerate(ready):
        load = state.loads.get((site, ask.model, ask.version))
        instances = ready_instances(fleet, state.capacity, ask, site, now_ms, road.excluded)
        terms[site] = {
            "place": float(place),
            "rtt_ms": rtt_ms(fleet, state, ask.entry, site),
            "instances": float(len(instances)),
            **load_terms(fleet, load, instances, now_ms),
        }
        quiet = load is not None and load.silent_until_ms > now_ms
        (silent if quiet else open_sites).append(site)
    # A breaker, not a ban: a site whose TokenPilot is silent is asked last, and first again when its time is over.
    ordered = [site for site in (*open_sites, *silent) if site not in avoid]
    if not ordered:
        return Ranking("", "", _scored(considered, terms, ""), reason="unavailable", reset_ms=1_000.0)
    if fleet.policy.sites == "round-robin":
        key = turn_key(ask.model, ordered)
        site = _turn(state.turns.get(key, 0), ordered, terms)
        return Ranking(site, "turn", _scored(considered, terms, site), key)
    below = [site for site in ordered if terms[site]["load"] < fleet.sites[site].load_ceiling]
    if not below:
        site, why = ordered[0], "full"
    else:
        site, why = below[0], "home" if below[0] == ordered[0] else "diverted"
    return Ranking(site, why, _scored(considered, terms, site))


def turn_key(model: str, sites: Sequence[str]) -> str:
    """Whose turn it is counts per choice of sites: a tenant with fewer must not shift the others' turns."""
    return " ".join((model, *sorted(sites)))


def _turn(turn: int, sites: Sequence[str], terms: dict[str, dict[str, float]]) -> str:
    """Sites in turn, weighted by ready instances, interleaved."""
    slots = [((n + 0.5) / terms[s]["instances"], s) for s in sorted(sites) for n in range(int(terms[s]["instances"]))]
    slots.sort()
    return slots[turn % len(slots)][1]


def _scored(
    considered: Sequence[Considered], terms: dict[str, dict[str, float]], chosen: str
) -> tuple[Considered, ...]:
    return tuple(
        Considered(name=one.name, out=one.out, terms=terms.get(one.name, {}), chosen=one.name == chosen)
        for one in considered
    )


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


def may_move(fleet: Fleet, state: State, road: Road, now_ms: float) -> bool:
    """Whether a held request could go elsewhere at all: it has its time, or its site can serve it no more."""
    if fleet.policy.sites != "round-robin" and movable(road, now_ms):
        return True
    ask = road.ask
    if site_out(fleet, state.capacity, ask, road.site, now_ms, road.excluded):
        return True
    return road.site not in fleet.home_order(ask.entry, ask.model)


def urgency(road: Road, now_ms: float) -> tuple[bool, float, float]:
    """Order in which held requests may move: those that are late where they are but have a deadline first."""
    left_ms = max(0.0, road.wait_ms - (now_ms - road.held_ms))
    rescued = now_ms + left_ms + road.own_ms > road.deadline_ms > now_ms + road.own_ms
    return (not rescued, float(road.ask.received_unix_ms), fraction(road.ask.request_id, "move"))


class Mover(Protocol):
    """Says where a held request should go instead of waiting on, if anywhere."""

    def __call__(self, fleet: Fleet, state: State, road: Road, now_ms: float) -> Move | None: ...


def move(fleet: Fleet, state: State, road: Road, now_ms: float) -> Move | None:
    """Where a held request should go instead of waiting on, if anywhere.

    Any allowed and ready site when its own can serve it no more; else one that holds nothing, is below its ceiling,
    and gains more than the margin: the wait left here, less the longer way and the prefix that is computed anew.
    """
    if not may_move(fleet, state, road, now_ms):
        return None
    ask = road.ask
    ready, considered = allowed_ready_sites(fleet, state.capacity, ask, now_ms, road.excluded)
    stranded = road.site not in ready
    left_ms = max(0.0, road.wait_ms - (now_ms - road.held_ms))
    best: tuple[float, str] | None = None
    terms: dict[str, dict[str, float]] = {}
    for site in ready:
        if site == road.site:
            continue
        load = state.loads.get((site, ask.model, ask.version))
        instances = ready_instances(fleet, state.capacity, ask, site, now_ms, road.excluded)
        terms[site] = load_terms(fleet, load, instances, now_ms)
        quiet = load is not None and load.silent_until_ms > now_ms
        if quiet or (not stranded and (terms[site]["load"] >= fleet.sites[site].load_ceiling)):
            continue
        rate = _supply(fleet, instances).prefill_tokens_per_s / max(1, len(instances))
        farther = rtt_ms(fleet, state, ask.entry, site) - rtt_ms(fleet, state, ask.entry, road.site)
        anew_ms = 1000.0 * road.prefix_hit_tokens / rate if rate > 0 else 0.0
        gain_ms = left_ms - max(0.0, farther) - anew_ms
        terms[site]["gain_ms"] = gain_ms
        if not stranded and gain_ms <= max(MARGIN_MS, MARGIN_PART * left_ms):
            continue
        score = (-gain_ms if not stranded else terms[site]["load"], site)
        best = min(best, score) if best is not None else score
    if best is None:
        return None
    site = best[1]
    return Move(ask.request_id, site, _scored(considered, terms, site), "stranded" if stranded else "spare")


def deadline_ms(slack_ms: float | None, now_ms: float) -> float:
    """When the first token is late, our clock; infinity without an objective."""
    return INFINITY if slack_ms is None else now_ms + slack_ms
