"""The site agent's shell: polls every engine of the site on its own, probes the other sites, feeds the core.

Each instance has a task of its own with its own time-outs, so that a hung engine delays nobody else's samples.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol

import aiohttp

from tokenfleet.effects import Effect
from tokenfleet.eligibility import fraction
from tokenfleet.fleet import Fleet, Instance
from tokenfleet.runtime.probe import Responder
from tokenfleet.runtime.runner import Read, Runner
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.settings import SettingsError
from tokenfleet.siteagent import drivers, engines, kv_reader, probing
from tokenfleet.siteagent.core import Actuate, SiteAgentCore
from tokenfleet.siteagent.settings import Knobs
from tokenfleet.siteagent.state import Actuated, BandwidthTaken, Identity, Metrics, ProbeTaken, Sample
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import stream_of, subject_filter

log = logging.getLogger("tokenfleet.siteagent")

#: a longer answer of an engine is not read to its end
_ANSWER_BYTES_MAX = 8 * 1024 * 1024


async def body(service: Service) -> None:
    """The agent of `service.settings.site`, until the service stops; raises `SettingsError` for an unknown site."""
    site = service.settings.site
    if site not in service.fleet.sites:
        raise SettingsError(f"TOKENFLEET_SITE={site!r}: no such site in the fleet file")
    core = SiteAgentCore(service.fleet, site, began=secrets.token_hex(4))
    plans = Read(filter=subject_filter("plan", site=site), stream=stream_of("plan"), latest=True, since_s=None)
    agents: list[Agent] = []
    runner = Runner(service, core, [plans], perform=lambda effect: agents[0].perform(effect))
    kv: kv_reader.KvReaders | None = None
    if kv_reader.AVAILABLE and service.settings.secret:
        kv = kv_reader.KvReaders(service.bus, site, service.settings.secret, service.metrics)
        await kv.listen()
    agent = Agent(core, runner, os.environ, core.knobs, kv)
    agents.append(agent)
    service.page("probe", Responder(asyncio.get_running_loop().time).answer)
    service.on_reload(agent.follow)
    running = asyncio.ensure_future(runner.run())
    current = asyncio.ensure_future(runner.caught_up.wait())
    try:
        await asyncio.wait({running, current}, return_when=asyncio.FIRST_COMPLETED)
        if current.done():
            agent.follow(service.fleet)
        await running
    finally:
        current.cancel()
        running.cancel()
        await agent.stop()
        await asyncio.gather(current, running, return_exceptions=True)


class Agent:
    """The polling and probing tasks, one per declared instance and one per other site."""

    def __init__(
        self,
        core: SiteAgentCore,
        runner: "Feeds",
        environ: Mapping[str, str],
        knobs: Knobs,
        kv: kv_reader.KvReaders | None = None,
    ) -> None:
        self._core = core
        #: None: KV events are not listened to (no pyzmq, or no secret to make digests with)
        self._kv = kv
        self._runner = runner
        self._environ = environ
        self._knobs = knobs
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._polled: dict[str, Instance] = {}
        self._numbers = count(1)
        self._acting: set[asyncio.Task[None]] = set()

    def perform(self, effect: Effect) -> None:
        """Do what the core asks for beyond messages: have an instance started or stopped."""
        if not isinstance(effect, Actuate):
            raise TypeError(f"nobody performs {type(effect).__name__}")
        task = asyncio.get_running_loop().create_task(self._actuate(effect))
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    async def _actuate(self, order: Actuate) -> None:
        detail = ""
        try:
            await self._drive(order)
        except drivers.ActuatorError as error:
            detail = str(error)
        except Exception as error:  # a fault of a driver's own is a failed order, not a dead agent
            log.exception("driver failed", extra={"instance": order.instance})
            detail = repr(error)
        self._runner.feed(
            Actuated(
                id=f"actuated:{order.instance}:{next(self._numbers)}",
                site=self._core.site,
                instance=order.instance,
                action=order.action,
                ok=not detail,
                detail=detail,
            )
        )

    async def _drive(self, order: Actuate) -> None:
        hand = self._core.actuation.hands.get(order.instance)
        actuator = self._core.actuation.actuator
        if hand is None or actuator is None:
            raise drivers.ActuatorError(f"{order.instance} is no longer declared here, or its site has no actuator")
        driver = drivers.driver(
            actuator,
            self._http,
            site=self._core.site,
            cold_start_s=self._core.actuation.cold_start_s,
            credential=self._credential,
            wanted=self._core.actuation.wanted,
        )
        await (driver.start if order.action == "start" else driver.stop)(order.instance, hand.declared)

    def follow(self, fleet: Fleet) -> None:
        """Poll what this fleet declares at the site, stop polling what it does not."""
        if self._kv is not None:
            self._kv.follow(fleet)
        site = fleet.sites.get(self._core.site)
        declared = site.instances if site is not None else {}
        for name in [name for name, one in self._polled.items() if declared.get(name) != one]:
            del self._polled[name]
            self._cancel("poll", name)
            if self._kv is not None:
                self._cancel("kv", name)
        for name, one in declared.items():
            if name not in self._polled:
                self._polled[name] = one
                self._start("poll", name, partial(self._poll, name, one))
                if self._kv is not None:
                    self._start("kv", name, partial(self._listen, self._kv, name, one))
        if self._kv is not None and declared and ("summary", "kv") not in self._tasks:
            self._start("summary", "kv", partial(self._kv.summarise, self._knobs))
        others = {name: other for name, other in fleet.sites.items() if name != self._core.site}
        wanted = {("probe", name): self._probe for name, other in others.items() if other.instances or other.probe_url}
        if fleet.probing.bandwidth_bytes:
            wanted |= {("bandwidth", name): self._bandwidth for name, other in others.items() if other.probe_url}
        for kind, name in list(self._tasks):
            if kind in ("probe", "bandwidth") and (kind, name) not in wanted:
                self._cancel(kind, name)
        for (kind, name), measure in sorted(wanted.items()):
            if (kind, name) not in self._tasks:
                self._start(kind, name, partial(measure, name))

    async def stop(self) -> None:
        """End all tasks and connections."""
        tasks = [*self._tasks.values(), *self._acting]
        for task in self._acting:
            task.cancel()
        for key in list(self._tasks):
            self._cancel(*key)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._kv is not None:
            self._kv.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _start(self, kind: str, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks[kind, name] = asyncio.get_running_loop().create_task(self._keep(kind, name, work))

    def _cancel(self, kind: str, name: str) -> None:
        self._tasks.pop((kind, name)).cancel()

    async def _keep(self, kind: str, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A fault of ours in one task must not leave an instance unwatched and reported as it last was."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("task failed; begun anew", extra={"task": kind, "of": name})
            await asyncio.sleep(self._knobs.poll_ms / 1000)

    # --- instances ------------------------------------------------------------------------------------------

    async def _poll(self, name: str, declared: Instance) -> None:
        loop = asyncio.get_running_loop()
        engine = Engine(self._http(), declared, self._credential(declared.credential), self._knobs)
        next_s = loop.time()
        while True:
            self._runner.feed(await self._sample(name, engine))
            # on a fixed grid, so that two runs poll alike; a slow engine skips beats instead of being hurried
            next_s = max(next_s + self._knobs.poll_ms / 1000, loop.time())
            await asyncio.sleep(next_s - loop.time())

    async def _listen(self, kv: kv_reader.KvReaders, name: str, declared: Instance) -> None:
        engine = Engine(self._http(), declared, self._credential(declared.credential), self._knobs)
        await kv.read(name, declared, engine.kv_event_sources, lambda: self._core.records.get(name), self._knobs)

    async def _sample(self, name: str, engine: "Engine") -> Sample:
        (health, failure), metrics = await asyncio.gather(engine.health(), engine.metrics())
        identity = None
        if health is not None and engine.must_identify(metrics, self._core.wants_identity(name)):
            identity = await engine.identify()
        return Sample(
            id=f"sample:{name}:{next(self._numbers)}",
            site=self._core.site,
            instance=name,
            health=health,
            failure=failure,
            metrics=metrics,
            identity=identity,
        )

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._knobs.request_timeout_ms / 1000)
            # engines close idle connections after 5 s; no common limit, so that nobody waits for another's connection
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=True)
        return self._session

    def _credential(self, name: str) -> str:
        token = "".join(char if char.isalnum() else "_" for char in name.upper())
        return self._environ.get(f"TOKENFLEET_CREDENTIAL_{token}", "") if name else ""

    # --- network --------------------------------------------------------------------------------------------

    async def _probe(self, other: str) -> None:
        loop, knobs = asyncio.get_running_loop(), self._knobs
        next_s = loop.time()
        for turn in count():
            site = self._core.fleet.sites.get(other)
            urls = [one.url for one in site.instances.values()] if site is not None else []
            if site is not None and site.probe_url:
                urls.append(site.probe_url)
            if urls:
                url = urls[turn % len(urls)]
                # one after the other: the shortest is the network's, a longer one may be this process's own delay
                rtts = [await probing.connect_ms(url, knobs.probe_timeout_ms) for _ in range(knobs.probe_connects)]
                number = next(self._numbers)
                self._runner.feed(
                    ProbeTaken(
                        id=f"probe:{other}:{number}", site=self._core.site, other_site=other, rtts_ms=tuple(rtts)
                    )
                )
            next_s = max(next_s + knobs.probe_ms / 1000, loop.time())
            await asyncio.sleep(next_s - loop.time())

    async def _bandwidth(self, other: str) -> None:
        while True:
            fleet = self._core.fleet
            site, size = fleet.sites.get(other), fleet.probing.bandwidth_bytes
            if site is not None and site.probe_url and size:
                taken = await probing.throughput(self._http(), site.probe_url, size)
                self._runner.feed(
                    BandwidthTaken(
                        id=f"bandwidth:{other}:{next(self._numbers)}",
                        site=self._core.site,
                        other_site=other,
                        bytes_per_s=taken,
                    )
                )
            # a part of its own for each pair, so that a fleet started at once does not probe at once
            part = 0.75 + 0.5 * fraction(self._core.site, other, str(next(self._numbers)))
            await asyncio.sleep(part * fleet.probing.bandwidth_every_s)


class Feeds(Protocol):
    """What the agent needs of a runner."""

    def feed(self, event: Event) -> None:
        """Hand an input to the core."""
        ...


class Engine:
    """One engine's HTTP endpoints, asked in a way that always ends."""

    def __init__(self, session: aiohttp.ClientSession, declared: Instance, secret: str, knobs: Knobs) -> None:
        self._session = session
        self._declared = declared
        self._base = declared.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._knobs = knobs
        self._started: float | None = None
        self._identified_s: float | None = None

    async def health(self) -> tuple[int | None, str]:
        """(status, why there is none: `refused` or `silent`)."""
        try:
            status, _ = await self._get("/health")
        except (aiohttp.ClientConnectorError, ConnectionResetError):
            return None, "refused"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None, "silent"
        return status, ""

    async def metrics(self) -> Metrics | None:
        """The page in one form; None without one in time. An engine that has no such page says nothing: all unknown."""
        try:
            status, page = await self._get("/metrics")
            if status == 404:
                return Metrics()
            return engines.metrics(self._declared.engine, page) if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):  # EngineError is a ValueError
            return None

    def must_identify(self, metrics: Metrics | None, wanted: bool) -> bool:
        """Whether to ask who it is: nobody knows, it began anew, or it has not been asked for a while."""
        started = metrics.started_unix_s if metrics is not None else self._started
        anew, self._started = started != self._started, started
        now_s = asyncio.get_running_loop().time()
        old = self._identified_s is None or now_s - self._identified_s >= self._knobs.identity_ms / 1000
        return wanted or anew or old

    async def identify(self) -> Identity | None:
        """What it serves, and its version; None without an answer."""
        models, version = await asyncio.gather(
            self._get("/v1/models"),
            self._get(engines.VERSION_PATHS[self._declared.engine]),
            return_exceptions=True,
        )
        for failure in (models, version):
            if isinstance(failure, BaseException) and not isinstance(failure, _FAILURES):
                raise failure
        if isinstance(models, BaseException) or models[0] != 200:
            return None
        try:
            served = engines.models(models[1])
        except engines.EngineError:
            return None
        said = "" if isinstance(version, BaseException) or version[0] != 200 else engines.version(version[1])
        self._identified_s = asyncio.get_running_loop().time()
        return Identity(served=served, engine_version=said)

    async def kv_event_sources(self) -> tuple[int, bytes] | None:
        """(status, page) where it says who publishes its KV events; None without an answer."""
        try:
            return await self._get("/kv_event_sources")
        except _FAILURES:
            return None

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self._base + path, headers=self._headers, allow_redirects=False) as answer:
            content = b""
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > _ANSWER_BYTES_MAX:
                    raise ValueError(f"{path}: an answer of more than {_ANSWER_BYTES_MAX} bytes")
            return answer.status, content


_FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
