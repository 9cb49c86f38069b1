"""Listens to the engines' KV events and says what changed: the shell around `kv_events`.

Decides where an instance's publishers are, when to ask them again for what was lost, and when a silence is an alarm.
What an event means is `kv_events`' business; what follows from a change, TokenPilot's. Without pyzmq no engine is
listened to, and every instance stays with the approximate index.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import prometheus_client

from tokenfleet.fleet import Fleet, Instance
from tokenfleet.prefix import DIGEST_BYTES
from tokenfleet.runtime.bus import Bus, BusDown
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet.siteagent import kv_summary
from tokenfleet.siteagent.kv_events import (
    Blocks,
    Content,
    Feed,
    Gap,
    Keys,
    KvEventError,
    Source,
    replayed_frames,
    sources,
)
from tokenfleet.siteagent.settings import Knobs
from tokenfleet.siteagent.state import Record
from tokenfleet_schemas import codec
from tokenfleet_schemas.kv import KvChanged, KvRequested, KvSummarised
from tokenfleet_schemas.routes import subject_filter

try:
    import zmq
    import zmq.asyncio
except ImportError:  # an agent without the extra's library
    AVAILABLE = False
else:
    AVAILABLE = True

log = logging.getLogger("tokenfleet.siteagent")

#: digests in one message: 2 MiB, far below what the bus carries
_MESSAGE_DIGESTS = 262_144
#: GET /kv_event_sources: (status, body), or None without an answer
Ask = Callable[[], Awaitable[tuple[int, bytes] | None]]


class Meters:
    """What operators see of KV events, by instance."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(f"tokenfleet_{name}", text, ["instance", *labels], registry=registry)

        self.digests = gauge("kv_digests", "Prefix digests that an instance holds by its KV events")
        self.silent = gauge("kv_events_silent", "1: KV events are configured, requests run, and no event comes")
        self.gaps = gauge("kv_gaps", "Gaps in the KV events of an instance since the agent began to listen")
        self.unrecovered = gauge("kv_gap_unrecovered", "Gaps that the engine could not replay: content forgotten")
        self.restarts = gauge("kv_restarts", "Restarts of an instance seen in its KV events")
        self.skipped = gauge("kv_blocks_skipped", "Blocks that could not be told as digests, by why", "reason")

    def show(self, instance: str, content: Content, feeds: list[Feed]) -> None:
        """The present counts."""
        self.digests.labels(instance).set(len(content))
        self.gaps.labels(instance).set(sum(feed.gaps for feed in feeds))
        self.unrecovered.labels(instance).set(sum(feed.gaps_unrecovered for feed in feeds))
        self.restarts.labels(instance).set(sum(feed.restarts for feed in feeds))
        for feed in feeds:
            for reason, count in feed.blocks.skipped.items():
                self.skipped.labels(instance, reason).set(count)

    def forget(self, instance: str) -> None:
        """The instance is no longer declared."""
        for gauge in (self.digests, self.silent, self.gaps, self.unrecovered, self.restarts):
            gauge.remove_by_labels({"instance": instance})
        self.skipped.remove_by_labels({"instance": instance})


class _Anew(Exception):
    """Look for the publishers again."""


class KvReader:
    """One instance: its publishers, its content, what is said of it."""

    def __init__(
        self,
        instance: str,
        declared: Instance,
        *,
        site: str,
        ask: Ask,
        record: Callable[[], Record | None],
        keys: Callable[[], Keys],
        publish: Callable[[KvChanged], None],
        now_ms: Callable[[], float],
        meters: Meters,
        knobs: Knobs,
        context: Any,
    ) -> None:
        self.instance = instance
        self.content = Content()
        self.feeds: list[Feed] = []
        self._declared = declared
        self._site = site
        self._ask = ask
        self._record = record
        self._keys = keys
        self._publish = publish
        self._now_ms = now_ms
        self._meters = meters
        self._knobs = knobs
        self._context = context
        #: numbers rise over restarts of the agent
        self._sequence = int(now_ms())
        self._incarnation = ""
        self._dirty = asyncio.Event()
        #: any message came since the publishers were found: only then is there anything to say
        self._heard = False
        self._snapshot_due = False
        self._silent = False
        self._quiet = _Quiet(knobs)

    @property
    def model(self) -> str:
        """What the instance serves."""
        return self._declared.model

    @property
    def known(self) -> bool:
        """Whether its content is known: it speaks, and nothing of it is in doubt."""
        return self._heard and not self._silent

    def requested(self) -> None:
        """Somebody has lost its place: say everything, soon."""
        if self._heard:
            self._snapshot_due = True
            self._dirty.set()

    def rekey(self) -> None:
        """Other tenants are declared: blocks that come from now on are judged by them."""
        for feed in self.feeds:
            feed.blocks.keys = self._keys()

    async def run(self) -> None:
        """Listen until cancelled."""
        try:
            while True:
                pause_ms = await self._find_and_listen()
                await asyncio.sleep(pause_ms / 1000)
        finally:
            self._meters.forget(self.instance)

    async def _find_and_listen(self) -> float:
        """One attempt; how long to wait until the next, ms."""
        record = self._record()
        if record is None or not record.incarnation:
            return self._knobs.kv_look_ms
        answer = await self._ask()
        if answer is None:
            return self._knobs.kv_retry_ms
        status, page = answer
        if status != 200:
            return self._knobs.kv_absent_ms  # it has no KV events, or is too old to say so
        try:
            found = sources(page, urlsplit(self._declared.url).hostname or "")
        except KvEventError as error:
            log.warning("KV events not understood", extra={"instance": self.instance, "error": str(error)})
            return self._knobs.kv_absent_ms
        if not found:
            return self._knobs.kv_absent_ms
        try:
            await self._listen(found, record)
        except _Anew:
            pass
        except (zmq.ZMQError, KvEventError) as error:
            log.warning("KV events lost", extra={"instance": self.instance, "error": repr(error)})
        return self._knobs.kv_retry_ms

    async def _listen(self, found: tuple[Source, ...], record: Record) -> None:
        self.content, self._heard = Content(), False
        alone = len(found) == 1
        self._incarnation = record.incarnation
        self.feeds = [
            Feed(Blocks(self.content, self._keys(), blocks_max=self._knobs.kv_blocks_max // len(found), alone=alone))
            for _ in found
        ]
        self._quiet.reset(record, self._now_ms())
        listening = [
            asyncio.create_task(self._follow(source, feed)) for source, feed in zip(found, self.feeds, strict=True)
        ]
        try:
            log.info("listening to KV events", extra={"instance": self.instance, "publishers": len(found)})
            while True:
                await self._look()
                for task in listening:
                    if task.done():
                        task.result()
                try:
                    async with asyncio.timeout(self._knobs.kv_look_ms / 1000):
                        await self._dirty.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(self._knobs.kv_flush_ms / 1000)
                self._dirty.clear()
        finally:
            await cancel_and_wait(listening)

    # --- one publisher --------------------------------------------------------------------------------------

    async def _follow(self, source: Source, feed: Feed) -> None:
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 100_000)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 20)
            socket.setsockopt(zmq.IPV6, "[" in source.endpoint)
            socket.subscribe(source.topic.encode())
            socket.connect(source.endpoint)
            await self._from_the_start(source, feed)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    feed.undecodable += 1
                    continue
                await self._take(source, feed, int.from_bytes(frames[-2], "big", signed=True), frames[-1])
        finally:
            socket.close()

    async def _from_the_start(self, source: Source, feed: Feed) -> None:
        """What the engine held before anybody listened."""
        messages = await self._replay(source, 0)
        if messages:
            feed.replayed(Gap(0, min(messages)), messages)
            self._came()  # but a buffer that answers is no publisher that speaks

    async def _take(self, source: Source, feed: Feed, sequence: int, payload: bytes) -> None:
        self._quiet.heard = True
        self._came()
        restarts = feed.restarts
        gap = feed.offer(sequence, payload)
        if gap is None:
            return
        # a gap is closed before what follows it is taken; further messages wait in the socket
        if not feed.replayed(gap, await self._replay(source, gap.first)) and feed.gaps and feed.restarts == restarts:
            log.warning(
                "KV events lost for good; the instance's content is forgotten",
                extra={"instance": self.instance, "first": gap.first, "until": gap.until},
            )
        feed.offer(sequence, payload)

    def _came(self) -> None:
        if not self._heard:
            self._heard = self._snapshot_due = True
        self._dirty.set()

    async def _replay(self, source: Source, first: int) -> dict[int, bytes]:
        """What a publisher still has from a number on; empty where it has nothing or does not answer."""
        messages: dict[int, bytes] = {}
        if not source.replay_endpoint:
            return messages
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, "[" in source.replay_endpoint)
            socket.connect(source.replay_endpoint)
            async with asyncio.timeout(self._knobs.kv_replay_timeout_ms / 1000) as patience:
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while (message := replayed_frames(await socket.recv_multipart())) is not None:
                    messages[message[0]] = message[1]
                    patience.reschedule(asyncio.get_running_loop().time() + self._knobs.kv_replay_timeout_ms / 1000)
        except (TimeoutError, KvEventError) as error:
            log.warning("no KV replay", extra={"instance": self.instance, "error": repr(error)})
        finally:
            socket.close()
        return messages

    # --- saying it ------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        record = self._record()
        if record is None:
            return
        if record.incarnation != self._incarnation:
            self._begin(record)
        self._judge_silence(record)
        self._say()
        self._meters.show(self.instance, self.content, self.feeds)
        self._meters.silent.labels(self.instance).set(self._silent)

    def _begin(self, record: Record) -> None:
        """The engine has another incarnation: by its messages, or only by its start time."""
        self._incarnation = record.incarnation
        started = record.metrics.started_unix_s if record.metrics is not None else None
        forgotten = [feed.begin(started) for feed in self.feeds]
        self._snapshot_due = self._snapshot_due or self._heard
        self._quiet.reset(record, self._now_ms())
        if any(forgotten):
            self._say()
            raise _Anew  # it may publish elsewhere now, and has a beginning to be replayed

    def _judge_silence(self, record: Record) -> None:
        heard = self._quiet.heard
        if self._quiet.silent(record, self._now_ms()):
            if not self._silent:
                log.warning("KV events are configured, but none come", extra={"instance": self.instance})
                # Nothing that was known can be relied on any more.
                for feed in self.feeds:
                    feed.blocks.clear()
                self._say()
                self._silent = True
            self._meters.show(self.instance, self.content, self.feeds)
            self._meters.silent.labels(self.instance).set(1)
            raise _Anew  # perhaps another connection hears more
        if self._silent and heard:
            self._silent, self._snapshot_due = False, True
            log.info("KV events come again", extra={"instance": self.instance})

    def _say(self) -> None:
        if not self._heard or self._silent:
            return
        try:
            if self._snapshot_due:
                self._say_snapshot()
            elif self.content.changed:
                changes = self.content.take()
                self._change(changes.stored, changes.removed, cleared=changes.cleared)
        except BusDown:
            self._snapshot_due = True

    def _say_snapshot(self) -> None:
        size = _MESSAGE_DIGESTS * DIGEST_BYTES
        held = self.content.snapshot()
        self._change(held[:size], b"", snapshot=True)
        for at in range(size, len(held), size):
            self._change(held[at : at + size], b"")
        self._snapshot_due = False

    def _change(self, stored: bytes, removed: bytes, *, cleared: bool = False, snapshot: bool = False) -> None:
        self._sequence += 1
        self._publish(
            KvChanged(
                id=f"kv:{self.instance}:{self._incarnation}:{self._sequence}",
                time_unix_ms=int(self._now_ms()),
                site=self._site,
                model=self._declared.model,
                instance=self.instance,
                incarnation=self._incarnation,
                sequence=self._sequence,
                stored=stored,
                removed=removed,
                cleared=cleared,
                snapshot=snapshot,
            )
        )


class _Quiet:
    """Whether a publisher says nothing although its engine works."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self.heard = False
        self._finished = self._tokens = 0
        self._busy_since_ms: float | None = None

    def reset(self, record: Record, now_ms: float) -> None:
        """Count from here."""
        self.heard = False
        self._finished, self._tokens = _work(record)
        self._busy_since_ms = None

    def silent(self, record: Record, now_ms: float) -> bool:
        """Enough requests or time have passed, and enough tokens were computed to fill blocks, without a word."""
        finished, tokens = _work(record)
        if self.heard or finished < self._finished or tokens < self._tokens:
            self.reset(record, now_ms)
            return False
        if tokens == self._tokens and finished == self._finished:
            return False
        if self._busy_since_ms is None:
            self._busy_since_ms = now_ms
        knobs = self._knobs
        long = now_ms - self._busy_since_ms >= knobs.kv_silent_ms
        many = finished - self._finished >= knobs.kv_silent_requests
        return (many or long) and tokens - self._tokens >= knobs.kv_silent_tokens


def _work(record: Record) -> tuple[int, int]:
    """(requests ended, tokens computed) as the engine counts them."""
    metrics = record.metrics
    if metrics is None:
        return 0, 0
    return metrics.finished_total or 0, (metrics.prompt_tokens_total or 0) + (metrics.generation_tokens_total or 0)


class KvReaders:
    """The readers of a site's instances, and who asks them for snapshots."""

    def __init__(self, bus: Bus, site: str, secret: str, registry: prometheus_client.CollectorRegistry) -> None:
        self._bus = bus
        self._site = site
        self._secret = secret
        self._meters = Meters(registry)
        self._keys: Keys | None = None
        self._context: Any = zmq.asyncio.Context()
        self._readers: dict[str, KvReader] = {}
        #: of the clock, so that it rises over restarts of the agent
        self._summary = 0
        bus.on_reconnected(self._reconnected)

    def follow(self, fleet: Fleet) -> None:
        """These tenants' salts are known from now on; raises `prefix.PrefixError` without a secret."""
        self._keys = Keys(fleet, self._secret)
        for reader in self._readers.values():
            reader.rekey()

    async def listen(self) -> None:
        """Hear who has lost its place."""
        await self._bus.nc.listen(subject_filter(KvRequested, site=self._site), self._requested)

    async def read(
        self, instance: str, declared: Instance, ask: Ask, record: Callable[[], Record | None], knobs: Knobs
    ) -> None:
        """Listen to one instance until cancelled."""
        reader = self._readers[instance] = KvReader(
            instance,
            declared,
            site=self._site,
            ask=ask,
            record=record,
            keys=self._known,
            publish=self._bus.publish,
            now_ms=self._bus.clock.now_ms,
            meters=self._meters,
            knobs=knobs,
            context=self._context,
        )
        try:
            await reader.run()
        finally:
            if self._readers.get(instance) is reader:
                del self._readers[instance]

    async def summarise(self, knobs: Knobs) -> None:
        """Tell the fleet every so often what the site holds, model by model, until cancelled.

        A model of which nothing is known is not told of; who told of it before is forgotten by its age.
        """
        while True:
            await asyncio.sleep(knobs.kv_summary_ms / 1000)
            readers = {name: (reader.model, reader.content) for name, reader in self._readers.items() if reader.known}
            for model, contents in kv_summary.by_model(readers).items():
                digests, bits = kv_summary.sample(contents)
                now_ms = int(self._bus.clock.now_ms())
                self._summary = max(self._summary + 1, now_ms)
                message = KvSummarised(
                    id=f"kv:{self._site}:{model}:{self._summary}",
                    time_unix_ms=now_ms,
                    site=self._site,
                    model=model,
                    sequence=self._summary,
                    digests=digests,
                    hits=(),
                    sampled_bits=bits,
                )
                try:
                    self._bus.publish(message)
                except BusDown:
                    break  # the next one tells the same

    def close(self) -> None:
        """After all readers were cancelled."""
        self._context.destroy(linger=0)

    def _known(self) -> Keys:
        assert self._keys is not None, "follow() comes first"
        return self._keys

    def _requested(self, _subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        try:
            event = codec.decode_packed(data)
        except codec.ContractError as error:
            log.warning("not a request for KV content", extra={"error": str(error)})
            return
        if isinstance(event, KvRequested):
            for name, reader in self._readers.items():
                if event.instance in ("", name):
                    reader.requested()

    def _reconnected(self) -> None:
        for reader in self._readers.values():
            reader.requested()
