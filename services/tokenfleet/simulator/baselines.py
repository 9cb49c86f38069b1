"""Other systems' rules at the seams of TokenPilot, FleetMind and SLOMax, for comparison in simulation only.

Decides which instance (`RULES`), which site (`SITE_RULES`) and who goes next (`ORDERS`) as the named system does, on
the same information of the same age as ours: the router's own bookings, its prefix index, the agents' reports. Ties
break by a hash of (request id, candidate) for all of them: a fixed order would send every tie to the first instance.
Refuses to know what a request will generate.

A rule alone dispatches at once and leaves the queue to the engine, as the systems do that it comes from; with `+queue`
it has our holds and releases around it, so that placing and ordering can be told apart; with `+hold` it moreover waits
for the instance that it would choose if all had room.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from tokenfleet.effects import Effect
from tokenfleet.eligibility import fraction
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.policy import Move, Ranking, move, rank
from tokenfleet.fleetmind.state import Road
from tokenfleet.fleetmind.view import View
from tokenfleet.simulator.gates import GatedPilot, gate_named, split_filters
from tokenfleet.slomax.policy import Choice, Level, fits
from tokenfleet.slomax.state import Held
from tokenfleet.slomax.state import Pool as HeldPool
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.policy import FILTERS, Candidate, Filter, Situation, least_work
from tokenfleet.tokenpilot.state import Pool, Waiting
from tokenfleet_schemas.placement import Considered

#: lower is better; candidates are all that could serve the request, with or without room
Rule = Callable[[Situation, Sequence[Candidate]], list[float]]

#: tokens of a KV block in costs that count blocks
_BLOCK_TOKENS = 16
#: bounded load of the prefix hash: no instance gets more than this times the mean (CHWBL; KubeAI's default)
_PREFIX_HASH_BOUND = 1.25
#: SGLang's router: balanced unless the largest load exceeds the smallest by both, absolutely and relatively
_IMBALANCE_ABS, _IMBALANCE_REL, _MATCH_MIN = 64, 1.5, 0.3
#: llm-d's affinity: a prefix hit worth keeping, and the backlog gap, in seconds of prefill, that breaks it
_AFFINITY_HIT, _AFFINITY_GAP_S = 0.8, 18.0
#: weights of J: the price of own compute, and of each request beside which it is computed
_MU, _W = 5.0, 0.05
_UNKNOWN_TPOT_MS = 20.0
#: weight of own work against slack in `priced-edf`, and the slack of what has no deadline, ms
_OWN_PRICE, _SLACK_MAX_MS = 10.0, 600_000.0


def _backlog(c: Candidate) -> int:
    """Prompt tokens dispatched and not prefilled, with this request's own."""
    return c.load.prefill_tokens + c.work.prefill_tokens


def _hit_share(situation: Situation, c: Candidate) -> float:
    return c.hit_tokens / situation.request.ask.input_tokens


def _kv_share(c: Candidate) -> float:
    total = c.heard.report.kv_tokens_total
    return min(1.0, c.load.kv_tokens_taken / total) if total else 0.0


def random_choice(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """All are equal: the hash decides."""
    return [0.0] * len(candidates)


def least_requests(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """Fewest open requests."""
    return [float(c.load.sequences) for c in candidates]


def power_of_two(situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """The less loaded of two drawn ones (Mitzenmacher 2001)."""
    request_id = situation.request.ask.request_id
    drawn = sorted(range(len(candidates)), key=lambda n: fraction(request_id, "draw", candidates[n].name))[:2]
    return [float(c.load.sequences) if n in drawn else float("inf") for n, c in enumerate(candidates)]


def prefix_hash(situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """The instance that the prompt's beginning hashes to, the next one where that is loaded beyond the bound.

    Rendezvous hashing of the first 64 tokens; consistent hashing with bounded loads (Mirrokni et al. 2018).
    """
    ask = situation.request.ask
    opening = ask.prefix[:10] if ask.prefix_stride == 1 and ask.prefix else ask.request_id
    bound = _PREFIX_HASH_BOUND * (sum(c.load.sequences for c in candidates) + 1) / len(candidates)
    return [fraction(opening, c.name) + (1.0 if c.load.sequences + 1 > bound else 0.0) for c in candidates]


def cache_aware(situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """SGLang's router (`cache_aware`): shortest queue while unbalanced, else the longest match above 0.3."""
    loads = [c.load.sequences for c in candidates]
    if max(loads) - min(loads) > _IMBALANCE_ABS and max(loads) > _IMBALANCE_REL * min(loads):
        return [float(load) for load in loads]
    shares = [_hit_share(situation, c) for c in candidates]
    if max(shares) > _MATCH_MIN:
        return [-share for share in shares]
    return [float(load) for load in loads]


def llm_d(situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """llm-d's scorers with weights prefix 3, queue 2, KV 2; the queue score is relative to the others."""
    queued = [c.load.sequences - c.load.decoding for c in candidates]
    low, high = min(queued), max(queued)
    return [
        -(
            3.0 * _hit_share(situation, c)
            + 2.0 * ((high - q) / (high - low) if high > low else 1.0)
            + 2.0 * (1.0 - _kv_share(c))
        )
        for c, q in zip(candidates, queued, strict=True)
    ]


def affinity(situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """llm-d's newer default: those that hold 0.8 of the prompt, unless they lag too far behind; then least tokens."""
    backlogs = [float(_backlog(c)) for c in candidates]
    kept = [n for n, c in enumerate(candidates) if _hit_share(situation, c) >= _AFFINITY_HIT]
    if kept:
        rate = max((c.rate for c in candidates if c.rate is not None), default=0.0)
        gap = min(candidates[n].load.prefill_tokens for n in kept) - min(c.load.prefill_tokens for c in candidates)
        if gap <= rate * _AFFINITY_GAP_S:
            return [backlog if n in kept else float("inf") for n, backlog in enumerate(backlogs)]
    return backlogs


def dynamo(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """Dynamo's KV router: blocks to prefill, less the overlap, plus blocks being decoded; temperature 0."""
    return [
        (_backlog(c) + max(0.0, c.load.kv_tokens_taken - c.load.prefill_tokens)) / _BLOCK_TOKENS for c in candidates
    ]


def mooncake(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """Mooncake's conductor: least time to the first token, queue plus own prefill (FAST 2025)."""
    return [_backlog(c) / (c.rate or 1.0) for c in candidates]


def lmetric(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """LMetric (OSDI 2026): tokens to prefill times requests in flight."""
    return [float(_backlog(c) * (c.load.sequences + 1)) for c in candidates]


def work_and_delay(_situation: Situation, candidates: Sequence[Candidate]) -> list[float]:
    """J: own time to the first token, KV shortage, and a price on compute burnt and delay inflicted on others.

    J = wait + own + kv + (mu + w N) own, in ms, mu = 5, w = 0.05.
    """
    found = []
    for c in candidates:
        total = c.heard.report.kv_tokens_total or 0
        excess = max(0.0, c.load.kv_tokens_taken + c.work.own_kv_tokens - total) if total else 0.0
        stay_ms = c.work.decode_tokens * (c.load.tpot_ms or _UNKNOWN_TPOT_MS)
        kv_ms = excess * stay_ms / max(1.0, c.load.kv_tokens_taken)
        own_ms = c.terms["own_ms"]
        found.append(c.terms["wait_ms"] + own_ms + kv_ms + (_MU + _W * c.load.sequences) * own_ms)
    return found


RULES: dict[str, Rule] = {
    "random": random_choice,
    "least-requests": least_requests,
    "power-of-two": power_of_two,
    "prefix-hash": prefix_hash,
    "cache-aware": cache_aware,
    "llm-d": llm_d,
    "affinity": affinity,
    "dynamo": dynamo,
    "mooncake": mooncake,
    "lmetric": lmetric,
    "j": work_and_delay,
}


def best(rule: Rule, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate of the lowest score; ties by hash."""
    if not candidates:
        return None
    request_id = situation.request.ask.request_id
    scores = rule(situation, candidates)
    for c, score in zip(candidates, scores, strict=True):
        c.terms = {**c.terms, "score": score}
    return min(candidates, key=lambda c: (c.terms["score"], fraction(request_id, c.name)))


class ImmediatePilot(TokenPilot):
    """A TokenPilot that asks a rule and dispatches at once, room or not, as routers without a queue do."""

    def __init__(
        self, fleet: Fleet, site: str, *, replica: str, rule: Rule, filters: Sequence[Filter] = FILTERS
    ) -> None:
        super().__init__(fleet, site, replica=replica, filters=filters)
        self.rule = rule

    def _at_once(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        situation, candidates = self._consider(waiting.request, waiting, now_ms, force=True)
        chosen = best(self.rule, situation, [c for c in candidates if not c.out])
        if chosen is not None:
            yield from self._assign(scope, pool, waiting, candidates, chosen, now_ms, how="room")
        elif waiting.held is None:
            yield from self._hold(scope, pool, waiting, situation, candidates, now_ms)


class HoldForBest:
    """A picker for the live TokenPilot: the rule's best of all, and nothing while that one lacks room.

    A request held for the instance where it belongs, and released to another one's room, is held again: spreading it
    would cost a prefill that its own instance need not do (the hit-collapse loop: queue, spread, misses, queue).
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
        chosen = best(self.rule, situation, candidates)
        return chosen if chosen is not None and not chosen.lacks else None


class WithRoom:
    """A picker for the live TokenPilot: the rule's best among those that have room; none: it is held."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
        return best(self.rule, situation, [c for c in candidates if not c.lacks])


def pilot(placement: str, admission: str, fleet: Fleet, site: str, replica: str) -> TokenPilot:
    """The TokenPilot of a site under a placement's name: the live rule, a baseline, or one with our queue.

    Under an admission that works at the router it is gated, or has its part of the instances.
    """
    name, _, queue = placement.partition("+")
    rule = RULES.get(name)
    gate = gate_named(admission)
    if gate is not None:
        if rule is None:
            return GatedPilot(fleet, site, replica=replica, gate=gate)
        return GatedPilot(fleet, site, replica=replica, gate=gate, scorer=least_work, picker=WithRoom(rule))
    filters = split_filters(fleet, site) if admission == "split" else FILTERS
    if rule is None or (not queue and name == fleet.policy.placement):
        return TokenPilot(fleet, site, replica=replica, filters=filters)
    if queue:
        picker = HoldForBest(rule) if queue == "hold" else WithRoom(rule)
        return TokenPilot(fleet, site, replica=replica, filters=filters, scorer=least_work, picker=picker)
    return ImmediatePilot(fleet, site, replica=replica, filters=filters, rule=rule)


# ---------------------------------------------------------------------------------------------- which site


class SiteRule:
    """A ranker for the live FleetMind: its filters and figures, another choice among the sites that are left."""

    def __init__(self, key: Callable[[Considered, Sequence[Considered]], tuple[float, ...]]) -> None:
        self.key = key

    def __call__(self, view: View, road: Road, now_ms: float, *, avoid: Collection[str] = ()) -> Ranking:
        """The site to ask; see `tokenfleet.fleetmind.policy.Ranker`."""
        ours = rank(view, road, now_ms, avoid=avoid)
        sites = [one for one in ours.considered if one.terms and one.name not in avoid]
        if not ours.site or not sites:
            return ours
        request_id = road.ask.request_id
        site = min(sites, key=lambda one: (self.key(one, sites), fraction(request_id, one.name))).name
        considered = tuple(msgspec.structs.replace(one, chosen=one.name == site) for one in ours.considered)
        return msgspec.structs.replace(ours, site=site, why="rule", considered=considered)


def _local_first(one: Considered, sites: Sequence[Considered]) -> tuple[float, ...]:
    """SkyWalker: home unless work is pending there, then the least loaded without any, else home all the same."""
    pending = "held" in one.terms
    if one is sites[0]:
        return (1.0 if pending else 0.0, 0.0)
    return (2.0, 0.0) if pending else (0.5, one.terms["load"])


def stay(view: View, road: Road, now_ms: float, *, among: Collection[str] = ()) -> Move | None:
    """A mover that takes a held request away only from a site that can serve it no more."""
    found = move(view, road, now_ms, among=among)
    return found if found is not None and found.why == "stranded" else None


SITE_RULES: dict[str, SiteRule] = {
    "home-only": SiteRule(lambda one, _sites: (one.terms["place"],)),
    "least-load": SiteRule(lambda one, _sites: (one.terms["load"],)),
    "local-first": SiteRule(_local_first),
}


# ---------------------------------------------------------------------------------------------- who goes next


class InOrder:
    """Holds of a pool by one key over all classes, the first that fits; nobody is shed and nobody has a share."""

    def __init__(self, key: Callable[[Held, float], tuple[float, ...]]) -> None:
        self.key = key

    def __call__(self, fleet: Fleet, pool: HeldPool, instance: str, room: Level, now_ms: float) -> Choice:
        """The hold that goes next; see `tokenfleet.slomax.policy.Chooser`."""
        waiting = [held for held in pool.held.values() if not held.released and fits(held, instance, room, now_ms)]
        first = min(waiting, key=lambda held: (self.key(held, now_ms), held.request_id), default=None)
        if first is not None:
            return Choice(first, "in_order")
        return Choice(None, "nothing_fits" if pool.waiting() else "nothing_held")


def _feasible(held: Held, now_ms: float) -> tuple[float, ...]:
    """Deadline order, but what would miss even if started now goes last, shortest first (as Niyama relegates)."""
    late = now_ms + 1.1 * held.own_ms > held.deadline_ms
    return (1.0, held.own_ms) if late else (0.0, held.deadline_ms)


def _priced(held: Held, now_ms: float) -> tuple[float, ...]:
    """As `_feasible`, but ten times its own work is added to what is left of its time: short ones go before long ones.

    Between shortest-first and earliest-deadline-first; between factors of 3 and 100 the result hardly differs.
    """
    if now_ms + 1.1 * held.own_ms > held.deadline_ms:
        return (1.0, held.own_ms)
    return (0.0, min(held.deadline_ms - now_ms, _SLACK_MAX_MS) + _OWN_PRICE * held.own_ms)


ORDERS: dict[str, InOrder] = {
    "fcfs": InOrder(lambda held, _now_ms: (float(held.received_unix_ms),)),
    "edf": InOrder(lambda held, _now_ms: (held.deadline_ms,)),
    "sjf": InOrder(lambda held, _now_ms: (held.own_ms,)),
    "feasible-edf": InOrder(_feasible),
    "priced-edf": InOrder(_priced),
}
