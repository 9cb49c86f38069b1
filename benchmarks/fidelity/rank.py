"""Policies on real engines behind real services, and the same policies on the same arrivals in the simulation.

Decides whether both rank them alike: by the 95th percentile of TTFT as clients see it, mean and 95% confidence interval
over the runs, and only where the measured intervals of two policies do not overlap (elsewhere the machine cannot tell
them apart, and neither order would be wrong). The simulation is told the engine's fitted constants, the fleet file and
the arrivals, and nothing of the live runs. Refuses to know why a policy is better.

Clients ask for documents: a long beginning that others share, a question of their own, a short answer. Caches hold
some of the beginnings, not all.
"""

import asyncio
import json
import math
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from benchmarks.fidelity.sending import Sent, encode, get_text, send_all
from tokenfleet.engine_model import Profile
from tokenfleet.local.cluster import LocalFleet
from tokenfleet.local.fleetfile import set_policy
from tokenfleet.local.state_dir import StateDir
from tokenfleet.replay.records import nearest_rank
from tokenfleet.replay.traces import Row, Trace
from tokenfleet.simulator.experiment import Estimate, estimate
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import AgentSpec, BusSpec, EngineSpec, Info, Scenario, Source
from tokenfleet.simulator.world import World

POLICIES = ("round-robin", "least-requests", "tokenfleet")
#: tokens of a digest, and so of the blocks that the simulated prompts are made of
BLOCK_TOKENS = 64
_CLASS = "chat"
_SETTLE_S = 4.0
#: of the only class: what TokenPilot prices being late by
_OBJECTIVE_MS = 1000

FLEET = """
[fleet]
name = "fidelity"
default_class = "chat"
[models."{model}"]
versions = ["1"]
default_version = "1"
max_model_len = {max_model_len}
tokenizer = "{tokenizer}"
chat_template = "chatml"
[sites.a]
zone = "eu"
entry = true
gpus = {count}
[sites.a.instances]
{instances}
[classes.chat]
ttft_ms = {ttft_ms}
patience_ms = 60000
[tenants.fidelity]
zones = ["*"]
classes = ["chat"]
"""


class RankError(RuntimeError):
    """The comparison could not be run; says nothing about any policy."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What clients ask."""

    rate_per_s: float
    seconds: float
    #: requests that arrive before this are not counted: the caches are cold then
    warmup_s: float = 10.0
    #: documents, and tokens that all requests of one begin with (the template's opening included)
    documents: int = 12
    shared_tokens: int = 1536
    #: tokens of their own, and of the answer: most are about this long
    own_tokens: int = 60
    output_tokens: int = 16


class Alphabet:
    """Letters of which a text of N has N tokens: none of them merge, whatever stands beside them."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        merges = {tuple(one) if isinstance(one, list) else tuple(one.split(" ", 1))
                  for one in json.loads(path.read_text())["model"].get("merges", [])}  # fmt: skip
        kept: list[str] = []
        for letter in "QXZJVKWYGBHFUPMDLNCRqxzjvkwyg":
            if not any((letter, other) in merges or (other, letter) in merges for other in [*kept, letter]):
                kept.append(letter)
        self.letters = "".join(kept)
        if len(self.letters) < 4 or self.count(self.letters * 20) != 20 * len(self.letters):
            raise RankError(f"{path}: found no letters of one token each")

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, seed: str, tokens: int) -> str:
        """So many tokens, always the same for a seed."""
        return "".join(random.Random(seed).choices(self.letters, k=tokens))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    at_s: float
    document: int
    own: int
    output: int


def draw(load: Load, seed: int) -> list[Asked]:
    """Poisson arrivals; some documents are asked for more often than others."""
    dice = random.Random(f"rank {seed}")
    weights = [1.0 / (1 + n) ** 0.5 for n in range(load.documents)]
    found: list[Asked] = []
    at_s = 0.0
    while (at_s := at_s + dice.expovariate(load.rate_per_s)) < load.seconds:
        found.append(
            Asked(
                at_s=at_s,
                document=dice.choices(range(load.documents), weights)[0],
                own=max(8, round(dice.lognormvariate(math.log(load.own_tokens), 0.6))),
                output=min(64, max(2, round(dice.lognormvariate(math.log(load.output_tokens), 0.5)))),
            )
        )
    return found


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One run under one policy."""

    policy: str
    seed: int
    requests: int
    failed: int
    ttft_p50_ms: float
    #: None: more than one request in twenty had no first token
    ttft_p95_ms: float | None
    #: tokens found in an engine's cache over prompt tokens; None: engines do not say
    hit: float | None


def judged(policy: str, seed: int, ttfts: Sequence[float | None], hit: float | None) -> Figure:
    """Percentiles over what was offered: no first token counts as infinite."""
    ordered = sorted(math.inf if one is None else one for one in ttfts)
    p50, p95 = nearest_rank(ordered, 0.5), nearest_rank(ordered, 0.95)
    assert p50 is not None
    assert p95 is not None
    return Figure(
        policy=policy,
        seed=seed,
        requests=len(ordered),
        failed=sum(one is None for one in ttfts),
        ttft_p50_ms=p50,
        ttft_p95_ms=p95 if math.isfinite(p95) else None,
        hit=hit,
    )


# ── live ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Live:
    """A fleet of services over engines that run already."""

    def __init__(self, fleet: LocalFleet, alphabet: Alphabet, load: Load, engines: Sequence[str], model: str) -> None:
        self.fleet, self.alphabet, self.load, self.engines = fleet, alphabet, load, engines
        self.model = model
        self.head_tokens = 0

    async def begin(self) -> None:
        """Learn what the chat template adds, and let every engine answer once."""
        probes = [self._request(n, f"opening {n} {os.getpid()}", "", 40, 4, 0.0) for n in range(8)]
        await send_all(f"{self.fleet.api_url}/chat/completions", probes, key=self.fleet.key)
        broken = [one.problem for one in probes if one.problem]
        if broken:
            raise RankError(f"the fleet does not answer: {broken[0]}")
        self.head_tokens = probes[0].prompt_tokens - 40
        if any(one.prompt_tokens != probes[0].prompt_tokens for one in probes) or self.head_tokens < 0:
            raise RankError("the engine counts prompts otherwise than its tokenizer does")

    def _request(self, index: int, seed: str, shared: str, own: int, output: int, at_s: float) -> Sent:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": shared + self.alphabet.text(seed, own)}],
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Sent(index=index, body=encode(body), at_ms=at_s * 1000)

    async def run(self, policy: str, seed: int, asked: Sequence[Asked]) -> Figure:
        """One run; its prompts are its own, so that it finds nothing in the caches."""
        await self._switch(policy)
        salt = f"{policy} {seed}"
        shared = [
            self.alphabet.text(f"{salt} document {n}", self.load.shared_tokens - self.head_tokens)
            for n in range(self.load.documents)
        ]
        requests = [
            self._request(n, f"{salt} own {n}", shared[one.document], one.own, one.output, one.at_s)
            for n, one in enumerate(asked)
        ]
        await send_all(f"{self.fleet.api_url}/chat/completions", requests, key=self.fleet.key)
        counted = [one for one in requests if one.at_ms >= self.load.warmup_s * 1000]
        hits = [one for one in counted if one.cached_tokens is not None]
        hit = sum(one.cached_tokens or 0 for one in hits) / sum(one.prompt_tokens for one in hits) if hits else None
        ttfts = [None if one.problem else one.ttft_ms for one in counted]
        return judged(policy, seed, ttfts, hit)

    async def _switch(self, policy: str) -> None:
        """Change the policy of the running services once the engines are idle."""
        for _ in range(600):
            if not any([await _busy(engine) for engine in self.engines]):
                break
            await asyncio.sleep(0.5)
        else:
            raise RankError("the engines did not drain within 300 s")
        tables = choose(policy).applied(self.fleet.fleet).policy
        set_policy(
            self.fleet.state.fleet_file, placement=tables.placement, sites=tables.sites, admission=tables.admission
        )
        for name, pid in self.fleet.supervisor.pids().items():
            if name not in ("nats", "postgres"):
                os.kill(pid, signal.SIGHUP)
        await asyncio.sleep(_SETTLE_S)


async def _busy(engine: str) -> float:
    """Requests that an engine runs or queues."""
    page = await get_text(f"{engine.rstrip('/')}/metrics")
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(wanted))


def fleet_text(
    engines: Sequence[str],
    model: str,
    profile: Profile,
    tokenizer: Path | str,
    *,
    max_model_len: int,
    simulated: bool = False,
) -> str:
    """The fleet file; the simulated one names the profile and counts as its arrivals say."""
    limits = (
        f"token_budget = {profile.token_budget}, max_sequences = {profile.max_sequences}, "
        f"kv_tokens = {profile.kv_tokens}"
    )
    extra = f', profile = "{profile.name}"' if simulated else ""
    instances = "\n".join(
        f'e-{n} = {{ model = "{model}", version = "1", url = "{url}", {limits}{extra} }}'
        for n, url in enumerate(engines)
    )
    return FLEET.format(
        model=model,
        max_model_len=max_model_len,
        tokenizer="bytes" if simulated else tokenizer,
        instances=instances,
        count=len(engines),
        ttft_ms=_OBJECTIVE_MS,
    )


# ── simulated ───────────────────────────────────────────────────────────────────────────────────────────────────────


def simulated(
    policy: str,
    seed: int,
    asked: Sequence[Asked],
    load: Load,
    *,
    text: str,
    model: str,
    profile: Profile,
    scheduling: str,
) -> Figure:
    """The same run on the virtual clock."""
    from tokenfleet import fleet as fleets

    blocks = load.shared_tokens // BLOCK_TOKENS
    rows = tuple(
        Row(
            t_s=one.at_s,
            input_tokens=load.shared_tokens + one.own,
            output_tokens=one.output,
            blocks=tuple(range(one.document * blocks, (one.document + 1) * blocks)),
            cls=_CLASS,
        )
        for one in asked
    )
    scenario = Scenario(
        info=Info(name="rank", warmup_s=load.warmup_s, drain_s=300.0),
        fleet=fleets.parse(text.encode()),
        sources=(Source(trace="rank", tenant="fidelity", model=model),),
        traces=(Trace(name="rank", rows=rows, block_tokens=BLOCK_TOKENS),),
        bus=BusSpec(),
        agents=AgentSpec(declare_rates=False),
        engines=EngineSpec(
            block_tokens=profile.block_tokens, scheduling="fcfs" if scheduling == "fcfs" else "priority"
        ),
        profiles={profile.name: profile},
    )
    world = World(scenario, choose(policy), seed)
    run = world.run()
    world.check()
    counted = [one for one in run.records if one.planned_ms >= load.warmup_s * 1000]
    hits = sum(one.cached_tokens or 0 for one in counted)
    prompts = sum(one.prompt_tokens or one.input_tokens for one in counted)
    return judged(policy, seed, [one.ttft_ms for one in counted], hits / prompts if prompts else None)


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Row95(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over all runs."""

    policy: str
    live_p95_ms: Estimate
    live_p50_ms: Estimate
    live_hit: float | None
    simulated_p95_ms: Estimate
    simulated_p50_ms: Estimate
    simulated_hit: float | None
    failed: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two policies beside each other."""

    better: str
    worse: str
    #: the live intervals do not overlap: the order is measured
    separate: bool
    #: the simulation has them in the same order
    agrees: bool


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    load: Load
    runs: int
    rows: list[Row95]
    pairs: list[Pair]
    live: list[Figure]
    simulated: list[Figure]

    @property
    def holds(self) -> bool:
        """Wherever the measured order is certain, the simulation has it too."""
        return all(pair.agrees for pair in self.pairs if pair.separate)


def compare(load: Load, live: Sequence[Figure], simulation: Sequence[Figure]) -> Ranking:
    """Policies by measured P95, and whether the simulation orders them so."""
    rows: list[Row95] = []
    for policy in dict.fromkeys(one.policy for one in live):
        mine = [one for one in live if one.policy == policy]
        theirs = [one for one in simulation if one.policy == policy]
        rows.append(
            Row95(
                policy=policy,
                live_p95_ms=estimate([one.ttft_p95_ms for one in mine]),
                live_p50_ms=estimate([one.ttft_p50_ms for one in mine]),
                live_hit=_mean([one.hit for one in mine]),
                simulated_p95_ms=estimate([one.ttft_p95_ms for one in theirs]),
                simulated_p50_ms=estimate([one.ttft_p50_ms for one in theirs]),
                simulated_hit=_mean([one.hit for one in theirs]),
                failed=sum(one.failed for one in mine),
            )
        )
    rows.sort(key=lambda row: _low(row.live_p95_ms))
    pairs = []
    for n, better in enumerate(rows):
        for worse in rows[n + 1 :]:
            one, other = better.live_p95_ms, worse.live_p95_ms
            # A single run has no interval, and tells nothing apart.
            wide = math.inf if one.ci95 is None or other.ci95 is None else one.ci95 + other.ci95
            separate = _low(one) + wide < _low(other)
            agrees = _low(better.simulated_p95_ms) < _low(worse.simulated_p95_ms)
            pairs.append(Pair(better=better.policy, worse=worse.policy, separate=separate, agrees=agrees))
    runs = len({one.seed for one in live})
    return Ranking(load=load, runs=runs, rows=rows, pairs=pairs, live=list(live), simulated=list(simulation))


def _low(value: Estimate) -> float:
    return math.inf if value.mean is None else value.mean


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def table(found: Ranking) -> str:
    """The comparison for people."""
    lines = [
        f"{found.runs} runs of {found.load.seconds:.0f} s at {found.load.rate_per_s:g} requests/s; "
        "TTFT in ms, mean over the runs and half width of its 95% interval",
        "",
        f"{'policy':<16} {'live P95':>15} {'simulated P95':>15} {'live P50':>13} {'simulated P50':>13} "
        f"{'live hit':>8} {'sim. hit':>8} {'failed':>6}",
    ]
    lines += [
        f"{row.policy:<16} {_cell(row.live_p95_ms):>15} {_cell(row.simulated_p95_ms):>15} "
        f"{_cell(row.live_p50_ms):>13} {_cell(row.simulated_p50_ms):>13} {_share(row.live_hit):>8} "
        f"{_share(row.simulated_hit):>8} {row.failed:>6}"
        for row in found.rows
    ]
    lines.append("")
    for pair in found.pairs:
        if pair.separate:
            verdict = "as simulated" if pair.agrees else "NOT as simulated"
        else:
            verdict = "measured intervals overlap: undecided"
        lines.append(f"{pair.better} before {pair.worse}: {verdict}")
    return "\n".join(lines)


def _cell(value: Estimate) -> str:
    if value.mean is None:
        return "never"
    return f"{value.mean:.0f}" if value.ci95 is None else f"{value.mean:.0f} ±{value.ci95:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


async def measure(
    engines: Sequence[str], model: str, text: str, alphabet: Alphabet, load: Load, *, runs: int, seed: int,
    say: Callable[[str], None], policies: Sequence[str] = POLICIES
) -> list[Figure]:  # fmt: skip
    """All live runs, every policy once in each, in turns."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="tokenfleet-rank-") as root, StateDir(Path(root) / "state") as state:
        fleet = LocalFleet(state=state, fleet_text=text, say=say)
        try:
            await fleet.start()
            live = Live(fleet, alphabet, load, engines, model)
            await live.begin()
            for number in range(runs):
                asked = draw(load, seed + number)
                for place in range(len(policies)):
                    policy = policies[(place + number) % len(policies)]
                    figure = await live.run(policy, seed + number, asked)
                    figures.append(figure)
                    p95 = "never" if figure.ttft_p95_ms is None else f"{figure.ttft_p95_ms:.0f} ms"
                    say(f"run {number + 1} of {runs}, {policy}: P95 {p95}, hit {_share(figure.hit)}, "
                        f"{figure.failed} failed of {figure.requests}")  # fmt: skip
            return figures
        finally:
            await fleet.stop()
