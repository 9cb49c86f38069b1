"""Whatever breaks, the ledger equals the oracle row by row, and the windows equal the ledger."""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import asyncpg
import nats
import nats.errors
import nats.js.errors
import prometheus_client
import pytest
from nats.aio.client import Client

from tokenfleet import database
from tokenfleet.accountant import partitions, store
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.accountant.service import Writer, run
from tokenfleet.accountant.settings import AccountantSettings
from tokenfleet.accountant.sketch import RELATIVE_ERROR
from tokenfleet.fleet import parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.local.postgres import PostgresServer
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas import codec
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.outcome import Outcome, OutcomeFinished, Times
from tokenfleet_schemas.routes import subject_filter, subject_of

FLEET = b"""
[fleet]
name = "test"
default_class = "chat"
# the two short ones tile time in the test's own time; the long one keeps what comes late
windows_s = [4, 10, 300]
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
#: depend on what the writer had learned by then
LEARNED = ("offered_output_tokens", "offered_estimated")
FACTS = tuple(name for name in store.Row.__struct_fields__ if name not in LEARNED)
OUTCOMES: tuple[Outcome, ...] = (
    "completed", "completed", "completed", "completed", "refused", "cancelled", "failed", "failed_midstream",
)  # fmt: skip
soak = pytest.mark.soak


def outcome(rng: random.Random, request_id: str, received_ms: int, attempt: int, *, final: bool) -> OutcomeFinished:
    """Any outcome that a gateway may report."""
    what = rng.choice(OUTCOMES) if final else "failed"
    served = what not in ("refused",)
    tokens = rng.randint(0, 200) if what in ("completed", "cancelled", "failed_midstream") else 0
    ttft_ms = rng.uniform(20, 900) if tokens else None
    tpot_ms = rng.uniform(5, 40) if tokens > 1 else None
    e2e_ms = (ttft_ms or 5.0) + (tpot_ms or 0.0) * tokens
    return OutcomeFinished(
        id=f"{request_id}:finished:{attempt}",
        site="a",
        time_unix_ms=int(time.time() * 1000),
        request_id=request_id,
        attempt=attempt,
        final=final,
        outcome=what,
        gateway="g",
        gateway_incarnation="i1",
        tenant=rng.choice(("acme", "other")),
        service_class=rng.choice(("chat", "batch")),
        model_asked="m",
        model="m",
        version="1",
        served_site="b" if served else "",
        instance="b1" if served else "",
        input_tokens=rng.randint(1, 999),
        output_tokens=tokens,
        received_unix_ms=received_ms,
        times=Times(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms),
        predicted_ttft_ms=None if rng.random() < 0.2 else rng.uniform(20, 900),
        ttft_objective_ms=500.0,
    )


def requests(rng: random.Random, prefix: str, count: int) -> list[OutcomeFinished]:
    """Outcomes of requests, some of which needed several attempts."""
    events = []
    for number in range(count):
        attempts = rng.choice((1, 1, 1, 1, 2, 3))
        # whatever its length, it has ended by now
        received_ms = int(time.time() * 1000) - rng.randint(9_000, 20_000)
        events += [
            outcome(rng, f"{prefix}{number}", received_ms, attempt, final=attempt == attempts)
            for attempt in range(1, attempts + 1)
        ]
    return events


def repeated(rng: random.Random, events: Iterable[OutcomeFinished]) -> list[OutcomeFinished]:
    """Each one to five times, shuffled."""
    deliveries = [event for event in events for _ in range(rng.randint(1, 5))]
    rng.shuffle(deliveries)
    return deliveries


async def fetch(url: str, query: str, *values: Any) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(query, *values))
    finally:
        await connection.close()


async def equals_oracle(url: str, truth: Iterable[OutcomeFinished]) -> None:
    """Every row, every fact: nothing lost, nothing twice, nothing changed, nothing in quarantine."""
    wanted = {}
    for event in truth:
        row = store.row_of(event, OutputMedian())
        wanted[row.key] = {name: getattr(row, name) for name in FACTS}
    rows = await fetch(url, f"SELECT {', '.join(FACTS)} FROM attempts")
    found = {(row["request_id"], row["attempt"]): dict(row) for row in rows}
    assert len(rows) == len(found)
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        assert found[key] == row
    assert await fetch(url, "SELECT * FROM ledger_contradictions") == []
    assert await fetch(url, "SELECT * FROM quarantine") == []


async def until(check: Callable[[], Awaitable[bool]], *, timeout_s: float = 45.0, what: str = "it") -> None:
    """Poll what cannot be awaited: another process's rows."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await check():
        assert loop.time() < end, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.05)


async def drained(nats_url: str, *, timeout_s: float = 60.0) -> None:
    """Until the consumer has everything acknowledged."""
    client = await nats.connect(nats_url)
    try:

        async def empty() -> bool:
            with contextlib.suppress(nats.js.errors.Error, nats.errors.Error, TimeoutError):
                info = await client.jetstream().consumer_info("TF_OUTCOME", "accountant")
                return info.num_pending == 0 and info.num_ack_pending == 0
            return False

        await until(empty, timeout_s=timeout_s, what="everything acknowledged")
    finally:
        await client.close()


async def publish(client: Client, events: Iterable[OutcomeFinished], *, per_s: float = 0.0) -> None:
    """Into the stream, each acknowledged, without ids, so that its duplicate window cannot help."""
    stream = client.jetstream(timeout=10)
    events = list(events)
    size = max(1, int(per_s / 10)) if per_s else 256
    for start in range(0, len(events), size):
        await asyncio.gather(
            *(stream.publish(subject_of(event), codec.encode(event)) for event in events[start : start + size])
        )
        if per_s:
            await asyncio.sleep(size / per_s)


@contextlib.asynccontextmanager
async def service(
    nats_url: str, postgres_url: str, name: str = "accountant", replica: str = ""
) -> AsyncIterator[Service]:
    settings = Settings(nats_url=nats_url, postgres_url=postgres_url, replica=replica, fleet="/nonexistent")
    made = Service(name, settings, parse(FLEET))
    await made.start()
    try:
        yield made
    finally:
        made.stopping.set()
        await made.close()


@contextlib.asynccontextmanager
async def accountant(nats_url: str, postgres_url: str, replica: str) -> AsyncIterator[Service]:
    """A whole accountant in this process."""
    async with service(nats_url, postgres_url, replica=replica) as made:
        running = asyncio.create_task(run(made))
        try:
            yield made
        finally:
            made.stopping.set()
            await asyncio.wait_for(running, 45)


@pytest.fixture
async def client(clean_nats_url: str) -> AsyncIterator[Client]:
    made = await nats.connect(clean_nats_url)
    yield made
    await made.close()


class Crash(BaseException):
    """kill -9 at a chosen moment."""


@dataclasses.dataclass
class Crashes:
    """The `committed` hook of writers: every second commit is a writer's last."""

    left: int
    commits: int = 0

    async def committed(self) -> None:
        self.commits += 1
        if self.left and self.commits % 2:
            self.left -= 1
            raise Crash


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1500, pytest.param(7000, marks=soak)])  # requests; half as many attempts more
async def test_a_hundred_crashes_between_commit_and_acknowledgement(
    clean_nats_url: str, database_url: str, client: Client, count: int
) -> None:
    """L07: four writers die a hundred times after committing, before acknowledging, while each outcome comes one to
    five times in any order: every row is there once and as the gateway said."""
    rng = random.Random(11)
    truth = requests(rng, "r", count)
    crashes = Crashes(left=100)
    settings = AccountantSettings(ack_wait_s=1.0, batch_rows_min=20, batch_rows_max=20, batch_wait_s=0.05)
    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(service(clean_nats_url, database_url)) for _ in range(4)]
        engines = [database.create_engine(database_url) for _ in services]
        await partitions.ensure(engines[0])

        async def worker(number: int) -> None:
            while not services[number].stopping.is_set():
                services[number].metrics = prometheus_client.CollectorRegistry()
                writer = Writer(services[number], engines[number], OutputMedian(), settings)
                writer.committed = crashes.committed
                with contextlib.suppress(Crash):
                    await writer.run()

        workers = [asyncio.create_task(worker(number)) for number in range(4)]
        try:
            await publish(client, repeated(rng, truth))
            await drained(clean_nats_url, timeout_s=300)
        finally:
            for one in services:
                one.stopping.set()
            await asyncio.gather(*workers)
            for engine in engines:
                await engine.dispose()
    assert crashes.left == 0
    await equals_oracle(database_url, truth)


def process(nats_url: str, postgres_url: str, fleet: Path) -> "subprocess.Popen[bytes]":
    """An accountant as a process of its own."""
    fleet.write_bytes(FLEET)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tokenfleet.cli", "run", "accountant"],
        env=clean
        | {"TOKENFLEET_NATS_URL": nats_url, "TOKENFLEET_POSTGRES_URL": postgres_url, "TOKENFLEET_FLEET": str(fleet)},
    )


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=soak)])
async def test_kill_9_while_it_writes(
    clean_nats_url: str, database_url: str, client: Client, tmp_path: Path, kills: int
) -> None:
    """The process itself is killed in the middle of its work, over and over; its successor finishes everything."""
    rng = random.Random(13)
    truth: list[OutcomeFinished] = []
    running = process(clean_nats_url, database_url, tmp_path / "fleet.toml")
    try:
        async with service(clean_nats_url, database_url, name="gateway"):
            pass  # streams are there
        for number in range(kills):
            events = requests(rng, f"k{number}-", 60)
            truth += events
            before = len(await fetch(database_url, "SELECT 1 FROM attempts"))
            await publish(client, repeated(rng, events))

            async def writing(before: int = before) -> bool:
                return len(await fetch(database_url, "SELECT 1 FROM attempts")) > before

            await until(writing, timeout_s=90, what="rows")
            await asyncio.sleep(rng.random() * 0.2)
            running.send_signal(signal.SIGKILL)
            await asyncio.to_thread(running.wait)
            running = process(clean_nats_url, database_url, tmp_path / "fleet.toml")
        # what the dead had in hand comes again after the acknowledgement time
        await drained(clean_nats_url, timeout_s=90)
    finally:
        running.terminate()
        await asyncio.to_thread(running.wait, 45)
    await equals_oracle(database_url, truth)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=soak)])
async def test_postgres_is_down_while_outcomes_come(
    clean_nats_url: str, client: Client, postgres_server: PostgresServer, seconds: int
) -> None:
    """B05: no database for a while. Outcomes wait on the bus, readiness says so, nobody else is held up."""
    await database.migrate(postgres_server.url)
    rng = random.Random(17)
    truth = requests(rng, "r", 20 * seconds)
    async with accountant(clean_nats_url, postgres_server.url, "one") as made:
        await publish(client, truth[:100])
        await drained(clean_nats_url)
        await asyncio.to_thread(postgres_server.kill)
        begun = time.monotonic()
        await publish(client, truth[100:], per_s=20)
        assert "ledger" in made.not_ready()
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        await asyncio.to_thread(postgres_server.start)
        await drained(clean_nats_url)
        assert "ledger" not in made.not_ready()
    await equals_oracle(postgres_server.url, truth)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=soak)])
async def test_a_gateways_outbox_outlives_an_outage_of_the_bus(
    nats_server: NatsServer, database_url: str, seconds: int
) -> None:
    """The bus is away while requests end: the gateway keeps their outcomes and says them when it is back."""
    rng = random.Random(19)
    truth = requests(rng, "before", 50)
    async with (
        service(nats_server.url, database_url, name="gateway") as gateway,
        accountant(nats_server.url, database_url, "one"),
    ):
        for event in truth:
            gateway.bus.outbox.put(event)
        await asyncio.wait_for(gateway.bus.outbox.drained(), 45)
        await asyncio.to_thread(nats_server.kill)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            events = requests(rng, f"during{len(truth)}-", 5)
            truth += events
            for event in events:
                gateway.bus.outbox.put(event)
            await asyncio.sleep(0.25)
        assert gateway.bus.outbox.pending > 0
        await asyncio.to_thread(nats_server.start)
        await asyncio.wait_for(gateway.bus.outbox.drained(), 45)
        await drained(nats_server.url)
    await equals_oracle(database_url, truth)


@pytest.mark.timeout(300)
async def test_a_full_stream_loses_no_outcome(nats_server: NatsServer, database_url: str) -> None:
    """B06: the stream of outcomes is full and refuses. The gateway keeps what was refused until there is room again."""
    rng = random.Random(31)
    truth = requests(rng, "r", 300)
    async with (
        service(nats_server.url, database_url, name="gateway") as gateway,
        accountant(nats_server.url, database_url, "one"),
    ):
        stream = gateway.bus.js
        config = (await stream.stream_info("TF_OUTCOME")).config
        size = config.max_bytes
        config.max_bytes = 100_000
        await stream.update_stream(config)
        for event in truth:
            gateway.bus.outbox.put(event)

        async def refused() -> bool:
            return gateway.bus.outbox.retried > 0

        await until(refused, what="a refusal")
        await asyncio.sleep(1)
        pending = gateway.bus.outbox.pending
        assert 0 < pending < len(truth)
        config.max_bytes = size
        await stream.update_stream(config)
        await asyncio.wait_for(gateway.bus.outbox.drained(), 45)
        await drained(nats_server.url)
    await equals_oracle(database_url, truth)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=soak)])
async def test_a_locked_ledger_holds_up_nobody_and_takes_no_connections(
    clean_nats_url: str, database_url: str, client: Client, seconds: int
) -> None:
    """L04: a lock on the table while 200 outcomes a second come: bounded connections, then the backlog drains."""
    rng = random.Random(23)
    truth = requests(rng, "r", 100 * seconds)
    async with accountant(clean_nats_url, database_url, "locked"):
        await publish(client, truth[:20])
        await drained(clean_nats_url)
        blocker = await asyncpg.connect(database_url)
        transaction = blocker.transaction()
        await transaction.start()
        await blocker.execute("LOCK TABLE attempts IN ACCESS EXCLUSIVE MODE")
        sessions = 0

        async def watch() -> None:
            nonlocal sessions
            while True:
                found = await blocker.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tokenfleet-accountant%'"
                    " AND datname = current_database()"
                )
                sessions = max(sessions, found)
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        begun = time.monotonic()
        await publish(client, truth[20:], per_s=200)
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await transaction.rollback()
        await blocker.close()
        released = time.monotonic()
        await drained(clean_nats_url, timeout_s=120)
        assert time.monotonic() - released < 120
    assert 0 < sessions <= AccountantSettings().pool_size
    await equals_oracle(database_url, truth)


COUNTED = ("offered", "completed", "compliant", "refused", "cancelled", "failed", "repeated", "output_tokens",
           "compliant_tokens", "predicted")  # fmt: skip


#: lengths of the fleet file's windows that are compared with the ledger, s
TILES_S = (4, 10)


@pytest.mark.timeout(600)
async def test_windows_and_ledger_agree_after_chaos(
    nats_server: NatsServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """Both servers are killed, the speaking accountant too, outcomes come late, several times and in any order: the
    windows that tile time equal SQL over the ledger in every count and sum, and their percentiles within the error."""
    rng = random.Random(29)
    await database.migrate(postgres_server.url)
    truth: list[OutcomeFinished] = []
    pending: list[OutcomeFinished] = []

    async def say(client: Client, count: int, *, keep_back: float = 0.3) -> None:
        """Some of the new outcomes stay behind for later."""
        events = requests(rng, f"r{len(truth)}-", count)
        truth.extend(events)
        late = {event.id for event in events if rng.random() < keep_back}
        pending.extend(repeated(rng, [event for event in events if event.id in late]))
        await publish(client, repeated(rng, [event for event in events if event.id not in late]))

    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(accountant(nats_server.url, postgres_server.url, "first"))

        async def speaking() -> bool:
            return bool(first.metrics.get_sample_value("tokenfleet_accountant_in_office"))

        await until(speaking, timeout_s=90, what="the first accountant in office")
        second = process(nats_server.url, postgres_server.url, tmp_path / "fleet.toml")
        stack.callback(second.wait)
        stack.callback(second.kill)
        client = await nats.connect(nats_server.url)
        for _ in range(4):
            await say(client, 60)
            await asyncio.sleep(1)

        async def heard() -> bool:
            return bool(await said_last(nats_server.url))

        await until(heard, timeout_s=90, what="words of the first accountant")
        await client.close()
        await asyncio.to_thread(nats_server.kill)
        await asyncio.sleep(2)
        await asyncio.to_thread(nats_server.start)
        client = await nats.connect(nats_server.url)
        await say(client, 60)
        await asyncio.to_thread(postgres_server.kill)
        await say(client, 60)
        # the one that spoke is gone, the other takes the office over within the lease's time
        await stack.enter_async_context(accountant(nats_server.url, postgres_server.url, "third"))
        first.stopping.set()
        await asyncio.to_thread(postgres_server.start)
        for _ in range(4):
            await say(client, 40)
            await asyncio.sleep(1)
        second.kill()
        await publish(client, pending)
        for _ in range(3):
            await say(client, 20, keep_back=0.0)
            await asyncio.sleep(1)
        # the killed process held some; its share comes again after the acknowledgement time
        await drained(nats_server.url, timeout_s=120)
        await client.close()
        await equals_oracle(postgres_server.url, truth)
        await agree(nats_server.url, postgres_server.url, timeout_s=120)


async def agree(nats_url: str, postgres_url: str, *, timeout_s: float) -> None:
    """Every window that tiles time, against SQL. The last are said as much as their length after the last outcome, by
    whoever has the office by then: what is waited for is that they agree, and the limit is for when they never do."""
    end = time.monotonic() + timeout_s
    while True:
        last = await said_last(nats_url)
        heard = list(last.values())
        wrong = await differences(postgres_url, last)
        if not wrong or time.monotonic() > end:
            assert wrong == []
            # the comparison had something to compare, and late events were among it
            assert len(heard) - len(last) >= 20
            assert any(said.revision > 0 for said in heard)
            assert len({said.term for said in heard}) >= 2
            return
        await asyncio.sleep(1)


async def said_last(nats_url: str) -> dict[tuple[Any, ...], GoodputMeasured]:
    """The last word on every window, from the stream."""
    client = await nats.connect(nats_url)
    last: dict[tuple[Any, ...], GoodputMeasured] = {}
    try:
        info = await client.jetstream().stream_info("TF_GOODPUT")
        subscription = await client.jetstream().pull_subscribe(subject_filter(GoodputMeasured), stream="TF_GOODPUT")
        seen = 0
        while seen < info.state.messages:
            for message in await subscription.fetch(500, timeout=5):
                seen += 1
                event = codec.decode(message.data)
                assert isinstance(event, GoodputMeasured)
                group = (event.service_class, event.tenant, event.model, event.site)
                key = (*group, event.window_s, event.window_end_unix_ms)
                known = last.get(key)
                if known is None or (event.term, event.revision) > (known.term, known.revision):
                    last[key] = event
    finally:
        await client.close()
    return last


async def differences(postgres_url: str, last: dict[tuple[Any, ...], GoodputMeasured]) -> list[str]:
    wrong = []
    for window_s in TILES_S:
        rows = await fetch(
            postgres_url,
            """
            SELECT service_class, tenant, model, served_site, window_end,
                count(*) FILTER (WHERE final) AS offered,
                count(*) FILTER (WHERE final AND outcome = 'completed') AS completed,
                count(*) FILTER (WHERE compliant) AS compliant,
                count(*) FILTER (WHERE final AND outcome = 'refused') AS refused,
                count(*) FILTER (WHERE final AND outcome = 'cancelled') AS cancelled,
                count(*) FILTER (WHERE final AND outcome IN ('failed', 'failed_midstream')) AS failed,
                count(*) FILTER (WHERE NOT final) AS repeated,
                sum(output_tokens)::bigint AS output_tokens,
                coalesce(sum(output_tokens) FILTER (WHERE compliant), 0)::bigint AS compliant_tokens,
                count(*) FILTER (WHERE final AND ttft_ms IS NOT NULL AND predicted_ttft_ms IS NOT NULL) AS predicted,
                count(ttft_ms) FILTER (WHERE final) AS ttft_count,
                percentile_disc(ARRAY[0.5, 0.9, 0.95, 0.99]) WITHIN GROUP (ORDER BY ttft_ms) FILTER (WHERE final)
                    AS ttft,
                coalesce(sum(wasted_tokens), 0)::bigint AS wasted
            FROM attempts, LATERAL (
                SELECT (ceil(extract(epoch FROM finished_at) / $1::int) * $1::int * 1000)::bigint AS window_end
            ) AS tiles
            GROUP BY 1, 2, 3, 4, 5
            """,
            window_s,
        )
        for row in rows:
            key = (row["service_class"], row["tenant"], row["model"], row["served_site"], window_s, row["window_end"])
            said = last.pop(key, None)
            if said is None:
                wrong.append(f"{key} was never said")
                continue
            wrong += [f"{key}: {name} {getattr(said, name)}, {row[name]}" for name in COUNTED
                      if getattr(said, name) != row[name]]  # fmt: skip
            if sum(said.wasted_tokens.values()) != row["wasted"] or said.ttft_ms.count != row["ttft_count"]:
                wrong.append(f"{key}: waste or first tokens")
            for found, exact in zip(
                (said.ttft_ms.p50, said.ttft_ms.p90, said.ttft_ms.p95, said.ttft_ms.p99),
                row["ttft"] or [],
                strict=False,
            ):
                if found is None or abs(found - exact) > RELATIVE_ERROR * exact + 0.001:
                    wrong.append(f"{key}: percentile {found}, {exact}")
    # what the ledger does not have was taken back or is empty
    tiling = {key: said for key, said in last.items() if key[4] in TILES_S and key[5] % (key[4] * 1000) == 0}
    return wrong + [f"{key} is not in the ledger" for key, said in tiling.items() if said.offered or said.repeated]
