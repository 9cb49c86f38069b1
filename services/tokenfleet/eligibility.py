"""Which sites may and can serve a request, and why the others are out: one filter for every road and every fallback.

Decides eligibility only: permission and residency (`Fleet.site_denial`, fail closed), then whether the site has an
instance of the exact model version that is ready, fresh, routable from the gateway's zone and not excluded. Refuses
to know load, cost and who asks: FleetMind ranks what is left, SLOMax and the gateway take it in order when FleetMind
is silent. Unknown is never ready: an instance without a version, without a report or with an old one is out.
"""

from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.placement import Considered
from tokenfleet_schemas.request import Ask

#: a report older than this, judged by our own clock on its arrival, says nothing any more
FRESH_MS = 10_000.0
#: reasons of `Fleet.site_denial` that say "never", as against "not now"
DENIALS = frozenset({"unknown_tenant", "unknown_site", "model_not_permitted", "site_not_permitted", "residency"})
#: round trip between two sites of which nobody said it, ms
UNKNOWN_RTT_MS = 200.0
#: what each sender waits for its next hop beside two round trips, ms
HOP_BASE_MS = 250.0

#: why an instance is out, from the least to the most hopeful; a site is out for the most hopeful of its instances
_INSTANCE_REASONS = (
    "no_instance",
    "declared_elsewhere",
    "zone_mismatch",
    "other_version",
    "no_adapter",
    "not_routable",
    "stale",
    "not_ready",
    "draining",
    "excluded",
)


_name = itemgetter(0)


class Heard(msgspec.Struct):
    """The last report of one instance and when it reached us (our clock, ms)."""

    report: CapacityReported
    heard_ms: float


class Roster(list[Heard]):
    """Instances of a site that can take a kind of request now, in name order, as of the last report.

    `why` is the site's most hopeful reason where there are none. Whoever sums over it may keep its sums in `sums`: a
    report makes a new roster.
    """

    __slots__ = ("since_ms", "sums", "until_ms", "why")

    def __init__(self, since_ms: float) -> None:
        super().__init__()
        self.why = "no_instance"
        #: holds from its making until the first of its instances is stale
        self.since_ms, self.until_ms = since_ms, float("inf")
        self.sums: dict[str, Any] = {}


#: site, model, version, adapter, zone of entry
_Kind = tuple[str, str, str, str, str]


class CapacityView(msgspec.Struct, dict=True):
    """The fold of `capacity.reported`: per site and instance the latest report, in order of arrival.

    A Struct, so that a core can put it into its checkpoint as it is. Rosters are derived from it and left out.
    """

    sites: dict[str, dict[str, Heard]] = {}

    def __post_init__(self) -> None:
        self._rosters: dict[_Kind, Roster] = {}
        self._rosters_of: Fleet | None = None
        self._kinds: dict[str, list[_Kind]] = {}
        #: by kind without its site: (since, until, site → roster), until the next report
        self._everywhere: dict[tuple[str, str, str, str], tuple[float, float, dict[str, Roster]]] = {}
        #: nobody was heard before this: of the oldest report when it was last looked for
        self._oldest_ms = -float("inf")

    def fold(self, report: CapacityReported, now_ms: float) -> bool:
        """Take a report in; False for one of nobody, and for a redelivery, which makes no old sample fresh again."""
        if not report.instance:
            return False
        instances = self.sites.setdefault(report.site, {})
        known = instances.get(report.instance)
        if known is not None and known.report.id == report.id:
            return False
        instances[report.instance] = Heard(report, now_ms)
        if report.site in self._kinds:
            for kind in self._kinds.pop(report.site):
                del self._rosters[kind]
            self._everywhere.clear()
        return True

    def renew(self, now_ms: float) -> None:
        """The listener was deaf until now: silence counts from here, for every instance."""
        for instances in self.sites.values():
            for heard in instances.values():
                heard.heard_ms = max(heard.heard_ms, now_ms)
        self._forget_rosters()

    def forget(self, before_ms: float) -> None:
        """Drop instances not heard since; keeps the view bounded when instances come and go under new names."""
        if before_ms <= self._oldest_ms:
            return
        for instances in self.sites.values():
            for name in [n for n, heard in instances.items() if heard.heard_ms < before_ms]:
                del instances[name]
                self._forget_rosters()
        left = [heard.heard_ms for instances in self.sites.values() for heard in instances.values()]
        self._oldest_ms = min(left, default=before_ms)  # a clock never goes back: who comes is heard later

    def _forget_rosters(self) -> None:
        self._rosters.clear()
        self._kinds.clear()
        self._everywhere.clear()

    def rosters(self, fleet: Fleet, ask: Ask, now_ms: float) -> dict[str, Roster]:
        """`roster` of every site of the fleet file, to be read only."""
        kind = (ask.model, ask.version, ask.adapter, ask.entry_zone)
        found = self._everywhere.get(kind)
        if found is not None and self._rosters_of is fleet and found[0] <= now_ms <= found[1]:
            return found[2]
        made = {site: self.roster(fleet, ask, site, now_ms) for site in fleet.sites}
        until_ms = min((roster.until_ms for roster in made.values()), default=now_ms)
        self._everywhere[kind] = now_ms, until_ms, made
        return made

    def roster(self, fleet: Fleet, ask: Ask, site: str, now_ms: float) -> Roster:
        """Who can take this request at a site if nobody is excluded, found once per report and kind of request.

        At hundreds of instances a site and thousands of requests a second nobody can look at each for each.
        """
        if self._rosters_of is not fleet:
            self._forget_rosters()
            self._rosters_of = fleet
        kind = (site, ask.model, ask.version, ask.adapter, ask.entry_zone)
        found = self._rosters.get(kind)
        if found is not None and found.since_ms <= now_ms <= found.until_ms:
            return found
        made = Roster(now_ms)
        able: list[tuple[str, Heard]] = []
        for name, heard in self.instances(site).items():
            if heard.report.model != ask.model:
                continue
            if now_ms - heard.heard_ms <= FRESH_MS:
                made.until_ms = min(made.until_ms, heard.heard_ms + FRESH_MS)
            why = instance_out(fleet, heard, ask, now_ms)
            if not why:
                able.append((name, heard))
            elif _INSTANCE_REASONS.index(why) > _INSTANCE_REASONS.index(made.why):
                made.why = why
        able.sort(key=_name)
        made.extend(heard for _, heard in able)
        if found is None:
            self._kinds.setdefault(site, []).append(kind)
        self._rosters[kind] = made
        return made

    def instances(self, site: str) -> dict[str, Heard]:
        """What is known of a site's instances."""
        return self.sites.get(site, {})


def instance_out(fleet: Fleet, heard: Heard, ask: Ask, now_ms: float, excluded: Collection[str] = ()) -> str:
    """Why an instance cannot take this request now; empty when it can.

    One of `declared_elsewhere`, `zone_mismatch`, `other_version`, `no_adapter`, `not_routable`, `stale`,
    `not_ready`, `draining`, `excluded`. Permission and residency are the site's: see `allowed_ready_sites`.
    """
    report = heard.report
    site = fleet.sites.get(report.site)
    # An agent that reports under another site's name would carry data over a border: its word alone is not enough.
    # (Names are unique over the fleet, so one that its own site declares is declared nowhere else.)
    declared_here = site is not None and report.instance in site.instances
    if not declared_here and fleet.instance_site(report.instance) not in (None, report.site):
        return "declared_elsewhere"
    if site is None or report.zone != site.zone:
        return "zone_mismatch"
    if report.model != ask.model or not report.version or report.version != ask.version:
        return "other_version"
    if ask.adapter and ask.adapter not in report.adapters:
        return "no_adapter"
    if "*" not in report.routable_from and ask.entry_zone not in report.routable_from:
        return "not_routable"
    if now_ms - heard.heard_ms > FRESH_MS:
        return "stale"
    if report.draining:
        return "draining"
    if not report.ready:
        return "not_ready"
    if report.instance in excluded:
        return "excluded"
    return ""


def ready_instances(
    fleet: Fleet, view: CapacityView, ask: Ask, site: str, now_ms: float, excluded: Collection[str] = ()
) -> list[Heard]:
    """The instances of a site that can take this request now, in name order, to be read only; permission is not asked.

    Where nobody is excluded it is the view's `Roster`.
    """
    roster = view.roster(fleet, ask, site, now_ms)
    return [heard for heard in roster if heard.report.instance not in excluded] if excluded else roster


def site_out(
    fleet: Fleet, view: CapacityView, ask: Ask, site: str, now_ms: float, excluded: Collection[str] = ()
) -> str:
    """Why a site may not or cannot serve this request now; empty when it can.

    A reason in `DENIALS` means never; any other is the most hopeful reason among its instances of the model.
    """
    denial = fleet.site_denial(ask.tenant, ask.model, site)
    if denial:
        return denial
    roster = view.roster(fleet, ask, site, now_ms)
    if not roster:
        return roster.why
    if excluded and all(heard.report.instance in excluded for heard in roster):
        return "excluded"
    return ""


def allowed_ready_sites(
    fleet: Fleet, view: CapacityView, ask: Ask, now_ms: float, excluded: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[Considered, ...]]:
    """Sites that may and can serve a request, home sites of its entry first in their order, then the nearest.

    The second part names every site that was considered, with the reason of those that are out (`site_out`).
    """
    sites: list[str] = []
    considered: list[Considered] = []
    for site, why in sites_out(fleet, view, ask, now_ms, excluded):
        considered.append(Considered(name=site, out=why))
        if not why:
            sites.append(site)
    return tuple(sites), tuple(considered)


def sites_out(
    fleet: Fleet, view: CapacityView, ask: Ask, now_ms: float, excluded: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """What `site_out` says of each site, home sites of the request's entry first in their order, then the nearest."""
    if excluded:
        out = set(excluded)
        for site in fleet.home_order(ask.entry, ask.model):
            yield site, site_out(fleet, view, ask, site, now_ms, out)
        return
    rosters = view.rosters(fleet, ask, now_ms)
    for site, denial in _denials(fleet, ask.tenant, ask.model, ask.entry):
        yield site, denial or ("" if rosters[site] else rosters[site].why)


def _denials(fleet: Fleet, tenant: str, model: str, entry: str) -> tuple[tuple[str, str], ...]:
    """Sites in the order of an entry, each with `Fleet.site_denial`."""
    known: dict[tuple[str, str, str], tuple[tuple[str, str], ...]] = fleet.__dict__.setdefault("denials", {})
    found = known.get((tenant, model, entry))
    if found is None:
        found = tuple((site, fleet.site_denial(tenant, model, site)) for site in fleet.home_order(entry, model))
        if tenant in fleet.tenants and model in fleet.models and entry in fleet.sites:  # others' names would add up
            known[tenant, model, entry] = found
    return found


def permitted_sites(fleet: Fleet, tenant: str, model: str) -> tuple[str, ...]:
    """Sites with engines to which this tenant's data for this model may go, ready or not."""
    known: dict[tuple[str, str], tuple[str, ...]] = fleet.__dict__.setdefault("permitted_sites", {})
    found = known.get((tenant, model))
    if found is None:
        sites = fleet.sites.items()
        found = tuple(s for s, site in sites if site.instances and not fleet.site_denial(tenant, model, s))
        if tenant in fleet.tenants and model in fleet.models:  # a foreign publisher's names would add up
            known[tenant, model] = found
    return found


def zone_bound(fleet: Fleet, tenant: str, model: str, version: str) -> bool:
    """Whether residency alone keeps a tenant from a site that is declared to serve this version."""
    return any(
        (model, version) in fleet.pools(site) and fleet.site_denial(tenant, model, site) == "residency"
        for site in fleet.sites
    )


def hop_timeout_ms(fleet: Fleet, entry: str, site: str) -> float:
    """How long a sender waits for the next hop before it acts itself: 250 ms + 2 RTT, ms."""
    rtt = fleet.rtt_ms(entry, site)
    return HOP_BASE_MS + 2 * (UNKNOWN_RTT_MS if rtt is None else rtt)


def fraction(*parts: str) -> float:
    """A number in [0, 1) from words: breaks ties and jitters without dice, the same on every replica."""
    return int.from_bytes(blake2b("\x1f".join(parts).encode(), digest_size=7).digest(), "big") / 2.0**56


def retry_after_s(request_id: str, reset_ms: float) -> float:
    """Whole seconds for a Retry-After header: the true reset within ±1 s, at least 1, spread over clients."""
    return float(max(1, int(max(0.0, reset_ms) / 1000.0 + fraction(request_id, "retry_after"))))


def no_site_reason(
    fleet: Fleet, view: CapacityView, ask: Ask, now_ms: float, considered: Iterable[Considered]
) -> tuple[str, float]:
    """Why nobody can be asked, from what `allowed_ready_sites` considered: (reason of `REASONS`, wait in ms).

    403 (`residency`, `not_permitted`) when no site with engines is allowed at all; 503 `residency_no_capacity` when
    only residency keeps the request from an engine that is ready; `no_capacity` when every ready engine has failed
    this request or drains; else `model_not_ready`. The wait is how soon asking again may help; 0 where it never does.
    """
    outs = {one.name: one.out for one in considered}
    if all(out in DENIALS for out in outs.values()):
        serves = {s for s in outs if any(i.model == ask.model for i in fleet.sites[s].instances.values())}
        return ("residency" if any(outs[s] == "residency" for s in serves or outs) else "not_permitted"), 0.0
    for site, out in outs.items():
        if out == "residency" and ready_instances(fleet, view, ask, site, now_ms):
            return "residency_no_capacity", 5_000.0
    if any(out in ("excluded", "draining") for out in outs.values()):
        return "no_capacity", 3_000.0
    return "model_not_ready", 5_000.0
