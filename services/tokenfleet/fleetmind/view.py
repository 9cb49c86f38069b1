"""What FleetMind sees of the fleet when it decides: who may serve a request, and the sites' pools, summed once.

Decides eligibility as `tokenfleet.eligibility` does, and remembers what does not change between two reports: a pool of
ninety instances is not summed anew for each request. Refuses to know costs.
"""

from collections.abc import Collection, Iterator

from tokenfleet.eligibility import ready_instances, sites_out
from tokenfleet.fleet import Fleet
from tokenfleet.fleetmind.costs import Pool, pool_of
from tokenfleet.fleetmind.promises import Promises
from tokenfleet.fleetmind.state import State
from tokenfleet_schemas.placement import Considered
from tokenfleet_schemas.request import Ask

#: under which a roster keeps our sums
_SUMS = "fleetmind"


class View:
    """Reads the fleet and the fold; owns nothing but what it remembers of them."""

    def __init__(self, fleet: Fleet, state: State, promises: Promises | None = None) -> None:
        self.fleet, self.state, self.promises = fleet, state, promises
        self._order: dict[tuple[str, str], tuple[str, ...]] = {}
        #: whether anybody says what GPUs cost
        self.priced = any(site.gpu_hour_price for site in fleet.sites.values())

    def order(self, entry: str, model: str) -> tuple[str, ...]:
        """Home sites in their order, then the nearest."""
        found = self._order.get((entry, model))
        if found is None:
            found = self._order[entry, model] = tuple(self.fleet.home_order(entry, model))
        return found

    def pool(self, ask: Ask, site: str, now_ms: float, excluded: Collection[str] = ()) -> tuple[Pool, str]:
        """A site's ready instances for a request, and why there are none; permission is not judged here."""
        fleet, capacity = self.fleet, self.state.capacity
        if excluded:
            ready = ready_instances(fleet, capacity, ask, site, now_ms, excluded)
            return pool_of(fleet, ready), "" if ready else "excluded"
        roster = capacity.rosters(fleet, ask, now_ms).get(site)
        if roster is None:  # a site that a reload removed still drains
            roster = capacity.roster(fleet, ask, site, now_ms)
        pool: Pool | None = roster.sums.get(_SUMS)
        if pool is None:
            pool = roster.sums[_SUMS] = pool_of(fleet, roster)
            load = self.state.load((site, ask.model, ask.version))
            if pool.rate is None and load.pace.prefill_tokens_per_s:
                pool.rate_one = load.pace.prefill_tokens_per_s
                pool.rate = pool.rate_one * pool.instances
            load.set_rate(pool.rate_guess, now_ms)
        return pool, "" if roster else roster.why

    @property
    def promised(self) -> bool:
        """Whether anything is promised to anybody."""
        return self.promises is not None and bool(self.promises.state.book.given)

    def closed(self, ask: Ask, site: str, now_ms: float) -> float:
        """Part of a site's room that promises to others close to a request, 0..1."""
        if self.promises is None or not self.promised:
            return 0.0

        def inside() -> Iterator[Ask]:
            for (where, model, _), load in self.state.loads.items():
                if (where, model) == (site, ask.model):
                    for request_id in (*load.asked, *load.held, *load.booked):
                        road = self.state.roads.get(request_id)
                        if road is not None:
                            yield road.ask

        return self.promises.closed(self.fleet, self.state.capacity, site, ask, now_ms, inside)

    def eligible(self, ask: Ask, now_ms: float, excluded: Collection[str] = ()) -> tuple[list[str], list[Considered]]:
        """As `eligibility.allowed_ready_sites`: the same sites in the same order, with the same reasons."""
        sites: list[str] = []
        considered: list[Considered] = []
        for site, out in sites_out(self.fleet, self.state.capacity, ask, now_ms, excluded):
            considered.append(Considered(name=site, out=out))
            if not out:
                sites.append(site)
        return sites, considered
