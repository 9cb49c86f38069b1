"""What a service's shell lives in: settings, fleet, bus, clock, health, metrics, signals."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import prometheus_client
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily

from tokenfleet import fleet as fleet_file
from tokenfleet.fleet import Fleet
from tokenfleet.runtime import logs
from tokenfleet.runtime.bus import Bus, BusError
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.settings import Settings, SettingsError
from tokenfleet.runtime.tasks import cancel_and_wait

#: how often the fleet file is looked at
RELOAD_S = 2.0


class _ViewAges(prometheus_client.registry.Collector):
    """How old what is known from each stream may be; no sample where nothing is read."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample per stream."""
        family = GaugeMetricFamily(
            "tokenfleet_view_age_seconds", "Since the bus was last heard of a stream that is read", labels=["stream"]
        )
        for stream, age_s in sorted(self._bus.view_ages().items()):
            family.add_metric([stream], age_s)
        yield family


class Service:
    """One running service process."""

    def __init__(self, name: str, settings: Settings, fleet: Fleet) -> None:
        self.name = name
        self.settings = settings
        self.fleet = fleet
        self.replica = settings.replica_of(name)
        self.clock = Clock()
        self.bus = Bus(settings, self.clock, self.replica)
        self.metrics = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.metrics)
        tasks = prometheus_client.Gauge(
            "tokenfleet_asyncio_tasks", "Tasks of the event loop; a leak shows as growth", registry=self.metrics
        )
        tasks.set_function(lambda: float(len(asyncio.all_tasks())))
        self.metrics.register(_ViewAges(self.bus))
        self.log = logging.getLogger(f"tokenfleet.{name}")
        #: set by SIGTERM or SIGINT
        self.stopping = asyncio.Event()
        #: where /healthz, /readyz and /metrics really listen
        self.metrics_port = 0
        self._checks: dict[str, Callable[[], bool]] = {"bus": lambda: self.bus.connected}
        self._reloaded: list[Callable[[Fleet], None]] = []
        path = Path(settings.fleet)
        self._fleet_bytes = path.read_bytes() if path.is_file() else b""
        self._pages: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    def ready_when(self, name: str, check: Callable[[], bool]) -> None:
        """/readyz answers 200 only while every check says true."""
        self._checks[name] = check

    def page(self, name: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        """Answer `GET /<name>` beside health and metrics."""
        self._pages[name] = answer

    def not_ready(self) -> list[str]:
        """Names of the checks that fail now."""
        return [name for name, check in self._checks.items() if not check()]

    def on_reload(self, callback: Callable[[Fleet], None]) -> None:
        """Call this with the new fleet when the file changed (looked at every 2 s, and at SIGHUP)."""
        self._reloaded.append(callback)

    async def start(self) -> None:
        """Connect, provision, listen; raises `BusError`, OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        await self._listen()
        await self.bus.connect()
        if self.settings.nats_user in ("", "admin"):
            await self.bus.provision()
        else:
            await self.bus.wait_provisioned()
        self._tasks.append(loop.create_task(self._watch_fleet()))

    async def close(self) -> None:
        """Disconnect and stop listening."""
        await cancel_and_wait(self._tasks)
        await self.bus.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def reload(self) -> None:
        """Read the fleet file again; a bad one is logged and the old one stays in force."""
        try:
            data = Path(self.settings.fleet).read_bytes()
            if data == self._fleet_bytes:
                return
            self._fleet_bytes = data
            fleet = fleet_file.parse(data, source=self.settings.fleet)
        except (OSError, fleet_file.FleetError) as error:
            self.log.error("fleet file not reloaded, the old one stays", extra={"error": str(error)})
            return
        self.fleet = fleet
        self.log.info("fleet file reloaded", extra={"policy": fleet.policy})
        for callback in self._reloaded:
            callback(fleet)

    async def _watch_fleet(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            self.reload()

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/{page}", self._page)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.settings.host, self.settings.metrics_port)
        await site.start()
        self.metrics_port = self._runner.addresses[0][1]

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        failing = self.not_ready()
        if failing:
            return web.Response(status=503, text="not ready: " + ", ".join(failing) + "\n")
        return web.Response(text="ready\n")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        answer = self._pages.get(request.match_info["page"])
        if answer is None:
            raise web.HTTPNotFound
        return await answer(request)

    async def _metrics(self, _request: web.Request) -> web.Response:
        page = prometheus_client.generate_latest(self.metrics)
        return web.Response(body=page, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})


def load(name: str, *, database: bool = False) -> tuple[Settings, Fleet]:
    """Settings and fleet from the environment; raises `SettingsError`, `FleetError`, OSError."""
    settings = Settings.load()
    if database and not settings.postgres_url:
        raise SettingsError(f"{name} needs TOKENFLEET_POSTGRES_URL")
    return settings, fleet_file.parse(Path(settings.fleet).read_bytes(), source=settings.fleet)


def main(name: str, body: Callable[[Service], Awaitable[None]], *, database: bool = False) -> int:
    """Run one service until SIGTERM or SIGINT; exit code 0 done, 1 it failed, 2 its settings or fleet are wrong."""
    try:
        settings, fleet = load(name, database=database)
    except (SettingsError, fleet_file.FleetError, OSError) as error:
        print(f"tokenfleet {name}: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level)
    return run(_run(name, settings, fleet, body))


async def _run(name: str, settings: Settings, fleet: Fleet, body: Callable[[Service], Awaitable[None]]) -> int:
    service = Service(name, settings, fleet)
    try:
        await service.start()
        _calm_collector()
        service.log.info("started", extra={"replica": service.replica, "metrics_port": service.metrics_port})
        await body(service)
    except (BusError, OSError) as error:
        service.log.error("stopped by an error", extra={"error": str(error)})
        return 1
    finally:
        await service.close()
    service.log.info("stopped")
    return 0


def _calm_collector() -> None:
    """What was made until now (modules, classes) lives as long as the process: the cycle collector need not see it.

    And messages come and go by reference counts: looking for cycles every 700 allocations only costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def run(work: "Awaitable[int]") -> int:
    """Run a coroutine on uvloop where there is one."""

    async def whole() -> int:
        return await work

    if sys.platform == "win32":
        return asyncio.run(whole())
    import uvloop

    return uvloop.run(whole())
