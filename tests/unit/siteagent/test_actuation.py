"""How a site's plan becomes true: which replicas stay, drain before they stop, and what an actuator that fails does."""

import random

import pytest

from tokenfleet.fleet import Actuator, Instance, Planning
from tokenfleet.siteagent.actuation import RETRY_MS, Act, Actuation
from tokenfleet_schemas.plan import PlanIssued, Target

COLD_MS = 155_000.0


class Site:
    """One site whose engines obey, with its clock."""

    def __init__(self, *running: str, count: int = 4, kind: str = "emulator", obeys: bool = True) -> None:
        instances = {f"b-{n}": Instance(model="m", version="1", url="http://b") for n in range(count)}
        actuator = Actuator(kind=kind) if kind else None  # type: ignore[arg-type]  # one of the kinds
        self.actuation = Actuation("b", instances, actuator, Planning())
        self.open = dict.fromkeys(instances, 0)
        self.ready_ms = {name: 0.0 if name in running else None for name in instances}
        self.now_ms, self.revision, self.obeys = 0.0, 0, obeys
        self.acts: list[Act] = []
        self.sample()

    def sample(self) -> None:
        for name, since_ms in self.ready_ms.items():
            ready = since_ms is not None and self.now_ms >= since_ms
            self.actuation.observe(
                name, ready=ready, reachable=ready, open_requests=self.open[name] if ready else None, now_ms=self.now_ms
            )
        self.act()

    def act(self) -> None:
        for act in list(self.actuation.act(self.now_ms)):
            self.acts.append(act)
            if self.obeys:
                self.ready_ms[act.instance] = self.now_ms + COLD_MS if act.action == "start" else None
            words = "" if self.obeys else "no such node"
            self.actuation.done(act.instance, act.action, ok=self.obeys, detail=words, now_ms=self.now_ms)

    def plan(self, replicas: int, *, term: int = 1) -> None:
        self.revision += 1
        plan = PlanIssued(
            id=f"p{self.revision}", term=term, site="b", model="m", revision=self.revision,
            targets=(Target(version="1", replicas=replicas),),
        )  # fmt: skip
        assert self.actuation.plan(plan, self.now_ms)
        self.act()

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_ms += 1_000.0
            self.sample()

    def reasons(self) -> dict[str, str]:
        return {
            name: self.actuation.verdict(name, self.ready_ms[name] is not None and self.now_ms >= 0, "")[1]
            for name in self.ready_ms
        }


def test_without_a_plan_nothing_is_touched() -> None:
    """An agent that begins, a fleet without a planner: whatever runs is the operator's."""
    site = Site("b-0")
    site.run(600)
    assert site.acts == []
    assert site.reasons()["b-0"] == ""


def test_a_plan_starts_what_is_missing_and_says_so() -> None:
    """Two wanted, one runs: one order, `starting` until it serves, and the plan is applied then."""
    site = Site("b-0")
    site.plan(2)
    assert site.acts == [Act("b-1", "start")]
    applied = site.actuation.applied("m", site.now_ms)
    assert applied is not None
    assert (applied.ok, applied.replicas, applied.starting) == (False, {"1": 1}, {"1": 1})
    assert site.actuation.verdict("b-1", False, "unreachable") == (False, "starting")
    site.run(160)
    applied = site.actuation.applied("m", site.now_ms)
    assert applied is not None
    assert (applied.ok, applied.replicas, applied.starting) == (True, {"1": 2}, {"1": 0})
    assert site.actuation.applied("m", site.now_ms) is None
    assert len(site.acts) == 1


def test_a_replica_drains_before_it_is_stopped() -> None:
    """A stopped engine broke forty streams: it is reported as draining, and stopped only when it is empty."""
    site = Site("b-0", "b-1")
    site.open["b-1"] = 3
    site.open["b-0"] = 5
    site.sample()
    site.plan(1)
    assert site.acts == []
    assert site.actuation.verdict("b-1", True, "") == (False, "draining")
    assert site.actuation.verdict("b-0", True, "") == (True, "")
    site.run(60)
    assert site.acts == []
    site.open["b-1"] = 0
    site.run(3)
    assert site.acts == [Act("b-1", "stop")]
    assert site.actuation.verdict("b-1", False, "unreachable") == (False, "stopped")


def test_an_empty_sample_alone_stops_nothing() -> None:
    """What was assigned just before the drain was heard arrives a moment later."""
    site = Site("b-0")
    site.plan(0)
    site.now_ms += 500
    site.sample()
    assert site.acts == []
    site.open["b-0"] = 1
    site.run(5)
    assert site.acts == []


def test_twenty_streams_end_by_themselves() -> None:
    """F08: a scale-down broke what was in flight five seconds after its signal. All of it ends; then it stops."""
    site = Site("b-0")
    site.open["b-0"] = 20
    site.sample()
    site.plan(0)
    for left in range(19, -1, -1):
        site.run(10)
        assert site.acts == []
        site.open["b-0"] = left
    site.run(3)
    assert site.acts == [Act("b-0", "stop")]


def test_a_drain_has_an_end() -> None:
    """One answer of an hour must not keep a GPU from another model."""
    site = Site("b-0")
    site.open["b-0"] = 1
    site.plan(0)
    site.run(299)
    assert site.acts == []
    site.run(2)
    assert site.acts == [Act("b-0", "stop")]


def test_what_drains_is_called_back_before_anything_is_loaded() -> None:
    """Demand came back within the drain: no cold start for it."""
    site = Site("b-0", "b-1")
    site.open["b-1"] = site.open["b-0"] = 1
    site.plan(1)
    site.run(10)
    site.plan(2)
    site.run(10)
    assert site.acts == []
    assert (site.reasons()["b-0"], site.reasons()["b-1"]) == ("", "")


def test_what_has_the_least_to_finish_goes() -> None:
    """Not the one with forty streams."""
    site = Site("b-0", "b-1", "b-2")
    site.open.update({"b-0": 1, "b-1": 40, "b-2": 7})
    site.sample()
    site.plan(2)
    assert [name for name, why in site.reasons().items() if why == "draining"] == ["b-0"]


def test_a_stateful_set_loses_its_last_replica_first() -> None:
    """Kubernetes takes them from the end, whatever we drain: so we drain the end."""
    site = Site("b-0", "b-1", "b-2", kind="kubernetes")
    site.open.update({"b-0": 0, "b-1": 0, "b-2": 40})
    site.sample()
    site.plan(2)
    assert [name for name, why in site.reasons().items() if why == "draining"] == ["b-2"]


def test_an_actuator_that_fails_is_asked_again_ever_later_and_is_an_alert() -> None:
    """The orchestrator is down for ten minutes: not a storm, not silence, and it comes right by itself."""
    site = Site(obeys=False)
    site.plan(1)
    site.run(600)
    # another replica may be on a better node: each is tried, each ever later
    assert {act.instance for act in site.acts} == set(site.open)
    assert {act.action for act in site.acts} == {"start"}
    assert len(site.acts) <= 4 * 7
    assert any(site.actuation.failing().values())
    applied = site.actuation.applied("m", site.now_ms)
    assert applied is not None
    assert applied.failed["1"] >= 1
    assert "no such node" in applied.detail
    site.obeys = True
    site.run(700)
    applied = site.actuation.applied("m", site.now_ms)
    assert applied is not None
    assert applied.ok
    assert applied.replicas == {"1": 1}
    assert RETRY_MS >= 1_000


def test_a_start_that_never_serves_has_failed() -> None:
    """The order was taken, the engine crashes in its first minute: said, and tried again."""
    site = Site()
    site.plan(1)
    site.ready_ms = dict.fromkeys(site.ready_ms)
    for _ in range(3 * 155 + 30):
        site.now_ms += 1_000
        site.sample()
        site.ready_ms = dict.fromkeys(site.ready_ms)
    assert len(site.acts) >= 2
    applied = site.actuation.applied("m", site.now_ms, again=True)
    assert applied is not None
    assert "does not serve" in applied.detail


def test_a_replica_that_died_is_brought_back() -> None:
    """Plan and reality: nobody restarts it for a cold start's time, then we do."""
    site = Site("b-0")
    site.plan(1)
    site.ready_ms["b-0"] = None
    site.run(150)
    assert site.acts == []
    site.run(10)
    assert site.acts == [Act("b-0", "start")]


def test_a_new_agent_waits_for_a_look_at_every_engine() -> None:
    """The agent restarted, read the plan, and loaded b-0 while b-3 was serving all along."""
    site = Site("b-3")
    fresh = Site("b-3")
    fresh.actuation = Actuation(
        "b", {n: h.declared for n, h in site.actuation.hands.items()}, Actuator(kind="emulator"), Planning()
    )
    fresh.plan(1)
    assert fresh.acts == []
    fresh.run(5)
    assert fresh.acts == []


def test_an_older_plan_changes_nothing() -> None:
    """Redelivered, or said by an owner that had lost its office."""
    site = Site("b-0")
    site.plan(1, term=7)
    old = PlanIssued(id="old", term=6, site="b", model="m", revision=99, targets=(Target(version="1", replicas=0),))
    assert not site.actuation.plan(old, site.now_ms)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_is_planned_comes_true_and_no_stream_is_broken(seed: int) -> None:
    """Plans, loads and samples in any order: at the end what runs is what was planned last, and stops were empty."""
    dice = random.Random(seed)
    site = Site(*[f"b-{n}" for n in range(dice.randint(0, 4))])
    for _ in range(40):
        if dice.random() < 0.3:
            site.plan(dice.randint(0, 4))
        for name in site.open:
            site.open[name] = dice.choice((0, 0, 1, 5)) if site.ready_ms[name] is not None else 0
        before = len(site.acts)
        load = dict(site.open)
        site.run(dice.choice((1, 5, 60)))
        for act in site.acts[before:]:
            assert act.action == "start" or load[act.instance] == 0
    site.open = dict.fromkeys(site.open, 0)
    site.plan(2)
    site.run(400)
    assert sum(since is not None for since in site.ready_ms.values()) == 2
