"""Other systems' admission, for comparison in simulation only: limits at the router, and pools split once and for all.

Decides how many requests an instance may have (`Concurrency`), when a pool is full (`Saturation`) and which instances
are whose (`Partition`); all of it at the router, where those systems do it too, on the same bookings, reports and holds
as ours. What may not be dispatched waits in our holds, first come first served by tier. Refuses to know what a request
will generate and which instance is best among those that are open: that is the placement's rule.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from tokenfleet.effects import Effect, Note
from tokenfleet.fleet import Fleet
from tokenfleet.slomax.policy import Choice, Level, fits
from tokenfleet.slomax.state import Held
from tokenfleet.slomax.state import Pool as HeldPool
from tokenfleet.tokenpilot.board import CODE, Board, Codes
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.policy import FILTERS, NO_ROOM, Candidate, Filter, Picker, Room, Scorer, Situation
from tokenfleet.tokenpilot.state import Load, Pool, Waiting
from tokenfleet_schemas.placement import PlacementRequested

#: prompt and KV tokens of room where only requests are counted: more than any request has
_ANY_TOKENS = 1 << 40
#: requests in flight per endpoint: the default of llm-d's concurrency detector (`maxConcurrency`; headroom 0)
CONCURRENCY = 100
#: llm-d's utilisation detector: waiting requests and share of KV at which an endpoint is full, and no headroom
QUEUE_DEPTH, KV_SHARE = 5, 0.8


class Gate(Protocol):
    """How many more requests each instance of a pool may be given now, by its bookings and its KV capacity."""

    #: whether requests of sheddable classes are refused while nothing is open, instead of held
    sheds: bool

    def __call__(self, loads: Sequence[tuple[Load, int]]) -> list[int]: ...


class Concurrency:
    """At most so many requests in flight per instance (llm-d-router, `concurrency-detector`, mode `requests`).

    The pool is full when the sum is, an endpoint when its own count is: with no headroom that is the same.
    """

    sheds = False

    def __init__(self, limit: int = CONCURRENCY) -> None:
        self.limit = limit

    def __call__(self, loads: Sequence[tuple[Load, int]]) -> list[int]:
        """Places left of each instance."""
        return [max(0, self.limit - load.sequences) for load, _ in loads]


class Saturation:
    """Closed while the pool is saturated (llm-d-router, `utilization-detector`; llm-d's default).

    An instance's saturation is the larger of its waiting requests over 5 and its share of KV over 0.8; the pool's is
    their mean. Below 1 the pool is open, but for instances beyond their own limits. Where they scrape metrics, every 50
    ms, this counts the router's own bookings, as all baselines here do: dispatched without a first token is waiting.
    """

    sheds = True

    def __call__(self, loads: Sequence[tuple[Load, int]]) -> list[int]:
        """Places left of each instance: up to the limit of its queue."""
        if not loads:
            return []
        queued = [load.sequences - load.decoding for load, _ in loads]
        shares = [load.kv_tokens_taken / total if total else 0.0 for load, total in loads]
        mean = sum(max(q / QUEUE_DEPTH, kv / KV_SHARE) for q, kv in zip(queued, shares, strict=True)) / len(loads)
        if mean >= 1.0:
            return [0] * len(loads)
        return [max(0, QUEUE_DEPTH - q) if kv <= KV_SHARE else 0 for q, kv in zip(queued, shares, strict=True)]


class GatedPilot(TokenPilot):
    """A TokenPilot whose room is a gate's: dispatches while it is open, holds while it is not."""

    def __init__(
        self,
        fleet: Fleet,
        site: str,
        *,
        replica: str,
        gate: Gate,
        scorer: Scorer | None = None,
        picker: Picker | None = None,
    ) -> None:
        super().__init__(fleet, site, replica=replica, scorer=scorer, picker=picker)
        self.gate = gate

    def _answer(self, scope: str, pool: Pool, waiting: Waiting, now_ms: float) -> Iterator[Effect]:
        cls = self.fleet.classes.get(waiting.request.ask.service_class)
        if self.gate.sheds and cls is not None and cls.sheddable and waiting.held is None:
            names = [name for name in self._instances_of(pool) if self._usable(name, now_ms)]
            if names and not any(self._places(names).values()):
                yield from self._refuse(scope, pool, waiting, "saturated", now_ms)
                yield Note("refused", {"reason": "saturated"})
                return
        yield from super()._answer(scope, pool, waiting, now_ms)

    def _places(self, names: Sequence[str]) -> dict[str, int]:
        heard = self.state.view.instances(self.site)
        loads = [(self.state.load(name), heard[name].report.kv_tokens_total or 0) for name in names]
        return dict(zip(names, self.gate(loads), strict=True))

    def _consider(
        self, request: PlacementRequested, waiting: Waiting, now_ms: float, *, force: bool = False, only: str = ""
    ) -> tuple[Situation, list[Candidate]]:
        situation, candidates = super()._consider(request, waiting, now_ms, force=force, only=only)
        able = [c for c in candidates if not c.out]
        places = self._places([c.name for c in able])
        for c in able:
            c.lacks = "" if places[c.name] else "sequences"
        board = situation.board
        if board is not None:
            open_ = np.array([places.get(name, 0) > 0 for name in board.names], np.bool_)
            situation.roomy_rows = situation.able_rows & open_
        return situation, candidates

    def _room(self, name: str, now_ms: float) -> Room:
        if not self._usable(name, now_ms):
            return NO_ROOM
        report = self.state.view.instances(self.site)[name].report
        pool = self._pool(report.model, report.version)
        names = [name] if pool is None else [one for one in self._instances_of(pool) if self._usable(one, now_ms)]
        places = self._places(names)[name]
        if not places:
            return NO_ROOM
        return Room(_ANY_TOKENS, True, places, _ANY_TOKENS, empty=self.state.load(name).sequences == 0)


# ---------------------------------------------------------------------------------------------- split pools


def owners(fleet: Fleet, site: str, model: str, version: str) -> dict[str, frozenset[str]]:
    """Whose each instance of a pool is: instances by name, to classes by their configured shares.

    Largest remainder, at least one each; with fewer instances than classes some share one.
    """
    names = fleet.pools(site)[model, version]
    classes = sorted(fleet.classes)
    if len(names) <= len(classes):
        return {name: frozenset(classes[n :: len(names)]) for n, name in enumerate(names)}
    whole = sum(fleet.classes[cls].share for cls in classes)
    even = 1.0 / len(classes)
    shares = {cls: (fleet.classes[cls].share / whole if whole else even) * len(names) for cls in classes}
    counts = {cls: max(1, int(shares[cls])) for cls in classes}
    while sum(counts.values()) < len(names):
        counts[max(classes, key=lambda cls: (shares[cls] - counts[cls], cls))] += 1
    while sum(counts.values()) > len(names):
        counts[max((c for c in classes if counts[c] > 1), key=lambda cls: (counts[cls] - shares[cls], cls))] -= 1
    found: dict[str, frozenset[str]] = {}
    left = iter(names)
    for cls in classes:
        found |= {next(left): frozenset((cls,)) for _ in range(counts[cls])}
    return found


class Partition:
    """A filter for the live TokenPilot: an instance of other classes is none."""

    def __init__(self, fleet: Fleet, site: str) -> None:
        self.of = {
            name: classes
            for model, version in fleet.pools(site)
            for name, classes in owners(fleet, site, model, version).items()
        }

    def __call__(self, situation: Situation, board: Board) -> Codes:
        """See `tokenfleet.tokenpilot.policy.Filter`."""
        cls = situation.request.ask.service_class
        mine = [cls in self.of.get(name, ()) for name in board.names]
        return np.where(mine, 0, CODE["declared_elsewhere"]).astype(np.int8)


def split_filters(fleet: Fleet, site: str) -> tuple[Filter, ...]:
    """The live filters, and the partition."""
    return (*FILTERS, Partition(fleet, site))


# ---------------------------------------------------------------------------------------------- who goes next


class Bands:
    """Strict priority by tier, first come first served inside: the queue of llm-d's flow control with its defaults."""

    def __call__(self, fleet: Fleet, pool: HeldPool, instance: str, room: Level, now_ms: float) -> Choice:
        """The hold that goes next; see `tokenfleet.slomax.policy.Chooser`."""
        waiting = [
            held
            for held in pool.held.values()
            if not held.released and self._may(fleet, held, instance) and fits(held, instance, room, now_ms)
        ]
        first = min(waiting, key=lambda held: self._place(fleet, held), default=None)
        if first is not None:
            return Choice(first, "in_order")
        return Choice(None, "nothing_fits" if pool.waiting() else "nothing_held")

    def _may(self, fleet: Fleet, held: Held, instance: str) -> bool:
        return True

    @staticmethod
    def _place(fleet: Fleet, held: Held) -> tuple[float, int, str]:
        cls = fleet.classes.get(held.service_class)
        return (float("inf") if cls is None else cls.tier, held.received_unix_ms, held.request_id)


class Split(Bands):
    """First come first served, each class in its own instances only."""

    def __init__(self, fleet: Fleet) -> None:
        self.of = {name: one for site in fleet.sites for name, one in Partition(fleet, site).of.items()}

    def _may(self, fleet: Fleet, held: Held, instance: str) -> bool:
        return held.service_class in self.of.get(instance, ())


def gate_named(admission: str) -> Gate | None:
    """The gate of an admission's name: `gate`, `concurrency`, or `concurrency-N` with another limit; else None."""
    if admission == "gate":
        return Saturation()
    name, _, limit = admission.partition("-")
    if name != "concurrency" or (limit and not limit.isdigit()) or limit == "0" or admission.endswith("-"):
        return None
    return Concurrency(int(limit)) if limit else Concurrency()
