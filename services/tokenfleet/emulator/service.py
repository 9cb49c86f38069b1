"""The emulator's shell: all emulated instances of a fleet in one process, from start to an orderly end.

Decides which declared instances are served and where they listen. Refuses to know how an instance behaves (`instance`)
and what it says (`wire`, `http`).
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokenfleet.emulator import kv_events
from tokenfleet.emulator.http import Endpoint
from tokenfleet.emulator.instance import EmulatedInstance
from tokenfleet.emulator.settings import EmulatorSettings
from tokenfleet.fleet import Fleet

log = logging.getLogger("tokenfleet.emulator")


class EmulatorError(RuntimeError):
    """The emulator cannot serve what it was asked to."""


class Emulator:
    """All emulated instances of a fleet (or of one of its sites) in this process.

    `start` binds and returns the real addresses, `stop` ends everything: open streams get an engine's dying words.
    Raises `EmulatorError` where nothing is to be served or a port is taken.
    """

    def __init__(self, fleet: Fleet, *, site: str | None = None, settings: EmulatorSettings | None = None) -> None:
        self._settings = settings or EmulatorSettings()
        if self._settings.time_scale <= 0:
            raise EmulatorError(f"the time scale must be positive, not {self._settings.time_scale}")
        if site is not None and site not in fleet.sites:
            raise EmulatorError(f"the fleet has no site {site!r}")
        loop = asyncio.get_running_loop()
        self.instances: dict[str, EmulatedInstance] = {
            name: EmulatedInstance(
                name,
                declared,
                max_model_len=fleet.models[declared.model].max_model_len,
                settings=self._settings,
                loop=loop,
            )
            for where, at in fleet.sites.items()
            if site is None or where == site
            for name, declared in at.instances.items()
            if declared.profile
        }
        if not self.instances:
            raise EmulatorError(f"no instance of {site or 'the fleet'} has a profile: nothing to emulate")
        self._endpoints: list[Endpoint] = []
        self._sockets: Any = None

    async def start(self) -> dict[str, dict[str, str]]:
        """Listen. Returns {instance: {"url", "admin"}}."""
        addresses: dict[str, dict[str, str]] = {}
        try:
            for name, instance in self.instances.items():
                where = urlsplit(instance.declared.url)
                host = where.hostname or "127.0.0.1"
                # "localhost" is two interfaces, which a free port would give two numbers
                host = "127.0.0.1" if host == "localhost" else host
                endpoint = Endpoint(
                    instance,
                    host,
                    where.port or 0,
                    instance.declared.admin_port,
                    bind_host=self._settings.bind_host or host,
                )
                self._endpoints.append(endpoint)
                addresses[name] = await endpoint.start()
                if instance.kv is not None:
                    self._sockets = self._sockets or kv_events.context()
                    instance.kv.start(self._sockets, self._settings.bind_host or host)
        except OSError as error:
            await self.stop()
            raise EmulatorError(f"{name}: cannot listen at {instance.declared.url}: {error}") from error
        log.info("%d instances, time scale %g", len(addresses), self._settings.time_scale)
        return addresses

    async def stop(self) -> None:
        """Stop serving; safe to call twice."""
        for instance in self.instances.values():
            instance.fail_jobs()
        endpoints, self._endpoints = self._endpoints, []
        await asyncio.gather(*(endpoint.stop() for endpoint in endpoints))
        await asyncio.gather(*(instance.stop() for instance in self.instances.values()))
        if self._sockets is not None:
            self._sockets.term()
            self._sockets = None


async def run(
    fleet: Fleet,
    *,
    site: str | None = None,
    time_scale: float = 1.0,
    announce: Callable[[dict[str, dict[str, str]]], None] | None = None,
    settings: EmulatorSettings | None = None,
) -> None:
    """Serve the emulated instances of a fleet until cancelled, SIGTERM or SIGINT; then stop in order.

    `announce` hears {instance: {"url", "admin"}} once all of them listen. `settings` are the finer knobs; `time_scale`
    wins over theirs. Raises `EmulatorError`.
    """
    settings = msgspec.structs.replace(settings or EmulatorSettings(), time_scale=time_scale)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    emulator = Emulator(fleet, site=site, settings=settings)
    handled: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        # Only a main thread may; elsewhere cancelling is the way to end.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, ended.set)
            handled.append(number)
    try:
        addresses = await emulator.start()
        if announce is not None:
            announce(addresses)
        await ended.wait()
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
        await emulator.stop()
