"""How a verb reaches the bus: where it is, who asks, and what is on a stream now."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.runtime.bus import Bus
    from tokenfleet_schemas.event import Event

#: how long a server may take to answer before the command gives up, seconds
PATIENCE_S = 3.0


def credentials(url: str) -> dict[str, str]:
    """Settings for a URL; user and password in it win over the environment's. Raises `UsageError`.

    Several, separated by commas, are one cluster: the first one's user counts.
    """
    first, *others = [_credentials(one) for one in url.split(",")]
    return first | {"nats_url": ",".join(one["nats_url"] for one in (first, *others))}


def _credentials(url: str) -> dict[str, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--nats or TOKENFLEET_NATS_URL: {error}") from None
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise UsageError("--nats or TOKENFLEET_NATS_URL: expected nats://[user:password@]host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    found = {"nats_url": urlunsplit((parts.scheme, f"{host}:{port or 4222}", "", "", ""))}
    if parts.username:
        found |= {"nats_user": unquote(parts.username), "nats_password": unquote(parts.password or "")}
    return found


@contextlib.asynccontextmanager
async def connected(url: str | None, name: str) -> "AsyncIterator[Bus]":
    """The bus of the environment, or at a URL. Raises `UsageError`, `CommandError`."""
    import msgspec

    from tokenfleet.runtime.bus import Bus, BusError
    from tokenfleet.runtime.clock import Clock
    from tokenfleet.runtime.settings import Settings, SettingsError

    try:
        settings = Settings.load()
    except SettingsError as error:
        raise UsageError(str(error)) from None
    settings = msgspec.structs.replace(settings, **credentials(url or settings.nats_url))
    bus = Bus(settings, Clock(), f"{name}-{os.getpid()}")
    try:
        await bus.connect(patience_s=PATIENCE_S)
        yield bus
    except BusError as error:
        raise CommandError(str(error)) from None
    finally:
        await bus.close()


async def follow(bus: "Bus", family: str) -> "tuple[asyncio.Queue[Event], asyncio.Event]":
    """The last value of every subject of a family, then what comes; the event is set when all that was there is in.

    Raises `CommandError` where the server does not let us read.
    """
    from tokenfleet_schemas.routes import stream_of, subject_filter

    queue: asyncio.Queue[Event] = asyncio.Queue()
    try:
        reader = await asyncio.wait_for(
            bus.read(
                subject_filter(family),
                lambda event, _now_ms: queue.put_nowait(event),
                stream=stream_of(family),
                latest=True,
                since_s=None,
            ),
            PATIENCE_S,
        )
    except TimeoutError:
        raise CommandError(f"NATS does not let this user read {family}") from None
    return queue, reader.caught_up


async def present(bus: "Bus", family: str) -> "list[Event]":
    """The last value of every subject of a family, oldest first. Raises `CommandError`."""
    queue, caught_up = await follow(bus, family)
    try:
        await asyncio.wait_for(caught_up.wait(), PATIENCE_S)
    except TimeoutError:
        raise CommandError(f"the stream of {family} does not answer") from None
    return [queue.get_nowait() for _ in range(queue.qsize())]
