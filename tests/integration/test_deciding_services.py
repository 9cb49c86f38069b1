"""SLOMax, FleetMind and TokenPilot as processes on a real NATS: the road is travelled, and any kill -9 costs a moment.

The test plays the agents and the gateway; everything between `request.received` and `placement.assigned` is real.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.harness import SMALL, Engine, report
from tests.simulation.messages import finished, leased, make_ask, received

from tokenfleet import fleet as fleets
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.settings import Settings
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionOwned
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementHeld,
    PlacementOwned,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
)
from tokenfleet_schemas.routes import stream_of, subject_filter

INSTANCES = """
[sites.b.instances.b-0]
model = "m"
version = "1"
url = "http://127.0.0.1:1/b-0"
token_budget = 2048
max_sequences = 32
kv_tokens = 200000
prefill_tokens_per_s = 10000.0
"""
FLEET = SMALL.format(instances=INSTANCES)


class Around:
    """Agent and gateway, played by the test; remembers all that is said."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.fleet = fleets.parse(FLEET.encode())
        self.heard: list[Event] = []
        self.open: set[str] = set()
        self.beat = 0

    async def listen(self) -> None:
        for family in ("admission", "placement"):
            await self.bus.read(
                subject_filter(family), lambda e, _: self.heard.append(e), stream=stream_of(family), since_s=5
            )

    async def live(self) -> None:
        """A report every 300 ms, a lease every 600 ms."""
        while True:
            self.beat += 1
            self.bus.publish(report(self.fleet, "b-0", Engine(10_000.0), self.beat, time.time() * 1000))
            if self.beat % 2 == 0:
                self.bus.publish(leased(self.beat, sorted(self.open)))
            await asyncio.sleep(0.3)

    def ask(self, request_id: str, revision: int = 0, **changes: Any) -> None:
        self.open.add(request_id)
        ask = make_ask(request_id, received_unix_ms=int(time.time() * 1000), patience_ms=30_000.0, **changes)
        self.bus.publish(received(ask, revision=revision))

    async def until(self, kind: type[Event], timeout_s: float = 45, **fields: Any) -> Any:
        """The first event of a type with these values."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.heard:
                    if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                        return event
                await asyncio.sleep(0.01)


@pytest.fixture
async def around(clean_nats_url: str) -> AsyncIterator[Around]:
    """Surroundings, alive."""
    bus = Bus(Settings(nats_url=clean_nats_url), Clock(), "test")
    await bus.connect()
    await bus.provision()
    made = Around(bus)
    await made.listen()
    living = asyncio.create_task(made.live())
    yield made
    await cancel_and_wait([living])
    await bus.close()


class Processes:
    """Service processes of one test."""

    def __init__(self, url: str, tmp_path: Path) -> None:
        self.url = url
        self.fleet = tmp_path / "fleet.toml"
        self.fleet.write_text(FLEET)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, service: str, replica: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
        environ |= {
            "TOKENFLEET_NATS_URL": self.url,
            "TOKENFLEET_FLEET": str(self.fleet),
            "TOKENFLEET_REPLICA": replica,
        }
        if service == "tokenpilot":
            environ["TOKENFLEET_SITE"] = "b"
        self.running[replica] = subprocess.Popen(
            [sys.executable, "-m", f"tokenfleet.{service}"],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def end(self, replica: str, number: int) -> int:
        process = self.running.pop(replica)
        process.send_signal(number)
        return process.wait(timeout=15)


@pytest.fixture
async def processes(clean_nats_url: str, tmp_path: Path) -> AsyncIterator[Processes]:
    """One of each service; whatever still runs at the end is killed."""
    made = Processes(clean_nats_url, tmp_path)
    for service in ("slomax", "fleetmind", "tokenpilot"):
        made.start(service, f"{service}-1")
    yield made
    for replica in list(made.running):
        made.end(replica, signal.SIGKILL)


async def in_office(around: Around) -> None:
    await around.until(AdmissionOwned, scope="admission:a", owner="slomax-1")
    await around.until(AdmissionOwned, scope="release:b", owner="slomax-1")
    await around.until(PlacementOwned, scope="model:m", owner="fleetmind-1")
    await around.until(PlacementOwned, scope="pool:b:m:1")


async def test_the_road_is_travelled_and_congestion_is_released_by_slomax(around: Around, processes: Processes) -> None:
    """Four hops in milliseconds; beyond the look-ahead: held, and released when the engine's work ends."""
    await in_office(around)
    began = time.monotonic()
    around.ask("r0", input_tokens=2048)
    first = await around.until(PlacementAssigned, request_id="r0")
    assert time.monotonic() - began < 0.5
    decided = await around.until(AdmissionDecided)
    requested = await around.until(PlacementRequested)
    assert (requested.cause, first.cause) == (decided.id, requested.id)
    around.ask("r1", input_tokens=2048)
    await around.until(PlacementAssigned, request_id="r1")
    around.ask("r2", input_tokens=2048)
    await around.until(PlacementHeld, request_id="r2")
    around.bus.outbox.put(finished(make_ask("r0"), booking=first.id, instance="b-0"))
    around.open.discard("r0")
    released = await around.until(PlacementReleased, request_id="r2")
    last = await around.until(PlacementAssigned, request_id="r2")
    assert (last.how, last.release_number, last.cause) == ("released", released.number, released.id)
    around.ask("no", tenant="nobody")
    refused = await around.until(PlacementRefused, request_id="no")
    assert (refused.reason, refused.status) == ("not_permitted", 403)


@pytest.mark.parametrize("service", ["slomax", "fleetmind"])
async def test_kill_9_and_restart_loses_nothing(around: Around, processes: Processes, service: str) -> None:
    """Killed between two requests; the second is answered by the new process in 5 s, the first not again."""
    await in_office(around)
    around.ask("before", input_tokens=100)
    before = await around.until(PlacementAssigned, request_id="before")
    processes.end(f"{service}-1", signal.SIGKILL)
    around.ask("meanwhile", input_tokens=100)
    began = time.monotonic()
    processes.start(service, f"{service}-2")
    assigned = await around.until(PlacementAssigned, request_id="meanwhile", timeout_s=8)
    assert time.monotonic() - began < 5
    mark = AdmissionOwned if service == "slomax" else PlacementOwned
    await around.until(mark, owner=f"{service}-2")
    around.ask("after", input_tokens=100)
    await around.until(PlacementAssigned, request_id="after")
    assert assigned.attempt == 1
    said = [e.request_id for e in around.heard if isinstance(e, PlacementAssigned)]
    assert sorted(said) == ["after", "before", "meanwhile"]
    assert before.attempt == 1
    assert processes.end(f"{service}-2", signal.SIGTERM) == 0


async def test_a_standby_decides_within_two_seconds(around: Around, processes: Processes) -> None:
    """The lease expires 1.2 s after its owner's death; the standby has folded everything and answers at once."""
    await in_office(around)
    processes.start("slomax", "slomax-2")
    around.ask("r0", input_tokens=100)
    await around.until(PlacementAssigned, request_id="r0")
    processes.end("slomax-1", signal.SIGKILL)
    around.ask("r1", input_tokens=100)
    began = time.monotonic()
    decided = await around.until(PlacementAssigned, request_id="r1")
    assert time.monotonic() - began < 4
    assert decided.attempt == 1
    (one,) = [e for e in around.heard if isinstance(e, AdmissionDecided) and e.ask.request_id == "r1"]
    assert one.admitted
