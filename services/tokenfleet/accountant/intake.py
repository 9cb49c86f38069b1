"""Events from the shared durable consumer, in batches, each acknowledged by its reader.

Decides how many events are taken at once: what is there, up to a limit, after a short wait for company. One request is
open at the server at any time, never given up while it may still deliver (what comes to nobody is delivered again only
after the acknowledgement time); one that no heartbeat confirms is made anew, and so is a consumer that is gone.
Refuses to know what the events mean.
"""

import asyncio
import logging
from collections import deque

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from tokenfleet.runtime.bus import Bus

log = logging.getLogger("tokenfleet.accountant.intake")

#: how long a request stays open at the server, how often that confirms it, and the silence after which it is lost
REQUEST_S = 5.0
BEAT_S = 0.5
SILENCE_S = 1.6


class Lag(msgspec.Struct, frozen=True):
    """What the consumer still owes us."""

    #: not delivered yet
    waiting: int
    #: delivered to some replica, not acknowledged
    unacknowledged: int


class Intake:
    """One replica's share of a durable consumer."""

    def __init__(
        self,
        bus: Bus,
        *,
        stream: str,
        consumer: str,
        filter: str,
        ack_wait_s: float,
        ack_pending_max: int,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        #: times that the consumer was made or confirmed: once at the start, then after every trouble
        self.recreated = 0
        self._bus = bus
        self._config = ConsumerConfig(
            name=consumer,
            durable_name=consumer,
            filter_subject=filter,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            # an event is never given up on: what cannot be written goes to quarantine, what cannot be written now waits
            max_deliver=-1,
            max_ack_pending=ack_pending_max,
        )
        self._made = False
        self._arrived: deque[Msg] = deque()
        self._news = asyncio.Event()
        #: so many events are news
        self._wanted = 1
        self._subscription: Subscription | None = None
        self._inbox = ""
        #: number of the open request, events it may still deliver, and when the server was last heard about it
        self._request = 0
        self._owed = 0
        self._heard_s = 0.0

    async def take(self, count_max: int, *, wait_s: float, company_s: float) -> list[Msg]:
        """Up to `count_max` events; empty when none came within `wait_s` or the bus is away.

        After the first event, what else comes within `company_s` is taken too.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        try:
            while not self._arrived:
                await self._ask(count_max)
                if not await self._wait(min(deadline, loop.time() + BEAT_S)) and loop.time() >= deadline:
                    return []
            deadline = loop.time() + company_s
            while len(self._arrived) < count_max:
                # an open request may have been for fewer
                await self._ask(count_max)
                # one wait for all of them: waking for each costs more than the rest of its way
                if not await self._wait(deadline, wanted=count_max):
                    break
            taken = [self._arrived.popleft() for _ in range(min(count_max, len(self._arrived)))]
            await self._ask(count_max)
            return taken
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            log.warning("intake interrupted", extra={"consumer": self.consumer, "error": repr(error)})
            self._made, self._owed = False, 0
            await asyncio.sleep(0.1)
            return []

    async def stop(self) -> None:
        """Give back what was delivered and not taken, so that another replica gets it at once."""
        subscription, self._subscription = self._subscription, None
        if subscription is None or not self._bus.connected:
            return
        try:
            # draining: what the server had sent before it heard of our leaving is ours to give back too
            await asyncio.wait_for(subscription.drain(), 2)  # type: ignore[no-untyped-call]  # nats-py leaves it so
            while self._arrived:
                await self._arrived.popleft().nak()
        except (nats.errors.Error, TimeoutError) as error:
            log.debug("intake stopped while the bus was away", extra={"error": repr(error)})

    async def _wait(self, deadline_s: float, *, wanted: int = 1) -> bool:
        """Wait until so many events are here, or something else happened; False when the time is up."""
        if len(self._arrived) >= wanted:
            return True
        self._news.clear()
        self._wanted = wanted
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, deadline_s - asyncio.get_running_loop().time()))
        except TimeoutError:
            return False
        return True

    async def _ask(self, count: int) -> None:
        """Have one request open, unless enough is here already."""
        if not self._bus.connected:
            self._owed = 0
            return
        now_s = asyncio.get_running_loop().time()
        if (self._owed and now_s - self._heard_s < SILENCE_S) or len(self._arrived) >= count:
            return
        if self._owed:
            log.warning("intake is silent: asking again", extra={"consumer": self.consumer})
            self._made = False
        if not self._made:
            await self._bus.js.add_consumer(self.stream, self._config)
            self._made = True
            self.recreated += 1
        if self._subscription is None:
            self._inbox = self._bus.nc.new_inbox()
            self._subscription = await self._bus.nc.subscribe(
                f"{self._inbox}.*", cb=self._on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
            )
        self._request += 1
        self._owed, self._heard_s = count, now_s
        request = {"batch": count, "expires": int(REQUEST_S * 1e9), "idle_heartbeat": int(BEAT_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"
        await self._bus.nc.publish(subject, msgspec.json.encode(request), reply=f"{self._inbox}.{self._request}")

    async def _on_message(self, message: Msg) -> None:
        status = None if message.data else (message.headers or {}).get("Status")
        if status is None:
            # an event bears its own subject, not that of the request; counting one of an older request against the
            # present one only makes us ask a little early
            self._heard_s = asyncio.get_running_loop().time()
            self._owed = max(0, self._owed - 1)
            self._arrived.append(message)
            if len(self._arrived) >= self._wanted or not self._owed:
                self._news.set()
        elif message.subject == f"{self._inbox}.{self._request}":
            self._heard_s = asyncio.get_running_loop().time()
            if status != "100":
                self._heed(status, (message.headers or {}).get("Description", ""))

    def _heed(self, status: str, description: str) -> None:
        """End of the request: 404 nothing there, 408 time is up, 409 shutting down or consumer gone, 503 nobody."""
        self._owed = 0
        self._news.set()
        if status in ("404", "408"):
            return
        self._made = False
        log.info("intake request ended", extra={"status": status, "description": description})

    async def lag(self) -> Lag | None:
        """How far behind all replicas together are; None while the bus cannot say."""
        try:
            info = await self._bus.js.consumer_info(self.stream, self.consumer)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
            return None
        return Lag(waiting=info.num_pending or 0, unacknowledged=info.num_ack_pending or 0)
