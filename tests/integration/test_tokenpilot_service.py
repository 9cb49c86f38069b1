"""TokenPilot as a process on a real NATS: it reads its own site only, and a kill costs nothing but a moment."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.harness import Engine, report
from tests.unit.tokenpilot.driver import ask

from tokenfleet import fleet as fleets
from tokenfleet import prefix
from tokenfleet.fleet import Fleet
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.settings import Settings
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas import codec
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged, KvRequested
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, Times
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementOwned, PlacementRequested
from tokenfleet_schemas.room import RoomOffered
from tokenfleet_schemas.routes import stream_of, subject_filter

FLEET = """
[fleet]
name = "one"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
homes = { m = ["b"] }
[sites.b]
zone = "eu"
[sites.b.instances.b-0]
model = "m"
version = "1"
url = "http://127.0.0.1:1/b-0"
max_sequences = 32
kv_tokens = 200000
prefill_tokens_per_s = 10000.0
[sites.b.instances.b-1]
model = "m"
version = "1"
url = "http://127.0.0.1:1/b-1"
max_sequences = 32
kv_tokens = 200000
prefill_tokens_per_s = 10000.0
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 131072
[classes.chat]
ttft_ms = 1000
[tenants.acme]
zones = ["*"]
classes = ["chat"]
[network.rtt_ms]
a-b = 5
"""


class Around:
    """The agent, the gateway and FleetMind of site b, played by the test."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self.bus, self.fleet = bus, fleet
        self.heard: list[Event] = []
        self.open: set[str] = set()
        self.revision = 0
        #: prompt tokens that an engine computes in a second
        self.rate = 10_000.0

    async def listen(self) -> None:
        for family in ("placement", "room"):
            await self.bus.read(
                subject_filter(family), lambda e, _: self.heard.append(e), stream=stream_of(family), since_s=5
            )

    async def live(self) -> None:
        """Reports every 300 ms, leases every second."""
        while True:
            self.revision += 1
            now_ms = time.time() * 1000
            for name in self.fleet.sites["b"].instances:
                self.bus.publish(report(self.fleet, name, Engine(self.rate), self.revision, now_ms))
            if self.revision % 3 == 0:
                self.bus.publish(
                    GatewayLeased(
                        id=f"gw:1:{self.revision}",
                        site="a",
                        gateway="gw",
                        gateway_incarnation="1",
                        revision=self.revision,
                        open=tuple(OpenRequest(request_id=r, attempt=1, phase="waiting") for r in self.open),
                    )
                )
            await asyncio.sleep(0.3)

    def request(self, request_id: str, revision: int = 0, site: str = "b", **changes: Any) -> None:
        self.open.add(request_id)
        self.bus.publish(
            PlacementRequested(
                id=f"{request_id}:requested:{site}:{revision}",
                site=site,
                ask=ask(request_id, **changes),
                revision=revision,
            )
        )

    def finish(self, assigned: PlacementAssigned) -> None:
        self.open.discard(assigned.request_id)
        self.bus.outbox.put(
            OutcomeFinished(
                id=f"{assigned.request_id}:finished",
                site="a",
                request_id=assigned.request_id,
                attempt=assigned.attempt,
                final=True,
                outcome="completed",
                gateway="gw",
                gateway_incarnation="1",
                tenant="acme",
                service_class="chat",
                model_asked="m",
                model="m",
                version="1",
                instance=assigned.instance,
                booking=assigned.id,
                input_tokens=10,
                output_tokens=5,
                received_unix_ms=0,
                times=Times(e2e_ms=100),
            )
        )

    async def until(self, kind: type[Event], timeout_s: float = 10, **fields: Any) -> Any:
        """The first event of a type with these values."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.heard:
                    if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                        return event
                await asyncio.sleep(0.01)


@pytest.fixture
async def around(clean_nats_url: str) -> AsyncIterator[Around]:
    """Site b's surroundings, alive."""
    bus = Bus(Settings(nats_url=clean_nats_url), Clock(), "test")
    await bus.connect()
    await bus.provision()
    made = Around(bus, fleets.parse(FLEET.encode()))
    await made.listen()
    living = asyncio.create_task(made.live())
    yield made
    await cancel_and_wait([living])
    await bus.close()


class Process:
    """`python -m tokenfleet.tokenpilot` for site b."""

    def __init__(self, url: str, tmp_path: Path, replica: str, site: str = "b", fleet_toml: str = FLEET) -> None:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(fleet_toml)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenfleet.tokenpilot"],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
                "TOKENFLEET_NATS_URL": url,
                "TOKENFLEET_FLEET": str(fleet),
                "TOKENFLEET_SITE": site,
                "TOKENFLEET_REPLICA": replica,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; (exit code, what it had printed)."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=15)
        return self.process.returncode, out.decode()


async def test_a_process_places_holds_offers_and_survives_kill_9(
    around: Around, clean_nats_url: str, tmp_path: Path
) -> None:
    """kill -9 under load: the next process refolds, knows what is booked, and answers what came meanwhile in 5 s."""
    # slow engines: on no machine is what they compute meanwhile worth an offer
    around.rate = 100.0
    fleet = FLEET.replace("prefill_tokens_per_s = 10000.0", "prefill_tokens_per_s = 100.0")
    first = Process(clean_nats_url, tmp_path, "pilot-1", fleet_toml=fleet)
    second = None
    try:
        await around.until(PlacementOwned, owner="pilot-1")
        placed = []
        for n in range(2):
            around.request(f"r{n}", input_tokens=2048)
            placed.append(await around.until(PlacementAssigned, request_id=f"r{n}"))
        assert sorted(a.instance for a in placed) == ["b-0", "b-1"]
        around.request("elsewhere", site="c")
        around.request("held", input_tokens=2000)
        held = await around.until(PlacementHeld, request_id="held")
        assert held.lacks == "prefill_tokens"

        first.end(signal.SIGKILL)
        around.request("meanwhile", input_tokens=1000)
        began = time.monotonic()
        second = Process(clean_nats_url, tmp_path, "pilot-2", fleet_toml=fleet)
        answer = await around.until(PlacementHeld, timeout_s=30, request_id="meanwhile")
        assert time.monotonic() - began < 30  # 1.5 s of lease, a process's start, and a busy machine
        assert answer.lacks == "newcomer", "the fold knows that somebody waits already"
        assert answer.term > held.term

        around.finish(placed[0])
        offer = await around.until(RoomOffered, instance=placed[0].instance, term=answer.term)
        assert offer.prefill_tokens >= 2000
        filled = await around.until(PlacementAssigned, request_id="held")
        assert filled.how == "unanswered", "there is no SLOMax in this test"
        assert not [e for e in around.heard if getattr(e, "request_id", "") == "elsewhere"]
        assigned = [e for e in around.heard if isinstance(e, PlacementAssigned)]
        assert len({e.request_id for e in assigned}) == len(assigned), "nobody was assigned twice"
        code, out = second.end()
        assert code == 0, out
    finally:
        for process in (first, second):
            if process is not None and process.process.poll() is None:
                process.end(signal.SIGKILL)


async def test_what_engines_hold_is_asked_for_followed_and_chosen_by(
    around: Around, clean_nats_url: str, tmp_path: Path
) -> None:
    """A fresh process knows no prefix: it asks the agent, and the next request goes where its prefix lies."""
    key = prefix.tenant_key("k", "acme")
    # a new prompt per try: what TokenPilot sent somewhere itself proves nothing
    chains = [prefix.digests(bytes([n]) * 4096, key) for n in range(50)]
    wanted: list[KvRequested] = []

    def answer(_subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        event = codec.decode_packed(data)
        assert isinstance(event, KvRequested)
        wanted.append(event)
        if event.instance == "b-1":
            around.bus.publish(
                KvChanged(
                    id=f"kv:b-1:{len(wanted)}",
                    site="b",
                    model="m",
                    instance="b-1",
                    incarnation=report(around.fleet, "b-1", Engine(10_000.0), 1, 0.0).incarnation,
                    sequence=len(wanted),
                    stored=b"".join(chains),
                    snapshot=True,
                )
            )

    await around.bus.nc.listen(subject_filter(KvRequested, site="b"), answer)
    process = Process(clean_nats_url, tmp_path, "pilot-1")
    try:
        await around.until(PlacementOwned, owner="pilot-1")
        async with asyncio.timeout(10):
            for n, chain in enumerate(chains):
                around.request(f"r{n}", input_tokens=4200, prefix=prefix.pack(chain)[0])
                assigned = await around.until(PlacementAssigned, request_id=f"r{n}")
                around.finish(assigned)
                if assigned.prefix_hit_tokens:
                    break
                await asyncio.sleep(0.2)
        assert (assigned.instance, assigned.prefix_hit_tokens) == ("b-1", 4096)
        assert {event.instance for event in wanted} == {"b-0", "b-1"}
    finally:
        process.end(signal.SIGKILL)


async def test_a_standby_takes_over_from_a_stopped_owner(around: Around, clean_nats_url: str, tmp_path: Path) -> None:
    """An orderly stop gives the office back: the standby decides within a second."""
    processes = [Process(clean_nats_url, tmp_path, f"pilot-{n}") for n in (1, 2)]
    try:
        mark = await around.until(PlacementOwned)
        owner, standby = processes if mark.owner == "pilot-1" else reversed(processes)
        around.request("r1", input_tokens=100)
        assert (await around.until(PlacementAssigned, request_id="r1")).term == mark.term
        code, out = await asyncio.to_thread(owner.end)
        assert code == 0, out
        around.request("r2", input_tokens=100)
        assert (await around.until(PlacementAssigned, request_id="r2", timeout_s=5)).term > mark.term
        assert standby.process.poll() is None
    finally:
        for process in processes:
            if process.process.poll() is None:
                process.end(signal.SIGKILL)


async def test_the_owner_is_killed_in_a_burst(around: Around, clean_nats_url: str, tmp_path: Path) -> None:
    """P05: two routers with half a view each sent a burst to the same instance. kill -9 after half of 300 requests.

    A standby decides within 2 s, with the same view: what the owner booked is booked, and the burst stays even.
    """
    instance = FLEET[FLEET.index("[sites.b.instances.b-1]") : FLEET.index("[models.m]")]
    instance = instance.replace("max_sequences = 32", "max_sequences = 256").replace("= 200000", "= 2000000")
    six = "".join(instance.replace("b-1", f"b-{n}") for n in range(6))
    fleet_toml = FLEET.replace(FLEET[FLEET.index("[sites.b.instances.b-0]") : FLEET.index("[models.m]")], six)
    around.fleet = fleets.parse(fleet_toml.encode())
    processes = {
        f"pilot-{n}": Process(clean_nats_url, tmp_path, f"pilot-{n}", fleet_toml=fleet_toml) for n in (1, 2, 3)
    }
    try:
        mark = await around.until(PlacementOwned)
        around.request("first", input_tokens=40)
        await around.until(PlacementAssigned, request_id="first")
        await asyncio.sleep(1.5)  # every instance has reported, every standby has caught up
        for n in range(300):
            if n == 150:
                killed = time.monotonic()
                processes[mark.owner].process.kill()
            around.request(f"r{n}", input_tokens=40)
            if n % 10 == 9:
                await asyncio.sleep(0.01)
        first: dict[str, PlacementAssigned] = {}
        taken_s = 0.0
        async with asyncio.timeout(15):
            while len(first) < 301:
                for event in around.heard:
                    if isinstance(event, PlacementAssigned):
                        first.setdefault(event.request_id, event)
                if not taken_s and any(event.term > mark.term for event in first.values()):
                    taken_s = time.monotonic() - killed
                await asyncio.sleep(0.01)
        loads = Counter(event.instance for event in first.values())
        assert max(loads.values()) / (301 / 6) < 1.4, loads
        assert {event.term for event in first.values()} >= {mark.term}
        assert taken_s < 2.0, "the lease of a dead owner lasts 1.2 s"
    finally:
        for process in processes.values():
            process.end(signal.SIGKILL)


async def test_a_site_that_is_not_in_the_fleet_is_a_clear_end(clean_nats_url: str, tmp_path: Path) -> None:
    """A misspelt site once made an idle process that looked healthy."""
    process = Process(clean_nats_url, tmp_path, "pilot-x", site="bb")
    code, out = await asyncio.to_thread(process.wait)
    assert code == 2
    assert out.count("TOKENFLEET_SITE='bb'") == 1
    assert "Traceback" not in out
