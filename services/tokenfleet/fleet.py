"""The fleet as its operators declare it: sites, models, classes, tenants, network. Parsed from `fleet.toml`.

Decides nothing at run time; it says what is allowed and what is promised, and refuses a file that could be read in
two ways. Residency and permission fail closed: a tenant without an explicit `zones` list is an error here, and
`site_denial` says yes only where every rule could be evaluated and said yes. Knows no I/O: `parse`
takes the file's bytes.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from tokenfleet_schemas.tokens import slug

NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$")
SLUG_PATTERN = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")


class FleetError(ValueError):
    """The fleet file is wrong: says where and why, one finding per line."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("fleet.toml: " + "; ".join(findings))
        self.findings = findings


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: an unknown key is a mistake and is refused."""


class FleetInfo(Table, frozen=True, kw_only=True):
    """`[fleet]`: what holds for the whole fleet."""

    name: str
    #: class of a request that declares none
    default_class: str
    #: largest request body a gateway reads, bytes
    max_body_bytes: int = 32 * 1024 * 1024
    #: accountant's windows, seconds
    windows_s: tuple[int, ...] = (10, 60, 300)


class Policy(Table, frozen=True, kw_only=True):
    """`[policy]`: which decision rules run; reloaded without a restart (SIGHUP or a changed file)."""

    #: TokenPilot. `predicted-latency` prices what was learned of each instance, and the delay inflicted on others;
    #: `least-work` compares booked prefill over declared rates; both hold requests beyond the look-ahead;
    #: `round-robin` assigns at once, in turn, and `least-requests` at once, where the fewest requests are open
    placement: Literal["predicted-latency", "least-work", "round-robin", "least-requests"] = "predicted-latency"
    #: FleetMind. `home-first` diverts where that costs less by a margin; `round-robin` takes allowed sites in turn
    sites: Literal["home-first", "round-robin"] = "home-first"
    #: SLOMax. `pools` admits and orders by class; `none` admits whatever a quota does not forbid
    admission: Literal["pools", "none"] = "pools"
    #: `on`: SLOMax moves the classes' shares by what the accountant measures. `off`: they stay as they are. `frozen`:
    #: so they do, and nothing else is learned from outcomes either: TokenPilot's predictions and lengths, SLOMax's pace
    feedback: Literal["on", "off", "frozen"] = "on"


class Classification(Table, frozen=True, kw_only=True):
    """`[classification]`: what a request that declares neither class nor task is taken for, and who serves it."""

    #: task (chat, document, agent, batch, or any word that clients declare) → class; empty: the default class is all
    classes: dict[str, str] = {}
    #: a prompt from this length on is a `document`, tokens
    long_input_tokens: int = 8192
    #: an answer that is not streamed and has at least so long a deadline is `batch`, ms
    batch_deadline_ms: float = 60_000
    #: so is one that is not streamed and may be so long, tokens; 0: its length says nothing
    batch_output_tokens: int = 0


class Planning(Table, frozen=True, kw_only=True):
    """`[planning]`: FleetMind's long cycle. Seconds are of the fleet's own time: see `time_scale`."""

    #: `on` issues replica targets to the sites that have an actuator; `off` leaves every site as it is
    mode: Literal["off", "on"] = "off"
    #: between two plans, s; at least 60
    every_s: float = 60.0
    #: what it takes until a started replica serves, where neither instance nor profile says so, s
    cold_start_s: float = 155.0
    #: a draining replica is stopped after this with what it still has, s
    drain_s: float = 300.0
    #: part of a replica's sustainable work that is planned with
    utilisation: float = 0.95
    #: standard deviations of the load in progress that are kept free
    burst: float = 1.0
    #: demand repeats itself after this, s, in so many bins
    season_s: float = 86_400.0
    season_bins: int = 96
    #: model → replicas over the fleet that run without demand too; 0, the default: scales to zero
    min_replicas: dict[str, int] = {}
    #: every duration of the long cycle divided by this: for fleets that live a day in minutes (tests, simulations)
    time_scale: float = 1.0


class Probing(Table, frozen=True, kw_only=True):
    """`[probing]`: what site agents send one another to learn the network's bandwidth."""

    #: size of one timed transfer, at most 1 MiB; 0: bandwidth is not probed
    bandwidth_bytes: int = 262_144
    #: between two of them from one site to another, s; at least 10
    bandwidth_every_s: float = 60.0


class Actuator(Table, frozen=True, kw_only=True):
    """`[sites.NAME.actuator]`: how a site's agent starts and stops its instances; without it nobody does."""

    #: `emulator`: the emulator's admin port. `command`: a program of the operator's. `vllm-sleep`: vLLM's sleep mode,
    #: which frees the GPU and keeps the process. `kubernetes`: the scale of a StatefulSet per model version
    kind: Literal["emulator", "command", "vllm-sleep", "kubernetes"]
    #: command: the program and its arguments; `{action}` (start, stop), `{instance}`, `{model}`, `{version}`, `{url}`
    command: tuple[str, ...] = ()
    #: vllm-sleep: 1 keeps the weights in memory, 2 drops them
    sleep_level: int = 1
    #: kubernetes: URL of its API; empty: the one that a pod finds in its environment
    api_url: str = ""
    namespace: str = "default"
    #: kubernetes: name of the StatefulSet; `{model}`, `{version}`, `{site}`
    stateful_set: str = "{model}-{version}"
    #: an actuator that answers later has failed, s
    timeout_s: float = 30.0


class Promise(Table, frozen=True, kw_only=True):
    """`[reservations.NAME]`: capacity for a tenant or a class; asked for as `tokenfleet reserve` does."""

    site: str
    model: str
    tenant: str = ""
    service_class: str = ""
    gpu_seconds_per_s: float
    #: with offset: 2026-12-01T20:00:00Z
    begin: datetime
    end: datetime


class Instance(Table, frozen=True, kw_only=True):
    """One engine replica: `[sites.X.instances.NAME]`. Names are unique over the fleet."""

    model: str
    version: str
    url: str
    engine: Literal["vllm", "sglang"] = "vllm"
    #: name of the credential that gateways send; never the credential itself
    credential: str = ""
    #: zones whose gateways can reach `url`; `*` for all
    routable_from: tuple[str, ...] = ("*",)
    gpus: int = 1
    #: instances of a site with the same name here run on the same GPUs; empty: on its own
    gpu_group: str = ""
    #: prompt tokens an engine computes per step at most (vLLM: max_num_batched_tokens)
    token_budget: int = 2048
    #: sequences it runs at once at most (vLLM: max_num_seqs)
    max_sequences: int = 256
    #: KV capacity in tokens; 0 means unknown until the engine says it
    kv_tokens: int = 0
    #: prior for the prefill rate until it has been observed, tokens/s; 0 means unknown
    prefill_tokens_per_s: float = 0.0
    #: hardware profile of an emulated instance (`tokenfleet.engine_model.profiles`); empty for a real engine
    profile: str = ""
    #: emulator only: its admin port (faults on command); 0 picks a free one
    admin_port: int = 0
    #: emulator only: adapters that it has loaded; a real engine says so itself
    adapters: tuple[str, ...] = ()
    #: from the beginning of its start until it serves, s; 0: as the profile says, else `planning.cold_start_s`
    cold_start_s: float = 0.0


class Site(Table, frozen=True, kw_only=True):
    """`[sites.NAME]`: one datacenter, possibly an entry without GPUs."""

    zone: str
    #: has a gateway for clients
    entry: bool = False
    #: ordered home sites per model, for requests that enter here
    homes: dict[str, tuple[str, ...]] = {}
    gpus: int = 0
    #: above this share of its room a site takes no work of entries whose home it is not
    load_ceiling: float = 0.85
    #: what an hour of one GPU costs here, in any one currency, for reports; null: unknown
    gpu_hour_price: float | None = None
    actuator: Actuator | None = None
    #: where other sites' agents reach this one's HTTP port, to measure bandwidth; empty: nobody does
    probe_url: str = ""
    instances: dict[str, Instance] = {}


class Model(Table, frozen=True, kw_only=True):
    """`[models.NAME]`: what clients may ask for. `NAME@VERSION` asks for an exact version."""

    versions: tuple[str, ...]
    default_version: str
    max_model_len: int
    #: `bytes` (one token a UTF-8 byte), `engine` (ask the instance's /tokenize) or a path to a tokenizer.json
    tokenizer: str = "engine"
    #: `chatml` or a path to a jinja chat template
    chat_template: str = "chatml"
    #: LoRA adapters of it that clients may ask for by their own names; served where an engine says that it has them
    adapters: tuple[str, ...] = ()


class ServiceClass(Table, frozen=True, kw_only=True):
    """`[classes.NAME]`: the service objectives of a class and how it is served. Times in milliseconds."""

    #: time to first token; null: no objective
    ttft_ms: float | None = None
    #: mean time per output token after the first; null: no objective
    tpot_ms: float | None = None
    #: whole answer; a request's own deadline may only tighten it
    e2e_ms: float | None = None
    #: 0 is served first
    tier: int = 1
    #: longest hold before refusal; never above 300,000
    patience_ms: float = 30_000
    #: guaranteed share of a pool's released work, relative to the other classes
    share: float = 1.0
    #: part of its requests that should keep their objectives: who falls behind it gains share from who is above
    target: float = 0.95
    #: refused at once at saturation instead of held
    sheddable: bool = False
    #: holds per (site, model version) beyond which newcomers of the class are refused
    max_held: int = 1000


class Override(Table, frozen=True, kw_only=True):
    """`[tenants.NAME.overrides.CLASS]`: what a tenant is promised instead of what its class says; times in ms."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    patience_ms: float | None = None


class Tenant(Table, frozen=True, kw_only=True):
    """`[tenants.NAME]`: what its keys are entitled to. `zones` has no default: residency is always explicit."""

    zones: tuple[str, ...]
    classes: tuple[str, ...]
    default_class: str = ""
    models: tuple[str, ...] = ("*",)
    sites: tuple[str, ...] = ("*",)
    #: open requests at once, over all its keys; 0: no limit
    max_concurrent: int = 0
    #: tokens (input + output budget) reserved per minute; 0: no limit
    tokens_per_minute: int = 0
    #: task → class, before the fleet's `[classification]`
    task_classes: dict[str, str] = {}
    #: class → other objectives than the class's
    overrides: dict[str, Override] = {}
    #: its part of a class's work against that of other tenants that wait too
    weight: float = 1.0
    #: share prefix caches with other tenants that also say so
    share_prefix: bool = False


class _File(Table, frozen=True, kw_only=True):
    fleet: FleetInfo
    policy: Policy = Policy()
    classification: Classification = Classification()
    sites: dict[str, Site]
    models: dict[str, Model]
    classes: dict[str, ServiceClass]
    tenants: dict[str, Tenant] = {}
    #: round-trip times between sites, ms: `[network.rtt_ms]  a-b = 5`
    network: dict[str, dict[str, float]] = {}
    planning: Planning = Planning()
    probing: Probing = Probing()
    reservations: dict[str, Promise] = {}


class Fleet(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A checked fleet. Every name that another table uses exists; every instance name is unique."""

    info: FleetInfo
    policy: Policy
    sites: dict[str, Site]
    models: dict[str, Model]
    classes: dict[str, ServiceClass]
    tenants: dict[str, Tenant]
    rtt: dict[tuple[str, str], float]
    classification: Classification = Classification()
    planning: Planning = Planning()
    probing: Probing = Probing()
    reservations: dict[str, Promise] = {}

    def objectives(self, tenant: str, service_class: str) -> ServiceClass:
        """What a tenant is promised in a class: the class, with the tenant's own numbers where it has them.

        Raises KeyError for a class that the fleet does not have.
        """
        cls = self.classes[service_class]
        who = self.tenants.get(tenant)
        own = who.overrides.get(service_class) if who is not None else None
        if own is None:
            return cls
        changes = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
        return msgspec.structs.replace(cls, **changes)

    def rtt_ms(self, one: str, other: str) -> float | None:
        """Configured round-trip time between two sites, ms; 0 within one; None if nobody said."""
        if one == other:
            return 0.0
        found = self.rtt.get((one, other))
        return found if found is not None else self.rtt.get((other, one))

    def resolve_model(self, asked: str) -> tuple[str, str] | None:
        """`NAME` or `NAME@VERSION` as a client asks for it → (model, exact version); None if unknown."""
        if asked in self.models:
            return asked, self.models[asked].default_version
        name, at, version = asked.rpartition("@")
        if at and name in self.models and version in self.models[name].versions:
            return name, version
        return None

    def resolve(self, asked: str) -> tuple[str, str, str] | None:
        """`resolve_model`, or an adapter by its name → (model, exact version, adapter); None if unknown.

        An adapter belongs to its model's default version: what it was trained on.
        """
        found = self.resolve_model(asked)
        if found is not None:
            return (*found, "")
        name = next((name for name, model in self.models.items() if asked in model.adapters), None)
        return None if name is None else (name, self.models[name].default_version, asked)

    def pools(self, site: str) -> dict[tuple[str, str], list[str]]:
        """(model, version) → declared instance names at a site, in name order."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, instance in sorted(self.sites[site].instances.items()):
            found.setdefault((instance.model, instance.version), []).append(name)
        return found

    def instance_site(self, name: str) -> str | None:
        """The site that declares an instance."""
        return next((s for s, site in self.sites.items() if name in site.instances), None)

    def site_denial(self, tenant: str, model: str, site: str) -> str:
        """Why this tenant's data for this model may not go to this site; empty when it may.

        One of `unknown_tenant`, `unknown_site`, `model_not_permitted`, `site_not_permitted`, `residency`.
        A rule that cannot be evaluated denies.
        """
        who, where = self.tenants.get(tenant), self.sites.get(site)
        if who is None:
            return "unknown_tenant"
        if where is None:
            return "unknown_site"
        if "*" not in who.models and model not in who.models:
            return "model_not_permitted"
        if "*" not in who.sites and site not in who.sites:
            return "site_not_permitted"
        if "*" not in who.zones and where.zone not in who.zones:
            return "residency"
        return ""

    def home_order(self, entry: str, model: str) -> tuple[str, ...]:
        """Home sites of an entry for a model in order, then every other site by round-trip time, unknown last."""
        known: dict[tuple[str, str], tuple[str, ...]] = self.__dict__.setdefault("home_orders", {})
        found = known.get((entry, model))
        if found is None:
            found = self._home_order(entry, model)
            if model in self.models:  # a foreign publisher's names would add up
                known[entry, model] = found
        return found

    def _home_order(self, entry: str, model: str) -> tuple[str, ...]:
        homes = list(self.sites[entry].homes.get(model, ())) if entry in self.sites else []
        others = [s for s in self.sites if s not in homes and self.sites[s].instances]

        def distance(site: str) -> tuple[float, str]:
            rtt = self.rtt_ms(entry, site)
            return (float("inf") if rtt is None else rtt, site)

        return (*homes, *sorted(others, key=distance))


def parse(data: bytes, *, source: str = "fleet.toml") -> Fleet:
    """Read and check a fleet file.

    Raises `FleetError` naming every finding: bad TOML, unknown keys, dangling names, duplicate instances, impossible
    numbers, two names with one subject token.
    """
    try:
        raw = msgspec.toml.decode(data, type=_File)
    except msgspec.DecodeError as error:  # a ValidationError is one too: it says the path of the key
        raise FleetError([f"{source}: {error}"]) from None
    return _check(raw)


def build(tables: Mapping[str, Any], *, source: str = "fleet") -> Fleet:
    """Check a fleet that is there as tables already (a scenario's own); raises `FleetError` as `parse` does."""
    try:
        raw = msgspec.convert(tables, type=_File)
    except msgspec.ValidationError as error:
        raise FleetError([f"{source}: {error}"]) from None
    return _check(raw)


def _check(raw: _File) -> Fleet:
    findings: list[str] = []

    def expect(ok: bool, what: str) -> None:
        if not ok:
            findings.append(what)

    slugs: dict[tuple[str, str], str] = {}
    for kind, names in (
        ("sites", raw.sites),
        ("models", raw.models),
        ("classes", raw.classes),
        ("tenants", raw.tenants),
        ("instances", {n: 0 for site in raw.sites.values() for n in site.instances}),
    ):
        for name in names:
            if not NAME_PATTERN.match(name):
                findings.append(f"{kind}.{name!r}: not a usable name")
            first = slugs.setdefault((kind, slug(name)), name)
            expect(first == name, f"{kind}: {name!r} and {first!r} would share one subject token")
    seen: dict[str, str] = {}
    for site_name, site in raw.sites.items():
        where = f"sites.{site_name}"
        price = site.gpu_hour_price
        expect(not site.probe_url or site.probe_url.startswith(("http://", "https://")), f"{where}.probe_url: no URL")
        expect(price is None or price >= 0, f"{where}.gpu_hour_price must not be negative")
        expect(0 < site.load_ceiling <= 1, f"{where}.load_ceiling must be in (0, 1]")
        for model, homes in site.homes.items():
            expect(model in raw.models, f"{where}.homes: unknown model {model!r}")
            for home in homes:
                expect(home in raw.sites, f"{where}.homes: unknown site {home!r}")
        for name, instance in site.instances.items():
            at = f"{where}.instances.{name}"
            expect(name not in seen, f"{at}: also declared at site {seen.get(name)!r}")
            seen[name] = site_name
            expect(instance.url.startswith(("http://", "https://")), f"{at}.url must be http(s)")
            expect(instance.token_budget > 0, f"{at}.token_budget must be positive")
            expect(instance.max_sequences > 0, f"{at}.max_sequences must be positive")
            declared = raw.models.get(instance.model)
            if declared is None:
                findings.append(f"{at}: unknown model {instance.model!r}")
            elif instance.version not in declared.versions:
                findings.append(f"{at}: {instance.model!r} has no version {instance.version!r}")
            else:
                for adapter in instance.adapters:
                    expect(adapter in declared.adapters, f"{at}.adapters: {instance.model!r} declares no {adapter!r}")
    adapters: dict[str, str] = {}
    for name, entry in raw.models.items():
        expect("@" not in name, f"models.{name}: '@' separates model and version")
        expect(
            entry.default_version in entry.versions,
            f"models.{name}.default_version is not one of its versions",
        )
        expect(entry.max_model_len > 0, f"models.{name}.max_model_len must be positive")
        for adapter in entry.adapters:
            usable = bool(NAME_PATTERN.match(adapter)) and "@" not in adapter
            expect(usable, f"models.{name}.adapters: {adapter!r} is not a usable name")
            expect(adapter not in raw.models, f"models.{name}.adapters: {adapter!r} is a model")
            first = adapters.setdefault(adapter, name)
            expect(first == name, f"models.{name}.adapters: {adapter!r} is one of {first!r}")
        tokens = {slug(v) for v in entry.versions}
        expect(len(tokens) == len(entry.versions), f"models.{name}: versions share a subject token")
    expect(bool(raw.classes), "classes: at least one is needed")
    expect(
        raw.fleet.default_class in raw.classes,
        f"fleet.default_class: unknown class {raw.fleet.default_class!r}",
    )
    for name, cls in raw.classes.items():
        expect(0 < cls.patience_ms <= 300_000, f"classes.{name}.patience_ms must be in (0, 300000]")
        expect(cls.share > 0, f"classes.{name}.share must be positive: no class may starve")
        expect(0 < cls.target <= 1, f"classes.{name}.target must be in (0, 1]")
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(cls, key)
            expect(value is None or value > 0, f"classes.{name}.{key} must be positive")
    zones = {site.zone for site in raw.sites.values()}
    for task, cls_name in raw.classification.classes.items():
        expect(cls_name in raw.classes, f"classification.classes.{task}: unknown class {cls_name!r}")
    expect(raw.classification.long_input_tokens > 0, "classification.long_input_tokens must be positive")
    for name, tenant in raw.tenants.items():
        where = f"tenants.{name}"
        for task, cls_name in tenant.task_classes.items():
            expect(cls_name in tenant.classes, f"{where}.task_classes.{task} is not one of its classes")
        for cls_name, own in tenant.overrides.items():
            expect(cls_name in tenant.classes, f"{where}.overrides: {cls_name!r} is not one of its classes")
            for key, value in msgspec.structs.asdict(own).items():
                limit = 300_000 if key == "patience_ms" else float("inf")
                expect(value is None or 0 < value <= limit, f"{where}.overrides.{cls_name}.{key}: out of range")
        expect(bool(tenant.zones), f"{where}.zones: name the allowed zones, or '*'")
        for zone in tenant.zones:
            expect(zone == "*" or zone in zones, f"{where}.zones: no site is in zone {zone!r}")
        expect(bool(tenant.classes), f"{where}.classes: at least one is needed")
        expect(tenant.weight > 0, f"{where}.weight must be positive: no tenant may starve")
        for cls_name in tenant.classes:
            expect(cls_name in raw.classes, f"{where}.classes: unknown class {cls_name!r}")
        if tenant.default_class:
            expect(
                tenant.default_class in tenant.classes,
                f"{where}.default_class is not one of its classes",
            )
        for model_name in tenant.models:
            expect(
                model_name == "*" or model_name in raw.models,
                f"{where}.models: unknown model {model_name!r}",
            )
        for site_name in tenant.sites:
            expect(
                site_name == "*" or site_name in raw.sites,
                f"{where}.sites: unknown site {site_name!r}",
            )
    expect(set(raw.network) <= {"rtt_ms"}, "network: only [network.rtt_ms] is known")
    rtt: dict[tuple[str, str], float] = {}
    for pair, value in raw.network.get("rtt_ms", {}).items():
        ends = _split_pair(pair, raw.sites)
        if ends is None:
            findings.append(f"network.rtt_ms: {pair!r} is not SITE-SITE")
            continue
        expect(value >= 0, f"network.rtt_ms.{pair} must not be negative")
        rtt[ends] = value
    probing = raw.probing
    expect(0 <= probing.bandwidth_bytes <= 1_048_576, "probing.bandwidth_bytes must be in [0, 1048576]")
    expect(probing.bandwidth_every_s >= 10, "probing.bandwidth_every_s must be at least 10")
    findings += _check_planning(raw)
    if findings:
        raise FleetError(findings)
    return Fleet(
        info=raw.fleet,
        policy=raw.policy,
        sites=raw.sites,
        models=raw.models,
        classes=raw.classes,
        tenants=raw.tenants,
        rtt=rtt,
        classification=raw.classification,
        planning=raw.planning,
        probing=raw.probing,
        reservations=raw.reservations,
    )


def _check_planning(raw: _File) -> Iterator[str]:
    plan = raw.planning
    for key in ("cold_start_s", "drain_s", "burst"):
        if not 0 <= getattr(plan, key) < float("inf"):
            yield f"planning.{key} must not be negative"
    if plan.every_s < 60:
        yield "planning.every_s must be at least 60: engines take minutes to start"
    if not 0 < plan.utilisation <= 1:
        yield "planning.utilisation must be in (0, 1]"
    if not 0 < plan.time_scale < float("inf"):
        yield "planning.time_scale must be positive"
    if not 2 <= plan.season_bins <= 1_440 or plan.season_s < plan.season_bins * plan.every_s:
        yield "planning: a season has 2 to 1440 bins, none shorter than every_s"
    for model, count in plan.min_replicas.items():
        if model not in raw.models or count < 0:
            yield f"planning.min_replicas.{model}: no such model, or a negative number"
    for name, site in raw.sites.items():
        one = site.actuator
        if one is None:
            continue
        at = f"sites.{name}.actuator"
        if (one.kind == "command") != bool(one.command):
            yield f"{at}.command belongs to kind 'command', and it needs one"
        if one.sleep_level not in (1, 2):
            yield f"{at}.sleep_level is 1 or 2"
        if not 0 < one.timeout_s <= 600:
            yield f"{at}.timeout_s must be in (0, 600]"
        for field, words in (("command", one.command), ("stateful_set", (one.stateful_set,))):
            for word in words:
                try:
                    word.format(action="", instance="", model="", version="", url="", site="")
                except (KeyError, IndexError, ValueError):
                    yield f"{at}.{field}: {word!r} names something unknown in braces"
    for name, promise in raw.reservations.items():
        at = f"reservations.{name}"
        if not SLUG_PATTERN.match(name):
            yield f"{at}: not a usable name"
        if promise.begin.tzinfo is None or promise.end.tzinfo is None:
            yield f"{at}: begin and end need an offset, such as 2026-12-01T20:00:00Z"
        elif promise.begin >= promise.end:
            yield f"{at}.end must be after its begin"
        if promise.gpu_seconds_per_s <= 0:
            yield f"{at}.gpu_seconds_per_s must be positive"
        for kind, what, names in (
            ("site", promise.site, raw.sites),
            ("model", promise.model, raw.models),
            ("tenant", promise.tenant or None, raw.tenants),
            ("class", promise.service_class or None, raw.classes),
        ):
            if what is not None and what not in names:
                yield f"{at}: unknown {kind} {what!r}"
        if not promise.tenant and not promise.service_class:
            yield f"{at}: name a tenant, a class, or both"


def _split_pair(pair: str, sites: Mapping[str, Any]) -> tuple[str, str] | None:
    """`a-b` → (a, b); site names may themselves hold dashes, so every split is tried."""
    parts = pair.split("-")
    for cut in range(1, len(parts)):
        one, other = "-".join(parts[:cut]), "-".join(parts[cut:])
        if one in sites and other in sites:
            return one, other
    return None
