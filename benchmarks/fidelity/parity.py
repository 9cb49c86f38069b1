"""One scenario through live services with emulated engines in real time, and through the simulator: the same decisions?

Decides how alike they are, decision by decision: where the live fleet sent each request, and where the simulated one
sends it, with both scorers' figures for the two places. Two numbers are told apart, because a decision that differs
changes what later ones find (another instance has the prefix then):

- *followed*: the simulated TokenPilot decides every request by itself, is asked whether it chose as the live one did,
  and is then made to go the live one's way. Every decision is compared on the live history.
- *free*: the simulation runs by itself; once it differs, histories part.

The simulation is told the arrivals and ids of the requests as they were live, and what was measured of the bus and of
the reports (`Calibration`); nothing of the decisions, the engines' answers or their times.
"""

import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import nats
import nats.errors
from nats.js.api import ConsumerConfig, DeliverPolicy

from tokenfleet import fleet as fleets
from tokenfleet.engine_model import profile
from tokenfleet.fleet import Fleet
from tokenfleet.local.cluster import LocalFleet
from tokenfleet.local.state_dir import StateDir
from tokenfleet.replay import driver
from tokenfleet.replay.plan import Choices, plan
from tokenfleet.replay.records import Record
from tokenfleet.replay.traces import Row, Trace
from tokenfleet.simulator.arrivals import draw
from tokenfleet.simulator.policies import Choice, choose
from tokenfleet.simulator.scenario import AgentSpec, BusSpec, EngineSpec, Info, Scenario, Source
from tokenfleet.simulator.world import World
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.policy import Candidate, Situation
from tokenfleet_schemas import codec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeStarted
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.routes import subject_filter

BLOCK_TOKENS = 64
TENANT = "parity"
_TOKEN_BUDGET = 512
#: how often site agents report
_REPORT_MS = 1000.0
#: the goals
SAME_MIN, GAP_MAX, TTFT_ERROR_MAX = 0.95, 0.05, 0.10

FLEET = """
[fleet]
name = "parity"
default_class = "chat"
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 16384
tokenizer = "bytes"
[sites.a]
zone = "eu"
entry = true
gpus = {count}
[sites.a.instances]
{instances}
[classes.chat]
ttft_ms = 1500
tier = 1
patience_ms = 30000
[classes.document]
ttft_ms = 8000
tier = 2
patience_ms = 60000
[tenants.parity]
zones = ["*"]
classes = ["chat", "document"]
"""


class ParityError(RuntimeError):
    """The live run cannot be compared: it failed, or its driver lagged."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    seconds: float = 60.0
    rate_per_s: float = 5.0
    #: hardware of each instance; alike, they share the load and are hard to tell apart
    profiles: tuple[str, ...] = ("32b-a100x2",) * 4
    #: the fleet file declares the instances' prefill rates; otherwise agents say unknown
    declared: bool = True
    #: of a chat, least and most: the first of them finds its prompt nowhere
    turns: tuple[int, int] = (4, 10)
    seed: int = 1
    #: requests of the beginning are served and not compared: predictors learn, caches are cold
    warmup_s: float = 5.0


def rows(load: Load) -> tuple[Row, ...]:
    """Chats whose turns repeat their history, and documents that several ask about; openings differ by session."""
    dice = random.Random(f"parity {load.seed}")
    fresh = iter(range(1_000_000_000))
    found: list[Row] = []
    documents = [tuple(next(fresh) for _ in range(dice.randrange(24, 56))) for _ in range(6)]
    least, most = load.turns
    # Sessions that began before the window still send turns in it; three in ten ask about a document, twice on average.
    at_s = -2.0 * most
    per_session = 0.7 * (least + most) / 2 + 0.3 * 2
    while (at_s := at_s + dice.expovariate(load.rate_per_s / per_session)) < load.seconds:
        if dice.random() < 0.3:
            known = dice.choice(documents)
            blocks = known
            t_s = at_s
            for _ in range(dice.randrange(1, 4)):
                found.append(_row(t_s, blocks, dice.randrange(200, 900), dice.randrange(20, 60), "document"))
                t_s += dice.uniform(1.0, 4.0)
            continue
        blocks = tuple(next(fresh) for _ in range(dice.randrange(4, 14)))
        t_s = at_s
        for _ in range(dice.randint(least, most)):
            found.append(_row(t_s, blocks, dice.randrange(60, 400), dice.randrange(16, 80), "chat"))
            blocks = (*blocks, *(next(fresh) for _ in range(dice.randrange(1, 5))))
            t_s += dice.uniform(1.5, 5.0)
    return tuple(sorted((row for row in found if 0.0 <= row.t_s < load.seconds), key=lambda row: row.t_s))


def _row(t_s: float, blocks: tuple[int, ...], own: int, output: int, cls: str) -> Row:
    tokens = len(blocks) * BLOCK_TOKENS + own
    return Row(t_s=t_s, input_tokens=tokens, output_tokens=output, blocks=blocks, cls=cls)


def fleet_text(load: Load) -> str:
    """All instances at one site: there is no network between sites on one machine."""
    instances = "\n".join(
        f'i-{n} = {{ model = "m", version = "1", url = "http://127.0.0.1:0", profile = "{name}", '
        f"token_budget = {_TOKEN_BUDGET}, max_sequences = 16, kv_tokens = 64000, "
        f"prefill_tokens_per_s = {_declared_rate(name) if load.declared else 0.0} }}"
        for n, name in enumerate(load.profiles)
    )
    return FLEET.format(count=len(load.profiles), instances=instances)


def _declared_rate(name: str) -> float:
    """What an operator would declare: a full step's tokens over its time. Undeclared, a live agent says unknown."""
    one = profile(name)
    return round(
        1000.0 * _TOKEN_BUDGET / (one.t_fix_ms + max(one.t_w_ms, one.c_us_per_token * _TOKEN_BUDGET * 1e-3)), 1
    )


# ── live ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Heard(msgspec.Struct, frozen=True):
    """One event, and when its stream had it, ms since the epoch."""

    stored_ms: float
    event: Event


class LiveRun(msgspec.Struct, kw_only=True):
    """What a live run left."""

    load: Load
    records: list[Record]
    heard: list[Heard]
    #: driver's lag, p99
    lag_ms: float


async def live(load: Load, say: Callable[[str], None]) -> LiveRun:
    """Bring the fleet up, send the scenario, read what was said. Raises `ParityError` when a request failed."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-parity-") as root, StateDir(Path(root) / "state") as state:
        fleet = LocalFleet(state=state, fleet_text=fleet_text(load), say=say)
        try:
            await fleet.start()
            return await played(load, api=fleet.api_url, key=fleet.key, nats_url=fleet.ready()["nats"], say=say)
        finally:
            await fleet.stop()


async def played(load: Load, *, api: str, key: str, nats_url: str, say: Callable[[str], None]) -> LiveRun:
    """The scenario against a fleet that runs."""
    trace = Trace(name="parity", rows=rows(load), block_tokens=BLOCK_TOKENS)
    planned = plan(trace, fleets.parse(fleet_text(load).encode()), Choices(tenant=TENANT))
    target = driver.Target(url=api, key=key, drain_s=60.0, seed=load.seed, block_tokens=BLOCK_TOKENS)
    say(f"{len(planned)} requests over {load.seconds:.0f} s")
    ran = await asyncio.to_thread(driver.run, planned, target, processes=2)
    bad = [one for one in ran.records if one.outcome != "completed"]
    if bad:
        raise ParityError(f"{len(bad)} of {len(planned)} requests failed, first: {bad[0].outcome} {bad[0].error_code}")
    lags = sorted(one.lag_ms for one in ran.records)
    families = (CapacityReported, OutcomeStarted, PlacementAssigned, PlacementHeld, RequestReceived)
    heard = await read(nats_url, families)
    return LiveRun(load=load, records=ran.records, heard=heard, lag_ms=lags[int(0.99 * (len(lags) - 1))])


async def read(nats_url: str, kinds: Sequence[type[Event]]) -> list[Heard]:
    """Everything that the streams hold of these messages."""
    client = await nats.connect(nats_url)
    found: list[Heard] = []
    try:
        js = client.jetstream()
        for kind in kinds:
            everything = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
            subscription = await js.subscribe(subject_filter(kind), ordered_consumer=True, config=everything)
            while True:
                try:
                    message = await subscription.next_msg(timeout=1.0)
                except (nats.errors.TimeoutError, TimeoutError):
                    break
                stored_ms = message.metadata.timestamp.timestamp() * 1000
                found.append(Heard(stored_ms, codec.decode(message.data)))
                if not message.metadata.num_pending:
                    break
            await subscription.unsubscribe()
    finally:
        await client.close()
    return found


class _Kept(msgspec.Struct, kw_only=True):
    load: Load
    records: list[Record]
    heard: list[tuple[float, msgspec.Raw]]
    lag_ms: float


def encode(run: LiveRun) -> bytes:
    """A live run as JSON."""
    heard = [(one.stored_ms, msgspec.Raw(codec.encode(one.event))) for one in run.heard]
    return msgspec.json.encode(_Kept(load=run.load, records=run.records, heard=heard, lag_ms=run.lag_ms))


def decode(data: bytes) -> LiveRun:
    """What `encode` wrote."""
    kept = msgspec.json.decode(data, type=_Kept)
    heard = [Heard(at_ms, codec.decode(bytes(raw))) for at_ms, raw in kept.heard]
    return LiveRun(load=kept.load, records=kept.records, heard=heard, lag_ms=kept.lag_ms)


# ── what the simulation is told ─────────────────────────────────────────────────────────────────────────────────────


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measured of the live run: how long messages take, and how old reports are."""

    #: from one service's answer in the stream to the next one's, ms, deciding included
    hop_ms: float
    report_every_s: float
    report_late_ms: float


def calibrate(run: LiveRun) -> Calibration:
    """Medians over the run. Raises `ParityError` when nothing was heard."""
    received: dict[str, float] = {}
    assigned: dict[str, float] = {}
    ages: list[float] = []
    gaps: list[float] = []
    last: dict[str, float] = {}
    for one in run.heard:
        event = one.event
        if isinstance(event, CapacityReported):
            ages.append(event.sample_age_ms or 0.0)
            if event.instance in last:
                gaps.append(one.stored_ms - last[event.instance])
            last[event.instance] = one.stored_ms
        elif isinstance(event, RequestReceived):
            received.setdefault(event.ask.request_id, one.stored_ms)
        elif isinstance(event, PlacementAssigned):
            assigned.setdefault(event.request_id, one.stored_ms)
    held = held_ids(run)
    roads = [assigned[name] - at for name, at in received.items() if name in assigned and name not in held]
    if not roads:
        raise ParityError("the streams hold no decisions")
    # received → decided → requested → assigned
    hop_ms = statistics.median(roads) / 3
    # The stream keeps each instance's last report only: where there are no two, the agents' own pace.
    every_ms = statistics.median(gaps) if gaps else _REPORT_MS
    late_ms = statistics.median(ages) if ages else 0.0
    return Calibration(hop_ms=hop_ms, report_every_s=every_ms / 1000, report_late_ms=late_ms + hop_ms)


def held_ids(run: LiveRun) -> set[str]:
    """Requests that waited for room."""
    return {one.event.request_id for one in run.heard if isinstance(one.event, PlacementHeld)}


def scenario_of(run: LiveRun, told: Calibration) -> tuple[Scenario, list[Record]]:
    """The same fleet, and its arrivals as they were sent; the live records in that order."""
    made = rows(run.load)
    records = sorted(run.records, key=lambda record: (record.sent_ms, record.index))
    moved = tuple(msgspec.structs.replace(made[one.index], t_s=one.sent_ms / 1000) for one in records)
    scenario = Scenario(
        info=Info(name="parity", drain_s=120.0),
        fleet=fleets.parse(fleet_text(run.load).encode()),
        sources=(Source(trace="parity", tenant=TENANT),),
        traces=(Trace(name="parity", rows=moved, block_tokens=BLOCK_TOKENS),),
        bus=BusSpec(hop_ms=told.hop_ms),
        agents=AgentSpec(every_s=told.report_every_s, late_ms=told.report_late_ms, declare_rates=False),
        engines=EngineSpec(scheduling="fcfs"),
    )
    return scenario, records


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One request: where the live fleet sent it and where the simulated one would."""

    index: int
    live: str
    simulated: str
    #: by how much the simulated scorer has the live choice dearer than its own; 0 where they are the same
    gap: float = 0.0
    #: and the live scorer the simulated choice dearer than its own; infinite: it could not have taken it
    live_gap: float = 0.0
    #: part of the prompt was expected in the cache of the live choice
    hit: bool = False


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of one way of comparing."""

    decisions: list[Decision]

    @property
    def same(self) -> float:
        """Share of equal decisions."""
        return sum(one.live == one.simulated for one in self.decisions) / len(self.decisions)

    def same_where(self, hit: bool) -> tuple[float, int]:
        """The same among requests with a cached prefix, or without one, and how many these are."""
        these = [one for one in self.decisions if one.hit is hit]
        return (sum(one.live == one.simulated for one in these) / len(these) if these else 1.0), len(these)

    @property
    def others(self) -> list[Decision]:
        """Those that are not equal."""
        return [one for one in self.decisions if one.live != one.simulated]


class Median(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT of a class, ms."""

    live_ms: float
    simulated_ms: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated_ms / self.live_ms - 1


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    load: Load
    requests: int
    held: int
    told: Calibration
    lag_ms: float
    followed: Compared
    free: Compared
    ttft: dict[str, Median]

    @property
    def reached(self) -> bool:
        """Whether every goal is."""
        return (
            self.followed.same >= SAME_MIN
            and all(one.gap < GAP_MAX for one in self.followed.others)
            and all(abs(one.error) <= TTFT_ERROR_MAX for one in self.ttft.values())
        )


class Follow:
    """A picker that decides as the live TokenPilot does, says so, and goes where the live run went."""

    def __init__(self, wanted: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.said: dict[str, tuple[str, float]] = {}

    def __call__(self, situation: Situation, candidates: Sequence[Candidate]) -> Candidate | None:
        """See `policy.Picker`."""
        ours = policy.home_or_room(situation, candidates)
        if ours is None:
            return None
        request_id = situation.request.ask.request_id
        other = next((c for c in candidates if c.name == self.wanted.get(request_id)), None)
        if other is None or other is ours:
            self.said[request_id] = ours.name, 0.0
            return ours
        self.said[request_id] = ours.name, _gap(other.cost_ms, ours.cost_ms)
        return other


class Followed(Choice, frozen=True, kw_only=True):
    """Our policy with a picker that follows."""

    follow: Follow

    def tokenpilot(self, fleet: Fleet, site: str, replica: str) -> TokenPilot:
        """See `Choice`."""
        return TokenPilot(fleet, site, replica=replica, picker=self.follow)


def simulate(scenario: Scenario, ids: Sequence[str], choice: Choice) -> tuple[dict[str, str], list[Record]]:
    """One run with the live requests' ids, by which ties break: where each went first, and its record."""
    arrivals = draw(scenario, 1)
    for arrival, name in zip(arrivals, ids, strict=True):
        arrival.request_id = name
    world = World(scenario, choice, 1, arrivals=arrivals)
    went: dict[str, str] = {}

    def note(event: Event) -> None:
        if isinstance(event, PlacementAssigned):
            went.setdefault(event.request_id, event.instance)

    for node in world.bus.nodes.values():
        if node.service == "tokenpilot":
            node.on_publish = note
    run = world.run()
    world.check()
    return went, run.records


def compare(run: LiveRun) -> Parity:
    """Both simulations, beside the live run. Raises `ParityError` where the live run says too little."""
    told = calibrate(run)
    scenario, records = scenario_of(run, told)
    ids = [record.request_id for record in records]
    decided: dict[str, PlacementAssigned] = {}
    first_ms: dict[str, float] = {}
    for one in run.heard:
        if isinstance(one.event, PlacementAssigned):
            decided.setdefault(one.event.request_id, one.event)
        elif isinstance(one.event, OutcomeStarted):
            first_ms.setdefault(one.event.request_id, one.event.ttft_ms)
    lost = [name for name in ids if name not in decided or name not in first_ms]
    if lost:
        raise ParityError(f"{len(lost)} of {len(ids)} requests have no decision or no first token in the streams")
    follow = Follow({name: decided[name].instance for name in ids})
    ours = choose("tokenfleet")
    following = Followed(
        name=ours.name, placement=ours.placement, sites=ours.sites, admission=ours.admission, follow=follow
    )
    _, followed_records = simulate(scenario, ids, following)
    went, _ = simulate(scenario, ids, ours)
    counted = [n for n, record in enumerate(records) if record.sent_ms >= run.load.warmup_s * 1000]
    followed: list[Decision] = []
    free: list[Decision] = []
    for n in counted:
        name = ids[n]
        live = decided[name]
        chosen, gap = follow.said[name]
        followed.append(
            Decision(
                index=n,
                live=live.instance,
                simulated=chosen,
                gap=gap,
                live_gap=_live_gap(live, chosen),
                hit=live.prefix_hit_tokens > 0,
            )
        )
        there = _live_gap(live, went[name])
        free.append(Decision(index=n, live=live.instance, simulated=went[name], gap=there, live_gap=there))
    by_class: dict[str, list[tuple[float, float]]] = {}
    for n in counted:
        simulated_ms = followed_records[n].ttft_ms
        if simulated_ms is None:
            raise ParityError(f"request {n} had no token in the simulation")
        by_class.setdefault(records[n].cls, []).append((first_ms[ids[n]], simulated_ms))
    return Parity(
        load=run.load,
        requests=len(counted),
        held=len(held_ids(run)),
        told=told,
        lag_ms=run.lag_ms,
        followed=Compared(decisions=followed),
        free=Compared(decisions=free),
        ttft={
            name: Median(
                live_ms=statistics.median(mine for mine, _ in both),
                simulated_ms=statistics.median(theirs for _, theirs in both),
            )
            for name, both in sorted(by_class.items())
        },
    )


def _live_gap(decided: PlacementAssigned, chosen: str) -> float:
    """By how much the live scorer had another choice dearer than its own; infinite: it was no candidate."""
    costs = {one.name: one.terms.get("cost_ms") for one in decided.candidates if not one.out}
    mine, other = costs.get(decided.instance), costs.get(chosen)
    return math.inf if mine is None or other is None else _gap(other, mine)


def _gap(other_ms: float, best_ms: float) -> float:
    return other_ms / best_ms - 1 if best_ms > 0 else math.inf


def table(found: Parity) -> str:
    """The comparison for people."""
    load, told = found.load, found.told
    lines = [
        f"{found.requests} decisions over {', '.join(load.profiles)}; {found.held} requests held; "
        f"driver lag p99 {found.lag_ms:.1f} ms",
        f"told: hop {told.hop_ms:.2f} ms, reports every {told.report_every_s:.2f} s, {told.report_late_ms:.0f} ms late",
        "",
        f"{'':<10} {'equal':>7} {'others':>7} {'gap median':>11} {'gap max':>9} {'live gap median':>16} {'max':>9}",
    ]
    for name, way in (("followed", found.followed), ("free", found.free)):
        gaps, theirs = [other.gap for other in way.others], [other.live_gap for other in way.others]
        cells = ["-"] * 4
        if gaps:
            values = (statistics.median(gaps), max(gaps), statistics.median(theirs), max(theirs))
            cells = [f"{value:.1%}" for value in values]
        lines.append(
            f"{name:<10} {way.same:>7.1%} {len(gaps):>7} {cells[0]:>11} {cells[1]:>9} {cells[2]:>16} {cells[3]:>9}"
        )
    (with_hit, hits), (without, misses) = found.followed.same_where(True), found.followed.same_where(False)
    lines += [
        "",
        f"followed, a prefix is cached: {with_hit:.1%} of {hits} equal; none is: {without:.1%} of {misses}",
        "",
    ]
    lines += [
        f"TTFT median, {name}: live {one.live_ms:.1f} ms, simulated {one.simulated_ms:.1f} ms ({one.error:+.1%})"
        for name, one in found.ttft.items()
    ]
    return "\n".join(lines)
