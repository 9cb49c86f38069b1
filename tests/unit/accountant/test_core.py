"""The accountant's core: what counts once, and who lost their owner."""

from typing import Any

import msgspec
import pytest

from tokenfleet.accountant.core import Accountant
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.accountant.settings import AccountantSettings
from tokenfleet.accountant.store import row_of
from tokenfleet.effects import Effect, Publish
from tokenfleet.fleet import parse
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted, Times
from tokenfleet_schemas.request import Ask, RequestReceived

T0 = 1_800_000_000_000.0
FLEET = parse(b"""
[fleet]
name = "test"
default_class = "chat"
windows_s = [10, 60]
[sites.a]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 1000
[classes.chat]
ttft_ms = 500
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
""")


class World:
    """A core in office on a clock of its own, with one gateway."""

    def __init__(self, *, term: int = 7) -> None:
        self.core = Accountant(FLEET)
        self.core.take_office(term)
        self.now_ms = T0
        self.said: list[Event] = []
        self.revision = 0
        self.perform(self.core.wake(self.now_ms))

    def perform(self, effects: Any) -> list[Event]:
        published = [e.event for e in effects if isinstance(e, Publish)]
        self.said += published
        return published

    def hear(self, event: Event) -> list[Effect]:
        effects = list(self.core.handle(event, self.now_ms))
        self.perform(effects)
        return effects

    def run_for(self, ms: float, *, lease: list[OpenRequest] | None = None, incarnation: str = "i1") -> None:
        """Pass time, waking the core; with `lease` its gateway goes on saying what it has open."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms += 500
            if lease is not None and (self.now_ms - T0) % 2000 == 0:
                self.lease(*lease, incarnation=incarnation)
            self.perform(self.core.wake(self.now_ms))

    def lease(self, *listed: OpenRequest, incarnation: str = "i1", closing: bool = False) -> None:
        self.revision += 1
        self.hear(
            GatewayLeased(
                id=f"g:{incarnation}:{self.revision}",
                time_unix_ms=int(self.now_ms),
                site="a",
                gateway="g",
                gateway_incarnation=incarnation,
                revision=self.revision,
                open=listed,
                closing=closing,
            )
        )

    def request(self, request_id: str, *, incarnation: str = "i1") -> None:
        ask = Ask(
            request_id=request_id,
            gateway="g",
            gateway_incarnation=incarnation,
            entry="a",
            entry_zone="eu",
            tenant="acme",
            service_class="chat",
            model_asked="m",
            model="m",
            version="1",
            input_tokens=10,
            received_unix_ms=int(self.now_ms),
            ttft_ms=500.0,
            patience_ms=1000.0,
            prefix="x" * 1000,
        )
        self.hear(RequestReceived(id=f"{request_id}:received", site="a", ask=ask))

    def finish(self, request_id: str, *, attempt: int = 1, final: bool = True, **changes: Any) -> OutcomeFinished:
        values: dict[str, Any] = {
            "id": f"{request_id}:finished:{attempt}",
            "site": "a",
            "time_unix_ms": int(self.now_ms),
            "request_id": request_id,
            "attempt": attempt,
            "final": final,
            "outcome": "completed",
            "gateway": "g",
            "gateway_incarnation": "i1",
            "tenant": "acme",
            "service_class": "chat",
            "model_asked": "m",
            "model": "m",
            "version": "1",
            "served_site": "b",
            "instance": "b1",
            "input_tokens": 10,
            "output_tokens": 20,
            "received_unix_ms": int(self.now_ms) - 1000,
            "times": Times(ttft_ms=100.0, tpot_ms=10.0, e2e_ms=300.0),
            "ttft_objective_ms": 500.0,
        }
        event = OutcomeFinished(**(values | changes))
        self.hear(event)
        return event

    @property
    def lost(self) -> list[OutcomeFinished]:
        return [event for event in self.said if isinstance(event, OutcomeFinished)]

    def offered(self, window_s: int = 60) -> dict[str, int]:
        """What the last windows add up to: offered, failed, compliant."""
        last: dict[tuple[str, str], GoodputMeasured] = {}
        for event in self.said:
            if isinstance(event, GoodputMeasured) and event.window_s == window_s:
                last[event.service_class, event.site] = event
        return {
            "offered": sum(m.offered for m in last.values()),
            "failed": sum(m.failed for m in last.values()),
            "compliant": sum(m.compliant for m in last.values()),
        }


def streaming(request_id: str, attempt: int = 1) -> OpenRequest:
    return OpenRequest(request_id=request_id, attempt=attempt, phase="streaming", booking=f"{request_id}:booking")


def test_a_killed_gateways_requests_are_closed_after_six_silent_seconds() -> None:
    """kill -9 of a gateway under load: its rows would be missing for ever, its bookings held, its windows too good."""
    world = World()
    world.request("r1")
    world.request("r2")
    world.hear(
        OutcomeStarted(
            id="r1:started:1", request_id="r1", attempt=1, gateway="g", tenant="acme", service_class="chat", model="m",
            version="1", served_site="b", instance="b1", booking="r1:assigned", ttft_ms=120.0, engine_ttft_ms=100.0,
        )
    )  # fmt: skip
    world.run_for(4000, lease=[streaming("r1"), OpenRequest(request_id="r2", attempt=1, phase="held")])
    assert world.lost == []
    world.run_for(5500)
    assert world.lost == []
    world.run_for(1500)
    first, second = sorted(world.lost, key=lambda e: e.request_id)
    assert (first.request_id, first.attempt, first.outcome, first.final) == ("r1", 1, "owner_lost", True)
    assert (first.served_site, first.instance, first.booking) == ("b", "b1", "r1:booking")
    assert (first.reason, first.times.ttft_ms, first.term) == ("gateway_silent", 120.0, 7)
    # a fact of the request, by whose day the ledger keeps its rows apart
    assert first.received_unix_ms == int(T0)
    assert first.ask is None
    # nobody ever saw the other one dispatched
    assert (second.request_id, second.attempt, second.booking, second.served_site) == ("r2", 0, "", "")
    for event in world.lost:
        world.hear(event)
    world.run_for(10_000)
    assert len(world.lost) == 2
    assert world.offered() == {"offered": 2, "failed": 2, "compliant": 0}
    assert world.core.gauges()["accountant_open_requests"] == {(): 0.0}


def test_a_lost_attempt_without_a_first_token_is_booked_where_it_was_sent() -> None:
    """L09: a gateway died while its engine was prefilling; the loss belonged to no site and no instance."""
    world = World()
    world.request("r1")
    sent = OpenRequest(request_id="r1", attempt=1, phase="dispatched", booking="a1", served_site="b", instance="b1")
    world.run_for(2000, lease=[sent])
    # repeated elsewhere, and lost there
    world.run_for(2000, lease=[msgspec.structs.replace(sent, attempt=2, booking="a2", served_site="c", instance="c1")])
    world.run_for(8000)
    (lost,) = world.lost
    assert (lost.attempt, lost.booking, lost.served_site, lost.instance) == (2, "a2", "c", "c1")


def test_a_restarted_gateway_gives_up_what_its_former_self_had_open() -> None:
    """The gateway comes back within a second: the old process's streams are broken though it never was silent."""
    world = World()
    world.request("old")
    world.run_for(2000, lease=[streaming("old")])
    world.request("new", incarnation="i2")
    world.run_for(6000, lease=[streaming("new")], incarnation="i2")
    assert [(event.request_id, event.reason) for event in world.lost] == [("old", "gateway_restarted")]
    world.hear(world.lost[0])
    world.run_for(6000, lease=[streaming("new")], incarnation="i2")
    assert len(world.lost) == 1


def test_an_omitted_request_is_given_time_for_its_outcome() -> None:
    """A gateway ended the request and its outcome is still on the way through the outbox: nothing is lost."""
    world = World()
    world.request("late")
    world.request("gone")
    world.run_for(4500, lease=[])
    world.finish("late")
    assert world.lost == []
    world.run_for(6000, lease=[])
    assert [(event.request_id, event.reason) for event in world.lost] == [("gone", "lease_omitted")]


def test_one_missed_lease_closes_nothing() -> None:
    """A request received while a lease was being written is not in it; only two in a row prove anything."""
    world = World()
    world.request("r1")
    world.lease()
    for _ in range(10):
        world.run_for(1000)
        world.lease(streaming("r1"))
        world.run_for(1000)
        world.lease()
    assert world.lost == []


def test_our_own_pause_is_nobodys_silence() -> None:
    """The accountant was stopped (SIGSTOP, a long migration, a bus outage) for a minute: every gateway starts anew."""
    world = World()
    world.request("r1")
    world.run_for(4000, lease=[streaming("r1")])
    world.now_ms += 60_000
    world.perform(world.core.wake(world.now_ms))
    world.run_for(5000)
    assert world.lost == []
    world.core.resumed(world.now_ms)
    world.run_for(5500)
    assert world.lost == []
    world.run_for(1500)
    assert [event.request_id for event in world.lost] == ["r1"]


def test_the_attempt_after_an_ended_one_is_the_lost_one() -> None:
    """Attempt 1 failed and has its row; the gateway died before attempt 2 was dispatched: 2 is lost, 1 stays."""
    world = World()
    world.request("r1")
    world.run_for(2000, lease=[streaming("r1")])
    world.finish("r1", final=False, outcome="failed", output_tokens=0)
    world.run_for(8000)
    (lost,) = world.lost
    assert (lost.attempt, lost.booking, lost.instance) == (2, "", "")


def test_the_truth_takes_the_place_of_a_guess() -> None:
    """A gateway was only cut off: its completed answer arrives after owner_lost, and must count once and as itself."""
    world = World()
    world.request("r1")
    world.run_for(2000, lease=[streaming("r1")])
    world.run_for(8000)
    (lost,) = world.lost
    world.hear(lost)
    world.run_for(2000)
    assert world.offered() == {"offered": 1, "failed": 1, "compliant": 0}
    world.finish("r1", attempt=2)
    world.run_for(2000)
    assert world.offered() == {"offered": 1, "failed": 0, "compliant": 1}
    world.hear(lost)
    world.finish("r1", attempt=2)
    world.run_for(2000)
    assert world.offered() == {"offered": 1, "failed": 0, "compliant": 1}


def test_only_the_replica_in_office_speaks_and_its_successor_says_what_is_missing() -> None:
    """Two accountants: one says each loss; if it dies before the stream has it, the next one does."""
    standby = World(term=0)
    standby.core.leave_office()
    standby.request("r1")
    standby.run_for(10_000)
    assert standby.said == []
    standby.core.take_office(9)
    standby.run_for(500)
    (lost,) = standby.lost
    assert lost.term == 9


def test_repeats_count_once_whatever_their_order() -> None:
    """L07: a stream delivered one message 970 times without any mark of redelivery."""
    world = World()
    for _ in range(5):
        world.finish("r1", attempt=2)
        world.finish("r1", attempt=1, final=False, outcome="failed", output_tokens=0)
    world.run_for(2000)
    assert world.offered() == {"offered": 1, "failed": 0, "compliant": 1}
    measured = [e for e in world.said if isinstance(e, GoodputMeasured) and e.window_s == 10]
    assert [(m.repeated, m.output_tokens) for m in measured] == [(1, 20)]


def test_a_second_final_outcome_is_not_counted() -> None:
    """A gateway that breaks the rule of one final outcome: the ledger sets the second aside, and so do the windows."""
    world = World()
    world.finish("r1", attempt=1)
    world.finish("r1", attempt=2)
    world.finish("r1", attempt=1)
    world.run_for(2000)
    assert world.offered() == {"offered": 1, "failed": 0, "compliant": 1}


def test_what_cannot_be_negative_is_clamped_as_in_the_ledger() -> None:
    """O04: a clock or a counter jumped back: the row says zero, and a window that says less would not add up to it."""
    world = World()
    event = world.finish("r1", output_tokens=-5, times=Times(ttft_ms=-3.0, tpot_ms=-1.0, e2e_ms=-2.0))
    world.run_for(2000)
    (measured,) = [e for e in world.said if isinstance(e, GoodputMeasured) and e.window_s == 60]
    row = row_of(event, OutputMedian())
    assert (measured.output_tokens, measured.compliant_tokens) == (row.output_tokens, row.output_tokens) == (0, 0)
    assert (measured.ttft_ms.p50, measured.tpot_ms.p50) == (row.ttft_ms, row.tpot_ms) == (0.0, 0.0)


def test_an_end_before_its_beginning_leaves_no_open_request() -> None:
    """Streams are read apart: the outcome may be folded before its request."""
    world = World()
    world.finish("r1")
    world.request("r1")
    assert world.core.gauges()["accountant_open_requests"] == {(): 0.0}
    world.run_for(20_000, lease=[])
    assert world.lost == []


@pytest.mark.parametrize("skew_ms", [0, 30_000, -30_000])
def test_a_gateways_clock_does_not_move_its_outcomes(skew_ms: int) -> None:
    """A gateway 30 s ahead (or behind): its outcomes belong into the window in which they happened."""
    world = World()
    world.hear(
        GatewayLeased(
            id="l", time_unix_ms=int(world.now_ms) + skew_ms, gateway="g", gateway_incarnation="i1", revision=1, open=()
        )
    )
    finished_ms = int(world.now_ms) + skew_ms
    world.run_for(12_000)  # the outcome waited in an outbox
    world.finish("r1", received_unix_ms=finished_ms - 300, time_unix_ms=finished_ms)
    world.run_for(2000)
    assert world.offered(10)["offered"] == 0
    assert world.offered(60)["offered"] == 1


def test_a_checkpoint_carries_everything() -> None:
    """A restarted accountant must not forget what it counted, what is open, and who is silent."""
    world = World()
    world.finish("done")
    world.request("open")
    world.run_for(1000, lease=[streaming("open")])
    data = world.core.snapshot()
    assert len(data) < 4000  # no prefix digests

    again = World()
    again.core.restore(data)
    again.core.take_office(8)
    again.now_ms = world.now_ms
    again.finish("done")
    again.run_for(2000)
    assert again.offered() == {"offered": 1, "failed": 0, "compliant": 1}
    again.run_for(8000)
    assert [event.request_id for event in again.lost] == ["open"]
    with pytest.raises(ValueError, match="not a checkpoint"):
        again.core.restore(b"\x00")


def test_a_busy_fleet_does_not_fill_the_memory() -> None:
    """Thousands of outcomes a second: what is remembered against repeats is bounded by number too, newest kept."""
    core = Accountant(FLEET, AccountantSettings(remembered_max=500))
    event = World().finish("template")
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    for number in range(5_000):
        core.handle(OutcomeFinished(**(values | {"request_id": f"r{number}"})), T0 + number)
        if number % 100 == 0:
            list(core.wake(T0 + number))
    assert len(core.state.counted) <= 600
    assert len(core.state.closed) <= 600
    assert "r4999" in core.state.closed


def test_hours_of_history_leave_only_what_matters() -> None:
    """Catching up with two hours of a busy fleet must not hold two hours in memory."""
    core = Accountant(FLEET)
    world = World()
    event = world.finish("template")
    for number in range(20_000):
        now_ms = T0 + number * 100
        values = {name: getattr(event, name) for name in event.__struct_fields__}
        core.handle(OutcomeFinished(**(values | {"request_id": f"r{number}", "received_unix_ms": int(now_ms)})), now_ms)
    assert len(core.windows) <= 2 * 60 * 10 + 1024
    assert len(core.state.closed) <= 600 * 10 + 1024
    assert len(core.state.counted) <= 600 * 10 + 1024
