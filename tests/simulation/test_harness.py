"""The harness itself: what it promises to the tests that stand on it."""

from collections.abc import Iterator

from tests.simulation.harness import Agent, Harness, World, matches, small_fleet

from tokenfleet.effects import Effect, Publish
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.room import RoomOffered


class Recorder:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, Event]] = []

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        self.heard.append((now_ms, message))
        yield from ()

    def wake(self, now_ms: float) -> Iterator[Effect]:
        yield from ()


def test_subjects_match_as_nats_does() -> None:
    """A filter that matched too much once hid that a core did not read its own site."""
    assert matches("tf.v1.capacity.reported.b.*.*", "tf.v1.capacity.reported.b.m.b-0")
    assert not matches("tf.v1.capacity.reported.b.*", "tf.v1.capacity.reported.b.m.b-0")
    assert matches("tf.*.capacity.>", "tf.v1.capacity.reported.b.m.b-0")
    assert not matches("tf.v1.capacity.reported.c.*.*", "tf.v1.capacity.reported.b.m.b-0")


def test_a_stream_is_read_in_order_and_by_its_consumers_only() -> None:
    """Jitter may reorder streams against each other, never one stream; who is no consumer hears nothing."""
    fleet = small_fleet()
    harness = Harness(fleet, seed=3, jitter_ms=500, duplicate=0.3)
    pilot, accountant = Recorder(), Recorder()
    harness.join("pilot", pilot, "tokenpilot", "tf.v1.capacity.reported.b.*.*")
    harness.join("accountant", accountant, "accountant")
    harness.join("agent-b", Agent(fleet, "b", World(fleet)), "siteagent")
    harness.join("agent-c", Agent(fleet, "c", World(fleet)), "siteagent")
    harness.run_for(20_000)

    reports = [event for _, event in pilot.heard if isinstance(event, CapacityReported)]
    assert {event.site for event in reports} == {"b"}
    revisions = [event.revision for event in reports if event.instance == "b-0"]
    assert revisions == sorted(revisions)
    assert len(revisions) > len(set(revisions)), "some were delivered twice"
    assert accountant.heard == []


def test_a_paused_process_catches_up_and_a_killed_one_does_not() -> None:
    """SIGSTOP keeps the backlog, SIGKILL loses it."""
    fleet = small_fleet()
    harness = Harness(fleet)
    paused, killed = Recorder(), Recorder()
    harness.join("paused", paused, "tokenpilot")
    harness.join("killed", killed, "tokenpilot")
    harness.join("agent-b", Agent(fleet, "b", World(fleet)), "siteagent")
    harness.run_for(10)
    assert len(paused.heard) == len(killed.heard) == 2
    harness.pause("paused")
    harness.kill("killed")
    harness.run_for(5000)
    assert len(paused.heard) == 2
    harness.resume("paused")
    assert len(paused.heard) == 12
    assert len(killed.heard) == 2
    assert all(isinstance(c.event, CapacityReported) for c in harness.log)
    assert not harness.said(RoomOffered)
    assert isinstance(Publish(harness.log[0].event), Effect)
