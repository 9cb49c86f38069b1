"""Promises of capacity: GPU-seconds per second of a model at a site, for a tenant or a class, in a time window.

Decides whether a promise can be kept beside those already given: at no moment may the promises of a site exceed its
GPUs, nor those of a model there the GPUs of its declared replicas. A promise that is granted counts from that moment,
so two that fit only one by one are never both granted, in whatever order they are asked for. Outside its window a
promise binds nobody; after it, it is forgotten. Residency and permission of a tenant are asked of `Fleet.site_denial`
and fail closed. Refuses to know who may ask, how a promise is spoken of, and what runs.
"""

from collections.abc import Iterable

import msgspec

from tokenfleet.fleet import Fleet

#: a window that ended so long ago is forgotten, ms: late cancellations still find it
FORGET_MS = 3_600_000.0
_EPSILON = 1e-9


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """One promise."""

    name: str
    site: str
    model: str
    #: whose requests it is for; of several that are named, all must fit; empty: any
    tenant: str = ""
    service_class: str = ""
    gpu_seconds_per_s: float
    from_ms: float
    until_ms: float
    #: id of the event that granted it, and the term under which it was
    granted: str = ""
    term: int = 0
    revision: int = 0

    def holds(self, now_ms: float) -> bool:
        """Whether its window is open."""
        return self.from_ms <= now_ms < self.until_ms

    def covers(self, tenant: str, service_class: str) -> bool:
        """Whether a request is one of those that it is for."""
        return self.tenant in ("", tenant) and self.service_class in ("", service_class)


def site_gpus(fleet: Fleet, site: str) -> int:
    """GPUs of a site: what it declares, else what its declared replicas take."""
    declared = fleet.sites[site]
    return declared.gpus or sum(one.gpus for one in declared.instances.values())


def model_gpus(fleet: Fleet, site: str, model: str) -> int:
    """GPUs that a site's declared replicas of a model take, all versions together."""
    return sum(one.gpus for one in fleet.sites[site].instances.values() if one.model == model)


def most(promises: Iterable[Reservation], from_ms: float, until_ms: float) -> float:
    """The greatest sum of promises at any moment of a window."""
    steps: list[tuple[float, float]] = []
    for one in promises:
        if one.from_ms < until_ms and one.until_ms > from_ms:
            steps.append((max(one.from_ms, from_ms), one.gpu_seconds_per_s))
            steps.append((min(one.until_ms, until_ms), -one.gpu_seconds_per_s))
    total = top = 0.0
    # an end comes before a beginning at the same moment: windows are half open
    for _, change in sorted(steps):
        total += change
        top = max(top, total)
    return top


def denial(fleet: Fleet, given: Iterable[Reservation], asked: Reservation, now_ms: float) -> str:
    """Why a promise cannot be given; empty when it can.

    One of `unknown_site`, `unknown_model`, `unknown_tenant`, `unknown_class`, `nobody` (it names neither),
    `not_positive`, `window`, `no_replicas`, `over_budget`, or a reason of `Fleet.site_denial`.
    """
    if asked.site not in fleet.sites:
        return "unknown_site"
    if asked.model not in fleet.models:
        return "unknown_model"
    if not asked.tenant and not asked.service_class:
        return "nobody"
    if asked.service_class and asked.service_class not in fleet.classes:
        return "unknown_class"
    if asked.tenant:
        refused = fleet.site_denial(asked.tenant, asked.model, asked.site)
        if refused:
            return refused
    if not 0 < asked.gpu_seconds_per_s < float("inf"):
        return "not_positive"
    if not asked.from_ms < asked.until_ms or asked.until_ms <= now_ms:
        return "window"
    of_model = model_gpus(fleet, asked.site, asked.model)
    if not of_model:
        return "no_replicas"
    others = [one for one in given if one.site == asked.site and one.name != asked.name]
    window = (asked.from_ms, asked.until_ms)
    if most(others, *window) + asked.gpu_seconds_per_s > site_gpus(fleet, asked.site) + _EPSILON:
        return "over_budget"
    same = [one for one in others if one.model == asked.model]
    if most(same, *window) + asked.gpu_seconds_per_s > of_model + _EPSILON:
        return "over_budget"
    return ""


class Book(msgspec.Struct):
    """The promises that stand."""

    given: dict[str, Reservation] = {}

    def ask(self, fleet: Fleet, asked: Reservation, now_ms: float) -> str:
        """Grant a promise, or say why not; a granted one is in the book when this returns.

        Asking again under the same name replaces the promise where the new one fits without the old, and leaves it as
        it was where it does not.
        """
        why = denial(fleet, self.given.values(), asked, now_ms)
        if not why:
            self.given[asked.name] = asked
        return why

    def at(self, now_ms: float) -> list[Reservation]:
        """Promises whose windows are open, by name."""
        return [one for _, one in sorted(self.given.items()) if one.holds(now_ms)]

    def within(self, now_ms: float, ahead_ms: float) -> list[Reservation]:
        """Promises whose windows are open now or will be within that time."""
        return [
            one for _, one in sorted(self.given.items()) if one.from_ms < now_ms + ahead_ms and one.until_ms > now_ms
        ]

    def sweep(self, now_ms: float) -> list[Reservation]:
        """Forget what ended long ago; returns it."""
        over = [one for one in self.given.values() if one.until_ms + FORGET_MS <= now_ms]
        for one in over:
            del self.given[one.name]
        return over


def closed_share(
    given: Iterable[Reservation],
    *,
    used: dict[str, float],
    active: set[str],
    gpus: float,
    tenant: str,
    service_class: str,
) -> float:
    """Part of a pool's room that this request must leave to others, 0..1.

    `given` are the open promises of the pool's model at its site, `used` what the holders of each use now in GPUs,
    `active` those whose holders were seen lately: a promise whose holder is idle is lent to everybody. What a holder
    already uses is taken; only what it may still claim is closed.
    """
    if gpus <= 0:
        return 0.0
    left = 0.0
    for one in given:
        if one.name in active and not one.covers(tenant, service_class):
            left += max(0.0, one.gpu_seconds_per_s - used.get(one.name, 0.0))
    return min(1.0, left / gpus)
