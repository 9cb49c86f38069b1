"""The bus on a real NATS: order, gaps, restarts, offices, the outbox, the runner."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest
from tests.e2e.running import patience

from tokenfleet.effects import Effect, Publish, WakeAt
from tokenfleet.local.nats import NatsServer
from tokenfleet.runtime import direct, ownership
from tokenfleet.runtime.bus import Bus, BusDown
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.ownership import Lease
from tokenfleet.runtime.runner import Read, Runner
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import Settings
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas.capacity import CapacityProbed
from tokenfleet_schemas.codec import encode
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.placement import PlacementOwned, PlacementWithdrawn
from tokenfleet_schemas.routes import subject_filter, subject_of
from tokenfleet_schemas.streams import STREAMS

PLACEMENT = subject_filter("placement")


def withdrawn(number: int, site: str = "b") -> PlacementWithdrawn:
    """A small placement event."""
    return PlacementWithdrawn(
        id=f"w{number}",
        site=site,
        request_id=f"r{number}",
        gateway="g",
        model="m",
        version="1",
        attempt=1,
        revision=number,
        moved_to="c",
    )


async def until(check: Callable[[], bool], timeout_s: float = 40.0) -> None:
    """Wait for a condition that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


@pytest.fixture
async def bus(clean_nats_url: str) -> AsyncIterator[Bus]:
    """A provisioned bus on the shared server."""
    async with connected(clean_nats_url) as made:
        yield made


class connected:
    """`async with connected(url) as bus`."""

    def __init__(self, url: str, name: str = "test") -> None:
        self.bus = Bus(Settings(nats_url=url), Clock(), name)

    async def __aenter__(self) -> Bus:
        await self.bus.connect(patience_s=40)
        await self.bus.provision()
        return self.bus

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()


async def test_a_reader_gets_what_was_kept_and_what_comes_in_order(bus: Bus) -> None:
    """A service that starts late must see the same stream as one that was there."""
    for number in range(50):
        bus.publish(withdrawn(number))
    await bus.publish_acked(withdrawn(50))
    seen: list[int] = []
    reader = await bus.read(PLACEMENT, lambda e, _now: seen.append(e.revision), stream="TF_PLACEMENT")  # type: ignore[attr-defined]
    await asyncio.wait_for(reader.caught_up.wait(), 40)
    await bus.publish_acked(withdrawn(51))
    await until(lambda: len(seen) >= 52)
    assert seen == list(range(52))


async def test_a_reader_of_new_messages_sees_no_old_ones(bus: Bus) -> None:
    """A gateway that starts must not dispatch what its predecessor was assigned."""
    await bus.publish_acked(withdrawn(1))
    seen: list[str] = []
    reader = await bus.read(PLACEMENT, lambda e, _now: seen.append(e.id), stream="TF_PLACEMENT", since_s=0)
    assert reader.caught_up.is_set()
    await bus.publish_acked(withdrawn(2))
    await until(lambda: bool(seen))
    assert seen == ["w2"]


async def test_a_filter_takes_only_its_site(bus: Bus) -> None:
    """A TokenPilot reads its own site's placements and pays for no other's."""
    seen: list[str] = []
    await bus.read(
        subject_filter("placement", site="c"), lambda e, _now: seen.append(e.id), stream="TF_PLACEMENT", since_s=0
    )
    bus.publish(withdrawn(1, site="b"))
    bus.publish(withdrawn(2, site="c"))
    await bus.publish_acked(withdrawn(3, site="b"))
    await until(lambda: bool(seen))
    assert seen == ["w2"]


async def test_the_last_value_of_every_subject_reaches_a_late_joiner(bus: Bus) -> None:
    """The fleet's capacity must be known to a service that starts between two reports."""
    for revision in range(5):
        for other in ("c", "d"):
            await bus.publish_acked(
                CapacityProbed(id=f"{other}{revision}", site="b", other_site=other, revision=revision)
            )
    seen: list[str] = []
    reader = await bus.read(
        subject_filter(CapacityProbed), lambda e, _now: seen.append(e.id), stream="TF_CAPACITY", latest=True
    )
    await asyncio.wait_for(reader.caught_up.wait(), 40)
    assert sorted(seen) == ["c4", "d4"]


async def test_poison_on_a_stream_is_skipped_and_counted(bus: Bus) -> None:
    """One message of a newer version or plain garbage must not stop the others."""
    seen: list[str] = []
    reader = await bus.read(PLACEMENT, lambda e, _now: seen.append(e.id), stream="TF_PLACEMENT", since_s=0)
    subject = subject_of(withdrawn(1))
    await bus.js.publish(subject, b'{"type":"tokenfleet.placement.v9.withdrawn"}')
    await bus.js.publish(subject, b"\xff\xfe not json")
    await bus.publish_acked(withdrawn(7))
    await until(lambda: bool(seen))
    assert (seen, reader.undecodable) == (["w7"], 2)


async def test_with_another_nats_py_the_public_ways_do(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgraded client library without the inner parts that the short way leans on costs time, not messages."""
    monkeypatch.setattr(direct, "DIRECT", False)
    async with connected(bus.settings.nats_url, "other") as other:
        seen: list[int] = []
        await other.read(PLACEMENT, lambda e, _now: seen.append(e.revision), stream="TF_PLACEMENT", since_s=0)  # type: ignore[attr-defined]
        for number in range(20):
            other.publish(withdrawn(number))
        await other.publish_acked(withdrawn(20))
        other.outbox.put(withdrawn(21))
        await asyncio.wait_for(other.outbox.drained(), 40)
        await until(lambda: len(seen) >= 22)
        assert seen == list(range(22))


async def test_readers_and_outbox_survive_a_killed_server(nats_server: NatsServer) -> None:
    """NATS dies with -9 and comes back: nothing is lost, nothing comes twice, within seconds (bus B01)."""
    async with connected(nats_server.url) as bus:
        seen: list[int] = []
        await bus.read(PLACEMENT, lambda e, _now: seen.append(e.revision), stream="TF_PLACEMENT")  # type: ignore[attr-defined]
        for number in range(20):
            await bus.publish_acked(withdrawn(number))
        await asyncio.to_thread(nats_server.kill)
        await until(lambda: not bus.connected)
        with pytest.raises(BusDown):
            bus.publish(withdrawn(99))
        for number in range(20, 40):
            bus.outbox.put(withdrawn(number))
        assert bus.outbox.pending == 20
        await asyncio.to_thread(nats_server.start)
        async with asyncio.timeout(40):
            await bus.outbox.drained()
        await until(lambda: len(seen) >= 40, 40)
        assert sorted(seen) == list(range(40))
        # a second restart before any other message must not refold from the beginning
        await asyncio.to_thread(nats_server.restart)
        await until(lambda: bus.connected)
        await bus.publish_acked(withdrawn(40), timeout_s=5)
        await until(lambda: len(seen) >= 41, 40)
        assert sorted(seen) == list(range(41))


async def test_a_copy_of_last_values_is_right_again_after_a_restart_while_its_reader_was_busy(
    nats_server: NatsServer,
) -> None:
    """B02: a watcher died in silence on reconnecting, and its copy went stale. Fifty values change while NATS restarts
    and our process is too busy to read: within ten seconds the copy is right, and it goes on from there."""

    def probe(other: int, revision: int) -> CapacityProbed:
        return CapacityProbed(id=f"p{other}-{revision}", site="b", other_site=f"s{other}", revision=revision)

    copy: dict[str, int] = {}

    def fold(event: Event, _now_ms: float) -> None:
        assert isinstance(event, CapacityProbed)
        copy[event.other_site] = event.revision

    async with connected(nats_server.url) as bus, connected(nats_server.url, "agent") as agent:
        for other in range(50):
            await agent.publish_acked(probe(other, 1))
        reader = await bus.read(subject_filter(CapacityProbed), fold, stream="TF_CAPACITY", latest=True)
        await asyncio.wait_for(reader.caught_up.wait(), 40)
        assert copy == {f"s{other}": 1 for other in range(50)}
        await asyncio.to_thread(nats_server.kill)
        # a handler that computes: nothing of the connection is looked at meanwhile
        time.sleep(1.5)  # noqa: ASYNC251
        assert bus.view_ages()["TF_CAPACITY"] >= 1.5
        await asyncio.to_thread(nats_server.start)
        await until(lambda: agent.connected)
        for other in range(25):
            await agent.publish_acked(probe(other, 2), timeout_s=5)
        time.sleep(1.5)  # noqa: ASYNC251
        for other in range(25, 50):
            await agent.publish_acked(probe(other, 2), timeout_s=5)
        await until(lambda: copy == {f"s{other}": 2 for other in range(50)}, 40)
        await agent.publish_acked(probe(7, 3), timeout_s=5)
        await until(lambda: copy["s7"] == 3, 40)
        await until(lambda: bus.view_ages()["TF_CAPACITY"] < 1.0, 40)


async def test_a_lease_has_one_holder_and_passes_within_two_seconds(clean_nats_url: str) -> None:
    """The owner is killed: its standby takes over within 2 s, with a higher term."""
    async with connected(clean_nats_url, "one") as one, connected(clean_nats_url, "two") as two:
        first, second = Lease(one, "pool:b:m:1", "one"), Lease(two, "pool:b:m:1", "two")
        running = asyncio.create_task(first.run())
        await until(lambda: first.held)
        other = asyncio.create_task(second.run())
        await asyncio.sleep(1.6)
        assert (first.held, second.held) == (True, False)
        one.connected = False  # as a process that is stopped: it neither renews nor gives back
        running.cancel()
        began = asyncio.get_running_loop().time()
        await until(lambda: second.held, 3)
        assert asyncio.get_running_loop().time() - began < patience(2.1)
        assert second.term > first.term
        one.connected = True
        await cancel_and_wait([running, other])


async def test_an_orderly_stop_hands_the_office_on_at_once(
    clean_nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling upgrade must not pay the lease's age for every replica."""
    monkeypatch.setattr(ownership, "LEASE_S", 60.0)
    async with connected(clean_nats_url, "one") as one, connected(clean_nats_url, "two") as two:
        first, second = Lease(one, "s", "one"), Lease(two, "s", "two")
        running = asyncio.create_task(first.run())
        await until(lambda: first.held)
        other = asyncio.create_task(second.run())
        await asyncio.sleep(0.4)
        await cancel_and_wait([running])
        await until(lambda: second.held, 40)
        await cancel_and_wait([running, other])


async def test_a_stop_in_the_middle_of_a_renewal_hands_the_office_on_too(
    clean_nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal was at the server when its owner was told to stop: giving back failed, as of an old revision."""
    monkeypatch.setattr(ownership, "LEASE_S", 60.0)
    async with connected(clean_nats_url, "one") as one, connected(clean_nats_url, "two") as two:
        first, second = Lease(one, "s", "one"), Lease(two, "s", "two")
        running = asyncio.create_task(first.run())
        await until(lambda: first.held)
        first._revision -= 1  # as if the last renewal's acknowledgement had not been waited for
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        other = asyncio.create_task(second.run())
        await until(lambda: second.held, 40)
        await cancel_and_wait([other])


class Counting:
    """A core that counts what it folds and answers leases when it holds its office."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.ids: list[str] = []
        self.times: list[float] = []
        self.deciding = False
        self.woken = 0

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold; a mark of its own opens the office."""
        self.times.append(now_ms)
        if isinstance(message, PlacementOwned):
            self.deciding = message.owner == self.replica
            yield WakeAt(at_ms=now_ms + 20)
            return
        self.ids.append(message.id)
        if message.id == "poison":
            raise RuntimeError("a fault in the core")
        if self.deciding and isinstance(message, GatewayLeased):
            yield Publish(event=withdrawn(message.revision))

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Count."""
        self.woken += 1
        return ()

    def scopes(self) -> tuple[str, ...]:
        """One office."""
        return ("pool:b:m:1",)

    def mark(self, scope: str, term: int, now_ms: float) -> Event:
        """Open it."""
        return PlacementOwned(id=f"{scope}:{term}", site="b", term=term, scope=scope, owner=self.replica, model="m")

    def resign(self, scope: str, now_ms: float) -> Iterable[Effect]:
        """Close it."""
        self.deciding = False
        return ()

    def snapshot(self) -> bytes:
        """What it has seen."""
        return ",".join(self.ids).encode()

    def restore(self, data: bytes) -> None:
        """What it had seen."""
        self.ids = data.decode().split(",") if data else []


READS = [
    Read(filter=PLACEMENT, stream="TF_PLACEMENT"),
    Read(filter=subject_filter(GatewayLeased), stream="TF_LEASE"),
]


def lease(number: int, name: str = "") -> GatewayLeased:
    """A gateway's sign of life."""
    return GatewayLeased(
        id=name or f"l{number}", site="a", gateway="g", gateway_incarnation="i", revision=number, open=()
    )


async def start(url: str, fleet_file: Path, core: Counting) -> tuple[Service, Runner, asyncio.Task[None]]:
    """A service around a core, caught up."""
    settings = Settings(nats_url=url, fleet=str(fleet_file), replica=core.replica)
    service = Service("counting", settings, None)  # type: ignore[arg-type]  # this core asks for no fleet
    await service.bus.connect()
    await service.bus.provision()
    runner = Runner(service, core, READS)
    task = asyncio.create_task(runner.run())
    await asyncio.wait_for(runner.caught_up.wait(), 40)
    return service, runner, task


async def stop(service: Service, task: asyncio.Task[None]) -> None:
    """In order."""
    service.stopping.set()
    await asyncio.wait_for(task, 40)
    await service.bus.close()


async def test_a_core_catches_up_in_the_order_of_time_and_decides_after_its_mark(
    clean_nats_url: str, tmp_path: Path
) -> None:
    """Two streams are merged by stored time; decisions wait for the office; a fault on one message spares the rest."""
    async with connected(clean_nats_url) as bus:
        for number in range(10):
            await bus.publish_acked(lease(number))
            await bus.publish_acked(withdrawn(number))
        core = Counting("me")
        service, _runner, task = await start(clean_nats_url, tmp_path / "none", core)
        expected = [name for number in range(10) for name in (f"l{number}", f"w{number}")]
        assert core.ids == expected
        assert core.times == sorted(core.times)
        await until(lambda: core.deciding)
        await until(lambda: core.woken >= 2)
        await bus.publish_acked(lease(0, "poison"))
        await bus.publish_acked(lease(77))
        await until(lambda: "w77" in core.ids)
        assert service.metrics.get_sample_value("tokenfleet_core_errors_total", {"message": "GatewayLeased"}) == 1
        await stop(service, task)


async def test_a_restarted_core_resumes_from_its_checkpoint(clean_nats_url: str, tmp_path: Path) -> None:
    """Catching up must take seconds after hours of history: only what came since the checkpoint is folded again."""
    async with connected(clean_nats_url) as bus:
        for number in range(30):
            await bus.publish_acked(withdrawn(number))
        core = Counting("first")
        service, runner, task = await start(clean_nats_url, tmp_path / "none", core)
        await runner._save_checkpoint()
        await stop(service, task)
        await bus.publish_acked(withdrawn(30))
        again = Counting("second")
        service, _runner, task = await start(clean_nats_url, tmp_path / "none", again)
        assert again.ids == [f"w{n}" for n in range(31)]
        # folded by this process: the rest and at most its predecessor's mark
        assert len(again.times) <= 2
        await stop(service, task)


async def test_an_operators_replicas_are_kept_and_wrong_limits_are_said(
    clean_nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B06: limits that somebody had changed gave acknowledgements without storage. Who may change streams puts them
    right at its start, who may not says so; what the operator decides (copies, a description) stays."""
    spec = next(one for one in STREAMS if one.name == "TF_OUTCOME")
    async with connected(clean_nats_url) as bus:
        await bus.wait_provisioned(patience_s=5)
        assert caplog.records == []
        config = (await bus.js.stream_info(spec.name)).config
        await bus.js.update_stream(config.evolve(max_bytes=1_000_000, discard="old", description="ours"))
        await bus.wait_provisioned(patience_s=5)
        (said,) = (vars(line) for line in caplog.records)
        assert (said["stream"], said["has"]["max_bytes"], said["has"]["discard"]) == ("TF_OUTCOME", 1_000_000, "old")
        await bus.provision()
        found = (await bus.js.stream_info(spec.name)).config
        assert (found.max_bytes, found.discard, found.description) == (spec.max_bytes, "new", "ours")


async def test_a_full_stream_of_measurements_drops_the_oldest_and_holds_up_nobody(clean_nats_url: str) -> None:
    """B06: three times a stream's size is published to one that may drop: the newest are there, nobody is refused."""
    async with connected(clean_nats_url) as bus:
        config = (await bus.js.stream_info("TF_PLACEMENT")).config
        await bus.js.update_stream(config.evolve(max_bytes=100_000))
        size = 0
        number = 0
        while size < 300_000:
            bus.publish(withdrawn(number))
            size += len(encode(withdrawn(number)))
            number += 1
        last = await bus.publish_acked(withdrawn(number))
        assert last == number + 1
        state = (await bus.js.stream_info("TF_PLACEMENT")).state
        assert state.last_seq == last
        assert 0 < state.messages < number
        assert state.bytes <= 100_000
