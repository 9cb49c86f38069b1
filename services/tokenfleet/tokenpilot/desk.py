"""What every room of TokenPilot shares: its fold, its offices, its knobs, and small questions about them.

Decides nothing. The rooms stand on one another in this order: desk, choosing, deciding, rooms, fold, core; each has one
purpose and uses only those below it.
"""

from collections.abc import Sequence

import msgspec

from tokenfleet.eligibility import FRESH_MS
from tokenfleet.fleet import Fleet
from tokenfleet.offices import Offices
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.board import Board, Column
from tokenfleet.tokenpilot.exact_index import ExactIndex
from tokenfleet.tokenpilot.pins import Pins
from tokenfleet.tokenpilot.policy import NO_ROOM, Room
from tokenfleet.tokenpilot.predictor import Model
from tokenfleet.tokenpilot.prefix_index import EMPTY, Chain, PrefixIndex
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import NO_INSTANCE, Booking, Pool, State, Waiting
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementHeld,
    Work,
)

#: the core asks to be woken at least this often, so that silence and patience are noticed, ms
TICK_MS = 1000.0
#: instances that nobody reported for so long are forgotten, ms
FORGET_MS = 600_000.0
INFINITY = float("inf")


class Offer(msgspec.Struct):
    """What was last said of one instance's room. Not part of the fold: a new owner offers anew."""

    revision: int = 0
    id: str = ""
    room: Room = NO_ROOM
    last_released: int = -1
    said_ms: float = -INFINITY
    #: first offer since the last answer; None: answered, or nothing was offered
    unanswered_since_ms: float | None = None
    declined_until_ms: float = -INFINITY
    #: when a postponed offer is due
    due_ms: float = INFINITY

    def overdue(self, answer_ms: float, now_ms: float) -> bool:
        """Whether nobody answered it in time."""
        return self.unanswered_since_ms is not None and now_ms >= self.unanswered_since_ms + answer_ms


class Desk:
    """State and what can be asked of it; see the module."""

    def __init__(
        self,
        fleet: Fleet,
        site: str,
        *,
        replica: str,
        knobs: Knobs | None = None,
        filters: Sequence[policy.Filter] = policy.FILTERS,
        scorer: policy.Scorer | None = None,
        picker: policy.Picker | None = None,
    ) -> None:
        self.fleet = fleet
        self.site = site
        self.replica = replica
        self.knobs = knobs or Knobs()
        self.filters = filters
        self._scorer = scorer
        self._picker = picker
        #: a picker of somebody else's sees every candidate, not the best only
        self._everybody = picker is not None
        #: the last packed chain and its digests: a decision and its booking ask for the same
        self._chain_of: tuple[str, Chain] = "", EMPTY
        #: columns per model
        self._boards: dict[str, Board] = {}
        self.offices = Offices(replica)
        self.index = PrefixIndex(self.knobs.prefix_digests)
        #: what bookings hold of it, which needs no room a second time
        self.pins = Pins(self.index)
        #: follows what engines say they hold into the index, where they say it
        self.exact = ExactIndex(site, replica=replica, content=self.index)
        self.state = State(site)
        self._offers: dict[str, Offer] = {}
        #: those of them that may be due earlier than when the next wake-up was last thought over
        self._stirred: set[str] = set()
        #: and those whose room has a limit (`lanes`)
        self._limited: set[str] = set()
        #: by model version, models that have learned from few requests; None: to be looked for anew
        self._few: dict[str, dict[str, Model]] | None = None
        #: bookings of ours that have not been seen in the stream yet, and some that have
        self._unconfirmed: dict[str, Booking] = {}
        #: instances whose room changed while this message was handled
        self._touched: set[str] = set()
        #: by (model, version): what `lanes` needs (when, of how many, smallest size that may be limited, instances per
        #: border), the limits at a time, and the longest hold that was held long enough at a time
        self._needs: dict[tuple[str, str], tuple[float, int, float, Column]] = {}
        self._limits: dict[tuple[str, str], tuple[float, Column | None]] = {}
        self._aged_tokens: dict[tuple[str, str], tuple[float, float]] = {}
        self._wake_ms = INFINITY
        #: how long SLOMax may take to answer, and in which fleet
        self._answers: tuple[Fleet | None, float] = None, 0.0
        self._ensure_pools()

    def _release(self, booking_id: str, now_ms: float) -> Booking | None:
        """Take a booking back, and what it held with others; None if it is not booked."""
        booking = self.state.release(booking_id, now_ms)
        if booking is not None:
            self.pins.unpin(booking_id)
            self.state.load(booking.instance).shared_kv_tokens = self.pins.shared_tokens(booking.instance)
        return booking

    def _touch(self, name: str) -> None:
        """The instance's load or report changed: its room may be offered."""
        self._ask_about(name)
        self._dirty(name)

    def _ask_about(self, name: str) -> None:
        """Its room may be offered, though its load and its report are what they were."""
        self._touched.add(name)
        self._limits.clear()

    def _dirty(self, name: str) -> None:
        """Something that its columns show changed."""
        heard = self.state.view.instances(self.site).get(name)
        model = heard.report.model if heard is not None else ""
        for its, board in self._boards.items():
            if its == model or name in board.row:
                board.dirty.add(name)

    def _queued(self, pool: Pool, but: Waiting) -> int:
        """How many others wait for any room here; who waits for an instance does not close the pool to newcomers."""
        mine = but.held is not None and not but.held.bound and queued_work(but) is not None
        return pool.held - pool.blocked - sum(pool.bound.values()) - mine

    def _scope(self, model: str, version: str) -> str:
        return f"pool:{self.site}:{model}:{version}"

    def _pool(self, model: str, version: str) -> Pool | None:
        return self.state.pools.get(self._scope(model, version))

    def _ensure_pools(self) -> None:
        for model, version in self.fleet.pools(self.site):
            self.state.pools.setdefault(self._scope(model, version), Pool(model, version))

    def _instances_of(self, pool: Pool) -> list[str]:
        return sorted(
            name
            for name, heard in self.state.view.instances(self.site).items()
            if heard.report.model == pool.model and heard.report.version == pool.version
        )

    def _forget_offers(self, scope: str) -> None:
        """Another owner offers now, or this one offers anew."""
        for name in self._instances_of(self.state.pools[scope]):
            self._offers.pop(name, None)
            self._limited.discard(name)

    def _touch_pool(self, pool: Pool) -> None:
        for name in self._instances_of(pool):
            self._touch(name)

    def _offer_of(self, name: str) -> Offer:
        found = self._offers.get(name)
        if found is None:
            found = self._offers[name] = Offer()
        return found

    def _is_ours(self, instance: str) -> bool:
        return instance in self.state.view.instances(self.site) or instance in self.fleet.sites[self.site].instances

    def _outdated(self, office: str, term: int) -> bool:
        """Whether a command of another office comes from before its present owner; fallbacks have no term."""
        known = self.state.terms.get(office, 0)
        if term > known:
            self.state.terms[office] = term
        return 0 < term < known

    def _decided_here(self, message: PlacementHeld | PlacementAssigned) -> Pool | None:
        """The pool that a TokenPilot of this site decided for, unless a later owner's mark came before it."""
        scope = self._scope(message.model, message.version)
        return None if self.offices.void(scope, message.term) else self.state.pools.get(scope)

    def _drop_answered(self, pool: Pool, message: PlacementAssigned) -> None:
        waiting = pool.waiting.get(message.request_id)
        if waiting is not None:
            known = waiting.request
            if (known.attempt, known.revision) <= (message.attempt, message.revision):
                pool.drop(message.request_id)
        self.state.settle(message.request_id, message.gateway)

    def _drop_waiting(self, pool: Pool, request_id: str) -> None:
        waiting = pool.drop(request_id)
        if waiting is not None:
            self.state.settle(request_id, waiting.request.ask.gateway)

    def _usable(self, name: str, now_ms: float) -> bool:
        """Whether requests may go to the instance, as far as that does not depend on the request."""
        heard = self.state.view.instances(self.site).get(name)
        if heard is None:
            return False
        report = heard.report
        fresh = now_ms - heard.heard_ms <= FRESH_MS
        return report.ready and not report.draining and fresh and bool(report.endpoint_url)


def takes(room: Room, name: str, waiting: Waiting) -> bool:
    """Whether a hold waits for room, would go to this instance, and fits."""
    work, held = queued_work(waiting), waiting.held
    if work is None or held is None or (held.bound and held.home_instance != name):
        return False
    return not room.lacks(work)


def queued_work(waiting: Waiting) -> Work | None:
    """The work of a hold that waits for room; None when it waits for an instance, or for its first answer."""
    held = waiting.held
    return held.work if held is not None and held.lacks != NO_INSTANCE else None
