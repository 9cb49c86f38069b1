"""The gateway's shell: sockets, timers, the bus and the counters around the pure core.

Decides nothing about a request. It feeds the core what it hears and does what the effects say; it watches the clock
for those who fall silent in the middle of an answer, says every two seconds what is open, and stops in order.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import resource
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import prometheus_client
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily

from tokenfleet import keys as api_keys
from tokenfleet.database import create_engine
from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.eligibility import allowed_ready_sites, ready_instances
from tokenfleet.fleet import Fleet
from tokenfleet.gateway.core import Gateway
from tokenfleet.gateway.http import Api, make_request
from tokenfleet.gateway.idempotency import Kept, Once
from tokenfleet.gateway.keys import Find, Keys
from tokenfleet.gateway.openai import ApiError, GatewayError, Parsed
from tokenfleet.gateway.policy import engine_priority
from tokenfleet.gateway.relay import Engines, Exchange, Relay, abort
from tokenfleet.gateway.settings import Limits
from tokenfleet.gateway.state import Dispatch, End, Interrupt, Refuse
from tokenfleet.gateway.tokenization import Tokenization, TokenizationError
from tokenfleet.runtime.bus import BusDown, Reader
from tokenfleet.runtime.probe import Responder
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.service import main as run_service
from tokenfleet_schemas.admission import REASONS
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementRefused
from tokenfleet_schemas.request import Ask
from tokenfleet_schemas.routes import stream_of, subject_filter

#: outcomes that wait for the bus in memory; beyond this, refusals of a long outage leave no row
_OUTBOX_MAX = 50_000
#: file descriptors that are not a client's or an engine's
_OTHER_FILES = 256
_TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 300)


class Gatekeeper:
    """One gateway process at work; `run` is its life."""

    def __init__(self, service: Service, *, find_key: Find, limits: Limits | None = None) -> None:
        if service.settings.site not in service.fleet.sites:
            raise GatewayError(f"TOKENFLEET_SITE: the fleet has no site {service.settings.site!r}")
        if not service.settings.secret:
            raise GatewayError("TOKENFLEET_SECRET is not set: keys, digests and cache salts need it")
        self.service = service
        self.log: logging.Logger = service.log
        self.site = service.settings.site
        self.secret = service.settings.secret
        self.name = service.replica
        self.incarnation = secrets.token_hex(6)
        self.limits = _within_files(limits or Limits())
        self.now_ms = service.clock.now_ms
        self.core = Gateway(
            service.fleet, site=self.site, name=self.name, incarnation=self.incarnation, limits=self.limits
        )
        self.engines = Engines(self.limits, os.environ)
        self.relay = Relay(self.engines, self.limits, self.now_ms)
        self.tokenization = Tokenization(
            service.fleet,
            self.secret,
            directory=Path(service.settings.fleet).resolve().parent,
            ask_engine=self._ask_engine,
        )
        loop = asyncio.get_running_loop()
        self.keys = Keys(find_key, self.secret, clock_s=loop.time)
        self.once = Once(
            service.bus, secret=self.secret, gateway=self.name, incarnation=self.incarnation, limits=self.limits
        )
        self.exchanges: dict[str, Exchange] = {}
        #: where clients are answered, once listening
        self.api_port = 0
        self._fleet = service.fleet
        self._readers: list[Reader] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = float("inf")
        self._emptied = asyncio.Event()
        self._stopping = False
        self._metrics = _Metrics(service.metrics, self._gauges)

    @property
    def fleet(self) -> Fleet:
        """The fleet in force."""
        return self._fleet

    # --- life --------------------------------------------------------------------------------------------------

    async def run(self, listening: Callable[[int], None] | None = None) -> None:
        """Listen, serve until the service stops, let open requests finish, leave nothing behind."""
        service = self.service
        await self._subscribe()
        service.ready_when("events", lambda: all(reader.caught_up.is_set() for reader in self._readers))
        service.on_reload(self._reload)
        service.bus.on_reconnected(self._reconnected)
        server = web.Server(Api(self).handle, request_factory=make_request, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        tasks: list[asyncio.Task[None]] = []
        try:
            site = web.TCPSite(runner, service.settings.host, service.settings.api_port, backlog=2048)
            await site.start()
            self.api_port = int(runner.addresses[0][1])
            tasks = [asyncio.create_task(loop()) for loop in (self._lease, self._watch, self._renew)]
            for task in tasks:
                task.add_done_callback(self._loop_ended)
            self.log.info("listening for clients", extra={"api_port": self.api_port, "gateway": self.name})
            if listening is not None:
                listening(self.api_port)
            await service.stopping.wait()
            self._stopping = True
            await site.stop()
            await self._finish_open()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.once.close()
            await runner.cleanup()
            self._say_lease(closing=True)
            for reader in self._readers:
                await reader.stop()
            if self._timer is not None:
                self._timer.cancel()
            try:
                async with asyncio.timeout(5.0):
                    await service.bus.outbox.drained()
            except TimeoutError:
                self.log.error("outcomes not delivered before the stop", extra={"pending": service.bus.outbox.pending})
            await self.engines.close()

    def _loop_ended(self, task: "asyncio.Task[None]") -> None:
        """Without leases every booking of ours expires, without a watch requests may hang: better to be restarted."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.log.error("the gateway stops: a loop of it failed", exc_info=error)
            self.service.stopping.set()

    async def _subscribe(self) -> None:
        bus = self.service.bus
        for message in (PlacementAssigned, PlacementHeld, PlacementRefused):
            found = await bus.read(
                subject_filter(message, leaf=self.name), self._hear, stream=stream_of(message), since_s=0
            )
            self._readers.append(found)
        self._readers.append(
            await bus.read(
                subject_filter(CapacityReported), self._hear, stream=stream_of(CapacityReported), latest=True
            )
        )

    async def _finish_open(self) -> None:
        """Let what is open finish for a while, then end it with a word to its client."""
        if self.exchanges:
            self.log.info("waiting for open requests", extra={"open": len(self.exchanges)})
        for grace_s in (self.limits.stop_grace_s, 3.0):
            self._emptied.clear()
            if not self.exchanges:
                return
            try:
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
                    return
            except TimeoutError:
                self.apply(self.core.stop(self.now_ms()))
                for exchange in list(self.exchanges.values()):
                    exchange.interrupt(exchange.attempt, "gateway_stopping")

    def not_ready(self) -> list[str]:
        """Names of the checks that fail now."""
        return [*self.service.not_ready(), *(["stopping"] if self._stopping else [])]

    # --- what the API asks -------------------------------------------------------------------------------------

    def closed_to_newcomers(self) -> str:
        """Why no request can be opened now, of `REASONS`; empty if one can."""
        if self._stopping or not self.service.bus.connected:
            return "unavailable"
        return "gateway_full" if self.core.full else ""

    def refused(self, ask: Ask, reason: str, received_ms: float) -> None:
        """A request was refused before it was opened."""
        if self.service.bus.outbox.pending < _OUTBOX_MAX:
            self.apply(self.core.refused(ask, reason, self.now_ms(), received_ms=received_ms))

    def open(
        self,
        request: web.BaseRequest,
        parsed: Parsed,
        ask: Ask,
        *,
        received_ms: float,
        cache_salt: str,
        kept: Kept | None = None,
    ) -> Exchange:
        """Send a request on its road."""
        tier = self._fleet.classes[ask.service_class].tier
        exchange = Exchange(
            request,
            parsed,
            ask,
            cache_salt=cache_salt,
            priority=functools.partial(engine_priority, tier=tier),
            on_first_token=self._first_token,
            on_end=self._ended,
            kept=kept,
        )
        self.exchanges[exchange.request_id] = exchange
        self.apply(self.core.open(ask, self.now_ms(), received_ms=received_ms))
        return exchange

    def close(self, exchange: Exchange, *, fault: bool) -> None:
        """The handler is done with it, whatever happened (`fault`: by a fault of ours): nothing of it stays open."""
        del self.exchanges[exchange.request_id]
        one = self.core.requests.get(exchange.request_id)
        # a run with an idempotency key does not end with its client
        reason = "gateway_error" if fault else "client_left" if exchange.kept is None else "claim_lost"
        if fault and exchange.response is not None:
            abort(exchange)
        if one is not None:
            if one.stage.unplaced:
                self.apply(self.core.left(exchange.request_id, self.now_ms(), reason=reason))
            else:
                status = 0 if exchange.response is None else exchange.response.status
                exchange.conclude(exchange.end("failed_midstream" if fault else "cancelled", reason, status))
        if not self.exchanges:
            self._emptied.set()

    def engine_of(self, instance: str) -> str:
        """`vllm` or `sglang`, as its agent reports or the fleet declares it; empty if neither does."""
        for instances in self.core.capacity.sites.values():
            if instance in instances:
                return instances[instance].report.engine
        site = self._fleet.instance_site(instance)
        return self._fleet.sites[site].instances[instance].engine if site is not None else ""

    def count_error(self, error: ApiError) -> None:
        """One answer that is an error."""
        self._metrics.error(error)

    # --- effects -----------------------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """Do what the core says."""
        for effect in effects:
            if isinstance(effect, Publish):
                self._publish(effect)
            elif isinstance(effect, WakeAt):
                self._arm(effect.at_ms)
            elif isinstance(effect, Dispatch | Refuse):
                exchange = self.exchanges.get(effect.request_id)
                if exchange is not None:
                    exchange.decide(effect)
            elif isinstance(effect, Interrupt):
                exchange = self.exchanges.get(effect.request_id)
                if exchange is not None:
                    exchange.interrupt(effect.attempt, effect.reason)
            elif isinstance(effect, Note):
                self._note(effect)
            else:
                raise TypeError(f"nobody performs {type(effect).__name__}")

    def _publish(self, effect: Publish) -> None:
        event = effect.event
        if isinstance(event, OutcomeFinished):
            self._metrics.finished(event, self._fleet)
            if event.outcome in ("failed", "failed_midstream", "timed_out", "client_stalled"):
                self.log.warning(
                    "attempt failed",
                    extra={
                        "request_id": event.request_id,
                        "attempt": event.attempt,
                        "final": event.final,
                        "outcome": event.outcome,
                        "reason": event.reason,
                        "instance": event.instance,
                    },
                )
        elif isinstance(event, OutcomeStarted):
            self._metrics.started(event)
        if effect.durable:
            self.service.bus.outbox.put(event)
            return
        try:
            self.service.bus.publish(event)
        except BusDown:
            self._metrics.unsaid.inc()  # the core says what matters again once the bus is back

    def _note(self, note: Note) -> None:
        self._metrics.note(note)
        if note.level != "debug":
            self.log.log(getattr(logging, note.level.upper()), note.name, extra={**note.labels, **note.detail})

    def _arm(self, at_ms: float) -> None:
        if at_ms >= self._timer_at_ms:
            return  # the earlier timer looks on; to set each anew costs more than a look in vain
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = at_ms
        delay_s = max(0.0, (at_ms - self.now_ms()) / 1000)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_at_ms = None, float("inf")
        try:
            self.apply(self.core.wake(self.now_ms()))
        except Exception:
            # one request that nobody foresaw must not stop the clock for all others
            self._metrics.skipped.inc()
            self.log.exception("a timer failed")
        finally:
            self._arm(self.core.next_wake_ms)

    # --- what is heard -----------------------------------------------------------------------------------------

    def _hear(self, event: Event, now_ms: float) -> None:
        try:
            self.apply(self.core.handle(event, now_ms))
        except Exception:
            # one message that nobody foresaw must not end the reader for all others
            self._metrics.skipped.inc()
            self.log.exception("event skipped", extra={"event": event.id, "message_type": type(event).__name__})

    def _first_token(self, exchange: Exchange) -> None:
        self.apply(self.core.started(exchange.request_id, self.now_ms()))

    def _ended(self, exchange: Exchange, end: End) -> None:
        if end.input_tokens:
            self.tokenization.learn(exchange.ask.model, exchange.parsed.body_bytes, end.input_tokens)
        self.apply(self.core.ended(exchange.request_id, end, self.now_ms()))

    def _reconnected(self) -> None:
        self.apply(self.core.reconnected(self.now_ms()))
        self._say_lease()

    def _reload(self, fleet: Fleet) -> None:
        if self.site not in fleet.sites:
            self.log.error("fleet not reloaded: this gateway's site is gone", extra={"site": self.site})
            return
        try:
            self.tokenization.reconfigure(fleet)
        except TokenizationError as error:
            self.log.error("fleet not reloaded", extra={"error": str(error)})
            return
        self._fleet = fleet
        self.apply(self.core.reconfigure(fleet, self.now_ms()))

    # --- what time makes due -----------------------------------------------------------------------------------

    async def _lease(self) -> None:
        while True:
            self._say_lease()
            await asyncio.sleep(self.limits.lease_s)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.limits.lease_s)
            await self.once.beat()

    def _say_lease(self, *, closing: bool = False) -> None:
        with contextlib.suppress(BusDown):  # silence is what a lease is judged by
            self.service.bus.publish(self.core.lease(self.now_ms(), closing=closing))

    async def _watch(self) -> None:
        """Find engines that stopped in the middle and clients that stopped reading: one look at all, no timer each."""
        for rounds in itertools.count(1):
            await asyncio.sleep(self.limits.watch_s)
            now_ms = self.now_ms()
            for exchange in list(self.exchanges.values()):
                if not exchange.attempt:
                    continue
                if exchange.write_since_ms is not None:
                    if now_ms - exchange.write_since_ms > self.limits.client_stall_ms:
                        exchange.interrupt(exchange.attempt, "client_stalled")
                elif exchange.first_token and now_ms - exchange.last_read_ms > self.limits.token_gap_ms:
                    exchange.interrupt(exchange.attempt, "token_timeout")
            if rounds % 20 == 0:
                await self.engines.forget_idle()

    async def _ask_engine(self, ask: Ask, what: dict[str, Any]) -> list[int] | None:
        """A prompt's token ids by the `/tokenize` of a ready instance that the tenant's words may go to."""
        core, now_ms = self.core, self.now_ms()
        sites, _ = allowed_ready_sites(self._fleet, core.capacity, ask, now_ms)
        for site in sites[:2]:
            for heard in ready_instances(self._fleet, core.capacity, ask, site, now_ms)[:1]:
                report = heard.report
                headers = {"Content-Type": "application/json"}
                credential = self.engines.credential(report.credential)
                if credential:
                    headers["Authorization"] = f"Bearer {credential}"
                body = msgspec.json.encode({"model": ask.model, **{k: v for k, v in what.items() if v is not None}})
                try:
                    async with asyncio.timeout(2.0):
                        with self.engines.using(report.instance, report.endpoint_url) as session:
                            url = report.endpoint_url.rstrip("/") + "/tokenize"
                            async with session.post(url, data=body, headers=headers) as answer:
                                if answer.status == 200:
                                    return msgspec.json.decode(await answer.read(), type=_Tokenized).tokens
                except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                    self.log.warning(
                        "prompt not tokenized by an engine",
                        extra={"instance": report.instance, "error": type(error).__name__},
                    )
        return None

    def _gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        gauges = self.core.gauges()
        gauges["outbox_pending"] = {(): float(self.service.bus.outbox.pending)}
        gauges["clients"] = {(): float(len(self.exchanges))}
        gauges["kept_answer_bytes"] = {(): float(self.once.kept_bytes)}
        return gauges


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Metrics:
    """Counters with bounded labels: words of ours and names of the fleet file, never a client's."""

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        gauges: Callable[[], dict[str, dict[tuple[tuple[str, str], ...], float]]],
    ) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> prometheus_client.Counter:
            return prometheus_client.Counter(f"tokenfleet_gateway_{name}", text, labels, registry=registry)

        self._children: dict[tuple[object, ...], prometheus_client.Counter] = {}
        self._ttft_of: dict[str, prometheus_client.Histogram] = {}
        self._requests = counter(
            "requests", "Requests by their final outcome", ("tenant", "service_class", "outcome", "status")
        )
        self._attempts = counter("attempts", "Attempts dispatched, by what came of them", ("outcome",))
        self._errors = counter("errors", "Answers that were errors", ("status", "code"))
        self._tokens = counter("tokens", "Tokens of finished attempts", ("service_class", "kind"))
        self._notes = counter("notes", "Declined placements, fallbacks and repeated attempts", ("note", "detail"))
        self.unsaid = counter("unsaid_events", "Plain events not said because the bus was down")
        self.skipped = counter("skipped_events", "Events that could not be handled")
        self._ttft = prometheus_client.Histogram(
            "tokenfleet_gateway_ttft_seconds",
            "From receipt to first token",
            ("service_class",),
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        registry.register(_Sampled(gauges))

    def finished(self, event: OutcomeFinished, fleet: Fleet) -> None:
        """An attempt, or a request that had none, ended."""
        if event.attempt:
            self._child(self._attempts, event.outcome).inc()
        if event.final:
            tenant = event.tenant if event.tenant in fleet.tenants else "other"
            self._child(self._requests, tenant, event.service_class, event.outcome, str(event.status)).inc()
        if event.output_tokens:
            self._child(self._tokens, event.service_class, "output").inc(event.output_tokens)

    def _child(self, parent: prometheus_client.Counter, *labels: str) -> prometheus_client.Counter:
        """The counter of these labels; finding it once saves most of what counting costs."""
        key = (parent, *labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = parent.labels(*labels)
        return found

    def started(self, event: OutcomeStarted) -> None:
        """A first token."""
        found = self._ttft_of.get(event.service_class)
        if found is None:
            found = self._ttft_of[event.service_class] = self._ttft.labels(event.service_class)
        found.observe(event.ttft_ms / 1000)

    def error(self, error: ApiError) -> None:
        """An error was answered; codes of refusals come from other services and are bounded here."""
        known = error.code in REASONS or error.status < 500
        self._errors.labels(str(error.status), error.code if known else "other").inc()

    def note(self, note: Note) -> None:
        """A note of the core."""
        self._notes.labels(note.name, next(iter(note.labels.values()), "")).inc()


class _Sampled(prometheus_client.registry.Collector):
    """Gauges that are read when somebody scrapes."""

    def __init__(self, gauges: Callable[[], dict[str, dict[tuple[tuple[str, str], ...], float]]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per name."""
        for name, values in self._gauges().items():
            labels = sorted({key for sample in values for key, _ in sample})
            family = GaugeMetricFamily(f"tokenfleet_gateway_{name}", f"Present value of {name}", labels=labels)
            for sample, value in values.items():
                given = dict(sample)
                family.add_metric([given[label] for label in labels], value)
            yield family


def _within_files(limits: Limits) -> Limits:
    """As many open requests as files allow: each takes a client's connection and an engine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    affordable = max(16, (hard - _OTHER_FILES) // 2) if hard != resource.RLIM_INFINITY else limits.max_open
    return msgspec.structs.replace(limits, max_open=min(limits.max_open, affordable))


async def body(service: Service) -> None:
    """What the process does between start and stop."""
    database = create_engine(service.settings.postgres_url, application="tokenfleet-gateway")
    try:
        keeper = Gatekeeper(service, find_key=functools.partial(api_keys.find, database))
        service.page("probe", Responder(asyncio.get_running_loop().time).answer)
        await keeper.run()
    except GatewayError as error:
        service.log.error("cannot serve", extra={"error": str(error)})
        raise SystemExit(2) from None
    finally:
        await database.dispose()


def main() -> int:
    """Run a gateway by the environment; its exit code: 0 stopped, 1 it failed, 2 settings or fleet are wrong."""
    return run_service("gateway", body, database=True)
