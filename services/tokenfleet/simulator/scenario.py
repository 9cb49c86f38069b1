"""Scenario files: which fleet, which arrivals, what goes wrong when. TOML, checked before anything runs.

Decides nothing at run time; it refuses a file that could be read in two ways. `load` is the only I/O. A scenario's
fleet is the name of a packaged one (`reference`), a path beside the file, or tables of its own, to which `[[pools]]`
adds instances by the dozen.
"""

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenfleet import fleet as fleets
from tokenfleet.engine_model import PROFILES, Profile
from tokenfleet.fleet import Fleet
from tokenfleet.replay.errors import ReplayError
from tokenfleet.replay.plan import parse_steps
from tokenfleet.replay.traces import Trace
from tokenfleet.replay.traces import read as read_trace
from tokenfleet.replay.workload import STREAMS
from tokenfleet.simulator.errors import ScenarioError

#: scenarios that are part of the package
PACKAGED = resources.files("tokenfleet.simulator") / "scenarios"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: an unknown key is a mistake and is refused."""


class Info(Table, frozen=True, kw_only=True):
    """`[scenario]`."""

    name: str
    #: of arrivals' places inside coarse clock ticks, generated workloads, lost messages
    seed: int = 1
    #: arrivals after this are cut off; 0: all that the workload has
    duration_s: float = 0.0
    #: requests that arrive before this load the fleet and are not counted
    warmup_s: float = 0.0
    #: virtual time after the last arrival for what is still open; what then is open counts as unfinished
    drain_s: float = 120.0
    #: a client gives up after this
    client_timeout_s: float = 600.0
    policies: tuple[str, ...] = ("tokenfleet", "round-robin")


class Source(Table, frozen=True, kw_only=True):
    """`[[workload]]`: a trace, or the generated workload of `tokenfleet replay builtin`; several are merged."""

    #: `builtin`, a path beside the scenario, or the name of a trace in the directory of traces
    trace: str
    #: divides every gap of a trace
    speed: float = 1.0
    limit: int | None = None
    #: requests per second of `builtin`
    rate_per_s: float = 0.0
    #: only these tasks of `builtin`; empty: all of them
    tasks: tuple[str, ...] = ()
    #: requests before and after these times of the run are left out; 0 for `until_s`: to the end
    from_s: float = 0.0
    until_s: float = 0.0
    #: model, class and tenant of every request; empty: as the trace and the fleet say
    model: str = ""
    model_map: dict[str, str] = {}
    service_class: str = ""
    class_rule: str = ""
    tenant: str = ""
    default_tenant: str = "default"
    #: where clients come in; empty: spread over the entries, a session always at the same
    entry: str = ""
    #: a session's next request is sent `think` seconds after its last answer, instead of at its own time
    closed_loop: bool = False


class PoolSpec(Table, frozen=True, kw_only=True):
    """`[[pools]]`: `count` equal instances at a site."""

    site: str
    model: str
    version: str
    profile: str
    count: int
    #: instances are called `<name>-<n>`; default `<site>-<model>-<version>`
    name: str = ""
    token_budget: int = 2048
    max_sequences: int = 256
    #: 0: as the profile says
    kv_tokens: int = 0
    gpus: int = 1


class ProfileSpec(Table, frozen=True, kw_only=True):
    """`[profiles.NAME]`: an engine of your own, as `python -m benchmarks.fidelity fit` prints it."""

    t_fix_ms: float
    t_w_ms: float
    c_us_per_token: float
    a_ns_per_pair: float
    k_ns_per_kv_token: float
    per_sequence_us: float
    api_delay_ms: float
    kv_tokens: int
    token_budget: int = 2048
    max_sequences: int = 256
    cold_start_s: float = 155.0


class BusSpec(Table, frozen=True, kw_only=True):
    """`[bus]`: how messages travel."""

    #: from a sender to a reader of the same site, ms (a plain message through NATS takes 0.2 ms)
    hop_ms: float = 0.3
    #: `sites`: a fact is captured at the site that its subject names. `hub`: one server, at `hub`
    topology: Literal["sites", "hub"] = "sites"
    #: site of the one server, and of SLOMax, FleetMind and the accountant; empty: the first entry
    hub: str = ""
    #: share of plain messages that are lost before a stream has them; facts that must not be lost never are
    loss: float = 0.0
    #: share of messages that are delivered twice
    duplicates: float = 0.0


class AgentSpec(Table, frozen=True, kw_only=True):
    """`[agents]`: what site agents say, and how late."""

    every_s: float = 1.0
    #: age of a report's numbers when it is sent, ms
    late_ms: float = 50.0
    #: declared prefill rate over the true one: a wrong prior (1: right)
    rate_error: float = 1.0
    #: of instances for which the fleet file declares no prefill rate agents say the profile's; false: they say that it
    #: is unknown, as live agents do
    declare_rates: bool = True
    #: engines say what their caches hold, so late, ms; else placement knows only what was sent where
    kv_events: bool = False
    kv_late_ms: float = 50.0
    #: with `kv_events`: between two summaries of a site's caches for FleetMind, s; 0: none (live agents: 5)
    kv_summary_s: float = 0.0


class EngineSpec(Table, frozen=True, kw_only=True):
    """`[engines]`: factors on the engine model's constants, which no policy is told of."""

    c: float = 1.0
    a: float = 1.0
    k: float = 1.0
    t_w: float = 1.0
    t_fix: float = 1.0
    api_delay: float = 1.0
    per_sequence: float = 1.0
    #: on the KV capacity, which engines report as it is
    kv_tokens: float = 1.0
    #: on the time that a new replica takes until it answers
    cold_start: float = 1.0
    scheduling: Literal["fcfs", "priority"] = "priority"
    #: tokens of a KV block (vLLM: 16); larger ones make long prompts cheaper to simulate and hits a little shorter
    block_tokens: int = 16


class ScalingSpec(Table, frozen=True, kw_only=True):
    """`[scaling]`: replicas that start and stop within a run; see `simulator.scaling`."""

    #: `none`: all declared replicas run all the time. `static`: those that it begins with do.
    #: `plan`: FleetMind's long cycle, by the fleet's `[planning]`. `reactive`: a utilisation threshold per pool
    kind: Literal["none", "static", "plan", "reactive"] = "none"
    #: `SITE/MODEL` or `SITE/MODEL@VERSION` → replicas that run when it begins; 1 where nothing is said
    begin: dict[str, int] = {}
    #: reactive: utilisation aimed at (running and waiting over sequences), how often, and for how long the highest wish
    #: holds a pool up
    target: float = 0.7
    every_s: float = 15.0
    down_after_s: float = 300.0
    at_least: int = 1


class GatewaySpec(Table, frozen=True, kw_only=True):
    """`[gateways]`."""

    lease_s: float = 2.0


class Fault(Table, frozen=True, kw_only=True):
    """`[[faults]]`: what goes wrong, when, and for how long."""

    #: engine_down: the process dies, its streams break, it answers again after `for_s` with an empty cache.
    #: engine_slow: steps take `factor` times as long. engine_stalled: accepts, and makes no token.
    #: agent_silent: an instance's (or site's) reports stop. service_paused: a service hears and says nothing, then all.
    #: site_cut: no message reaches or leaves the site. messages_lost: `share` of plain messages vanish.
    #: gateway_down: a gateway dies with all it had open and is back after `for_s` with a new incarnation.
    kind: Literal[
        "engine_down",
        "engine_slow",
        "engine_stalled",
        "agent_silent",
        "service_paused",
        "site_cut",
        "messages_lost",
        "gateway_down",
    ]
    at_s: float
    for_s: float
    #: an instance, a site, `slomax`, `fleetmind`, `accountant`, `tokenpilot@SITE` or an entry
    target: str = ""
    factor: float = 1.0
    share: float = 0.0


class _File(Table, frozen=True, kw_only=True):
    scenario: Info
    fleet: str | dict[str, Any] = "reference"
    pools: tuple[PoolSpec, ...] = ()
    profiles: dict[str, ProfileSpec] = {}
    workload: tuple[Source, ...]
    bus: BusSpec = BusSpec()
    agents: AgentSpec = AgentSpec()
    engines: EngineSpec = EngineSpec()
    gateways: GatewaySpec = GatewaySpec()
    scaling: ScalingSpec = ScalingSpec()
    faults: tuple[Fault, ...] = ()


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A checked scenario with its traces read; everything that a run needs, and nothing that changes."""

    info: Info
    fleet: Fleet
    sources: tuple[Source, ...]
    #: trace of each source; None: generated per seed
    traces: tuple[Trace | None, ...]
    bus: BusSpec = BusSpec()
    agents: AgentSpec = AgentSpec()
    engines: EngineSpec = EngineSpec()
    gateways: GatewaySpec = GatewaySpec()
    scaling: ScalingSpec = ScalingSpec()
    faults: tuple[Fault, ...] = ()
    #: the scenario's own, beside the built-in ones
    profiles: dict[str, Profile] = {}

    @property
    def hub(self) -> str:
        """Site of the services that stand for the whole fleet."""
        return self.bus.hub or next(name for name, site in self.fleet.sites.items() if site.entry)

    def faster(self, factor: float) -> "Scenario":
        """The same scenario with arrivals so many times as fast; durations of traces shrink with it."""
        sources = tuple(
            msgspec.structs.replace(one, rate_per_s=one.rate_per_s * factor)
            if trace is None
            else msgspec.structs.replace(
                one, speed=one.speed * factor, from_s=one.from_s / factor, until_s=one.until_s / factor
            )
            for one, trace in zip(self.sources, self.traces, strict=True)
        )
        traces = tuple(
            None
            if trace is None
            else msgspec.structs.replace(
                trace, rows=tuple(msgspec.structs.replace(row, t_s=row.t_s / factor) for row in trace.rows)
            )
            for trace in self.traces
        )
        return msgspec.structs.replace(self, sources=sources, traces=traces)


def packaged() -> list[str]:
    """Names of the scenarios that are part of the package."""
    return sorted(p.name.removesuffix(".toml") for p in PACKAGED.iterdir() if p.name.endswith(".toml"))


def load(name: str, *, trace_dir: Path | None = None, speed: float | None = None) -> Scenario:
    """Read a scenario by path, or a packaged one by name, with its traces. Raises `ScenarioError`.

    Traces are looked for beside the file, then in `trace_dir`, then in `$TOKENFLEET_SHARED/traces`. `speed` multiplies
    every source's own speed (see `Scenario.faster`).
    """
    path = Path(name)
    try:
        if path.suffix == ".toml" or path.is_file():
            return parse(path.read_bytes(), source=str(path), base=path.parent, trace_dir=trace_dir, speed=speed)
        if name in packaged():
            data = (PACKAGED / f"{name}.toml").read_bytes()
            return parse(data, source=name, base=None, trace_dir=trace_dir, speed=speed)
    except OSError as error:
        raise ScenarioError(str(error.filename or name), [error.strerror or str(error)]) from None
    raise ScenarioError(name, [f"no such file, and the packaged scenarios are {', '.join(packaged())}"])


def parse(
    data: bytes,
    *,
    source: str = "scenario",
    base: Path | None = None,
    trace_dir: Path | None = None,
    speed: float | None = None,
) -> Scenario:
    """Check a scenario's text and read what it names. Raises `ScenarioError` with every finding."""
    try:
        raw = msgspec.toml.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise ScenarioError(source, [str(error)]) from None
    try:
        fleet = _fleet(raw, source, base)
    except fleets.FleetError as error:
        raise ScenarioError(source, error.findings) from None
    findings = _findings(raw, fleet)
    if findings:
        raise ScenarioError(source, findings)
    sources = raw.workload
    try:
        traces = tuple(
            None
            if one.trace == "builtin"
            else read_trace(_find_trace(one.trace, source, base, trace_dir), limit=one.limit, speed=one.speed)
            for one in sources
        )
    except ReplayError as error:
        raise ScenarioError(source, [str(error)]) from None
    made = Scenario(
        info=raw.scenario,
        fleet=fleet,
        sources=sources,
        traces=traces,
        bus=raw.bus,
        agents=raw.agents,
        engines=raw.engines,
        gateways=raw.gateways,
        scaling=raw.scaling,
        faults=raw.faults,
        profiles={name: _profile(name, one) for name, one in raw.profiles.items()},
    )
    return made if speed is None else made.faster(speed)


def _fleet(raw: _File, source: str, base: Path | None) -> Fleet:
    tables: dict[str, Any]
    if isinstance(raw.fleet, str):
        if raw.fleet == "reference":
            data = (resources.files("tokenfleet.local") / "reference.fleet.toml").read_bytes()
        else:
            data = ((base or Path()) / raw.fleet).read_bytes()
        if not raw.pools:
            return fleets.parse(data, source=raw.fleet)
        try:
            tables = msgspec.toml.decode(data)
        except msgspec.DecodeError as error:
            raise fleets.FleetError([f"{raw.fleet}: {error}"]) from None
    else:
        tables = raw.fleet
    for pool in raw.pools:
        site = tables.get("sites", {}).get(pool.site)
        if site is None:
            raise fleets.FleetError([f"pools: no site {pool.site!r}"])
        instances = site.setdefault("instances", {})
        name = pool.name or f"{pool.site}-{pool.model}-{pool.version}"
        for number in range(pool.count):
            instances[f"{name}-{number}"] = _instance(pool, number)
    return fleets.build(tables, source=source)


def _profile(name: str, spec: ProfileSpec) -> Profile:
    return Profile(name=name, **msgspec.structs.asdict(spec))


def _instance(pool: PoolSpec, number: int) -> Mapping[str, Any]:
    return {
        "model": pool.model,
        "version": pool.version,
        "url": f"http://simulated/{number}",
        "profile": pool.profile,
        "token_budget": pool.token_budget,
        "max_sequences": pool.max_sequences,
        "kv_tokens": pool.kv_tokens,
        "gpus": pool.gpus,
    }


def _findings(raw: _File, fleet: Fleet) -> list[str]:
    found: list[str] = []

    def expect(ok: bool, what: str) -> None:
        if not ok:
            found.append(what)

    info = raw.scenario
    expect(bool(raw.workload), "workload: at least one is needed")
    expect(info.duration_s >= 0 and info.drain_s >= 0, "scenario: durations must not be negative")
    expect(info.warmup_s >= 0, "scenario.warmup_s must not be negative")
    expect(not info.duration_s or info.warmup_s < info.duration_s, "scenario.warmup_s leaves nothing to count")
    expect(info.client_timeout_s > 0, "scenario.client_timeout_s must be positive")
    entries = [name for name, site in fleet.sites.items() if site.entry]
    expect(bool(entries), "fleet: no site is an entry")
    for number, one in enumerate(raw.workload, start=1):
        at = f"workload {number}"
        expect(one.speed > 0, f"{at}: speed must be positive")
        expect(one.limit is None or one.limit > 0, f"{at}: limit must be positive")
        expect(one.from_s >= 0 and (not one.until_s or one.until_s > one.from_s), f"{at}: from_s before until_s")
        unknown = set(one.tasks) - ({stream.task for stream in STREAMS} if one.trace == "builtin" else set())
        expect(not unknown, f"{at}: no tasks {', '.join(sorted(unknown))} in {one.trace}")
        expect(not one.entry or one.entry in entries, f"{at}: {one.entry!r} is no entry site")
        if one.trace == "builtin":
            expect(one.rate_per_s > 0, f"{at}: builtin needs rate_per_s")
            expect(info.duration_s > 0, "scenario.duration_s is needed for a generated workload")
            expect(one.speed == 1.0, f"{at}: builtin takes rate_per_s, not speed")
        else:
            expect(not one.rate_per_s, f"{at}: a trace takes speed, not rate_per_s")
        expect(not one.service_class or one.service_class in fleet.classes, f"{at}: no class {one.service_class!r}")
        expect(not one.tenant or one.tenant in fleet.tenants, f"{at}: no tenant {one.tenant!r}")
        if one.class_rule:
            try:
                parse_steps(one.class_rule)
            except ReplayError as error:
                found.append(f"{at}: {error}")
    for name, spec in raw.profiles.items():
        expect(name not in PROFILES, f"profiles.{name}: there is a built-in profile of that name")
        fields = msgspec.structs.asdict(spec)
        low = [field for field, value in fields.items() if value < 0 or (isinstance(value, int) and not value)]
        expect(not low, f"profiles.{name}: {', '.join(low)} must be positive")
    for name, site in fleet.sites.items():
        for instance, declared in site.instances.items():
            known = declared.profile in PROFILES or declared.profile in raw.profiles
            expect(known, f"sites.{name}.instances.{instance}: no profile {declared.profile!r}")
    expect(any(site.instances for site in fleet.sites.values()), "fleet: nothing could serve anything")
    expect(raw.bus.hop_ms >= 0, "bus.hop_ms must not be negative")
    expect(0 <= raw.bus.loss < 1 and 0 <= raw.bus.duplicates <= 1, "bus: shares are from 0 to 1")
    expect(not raw.bus.hub or raw.bus.hub in fleet.sites, f"bus.hub: no site {raw.bus.hub!r}")
    expect(raw.agents.every_s > 0 and raw.agents.late_ms >= 0, "agents: every_s > 0 and late_ms >= 0")
    expect(raw.agents.kv_late_ms >= 0, "agents.kv_late_ms must not be negative")
    expect(raw.agents.rate_error > 0, "agents.rate_error must be positive")
    expect(raw.gateways.lease_s > 0, "gateways.lease_s must be positive")
    scaling = raw.scaling
    expect(0 < scaling.target <= 1, "scaling.target must be in (0, 1]")
    expect(scaling.every_s > 0 and scaling.down_after_s >= 0, "scaling: every_s > 0 and down_after_s >= 0")
    expect(scaling.at_least >= 0, "scaling.at_least must not be negative")
    for where, count in scaling.begin.items():
        at, _, model = where.partition("/")
        known = at in fleet.sites and fleet.resolve_model(model) is not None
        expect(known and count >= 0, f"scaling.begin.{where}: SITE/MODEL = replicas")
    for key in ("c", "a", "k", "t_w", "t_fix", "api_delay", "per_sequence", "kv_tokens", "cold_start"):
        expect(getattr(raw.engines, key) > 0, f"engines.{key} must be positive")
    block = raw.engines.block_tokens
    expect(block in (16, 32, 64, 128, 256, 512), f"engines.block_tokens cannot be {block}")
    for number, fault in enumerate(raw.faults, start=1):
        wrong = _fault(fault, fleet, entries)
        if wrong:
            found.append(f"fault {number}: {wrong}")
    return found


def _fault(fault: Fault, fleet: Fleet, entries: list[str]) -> str:
    if fault.at_s < 0 or fault.for_s <= 0:
        return "at_s must not be negative and for_s positive"
    instances = {name for site in fleet.sites.values() for name in site.instances}
    sites = {name for name, site in fleet.sites.items() if site.instances}
    services = {"slomax", "fleetmind", "accountant", *(f"tokenpilot@{site}" for site in sites)}
    targets: dict[str, set[str]] = {
        "agent_silent": instances | sites,
        "service_paused": services,
        "site_cut": set(fleet.sites),
        "messages_lost": {""},
        "gateway_down": set(entries),
    }
    known = targets.get(fault.kind, instances)
    if fault.target not in known:
        return f"{fault.kind} cannot hit {fault.target!r}; known: {', '.join(sorted(known)) or 'nothing'}"
    if fault.kind == "engine_slow" and fault.factor <= 0:
        return "factor must be positive"
    if fault.kind == "messages_lost" and not 0 < fault.share < 1:
        return "share must be between 0 and 1"
    return ""


def _find_trace(name: str, source: str, base: Path | None, trace_dir: Path | None) -> Path:
    shared = os.environ.get("TOKENFLEET_SHARED")
    places = [base, trace_dir, Path(shared) / "traces" if shared else None]
    for place in places:
        if place is None:
            continue
        for ending in ("", ".jsonl.gz", ".jsonl"):
            found = place / f"{name}{ending}"
            if found.is_file():
                return found
    raise ScenarioError(
        source, [f"no trace {name!r} beside the scenario, in --traces DIR or in $TOKENFLEET_SHARED/traces"]
    )
