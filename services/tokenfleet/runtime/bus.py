"""NATS JetStream as the services use it: ordered readers, plain and acknowledged publishing, an outbox.

The ordered reader is ours, over nats-py's plain subscriptions, because a stock ordered consumer resumes only after
its default heartbeat (5 s) and reuses names that collide under restricted permissions: here every (re)creation
takes a fresh consumer name, beats every 0.5 s and starts from an explicit sequence.
"""

import asyncio
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.subscription import Subscription
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.direct import DirectClient
from tokenfleet.runtime.settings import Settings
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas import codec
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import subject_of
from tokenfleet_schemas.streams import BUCKETS, STREAMS, StreamSpec

log = logging.getLogger("tokenfleet.bus")

#: idle heartbeat of readers, and the silence after which one is created anew
HEARTBEAT_S = 0.5
SILENCE_S = 1.6
#: how long the outbox waits for an acknowledgement
ACK_S = 2.0
_SECOND_NS = 1_000_000_000


class BusError(RuntimeError):
    """The bus refused or did not answer."""


class BusDown(BusError):
    """No connection to the bus at this moment."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One message as a stream delivers it."""

    subject: str
    data: bytes
    sequence: int
    #: the stream's own time of the message, mapped to this process's clock, ms since the epoch
    stored_ms: float
    #: everything before it has been delivered and nothing waits behind it
    last: bool


class Bus:
    """One connection. `connect` waits for the server; after that reconnection is automatic and endless."""

    def __init__(self, settings: Settings, clock: Clock, name: str) -> None:
        self.settings = settings
        #: where to, for people: without what a URL says of user and password
        self.address = re.sub(r"//[^@/]*@", "//", settings.nats_url)
        self.clock = clock
        self.name = re.sub(r"[^A-Za-z0-9_-]", "-", name)
        self.nc = DirectClient()
        self.js: JetStreamContext = self.nc.jetstream(timeout=5)
        self.outbox = Outbox(self)
        self.connected = False
        #: rises with every (re)connection
        self.connections = 0
        self._readers: set[Reader] = set()
        self._reconnected: list[Callable[[], None]] = []
        #: plain messages that could not be written at once
        self._queue: list[tuple[str, bytes, str, str]] = []
        self._queued = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._buckets: dict[str, KeyValue] = {}
        self._dropped = 0
        #: this process's clock minus the server's, measured once per connection: one value for all readers, so that
        #: the order of times is the server's own
        self.server_offset_ms = 0.0
        self._offset_of = 0

    # --- connection -----------------------------------------------------------------------------------------

    async def connect(self, *, patience_s: float = 60.0) -> None:
        """Connect, waiting for a server that is not there yet; raises `BusDown` after `patience_s`."""
        user = self.settings.nats_user
        options: dict[str, Any] = {"user": user, "password": self.settings.nats_password} if user else {}
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                # nats-py would retry a first connection for ever, inside this call
                async with asyncio.timeout(min(5.0, patience_s)):
                    await self._connect_once(options)
                break
            except nats.errors.AuthorizationError:
                raise BusError(f"NATS refused user {user!r}") from None
            except (OSError, nats.errors.Error, TimeoutError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise BusDown(f"no NATS at {self.address}: {str(error) or 'no answer'}") from None
                log.info("waiting for NATS", extra={"url": self.address})
                await asyncio.sleep(0.3)
                self.nc = DirectClient()
                self.js = self.nc.jetstream(timeout=5)
        self.connected = True
        self.connections += 1
        self.spawn(self._pump())
        await self.outbox.start()

    async def _connect_once(self, options: dict[str, Any]) -> None:
        user = self.settings.nats_user
        await self.nc.connect(
            self.settings.nats_url.split(","),
            name=self.name,
            inbox_prefix=f"_INBOX_{user}" if user else "_INBOX",
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # annotated int, used as seconds
            connect_timeout=2,
            ping_interval=10,
            max_outstanding_pings=2,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_disconnected,
            **options,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task of the bus; it ends with `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stop readers and tasks, write out what is queued, disconnect."""
        for reader in list(self._readers):
            await reader.stop()
        for _ in range(20):
            if not self._queue:
                break
            await asyncio.sleep(0.01)
        if self.connected:
            self.nc.write_said()
            try:
                await self.nc.flush(timeout=1)
            except (nats.errors.Error, TimeoutError) as error:
                log.warning("flush at close failed", extra={"error": repr(error)})
        await cancel_and_wait(self._tasks)
        self.connected = False  # so that this end is not taken for a lost connection
        await self.nc.close()

    def measure_offset(self, server_time: str) -> None:
        """Compare the clocks, from a time that the server has just written."""
        if self._offset_of != self.connections:
            self._offset_of = self.connections
            self.server_offset_ms = self.clock.now_ms() - unix_ms(server_time)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """Call this after every reconnection."""
        self._reconnected.append(callback)

    async def _on_error(self, error: Exception) -> None:
        log.warning("NATS client error", extra={"error": repr(error)})

    async def _on_disconnected(self) -> None:
        if self.connected:
            log.warning("NATS connection lost", extra={"url": self.address})
        self.connected = False
        self._dropped += len(self._queue)
        self._queue.clear()

    async def _on_reconnected(self) -> None:
        self.connected = True
        self.connections += 1
        log.info("NATS connection back", extra={"url": self.address})
        for reader in self._readers:
            reader.restart()
        for callback in self._reconnected:
            callback()

    # --- streams --------------------------------------------------------------------------------------------

    async def provision(self, specs: tuple[StreamSpec, ...] = STREAMS) -> None:
        """Create or update every stream and KV bucket; raises `BusError` where the server refuses."""
        try:
            for spec in specs:
                await self._provision_stream(spec)
            for bucket, kept in BUCKETS.items():
                try:
                    await self.js.key_value(bucket)
                except nats.js.errors.NotFoundError:
                    await self.js.create_key_value(
                        bucket=bucket,
                        history=1,
                        storage=StorageType.FILE,
                        direct=True,
                        ttl=kept.ttl_s,
                        max_bytes=kept.max_bytes,
                    )
        except (nats.js.errors.APIError, nats.errors.Error, TimeoutError) as error:
            raise BusError(f"provisioning streams: {error!r}") from None

    async def _provision_stream(self, spec: StreamSpec) -> None:
        ours: dict[str, Any] = {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": RetentionPolicy.LIMITS,
            "storage": StorageType.FILE,
            "max_age": float(spec.max_age_s),
            "max_bytes": spec.max_bytes,
            "max_msgs_per_subject": spec.max_msgs_per_subject or -1,
            "discard": DiscardPolicy(spec.discard),
            "duplicate_window": float(min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s)),
            "allow_direct": True,
        }
        for _ in range(2):
            try:
                found = (await self.js.stream_info(spec.name)).config
            except nats.js.errors.NotFoundError:
                try:
                    await self.js.add_stream(StreamConfig(**ours))
                    return
                except nats.js.errors.BadRequestError:
                    continue  # a neighbour was faster
            # the number of replicas, and what else we do not care about, is the operator's
            await self.js.update_stream(found.evolve(**ours))
            return
        raise BusError(f"stream {spec.name} can neither be made nor found")

    async def wait_provisioned(self, *, patience_s: float = 60.0) -> None:
        """For users who may not create streams: wait until somebody did; raises `BusError`."""
        deadline = asyncio.get_running_loop().time() + patience_s
        for spec in STREAMS:
            while True:
                try:
                    self._check_limits(spec, (await self.js.stream_info(spec.name)).config)
                    break
                except (nats.js.errors.NotFoundError, TimeoutError):
                    if asyncio.get_running_loop().time() > deadline:
                        raise BusError(f"stream {spec.name} was never created") from None
                    await asyncio.sleep(0.3)

    def _check_limits(self, spec: StreamSpec, found: StreamConfig) -> None:
        """A stream that drops what must not be lost, or holds less than it should, is said at the start."""
        wanted = {"max_age_s": float(spec.max_age_s), "max_bytes": spec.max_bytes, "discard": spec.discard}
        has = {
            "max_age_s": float(found.max_age or 0.0),
            "max_bytes": found.max_bytes,
            "discard": DiscardPolicy(found.discard).value,
        }
        if has != wanted:
            log.error("a stream has other limits than it should", extra={"stream": spec.name, "has": has})

    async def bucket(self, name: str) -> KeyValue:
        """A KV bucket that `provision` made."""
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = await self.js.key_value(name)
        return found

    def view_ages(self) -> dict[str, float]:
        """Stream → seconds since its most silent reader heard of it (heartbeats count): how old our copy may be."""
        ages: dict[str, float] = {}
        for reader in self._readers:
            ages[reader.stream] = max(ages.get(reader.stream, 0.0), reader.age_s)
        return ages

    # --- publishing -----------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Plain messages lost because the connection broke before they were written."""
        return self._dropped + self.nc.lost

    def publish(self, event: Event) -> None:
        """Publish plainly: its stream captures it, nobody waits. Raises `BusDown` when not connected."""
        if not self.connected:
            raise BusDown("not connected to NATS")
        self.write(subject_of(event), codec.encode_routed(event), event.id)

    def write(self, subject: str, data: bytes, message_id: str, reply: str = "") -> None:
        """Write one message now, or, where the socket does not take it, as soon as it does; in order."""
        if self._queue or not self.nc.say(subject, data, message_id, reply):
            self._queue.append((subject, data, message_id, reply))
            self._queued.set()

    async def publish_acked(self, event: Event, *, timeout_s: float = 2.0) -> int:
        """Publish and wait for the stream's acknowledgement; its sequence. Raises `BusError`, `BusDown`."""
        if not self.connected:
            raise BusDown("not connected to NATS")
        self.nc.write_said()  # what was said before stays before
        await self._write_out()
        try:
            ack = await self.js.publish(
                subject_of(event), codec.encode(event), timeout=timeout_s, headers={"Nats-Msg-Id": event.id}
            )
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusError(f"{type(event).__name__} not acknowledged: {error!r}") from None
        return ack.seq

    async def _pump(self) -> None:
        """Write what could not be written at once, in order."""
        while True:
            await self._queued.wait()
            self._queued.clear()
            await self._write_out()

    async def _write_out(self) -> None:
        batch, self._queue = self._queue, []
        for subject, data, message_id, reply in batch:
            try:
                await self.nc.publish(subject, data, reply=reply, headers={"Nats-Msg-Id": message_id})
            except nats.errors.Error as error:
                self._dropped += 1
                log.warning("publish failed", extra={"subject": subject, "error": repr(error)})

    # --- reading --------------------------------------------------------------------------------------------

    async def read_raw(
        self,
        filter: str,
        handler: Callable[[Captured], None],
        *,
        stream: str,
        since_s: float | None = None,
        latest: bool = False,
        after_sequence: int | None = None,
    ) -> "Reader":
        """An ordered reader of a stream's messages that match one filter; see `read`.

        `after_sequence` resumes behind a checkpoint. The handler is called in stream order and must not raise.
        """
        reader = Reader(self, filter, handler, stream, since_s=since_s, latest=latest, after_sequence=after_sequence)
        self._readers.add(reader)
        await reader.start()
        return reader

    async def read(
        self,
        filter: str,
        handler: Callable[[Event, float], None],
        *,
        stream: str,
        since_s: float | None = None,
        latest: bool = False,
        accept: Callable[[str], bool] | None = None,
    ) -> "Reader":
        """An ordered reader that decodes: `handler(event, now_ms)`.

        `since_s` None reads all that is kept, 0 only what comes from now on; `latest` reads the last value of every
        subject first. `accept` looks at the subject before anything is decoded. Bytes that are no message of the
        contract are logged, counted in `reader.undecodable` and skipped.
        """

        def deliver(captured: Captured) -> None:
            if accept is not None and not accept(captured.subject):
                return
            event = reader.decode(captured)
            if event is not None:
                handler(event, self.clock.now_ms())

        reader = Reader(self, filter, deliver, stream, since_s=since_s, latest=latest, after_sequence=None)
        self._readers.add(reader)
        await reader.start()
        return reader


class Reader:
    """One ordered consumer, created anew on a gap, on silence and after a reconnection."""

    def __init__(
        self,
        bus: Bus,
        filter: str,
        handler: Callable[[Captured], None],
        stream: str,
        *,
        since_s: float | None,
        latest: bool,
        after_sequence: int | None,
    ) -> None:
        self.filter = filter
        self.stream = stream
        self.caught_up = asyncio.Event()
        #: last stream sequence delivered
        self.sequence = after_sequence or 0
        self.undecodable = 0
        #: times it was created anew
        self.resets = 0
        #: identity of the stream; another one means that it was re-created
        self.stream_created = ""
        #: everything held back at the consumer's creation
        self.backlog = 0
        self._bus = bus
        self._handler = handler
        self._since_s = since_s
        self._latest = latest
        self._resume = after_sequence is not None
        self._expected = 1
        self._consumer = ""
        self._subscription: Subscription | None = None
        self._time_s = asyncio.get_running_loop().time
        #: event loop's time of the last sign of the consumer
        self._heard_s = self._time_s()
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Create the consumer, waiting for the stream if it is not there yet, and watch it from now on."""
        created: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = self._bus.spawn(self._watch(created))
        await created

    def restart(self) -> None:
        """Create the consumer anew at the next turn (after a reconnection)."""
        self.caught_up.clear()
        self._restart.set()

    @property
    def age_s(self) -> float:
        """Since the last sign of the consumer."""
        return self._time_s() - self._heard_s

    async def stop(self) -> None:
        """Stop reading; the server forgets the consumer by itself."""
        self._stopped = True
        self._bus._readers.discard(self)
        if self._task is not None:
            await cancel_and_wait([self._task])
        await self._unsubscribe()

    def decode(self, captured: Captured) -> Event | None:
        """The message's event; None, counted and logged, when it is none."""
        try:
            return codec.decode(captured.data)
        except codec.ContractError as error:
            self.undecodable += 1
            log.warning(
                "undecodable message skipped",
                extra={"subject": captured.subject, "sequence": captured.sequence, "error": str(error)[:200]},
            )
            return None

    async def _watch(self, created: "asyncio.Future[None]") -> None:
        """Create; then create again whenever the consumer is silent, gapped or asked to restart."""
        pause_s = 0.1
        while not self._stopped:
            if not self._bus.connected:
                await asyncio.sleep(0.05)
                continue
            self._restart.clear()
            try:
                await self._create()
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError, BusError) as error:
                log.warning(
                    "reader could not be created",
                    extra={"stream": self.stream, "filter": self.filter, "error": repr(error)},
                )
                await asyncio.sleep(pause_s)
                pause_s = min(1.0, pause_s * 2)
                continue
            pause_s = 0.1
            if not created.done():
                created.set_result(None)
            await self._silent_or_restarted()
            self.resets += 1

    async def _silent_or_restarted(self) -> None:
        """Return when the consumer has to be created anew. Messages only leave a time: no task wakes for each."""
        self._heard_s = self._time_s()
        while not self._restart.is_set():
            left_s = self._heard_s + SILENCE_S - self._time_s()
            if left_s <= 0:
                # a stall of our own process lets timers fire before what waits in the socket is read
                await asyncio.sleep(0.05)
                if self._heard_s + SILENCE_S > self._time_s():
                    continue
                if self._bus.connected:
                    log.warning("reader is silent", extra={"stream": self.stream, "filter": self.filter})
                    self.caught_up.clear()
                    return
                left_s = SILENCE_S
            try:
                # not `wait_for`: before Python 3.12 it swallows a cancellation that meets a message
                async with asyncio.timeout(left_s):
                    await self._restart.wait()
            except TimeoutError:
                pass  # heard in the meantime, or looked at above

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            try:
                await self._bus.nc.leave(subscription)
            except nats.errors.Error as error:
                log.debug("unsubscribe", extra={"error": repr(error)})

    async def _create(self) -> None:
        await self._unsubscribe()
        bus = self._bus
        name = f"{bus.name}-{secrets.token_hex(6)}"
        inbox = bus.nc.new_inbox()
        info = await self._api(f"$JS.API.STREAM.INFO.{self.stream}", {})
        bus.measure_offset(info["ts"])  # before the first message can come
        stream_created = str(info["created"])
        if self.stream_created and stream_created != self.stream_created:
            log.warning("stream was re-created; reading it from its beginning", extra={"stream": self.stream})
            self.sequence, self._resume = 0, False
        self.stream_created = stream_created
        config: dict[str, Any] = {
            "name": name,
            "deliver_subject": inbox,
            "filter_subject": self.filter,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * _SECOND_NS),
            "inactive_threshold": 5 * _SECOND_NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        last_sequence = int(info["state"]["last_seq"])
        if self._resume or self.sequence:
            # a stream restored from a backup may end before what we have seen
            self.sequence = min(self.sequence, last_sequence)
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence + 1}
        elif self._latest:
            config |= {"deliver_policy": "last_per_subject"}
        elif self._since_s is None:
            config |= {"deliver_policy": "all"}
        elif self._since_s <= 0:
            # an explicit sequence, so that nothing is lost when the consumer is created anew
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": last_sequence + 1}
            self.sequence, self._resume = last_sequence, True
        else:
            start = _seconds_before(info["ts"], self._since_s)
            config |= {"deliver_policy": "by_start_time", "opt_start_time": start}
        self._expected = 1
        self._consumer = name
        self._subscription = await bus.nc.listen(inbox, self._take)
        answer = await self._api(
            f"$JS.API.CONSUMER.CREATE.{self.stream}.{name}.{self.filter}",
            {"stream_name": self.stream, "config": config, "action": "create"},
        )
        self.backlog = int(answer["num_pending"]) + int(answer["delivered"]["consumer_seq"])
        if self.backlog == 0:
            self.caught_up.set()

    async def _api(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        reply = await self._bus.nc.request(subject, msgspec.json.encode(request) if request else b"", timeout=3)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            raise BusError(f"{self.stream}: {answer['error'].get('description', answer['error'])}")
        return answer

    def _take(self, subject: str, reply: str, data: bytes, status: dict[str, str] | None) -> None:
        self._heard_s = self._time_s()
        if status is not None:
            self._on_control(reply, status)
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time ns>.<pending>, with domain
        # and account hash after $JS.ACK (and a random token behind) where there are more than nine tokens
        tokens = reply.split(".")
        at = 2 if len(tokens) == 9 else 4
        if tokens[at + 1] != self._consumer:
            return  # of a consumer that was given up
        if int(tokens[at + 4]) != self._expected:
            log.warning("reader has a gap", extra={"stream": self.stream, "filter": self.filter})
            self._expected = -1  # nothing more of this consumer
            self._consumer = ""
            self.restart()
            return
        self._expected += 1
        sequence, pending = int(tokens[at + 3]), tokens[at + 6]
        if sequence <= self.sequence:
            return
        self.sequence = sequence
        stored_ms = int(tokens[at + 5]) / 1e6 + self._bus.server_offset_ms
        last = pending == "0"
        self._handler(Captured(subject=subject, data=data, sequence=sequence, stored_ms=stored_ms, last=last))
        if last and not self.caught_up.is_set():
            self.caught_up.set()

    def _on_control(self, reply: str, headers: dict[str, str]) -> None:
        """Heartbeats tell the last sequence sent (a lost tail shows); flow control wants an empty answer."""
        if headers["Status"] != "100":
            log.warning("reader ended by the server", extra={"stream": self.stream, "status": dict(headers)})
            self.restart()
            return
        stalled = headers.get("Nats-Consumer-Stalled")
        answer_to = reply or stalled
        if answer_to and self._bus.connected:
            self._bus.spawn(self._answer(answer_to))
        last = headers.get("Nats-Last-Consumer")
        if last is not None and self._consumer:
            if int(last) >= self._expected:
                log.warning("reader lost its tail", extra={"stream": self.stream, "filter": self.filter})
                self.restart()
            elif not self.caught_up.is_set() and int(last) >= self.backlog:
                self.caught_up.set()

    async def _answer(self, subject: str) -> None:
        try:
            await self._bus.nc.publish(subject, b"")
        except nats.errors.Error as error:
            log.debug("flow control", extra={"error": repr(error)})


def unix_ms(stamp: str) -> float:
    """An RFC 3339 time with nanoseconds, as NATS writes it, in ms since the epoch."""
    value = msgspec.convert(stamp, type=datetime)
    return value.timestamp() * 1000


def _seconds_before(stamp: str, seconds: float) -> str:
    value = msgspec.convert(stamp, type=datetime)
    return (value - timedelta(seconds=seconds)).isoformat()


class _Sent(msgspec.Struct):
    """A fact of the outbox on its way."""

    event: Event
    #: event loop's time after which no acknowledgement is awaited
    until_s: float


class Outbox:
    """Facts that must not be lost: kept in memory and published until their stream acknowledged them.

    Acknowledgements come to one inbox, numbered; one task looks at what is late. (A request of nats-py each would cost
    more than the rest of a fact's way.)
    """

    def __init__(self, bus: Bus, *, in_flight_max: int = 64) -> None:
        self._bus = bus
        self._waiting: dict[str, Event] = {}
        #: number → what was sent under it
        self._sent: dict[int, _Sent] = {}
        self._in_flight: set[str] = set()
        #: event → (not before, pause then) after it failed
        self._paused: dict[str, tuple[float, float]] = {}
        #: events that nobody has tried to send yet, in order
        self._fresh: deque[str] = deque()
        self._number = 0
        self._inbox = ""
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._in_flight_max = in_flight_max
        self._time_s: Callable[[], float] = lambda: 0.0
        self.acknowledged = 0
        self.retried = 0

    @property
    def pending(self) -> int:
        """Events not yet acknowledged."""
        return len(self._waiting)

    def put(self, event: Event) -> None:
        """Take responsibility for an event; a repeated id is the same event."""
        self._waiting[event.id] = event
        self._empty.clear()
        self._fresh.append(event.id)
        self._fill()
        self._wake.set()

    async def drained(self) -> None:
        """Wait until everything is acknowledged."""
        await self._empty.wait()

    async def start(self) -> None:
        """Begin to publish; called by the bus once it is connected."""
        self._time_s = asyncio.get_running_loop().time
        self._inbox = self._bus.nc.new_inbox()
        await self._bus.nc.listen(f"{self._inbox}.*", self._on_answer)
        self._bus.on_reconnected(self._again)
        self._bus.spawn(self._run())
        self._fill()

    def _fill(self) -> None:
        """Send what was not tried yet, as far as it may be in flight."""
        while self._fresh and self._inbox and self._bus.connected and len(self._sent) < self._in_flight_max:
            self._send(self._fresh.popleft())

    def _send(self, key: str) -> None:
        event = self._waiting.get(key)
        if event is None or key in self._in_flight:
            return
        self._number += 1
        self._sent[self._number] = _Sent(event, self._time_s() + ACK_S)
        self._in_flight.add(key)
        self._bus.write(subject_of(event), codec.encode(event), event.id, f"{self._inbox}.{self._number}")

    def _on_answer(self, subject: str, _reply: str, data: bytes, status: dict[str, str] | None) -> None:
        sent = self._sent.pop(int(subject.rpartition(".")[2]), None)
        if sent is None:
            return  # its answer was too late, and it was sent again
        event = sent.event
        if status is not None or b'"error"' in data:
            self._failed(event, f"{status or data[:200]!r}")
            return
        self._in_flight.discard(event.id)
        self._paused.pop(event.id, None)
        if self._waiting.get(event.id) is event:
            del self._waiting[event.id]
        elif event.id in self._waiting:
            self._fresh.append(event.id)  # put anew while it was on its way
        self.acknowledged += 1
        self._fill()
        if not self._waiting:
            self._empty.set()

    def _failed(self, event: Event, why: str) -> None:
        """Try again after a pause that grows."""
        self.retried += 1
        self._in_flight.discard(event.id)
        _, pause_s = self._paused.get(event.id, (0.0, 0.1))
        self._paused[event.id] = (self._time_s() + pause_s, min(2.0, pause_s * 2))
        log.debug("outbox retries", extra={"event": event.id, "error": why, "pending": self.pending})

    def _again(self) -> None:
        """The connection is new: answers to what was sent before it went may never come."""
        for number in list(self._sent):
            sent = self._sent.pop(number)
            self._in_flight.discard(sent.event.id)
            self._fresh.append(sent.event.id)
        self._fill()

    async def _run(self) -> None:
        """Look after what is late, as long as something waits."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await asyncio.sleep(0.1)
                now_s = self._time_s()
                for number in [number for number, sent in self._sent.items() if sent.until_s <= now_s]:
                    self._failed(self._sent.pop(number).event, "not acknowledged")
                if not self._bus.connected:
                    continue
                for key in [key for key, (at_s, _) in self._paused.items() if at_s <= now_s]:
                    if key not in self._waiting:
                        del self._paused[key]
                    elif len(self._sent) < self._in_flight_max:
                        self._send(key)
                self._fill()
