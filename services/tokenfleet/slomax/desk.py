"""SLOMax's desk: what all of its rooms share, the fold, the offices, the effects to come and how a request ends.

Decides nothing beyond that an end is an end. Refuses to know who is let in and who goes next.
"""

from heapq import heappush

from tokenfleet.effects import Effect, Publish
from tokenfleet.fleet import Fleet
from tokenfleet.offices import Offices
from tokenfleet.slomax import fairness
from tokenfleet.slomax.state import INFINITY, Held, State
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import PlacementRefused


class Desk:
    """The fold and the tools of one replica; its rooms are classes that add their own events and decisions."""

    def __init__(self, fleet: Fleet, *, replica: str) -> None:
        self.fleet = fleet
        self.replica = replica
        self.state = State()
        self.offices = Offices(replica)
        self._timers: list[tuple[float, str, str]] = []
        self._out: list[Effect] = []

    def _find_held(self, request_id: str) -> Held | None:
        key = self.state.where.get(request_id)
        return None if key is None else self.state.pools[key].held.get(request_id)

    def _unhold(self, request_id: str) -> None:
        """A hold ends without an assignment; a release under way to it takes no room."""
        held = self._find_held(request_id)
        if held is not None:
            if held.released:
                fairness.take_back(self.state.pools[self.state.where[request_id]], held.released)
            self.state.unhold(request_id)

    def _refused(self, message: PlacementRefused, now_ms: float) -> None:
        """Whoever refused: nothing is owed any more. What it reserved is given back when the gateway says the end."""
        self._unhold(message.request_id)
        one = self.state.open.get(message.request_id)
        if one is not None:
            one.refused = message
            one.watch_until_ms = INFINITY

    def _close(self, rid: str, gateway: str, tokens: float, now_ms: float) -> None:
        self._unhold(rid)
        self.state.leave(rid, now_ms)
        one = self.state.open.pop(rid, None)
        self.state.presence.close(rid, gateway)
        self.state.bury(rid, now_ms)
        self.state.bills.pop(rid, None)
        # What nobody knew to be open has reserved nothing.
        account = self.state.accounts.get((one.ask.tenant, one.ask.entry)) if one is not None else None
        if account is not None and rid in account.open:
            # The estimate goes back into the bucket, what was really used stays out.
            account.level += account.open.pop(rid) - tokens

    def _publish(self, event: Event) -> None:
        self._out.append(Publish(event))

    def _arm(self, kind: str, at_ms: float, request_id: str) -> None:
        if at_ms < INFINITY:
            heappush(self._timers, (at_ms, kind, request_id))
