"""The agent's core, incident by incident: whole effect lists, no clock, no sockets."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet, parse
from tokenfleet.siteagent.core import SiteAgentCore
from tokenfleet.siteagent.settings import Knobs
from tokenfleet.siteagent.state import BandwidthTaken, Identity, Metrics, ProbeTaken, Sample, Served
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.plan import PlanApplied, PlanIssued, Target

T0 = 1_796_061_600_000.0
IDENTITY = Identity(served=(Served(name="m", root="m@2", max_model_len=8_192),), engine_version="0.32.0")
METRICS = Metrics(
    running=1,
    waiting=0,
    kv_usage=0.1,
    kv_tokens_total=100_000,
    prompt_tokens_total=10_000,
    generation_tokens_total=1_000,
    preemptions_total=0,
    started_unix_s=1_796_000_000.5,
)


def fleet(**instance: Any) -> Fleet:
    more = "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in instance.items())
    return parse(
        f"""
        [fleet]
        name = "test"
        default_class = "chat"
        [models.m]
        versions = ["1", "2"]
        default_version = "1"
        max_model_len = 32768
        [classes.chat]
        [sites.b]
        zone = "eu"
        [sites.b.instances.i]
        model = "m"
        version = "2"
        url = "http://10.0.0.1:8000"
        credential = "engines"
        routable_from = ["eu"]
        prefill_tokens_per_s = 20000.0
        {more}
        [sites.c]
        zone = "us"
        """.encode()
    )


class Agent:
    """A core with its time, and what it said."""

    def __init__(self, fleet_: Fleet | None = None, *, now_ms: float = T0, began: str = "aa", **knobs: Any) -> None:
        self.core = SiteAgentCore(fleet_ or fleet(), "b", began=began, knobs=Knobs(**knobs))
        self.now_ms = now_ms
        self.reports: list[CapacityReported] = []
        self.notes: list[Note] = []
        self.wake_ms: float | None = None

    def take(self, effects: Iterable[Effect]) -> list[CapacityReported]:
        said = []
        for effect in effects:
            if isinstance(effect, Publish):
                assert isinstance(effect.event, CapacityReported)
                assert not effect.durable
                said.append(effect.event)
            elif isinstance(effect, WakeAt):
                self.wake_ms = effect.at_ms
            else:
                assert isinstance(effect, Note)
                self.notes.append(effect)
        self.reports += said
        return said

    def poll(
        self,
        metrics: Metrics | None = METRICS,
        *,
        after_ms: float = 1_000.0,
        health: int | None = 200,
        failure: str = "",
        identity: Identity | None = IDENTITY,
        **changes: Any,
    ) -> list[CapacityReported]:
        """Time passes (the core is woken as it asked), then a sample comes."""
        until = self.now_ms + after_ms
        woken: list[CapacityReported] = []
        while self.wake_ms is not None and self.wake_ms < until:
            self.now_ms, self.wake_ms = self.wake_ms, None
            woken += self.take(self.core.wake(self.now_ms))
        self.now_ms = until
        if metrics is not None and changes:
            metrics = msgspec.structs.replace(metrics, **changes)
        sample = Sample(id="s", instance="i", health=health, failure=failure, metrics=metrics, identity=identity)
        return woken + self.take(self.core.handle(sample, self.now_ms))

    def silent(self, after_ms: float = 1_000.0, failure: str = "silent") -> list[CapacityReported]:
        return self.poll(None, after_ms=after_ms, health=None, failure=failure, identity=None)


def test_a_ready_instance_is_reported_with_all_that_is_known() -> None:
    """The whole record: what the file declares, what the engine says, whose clock."""
    agent = Agent(fleet(gpus=2, max_sequences=64))
    assert agent.poll() == [
        CapacityReported(
            id=f"i:1796000000.500:{int(T0 + 1000)}",
            time_unix_ms=int(T0 + 1000),
            site="b",
            zone="eu",
            instance="i",
            incarnation="1796000000.500",
            revision=int(T0 + 1000),
            model="m",
            version="2",
            ready=True,
            endpoint_url="http://10.0.0.1:8000",
            credential="engines",
            routable_from=("eu",),
            engine="vllm",
            engine_version="0.32.0",
            gpus=2,
            max_model_len=8_192,
            running=1,
            waiting=0,
            kv_tokens_total=100_000,
            kv_usage=0.1,
            prompt_tokens_total=10_000,
            generation_tokens_total=1_000,
            preemptions_total=0,
            token_budget=2_048,
            max_sequences=64,
            prefill_tokens_per_s=20_000.0,
        )
    ]
    assert [note.name for note in agent.notes] == ["readiness_changed"]
    assert agent.core.gauges() == {
        "siteagent_instance_ready": {(("instance", "i"),): 1.0},
        "siteagent_actuator_failing": {(("instance", "i"),): 0.0},
    }


def test_reports_come_every_second_and_not_more_often() -> None:
    """Polls may be quicker than reports; the stream keeps the last value only."""
    agent = Agent()
    said = [len(agent.poll(after_ms=250.0, generation_tokens_total=1_000 + turn)) for turn in range(12)]
    assert sum(said) == 6
    assert [r.revision for r in agent.reports] == sorted({r.revision for r in agent.reports})


def test_s01_unknown_stays_unknown_and_is_said_once() -> None:
    """A new engine version renames its gauges: an alert, the declared KV room, and no zero anywhere."""
    agent = Agent(fleet(kv_tokens=64_000))
    for _ in range(3):
        agent.poll(Metrics(started_unix_s=1.0))
    report = agent.reports[-1]
    assert report.ready
    assert (report.running, report.waiting, report.kv_usage) == (None, None, None)
    assert report.kv_tokens_total == 64_000
    alerts = [note for note in agent.notes if note.name == "metrics_unknown"]
    assert [(note.level, note.detail["names"]) for note in alerts] == [("warning", "running waiting kv_usage")]
    undeclared = Agent()
    undeclared.poll(Metrics())
    assert undeclared.reports[-1].kv_tokens_total is None


def test_s04_an_engine_that_computes_nothing_is_out_within_15_s_and_back_by_itself() -> None:
    """Health, models and metrics answer 200 while two requests get no token: 85 minutes of burned requests once."""
    agent = Agent()
    agent.poll(running=2)
    stuck = agent.now_ms
    while agent.reports[-1].ready:
        assert agent.now_ms - stuck <= 15_000
        agent.poll(running=2)
    assert agent.reports[-1].reason == "stalled"
    assert agent.now_ms - stuck == 15_000
    assert agent.reports[-1].running == 2
    agent.poll(running=2)
    assert not agent.reports[-1].ready
    (back,) = agent.poll(running=2, generation_tokens_total=1_001)
    assert back.ready
    assert back.reason == ""


def test_s04_an_engine_whose_requests_were_taken_back_is_back() -> None:
    """The gateway cancels what was stuck; with nothing running there is nothing to wait for."""
    agent = Agent()
    for _ in range(20):
        agent.poll(running=2)
    assert agent.reports[-1].reason == "stalled"
    agent.poll(running=0)
    assert agent.reports[-1].ready


@pytest.mark.parametrize(
    "sign",
    [
        {"prompt_tokens_total": 100},
        {"kv_usage": 0.01},
        {"steps_total": 1},
        {"generation_tokens_total": 1},
    ],
)
def test_s04_a_prefill_of_a_minute_is_no_stall_where_any_sign_of_it_shows(sign: dict[str, float]) -> None:
    """A prompt of a million tokens: no token comes out, but something moves."""
    agent = Agent()
    for turn in range(60):
        agent.poll(running=1, **{name: step * turn for name, step in sign.items()})
    assert all(report.ready for report in agent.reports)


def test_s04_a_silent_prefill_gets_the_time_that_the_longest_prompt_takes() -> None:
    """A slow engine that counts a prompt only at its end: 8,192 tokens at 150/s are 55 s, and half as much again."""
    agent = Agent(slow_fleet())
    agent.poll(running=0)
    agent.poll(running=1)
    for _ in range(60):
        agent.poll(running=1)
    assert agent.reports[-1].ready
    for _ in range(25):
        agent.poll(running=1)
    assert agent.reports[-1].reason == "stalled"


def slow_fleet() -> Fleet:
    known = fleet()
    slow = msgspec.structs.replace(known.sites["b"].instances["i"], prefill_tokens_per_s=150.0)
    site = msgspec.structs.replace(known.sites["b"], instances={"i": slow})
    return msgspec.structs.replace(known, sites={**known.sites, "b": site})


def test_s04_no_allowance_without_a_new_request() -> None:
    """The same slow engine stops in the middle of decoding: nobody entered, so 15 s it is."""
    agent = Agent(slow_fleet())
    agent.poll(running=2)
    for turn in range(3):
        agent.poll(running=2, generation_tokens_total=2_000 + turn)
    last = agent.now_ms
    while agent.reports[-1].ready:
        agent.poll(running=2, generation_tokens_total=2_002)
    assert agent.now_ms - last == 15_000


def test_s06_a_scrape_that_hangs_keeps_the_last_load_and_ages_it() -> None:
    """/metrics hangs 5 s while the queue is full: the load must not turn into zero just then."""
    agent = Agent()
    agent.poll(running=40, waiting=25, kv_usage=0.97)
    for _ in range(3):
        agent.poll(None, after_ms=2_000.0, identity=None)
    ages = [report.sample_age_ms for report in agent.reports]
    assert ages == sorted(ages)
    assert ages[-1] == 6_000.0
    assert {(r.ready, r.running, r.waiting, r.kv_usage) for r in agent.reports} == {(True, 40, 25, 0.97)}
    agent.poll(running=41, generation_tokens_total=2_000)
    assert (agent.reports[-1].running, agent.reports[-1].sample_age_ms) == (41, 0.0)


def test_s06_reports_go_on_while_a_poll_hangs() -> None:
    """Nothing comes from the engine for a while: the agent's own reports still say how old its knowledge is."""
    agent = Agent()
    agent.poll()
    said = agent.poll(None, after_ms=4_000.0, identity=None)
    assert [report.sample_age_ms for report in said] == [1_250.0, 2_500.0, 3_750.0]


def test_one_late_answer_is_no_failure_and_lasting_silence_is() -> None:
    """A stopped process (SIGSTOP) accepts connections and says nothing; a busy one is late once."""
    agent = Agent()
    agent.poll()
    agent.silent(2_000.0)
    assert agent.reports[-1].ready
    agent.poll(generation_tokens_total=1_500)
    agent.silent(2_000.0)
    agent.silent(2_000.0)
    assert agent.reports[-1].ready
    agent.silent(2_000.0)
    assert (agent.reports[-1].ready, agent.reports[-1].reason) == (False, "unreachable")
    (back,) = agent.poll(generation_tokens_total=1_600)
    assert back.ready


def test_s07_a_closed_port_is_out_at_once() -> None:
    """The engine was stopped in order: no new dispatch a second later."""
    agent = Agent()
    agent.poll()
    (report,) = agent.silent(500.0, "refused")
    assert (report.ready, report.reason) == (False, "unreachable")
    assert report.running == 1
    assert report.sample_age_ms == 500.0


def test_an_agent_that_knows_nothing_yet_says_nothing() -> None:
    """The agent is restarted while an engine is slow: what its predecessor reported must not be overwritten."""
    agent = Agent()
    assert agent.silent(2_000.0) == []
    (report,) = agent.silent(4_000.0)
    assert (report.ready, report.reason, report.running) == (False, "unreachable", None)
    assert report.incarnation == "agent-aa"


def test_starting_unhealthy_and_asleep() -> None:
    """503 while weights load is a start; 503 afterwards is a failure; asleep answers 200 and computes nothing."""
    agent = Agent()
    agent.poll(None, health=503, identity=None)
    assert agent.reports[-1].reason == "starting"
    agent.poll()
    assert agent.reports[-1].ready
    agent.poll(health=503)
    assert agent.reports[-1].reason == "unhealthy"
    agent.poll(generation_tokens_total=1_001)
    assert agent.reports[-1].ready
    agent.poll(asleep=True, generation_tokens_total=1_002)
    assert agent.reports[-1].reason == "stopped"
    agent.poll(generation_tokens_total=1_003)
    assert agent.reports[-1].ready


@pytest.mark.parametrize(
    ("served", "version", "reason"),
    [
        (Served(name="m", root="m@2"), "2", ""),
        (Served(name="m@2", root="/models/m"), "2", ""),
        (Served(name="m", root="/models/m"), "2", ""),  # the operator's word
        (Served(name="m", root="m@1"), "", "version_mismatch"),
        (Served(name="m@1", root="/models/m"), "", "version_mismatch"),
        (Served(name="other", root="m@2"), "", "version_mismatch"),
        (Served(name="m", root="m@2", parent="base"), "", "version_mismatch"),
    ],
)
def test_only_the_exact_version_is_ready(served: Served, version: str, reason: str) -> None:
    """An engine was upgraded and the file was not: answers of another version must not pass for this one."""
    agent = Agent()
    agent.poll(identity=Identity(served=(served,)))
    report = agent.reports[-1]
    assert (report.version, report.reason, report.ready) == (version, reason, not reason)


def test_a_version_that_nobody_can_tell_is_not_trusted_where_the_operator_says_so() -> None:
    """`trust_declared_version` off: unknown is not eligible."""
    agent = Agent(trust_declared_version=False)
    agent.poll(identity=Identity(served=(Served(name="m", root="/models/m"),)))
    assert (agent.reports[-1].version, agent.reports[-1].reason) == ("", "version_mismatch")


def test_adapters_of_the_model_are_named() -> None:
    """A request for an adapter goes only where it is loaded."""
    served = (*IDENTITY.served, Served(name="sql", parent="m"), Served(name="alien", parent="x"))
    agent = Agent()
    agent.poll(identity=Identity(served=served))
    assert agent.reports[-1].adapters == ("sql",)


def test_s09_a_restarted_engine_is_a_new_incarnation_before_anything_else_is_said_of_it() -> None:
    """Same address, empty cache: hits of its old blocks would be chased for ever."""
    agent = Agent()
    agent.poll()
    (report,) = agent.poll(started_unix_s=1_796_061_000.0, generation_tokens_total=0, prompt_tokens_total=0, running=0)
    assert report.incarnation == "1796061000.000"
    assert report.ready
    assert [note.name for note in agent.notes].count("engine_restarted") == 1


def test_s09_counters_that_go_backwards_are_a_restart_too() -> None:
    """SGLang does not say when it began, and a container may keep its process's start time."""
    agent = Agent()
    agent.poll(started_unix_s=None)
    first = agent.reports[-1].incarnation
    agent.poll(started_unix_s=None, generation_tokens_total=2_000)
    assert agent.reports[-1].incarnation == first == "agent-aa"
    agent.poll(started_unix_s=None, generation_tokens_total=5)
    assert agent.reports[-1].incarnation == "agent-aa-1"
    agent.poll(started_unix_s=None, generation_tokens_total=9)
    assert agent.reports[-1].incarnation == "agent-aa-1"
    agent.poll(started_unix_s=None, generation_tokens_total=0)
    assert agent.reports[-1].incarnation == "agent-aa-2"


def test_s09_what_the_new_process_serves_is_asked_before_it_is_ready() -> None:
    """The restart was an upgrade: until the new models page is there, the old one does not count."""
    agent = Agent()
    agent.poll()
    assert not agent.core.wants_identity("i")
    (report,) = agent.poll(started_unix_s=2.0, identity=None)
    assert (report.ready, report.reason, report.version) == (False, "starting", "")
    assert agent.core.wants_identity("i")
    (report,) = agent.poll(started_unix_s=2.0, identity=Identity(served=(Served(name="m", root="m@3"),)))
    assert report.reason == "version_mismatch"


def test_revisions_rise_over_restarts_of_the_agent() -> None:
    """Ids that repeat within the duplicate window would make the stream drop the new agent's reports."""
    first = Agent()
    for turn in range(5):
        first.poll(generation_tokens_total=1_000 + turn)
    second = Agent(now_ms=first.now_ms + 100, began="bb")
    second.poll(generation_tokens_total=1_005)
    assert second.reports[0].incarnation == first.reports[-1].incarnation
    assert second.reports[0].revision > first.reports[-1].revision
    assert len({report.id for report in first.reports + second.reports}) == len(first.reports) + len(second.reports)


def test_an_instance_taken_out_of_the_file_is_said_to_drain_and_forgotten() -> None:
    """An operator removes an engine: new requests stop now, not when its last report is too old."""
    agent = Agent()
    agent.poll()
    known = agent.core.fleet
    without = msgspec.structs.replace(known.sites["b"], instances={})
    empty = msgspec.structs.replace(known, sites={**known.sites, "b": without})
    (report,) = agent.take(agent.core.reconfigure(empty, agent.now_ms + 10))
    assert (report.ready, report.draining, report.reason) == (False, True, "draining")
    assert agent.poll() == []
    assert agent.core.records == {}
    assert agent.take(agent.core.reconfigure(known, agent.now_ms)) == []
    agent.poll(generation_tokens_total=1_001)
    assert agent.reports[-1].ready


def test_a_changed_declaration_of_the_same_engine_keeps_what_is_known() -> None:
    """Another KV size in the file is no reason to doubt a healthy engine; another version is."""
    agent = Agent()
    agent.poll()
    agent.take(agent.core.reconfigure(slow_fleet(), agent.now_ms))
    (report,) = agent.poll(generation_tokens_total=1_001)
    assert (report.ready, report.prefill_tokens_per_s) == (True, 150.0)
    known = agent.core.fleet
    other = msgspec.structs.replace(known.sites["b"].instances["i"], version="1")
    site = msgspec.structs.replace(known.sites["b"], instances={"i": other})
    agent.take(agent.core.reconfigure(msgspec.structs.replace(known, sites={**known.sites, "b": site}), agent.now_ms))
    agent.poll(generation_tokens_total=1_002)
    assert agent.reports[-1].reason == "version_mismatch"


def test_the_network_is_reported_with_its_losses() -> None:
    """One lost probe in four; when nothing answers the round trip is unknown, not zero."""
    core = Agent().core
    said = [
        effect.event
        for turn, rtt in enumerate([30.0, None, 32.0, 31.0])
        for effect in core.handle(ProbeTaken(id=f"p{turn}", other_site="c", rtts_ms=(rtt,)), T0 + turn)
        if isinstance(effect, Publish)
    ]
    last = said[-1]
    assert isinstance(last, CapacityProbed)
    assert (last.site, last.other_site, last.rtt_ms, last.loss) == ("b", "c", 31.0, 0.25)
    assert len({event.id for event in said}) == 4
    lost = [
        effect.event
        for turn in range(6)
        for effect in core.handle(ProbeTaken(id=f"l{turn}", other_site="c", rtts_ms=(None,)), T0 + 10 + turn)
        if isinstance(effect, Publish)
    ][-1]
    assert isinstance(lost, CapacityProbed)
    assert (lost.rtt_ms, lost.loss) == (None, 1.0)


def test_of_one_probe_the_shortest_connection_is_the_networks() -> None:
    """An agent that was busy itself measured its own delay, and its whole site looked far away."""
    core = Agent().core
    said: list[CapacityProbed] = []
    for turn, rtts in enumerate([(40.0, 5.0, 5.2), (5.1, 300.0, 80.0), (None, 90.0, 4.9)]):
        effects = core.handle(ProbeTaken(id=f"p{turn}", other_site="c", rtts_ms=rtts), T0 + turn)
        said += [one.event for one in effects if isinstance(one, Publish) and isinstance(one.event, CapacityProbed)]
    assert (said[-1].rtt_ms, said[-1].loss) == (5.0, round(1 / 9, 4))


def test_bandwidth_is_said_with_its_age_and_no_longer_than_it_is_true() -> None:
    """Of two transfers the better counts, a failed one says nothing; unknown stays unknown."""
    core = Agent().core

    def probed(after_ms: float) -> CapacityProbed:
        (effect,) = core.handle(ProbeTaken(id=f"p{after_ms}", other_site="c", rtts_ms=(30.0,)), T0 + after_ms)
        assert isinstance(effect, Publish)
        assert isinstance(effect.event, CapacityProbed)
        return effect.event

    assert (probed(0).bytes_per_s, probed(1).bandwidth_age_ms) == (None, None)
    for turn, rate in enumerate((8e6, 2e6, None)):
        assert list(core.handle(BandwidthTaken(id=f"b{turn}", other_site="c", bytes_per_s=rate), T0 + 1_000)) == []
    assert (probed(5_000).bytes_per_s, probed(5_000).bandwidth_age_ms) == (8e6, 4_000.0)
    list(core.handle(BandwidthTaken(id="b3", other_site="c", bytes_per_s=1e6), T0 + 6_000))
    assert probed(7_000).bytes_per_s == 2e6
    assert probed(700_000).bytes_per_s is None


def test_a_plan_is_answered_with_what_really_runs() -> None:
    """FleetMind must not believe a plan that nobody carried out."""
    agent = Agent()
    agent.poll()

    def answers(replicas: int, revision: int, site: str = "b") -> list[PlanApplied]:
        targets = (Target(version="2", replicas=replicas),)
        plan = PlanIssued(id=f"p{revision}", site=site, model="m", revision=revision, targets=targets)
        found = [e.event for e in agent.core.handle(plan, agent.now_ms) if isinstance(e, Publish)]
        return [event for event in found if isinstance(event, PlanApplied)]

    (good,) = answers(1, 3)
    assert (good.cause, good.plan, good.ok, good.replicas, good.revision) == ("p3", "p3", True, {"2": 1}, 3)
    (bad,) = answers(2, 4)
    assert (bad.ok, bad.replicas) == (False, {"2": 1})
    assert bad.detail == "not as planned: 2; this site has no actuator"
    assert answers(2, 4) == []
    assert answers(1, 3) == []
    assert answers(1, 5, site="c") == []


def test_samples_of_strangers_change_nothing() -> None:
    """A poll that was under way when its instance was removed."""
    core = Agent().core
    assert list(core.handle(Sample(id="s", instance="ghost", health=200), T0)) == []
