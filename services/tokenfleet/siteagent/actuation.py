"""What a plan means for each instance of a site: which run, which drain, which are started and stopped, and when.

Decides which replicas serve a plan: what runs goes on, what drains is called back before anything is loaded anew, and
what has the least to finish goes first. A replica that must go is reported as draining, so that nobody sends it more,
and is stopped when it is empty for two samples, or when its time is over. An actuator that fails is asked again, ever
later, for as long as the plan wants it. Nothing that no plan speaks of is touched. Refuses to know how anything is
started, HTTP and clocks; the simulator runs the same object.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from tokenfleet.engine_model import cold_start_s
from tokenfleet.fleet import Actuator, Instance, Planning
from tokenfleet_schemas.plan import PlanApplied, PlanIssued

#: a drained replica was seen empty so many samples in a row: what was assigned before the drain was heard has arrived
EMPTY_SAMPLES = 2
#: and not sooner than this after it was reported as draining, ms
DRAIN_MIN_MS = 2_000.0
#: pause before an actuator that failed is asked again, doubled each time, ms
RETRY_MS = 5_000.0
RETRY_MAX_MS = 300_000.0
#: a start that does not come true within so many cold starts, and some samples, has failed
LATE = 3.0
SAMPLES_MS = 10_000.0

Action = Literal["start", "stop"]
State = Literal["untouched", "on", "starting", "draining", "stopping", "off"]


class Act(msgspec.Struct, frozen=True):
    """Something for the actuator to do."""

    instance: str
    action: Action


class Hand(msgspec.Struct):
    """One instance as the plan wants it and as it is."""

    declared: Instance
    state: State = "untouched"
    #: a sample has been taken, answered or not
    seen: bool = False
    ready: bool = False
    #: runs, but has not served since; None: serves
    lost_ms: float | None = None
    #: requests inside, as the engine says; None: unknown
    open_requests: int | None = None
    #: in this state since, ms
    since_ms: float = 0.0
    empty_samples: int = 0
    #: the actuator said that the start is under way
    begun: bool = False
    #: the actuator has been asked and has not answered
    asked: Action | None = None
    failures: int = 0
    failure: str = ""
    retry_ms: float = 0.0


class Actuation:
    """The plans of one site, on their way to becoming true."""

    def __init__(
        self, site: str, instances: dict[str, Instance], actuator: Actuator | None, planning: Planning
    ) -> None:
        self.site = site
        self.actuator = actuator
        self.hands = {name: Hand(one) for name, one in instances.items()}
        #: model → the plan that holds
        self.plans: dict[str, PlanIssued] = {}
        #: model → what was said of it last
        self.said: dict[str, PlanApplied] = {}
        self.planning = planning
        self._pace()

    # ------------------------------------------------------------------ inputs

    def _pace(self) -> None:
        """How long starting and draining may take, of the slowest instance, ms."""
        slowest_s = max((self.cold_start_s(hand.declared) for hand in self.hands.values()), default=0.0)
        self.cold_start_ms = 1000.0 * slowest_s
        self.drain_ms = 1000.0 * self.planning.drain_s / self.planning.time_scale

    def reconfigure(self, instances: dict[str, Instance], actuator: Actuator | None, planning: Planning) -> None:
        """The fleet file changed: what is still declared keeps its state."""
        self.actuator, self.planning = actuator, planning
        kept = self.hands
        self.hands = {}
        for name, one in instances.items():
            hand = kept.get(name) or Hand(one)
            hand.declared = one
            self.hands[name] = hand
        self._pace()

    def plan(self, plan: PlanIssued, now_ms: float) -> bool:
        """Take a plan; False for one that is older than what holds."""
        known = self.plans.get(plan.model)
        if known is not None and (plan.term, plan.revision) <= (known.term, known.revision):
            return False
        self.plans[plan.model] = plan
        return True

    def observe(self, name: str, *, ready: bool, reachable: bool, open_requests: int | None, now_ms: float) -> None:
        """A sample of an instance: whether it serves, whether it answers at all, and what it has inside."""
        hand = self.hands.get(name)
        if hand is None:
            return
        hand.seen, hand.ready, hand.open_requests = True, ready, open_requests
        hand.lost_ms = None if ready else now_ms if hand.lost_ms is None else hand.lost_ms
        hand.empty_samples = hand.empty_samples + 1 if open_requests == 0 or not reachable else 0
        if hand.state in ("starting", "off") and ready:
            # `off`: somebody else started it; the plan decides whether it stays
            self._turn(hand, "on", now_ms)
            hand.failures, hand.failure, hand.retry_ms = 0, "", 0.0

    def done(self, name: str, action: Action, *, ok: bool, detail: str, now_ms: float) -> None:
        """The actuator answered."""
        hand = self.hands.get(name)
        if hand is None or hand.asked != action:
            return
        hand.asked = None
        if ok:
            hand.retry_ms = 0.0
            if action == "stop":
                self._turn(hand, "off", now_ms)
            else:
                hand.begun, hand.since_ms = True, now_ms
            return
        self._failed(hand, detail, now_ms)

    # ------------------------------------------------------------------ what follows

    def act(self, now_ms: float) -> Iterator[Act]:
        """Bring what is nearer to what is planned; called after every input and at `due_ms`."""
        if self.actuator is None:
            return
        for model, plan in sorted(self.plans.items()):
            for target in plan.targets:
                self._choose(model, target.version, target.replicas, now_ms)
        for name, hand in sorted(self.hands.items()):
            if hand.asked is not None or now_ms < hand.retry_ms:
                continue
            if (
                hand.state == "on"
                and hand.lost_ms is not None
                and now_ms - hand.lost_ms >= max(self.cold_start_ms, SAMPLES_MS)
            ):
                self._turn(hand, "starting", now_ms)  # it died, and nobody brought it back
            if hand.state == "draining" and self._drained(hand, now_ms):
                self._turn(hand, "stopping", now_ms)
            if hand.state == "starting" and hand.begun and now_ms - hand.since_ms >= self._late_ms:
                self._turn(hand, "stopping", now_ms)
                self._failed(hand, "started, but does not serve", now_ms)
            elif hand.state == "stopping" or (hand.state == "starting" and not hand.begun):
                hand.asked = "stop" if hand.state == "stopping" else "start"
                yield Act(name, hand.asked)

    def due_ms(self, now_ms: float) -> float:
        """When `act` may have something to do by time alone; infinity when never."""
        wishes = [float("inf")]
        for hand in self.hands.values():
            if hand.asked is not None:
                continue
            if hand.state == "draining":
                wishes.append(hand.since_ms + (DRAIN_MIN_MS if hand.empty_samples else self.drain_ms))
            elif hand.state == "starting" and hand.begun:
                wishes.append(hand.since_ms + self._late_ms)
            elif hand.state in ("starting", "stopping"):
                wishes.append(hand.retry_ms)
        return max(now_ms + 1.0, min(wishes))

    def verdict(self, name: str, ready: bool, reason: str) -> tuple[bool, str]:
        """What is to be reported of an instance, given what its engine says."""
        hand = self.hands.get(name)
        if hand is None or hand.state in ("untouched", "on"):
            return ready, reason
        if hand.state == "draining":
            return False, "draining"
        if hand.state == "starting":
            return ready, "" if ready else "starting"
        return False, "draining" if hand.state == "stopping" and hand.open_requests else "stopped"

    def applied(self, model: str, now_ms: float, *, again: bool = False) -> PlanApplied | None:
        """What has become of a model's plan, if that has changed since it was last said (or `again`)."""
        plan = self.plans.get(model)
        if plan is None:
            return None
        ready, starting, draining, failed = (dict.fromkeys((t.version for t in plan.targets), 0) for _ in range(4))
        details = []
        for name, hand in sorted(self.hands.items()):
            version = hand.declared.version
            if hand.declared.model != model or version not in ready:
                continue
            ready[version] += hand.ready and hand.state in ("on", "untouched", "starting")
            starting[version] += hand.state == "starting" and not hand.ready
            draining[version] += hand.state in ("draining", "stopping")
            if hand.failures:
                failed[version] += hand.state in ("starting", "off") and now_ms < hand.retry_ms
                details.append(f"{name}: {hand.failure}")
        short = [t.version for t in plan.targets if ready[t.version] != t.replicas]
        if short and self.actuator is None:
            details.append(f"not as planned: {', '.join(short)}; this site has no actuator")
        before = self.said.get(model)
        made = PlanApplied(
            id=f"{plan.id}:applied:{int(now_ms)}",
            cause=plan.id,
            time_unix_ms=int(now_ms),
            site=self.site,
            model=model,
            revision=plan.revision,
            plan=plan.id,
            ok=not short,
            replicas=ready,
            detail="; ".join(details)[:500],
            starting=starting,
            draining=draining,
            failed=failed,
        )
        if before is not None and not again and _same(before, made):
            return None
        self.said[model] = made
        return made

    def wanted(self, model: str, version: str) -> int:
        """Replicas of a version that are not to be stopped now."""
        mine = (h for h in self.hands.values() if (h.declared.model, h.declared.version) == (model, version))
        return sum(hand.state not in ("off", "stopping") for hand in mine)

    def cold_start_s(self, declared: Instance) -> float:
        """What an emulated instance is to take until it serves, s."""
        known_s = cold_start_s(declared.cold_start_s, declared.profile, self.planning.cold_start_s)
        return known_s / self.planning.time_scale

    def failing(self) -> dict[str, bool]:
        """Instance → whether its actuator fails: for an alert."""
        return {name: hand.failures > 0 for name, hand in self.hands.items()}

    # ------------------------------------------------------------------ choosing

    def _choose(self, model: str, version: str, replicas: int, now_ms: float) -> None:
        mine = [
            (name, hand)
            for name, hand in sorted(self.hands.items())
            if (hand.declared.model, hand.declared.version) == (model, version)
        ]
        if not all(hand.seen for _, hand in mine):
            return  # an agent that has just begun must not start one while another runs already
        wanted = {name for name, _ in sorted(mine, key=lambda one: self._worth(*one))[:replicas]}
        for name, hand in mine:
            if name in wanted:
                if hand.state == "draining":
                    self._turn(hand, "on", now_ms)
                elif hand.state in ("off", "untouched"):
                    self._turn(hand, "on" if hand.ready else "starting", now_ms)
            elif hand.state in ("on", "untouched") and hand.ready:
                self._turn(hand, "draining", now_ms)
            elif hand.state == "untouched":
                self._turn(hand, "off", now_ms)
            elif hand.state == "starting" and not hand.begun and hand.asked is None:
                self._turn(hand, "off", now_ms)  # nothing was started
            elif hand.state in ("on", "starting") and hand.asked is None:
                self._turn(hand, "stopping", now_ms)  # it serves nobody: nothing to wait for
                hand.retry_ms = 0.0

    def _worth(self, name: str, hand: Hand) -> tuple[int, int, str]:
        """Order in which replicas are wanted: what serves, what nearly does, what can be had soonest."""
        if self.actuator is not None and self.actuator.kind == "kubernetes":
            return (0, 0, name)  # a StatefulSet takes its replicas away from the end
        rank = {"on": 0, "untouched": 0 if hand.ready else 4, "starting": 1, "draining": 2, "stopping": 5, "off": 3}
        broken = 10 * hand.failures
        if hand.state in ("on", "untouched") and not hand.ready:
            broken += 3
        return (rank[hand.state] + broken, -(hand.open_requests or 0), name)

    @property
    def _late_ms(self) -> float:
        return LATE * self.cold_start_ms + SAMPLES_MS

    def _drained(self, hand: Hand, now_ms: float) -> bool:
        waited_ms = now_ms - hand.since_ms
        empty = hand.empty_samples >= EMPTY_SAMPLES and waited_ms >= DRAIN_MIN_MS
        return empty or waited_ms >= self.drain_ms

    def _failed(self, hand: Hand, detail: str, now_ms: float) -> None:
        hand.failures += 1
        hand.failure = detail
        hand.retry_ms = now_ms + min(RETRY_MAX_MS, RETRY_MS * 2.0 ** (hand.failures - 1))

    def _turn(self, hand: Hand, state: State, now_ms: float) -> None:
        hand.state, hand.since_ms = state, now_ms
        hand.empty_samples = 0
        hand.begun = False


def _same(one: PlanApplied, other: PlanApplied) -> bool:
    return msgspec.structs.replace(one, id="", time_unix_ms=0) == msgspec.structs.replace(other, id="", time_unix_ms=0)
