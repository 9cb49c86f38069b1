"""The accountant on a real NATS and a real Postgres: nothing lost, nothing twice, whatever breaks."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import nats
import nats.js.errors
import prometheus_client
import pytest
from nats.aio.client import Client

from tokenfleet import database
from tokenfleet.accountant.core import Accountant
from tokenfleet.accountant.service import Writer, run
from tokenfleet.accountant.settings import AccountantSettings
from tokenfleet.fleet import parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.local.postgres import PostgresServer
from tokenfleet.runtime.permissions import nats_users, user_names
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas import codec
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.lease import GatewayLeased, OpenRequest
from tokenfleet_schemas.outcome import OutcomeFinished, Times
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.routes import subject_filter, subject_of

FLEET = b"""
[fleet]
name = "test"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 1000
[classes.chat]
ttft_ms = 500
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""


def now_ms() -> int:
    return int(time.time() * 1000)


def outcome(request_id: str, *, attempt: int = 1, final: bool = True, **changes: Any) -> OutcomeFinished:
    values: dict[str, Any] = {
        "id": f"{request_id}:finished:{attempt}",
        "site": "a",
        "time_unix_ms": now_ms(),
        "request_id": request_id,
        "attempt": attempt,
        "final": final,
        "outcome": "completed",
        "gateway": "g",
        "gateway_incarnation": "i1",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m",
        "model": "m",
        "version": "1",
        "served_site": "b",
        "instance": "b1",
        "input_tokens": 10,
        "output_tokens": 20,
        "received_unix_ms": now_ms(),
        "times": Times(ttft_ms=100.0, tpot_ms=10.0, e2e_ms=300.0),
        "ttft_objective_ms": 500.0,
    }
    return OutcomeFinished(**(values | changes))


async def until(check: Callable[[], Awaitable[bool]], *, timeout_s: float = 45.0, what: str = "it") -> None:
    """Poll what cannot be awaited: another process's rows."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await check():
        assert loop.time() < end, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.05)


class Rows:
    """The ledger, seen from outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def fetch(self, query: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    async def count(self) -> int:
        return int((await self.fetch("SELECT count(*) FROM attempts"))[0][0])

    async def until(self, count: int, *, timeout_s: float = 45.0) -> None:
        async def there() -> bool:
            return await self.count() >= count

        await until(there, timeout_s=timeout_s, what=f"{count} rows")


async def publish(client: Client, *events: Event, message_id: bool = False) -> None:
    """Into the stream as it is; without ids, so that its duplicate window cannot help."""
    stream = client.jetstream(timeout=10)
    for start in range(0, len(events), 256):
        await asyncio.gather(
            *(
                stream.publish(
                    subject_of(event), codec.encode(event), headers={"Nats-Msg-Id": event.id} if message_id else None
                )
                for event in events[start : start + 256]
            )
        )


@contextlib.asynccontextmanager
async def service(nats_url: str, postgres_url: str, replica: str = "", **more: str) -> AsyncIterator[Service]:
    """A connected service without a body."""
    settings = Settings(nats_url=nats_url, postgres_url=postgres_url, replica=replica, fleet="/nonexistent", **more)
    made = Service("accountant", settings, parse(FLEET))
    await made.start()
    try:
        yield made
    finally:
        made.stopping.set()
        await made.close()


@contextlib.asynccontextmanager
async def accountant(nats_url: str, postgres_url: str, replica: str = "", **more: str) -> AsyncIterator[Service]:
    """A whole accountant in this process."""
    async with service(nats_url, postgres_url, replica, **more) as made:
        running = asyncio.create_task(run(made))
        try:
            yield made
        finally:
            made.stopping.set()
            await asyncio.wait_for(running, 40)


def process(nats_url: str, postgres_url: str, fleet: Path) -> "subprocess.Popen[bytes]":
    """An accountant as a process of its own."""
    fleet.write_bytes(FLEET)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tokenfleet.cli", "run", "accountant"],
        env=clean
        | {"TOKENFLEET_NATS_URL": nats_url, "TOKENFLEET_POSTGRES_URL": postgres_url, "TOKENFLEET_FLEET": str(fleet)},
    )


@pytest.fixture
async def client(clean_nats_url: str) -> AsyncIterator[Client]:
    made = await nats.connect(clean_nats_url)
    yield made
    await made.close()


class Crash(BaseException):
    """kill -9 at a chosen moment."""


async def test_repeats_and_crashes_between_commit_and_acknowledgement(
    clean_nats_url: str, database_url: str, client: Client
) -> None:
    """L07: 1,500 outcomes delivered one to five times, shuffled, to four workers that die after committing."""
    rng = random.Random(3)
    settings = AccountantSettings(ack_wait_s=1.0, batch_rows_max=200)
    truth = [outcome(f"r{number}", attempt=number % 3) for number in range(1500)]
    deliveries = [event for event in truth for _ in range(rng.randint(1, 5))]
    rng.shuffle(deliveries)
    crashes = iter([2, 3, 4, 6, 9])

    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(service(clean_nats_url, database_url)) for _ in range(4)]
        engines = [database.create_engine(database_url) for _ in services]
        batches = 0

        async def committed() -> None:
            nonlocal batches, crash_at
            batches += 1
            if batches == crash_at:
                crash_at = next(crashes, 0)
                raise Crash

        crash_at = next(crashes)

        async def worker(number: int) -> None:
            while not services[number].stopping.is_set():
                writer = Writer(_renewed(services[number]), engines[number], Accountant(services[number].fleet).medians,
                                settings)  # fmt: skip
                writer.committed = committed
                with contextlib.suppress(Crash):
                    await writer.run()

        workers = [asyncio.create_task(worker(number)) for number in range(4)]
        await publish(client, *deliveries)

        async def drained() -> bool:
            info = await client.jetstream().consumer_info("TF_OUTCOME", "accountant")
            return info.num_pending == 0 and info.num_ack_pending == 0

        await until(drained, timeout_s=60, what="everything acknowledged")
        for one in services:
            one.stopping.set()
        await asyncio.gather(*workers)
        for engine in engines:
            await engine.dispose()

    assert crash_at == 0, "not every crash happened"
    found = await Rows(database_url).fetch("SELECT request_id, attempt, output_tokens FROM attempts")
    assert sorted(found) == sorted((event.request_id, event.attempt, 20) for event in truth)


def _renewed(made: Service) -> Service:
    """A worker that starts again has counters of its own."""
    made.metrics = prometheus_client.CollectorRegistry()
    return made


async def test_postgres_goes_away_and_comes_back(
    clean_nats_url: str, client: Client, postgres_server: PostgresServer
) -> None:
    """B05: the database is down for a while; plain redelivery would burn every attempt in milliseconds."""
    await database.migrate(postgres_server.url)
    rows = Rows(postgres_server.url)
    async with accountant(clean_nats_url, postgres_server.url) as made:
        await publish(client, *(outcome(f"before{n}") for n in range(50)))
        await rows.until(50)
        await asyncio.to_thread(postgres_server.kill)
        await publish(client, *(outcome(f"during{n}") for n in range(700)))

        async def noticed() -> bool:
            return "ledger" in made.not_ready()

        await until(noticed, what="readiness to say that Postgres is away")
        await asyncio.sleep(4)  # an outage has a length
        await asyncio.to_thread(postgres_server.start)
        await rows.until(750, timeout_s=45)
        await publish(client, *(outcome(f"after{n}") for n in range(50)))
        await rows.until(800)
        assert await rows.count() == 800
        assert "ledger" not in made.not_ready()


async def test_poison_is_set_aside_and_the_others_flow(clean_nats_url: str, database_url: str, client: Client) -> None:
    """B05: one event of a bad schema must neither block the ones behind it nor vanish."""
    rows = Rows(database_url)
    async with accountant(clean_nats_url, database_url):
        stream = client.jetstream()
        subject = subject_of(outcome("r1"))
        await publish(client, outcome("r1"))
        await stream.publish(subject, b"\xff\xfe not json")
        await stream.publish(subject, b'{"type":"tokenfleet.outcome.v9.finished"}')
        await publish(client, outcome("r2"), outcome("huge", input_tokens=2**80), outcome("r3"))
        await rows.until(3)

        async def set_aside() -> bool:
            return len(await rows.fetch("SELECT 1 FROM quarantine")) == 3

        await until(set_aside, what="three events in quarantine")
        reasons = await rows.fetch("SELECT reason, subject FROM quarantine ORDER BY id")
        assert all(reason for reason, _ in reasons)

        async def acknowledged() -> bool:
            info = await stream.consumer_info("TF_OUTCOME", "accountant")
            return info.num_pending == 0 and info.num_ack_pending == 0

        await until(acknowledged, what="poison acknowledged")
    assert [found[0] for found in await rows.fetch("SELECT request_id FROM attempts ORDER BY 1")] == ["r1", "r2", "r3"]


@pytest.mark.timeout(300)
async def test_the_bus_restarts_while_rows_are_written(nats_server: NatsServer, database_url: str) -> None:
    """B01: after a server restart the consumer looked active and received nothing. It must go on by itself."""
    rows = Rows(database_url)
    async with accountant(nats_server.url, database_url):
        first = await nats.connect(nats_server.url)
        await publish(first, *(outcome(f"before{n}") for n in range(100)))
        await rows.until(100)
        await first.close()
        for round_number in range(2):
            await asyncio.to_thread(nats_server.kill)
            await asyncio.to_thread(nats_server.start)
            again = await nats.connect(nats_server.url)
            await publish(again, *(outcome(f"round{round_number}-{n}") for n in range(100)))
            await again.close()
            await rows.until(100 * (round_number + 2), timeout_s=40)
    assert await rows.count() == 300


async def test_a_stream_made_anew_is_read_from_its_beginning(
    clean_nats_url: str, database_url: str, client: Client
) -> None:
    """An operator restored the bus from nothing: the durable consumer is gone and must come back by itself."""
    rows = Rows(database_url)
    async with accountant(clean_nats_url, database_url) as made:
        await publish(client, outcome("r1"))
        await rows.until(1)
        await client.jsm().delete_stream("TF_OUTCOME")
        await made.bus.provision()
        await publish(client, outcome("r2"))
        await rows.until(2)


@pytest.mark.timeout(300)
async def test_a_stopped_accountant_finishes_what_it_began(
    clean_nats_url: str, database_url: str, client: Client, tmp_path: Path
) -> None:
    """B11: SIGTERM with a full buffer cut the last handler: 10 received, 9 finished. Here: begun is committed."""
    rows = Rows(database_url)
    first = process(clean_nats_url, database_url, tmp_path / "fleet.toml")
    try:

        async def provisioned() -> bool:
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await client.jetstream().consumer_info("TF_OUTCOME", "accountant")
                return True
            return False

        await until(provisioned, what="the accountant")
        publishing = asyncio.create_task(publish(client, *(outcome(f"r{n}") for n in range(4000))))
        await rows.until(500)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 60) == 0
        await publishing
    finally:
        first.kill()
        await asyncio.to_thread(first.wait)
    second = process(clean_nats_url, database_url, tmp_path / "fleet.toml")
    try:
        # what the first one had in hand was given back, or comes again after the acknowledgement time
        await rows.until(4000, timeout_s=60)
    finally:
        second.terminate()
        assert await asyncio.to_thread(second.wait, 60) == 0
    assert await rows.count() == 4000


async def test_a_dead_gateway_is_closed_in_ledger_and_goodput_by_one_voice(
    clean_nats_url: str, database_url: str, client: Client
) -> None:
    """kill -9 of a gateway, with two accountants: one owner_lost row, said once, and windows that know of it."""
    rows = Rows(database_url)
    said: list[GoodputMeasured] = []
    lost: list[OutcomeFinished] = []
    ask = Ask(
        request_id="lost",
        gateway="g",
        gateway_incarnation="i1",
        entry="a",
        entry_zone="eu",
        tenant="acme",
        service_class="chat",
        model_asked="m",
        model="m",
        version="1",
        input_tokens=10,
        received_unix_ms=now_ms(),
        patience_ms=1000.0,
    )
    async with (
        accountant(clean_nats_url, database_url, "one") as one,
        accountant(clean_nats_url, database_url, "two") as two,
    ):

        async def goodput(message: Any) -> None:
            said.append(codec.decode(message.data))  # type: ignore[arg-type]  # the filter admits only these

        async def finished(message: Any) -> None:
            event = codec.decode(message.data)
            if isinstance(event, OutcomeFinished) and event.outcome == "owner_lost":
                lost.append(event)

        await client.subscribe(subject_filter(GoodputMeasured), cb=goodput)
        await client.subscribe(subject_filter(OutcomeFinished), cb=finished)

        async def ready() -> bool:
            return not one.not_ready() and not two.not_ready()

        await until(ready, what="both accountants ready")
        await publish(client, RequestReceived(id="lost:received", site="a", ask=ask))
        listed = OpenRequest(request_id="lost", attempt=1, phase="streaming", booking="lost:assigned:1")
        await publish(
            client,
            GatewayLeased(
                id="l1", time_unix_ms=now_ms(), site="a", gateway="g", gateway_incarnation="i1", revision=1,
                open=(listed,),
            ),
        )  # fmt: skip
        await publish(client, *(outcome(f"r{n}") for n in range(10)))
        await rows.until(11, timeout_s=45)
        assert await rows.fetch("SELECT attempt, outcome, reason, final FROM attempts WHERE request_id = 'lost'") == [
            (1, "owner_lost", "gateway_silent", True)
        ]

        async def told() -> bool:
            last = {(m.site, m.window_s): m for m in said}
            return sum(m.offered for (_, window_s), m in last.items() if window_s == 60) == 11

        await until(told, what="windows that count eleven")
        last = {m.site: m for m in said if m.window_s == 60}
        assert (last["b"].completed, last["b"].compliant, last["b"].compliant_tokens) == (10, 10, 200)
        assert (last[""].failed, last[""].offered) == (1, 1)
        assert len({m.id for m in said}) == len(said)
        assert len(lost) == 1
        # the gateway was only cut off: its true outcome comes after all
        await publish(client, outcome("lost", received_unix_ms=ask.received_unix_ms))

        async def replaced() -> bool:
            return await rows.fetch("SELECT outcome FROM attempts WHERE request_id = 'lost'") == [("completed",)]

        await until(replaced, what="the truth in the ledger")

        async def corrected() -> bool:
            last = {(m.site, m.window_s): m for m in said}
            return last[("b", 60)].completed == 11 and last[("", 60)].offered == 0

        await until(corrected, what="the truth in the windows")


async def test_an_accountant_waits_for_the_schema_and_stops_at_a_newer_one(
    clean_nats_url: str, empty_database_url: str, client: Client, tmp_path: Path
) -> None:
    """Started before the migration it waits; started by an old binary on a newer schema it ends and says so."""
    rows = Rows(empty_database_url)
    async with accountant(clean_nats_url, empty_database_url):
        await publish(client, outcome("r1"))
        await database.migrate(empty_database_url)
        await rows.until(1)
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    await connection.close()
    old = process(clean_nats_url, empty_database_url, tmp_path / "fleet.toml")
    try:
        assert await asyncio.to_thread(old.wait, 45) == 1
    finally:
        old.kill()


async def test_its_own_user_may_do_all_that_it_does(database_url: str, tmp_path: Path) -> None:
    """In production it is no administrator: a missing grant would show as a ledger that stays empty."""
    fleet = parse(FLEET)
    users = nats_users(fleet, {name: f"pw-{name}" for name in user_names(fleet)})
    said = asyncio.Event()

    async def goodput(_message: Any) -> None:
        said.set()

    with NatsServer(tmp_path / "nats", users=[user.entry() for user in users]) as server:
        assert isinstance(server, NatsServer)
        admin = await nats.connect(server.url_for("admin"))
        await admin.subscribe(subject_filter(GoodputMeasured), cb=goodput)
        async with service(server.url_for("admin"), database_url):
            pass  # provisions the streams
        user = {"nats_user": "accountant", "nats_password": "pw-accountant"}
        async with accountant(server.bare_url, database_url, **user) as made:
            await publish(admin, *(outcome(f"r{n}") for n in range(20)))
            await Rows(database_url).until(20)
            await asyncio.wait_for(said.wait(), 40)
            assert made.not_ready() == []
        await admin.close()
