"""What each NATS user can do and, above all, cannot do: on a real server, with real nats-py."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from tokenfleet.fleet import Fleet, parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.permissions import (
    ADMIN,
    PermissionsError,
    User,
    nats_users,
    render_config,
    user_name,
    user_names,
)
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.codec import decode, encode, encode_packed
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.kv import KvChanged
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.placement import PlacementAssigned, PlacementOwned
from tokenfleet_schemas.routes import BY_MESSAGE, ROUTES, stream_of, subject_filter, subject_of
from tokenfleet_schemas.streams import CHECKPOINTS_BUCKET, IDEMPOTENCY_BUCKET, OWNERS_BUCKET, STREAMS

EXAMPLES = Path(__file__).resolve().parents[2] / "schemas" / "examples" / "v1"
DENIED_WITHIN_S = 2.0


def fleet() -> Fleet:
    return parse(
        b"""
        [fleet]
        name = "test"
        default_class = "chat"
        [models.m]
        versions = ["1"]
        default_version = "1"
        max_model_len = 4096
        [classes.chat]
        [sites.a]
        zone = "eu"
        entry = true
        [sites.b]
        zone = "eu"
        [sites.c]
        zone = "us"
        """
    )


def people() -> dict[str, User]:
    passwords = {name: f"secret of {name}" for name in user_names(fleet())}
    return {user.user: user for user in nats_users(fleet(), passwords)}


def example(name: str, **changes: Any) -> Event:
    return msgspec.structs.replace(decode((EXAMPLES / f"{name}.json").read_bytes()), **changes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that knows all users; the streams are there."""
    users = [user.entry() for user in people().values()]
    with NatsServer(tmp_path_factory.mktemp("nats"), users=users) as running:
        assert isinstance(running, NatsServer)
        with asyncio.Runner() as runner:
            runner.run(provision(running))
        yield running


async def provision(server: NatsServer) -> None:
    bus = bus_of(server, ADMIN)
    await bus.connect()
    await bus.provision()
    await bus.close()


def bus_of(server: NatsServer, user: str) -> Bus:
    settings = Settings(nats_url=server.bare_url, nats_user=user, nats_password=people()[user].password)
    return Bus(settings, Clock(), user)


class Session:
    """One user's plain nats-py connection that remembers what the server denied."""

    def __init__(self, client: Client, violations: list[str], heard: asyncio.Event) -> None:
        self.client = client
        self.js = client.jetstream(timeout=DENIED_WITHIN_S)
        self.violations = violations
        self.heard = heard

    async def denied(self, subject: str) -> None:
        """The server said no to this subject."""
        async with asyncio.timeout(DENIED_WITHIN_S):
            while not any(subject.lower() in violation.lower() for violation in self.violations):
                self.heard.clear()
                await self.heard.wait()

    async def publish_is_denied(self, subject: str, data: bytes = b"{}") -> None:
        await self.client.publish(subject, data)
        await self.denied(subject)

    async def create_is_denied(self, stream: str, filter: str, **more: Any) -> None:
        """Neither by the exact subject nor by any other spelling of the same wish."""
        subject = f"$JS.API.CONSUMER.CREATE.{stream}.probe.{filter}" if filter else f"$JS.API.CONSUMER.CREATE.{stream}"
        await self.publish_is_denied(subject, create_request(stream, filter, **more))


def create_request(stream: str, filter: str, **more: Any) -> bytes:
    config = {"name": "probe", "deliver_policy": "all", "ack_policy": "none", "filter_subject": filter} | more
    return json.dumps({"stream_name": stream, "config": config, "action": "create"}).encode()


@contextlib.asynccontextmanager
async def session(server: NatsServer, name: str) -> AsyncIterator[Session]:
    user, violations, heard = people()[name], list[str](), asyncio.Event()

    async def on_error(error: Exception) -> None:
        violations.append(str(error))
        heard.set()

    client = await nats.connect(
        server.bare_url,
        user=user.user,
        password=user.password,
        inbox_prefix=user.inbox_prefix,
        error_cb=on_error,
        allow_reconnect=False,
    )
    try:
        yield Session(client, violations, heard)
    finally:
        await client.close()


async def stored(server: NatsServer, event: Event) -> int:
    """Put an event into its stream as admin; its sequence."""
    async with session(server, ADMIN) as admin:
        return (await admin.js.publish(subject_of(event), encode(event))).seq


def test_the_users_of_a_fleet_are_its_services_at_its_sites() -> None:
    """An operator must know which passwords to make, and a missing one must be named."""
    assert user_names(fleet()) == [
        "admin", "subscriber", "slomax", "fleetmind", "accountant",
        "gateway-a", "siteagent-a", "tokenpilot-a", "siteagent-b", "tokenpilot-b", "siteagent-c", "tokenpilot-c",
    ]  # fmt: skip
    assert user_name("siteagent", "EU.West") == "siteagent-eu-west"
    with pytest.raises(PermissionsError, match=r"no password for slomax, tokenpilot-c$"):
        nats_users(fleet(), {name: "x" for name in user_names(fleet()) if name not in ("slomax", "tokenpilot-c")})


def test_the_rendered_block_is_one_that_a_server_accepts(tmp_path: Path) -> None:
    """An operator's own server includes the block; a comma too many would keep it from starting."""
    block = tmp_path / "users.conf"
    block.write_text(render_config(people().values()))

    class Including(NatsServer):
        def prepare(self) -> None:
            super().prepare()
            config = json.loads(self._config_file.read_text())
            lines = [f"{key}: {json.dumps(value)}" for key, value in config.items()]
            self._config_file.write_text("\n".join([*lines, f"include {block.name}"]) + "\n")

        @property
        def _config_file(self) -> Path:
            return tmp_path / "nats-server.conf"

    async def try_it(server: NatsServer) -> None:
        async with session(server, "subscriber") as reader:
            await reader.publish_is_denied("anything")
        connection, writer = await asyncio.open_connection(server.host, server.port)
        info = json.loads((await connection.readline()).removeprefix(b"INFO "))
        assert info["auth_required"] is True
        writer.close()
        await writer.wait_closed()

    with Including(tmp_path / "store") as server, asyncio.Runner() as runner:
        assert isinstance(server, NatsServer)
        runner.run(try_it(server))


SAYS = [
    (user_name(service, site if service in ("siteagent", "tokenpilot", "gateway") else ""), site, route)
    for service, site in (
        ("siteagent", "b"),
        ("tokenpilot", "b"),
        ("gateway", "a"),
        ("slomax", "b"),
        ("fleetmind", "b"),
        ("accountant", "b"),
    )
    for route in ROUTES
    if service in route.producers
]


async def test_every_service_can_say_what_it_is_the_producer_of(server: NatsServer) -> None:
    """The allow lists come from the routes: a new message needs no second place."""
    for name in dict.fromkeys(name for name, _, _ in SAYS):
        async with session(server, name) as user:
            for who, site, route in SAYS:
                if who != name:
                    continue
                event = example(f"{route.family}.{route.fact}", site=site)
                if route.stream is None:
                    await user.client.publish(subject_of(event), encode_packed(event))
                else:
                    ack = await user.js.publish(subject_of(event), encode(event))
                    assert ack.stream == route.stream
            await user.client.flush()
            assert user.violations == []


@pytest.mark.parametrize("name", ["gateway-a", "siteagent-b", "tokenpilot-b", "slomax", "fleetmind", "accountant"])
async def test_every_service_can_read_what_it_hears_with_our_reader(server: NatsServer, name: str) -> None:
    """Each service's start: wait for the streams, then an ordered reader per family, flow control and heartbeats on."""
    service, _, site = name.partition("-")
    families = {route.family for route in ROUTES if service in route.consumers and route.stream}
    for route in ROUTES:
        if route.family in families and service in route.consumers:
            await stored(server, example(f"{route.family}.{route.fact}", site=site or "b"))
    bus = bus_of(server, name)
    await bus.connect()
    try:
        await bus.wait_provisioned(patience_s=5)
        for family in sorted(families):
            held = service in ("siteagent", "tokenpilot") and family not in ("outcome", "gateway")
            got: list[Event] = []
            reader = await bus.read(
                subject_filter(family, site=site if held else None),
                lambda event, _now_ms, into=got: into.append(event),  # type: ignore[misc]
                stream=stream_of(family),
                latest=True,
            )
            await asyncio.wait_for(reader.caught_up.wait(), 5)
            heard = {type(event) for event in got}
            assert {r.message for r in ROUTES if r.family == family and service in r.consumers} <= heard
            assert reader.resets == 0
    finally:
        await bus.close()


async def test_a_site_agent_cannot_speak_for_another_site(server: NatsServer) -> None:
    """A compromised agent of b reports c's instances as down, or offers its own address as theirs."""
    async with session(server, "siteagent-b") as agent:
        own, foreign = example("capacity.reported", site="b"), example("capacity.reported", site="c")
        await agent.js.publish(subject_of(own), encode(own))
        await agent.publish_is_denied(subject_of(foreign), encode(foreign))
        await agent.publish_is_denied(subject_of(example("plan.applied", site="c")))
        await agent.publish_is_denied(subject_of(example("kv.changed", site="c")))
        # nor be anybody else at its own site
        await agent.publish_is_denied(subject_of(example("placement.assigned", site="b")))
        await agent.publish_is_denied(subject_of(example("outcome.finished", site="b")))
        await agent.publish_is_denied(subject_of(example("goodput.measured", site="b")))
    assert isinstance(foreign, CapacityReported)
    async with session(server, ADMIN) as admin:
        with pytest.raises(nats.js.errors.NotFoundError):
            await admin.js.get_last_msg(stream_of(CapacityReported), subject_of(foreign))


async def test_a_tokenpilot_cannot_read_the_placements_of_another_site(server: NatsServer) -> None:
    """Site b's operator may not see who asks for what at c: by no spelling of the filter."""
    await stored(server, example("placement.assigned", site="c"))
    stream = stream_of(PlacementAssigned)
    async with session(server, "tokenpilot-b") as pilot:
        for filter in (
            subject_filter("placement", site="c"),
            subject_filter(PlacementAssigned, site="c"),
            subject_filter("placement"),
            subject_filter(PlacementAssigned),
            subject_filter("placement").rsplit(".", 4)[0] + ".>",
            ">",
            "",
        ):
            await pilot.create_is_denied(stream, filter)
        # an allowed subject with another filter in the body is refused by the server
        own = subject_filter("placement", site="b")
        foreign = subject_filter("placement", site="c")
        subject = f"$JS.API.CONSUMER.CREATE.{stream}.probe.{own}"
        for request in (
            create_request(stream, foreign),
            create_request(stream, ""),
            create_request(stream, "", filter_subjects=[foreign]),
            create_request(stream, own, filter_subjects=[own, foreign]),
            create_request(stream_of(OutcomeFinished), own),
        ):
            reply = json.loads((await pilot.client.request(subject, request, timeout=DENIED_WITHIN_S)).data)
            assert "error" in reply, reply
        # and there is no way around consumers
        for around in (
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.{subject_of(example('placement.assigned', site='c'))}",
            f"$JS.API.CONSUMER.LIST.{stream}",
            f"$JS.API.CONSUMER.NAMES.{stream}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.probe",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.probe",
            f"$JS.API.STREAM.UPDATE.{stream}",
            f"$JS.API.STREAM.PURGE.{stream}",
            f"$JS.API.STREAM.DELETE.{stream}",
            "$JS.API.STREAM.CREATE.THEFT",
        ):
            await pilot.publish_is_denied(around)
        await pilot.client.subscribe(subject_filter(PlacementAssigned))
        await pilot.denied(subject_filter(PlacementAssigned))


async def test_the_marks_of_office_are_read_from_everywhere(server: NatsServer) -> None:
    """FleetMind's new term voids old requests at every site, so every TokenPilot must see it."""
    mark = example("placement.owned", site="", scope="model:m", model="m")
    await stored(server, mark)
    bus = bus_of(server, "tokenpilot-b")
    await bus.connect()
    try:
        got: list[Event] = []
        reader = await bus.read(
            subject_filter(PlacementOwned), lambda event, _: got.append(event), stream=stream_of(PlacementOwned)
        )
        await asyncio.wait_for(reader.caught_up.wait(), 5)
        assert mark in got
    finally:
        await bus.close()


async def test_nobody_hears_the_answers_to_another(server: NatsServer) -> None:
    """An inbox shared by all would give every reply, and every consumer's messages, to whoever listens."""
    async with session(server, "tokenpilot-b") as pilot:
        for inbox in ("_INBOX.>", "_INBOX_tokenpilot-c.>", "*.>", ">"):
            await pilot.client.subscribe(inbox)
            await pilot.denied(inbox)


async def test_a_subscriber_reads_capacity_and_goodput_and_nothing_else(server: NatsServer) -> None:
    """The read-only password is handed to other teams: it must not show tenants' requests, and say nothing."""
    capacity, goodput = example("capacity.reported", site="b"), example("goodput.measured", site="b")
    await stored(server, capacity)
    await stored(server, goodput)
    async with session(server, "subscriber") as reader:
        # as a person would write it: an ordered consumer, and plainly without JetStream
        for event in (capacity, goodput):
            route = BY_MESSAGE[type(event)]
            plain = await reader.client.subscribe(subject_filter(type(event)))
            ordered = await reader.js.subscribe(
                subject_filter(type(event)),
                stream=route.stream,
                ordered_consumer=True,
                config=ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT),
            )
            seen = decode((await ordered.next_msg(timeout=5)).data)
            assert type(seen) is type(event)
            await reader.client.flush()
            await stored(server, event)
            assert decode((await plain.next_msg(timeout=5)).data) == event
        pull = await reader.js.pull_subscribe(subject_filter(GoodputMeasured), stream=stream_of(GoodputMeasured))
        (message, *_rest) = await pull.fetch(1, timeout=5)
        await message.ack()
        assert reader.violations == []
        for route in ROUTES:
            event = example(f"{route.family}.{route.fact}")
            await reader.publish_is_denied(subject_of(event), encode(event))
            if route.family not in ("capacity", "goodput"):
                await reader.client.subscribe(subject_filter(route.message))
                await reader.denied(f'subscription to "{subject_filter(route.message)}"')
                if route.stream:
                    await reader.create_is_denied(route.stream, subject_filter(route.message))
        for bucket in (OWNERS_BUCKET, CHECKPOINTS_BUCKET):
            await reader.publish_is_denied(f"$KV.{bucket}.x")
            await reader.publish_is_denied(f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.x")


async def test_a_plain_message_of_kv_content_reaches_its_sites_tokenpilot_only(server: NatsServer) -> None:
    """Which prefixes an instance holds tells what a site's tenants work on."""
    async with session(server, "siteagent-b") as agent, session(server, "tokenpilot-b") as pilot:
        heard = await pilot.client.subscribe(subject_filter(KvChanged, site="b"))
        await pilot.client.flush()
        event = example("kv.changed", site="b")
        await agent.client.publish(subject_of(event), encode_packed(event))
        assert (await heard.next_msg(timeout=5)).data == encode_packed(event)
        await pilot.client.subscribe(subject_filter(KvChanged, site="c"))
        await pilot.denied(subject_filter(KvChanged, site="c"))
        await pilot.client.subscribe(subject_filter(KvChanged))
        await pilot.denied(f'"{subject_filter(KvChanged)}"')


@pytest.mark.parametrize(
    ("name", "own", "foreign"),
    [
        ("tokenpilot-b", "pool.b.m.1", "pool.c.m.1"),
        ("slomax", "release.b", "pool.b.m.1"),
        ("slomax", "admission.a", "model.m"),
        ("fleetmind", "model.m", "admission.a"),
    ],
)
async def test_a_lease_is_written_only_by_who_may_hold_the_office(
    server: NatsServer, name: str, own: str, foreign: str
) -> None:
    """Whoever writes a lease decides: site b's TokenPilot must not take c's pools."""
    async with session(server, name) as user:
        bucket = await user.js.key_value(OWNERS_BUCKET)
        with contextlib.suppress(nats.js.errors.KeyWrongLastSequenceError):
            await bucket.create(own, b"{}")
        entry = await bucket.get(own)
        assert entry.revision
        revision = await bucket.update(own, b'{"beat":1}', last=entry.revision)
        with pytest.raises(nats.js.errors.KeyWrongLastSequenceError):
            await bucket.update(own, b"{}", last=revision - 1)
        assert user.violations == []
        await user.publish_is_denied(f"$KV.{OWNERS_BUCKET}.{foreign}")
        await user.publish_is_denied(f"$KV.{OWNERS_BUCKET}.unknown.{foreign}")
        checkpoints = await user.js.key_value(CHECKPOINTS_BUCKET)
        await checkpoints.put(f"{name.replace('-', '.')}" if "-" in name else f"{name}._", b"state")
        await user.publish_is_denied(f"$KV.{CHECKPOINTS_BUCKET}.accountant._")


async def test_gateways_share_the_claims_on_idempotency_keys(server: NatsServer) -> None:
    """A key's repeat may come to any gateway: each makes, reads and changes claims, and nobody else does."""
    async with session(server, "gateway-a") as gateway:
        bucket = await gateway.js.key_value(IDEMPOTENCY_BUCKET)
        revision = await bucket.create("0af3", b"{}")
        with pytest.raises(nats.js.errors.KeyWrongLastSequenceError):
            await bucket.update("0af3", b"{}", last=0)
        assert (await bucket.get("0af3")).revision == revision
        assert gateway.violations == []
    async with session(server, "slomax") as other:
        await other.publish_is_denied(f"$KV.{IDEMPOTENCY_BUCKET}.0af3")
        await other.publish_is_denied(f"$JS.API.DIRECT.GET.KV_{IDEMPOTENCY_BUCKET}.$KV.{IDEMPOTENCY_BUCKET}.0af3")


async def test_the_accountant_shares_a_durable_consumer_of_outcomes(server: NatsServer) -> None:
    """Its replicas split the outcomes and acknowledge each after the row is committed."""
    sequence = await stored(server, example("outcome.finished"))
    async with session(server, "accountant") as accountant:
        pull = await accountant.js.pull_subscribe(
            subject_filter("outcome"),
            durable="accountant",
            stream=stream_of("outcome"),
            config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_ack_pending=1000),
        )
        done = 0
        while done < sequence:
            for message in await pull.fetch(10, timeout=5):
                await message.ack_sync()
                done = message.metadata.sequence.stream
        info = await pull.consumer_info()
        assert info.num_ack_pending == 0
        again = await accountant.js.pull_subscribe_bind(durable="accountant", stream=stream_of("outcome"))
        with pytest.raises(nats.errors.TimeoutError):
            await again.fetch(1, timeout=0.2)
        assert accountant.violations == []
        await accountant.publish_is_denied(subject_of(example("request.received")))


async def test_only_admin_makes_streams(server: NatsServer) -> None:
    """A service with a typing mistake in its stream must not reconfigure the fleet's."""
    for name in user_names(fleet()):
        if name == ADMIN:
            continue
        async with session(server, name) as user:
            for spec in STREAMS:
                await user.publish_is_denied(f"$JS.API.STREAM.UPDATE.{spec.name}")
            await user.publish_is_denied(f"$JS.API.CONSUMER.DELETE.{STREAMS[0].name}.x")
