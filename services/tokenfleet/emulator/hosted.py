"""`tokenfleet run emulator`: emulated engines as a service of a fleet, beside the others.

The settings are the environment's (TOKENFLEET_FLEET, _SITE, _HOST, _METRICS_PORT, _LOG_LEVEL); /healthz, /readyz and
/metrics answer for the process itself, each instance has its own on its own port. It needs no bus.
"""

import asyncio
import sys
from pathlib import Path

import prometheus_client
from aiohttp import web

from tokenfleet import fleet as fleets
from tokenfleet.emulator.service import EmulatorError, run
from tokenfleet.emulator.settings import EmulatorSettings
from tokenfleet.runtime import logs
from tokenfleet.runtime.settings import Settings, SettingsError


def main() -> int:
    """Serve until SIGTERM. Exit codes: 0 stopped, 1 cannot serve, 2 the settings or the fleet file are wrong."""
    try:
        settings = Settings.load()
        fleet = fleets.parse(Path(settings.fleet).read_bytes(), source=settings.fleet)
    except (SettingsError, fleets.FleetError, OSError) as error:
        print(f"tokenfleet emulator: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level)
    try:
        asyncio.run(_serve(settings, fleet))
    except (EmulatorError, OSError) as error:
        print(f"tokenfleet emulator: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings, fleet: fleets.Fleet) -> None:
    ready = asyncio.Event()
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        return web.Response(text="ready\n") if ready.is_set() else web.Response(status=503, text="starting\n")

    async def metrics(_request: web.Request) -> web.Response:
        page = prometheus_client.generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.metrics_port).start()
        # in a container the URL's host is a name for others; listen where we are told to
        everywhere = settings.host if settings.host in ("0.0.0.0", "::") else ""
        await run(
            fleet,
            site=settings.site or None,
            announce=lambda _addresses: ready.set(),
            settings=EmulatorSettings(bind_host=everywhere),
        )
    finally:
        await runner.cleanup()
