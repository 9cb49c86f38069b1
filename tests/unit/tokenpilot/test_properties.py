"""Whatever order messages come in, and however often: books balance, nothing is below zero, everything ends at zero."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tokenpilot.driver import KNOBS, SCOPE, Pilot, validate

from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementOwned

OUTCOMES = ("completed", "failed", "failed_midstream", "timed_out", "cancelled", "rejected", "client_stalled")
REQUESTS = tuple(f"r{n}" for n in range(6))

#: (what, request, number, switch): interpreted by `step`
WHAT = (
    *("request", "resubmit", "retry", "start", "finish", "close", "decline", "withdraw", "release", "report"),
    *("ill", "restart", "echo", "lease", "silence", "wake", "mark", "foreign_mark"),
)
STEP = st.tuples(st.sampled_from(WHAT), st.sampled_from(REQUESTS), st.integers(0, 6000), st.booleans())


class Chaos:
    """Says anything that the others may say, in any order, about few requests, so that they collide."""

    def __init__(self, placement: str = "predicted-latency") -> None:
        policy = f'placement = "{placement}"'
        self.pilot = Pilot(instances=2, max_sequences=4, kv_tokens=20_000, policy=policy)
        self.attempts: dict[str, tuple[int, int]] = {}
        self.heard: list[Event] = []
        self.term, self.released, self.lease_revision = 1, 0, 0

    def say(self, event: Event) -> None:
        self.heard.append(event)
        self.pilot.hear(event)

    def decision(self, request: str, kind: Any = PlacementAssigned) -> Any:
        return next(
            (e for e in reversed(self.pilot.said) if isinstance(e, kind) and e.request_id == request),
            None,
        )

    def step(self, what: str, request: str, number: int, switch: bool) -> None:
        pilot = self.pilot
        attempt, revision = self.attempts.get(request, (1, 0))
        assigned, held = self.decision(request), self.decision(request, PlacementHeld)
        if what == "request":
            self.attempts.setdefault(request, (1, 0))
            pilot.request(request, attempt=attempt, revision=revision, input_tokens=1 + number, patience_ms=20_000)
        elif what == "resubmit":
            self.attempts[request] = (attempt, revision + 1)
            pilot.request(request, attempt=attempt, revision=revision + 1, input_tokens=1 + number)
        elif what == "retry" and assigned is not None:
            pilot.finish(assigned, "failed", final=False)
            self.attempts[request] = (attempt + 1, revision + 1)
            pilot.request(request, attempt=attempt + 1, revision=revision + 1, excluded=(assigned.instance,))
        elif what == "start" and assigned is not None:
            pilot.start(assigned, booking=assigned.id if number % 5 else "")
        elif what == "finish" and assigned is not None:
            outcome = OUTCOMES[number % len(OUTCOMES)]
            pilot.finish(assigned, outcome, final=switch, id=f"{assigned.id}:finished:{outcome}:{switch}")
        elif what == "close" and (assigned or held) is not None:
            pilot.finish(assigned or _as_assigned(held), "cancelled", attempt=0, instance="", booking="")
        elif what == "decline" and (assigned or held) is not None:
            pilot.decline(assigned if switch and assigned is not None else held or assigned)
        elif what == "withdraw":
            pilot.withdraw(request, attempt=attempt, revision=revision)
        elif what == "release" and held is not None:
            self.released += 1
            pilot.release(held, self.released, instance=f"b-{number % 2}", term=self.term)
        elif what == "report":
            pilot.report(f"b-{number % 2}", running=number % 7, waiting=number % 3, kv_usage=(number % 100) / 100)
        elif what == "ill":
            pilot.report(f"b-{number % 2}", ready=switch, draining=number % 3 == 0)
        elif what == "restart":
            pilot.engines[f"b-{number % 2}"].incarnation = str(number)
            pilot.report(f"b-{number % 2}")
        elif what == "echo" and pilot.said:
            pilot.hear(pilot.said[number % len(pilot.said)])
        elif what == "lease":
            self.lease_revision += 1
            pilot.now_ms += 500
            pilot.lease(self.lease_revision, *(REQUESTS[: number % 7]))
        elif what == "silence":
            pilot.now_ms += number
        elif what == "wake":
            pilot.wake(number / 4)
        elif what == "mark":
            self.term += 1
            pilot.take_office(self.term)
        elif what == "foreign_mark":
            self.term += 1
            pilot.hear(
                PlacementOwned(id=f"f{self.term}", term=self.term, site="b", scope=SCOPE, owner="other", model="m")
            )

    def end(self) -> None:
        """The gateway closes everything."""
        pilot = self.pilot
        for request in REQUESTS:
            closing = self.decision(request) or self.decision(request, PlacementHeld)
            if closing is not None:
                pilot.finish(_as_assigned(closing), "cancelled", attempt=9, id=f"{request}:end")
        for n in range(3):
            pilot.now_ms += 500
            pilot.lease(10_000 + n)
        pilot.wake(0)


def _as_assigned(event: Any) -> Any:
    if isinstance(event, PlacementAssigned):
        return event
    return PlacementAssigned(
        id="none",
        request_id=event.request_id,
        gateway=event.gateway,
        tenant=event.tenant,
        service_class=event.service_class,
        model="m",
        version="1",
        attempt=event.attempt,
        revision=event.revision,
        instance="",
        incarnation="",
        endpoint_url="",
        work=event.work,
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60), st.sampled_from(("predicted-latency", "least-work")))
def test_any_order_balances_and_ends_at_zero(steps: list[tuple[str, str, int, bool]], placement: str) -> None:
    """P01, P08: leaks came from the orders that nobody had thought of. The driver checks the sums at every message."""
    chaos = Chaos(placement)
    for one in steps:
        chaos.step(*one)
    chaos.end()
    chaos.pilot.quiet()


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(0, 40))
def test_a_checkpoint_anywhere_changes_nothing(steps: list[tuple[str, str, int, bool]], at: int) -> None:
    """The state after a restore must be the state before, whatever is under way."""
    chaos = Chaos()
    for one in steps[:at]:
        chaos.step(*one)
    data = chaos.pilot.core.snapshot()
    copy = TokenPilot(chaos.pilot.fleet, "b", replica="p0", knobs=KNOBS)
    copy.restore(data)
    validate(copy)
    assert copy.state == chaos.pilot.core.state
    assert copy.offices.marks == chaos.pilot.core.offices.marks
    assert copy.gauges() == chaos.pilot.core.gauges()


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_redelivery_changes_nothing(steps: list[tuple[str, str, int, bool]]) -> None:
    """Every message comes twice in a row: the same decisions are said, and the same state is left."""
    once, twice = Chaos(), Chaos()
    hear = twice.pilot.hear

    def again(event: Event) -> list[Event]:
        said = hear(event)
        for effect in twice.pilot.core.handle(event, twice.pilot.now_ms):
            assert not hasattr(effect, "event"), (event, effect)
        return said

    twice.pilot.hear = again  # type: ignore[method-assign] # the driver's ear, doubled
    for one in steps:
        once.step(*one)
        twice.step(*one)
    assert [e.id for e in twice.pilot.said] == [e.id for e in once.pilot.said]
    assert msgspec.to_builtins(twice.pilot.core.state) == msgspec.to_builtins(once.pilot.core.state)
