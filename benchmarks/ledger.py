"""How many outcomes a second the ledger takes, beside Postgres' own COPY of the same rows.

    python -m benchmarks.ledger [--outcomes 100000] [--repeat-share 0.0] [--rate 5000 --seconds 20]

Two measurements, each on a NATS and a durable Postgres of its own, all on this machine:

- drain: a backlog on the outcome stream, written by one accountant's writer from the first message to an empty
  consumer. `copy` is asyncpg's COPY of the same rows, in batches of the same size, into a table with the same keys: no
  bus, no exactly once, no verdicts. Both are given per second and as CPU per outcome by process, since a busy machine
  halves rates and not CPU. `per_s_on_2_cores` is what that CPU allows on two cores of one's own: limited by both cores
  together, or by the one that the writer's Python has.
- live (with --rate): a whole accountant process, which folds and writes, while outcomes come at a steady rate. The lag
  is sampled every half second; sustained means that it did not grow: all is written within 2 s of the last outcome.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import nats
import psutil
import uvloop
from nats.aio.client import Client

from benchmarks._memory import peak_rss_bytes
from tokenfleet import database
from tokenfleet.accountant import partitions, store
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.accountant.service import Writer
from tokenfleet.accountant.settings import CONSUMER, AccountantSettings
from tokenfleet.fleet import parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.local.postgres import PostgresServer
from tokenfleet.local.processes import Command, spawn, stop
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas import codec
from tokenfleet_schemas.outcome import OutcomeFinished, Times
from tokenfleet_schemas.routes import stream_of, subject_of

GOAL_PER_S = 5_000.0
FLEET = b"""
[fleet]
name = "bench"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 100000
[classes.chat]
ttft_ms = 500
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""


def outcome(rng: random.Random) -> OutcomeFinished:
    """One of many tenants' outcomes, as wide as real ones are."""
    request_id = "req-" + secrets.token_hex(12)
    ttft_ms, tpot_ms, tokens = rng.lognormvariate(5, 0.7), rng.lognormvariate(2.5, 0.3), rng.randint(1, 600)
    e2e_ms = ttft_ms + tpot_ms * tokens
    now_ms = int(time.time() * 1000)
    return OutcomeFinished(
        id=f"{request_id}:finished:1",
        site="a",
        time_unix_ms=now_ms,
        request_id=request_id,
        attempt=1,
        final=True,
        outcome="completed",
        status=200,
        gateway="gateway-a-1",
        gateway_incarnation="5f1c2b7a9e",
        tenant=f"tenant-{rng.randint(1, 20)}",
        service_class="chat",
        model_asked="m",
        model="m",
        version="1",
        model_served="m",
        served_site="b",
        instance=f"b{rng.randint(1, 8)}",
        booking=f"{request_id}:assigned:1:1:7",
        stream=True,
        input_tokens=rng.randint(50, 4000),
        output_tokens=tokens,
        cached_tokens=rng.randint(0, 2000),
        usage_source="engine",
        request_bytes=4_000,
        response_bytes=200 * tokens,
        received_unix_ms=now_ms - int(e2e_ms),
        times=Times(queue_ms=3.2, first_byte_ms=ttft_ms - 1, ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms),
        predicted_ttft_ms=ttft_ms * rng.uniform(0.7, 1.3),
        predicted_tpot_ms=tpot_ms,
        ttft_objective_ms=500.0,
        tpot_objective_ms=50.0,
        finish_reason="stop",
    )


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, those that ended included."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Servers:
    """A NATS and a migrated Postgres."""

    def __init__(self, nats_server: NatsServer, postgres: PostgresServer) -> None:
        self.nats, self.postgres = nats_server, postgres

    def cpu(self) -> dict[str, float]:
        """So far, by process; `writer` is this one."""
        assert self.nats.pid is not None
        assert self.postgres.pid is not None
        return {
            "writer": time.process_time(),
            "postgres": cpu_s(self.postgres.pid),
            "nats": cpu_s(self.nats.pid),
        }


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    with (
        tempfile.TemporaryDirectory(prefix="tokenfleet-bench-") as root,
        NatsServer(Path(root) / "nats") as bus,
        PostgresServer(Path(root) / "postgres") as postgres,
    ):
        assert isinstance(bus, NatsServer)
        assert isinstance(postgres, PostgresServer)
        await database.migrate(postgres.url)
        yield Servers(bus, postgres)


async def publish(client: Client, events: list[OutcomeFinished], *, per_s: float = 0.0) -> None:
    """Into the stream; at a steady rate if one is given."""
    begun = time.monotonic()
    for number, event in enumerate(events):
        await client.publish(subject_of(event), codec.encode(event))
        if number % 256 == 255:
            await client.flush(timeout=60)
            ahead_s = (number + 1) / per_s - (time.monotonic() - begun) if per_s else 0.0
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
    await client.flush(timeout=60)


async def poll(check: Callable[[], Awaitable[bool]], every_s: float) -> None:
    """Wait for what other processes do and nobody announces."""
    while True:
        if await check():
            return
        await asyncio.sleep(every_s)


async def stored(client: Client, count: int) -> bool:
    """Whether the stream has them."""
    return (await client.jetstream().stream_info(stream_of(OutcomeFinished))).state.messages >= count


async def owed(client: Client) -> int:
    """Outcomes that the consumer has not had acknowledged."""
    info = await client.jetstream().consumer_info(stream_of(OutcomeFinished), CONSUMER)
    return (info.num_pending or 0) + (info.num_ack_pending or 0)


async def drain(count: int, repeat_share: float, settings: AccountantSettings) -> dict[str, Any]:
    """One writer against a backlog."""
    rng = random.Random(1)
    async with servers() as at:
        fleet = Path(at.nats.log).parent / "fleet.toml"
        fleet.write_bytes(FLEET)
        made = Service("accountant", Settings(nats_url=at.nats.url, fleet=str(fleet)), parse(FLEET))
        await made.start()
        client = await nats.connect(at.nats.url)
        events = [outcome(rng) for _ in range(count)]
        deliveries = events + rng.choices(events, k=int(count * repeat_share))
        await publish(client, deliveries)
        await poll(lambda: stored(client, len(deliveries)), 0.05)
        await asyncio.sleep(1.0)
        engine = database.create_engine(at.postgres.url, pool_size=settings.pool_size, pre_ping=False)
        await partitions.ensure(engine)
        writer = Writer(made, engine, OutputMedian(), settings)
        before, rss = at.cpu(), psutil.Process().memory_info().rss
        begun = time.monotonic()
        running = asyncio.create_task(writer.run())

        async def drained() -> bool:
            return await written(at.postgres.url, count) and not await owed(client)

        await poll(drained, 0.1)
        took_s = time.monotonic() - begun
        after = at.cpu()
        grown = max(0, peak_rss_bytes() - rss)
        made.stopping.set()
        await running
        await client.close()
        await made.close()
        await engine.dispose()
        copied = await copy(at, events, settings.batch_rows_max)
    cpu_us = {name: round((after[name] - before[name]) / len(deliveries) * 1e6, 1) for name in after}
    return {
        "outcomes": len(deliveries),
        "rows": count,
        "per_s": round(len(deliveries) / took_s, 1),
        "cpu_us_per_outcome": cpu_us,
        "per_s_on_2_cores": round(min(2e6 / sum(cpu_us.values()), 1e6 / cpu_us["writer"]), 1),
        "memory_grown_mib": round(grown / 2**20, 1),
        "copy": copied,
        "ratio_to_copy": round(len(deliveries) / took_s / copied["per_s"], 3),
    }


async def written(url: str, count: int) -> bool:
    """Whether all rows are there; counted by the sum of the partitions' statistics would be late, so really counted."""
    connection = await asyncpg.connect(url)
    try:
        return bool(await connection.fetchval("SELECT count(*) FROM attempts") >= count)
    finally:
        await connection.close()


async def copy(at: Servers, events: list[OutcomeFinished], batch: int) -> dict[str, Any]:
    """The least that Postgres must do for these rows."""
    medians = OutputMedian()
    names = store.Row.__struct_fields__
    records = [tuple(getattr(store.row_of(event, medians), name) for name in names) for event in events]
    connection = await asyncpg.connect(at.postgres.url)
    await connection.execute("CREATE TABLE copied (LIKE attempts)")
    await connection.execute("ALTER TABLE copied ALTER recorded_at DROP NOT NULL")
    await connection.execute("ALTER TABLE copied ADD PRIMARY KEY (request_id, attempt)")
    await connection.execute("CREATE UNIQUE INDEX ON copied (request_id) WHERE final")
    await connection.execute("CREATE INDEX ON copied (finished_at)")
    before, begun = at.cpu(), time.monotonic()
    for start in range(0, len(records), batch):
        await connection.copy_records_to_table("copied", records=records[start : start + batch], columns=names)
    took_s, after = time.monotonic() - begun, at.cpu()
    await connection.close()
    return {
        "per_s": round(len(records) / took_s, 1),
        "cpu_us_per_outcome": {
            name: round((after[name] - before[name]) / len(records) * 1e6, 1) for name in ("writer", "postgres")
        },
    }


async def live(per_s: float, seconds: float) -> dict[str, Any]:
    """A whole accountant under a steady rate."""
    rng = random.Random(2)
    async with servers() as at:
        root = Path(at.nats.log).parent
        (root / "fleet.toml").write_bytes(FLEET)
        environ = {
            "TOKENFLEET_NATS_URL": at.nats.url,
            "TOKENFLEET_POSTGRES_URL": at.postgres.url,
            "TOKENFLEET_FLEET": str(root / "fleet.toml"),
        }
        command = Command(argv=(sys.executable, "-m", "tokenfleet.cli", "run", "accountant"), env=os.environ | environ)
        process = spawn(command, root / "accountant.log")
        client = await nats.connect(at.nats.url)
        try:
            while True:
                with contextlib.suppress(nats.js.errors.Error):
                    await owed(client)
                    break
                await asyncio.sleep(0.2)
            events = [outcome(rng) for _ in range(int(per_s * seconds))]
            before = at.cpu() | {"accountant": cpu_s(process.pid)}
            begun = time.monotonic()
            publishing = asyncio.create_task(publish(client, events, per_s=per_s))
            lag: list[int] = []
            while not publishing.done():
                await asyncio.sleep(0.5)
                lag.append(await owed(client))
            await publishing
            offered_s = time.monotonic() - begun
            await poll(lambda: written(at.postgres.url, len(events)), 0.1)
            behind_s = time.monotonic() - begun - offered_s
            after = at.cpu() | {"accountant": cpu_s(process.pid)}
            memory = psutil.Process(process.pid).memory_info().rss
        finally:
            await client.close()
            stop(process, command)
    cpu_us = {name: round((after[name] - before[name]) / len(events) * 1e6, 1) for name in after if name != "writer"}
    return {
        "outcomes": len(events),
        "asked_per_s": per_s,
        "offered_per_s": round(len(events) / offered_s, 1),
        "behind_s": round(behind_s, 2),
        "sustained": behind_s <= 2.0,
        "lag_outcomes": {"max": max(lag, default=0), "half": lag[len(lag) // 2] if lag else 0, "last": lag[-1]},
        "cpu_us_per_outcome": cpu_us,
        "accountant_memory_mib": round(memory / 2**20, 1),
    }


def main() -> int:
    """Run it; 0 the goal is met, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--outcomes", type=int, default=100_000, help="of the backlog (default 100000); 0: no drain")
    parser.add_argument("--repeat-share", type=float, default=0.0, help="of the backlog delivered twice (default 0)")
    parser.add_argument("--rate", type=float, default=0.0, help="outcomes per second of the live run; default: none")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the live run (default 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    met = True
    if args.outcomes:
        result["drain"] = found = uvloop.run(drain(args.outcomes, args.repeat_share, AccountantSettings()))
        met = max(found["per_s"], found["per_s_on_2_cores"]) >= GOAL_PER_S
    if args.rate:
        result["live"] = uvloop.run(live(args.rate, args.seconds))
        met = met and result["live"]["sustained"]
    print(json.dumps(result, indent=None if args.json else 2))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
