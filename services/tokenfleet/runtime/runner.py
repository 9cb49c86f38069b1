"""Drives a core: messages in stream order, wake-ups, offices, checkpoints; performs what it asks for.

During catch-up the messages of all readers are merged by the time at which their streams stored them, and the core
lives through them at that time: the state is the one it would have, had it been there.
"""

import asyncio
import logging
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import nats.errors
import nats.js.errors
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenfleet.effects import Core, Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet
from tokenfleet.runtime.bus import BusError, Captured, Reader
from tokenfleet.runtime.ownership import Lease
from tokenfleet.runtime.recording import Call, Recorder
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.streams import CHECKPOINTS_BUCKET

log = logging.getLogger("tokenfleet.runner")

CHECKPOINT_S = 10.0
#: a large state is kept less often: its making takes at most one part in so many of the time, but not later than this
CHECKPOINT_SHARE = 500.0
CHECKPOINT_MAX_S = 30.0
#: a checkpoint above this is not kept (NATS' max_payload in our configuration is 8 MiB)
CHECKPOINT_BYTES_MAX = 4 * 1024 * 1024
Gauges = dict[str, dict[tuple[tuple[str, str], ...], float]]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription of a core; see `Bus.read`."""

    filter: str
    stream: str
    since_s: float | None = 900
    latest: bool = False
    accept: Callable[[str], bool] | None = None


@runtime_checkable
class Deciding(Protocol):
    """A core that decides under an office."""

    replica: str

    def scopes(self) -> tuple[str, ...]:
        """The offices it stands for."""
        ...

    def mark(self, scope: str, term: int, now_ms: float) -> Event:
        """The `owned` event that opens its term in the streams."""
        ...

    def resign(self, scope: str, now_ms: float) -> Iterable[Effect]:
        """The lease is lost: decide no more."""
        ...


@runtime_checkable
class Checkpointed(Protocol):
    """A core whose fold can be saved."""

    def snapshot(self) -> bytes:
        """The state."""
        ...

    def restore(self, data: bytes) -> None:
        """Take a state over; raises ValueError for one that it cannot read."""
        ...


class _Checkpoint(msgspec.Struct, frozen=True):
    """A fold's state and how far it had read each stream."""

    state: bytes
    #: filter → (identity of the stream, last sequence)
    read: dict[str, tuple[str, int]]


class Runner:
    """One core on the bus."""

    def __init__(
        self, service: Service, core: Core, reads: Sequence[Read], *, perform: Callable[[Effect], None] | None = None
    ) -> None:
        self.service = service
        self.core = core
        self.reads = list(reads)
        #: all readers delivered everything that was there, and the core has folded it
        self.caught_up = asyncio.Event()
        self._perform_other = perform
        self._readers: dict[str, Reader] = {}
        self._waiting: list[deque[tuple[Captured, Event]]] = []
        self._live = False
        self._now_ms = 0.0
        self._wake_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: name → its notes by labels, in the order of the first one's labels
        self._noted: dict[str, _Counts] = {}
        self._changed = False
        self._recorder: Recorder | None = None
        if service.settings.record_dir:
            self._recorder = Recorder(Path(service.settings.record_dir) / f"{service.name}.{service.replica}.jsonl")
        self._key = re.sub(r"[^A-Za-z0-9._=-]", "-", f"{service.name}.{service.settings.site or '_'}")
        registry = service.metrics
        self._errors = prometheus_client.Counter(
            "tokenfleet_core_errors", "Messages on which the core failed; skipped", ["message"], registry=registry
        )
        self._handled = _Counts("messages_handled", "Messages folded", ("message",))
        registry.register(self._handled)
        self._undelivered = prometheus_client.Counter(
            "tokenfleet_publish_failed", "Plain messages that could not be published", registry=registry
        )
        if hasattr(core, "gauges"):
            registry.register(_Sampled(core.gauges))

    async def run(self) -> None:
        """Catch up, stand for office, decide, until the service stops."""
        service = self.service
        service.ready_when("caught_up", self._is_current)
        service.bus.on_reconnected(self._on_reconnected)
        if hasattr(self.core, "reconfigure"):
            service.on_reload(self._on_reload)
        checkpoint = await self._load_checkpoint()
        for read in self.reads:
            await self._start_reader(read, checkpoint)
        await self._catch_up()
        tasks: list[asyncio.Task[None]] = []
        if isinstance(self.core, Deciding):
            tasks += [asyncio.create_task(self._office(scope)) for scope in self.core.scopes()]
        if isinstance(self.core, Checkpointed):
            tasks.append(asyncio.create_task(self._save_checkpoints()))
        try:
            await service.stopping.wait()
        finally:
            await cancel_and_wait(tasks)
            if self._timer is not None:
                self._timer.cancel()
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None

    def _is_current(self) -> bool:
        return self.caught_up.is_set() and all(reader.caught_up.is_set() for reader in self._readers.values())

    # --- catching up ----------------------------------------------------------------------------------------

    async def _start_reader(self, read: Read, checkpoint: _Checkpoint | None) -> None:
        waiting: deque[tuple[Captured, Event]] = deque()
        self._waiting.append(waiting)
        accept = read.accept
        holder: list[Reader] = []
        early: list[Captured] = []

        def deliver(captured: Captured) -> None:
            if not holder:
                early.append(captured)  # before `read_raw` returned
                return
            if accept is not None and not accept(captured.subject):
                return
            event = holder[0].decode(captured)
            if event is None:
                return
            if self._live:
                self._handle(event, self.service.clock.now_ms())
            else:
                waiting.append((captured, event))

        after = None
        if checkpoint is not None and not read.latest:
            after = checkpoint.read[read.filter][1]
        reader = await self.service.bus.read_raw(
            read.filter, deliver, stream=read.stream, since_s=read.since_s, latest=read.latest, after_sequence=after
        )
        holder.append(reader)
        for captured in early:
            deliver(captured)
        self._readers[read.filter] = reader

    async def _catch_up(self) -> None:
        for reader in self._readers.values():
            await reader.caught_up.wait()
        count = 0
        for captured, event in self._merged():
            self._now_ms = max(self._now_ms, captured.stored_ms)
            self._handle(event, min(self._now_ms, self.service.clock.now_ms()))
            count += 1
            if count % 500 == 0:
                await asyncio.sleep(0)  # let heartbeats through
        self._live = True
        self._wake()
        self.caught_up.set()
        log.info("caught up", extra={"messages": count})

    def _merged(self) -> Iterator[tuple[Captured, Event]]:
        """Everything that waits, oldest first, also what arrives meanwhile."""
        while True:
            oldest = min((q for q in self._waiting if q), key=lambda q: q[0][0].stored_ms, default=None)
            if oldest is None:
                return
            yield oldest.popleft()

    def _on_reconnected(self) -> None:
        """After a silence nobody is late: timers that judge others' silence start anew."""
        resumed = getattr(self.core, "resumed", None)
        if resumed is not None:
            self._do(lambda now_ms: resumed(now_ms), "resumed")

    def _on_reload(self, fleet: Fleet) -> None:
        self._do(lambda now_ms: self.core.reconfigure(fleet, now_ms), "reconfigure")  # type: ignore[attr-defined]

    # --- the core -------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Hand the core an input of the shell's own (a sample, a timer's result) as if it were a message."""
        self._handle(event, self.service.clock.now_ms())

    def _handle(self, event: Event, now_ms: float) -> None:
        kind = type(event)
        self._handled.add((kind.__name__,))
        self._changed = True
        if self._recorder is not None:
            self._recorder.event("handle", event, now_ms)
        try:
            effects = self.core.handle(event, now_ms)
            for effect in effects:
                self._perform(effect)
        except Exception:
            self._errors.labels(kind.__name__).inc()
            log.exception("core failed on a message; skipped", extra={"event": event.id, "message_type": kind.__name__})

    def _do(self, call: Callable[[float], Iterable[Effect]], what: Call, scope: str = "") -> None:
        now_ms = self.service.clock.now_ms()
        if self._recorder is not None:
            self._recorder.write(what, now_ms, scope=scope)
        try:
            for effect in call(now_ms):
                self._perform(effect)
        except Exception:
            self._errors.labels(what).inc()
            log.exception("core failed", extra={"call": what})

    def _wake(self) -> None:
        self._timer, self._wake_at = None, None
        if not self.service.bus.connected:
            self._arm(self.service.clock.now_ms() + 200)  # nobody could hear; silence does not count
            return
        self._do(self.core.wake, "wake")

    def _perform(self, effect: Effect) -> None:
        kind = type(effect)
        if kind is Publish:
            self._publish(effect)  # type: ignore[arg-type]
        elif kind is WakeAt:
            self._arm(effect.at_ms)  # type: ignore[attr-defined]
        elif kind is Note:
            self._note(effect)  # type: ignore[arg-type]
        elif self._perform_other is not None:
            self._perform_other(effect)
        else:
            raise TypeError(f"nobody performs {kind.__name__}")

    def _publish(self, effect: Publish) -> None:
        if self._recorder is not None:
            self._recorder.event("said", effect.event)
        if effect.durable:
            self.service.bus.outbox.put(effect.event)
            return
        try:
            self.service.bus.publish(effect.event)
        except BusError:
            self._undelivered.inc()  # senders resubmit, decisions are repeated then

    def _arm(self, at_ms: float) -> None:
        if self._wake_at is not None and self._wake_at <= at_ms and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = at_ms
        if not self._live:
            return  # `_catch_up` wakes the core at its end
        delay_s = max(0.0, (at_ms - self.service.clock.now_ms()) / 1000)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _note(self, note: Note) -> None:
        counts = self._noted.get(note.name)
        if counts is None:
            counts = self._noted[note.name] = _Counts(note.name, f"Notes of kind {note.name}", tuple(note.labels))
            self.service.metrics.register(counts)
        counts.add(tuple([note.labels[label] for label in counts.labels]))
        if note.level != "debug":
            level = getattr(logging, note.level.upper())
            self.service.log.log(level, note.name, extra={**note.labels, **note.detail})

    # --- offices --------------------------------------------------------------------------------------------

    async def _office(self, scope: str) -> None:
        core = self.core
        assert isinstance(core, Deciding)
        announce = asyncio.Event()

        def lost() -> None:
            self._do(lambda now_ms: core.resign(scope, now_ms), "resign", scope)

        lease = Lease(self.service.bus, scope, self.service.replica, taken=lambda _term: announce.set(), lost=lost)
        holding = asyncio.create_task(lease.run())
        try:
            while True:
                await announce.wait()
                announce.clear()
                await self._announce(lease, core)
        finally:
            await cancel_and_wait([holding])

    async def _announce(self, lease: Lease, core: Deciding) -> None:
        """Write the mark until the stream has it; the core decides from reading it back."""
        while lease.held:
            try:
                now_ms = self.service.clock.now_ms()
                if self._recorder is not None:
                    self._recorder.write("mark", now_ms, scope=lease.scope, term=lease.term)
                await self.service.bus.publish_acked(core.mark(lease.scope, lease.term, now_ms))
                return
            except BusError as error:
                log.warning("mark not written yet", extra={"scope": lease.scope, "error": str(error)})
                await asyncio.sleep(0.2)

    # --- checkpoints ----------------------------------------------------------------------------------------

    async def _load_checkpoint(self) -> _Checkpoint | None:
        core, bus = self.core, self.service.bus
        if not isinstance(core, Checkpointed):
            return None
        try:
            bucket = await bus.bucket(CHECKPOINTS_BUCKET)
            entry = await bucket.get(self._key)
            found = msgspec.msgpack.decode(zlib.decompress(entry.value or b""), type=_Checkpoint)
            for read in self.reads:
                if read.latest:
                    continue
                identity, sequence = found.read[read.filter]
                info = await bus.nc.request(f"$JS.API.STREAM.INFO.{read.stream}", b"", timeout=3)
                state = msgspec.json.decode(info.data)
                if state["created"] != identity or int(state["state"]["first_seq"]) > sequence + 1:
                    log.info("checkpoint is too old for its stream; reading afresh", extra={"stream": read.stream})
                    return None
            if self._recorder is not None:
                self._recorder.write("restore", data=found.state)
            core.restore(found.state)
        except nats.js.errors.NotFoundError:
            return None
        except (KeyError, ValueError, zlib.error, msgspec.DecodeError, nats.errors.Error, TimeoutError) as error:
            log.warning("checkpoint not used; reading afresh", extra={"error": repr(error)})
            return None
        return found

    async def _save_checkpoints(self) -> None:
        pause_s = CHECKPOINT_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = CHECKPOINT_S
            if self._changed and self._live and self.service.bus.connected:
                self._changed = False
                took_s = await self._save_checkpoint()
                pause_s = min(CHECKPOINT_MAX_S, max(CHECKPOINT_S, took_s * CHECKPOINT_SHARE))

    async def _save_checkpoint(self) -> float:
        """Keep the fold as it is now; the seconds that making it took."""
        core = self.core
        assert isinstance(core, Checkpointed)
        began_s = time.perf_counter()
        state = core.snapshot()
        read = {key: (reader.stream_created, reader.sequence) for key, reader in self._readers.items()}
        # in a thread: the loop must not stand still for it
        data = await asyncio.to_thread(zlib.compress, msgspec.msgpack.encode(_Checkpoint(state, read)), 1)
        took_s = time.perf_counter() - began_s
        if len(data) > CHECKPOINT_BYTES_MAX:
            log.warning("checkpoint too large to keep", extra={"bytes": len(data)})
            return took_s
        try:
            bucket = await self.service.bus.bucket(CHECKPOINTS_BUCKET)
            await bucket.put(self._key, data)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            log.warning("checkpoint not written", extra={"error": repr(error)})
        return took_s


class _Counts(prometheus_client.registry.Collector):
    """A counter for one thread: adding is a dictionary's addition, which a message passes often."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self.labels = name, text, labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, values: tuple[str, ...]) -> None:
        """One more with these labels' values."""
        self._values[values] = self._values.get(values, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The family."""
        family = CounterMetricFamily(f"tokenfleet_{self._name}", self._text, labels=self.labels)
        for values, count in self._values.items():
            family.add_metric(values, count)
        yield family


class _Sampled(prometheus_client.registry.Collector):
    """A core's gauges, read when somebody scrapes."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per name."""
        for name, values in self._gauges().items():
            labels = sorted({key for sample in values for key, _ in sample})
            family = GaugeMetricFamily(f"tokenfleet_{name}", f"Present value of {name}", labels=labels)
            for sample, value in values.items():
                given = dict(sample)
                family.add_metric([given.get(label, "") for label in labels], value)
            yield family


async def run_core(
    service: Service, core: Core, reads: Sequence[Read], *, perform: Callable[[Effect], None] | None = None
) -> None:
    """Drive a core until the service stops; see `Runner`."""
    await Runner(service, core, reads, perform=perform).run()
