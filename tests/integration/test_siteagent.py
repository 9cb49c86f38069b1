"""The site agent against emulated engines: its shell in this process with short times, and the real process on NATS."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tokenfleet.effects import Effect, Publish
from tokenfleet.emulator import Emulator
from tokenfleet.emulator.settings import EmulatorSettings
from tokenfleet.fleet import Fleet, parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.permissions import nats_users, user_names
from tokenfleet.runtime.probe import Responder
from tokenfleet.runtime.settings import Settings
from tokenfleet.siteagent.core import SiteAgentCore
from tokenfleet.siteagent.probing import connect_ms, throughput
from tokenfleet.siteagent.service import Agent
from tokenfleet.siteagent.settings import Knobs
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import stream_of, subject_filter

FLEET = """
[fleet]
name = "test"
default_class = "chat"
[classes.chat]
[models.m]
versions = ["1", "2"]
default_version = "1"
max_model_len = 8192
[sites.b]
zone = "eu"
[sites.b.instances.b1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
prefill_tokens_per_s = 15000.0
[sites.b.instances.b2]
model = "m"
version = "2"
url = "http://127.0.0.1:0"
profile = "8b-h100"
kv_tokens = 32768
[sites.c]
zone = "us"
[sites.c.instances.c1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
"""


class Engines:
    """The emulated engines of all sites, and the fleet file with their real addresses."""

    def __init__(
        self, emulator: Emulator, addresses: dict[str, dict[str, str]], session: aiohttp.ClientSession
    ) -> None:
        self.emulator = emulator
        self.addresses = addresses
        self.session = session
        text, names = FLEET, ["b1", "b2", "c1"]
        for name in names:
            text = text.replace("http://127.0.0.1:0", addresses[name]["url"], 1)
        self.text = text

    @property
    def fleet(self) -> Fleet:
        return parse(self.text.encode())

    async def fault(self, instance: str, kind: str, **more: Any) -> None:
        body = {"kind": kind, **more}
        async with self.session.post(f"{self.addresses[instance]['admin']}/faults", json=body) as answer:
            assert answer.status == 200, await answer.text()

    def chat(self, instance: str, tokens: int) -> "asyncio.Task[None]":
        """A request under way."""

        async def go() -> None:
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": "Tell me"}],
                "max_tokens": tokens,
                "ignore_eos": True,
            }
            async with self.session.post(f"{self.addresses[instance]['url']}/v1/chat/completions", json=body) as answer:
                await answer.read()

        return asyncio.get_running_loop().create_task(go())


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    emulator = Emulator(parse(FLEET.encode()), settings=EmulatorSettings(time_scale=5.0))
    addresses = await emulator.start()
    async with aiohttp.ClientSession() as session:
        yield Engines(emulator, addresses, session)
    await emulator.stop()


class Heard:
    """What was said, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def take(self, event: Event) -> None:
        self.events.append(event)
        self._more.set()

    def reports(self, instance: str) -> list[CapacityReported]:
        return [e for e in self.events if isinstance(e, CapacityReported) and e.instance == instance]

    async def until(
        self, instance: str, holds: Callable[[CapacityReported], bool], timeout_s: float = 8
    ) -> CapacityReported:
        """The first report of an instance from now on, or its last one, for which something holds."""
        async with asyncio.timeout(timeout_s):
            seen = max(0, len(self.reports(instance)) - 1)
            while True:
                reports = self.reports(instance)
                for report in reports[seen:]:
                    if holds(report):
                        return report
                seen = len(reports)
                self._more.clear()
                await self._more.wait()


class Loop:
    """A core fed by the agent's shell, without a bus."""

    def __init__(self, core: SiteAgentCore, heard: Heard) -> None:
        self.core = core
        self.heard = heard
        self._timer: asyncio.TimerHandle | None = None

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    def feed(self, event: Event) -> None:
        self._perform(self.core.handle(event, self.now_ms()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.heard.take(effect.event)


@contextlib.asynccontextmanager
async def agent(fleet: Fleet, **knobs: Any) -> AsyncIterator[tuple[Agent, Heard]]:
    heard = Heard()
    settings = Knobs(**{"poll_ms": 40.0, "report_ms": 40.0, "request_timeout_ms": 300.0, "probe_ms": 100.0} | knobs)
    core = SiteAgentCore(fleet, "b", began="t", knobs=settings)
    shell = Agent(core, Loop(core, heard), {}, settings)
    shell.follow(fleet)
    try:
        yield shell, heard
    finally:
        await shell.stop()


async def test_it_sees_what_engines_are_and_how_loaded(engines: Engines) -> None:
    """Exact version, KV room, lengths from the engine itself; a running request shows and goes."""
    async with agent(engines.fleet) as (_, heard):
        report = await heard.until("b1", lambda r: r.ready)
        assert (report.version, report.max_model_len, report.engine_version) == ("1", 8192, "0.32.0")
        assert report.kv_tokens_total
        assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)
        assert (await heard.until("b2", lambda r: r.ready)).kv_tokens_total == 32_768
        request = engines.chat("b1", 200)
        busy = await heard.until("b1", lambda r: r.running == 1)
        assert busy.kv_usage
        await request
        idle = await heard.until("b1", lambda r: r.running == 0)
        assert idle.generation_tokens_total == 200
        assert idle.incarnation == report.incarnation


async def test_an_engine_that_hangs_is_unreachable_and_delays_nobody(engines: Engines) -> None:
    """Every endpoint of one engine accepts and never answers; its neighbour is reported as before."""
    async with agent(engines.fleet, unreachable_ms=500.0) as (_, heard):
        await heard.until("b1", lambda r: r.ready)
        await heard.until("b2", lambda r: r.ready)
        await engines.fault("b1", "hang", scope="all")
        before = len(heard.reports("b2"))
        gone = await heard.until("b1", lambda r: not r.ready)
        assert gone.reason == "unreachable"
        times = [report.revision for report in heard.reports("b2")[before:]]
        assert len(times) >= 5
        assert max(after - earlier for earlier, after in itertools.pairwise(times)) < 250
        await engines.fault("b1", "none")
        await heard.until("b1", lambda r: r.ready)


async def test_an_engine_that_computes_nothing_is_stalled(engines: Engines) -> None:
    """S04 on real sockets: all endpoints answer, the request runs, no token comes; afterwards it is back by itself."""
    async with agent(engines.fleet, stalled_ms=400.0, prefill_allowance=0.1) as (_, heard):
        await heard.until("b1", lambda r: r.ready)
        await engines.fault("b1", "stall")
        request = engines.chat("b1", 50)
        stalled = await heard.until("b1", lambda r: not r.ready)
        assert (stalled.reason, stalled.running) == ("stalled", 1)
        await engines.fault("b1", "none")
        await request
        await heard.until("b1", lambda r: r.ready)


async def test_a_restart_is_a_new_incarnation_and_a_refusing_engine_is_unhealthy(engines: Engines) -> None:
    """S09: in place, same address; S07: a closed port is seen at the next poll."""
    async with agent(engines.fleet) as (_, heard):
        first = await heard.until("b1", lambda r: r.ready)
        await engines.fault("b1", "restart", down_ms=200)
        assert (await heard.until("b1", lambda r: not r.ready)).reason == "unreachable"
        again = await heard.until("b1", lambda r: r.ready)
        assert again.incarnation != first.incarnation
        await engines.fault("b1", "refuse", scope="all")
        assert (await heard.until("b1", lambda r: not r.ready)).reason == "unhealthy"
        await engines.fault("b1", "none")
        assert (await heard.until("b1", lambda r: r.ready)).incarnation == again.incarnation


async def test_an_instance_of_another_version_is_never_ready(engines: Engines) -> None:
    """The file says version 2 at an address where version 1 answers; corrected by a reload."""
    wrong = engines.text.replace(
        '[sites.b.instances.b1]\nmodel = "m"\nversion = "1"', '[sites.b.instances.b1]\nmodel = "m"\nversion = "2"'
    )
    async with agent(parse(wrong.encode())) as (shell, heard):
        report = await heard.until("b1", lambda r: bool(r.reason))
        assert (report.ready, report.reason, report.version) == (False, "version_mismatch", "")
        for effect in shell._core.reconfigure(engines.fleet, 0.0):
            if isinstance(effect, Publish):
                heard.take(effect.event)
        shell.follow(engines.fleet)
        await heard.until("b1", lambda r: r.ready)


async def test_the_way_to_other_sites_is_measured(engines: Engines) -> None:
    """Loopback takes less than a second, also to a closed port; nobody there at all is lost."""
    async with agent(engines.fleet) as (_, heard):
        await heard.until("b1", lambda r: r.ready)
        async with asyncio.timeout(5):
            while not (probes := [e for e in heard.events if isinstance(e, CapacityProbed)]):
                await asyncio.sleep(0.01)
        assert {probe.other_site for probe in probes} == {"c"}
        assert probes[0].rtt_ms is not None
        assert 0 < probes[0].rtt_ms < 1000
        assert probes[0].loss == 0
    await engines.emulator.stop()
    assert await connect_ms(engines.addresses["c1"]["url"], 1000) is not None
    assert await connect_ms("http://name.invalid:80", 1000) is None


class Link:
    """Another site's end of the network: answers probes, at the pace of a link that can be narrowed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.piece_ms = 0.0
        self.answered = 0
        self.responder = Responder(lambda: self.now_s)
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.answered += 1
        if not self.piece_ms:
            return await self.responder.answer(request)
        size = int(request.query["bytes"])
        response = web.StreamResponse(headers={"Content-Length": str(size)})
        await response.prepare(request)
        for _ in range(16):
            await response.write(bytes(size // 16))
            await asyncio.sleep(self.piece_ms / 1000)
        return response


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    found = Link()
    app = web.Application()
    app.router.add_get("/probe", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


async def test_a_brown_out_of_a_link_is_measured(engines: Engines, link: Link) -> None:
    """A link that connects as fast as ever and carries a fiftieth: only a transfer shows it."""
    fleet = engines.fleet
    c = msgspec.structs.replace(fleet.sites["c"], probe_url=link.url)
    probing = msgspec.structs.replace(fleet.probing, bandwidth_every_s=0.05)
    fleet = msgspec.structs.replace(fleet, sites={**fleet.sites, "c": c}, probing=probing)
    async with agent(fleet) as (_, heard):

        async def measured(holds: Callable[[float], bool]) -> CapacityProbed:
            async with asyncio.timeout(20):
                while True:
                    for event in heard.events:
                        if isinstance(event, CapacityProbed) and event.bytes_per_s and holds(event.bytes_per_s):
                            return event
                    await asyncio.sleep(0.02)

        well = await measured(lambda rate: rate > 300_000)
        assert well.bandwidth_age_ms is not None
        assert well.bandwidth_age_ms >= 0
        link.piece_ms = 80.0
        heard.events.clear()
        # a quarter of a megabyte in 1.2 s, or slower on a slow machine
        slow = await measured(lambda rate: rate < 300_000)
        assert slow.loss == 0
        off = msgspec.structs.replace(fleet, probing=msgspec.structs.replace(fleet.probing, bandwidth_bytes=0))
    async with agent(off) as (_, heard):
        before = link.answered
        while not [e for e in heard.events if isinstance(e, CapacityProbed)]:
            await asyncio.sleep(0.02)
        assert link.answered == before


async def test_probes_are_answered_within_a_rate(link: Link) -> None:
    """Whoever asks all the time gets four megabytes at once, then one a second, and never a large answer."""
    async with aiohttp.ClientSession() as session:

        async def status(size: str) -> int:
            async with session.get(f"{link.url}/probe", params={"bytes": size}) as answer:
                assert len(await answer.read()) == (int(size) if answer.status == 200 else answer.content_length)
                return answer.status

        assert [await status("1048576") for _ in range(5)] == [200] * 4 + [429]
        link.now_s += 0.5
        assert [await status("524288"), await status("1")] == [200, 429]
        link.now_s += 1.0
        assert [await status(size) for size in ("1048577", "0", "-1", "many")] == [400] * 4
        assert (await throughput(session, link.url, 262_144) or 0.0) > 0
        assert await throughput(session, "http://127.0.0.1:9", 1_000) is None


# --- the process ------------------------------------------------------------------------------------------------


@pytest.fixture
def bus_server(tmp_path: Path) -> Iterator[NatsServer]:
    users = nats_users(parse(FLEET.encode()), dict.fromkeys(user_names(parse(FLEET.encode())), "secret"))
    with NatsServer(tmp_path / "nats", users=[user.entry() for user in users]) as server:
        assert isinstance(server, NatsServer)
        yield server


async def connected(server: NatsServer, user: str) -> Bus:
    bus = Bus(Settings(nats_url=server.bare_url, nats_user=user, nats_password="secret"), Clock(), user)
    await bus.connect()
    return bus


async def start(server: NatsServer, fleet_file: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenfleet.cli", "run", "siteagent", "--site", "b",
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
            "TOKENFLEET_FLEET": str(fleet_file),
            "TOKENFLEET_NATS_URL": server.bare_url,
            "TOKENFLEET_NATS_USER": "siteagent-b",
            "TOKENFLEET_NATS_PASSWORD": "secret",
        },
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def test_the_process_survives_its_own_and_the_buss_death(
    engines: Engines, bus_server: NatsServer, tmp_path: Path
) -> None:
    """With its site's rights only: kill -9 of the agent takes no instance out; a NATS restart and a reload are seen."""
    fleet_file = tmp_path / "fleet.toml"
    fleet_file.write_text(engines.text)
    admin, subscriber, heard = await connected(bus_server, "admin"), await connected(bus_server, "subscriber"), Heard()
    await admin.provision()
    await subscriber.read(
        subject_filter("capacity", site="b"),
        lambda event, _: heard.take(event),
        stream=stream_of("capacity"),
        latest=True,
    )
    process = await start(bus_server, fleet_file)
    try:
        first = await heard.until("b1", lambda r: r.ready, 20)
        await heard.until("b2", lambda r: r.ready)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        process = await start(bus_server, fleet_file)
        killed_at = len(heard.reports("b1"))
        await heard.until("b1", lambda r: r.revision > first.revision and len(heard.reports("b1")) > killed_at + 1, 20)
        assert all(report.ready for report in heard.reports("b1") + heard.reports("b2"))
        revisions = [report.revision for report in heard.reports("b1")]
        assert revisions == sorted(set(revisions))
        assert {report.incarnation for report in heard.reports("b1")} == {first.incarnation}
        bus_server.kill()
        bus_server.start()
        back_at = len(heard.reports("b1"))
        await heard.until("b1", lambda _: len(heard.reports("b1")) > back_at + 1, 20)
        fleet_file.write_text(engines.text.partition("[sites.b.instances.b2]")[0] + "[sites.c]\nzone = 'us'\n")
        gone = await heard.until("b2", lambda r: r.draining, 10)
        assert not gone.ready
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await subscriber.close()
        await admin.close()


async def test_a_site_that_is_not_in_the_file_ends_with_2(tmp_path: Path, bus_server: NatsServer) -> None:
    """A typing mistake in TOKENFLEET_SITE is said at once, not after minutes without reports."""
    fleet_file = tmp_path / "fleet.toml"
    fleet_file.write_text(FLEET)
    admin = await connected(bus_server, "admin")
    await admin.provision()
    await admin.close()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenfleet.cli", "run", "siteagent", "--site", "nowhere",
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
            "TOKENFLEET_FLEET": str(fleet_file),
            "TOKENFLEET_NATS_URL": bus_server.bare_url,
            "TOKENFLEET_NATS_USER": "siteagent-b",
            "TOKENFLEET_NATS_PASSWORD": "secret",
        },
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert b"TOKENFLEET_SITE='nowhere': no such site" in said
