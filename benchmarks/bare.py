"""What TokenFleet is compared with: the same road with nobody deciding anything.

A relay and one process for each hop, on the same NATS, say the very messages that the fleet said for such a request
(captured from it; only ids are made new) on streams of the same configuration. Every message is decoded by the next
process of the road and answered by the next message; each has exactly one reader. No state, no timers, no offices, no
leases, no metrics, no retries, no look at the answer's content.

Run as `python -m benchmarks.bare ROLE`; settings come in `BENCH_*` variables (`Settings`).
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import nats
import uvloop
from aiohttp import web
from nats.aio.client import Client
from nats.aio.msg import Msg

from tokenfleet_schemas import codec
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import PlacementAssigned, PlacementRequested
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.routes import subject_of

#: the road, in order
MESSAGES: tuple[type[Event], ...] = (
    RequestReceived,
    AdmissionDecided,
    PlacementRequested,
    PlacementAssigned,
    OutcomeStarted,
    OutcomeFinished,
)
#: processes and what each reads
ROLES: dict[str, tuple[type[Event], ...]] = {
    "relay": (PlacementAssigned,),
    "admission": (RequestReceived,),
    "site": (AdmissionDecided,),
    "instance": (PlacementRequested, OutcomeStarted),
    "ledger": (OutcomeFinished,),
}
PREFIX = "bench"


def bare_subject(event: Event) -> str:
    """The fleet's subject under another root, so that neither hears the other."""
    return f"{PREFIX}.{subject_of(event).partition('.')[2]}"


class Settings(msgspec.Struct, frozen=True):
    """`BENCH_NATS`, `BENCH_ENGINE`, `BENCH_MESSAGES` (directory of captured messages)."""

    nats: str
    engine: str
    messages: Path

    @classmethod
    def load(cls) -> "Settings":
        """From the environment; raises KeyError."""
        env = os.environ
        return cls(env["BENCH_NATS"], env["BENCH_ENGINE"], Path(env["BENCH_MESSAGES"]))


class Hop:
    """A connection, the captured messages, and how one is said again under another id."""

    def __init__(self, settings: Settings, nc: Client) -> None:
        self.settings = settings
        self.nc = nc
        self.said: dict[type[Event], Any] = {
            kind: codec.decode((settings.messages / kind.__name__).read_bytes()) for kind in MESSAGES
        }

    async def read(self, kind: type[Event], handle: Callable[[Any], Awaitable[None]]) -> None:
        """Call this with every message of a kind."""

        async def on_message(message: Msg) -> None:
            await handle(codec.decode(message.data))

        await self.nc.subscribe(bare_subject(self.said[kind]), cb=on_message)

    async def say(self, event: Event) -> None:
        """Publish it; its stream captures it, nobody waits."""
        await self.nc.publish(bare_subject(event), codec.encode(event), headers={"Nats-Msg-Id": event.id})

    async def say_for(self, kind: type[Event], request_id: str) -> None:
        """The captured message of a kind, for this request."""
        name = kind.__name__
        await self.say(
            msgspec.structs.replace(self.said[kind], id=f"{request_id}:{name}:1:0:99", request_id=request_id)
        )

    async def say_asking(self, kind: type[Event], ask: Any) -> None:
        """The captured message of a kind that carries the whole request."""
        name = kind.__name__
        await self.say(msgspec.structs.replace(self.said[kind], id=f"{ask.request_id}:{name}:1:0:99", ask=ask))


async def _admission(hop: Hop) -> None:
    async def decide(event: RequestReceived) -> None:
        await hop.say_asking(AdmissionDecided, event.ask)

    await hop.read(RequestReceived, decide)


async def _site(hop: Hop) -> None:
    async def choose(event: AdmissionDecided) -> None:
        await hop.say_asking(PlacementRequested, event.ask)

    await hop.read(AdmissionDecided, choose)


async def _instance(hop: Hop) -> None:
    async def assign(event: PlacementRequested) -> None:
        await hop.say_for(PlacementAssigned, event.ask.request_id)

    async def started(_event: OutcomeStarted) -> None:
        pass

    await hop.read(PlacementRequested, assign)
    await hop.read(OutcomeStarted, started)


async def _ledger(hop: Hop) -> None:
    async def finished(_event: OutcomeFinished) -> None:
        pass

    await hop.read(OutcomeFinished, finished)


async def _relay(hop: Hop) -> int:
    """A bare aiohttp relay behind the bare chain; returns its port."""
    waiting: dict[str, asyncio.Future[None]] = {}
    loop = asyncio.get_running_loop()
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    url = hop.settings.engine + "/v1/chat/completions"
    ask = hop.said[RequestReceived].ask

    async def assigned(event: PlacementAssigned) -> None:
        waiter = waiting.pop(event.request_id, None)
        if waiter is not None:
            waiter.set_result(None)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        request_id = "req-" + secrets.token_hex(12)
        waiter = waiting[request_id] = loop.create_future()
        await hop.say_asking(RequestReceived, msgspec.structs.replace(ask, request_id=request_id))
        await waiter
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            first = True
            async for data in answer.content.iter_any():
                if first:
                    first = False
                    await hop.say_for(OutcomeStarted, request_id)
                await response.write(data)
            await response.write_eof()
            await hop.say_for(OutcomeFinished, request_id)
        return response

    await hop.read(PlacementAssigned, assigned)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    return int(runner.addresses[0][1])


async def run(role: str) -> None:
    """One process until it is ended; prints its port (0: none) once it listens."""
    settings = Settings.load()
    nc = await nats.connect(settings.nats, name=f"bench-{role}")
    hop = Hop(settings, nc)
    starts: dict[str, Callable[[Hop], Awaitable[int | None]]] = {
        "relay": _relay,
        "admission": _admission,
        "site": _site,
        "instance": _instance,
        "ledger": _ledger,
    }
    port = await starts[role](hop)
    await nc.flush()
    print(port or 0, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1]))
