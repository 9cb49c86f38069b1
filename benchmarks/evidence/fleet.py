"""Claim: diversion absorbs a hot site without breaking a rule, without flooding the others and without flapping."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.evidence import Bars, Cell, Compare, Figures, Goal, Part, Quick
from benchmarks.evidence._simulated import UnsoundRunError, load
from tokenfleet.replay import report
from tokenfleet.replay.records import Record
from tokenfleet.simulator.experiment import window_s
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.world import World

SCENARIO = "benchmarks/evidence/scenarios/hot-site.toml"
#: requests/s of A's clients that B alone serves at 95% compliance (cells `local only @…` show it)
ALONE = 10.0
#: requests/s of A's, C's and D's clients
HOT, FAULTY = (1.3 * ALONE, 0.4 * ALONE, 0.4 * ALONE), (ALONE, 0.4 * ALONE, 0.4 * ALONE)
BOUND = ("bank", "devtools")
LOCALS = ("c-local", "d-local")
#: half the tenants bound to B's zone, which no other site is in
RESIDENCY: dict[str, Any] = {
    "scenario": {"duration_s": 300},
    "fleet": {
        "sites": {"c": {"zone": "us"}},
        "tenants": {name: {"zones": ["eu"]} for name in BOUND},
    },
}
#: after a fault has ended so long ago, requests/s that go elsewhere are as without it, ms
_SETTLED_MS = 30_000.0


def fleet(
    seed: int,
    *,
    policy: str,
    rates: Sequence[float],
    overrides: Mapping[str, Any] | None = None,
    tasks: Sequence[str] = (),
) -> Figures:
    """One run; `rates` are A's, C's and D's, `tasks` those of A's clients (empty: all)."""
    scenario = load(SCENARIO, overrides)
    sources = tuple(
        msgspec.structs.replace(source, rate_per_s=rate) for source, rate in zip(scenario.sources, rates, strict=True)
    )
    if tasks:
        sources = (msgspec.structs.replace(sources[0], tasks=tuple(tasks)), *sources[1:])
    scenario = msgspec.structs.replace(scenario, sources=sources)
    world = World(scenario, choose(policy), seed)
    run = world.run()
    findings = world.findings()
    if findings:
        raise UnsoundRunError(f"{policy}, seed {seed}: {'; '.join(findings[:3])}")
    warmup_ms = scenario.info.warmup_s * 1000.0
    counted = [record for record in run.records if record.planned_ms >= warmup_ms]
    duration_s = window_s(scenario, counted)

    def group(records: list[Record]) -> report.Result:
        return report.make(records, scenario.fleet.classes, policy=policy, seed=seed, duration_s=duration_s).overall

    ours = [record for record in counted if record.tenant not in LOCALS]
    whole, hot = group(counted), group(ours)
    served = [record for record in ours if record.site]
    fault_end_ms = max((1000.0 * (fault.at_s + fault.for_s) for fault in scenario.faults), default=0.0)
    metrics: dict[str, float | None] = {
        "compliance": whole.compliance,
        "goodput_tokens_per_s": whole.goodput_tokens_per_s,
        "hot_compliance": hot.compliance,
        "hot_compliance_requests": hot.compliance_requests,
        "hot_ttft_p95_s": float("inf") if hot.ttft_ms.p95 is None else hot.ttft_ms.p95 / 1000.0,
        "diverted_share": sum(record.site != "b" for record in served) / len(ours),
        "wan_mb": sum(size for (entry, site, _), size in world.traffic.items() if _is_abroad(entry, site)) / 1e6,
        "lost": float(sum(record.outcome == "unfinished" for record in run.records)),
        "refused_share": whole.refused / whole.offered,
        "untyped": float(sum(record.outcome == "refused" and not record.error_code for record in run.records)),
        "flaps": float(_flaps(world, run.records, fault_end_ms + _SETTLED_MS)),
        "outside_bytes": float(
            sum(
                size
                for (_, site, tenant), size in world.traffic.items()
                if scenario.fleet.site_denial(tenant, "chat-8b", site)
            )
        ),
        "prefix_hit": run.prefix_hit,
    }
    bound = [record for record in ours if record.tenant in BOUND]
    free = [record for record in ours if record.tenant not in BOUND]
    if bound:
        metrics["bound_compliance"] = group(bound).compliance
    if free:
        metrics["free_compliance"] = group([*free, *(one for one in counted if one.tenant in LOCALS)]).compliance
    return Figures(metrics=metrics)


def _is_abroad(entry: str, site: str) -> bool:
    """Whether bytes crossed the WAN because of a decision: A has no GPUs, its home is B."""
    return site != {"a": "b"}.get(entry, entry)


def _flaps(world: World, records: Sequence[Record], from_ms: float) -> int:
    """Conversations of A's that changed their site three times or more after `from_ms`."""
    last: dict[str, str] = {}
    changes: Counter[str] = Counter()
    for record in records:
        arrival = world.arrivals[record.index]
        if record.site and arrival.session and arrival.entry == "a" and record.planned_ms >= from_ms:
            changes[arrival.session] += last.get(arrival.session, record.site) != record.site
            last[arrival.session] = record.site
    return sum(count >= 3 for count in changes.values())


SHORT: dict[str, Any] = {"scenario": {"duration_s": 300}}


def _cell(name: str, policy: str = "tokenfleet", rates: Sequence[float] = HOT, **args: Any) -> Cell:
    return Cell(name=name, run=fleet, args={"policy": policy, "rates": list(rates), **args})


def _fault(*faults: dict[str, Any]) -> dict[str, Any]:
    return {**SHORT, "faults": list(faults)}


FAULTS: dict[str, dict[str, Any]] = {
    "C's engine dies": _fault({"kind": "engine_down", "target": "c-chat-8b-1-0", "at_s": 150, "for_s": 1_000}),
    "C is cut off for 60 s": _fault({"kind": "site_cut", "target": "c", "at_s": 120, "for_s": 60}),
    "FleetMind is killed for 60 s": _fault({"kind": "service_paused", "target": "fleetmind", "at_s": 120, "for_s": 60}),
}
OTHERS = {"local only": "/home-only", "least load": "/least-load", "local first": "/local-first"}
FREE_TASKS = ("assistant",)
FINDINGS = """
- *The hot site*: what B cannot serve in time C and D serve, and hardly more than that is diverted: a request leaves its
  home only for a gain that its promise needs, and what waits is fetched by whoever has room (ADR 18).
- *Local only* is no straw man: B alone runs as many sequences as come at their promised pace, and refuses the rest with
  a reason (ADR 25). Without that, at the same load, nearly nothing complied there, and of the bound clients of the
  saturated zone least: all 256 sequences ran, and none of their tokens came in time.
- *A dead engine* of C's costs more than the tenth allowed: B is full then, and how many sequences it may run is limited
  only after a hundred late answers (ADR 25). The first form of that limit, after thirty, lost 7% here, and at
  the hot site alone nearly half again as much complied; but it made agents that kept their promises wait for a minute.
- *Flaps* are conversations that changed their site three times or more. At the hot site a few of some two thousand do:
  each change is a turn for which neither its home nor the site of its last turn had a place. They became fewer when a
  conversation was kept where its last turn was (before: where 30% more of its prompt is cached). To have none it would
  have to wait for a place instead of taking one, at the cost of its promise.
- *Residency*: the saturated zone serves about what its engine can in time, and the rest is refused with a reason.
"""

PART = Part(
    title="Capacity across sites: a hot site, residency, faults",
    question=f"""
Entry A has no GPUs and its home is B; C and D serve clients of their own, at 40% of what each serves alone. One A100
with an 8B model a site, WAN round trips of 5, 30 and 80 ms, the built-in chats, help desks and agents. B alone serves
{ALONE:g} requests/s of them at 95% compliance; *hot* is 1.3 times that for ten minutes. Least load takes the least
loaded site of all; local first forwards when work is pending at home (SkyWalker's rule).

`hot_compliance` is that of A's clients, `diverted_share` the part of their requests that was served elsewhere than at
B, `wan_mb` what crossed the WAN by a decision: bodies and streamed answers served neither where they came in nor, for
A's, at B. `flaps` are conversations that changed their site three times or more, after a fault 30 s after its end.
`outside_bytes` went where their tenant's data may not go.

*Residency*: C is in another zone too, and half of A's tenants may not leave B's zone; they alone offer B 1.2 times
what it serves. `free` are all other clients, compared with a run without the bound ones' requests.

*Faults*: B is offered 1.0 of what it serves for five minutes.
""",
    cells=(
        _cell("hot"),
        *(_cell(f"hot, {name}", policy) for name, policy in OTHERS.items()),
        _cell("local only @1.0", "/home-only", FAULTY, overrides=SHORT),
        _cell("residency", rates=(2.2 * ALONE, 0.2 * ALONE, 0.2 * ALONE), overrides=RESIDENCY),
        _cell(
            "residency, free ones alone",
            rates=(2.2 * ALONE * 0.44, 0.2 * ALONE, 0.2 * ALONE),
            overrides=RESIDENCY,
            tasks=FREE_TASKS,
        ),
        _cell("no fault", rates=FAULTY, overrides=SHORT),
        *(_cell(name, rates=FAULTY, overrides=faults) for name, faults in FAULTS.items()),
    ),
    seeds=(1, 2, 3, 4, 5),
    compare=(
        Compare(
            name="goodput against least load", metric="goodput_tokens_per_s", ours="hot", theirs="hot, least load",
            expect=1, at_least=0.0,
        ),
        Compare(
            name="goodput against local first", metric="goodput_tokens_per_s", ours="hot", theirs="hot, local first",
            expect=1, at_least=0.0,
        ),
        Compare(
            name="WAN bytes against least load", metric="wan_mb", ours="hot", theirs="hot, least load",
            expect=-1, at_most=-0.5,
        ),
        Compare(
            name="compliance against local only", metric="hot_compliance", ours="hot", theirs="hot, local only",
            how="absolute", expect=1, at_least=0.25,
        ),
        Compare(
            name="the free beside a saturated zone", metric="free_compliance", ours="residency",
            theirs="residency, free ones alone", how="absolute", expect=0, at_least=-0.02,
        ),
        *(
            Compare(
                name=f"goodput, {name}", metric="goodput_tokens_per_s", ours=name, theirs="no fault", expect=-1,
                at_least=-0.1,
            )
            for name in FAULTS
        ),
    ),
    goals=(
        Goal(name="hot: compliance of A's clients", cell="hot", metric="hot_compliance", at_least=0.95),
        Goal(name="hot: local only", cell="hot, local only", metric="hot_compliance", at_most=0.7),
        Goal(name="B alone at 1.0", cell="local only @1.0", metric="hot_compliance", at_least=0.95),
        # offered less what B alone serves, and a tenth of what is offered
        Goal(name="hot: diverted", cell="hot", metric="diverted_share", at_most=round(0.3 / 1.3 + 0.1, 3)),
        Goal(name="hot: flaps", cell="hot", metric="flaps", at_most=0.0),
        Goal(name="residency: bytes outside", cell="residency", metric="outside_bytes", at_most=0.0),
        Goal(name="residency: refusals without a reason", cell="residency", metric="untyped", at_most=0.0),
        *(Goal(name=f"{name}: lost", cell=name, metric="lost", at_most=0.0) for name in FAULTS),
        *(Goal(name=f"{name}: flaps", cell=name, metric="flaps", at_most=0.0) for name in FAULTS),
    ),
    columns=(
        "hot_compliance", "compliance", ("goodput_tokens_per_s", "goodput tok/s", 1.0, 0), "diverted_share",
        ("wan_mb", "WAN MB", 1.0, 1), "refused_share", ("flaps", "flaps", 1.0, 1), "prefix_hit", "bound_compliance",
        "free_compliance", ("outside_bytes", "outside bytes", 1.0, 0), ("lost", "lost", 1.0, 0),
    ),
    plots=(
        Bars(
            title="Compliance of the hot site's clients", metric="hot_compliance",
            cells=("hot", *(f"hot, {name}" for name in OTHERS)), unit="of offered tokens",
        ),
        Bars(
            title="WAN traffic by decision", metric="wan_mb",
            cells=("hot", *(f"hot, {name}" for name in OTHERS)), unit="MB in ten minutes",
        ),
    ),
    quick=Quick(
        cells=("hot", "hot, local only", "hot, least load"), seeds=3,
        args={"overrides": {"scenario": {"duration_s": 240}}},
    ),
    findings=FINDINGS,
)  # fmt: skip
