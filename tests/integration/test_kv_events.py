"""KV events on their whole way: an engine's ZMQ socket, the site agent, NATS with a site's rights, the reader."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import prometheus_client
import pytest
from aiohttp import web
from tests.simulation.messages import make_ask

from tokenfleet import prefix
from tokenfleet.emulator import Emulator
from tokenfleet.emulator.settings import EmulatorSettings
from tokenfleet.fleet import Fleet, parse
from tokenfleet.fleetmind.caches import Caches
from tokenfleet.local.nats import NatsServer
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.permissions import nats_users, user_names
from tokenfleet.runtime.settings import Settings
from tokenfleet.siteagent.core import SiteAgentCore
from tokenfleet.siteagent.service import Agent
from tokenfleet.siteagent.settings import Knobs
from tokenfleet_schemas.codec import decode_packed
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged, KvRequested, KvSummarised
from tokenfleet_schemas.routes import subject_filter

zmq = pytest.importorskip("zmq", reason="KV events travel by pyzmq (extra siteagent)")
sockets = pytest.importorskip("zmq.asyncio")
from tokenfleet.siteagent.kv_reader import KvReaders  # noqa: E402  # needs it

SECRET = "s" * 32
SALT = prefix.cache_salt(SECRET, "acme")
KEY = prefix.tenant_key(SECRET, "acme")
FLEET = """
[fleet]
name = "test"
default_class = "chat"
[classes.chat]
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
[tenants.other]
zones = ["eu"]
classes = ["chat"]
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 8192
[sites.b]
zone = "eu"
[sites.b.instances.b1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
kv_tokens = 16384
[sites.c]
zone = "us"
"""
QUICK = Knobs(poll_ms=40.0, report_ms=40.0, kv_flush_ms=5.0, kv_look_ms=20.0, kv_retry_ms=20.0, kv_absent_ms=100.0)


def digests(text: str, key: bytes = KEY) -> set[bytes]:
    """What a gateway says of a prompt to a byte-tokenising engine."""
    chain = prefix.digests([byte + 3 for byte in text.encode()], key)
    return {chain[at : at + 8] for at in range(0, len(chain), 8)}


class Mirror:
    """What a reader of the bus believes that instance b1 holds."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.events: list[KvChanged] = []
        self._more = asyncio.Event()

    def take(self, _subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        event = decode_packed(data)
        assert isinstance(event, KvChanged)
        if self.events and not event.snapshot:
            assert event.sequence == self.events[-1].sequence + 1
        if event.cleared or event.snapshot:
            self.held.clear()
        self.held |= {event.stored[at : at + 8] for at in range(0, len(event.stored), 8)}
        gone = {event.removed[at : at + 8] for at in range(0, len(event.removed), 8)}
        assert gone <= self.held
        self.held -= gone
        self.events.append(event)
        self._more.set()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 8) -> None:
        """Wait for a message after which something holds."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._more.clear()
                await self._more.wait()


class Feeds:
    """The agent's core without a runner: what it reports is of no interest here."""

    def __init__(self, core: SiteAgentCore) -> None:
        self.core = core

    def feed(self, event: Event) -> None:
        list(self.core.handle(event, asyncio.get_running_loop().time() * 1000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    fleet = parse(FLEET.encode())
    users = nats_users(fleet, dict.fromkeys(user_names(fleet), "secret"))
    with NatsServer(tmp_path / "nats", users=[user.entry() for user in users]) as found:
        assert isinstance(found, NatsServer)
        yield found


@contextlib.asynccontextmanager
async def connected(server: NatsServer, user: str) -> AsyncIterator[Bus]:
    bus = Bus(Settings(nats_url=server.bare_url, nats_user=user, nats_password="secret"), Clock(), user)
    await bus.connect()
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def listening(
    server: NatsServer, fleet: Fleet, knobs: Knobs = QUICK
) -> AsyncIterator[tuple[Mirror, Bus, prometheus_client.CollectorRegistry]]:
    """An agent of site b, and a reader with the rights of its TokenPilot."""
    mirror, registry = Mirror(), prometheus_client.CollectorRegistry()
    async with connected(server, "siteagent-b") as bus, connected(server, "tokenpilot-b") as pilot:
        await pilot.nc.listen(subject_filter(KvChanged, site="b"), mirror.take)
        await pilot.nc.flush()
        core = SiteAgentCore(fleet, "b", began="t", knobs=knobs)
        kv = KvReaders(bus, "b", SECRET, registry)
        await kv.listen()
        shell = Agent(core, Feeds(core), {}, knobs, kv)
        shell.follow(fleet)
        try:
            yield mirror, pilot, registry
        finally:
            await shell.stop()


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Fleet, dict[str, str], aiohttp.ClientSession]]:
    emulator = Emulator(parse(FLEET.encode()), settings=EmulatorSettings(time_scale=20.0))
    addresses = (await emulator.start())["b1"]
    text = FLEET.replace("http://127.0.0.1:0", addresses["url"])
    async with aiohttp.ClientSession() as session:
        yield parse(text.encode()), addresses, session
    await emulator.stop()


async def complete(session: aiohttp.ClientSession, url: str, text: str, salt: str = SALT) -> int:
    """One completion of 8 tokens; the cached tokens that the engine reports."""
    body = {"model": "m", "prompt": text, "max_tokens": 8, "ignore_eos": True, "cache_salt": salt}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def test_what_an_engine_caches_is_known_exactly(
    server: NatsServer, engine: tuple[Fleet, dict[str, str], aiohttp.ClientSession]
) -> None:
    """Before the agent listened, while it does, after evictions, a clearing and a restart: always what is there."""
    fleet, addresses, session = engine
    url = addresses["url"]
    before, after, strange = ("a" * 1000, "b" * 1000 + "c" * 500, "d" * 640)
    await complete(session, url, before)
    async with listening(server, fleet) as (mirror, pilot, _):
        await mirror.until(lambda: digests(before) <= mirror.held)
        assert mirror.events[0].snapshot
        await complete(session, url, after)
        await complete(session, url, strange, salt="not of this fleet")
        await mirror.until(lambda: digests(after) <= mirror.held)
        # a hit that the engine grants is one that was foreseen
        hit = await complete(session, url, after)
        foreseen = 64 * len(digests(after) & mirror.held)
        assert 0 <= hit - foreseen < 64
        assert not any(digests(strange, prefix.tenant_key(SECRET, who)) & mirror.held for who in ("acme", "other"))
        # 16,384 tokens of KV: twenty prompts of 1,500 throw the first ones out
        many = [chr(ord("e") + n) * 1500 for n in range(12)]
        for text in many:
            await complete(session, url, text)
        await mirror.until(lambda: digests(many[-1]) <= mirror.held and not digests(before) & mirror.held)
        incarnation = mirror.events[-1].incarnation
        # who has lost its place asks
        said = len(mirror.events)
        pilot.publish(KvRequested(id="r", site="b", model="m", instance="b1", replica="r"))
        await mirror.until(lambda: any(event.snapshot for event in mirror.events[said:]))
        assert digests(many[-1]) <= mirror.held
        async with session.post(f"{url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        await complete(session, url, "z" * 640)
        await mirror.until(lambda: digests("z" * 640) <= mirror.held and not digests(many[-1]) & mirror.held)
        async with session.post(f"{addresses['admin']}/faults", json={"kind": "restart"}) as answer:
            assert answer.status == 200
        await mirror.until(lambda: not mirror.held)
        await complete(session, url, "y" * 640)
        await mirror.until(lambda: digests("y" * 640) <= mirror.held and mirror.events[-1].incarnation != incarnation)
        assert len(mirror.held) <= 11


async def test_a_summary_of_what_a_site_holds_reaches_fleetmind(
    server: NatsServer, engine: tuple[Fleet, dict[str, str], aiohttp.ClientSession]
) -> None:
    """With FleetMind's own rights, and it finds a prompt there that it never sent itself."""
    fleet, addresses, session = engine
    text = "h" * 2000
    knobs = msgspec.structs.replace(QUICK, kv_summary_ms=30.0)
    chain, stride = prefix.pack(prefix.digests([byte + 3 for byte in text.encode()], KEY))
    ask = make_ask(tenant="acme", input_tokens=2000, prefix=chain, prefix_stride=stride)
    caches, found = Caches(), asyncio.Event()

    def take(_subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        event = decode_packed(data)
        assert isinstance(event, KvSummarised)
        caches.summarised(event, 0.0)
        if caches.hits(ask, 0.0).get("b", 0) >= 1900:
            found.set()

    async with connected(server, "fleetmind") as fleetmind:
        await fleetmind.nc.listen(subject_filter(KvSummarised), take)
        await fleetmind.nc.flush()
        async with listening(server, fleet, knobs):
            await complete(session, addresses["url"], text)
            await asyncio.wait_for(found.wait(), 8)


class Wire:
    """A publisher of KV events that loses messages on command, and the pages of the engine that it belongs to."""

    def __init__(self, *, with_topic: bool = True, replays: bool = True) -> None:
        self._context = sockets.Context()
        self.events = self._context.socket(zmq.PUB)
        self.replays = self._context.socket(zmq.ROUTER)
        self._with_topic = with_topic
        self._replays = replays
        self.sent: dict[int, bytes] = {}
        self.started, self.finished, self.tokens = 100.0, 0, 0
        self.asked: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        self.events.bind("tcp://127.0.0.1:*")
        self.replays.bind("tcp://127.0.0.1:*")
        self._tasks.append(asyncio.create_task(self._answer()))
        app = web.Application()
        pages: dict[str, Callable[[], str]] = {
            "/health": lambda: "",
            "/metrics": self._metrics,
            "/v1/models": lambda: '{"data":[{"id":"m"}]}',
            "/version": lambda: '{"version":"0.32.0"}',
            "/kv_event_sources": self._sources,
        }
        for path, page in pages.items():
            app.router.add_get(path, self._page(page))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._runner is not None
        await self._runner.cleanup()
        self._context.destroy(linger=0)

    @property
    def fleet(self) -> Fleet:
        return parse(FLEET.replace("http://127.0.0.1:0", self.url).replace('profile = "8b-h100"\n', "").encode())

    async def say(self, sequence: int, *events: Any, unix_s: float = 200.0, lost: bool = False) -> None:
        """One batch, kept for replay; a lost one reaches nobody else."""
        payload = msgspec.msgpack.encode([unix_s + sequence, list(events), 0])
        self.sent[sequence] = payload
        if not lost:
            await self.events.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])

    def stored(self, text: str) -> dict[str, Any]:
        """A prompt of whole blocks."""
        tokens = [byte + 3 for byte in text.encode()]
        names = [hash((text, at)) & (2**64 - 1) for at in range(len(tokens) // 16)]
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": tokens[: 16 * len(names)],
            "block_size": 16,
            "extra_keys": [[SALT]] + [None] * (len(names) - 1),
        }

    def _page(self, page: Callable[[], str]) -> Callable[[web.Request], Any]:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(text=page())

        return answer

    def _metrics(self) -> str:
        return (
            f"process_start_time_seconds {self.started}\n"
            'vllm:num_requests_running{engine="0"} 0\n'
            'vllm:num_requests_waiting{engine="0"} 0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0\n'
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {self.finished}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n'
        )

    def _sources(self) -> str:
        def at(socket: Any) -> str:
            port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            return f"tcp://*:{port}"

        source = {"endpoint": at(self.events), "replay_endpoint": at(self.replays), "topic": "kv", "publisher": "zmq"}
        return msgspec.json.encode({"0": source}).decode()

    async def _answer(self) -> None:
        while True:
            peer, _, start = await self.replays.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = [b"kv"] if self._with_topic else []
            for sequence, payload in sorted(self.sent.items()) if self._replays else ():
                if sequence >= first:
                    await self.replays.send_multipart([peer, b"", *topic, sequence.to_bytes(8, "big"), payload])
            await self.replays.send_multipart([peer, b"", b"", b"\xff" * 8, b""])


@contextlib.asynccontextmanager
async def wire(**options: bool) -> AsyncIterator[Wire]:
    found = Wire(**options)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


def text(n: int) -> str:
    """A prompt of two digests."""
    return f"{n:08d}" * 16


@pytest.mark.parametrize("with_topic", [True, False])
async def test_lost_batches_are_asked_for_and_applied_in_their_place(server: NatsServer, with_topic: bool) -> None:
    """S08: sequence numbers were read and not checked, and the replay path could not read the engine's frames."""
    async with wire(with_topic=with_topic) as engine, listening(server, engine.fleet) as (mirror, _, registry):
        await engine.say(0, engine.stored(text(0)))
        await mirror.until(lambda: digests(text(0)) <= mirror.held)
        engine.asked.clear()
        for n in range(1, 40):
            await engine.say(n, engine.stored(text(n)), lost=10 <= n < 20)
        await mirror.until(lambda: all(digests(text(n)) <= mirror.held for n in range(40)))
        assert engine.asked == [10]
        assert registry.get_sample_value("tokenfleet_kv_gaps", {"instance": "b1"}) == 1
        assert registry.get_sample_value("tokenfleet_kv_gap_unrecovered", {"instance": "b1"}) == 0


async def test_what_cannot_be_replayed_is_forgotten_and_counted(server: NatsServer) -> None:
    """S08: the replay was refused; a removal may have been lost, so nothing old may stay."""
    async with wire(replays=False) as engine, listening(server, engine.fleet) as (mirror, _, registry):
        await engine.say(0, engine.stored(text(0)))
        while not mirror.held:  # the socket may have subscribed after the first message
            await engine.say(0, engine.stored(text(0)))
            with contextlib.suppress(TimeoutError):
                await mirror.until(lambda: bool(mirror.held), 0.2)
        await engine.say(5, engine.stored(text(5)))
        await mirror.until(lambda: mirror.held == digests(text(5)))
        assert registry.get_sample_value("tokenfleet_kv_gap_unrecovered", {"instance": "b1"}) == 1


async def test_a_restart_in_place_is_seen_by_its_start_time_alone(server: NatsServer) -> None:
    """S09: no event of the new process has come yet, and the old blocks must be gone by the next scrape."""
    async with wire() as engine, listening(server, engine.fleet) as (mirror, _, _registry):
        await engine.say(0, engine.stored(text(0)), unix_s=200.0)
        await mirror.until(lambda: bool(mirror.held))
        incarnation = mirror.events[-1].incarnation
        engine.sent.clear()
        engine.started = 500.0
        await mirror.until(lambda: not mirror.held)
        await engine.say(0, engine.stored(text(7)), unix_s=600.0)
        await mirror.until(lambda: mirror.held == digests(text(7)))
        assert mirror.events[-1].incarnation != incarnation


async def test_a_silent_publisher_is_an_alarm(server: NatsServer) -> None:
    """S11: the engine's log confirmed its configuration, no event ever came, and affinity was dead without an alarm."""
    async with wire() as engine, listening(server, engine.fleet) as (mirror, _, registry):
        await engine.say(0, engine.stored(text(0)))
        await mirror.until(lambda: bool(mirror.held))
        for _ in range(3):  # requests that fill no block are no alarm
            engine.finished += 40
            engine.tokens += 400
            await asyncio.sleep(0.05)
        assert registry.get_sample_value("tokenfleet_kv_events_silent", {"instance": "b1"}) == 0
        engine.finished += 100
        engine.tokens += 20_000
        await mirror.until(lambda: not mirror.held)
        assert mirror.events[-1].cleared
        async with asyncio.timeout(5):
            while registry.get_sample_value("tokenfleet_kv_events_silent", {"instance": "b1"}) != 1:
                await asyncio.sleep(0.01)
        # it speaks again: the agent listens anew, what was replayed is believed again
        said = 0
        async with asyncio.timeout(8):
            while registry.get_sample_value("tokenfleet_kv_events_silent", {"instance": "b1"}) != 0:
                said += 1
                await engine.say(said, engine.stored(text(said)))
                await asyncio.sleep(0.05)
        await mirror.until(lambda: digests(text(0)) | digests(text(said)) <= mirror.held)


async def test_other_sites_are_deaf_to_it(server: NatsServer) -> None:
    """Which prefixes an instance holds is for its own site's TokenPilot; nobody else may ask for it either."""
    async with (
        wire() as engine,
        listening(server, engine.fleet) as (mirror, _, _registry),
        connected(server, "tokenpilot-c") as other,
    ):
        heard: list[bytes] = []
        await other.nc.listen(subject_filter(KvChanged), lambda _s, _r, data, _h: heard.append(data))
        await engine.say(0, engine.stored(text(0)))
        await mirror.until(lambda: bool(mirror.held))
        said = len(mirror.events)
        other.publish(KvRequested(id="r", site="b", replica="r"))
        await other.nc.flush()
        await engine.say(1, engine.stored(text(1)))
        await mirror.until(lambda: digests(text(1)) <= mirror.held)
        assert not any(event.snapshot for event in mirror.events[said:])
        assert not heard
