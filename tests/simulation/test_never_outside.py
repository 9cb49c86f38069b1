"""F01 as a property: whatever is heard, in whatever order, no request is placed outside the sites it may go to.

Forged holds at forbidden sites, fallbacks of others to forbidden sites, agents that report under another site's name,
summaries that say that the prompt is cached over the border, probes that say that the way there is short and the way
home dead, promises and plans for forbidden sites, retries, moves, takeovers and reloads are among the events. And
whatever happened, when every request has had its end, every counter is exactly zero.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.simulation.harness import SMALL, START_MS, Engine, report
from tests.simulation.messages import (
    Bench,
    admitted,
    assigned,
    finished,
    held,
    leased,
    make_ask,
    offered,
    received,
    requested,
)

from tokenfleet import fleet as fleets
from tokenfleet import prefix
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.fleetmind.policy import rank
from tokenfleet.fleetmind.state import PACE_IDLE_MS, Road
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.capacity import CapacityProbed
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvSummarised
from tokenfleet_schemas.placement import PlacementReleased, PlacementRequested, PlacementWithdrawn
from tokenfleet_schemas.plan import PlanIssued, Target
from tokenfleet_schemas.reservation import ReservationGranted, ReservationRevoked

SITES = "bcd"
INSTANCES = '[sites.d]\nzone = "us"\n' + "".join(
    f"""
[sites.{site}.instances.{site}-{n}]
model = "m"
version = "1"
url = "http://127.0.0.1:1/{site}-{n}"
prefill_tokens_per_s = 10000
"""
    for site in SITES
    for n in range(2)
)
TENANTS = """
[tenants.us]
zones = ["us"]
classes = ["chat", "batch"]
[tenants.only-d]
zones = ["*"]
classes = ["chat"]
sites = ["d"]
[tenants.no-model]
zones = ["*"]
classes = ["chat"]
models = []
"""
FLEET = fleets.parse((SMALL.format(instances=INSTANCES) + TENANTS).encode())
OTHER_POLICY = fleets.parse(
    (SMALL.format(instances=INSTANCES) + TENANTS + '[policy]\nsites="round-robin"\nadmission="none"\n').encode()
)
WHO = ("acme", "local", "us", "only-d", "no-model", "nobody")
KINDS = (
    "received",
    "admitted",
    "fallback",
    "requested",
    "held",
    "assigned",
    "failed",
    "offered",
    "report",
    "lie",
    "time",
    "lease",
    "withdrawn",
    "office",
    "reload",
    "restore",
    "probe",
    "summary",
    "promise",
    "plan",
)

#: no explain phase: a script has hundreds of values, and each would be varied
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

steps = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 5),
        st.sampled_from(SITES),
        st.integers(0, 3),
        st.booleans(),
        st.sampled_from((1, 50, 300, 700, 2_000)),
    ),
    min_size=30,
    max_size=80,
)


#: all ask for the same: whoever holds it attracts them
DIGESTS = bytes(range(8 * 12))


def ask_of(n: int) -> Any:
    return make_ask(f"r{n}", tenant=WHO[n % len(WHO)], prefix=prefix.pack(DIGESTS)[0])


def event_of(kind: str, n: int, site: str, revision: int, flag: bool) -> Event | None:
    ask, attempt = ask_of(n), 1 + revision // 2
    if kind == "received":
        return received(ask, revision=revision, attempt=attempt)
    if kind == "admitted":
        return admitted(ask, revision=revision, attempt=attempt)
    if kind == "fallback":
        return admitted(ask, revision=revision, id=f"{ask.request_id}:decided:g:{revision}", fallback=True)
    if kind == "requested":
        who = ("gateway", "slomax")[flag]
        made = requested(ask, site, revision=revision, attempt=attempt, fallback=who)
        return msgspec.structs.replace(made, id=f"{made.id}:{site}:{who}")
    if kind == "held":
        made_held = held(ask, site, revision=revision, attempt=attempt, predicted_wait_ms=4_000.0)
        return msgspec.structs.replace(made_held, id=f"{made_held.id}:{site}:{flag}")
    if kind == "assigned":
        made_assigned = assigned(ask, site, revision=revision, attempt=attempt)
        return msgspec.structs.replace(made_assigned, id=f"{made_assigned.id}:{site}")
    if kind == "failed":
        return finished(ask, "failed", attempt=attempt, final=False, instance=f"{site}-{n % 2}")
    if kind == "offered":
        return offered(f"{site}-{n % 2}", revision=revision * 100 + n, held=1 + n)
    if kind == "probe":
        return CapacityProbed(
            id=f"p{n}{site}{revision}{flag}",
            site="a",
            other_site=site,
            revision=revision,
            rtt_ms=(1.0, 900.0, None)[n % 3],
            loss=(0.0, 0.9)[flag],
            bytes_per_s=(None, 1e3, 1e9)[n % 3],
        )
    if kind == "summary":
        number = 10 * revision + n
        return KvSummarised(
            id=f"kv{site}{number}", site=site, model="m", sequence=number, digests=DIGESTS if flag else b"", hits=()
        )
    if kind == "promise":
        return ReservationGranted(
            id=f"g{n}{site}{revision}",
            cause=f"asked-{n}",
            term=1000,
            site=site,
            reservation=f"promise-{n}",
            model="m",
            tenant=WHO[n % len(WHO)] if flag else "",
            gpu_seconds_per_s=1.0 + revision,
            from_unix_ms=0,
            until_unix_ms=int(START_MS) + 3_600_000,
            revision=revision,
        )
    if kind == "plan":
        return PlanIssued(
            id=f"plan{n}{site}{revision}",
            term=1000,
            site=site,
            model="m",
            revision=revision,
            targets=(Target(version="1", replicas=n, prewarmed=int(flag)),),
        )
    if kind == "withdrawn":
        return PlacementWithdrawn(
            id=f"w{n}{site}{revision}",
            site=site,
            request_id=ask.request_id,
            gateway=ask.gateway,
            model="m",
            version="1",
            attempt=attempt,
            revision=revision,
            moved_to="b",
        )
    return None


def play(bench: Bench, script: list[tuple[str, int, str, int, bool, int]]) -> None:
    lease = 0
    for kind, n, site, revision, flag, ms in script:
        event = event_of(kind, n, site, revision, flag)
        if event is not None:
            bench.feed(event)
        elif kind == "report":
            bench.report(*(f"{site}-{k}" for k in range(2)), ready=flag, running=n * 40)
        elif kind == "lie":  # an agent of c says that it is `site`
            lie = report(FLEET, f"{site}-0", Engine(10_000), 1_000 + n, bench.now_ms)
            bench.feed(msgspec.structs.replace(lie, site="b" if flag else site, zone="us", id=f"lie-{n}-{site}-{flag}"))
        elif kind == "time":
            bench.run(ms, reports=flag)
        elif kind == "lease":
            lease += 1
            bench.feed(leased(lease, [f"r{k}" for k in range(6) if flag or k != n]))
        elif kind == "office":
            bench.take_office()
        elif kind == "reload":
            bench.core.reconfigure(OTHER_POLICY if flag else FLEET, bench.now_ms)
        elif kind == "restore":
            bench.core.restore(bench.core.snapshot())
            bench.take_office()


def check(bench: Bench) -> None:
    for event in bench.said:
        if isinstance(event, PlacementRequested):
            denial = FLEET.site_denial(event.ask.tenant, event.ask.model, event.site)
            assert not denial, (event.id, event.site, denial)
        elif isinstance(event, PlacementReleased):
            tenant = WHO[int(event.request_id[1:]) % len(WHO)]
            assert not FLEET.site_denial(tenant, event.model, event.site), (event.id, event.site)
    ids = [event.id for event in bench.said]
    assert len(ids) == len(set(ids)), "an id was used twice"
    for n in range(6):
        bench.feed(finished(ask_of(n), "cancelled", attempt=0))
    if isinstance(bench.core, FleetMind):
        revoke_all(bench)
    bench.check_zero()


def revoke_all(bench: Bench) -> None:
    for name, known in list(bench.core.long.promises.state.book.given.items()):
        revoked = ReservationRevoked(
            id=f"over-{name}", term=2_000, site=known.site, reservation=name, model="m", reason="over", revision=99
        )
        bench.feed(revoked)


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(steps)
def test_fleetmind_never_asks_a_forbidden_site(script: list[tuple[str, int, str, int, bool, int]]) -> None:
    """Choice, resubmission, silent hop, retry, move and takeover: one filter, failing closed."""
    bench = Bench(FleetMind(FLEET, replica="fleetmind-1"), FLEET)
    bench.report()
    play(bench, script)
    check(bench)


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(steps)
def test_an_idle_fleet_is_seen_as_a_new_one(script: list[tuple[str, int, str, int, bool, int]]) -> None:
    """After faults and kills FleetMind went on choosing another site over an idle home.

    Whatever is learned or counted fades: some time after the last of it a site costs what it costs a FleetMind that
    has seen nothing.
    """

    def costs(core: FleetMind, now_ms: float) -> dict[str, float]:
        road = Road(make_ask("look", tpot_ms=50.0), now_ms, "look")
        return {one.name: one.terms["cost_ms"] for one in rank(core.view, road, now_ms).considered}

    bench = Bench(FleetMind(FLEET, replica="fleetmind-1"), FLEET)
    bench.report()
    play(bench, script)
    for n in range(6):
        end = finished(ask_of(n), instance=f"{SITES[n % 3]}-0", served_site=SITES[n % 3], output_tokens=200)
        slow = msgspec.structs.replace(end.times, queue_ms=1.0, tpot_ms=5_000.0, e2e_ms=900_000.0)
        bench.feed(msgspec.structs.replace(end, times=slow))
    bench.now_ms += PACE_IDLE_MS
    for a, b in list(bench.core.state.paths):
        rtt_ms = FLEET.rtt_ms(a, b)
        bench.feed(CapacityProbed(id=f"well{a}{b}", site=a, other_site=b, revision=99, rtt_ms=rtt_ms, loss=0.0))
    revoke_all(bench)
    fresh = Bench(FleetMind(FLEET, replica="fleetmind-1"), FLEET)
    fresh.now_ms = bench.now_ms
    for one in (bench, fresh):
        one.core.reconfigure(FLEET, one.now_ms)
        one.report()
    assert costs(bench.core, bench.now_ms) == pytest.approx(costs(fresh.core, fresh.now_ms))


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(steps)
def test_slomax_never_asks_or_releases_at_a_forbidden_site(script: list[tuple[str, int, str, int, bool, int]]) -> None:
    """The fallback for a silent FleetMind and the release of what somebody else held in the wrong place."""
    bench = Bench(SLOMax(FLEET, replica="slomax-1"), FLEET)
    bench.report()
    play(bench, script)
    check(bench)
