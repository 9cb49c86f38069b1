"""The shell of the accountant: the core on the bus, and the writer between the outcome stream and Postgres.

Decides nothing about requests. Every replica folds and writes; one, by lease, speaks. An event is acknowledged after
its row is committed, so a crash between the two delivers it again, to whom the unique key is no news. While Postgres
does not take rows, events wait on the bus, handed back with a growing delay.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence

import nats.errors
import prometheus_client
from nats.aio.msg import Msg
from sqlalchemy.ext.asyncio import AsyncEngine

from tokenfleet import database
from tokenfleet.accountant import partitions, store
from tokenfleet.accountant.core import Accountant
from tokenfleet.accountant.intake import Intake
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.accountant.settings import CONSUMER, OFFICE, AccountantSettings
from tokenfleet.runtime.ownership import Lease
from tokenfleet.runtime.runner import Read, Runner
from tokenfleet.runtime.service import Service
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.routes import stream_of, subject_filter

#: how far back the fold reads without a checkpoint, s: nothing is open for longer
HISTORY_S = 7_200.0

READS = tuple(
    Read(filter=wanted, stream=stream_of(message), since_s=HISTORY_S)
    for message, wanted in (
        (RequestReceived, subject_filter(RequestReceived)),
        # first tokens and ends by one reader, so that they keep their order
        (OutcomeFinished, subject_filter("outcome")),
        (GatewayLeased, subject_filter(GatewayLeased)),
    )
)


class Writer:
    """One replica's share of writing the ledger."""

    def __init__(
        self, service: Service, engine: AsyncEngine, medians: OutputMedian, settings: AccountantSettings
    ) -> None:
        self._service = service
        self._engine = engine
        self._medians = medians
        self._settings = settings
        self._pause_s = 0.0
        #: what a test may hook in: called after the commit, before the acknowledgements
        self.committed: Callable[[], Awaitable[None]] | None = None
        self.intake = Intake(
            service.bus,
            stream=stream_of(OutcomeFinished),
            consumer=CONSUMER,
            filter=subject_filter(OutcomeFinished),
            ack_wait_s=settings.ack_wait_s,
            ack_pending_max=settings.ack_pending_max,
        )
        registry = service.metrics
        self._rows = prometheus_client.Counter(
            "tokenfleet_ledger_rows", "Rows written to the ledger", registry=registry
        )
        self._duplicates = prometheus_client.Counter(
            "tokenfleet_ledger_duplicates", "Outcomes that the ledger had already", registry=registry
        )
        self._replaced = prometheus_client.Counter(
            "tokenfleet_ledger_replaced", "owner_lost rows replaced by a true outcome", registry=registry
        )
        self._poison = prometheus_client.Counter(
            "tokenfleet_ledger_quarantined", "Outcomes put into quarantine", registry=registry
        )
        self._retries = prometheus_client.Counter(
            "tokenfleet_ledger_retries", "Batches handed back because Postgres did not take them", registry=registry
        )
        self._seconds = prometheus_client.Histogram(
            "tokenfleet_ledger_batch_seconds",
            "Time to write and commit one batch",
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self._lag = prometheus_client.Gauge(
            "tokenfleet_ledger_lag", "Outcomes on the bus that are not in the ledger yet", registry=registry
        )

    @property
    def healthy(self) -> bool:
        """The last batch went in."""
        return self._pause_s == 0.0

    async def run(self) -> None:
        """Write until the service stops; a batch that has been begun is finished first."""
        stopping, settings = self._service.stopping, self._settings
        rows_max = min(settings.batch_rows_min, settings.batch_rows_max)
        watches = (asyncio.create_task(self._watch_lag()), asyncio.create_task(self._watch_days()))
        try:
            while not stopping.is_set():
                batch = await self.intake.take(rows_max, wait_s=0.5, company_s=settings.batch_wait_s)
                if batch:
                    await self._write(batch)
                # what waits on the bus shows as full batches: the longer the queue, the fewer transactions for it
                rows_max = 2 * rows_max if len(batch) == rows_max else rows_max // 2
                rows_max = min(settings.batch_rows_max, max(settings.batch_rows_min, rows_max))
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self.intake.stop()

    async def _write(self, batch: Sequence[Msg]) -> None:
        begun_s = time.monotonic()
        found = [store.read(message.subject, message.data, self._medians) for message in batch]
        rows = [one for one in found if isinstance(one, store.Row)]
        poison = [one for one in found if isinstance(one, store.Poison)]
        for one in poison:
            self._service.log.error("outcome quarantined", extra={"subject": one.subject, "reason": one.reason[:200]})
        try:
            done = await store.write(self._engine, rows, poison)
        except database.ERRORS as error:
            await self._hand_back(batch, error)
            return
        self._pause_s = 0.0
        self._seconds.observe(time.monotonic() - begun_s)
        self._rows.inc(done.inserted)
        self._duplicates.inc(done.duplicates)
        self._replaced.inc(done.replaced)
        self._poison.inc(done.quarantined)
        if done.quarantined > len(poison):
            self._service.log.error("rows refused by Postgres quarantined", extra={"count": done.quarantined})
        if self.committed is not None:
            await self.committed()
        for message in batch:
            await _answer(message.ack)

    async def _hand_back(self, batch: Sequence[Msg], error: BaseException) -> None:
        """Not now: deliver these again after a pause that grows while Postgres stays away, up to a few seconds."""
        settings = self._settings
        self._pause_s = min(settings.retry_max_s, max(settings.retry_min_s, 2 * self._pause_s))
        self._retries.inc()
        self._service.log.warning(
            "Postgres did not take a batch; trying again",
            extra={
                "rows": len(batch),
                "pause_s": self._pause_s,
                "transient": database.is_transient(error),
                "error": database.brief(error),
            },
        )
        for message in batch:
            await _answer(functools.partial(message.nak, delay=self._pause_s))
        try:
            await asyncio.wait_for(self._service.stopping.wait(), self._pause_s)
        except TimeoutError:
            pass

    async def _watch_lag(self) -> None:
        while True:
            lag = await self.intake.lag() if self._service.bus.connected else None
            if lag is not None:
                self._lag.set(lag.waiting + lag.unacknowledged)
            await asyncio.sleep(2.0)

    async def _watch_days(self) -> None:
        """Have the partitions of the coming days; without one rows go to the default partition and are moved later."""
        settings = self._settings
        while True:
            try:
                made = await partitions.ensure(self._engine, ahead=settings.days_ahead)
            except database.ERRORS as error:
                self._service.log.warning(
                    "days of the ledger not made yet; trying again", extra={"error": database.brief(error)}
                )
                await asyncio.sleep(settings.days_retry_s)
                continue
            if made:
                self._service.log.info("days of the ledger made", extra={"partitions": made})
            await asyncio.sleep(settings.days_check_s)


async def _answer(send: Callable[[], Awaitable[None]]) -> None:
    """Acknowledge or hand back; what a broken connection swallows is delivered again, and known."""
    try:
        await send()
    except nats.errors.Error:
        pass


async def run(service: Service) -> None:
    """The accountant until SIGTERM."""
    settings = AccountantSettings()
    engine = database.create_engine(
        service.settings.postgres_url,
        application=f"tokenfleet-accountant {service.replica}"[:63],
        pool_size=settings.pool_size,
        statement_timeout_ms=settings.statement_timeout_ms,
        lock_timeout_ms=settings.lock_timeout_ms,
        pre_ping=False,
    )
    try:
        if not await _schema_ready(service, engine):
            return
        core = Accountant(service.fleet, settings)
        runner = Runner(service, core, READS)
        lease = Lease(service.bus, OFFICE, service.replica, taken=core.take_office, lost=core.leave_office)
        writer = Writer(service, engine, core.medians, settings)
        service.ready_when("ledger", lambda: writer.healthy)
        await _together(service, core, runner, lease, writer)
    finally:
        await engine.dispose()


async def _together(service: Service, core: Accountant, runner: Runner, lease: Lease, writer: Writer) -> None:
    async def speaking() -> None:
        # who has not read the past yet would measure windows with holes
        await runner.caught_up.wait()
        await lease.run()

    async def writing() -> None:
        # estimates of undelivered output are learned from the past
        await runner.caught_up.wait()
        await writer.run()

    folding = asyncio.create_task(runner.run())
    office = asyncio.create_task(speaking())
    ledger = asyncio.create_task(writing())
    stopped = asyncio.create_task(service.stopping.wait())
    try:
        await asyncio.wait([folding, office, ledger, stopped], return_when=asyncio.FIRST_COMPLETED)
        service.stopping.set()
    finally:
        core.leave_office()
        office.cancel()
        if not runner.caught_up.is_set():
            ledger.cancel()
        results = await asyncio.gather(folding, office, ledger, stopped, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _schema_ready(service: Service, engine: AsyncEngine) -> bool:
    """Wait for Postgres and its schema; False when told to stop meanwhile. Raises `SchemaAheadError`."""
    said = ""
    while not service.stopping.is_set():
        try:
            await database.check_schema(engine)
            return True
        except (database.SchemaBehindError, database.DatabaseDownError) as error:
            if str(error) != said:
                said = str(error)
                service.log.warning("waiting for Postgres", extra={"error": said})
        try:
            await asyncio.wait_for(service.stopping.wait(), 0.5)
        except TimeoutError:
            pass
    return False
