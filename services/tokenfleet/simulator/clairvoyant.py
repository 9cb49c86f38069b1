"""What nobody could have beaten: an upper bound on compliance by one who knows every arrival and length beforehand.

Decides nothing; it bounds. It is a relaxation of the simulator's own engines, not a policy: whatever any policy does
in a run of the scenario, clairvoyant or not, no more output tokens (or requests) comply. It refuses to know where work
was placed: all engines of a model are one, infinitely divisible, with a perfect cache of everything that ever arrived.

Why it holds. A step of the engine model takes at least the sum of what each of its tokens costs by itself (`c` per
token, attention per pair, KV per context token, bookkeeping per sequence; `engine_model.profiles`). So a compliant
request costs its engine

- p for its prefill, within [arrival, arrival + TTFT objective]: the tokens behind the longest run of blocks that
  arrived earlier. Blocks that arrive first with it may be computed by a later request that has them too, but then
  before its own first token and after its arrival, so within that window, and they are charged to nobody else;
- q for the rest of its answer, within [arrival, arrival + TTFT + TPOT x (output - 1)], or its deadline if that is
  sooner.

Let x be 1 for compliant requests. In a time slot the engines of a model have at most C = engines x width of time.
With any prices y >= 0 per slot, weak duality of the linear program that spreads p and q over their windows gives

    sum w x  <=  sum C y  +  sum max(0, w - p min(y over its first window) - q min(y over its second)).

Every y is a valid bound; `bound` looks for a low one by subgradient descent. Windows are widened to whole slots, faults
only take capacity away (an engine made faster by a fault is counted as that fast throughout), and follow-up requests of
closed loops, whose arrival is not known beforehand, count as compliant for nothing. The relaxed program ignores memory,
batch limits, the network, residency, quotas and that one request cannot be computed by two engines at once, but for one
thing: what takes a single engine longer than its objective is not compliant.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tokenfleet.engine_model import Profile, profile
from tokenfleet.fleet import Fleet, ServiceClass
from tokenfleet.simulator.arrivals import Arrival, draw
from tokenfleet.simulator.instances import perturbed
from tokenfleet.simulator.scenario import Scenario

Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

#: width of a time slot, ms: wide slots widen windows and loosen the bound
SLOT_MS = 500.0
#: steps of the descent; the bound is valid after any number of them
STEPS = 400


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """No policy does better on these arrivals. Over counted requests, as `replay.report` defines the figures."""

    seed: int
    compliance: float
    compliance_requests: float
    goodput_tokens_per_s: float


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one compliant request costs, at least; ms."""

    weight: float
    prefill_ms: float
    decode_ms: float
    begin_ms: float
    #: the first token, and the last one, may not come later
    first_ms: float
    last_ms: float


def bound(scenario: Scenario, seed: int) -> Bound:
    """Bound what any policy can do with the arrivals of a seed. Raises `ScenarioError`."""
    arrivals = draw(scenario, seed)
    warmup_ms = scenario.info.warmup_s * 1000.0
    counted = [one for one in arrivals if one.at_ms >= warmup_ms]
    end_ms = max(one.at_ms for one in arrivals)
    end_ms = max(end_ms, scenario.info.duration_s * 1000.0) + scenario.info.drain_s * 1000.0
    tokens = _most(scenario, arrivals, warmup_ms, end_ms, by_tokens=True)
    requests = _most(scenario, arrivals, warmup_ms, end_ms, by_tokens=False)
    offered = sum(one.stated_output_tokens for one in counted)
    duration_s = scenario.info.duration_s - scenario.info.warmup_s if scenario.info.duration_s else 0.0
    duration_s = duration_s or max((one.at_ms for one in counted), default=0.0) / 1000.0 - scenario.info.warmup_s
    return Bound(
        seed=seed,
        compliance=round(min(1.0, tokens / offered), 6) if offered else 0.0,
        compliance_requests=round(min(1.0, requests / len(counted)), 6) if counted else 0.0,
        goodput_tokens_per_s=round(min(tokens, offered) / duration_s, 3) if duration_s > 0 else 0.0,
    )


def _most(
    scenario: Scenario, arrivals: Sequence[Arrival], warmup_ms: float, end_ms: float, *, by_tokens: bool
) -> float:
    """The bound on what complies, summed over models: tokens, or requests."""
    fleet = scenario.fleet
    engines = _engines(scenario)
    hits = _hits(arrivals)
    jobs: dict[str, list[Job]] = {}
    free = 0.0
    for one, hit in zip(arrivals, hits, strict=True):
        weight = float(one.stated_output_tokens) if by_tokens else 1.0
        if one.at_ms < warmup_ms and not one.follows:
            continue  # loads the fleet and counts for nothing: without it all is only easier
        resolved = fleet.resolve_model(one.model)
        model = resolved[0] if resolved is not None else one.model
        if model not in engines:
            continue  # nothing could serve it
        if one.follows:
            free += weight
            continue
        job = _job(one, hit, weight, fleet.classes[one.service_class], engines[model], end_ms)
        if job.prefill_ms <= job.first_ms - job.begin_ms:
            jobs.setdefault(model, []).append(job)
    return free + sum(most(found, len(engines[model])) for model, found in jobs.items())


def _engines(scenario: Scenario) -> dict[str, list[Profile]]:
    """Profiles of all engines of each model, as fast as any fault may make them."""
    fleet: Fleet = scenario.fleet
    fastest = min([1.0, *(fault.factor for fault in scenario.faults if fault.kind == "engine_slow")])
    found: dict[str, list[Profile]] = {}
    for site in fleet.sites.values():
        for declared in site.instances.values():
            mine = perturbed(profile(declared.profile), scenario.engines).scaled(1.0 / fastest)
            found.setdefault(declared.model, []).append(mine)
    return found


def _hits(arrivals: Sequence[Arrival]) -> list[int]:
    """Prompt tokens of each request that an engine with a perfect cache need not compute, in the order given.

    Blocks of earlier arrivals with the same salt. A session's follow-ups may arrive at any time: theirs are known from
    the beginning.
    """
    seen = {(one.salt, block) for one in arrivals if one.follows for block in one.blocks}
    hits = []
    for one in arrivals:
        known = 0
        for block in one.blocks:
            if (one.salt, block) not in seen:
                break
            known += 1
        seen.update((one.salt, block) for block in one.blocks)
        hits.append(min(known * one.block_tokens, one.input_tokens - 1))
    return hits


def _job(one: Arrival, hit: int, weight: float, cls: ServiceClass, engines: Sequence[Profile], end_ms: float) -> Job:
    new, out, prompt = one.input_tokens - hit, one.output_tokens, one.input_tokens
    pairs = new * (hit + new / 2.0)
    read = (out - 1) * prompt + (out - 1) * (out - 2) / 2.0
    ends = [limit for limit in (cls.e2e_ms, one.deadline_ms) if limit is not None]
    last_ms = min([end_ms, *(one.at_ms + limit for limit in ends)])
    first_ms = last_ms if cls.ttft_ms is None else min(last_ms, one.at_ms + cls.ttft_ms)
    if cls.ttft_ms is not None and cls.tpot_ms is not None:
        last_ms = min(last_ms, one.at_ms + cls.ttft_ms + cls.tpot_ms * max(0, out - 1))
    return Job(
        weight=weight,
        # the cheapest engine of the model for each part: no engine does it for less
        prefill_ms=min((p.c_us_per_token * new * 1e-3 + p.a_ns_per_pair * pairs * 1e-6) for p in engines),
        decode_ms=min(
            (p.c_us_per_token + p.per_sequence_us) * (out - 1) * 1e-3 + p.k_ns_per_kv_token * read * 1e-6
            for p in engines
        ),
        begin_ms=one.at_ms,
        first_ms=first_ms,
        last_ms=last_ms,
    )


# ---------------------------------------------------------------------------------------------- the dual


def most(jobs: Sequence[Job], engines: int, *, slot_ms: float = SLOT_MS, steps: int = STEPS) -> float:
    """An upper bound on the weight of jobs that so many engines can do in time; see the module for why."""
    if not jobs:
        return 0.0
    begin_ms = min(job.begin_ms for job in jobs)

    def column(of: list[float]) -> Column:
        return np.array(of, np.float64)

    weight, p, q = (
        column([job.weight for job in jobs]),
        column([job.prefill_ms for job in jobs]),
        column([job.decode_ms for job in jobs]),
    )

    def slot(of: list[float]) -> Rows:
        return np.floor((column(of) - begin_ms) / slot_ms).astype(np.intp)

    start = slot([job.begin_ms for job in jobs])
    first, last = slot([job.first_ms for job in jobs]), slot([job.last_ms for job in jobs])
    slots = int(last.max()) + 1
    capacity = np.full(slots, engines * slot_ms)
    one, two = _Ranges(slots, start, first), _Ranges(slots, start, last)

    def value(prices: Column) -> tuple[float, Column]:
        """The bound at these prices, and in which direction it grows."""
        at_p, at_q = one.cheapest(prices), two.cheapest(prices)
        gains = weight - p * prices[at_p] - q * prices[at_q]
        done = gains > 0.0
        slope = capacity - _summed(slots, at_p[done], p[done]) - _summed(slots, at_q[done], q[done])
        return float(capacity @ prices + gains[done].sum()), slope

    # The descent begins with the best of one price everywhere (a fractional knapsack) or where it is busy.
    load = _spread(slots, start, first, p) + _spread(slots, start, last, q)
    masks = [np.ones(slots), *((load >= share * capacity).astype(np.float64) for share in (0.5, 0.8, 1.0))]
    density = np.unique(weight / np.maximum(1e-9, p + q))
    some = density[np.linspace(0, density.size - 1, min(48, density.size)).astype(np.intp)].tolist()
    starts = [np.zeros(slots), *(price * mask for price in some for mask in masks)]
    prices = min(starts, key=lambda prices: value(prices)[0])
    now, slope = value(prices)
    best, best_prices, closer = now, prices, 0.05
    for step in range(steps):
        norm = float(slope @ slope)
        if norm <= 0.0:
            break
        # Polyak's step, towards a value a little below the best so far; less below it as nothing better is found.
        prices = np.maximum(0.0, prices - (now - best * (1.0 - closer)) / norm * slope)
        now, slope = value(prices)
        if now < best:
            best, best_prices = now, prices
        elif step % 20 == 19:
            closer *= 0.7
            prices = best_prices
            now, slope = value(prices)
    return min(best, float(weight.sum()))


def _summed(slots: int, at: Rows, amount: Column) -> Column:
    """Amounts by slot."""
    return np.asarray(np.bincount(at, amount, slots), np.float64)


def _spread(slots: int, begin: Rows, end: Rows, amount: Column) -> Column:
    """Each amount spread evenly over its range of slots, summed."""
    each = amount / (end - begin + 1)
    steps = np.bincount(begin, each, slots + 1) - np.bincount(end + 1, each, slots + 1)
    found: Column = np.cumsum(steps)[:slots]
    return found


class _Ranges:
    """Where prices are least in each of many fixed ranges of slots (a sparse table, laid out once)."""

    def __init__(self, slots: int, begin: Rows, end: Rows) -> None:
        self._slots = slots
        self._level = np.floor(np.log2(end - begin + 1)).astype(np.intp)
        self._begin = begin
        self._last = end - (1 << self._level) + 1

    def cheapest(self, prices: Column) -> Rows:
        """The slot of the least price in each range."""
        row = np.arange(self._slots, dtype=np.intp)
        found = np.zeros(self._begin.size, np.intp)
        for level in range(int(self._level.max()) + 1):
            mine = self._level == level
            if mine.any():
                left, right = row[self._begin[mine]], row[self._last[mine]]
                found[mine] = np.where(prices[left] <= prices[right], left, right)
            half = 1 << level
            if row.size > half:
                left, right = row[:-half], row[half:]
                row = np.where(prices[left] <= prices[right], left, right)
        return found
