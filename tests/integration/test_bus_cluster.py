"""Three NATS servers that copy to each other: any one of them may die, stop for a while or come back late."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from tests.integration.test_ledger_survives import accountant, equals_oracle, requests, until

from tokenfleet.local.nats import NatsServer, render_config, write_private
from tokenfleet.local.ports import free_ports
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas import codec
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.routes import subject_of


class Member(NatsServer):
    """One server of a cluster."""

    def __init__(self, store: Path, *, name: str, route_port: int, routes: list[int]) -> None:
        super().__init__(store, server_name=name)
        self.route_port, self.routes = route_port, routes

    def prepare(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        # a server's configuration may hold several of NATS' own notation's blocks: JSON is one of them
        config = render_config(**self._config()).rstrip().removesuffix("}").rstrip()
        routes = ", ".join(f'"nats://{self.host}:{port}"' for port in self.routes)
        cluster = f'"cluster": {{"name": "test", "listen": "{self.host}:{self.route_port}", "routes": [{routes}]}}'
        write_private(self._config_file, f"{config},\n{cluster}}}\n")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Member]]:
    """Three servers."""
    ports = free_ports(3)
    members = [
        Member(tmp_path / f"n{number}", name=f"n{number}", route_port=port, routes=ports)
        for number, port in enumerate(ports)
    ]
    # none is healthy before there is a leader, so all at once; a server ends with the thread that started it
    with ThreadPoolExecutor(3) as pool:
        try:
            list(pool.map(lambda one: one.start(timeout_s=90), members))
            yield members
        finally:
            for one in members:
                if one.pid is not None:
                    os.kill(one.pid, signal.SIGCONT)
                one.kill()


@contextlib.asynccontextmanager
async def connected(cluster: list[Member]) -> AsyncIterator[Client]:
    """A client that knows all of them."""
    urls = [one.url for one in cluster]
    client = await nats.connect(urls, reconnect_time_wait=0.2, max_reconnect_attempts=-1, ping_interval=2)
    try:
        yield client
    finally:
        await client.close()


async def leader(client: Client, stream: str = "TF_OUTCOME") -> str:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                info = await client.jetstream().stream_info(stream)
                if info.cluster is not None and info.cluster.leader:
                    return str(info.cluster.leader)
            await asyncio.sleep(0.1)


async def say(client: Client, event: OutcomeFinished, given_up: asyncio.Event) -> None:
    """Until the cluster has it; twice does not matter."""
    while not given_up.is_set():
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            await client.jetstream(timeout=2).publish(subject_of(event), codec.encode(event))
            return
        await asyncio.sleep(0.1)


async def copied(client: Client) -> None:
    """Every stream has three copies, as an operator orders it, and they are in step."""
    stream = client.jetstream()

    async def in_step() -> bool:
        # a cluster that has just lost or found a server says for a while that it is unavailable
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            found = await stream.streams_info()
            for info in found:
                if (info.config.num_replicas or 1) < 3:
                    await stream.update_stream(info.config.evolve(num_replicas=3))
            replicas = [(info.cluster.replicas or []) if info.cluster is not None else [] for info in found]
            return bool(found) and all(len(one) == 2 and all(peer.current for peer in one) for one in replicas)
        return False

    await until(in_step, timeout_s=120, what="copies")


#: what happens to a server, how many times, how long it is away each time
ORDEALS = [("killed", 1, 1.0), pytest.param("killed", 6, 5.0, marks=pytest.mark.soak),
           pytest.param("paused", 1, 90.0, marks=pytest.mark.soak)]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("what", "times", "away_s"), ORDEALS)
async def test_the_ledger_goes_on_when_a_server_of_three_is_away(
    cluster: list[Member], database_url: str, what: str, times: int, away_s: float
) -> None:
    """B01: the server that leads the outcomes is killed, or stands still, while 500 of them a second come. The consumer
    goes on by itself, with a new leader and with the old one back: nothing is lost, nothing twice."""
    rng = random.Random(37)
    truth: list[OutcomeFinished] = []
    saying: set[asyncio.Task[None]] = set()
    over, given_up = asyncio.Event(), asyncio.Event()
    urls = ",".join(one.url for one in cluster)
    async with accountant(urls, database_url, "one") as made, connected(cluster) as client:
        await copied(client)

        def written() -> float:
            return made.metrics.get_sample_value("tokenfleet_ledger_rows_total") or 0.0

        async def speak() -> None:
            # about 500 attempts a second, but no flood of what could not be said meanwhile
            while not over.is_set():
                if len(saying) > 1000:
                    await asyncio.sleep(0.1)
                    continue
                events = requests(rng, f"r{len(truth)}-", 33)
                truth.extend(events)
                for event in events:
                    task = asyncio.create_task(say(client, event, given_up))
                    saying.add(task)
                    task.add_done_callback(saying.discard)
                await asyncio.sleep(0.1)

        async def go_on(after: float) -> None:
            async def more() -> bool:
                return written() > after

            # a server that stands still keeps its connections: they are given up after some missed answers
            await until(more, timeout_s=120, what="rows")

        speaking = asyncio.create_task(speak())
        try:
            await go_on(100)
            for _ in range(times):
                name = await leader(client)
                victim = next(one for one in cluster if one.server_name == name)
                if what == "killed":
                    await asyncio.to_thread(victim.kill)
                else:
                    assert victim.pid is not None
                    os.kill(victim.pid, signal.SIGSTOP)
                # two of three are enough
                begun, before = time.monotonic(), written()
                await go_on(before + 100)
                await asyncio.sleep(max(0.0, away_s - (time.monotonic() - begun)))
                if what == "killed":
                    await asyncio.to_thread(victim.start, timeout_s=90)
                else:
                    os.kill(victim.pid or 0, signal.SIGCONT)
                await copied(client)
                await go_on(written() + 100)
            over.set()
            await speaking
            await asyncio.wait_for(asyncio.gather(*saying), 60)

            async def acknowledged() -> bool:
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                    info = await client.jetstream().consumer_info("TF_OUTCOME", "accountant")
                    return info.num_pending == 0 and info.num_ack_pending == 0
                return False

            await until(acknowledged, timeout_s=60, what="everything acknowledged")
        finally:
            # a failure must not leave writers behind that fill the memory of the tests after it
            over.set()
            given_up.set()
            await cancel_and_wait([speaking, *saying])
    await equals_oracle(database_url, truth)
