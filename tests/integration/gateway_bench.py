"""A real gateway on a real NATS, with scripted engines behind it and a scripted TokenPilot that answers it.

The engines speak raw HTTP over sockets of their own, so that a test decides every byte, pause and reset.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import msgspec

from tokenfleet import fleet as fleets
from tokenfleet.gateway.service import Gatekeeper
from tokenfleet.gateway.settings import Limits
from tokenfleet.keys import ApiKey, hash_key
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import PlacementAssigned, PlacementDeclined, PlacementHeld, PlacementRefused, Work
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.routes import stream_of, subject_filter

SECRET = "test-secret"
KEY, BATCH_KEY, LOCAL_KEY = "tf_" + "k" * 30, "tf_" + "b" * 30, "tf_" + "l" * 30
E = TypeVar("E", bound=Event)
_numbers = itertools.count(1)
WORK = Work(prefill_tokens=10, decode_tokens=10, kv_tokens=20)

FLEET = """
[fleet]
name = "test"
default_class = "chat"
max_body_bytes = 1000000

[sites.a]
zone = "eu"
entry = true
homes = { m = ["b"], other = ["b"] }
[sites.b]
zone = "eu"
[sites.u]
zone = "us"
[sites.b.instances.b-0]
model = "m"
version = "1"
url = "http://127.0.0.1:1"
[sites.b.instances.b-1]
model = "m"
version = "1"
url = "http://127.0.0.1:1"

[models.m]
versions = ["1", "2"]
default_version = "1"
max_model_len = 2000
tokenizer = "bytes"
[models.other]
versions = ["1"]
default_version = "1"
max_model_len = 2000
tokenizer = "bytes"

[classes.chat]
ttft_ms = 1000
tier = 0
patience_ms = 10000
[classes.batch]
e2e_ms = 300000
tier = 2
patience_ms = 10000
[classes.secret]
tier = 1

[tenants.acme]
zones = ["*"]
classes = ["chat", "batch"]
[tenants.local]
zones = ["us"]
classes = ["chat"]
models = ["m"]

[network.rtt_ms]
a-b = 1
"""


class Connection:
    """One request at a scripted engine, and the words in which the script answers it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.headers: dict[str, str] = {}
        self.body: dict[str, Any] = {}
        #: the gateway closed its side
        self.closed = asyncio.Event()
        #: how many bytes were taken from the script
        self.sent = 0

    async def head(self, status: str = "200 OK", content_type: str = "text/event-stream; charset=utf-8") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()
        self.sent += len(data)

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def page(self, status: str, page: Any) -> None:
        await self.head(status, "application/json")
        await self.send(page if isinstance(page, bytes) else json.dumps(page).encode())
        await self.end()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Connection], Awaitable[None]]


class Engine:
    """Answers every request by its script; `seen` are the connections in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Connection] = []
        self.arrived = asyncio.Event()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                connection = Connection(reader, writer)
                for line in head.decode().split("\r\n")[1:]:
                    name, _, value = line.partition(": ")
                    if name:
                        connection.headers[name.lower()] = value
                body = await reader.readexactly(int(connection.headers["content-length"]))
                connection.body = json.loads(body)
                self.seen.append(connection)
                self.arrived.set()
                watch = asyncio.create_task(self._watch(connection))
                try:
                    await self.script(connection)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for connection in self.seen:
                if connection.writer is writer:
                    connection.closed.set()
            writer.transport.abort()
            self._tasks.discard(task)

    async def _watch(self, connection: Connection) -> None:
        """Between a request and the next only a disconnect can be read."""
        with contextlib.suppress(ConnectionError):
            if await connection.reader.read(1) == b"":
                connection.closed.set()


def sse(*parts: str, role: bool = True, finish: str = "stop", usage: int | None = None) -> list[bytes]:
    """The events of a chat answer."""
    events = [event({"role": "assistant", "content": ""})] if role else []
    events += [event({"content": part}) for part in parts]
    events.append(event({}, finish))
    if usage is not None:
        count = {"prompt_tokens": 9, "completion_tokens": usage, "total_tokens": 9 + usage}
        events.append(b"data: " + json.dumps({"id": "x", "choices": [], "usage": count}).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


def event(delta: dict[str, Any], finish: str | None = None, *, counted: int | None = None) -> bytes:
    """One event of a chat answer; `counted`: with the running count of an engine that was asked to."""
    data: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if counted is not None:
        data["usage"] = {"prompt_tokens": 9, "total_tokens": 9 + counted, "completion_tokens": counted}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def answering(events: list[bytes], *, pause_s: float = 0.0) -> Script:
    """A script that streams these events."""

    async def script(connection: Connection) -> None:
        await connection.head()
        for event in events:
            await connection.send(event)
            if pause_s:
                await asyncio.sleep(pause_s)
        await connection.end()

    return script


async def hanging(connection: Connection) -> None:
    """Takes the request and never answers."""
    await connection.closed.wait()


class Pilot:
    """Answers the gateway's requests: `places` are (instance, engine) in turn; collects what the gateway says."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self.bus, self.gateway = bus, gateway
        self.places: list[tuple[str, Engine]] = []
        #: instead of an assignment
        self.answer: Callable[[RequestReceived], Event | None] | None = None
        self.said: list[Event] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        for message, leaf in (
            (RequestReceived, self.gateway),
            (PlacementDeclined, self.gateway),
            (OutcomeFinished, None),
            (OutcomeStarted, None),
        ):
            await self.bus.read(subject_filter(message, leaf=leaf), self._hear, stream=stream_of(message), since_s=0)

    def _hear(self, event: Event, _now_ms: float) -> None:
        if isinstance(event, RequestReceived):
            self.said.append(event)
            answer = self.answer(event) if self.answer is not None else self.assign(event.ask, 1)
            if answer is not None:
                self.bus.publish(answer)
        elif event.gateway == self.gateway:  # type: ignore[attr-defined]
            self.said.append(event)
            if isinstance(event, OutcomeFinished) and not event.final:
                assert event.ask is not None
                self.bus.publish(self.assign(event.ask, event.attempt + 1))
        self._changed.set()

    def assign(self, ask: Ask, attempt: int, **changes: Any) -> PlacementAssigned:
        instance, engine = self.places[(attempt - 1) % len(self.places)]
        values: dict[str, Any] = {
            "id": f"{ask.request_id}:assigned:{attempt}",
            "site": "b",
            "request_id": ask.request_id,
            "gateway": ask.gateway,
            "tenant": ask.tenant,
            "service_class": ask.service_class,
            "model": ask.model,
            "version": ask.version,
            "attempt": attempt,
            "revision": 0,
            "instance": instance,
            "incarnation": "e1",
            "endpoint_url": engine.url,
            "work": WORK,
        }
        return PlacementAssigned(**{**values, **changes})

    def hold(self, ask: Ask) -> PlacementHeld:
        return PlacementHeld(
            id=f"{ask.request_id}:held:1",
            site="b",
            request_id=ask.request_id,
            gateway=ask.gateway,
            entry="a",
            tenant=ask.tenant,
            service_class=ask.service_class,
            model=ask.model,
            version=ask.version,
            attempt=1,
            revision=0,
            home_instance="b-0",
            work=WORK,
            predicted_wait_ms=1.0,
            predicted_own_ms=1.0,
            patience_left_ms=1000.0,
            received_unix_ms=ask.received_unix_ms,
            lacks="prefill_tokens",
        )

    def refuse(self, ask: Ask, reason: str, status: int, retry_after_s: float | None) -> PlacementRefused:
        return PlacementRefused(
            id=f"{ask.request_id}:refused",
            site="a",
            request_id=ask.request_id,
            gateway=ask.gateway,
            model=ask.model,
            version=ask.version,
            attempt=1,
            revision=0,
            reason=reason,
            status=status,
            retry_after_s=retry_after_s,
        )

    def report(self, instance: str, engine: Engine, **changes: Any) -> CapacityReported:
        number = next(_numbers)
        values: dict[str, Any] = {
            "id": f"{instance}:{self.gateway}:{number}",
            "site": "b",
            "zone": "eu",
            "instance": instance,
            "incarnation": "e1",
            "revision": number,
            "model": "m",
            "version": "1",
            "ready": True,
            "endpoint_url": engine.url,
            "routable_from": ("*",),
        }
        return CapacityReported(**{**values, **changes})

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.said if isinstance(event, kind)]

    async def until(self, ready: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until what was said makes this true."""
        async with asyncio.timeout(timeout_s):
            while not ready():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, count: int = 1) -> list[OutcomeFinished]:
        """Wait for so many outcomes."""
        await self.until(lambda: len(self.events(OutcomeFinished)) >= count)
        return self.events(OutcomeFinished)


class Bench:
    """The whole of it."""

    def __init__(self, keeper: Gatekeeper, pilot: Pilot, client: aiohttp.ClientSession, base: str) -> None:
        self.keeper, self.pilot, self.client, self.base = keeper, pilot, client, base
        self.engines: list[Engine] = []
        self.key_up = True

    async def engine(self, script: Script, instance: str = "") -> Engine:
        """One more engine; requests go to the engines in turn by attempt."""
        engine = Engine(script)
        await engine.start()
        self.engines.append(engine)
        self.pilot.places.append((instance or f"b-{len(self.pilot.places)}", engine))
        return engine

    def post(self, body: Any = None, *, path: str = "/v1/chat/completions", key: str = KEY, **more: Any) -> Any:
        """A request as aiohttp's context manager."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **more.pop("headers", {})}
        data = body if isinstance(body, bytes) else json.dumps(ask(**more) if body is None else body).encode()
        return self.client.post(self.base + path, data=data, headers=headers)

    def metrics(self) -> dict[str, float]:
        """Samples of this gateway by name and labels."""
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in self.keeper.service.metrics.collect()
            for sample in family.samples
        }

    async def idle(self) -> None:
        """What must hold when nothing runs: every gauge is zero."""
        async with asyncio.timeout(5):
            while self.keeper.exchanges or self.keeper.service.bus.outbox.pending:
                await asyncio.sleep(0.01)
        assert self.keeper.core.requests == {}
        gauges = {k: v for k, v in self.metrics().items() if "open_requests" in k or "clients" in k}
        assert gauges
        assert set(gauges.values()) == {0.0}


def ask(**changes: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, **changes}


def keys() -> dict[bytes, ApiKey]:
    """The test's API keys by hash."""
    created = msgspec.convert("2026-01-01T00:00:00Z", type=ApiKey.__annotations__["created_at"])
    return {
        hash_key(SECRET, KEY): ApiKey(id="k1", tenant="acme", created_at=created),
        hash_key(SECRET, BATCH_KEY): ApiKey(id="k2", tenant="acme", classes=("batch",), created_at=created),
        hash_key(SECRET, LOCAL_KEY): ApiKey(id="k3", tenant="local", created_at=created),
    }


@contextlib.asynccontextmanager
async def bench(nats_url: str, *, limits: Limits | None = None, fleet: str = FLEET) -> AsyncIterator[Bench]:
    """A running gateway; checks at the end that it left nothing behind."""
    name = f"gw-{next(_numbers)}-{id(nats_url) % 9973}"
    settings = Settings(nats_url=nats_url, site="a", replica=name, secret=SECRET, fleet="fleet.toml")
    service = Service("gateway", settings, fleets.parse(fleet.encode()))
    await service.bus.connect()
    await service.bus.provision()
    side = Bus(settings, Clock(), f"pilot-{name}")
    await side.connect()
    pilot = Pilot(side, name)
    await pilot.start()
    known = keys()

    async def find(hashed: bytes) -> ApiKey | None:
        if not built[0].key_up:
            raise OSError("down")
        return known.get(hashed)

    keeper = Gatekeeper(service, find_key=find, limits=limits or Limits(stop_grace_s=1.0, watch_s=0.05))
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(keeper.run(listening.set_result))
    port = await listening
    client = aiohttp.ClientSession()
    built = [Bench(keeper, pilot, client, f"http://127.0.0.1:{port}")]
    try:
        yield built[0]
        await built[0].idle()
    finally:
        await client.close()
        service.stopping.set()
        await running
        for engine in built[0].engines:
            await engine.stop()
        await side.close()
        await service.bus.close()
