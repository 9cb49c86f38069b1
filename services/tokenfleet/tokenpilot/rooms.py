"""Room: when an instance's room is offered, and who gets it when nobody answers.

Decides when to offer, at most so often as the knobs say, and fills what SLOMax leaves unanswered, earliest deadline
first. Refuses to know who should go first otherwise.
"""

from collections.abc import Collection, Iterator
from operator import attrgetter

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import UNKNOWN_RTT_MS
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.deciding import Deciding
from tokenfleet.tokenpilot.desk import INFINITY, TICK_MS, queued_work, takes
from tokenfleet.tokenpilot.policy import Room
from tokenfleet.tokenpilot.state import Pool, Waiting
from tokenfleet_schemas.room import RoomOffered

#: bound holds that think again when an instance runs dry, and how long each rests after that, ms
ATTRACT_MAX, THINK_GAP_MS = 4, 100.0
#: bound holds that think again of themselves when woken, and after how long, ms
THINK_MAX, THINK_MS = 32, 1000.0
_held = attrgetter("held")


class Rooms(Deciding):
    """See the module."""

    def _after(self, now_ms: float) -> Iterator[Effect]:
        """Offer the room that changed, then ask to be woken when something is due."""
        touched, self._touched = self._touched, set()
        if touched and not any(map(_held, self.state.pools.values())):
            touched.clear()  # nobody waits for room
        if touched:  # what ended on one instance may lift the limit of another
            touched |= self._limited
        for name in sorted(touched):
            heard = self.state.view.instances(self.site).get(name)
            if heard is None:
                continue
            scope = self._scope(heard.report.model, heard.report.version)
            pool = self.state.pools.get(scope)
            if pool is None or not pool.held or not self.offices.term(scope):
                continue
            if self.fleet.policy.placement in policy.AT_ONCE:
                yield from self._answer_all(scope, pool, now_ms)
            else:
                yield from self._offer(scope, pool, name, now_ms)
        # What was not stirred is due no earlier than the wake-up that is asked for already.
        names = self._offers if self._wake_ms == INFINITY else self._stirred
        due_ms = self._next_due_ms(names, now_ms)
        self._stirred.clear()
        if due_ms < self._wake_ms:
            self._wake_ms = due_ms
            yield WakeAt(due_ms)

    def _offer(self, scope: str, pool: Pool, name: str, now_ms: float) -> Iterator[Effect]:
        offer, room = self._offer_of(name), self._room(name, now_ms)
        self._stirred.add(name)
        usable = self._usable(name, now_ms)
        if usable and room.idle and pool.bound:
            yield from self._attract(scope, pool, name, room, now_ms)
        if usable and not (room.any() and any(takes(room, name, w) for w in pool.waiting.values())):
            # No held request fits: asking would only be declined. Perhaps in a while.
            wanted = [
                work.prefill_tokens
                for w in pool.waiting.values()
                if (work := queued_work(w)) and w.held and (not w.held.bound or w.held.home_instance == name)
            ]
            if wanted and room.sequences and (room.kv_tokens or room.empty):
                offer.due_ms = min(offer.due_ms, self._room_due_ms(name, min(wanted), now_ms) + 1.0)
            return
        if not usable and not offer.room.any():
            return  # nothing was offered, nothing is taken back
        same = (room, pool.last_released) == (offer.room, offer.last_released)
        if same and (
            offer.unanswered_since_ms is not None
            or now_ms < offer.declined_until_ms
            or (offer.declined_until_ms <= offer.said_ms and now_ms - offer.said_ms < self.knobs.offer_repeat_ms)
        ):
            return
        if now_ms - offer.said_ms < self.knobs.offer_gap_ms:
            offer.due_ms = offer.said_ms + self.knobs.offer_gap_ms
            return
        term = self.offices.term(scope)
        offer.revision += 1
        offer.id = f"{name}:room:{term}:{offer.revision}"
        offer.room, offer.last_released = room, pool.last_released
        if room.longest_tokens:
            self._limited.add(name)
        else:
            self._limited.discard(name)
        offer.said_ms, offer.due_ms = now_ms, INFINITY
        if not room.any():
            offer.unanswered_since_ms = None
        elif offer.unanswered_since_ms is None:
            offer.unanswered_since_ms = now_ms
        yield Publish(
            RoomOffered(
                id=offer.id,
                term=term,
                time_unix_ms=int(now_ms),
                site=self.site,
                model=pool.model,
                version=pool.version,
                instance=name,
                revision=offer.revision,
                prefill_tokens=room.prefill_tokens,
                idle=room.idle,
                sequences=room.sequences,
                kv_tokens=room.kv_tokens,
                longest_tokens=room.longest_tokens,
                last_released=pool.last_released,
                held=pool.held,
            )
        )
        yield Note("offered")

    def _think_due(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """Time alone may make a home not worth waiting for; and it may be gone."""
        if not pool.bound:
            return
        due = [w for w in pool.waiting.values() if now_ms - w.thought_ms >= THINK_MS]
        for waiting in due[:THINK_MAX]:
            yield from self._think_again(scope, pool, waiting, now_ms)

    def _attract(self, scope: str, pool: Pool, name: str, room: Room, now_ms: float) -> Iterator[Effect]:
        """An instance runs dry: a few of those that wait for the busiest other one think again."""
        others = [home for home in pool.bound if home != name]
        if not room.any() or not others:
            return
        busiest = max(others, key=lambda home: (pool.bound_tokens[home], home))
        left = ATTRACT_MAX
        for waiting in list(pool.waiting.values()):
            held = waiting.held
            if held is None or not held.bound or held.home_instance != busiest:
                continue
            if now_ms - waiting.thought_ms >= THINK_GAP_MS:
                yield from self._think_again(scope, pool, waiting, now_ms)
                left -= 1
                if not left:
                    return

    def _fill_unanswered(self, scope: str, pool: Pool, now_ms: float) -> Iterator[Effect]:
        """SLOMax is silent: fill the instances that it was offered, earliest deadline first, and say so."""
        answer_ms = self._answer_ms()
        for name in self._instances_of(pool):
            offer = self._offers.get(name)
            if offer is None or not offer.overdue(answer_ms, now_ms):
                continue
            offer.unanswered_since_ms = None
            filled = 0
            for waiting in sorted(pool.waiting.values(), key=_by_deadline):
                if waiting.patience_left_ms(now_ms, self.knobs.hold_max_ms) <= 0:
                    continue
                room = self._room(name, now_ms)
                if not room.any():
                    break
                if not takes(room, name, waiting):
                    continue
                for effect in self._place(scope, pool, waiting, now_ms, how="unanswered", only=name):
                    filled += isinstance(effect, Publish)
                    yield effect
            # Its next room is offered as usual; what is left unfilled now is not worth asking about at once.
            offer.declined_until_ms = now_ms + self.knobs.offer_repeat_ms
            yield Note("offer_unanswered", {"filled": "yes" if filled else "no"}, {"instance": name}, level="info")

    def _any_overdue(self, now_ms: float) -> bool:
        """Whether any offer at all was not answered in time."""
        before_ms = now_ms - self._answer_ms()
        since = [offer.unanswered_since_ms for offer in self._offers.values()]
        # A hair early: who is overdue is asked of each.
        return any(at_ms is not None and at_ms <= before_ms + 1.0 for at_ms in since)

    def _answer_ms(self) -> float:
        """How long SLOMax may take: it may run at any entry."""
        if self._answers[0] is not self.fleet:
            self._answers = self.fleet, self._slowest_answer_ms()
        return self._answers[1]

    def _slowest_answer_ms(self) -> float:
        entries = [name for name, site in self.fleet.sites.items() if site.entry]
        rtts = [self.fleet.rtt_ms(self.site, entry) for entry in entries]
        slowest = max((UNKNOWN_RTT_MS if rtt is None else rtt for rtt in rtts), default=UNKNOWN_RTT_MS)
        return max(self.knobs.offer_answer_ms, 3 * slowest)

    def _touch_due(self, pool: Pool, now_ms: float) -> None:
        if not pool.held:
            return
        for name, heard in self.state.view.instances(self.site).items():
            report = heard.report
            if report.model != pool.model or report.version != pool.version:
                continue
            offer = self._offers.get(name)
            if offer is None or offer.due_ms <= now_ms or offer.declined_until_ms <= now_ms:
                self._ask_about(name)

    def _next_due_ms(self, names: Collection[str], now_ms: float) -> float:
        due = now_ms + TICK_MS
        if not names:
            return due
        offers = [self._offers[name] for name in names if name in self._offers]
        answer_ms = self._answer_ms() if offers else 0.0
        for offer in offers:
            due = min(due, offer.due_ms)
            if offer.unanswered_since_ms is not None:
                due = min(due, offer.unanswered_since_ms + answer_ms)
            if offer.declined_until_ms > now_ms:
                due = min(due, offer.declined_until_ms)
        return max(due, now_ms)


def _by_deadline(waiting: Waiting) -> tuple[float, int, str]:
    ask = waiting.request.ask
    return waiting.deadline_ms(), ask.received_unix_ms, ask.request_id
